// Markdown as the server renders it, taken over element by element: nothing enters the page that is not listed here.

import { call } from "./api.js";
import { make } from "./dom.js";

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong s hr br table thead tbody tr th td a".split(" "),
);
const PLAIN = new Set(["P", "BR"]);

/** The elements of a text, or null if it has no markup: then the text itself says as much. */
export async function markdown(text) {
  const { html } = await call("playground/markdown", { text });
  const source = new DOMParser().parseFromString(html, "text/html").body;
  if ([...source.querySelectorAll("*")].every((element) => PLAIN.has(element.tagName))) return null;
  const copy = make("div", { class: "markdown" });
  copy.append(...[...source.childNodes].flatMap(clean));
  for (const block of copy.querySelectorAll("pre")) {
    const button = make("button", { class: "quiet copy", type: "button" }, "Copy");
    button.addEventListener("click", () => navigator.clipboard.writeText(block.querySelector("code")?.textContent ?? ""));
    block.append(button);
  }
  return copy;
}

function clean(node) {
  if (node.nodeType === Node.TEXT_NODE) return [document.createTextNode(node.data)];
  if (node.nodeType !== Node.ELEMENT_NODE) return [];
  const children = [...node.childNodes].flatMap(clean);
  const tag = node.tagName.toLowerCase();
  if (!TAGS.has(tag)) return children;
  const element = make(tag, {}, ...children);
  const address = node.getAttribute("href") ?? "";
  if (tag === "a" && /^(https?|mailto):/i.test(address)) {
    for (const [name, value] of [["href", address], ["target", "_blank"], ["rel", "noreferrer noopener"]]) {
      element.setAttribute(name, value);
    }
  }
  if (tag === "ol" && /^\d+$/.test(node.getAttribute("start") ?? "")) element.setAttribute("start", node.getAttribute("start"));
  return [element];
}
