// A message in the conversation: its text, reasoning, tool calls, statistics and buttons.

import { attempt } from "/ui/api.js";
import { GrowingText, show } from "/ui/markdown.js";
import { copyText, make } from "/ui/plan.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };
const LEAST_FOR_RATE = 16; // tokens; the speed of a shorter answer says little
const PAUSES = 4; // drawing takes a fifth of the time at most, however long the answer is
const COPIED_MS = 1500;
const log = document.querySelector("#log");

log.addEventListener("click", ({ target }) => {
  if (target.matches("figure .copy")) copy(target, target.closest("figure").querySelector("code").textContent);
});

async function copy(button, text) {
  await copyText(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
}

export function makeButton(textContent, onclick, properties = {}) {
  return make("button", { type: "button", className: "quiet", textContent, onclick, ...properties });
}

export class MessageView {
  /** Appends a message in the API's format to the log. `on` has what `edit()`, `remove()` and `retry()` do. */
  constructor(message, on) {
    this.message = message;
    this.text = make("div", { className: "text" });
    this.growing = new GrowingText(this.text);
    this.thought = make("pre");
    this.reasoning = make("details", { className: "reasoning" }, make("summary", {}, "Thinking"), this.thought);
    this.cards = make("div");
    this.notes = make("span", { className: "notes" });
    const buttons = [makeButton("Copy", ({ target }) => copy(target, message.content))];
    if (message.role === "user") buttons.push(makeButton("Edit", on.edit));
    if (message.role !== "tool") buttons.push(makeButton("Delete", on.remove));
    buttons.push(makeButton("Try again", on.retry, { className: "quiet retry" }));
    this.foot = make("div", { className: "foot" }, ...buttons, this.notes);
    const name = make("h3", {}, NAMES[message.role] ?? message.role);
    this.root = make("article", { className: `message ${message.role}`, ariaBusy: String(message.role === "assistant") }, name, this.text, this.cards, this.foot);
    log.append(this.root);
    this.draw();
    log.scrollTop = log.scrollHeight;
  }

  /** Draws what has come since, soon. */
  update() {
    this.timer ??= setTimeout(() => this.draw(), this.pause);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const started = performance.now();
    stayAtEnd(() => this.drawParts());
    this.pause = PAUSES * (performance.now() - started);
  }

  drawParts() {
    const { role, content, reasoning_content: thought = "", tool_calls: calls = [] } = this.message;
    show(this.thought, [thought]);
    if (thought && !this.reasoning.isConnected) this.text.before(this.reasoning);
    if (role === "assistant" && !isJson(content)) this.growing.show(content);
    else show(this.text, [content]);
    this.cards.replaceChildren(...calls.map(({ function: { name, arguments: values } }) =>
      make("div", { className: "card" }, make("b", {}, name), make("pre", {}, values))));
  }

  /** Shows one field for each call. `onResults` gets the tool messages when all fields are filled. */
  askForResults(calls, onResults) {
    const results = new Map();
    [...this.cards.children].forEach((card, i) => {
      const field = make("input", { required: true, placeholder: "result of this call", ariaLabel: `Result of ${calls[i].function.name}` });
      const form = make("form", {}, field, make("button", { type: "submit" }, "Give"));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        results.set(i, { role: "tool", tool_call_id: calls[i].id, content: field.value });
        form.remove();
        if (results.size === calls.length) onResults(calls.map((_, j) => results.get(j)));
      });
      stayAtEnd(() => card.append(form));
    });
  }

  /** Shows how an answer has ended. */
  finish(outcome = {}) {
    this.draw();
    stayAtEnd(() => this.drawEnd(outcome));
  }

  drawEnd({ reason, failure, usage, started, first }) {
    const { role, content } = this.message;
    const value = role === "assistant" && isJson(content) && attempt(() => JSON.parse(content)); // false if it was cut off
    if (value) this.text.replaceChildren(make("div", { className: "card json" }, make("pre", {}, JSON.stringify(value, null, 2))));
    if (failure) this.foot.before(make("p", { className: "error" }, failure));
    if (reason && reason !== "stop") this.notes.append(make("b", {}, reason), " ");
    if (usage && first) {
      const seconds = (performance.now() - first) / 1000;
      const rate = usage.completion_tokens >= LEAST_FOR_RATE ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(0)}/s` : "";
      this.notes.append(`${usage.completion_tokens} tokens${rate}, first after ${(first - started).toFixed(0)} ms`);
    }
    this.root.setAttribute("aria-busy", "false"); // shows the buttons
  }
}

/** Makes a change. If the log was scrolled to its end, it stays there. */
function stayAtEnd(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** Whether an answer is shown as it is: known from its first character on. */
const isJson = (content) => content.startsWith("{");
