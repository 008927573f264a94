// Recent requests, newest first, filtered by words; each opens to its timeline.

import { $, ask, element, Refused, seconds } from "./dom.js";
import { placement, timeline } from "./timeline.js";

const LIMIT = 100;
const TONES = { failed: "bad", refused: "warn", running: "quiet", finished: "good" };
const PATHS = { transferred: "hand-off", local: "local prefill", stand_in: "stand-in" };
const COLUMNS = ["status", "time", "request", "prompt", "cached", "output", "first token", "TPOT",
  "total", "end", "path", "nodes"];
let listed = [];

export async function showRequests(signal) {
  if (!$("requests-section").open) return;
  try {
    listed = (await (await ask(`v1/timelines?limit=${LIMIT}`, { signal })).json()).data;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    listed = [];
    $("requests-why").textContent = error.message;
    $("requests-why").hidden = false;
    return;
  }
  $("requests-why").hidden = true;
  draw();
}

function draw() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = listed.filter((one) => words.every((word) => matches(one, word)));
  $("requests-count").textContent = listed.length ? `${found.length} of ${listed.length}` : "no requests yet";
  const body = $("requests"), rows = new Map([...body.children].map((old) => [old.dataset.id, old]));
  let next = body.firstChild;
  for (const one of found) { // a row that keeps its place keeps the focus
    const made = row(one, rows.get(one.id));
    if (made === next) next = next.nextSibling;
    else body.insertBefore(made, next);
  }
  const kept = new Set(found.map((one) => one.id));
  for (const [id, old] of rows) if (!kept.has(id)) old.remove();
}

const matches = (one, word) => [one.id, one.request_id, one.status, statusOf(one), one.path,
  PATHS[one.path] ?? "", one.error?.message ?? "", ...one.finish_reasons, ...one.nodes]
  .some((text) => text.toLowerCase().includes(word));

const statusOf = (one) => (one.error ? `${one.http_status} ${one.error.code}` : one.status);
const time = (value) => (value == null ? "–" : seconds(value));

// The path of the prompt's KV, from node to node.
function nodesOf(one) {
  const { prefill_node: prefill, decode_node: decode } = one;
  if (!decode) return one.nodes.join(", ") || "–";
  return prefill && prefill !== decode ? `${prefill} → ${decode}` : decode;
}

function row(one, old) {
  const status = element("span", { className: TONES[one.status] ?? "" }, statusOf(one));
  status.title = one.error?.message ?? "";
  const moved = one.migrations ? `, moved ${one.migrations}×` : "";
  const cells = [
    status, new Date(1000 * one.created).toLocaleTimeString(), one.request_id,
    String(one.prompt_tokens || "–"), String(one.prompt_tokens ? one.cached_tokens : "–"),
    String(one.completion_tokens), time(one.first_token), time(one.tpot), seconds(one.seconds),
    [...new Set(one.finish_reasons)].join(", ") || "–", (PATHS[one.path] ?? "–") + moved, nodesOf(one),
  ];
  const made = old ?? element("tr", { tabIndex: 0 });
  made.dataset.id = one.id;
  made.replaceChildren(...cells.map((cell, i) => {
    const found = element("td", {}, cell);
    found.dataset.name = COLUMNS[i]; // where there is no room for a table
    return found;
  }));
  made.onclick = () => open(one);
  made.onkeydown = (event) => event.key === "Enter" && open(one);
  return made;
}

async function open(one) {
  $("request-title").textContent = one.request_id;
  const found = (await (await ask(`v1/timelines/${encodeURIComponent(one.id)}`)).json()).data;
  $("request-parts").replaceChildren(...found.map((part) => element("div", {},
    part.error ? element("p", { className: "bad" }, `${statusOf(part)}: ${part.error.message}`) : "",
    timeline(part.timeline, part), placement(part.chosen) ?? "")));
  $("request").showModal();
}

$("filter").addEventListener("input", draw);
$("request-close").addEventListener("click", () => $("request").close());
