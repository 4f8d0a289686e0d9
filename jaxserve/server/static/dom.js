// Small help with elements. Text only ever enters the page as text, never as markup.

export const $ = (id) => document.getElementById(id);

/** A new element: attributes (`on...` are listeners, `class` and others as in HTML), then children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A button that copies `text()`. */
export function copyButton(text, name = "") {
  const button = make("button", { class: `quiet ${name}`, type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea"); // without HTTPS a page of another machine may only copy what is selected
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Let a text field be as high as its text. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

/** The id of the API's answer that a sequence of the engine belongs to: without what made it unique, prompt and choice. */
export const answerId = (requestId) => requestId.replace(/(\.[0-9a-f]{32})?(-\d+)*$/, "");

/** What is stored of this browser's choices, or `fallback`. */
export function recall(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`jaxserve.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  localStorage.setItem(`jaxserve.${name}`, JSON.stringify(value));
}
