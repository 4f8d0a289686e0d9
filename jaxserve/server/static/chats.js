// Chats that are kept in this browser: named, opened again, exported, forgotten.

import { $, make, recall, remember } from "./dom.js";

const MAX_CHATS = 100;

export class Chats {
  #chats = recall("chats", []); // {id, name, messages: [{role, text, ...}]}, the last used first
  #current = null;

  /** `open(messages)` shows a chat; `[]` is a new one. */
  constructor({ open }) {
    this.open = open;
    $("chats-button").addEventListener("click", () => {
      this.#show();
      $("chats").showModal();
    });
    $("new-chat").addEventListener("click", () => this.#choose(null));
    $("clear").addEventListener("click", () => (this.#current = null)); // what was said is kept
    $("export").addEventListener("click", () => this.#export());
  }

  /** Keep the messages of the current chat, as they are now. */
  keep(messages) {
    if (!messages.length && !this.#current) return;
    if (!this.#current) this.#current = { id: crypto.randomUUID(), name: nameOf(messages), messages: [] };
    this.#current.messages = messages;
    this.#chats = [this.#current, ...this.#chats.filter((chat) => chat !== this.#current)].slice(0, MAX_CHATS);
    if (!messages.length) this.#forget(this.#current);
    this.#store();
  }

  #choose(chat) {
    this.#current = chat;
    this.open(chat?.messages ?? []);
    $("chats").close();
  }

  #forget(chat) {
    this.#chats = this.#chats.filter((other) => other !== chat);
    if (chat === this.#current) this.#current = null;
    this.#store();
  }

  #store() {
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
    const rows = this.#chats.map((chat) => {
      const name = make("input", { "aria-label": "Name of the chat", value: chat.name });
      name.addEventListener("change", () => {
        chat.name = name.value.trim() || nameOf(chat.messages);
        this.#store();
        this.#show();
      });
      const row = make("li", { class: chat === this.#current && "here" }, name);
      row.append(
        make("button", { class: "quiet open", type: "button", onclick: () => this.#choose(chat) }, "Open"),
        make("button", { class: "quiet", type: "button", onclick: () => this.#drop(chat) }, "Delete"),
      );
      return row;
    });
    $("chat-list").replaceChildren(...rows);
    $("no-chats").hidden = rows.length > 0;
    $("export").hidden = rows.length === 0;
  }

  #drop(chat) {
    const wasOpen = chat === this.#current;
    this.#forget(chat);
    if (wasOpen) this.open([]);
    this.#show();
  }

  #export() {
    const content = new Blob([JSON.stringify(this.#chats, null, 2)], { type: "application/json" });
    const link = make("a", { href: URL.createObjectURL(content), download: "chats.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

const nameOf = (messages) => messages[0].text.split("\n")[0].slice(0, 60);
