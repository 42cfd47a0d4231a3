// One request: its stages and the chunks of its KV on a time axis, where each was, and why it was placed there.

import { byId, classes, h } from "./dom.js";
import { bytes, count, seconds, share } from "./format.js";
import { isAnswered, pathText } from "./requests.js";

const COLOURS = {
  route: "router", route_queue: "router", prefill_queue: "prefill", prefill: "prefill", handoff_wait: "moves",
  transfer: "moves", decode_queue: "decode", decode: "decode", retry: "failed", lost: "failed",
};

export function makeWaterfall() {
  const dialog = byId("request");
  dialog.addEventListener("close", () => {
    if (location.hash.startsWith("#request=")) history.replaceState(null, "", location.pathname);
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  addEventListener("hashchange", openHash);
  openHash();
}

export function openHash() {
  const asked = /^#request=(.+)$/.exec(location.hash);
  const dialog = byId("request");
  if (!asked) {
    if (dialog.open) dialog.close();
    return;
  }
  show(decodeURIComponent(asked[1]));
}

async function show(id) {
  const dialog = byId("request");
  fill(dialog, id, h("p", { className: "muted" }, "Asking the router …"));
  if (!dialog.open) dialog.showModal();
  const answer = await fetch(`/console/requests/${encodeURIComponent(id)}`).catch(() => null);
  if (!dialog.open) return;
  if (!answer || !answer.ok) {
    const why = answer ? (await answer.json()).error.message : "the gateway does not answer";
    fill(dialog, id, h("p", { className: "bad" }, why));
    return;
  }
  const { requests } = await answer.json();
  fill(dialog, id, ...requests.flatMap((request) => [facts(request), bars(request), because(request)]));
}

function fill(dialog, id, ...parts) {
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  dialog.replaceChildren(
    h("div", { className: "title" }, h("h2", { id: "request-title" }, "Request ", h("span", { className: "mono" }, id)), close),
    h("div", { className: "body" }, ...parts));
}

function facts(request) {
  const cached = request.num_cached_tokens ? `, ${count(request.num_cached_tokens)} cached` : "";
  const moved = request.transfer_bytes
    ? `${bytes(request.transfer_bytes)} by ${request.transfer_backend}` : "nothing";
  const rows = [
    ["Outcome", h("span", { className: classes(!isAnswered(request.outcome) && "bad") }, request.outcome)],
    ["Duration", seconds(request.duration_s)],
    ["First token", seconds(request.ttft_s)],
    ["Per token", seconds(request.itl_s)],
    ["Prompt", `${count(request.num_prompt_tokens)} tokens${cached}`],
    ["Answer", `${count(request.num_completion_tokens)} tokens`],
    ["Path", pathText(request)],
    ["KV moved", moved],
    ["Attempts", request.attempts],
    ["Model", request.model],
    ["Class", request.workload_class || "–"],
    ["Trace", h("span", { className: "mono" }, request.trace_id || "–")],
  ];
  return h("dl", { className: "facts" }, ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function bars(request) {
  const whole = Math.max(request.duration_s, 1e-6,
    ...request.chunks.map((chunk) => chunk.start_s + chunk.duration_s));
  const rows = request.timeline.map((interval) => barRow({
    kind: "stage", name: interval.stage.replaceAll("_", " "), stage: interval.stage,
    where: interval.worker || placeOf(interval.stage), attempt: request.attempts > 1 ? interval.attempt : 0,
    start: interval.start_s, length: interval.duration_s, colour: COLOURS[interval.stage] ?? "", whole,
    first: request.ttft_s,
  }));
  const chunks = request.chunks.map((chunk, index) => barRow({
    kind: "chunk", stage: "kv", name: `KV chunk ${index + 1}`,
    where: `${chunk.num_blocks} blocks, ${bytes(chunk.num_bytes)}${chunk.is_early ? ", early" : ""}`,
    attempt: request.attempts > 1 ? chunk.attempt : 0, start: chunk.start_s, length: chunk.duration_s,
    colour: classes("moves", chunk.is_early && "early"), whole, first: request.ttft_s,
  }));
  const axis = h("span", { className: "ticks" }, h("span", {}, "0"), h("span", {}, seconds(whole / 2)), h("span", {}, seconds(whole)));
  const table = h("table", { className: "waterfall", "aria-label": "Stages of the request and chunks of its KV" },
    h("thead", {}, h("tr", {},
      h("th", { scope: "col" }, "Stage"), h("th", { scope: "col", className: "wide" }, "Where"),
      h("th", { scope: "col", className: "number wide" }, "Begins"), h("th", { scope: "col", className: "number" }, "Lasts"),
      h("th", { scope: "col", className: "axis" }, axis))),
    h("tbody", {}, ...rows, ...chunks));
  return h("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": "Waterfall" }, table);
}

function barRow({ kind, name, stage, where, attempt, start, length, colour, whole, first }) {
  const bar = h("i", { className: colour });
  bar.style.left = `${(100 * start) / whole}%`;
  bar.style.width = `${(100 * length) / whole}%`;
  const track = h("div", { className: "track", "aria-hidden": "true" }, bar);
  if (first) {
    const mark = h("span", { className: "first", title: "first token" });
    mark.style.left = `${(100 * first) / whole}%`;
    track.append(mark);
  }
  return h("tr", { "data-kind": kind, "data-stage": stage, "data-start": start, "data-duration": length },
    h("th", { scope: "row" }, attempt ? `${name} (attempt ${attempt})` : name),
    h("td", { className: "muted wide" }, where),
    h("td", { className: "number muted wide" }, seconds(start)),
    h("td", { className: "number" }, seconds(length)),
    h("td", { className: "axis" }, track));
}

function placeOf(stage) {
  if (stage.startsWith("route")) return "router";
  return stage === "network" ? "between processes" : "gateway";
}

function because(request) {
  const attempts = request.attempt_records.map((attempt) => {
    const { placement } = attempt;
    const head = `Attempt ${attempt.attempt}, after ${seconds(attempt.started_s)}, ${seconds(attempt.duration_s)} long: `;
    const end = attempt.outcome === "ok" ? "ended well" : `${attempt.outcome}. ${attempt.message}`;
    if (!placement) return h("li", {}, `${head}not placed; ${end}`);
    const path = [placement.prefill, placement.decode].filter(Boolean).map((worker) => worker.id).join(" > ");
    const { prediction } = placement;
    const lines = [
      `because ${placement.why || placement.reason}`,
      placement.runner_up && `second best: ${placement.runner_up}, at a cost of ${seconds(placement.runner_up_prediction.cost_s)}`
        + ` against ${seconds(prediction.cost_s)}`,
      prediction.ttft_s > 0 && `expected the first token after ${seconds(prediction.ttft_s)}; it came after ${seconds(request.ttft_s)}`,
      prediction.num_cached_tokens > 0 && `expected ${share(prediction.num_cached_tokens / request.num_prompt_tokens)} of the prompt to be cached`,
      placement.queue_s > 0 && `waited ${seconds(placement.queue_s)} at the router`,
    ].filter(Boolean);
    return h("li", {}, `${head}${placement.mode} on ${path}, ${end}`, h("ul", {}, ...lines.map((line) => h("li", {}, line))));
  });
  return h("div", { className: "because" }, h("h3", {}, "Why it went there"), h("ol", {}, ...attempts));
}
