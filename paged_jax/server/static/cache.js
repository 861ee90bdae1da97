"use strict";

// Polls the state of the cache several times per second and draws it.

const INTERVAL = 300; // milliseconds between a response and the next request
const GAP = 1;
const MAX_EVENTS = 200; // maximum rows of events
const FOLD_SECONDS = 2; // events of one kind share a row for this time
const MAX_FOLDED = 50; // maximum texts in a row
const PALEST = 0.4; // opacity of the cached block that is evicted first
const HISTORY = 120; // maximum seconds that the curves show
const SHORTEST = 15; // minimum seconds that the curves show
const WINDOW = 3; // seconds over which rates are averaged

// Maps each reason to wait to its text in the table and an explanation.
const WAITS = {
  turn: ["its turn", "Other requests are before it in the queue."],
  slots: ["a slot", "All slots of the batch are taken."],
  blocks: ["blocks", "The pool has too few free blocks for its next tokens."],
  budget: ["room in a step", "The number of tokens per step is limited."],
  "same prefix": ["the same prefix", "A running sequence is computing its next block."],
  fork: ["its prompt", "Another sample computes the shared prompt."],
  preempted: ["to resume", "It was preempted: other requests needed its blocks."],
};

const percent = (x) => `${(100 * x).toFixed(0)}%`;

// Each curve has a name, a function that computes its value, a format, and the value at the top of
// the plot (by default the maximum). The function takes the current sample and a sample some seconds
// earlier, and returns null if the value is undefined.
const CURVES = [
  ["tokens/s", (now, then) => (now.generated - then.generated) / (now.time - then.time), (x) => x.toFixed(0)],
  ["cache hits", (now, then) => (now.queried > then.queried ? (now.cached - then.cached) / (now.queried - then.queried) : null), percent, 1],
  ["waiting", (now) => now.waiting, (x) => x],
  ["blocks in use", (now) => now.used / state.num_blocks, percent, 1],
];

const byId = (id) => document.getElementById(id);
const canvas = byId("map");

let state = null;
let lastEvent = 0;
let pointed = null; // the block under the pointer
let described = null; // its content when it was last described
let marked = null; // key of the sequence whose blocks are marked
const rows = new Map(); // rows of the table by the key of their sequence
let samples = []; // counts of the last minutes, in order of time
let columns = 1;
let cell = 10;

function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// Returns the kind of a block: free, cached (free, but in the prefix cache), used, or shared.
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

// Returns the opacity of each cached block. The next block to be evicted is the palest.
function recency() {
  const cached = state.free_order.filter((block) => state.is_cached[block]);
  const shades = {};
  cached.forEach((block, rank) => (shades[block] = PALEST + ((1 - PALEST) * (rank + 1)) / cached.length));
  return shades;
}

function draw() {
  layOut();
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const colors = {};
  for (const kind of ["free", "cached", "used", "shared"]) {
    // Read the colors from the legend: in custom properties, light-dark() is not resolved.
    const style = getComputedStyle(document.querySelector(`#legend .${kind}`));
    colors[kind] = kind === "free" ? style.borderTopColor : style.backgroundColor;
  }
  const text = getComputedStyle(document.body).color;
  const shades = recency();
  const places = placesOf(marked);
  for (let block = 0; block < state.num_blocks; block++) {
    const faded = marked !== null && !places.has(block) ? 0.5 : 1;
    drawBlock(context, block, colors, faded, shades[block]);
    if (places.has(block)) drawMark(context, block, places.get(block), text);
  }
  context.globalAlpha = 1;
  if (pointed !== null) {
    context.strokeStyle = text;
    context.lineWidth = 2;
    context.strokeRect(...cornerOf(pointed), cell - GAP, cell - GAP);
  }
}

function cornerOf(block) {
  return [(block % columns) * cell, Math.floor(block / columns) * cell];
}

// Draws a block: an outline if it is free, otherwise a filled square.
function drawBlock(context, block, colors, faded, shade) {
  const kind = kindOf(block);
  const [x, y] = cornerOf(block);
  const size = cell - GAP;
  context.globalAlpha = faded;
  if (kind === "free") {
    context.strokeStyle = colors.free;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    return;
  }
  if (kind === "cached") context.globalAlpha = faded * shade;
  context.fillStyle = colors[kind];
  context.fillRect(x, y, size, size);
  if (kind === "shared") {
    context.globalAlpha = faded * Math.min(0.6, 0.12 * (state.ref_counts[block] - 2));
    context.fillStyle = "black";
    context.fillRect(x, y, size, size);
  }
}

// Outlines a block of the marked sequence, and writes its place in the block table if there is room.
function drawMark(context, block, place, color) {
  const [x, y] = cornerOf(block);
  const size = cell - GAP;
  context.globalAlpha = 1;
  context.strokeStyle = color;
  context.lineWidth = size > 8 ? 2 : 1;
  context.strokeRect(x + 1, y + 1, size - 2, size - 2);
  if (size < 16) return;
  context.fillStyle = "white";
  context.font = "600 10px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(place, x + size / 2, y + size / 2 + 1);
}

