// The planner: a form whose choice is the page's link, and the plan for it. All figures come from the planner; this
// file has no arithmetic. It imports nothing, because it is also a part of the file that `scripts/plan --html` writes.

const WAIT_MS = 300; // after the last change of the form
const CUSTOM = "custom";
const BYTES_PER_GIB = 2 ** 30;
const FIELDS = ["model", "target", "workload", "prompt_tokens", "output_tokens", "request_rate", "ttft_ms", "itl_ms", "quantization", "kv_cache_dtype", "price_per_hour"];
const KINDS = { chat: "Chat", rag: "RAG", batch: "Batch", agents: "Agents", code: "Code completion", custom: "By hand" };
const field = (name) => document.querySelector(`#plan-${name}`);
const said = (text) => (document.querySelector("#plan-status").textContent = text);

let options = null;
let ask = null; // asks the server; null: this page is a file with one plan
let events = null;
let asked = 0; // number of the last question: older answers are dropped
let timer = 0;
let search = null; // the AbortController of the search that runs

/** Starts the view: with `ask(choice, signal)` and `events(response)` of a server, or with the `page` that a file has. */
export function startPlan(parts) {
  const form = document.querySelector("#plan-form");
  form.addEventListener("submit", (event) => event.preventDefault());
  document.querySelector("#plan-copy").addEventListener("click", async () => {
    await copyText(document.querySelector("#plan-command").textContent);
    said("The command is copied.");
  });
  if (parts.page) {
    options = parts.page.options;
    fillForm(parts.page.choice);
    for (const part of document.querySelectorAll("#plan-form fieldset, #plan-apis input")) part.disabled = true;
    document.querySelector("#plan-search").hidden = true;
    said("This file has one plan.");
    show(parts.page.plan);
    return { open() {} };
  }
  ({ ask, events } = parts);
  form.addEventListener("input", (event) => {
    if (event.target.id === "plan-workload") setLimits();
    if (event.target.id === "plan-target") setPrice();
    if (event.target.id === "plan-model") setApis();
    showSource();
    changed();
  });
  document.querySelector("#plan-simulate").addEventListener("click", simulate);
  document.querySelector("#plan-stop").addEventListener("click", () => search?.abort());
  document.querySelector("#plan-apis").addEventListener("input", changed);
  return { open };
}

/** Copies a text. On plain HTTP from another host a browser has no clipboard, but the command that copies. */
export function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const give = (event) => {
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  };
  document.addEventListener("copy", give, { once: true });
  document.execCommand("copy");
}

/** The view is shown: with the choice of the link, or the one before if the link has none. */
async function open() {
  const query = new URLSearchParams(location.hash.split("?")[1] ?? "");
  if (options && !query.size) return history.replaceState(null, "", link());
  if (options && location.hash === link()) return;
  try {
    if (!options) {
      said("The planner starts.");
      options = await (await ask()).json();
    }
  } catch (error) {
    said(`There is no planner: ${error.message}`);
    return;
  }
  const choice = Object.fromEntries(query);
  if (query.has("api_prices")) choice.api_prices = query.getAll("api_prices");
  fillForm(query.size ? choice : {});
  changed();
}

function fillForm(choice) {
  fillSelect("model", Object.entries(options.models).map(([name, title]) => [name, name === "served" ? `${title} (served here)` : title]));
  const groups = Map.groupBy(Object.entries(options.targets), ([, target]) => target.chip);
  field("target").replaceChildren(...[...groups].map(([chip, targets]) =>
    make("optgroup", { label: chip }, ...targets.map(([name, target]) => new Option(`${target.count} × ${chip}`, name)))));
  fillSelect("workload", [...Object.keys(options.workloads), CUSTOM].map((name) => [name, KINDS[name] ?? name]));
  fillSelect("quantization", [["", "as stored"], ...options.quantizations.map((name) => [name, name])]);
  fillSelect("kv_cache_dtype", options.kv_cache_dtypes.map((name) => [name, name]));
  setValue("model", choice.model ?? (options.models.served ? "served" : "8b"));
  setValue("target", choice.target ?? "1xh100");
  setValue("workload", choice.workload ?? "chat");
  setApis();
  if (choice.workload === undefined) setLimits();
  if (choice.price_per_hour === undefined) setPrice();
  for (const name of FIELDS.slice(3)) if (choice[name] != null) setValue(name, choice[name]);
  if (choice.api_prices) setApis(choice.api_prices);
  showCustom();
  showSource();
}

