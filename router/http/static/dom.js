// Elements, readable numbers, and requests to the router. Text of nodes, the model or errors becomes
// text nodes, never markup; the page's policy (router/http/info.py) would not run it either.

const KEY = "pdserve-api-key";
export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function drawn(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// ---- requests to the router: paths are relative, because a proxy may add a prefix ----------------

export class Refused extends Error {}

let clientsKey; // a key that may not see the cluster

export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const why = body?.error?.message ?? `${response.status} ${response.statusText}`;
  if (key === sessionStorage.getItem(KEY)) {
    if (response.status === 401) askForKey(key && "The server does not know this key.");
    // Once for each key: the chat works without an operator's key.
    if (response.status === 403 && clientsKey !== key) askForKey(why);
    if (response.status === 403) clientsKey = key;
  }
  throw new Refused(why);
}

function askForKey(why) {
  if ($("ask-key").open) return;
  if (why) $("key-why").textContent = why;
  $("ask-key").showModal();
}

export function onKey(then) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value.trim());
    $("key").value = "";
    $("ask-key").close();
    then();
  });
}

// ---- numbers -------------------------------------------------------------------------------------

export const number = (value, digits = 3) => String(Number(value.toPrecision(digits)));
export const percent = (share) => `${Math.round(100 * share)} %`;

export function seconds(value) {
  if (!value) return "0 s";
  if (value >= 1) return `${number(value)} s`;
  return value >= 1e-3 ? `${number(value * 1e3)} ms` : `${number(value * 1e6)} µs`;
}

export function duration(value) {
  const [days, hours, minutes] = [86400, 3600, 60].map((unit) => Math.floor(value / unit));
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(value)} s`;
}

export function bytes(value) {
  const unit = Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${number(value / 1000 ** unit)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}
