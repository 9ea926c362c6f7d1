// The chat: conversations in OpenAI's format, streamed answers, tool calls that the user answers by hand. The browser keeps
// the conversations, and the tab which of them it shows and its settings. The API key is never kept.

import { ApiError, attempt, events, request } from "/ui/api.js";
import { conversations, newConversation, remove, save, titleOf } from "/ui/conversations.js";
import { MessageView, makeButton } from "/ui/message.js";
import { make } from "/ui/plan.js";
import SUGGESTIONS from "/ui/suggestions.json" with { type: "json" };

const $ = (id) => document.getElementById(id);
let current = newConversation(); // its messages are those in the log, without the system prompt
let edited = null; // the question that the composer changes
let running = null; // the AbortController of the answer in progress

const STORED = "pallas-serve.chat";
const wide = matchMedia("(min-width: 46.01rem)");

export function startChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("prompt").value.trim();
    if (!text || running) return;
    if (edited) cut(current.messages.indexOf(edited));
    edit(null);
    add({ role: "user", content: text });
    answer();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && edited) edit(null);
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("prompt").addEventListener("input", fitPrompt);
  $("cancel").addEventListener("click", () => edit(null));
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => open(newConversation()));
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").addEventListener("input", showSettings);
  $("asked-model").addEventListener("focus", offerModels);
  addEventListener("pagehide", keepTab);
  addEventListener("storage", showList); // another tab has changed it
  const panels = [...document.querySelectorAll("details.panel")];
  const showPanels = () => panels.forEach((panel) => Object.assign(panel, { name: wide.matches ? "" : "panels", open: wide.matches }));
  wide.addEventListener("change", showPanels);
  $("composer").addEventListener("focusin", showPanels); // on a phone they lie over the conversation
  showPanels();
  restore();
  showSettings();
  offerModels();
}

/** Shows the models of the server, if there are several: adapters come and go. */
async function offerModels() {
  const select = $("asked-model");
  const response = await request("/v1/models").catch(() => null);
  if (!response) return; // the page's head says that the server is not reachable
  const names = (await response.json()).data.map(({ id }) => id);
  const chosen = names.includes(select.value) ? select.value : names[0];
  const shown = [...select.options].map(({ value }) => value);
  if (names.join("\n") !== shown.join("\n")) select.replaceChildren(...names.map((name) => new Option(name, name)));
  select.value = chosen;
  $("models").hidden = names.length < 2;
}

/** What an empty conversation offers. The demo can do little else than this. */
export function suggest(model) {
  const isDemo = model === "demo";
  $("welcome").querySelector("p").textContent = isDemo
    ? "The demo is a tiny model. It has learned to do these:"
    : `${model} answers here. For example:`;
  $("suggestions").replaceChildren(...SUGGESTIONS[isDemo ? "demo" : "other"].map(([text, note, settings]) => {
    const ask = () => {
      for (const [id, value] of Object.entries({ format: "text", tools: "", ...settings })) $(id).value = value;
      showSettings();
      $("prompt").value = text;
      $("composer").requestSubmit();
    };
    return make("button", { type: "button", className: "suggestion", onclick: ask }, text, ...(note ? [make("small", {}, note)] : []));
  }));
}

/** Keeps for a reload what has come of an answer, the settings, and which conversation this tab shows. */
function keepTab() {
  if (running) keep(current);
  const fields = [...$("settings").elements, $("asked-model")].filter((field) => field.id);
  const tab = { id: current.id, settings: Object.fromEntries(fields.map((field) => [field.id, field.value])) };
  attempt(() => sessionStorage.setItem(STORED, JSON.stringify(tab)));
}

function restore() {
  const kept = attempt(() => JSON.parse(sessionStorage.getItem(STORED))) ?? {};
  const { "asked-model": model, ...settings } = kept.settings ?? {};
  if (model) $("asked-model").replaceChildren(new Option(model, model)); // until the server tells what there is
  for (const [id, value] of Object.entries(settings)) if ($(id)) $(id).value = value;
  open(conversations().find(({ id }) => id === kept.id) ?? current);
}

/** Keeps a conversation that has messages. */
function keep(conversation) {
  const messages = conversation.messages.filter(isSaid);
  $("not-kept").hidden = !messages.length || save({ ...conversation, messages });
  showList();
}

/** Shows a conversation in place of the current one. */
function open(conversation) {
  running?.abort();
  current = conversation;
  if (edited) edit(null);
  $("log").ariaLive = "off"; // what is old is not read aloud
  $("log").replaceChildren();
  const views = current.messages.map(showMessage);
  for (const view of views) view.finish();
  const { tool_calls: calls } = current.messages.at(-1) ?? {};
  if (calls) askForResults(views.at(-1), calls);
  setTimeout(() => ($("log").ariaLive = "polite"));
  $("not-kept").hidden = true;
  showList();
}

