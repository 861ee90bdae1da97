"use strict";

// A chat with the served model, over POST v1/chat/completions. The tab keeps the chat and the API
// key in its session storage, so that both survive a reload.

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

// Blocks of a Markdown text: code between fences, and the texts around it.
function blocks(text) {
  const found = [], lines = text.split("\n");
  let fence = null, kept = [];
  const close = (isCode) => {
    if (isCode || kept.length) found.push({ isCode, text: kept.join("\n") });
    kept = [];
  };
  for (const line of lines) {
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (fence === null && mark) {
      close(false);
      fence = mark;
    } else if (fence !== null && mark?.startsWith(fence) && line.trim() === mark) {
      close(true);
      fence = null;
    } else {
      kept.push(line);
    }
  }
  close(fence !== null);
  return found;
}

function blockView({ isCode, text }) {
  const view = document.createElement("div");
  if (isCode) {
    view.className = "code";
    const copy = add(view, "button", "copy", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => copyText(text, copy));
    add(view, "pre", "", text);
    return view;
  }
  for (const [index, line] of text.split("\n").entries()) {
    if (index) view.append("\n");
    const heading = /^#{1,6} +(.*)/.exec(line)?.[1];
    // Parts with odd indices are inline code or bold text.
    for (const part of (heading ?? line).split(/(`[^`]+`|\*\*[^*]+\*\*)/)) {
      if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) {
        add(view, "code", "", part.slice(1, -1));
      } else if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) {
        add(view, "b", "", part.slice(2, -2));
      } else if (part) {
        heading === undefined ? view.append(part) : add(view, "b", "", part);
      }
    }
  }
  return view;
}

// Browsers allow access to the clipboard only to pages loaded over HTTPS or from this machine.
function copyText(text, button) {
  const copied = navigator.clipboard?.writeText(text) ?? Promise.reject();
  copied.then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Not allowed"; });
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// The view of a message. Blocks that do not change stay as they are while the text grows.
class MessageView {
  constructor(message) {
    this.view = add(byId("messages"), "div", `message ${message.role}`, "");
    this.message = message;
    this.shown = [];
    this.update();
  }

  update() {
    const list = byId("messages");
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    const { role, content, reasoning } = this.message;
    if (reasoning && !this.reasoning) {
      const details = document.createElement("details");
      details.className = "reasoning";
      add(details, "summary", "", "Reasoning");
      this.reasoning = add(details, "div", "", "");
      this.view.prepend(details);
    }
    if (reasoning) this.reasoning.textContent = reasoning;
    if (content && !this.content) this.content = add(this.view, "div", "content", "");
    if (content && role === "user") this.content.textContent = content;
    if (content && role !== "user") this.showBlocks(blocks(content));
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  showBlocks(all) {
    for (const [index, block] of all.entries()) {
      const before = this.shown[index];
      if (before?.text === block.text && before.isCode === block.isCode) continue;
      const old = this.content.children[index], view = blockView(block);
      old ? old.replaceWith(view) : this.content.append(view);
    }
    while (this.content.children.length > all.length) this.content.lastElementChild.remove();
    this.shown = all;
  }
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("again").hidden = running !== null || !messages.length;
  if (running === null) sessionStorage.setItem("chat", JSON.stringify(messages));
}

// Requests a path of the server with the API key. With other credentials than "omit", browsers
// would ask for a user name and a password if the key is wrong.
async function request(path, options = {}) {
  const key = byId("key").value.trim();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, credentials: "omit" });
  if (response.ok) return response;
  if (response.status === 401) {
    byId("settings").open = true;
    byId("key").focus();
    throw new Error("This server needs an API key. Enter it in the settings.");
  }
  const error = await response.json().catch(() => null);
  throw new Error(error?.error?.message ?? `The server answered ${response.status}.`);
}

function requestBody() {
  const system = byId("system").value.trim();
  const body = {
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

function showStats(usage, start, first, end) {
  if (!usage) return;
  const count = usage.completion_tokens, seconds = (performance.now() - first) / 1000;
  const rate = seconds > 0 && count > 1 ? `${((count - 1) / seconds).toFixed(1)} tokens/s, ` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const cut = end === "length" ? ", cut off at the maximum number of tokens" : "";
  byId("stats").textContent =
    `${rate}${count} tokens, first after ${((first - start) / 1000).toFixed(2)} s, ` +
    `prompt of ${usage.prompt_tokens} tokens, ${cached} from the cache${cut}`;
}

// Generates an answer to the chat, and adds it to the chat even if it was stopped.
async function answer() {
  const controller = new AbortController();
  setRunning(controller);
  byId("stats").textContent = "waiting";
  const message = { role: "assistant", content: "" };
  const view = new MessageView(message);
  const start = performance.now();
  let first = null, end = null, error = null;
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: controller.signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      for (const kind of ["reasoning", "content"]) {
        if (!choice?.delta[kind]) continue;
        first ??= performance.now();
        message[kind] = (message[kind] ?? "") + choice.delta[kind];
        view.update();
      }
      end = choice?.finish_reason ?? end;
      if (first !== null) showStats(event.usage, start, first, end);
    }
    if (end === null) throw new Error("The connection to the server was lost.");
  } catch (caught) {
    error = caught;
  }
  if (running !== controller) return;  // the chat was cleared
  if (error && error.name !== "AbortError") add(view.view, "div", "error", error.message);
  if (first === null) byId("stats").textContent = "";
  if (message.content || message.reasoning) messages.push(message);
  setRunning(null);
}

function send(event) {
  event?.preventDefault();
  const content = byId("text").value.trim();
  if (!content || running) return;
  byId("text").value = "";
  messages.push({ role: "user", content });
  new MessageView(messages.at(-1));
  byId("messages").scrollTop = byId("messages").scrollHeight;
  answer();
}

// Generates the last answer again, also if it failed or was stopped before its first token.
function again() {
  if (running || !messages.length) return;
  if (messages.at(-1).role === "assistant") messages.pop();
  const list = byId("messages");
  while (list.lastElementChild?.classList.contains("assistant")) list.lastElementChild.remove();
  answer();
}

function clear() {
  const stopped = running;
  messages.length = 0;
  byId("messages").replaceChildren();
  byId("stats").textContent = "";
  setRunning(null);
  stopped?.abort();
  byId("text").focus();
}

// Shows the name of the model, or an error message if the API key is missing or wrong.
async function showModel() {
  try {
    const models = await (await request("v1/models")).json();
    document.title = byId("model").textContent = models.data[0].id;
    byId("stats").textContent = "";
  } catch (error) {
    byId("stats").textContent = error.message;
  }
}

function start() {
  byId("form").addEventListener("submit", send);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("again").addEventListener("click", again);
  byId("clear").addEventListener("click", clear);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  byId("key").value = sessionStorage.getItem("key") ?? "";
  byId("key").addEventListener("change", () => {
    sessionStorage.setItem("key", byId("key").value.trim());
    showModel();
  });
  for (const message of JSON.parse(sessionStorage.getItem("chat") ?? "[]")) {
    messages.push(message);
    new MessageView(message);
  }
  setRunning(null);
  showModel();
}

start();
