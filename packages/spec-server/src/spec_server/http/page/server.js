// Talks to the server this page came from, and to nothing else.

const STREAM_ENDED = "The connection ended before the answer was complete.";

/** What the server answered instead of data, or that it did not answer. */
class Refusal extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

class Server {
  /** @param {Store} store keeps the key for as long as the tab is open */
  constructor(store) {
    const folder = location.pathname.endsWith("/") ? location.pathname : `${location.pathname}/`;
    this.base = new URL(folder, location.origin);
    this.store = store;
  }

  get key() {
    return this.store.get("key", "");
  }

  set key(value) {
    this.store.set("key", value);
  }

  /** The card of the model that is served. */
  async model() {
    return (await (await this.ask("v1/models")).json()).data[0];
  }

  async metrics() {
    return metricsOf(await (await this.ask("metrics")).text());
  }

  /** The events of a chat completion, as they arrive. */
  async *chat(body, signal) {
    const response = await this.ask("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.message, 0, event.error.code);
      yield event;
    }
    throw new Refusal(STREAM_ENDED);
  }

  /** A response that is data; everything else becomes a Refusal. */
  async ask(path, options = {}) {
    const headers = options.body ? { "Content-Type": "application/json" } : {};
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(new URL(path, this.base), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal("The server cannot be reached. Is it still running?");
    }
    if (!response.ok) throw await refusalOf(response);
    return response;
  }
}

/** The envelope of an error, or its status where there is none (a proxy's page, for instance). */
async function refusalOf(response) {
  try {
    const { error } = await response.json();
    return new Refusal(error.message, response.status, error.code);
  } catch {
    return new Refusal(`The server answered with status ${response.status}.`, response.status);
  }
}

/** The data of server-sent events; comments are dropped. */
async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const events = rest.split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
      if (done) return;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(STREAM_ENDED);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Prometheus text to what the page shows. */
function metricsOf(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = /^(\w+(?:\{[^}]*\})?) (\S+)/.exec(line);
    if (found) values.set(found[1], Number(found[2]));
  }
  const of = (name) => values.get(`spec_${name}`) ?? 0;
  const positions = [];
  for (let slot = 0; ; slot += 1) {
    const count = values.get(`spec_decode_num_accepted_tokens_per_pos_total{position="${slot}"}`);
    if (count === undefined) break;
    positions.push(count);
  }
  return {
    at: performance.now() / 1000,
    running: of("num_requests_running"),
    waiting: of("num_requests_waiting"),
    drafts: of("decode_num_drafts_total"),
    accepted: of("decode_num_accepted_tokens_total"),
    positions,
    written: of("generation_tokens_total"),
    cacheQueries: of("prefix_cache_queries_total"),
    cacheHits: of("prefix_cache_hits_total"),
    cacheQueryTokens: of("prefix_cache_query_tokens_total"),
    cacheHitTokens: of("prefix_cache_hit_tokens_total"),
  };
}

/** Values that live as long as the tab does; apart from those of other pages of this origin. */
class Store {
  constructor() {
    this.prefix = `spec ${location.pathname} `;
    this.values = new Map();
  }

  get(name, otherwise) {
    if (this.values.has(name)) return this.values.get(name);
    try {
      return JSON.parse(sessionStorage.getItem(this.prefix + name)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  /** Where the tab's storage is full or switched off, a reload forgets the value. */
  set(name, value) {
    this.values.set(name, value);
    try {
      sessionStorage.setItem(this.prefix + name, JSON.stringify(value));
    } catch {
      sessionStorage.removeItem(this.prefix + name);
    }
  }
}
