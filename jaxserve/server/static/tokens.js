// Generated text as tokens: spans that know their probability, and the card that tells it.

import { $, make } from "./dom.js";

/** Text that grows by pieces, in which tokens are found again as far as the server tells them. */
export class TokenText {
  #text = "";
  #placed = 0; // characters that stand in spans
  #waiting = []; // tokens whose text has not come yet: it is held back, or they end in the middle of a character

  constructor(element) {
    this.element = element;
    this.tail = element.appendChild(make("span"));
  }

  get text() {
    return this.#text;
  }

  /** `tokens` have {bytes, logprob, top: [{bytes, logprob}]}; they may come before or after their text. */
  push(text, tokens) {
    this.#text += text;
    this.#waiting.push(...tokens);
    this.#place();
    this.tail.textContent = this.#text.slice(this.#placed);
  }

  #place() {
    while (this.#waiting.length) {
      const count = this.#wholeTokens();
      if (count === 0) return;
      const group = this.#waiting.slice(0, count);
      const rest = this.#text.slice(this.#placed);
      let text = decode(group.flatMap((token) => token.bytes));
      if (this.#placed === 0 && !rest.startsWith(text)) text = text.trimStart(); // the first space is often left out
      if (!rest.startsWith(text)) {
        if (text.startsWith(rest)) return; // the rest of it is still to come
        this.#waiting.splice(0, count); // a token that is not shown, such as the end of the text
        continue;
      }
      this.#waiting.splice(0, count);
      this.#placed += text.length;
      if (text) this.element.insertBefore(tokenSpan(text, group), this.tail);
    }
  }

  /** How many waiting tokens it takes to end at the end of a character. */
  #wholeTokens() {
    const bytes = [];
    for (let count = 1; count <= Math.min(this.#waiting.length, 8); count++) {
      bytes.push(...this.#waiting[count - 1].bytes);
      if (isWhole(bytes)) return count;
    }
    return this.#waiting.length > 8 ? 1 : 0;
  }
}

/** The tokens of a chunk of a chat. */
export function chatTokens(logprobs) {
  return (logprobs?.content ?? []).map((entry) => ({
    bytes: entry.bytes ?? encode(entry.token),
    logprob: entry.logprob,
    top: entry.top_logprobs.map((other) => ({ bytes: other.bytes ?? encode(other.token), logprob: other.logprob })),
  }));
}

/** The tokens of a chunk of a completion. */
export function completionTokens(logprobs) {
  return (logprobs?.tokens ?? []).map((token, index) => ({
    bytes: bytesOf(token),
    logprob: logprobs.token_logprobs[index] ?? 0,
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([text, logprob]) => ({ bytes: bytesOf(text), logprob })),
  }));
}

/** Show the card of the token under the pointer, or of the one that has the focus. */
export function watchTokens(root) {
  root.addEventListener("pointerover", (event) => show(event.target.closest(".token")));
  root.addEventListener("pointerleave", () => show(null));
  root.addEventListener("scroll", () => show(null));
}

const facts = new WeakMap(); // span -> its tokens

function tokenSpan(text, group) {
  const span = make("span", { class: "token" }, text);
  const logprob = group.reduce((sum, token) => sum + token.logprob, 0);
  span.style.setProperty("--doubt", (1 - Math.exp(logprob)).toFixed(3));
  facts.set(span, group);
  return span;
}

function show(span) {
  const tip = $("tip");
  tip.hidden = !span;
  if (!span) return;
  const rows = facts.get(span).map((token) => {
    const others = [...token.top].sort((a, b) => b.logprob - a.logprob);
    const isListed = others.some((other) => same(other.bytes, token.bytes));
    const entries = isListed ? others : [...others, token];
    return make("table", {}, ...entries.map((entry) => row(entry, same(entry.bytes, token.bytes))));
  });
  tip.replaceChildren(...rows);
  const box = span.getClientRects()[0];
  const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.top = `${below ? box.bottom + 8 : box.top - 8 - tip.offsetHeight}px`;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
}

function row(entry, isChosen) {
  const probability = Math.exp(entry.logprob);
  const bar = make("div", { class: "bar" });
  bar.style.width = `${100 * probability}%`;
  const text = probability >= 0.0005 ? `${(100 * probability).toFixed(1)}%` : "<0.1%";
  return make(
    "tr",
    { class: isChosen && "chosen" },
    make("td", {}, visible(decode(entry.bytes))),
    make("td", {}, bar),
    make("td", {}, text),
  );
}

function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";
}

const encode = (text) => [...new TextEncoder().encode(text)];
const decode = (bytes) => new TextDecoder().decode(new Uint8Array(bytes));
const same = (a, b) => a.length === b.length && a.every((byte, index) => byte === b[index]);

/** Completions spell a token that is no text by itself as `bytes:\xe2\x98`. */
function bytesOf(token) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(token)) return encode(token);
  return token.slice(6).match(/[0-9a-f]{2}/g).map((digits) => parseInt(digits, 16));
}

function isWhole(bytes) {
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
    return true;
  } catch {
    return false;
  }
}
