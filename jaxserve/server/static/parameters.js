// The form of sampling parameters: an empty field is one that is not sent.

import { $, recall, remember } from "./dom.js";

const SENT = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "top_n_sigma", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const DEFAULTS = { alternatives: "5" };

export function setUpParameters() {
  const form = $("parameters");
  const fill = (values) => {
    for (const field of form.elements) if (field.name) field.value = values[field.name] ?? "";
  };
  const store = () => remember("parameters", Object.fromEntries(new FormData(form)));
  fill(recall("parameters", DEFAULTS));
  checkTools();
  form.addEventListener("input", (event) => {
    store();
    if (event.target === form.elements.tools) checkTools();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", () => {
    fill(DEFAULTS);
    store();
    checkTools();
  });
}

/** The fields that a request gets. */
export function parameters() {
  const form = $("parameters").elements;
  const body = {};
  for (const name of SENT) {
    if (form[name].value !== "") body[name] = Number(form[name].value);
  }
  const stop = form.stop.value.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) body.stop = stop;
  return body;
}

/** Whether everything in the form can be sent. The form shows what cannot; the tools matter to a chat only. */
export function isReady({ isChat }) {
  const isRight = checkTools();
  if (!isChat) $("parameters").elements.tools.setCustomValidity("");
  return (isRight || !isChat) && $("parameters").checkValidity();
}

/** The tools that a chat offers: a JSON list of functions, or of OpenAI's `{"type": "function", ...}`. Throws if it is none. */
export function tools() {
  const text = $("parameters").elements.tools.value.trim();
  if (!text) return {};
  const list = [JSON.parse(text)].flat().map((tool, index) => {
    const whole = tool?.function ? tool : { type: "function", function: tool };
    if (typeof whole.function?.name !== "string") throw new Error(`the name of function ${index + 1} is missing`);
    return whole;
  });
  return list.length ? { tools: list } : {};
}

function checkTools() {
  let problem = "";
  try {
    tools();
  } catch (error) {
    problem = error instanceof SyntaxError ? `This is not JSON: ${error.message}` : `Not a list of functions: ${error.message}`;
  }
  $("parameters").elements.tools.setCustomValidity(problem);
  $("tools-error").textContent = problem;
  $("tools-error").hidden = !problem;
  return !problem;
}

export const systemPrompt = () => $("parameters").elements.system.value.trim();
/** How many other tokens are asked for beside each token and its probability; null if probabilities are not shown. */
export const numAlternatives = () => ($("colour").checked ? Number($("parameters").elements.alternatives.value || 0) : null);
