// The engine's numbers over time, from the opening of the page on.

import { drawLanes, drawLines } from "/ui/charts.js";
import { tile } from "/ui/plan.js";

const SPAN_S = 120;
const LANES_S = 30;
const LATENCY_S = 10; // percentiles are of the tokens of this many seconds
const LEAST_LANES = 8;
const LONGEST_STEP_S = 0.12; // a step is drawn up to the next one, but no longer than this
const REDRAW_MS = 100;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Dashboard {
  constructor() {
    this.shown = false;
    this.readings = []; // {at: seconds, state}
    this.engine = 0; // whose steps are shown
    this.forgetSteps();
    setInterval(() => this.shown && !still.matches && !document.hidden && this.drawSteps(), REDRAW_MS);
    addEventListener("resize", () => this.draw());
    document.querySelector("#engine").addEventListener("change", (event) => {
      this.engine = Number(event.target.value);
      this.forgetSteps();
    });
  }

  show(shown) {
    this.shown = shown;
    if (shown) requestAnimationFrame(() => this.draw());
  }

  /** Adds one answer of /ui/state. */
  add(state) {
    const at = performance.now() / 1000;
    if (state.num_steps < (this.readings.at(-1)?.state.num_steps ?? 0)) {
      this.readings = []; // the server has restarted
      this.forgetSteps();
    }
    this.offerEngines(state.engines);
    this.readings = [...this.readings.filter((reading) => at - reading.at <= SPAN_S + 5), { at, state }];
    for (const step of state.steps) {
      this.skew = Math.min(this.skew, at - step.time_s);
      this.lastStep = Math.max(this.lastStep, step.number);
      this.numSlots = Math.max(this.numSlots, step.slots.length);
      this.steps.push(step);
    }
    this.steps = this.steps.filter((step) => at - this.skew - step.time_s <= LANES_S + 5);
    this.draw();
  }

  forgetSteps() {
    this.lastStep = -1;
    this.steps = []; // {time_s, number, variant, num_tokens, num_tokens_padded, slots}
    this.numSlots = LEAST_LANES;
    this.skew = Infinity; // this page's clock minus the engine's: the smallest difference so far
  }

  /** Shows the choice of an engine, if there are several. */
  offerEngines(count) {
    const select = document.querySelector("#engine");
    for (let number = select.length; number < count; number++) select.add(new Option(number, number));
    document.querySelector("#engine-choice").hidden = count < 2;
  }

  draw() {
    if (!this.shown || !this.readings.length) return;
    this.drawTiles();
    this.drawSteps();
    const now = this.readings.at(-1).at;
    const over = (value) => this.readings.map(({ at, state }, i) => [now - at, value(state, this.readings[i - 1]?.state, at - this.readings[i - 1]?.at)]);
    const rate = (name) => over((state, before, seconds) => (before ? (state[name] - before[name]) / seconds : null));
    lines("throughput", [rate("generation_tokens"), rate("prompt_tokens")], { format: compact });
    lines("requests", [over((s) => s.running), over((s) => s.waiting)], { format: compact });
    lines("pages", [over((s) => s.pages_used / s.pages), over((s) => s.pages_reusable / s.pages)], { max: 1, format: percent });
    lines("latency", ["inter_token_latency", "time_to_first_token"].map((name) =>
      this.readings.map(({ at }, i) => [now - at, milliseconds(quantile(this.recent(name, i), 0.5))])), { format: compact });
  }

  /** The histogram of the LATENCY_S seconds before reading `i`. */
  recent(name, i = this.readings.length - 1) {
    const { at, state } = this.readings[i];
    const before = this.readings.findLast((reading) => at - reading.at >= LATENCY_S) ?? this.readings[0];
    const { bounds } = this.readings.at(-1).state[name];
    return { bounds, counts: state[name].counts.map((count, k) => count - before.state[name].counts[k]) };
  }

  drawTiles() {
    const { at, state } = this.readings.at(-1);
    const before = this.readings.findLast((reading) => at - reading.at >= 2) ?? this.readings[0];
    const seconds = at - before.at;
    const per = (name) => (seconds ? (state[name] - before.state[name]) / seconds : 0);
    const latency = (name) => {
      const histogram = this.recent(name);
      return [quantile(histogram, 0.5), quantile(histogram, 0.95)].map((value) => (value === null ? "–" : compact(value * 1000)));
    };
    const [ttft, ttft95] = latency("time_to_first_token");
    const [itl, itl95] = latency("inter_token_latency");
    const { running, loaded, swaps } = state.adapters;
    const models = Object.keys(state.models);
    const atWork = models.filter((name) => state.models[name] === "running");
    const compiles = tile("Compiles", state.compiles_after_warm_up, "after warm-up");
    compiles.classList.toggle("bad", state.compiles_after_warm_up > 0);
    document.querySelector("#tiles").replaceChildren(...[
      tile("Running", state.running, `${state.waiting} waiting`),
      tile("Tokens/s", compact(per("generation_tokens")), `${compact(per("prompt_tokens"))} prompt`),
      tile("TTFT", ttft, `ms, p95 ${ttft95}`),
      tile("ITL", itl, `ms, p95 ${itl95}`),
      tile("K/V pages", percent(state.pages_used / state.pages), `of ${state.pages.toLocaleString()}`),
      tile("Prefix hits", percent(share(state.prefix_cache_hits, state.prefix_cache_queries)), "of prompt tokens"),
      state.with_targets && tile("Within targets", percent(state.within_targets / state.with_targets), `of ${compact(state.with_targets)} requests`),
      state.draft_tokens && tile("Drafts accepted", percent(state.draft_tokens_accepted / state.draft_tokens), `of ${compact(state.draft_tokens)} tokens`),
      state.max_loras && tile("Adapters", running, `running, ${loaded.toLocaleString()} loaded, ${compact(swaps)} swaps`),
      models.length && tile("Model", atWork.join(", ") || "–", `has the device, of ${models.length} models`),
      tile("Occupancy", percent(share(state.step_tokens, state.step_tokens_padded)), "of step tokens"),
      tile("Preemptions", state.preemptions.toLocaleString(), "since start"),
      compiles,
    ].filter(Boolean));
  }

  drawSteps() {
    const now = performance.now() / 1000 - this.skew;
    const steps = this.steps.map((step, i) => ({
      ago: now - step.time_s,
      length: Math.min((this.steps[i + 1]?.time_s ?? now) - step.time_s, LONGEST_STEP_S),
      slots: step.slots,
    }));
    drawLanes(document.querySelector("#occupancy"), steps, { span: LANES_S, numSlots: this.numSlots });
    const last = this.steps.at(-1);
    const summary = last
      ? `step ${last.number.toLocaleString()}, ${last.variant.toLowerCase()}: ${count(last, "d")} decode, ${count(last, "p")} prefill, ${last.num_tokens} of ${last.num_tokens_padded} tokens`
      : "no step yet";
    const note = document.querySelector("#step-summary");
    if (note.textContent !== summary) note.textContent = summary;
  }
}

const lines = (id, series, options) => drawLines(document.getElementById(id), series, { span: SPAN_S, ...options });
const count = (step, mark) => step.slots.split(mark).length - 1;
const share = (part, whole) => (whole ? part / whole : 0);
const percent = (value) => `${Math.round(value * 100)} %`;
const milliseconds = (value) => (value === null ? null : value * 1000);
const compact = (value) => (value >= 10000 ? `${(value / 1000).toFixed(0)}k` : value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1));

/** The quantile `q`, interpolated linearly within a bucket. Null if the histogram is empty. */
function quantile({ bounds, counts }, q) {
  const rank = q * counts.reduce((sum, n) => sum + n, 0);
  let reached = 0;
  const i = counts.findIndex((n) => (reached += n) >= rank && n);
  if (i < 0) return null;
  const low = i ? bounds[i - 1] : 0;
  const high = bounds[i] ?? bounds.at(-1);
  return low + (1 - (reached - rank) / counts[i]) * (high - low);
}
