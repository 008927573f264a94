// The cluster: a card for each node, and arrows for KV transfers.

import { $, bytes, drawn, duration, element, number, percent, seconds } from "./dom.js";

const MAX_ARROWS = 64, MAX_LABELS = 12;
const MOVING = 5; // seconds after its last bytes in which a link's speed is shown
const RATE = 10; // seconds over which a node's tokens are averaged
const cards = new Map(); // by node id
let flowsBefore = null; // {at, byPair}

const rate = (perSecond) => `${bytes(perSecond)}/s`;
const now = () => performance.now() / 1000;

// Returns a reason without its details, which the cards have.
const brief = (reason) => reason.split(/ \(|: /)[0];

export function showCluster(cluster) {
  const { nodes = [], ready, reason } = cluster;
  const well = ready && reason === "ok";
  setStatus(well ? "ready" : `${ready ? "ready" : "not ready"}: ${brief(reason)}`,
    well ? "good" : ready ? "warn" : "bad", reason);
  showTotals(cluster, nodes);
  for (const node of nodes) showNode(node);
  const present = new Set(nodes.map((node) => node.node_id));
  for (const [id, card] of cards) {
    if (present.has(id)) continue;
    card.item.remove();
    cards.delete(id);
  }
  showFlows(cluster.flows ?? [], new Set(nodes.filter(isGone).map((node) => node.node_id)));
}

const isGone = (node) => node.state === "lost";

function showTotals(cluster, nodes) {
  const { running = 0, waiting = 0, workers, first_token_seconds: predicted } = cluster;
  const others = (cluster.routers ?? 1) - 1;
  const elsewhere = nodes.filter((node) => node.role !== "prefill" && !isGone(node))
    .reduce((all, node) => all + (node.others ?? 0), 0);
  const up = nodes.filter((node) => node.state === "ready").length;
  $("nodes-ready").textContent = `${up} of ${nodes.length}`;
  $("running").textContent = running + elsewhere;
  $("running-here").textContent = others ? `${running} through this router` : "";
  $("waiting").textContent = waiting;
  $("first-token").textContent = predicted == null ? "–" : seconds(predicted);
  $("first-token-age").textContent = predicted == null ? "no request in the last minute"
    : `by a request ${duration(cluster.first_token_measured_ago ?? 0)} ago`;
  $("uptime").textContent = cluster.uptime_seconds == null ? "–" : duration(cluster.uptime_seconds);
  $("model").textContent = nodes[0]?.model ?? "";
  const name = `${location.host}, ${workers ? `${workers.length} workers` : `pid ${cluster.pid}`}`;
  $("charts-scope").textContent = others ? `this router alone (${name})` : "this router";
  $("scope").className = others ? "warn" : "quiet";
  $("scope").textContent = others
    ? `${others + 1} routers serve these nodes; this is one of them (${name}). Nodes, running ` +
      "requests and their output tokens are of all routers; queue, latencies, errors, SLO, hits, " +
      "transfers and the list of requests are of this one."
    : `This is the only router of these nodes (${name}).`;
}

function showNode(node) {
  const card = cards.get(node.node_id) ?? newCard(node), gone = isGone(node);
  const tone = { ready: "good", broken: "warn", unpaired: "warn" }[node.state] ?? "bad";
  const words = sentence(node);
  card.item.className = gone ? `${tone} gone` : tone;
  card.text.className = `state ${tone}`;
  card.text.textContent = words.state;
  card.why.hidden = !words.detail;
  card.detail.textContent = words.detail;
  card.meter.value = gone ? 0 : node.kv_cache_usage;
  card.kv.textContent = gone ? " –" : ` ${percent(node.kv_cache_usage)} of ${node.total_blocks} blocks`;
  card.load.textContent = `${node.in_flight ?? 0} in flight` +
    (node.others && !gone ? `, ${node.others} of other routers` : "");
  card.engine.textContent = gone ? "–" : `${node.running} running, ${node.waiting} waiting`;
  card.tokens.textContent = gone ? "–" : tokenRate(card, node.generation_tokens ?? 0);
  const hits = node.prompt_tokens ? percent(node.cached_tokens / node.prompt_tokens) : "–";
  card.hits.textContent = `${hits} of ${node.prompt_tokens} prompt tokens`;
  card.hits.hidden = card.hitsName.hidden = node.role === "decode" && !node.prompt_tokens;
}

// Returns the tokens per second of the last seconds.
function tokenRate(card, tokens) {
  card.counts.push({ at: now(), tokens });
  while (card.counts[1] && card.counts[1].at < now() - RATE) card.counts.shift();
  const [first, last] = [card.counts[0], card.counts.at(-1)];
  const took = last.at - first.at;
  return took < 1 ? "–" : `${number(Math.max(0, last.tokens - first.tokens) / took, 2)} /s`;
}

// Returns a node's state in a few words, and its details.
function sentence({ state, reason, seconds_since_heartbeat: silent = 0 }) {
  if (state === "ready") return { state, detail: reason === "ok" ? "" : reason };
  if (state === "lost") {
    return { state: `lost: last heard ${duration(silent)} ago`, detail: reason };
  }
  const words = brief(reason);
  return { state: words ? `${state}: ${words}` : state, detail: words === reason ? "" : reason };
}

function newCard(node) {
  const part = (tag) => element(tag);
  const card = {
    item: part("li"), text: part("span"), kv: part("span"), load: part("dd"), engine: part("dd"),
    hits: part("dd"), tokens: part("dd"), detail: part("p"), counts: [],
    meter: element("meter", { max: 1, high: 0.9, ariaLabel: "KV cache in use" }),
    hitsName: element("dt", {}, "Prefix hits"),
  };
  card.why = element("details", { className: "why" }, element("summary", {}, "Details"), card.detail);
  card.item.append(
    element("div", {}, element("strong", {}, node.node_id), " ", card.text),
    element("div", { className: "quiet" }, node.address, node.pid ? `, pid ${node.pid}` : ""), card.why,
    element("dl", {}, element("dt", {}, "Requests"), card.load,
      element("dt", {}, "Engine"), card.engine, element("dt", {}, "Output tokens"), card.tokens,
      element("dt", {}, "KV cache"),
      element("dd", {}, card.meter, card.kv), card.hitsName, card.hits),
  );
  $({ prefill: "prefill", decode: "decode" }[node.role] ?? "both").append(card.item);
  cards.set(node.node_id, card);
  return card;
}

// `gone`: ids of lost nodes.
function showFlows(flows, gone) {
  flows.sort((a, b) => (a.prefill + a.decode < b.prefill + b.decode ? -1 : 1));
  const before = flowsBefore, at = now();
  const byPair = new Map(flows.map((flow) => [JSON.stringify([flow.prefill, flow.decode]), flow]));
  flowsBefore = { at, byPair };
  for (const [pair, flow] of byPair) {
    const old = before?.byPair.get(pair) ?? (before ? { bytes: 0, seconds: 0 } : flow);
    const moved = Math.max(0, flow.bytes - old.bytes), took = flow.seconds - old.seconds;
    flow.gone = gone.has(flow.prefill) || gone.has(flow.decode);
    flow.now = flow.gone ? 0 : moved / Math.max(0.1, at - (before?.at ?? 0));
    if (moved) Object.assign(flow, { movedAt: at, speed: took > 0 ? moved / took : NaN });
    else Object.assign(flow, { movedAt: old.movedAt, speed: old.speed });
    flow.moves = !flow.gone && flow.movedAt > at - MOVING; // its speed is news
  }
  const mean = (flow) => (flow.seconds ? rate(flow.bytes / flow.seconds) : "–");
  const cells = (flow) => [flow.prefill, flow.decode, String(flow.transfers), bytes(flow.bytes),
    flow.gone ? "lost" : rate(flow.now), mean(flow)];
  $("flows").replaceChildren(...flows.map((flow) =>
    element("tr", {}, ...cells(flow).map((text) => element("td", {}, text)))));
  drawArrows(flows);
}

function drawArrows(flows) {
  const box = $("arrows").getBoundingClientRect();
  const height = (id) => {
    const card = cards.get(id)?.item.getBoundingClientRect();
    return card ? card.top + card.height / 2 - box.top : 0;
  };
  const fastest = Math.max(1, ...flows.map((flow) => flow.now));
  const paths = [], labels = [];
  flows.slice(0, MAX_ARROWS).forEach((flow, i) => {
    const [from, to, half] = [height(flow.prefill), height(flow.decode), box.width / 2];
    const d = `M 0 ${from} C ${half} ${from} ${half} ${to} ${box.width} ${to}`;
    const path = drawn("path", { d, class: flow.gone ? "gone" : flow.now ? "busy" : "" });
    path.style.strokeWidth = `${1.5 + 5 * flow.now / fastest}px`;
    paths.push(path);
    if (flows.length > MAX_LABELS || !flow.moves) return; // the table has all speeds
    const end = i % 2; // alternate ends, so that labels do not overlap
    const y = (end ? to + 0.1 * (from - to) : from + 0.1 * (to - from)) - 5;
    const at = { x: end ? box.width - 6 : 6, y, "text-anchor": end ? "end" : "start" };
    labels.push(drawn("text", at, Number.isFinite(flow.speed) ? rate(flow.speed) : rate(flow.now)));
  });
  $("arrows").replaceChildren(...paths, ...labels);
}

export function setStatus(text, tone, detail = "") {
  $("status").title = detail === "ok" ? "" : detail;
  if ($("status").textContent === text) return; // screen readers read every change aloud
  $("status").textContent = text;
  $("status").className = `badge ${tone}`;
}