function fillSelect(name, pairs) {
  field(name).replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
}

function setValue(name, value) {
  const input = field(name);
  if (input.options && ![...input.options].some((option) => option.value === String(value))) input.add(new Option(value, value));
  input.value = value;
}

function showCustom() {
  for (const part of document.querySelectorAll("[data-for=custom]")) part.hidden = field("workload").value !== CUSTOM;
}

function setLimits() {
  const limits = options.workloads[field("workload").value];
  showCustom();
  if (limits) for (const name of ["ttft_ms", "itl_ms"]) field(name).value = limits[name] ?? "";
}

function setPrice() {
  field("price_per_hour").value = options.targets[field("target").value]?.price_per_hour ?? "";
}

function showSource() {
  const { price_per_hour: price, as_of, source } = options.targets[field("target").value] ?? {};
  const text = !source ? "No price is listed." : Number(field("price_per_hour").value) === price ? `Listed ${as_of}: ${source}` : "Given by hand.";
  document.querySelector("#plan-price-source").textContent = text;
}

/** A row of two prices for each API: those listed for the model, or those of a choice, as NAME=IN/OUT. */
function setApis(prices = null) {
  const listed = options.apis.filter((api) => api.model === field("model").value);
  const rows = prices?.map((text) => {
    const [name, numbers] = text.split("=");
    const [input, output] = numbers.split("/");
    return { ...listed.find((api) => api.name === name && String(api.input) === input && String(api.output) === output), name, input, output };
  }) ?? listed;
  document.querySelector("#plan-apis").replaceChildren(...rows.map((api) => {
    const price = (value, way) => make("input", { type: "number", min: "0", step: "any", value, ariaLabel: `${api.name}, a million tokens ${way}` });
    const source = api.source ? `${api.as_of}: ${api.source}` : "given by hand";
    const row = tableRow(api.name, price(api.input, "in"), price(api.output, "out"), "–", "–", "–", source);
    row.dataset.name = api.name;
    return row;
  }));
}

function apiPrices() {
  return [...document.querySelectorAll("#plan-apis tr")].map((row) => [row.dataset.name, ...[...row.querySelectorAll("input")].map((input) => input.value)])
    .filter(([, input, output]) => input && output).map(([name, input, output]) => `${name}=${input}/${output}`);
}

/** The choice as pairs of texts, for the link. */
function choicePairs() {
  const used = FIELDS.filter((name) => field(name).value && (field("workload").value === CUSTOM || !name.endsWith("_tokens")));
  return [...used.map((name) => [name, field(name).value]), ...apiPrices().map((text) => ["api_prices", text])];
}

function link() {
  return `#plan?${new URLSearchParams(choicePairs())}`;
}

function choice() {
  const pairs = choicePairs().filter(([name]) => name !== "api_prices");
  return { ...Object.fromEntries(pairs.map(([name, value]) => [name, field(name).type === "number" ? Number(value) : value])), api_prices: apiPrices() };
}

function changed() {
  search?.abort();
  asked++; // an answer that is on its way is of the choice before
  history.replaceState(null, "", link());
  said("Estimating.");
  clearTimeout(timer);
  timer = setTimeout(plan, WAIT_MS);
}

async function plan() {
  const number = ++asked;
  try {
    const answer = await (await ask(choice())).json();
    if (number === asked) show(answer, "Estimated means of a steady load.");
  } catch (error) {
    if (number === asked) refuse(error.message);
  }
}

/** Searches in simulated time. The answer takes the place of the estimate. */
async function simulate() {
  const number = ++asked;
  const bar = document.querySelector("#plan-progress");
  search = new AbortController();
  searching(true);
  bar.removeAttribute("value");
  said("The simulation starts.");
  try {
    const response = await ask({ ...choice(), simulate: true }, search.signal);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.progress === undefined) show(event, "Simulated: the server's own scheduler in simulated time.");
      else {
        bar.value = event.progress;
        said(event.note);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") {
      if (number === asked) said("The simulation was stopped; the plan is the one before it.");
    } else if (number === asked) refuse(error.message);
  }
  searching(false);
}

function searching(is) {
  document.querySelector("#plan-simulate").hidden = is;
  for (const id of ["plan-stop", "plan-progress"]) document.querySelector(`#${id}`).hidden = !is;
}

