// The form of sampling parameters: an empty field is one that is not sent.

import { $, recall, remember } from "./dom.js";

const SENT = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const DEFAULTS = { alternatives: "5", max_tokens: "256" };

export function setUpParameters() {
  const form = $("parameters");
  const fill = (values) => {
    for (const field of form.elements) if (field.name) field.value = values[field.name] ?? "";
  };
  const store = () => remember("parameters", Object.fromEntries(new FormData(form)));
  fill(recall("parameters", DEFAULTS));
  form.addEventListener("input", store);
  form.addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", () => {
    fill(DEFAULTS);
    store();
  });
}

/** The fields that a request gets. */
export function parameters() {
  const form = $("parameters").elements;
  const body = {};
  for (const name of SENT) {
    if (form[name].value !== "" && form[name].validity.valid) body[name] = Number(form[name].value);
  }
  const stop = form.stop.value.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) body.stop = stop;
  return body;
}

/** The tools that a chat offers: a JSON list of functions, or of OpenAI's `{"type": "function", ...}`. */
export function tools() {
  const field = $("parameters").elements.tools;
  field.setCustomValidity("");
  if (!field.value.trim()) return {};
  try {
    const given = JSON.parse(field.value);
    const list = (Array.isArray(given) ? given : [given]).map((tool) => (tool.function ? tool : { type: "function", function: tool }));
    return list.length ? { tools: list } : {};
  } catch {
    field.setCustomValidity("not a JSON list");
    return {};
  }
}

export const systemPrompt = () => $("parameters").elements.system.value.trim();
export const numAlternatives = () => Number($("parameters").elements.alternatives.value || 0);
