// The page at /ui. All that nodes, the model or errors say becomes text nodes, never markup; the
// page's policy (router/http/ui.py) would not let it run anyway.

const POLL = 1000, KEPT = 120, WINDOW = 10; // ms; samples in a chart; samples of a quantile
const KEY = "pdserve-api-key";
const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// ---- asking the router: paths are relative, since a proxy may show it under another -------------

class Refused extends Error {}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const why = body?.error?.message ?? `${response.status} ${response.statusText}`;
  if (key === sessionStorage.getItem(KEY)) {
    if (response.status === 401) askForKey(key && "The server does not know this key.");
    // Once for each key: who closes the dialogue can chat without an operator's key.
    if (response.status === 403 && clientsKey !== key) askForKey(why);
    if (response.status === 403) clientsKey = key;
  }
  throw new Refused(why);
}

let clientsKey; // a key that was not enough to see the cluster

function askForKey(why) {
  if ($("ask-key").open) return;
  if (why) $("key-why").textContent = why;
  $("ask-key").showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("ask-key").close();
  look();
});

// ---- numbers for people --------------------------------------------------------------------------

const number = (value, digits = 3) => String(Number(value.toPrecision(digits)));
const percent = (share) => `${Math.round(100 * share)} %`;
const speed = (flow) => (Number.isFinite(flow.speed) ? rate(flow.speed) : "–");
const rate = (bytes) => `${number(bytes / 1e9, 2)} GB/s`;

function seconds(value) {
  if (value >= 1) return `${number(value)} s`;
  return value >= 1e-3 ? `${number(value * 1e3)} ms` : `${number(value * 1e6)} µs`;
}

