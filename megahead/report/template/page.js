// Draws the charts of the page from the JSON in #data: {panels: [...], runs: [...]}, see build_panels in panels.py.
// A series is {x: {tokens, step, seconds}, y, mean}; null in y is a missing or non-finite value: a gap in the line.
"use strict";
const { panels, runs } = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 230, EDGE = { left: 46, right: 12, top: 10, bottom: 26 };
const hiddenRuns = new Set();
let axis = "tokens", cursor = null; // cursor: its position on the axis, or null

const color = (k) => `var(--run-${k % 8})`;
const create = (name, attributes, parent) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return parent ? parent.appendChild(node) : node;
};

function formatNumber(value) {
  const size = Math.abs(value);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return +(value / (suffix === "k" ? 1e3 : limit)).toPrecision(3) + suffix;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.01 ? value.toExponential(1).replace(".0e", "e") : String(+value.toPrecision(3));
}

function duration(seconds) {
  if (seconds < 120) return `${+seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${+(seconds / 60).toPrecision(3)} min`;
  return seconds < 172800 ? `${+(seconds / 3600).toPrecision(3)} h` : `${+(seconds / 86400).toPrecision(3)} days`;
}

const formatValue = { tokens: (x) => `${formatNumber(x)} tokens`, step: (x) => `step ${Math.round(x).toLocaleString("en")}`, seconds: duration };
const formatTick = { tokens: formatNumber, step: formatNumber, seconds: duration };
const formatY = (panel, value) => (panel.percent ? `${+(100 * value).toPrecision(3)} %` : formatNumber(value));

function linearTicks(low, high, count, units) {
  const rough = (high - low) / count || 1;
  const steps = units || [1, 2, 2.5, 5, 10].map((m) => m * 10 ** Math.floor(Math.log10(rough)));
  const step = steps.find((s) => s >= rough * 0.999) || steps[steps.length - 1];
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return ticks;
}

function logTicks(low, high) {
  for (const digits of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      ticks.push(...digits.map((m) => m * 10 ** power).filter((t) => t >= low && t <= high));
    }
    if (ticks.length > 2) return ticks;
  }
  return linearTicks(low, high, 4);
}

const TIMES = [1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000];

function scales(panel, width) {
  const lines = panel.series.filter((s) => !hiddenRuns.has(s.run));
  const values = lines.flatMap((s) => [...s.y, ...s.mean]).filter((v) => v !== null && (!panel.log_scale || v > 0));
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [1, 2];
  if (panel.from_zero) low = 0;
  if (low === high) [low, high] = panel.log_scale ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  const f = panel.log_scale ? Math.log10 : (v) => v, margin = 0.05 * (f(high) - f(low));
  const floor = panel.from_zero ? 0 : f(low) - margin, ceiling = f(high) + margin;
  const last = Math.max(1e-9, ...lines.map((s) => s.x[axis][s.x[axis].length - 1] || 0));
  const innerWidth = width - EDGE.left - EDGE.right, innerHeight = HEIGHT - EDGE.top - EDGE.bottom;
  return {
    lines, low, high, last,
    x: (v) => EDGE.left + (v / last) * innerWidth,
    y: (v) => EDGE.top + (1 - (f(v) - floor) / (ceiling - floor)) * innerHeight,
    value: (px) => ((px - EDGE.left) / innerWidth) * last,
    ticks: panel.log_scale ? logTicks(10 ** floor, 10 ** ceiling) : linearTicks(panel.from_zero ? 0 : floor, ceiling, 4),
  };
}

function path(xs, ys, scale, log) {
  let text = "", pen = false;
  ys.forEach((y, k) => {
    const visible = y !== null && (!log || y > 0);
    if (visible) text += `${pen ? "L" : "M"}${scale.x(xs[k]).toFixed(1)} ${scale.y(y).toFixed(1)}`;
    pen = visible;
  });
  return text;
}

