// Requests that have ended: the latest, the slowest, the failed. Each opens its waterfall.

import { byId, classes, h, keyed, rowOf, setClass, setText, tableOf } from "./dom.js";
import { ago, count, seconds } from "./format.js";

const MAX_ROWS = 50;
const ANSWERED = new Set(["stop", "length"]);
const ORDERS = {
  recent: (requests) => [...requests].reverse(),
  ttft: (requests) => descending(requests, (request) => request.ttft_s ?? 0),
  duration: (requests) => descending(requests, (request) => request.duration_s),
  failed: (requests) => requests.filter((request) => !ANSWERED.has(request.outcome)).reverse(),
};
const COLUMNS = [
  { title: "Request", isHead: true, part: openPart },
  { title: "Ended", show: (r) => ago(r.at) },
  { title: "Outcome", part: outcomePart },
  { title: "First token", number: true, show: (r) => seconds(r.ttft_s) },
  { title: "Per token", number: true, wide: true, show: (r) => seconds(r.itl_s) },
  { title: "Duration", number: true, show: (r) => seconds(r.duration_s) },
  { title: "Prompt", number: true, wide: true, show: (r) => promptText(r) },
  { title: "Answer", number: true, wide: true, show: (r) => count(r.num_completion_tokens) },
  { title: "Path", wide: true, show: (r) => pathText(r) },
  { title: "Attempts", number: true, wide: true, show: (r) => r.attempts },
  { title: "Model", wide: true, show: (r) => r.model },
];
let body = null;

export const isAnswered = (outcome) => ANSWERED.has(outcome);

export function makeRequests(onChange) {
  body = tableOf(byId("requests"), "Requests that have ended", COLUMNS);
  byId("order").addEventListener("change", onChange);
}

export function drawRequests(requests) {
  const shown = ORDERS[byId("order").value](requests).slice(0, MAX_ROWS);
  byId("no-requests").hidden = shown.length > 0;
  byId("requests").parentElement.hidden = shown.length === 0;
  keyed(body, shown, (request) => request.id, () => rowOf(COLUMNS));
}

export function pathText({ mode, prefill, decode }) {
  if (!mode) return "not placed";
  return mode === "split" ? `${prefill} > ${decode}` : `${decode}, local`;
}

function openPart(request) {
  const element = h("button", { type: "button", className: "link", "aria-haspopup": "dialog" }, request.id);
  element.addEventListener("click", () => { location.hash = `request=${encodeURIComponent(request.id)}`; });
  return { element, update() {} };
}

function outcomePart() {
  const element = h("span");
  return {
    element,
    update({ outcome }) {
      setText(element, outcome);
      setClass(element, classes(!ANSWERED.has(outcome) && "bad") ?? "");
    },
  };
}

function promptText(request) {
  const cached = request.num_cached_tokens ? ` (${count(request.num_cached_tokens)} cached)` : "";
  return `${count(request.num_prompt_tokens)}${cached}`;
}

function descending(requests, of) {
  return [...requests].sort((one, other) => of(other) - of(one));
}
