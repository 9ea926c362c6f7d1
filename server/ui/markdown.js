// Markdown of answers. `parse` makes a tree of a text, and `show` makes DOM nodes of a tree. The subset is what models write:
// paragraphs with their line breaks, headings, fenced code, lists, quotes, tables, rules, code spans, emphasis and links.
// Everything else is text, HTML too. The time is linear in the length of the text, whatever the text is.

const MOST_LEVELS = 12; // lists and quotes within each other
const MOST_OPEN = 20; // brackets and emphases that wait for their end
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})(?:[-*+]|(\d{1,9})[.)])(?: {1,4}|$)/;
const ITEM_AFTER_TEXT = /^ {0,3}(?:[-*+]|1[.)]) +\S/;
const ALIGNMENT = /^:?-+:?$/;
const TOKEN = /\\[!-/:-@[-`{-~]|`+|!?\[|\]|\*+|_+|~~|https?:\/\/(?:[^\s<>[\]`*|()]|\([^\s<>[\]`*|()]*\))+(?<![.,:;!?'"_~])/g;
const TARGET = /\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\)){1,2000})>?(?:\s+"[^"]{0,500}")?\s*\)/y;
const FOLLOWED = /^(?:https?:\/\/|mailto:)/i; // all other addresses stay text
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}]/u;

/** The tree of a text: each node is a text, or `{tag, children}` with the properties of its element. */
export function parse(text) {
  return blocks(text.split("\n"), 0);
}

/** The blocks of some lines. `line` of a block is the number of its first one. */
function blocks(lines, level) {
  const tree = [];
  let at = 0;
  const take = (isTaken) => {
    const from = at;
    while (at < lines.length && isTaken(lines[at], at)) at++;
    return lines.slice(from, at);
  };
  if (level > MOST_LEVELS) return [element("p", [lines.join("\n")])];
  while (at < lines.length) {
    const line = at;
    const block = blockAt(lines[at++]);
    if (block) tree.push({ line, ...block });
  }
  return tree;

  function blockAt(first) {
    if (!first.trim()) return null;
    if (FENCE.test(first)) return fence(...FENCE.exec(first));
    if (HEADING.test(first)) return heading(...HEADING.exec(first));
    if (RULE.test(first)) return element("hr");
    if (QUOTE.test(first)) {
      const quoted = [first, ...take((text) => QUOTE.test(text))].map((text) => text.replace(QUOTE, ""));
      return element("blockquote", blocks(quoted, level + 1));
    }
    if (ITEM.test(first)) return list(ITEM.exec(first));
    if (startsTable(lines, at - 1)) return table(cells(first));
    return element("p", inline([first, ...take((text, i) => text.trim() && !interrupts(lines, i))].join("\n").trim()));
  }

  function fence(first, mark, info) {
    const indent = first.search(/\S/);
    const code = take((text) => !(text.trim().startsWith(mark) && !text.trim().replaceAll(mark[0], "")));
    at++;
    const copy = element("button", ["Copy"], { type: "button", className: "quiet copy" });
    const caption = element("figcaption", [element("span", [info.trim().split(" ")[0] || "code"]), copy]);
    const text = code.map((one) => (indent ? outdented(one, indent) : one)).join("\n");
    return element("figure", [caption, element("pre", [element("code", [text])])]);
  }

  function list([start, , number]) {
    const items = [];
    const kind = start.trim().at(-1); // "-", "*", "+", "." or ")"
    at--;
    for (let mark; (mark = ITEM.exec(lines[at] ?? "")) && !RULE.test(lines[at]) && mark[0].trim().at(-1) === kind; ) {
      const [{ length: width }, { length: outer }] = mark;
      const first = lines[at++].slice(width);
      const more = take((text) => !text.trim() || text[0] === "\t" || text.search(/\S/) > outer + 1);
      items.push(element("li", blocks([first, ...more.map((text) => outdented(text, width))], level + 1)));
    }
    return number ? element("ol", items, { start: Number(number) }) : element("ul", items);
  }

  function table(head) {
    const [marks, ...rows] = take((text) => text.includes("|")).map(cells);
    const align = marks.map((mark) => (!mark.endsWith(":") ? "" : mark.startsWith(":") ? "center" : "right"));
    const row = (texts, tag) =>
      element("tr", texts.slice(0, head.length).map((text, i) => element(tag, inline(text), { className: align[i] })));
    const parts = [element("thead", [row(head, "th")]), element("tbody", rows.map((texts) => row(texts, "td")))];
    return element("div", [element("table", parts)], { className: "scroll" });
  }
}

function element(tag, children = [], properties = {}) {
  return { tag, children, ...properties };
}

