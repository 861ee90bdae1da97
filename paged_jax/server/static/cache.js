"use strict";

// Asks for the state of the cache a few times a second, and draws it.

const INTERVAL = 300; // milliseconds between an answer and the next question
const GAP = 1;
const MAX_EVENTS = 200;

const byId = (id) => document.getElementById(id);
const canvas = byId("map");

let state = null;
let lastEvent = 0;
let pointed = null; // the block under the pointer
let described = null; // what it held when it was described
let columns = 1;
let cell = 10;

function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// What a block is: free, cached (free, but still found by prompts), used, or shared.
function kindOf(block) {
  const count = state.ref_counts[block];
  if (count > 1) return "shared";
  if (count === 1) return "used";
  return state.is_cached[block] ? "cached" : "free";
}

function layOut() {
  const width = canvas.clientWidth;
  const area = (width * Math.max(240, innerHeight * 0.55)) / state.num_blocks;
  cell = Math.max(4, Math.min(22, Math.floor(Math.sqrt(area))));
  columns = Math.max(1, Math.floor(width / cell));
  const height = Math.ceil(state.num_blocks / columns) * cell;
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
}

function draw() {
  layOut();
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const colors = {};
  for (const kind of ["free", "cached", "used", "shared"]) {
    // A custom property keeps its light-dark(); the legend's swatch has it resolved.
    colors[kind] = getComputedStyle(document.querySelector(`#legend .${kind}`)).backgroundColor;
  }
  for (let block = 0; block < state.num_blocks; block++) {
    const kind = kindOf(block);
    const x = (block % columns) * cell;
    const y = Math.floor(block / columns) * cell;
    context.globalAlpha = 1;
    context.fillStyle = colors[kind];
    context.fillRect(x, y, cell - GAP, cell - GAP);
    if (kind === "shared") {
      context.globalAlpha = Math.min(0.6, 0.12 * (state.ref_counts[block] - 2));
      context.fillStyle = "black";
      context.fillRect(x, y, cell - GAP, cell - GAP);
    }
  }
  context.globalAlpha = 1;
  if (pointed !== null) {
    context.strokeStyle = getComputedStyle(document.body).color;
    context.lineWidth = 2;
    const x = (pointed % columns) * cell;
    const y = Math.floor(pointed / columns) * cell;
    context.strokeRect(x, y, cell - GAP, cell - GAP);
  }
}

function count() {
  const counts = { free: 0, cached: 0, used: 0, shared: 0 };
  for (let block = 0; block < state.num_blocks; block++) counts[kindOf(block)]++;
  for (const kind of Object.keys(counts)) byId(`num-${kind}`).textContent = counts[kind];
}

function rowOf(sequence, slot, what, blocks) {
  const row = element("tr");
  const cells = [sequence.request_id, sequence.sample, slot, what, sequence.num_tokens, blocks];
  row.append(...cells.map((text) => element("td", text)));
  row.firstChild.title = sequence.request_id; // where it is too long to be shown
  return row;
}

function list() {
  const running = state.sequences.map((sequence) =>
    rowOf(sequence, sequence.slot, sequence.state, sequence.block_ids.length),
  );
  const waiting = state.waiting.map((sequence) => {
    const why = `waits: ${sequence.reason}${sequence.is_swapped ? ", swapped out" : ""}`;
    return rowOf(sequence, "", why, "");
  });
  byId("sequences").replaceChildren(...running, ...waiting);
  const used = state.ref_counts.filter((n) => n > 0).length;
  byId("totals").textContent =
    `${state.sequences.length} in slots, ${state.waiting.length} waiting; ` +
    `${used} of ${state.num_blocks} blocks of ${state.block_size} tokens`;
}

function log(events) {
  for (const event of events) {
    lastEvent = Math.max(lastEvent, event.number);
    const row = element("li");
    row.append(
      element("time", new Date(event.time * 1000).toLocaleTimeString()),
      element("span", event.kind.replaceAll("_", " "), "kind"),
      event.text,
    );
    byId("events").prepend(row);
  }
  while (byId("events").childElementCount > MAX_EVENTS) byId("events").lastElementChild.remove();
}

function say(text, isBad) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", Boolean(isBad));
}

async function ask(path) {
  const response = await fetch(path);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? response.statusText);
  return body;
}

async function refresh() {
  if (document.hidden) {
    setTimeout(refresh, INTERVAL);
    return;
  }
  try {
    const answer = await ask(`cache/state?since=${lastEvent}`);
    if (state !== null && state.started !== answer.started) lastEvent = 0;
    state = answer;
    byId("model").textContent = state.model;
    say("live");
    draw();
    count();
    list();
    log(state.events);
    if (pointed !== null && contentOf(pointed) !== described) describe(pointed);
  } catch (error) {
    say(`no answer: ${error.message}`, true);
  }
  setTimeout(refresh, INTERVAL);
}

function titleOf(holder) {
  if (holder.request_id === null) return "held by no request; reused by prompts that begin with this text:";
  const end = holder.start + holder.token_ids.length - 1;
  return `request ${holder.request_id}, sample ${holder.sample}, tokens ${holder.start} to ${end}`;
}

function textOf(holder) {
  return holder.text || holder.token_ids.join(" ");
}

// Changes whenever the description of a block may.
function contentOf(block) {
  const holders = state.sequences.filter((sequence) => sequence.block_ids.includes(block));
  const lengths = holders.map((sequence) => sequence.num_computed);
  return `${block} ${state.digests[block]} ${lengths}`;
}

async function describe(block) {
  described = contentOf(block);
  const box = byId("block");
  const title = `Block ${block}: ${kindOf(block)}`;
  const held = state.ref_counts[block];
  const parts = [element("h3", held > 1 ? `${title} by ${held}` : title)];
  try {
    for (const holder of await ask(`cache/blocks/${block}`)) {
      parts.push(element("p", titleOf(holder)), element("code", textOf(holder)));
    }
  } catch (error) {
    parts.push(element("p", error.message));
  }
  if (block === pointed) box.replaceChildren(...parts);
}

function point(block) {
  if (state === null || block === pointed || block < 0 || block >= state.num_blocks) return;
  pointed = block;
  draw();
  describe(block);
}

canvas.addEventListener("pointermove", (event) => {
  const column = Math.floor(event.offsetX / cell);
  if (column < columns) point(Math.floor(event.offsetY / cell) * columns + column);
});
canvas.addEventListener("keydown", (event) => {
  const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  if (move === undefined) return;
  event.preventDefault();
  point(pointed === null ? 0 : pointed + move);
});
addEventListener("resize", () => state && draw());
refresh();
