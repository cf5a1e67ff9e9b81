// Asks the API beside this page, and shows what comes. Texts are only ever set as text, never as markup.
"use strict";
const at = (id) => document.getElementById(id);
let messages = [], running = null;

function make(parent, kind, text = "", name = "") {
  const node = parent.appendChild(document.createElement(kind));
  node.textContent = text;
  node.className = name;
  return node;
}

function headers() {
  const key = at("key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

function show(problem) {
  at("problem").hidden = !problem;
  at("problem").textContent = problem;
}

async function ask(path, options = {}) {
  const response = await fetch(path, {...options, headers: headers()});
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({error: {message: response.statusText}}));
  if (response.status === 401) at("keyed").hidden = false;
  throw Object.assign(new Error(error.message), {code: error.code});
}

async function models() {
  try {
    const {data} = await (await ask("v1/models")).json();
    at("run").textContent = data[0].owned_by;
    at("model").replaceChildren();
    for (const model of data) make(at("model"), "option", model.id);
    show("");
  } catch (error) { show(error.message); }
}

function bubble(role) {
  const turn = make(at("talk"), "div", "", `turn ${role}`);
  return {turn, said: make(turn, "p", "", "said"), why: make(turn, "div", "", "why")};
}

function explain(why, {path, at: place, versions, scores}) {
  make(why, "h2", place ? `${path}, from token ${place} on` : path, "path");
  make(why, "p", Object.entries(versions).map(([module, version]) => `${module} version ${version}`).join(", "));
  const told = Object.entries(scores);
  if (!told.length) return;
  make(why, "p", "scores of the router");
  const list = make(why, "ol"), values = told.map(([, score]) => score);
  const best = Math.max(...values), least = Math.min(...values);
  for (const [name, score] of told) {
    const item = make(list, "li");
    make(item, "span", name);
    const bar = make(item, "meter");
    bar.value = best > least ? (score - least) / (best - least) : 1;
    bar.setAttribute("aria-label", `score of ${name}, from the least to the best`);
    make(item, "span", score.toFixed(2));
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n\n");
    text = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// A conversation that has become too long for a path loses its first turns.
async function begin(wish, signal) {
  for (;;) {
    const place = wish.messages ? "v1/chat/completions" : "v1/completions";
    try {
      return await ask(place, {method: "POST", body: JSON.stringify(wish), signal});
    } catch (error) {
      if (error.code !== "context_length_exceeded" || !wish.messages || wish.messages.length < 3) throw error;
      wish.messages.splice(0, 2);
    }
  }
}

async function send(text) {
  const isPlain = at("plain").checked, wish = {
    model: at("model").value, stream: true, temperature: Number(at("temperature").value),
    max_tokens: Number(at("tokens").value),
  };
  if (wish.model === "auto" && Number(at("every").value)) wish.every = Number(at("every").value);
  if (isPlain) wish.prompt = text;
  else wish.messages = [...messages, {role: "user", content: text}];
  bubble("user").said.textContent = text;
  const {turn, said, why} = bubble("assistant");
  turn.setAttribute("aria-busy", "true");
  running = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  show("");
  try {
    for await (const event of events(await begin(wish, running.signal))) {
      for (const one of event.dipaco?.turns ?? []) explain(why, one);
      for (const choice of event.choices) said.append(choice.delta?.content ?? choice.text ?? "");
    }
    if (!isPlain) messages = [...wish.messages, {role: "assistant", content: said.textContent}];
  } catch (error) {
    if (error.name !== "AbortError") show(error.message);
  }
  turn.removeAttribute("aria-busy");
  running = null;
  at("stop").disabled = true;
  at("send").disabled = false;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (running || !text.trim()) return;
  at("prompt").value = "";
  send(text);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("again").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("talk").replaceChildren();
  show("");
});
at("key").addEventListener("change", models);
models();
