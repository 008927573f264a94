// The page at /ui: asks the router once a second while the page can be seen.

import { $, ask, onKey, Refused } from "./dom.js";
import { setStatus, showCluster } from "./cluster.js";
import { showMetrics } from "./charts.js";
import { showRequests } from "./requests.js";
import "./chat.js";

const POLL = 1000; // ms
let looking = false;

async function look() {
  if (looking || document.hidden || $("ask-key").open) return;
  looking = true;
  try {
    const signal = AbortSignal.timeout(5 * POLL);
    showCluster(await (await ask("v1/cluster", { signal })).json());
    showMetrics(await (await ask("metrics", { signal })).text());
    await showRequests(signal);
  } catch (error) {
    const why = error instanceof Refused ? "" : "the router does not answer: ";
    setStatus(why + error.message, "bad");
  } finally {
    looking = false;
  }
}

async function showVersion() {
  const found = await (await ask("version")).json();
  $("version").textContent = found.version;
}

onKey(look);
document.addEventListener("visibilitychange", look);
setInterval(look, POLL);
look();
showVersion().catch(() => {}); // the badge says that the router does not answer
