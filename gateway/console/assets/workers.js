// Pools and their workers: who is there, in which life, how much it does and how full its KV memory is.

import { byId, classes, h, keyed, rowOf, setClass, setText, tableOf } from "./dom.js";
import { bytes, count, seconds, share } from "./format.js";

const KINDS = ["in_use", "leased", "custody", "cached"];
export const STATE_CLASS = { ready: "good", starting: "warn", draining: "warn", suspect: "bad", lost: "bad" };

const COLUMNS = [
  { title: "Worker", isHead: true, show: (w) => w.id },
  { title: "State", part: statePart },
  { title: "Running", number: true, show: (w) => `${w.num_running} / ${w.max_sequences}` },
  { title: "Waiting", number: true, show: (w) => w.num_waiting },
  { title: "Busy", part: () => meterPart((w) => [["use", w.rates.busy]], (w) => share(w.rates.busy)) },
  { title: "Tokens/s", number: true, show: (w) => count(w.role === "prefill" ? w.rates.prompt : w.rates.answer) },
  { title: "KV in use", part: () => meterPart(kvParts, kvText) },
  { title: "Leases", number: true, wide: true, show: (w) => (w.role === "prefill" ? leases(w) : "–") },
  { title: "Transfers", number: true, wide: true, show: (w) => (w.role === "prefill" ? "–" : w.num_transfers) },
  { title: "Incarnation", wide: true, part: monoPart((w) => w.incarnation) },
  { title: "Heartbeat", number: true, wide: true, show: (w) => seconds(w.heartbeat_age_s) },
  { title: "Where", wide: true, show: (w) => `${w.host}:${w.pid}` },
];
let body = null;

export function makeWorkers() {
  body = tableOf(byId("workers"), "Workers by pool", COLUMNS);
}

export function drawWorkers(news) {
  const rows = [];
  for (const pool of news.pools) {
    rows.push({ pool });
    for (const worker of news.workers) {
      if (worker.model === pool.model && worker.role === pool.role) rows.push({ worker });
    }
  }
  keyed(body, rows,
    ({ pool, worker }) => (pool ? `${pool.model} ${pool.role}` : `${worker.id} ${worker.incarnation}`),
    ({ pool }) => (pool ? poolRow() : workerRow()));
}

function poolRow() {
  const name = h("span");
  const size = h("span");
  const problem = h("span", { className: "bad" });
  const element = h("tr", { className: "pool" },
    h("th", { scope: "colgroup", colspan: COLUMNS.length }, name, " ", size, " ", problem));
  return {
    element,
    update({ pool }) {
      setText(name, `${pool.role} · ${pool.model}`);
      setText(size, `${pool.ready} of ${pool.desired} ready`);
      setClass(size, pool.ready >= pool.desired ? "muted" : "warn");
      setText(problem, pool.problem);
    },
  };
}

function workerRow() {
  const row = rowOf(COLUMNS);
  return {
    element: row.element,
    update({ worker }) {
      row.element.dataset.worker = worker.id;
      row.element.dataset.state = worker.state;
      row.update(worker);
    },
  };
}

function statePart() {
  const word = h("span");
  const more = h("span", { className: "muted" });
  return {
    element: h("span", {}, word, more),
    update(worker) {
      setText(word, worker.state);
      setClass(word, classes("state", STATE_CLASS[worker.state]));
      setText(more, [
        worker.next_role && ` to ${worker.next_role}`,
        worker.drain_left_s !== null && ` ${seconds(worker.drain_left_s)} left`,
        worker.is_mock && " mock",
      ].filter(Boolean).join(","));
    },
  };
}

function meterPart(partsOf, textOf) {
  const bar = h("span", { className: "bar", "aria-hidden": "true" });
  const text = h("span");
  return {
    element: h("span", { className: "meter" }, bar, text),
    update(worker) {
      keyed(bar, partsOf(worker), ([name]) => name, ([name]) => {
        const element = h("i", { className: name });
        return { element, update: ([, part]) => { element.style.width = `${100 * part}%`; } };
      });
      setText(text, textOf(worker));
      bar.title = partsOf(worker).map(([name, part]) => `${name.replace("_", " ")} ${share(part)}`).join(", ");
    },
  };
}

function monoPart(textOf) {
  return () => {
    const element = h("span", { className: "mono muted" });
    return { element, update: (worker) => setText(element, textOf(worker)) };
  };
}

const kvParts = ({ blocks }) => KINDS.map((kind) => [kind, blocks[kind] / blocks.total]);
const usedShare = ({ blocks }) => (blocks.in_use + blocks.leased + blocks.custody) / blocks.total;
const kvText = (w) => `${share(usedShare(w))} of ${bytes(w.blocks.total * w.block_bytes)}`;
const leases = (w) => (w.num_leases ? `${w.num_leases} · ${bytes(w.held_bytes)}` : "0");

// Of all workers that serve: for the summary.
export function kvShare(workers) {
  const sum = (of) => workers.reduce((total, worker) => total + of(worker), 0);
  const total = sum(({ blocks }) => blocks.total);
  return total ? sum(({ blocks }) => blocks.in_use + blocks.leased + blocks.custody) / total : 0;
}
