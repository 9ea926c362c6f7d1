// The chat: one conversation in OpenAI's format, streamed answers, tool calls that the user answers by hand. The
// conversation and the settings are kept in the tab's session storage, so a reload loses neither.

import { ApiError, events, request } from "/ui/api.js";
import { make as element } from "/ui/plan.js";

const $ = (id) => document.getElementById(id);
const messages = []; // in the API's format, without the system prompt
let running = null; // the AbortController of the answer in progress

const STORED = "pallas-serve.chat";
const LEAST_FOR_RATE = 16; // tokens; the speed of a shorter answer says little
const wide = matchMedia("(min-width: 46.01rem)");
const CALCULATOR = {
  type: "function",
  function: {
    name: "calculator",
    description: "Evaluates an expression.",
    parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
  },
};
const TEXT = { format: "text", tools: "" };
const SUGGESTIONS = {
  demo: [
    ["What is 47 + 35?", TEXT],
    ["Which is larger, 31 or 57?", TEXT],
    ["What is the capital of France?", TEXT],
    ["Count from 4 to 9.", TEXT],
    ["Tell me a story.", TEXT],
    ["What is 47 + 35? Answer in JSON.", { format: "json_object", tools: "" }, "JSON"],
    ["What is 347 * 21?", { format: "text", tools: JSON.stringify([CALCULATOR]) }, "calls a tool"],
  ],
  other: [
    ["Explain in two sentences what a KV cache is.", TEXT],
    ["Write a haiku about a compiler.", TEXT],
    ["Name three rivers. Answer in JSON.", { format: "json_object", tools: "" }, "JSON"],
  ],
};

export function startChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value.trim();
    if (!text || running) return;
    $("prompt").value = "";
    fitPrompt();
    add({ role: "user", content: text });
    answer();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("prompt").addEventListener("input", fitPrompt);
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    $("log").replaceChildren();
    keep();
    $("prompt").focus();
  });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").addEventListener("input", () => {
    showSettings();
    keep();
  });
  $("asked-model").addEventListener("focus", offerModels);
  const showPanel = () => ($("panel").open = wide.matches);
  wide.addEventListener("change", showPanel);
  showPanel();
  restore();
  showSettings();
  offerModels();
}

/** Shows the models of the server, if there are several: adapters come and go. */
async function offerModels() {
  const select = $("asked-model");
  let names = [];
  try {
    const { data } = await (await request("/v1/models")).json();
    names = data.map(({ id }) => id);
  } catch {
    return; // the page's head says that the server is not reachable
  }
  const chosen = names.includes(select.value) ? select.value : names[0];
  if (names.join("\n") !== [...select.options].map(({ value }) => value).join("\n")) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
  }
  select.value = chosen;
  $("models").hidden = names.length < 2;
}

/** What an empty conversation offers. The demo can do little else than this. */
export function suggest(model) {
  const isDemo = model === "demo";
  $("welcome").querySelector("p").textContent = isDemo
    ? "The demo is a tiny model. It has learned to do these:"
    : `${model} answers here. For example:`;
  $("suggestions").replaceChildren(...SUGGESTIONS[isDemo ? "demo" : "other"].map(([text, settings, note]) => {
    const button = element("button", { type: "button", className: "suggestion", textContent: text });
    if (note) button.append(element("small", { textContent: note }));
    button.addEventListener("click", () => {
      for (const [id, value] of Object.entries(settings)) $(id).value = value;
      showSettings();
      $("prompt").value = text;
      $("composer").requestSubmit();
    });
    return button;
  }));
}

/** Keeps the conversation and the settings for a reload of this tab. The API key is not among them. */
function keep() {
  $("welcome").hidden = messages.length > 0;
  const settings = Object.fromEntries([...$("settings").elements].filter((field) => field.id).map((field) => [field.id, field.value]));
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ messages, settings }));
  } catch {
    // Storage is switched off or full: the conversation goes on, and a reload loses it.
  }
}

function restore() {
  let kept = {};
  try {
    kept = JSON.parse(sessionStorage.getItem(STORED)) ?? {};
  } catch {
    // Storage is switched off.
  }
  const { "asked-model": model, ...settings } = kept.settings ?? {};
  if (model) $("asked-model").replaceChildren(new Option(model, model)); // until the server tells what there is
  for (const [id, value] of Object.entries(settings)) if ($(id)) $(id).value = value;
  messages.push(...(kept.messages ?? []));
  $("welcome").hidden = messages.length > 0;
  let view = null;
  for (const message of messages) {
    view = new MessageView(message.role);
    view.setText(message.content);
    if (message.reasoning_content) view.setReasoning(message.reasoning_content);
    if (message.tool_calls) view.setCalls(message.tool_calls);
    view.root.setAttribute("aria-busy", "false");
  }
  const last = messages.at(-1);
  if (last && last.role !== "assistant") new MessageView("assistant").finish({ reason: "interrupted by a reload" });
  else if (last) view.finish({});
  if (last?.tool_calls) askForResults(view, last.tool_calls);
}

function fitPrompt() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

function showSettings() {
  for (const output of document.querySelectorAll("#settings output")) output.value = $(output.htmlFor.value).value;
  for (const part of document.querySelectorAll("#settings [data-for]")) part.hidden = part.dataset.for !== $("format").value;
}

