// Who hands over to whom, over what, how fast by measure, and which pairs are left alone.

import { byId, classes, h, keyed, setClass, setText } from "./dom.js";
import { bytes, rate, share } from "./format.js";

export function drawPairs(news) {
  const table = byId("pairs");
  const decodes = ids(news, "decode", (pair) => pair.decode);
  const prefills = ids(news, "prefill", (pair) => pair.prefill);
  const has = decodes.length > 0 && prefills.length > 0;
  byId("no-pairs").hidden = has;
  table.parentElement.hidden = !has;
  if (!has) return;
  const known = new Map(news.pairs.map((pair) => [`${pair.prefill} ${pair.decode}`, pair]));
  const names = ["from \\ to", ...decodes];
  if (table.names !== names.join(" ")) {
    table.names = names.join(" ");
    table.body = h("tbody");
    table.setAttribute("aria-label", "Pairs: prefill workers by row, decode workers by column");
    const heads = names.map((name) => h("th", { scope: "col" }, name));
    table.replaceChildren(h("thead", {}, h("tr", {}, ...heads)), table.body);
  }
  const rows = prefills.map((prefill) => ({ prefill, pairs: decodes.map((decode) => known.get(`${prefill} ${decode}`)) }));
  keyed(table.body, rows, (row) => row.prefill, () => {
    const name = h("th", { scope: "row" });
    const cells = decodes.map(() => pairCell());
    return {
      element: h("tr", {}, name, ...cells.map((cell) => cell.element)),
      update({ prefill, pairs }) {
        setText(name, prefill);
        cells.forEach((cell, index) => cell.update(pairs[index]));
      },
    };
  });
}

function pairCell() {
  const speed = h("div", { className: "rate" });
  const link = h("div", { className: "muted" });
  const work = h("div", { className: "muted" });
  const state = h("div");
  const element = h("td", {}, speed, link, work, state);
  return {
    element,
    update(pair) {
      const isOpen = pair && pair.circuit !== "" && pair.circuit !== "closed";
      setText(speed, !pair ? "–" : pair.backend ? rate(pair.bytes_per_s) : "no link");
      setText(link, pair && pair.backend ? linkText(pair) : "");
      setText(work, pair ? workText(pair) : "not met yet");
      setText(state, pair && (isOpen || !pair.backend) ? `${isOpen ? "in quarantine" : "unusable"}: ${pair.why}` : "");
      setClass(state, classes("state", "bad"));
      state.hidden = !state.textContent;
      element.dataset.pair = pair ? `${pair.prefill} ${pair.decode}` : "";
    },
  };
}

function linkText(pair) {
  const part = pair.memcpy_bytes_per_s ? `, ${share(pair.bytes_per_s / pair.memcpy_bytes_per_s)} of memcpy` : "";
  return `${[pair.backend, pair.mode, pair.lane].filter(Boolean).join(" · ")}${part}`;
}

function workText(pair) {
  const failed = pair.num_failures ? `, ${pair.num_failures} failed` : "";
  return `${pair.num_handoffs} hand-offs, ${bytes(pair.num_bytes)}${failed}`;
}

function ids(news, role, ofPair) {
  const alive = news.workers.filter((worker) => worker.role === role && worker.state !== "lost");
  const found = [...alive.map((worker) => worker.id), ...news.pairs.map(ofPair)];
  return [...new Set(found)].sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
}
