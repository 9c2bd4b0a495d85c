// The conversation on the screen.

/** One question and its answer. */
class Turn {
  /** @param exchange {question, thought, content, ending, figures, refusal}: what is kept of it */
  constructor(log, exchange) {
    this.exchange = exchange;
    this.question = article("question", "You");
    this.question.append(element("p", {}, exchange.question));
    this.answer = article("answer", "Answer");
    this.summary = element("summary", {}, "Thought");
    this.thought = element("div", { className: "thought-text" });
    this.details = element("details", { hidden: true }, this.summary, this.thought);
    this.content = element("div", { className: "markdown" });
    this.below = element("div", { className: "below" });
    this.answer.append(this.details, this.content, this.below);
    this.view = new MarkdownView(this.content);
    this.frame = 0;
    log.append(this.question, this.answer);
    this.show();
  }

  /** Take a chunk's delta in; the screen follows with the next frame. */
  add(delta) {
    this.exchange.thought += delta.reasoning_content ?? "";
    this.exchange.content += delta.content ?? "";
    if (!this.frame) this.frame = requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { thought, content, ending, figures, refusal } = this.exchange;
    this.details.hidden = !thought;
    if (thought) this.thought.textContent = thought.trim();
    this.summary.textContent = content || ending ? "Thought" : "Thinking …";
    this.view.show(content);
    this.answer.classList.toggle("waiting", !ending && !refusal && !content && !thought);
    this.below.replaceChildren();
    if (figures) this.below.append(summaryOf(figures, endingText(ending)));
    else if (ending === "stopped") this.below.append(element("footer", {}, "stopped"));
    if (refusal) this.below.append(refusalNode(refusal));
  }

  /** Offer to ask again. */
  offer(again) {
    const button = element("button", { type: "button", className: "quiet" }, "Try again");
    button.addEventListener("click", again);
    this.below.append(button);
  }

  withdraw() {
    this.below.querySelector("button")?.remove();
  }

  remove() {
    this.question.remove();
    this.answer.remove();
  }
}

function article(name, title) {
  return element("article", { className: name }, element("h2", { className: "unseen" }, title));
}

function refusalNode(text) {
  const made = element("p", { className: "refusal" }, text);
  made.setAttribute("role", "alert");
  return made;
}

function endingText(ending) {
  return { length: "cut off: no tokens left", stopped: "stopped" }[ending] ?? "";
}

/** Keeps the newest text in sight unless the reader has scrolled up. */
class Follower {
  constructor(box) {
    this.box = box;
    this.following = true;
    box.addEventListener("scroll", () => {
      this.following = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
    });
    new MutationObserver(() => this.follow()).observe(box, { childList: true, subtree: true, characterData: true });
    new ResizeObserver(() => this.follow()).observe(box);
  }

  follow() {
    if (this.following) this.box.scrollTop = this.box.scrollHeight;
  }
}
