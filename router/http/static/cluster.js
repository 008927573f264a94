// The cluster: a card for each node, arrows for KV transfers, and a log of changes.

import { $, bytes, drawn, duration, element, percent, seconds } from "./dom.js";

const RECENT = 120; // seconds in which a refusal counts
const MAX_EVENTS = 50, MAX_ARROWS = 64, MAX_LABELS = 12;
const cards = new Map(); // by node id
let flowsBefore = null; // {at, byPair}
let faults = new Map(); // those that are in the log, by what they are about

const rate = (perSecond) => `${bytes(perSecond)}/s`;
const speed = (flow) => (Number.isFinite(flow.speed) ? rate(flow.speed) : "–");

// Returns a reason without its details, which the cards have.
const brief = (reason) => reason.split(/ \(|: /)[0];

export function showCluster(cluster) {
  const { nodes = [], running = 0, waiting = 0, ready, reason } = cluster;
  const well = ready && reason === "ok";
  setStatus(well ? "ready" : `${ready ? "ready" : "not ready"}: ${brief(reason)}`,
    well ? "good" : ready ? "warn" : "bad", reason);
  const up = nodes.filter((node) => node.state === "ready").length;
  $("nodes-ready").textContent = `${up} of ${nodes.length}`;
  $("running").textContent = running;
  $("waiting").textContent = waiting;
  const firstToken = cluster.first_token_seconds;
  $("first-token").textContent = firstToken == null ? "–" : seconds(firstToken);
  $("uptime").textContent = cluster.uptime_seconds == null ? "–" : duration(cluster.uptime_seconds);
  $("model").textContent = nodes[0]?.model ?? "";
  const first = cards.size === 0;
  for (const node of nodes) showNode(node, first);
  const present = new Set(nodes.map((node) => node.node_id));
  for (const [id, card] of cards) {
    if (present.has(id)) continue;
    logEvent(`${id} has left`, "quiet");
    card.item.remove();
    cards.delete(id);
  }
  showFlows(cluster.flows ?? []);
  showFaults(cluster);
}

// Logs each refused node and broken link once, until it is over.
function showFaults({ refused = [], broken_links: broken = [] }) {
  const now = new Map([
    ...refused.filter((each) => each.seconds_ago < RECENT)
      .map(({ reason }) => [reason, `a node was refused: ${reason}`]),
    ...broken.map(({ prefill, decode, reason }) =>
      [`${prefill} ${decode}`, `${prefill} hands no KV over to ${decode}: ${reason}`]),
  ]);
  for (const [key, text] of now) if (!faults.has(key)) logEvent(text, "bad");
  faults = now;
}

function showNode(node, quietly) {
  const known = cards.has(node.node_id);
  const card = cards.get(node.node_id) ?? newCard(node);
  const tone = { ready: "good", broken: "warn", unpaired: "warn" }[node.state] ?? "bad";
  const words = sentence(node);
  if (card.state !== node.state && !(quietly && tone === "good")) {
    logEvent(`${node.node_id} ${known ? "is" : "registered:"} ${words.event}`, tone);
  }
  card.state = node.state;
  card.item.className = tone;
  card.text.className = `state ${tone}`;
  card.text.textContent = words.state;
  card.why.hidden = !words.detail;
  card.detail.textContent = words.detail;
  card.meter.value = node.kv_cache_usage;
  card.kv.textContent = ` ${percent(node.kv_cache_usage)} of ${node.total_blocks} blocks`;
  card.load.textContent = `${node.in_flight ?? 0} in flight`;
  card.engine.textContent = `${node.running} running, ${node.waiting} waiting`;
  const hits = node.prompt_tokens ? percent(node.cached_tokens / node.prompt_tokens) : "–";
  card.hits.textContent = `${hits} of ${node.prompt_tokens} prompt tokens`;
  card.hits.hidden = card.hitsName.hidden = node.role === "decode" && !node.prompt_tokens;
}

// Returns a node's state in a few words for the card and for the log, and its details.
function sentence(node) {
  const { state, reason } = node;
  if (state === "ready") {
    return { state, event: state, detail: reason === "ok" ? "" : reason };
  }
  if (state === "lost") {
    const silent = Math.round(node.seconds_since_heartbeat ?? 0);
    return { state: `lost: silent for ${silent} s`, event: "lost", detail: reason };
  }
  const words = brief(reason), text = words ? `${state}: ${words}` : state;
  return { state: text, event: text, detail: words === reason ? "" : reason };
}

function newCard(node) {
  const part = (tag) => element(tag);
  const card = {
    item: part("li"), text: part("span"), kv: part("span"), load: part("dd"), engine: part("dd"),
    hits: part("dd"), detail: part("p"),
    meter: element("meter", { max: 1, high: 0.9, ariaLabel: "KV cache in use" }),
    hitsName: element("dt", {}, "Prefix hits"),
  };
  card.why = element("details", { className: "why" }, element("summary", {}, "Details"), card.detail);
  card.item.append(
    element("div", {}, element("strong", {}, node.node_id), " ", card.text),
    element("div", { className: "quiet" }, node.address), card.why,
    element("dl", {}, element("dt", {}, "Requests"), card.load,
      element("dt", {}, "Engine"), card.engine, element("dt", {}, "KV cache"),
      element("dd", {}, card.meter, card.kv), card.hitsName, card.hits),
  );
  $({ prefill: "prefill", decode: "decode" }[node.role] ?? "both").append(card.item);
  cards.set(node.node_id, card);
  return card;
}

function showFlows(flows) {
  flows.sort((a, b) => (a.prefill + a.decode < b.prefill + b.decode ? -1 : 1));
  const before = flowsBefore, now = performance.now() / 1000;
  const byPair = new Map(flows.map((flow) => [JSON.stringify([flow.prefill, flow.decode]), flow]));
  flowsBefore = { at: now, byPair };
  for (const [pair, flow] of byPair) {
    const old = before?.byPair.get(pair) ?? (before ? { bytes: 0, seconds: 0 } : flow);
    const moved = Math.max(0, flow.bytes - old.bytes), took = flow.seconds - old.seconds;
    flow.now = moved / Math.max(0.1, now - (before?.at ?? 0));
    flow.speed = moved && took > 0 ? moved / took : flow.bytes / flow.seconds; // NaN if unknown
  }
  const cells = (flow) => [flow.prefill, flow.decode, String(flow.transfers), bytes(flow.bytes),
    rate(flow.now), speed(flow)];
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
    const path = drawn("path", { d, class: flow.now ? "busy" : "" });
    path.style.strokeWidth = `${1.5 + 5 * flow.now / fastest}px`;
    paths.push(path);
    if (flows.length > MAX_LABELS) return; // the table has all speeds
    const end = i % 2; // alternate ends, so that labels do not overlap
    const y = (end ? to + 0.1 * (from - to) : from + 0.1 * (to - from)) - 5;
    const at = { x: end ? box.width - 6 : 6, y, "text-anchor": end ? "end" : "start" };
    labels.push(drawn("text", at, speed(flow)));
  });
  $("arrows").replaceChildren(...paths, ...labels);
}

function logEvent(text, tone) {
  $("events").querySelector(".none")?.remove();
  const time = new Date().toLocaleTimeString();
  $("events").prepend(element("li", {}, `${time} `, element("span", { className: tone }, text)));
  while ($("events").children.length > MAX_EVENTS) $("events").lastChild.remove();
}

export function setStatus(text, tone, detail = "") {
  $("status").title = detail === "ok" ? "" : detail;
  if ($("status").textContent === text) return; // screen readers read every change aloud
  $("status").textContent = text;
  $("status").className = `badge ${tone}`;
}