/** Shows the list of conversations, with buttons that open, rename and delete each. */
function showList() {
  $("welcome").hidden = current.messages.length > 0;
  $("conversations").replaceChildren(...conversations().map((kept) => {
    const one = kept.id === current.id ? current : kept;
    const title = makeButton(titleOf(one), () => {
      open(one);
      $("prompt").focus();
    }, { className: "quiet title", ariaCurrent: one === current ? "true" : null });
    const discard = () => {
      if (!confirm(`Delete "${titleOf(one)}"?`)) return;
      remove(one);
      one.messages = []; // an answer in progress is not kept
      if (one === current) open(newConversation());
      showList();
      $("clear").focus();
    };
    const rename = () => {
      one.title = prompt("Title of the conversation", titleOf(one))?.trim() ?? one.title;
      keep(one);
      $("clear").focus();
    };
    const buttons = [makeButton("✎", rename, { ariaLabel: `Rename ${titleOf(one)}` }), makeButton("✕", discard, { ariaLabel: `Delete ${titleOf(one)}` })];
    return make("li", {}, title, ...buttons);
  }));
}

/** Lets the composer change a question; null: it asks a new one. */
function edit(question) {
  edited = question;
  $("prompt").value = question?.content ?? "";
  $("cancel").hidden = !question;
  $("send").textContent = question ? "Send again" : "Send";
  fitPrompt();
  $("prompt").focus();
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
  const number = (id) => ($(id).value ? Number($(id).value) : undefined);
  const format = $("format").value;
  const schema = format === "json_schema" ? { name: "answer", schema: parsed("schema", "JSON schema"), strict: true } : undefined;
  return {
    model: $("asked-model").value || null,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...current.messages.filter(isSaid)],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_completion_tokens: number("max_tokens"),
    seed: number("seed"),
    tools: parsed("tools", "Tools"),
    response_format: format === "text" ? undefined : { type: format, json_schema: schema },
  };
}

function parsed(id, name) {
  const text = $(id).value.trim();
  try {
    return text ? JSON.parse(text) : undefined;
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}

/** Streams the next assistant message from all messages so far. */
async function answer() {
  const conversation = current;
  const message = { role: "assistant", content: "" };
  const outcome = { started: performance.now(), first: 0, usage: null, reason: "", failure: "" };
  const mine = (running = new AbortController());
  setRunning(true);
  conversation.messages.push(message);
  const view = showMessage(message);
  try {
    const response = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body()), signal: mine.signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new ApiError(chunk.error.message);
      outcome.usage = chunk.usage ?? outcome.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      outcome.reason = choice.finish_reason ?? outcome.reason;
      const { content, reasoning_content: thought, tool_calls: deltas } = choice.delta ?? {};
      if (content || thought || deltas) outcome.first ||= performance.now();
      if (thought) message.reasoning_content = (message.reasoning_content ?? "") + thought;
      if (content) message.content += content;
      for (const delta of deltas ?? []) mergeCall((message.tool_calls ??= []), delta);
      view.update();
    }
  } catch (error) {
    if (error.name === "AbortError") outcome.reason = "stopped";
    else outcome.failure = error.message;
  }
  view.finish(outcome);
  if (conversation.messages.includes(message)) keep(conversation); // it may have been deleted meanwhile
  if (running !== mine) return; // another answer has begun
  running = null;
  setRunning(false);
  if (message.tool_calls && outcome.reason === "tool_calls") askForResults(view, message.tool_calls);
  $("prompt").focus();
}

/** An answer that failed, or was stopped before its first token, is shown but not sent or kept. */
function isSaid({ role, content, tool_calls: calls }) {
  return role !== "assistant" || content || calls;
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
  current.messages.push(message);
  showMessage(message);
  keep(current);
}

/** Appends a message of the current conversation to the log, which has one article for each. */
function showMessage(message) {
  return new MessageView(message, {
    edit: () => edit(message),
    remove() {
      const place = current.messages.indexOf(message);
      let end = place + 1;
      while (current.messages[end]?.role === "tool") end++; // results belong to their call
      cut(place, end);
      $("prompt").focus();
    },
    retry() {
      cut(current.messages.findLastIndex(({ role }) => role !== "assistant") + 1);
      if (current.messages.length) answer();
    },
  });
}

/** Takes messages out of the conversation and the log, with the answer in progress if it is among them. */
function cut(from, end = current.messages.length) {
  if (end === current.messages.length) running?.abort();
  if (current.messages.splice(from, end - from).includes(edited)) edit(null);
  for (const view of [...$("log").children].slice(from, end)) view.remove();
  if (!current.messages.some(isSaid)) remove(current);
  keep(current);
}

function setRunning(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}
