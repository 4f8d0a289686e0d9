// Chats that are kept in this browser, in a sidebar: found again, named, exported, imported, forgotten.

import { $, make, recall, remember } from "./dom.js";

const MAX_CHATS = 100;

export class Chats {
  #chats = recall("chats", []); // {id, name, messages}, the last used first
  #current = null;
  #renamed = null; // the chat whose name is being edited

  /** `open(messages)` shows a chat, `[]` being a new one; `leave()` ends what is going on in the current one. */
  constructor({ open, leave }) {
    this.open = open;
    this.leave = leave;
    $("chats-button").addEventListener("click", () => {
      this.#toggle(!this.#isOpen);
      remember("sidebar", this.#isOpen);
    });
    $("new-chat").addEventListener("click", () => this.#choose(null));
    $("clear").addEventListener("click", () => this.#choose(null)); // what was said is kept
    $("search").addEventListener("input", () => this.#show());
    $("export").addEventListener("click", () => this.#export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import());
    addEventListener("storage", (event) => {
      if (event.key !== "jaxserve.chats") return; // another tab
      this.#chats = recall("chats", []);
      this.#current = this.#chats.find(({ id }) => id === this.#current?.id) ?? null;
      this.#show();
    });
    this.#current = this.#chats.find(({ id }) => id === recall("chat", null)) ?? null;
    const isWide = matchMedia("(min-width: 80rem)");
    const fit = () => this.#toggle(isWide.matches && recall("sidebar", true));
    isWide.addEventListener("change", fit);
    fit();
    if (this.#current) this.open(this.#current.messages);
  }

  /** Keep the messages of the current chat, as they are now. */
  keep(messages) {
    if (!messages.length && !this.#current) return;
    if (!this.#current) this.#current = { id: newId(), name: nameOf(messages), messages: [] };
    this.#current.messages = messages;
    this.#chats = [this.#current, ...this.#chats.filter((chat) => chat !== this.#current)].slice(0, MAX_CHATS);
    this.#store();
    this.#show();
  }

  get #isOpen() {
    return document.body.classList.contains("with-chats");
  }

  #toggle(isOpen) {
    document.body.classList.toggle("with-chats", isOpen);
    $("chats-button").setAttribute("aria-expanded", isOpen);
    this.#show();
  }

  #choose(chat) {
    this.leave();
    this.#current = chat;
    remember("chat", chat?.id ?? null);
    this.open(chat?.messages ?? []);
    if (!matchMedia("(min-width: 60rem)").matches) this.#toggle(false);
    this.#show();
  }

  #drop(chat) {
    if (chat === this.#current) this.#choose(null);
    this.#chats = this.#chats.filter((other) => other !== chat);
    this.#store();
    this.#show();
  }

  #store() {
    remember("chat", this.#current?.id ?? null);
    for (;;) {
      try {
        return remember("chats", this.#chats);
      } catch (error) {
        if (error.name !== "QuotaExceededError" || !this.#chats.length) throw error;
        this.#chats.pop(); // the one that was used longest ago
      }
    }
  }

  #show() {
    const sought = $("search").value.trim().toLowerCase();
    const found = this.#chats.filter((chat) => !sought || [chat.name, ...textsOf(chat.messages)].some((text) => text.toLowerCase().includes(sought)));
    $("chat-list").replaceChildren(...found.map((chat) => this.#row(chat)));
    $("no-chats").hidden = found.length > 0;
    $("no-chats").textContent = sought ? "No chat has this." : "No chats yet.";
    $("export").disabled = !this.#chats.length;
    $("chat-list").querySelector("input")?.focus();
    $("chat-list").querySelector("input")?.select();
  }

  #row(chat) {
    const button = (name, act, about) => make("button", { class: "quiet", type: "button", onclick: act, "aria-label": `${about}: ${chat.name}`, title: about }, name);
    const row = make("li", { class: chat === this.#current && "here" });
    if (chat === this.#renamed) {
      const name = make("input", { "aria-label": "Name of the chat", value: chat.name });
      name.addEventListener("change", () => {
        chat.name = name.value.trim() || nameOf(chat.messages);
        this.#store();
      });
      name.addEventListener("blur", () => this.#rename(null));
      name.addEventListener("keydown", (event) => event.key === "Enter" && name.blur());
      row.append(name);
    } else {
      const open = make("button", { class: "open", type: "button", title: chat.name, onclick: () => this.#choose(chat) }, chat.name);
      row.append(open, button("✎", () => this.#rename(chat), "Rename"), button("✕", () => this.#drop(chat), "Delete"));
    }
    return row;
  }

  #rename(chat) {
    if (chat === this.#renamed) return;
    this.#renamed = chat;
    this.#show();
  }

  #export() {
    const content = new Blob([JSON.stringify(this.#chats, null, 2)], { type: "application/json" });
    const link = make("a", { href: URL.createObjectURL(content), download: "chats.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  /** Add the chats of an exported file. */
  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    $("import-error").hidden = true;
    try {
      const known = new Set(this.#chats.map((chat) => JSON.stringify(chat.messages)));
      const added = [JSON.parse(await file.text())].flat().map(imported).filter((chat) => !known.has(JSON.stringify(chat.messages)));
      this.#chats = [...added, ...this.#chats].slice(0, MAX_CHATS);
      this.#store();
      this.#show();
    } catch (error) {
      $("import-error").textContent = `${file.name} holds no exported chats: ${error.message}`;
      $("import-error").hidden = false;
    }
  }
}

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16)).join(""); // randomUUID needs HTTPS
const nameOf = (messages) => messages[0].text.split("\n")[0].slice(0, 60);

/** All texts of a chat, those of its other branches too. */
function textsOf(messages) {
  return messages.flatMap(({ text, branches }) => [text, ...(branches?.tails ?? []).flatMap((tail) => textsOf(tail ?? []))]);
}

/** A chat of a file. Throws an Error if it is none. */
function imported(chat) {
  if (!Array.isArray(chat?.messages) || !chat.messages.length) throw new Error("a chat has no messages");
  const messages = importedMessages(chat.messages);
  return { id: newId(), name: typeof chat.name === "string" ? chat.name : nameOf(messages), messages };
}

function importedMessages(messages) {
  return messages.map((message) => {
    const { role, text, model, thoughts, calls, ending, error, branches } = message ?? {};
    if (!["user", "assistant"].includes(role) || typeof text !== "string") throw new Error("a message has no role or no text");
    for (const other of [model, thoughts, ending, error]) if (!["string", "undefined"].includes(typeof (other ?? undefined))) throw new Error("a message has a field that is no text");
    if (calls != null && !(Array.isArray(calls) && calls.every((call) => typeof call?.name === "string" && typeof call.arguments === "string"))) {
      throw new Error("a message has calls that are none");
    }
    return { role, text, model, thoughts, calls, ending, error, branches: branches && importedBranches(branches) };
  });
}

function importedBranches({ tails, at }) {
  const isRight = Array.isArray(tails) && Number.isInteger(at) && tails.every((tail, index) => (index === at) === (tail === null)) && at in tails;
  if (!isRight || !tails.every((tail) => tail === null || (Array.isArray(tail) && tail.length))) throw new Error("a message has branches that are none");
  return { at, tails: tails.map((tail) => tail && importedMessages(tail)) };
}