function draw(panel) {
  const svg = panel.svg, width = svg.clientWidth || 400, scale = scales(panel, width);
  panel.scale = scale;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  for (const tick of scale.ticks) {
    const y = scale.y(tick);
    create("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y }, svg);
    create("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" }, svg).textContent = formatY(panel, tick);
  }
  const columns = linearTicks(0, scale.last, Math.max(2, Math.floor(width / 110)), axis === "seconds" ? TIMES : null);
  for (const tick of columns) {
    const anchor = scale.x(tick) > width - 40 ? "end" : tick === 0 ? "start" : "middle";
    const attributes = { x: scale.x(tick), y: HEIGHT - 6, "text-anchor": anchor };
    create("text", attributes, svg).textContent = tick === 0 ? "0" : formatTick[axis](tick);
  }
  for (const line of scale.lines) {
    const stroke = color(line.run), xs = line.x[axis], dashes = line.run >= 8 ? "5 5" : "none";
    if (!panel.dots && !panel.noise_free) create("path", { class: "raw", stroke, d: path(xs, line.y, scale, panel.log_scale) }, svg);
    create("path", { class: "mean", stroke, "stroke-dasharray": dashes, d: path(xs, line.mean, scale, panel.log_scale) }, svg);
    line.mean.forEach((y, k) => {
      if (y === null || (panel.log_scale && y <= 0) || (!panel.dots && line.mean.length > 1)) return;
      create("circle", { cx: scale.x(xs[k]), cy: scale.y(y), r: line.mean.length > 60 ? 1.6 : 2.8, fill: stroke }, svg);
    });
    for (const event of runs[line.run].events) {
      const x = scale.x(event[axis]), bottom = HEIGHT - EDGE.bottom;
      const mark = create("path", { d: `M${x} ${bottom}l-4 7h8z`, fill: event.wrong ? "var(--wrong)" : "var(--again)" }, svg);
      create("title", {}, mark).textContent = event.text;
    }
  }
  drawCursor(panel);
}

function nearest(xs, x) {
  let best = 0;
  for (let k = 1; k < xs.length; k++) if (Math.abs(xs[k] - x) < Math.abs(xs[best] - x)) best = k;
  return best;
}

function drawCursor(panel) {
  panel.svg.querySelectorAll(".cursor").forEach((node) => node.remove());
  const { scale } = panel;
  if (cursor === null || cursor > scale.last * 1.02) return;
  const x = scale.x(cursor), top = EDGE.top, bottom = HEIGHT - EDGE.bottom;
  create("line", { class: "cursor-line cursor", x1: x, x2: x, y1: top, y2: bottom }, panel.svg);
  for (const line of scale.lines) {
    const k = nearest(line.x[axis], cursor), y = line.mean[k];
    if (y === null || y === undefined || (panel.log_scale && y <= 0)) continue;
    create("circle", { class: "cursor", cx: scale.x(line.x[axis][k]), cy: scale.y(y), r: 4, fill: color(line.run) }, panel.svg);
  }
}

const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;

function showTip(panel, event) {
  const rows = panel.scale.lines.map((line) => [line, line.mean[nearest(line.x[axis], cursor)]]).filter((row) => row[1] != null);
  tip.replaceChildren();
  tip.appendChild(document.createElement("div")).textContent = formatValue[axis](cursor);
  for (const [line, value] of rows) {
    const row = tip.appendChild(document.createElement("div")), dot = row.appendChild(document.createElement("span"));
    dot.className = line.run >= 8 ? "dot ring" : "dot";
    dot.style.setProperty("--its", color(line.run));
    if (runs.length > 1) row.append(runs[line.run].name);
    row.appendChild(document.createElement("b")).textContent = formatY(panel, value);
  }
  tip.hidden = false;
  const right = event.clientX + 18 + tip.offsetWidth > window.innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - 18 - tip.offsetWidth : event.clientX + 18)}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
}

function listen(panel) {
  panel.svg.addEventListener("pointermove", (event) => {
    const px = event.clientX - panel.svg.getBoundingClientRect().left;
    cursor = Math.min(Math.max(panel.scale.value(px), 0), panel.scale.last);
    panels.forEach(drawCursor);
    showTip(panel, event);
  });
  panel.svg.addEventListener("pointerleave", () => {
    cursor = null;
    tip.hidden = true;
    panels.forEach(drawCursor);
  });
}

const drawAll = () => panels.forEach(draw);
document.querySelectorAll(".chart").forEach((card, k) => {
  panels[k].svg = create("svg", { role: "img", "aria-label": panels[k].title }, card);
  listen(panels[k]);
});
document.querySelectorAll(".axis button").forEach((button, _, all) => {
  button.addEventListener("click", () => {
    axis = button.value;
    cursor = null;
    all.forEach((other) => other.setAttribute("aria-pressed", other === button));
    drawAll();
  });
});
document.querySelectorAll(".key").forEach((button, k) => {
  button.addEventListener("click", () => {
    if (!hiddenRuns.delete(k)) hiddenRuns.add(k);
    button.setAttribute("aria-pressed", !hiddenRuns.has(k));
    drawAll();
  });
});
new ResizeObserver(drawAll).observe(document.querySelector(".charts"));
drawAll();
