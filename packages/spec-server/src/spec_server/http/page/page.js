// What the page does: asks, shows, remembers for as long as the tab is open.

const EMPTY = { thought: "", content: "", ending: null, figures: null, refusal: null };
const SETTINGS = ["system", "temperature", "max-tokens", "thinking", "seed"];
const NARROW = "(max-width: 60rem)";
const BUSY_MS = 500;
const IDLE_MS = 3000;

class Page {
  constructor() {
    this.store = new Store();
    this.server = new Server(this.store);
    this.panel = new Panel();
    this.turns = [];
    this.running = null;
    this.known = false;
    this.log = byId("log");
    this.follower = new Follower(this.log);
  }

  start() {
    for (const exchange of this.store.get("chat", [])) this.turns.push(new Turn(this.log, exchange));
    this.panel.end(this.turns.at(-1)?.exchange.figures ?? null);
    for (const id of SETTINGS) byId(id).value = this.store.get(id, "");
    byId("compare").checked = this.store.get("compare", false);
    this.listen();
    this.refresh();
    this.look();
  }

  listen() {
    on("composer", "submit", () => (this.running ? this.running.abort() : this.send()));
    on("settings", "submit", () => {});
    on("settings", "input", () => this.keepSettings());
    on("new", "click", () => this.reset());
    on("panel-switch", "click", () => this.openPanel(!this.panelIsOpen));
    on("panel-close", "click", () => this.openPanel(false));
    on("key-form", "submit", () => this.takeKey());
    on("key-switch", "click", () => this.switchKey());
    on("key-cancel", "click", () => byId("key-dialog").close());
    byId("question").addEventListener("input", () => this.refresh());
    byId("question").addEventListener("keydown", (event) => this.typed(event));
    for (const button of document.querySelectorAll("#examples button")) {
      button.addEventListener("click", () => this.send(button.textContent));
    }
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open) this.escape();
    });
    matchMedia(NARROW).addEventListener("change", () => this.openPanel(false));
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
  }

  /** Enter sends where there is a keyboard; on a phone it makes a new line. */
  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    if (!this.running) this.send();
  }

  escape() {
    if (this.panelIsOpen) this.openPanel(false);
    else this.running?.abort();
  }

  // ---------------------------------------------------------------- asking

  async send(text = byId("question").value) {
    const question = text.trim();
    if (!question || this.running || !this.settingsAreRight()) return;
    byId("question").value = "";
    for (const turn of this.turns) turn.withdraw();
    const turn = new Turn(this.log, { ...EMPTY, question });
    this.turns.push(turn);
    this.follower.following = true;
    this.running = new AbortController();
    this.shared = false;
    this.panel.begin();
    this.refresh();
    this.look();
    const body = this.body();
    const done = await this.answer(turn, body);
    if (done && byId("compare").checked && this.panel.mode !== "baseline") await this.compare(turn, body);
    this.running = null;
    this.keepChat();
    this.refresh();
    this.look();
  }

  /** Stream an answer into its turn; true if it came to its end. */
  async answer(turn, body) {
    const { exchange } = turn;
    try {
      exchange.figures = await this.stream(body, (delta) => turn.add(delta), exchange);
    } catch (error) {
      exchange.ending = error.name === "AbortError" ? "stopped" : "failed";
      if (exchange.ending === "failed") {
        exchange.refusal = error.message;
        this.refused(error);
      }
    }
    turn.show();
    if (exchange.refusal) turn.offer(() => this.again(turn));
    this.panel.end(exchange.figures);
    put("announcement", { failed: "", stopped: "Stopped." }[exchange.ending] ?? "The answer is complete.");
    return exchange.figures !== null;
  }

  /** Send a request, give its deltas on, and return the figures of its end. */
  async stream(body, give, exchange) {
    let seen = null;
    let usage = null;
    for await (const event of this.server.chat(body, this.running.signal)) {
      const choice = event.choices[0];
      if (choice) give(choice.delta);
      if (choice?.finish_reason) exchange.ending = choice.finish_reason;
      seen = event.x_spec ?? seen;
      usage = event.usage ?? usage;
    }
    return seen && usage ? figuresOf(seen, usage) : null;
  }

  /** Ask the same again without drafts, for the rate of plain decoding beside this answer. */
  async compare(turn, body) {
    const { exchange } = turn;
    const { figures } = exchange;
    const text = { thought: "", content: "" };
    const again = { ending: null };
    figures.plain = { measuring: true };
    this.panel.plain(figures);
    turn.show();
    const give = (delta) => {
      text.thought += delta.reasoning_content ?? "";
      text.content += delta.content ?? "";
    };
    try {
      const plain = await this.stream({ ...body, max_draft: 0 }, give, again);
      const same = text.thought === exchange.thought && text.content === exchange.content;
      figures.plain = plain && { rate: plain.rate, same, shared: this.shared };
    } catch (error) {
      figures.plain = null;
      if (error.name !== "AbortError") this.refused(error);
    }
    this.panel.plain(figures);
    turn.show();
  }

  /** Ask a question again whose answer was refused. */
  again(turn) {
    if (this.running) return;
    turn.remove();
    this.turns = this.turns.filter((other) => other !== turn);
    this.send(turn.exchange.question);
  }

  body() {
    const messages = [];
    const system = byId("system").value.trim();
    if (system) messages.push({ role: "system", content: system });
    for (const { exchange } of this.turns) {
      const last = exchange === this.turns.at(-1).exchange;
      if (!last && !exchange.content) continue;
      messages.push({ role: "user", content: exchange.question });
      if (!last) messages.push(messageOf(exchange));
    }
    const body = { messages };
    for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
      if (byId(id).value !== "") body[name] = Number(byId(id).value);
    }
    const thinking = byId("thinking").value;
    if (thinking) body.enable_thinking = thinking === "on";
    // Both sides of a comparison have to draw alike.
    if (byId("compare").checked) body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
    return body;
  }

  // ---------------------------------------------------------------- the server

  /** Look at the server's figures, again and again; more often while an answer is written. */
  async look() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    const look = (this.looks = (this.looks ?? 0) + 1);
    try {
      const metrics = await this.server.metrics();
      if (metrics.running + metrics.waiting > 1) this.shared = true;
      this.panel.server(metrics);
      if (!this.known) {
        this.panel.model(await this.server.model());
        this.known = true;
      }
      this.state("ok", this.doing(metrics));
    } catch (error) {
      this.refused(error);
      if (error.status === 401) return;
    }
    if (look === this.looks) this.timer = setTimeout(() => this.look(), this.running ? BUSY_MS : IDLE_MS);
  }

  doing({ waiting }) {
    if (!this.running) return "Ready";
    const exchange = this.turns.at(-1)?.exchange;
    const silent = exchange && !exchange.content && !exchange.thought;
    return silent && waiting ? `In the queue, ${number(waiting)} waiting` : "Answering";
  }

  /** Say in the header why the server does not answer; ask for the key if that is why. */
  refused(error) {
    if (error.status === 401) {
      this.known = false;
      this.keyNeeded = true;
      this.state("wait", "Key needed");
      this.askKey(this.server.key ? "This key is not accepted." : "");
    } else if (error.code === "loading") {
      this.known = false;
      this.state("wait", "Loading");
    } else if (!error.status) {
      this.known = false;
      this.state("bad", "Not reachable");
    }
  }

  state(kind, text) {
    byId("state").className = kind;
    put("state-text", text);
    this.refresh();
  }

  askKey(message) {
    put("key-message", message);
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  }

  takeKey() {
    const key = byId("key").value.trim();
    if (!/^[!-~]+$/.test(key)) {
      this.askKey("A key has letters, digits and signs of ASCII, and no spaces.");
      return;
    }
    this.server.key = key;
    byId("key").value = "";
    byId("key-dialog").close();
    this.look();
  }

  switchKey() {
    if (!this.server.key) {
      this.askKey("");
      return;
    }
    this.server.key = "";
    this.known = false;
    this.look();
  }

  // ---------------------------------------------------------------- the screen

  refresh() {
    const question = byId("question");
    const send = byId("send");
    send.textContent = this.running ? "Stop" : "Send";
    send.disabled = !this.running && !question.value.trim();
    byId("welcome").hidden = this.turns.length > 0;
    byId("new").disabled = !this.turns.length;
    byId("key-switch").hidden = !this.server.key && !this.keyNeeded;
    put("key-switch", this.server.key ? "Forget the key" : "Enter the key");
    question.style.height = "auto";
    question.style.height = `${Math.min(question.scrollHeight, 240)}px`;
  }

  get panelIsOpen() {
    return document.body.classList.contains("panel-open");
  }

  /** On a narrow screen the panel lies over the conversation. */
  openPanel(open) {
    if (open === this.panelIsOpen) return;
    const button = byId("panel-switch");
    button.setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("panel-open", open);
    byId("chat").inert = open;
    (open ? byId("panel-close") : button).focus();
  }

  /** A new conversation. An answer that is still written is given up. */
  reset() {
    this.running?.abort();
    for (const turn of this.turns) turn.remove();
    this.turns = [];
    this.panel.reset();
    this.keepChat();
    this.refresh();
    byId("question").focus();
  }

  settingsAreRight() {
    if (byId("settings").checkValidity()) return true;
    if (matchMedia(NARROW).matches) this.openPanel(true);
    byId("settings").reportValidity();
    return false;
  }

  keepSettings() {
    for (const id of SETTINGS) this.store.set(id, byId(id).value);
    this.store.set("compare", byId("compare").checked);
  }

  keepChat() {
    this.store.set("chat", this.turns.map((turn) => turn.exchange));
  }
}

function messageOf({ content, thought }) {
  return { role: "assistant", content, ...(thought && { reasoning_content: thought }) };
}

function on(id, kind, act) {
  byId(id).addEventListener(kind, (event) => {
    if (kind === "submit") event.preventDefault();
    act(event);
  });
}

new Page().start();
