// What happened, the latest first.

import { byId, classes, h, keyed, rowOf, setClass, setText, tableOf } from "./dom.js";
import { clock } from "./format.js";

const CLASSES = {
  death: "bad", quarantine: "bad", suspect: "bad", shed: "warn", drain: "warn", flip: "warn", joined: "good",
  recovered: "good",
};
const KINDS = ["joined", "suspect", "recovered", "death", "left", "scale", "drain", "flip", "quarantine", "shed"];
const COLUMNS = [
  { title: "When", show: (event) => clock(event.at) },
  { title: "What", part: kindPart },
  { title: "Who", show: (event) => event.subject },
  { title: "How", text: true, show: (event) => (event.count > 1 ? `${event.text} (${event.count} times)` : event.text) },
];
let body = null;

export function makeEvents(onChange) {
  body = tableOf(byId("events"), "Events, the latest first", COLUMNS);
  byId("event-kind").append(...KINDS.map((kind) => h("option", { value: kind }, kind)));
  byId("event-kind").addEventListener("change", onChange);
}

export function drawEvents(events) {
  const kind = byId("event-kind").value;
  const shown = [...events.values()].reverse().filter((event) => !kind || event.kind === kind);
  byId("no-events").hidden = shown.length > 0;
  byId("events").parentElement.hidden = shown.length === 0;
  keyed(body, shown, (event) => event.number, () => rowOf(COLUMNS));
}

function kindPart() {
  const element = h("span");
  return {
    element,
    update(event) {
      setText(element, event.kind);
      setClass(element, classes(CLASSES[event.kind]) ?? "");
    },
  };
}
