// Recent requests, newest first, filtered by words; each opens to its timeline.

import { $, ask, element, Refused, seconds } from "./dom.js";
import { timeline } from "./chat.js";

const LIMIT = 100;
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
  $("requests-count").textContent = `${found.length} of ${listed.length}`;
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

const matches = (one, word) => [one.id, one.request_id, one.status, one.error?.code ?? "",
  one.error?.message ?? "", ...one.nodes].some((text) => text.toLowerCase().includes(word));

function row(one, old) {
  const tone = { failed: "bad", running: "warn" }[one.status] ?? "good";
  const cells = [
    new Date(1000 * one.created).toLocaleTimeString(), one.request_id,
    element("span", { className: tone, title: one.error?.message ?? "" }, one.error?.code ?? one.status),
    String(one.prompt_tokens), String(one.completion_tokens),
    one.first_token == null ? "–" : seconds(one.first_token), seconds(one.seconds),
    one.nodes.join(", ") || "–",
  ];
  const made = old ?? element("tr", { tabIndex: 0 });
  made.dataset.id = one.id;
  made.replaceChildren(...cells.map((cell) => element("td", {}, cell)));
  made.onclick = () => open(one);
  made.onkeydown = (event) => event.key === "Enter" && open(one);
  return made;
}

async function open(one) {
  $("request-title").textContent = one.request_id;
  const found = (await (await ask(`v1/timelines/${encodeURIComponent(one.id)}`)).json()).data;
  $("request-parts").replaceChildren(...found.map((part) => element("div", {},
    part.error ? element("p", { className: "bad" }, `${part.error.code}: ${part.error.message}`) : "",
    timeline(part.timeline, part))));
  $("request").showModal();
}

$("filter").addEventListener("input", draw);
$("request-close").addEventListener("click", () => $("request").close());
