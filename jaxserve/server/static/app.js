// Where the page begins: what the server is, which mode and look, and the keys of the keyboard.

import { ApiError, call, key } from "./api.js";
import { Chats } from "./chats.js";
import { $, answerId, recall, remember } from "./dom.js";
import { EngineView } from "./engine.js";
import { setUpParameters } from "./parameters.js";
import { Talk } from "./talk.js";
import { watchTokens } from "./tokens.js";

const mine = new Set(); // ids of the answers that this page has asked for
let model = "";
let isAsking = false;

const isMine = (id) => mine.has(answerId(id));
setUpParameters();
setUpTheme();
const talk = new Talk({
  model: () => model,
  onRequest: (id) => mine.add(id),
  onUnauthorized: askForKey,
  onInvalid: showInvalid,
  onChange: (messages) => chats.keep(messages),
});
const chats = new Chats({ open: (messages) => talk.open(messages), leave: () => talk.leave() });
const engine = new EngineView({ isMine, onUnauthorized: askForKey });
watchTokens($("scroll"));
setUpChoices();
setUpKeyboard();
start();

async function start() {
  try {
    model = (await call("v1/models")).data[0].id;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("model").textContent = error.status === 401 ? "locked" : error.message;
    if (error.status === 401) askForKey();
    else setTimeout(start, 3000);
    return;
  }
  $("model").textContent = model;
  document.title = `${model} · jaxserve`;
  $("key-button").hidden = !key.get();
  choose("mode", recall("mode", null) ?? ((await hasTemplate()) ? "chat" : "completion"));
}

async function hasTemplate() {
  try {
    await call("tokenize", { messages: [{ role: "user", content: "" }] });
    return true;
  } catch (error) {
    if (error instanceof ApiError) return error.status !== 400;
    throw error;
  }
}

function setUpTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const ofSystem = () => (system.matches ? "dark" : "light");
  const show = () => {
    const chosen = recall("theme", null);
    if (chosen) document.documentElement.dataset.theme = chosen;
    else delete document.documentElement.dataset.theme;
    requestAnimationFrame(() => engine.draw());
  };
  system.addEventListener("change", show);
  $("theme").addEventListener("click", () => {
    const other = (recall("theme", null) ?? ofSystem()) === "dark" ? "light" : "dark";
    remember("theme", other === ofSystem() ? null : other);
    show();
  });
  show();
}

/** Segmented controls: each sets an attribute of the body, which the style sheet reads. */
function setUpChoices() {
  for (const name of ["mode", "view", "panel"]) {
    for (const input of document.getElementsByName(name)) input.addEventListener("change", () => choose(name, input.value));
  }
  choose("panel", "engine");
  $("colour").checked = recall("colour", false);
  const colour = () => {
    $("scroll").classList.toggle("coloured", $("colour").checked);
    remember("colour", $("colour").checked);
  };
  $("colour").addEventListener("change", colour);
  colour();
  $("key-button").addEventListener("click", askForKey);
}

function choose(name, value) {
  document.body.dataset[name] = value;
  for (const input of document.getElementsByName(name)) input.checked = input.value === value;
  if (name === "mode") {
    remember("mode", value);
    talk.setMode(value);
  }
  if (name === "view" && value !== "talk") choose("panel", value); // on narrow screens one control does for both
  engine.draw();
}

/** What is wrong in the form of parameters is said there. */
function showInvalid() {
  choose(getComputedStyle(document.querySelector(".views")).display === "none" ? "panel" : "view", "parameters");
  $("parameters").reportValidity();
}

function setUpKeyboard() {
  document.addEventListener("keydown", (event) => {
    const isCommand = event.ctrlKey || event.metaKey;
    const isTyping = event.target.matches("input:not([type=radio], [type=checkbox]), textarea");
    if (event.key === "Escape" && talk.isBusy) talk.stop();
    else if (event.key === "Enter" && !event.isComposing) {
      if (isCommand && event.target.id === "prompt") talk.submit();
      else if (isCommand) talk.regenerate();
      else if (event.target.id === "input" && !event.shiftKey) talk.submit();
      else return;
      event.preventDefault();
    } else if (event.key === "ArrowUp" && event.target.id === "input" && !event.target.value) {
      event.preventDefault();
      talk.editLast();
    } else if (event.key === "/" && !isTyping && !isCommand) {
      event.preventDefault();
      (talk.mode === "chat" ? $("input") : $("prompt")).focus();
    }
  });
}

function askForKey() {
  if (isAsking) return;
  isAsking = true;
  engine.isPaused = true;
  $("key-error").hidden = !key.get();
  $("key").value = "";
  const dialog = $("key-dialog");
  dialog.returnValue = "cancel";
  dialog.addEventListener(
    "close",
    () => {
      isAsking = engine.isPaused = false;
      if (dialog.returnValue !== "ok") return void (engine.isPaused = !key.get() && !model);
      key.set($("key").value.trim());
      start();
    },
    { once: true },
  );
  dialog.showModal();
}
