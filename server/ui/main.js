// The frame of the page: the view that is shown, the theme, and the server's health.

import { events, request } from "/ui/api.js";
import { startChat, suggest } from "/ui/chat.js";
import { Dashboard } from "/ui/dashboard.js";
import { startPlan } from "/ui/plan.js";

const POLL_MS = 1000;
const QUIET_POLL_MS = 5000; // while the dashboard is not shown
const VIEWS = ["chat", "dashboard", "plan"];
const dashboard = new Dashboard();
const planner = startPlan({
  ask: (choice, signal) => request("/ui/plan", choice && { method: "POST", body: JSON.stringify(choice), signal }),
  events,
});
const health = document.querySelector("#health");
const model = document.querySelector("#model");

function showView() {
  const named = location.hash.slice(1).split("?")[0];
  const view = VIEWS.includes(named) ? named : VIEWS[0];
  for (const main of document.querySelectorAll("main")) main.hidden = main.id !== view;
  for (const link of document.querySelectorAll("[data-view]")) link.ariaCurrent = link.dataset.view === view ? "page" : null;
  dashboard.show(view === "dashboard");
  if (view === "plan") planner.open();
  poll();
}

function startTheme() {
  const dark = () =>
    (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.querySelector("#theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    dashboard.draw();
  });
}

function setHealth(state, text) {
  if (health.textContent !== text) health.textContent = text;
  health.dataset.state = state;
}

let timer = 0;
let polling = false;

async function poll() {
  clearTimeout(timer);
  if (polling) return;
  polling = true;
  try {
    const engine = dashboard.engine;
    const state = await (await request(`/ui/state?engine=${engine}&after=${dashboard.lastStep}`)).json();
    if (model.dataset.name !== state.model) suggest((model.dataset.name = state.model));
    model.textContent = `${state.model} · ${state.max_model_len.toLocaleString()} tokens`;
    setHealth(state.alive ? "serving" : "down", state.alive ? "serving" : "engine down");
    if (engine === dashboard.engine) dashboard.add(state); // otherwise the answer is about the engine shown before
  } catch {
    setHealth("down", "not reachable");
  }
  polling = false;
  timer = setTimeout(poll, document.hidden || !dashboard.shown ? QUIET_POLL_MS : POLL_MS);
}

startTheme();
startChat();
window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => document.hidden || poll());
showView();
