// Markdown to DOM nodes. Text only ever becomes text nodes, so markup in it stays visible text.

const DEEPEST = 8;
const STASHED = "\uE000";
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>[ ]?(.*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(\S.*)$/;
const DASHES = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** A new element with children; strings become text nodes. */
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Shows growing text: blocks that have not changed keep their nodes. */
class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.keys = [];
  }

  show(text) {
    const blocks = blocksOf(text.replaceAll("\r", "").split("\n"));
    const keys = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same += 1;
    while (this.parent.childNodes.length > same) this.parent.lastChild.remove();
    this.parent.append(...blocks.slice(same).map((block) => nodeOf(block, 0)));
    this.keys = keys;
  }
}

// ------------------------------------------------------------------ blocks

/** Lines to blocks: {kind, lines, ...}. */
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fenceAt(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].replace(/[ \t]#+[ \t]*$/, "");
    return [{ kind: "heading", level: heading[1].length, lines: [text] }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule", lines: [] }, at + 1];
  if (QUOTE.test(line)) return quoteAt(lines, at);
  if (ITEM.test(line)) return listAt(lines, at);
  if (startsTable(lines, at)) return tableAt(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return [{ kind: "paragraph", lines: lines.slice(at, end) }, end];
}

/** Whether a line begins another block in the middle of a paragraph. */
function interrupts(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line)) || startsTable(lines, at);
}

/** Code up to its closing fence; while an answer grows, up to the end. */
function fenceAt(lines, at) {
  const [, indent, mark, language] = FENCE.exec(lines[at]);
  const code = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const closing = lines[end].trim();
    if (closing.startsWith(mark) && !closing.replaceAll(mark[0], "")) break;
    code.push(lines[end].startsWith(indent) ? lines[end].slice(indent.length) : lines[end]);
  }
  return [{ kind: "code", language, lines: code }, end + 1];
}

function quoteAt(lines, at) {
  const inner = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end += 1) inner.push(QUOTE.exec(lines[end])[1]);
  return [{ kind: "quote", lines: inner }, end];
}

function startsTable(lines, at) {
  const below = lines[at + 1];
  return lines[at].includes("|") && below !== undefined && below.includes("|") && DASHES.test(below);
}

function tableAt(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return [{ kind: "table", lines: [lines[at], ...lines.slice(at + 2, end)] }, end];
}

/** A list and all that is indented below its items. */
function listAt(lines, at) {
  const [, margin, mark] = ITEM.exec(lines[at]);
  const list = { kind: "list", ordered: /\d/.test(mark), first: parseInt(mark, 10), items: [] };
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (item && indentOf(line) < margin.length + 2) {
      if (/\d/.test(item[2]) !== list.ordered || RULE.test(line)) break;
      list.items.push([item[3]]);
    } else if (!line.trim()) {
      if (!goesOn(lines, end + 1, margin.length)) break;
      list.items.at(-1).push("");
    } else if (indentOf(line) > margin.length) {
      list.items.at(-1).push(dedented(line, margin.length + mark.length + 1));
    } else if (lines[end - 1].trim() && !interrupts(lines, end)) {
      list.items.at(-1).push(line);
    } else {
      break;
    }
  }
  return [list, end];
}

