// The page at /ui. It asks the router once a second while the page is visible.

import { $, ask, onKey, Refused } from "./dom.js";
import { setStatus, showCluster } from "./cluster.js";
import { showMetrics } from "./charts.js";
import { showRequests } from "./requests.js";
import "./chat.js";

const POLL = 1000; // ms
let polling = false;

async function poll() {
  if (polling || document.hidden || $("ask-key").open) return;
  polling = true;
  try {
    const signal = AbortSignal.timeout(5 * POLL);
    showCluster(await (await ask("v1/cluster", { signal })).json());
    showMetrics(await (await ask("metrics", { signal })).text());
    await showRequests(signal);
  } catch (error) {
    const why = error instanceof Refused ? "" : "the router does not answer: ";
    setStatus(why + error.message, "bad");
  } finally {
    polling = false;
  }
}

async function showVersion() {
  const found = await (await ask("version")).json();
  $("version").textContent = found.version;
}

onKey(poll);
document.addEventListener("visibilitychange", poll);
setInterval(poll, POLL);
poll();
showVersion().catch(() => {}); // the badge shows that the router does not answer
