// The engine at work: asks for its state a few times a second, while somebody looks, and draws it.

import { ApiError, call } from "./api.js";
import { $, answerId, make } from "./dom.js";

const INTERVAL = 220; // ms between two looks
const RETRY = 3000; // ms, when there was no answer
const RATE_WINDOW = 60; // seconds of the sparkline
const LANE_WINDOW = 30; // seconds of the slots
const MAX_ROWS = 40;
const MAX_GAP = 2; // seconds between two states; where it is more, nobody looked
const SMOOTHING = 1.2; // seconds that a rate is averaged over

/** `isMine(id)` tells this page's own requests; `onUnauthorized()` hears of a key that is wrong. */
export class EngineView {
  #states = []; // {time, lanes: slot -> [kind, request_id], output: tokens so far}, oldest first
  #latest = null;
  #highlighted = null; // id of the request under the pointer
  #map = { columns: 1, cell: 1, count: 0, states: [], note: "" };

  constructor({ isMine, onUnauthorized }) {
    this.isMine = isMine;
    this.onUnauthorized = onUnauthorized;
    this.isPaused = false;
    $("requests").addEventListener("pointerover", (event) => this.#highlight(event.target.closest("li")?.dataset.id));
    $("requests").addEventListener("pointerleave", () => this.#highlight(null));
    $("blocks").addEventListener("pointermove", (event) => this.#tellBlock(event));
    $("blocks").addEventListener("pointerleave", () => ($("blocks-note").textContent = this.#map.note));
    new ResizeObserver(() => this.draw()).observe($("engine"));
    this.#poll();
  }

  get #isSeen() {
    return !document.hidden && !this.isPaused && $("engine").offsetParent !== null;
  }

  async #poll() {
    let pause = INTERVAL;
    if (this.#isSeen) {
      try {
        this.#take(await call("engine/state"));
        $("offline").hidden = true;
        this.draw();
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        pause = RETRY;
        $("offline").hidden = false;
        $("offline").textContent = error.status === 401 ? "The engine is shown to those with a key." : error.message;
        if (error.status === 401) this.onUnauthorized();
      }
    }
    setTimeout(() => this.#poll(), pause);
  }

  #take(state) {
    if (this.#latest && state.time < this.#latest.time) this.#states = []; // the server was started anew
    if (state.time === this.#latest?.time) return;
    this.#latest = state;
    const lanes = new Map();
    for (const request of state.snapshot.running) {
      const isPrompt = request.num_output_tokens === 0;
      lanes.set(request.slot, [isPrompt ? "prompt" : this.isMine(request.request_id) ? "mine" : "held", request.request_id]);
    }
    this.#states.push({ time: state.time, lanes, output: state.snapshot.num_output_tokens });
    while (this.#states[0].time < state.time - RATE_WINDOW - SMOOTHING) this.#states.shift();
  }

  /** Draw everything anew: colours may have changed, too. */
  draw() {
    if (!this.#latest || $("engine").offsetParent === null) return;
    const { stats } = this.#latest.snapshot;
    $("running").replaceChildren(String(stats.num_running), make("small", { class: "caption" }, ` / ${this.#latest.max_num_seqs}`));
    $("waiting").textContent = stats.num_waiting;
    $("usage").textContent = percent(stats.kv_cache_usage);
    $("hits").textContent = stats.prefix_cache_queries ? percent(stats.prefix_cache_hits / stats.prefix_cache_queries) : "–";
    this.#drawDrafts(stats);
    this.#drawRate();
    this.#drawLanes();
    this.#drawRequests();
    this.#drawBlocks();
  }

  /** What share of all drafts was accepted, and in what share of steps at least so many. Hidden without speculation. */
  #drawDrafts(stats) {
    const perPosition = stats.spec_decode_num_accepted_tokens_per_pos;
    const { spec_decode_num_drafts: count, spec_decode_num_draft_tokens: tokens, spec_decode_num_accepted_tokens: accepted } = stats;
    $("drafts").hidden = !perPosition.length;
    if (!perPosition.length) return;
    const shares = count ? `by position: ${perPosition.map((number) => percent(number / count)).join(", ")}` : "";
    $("accepted").replaceChildren(tokens ? percent(accepted / tokens) : "–", make("small", { class: "caption" }, ` ${shares}`));
  }

  #drawRate() {
    const now = this.#latest.time;
    const curves = rates(this.#states);
    const highest = Math.max(10, ...curves.flat().map(([, rate]) => rate));
    $("rate").textContent = Math.round(curves.at(-1)?.at(-1)?.[1] ?? 0).toLocaleString("en");
    const { context, width, height, colour } = canvas($("spark"), 52);
    const x = (time) => width - ((now - time) / RATE_WINDOW) * width;
    const y = (rate) => height - 1 - (rate / highest) * (height - 5);
    context.strokeStyle = colour("--line");
    line(context, [[0, height - 0.5], [width, height - 0.5]]);
    context.fillStyle = colour("--cached");
    context.strokeStyle = colour("--held");
    context.lineWidth = 1.5;
    for (const points of curves) {
      const curve = points.map(([time, rate]) => [x(time), y(rate)]);
      context.globalAlpha = 0.45;
      context.beginPath();
      for (const point of [[curve[0][0], height], ...curve, [curve.at(-1)[0], height]]) context.lineTo(...point);
      context.fill();
      context.globalAlpha = 1;
      line(context, curve);
    }
  }

  #drawLanes() {
    const now = this.#latest.time;
    const seen = this.#states.filter((state) => state.time >= now - LANE_WINDOW - 1);
    const highest = Math.max(-1, ...seen.flatMap((state) => [...state.lanes.keys()]));
    const count = Math.min(this.#latest.max_num_seqs, Math.max(8, highest + 1));
    const lane = Math.max(0.6, Math.min(9, 150 / count));
    const { context, width, colour } = canvas($("lanes"), count * lane);
    $("slots-note").textContent = `${count} of ${this.#latest.max_num_seqs} slots`;
    const gap = lane > 3 ? 1.5 : lane > 1.5 ? 0.5 : 0;
    context.fillStyle = colour("--free");
    context.globalAlpha = 0.55;
    for (let slot = 0; slot < count; slot++) context.fillRect(0, slot * lane, width, lane - gap);
    context.globalAlpha = 1;
    const x = (time) => Math.round(width - ((now - time) / LANE_WINDOW) * width); // whole pixels: no seams
    for (let index = 1; index < seen.length; index++) {
      const left = x(seen[index - 1].time);
      const right = x(seen[index].time);
      if (seen[index].time - seen[index - 1].time > MAX_GAP) continue;
      for (const [slot, [kind, id]] of seen[index].lanes) {
        const isNew = seen[index - 1].lanes.get(slot)?.[1] !== id;
        context.globalAlpha = this.#highlighted && this.#highlighted !== id ? 0.25 : 1;
        context.fillStyle = colour(`--${kind}`);
        context.fillRect(left + (isNew ? 1 : 0), slot * lane, right - left - (isNew ? 1 : 0), lane - gap);
      }
    }
    context.globalAlpha = 1;
  }

  #drawRequests() {
    const { running, waiting, stats } = this.#latest.snapshot;
    const all = [...running, ...waiting];
    const shown = all.slice(0, MAX_ROWS);
    const list = $("requests");
    const rows = new Map([...list.querySelectorAll("li[data-id]")].map((row) => [row.dataset.id, row]));
    const longest = Math.max(1, ...shown.map((request) => request.num_prompt_tokens + request.max_tokens));
    const wanted = shown.map((request) => fillRow(rows.get(request.request_id) ?? newRow(request), request, { longest, isMine: this.isMine }));
    if (!wanted.length) wanted.push(make("li", { class: "none" }, "–"));
    const isSame = wanted.length === list.children.length && wanted.every((row, index) => row === list.children[index]);
    if (!isSame) list.replaceChildren(...wanted);
    const hidden = stats.num_running + stats.num_waiting - shown.length;
    $("requests-note").textContent = hidden > 0 ? `and ${hidden} more` : "prompt + output tokens";
  }

  #drawBlocks() {
    const { blocks, running, stats } = this.#latest.snapshot;
    const states = [];
    let lastUsed = 0;
    for (let index = 0; index < blocks.length; index += 2) {
      for (let n = 0; n < blocks[index + 1]; n++) states.push(blocks[index]);
      if (blocks[index] !== 0) lastUsed = states.length;
    }
    const count = Math.min(states.length, Math.max(512, Math.ceil((lastUsed * 1.15) / 256) * 256));
    const room = $("blocks").clientWidth;
    const wanted = Math.max(0.8, Math.min(12, Math.sqrt((room * 170) / count)));
    const columns = Math.max(1, 8 * Math.round(room / wanted / 8)); // rows of a round number of blocks
    const cell = room / columns;
    const { context, colour } = canvas($("blocks"), Math.ceil(count / columns) * cell);
    const gap = cell > 4 ? 1 : cell > 2 ? 0.5 : 0;
    /** Blocks of one state from `first` to before `end`, row by row; apart from each other where there is room. */
    const put = (first, end, state) => {
      context.fillStyle = colour(`--${kindOf(state)}`);
      while (first < end) {
        const stop = gap ? first + 1 : Math.min(end, (Math.floor(first / columns) + 1) * columns);
        const top = Math.floor(first / columns) * cell;
        context.fillRect((first % columns) * cell, top, (stop - first) * cell - gap, cell - gap);
        first = stop;
      }
    };
    const chosen = running.find((request) => request.request_id === this.#highlighted)?.block_ids ?? [];
    context.globalAlpha = chosen.length ? 0.25 : 1;
    for (let index = 0, first = 0; index < blocks.length; first += blocks[index + 1], index += 2) {
      put(first, Math.min(count, first + blocks[index + 1]), blocks[index]);
    }
    context.globalAlpha = 1;
    for (const id of chosen) put(id, id + 1, states[id]);
    this.#map = { columns, cell, count, states, note: "" };
    const size = this.#latest.block_size;
    const total = states.length.toLocaleString("en");
    const part = count < states.length ? `first ${count.toLocaleString("en")} of ` : "";
    this.#map.note = `${part}${total}, ${size} tokens each${heldByKind(stats.kv_bytes_held)}`;
    if (!$("blocks").matches(":hover")) $("blocks-note").textContent = this.#map.note;
  }

  #highlight(id) {
    this.#highlighted = id ?? null;
    this.draw();
  }

  #tellBlock(event) {
    const { columns, cell, count, states } = this.#map;
    const column = Math.floor(event.offsetX / cell);
    const id = Math.floor(event.offsetY / cell) * columns + column;
    if (column >= columns || id >= count) return;
    const state = states[id];
    const use = state === 0 ? "free" : state < 0 ? "cached, held by nobody" : state === 1 ? "in use by one request" : `shared by ${state} requests`;
    $("blocks-note").textContent = `block ${id}: ${use}`;
  }
}

/** Tokens a second as curves of [time, rate], one for each time that somebody looked; averaged over SMOOTHING seconds. */
function rates(states) {
  const curves = [];
  let curve = null;
  let first = 0;
  for (let index = 1; index < states.length; index++) {
    const { time, output } = states[index];
    if (time - states[index - 1].time > MAX_GAP) {
      first = index;
      curve = null;
      continue;
    }
    while (first < index - 1 && time - states[first + 1].time >= SMOOTHING) first++;
    if (!curve) curves.push((curve = []));
    curve.push([time, (output - states[first].output) / (time - states[first].time)]);
  }
  return curves;
}

function kindOf(state) {
  if (state === 0) return "free";
  if (state < 0) return "cached";
  if (state === 1) return "held";
  return state === 2 ? "shared2" : state <= 4 ? "shared4" : "shared5";
}

/** What running requests hold, if there are layers that keep all and layers that forget: they share the blocks. */
function heldByKind(bytes) {
  const kinds = Object.entries(bytes);
  if (kinds.length < 2) return "";
  return "; held: " + kinds.map(([layers, size]) => `${layers} ${(size / 2 ** 20).toFixed(1)} MiB`).join(", ");
}

function newRow(request) {
  const track = make("span", { class: "track" });
  for (const part of ["prompt", "generated", "computed", "from-cache"]) track.append(make("i", { class: part }));
  return make("li", { "data-id": request.request_id }, make("span"), track, make("span"));
}

/** The track is as long as the longest request may get: prompt (cached, computed, to come), then output. */
function fillRow(row, request, { longest, isMine }) {
  const { num_prompt_tokens: prompt, num_output_tokens: output, max_tokens: limit } = request;
  const [name, track, text] = row.children;
  const share = (tokens) => `${(100 * tokens) / longest}%`;
  row.classList.toggle("mine", isMine(request.request_id));
  row.classList.toggle("waits", request.slot < 0);
  name.textContent = isMine(request.request_id) ? "yours" : answerId(request.request_id).slice(-6);
  text.textContent = request.slot < 0 ? `${request.num_preemptions ? "preempted" : "waits"}, ${prompt}` : `${prompt} + ${output}/${limit}`;
  track.style.width = share(prompt + limit);
  const within = (tokens) => `${(100 * tokens) / (prompt + limit)}%`;
  const [promptBar, generated, computed, cached] = track.children;
  promptBar.style.width = within(prompt);
  computed.style.width = within(Math.min(request.num_computed_tokens, prompt));
  cached.style.width = within(request.num_cached_tokens);
  generated.style.left = within(prompt);
  generated.style.width = within(output);
  return row;
}

function canvas(element, height) {
  const ratio = devicePixelRatio || 1;
  const width = element.clientWidth;
  element.style.height = `${height}px`;
  if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
    element.width = Math.round(width * ratio);
    element.height = Math.round(height * ratio);
  }
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const known = {};
  return { context, width, height, colour: (name) => (known[name] ??= resolve(element, name)) };
}

/** A colour of the style sheet, as it is now: a canvas takes neither variables nor pairs. */
function resolve(element, name) {
  element.style.color = `var(${name})`;
  return getComputedStyle(element).color;
}

function line(context, points) {
  context.beginPath();
  for (const point of points) context.lineTo(...point);
  context.stroke();
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
