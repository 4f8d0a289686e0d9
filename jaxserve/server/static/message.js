// One message of a chat: what is kept of it, and how it is shown.

import { copyButton, grow, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** How an answer ended that may go on. */
const UNFINISHED = new Set(["length", "stopped", "broken off"]);
const KEPT = ["role", "text", "model", "thoughts", "calls", "ending", "error", "branches"];

export class Message {
  text = "";
  thoughts = "";
  calls = []; // {id, name, arguments}
  ending = ""; // why an answer ended
  error = "";
  branches = null; // {tails, at}: the chats that begin here, the one that is shown being null

  #reasoning = null;

  /** `kept` is what the getter told; `acts` are what can be done: {regenerate, resume, edited, turn, isBusy}. */
  constructor(kept, acts) {
    for (const name of KEPT) if (kept[name] != null) this[name] = kept[name];
    this.acts = acts;
    this.prose = make("div", { class: "prose" }, this.text);
    this.tools = make("div", { class: "tools" });
    const who = make("div", { class: "who" }, this.role === "user" ? "You" : this.model);
    this.element = make("article", { class: `message ${this.role}` }, who, this.prose, this.tools);
    this.view = new MarkdownView(this.prose);
    this.show();
  }

  get kept() {
    return Object.fromEntries(KEPT.map((name) => [name, this[name]]));
  }

  /** As the API takes it. Calls are answered by nobody here: their text is kept, so that the chat goes on. */
  get sent() {
    const told = this.calls.map((call) => `${call.name}(${call.arguments})`).join("\n");
    return { role: this.role, content: [this.text, told].filter(Boolean).join("\n") };
  }

  get canGoOn() {
    return this.role === "assistant" && this.text !== "" && !this.calls.length && UNFINISHED.has(this.ending);
  }

  think(text) {
    this.thoughts += text;
    this.#addThoughts().append(text);
  }

  /** What a message has beside its text: folded thoughts, markup, calls, an error, and what can be done with it. */
  show() {
    if (this.thoughts && !this.#reasoning) this.#addThoughts().append(this.thoughts);
    this.#reasoning?.parentElement.removeAttribute("open");
    if (this.role === "assistant") this.view.show(this.text);
    for (const old of this.element.querySelectorAll(":scope > :is(.call, .note)")) old.remove();
    for (const call of this.calls) {
      this.tools.before(make("pre", { class: "call" }, make("b", {}, call.name), ` ${indented(call.arguments)}`));
    }
    if (this.error) this.tools.before(make("p", { class: "note", role: "alert" }, this.error));
    this.#showTools();
  }

  #addThoughts() {
    if (!this.#reasoning) {
      this.#reasoning = make("div", { class: "reasoning prose" });
      this.prose.before(make("details", { open: true }, make("summary", {}, "Thoughts"), this.#reasoning));
    }
    return this.#reasoning;
  }

  #showTools() {
    const buttons = [copyButton(() => this.text)];
    if (this.role === "assistant") buttons.push(button("Regenerate", () => this.acts.regenerate(this)));
    buttons.push(button("Edit", () => this.edit()));
    if (this.canGoOn) buttons.push(button("Continue", () => this.acts.resume(this)));
    if (this.branches) {
      const { tails, at } = this.branches;
      const turn = (by) => () => this.acts.turn(this, (at + by + tails.length) % tails.length);
      buttons.push(button("‹", turn(-1), "Previous version"), `${at + 1}/${tails.length}`, button("›", turn(1), "Next version"));
    }
    this.tools.replaceChildren(...buttons);
    this.tools.classList.toggle("stay", this.canGoOn || this.branches !== null);
  }

  /** Let the text be edited. A user's message is asked anew, beside the old one; an answer is only put right. */
  edit() {
    if (!this.prose.isConnected || this.acts.isBusy()) return;
    const field = make("textarea", { rows: 1, "aria-label": "Edit the message" });
    field.value = this.text;
    field.addEventListener("input", () => grow(field));
    const end = (isDone) => {
      if (isDone && this.acts.isBusy()) return; // an answer has begun meanwhile: the edit waits for it
      field.replaceWith(this.prose); // as it was, tokens included
      this.#showTools();
      if (isDone) this.acts.edited(this, field.value);
    };
    field.addEventListener("keydown", (event) => {
      const isDone = event.key === "Enter" && !event.shiftKey && !event.isComposing;
      if (event.key !== "Escape" && !isDone) return;
      event.preventDefault();
      event.stopPropagation();
      end(isDone);
    });
    this.prose.replaceWith(field); // its markup stays below, as it was, until the edit is done
    this.tools.replaceChildren(button(this.role === "user" ? "Send" : "Save", () => end(true)), button("Cancel", () => end(false)));
    grow(field);
    field.focus();
  }

  setText(text) {
    this.text = text;
    this.prose.replaceChildren(text);
    this.show();
  }
}

const button = (name, act, about) => make("button", { class: "quiet", type: "button", onclick: act, "aria-label": about, title: about }, name);

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // cut off
  }
}
