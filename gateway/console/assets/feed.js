// What is known of the cluster: the last news whole, and what was told bit by bit, bounded.

const MAX_REQUESTS = 1000;
const MAX_EVENTS = 500;
const SAMPLES_MS = 15 * 60 * 1000;
const RATE_MS = 1500;

export class Cluster {
  constructor() {
    this.news = null;
    this.events = new Map();
    this.requests = [];
    this.samples = [];
    this.rates = new Map();
  }

  take(news) {
    const now = Date.now();
    if (news.is_first) {
      this.events = new Map();
      this.requests = [];
      this.samples = [];
    }
    this.news = news;
    for (const event of news.events) {
      this.events.delete(event.number);
      this.events.set(event.number, { ...event, at: now - 1000 * event.age_s });
    }
    while (this.events.size > MAX_EVENTS) this.events.delete(this.events.keys().next().value);
    for (const request of news.requests) this.requests.push({ ...request, at: now - 1000 * request.age_s });
    this.requests.splice(0, this.requests.length - MAX_REQUESTS);
    for (const sample of news.samples) this.samples.push({ ...sample, at: now - 1000 * sample.age_s });
    while (this.samples.length && this.samples[0].at < now - SAMPLES_MS) this.samples.shift();
    this.#measure(news.workers, now);
  }

  // Rates of each worker, over the time between two looks at its counters.
  #measure(workers, now) {
    const kept = new Map();
    for (const worker of workers) {
      const key = `${worker.id} ${worker.incarnation}`;
      const before = this.rates.get(key);
      const totals = [worker.tokens_generated, worker.prompt_tokens_computed, worker.busy_s];
      if (before && now - before.at < RATE_MS) kept.set(key, before);
      else {
        const passed = before ? (now - before.at) / 1000 : 0;
        const [answer, prompt, busy] = totals.map((total, index) =>
          before ? Math.max(0, total - before.totals[index]) / passed : 0);
        kept.set(key, { at: now, totals, answer, prompt, busy: Math.min(1, busy) });
      }
      Object.assign(worker, { rates: kept.get(key) });
    }
    this.rates = kept;
  }
}

// Follows the feed until `close`. `onState(text, isGood)` says how the connection is.
export function follow({ onNews, onState, onSignedOut }) {
  let source = null;
  let timer = null;
  let isClosed = false;

  function open() {
    source = new EventSource("/console/feed");
    source.addEventListener("news", (message) => {
      onState("live", true);
      onNews(JSON.parse(message.data));
    });
    source.addEventListener("away", (message) => onState(`router away: ${JSON.parse(message.data).reason}`, false));
    source.addEventListener("error", async () => {
      onState("reconnecting", false);
      if (source.readyState !== EventSource.CLOSED || isClosed) return;
      // The browser does not say why: the session may be over, or the gateway.
      const answer = await fetch("/console/session").catch(() => null);
      if (isClosed) return;
      if (answer && [401, 403].includes(answer.status)) onSignedOut();
      else timer = setTimeout(open, 1000);
    });
  }

  open();
  return function close() {
    isClosed = true;
    clearTimeout(timer);
    source.close();
  };
}
