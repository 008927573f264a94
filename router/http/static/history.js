// The last two minutes and the last events, which the router keeps: a page that is opened late, or
// loaded again, shows them, too.

import { $, ask, element } from "./dom.js";

export const SECONDS = 120, WINDOW = 10; // of a chart, and that one point covers
const KEPT = SECONDS + WINDOW, MAX_EVENTS = 120;
const AGAIN = 5; // seconds that are asked for again: workers of a router may report late
const samples = new Map(); // by second
const events = new Map(); // by time and text
let bounds = {}, served = 0, newest = 0;

// Returns {bounds, served, windowOf}: the histograms' buckets, the requests since the router's start,
// and the samples of one point.
export async function showHistory(signal) {
  const since = Math.max(0, newest - AGAIN);
  const found = await (await ask(`v1/cluster/history?since=${since}`, { signal })).json();
  const last = found.samples.at(-1)?.at ?? newest;
  if (last + KEPT < newest) samples.clear(); // another router, whose clock is behind
  for (const each of found.samples) samples.set(each.at, each);
  newest = last;
  for (const at of samples.keys()) if (at <= newest - KEPT) samples.delete(at);
  ({ bounds, served } = found);
  showEvents(found.events);
  return { bounds, served, windowOf };
}

// Returns the samples of the seconds up to `back` seconds ago that one point covers.
function windowOf(back) {
  const found = [];
  for (let at = newest - back - WINDOW + 1; at <= newest - back; at++) {
    if (samples.has(at)) found.push(samples.get(at));
  }
  return found;
}

function showEvents(found) {
  for (const each of found) {
    const key = `${each.at} ${each.text}`;
    if (events.has(key)) continue;
    const time = new Date(1000 * each.at).toLocaleTimeString();
    const tone = ["good", "warn", "bad"].includes(each.tone) ? each.tone : "quiet";
    const item = element("li", {}, `${time} `, element("span", { className: tone }, each.text));
    events.set(key, item);
    $("events").querySelector(".none")?.remove();
    $("events").prepend(item);
  }
  for (const [key, item] of events) {
    if (events.size <= MAX_EVENTS) break;
    events.delete(key);
    item.remove();
  }
}
