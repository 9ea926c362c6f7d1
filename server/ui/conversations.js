// The conversations that this browser keeps: an entry of local storage each, so that two tabs do not overwrite each other.

import { attempt } from "/ui/api.js";

const PREFIX = "pallas-serve.conversation.";
const MOST = 50; // more make the oldest go
const LONGEST = 1_000_000; // characters of JSON; browsers have room for about five million

/** A conversation without messages. Messages have the API's format. It is kept once it is saved. */
export function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] };
}

/** The kept conversations, the last changed first. None if storage is switched off. */
export function conversations() {
  const entries = attempt(() => Object.entries(localStorage)) ?? [];
  const kept = entries.filter(([name]) => name.startsWith(PREFIX)).map(([, text]) => attempt(() => JSON.parse(text)));
  return kept.filter((one) => one?.messages).sort((a, b) => b.changed - a.changed);
}

/** Keeps a conversation, in place of the oldest ones if there are too many. Returns whether there was room for it. */
export function save(conversation) {
  const text = JSON.stringify({ ...conversation, changed: Date.now() });
  if (text.length > LONGEST) return false;
  const others = conversations().filter(({ id }) => id !== conversation.id);
  others.splice(MOST - 1).forEach(remove);
  const write = () => localStorage.setItem(PREFIX + conversation.id, text) ?? true;
  while (!attempt(write)) {
    if (!others.length) return false; // storage is switched off
    remove(others.pop());
  }
  return true;
}

export function remove({ id }) {
  attempt(() => localStorage.removeItem(PREFIX + id));
}

/** The title that was given, or how the first message begins. */
export function titleOf({ title, messages }) {
  return title || messages[0]?.content.trim().slice(0, 80) || "New conversation";
}
