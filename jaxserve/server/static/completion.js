// Completion: one document, of which the model has written the end.

import { call } from "./api.js";
import { $, grow, make } from "./dom.js";
import { numAlternatives, parameters } from "./parameters.js";
import { TokenText, completionTokens } from "./tokens.js";

export class Completion {
  #text = null; // of the continuation

  /** `model()` is the model's name; `run` sends a request, see Talk. */
  constructor({ model, run, isBusy }) {
    this.model = model;
    this.run = run;
    this.isBusy = isBusy;
    $("prompt").addEventListener("input", () => this.show());
  }

  async complete() {
    this.#forget();
    const output = make("span");
    $("continuation").replaceChildren(output);
    const text = new TokenText(output);
    const prompt = $("prompt").value;
    const body = { model: this.model(), prompt, stream: true, stream_options: { include_usage: true }, ...parameters() };
    if (numAlternatives() !== null) body.logprobs = Math.min(numAlternatives(), 5);
    const prepare = async (signal) => {
      body.max_tokens ??= await room(this.model(), prompt, signal);
    };
    const { error } = await this.run("v1/completions", body, output, { prepare }, (choice) => {
      text.push(choice.text, completionTokens(choice.logprobs));
    });
    if (output.parentElement !== $("continuation")) return; // cleared in the meantime
    const parts = error ? [make("p", { class: "note", role: "alert" }, error)] : [];
    if (text.text) {
      this.#text = text.text;
      const button = (name, act) => make("button", { class: "quiet", type: "button", onclick: act }, name);
      parts.push(
        button("Keep and go on", () => this.#keep(true)),
        button("Keep and edit", () => this.#keep(false)),
        button("Regenerate", () => this.isBusy() || this.complete()),
      );
    }
    $("choices").replaceChildren(...parts);
    $("choices").hidden = !parts.length;
    $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  clear() {
    this.#forget();
    $("prompt").value = "";
    this.show();
  }

  show() {
    $("ghost").textContent = $("prompt").value;
    grow($("prompt"));
  }

  #keep(goOn) {
    if (this.isBusy() || this.#text === null) return;
    $("prompt").value += this.#text;
    this.#forget();
    this.show();
    if (goOn) this.complete();
    else $("prompt").focus();
  }

  #forget() {
    this.#text = null;
    $("continuation").replaceChildren();
    $("choices").hidden = true;
  }
}

/** How many tokens fit behind a prompt. A completion without max_tokens has but 16, as OpenAI's. */
async function room(model, prompt, signal) {
  const { count, max_model_len } = await call("tokenize", { model, prompt }, { signal });
  return Math.max(1, max_model_len - count);
}