function heading(line, marks, text = "") {
  return element(`h${Math.min(marks.length + 3, 6)}`, inline(text.trim().replace(/\s#+$/, "")));
}

function interrupts(lines, i) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM_AFTER_TEXT].some((start) => start.test(lines[i])) || startsTable(lines, i);
}

function startsTable(lines, i) {
  if (!lines[i].includes("|") || !lines[i + 1]?.includes("|")) return false;
  const marks = cells(lines[i + 1]);
  return marks.every((mark) => ALIGNMENT.test(mark)) && marks.length === cells(lines[i]).length;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** The line without up to `width` spaces, or without one tab, at its start. */
function outdented(line, width) {
  return line[0] === "\t" ? line.slice(1) : line.slice(Math.min(width, line.length - line.trimStart().length));
}

/** The nodes of a text within a block. */
function inline(text) {
  const nodes = []; // texts, elements, and the members of `open`
  let open = []; // `{mark, size}` of brackets and emphases, the innermost last
  const ends = new Map(); // the place of the next run of as many backticks, by the place of a run
  const next = {};
  for (const { 0: { length }, index } of [...text.matchAll(/`+/g)].reverse()) {
    ends.set(index, next[length]);
    next[length] = index;
  }
  const since = (opener) => plain(nodes.splice(nodes.lastIndexOf(opener) + 1));
  let done = 0;
  TOKEN.lastIndex = 0;
  for (let found; (found = TOKEN.exec(text)); done = TOKEN.lastIndex) {
    const { 0: token, index } = found;
    nodes.push(text.slice(done, index));
    if (token[0] === "\\") nodes.push(token[1]);
    else if (token[0] === "`") codeSpan(token.length, index);
    else if (token[0] === "h") nodes.push(open.some(isBracket) ? token : link(token, [token]));
    else if (token.endsWith("[")) start({ mark: token, size: 1 });
    else if (token === "]") closeBracket();
    else emphasis(token[0], token.length, text[index - 1] ?? " ", text[TOKEN.lastIndex] ?? " ");
  }
  nodes.push(text.slice(done));
  return plain(nodes);

  function start(opener) {
    nodes.push(opener);
    open.push(opener);
    if (open.length > MOST_OPEN) open.shift();
  }

  function codeSpan(size, from) {
    const end = ends.get(from);
    if (!end) return void nodes.push("`".repeat(size));
    nodes.push(element("code", [text.slice(from + size, end).trim()]));
    TOKEN.lastIndex = end + size;
  }

  function closeBracket() {
    const i = open.findLastIndex(isBracket);
    TARGET.lastIndex = TOKEN.lastIndex;
    const address = i < 0 ? null : TARGET.exec(text)?.[1];
    if (address && FOLLOWED.test(address)) {
      const children = since(open[i]);
      nodes[nodes.length - 1] = link(address, children.length ? children : [address]);
      open = open.slice(0, i).filter((opener) => !isBracket(opener)); // a link has no links in it
      TOKEN.lastIndex = TARGET.lastIndex;
    } else {
      nodes.push("]");
      open = open.filter((_, j) => j !== i);
    }
  }

  /** A run of `size` marks ends the emphases that it matches, and its rest starts another. */
  function emphasis(mark, size, before, after) {
    const isWord = mark === "_" && WORD.test(before) && WORD.test(after); // as in snake_case
    const matches = (opener) => opener.mark === mark && (opener.size === size || opener.size === 3 || size === 3);
    while (size && size <= 3 && !isWord && !SPACE.test(before)) {
      const i = open.findLastIndex(matches);
      if (i < 0) break;
      const opener = open[i];
      const used = Math.min(opener.size, size, 2);
      nodes.push(element(mark === "~" ? "del" : used === 2 ? "strong" : "em", since(opener)));
      opener.size -= used;
      size -= used;
      open.length = opener.size ? i + 1 : i;
    }
    if (size && size <= 3 && !isWord && !SPACE.test(after)) start({ mark, size });
    else nodes.push(mark.repeat(size));
  }
}

const isBracket = ({ mark }) => mark.endsWith("[");

function link(href, children) {
  return element("a", children, { href, target: "_blank", rel: "noopener noreferrer" });
}

/** The nodes with what stayed open as text, and with neighbouring texts joined. */
function plain(nodes) {
  const joined = [];
  for (const node of nodes) {
    const text = node.mark ? node.mark.repeat(node.size) : node;
    if (typeof text === "string" && typeof joined.at(-1) === "string") joined.push(joined.pop() + text);
    else if (text !== "") joined.push(text);
  }
  return joined;
}

/** Makes the children of `parent` from number `first` on those of a tree. What is there already stays as it is. */
export function show(parent, tree, first = 0) {
  tree.forEach((node, i) => {
    const old = parent.childNodes[first + i];
    const put = (made) => (old ? old.replaceWith(made) : parent.append(made));
    if (typeof node === "string") {
      if (old?.nodeType !== Node.TEXT_NODE) put(new Text(node));
      else if (node.startsWith(old.data)) old.appendData(node.slice(old.length)); // a selection of the text stays
      else old.data = node;
      return;
    }
    const { tag, children, line, ...properties } = node;
    const element = old?.localName === tag ? old : document.createElement(tag);
    if (element !== old) put(element);
    show(Object.assign(element, properties), children);
  });
  while (parent.childNodes.length > first + tree.length) parent.lastChild.remove();
}

/** Shows a text that grows. Only its last blocks are read again. */
export class GrowingText {
  constructor(parent) {
    this.parent = parent;
    this.read = 0; // characters of blocks that can no longer change
    this.shown = 0; // those blocks
  }

  show(text) {
    const rest = text.slice(this.read);
    const tree = parse(rest);
    show(this.parent, tree, this.shown);
    const lines = rest.split("\n");
    const growing = tree.findLastIndex(({ line }) => line < lines.length - 2); // the kind of a block depends on two whole lines
    if (growing < 1) return;
    this.read += lines.slice(0, tree[growing].line).join("\n").length + 1;
    this.shown += growing;
  }
}