const keyOf = (sequence) => JSON.stringify([sequence.request_id, sequence.sample]);

// Returns the place of each block in the block table of a sequence.
function placesOf(key) {
  const sequence = state.sequences.find((each) => keyOf(each) === key);
  return new Map(sequence?.block_ids.map((block, place) => [block, place]));
}

// Marks the blocks of a sequence; null unmarks them.
function mark(key) {
  marked = key;
  if (state === null) return;
  list();
  draw();
}

// Marks the next sequence that holds a block, so that repeated clicks show all of them.
function markNextHolder(block) {
  const keys = state.sequences.filter((each) => each.block_ids.includes(block)).map(keyOf);
  mark(keys[keys.indexOf(marked) + 1] ?? null);
}

function count() {
  const counts = { free: 0, cached: 0, used: 0, shared: 0 };
  for (let block = 0; block < state.num_blocks; block++) counts[kindOf(block)]++;
  for (const kind of Object.keys(counts)) byId(`num-${kind}`).textContent = counts[kind];
}

// Shortens a request id: drops the prefix of the endpoint, and the middle of a long id.
function shortName(requestId) {
  const name = requestId.replace(/^(cmpl|chatcmpl|gen)-/, "");
  return name.length > 14 ? `${name.slice(0, 8)}…${name.slice(-3)}` : name;
}

// Returns the row of a sequence. Rows are kept while their sequence exists, so that a click or the
// focus is not lost when the table changes.
function rowOf(sequence, middle, blocks) {
  const key = keyOf(sequence);
  if (!rows.has(key)) {
    const button = element("button", shortName(sequence.request_id));
    button.title = sequence.request_id;
    const name = element("td");
    name.append(button);
    const row = element("tr");
    row.append(name);
    row.addEventListener("click", () => mark(marked === key ? null : key));
    rows.set(key, row);
  }
  const row = rows.get(key);
  const [name] = row.children;
  name.firstChild.setAttribute("aria-pressed", marked === key);
  row.classList.toggle("marked", marked === key);
  while (row.lastChild !== name) row.lastChild.remove();
  row.append(element("td", sequence.sample, "number"), ...middle);
  row.append(element("td", sequence.num_tokens, "number"), element("td", blocks, "number"));
  return row;
}

function waitingCell(sequence) {
  const [what, meaning] = WAITS[sequence.reason] ?? [sequence.reason, ""];
  const cell = element("td", `waits: ${what}${sequence.is_swapped ? ", swapped out" : ""}`);
  cell.colSpan = 2;
  cell.title = meaning;
  return cell;
}

function list() {
  const keys = new Set([...state.sequences, ...state.waiting].map(keyOf));
  if (!keys.has(marked)) marked = null;
  for (const key of rows.keys()) if (!keys.has(key)) rows.delete(key);
  const running = state.sequences.map((sequence) => {
    const middle = [element("td", sequence.slot, "number"), element("td", sequence.state)];
    return rowOf(sequence, middle, sequence.block_ids.length);
  });
  const waiting = state.waiting.map((sequence) => rowOf(sequence, [waitingCell(sequence)], ""));
  const present = [...byId("sequences").children];
  const wanted = [...running, ...waiting];
  if (present.length !== wanted.length || present.some((row, index) => row !== wanted[index])) {
    byId("sequences").replaceChildren(...wanted);
  }
  const used = state.ref_counts.filter((n) => n > 0).length;
  byId("totals").textContent =
    `${state.sequences.length} in slots, ${state.waiting.length} waiting; ` +
    `${used} of ${state.num_blocks} blocks of ${state.block_size} tokens` +
    state.groups.map(groupText).join("");
}

// Describes the blocks of a cache group. The map shows the first group only.
function groupText(group) {
  const used = `${group.num_used} of ${group.num_blocks}`;
  return `; ${group.num_layers} layers ${group.description}: ${used}`;
}

// Curves

function sample() {
  const time = performance.now() / 1000;
  samples.push({
    time,
    generated: state.num_generated_tokens,
    queried: state.num_queried_tokens,
    cached: state.num_cached_tokens,
    waiting: state.waiting.length,
    used: state.num_used,
  });
  samples = samples.filter((each) => each.time > time - HISTORY);
}

// Loads the samples from before the page was opened or shown again.
async function recall() {
  const kept = await ask("cache/recent");
  const time = performance.now() / 1000;
  samples = kept.map((each) => ({ ...each, time: time - each.age }));
}

// Returns the [time, value] pairs of a curve.
function valuesOf(value) {
  const found = [];
  let before = 0;
  samples.forEach((now, index) => {
    while (samples[before].time < now.time - WINDOW) before++;
    if (index === before) return;
    const number = value(now, samples[before]);
    if (number !== null) found.push([now.time, number]);
  });
  return found;
}