function refuse(message) {
  said(message);
  document.querySelector("#plan-status").classList.add("error");
  document.querySelector("#plan-result").hidden = true;
}

// --- how a plan is shown ---

function show(answer, text) {
  if (text) said(text);
  document.querySelector("#plan-status").classList.remove("error");
  document.querySelector("#plan-result").hidden = false;
  const { best, memory, cost } = answer;
  document.querySelector("#plan-command").textContent = answer.command;
  document.querySelector("#plan-by-hand").textContent = answer.plan_command;
  document.querySelector("#plan-where").textContent = answer.replicas > 1
    ? `${answer.replicas} replicas of ${best.tensor_parallel_size} devices; ${answer.idle_devices} are idle` : "one replica";
  const latency = (title, name) => {
    const { [best.judged]: first, ...others } = best.latencies_ms[name];
    return tile(`${title}, ${best.judged}`, `${short(first)} ms`, Object.entries(others).map(([point, ms]) => `${point} ${short(ms)}`).join(", "), best.mark);
  };
  document.querySelector("#plan-tiles").replaceChildren(
    tile("Requests/s", short(best.requests_per_s), answer.holds ?? (best.offered_requests_per_s === null ? "with all rows in use" : `${short(best.offered_requests_per_s)} asked`), best.mark),
    tile("Output tokens/s", short(best.output_tokens_per_s), `${short(best.total_tokens_per_s)} with prompts`, best.mark),
    latency("TTFT", "ttft"),
    latency("ITL", "itl"),
    tile("Room for K/V", memory.room_tokens.toLocaleString("en"), `tokens, ${memory.room_requests} requests of ${memory.max_model_len.toLocaleString()}`, memory.mark),
    tile("Rows", best.max_num_seqs, `${percent(best.occupancy)} in use (estimated)`, memory.mark),
    ...(cost ? [
      tile("A month", money(cost.per_month), `${cost.currency}, ${money(cost.per_hour)} an hour`, "counted"),
      tile("A million tokens", money(cost.per_million_total), `${cost.currency}; of output ${money(cost.per_million_output)}`, cost.mark),
    ] : [tile("A month", "–", "no price is given", "counted")]),
  );
  showApis(cost);
  document.querySelector("#plan-memory").replaceChildren(...[
    ["Weights", memory.weights], [`K/V, ${memory.kv_dtype}, ${memory.num_pages} pages of ${memory.page_size} tokens`, memory.kv],
    ["Temporaries of the largest step", memory.temporaries], ["State of the request slots", memory.state], ["Together", memory.total],
  ].map(([name, bytes]) => tableRow(name, `${(bytes / BYTES_PER_GIB).toFixed(2)} GiB`, memory.mark)));
  document.querySelector("#plan-tried").replaceChildren(...answer.tried.map((one) => tableRow(
    `${one.replicas} × ${one.tensor_parallel_size}`, one.max_num_seqs, one.max_num_batched_tokens, short(one.requests_per_s), short(one.output_tokens_per_s),
    short(one.latencies_ms.ttft[one.judged]), short(one.latencies_ms.itl[one.judged]), one.meets_slo ? "yes" : "no")));
}

function showApis(cost) {
  const rows = [...document.querySelectorAll("#plan-apis tr")];
  document.querySelector("#plan-apis-part").hidden = !rows.length;
  for (const row of rows) {
    const api = cost?.apis.find(({ price }) => price.name === row.dataset.name);
    const [, , , month, difference, pays] = row.children;
    month.textContent = api ? money(api.per_month) : "–";
    difference.textContent = api ? `${api.difference > 0 ? "+" : ""}${money(api.difference)}` : "–";
    pays.textContent = !api ? "–" : api.break_even_share > 1 ? "never" : `${short(api.break_even)} million`;
  }
}

/** A figure with its name and a note. `mark` tells whether it is counted, compiled or estimated. */
export function tile(name, value, note, mark = null) {
  const notes = [make("small", {}, note), ...(mark ? [make("small", { className: "mark" }, mark)] : [])];
  return make("div", {}, make("dt", {}, name), make("dd", {}, value, ...notes));
}

function tableRow(name, ...values) {
  return make("tr", {}, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value)));
}

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: value < 1000 ? 3 : 4 });
const money = (value) => value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 3 : 0 });
const percent = (value) => `${Math.round(value * 100)}%`;
