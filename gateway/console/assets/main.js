// The page: signs in, follows the feed, draws what it tells.

import { byId, h, keyed, setClass, setText } from "./dom.js";
import { drawCharts, makeCharts } from "./charts.js";
import { drawEvents, makeEvents } from "./events.js";
import { Cluster, follow } from "./feed.js";
import { count, seconds, share } from "./format.js";
import { drawPairs } from "./pairs.js";
import { drawRequests, makeRequests } from "./requests.js";
import { makeWaterfall } from "./waterfall.js";
import { drawWorkers, kvShare, makeWorkers } from "./workers.js";

const THEME = "baton-theme";
let cluster = new Cluster();
let stopFollowing = null;
let isDrawing = false;

function draw() {
  if (isDrawing || cluster.news === null) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    const { news, samples } = cluster;
    if (news === null) return;
    drawSummary(news, samples[samples.length - 1]);
    drawCharts(samples);
    drawWorkers(news);
    drawPairs(news);
    drawEvents(cluster.events);
    drawRequests(cluster.requests);
  });
}

function drawSummary(news, sample) {
  const serving = news.workers.filter((worker) => ["ready", "draining"].includes(worker.state));
  const desired = news.pools.reduce((total, pool) => total + pool.desired, 0);
  const ready = news.pools.reduce((total, pool) => total + pool.ready, 0);
  const facts = [
    ["Ready", `${ready} / ${desired}`, ready < desired ? "bad" : ""],
    ["Placed", count(news.num_placements), ""],
    ["Waiting", count(news.num_waiting), news.num_waiting ? "warn" : ""],
    ["Tokens/s", sample ? count(sample.tokens_per_s) : "–", ""],
    ["First token", sample ? seconds(sample.ttft_p50_s) : "–", ""],
    ["KV in use", share(kvShare(serving)), ""],
    ["Gateways", count(news.gateways.length), ""],
  ];
  keyed(byId("summary"), facts, ([name]) => name, ([name]) => {
    const value = h("dd");
    return {
      element: h("div", {}, h("dt", {}, name), value),
      update([, text, state]) {
        setText(value, text);
        setClass(value, state);
      },
    };
  });
}

function setLink(text, isGood) {
  setText(byId("link"), text);
  setClass(byId("link"), `state ${isGood ? "good" : "bad"}`);
}

function enter(needsKey) {
  byId("login").hidden = true;
  byId("cluster").hidden = byId("summary").hidden = false;
  byId("leave").hidden = !needsKey;
  stopFollowing?.();
  stopFollowing = follow({
    onNews(news) {
      cluster.take(news);
      draw();
    },
    onState: setLink,
    onSignedOut: askForKey,
  });
}

function askForKey() {
  stopFollowing?.();
  stopFollowing = null;
  cluster = new Cluster();
  byId("cluster").hidden = byId("summary").hidden = byId("leave").hidden = true;
  setText(byId("link"), "");
  setClass(byId("link"), "");
  byId("login").hidden = false;
  byId("key").focus();
}

async function signIn(event) {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  setText(byId("login-error"), "");
  const answer = await fetch("/console/session", { method: "POST", headers: { Authorization: `Bearer ${key}` } })
    .catch(() => null);
  if (answer?.ok) enter(true);
  else setText(byId("login-error"), answer ? (await answer.json()).error.message : "The gateway does not answer.");
}

async function start() {
  const answer = await fetch("/console/session").catch(() => null);
  if (answer?.ok) enter((await answer.json()).needs_key);
  else if (answer && answer.status < 500) askForKey();
  else {
    setLink("the gateway does not answer", false);
    setTimeout(start, 2000);
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").value = theme;
  localStorage.setItem(THEME, theme);
}

setTheme(localStorage.getItem(THEME) ?? "auto");
byId("theme").addEventListener("change", (event) => setTheme(event.target.value));
byId("login").addEventListener("submit", signIn);
byId("leave").addEventListener("click", async () => {
  await fetch("/console/session", { method: "DELETE" }).catch(() => null);
  askForKey();
});
makeCharts();
makeWorkers();
makeEvents(draw);
makeRequests(draw);
makeWaterfall();
start();