function figureOf(name) {
  const figure = element("figure");
  const caption = element("figcaption", name);
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  picture.setAttribute("viewBox", "0 0 100 100");
  picture.setAttribute("preserveAspectRatio", "none");
  picture.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  caption.append(element("b", "–"));
  figure.append(caption, picture);
  byId("rates").append(figure);
  return figure;
}

const figures = CURVES.map(([name]) => figureOf(name));

function plot() {
  const end = samples.at(-1).time;
  const span = Math.max(SHORTEST, end - samples[0].time);
  CURVES.forEach(([, value, written, top], index) => {
    const values = valuesOf(value);
    const most = Math.max(...values.map(([, number]) => number), 0);
    const scale = 94 / (top ?? (most || 1));
    const points = values.map(([time, number]) => `${100 - (100 * (end - time)) / span},${97 - scale * number}`);
    const [number] = figures[index].getElementsByTagName("b");
    const [line] = figures[index].getElementsByTagName("polyline");
    line.setAttribute("points", points.join(" "));
    number.textContent = values.length ? written(values.at(-1)[1]) : "–";
    figures[index].title = values.length ? `at most ${written(most)} in the last two minutes` : "";
  });
}

// Events of the same kind within FOLD_SECONDS share a row. Otherwise many events of one kind would
// push all other events out of the list.
let folds = []; // newest last: kind, time of the first event, row, and texts

function log(events) {
  const changed = new Set();
  for (const event of events) {
    lastEvent = Math.max(lastEvent, event.number);
    const name = event.request_id ?? "";
    let fold = folds.find((each) => each.kind === event.kind && event.time - each.start < FOLD_SECONDS);
    if (fold === undefined) {
      fold = { kind: event.kind, start: event.time, row: element("li"), texts: [], count: 0 };
      folds.push(fold);
      byId("events").prepend(fold.row);
    }
    fold.count++;
    fold.texts.unshift(name ? event.text.replaceAll(name, shortName(name)) : event.text);
    fold.texts.length = Math.min(fold.texts.length, MAX_FOLDED);
    changed.add(fold);
  }
  changed.forEach(showFold);
  const newest = events.at(-1)?.time ?? 0;
  folds = folds.filter((fold) => newest - fold.start < FOLD_SECONDS);
  while (byId("events").childElementCount > MAX_EVENTS) byId("events").lastElementChild.remove();
}

// Shows the newest text of a row. The other texts appear when the row is opened.
function showFold(fold) {
  const [text, ...others] = fold.texts;
  const kind = fold.kind.replaceAll("_", " ");
  const line = [
    element("time", new Date(fold.start * 1000).toLocaleTimeString()),
    element("span", fold.count > 1 ? `${kind} × ${fold.count}` : kind, "kind"),
    text,
  ];
  if (!others.length) {
    fold.row.replaceChildren(...line);
    return;
  }
  const details = element("details");
  details.open = fold.row.querySelector("details")?.open ?? false;
  const summary = element("summary");
  summary.append(...line);
  details.append(summary, ...others.map((each) => element("p", each)));
  if (fold.count > fold.texts.length) details.append(element("p", `and ${fold.count - fold.texts.length} earlier`));
  fold.row.replaceChildren(details);
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
    samples = [];
    setTimeout(refresh, INTERVAL);
    return;
  }
  try {
    const answer = await ask(`cache/state?since=${lastEvent}`);
    if (state !== null && state.started !== answer.started) {
      lastEvent = 0;
      samples = [];
    }
    if (!samples.length) await recall();
    state = answer;
    byId("model").textContent = state.model;
    say("live");
    list();
    draw();
    count();
    sample();
    plot();
    log(state.events);
    if (pointed !== null && contentOf(pointed) !== described) describe(pointed);
  } catch (error) {
    say(`no response: ${error.message}`, true);
  }
  setTimeout(refresh, INTERVAL);
}

function titleOf(holder) {
  if (holder.request_id === null) return "free, in the prefix cache; prompts that begin with this text reuse it:";
  const end = holder.start + holder.token_ids.length - 1;
  return `request ${shortName(holder.request_id)}, sample ${holder.sample}, tokens ${holder.start} to ${end}`;
}

function textOf(holder) {
  return holder.text || holder.token_ids.join(" ");
}

// Returns a text that changes whenever the description of a block may change.
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
      const title = element("p", titleOf(holder));
      if (holder.request_id !== null) title.title = holder.request_id;
      parts.push(title, element("code", textOf(holder)));
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
canvas.addEventListener("click", () => pointed !== null && markNextHolder(pointed));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && marked !== null) mark(null);
});
canvas.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && pointed !== null) markNextHolder(pointed);
  const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  if (move === undefined) return;
  event.preventDefault();
  point(pointed === null ? 0 : pointed + move);
});
addEventListener("resize", () => state && draw());
refresh();
