// Draws two charts on canvases: lines over time, and one lane for each slot of the batch.

const PAD = { left: 44, right: 8, top: 6, bottom: 18 };

/** Clears a canvas at the display's resolution. Returns [context, width, height] in CSS pixels. */
function cleared(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  return [context, width, height];
}

/** The colours of the legends, of the frames and of the notes. */
function colours() {
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  const [first, second] = ["i.decode", "i.prefill"].map((part) => style(part).backgroundColor);
  return { first, second, line: style("figure.wide").borderTopColor, soft: style(".legend").color };
}

/** The smallest number of the form 1, 2 or 5 x 10^n that is not below `value`. */
function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((m) => m * power).find((m) => m >= value * 0.999);
}

/** `series`: two lists of [seconds ago, value or null]; the axis covers `span` seconds. */
export function drawLines(canvas, series, { span, max, format = String }) {
  const [context, width, height] = cleared(canvas);
  const paint = colours();
  const top = max ?? niceCeiling(Math.max(0, ...series.flat().map(([, value]) => value ?? 0)));
  const x = (ago) => width - PAD.right - (ago / span) * (width - PAD.left - PAD.right);
  const y = (value) => height - PAD.bottom - (value / top) * (height - PAD.top - PAD.bottom);
  context.strokeStyle = paint.line;
  context.fillStyle = paint.soft;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const level = Math.round(y(top * share)) + 0.5;
    line(context, [[PAD.left, level], [width - PAD.right, level]]);
    context.fillText(format(top * share), PAD.left - 6, level);
  }
  timeAxis(context, x, height, span);
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  series.forEach((points, i) => {
    context.strokeStyle = i ? paint.second : paint.first;
    line(context, points.filter(([ago, value]) => value !== null && ago <= span).map(([ago, value]) => [x(ago), y(value)]));
  });
}

function line(context, points) {
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

function timeAxis(context, x, height, span) {
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (let ago = 0; ago < span; ago += span / 4) context.fillText(ago ? `-${ago} s` : "now", Math.min(x(ago), x(0) - 10), height - 4);
}

/** `steps`: {ago, length, slots} with times in seconds; one lane for each of `numSlots` slots. */
export function drawLanes(canvas, steps, { span, numSlots }) {
  const [context, width, height] = cleared(canvas);
  const paint = colours();
  const lane = (height - PAD.top - PAD.bottom) / numSlots;
  const gap = lane > 4 ? 1 : 0;
  const perSecond = (width - PAD.left - PAD.right) / span;
  const x = (ago) => width - PAD.right - ago * perSecond;
  context.fillStyle = paint.soft;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = niceCeiling(numSlots / 6);
  for (let slot = 0; slot < numSlots; slot += every) context.fillText(`slot ${slot}`, PAD.left - 6, PAD.top + (slot + 0.5) * lane);
  timeAxis(context, x, height, span);
  context.beginPath();
  context.rect(PAD.left, 0, width - PAD.left - PAD.right, height);
  context.clip();
  for (const { ago, length, slots } of steps) {
    const left = Math.round(x(ago));
    const wide = Math.max(1, Math.round(x(ago - length)) - left);
    for (let slot = 0; slot < slots.length; slot++) {
      if (slots[slot] === ".") continue;
      context.fillStyle = slots[slot] === "p" ? paint.second : paint.first;
      context.fillRect(left, PAD.top + slot * lane, wide, Math.max(1, lane - gap));
    }
  }
}
