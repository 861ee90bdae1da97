"use strict";

// A chat with the served model, over POST v1/chat/completions.

const byId = (id) => document.getElementById(id);
const messages = [];  // the chat so far, in OpenAI's format
let running = null;   // AbortController of the answer that is being generated

// Adds an element with a text. The text is never read as HTML.
function add(parent, tag, name, text) {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  parent.append(element);
  return element;
}

function show(message) {
  const view = add(byId("messages"), "div", `message ${message.role}`, "");
  const parts = { view, reasoning: null, content: null };
  if (message.reasoning) append(parts, "reasoning", message.reasoning);
  append(parts, "content", message.content);
  return parts;
}

// Appends text to the reasoning or the content of a message, and scrolls if the end is in view.
function append(parts, kind, text) {
  const list = byId("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  if (kind === "reasoning" && !parts.reasoning) {
    const details = document.createElement("details");
    details.className = "reasoning";
    add(details, "summary", "", "Reasoning");
    parts.reasoning = add(details, "div", "", "");
    parts.view.prepend(details);
  } else if (kind === "content" && !parts.content) {
    parts.content = add(parts.view, "div", "content", "");
  }
  parts[kind].append(text);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("again").hidden = running !== null || messages.at(-1)?.role !== "assistant";
}

function requestBody() {
  const system = byId("system").value.trim();
  const body = {
    model: document.title,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const temperature = byId("temperature").value, most = byId("max-tokens").value;
  if (temperature !== "") body.temperature = Number(temperature);
  if (most !== "") body.max_tokens = Number(most);
  return body;
}

// Yields the JSON of each event of a stream.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (buffer + value).split("\n\n");
    buffer = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

function showStats(usage, start, first) {
  if (!usage) return;
  const count = usage.completion_tokens, seconds = (performance.now() - first) / 1000;
  const rate = seconds > 0 && count > 1 ? `${((count - 1) / seconds).toFixed(1)} tokens/s, ` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  byId("stats").textContent =
    `${rate}${count} tokens, first after ${((first - start) / 1000).toFixed(2)} s, ` +
    `prompt of ${usage.prompt_tokens} tokens, ${cached} from the cache`;
}

// Generates an answer to the chat, and adds it to the chat even if it was stopped.
async function answer() {
  const controller = new AbortController();
  setRunning(controller);
  byId("stats").textContent = "waiting";
  const message = { role: "assistant", content: "" };
  const parts = show(message);
  const start = performance.now();
  let first = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      for (const kind of ["reasoning", "content"]) {
        if (!delta[kind]) continue;
        first ??= performance.now();
        message[kind] = (message[kind] ?? "") + delta[kind];
        append(parts, kind, delta[kind]);
      }
      if (first !== null) showStats(event.usage, start, first);
    }
  } catch (error) {
    if (error.name !== "AbortError") add(parts.view, "div", "error", error.message);
    if (first === null) byId("stats").textContent = "";
  }
  if (message.content || message.reasoning) messages.push(message);
  setRunning(null);
}

function send(event) {
  event?.preventDefault();
  const content = byId("text").value.trim();
  if (!content || running) return;
  byId("text").value = "";
  messages.push({ role: "user", content });
  show(messages.at(-1));
  answer();
}

function again() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  messages.pop();
  byId("messages").lastElementChild.remove();
  answer();
}

function clear() {
  running?.abort();
  messages.length = 0;
  byId("messages").replaceChildren();
  byId("stats").textContent = "";
  setRunning(null);
}

async function start() {
  byId("form").addEventListener("submit", send);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("again").addEventListener("click", again);
  byId("clear").addEventListener("click", clear);
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  const models = await (await fetch("v1/models")).json();
  document.title = byId("model").textContent = models.data[0].id;
}

start();