function bytes(value) {
  const unit = Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${number(value / 1000 ** unit)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

// ---- the cluster ---------------------------------------------------------------------------------

const cards = new Map(); // by node id
let flowsBefore = null; // {at, byPair}

function showCluster(cluster) {
  const { nodes = [], running = 0, waiting = 0 } = cluster;
  setStatus(cluster.ready ? `ready${cluster.reason === "ok" ? "" : `: ${cluster.reason}`}`
    : `not ready: ${cluster.reason}`,
    cluster.ready ? (cluster.reason === "ok" ? "good" : "warn") : "bad");
  const up = nodes.filter((node) => node.state === "ready").length;
  $("totals").textContent =
    `${up} of ${nodes.length} nodes ready, ${running} requests running, ${waiting} waiting`;
  $("model").textContent = nodes[0]?.model ?? "";
  const first = cards.size === 0;
  for (const node of nodes) showNode(node, first);
  const present = new Set(nodes.map((node) => node.node_id));
  for (const [id, card] of cards) {
    if (present.has(id)) continue;
    happened(`${id} is gone`, "bad");
    card.item.remove();
    cards.delete(id);
  }
  showFlows(cluster.flows ?? []);
}

function showNode(node, quietly) {
  const card = cards.get(node.node_id) ?? newCard(node);
  const tone = { ready: "good", broken: "warn" }[node.state] ?? "bad";
  const reason = node.reason === "ok" ? "" : node.reason;
  if (card.state !== node.state && !(quietly && tone === "good")) {
    happened(`${node.node_id}: ${node.state}${reason ? `, ${reason}` : ""}`, tone);
  }
  card.state = node.state;
  card.item.className = tone;
  card.text.className = `state ${tone}`;
  card.text.textContent = node.state + (reason ? `: ${reason}` : "");
  card.meter.value = node.kv_cache_usage;
  card.kv.textContent = ` ${percent(node.kv_cache_usage)} of ${node.total_blocks} blocks`;
  card.load.textContent = `${node.running} running, ${node.waiting} waiting`;
  const hits = node.prompt_tokens ? percent(node.cached_tokens / node.prompt_tokens) : "–";
  card.hits.textContent = `${hits} of ${node.prompt_tokens} prompt tokens`;
  card.hits.hidden = card.hitsName.hidden = node.role === "decode" && !node.prompt_tokens;
}

function newCard(node) {
  const part = (tag) => element(tag);
  const card = {
    item: part("li"), text: part("span"), kv: element("span"), load: part("dd"), hits: part("dd"),
    meter: element("meter", { max: 1, high: 0.9, ariaLabel: "KV cache in use" }),
    hitsName: element("dt", {}, "Prefix hits"),
  };
  card.item.append(
    element("div", {}, element("strong", {}, node.node_id), " ", card.text),
    element("div", { className: "quiet" }, node.address),
    element("dl", {}, element("dt", {}, "Requests"), card.load, element("dt", {}, "KV cache"),
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
    flow.speed = moved && took > 0 ? moved / took : flow.bytes / flow.seconds; // NaN: not known
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
  flows.slice(0, 64).forEach((flow, i) => {
    const [from, to, half] = [height(flow.prefill), height(flow.decode), box.width / 2];
    const d = `M 0 ${from} C ${half} ${from} ${half} ${to} ${box.width} ${to}`;
    const path = drawn("path", { d, class: flow.now ? "busy" : "" });
    path.style.strokeWidth = `${1.5 + 5 * flow.now / fastest}px`;
    paths.push(path);
    if (flows.length > 12) return; // the table has them
    const end = i % 2; // by turns at either end, so that labels do not meet
    const y = (end ? to + 0.1 * (from - to) : from + 0.1 * (to - from)) - 5;
    const at = { x: end ? box.width - 6 : 6, y, "text-anchor": end ? "end" : "start" };
    labels.push(drawn("text", at, speed(flow)));
  });
  $("arrows").replaceChildren(...paths, ...labels);
}

function happened(what, tone) {
  $("events").querySelector(".quiet")?.remove();
  const time = new Date().toLocaleTimeString();
  $("events").prepend(element("li", {}, `${time} `, element("span", { className: tone }, what)));
  while ($("events").children.length > 50) $("events").lastChild.remove();
}

function setStatus(text, tone) {
  if ($("status").textContent === text) return; // it is read out when it changes
  $("status").textContent = text;
  $("status").className = `badge ${tone}`;
}

// ---- latency -------------------------------------------------------------------------------------

const CHARTS = { ttft: "time_to_first_token_seconds", itl: "inter_token_latency_seconds" };
const samples = []; // {ttft: [[bound, count], …], itl: …, points: {…}}

function showLatency(text) {
  const sample = { points: {} };
  for (const [id, name] of Object.entries(CHARTS)) {
    sample[id] = [...text.matchAll(
      new RegExp(`^(?:pdserve_|vllm:)${name}_bucket\\{.*?le="([^"]+)".*\\} (\\S+)$`, "gm"))]
      .map(([, bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), Number(count)]);
    const old = samples.at(-WINDOW)?.[id] ?? samples[0]?.[id];
    sample.points[id] = [0.5, 0.95].map((share) => old && quantile(old, sample[id], share));
  }
  samples.push(sample);
  if (samples.length > KEPT + WINDOW) samples.shift();
  for (const id of Object.keys(CHARTS)) drawChart(id);
}

// As Prometheus reckons it: evenly within a bucket. Null where nothing happened.
function quantile(before, after, share) {
  const counts = after.map(([, count], i) => count - (before[i]?.[1] ?? 0));
  const rank = share * (counts.at(-1) ?? 0);
  if (!(rank > 0)) return null; // nothing, or another router
  const i = counts.findIndex((count) => count >= rank);
  const [low, below] = i ? [after[i - 1][0], counts[i - 1]] : [0, 0];
  if (after[i][0] === Infinity) return low;
  return low + (after[i][0] - low) * (rank - below) / (counts[i] - below);
}

function drawChart(id) {
  const shown = samples.slice(-KEPT).map((sample) => sample.points[id]);
  const top = 1.1 * Math.max(1e-9, ...shown.flat().map((value) => value ?? 0));
  const line = (which) => {
    let d = "", last = null;
    shown.forEach((point, i) => {
      const value = point[which];
      const x = KEPT - shown.length + i, y = 100 - 100 * (value ?? 0) / top;
      if (value != null) d += `${last == null ? "M" : "L"} ${x} ${y} `;
      last = value;
    });
    return drawn("path", { d, class: which ? "p95" : "p50" });
  };
  const [half, most] = shown.at(-1).map((value) => (value == null ? "–" : seconds(value)));
  $(`${id}-now`).textContent = `${half}, 95 %: ${most}`;
  $(id).setAttribute("viewBox", `0 0 ${KEPT} 100`);
  $(id).setAttribute("preserveAspectRatio", "none");
  $(id).setAttribute("aria-label", `now half within ${half}, 95 percent within ${most}`);
  $(id).replaceChildren(line(0), line(1));
}

// ---- looking again and again ---------------------------------------------------------------------

let looking = false;

async function look() {
  if (looking || document.hidden || $("ask-key").open) return;
  looking = true;
  try {
    const signal = AbortSignal.timeout(5 * POLL);
    showCluster(await (await ask("v1/cluster", { signal })).json());
    showLatency(await (await ask("metrics", { signal })).text());
  } catch (error) {
    const why = error instanceof Refused ? "" : "the router does not answer: ";
    setStatus(why + error.message, "bad");
  } finally {
    looking = false;
  }
}

// ---- chat ----------------------------------------------------------------------------------------

let messages = [], answering = null;

async function* events(body) {
  let rest = "";
  for await (const text of pieces(body.pipeThrough(new TextDecoderStream()))) {
    const frames = (rest + text).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: {")) yield JSON.parse(frame.slice(6)); // the last is [DONE]
    }
  }
}

async function* pieces(stream) { // not every browser iterates streams
  const reader = stream.getReader();
  for (let got = await reader.read(); !got.done; got = await reader.read()) yield got.value;
}

async function send(question) {
  const conversation = messages; // another one may begin meanwhile
  const text = element("p", { className: "said" });
  const who = element("span", { className: "who" }, "Model");
  const answer = element("li", { ariaBusy: "true" }, who, text);
  const user = { role: "user", content: question };
  $("answers").append(element("li", {}, element("span", { className: "who" }, "You"),
    element("p", { className: "said" }, question)), answer);
  answering = new AbortController();
  $("send").disabled = !($("stop").disabled = false);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      signal: answering.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        messages: [...conversation, user], stream: true, timeline: true,
        max_tokens: $("max-tokens").valueAsNumber, // an empty field is NaN, which becomes null,
        temperature: $("temperature").valueAsNumber, // which is no value to the server
      }),
    });
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta;
      text.append((delta?.reasoning_content ?? "") + (delta?.content ?? ""));
      if (event.pdserve) answer.append(timeline(event.pdserve.timeline, event.usage));
    }
  } catch (error) {
    const why = error.name === "AbortError" ? "stopped" : error.message;
    answer.append(element("p", { className: "bad", role: "alert" }, why));
  } finally {
    if (text.textContent) conversation.push(user, { role: "assistant", content: text.textContent });
    answer.ariaBusy = "false";
    answering = null;
    $("send").disabled = !($("stop").disabled = true);
  }
}

