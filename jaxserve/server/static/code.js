// Code in colours: highlight.js reads it into a tree of scopes, and the tree becomes elements with a class each.

import { make } from "./dom.js";
import bash from "./vendor/highlight/bash.min.js";
import c from "./vendor/highlight/c.min.js";
import hljs from "./vendor/highlight/core.min.js";
import cpp from "./vendor/highlight/cpp.min.js";
import diff from "./vendor/highlight/diff.min.js";
import go from "./vendor/highlight/go.min.js";
import java from "./vendor/highlight/java.min.js";
import javascript from "./vendor/highlight/javascript.min.js";
import json from "./vendor/highlight/json.min.js";
import python from "./vendor/highlight/python.min.js";
import rust from "./vendor/highlight/rust.min.js";
import sql from "./vendor/highlight/sql.min.js";
import typescript from "./vendor/highlight/typescript.min.js";
import xml from "./vendor/highlight/xml.min.js";
import yaml from "./vendor/highlight/yaml.min.js";

const LANGUAGES = { bash, c, cpp, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);

const MAX_CODE = 2 ** 15; // characters: some 20 ms, as often as the code grows

/** Texts and spans of a piece of code. It stays one text if its language is not known here. */
export function coloured(code, language) {
  if (code.length > MAX_CODE || !hljs.getLanguage(language)) return [code];
  return hljs.highlight(code, { language, ignoreIllegals: true })._emitter.rootNode.children.map(node);
}

function node(item) {
  if (typeof item === "string") return document.createTextNode(item);
  const kind = item.scope?.split(".")[0];
  return make("span", { class: kind && `code-${kind}` }, ...item.children.map(node));
}
