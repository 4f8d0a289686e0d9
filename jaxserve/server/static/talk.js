// The chat, and what it has in common with the completion: a request that streams in, is stopped, or fails.

import { ApiError, stream } from "./api.js";
import { Completion } from "./completion.js";
import { $, grow, make } from "./dom.js";
import { Message } from "./message.js";
import { isReady, numAlternatives, parameters, systemPrompt, tools } from "./parameters.js";
import { TokenText, chatTokens } from "./tokens.js";

/**
 * `onRequest(id)` hears the ids of this page's requests, `onUnauthorized()` of a key that is wrong, `onInvalid()` of a
 * form of parameters that has to be shown, as it says what is wrong, `onChange(messages)` what a chat has come to.
 */
export class Talk {
  #messages = [];
  #abort = null;

  constructor({ model, onRequest, onUnauthorized, onInvalid, onChange }) {
    this.model = model;
    this.onRequest = onRequest;
    this.onUnauthorized = onUnauthorized;
    this.onInvalid = onInvalid;
    this.onChange = onChange;
    this.mode = "chat";
    const run = (...request) => this.#run(...request);
    this.completion = new Completion({ model, run, isBusy: () => this.isBusy });
    this.acts = {
      regenerate: (message) => this.#regenerate(message),
      resume: (message) => this.#resume(message),
      edited: (message, text) => this.#edited(message, text),
      turn: (message, at) => this.#turn(message, at),
      isBusy: () => this.isBusy,
    };
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("input").addEventListener("input", () => grow($("input")));
    $("clear").addEventListener("click", () => this.clear());
    addEventListener("pagehide", () => this.leave());
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
    if (mode === "completion") this.completion.show();
    (mode === "chat" ? $("input") : $("prompt")).focus({ preventScroll: true });
  }

  /** The button: stop what runs, else send what stands there. */
  submit() {
    if (this.isBusy) this.stop();
    else if (this.mode === "completion") this.#complete();
    else this.say();
  }

  stop() {
    this.#abort?.abort();
  }

