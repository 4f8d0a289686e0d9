// Chat and completion: what is said, how it streams in, and the second thoughts: stop, regenerate, edit.

import { ApiError, stream } from "./api.js";
import { $, grow, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { numAlternatives, parameters, systemPrompt, tools } from "./parameters.js";
import { TokenText, chatTokens, completionTokens } from "./tokens.js";

/**
 * `onRequest(id)` hears the ids of this page's requests, `onUnauthorized()` of a key that is wrong, `onChange(messages)`
 * what a chat has come to.
 */
export class Talk {
  #messages = []; // {role, text, thoughts, calls, element}
  #abort = null;
  #continuation = null; // {text, element} of the completion

  constructor({ model, onRequest, onUnauthorized, onChange }) {
    this.model = model;
    this.onRequest = onRequest;
    this.onUnauthorized = onUnauthorized;
    this.onChange = onChange;
    this.mode = "chat";
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("input").addEventListener("input", () => grow($("input")));
    $("prompt").addEventListener("input", () => this.#showPrompt());
    $("clear").addEventListener("click", () => this.clear());
    this.#showEmpty();
  }

  get isBusy() {
    return this.#abort !== null;
  }

  setMode(mode) {
    this.stop();
    this.mode = mode;
    $("chat").hidden = mode !== "chat";
    $("document").hidden = mode === "chat";
    this.#showButton();
    if (mode === "completion") this.#showPrompt();
    (mode === "chat" ? $("input") : $("prompt")).focus({ preventScroll: true });
  }

  /** The button: stop what runs, else send what stands there. */
  submit() {
    if (this.isBusy) this.stop();
    else if (this.mode === "completion") this.complete();
    else this.say();
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#messages = [];
    $("chat").replaceChildren();
    this.#forgetContinuation();
    if (this.mode === "completion") $("prompt").value = "";
    this.#showPrompt();
    $("status").textContent = "";
    this.#showEmpty();
  }

  /** Show the messages of a chat that was kept; none is a new chat. */
  open(messages) {
    this.stop();
    this.#messages = [];
    $("chat").replaceChildren();
    for (const { role, text, thoughts, calls } of messages) this.#show(Object.assign(this.#add(role, text), { thoughts, calls }));
    this.#showEmpty();
  }

  // Chat

  say() {
    const text = $("input").value.trim();
    if (!text) return;
    $("input").value = "";
    grow($("input"));
    this.#add("user", text);
    this.#changed();
    this.#answer();
  }

  editLast() {
    const last = this.#messages.findLast((message) => message.role === "user");
    if (last) this.#edit(last);
  }

  regenerate() {
    if (this.isBusy) return;
    if (this.mode === "completion") return this.complete();
    if (this.#messages.at(-1)?.role === "assistant") this.#cut(this.#messages.length - 1);
    if (this.#messages.length) this.#answer();
  }

  async #answer() {
    const history = this.#messages.map(asSent);
    if (systemPrompt()) history.unshift({ role: "system", content: systemPrompt() });
    const message = this.#add("assistant", "");
    const body = { model: this.model(), messages: history, stream: true, stream_options: { include_usage: true }, ...parameters(), ...tools() };
    if (numAlternatives()) Object.assign(body, { logprobs: true, top_logprobs: numAlternatives() });
    const prose = message.element.querySelector(".prose");
    const content = new TokenText(prose);
    let reasoning = null;
    message.calls = [];
    await this.#run("v1/chat/completions", body, message.element, prose, (choice) => {
      const thought = choice.delta.reasoning ?? choice.delta.reasoning_content;
      if (thought) {
        reasoning ??= this.#addThoughts(message, "");
        reasoning.append(thought);
        message.thoughts = (message.thoughts ?? "") + thought;
      }
      for (const call of choice.delta.tool_calls ?? []) {
        const whole = (message.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" });
        whole.arguments += call.function.arguments ?? "";
      }
      content.push(choice.delta.content ?? "", chatTokens(choice.logprobs));
      message.text = content.text;
      message.view.showSoon(message.text, (show) => this.#followed(show));
    });
    reasoning?.parentElement.removeAttribute("open");
    this.#show(message);
    this.#changed();
  }

  /** What a message has beside its text: folded thoughts, calls, and the text with its markup. */
  #show(message) {
    const prose = message.element.querySelector(".prose:not(.reasoning)");
    if (message.thoughts && !message.element.querySelector("details")) this.#addThoughts(message, message.thoughts).parentElement.removeAttribute("open");
    for (const call of message.calls ?? []) {
      prose.after(make("pre", { class: "call" }, make("b", {}, call.name), ` ${indented(call.arguments)}`));
    }
    if (message.role === "assistant") this.#followed(() => message.view.show(message.text));
  }

  #addThoughts(message, text) {
    const thoughts = make("div", { class: "reasoning prose" }, text);
    message.element.insertBefore(make("details", { open: true }, make("summary", {}, "Thoughts"), thoughts), message.element.querySelector(".prose"));
    return thoughts;
  }

  #changed() {
    this.onChange(this.#messages.map(({ role, text, thoughts, calls }) => ({ role, text, thoughts, calls })));
  }

  #add(role, text) {
    $("chat").querySelector(".empty")?.remove();
    const message = { role, text };
    const tools = make("div", { class: "tools" });
    tools.append(this.#tool("Copy", () => navigator.clipboard.writeText(message.text)));
    if (role === "assistant") tools.append(this.#tool("Regenerate", () => this.#regenerateAt(message)));
    tools.append(this.#tool("Edit", () => this.#edit(message)), make("span", { class: "caption" }));
    const prose = make("div", { class: "prose" }, text);
    const who = make("div", { class: "who" }, role === "user" ? "You" : this.model());
    message.element = $("chat").appendChild(make("article", { class: `message ${role}` }, who, prose, tools));
    message.view = new MarkdownView(prose);
    this.#messages.push(message);
    this.#toEnd();
    return message;
  }

  #tool(name, act) {
    return make("button", { class: "quiet", type: "button", onclick: act }, name);
  }

  #regenerateAt(message) {
    if (this.isBusy) return;
    this.#cut(this.#messages.indexOf(message));
    this.#answer();
  }

  /** A user's message is asked again from there on; an answer is only put right. */
  #edit(message) {
    if (this.isBusy) return;
    const prose = message.element.querySelector(".prose:not(.reasoning)");
    const field = make("textarea", { rows: 1, "aria-label": "Edit the message" });
    field.value = message.text;
    const leave = (text) => {
      message.text = text;
      prose.textContent = text;
      field.replaceWith(prose);
      if (message.role === "assistant") message.view.show(text);
      this.#changed();
      $("input").focus();
    };
    field.addEventListener("input", () => grow(field));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        field.replaceWith(prose); // as it was, tokens included
        $("input").focus();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        event.stopPropagation();
        leave(field.value);
        if (message.role === "user") {
          this.#cut(this.#messages.indexOf(message) + 1);
          this.#answer();
        }
      }
    });
    prose.replaceWith(field); // its markup stays below, as it was, until the edit is done
    grow(field);
    field.focus();
  }

  #cut(length) {
    for (const message of this.#messages.splice(length)) message.element.remove();
  }

  // Completion

  complete() {
    this.#forgetContinuation();
    const output = make("span");
    $("continuation").replaceChildren(output);
    const text = new TokenText(output);
    const body = { model: this.model(), prompt: $("prompt").value, stream: true, stream_options: { include_usage: true }, ...parameters() };
    if (numAlternatives()) body.logprobs = Math.min(numAlternatives(), 5);
    const finished = this.#run("v1/completions", body, $("choices"), output, (choice) => {
      text.push(choice.text, completionTokens(choice.logprobs));
    });
    return finished.then(() => {
      if (!text.text) return;
      this.#continuation = text;
      $("choices").hidden = false;
      $("choices").replaceChildren(
        this.#tool("Keep and go on", () => this.#keep(true)),
        this.#tool("Keep and edit", () => this.#keep(false)),
        this.#tool("Regenerate", () => this.regenerate()),
      );
      this.#toEnd();
    });
  }

  #keep(goOn) {
    if (this.isBusy || !this.#continuation) return;
    $("prompt").value += this.#continuation.text;
    this.#forgetContinuation();
    this.#showPrompt();
    if (goOn) this.complete();
    else $("prompt").focus();
  }

  #showPrompt() {
    $("ghost").textContent = $("prompt").value;
    grow($("prompt"));
  }

  #forgetContinuation() {
    this.#continuation = null;
    $("continuation").replaceChildren();
    $("choices").hidden = true;
  }

  // Both

  async #run(path, body, element, prose, onChoice) {
    const abort = (this.#abort = new AbortController());
    this.#showButton();
    prose.classList.add("busy");
    const start = performance.now();
    let first = null;
    let usage = null;
    let ending = "";
    try {
      for await (const chunk of stream(path, body, { signal: abort.signal })) {
        this.onRequest(chunk.id);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices[0];
        if (!choice) continue;
        if (choice.delta?.role === undefined || choice.delta.content) first ??= performance.now();
        this.#followed(() => onChoice(choice));
        ending = choice.finish_reason ?? ending;
      }
    } catch (error) {
      if (error.name === "AbortError") ending = "stopped";
      else this.#fail(error, element, prose);
    } finally {
      prose.classList.remove("busy");
      if (this.#abort === abort) this.#abort = null;
      this.#showButton();
    }
    $("status").textContent = tell({ start, first, usage, ending });
  }

  #fail(error, element, prose) {
    if (!(error instanceof ApiError)) throw error;
    let text = error.message;
    if (error.status === 401) this.onUnauthorized();
    if (/chat template/i.test(text)) text += " (This model continues texts: try Completion.)";
    const note = make("p", { class: "note", role: "alert" }, text);
    if (this.mode === "chat") prose.after(note);
    else element.replaceChildren(note);
    element.hidden = false;
    if (this.#messages.at(-1)?.element === element && !this.#messages.at(-1).text) this.#messages.pop();
    this.#toEnd();
  }

  #showButton() {
    const button = $("send");
    button.textContent = this.isBusy ? "Stop" : this.mode === "chat" ? "Send" : "Continue";
    button.classList.toggle("stop", this.isBusy);
  }

  #showEmpty() {
    if (this.#messages.length) return;
    const hint = make("p", {}, make("kbd", {}, "Enter"), " sends, ", make("kbd", {}, "Esc"), " stops, ", make("kbd", {}, "↑"), " edits");
    $("chat").replaceChildren(make("div", { class: "empty" }, make("p", { class: "prose" }, "What shall we talk about?"), hint));
  }

  /** Change what is shown, and stay at the end if the reader is there. */
  #followed(change) {
    const box = $("scroll");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    change();
    if (isAtEnd) this.#toEnd();
  }

  #toEnd() {
    $("scroll").scrollTop = $("scroll").scrollHeight;
  }
}

/** One line on how a request went. */
function tell({ start, first, usage, ending }) {
  const parts = [];
  const now = performance.now();
  if (first) parts.push(`first token ${Math.round(first - start)} ms`);
  if (usage && first && usage.completion_tokens > 1) {
    parts.push(`${((1e3 * (usage.completion_tokens - 1)) / (now - first)).toFixed(0)} tokens/s`);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""} + ${usage.completion_tokens} tokens`);
  }
  if (ending) parts.push(ending);
  return parts.join(" · ");
}

/** A message as the API takes it. Calls are answered by nobody here: their text is kept, so that the chat goes on. */
function asSent({ role, text, calls }) {
  const told = (calls ?? []).map((call) => `${call.name}(${call.arguments})`).join("\n");
  return { role, content: [text, told].filter(Boolean).join("\n") };
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // cut off
  }
}
