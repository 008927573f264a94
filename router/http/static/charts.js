// Charts of the last two minutes, from the router's samples.

import { $, drawn, element, number, percent, seconds } from "./dom.js";
import { SECONDS, WINDOW } from "./history.js";

const LEFT = 52, RIGHT = 8, BOTTOM = 18, TOP = 8; // pixels for labels
const GRID = 4; // lines
const HISTOGRAMS = { ttft: 1, itl: 0.1, hand_off: 0.1 }; // seconds on the axis of an empty chart
const perSecond = (value) => `${number(value, 2)} /s`;

export function showCharts(history, cluster) {
  const windows = Array.from({ length: SECONDS }, (_, i) => history.windowOf(SECONDS - 1 - i));
  const whole = cluster.routers > 1;
  for (const [id, top] of Object.entries(HISTOGRAMS)) {
    const points = windows.map((each) => quantiles(each, id, history.bounds[id] ?? [], [0.5, 0.95]));
    drawChart(id, points, ["p50", "p95"], seconds, { top, served: history.served });
  }
  const rates = windows.map((each) => [
    ...(whole ? [rate(each, "nodes_tokens")] : []), rate(each, "tokens")]);
  drawChart("tokens", rates, whole ? ["all routers", "this router"] : ["now"], perSecond,
    { top: 100, served: history.served, fromZero: true });
  drawChart("hits", windows.map((each) => [share(sum(each, "cached_tokens"), sum(each, "prompt_tokens"))]),
    ["hits"], percent, { top: 1, max: 1, served: history.served });
  drawChart("slo", windows.map((each) => ["ttft", "itl"].map((name) => met(each, name))),
    ["TTFT", "between tokens"], percent,
    { top: 1, max: 1, served: history.served, empty: "no request with an SLO" });
  drawErrors(windows, history);
  const now = windows.at(-1);
  $("tokens-rate").textContent = shown(rates.at(-1)[0], perSecond);
  $("tokens-here").textContent = whole ? `${shown(rates.at(-1)[1], perSecond)} in this router` : "";
  $("requests-rate").textContent = shown(now.length ? total(codes(now)) / now.length : null, perSecond);
}

const shown = (value, format) => (value == null ? "–" : format(value));
const sum = (window, name) => window.reduce((all, sample) => all + (sample[name] ?? 0), 0);
const share = (part, whole) => (whole ? part / whole : null);
const rate = (window, name) => (window.length ? sum(window, name) / window.length : null);
const total = (counts) => [...counts.values()].reduce((all, count) => all + count, 0);

function met(window, name) {
  const count = (outcome) => window.reduce((all, { slo }) => all + (slo?.[`${name}/${outcome}`] ?? 0), 0);
  return share(count("met"), count("met") + count("missed"));
}

function codes(window) {
  const counts = new Map();
  for (const sample of window) {
    for (const [code, count] of Object.entries(sample.codes)) {
      counts.set(code, (counts.get(code) ?? 0) + count);
    }
  }
  return counts;
}

// Prometheus' histogram_quantile: linear within a bucket. Null if nothing was counted.
function quantiles(window, name, bounds, shares) {
  const counts = new Array(bounds.length + 1).fill(0);
  for (const sample of window) {
    for (const [index, count] of Object.entries(sample[name])) counts[index] += count;
  }
  const all = counts.reduce((sum, count) => sum + count, 0);
  return shares.map((share) => {
    let left = share * all;
    const i = counts.findIndex((count) => (left -= count) <= 0);
    if (!all || i < 0) return null;
    const low = i ? bounds[i - 1] : 0;
    return i === bounds.length ? low : low + (bounds[i] - low) * (1 + left / counts[i]);
  });
}

// The least round number (1, 2, 4, 5 or 8 times a power of ten) that is not below the value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 5, 8, 10].find((step) => step * power >= value * 0.999999);
}