/** Whether a list goes on behind a blank line. */
function goesOn(lines, at, margin) {
  const next = lines.slice(at, at + 3).find((line) => line.trim());
  return next !== undefined && (indentOf(next) > margin || ITEM.test(next));
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function dedented(line, most) {
  return line.slice(Math.min(most, indentOf(line)));
}

// ------------------------------------------------------------------ nodes

const MAKERS = {
  heading: (block) => element(`h${Math.min(6, block.level + 2)}`, {}, ...inlineOf(block.lines)),
  rule: () => element("hr"),
  code: (block) => codeNode(block),
  paragraph: (block) => element("p", {}, ...inlineOf(block.lines)),
  table: (block) => tableNode(block.lines),
  quote: (block, depth) => element("blockquote", {}, ...nodesOf(block.lines, depth + 1)),
  list: (block, depth) => listNode(block, depth + 1),
};

function nodeOf(block, depth) {
  return MAKERS[block.kind](block, depth);
}

function nodesOf(lines, depth) {
  if (depth > DEEPEST) return [element("p", {}, lines.join("\n"))];
  return blocksOf(lines).map((block) => nodeOf(block, depth));
}

function codeNode(block) {
  const code = element("code", {}, block.lines.join("\n"));
  const head = element("figcaption", {}, element("span", {}, block.language || "text"));
  if (navigator.clipboard) head.append(copyButton(code));
  return element("figure", { className: "code" }, head, element("pre", { tabIndex: 0 }, code));
}

function copyButton(code) {
  const button = element("button", { type: "button", className: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

function listNode(block, depth) {
  const made = element(block.ordered ? "ol" : "ul");
  if (block.ordered && block.first !== 1) made.start = block.first;
  for (const lines of block.items) {
    const nodes = nodesOf(lines, depth);
    if (nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
    made.append(element("li", {}, ...nodes));
  }
  return made;
}

function tableNode(lines) {
  const [head, ...rows] = lines.map((line) => line.trim().replace(/^\||\|$/g, "").split("|"));
  const row = (name, cells) =>
    element("tr", {}, ...cells.map((cell) => element(name, {}, ...inlineOf([cell.trim()]))));
  const table = element("table", {}, element("thead", {}, row("th", head)));
  table.append(element("tbody", {}, ...rows.map((cells) => row("td", cells))));
  return element("div", { className: "table", tabIndex: 0 }, table);
}

// ------------------------------------------------------------------ inline

/** Lines of running text to nodes. */
function inlineOf(lines) {
  const stash = [];
  const text = stashed(lines.map((line) => line.trim()).join("\n"), stash);
  return spans(text, stash, 0);
}

/** Take out code spans and escaped characters, whose text has no meaning: one mark stands for each. */
function stashed(text, stash) {
  const missing = new Set();
  const plain = text.replaceAll(STASHED, "\uFFFD");
  let out = "";
  let at = 0;
  while (at < plain.length) {
    if (plain[at] === "\\" && /[!-/:-@[-`{-~]/.test(plain[at + 1] ?? "")) {
      stash.push(document.createTextNode(plain[at + 1]));
      out += STASHED;
      at += 2;
    } else if (plain[at] === "`") {
      const ticks = /^`+/.exec(plain.slice(at, at + 64))[0].length;
      const close = missing.has(ticks) ? -1 : closingTicks(plain, at + ticks, ticks);
      if (close < 0) {
        missing.add(ticks);
        out += plain.slice(at, at + ticks);
        at += ticks;
      } else {
        stash.push(element("code", {}, unpadded(plain.slice(at + ticks, close))));
        out += STASHED;
        at = close + ticks;
      }
    } else {
      out += plain[at];
      at += 1;
    }
  }
  return out;
}

/** Where a run of exactly so many backticks begins, or -1. */
function closingTicks(text, from, ticks) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === ticks) return at;
    at = end;
  }
  return -1;
}

function unpadded(code) {
  return /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code;
}

const PART = /\n|\uE000|\*\*|\*|!?\[([^[\]\n]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?: "[^"\n]*")?\)|https?:\/\/[^\s<>"\uE000]+/g;

/** Text without code spans to nodes; the stash is used up from its front. No link holds another. */
function spans(text, stash, depth, inLink = false) {
  const nodes = [];
  const missing = new Set();
  const part = new RegExp(PART);
  let done = 0;
  for (let found = part.exec(text); found; found = part.exec(text)) {
    const [whole, label, address] = found;
    let made = null;
    let end = found.index + whole.length;
    if (whole === "\n") made = element("br");
    else if (whole === STASHED) made = stash.shift();
    else if (whole[0] === "*") {
      if (depth >= DEEPEST || missing.has(whole) || !opens(text, found.index, whole)) continue;
      const close = closingStars(text, end, whole);
      if (close < 0) {
        missing.add(whole);
        continue;
      }
      nodes.push(text.slice(done, found.index));
      const inner = spans(text.slice(end, close), stash, depth + 1, inLink);
      nodes.push(element(whole === "*" ? "em" : "strong", {}, ...inner));
      done = part.lastIndex = close + whole.length;
      continue;
    } else if (!inLink && address !== undefined) {
      if (isWebAddress(address)) made = linkNode(address, spans(label, stash, depth + 1, true));
    } else if (!inLink) {
      const url = whole.replace(/[.,;:!?*)\]}'`]+$/, "");
      end = found.index + url.length;
      if (isWebAddress(url)) made = linkNode(url, [url]);
    }
    if (made === null) {
      part.lastIndex = found.index + 1;
      continue;
    }
    nodes.push(text.slice(done, found.index), made);
    done = part.lastIndex = end;
  }
  nodes.push(text.slice(done));
  return nodes.filter((node) => node !== "");
}

/** Whether stars can begin emphasis: something follows at once; 2*x is no beginning. */
function opens(text, at, mark) {
  const follows = /\S/.test(text[at + mark.length] ?? " ");
  return follows && (mark === "**" || !/\w/.test(text[at - 1] ?? ""));
}

/** Where emphasis ends that begins before `from`, or -1. */
function closingStars(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at >= 0; at = text.indexOf(mark, at + 1)) {
    const inside = /\S/.test(text[at - 1]);
    if (mark === "**") {
      if (inside) return text[at + 2] === "*" && text[from] === "*" ? at + 1 : at;
    } else if (text[at + 1] === "*") {
      at += 1;
    } else if (inside && text[at - 1] !== "*" && !/\w/.test(text[at + 1] ?? "")) {
      return at;
    }
  }
  return -1;
}

function linkNode(address, label) {
  const made = element("a", { href: address, title: address, target: "_blank" }, ...label);
  made.rel = "noopener noreferrer nofollow";
  return made;
}

/** Whether it leads to a page of the web; any other address stays text. */
function isWebAddress(address) {
  if (!/^https?:\/\/[^\uE000]+$/i.test(address)) return false;
  try {
    return ["http:", "https:"].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}
