// Where a request's time went: a row for each stage, in order, as `pdserve trace` shows them. The
// style sheet has the colour of each stage.

import { bytes, element, percent, seconds } from "./dom.js";

const PATHS = {
  transferred: "KV transferred from a prefill node", local: "computed by the node that answers",
  stand_in: "computed by the decode node, for lack of a prefill node",
};
const MIN = 0.4; // percent of the width, which the shortest bar has

export const pathOf = (path) => PATHS[path] ?? path;
const words = (name) => name.replaceAll("_", " ");

// `line`: the timeline. `about`: token counts and, from the list of requests, how it ended.
export function timeline(line, about) {
  const { stages } = line;
  const whole = stages.reduce((sum, stage) => sum + stage.seconds, 0) || 1;
  const rows = stages.map((stage) => {
    const bar = element("span", { className: `stage stage-${stage.name}` });
    bar.style.marginInlineStart = `${Math.min(100 - MIN, 100 * stage.start / whole)}%`;
    bar.style.inlineSize = `${Math.max(MIN, 100 * stage.seconds / whole)}%`;
    bar.title = `${words(stage.name)} on ${stage.node}: ${seconds(stage.seconds)}`;
    return element("tr", {},
      element("th", { scope: "row" }, words(stage.name)), element("td", {}, stage.node),
      element("td", { className: "number" }, seconds(stage.seconds)),
      element("td", { className: "track" }, bar));
  });
  const head = ["stage", "node", "time", "share of the request"].map((text) =>
    element("th", { scope: "col" }, text));
  return element("figure", { className: "timeline" },
    element("figcaption", { className: "quiet" }, summary(line, about, whole)),
    element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Stages" },
      element("table", { className: "waterfall" }, element("thead", {}, element("tr", {}, ...head)),
        element("tbody", {}, ...rows))));
}

function summary(line, about, whole) {
  const first = line.first_token == null ? "no token yet" : `the first after ${seconds(line.first_token)}`;
  const parts = [
    `${about.completion_tokens} tokens in ${seconds(whole)}, ${first}`,
    `${line.cached_tokens} of ${about.prompt_tokens} prompt tokens cached`,
  ];
  if (line.path) parts.push(pathOf(line.path));
  if (line.transfer_bytes) parts.push(`${bytes(line.transfer_bytes)} of KV transferred`);
  if (about.tpot != null) parts.push(`TPOT ${seconds(about.tpot)}`);
  if (about.finish_reasons?.length) parts.push(`ended by ${about.finish_reasons.join(", ")}`);
  if (line.migrations) parts.push(`moved to other nodes ${line.migrations} times`);
  return parts.join("; ");
}

// Why each of its nodes got the request; null if it got none.
export function placement(chosen) {
  if (!chosen?.length) return null;
  return element("dl", { className: "placement" }, ...chosen.flatMap(({ role, node, why }) => [
    element("dt", {}, `${role}: ${node}`), element("dd", {}, why || "its policy gives no reason")]));
}