/** The request's body. Throws SyntaxError with the field's name if the schema or the tools are not JSON. */
function body() {
  const system = $("system").value.trim();
  const seed = $("seed").value.trim();
  const tools = parsed("tools", "Tools");
  const format = $("format").value;
  const schema = format === "json_schema" ? parsed("schema", "JSON schema") : null;
  return {
    model: $("asked-model").value || null,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    max_completion_tokens: Number($("max_tokens").value) || undefined,
    seed: seed ? Number(seed) : undefined,
    tools: tools ?? undefined,
    response_format:
      format === "text" ? undefined
      : format === "json_object" ? { type: format }
      : { type: format, json_schema: { name: "answer", schema, strict: true } },
  };
}

function parsed(id, name) {
  const text = $(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}

/** Streams the next assistant message from all messages so far. */
async function answer() {
  const view = new MessageView("assistant");
  const message = { role: "assistant", content: "" };
  const calls = [];
  const started = performance.now();
  let first = 0;
  let usage = null;
  let reason = "";
  running = new AbortController();
  setRunning(true);
  try {
    const response = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body()), signal: running.signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new ApiError(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const { content, reasoning_content: thought, tool_calls: deltas } = choice.delta ?? {};
      if ((content || thought || deltas) && !first) first = performance.now();
      if (thought) view.setReasoning((message.reasoning_content = (message.reasoning_content ?? "") + thought));
      if (content) view.setText((message.content += content));
      for (const delta of deltas ?? []) mergeCall(calls, delta);
      if (deltas) view.setCalls(calls);
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else view.fail(error.message);
  }
  running = null;
  setRunning(false);
  if (calls.length) message.tool_calls = calls;
  if (message.content || calls.length) messages.push(message);
  keep();
  view.finish({ reason, usage, started, first, wantsJson: $("format").value !== "text" });
  if (calls.length && reason === "tool_calls") askForResults(view, calls);
  $("prompt").focus();
}

function askForResults(view, calls) {
  view.askForResults(calls, (results) => {
    for (const result of results) add(result);
    answer();
  });
}

function mergeCall(calls, delta) {
  const call = (calls[delta.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id = delta.id ?? call.id;
  call.function.name += delta.function?.name ?? "";
  call.function.arguments += delta.function?.arguments ?? "";
}

function add(message) {
  messages.push(message);
  keep();
  new MessageView(message.role).setText(message.content);
}

function retry() {
  if (running) return;
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  const views = [...$("log").children];
  while (views.length && views.at(-1).dataset.role === "assistant") views.pop().remove();
  if (messages.length) answer();
}

function setRunning(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

class MessageView {
  constructor(role) {
    this.root = element("article", { className: `message ${role}` });
    this.root.dataset.role = role;
    this.text = element("div", { className: "text" });
    this.cards = element("div");
    this.root.append(element("h3", { textContent: NAMES[role] ?? role }), this.text, this.cards);
    this.root.setAttribute("aria-busy", String(role === "assistant"));
    $("log").append(this.root);
    this.root.scrollIntoView({ block: "end" });
  }

  setText(text) {
    const log = $("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.text.textContent = text;
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  /** Shows the reasoning, folded, above the answer. */
  setReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = element("pre");
      const details = element("details", { className: "reasoning" });
      details.append(element("summary", { textContent: "Thinking" }), this.reasoning);
      this.text.before(details);
    }
    this.reasoning.textContent = text;
  }

  setCalls(calls) {
    this.cards.replaceChildren(...calls.map((call) => {
      const card = element("div", { className: "card" });
      card.append(element("b", { textContent: call.function.name }), element("pre", { textContent: call.function.arguments }));
      return card;
    }));
  }

  /** Shows one field for each call. `onResults` gets the tool messages when all fields are filled. */
  askForResults(calls, onResults) {
    const results = new Map();
    [...this.cards.children].forEach((card, i) => {
      const form = element("form");
      const field = element("input", { required: true, placeholder: "result of this call" });
      field.setAttribute("aria-label", `Result of ${calls[i].function.name}`);
      form.append(field, element("button", { type: "submit", textContent: "Give" }));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        results.set(i, { role: "tool", tool_call_id: calls[i].id, content: field.value });
        form.remove();
        if (results.size === calls.length) onResults(calls.map((_, j) => results.get(j)));
      });
      card.append(form);
    });
    this.root.scrollIntoView({ block: "end" });
  }

  fail(message) {
    this.root.append(element("p", { className: "error", textContent: message }));
  }

  finish({ reason, usage, started, first, wantsJson }) {
    this.root.setAttribute("aria-busy", "false");
    if (wantsJson) this.showAsJson();
    for (const other of document.querySelectorAll(".retry")) other.remove();
    const foot = element("div", { className: "foot" });
    if (usage && first) {
      const seconds = (performance.now() - first) / 1000;
      const rate = usage.completion_tokens >= LEAST_FOR_RATE ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(0)}/s` : "";
      foot.append(`${usage.completion_tokens} tokens${rate}, first after ${(first - started).toFixed(0)} ms`);
    }
    if (reason && reason !== "stop") foot.append(element("span", { textContent: reason }));
    const button = element("button", { type: "button", className: "link retry", textContent: "Try again" });
    button.addEventListener("click", retry);
    foot.append(button);
    this.root.append(foot);
    this.root.scrollIntoView({ block: "end" });
  }

  showAsJson() {
    let value;
    try {
      value = JSON.parse(this.text.textContent);
    } catch {
      return; // cut off at the token limit, or an error: the text is shown unchanged
    }
    const card = element("div", { className: "card json" });
    card.append(element("pre", { textContent: JSON.stringify(value, null, 2) }));
    this.text.replaceChildren(card);
  }
}