  /** Stop, and keep what has been said. */
  leave() {
    if (!this.isBusy) return;
    this.stop();
    if (this.mode === "chat") {
      Object.assign(this.#messages.at(-1), { ending: "stopped" });
      this.#changed();
    }
  }

  clear() {
    this.stop();
    if (this.mode === "completion") this.completion.clear();
    $("status").textContent = "";
  }

  /** Show the messages of a chat that was kept; none is a new chat. */
  open(messages) {
    this.stop();
    this.#messages = [];
    $("chat").replaceChildren();
    for (const message of messages) this.#add(message);
    this.#showEmpty();
  }

  say() {
    const text = $("input").value.trim();
    if (!text || !this.#isReady()) return;
    $("input").value = "";
    grow($("input"));
    this.#add({ role: "user", text });
    this.#changed();
    this.#answer();
  }

  editLast() {
    this.#messages.findLast((message) => message.role === "user")?.edit();
  }

  regenerate() {
    if (this.isBusy) return;
    if (this.mode === "completion") return void this.#complete();
    const last = this.#messages.at(-1);
    if (last?.role === "assistant") this.#regenerate(last);
    else if (last && this.#isReady()) this.#answer();
  }

  #isReady() {
    if (isReady({ isChat: this.mode === "chat" })) return true;
    this.onInvalid();
    return false;
  }

  #complete() {
    if (this.#isReady()) this.completion.complete();
  }

  /** Ask for an answer, or for the rest of one that has begun. */
  async #answer(message = this.#add({ role: "assistant", model: this.model() })) {
    const before = message.text;
    const body = { model: this.model(), messages: this.#sent(), stream: true, stream_options: { include_usage: true }, ...parameters(), ...tools() };
    if (before) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    if (numAlternatives() !== null) Object.assign(body, { logprobs: true, top_logprobs: numAlternatives() });
    const content = new TokenText(message.prose);
    Object.assign(message, { error: "", ending: "" }).show();
    const how = await this.#run("v1/chat/completions", body, message.prose, {}, (choice) => {
      const thought = choice.delta.reasoning ?? choice.delta.reasoning_content;
      if (thought) message.think(thought);
      for (const call of choice.delta.tool_calls ?? []) {
        const whole = (message.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" });
        whole.arguments += call.function.arguments ?? "";
      }
      content.push(choice.delta.content ?? "", chatTokens(choice.logprobs));
      message.text = before + content.text;
      message.view.showSoon(message.text, (show) => this.#followed(show));
    });
    this.#followed(() => Object.assign(message, how).show());
    if (this.#messages.includes(message)) this.#changed();
  }

  #sent() {
    const messages = this.#messages.map((message) => message.sent).filter(({ role, content }) => role === "user" || content);
    return systemPrompt() ? [{ role: "system", content: systemPrompt() }, ...messages] : messages;
  }

  #resume(message) {
    if (this.isBusy || !this.#isReady()) return;
    while (this.#messages.at(-1) !== message) this.#messages.pop().element.remove();
    this.#answer(message);
  }

  #regenerate(message) {
    if (this.isBusy || !this.#isReady()) return;
    const hasFailed = !message.sent.content;
    const tails = this.#takeAside(message);
    const branches = hasFailed ? message.branches : { tails: [...tails, null], at: tails.length };
    this.#answer(this.#add({ role: "assistant", model: this.model(), branches }));
  }

  #edited(message, text) {
    $("input").focus();
    if (message.role === "assistant") {
      message.setText(text);
      this.#changed();
    } else if (this.#isReady()) {
      const tails = this.#takeAside(message);
      this.#add({ role: "user", text, branches: { tails: [...tails, null], at: tails.length } });
      this.#changed();
      this.#answer();
    }
  }

  /** Show another of the chats that begin in the place of a message. */
  #turn(message, at) {
    if (this.isBusy) return;
    const tails = this.#takeAside(message);
    const [first, ...rest] = tails[at];
    this.#add({ ...first, branches: { tails: tails.with(at, null), at } });
    for (const kept of rest) this.#add(kept);
    this.#changed();
  }

  /** Remove the messages from one on. Returns all chats that begin there, this one among them. */
  #takeAside(message) {
    const { tails, at } = message.branches ?? { tails: [null], at: 0 };
    const index = this.#messages.indexOf(message);
    const removed = this.#messages.splice(index);
    for (const { element } of removed) element.remove();
    const [first, ...rest] = removed.map(({ kept }) => kept);
    return tails.with(at, [{ ...first, branches: null }, ...rest]);
  }

  #changed() {
    this.onChange(this.#messages.map(({ kept }) => kept));
  }

  #add(kept) {
    $("chat").querySelector(".empty")?.remove();
    const message = new Message(kept, this.acts);
    $("chat").append(message.element);
    this.#messages.push(message);
    this.#toEnd();
    return message;
  }

  /** Send a request whose answer streams into an element. `prepare(signal)` runs before it. Returns {ending, error}. */
  async #run(path, body, prose, { prepare }, onChoice) {
    const abort = (this.#abort = new AbortController());
    this.#showButton();
    prose.classList.add("busy");
    $("status").textContent = "";
    const start = performance.now();
    let first = null;
    let usage = null;
    let ending = "";
    let error = "";
    try {
      await prepare?.(abort.signal);
      for await (const chunk of stream(path, body, { signal: abort.signal })) {
        this.onRequest(chunk.id);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices[0];
        if (!choice) continue;
        if (choice.delta?.role === undefined || choice.delta.content) first ??= performance.now();
        this.#followed(() => onChoice(choice));
        ending = choice.finish_reason ?? ending;
      }
    } catch (failure) {
      if (failure.name === "AbortError") ending = "stopped";
      else {
        error = this.#told(failure, first !== null);
        ending = "broken off";
      }
    } finally {
      prose.classList.remove("busy");
      if (this.#abort === abort) this.#abort = null;
      this.#showButton();
    }
    $("status").textContent = tell({ start, first, usage, ending });
    return { ending, error };
  }

  #told(failure, hasBegun) {
    if (!(failure instanceof ApiError)) throw failure;
    if (failure.status === 401) this.onUnauthorized();
    if (hasBegun) return `The answer broke off: ${failure.message}`;
    const hint = /chat template/i.test(failure.message) ? " (This model continues texts: try Completion.)" : "";
    return failure.message + hint;
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