// Draws axes and returns {x, y, parts}, or null while the chart is not visible.
function axes(svg, top, format) {
  const { width, height } = svg.getBoundingClientRect();
  if (!width) return null;
  const x = (i) => LEFT + (width - LEFT - RIGHT) * i / (SECONDS - 1);
  const y = (value) => height - BOTTOM - (height - BOTTOM - TOP) * value / top;
  const parts = [];
  for (let i = 0; i <= GRID; i++) {
    const value = top * i / GRID;
    parts.push(drawn("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
      drawn("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const [text, i, anchor] of [["2 min ago", 0, "start"], ["1 min", SECONDS / 2, "middle"],
    ["now", SECONDS - 1, "end"]]) {
    parts.push(drawn("text", { x: x(i), y: height - 3, "text-anchor": anchor }, text));
  }
  return { x, y, parts, middle: { x: (LEFT + width - RIGHT) / 2, y: height / 2 } };
}

// `points`: the values of each line, by second; null where there is none.
function drawChart(id, points, names, format, { top, max, served, empty, fromZero }) {
  const values = points.flat().filter((value) => value != null && (value > 0 || !fromZero));
  const axis = axes($(id), max ?? (values.some(Boolean) ? roundUp(Math.max(...values)) : top), format);
  const now = values.length ? points.at(-1).map((value) => shown(value, format)) : [];
  const labels = now.map((text, i) => (names.length > 1 ? `${names[i]} ${text}` : text));
  describe(id, labels.join(", "), served, empty);
  if (names.length > 1) $(`${id}-now`).replaceChildren(...labels.flatMap((label, i) => [
    i ? ", " : "", element("span", { className: `key ${i ? "p95" : "p50"}` }), ` ${label}`]));
  if (!axis) return;
  const { x, y, parts } = axis;
  if (!values.length) parts.push(nothing(axis, why(served, empty)));
  else names.forEach((_, which) => parts.push(line(points, which, x, y)));
  $(id).replaceChildren(...parts);
}

function line(points, which, x, y) {
  let d = "", last = null;
  points.forEach((point, i) => {
    const value = point[which];
    if (value != null) d += `${last == null ? "M" : "L"} ${x(i)} ${y(value)} `;
    last = value;
  });
  return drawn("path", { d, class: which ? "p95" : "p50" });
}

const why = (served, empty) => (served ? empty ?? "none in the last two minutes" : "no requests yet");
const nothing = ({ middle }, text) =>
  drawn("text", { ...middle, "text-anchor": "middle", class: "nothing" }, text);

function describe(id, label, served, empty) {
  $(`${id}-now`).textContent = label;
  $(id).setAttribute("aria-label", label ? `now ${label}` : why(served, empty));
}

// A bar for each ten seconds; the part of a code has the same colour in every bar.
function drawErrors(windows, history) {
  const bars = windows.map((window, i) => [i, codes(window)])
    .filter(([i]) => (SECONDS - 1 - i) % WINDOW === 0);
  for (const [, counts] of bars) counts.delete("OK");
  const all = codes(bars.map(([, counts]) => ({ codes: Object.fromEntries(counts) })));
  const most = Math.max(0, ...bars.map(([, counts]) => total(counts)));
  const axis = axes($("errors"), roundUp(Math.max(4, most)), (value) => number(value));
  const names = [...all.keys()].sort();
  describe("errors", names.map((code) => `${all.get(code)} ${code}`).join(", "), history.served, "none");
  $("errors-now").replaceChildren(...names.map((code) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = colour(code);
    return element("span", { className: "code" }, swatch, `${all.get(code)} ${code}`);
  }));
  if (!axis) return;
  const { x, y, parts } = axis;
  if (!names.length) parts.push(nothing(axis, why(history.served, "no errors")));
  const width = 0.8 * (x(WINDOW) - x(0));
  for (const [i, counts] of bars) {
    let below = 0;
    for (const code of names.filter((name) => counts.has(name))) {
      const above = below + counts.get(code);
      const box = { x: x(i) - width, y: y(above), width, height: y(below) - y(above) };
      const bar = drawn("rect", { ...box, fill: colour(code) });
      bar.append(drawn("title", {}, `${counts.get(code)} ${code}`));
      parts.push(bar);
      below = above;
    }
  }
  $("errors").replaceChildren(...parts);
}

function colour(code) {
  let hash = 0;
  for (const char of code) hash = (31 * hash + char.codePointAt(0)) % 360;
  return `hsl(${(137 * hash) % 360} 65% 50%)`;
}
