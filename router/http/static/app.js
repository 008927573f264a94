// The page at /ui. It asks the router once a second while the page is visible.

import { $, ask, onKey, Refused } from "./dom.js";
import { setStatus, showCluster } from "./cluster.js";
import { showCharts } from "./charts.js";
import { showHistory } from "./history.js";
import { showRequests } from "./requests.js";
import "./chat.js";

const POLL = 1000; // ms
let polling = false;

async function poll() {
  if (polling || document.hidden || $("ask-key").open) return;
  polling = true;
  try {
    const signal = AbortSignal.timeout(5 * POLL);
    await showOperators(signal);
    await showRequests(signal);
    document.body.classList.remove("stale");
  } catch (error) {
    setStatus(`the router does not answer: ${error.message}`, "bad");
    document.body.classList.add("stale"); // the numbers below are old
  } finally {
    polling = false;
  }
}

// Shows what operators may see; a client sees why not, and its own requests.
async function showOperators(signal) {
  try {
    const cluster = await (await ask("v1/cluster", { signal })).json();
    showCluster(cluster);
    showCharts(await showHistory(signal), cluster);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    setStatus(error.message, "bad");
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
