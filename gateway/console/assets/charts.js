// Four small charts of the last quarter of an hour. One cursor for all: what happened at the same time is read together,
// by pointer or by arrow keys.

import { byId, h, setText, svg } from "./dom.js";
import { count, seconds } from "./format.js";

const WIDTH = 360;
const HEIGHT = 96;
const TOP = 12;
const BOTTOM = 14;
const SPAN_MS = 15 * 60 * 1000;
const GAP_MS = 20_000;

const CHARTS = [
  {
    id: "ttft", title: "Time to first token", format: seconds, least: 0.01,
    lines: [{ name: "p50", of: (s) => s.ttft_p50_s }, { name: "p95", of: (s) => s.ttft_p95_s }],
  },
  {
    id: "itl", title: "Between tokens", format: seconds, least: 0.001,
    lines: [{ name: "p50", of: (s) => s.itl_p50_s }, { name: "p95", of: (s) => s.itl_p95_s }],
  },
  {
    id: "throughput", title: "Tokens per second", format: count, least: 10,
    lines: [{ name: "answer", of: (s) => s.tokens_per_s }, { name: "prompt", of: (s) => s.prompt_tokens_per_s }],
  },
  {
    id: "requests-chart", title: "Requests", format: count, least: 4,
    lines: [{ name: "running", of: (s) => s.num_running }, { name: "waiting", of: (s) => s.num_waiting }],
  },
];
const COLOURS = ["one", "two"];

let samples = [];
let cursorAt = null;
let drawn = [];

export function makeCharts() {
  drawn = CHARTS.map(makeChart);
  byId("charts").replaceChildren(...drawn.map((chart) => chart.element));
}

export function drawCharts(latest) {
  samples = latest;
  draw();
}

function draw() {
  const now = Date.now();
  for (const chart of drawn) chart.draw(now);
}

function makeChart({ id, title, format, least, lines }) {
  const values = lines.map(() => h("b"));
  const when = h("span");
  const now = h("span", { className: "now" }, when,
    ...lines.flatMap(({ name }, index) => [h("span", { className: `key ${COLOURS[index]}` }), `${name} `, values[index]]));
  const paths = lines.map((_, index) => svg("path", { class: `line ${COLOURS[index]}` }));
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  const picture = svg("svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: TOP, y2: TOP }),
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    ...paths, cursor);
  const scale = h("span", { className: "muted" });
  const element = h("div", { className: "chart", id, tabindex: "0", role: "group" },
    h("div", { className: "head" }, h("h2", {}, title), now),
    picture,
    h("div", { className: "head now", "aria-hidden": "true" }, h("span", {}, "15 min ago"), scale, h("span", {}, "now")));

  function shown() {
    if (cursorAt === null) return samples[samples.length - 1];
    return samples.reduce((best, one) =>
      Math.abs(one.at - cursorAt) < Math.abs(best.at - cursorAt) ? one : best, samples[0]);
  }

  function point(event) {
    const { left, width } = picture.getBoundingClientRect();
    cursorAt = Date.now() - SPAN_MS * (1 - (event.clientX - left) / width);
    draw();
  }

  function leave() {
    cursorAt = null;
    draw();
  }

  element.addEventListener("pointermove", point);
  element.addEventListener("pointerleave", leave);
  element.addEventListener("blur", leave);
  element.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !samples.length) return;
    event.preventDefault();
    const at = samples.indexOf(shown()) + step;
    cursorAt = at >= samples.length - 1 ? null : samples[Math.max(0, at)].at;
    draw();
  });

  return {
    element,
    draw(time) {
      const highest = Math.max(least, ...samples.flatMap((s) => lines.map(({ of }) => of(s) ?? 0)));
      const limit = roundUp(highest);
      const x = (at) => WIDTH * (1 - (time - at) / SPAN_MS);
      const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value / limit);
      lines.forEach(({ of }, index) => paths[index].setAttribute("d", pathOf(of, x, y)));
      setText(scale, `up to ${format(limit)}`);
      const sample = shown();
      lines.forEach(({ of }, index) => setText(values[index], sample ? format(of(sample)) : "–"));
      const isThen = cursorAt !== null && sample;
      setText(when, isThen ? new Date(sample.at).toLocaleTimeString(undefined, { hour12: false }) : "");
      cursor.setAttribute("visibility", isThen ? "visible" : "hidden");
      if (isThen) ["x1", "x2"].forEach((name) => cursor.setAttribute(name, x(sample.at).toFixed(1)));
      const told = lines.map(({ name, of }) => `${name} ${sample ? format(of(sample)) : "unknown"}`).join(", ");
      element.setAttribute("aria-label", `${title}: ${told}. Arrow keys go back in time.`);
    },
  };
}

// Lines break where nothing was measured for a while: no value is made up in between.
function pathOf(of, x, y) {
  let path = "";
  let last = null;
  for (const sample of samples) {
    const value = of(sample);
    if (value === null || value === undefined) continue;
    const isNew = last === null || sample.at - last > GAP_MS;
    path += `${isNew ? "M" : "L"}${x(sample.at).toFixed(1)} ${y(value).toFixed(1)}`;
    if (isNew) path += "h0.01";
    last = sample.at;
  }
  return path;
}

function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value);
}