// Where an answer's time went: its stages, which tile it.
function timeline(line, usage) {
  const { stages } = line;
  const whole = stages.reduce((sum, stage) => sum + stage.seconds, 0);
  const names = [...new Set(stages.map((stage) => stage.name))];
  const colour = (name) => `hsl(${(names.indexOf(name) * 137 + 210) % 360} 55% 50%)`;
  const says = (stage) =>
    `${stage.name.replaceAll("_", " ")} on ${stage.node}: ${seconds(stage.seconds)}`;
  const bar = element("div", { className: "bar", ariaHidden: "true" });
  const legend = element("ul", { className: "legend", ariaLabel: "Where the time went" });
  for (const stage of stages) {
    const part = element("span", { title: says(stage) });
    part.style.flexGrow = stage.seconds / (whole || 1);
    part.style.background = colour(stage.name);
    bar.append(part);
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = colour(stage.name);
    legend.append(element("li", {}, swatch, says(stage)));
  }
  const moved = line.migrations ? `, went on on other nodes ${line.migrations} times` : "";
  return element("figure", { className: "timeline" }, element("figcaption", { className: "quiet" },
    `${usage.completion_tokens} tokens in ${seconds(whole)}, the first after ` +
    `${seconds(line.first_token ?? 0)}; ${bytes(line.transfer_bytes)} of KV handed over, ` +
    `${line.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached${moved}`), bar, legend);
}

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || answering) return;
  $("question").value = "";
  send(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && answering?.abort());
$("stop").addEventListener("click", () => answering?.abort());
$("clear").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  $("answers").replaceChildren();
});

document.addEventListener("visibilitychange", look);
setInterval(look, POLL);
look();
