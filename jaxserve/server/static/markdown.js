// Markdown as elements while it streams in. marked reads it into tokens; what is listed here becomes an element, and
// everything else, HTML above all, stays text.

import { coloured } from "./code.js";
import { copyButton, make } from "./dom.js";
import { formula } from "./formula.js";
import { Marked, Tokenizer } from "./vendor/marked.esm.js";

const MAX_MARKDOWN = 2 ** 18; // characters; a longer text stays as it is
const MAX_HEADING = 1000; // characters of a heading with its underline
const PIECE = 1000; // characters in which the end of a paragraph is looked for first
const PAUSE = 50; // milliseconds between two looks at a text that grows

// None has its own opening in it, so that what is never closed is read once, up to the next one.
const FORMULA = /^(?:\$\$([^$]+)\$\$|\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d)|\\\[((?:[^\\]|\\[^[\]])+?)\\\]|\\\(((?:[^\\]|\\[^()])+?)\\\))/;
const DISPLAY = /^ {0,3}(?:\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\[^[\]])+?)\\\]) *(?:\n+|$)/; // a formula of its own lines, which may look like a list
const OPENING = /(?<=\n) {0,3}(?:\$\$|\\\[)/g; // of such a formula

/** Where the next formula of its own lines begins in a paragraph, with which the source begins. */
function nextDisplay(paragraph, source) {
  for (const { index } of paragraph.matchAll(OPENING)) if (DISPLAY.test(source.slice(index))) return index;
  return undefined;
}

/** The whole lines of a text's first characters. */
function begin(text, size) {
  return text.length <= size ? text : text.slice(0, text.lastIndexOf("\n", size) + 1);
}

const marked = new Marked({
  extensions: [
    {
      name: "formula",
      level: "inline",
      start: (source) => source.match(/^[^\n$\\<!\[`*~_]*(?=\$|\\[[(])/)?.[0].length, // at any of these a text ends anyway
      tokenizer(source) {
        const [raw, display, inline, otherDisplay, otherInline] = FORMULA.exec(source) ?? [];
        if (!raw) return undefined;
        const nodes = formula(display ?? inline ?? otherDisplay ?? otherInline, (display ?? otherDisplay) !== undefined);
        if (nodes) return { type: "formula", raw, nodes };
        return inline === undefined || /\\[a-z]/i.test(inline) ? { type: "escape", raw, text: raw } : undefined; // as it was written
      },
    },
    {
      name: "display",
      level: "block",
      tokenizer(source) {
        const [raw, display, otherDisplay] = DISPLAY.exec(source) ?? [];
        const nodes = raw && formula(display ?? otherDisplay, true);
        return nodes ? { type: "formula", raw, nodes } : undefined;
      },
    },
  ],
  breaks: true,
  tokenizer: {
    lheading(source) { // each line of an item is tried as the first one of a heading, so that no long text may be read
      const text = begin(source, MAX_HEADING);
      const end = this.lexer.state.top ? nextDisplay(text, source) : undefined;
      return Tokenizer.prototype.lheading.call(this, text.slice(0, end));
    },
    paragraph(source) { // ends before a formula of its own lines
      let end, size = PIECE, text, raw;
      do {
        text = begin(source, size);
        raw = this.rules.block.paragraph.exec(text)?.[0] ?? "";
        end = nextDisplay(raw, source);
        size *= 2;
      } while (end === undefined && raw.length >= text.length - 1 && text.length < source.length);
      return Tokenizer.prototype.paragraph.call(this, source.slice(0, end));
    },
    html: () => undefined,
    tag: (source) => {
      const raw = /^<br *\/?>/i.exec(source)?.[0];
      return raw && { type: "br", raw };
    },
  },
});

const ELEMENTS = {
  paragraph: (token) => make("p", {}, ...children(token)),
  heading: (token) => make(`h${token.depth}`, {}, ...children(token)),
  blockquote: (token) => make("blockquote", {}, ...children(token)),
  list: (token) => {
    const start = token.ordered && token.start !== 1 && token.start;
    return make(token.ordered ? "ol" : "ul", { start }, ...token.items.map((item) => make("li", {}, ...children(item))));
  },
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  code: (token) => codeBlock(token.text, token.lang?.match(/^\S+/)?.[0]),
  table: ({ header, rows }) => {
    const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, { class: cell.align }, ...children(cell))));
    return make("table", {}, make("thead", {}, row(header, "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
  },
  hr: () => make("hr"),
  strong: (token) => make("strong", {}, ...children(token)),
  em: (token) => make("em", {}, ...children(token)),
  del: (token) => make("s", {}, ...children(token)),
  codespan: (token) => make("code", {}, token.text),
  br: () => make("br"),
  link: (token) => link(token.href, children(token)),
  image: (token) => link(token.href, [token.text || token.href]), // it is not loaded: that would tell its server of the reader
  formula: (token) => token.nodes,
  escape: (token) => token.text,
  text: (token) => (token.tokens ? children(token) : unescaped(token.text)),
  space: () => [],
  def: () => [],
};
const PLAIN = new Set(["paragraph", "text", "br", "space"]);

/** The markup of a text, shown behind the element of the text itself; that one is hidden if there is any markup. */
export class MarkdownView {
  #blocks = []; // {raw, nodes}: the ones that have not changed are kept, and with them what is selected in them
  #links = "";
  #timer = null;
  #cost = 0;

  constructor(prose) {
    this.prose = prose;
    this.element = make("div", { class: "markdown", hidden: true });
    prose.after(this.element);
  }

  /** Show a text that grows, soon. `around(show)` calls show. */
  showSoon(text, around) {
    this.text = text;
    this.#timer ??= setTimeout(() => around(() => this.show(this.text)), Math.max(PAUSE, 4 * this.#cost));
  }

  show(text) {
    clearTimeout(this.#timer);
    this.#timer = null;
    const start = performance.now();
    let hasMarkup = false;
    try {
      hasMarkup = text.length <= MAX_MARKDOWN && this.#update(marked.lexer(text));
    } catch {
      this.clear(); // nested more deeply than the stack is
    }
    this.element.hidden = !hasMarkup;
    this.prose.classList.toggle("raw", hasMarkup);
    this.#cost = performance.now() - start;
  }

  clear() {
    this.#blocks = [];
    this.element.replaceChildren();
    this.element.hidden = true;
    this.prose.classList.remove("raw");
  }

  #update(tokens) {
    if (tokens.every(isPlain)) return false;
    const links = JSON.stringify(tokens.links); // they change what was read before
    let count = 0;
    if (links === this.#links) while (count < tokens.length && this.#blocks[count]?.raw === tokens[count].raw) count++;
    this.#links = links;
    for (const { nodes } of this.#blocks.splice(count)) for (const node of nodes) node.remove();
    for (const token of tokens.slice(count)) {
      const nodes = [elements(token)].flat().map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
      this.#blocks.push({ raw: token.raw, nodes });
      this.element.append(...nodes);
    }
    return true;
  }
}

const elements = (token) => (ELEMENTS[token.type] ?? (() => token.raw))(token);
const children = (token) => token.tokens.flatMap(elements);
const isPlain = (token) => PLAIN.has(token.type) && (token.tokens?.every(isPlain) ?? unescaped(token.text ?? "") === (token.text ?? ""));

/** Character references as characters. A reference is all that the parser gets to see. */
function unescaped(text) {
  const character = (reference) => new DOMParser().parseFromString(reference, "text/html").body.textContent;
  return text.replace(/&(#\d{1,7}|#x[0-9a-f]{1,6}|[a-z][a-z0-9]{1,31});/gi, character);
}

function link(address, nodes) {
  if (!/^(https?|mailto):/i.test(address)) return nodes;
  return make("a", { href: address, target: "_blank", rel: "noreferrer noopener" }, ...nodes);
}

function codeBlock(text, language) {
  const pre = make("pre", {}, make("code", {}, ...coloured(text, language?.toLowerCase())));
  return make("figure", {}, pre, copyButton(() => text, "copy"));
}
