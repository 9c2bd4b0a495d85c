// Figures of an answer and of the server. What was not measured is not shown as a number.

/** With more positions there is no room for a number above each bar. */
const WITH_NUMBERS = 8;
const NOT_MEASURED = "not measured";

/** What an answer's last chunks say about it. */
function figuresOf(seen, usage) {
  return {
    tokens: usage.completion_tokens,
    promptTokens: usage.prompt_tokens,
    cached: usage.prompt_tokens_details.cached_tokens,
    rate: seen.tokens_per_second,
    firstSeconds: seen.ttft_seconds,
    drafted: seen.drafted,
    mean: seen.mean_accept_length,
    shares: sharesOf(seen.round_accepts, seen.accept_by_position.length),
    maxDraft: seen.max_draft,
    fallbacks: seen.fallbacks,
    plain: null,
  };
}

/** For each position, the share of rounds whose guess there was accepted. */
function sharesOf(accepts, positions) {
  const kept = (slot) => accepts.filter((count) => count > slot).length;
  return Array.from({ length: positions }, (_, slot) => kept(slot) / accepts.length);
}

/** The same from the server's counters, between two looks at them. */
function sharesBetween(before, now) {
  const drafts = now.drafts - (before?.drafts ?? 0);
  if (!(drafts > 0)) return [];
  return now.positions.map((count, slot) => (count - (before?.positions[slot] ?? 0)) / drafts);
}

function number(value, digits = 0) {
  return value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function rateText(rate) {
  return number(rate, rate < 20 ? 1 : 0);
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

/** Bars, which say the same in words to a screen reader. With legends, the numbers are written too. */
function barsOf(shares, { legends = false } = {}) {
  const words = shares.map((share, slot) => `position ${slot + 1}: ${percent(share)}`);
  const bars = element("div", { className: "bars", title: words.join("\n") });
  bars.setAttribute("role", "img");
  bars.setAttribute("aria-label", `Accepted guesses, ${words.join(", ")}`);
  shares.forEach((share, slot) => {
    const fill = element("span", { className: "fill" });
    fill.style.height = `${share > 0 ? Math.max(2, 100 * share) : 0}%`;
    const column = element("span", { className: "column" }, element("span", { className: "bar" }, fill));
    if (legends && shares.length <= WITH_NUMBERS) column.prepend(element("span", {}, percent(share)));
    if (legends) column.append(element("span", {}, String(slot + 1)));
    bars.append(column);
  });
  return bars;
}

/** The line below an answer. */
function summaryOf(figures, ending) {
  const parts = [`${number(figures.tokens)} tokens`, `${rateText(figures.rate)} tokens/s`];
  if (figures.drafted) parts.push(`${number(figures.mean, 1)} a round`);
  if (figures.plain?.rate) parts.push(`${number(figures.rate / figures.plain.rate, 1)}× plain`);
  if (figures.plain?.measuring) parts.push("measuring plain decoding …");
  if (figures.cached) parts.push(`${number(figures.cached)} of ${number(figures.promptTokens)} prompt tokens reused`);
  if (ending) parts.push(ending);
  const line = element("footer", {}, ...parts.map((part) => element("span", {}, part)));
  if (figures.drafted) line.prepend(barsOf(figures.shares));
  return line;
}

/** The panel beside the conversation. */
class Panel {
  constructor() {
    this.metrics = null;
    this.began = null;
    this.answering = false;
    this.last = null;
    this.mode = null;
  }

  /** The model's card, as /v1/models gives it. */
  model(card) {
    const { mode, drafter, dtype, fallbacks, default_sampling: sampling } = card.x_spec;
    this.mode = mode;
    put("model", card.id);
    put("mode", mode);
    put("drafter", drafter ? drafter.replace(/\/+$/, "").split("/").at(-1) : "none");
    put("context", `${number(card.max_model_len)} tokens`);
    put("dtype", dtype);
    byId("temperature").placeholder = `${sampling.temperature} (the model's)`;
    byId("max-tokens").placeholder = "what the context has room for";
    byId("compare").disabled = mode === "baseline";
    this.notes(fallbacks);
    this.plain(this.last);
    document.title = `${card.id} · spec`;
  }

  notes(fallbacks) {
    byId("fallbacks").replaceChildren(...fallbacks.map((text) => element("li", {}, text)));
  }

  /** A look at the server's counters. */
  server(now) {
    put("running", number(now.running));
    put("waiting", number(now.waiting));
    const asked = now.cacheQueries > 0;
    put("cache", asked ? `${number(now.cacheHits)} of ${number(now.cacheQueries)} prompts` : "none yet");
    put("reused", asked ? percent(now.cacheHitTokens / now.cacheQueryTokens) : "–");
    const before = this.metrics;
    this.metrics = now;
    if (this.began) this.live(before, now);
    else if (this.answering) this.began = now;
    else if (!this.last) this.acceptance(sharesBetween(null, now), 1 + now.accepted / now.drafts, "since the server started");
  }

  /** While an answer is written: what the server does, other requests included. */
  live(before, now) {
    const shares = sharesBetween(this.began, now);
    if (shares.length) {
      const mean = 1 + (now.accepted - this.began.accepted) / (now.drafts - this.began.drafts);
      this.acceptance(shares, mean, "so far, all requests");
    }
    const written = now.written - before.written;
    if (written > 0) this.speed(written / (now.at - before.at), "now, all requests");
  }

  begin() {
    this.answering = true;
    put("speed-of", "answering");
  }

  /** The exact figures of an answer that has ended; null if it was stopped or refused. */
  end(figures) {
    this.answering = false;
    this.began = null;
    this.last = figures ?? this.last;
    if (!this.last) {
      this.reset();
      return;
    }
    const { rate, drafted, shares, mean, fallbacks } = this.last;
    this.speed(rate, "last finished answer");
    this.acceptance(drafted ? shares : [], mean, "last finished answer");
    this.plain(this.last);
    this.notes(fallbacks);
  }

  reset() {
    this.last = null;
    put("speed", "–");
    put("speed-of", "");
    this.plain(null);
  }

  speed(rate, what) {
    put("speed", rateText(rate));
    put("speed-of", what);
  }

  /** Plain decoding beside this answer, as far as it was measured. */
  plain(figures) {
    const plain = figures?.plain;
    const measured = plain?.rate > 0;
    let text = this.mode === "baseline" ? "this server decodes plainly" : NOT_MEASURED;
    if (plain?.measuring) text = "measuring …";
    if (measured) text = `${rateText(plain.rate)} tokens/s`;
    put("plain", text);
    byId("comparison").hidden = !measured;
    if (!measured) return;
    put("ratio", `${number(figures.rate / plain.rate, 1)}× as fast${plain.shared ? ", other requests ran" : ""}`);
    put("same", plain.same ? "the same" : "differs");
  }

  acceptance(shares, mean, what) {
    const some = shares.length > 0;
    byId("acceptance").replaceChildren(...(some ? [barsOf(shares, { legends: true })] : []));
    put("acceptance-of", some ? what : "");
    put("accepted", some ? `${number(mean, 1)} tokens a round` : this.mode === "baseline" ? "Nothing is drafted." : "No drafts yet.");
  }
}

function byId(id) {
  return document.getElementById(id);
}

function put(id, text) {
  byId(id).textContent = text;
}
