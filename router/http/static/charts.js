// Charts of the last two minutes' latency and throughput, from the router's metrics.

import { $, drawn, number, seconds } from "./dom.js";

const KEPT = 120, WINDOW = 10; // seconds in a chart, and in one quantile or rate
const LEFT = 52, BOTTOM = 18, TOP = 8; // pixels for labels
const GRID = 4; // lines
const SERIES = {
  ttft: "time_to_first_token_seconds", itl: "inter_token_latency_seconds",
  tokens: "generation_tokens_total",
};
const samples = []; // {at, ttft: [[bound, count], …], itl: …, tokens: count, points: {…}}

export function showMetrics(text) {
  const sample = { at: performance.now() / 1000, points: {} };
  for (const id of ["ttft", "itl"]) sample[id] = buckets(text, SERIES[id]);
  sample.tokens = total(text, SERIES.tokens);
  sample.requests = total(text, "time_to_first_token_seconds_count");
  const old = samples.at(-WINDOW) ?? samples[0];
  for (const id of ["ttft", "itl"]) {
    sample.points[id] = [0.5, 0.95].map((share) => old && quantile(old[id], sample[id], share));
  }
  sample.points.tokens = [old && perSecond(old, sample, "tokens")];
  const requests = old && perSecond(old, sample, "requests");
  samples.push(sample);
  if (samples.length > KEPT + WINDOW) samples.shift();
  const shown = (value, unit) => (value == null ? "–" : `${number(value)} ${unit}`);
  $("tokens-rate").textContent = shown(sample.points.tokens[0], "/s");
  $("requests-rate").textContent = shown(requests, "/s");
  for (const id of Object.keys(SERIES)) {
    drawChart(id, id === "tokens" ? (value) => number(value, 2) : seconds);
  }
}

const lines = (text, name, labels = "") => [...text.matchAll(
  new RegExp(`^(?:pdserve_|vllm:)${name}(?:\\{${labels}.*?\\})? (\\S+)$`, "gm"))];

const total = (text, name) => lines(text, name).reduce((sum, found) => sum + Number(found[1]), 0);

function buckets(text, name) {
  return lines(text, `${name}_bucket`, '.*?le="([^"]+)"')
    .map(([, bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), Number(count)]);
}

// Returns null after a restart of the router.
function perSecond(before, after, name) {
  const more = after[name] - before[name], time = after.at - before.at;
  return more < 0 || !(time > 0) ? null : more / time;
}

// Prometheus' histogram_quantile: linear within a bucket. Returns null if nothing was counted.
function quantile(before, after, share) {
  const counts = after.map(([, count], i) => count - (before[i]?.[1] ?? 0));
  const rank = share * (counts.at(-1) ?? 0);
  if (!(rank > 0)) return null; // nothing was counted, or the router restarted
  const i = counts.findIndex((count) => count >= rank);
  const [low, below] = i ? [after[i - 1][0], counts[i - 1]] : [0, 0];
  if (after[i][0] === Infinity) return low;
  return low + (after[i][0] - low) * (rank - below) / (counts[i] - below);
}

// The least round number (1, 2, 4, 5 or 8 times a power of ten) that is not below the value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 5, 8, 10].find((step) => step * power >= value * 0.999999);
}

function drawChart(id, format) {
  const svg = $(id), { width, height } = svg.getBoundingClientRect();
  if (!width) return;
  const shown = samples.slice(-KEPT).map((sample) => sample.points[id]);
  const top = roundUp(Math.max(1e-4, ...shown.flat().map((value) => value ?? 0)));
  const x = (i) => LEFT + (width - LEFT - 8) * (KEPT - shown.length + i) / (KEPT - 1);
  const y = (value) => height - BOTTOM - (height - BOTTOM - TOP) * value / top;
  const parts = [];
  for (let i = 0; i <= GRID; i++) {
    const value = top * i / GRID;
    parts.push(drawn("line", { x1: LEFT, x2: width - 8, y1: y(value), y2: y(value), class: "grid" }),
      drawn("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const [text, i, anchor] of [["2 min ago", 0, "start"], ["1 min", KEPT / 2, "middle"],
    ["now", KEPT - 1, "end"]]) {
    const at = { x: LEFT + (width - LEFT - 8) * i / (KEPT - 1), y: height - 3 };
    parts.push(drawn("text", { ...at, "text-anchor": anchor }, text));
  }
  shown[0]?.forEach((_, which) => {
    let d = "", last = null;
    shown.forEach((point, i) => {
      const value = point[which];
      if (value != null) d += `${last == null ? "M" : "L"} ${x(i)} ${y(value)} `;
      last = value;
    });
    parts.push(drawn("path", { d, class: which ? "p95" : "p50" }));
  });
  const now = (shown.at(-1) ?? []).map((value) => (value == null ? "–" : format(value)));
  const label = now.length > 1 ? `p50 ${now[0]}, p95 ${now[1]}` : `${now[0]} per second`;
  $(`${id}-now`).textContent = label;
  svg.setAttribute("aria-label", `now ${label}`);
  svg.replaceChildren(...parts);
}
