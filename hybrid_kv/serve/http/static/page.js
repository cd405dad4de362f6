// The page at /. Whatever comes from a model or a document is put in as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { info: null, document: null, turns: [], marked: [], abort: null, key: "" };
try { state.key = sessionStorage.getItem("hybrid-kv-key") || ""; } catch { /* no storage */ }

function el(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Talking to the server ---------------------------------------------------------------------------

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (state.key) headers.authorization = `Bearer ${state.key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey();
  let message = `the server said ${answer.status}`;
  try { message = (await answer.json()).error.message; } catch { /* not from the server */ }
  throw Object.assign(new Error(message), { status: answer.status });
}

const post = (path, content, signal) => call(path, {
  method: "POST", signal, body: JSON.stringify(content), headers: { "content-type": "application/json" },
});

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      let name = "message", data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) yield [name, JSON.parse(data)];
    }
  }
}

function askForKey() {
  $("key-row").hidden = false;
  $("key").focus();
}

async function connect() {
  try {
    state.info = await (await call("/hybrid_kv/info")).json();
  } catch (error) {
    $("served").textContent = error.message;
    return;
  }
  const { model, method, methods, context, chat } = state.info;
  const limit = context ? ` · up to ${context.toLocaleString("en")} tokens` : "";
  const raw = chat ? "" : " · continues text (no chat template)";
  $("served").textContent = `${model} · ${method}${limit}${raw}`;
  document.title = `${model} – hybrid-kv`;
  $("method").replaceChildren(new Option("as served", ""), ...methods.map((name) => new Option(name, name)));
  $("key-row").hidden = true;
}

// The document ------------------------------------------------------------------------------------

function problem(message) {
  $("document-problem").textContent = message;
  $("document-problem").hidden = !message;
}

async function take(content, name) {
  problem("");
  $("read").disabled = true;
  try {
    const body = typeof content === "string" ? new TextEncoder().encode(content) : content;
    const answer = await call("/hybrid_kv/documents", {
      method: "POST", body, headers: { "content-type": "application/octet-stream" },
    });
    const found = await answer.json();
    const text = new TextDecoder("utf-8").decode(body); // the server has refused all else
    state.document = { ident: found.document, text, points: null, body };
    state.marked = [];
    forgetAnswers();
    const counts = `${found.tokens.toLocaleString("en")} tokens, ${found.characters.toLocaleString("en")} characters`;
    $("facts").replaceChildren(el("b", { textContent: name }), ` · ${counts}`);
    $("give").hidden = true;
    $("given").hidden = false;
    showText([]);
    $("question").focus();
    await read();
  } catch (error) {
    problem(error.message);
  } finally {
    $("read").disabled = false;
  }
}

async function read() {
  progress("Reading", 0, 1);
  const began = performance.now();
  for await (const [name, data] of events(await post("/hybrid_kv/read", { document: state.document.ident }))) {
    if (name === "prefill") progress("Reading", data.done, data.total);
    if (name === "error") throw new Error(data.error.message);
    if (name === "done") {
      const seconds = (performance.now() - began) / 1e3;
      const known = data.reused_tokens ? `; ${data.reused_tokens.toLocaleString("en")} tokens were known` : "";
      progress(`Read in ${seconds.toFixed(1)} s${known}`, 1, 1);
    }
  }
}

function progress(label, done, total) {
  const counts = total > 1 ? ` ${done.toLocaleString("en")} of ${total.toLocaleString("en")} tokens` : "";
  $("prefill-label").textContent = label + counts;
  $("prefill").max = total;
  $("prefill").value = done;
}

/** Server offsets count characters as Python does; JavaScript counts those beyond U+FFFF twice. */
function toUnits(offset) {
  const given = state.document;
  if (given.points === null) {
    given.points = [];
    for (const match of given.text.matchAll(/[\u{10000}-\u{10ffff}]/gu)) {
      given.points.push(match.index - given.points.length);
    }
  }
  let low = 0, high = given.points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (given.points[middle] < offset) low = middle + 1; else high = middle;
  }
  return offset + low;
}

function showText(spans) {
  const text = state.document.text, parts = [];
  const most = Math.max(...spans.map((span) => span.weight), 0);
  let end = 0;
  state.marked = [];
  for (const span of [...spans].sort((a, b) => a.begin - b.begin)) {
    if (span.begin < end) continue;
    parts.push(text.slice(end, span.begin));
    const level = Math.max(1, Math.ceil(4 * span.weight / most));
    const mark = el("mark", { className: `w${level}`, textContent: text.slice(span.begin, span.end) });
    mark.title = `${(100 * span.weight).toFixed(1)}% of the attention`;
    parts.push(mark);
    state.marked.push({ ...span, mark });
    end = span.end;
  }
  parts.push(text.slice(end));
  $("text").replaceChildren(...parts);
}

function goTo(spans, place) {
  showText(spans);
  const found = state.marked.filter((span) => span.begin >= place.begin && span.end <= place.end);
  for (const span of found) span.mark.classList.add("here");
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  found[0]?.mark.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
}

// Questions ---------------------------------------------------------------------------------------

function settings() {
  const own = {};
  if ($("method").value) own.method = $("method").value;
  if ($("budget").value.trim()) own.budget = $("budget").value.trim();
  if ($("audit").checked) own.audit = 4;
  if ($("doubts").checked) own.errors = true;
  return {
    hybrid_kv: own,
    max_tokens: Number($("max-tokens").value) || 256,
    temperature: Number($("temperature").value) || 0,
  };
}

async function ask(question) {
  $("hint")?.remove();
  const answer = el("p", { className: "answer waiting", textContent: "…" });
  const card = el("article", {}, el("h3", { textContent: question }), answer);
  $("answers").append(card);
  card.scrollIntoView({ block: "end" });
  state.abort = new AbortController();
  busy(true);
  let text = "", done = null;
  const told = [];
  let errors = []; // of tokens whose text is still to come
  try {
    const content = { document: state.document?.ident ?? null, question, ...settings() };
    if (state.info?.chat) content.turns = state.turns;
    const stream = await askAgain(content);
    for await (const [name, data] of events(stream)) {
      if (name === "prefill" && !text) {
        answer.textContent = `reading ${data.done.toLocaleString("en")} of ${data.total.toLocaleString("en")} tokens…`;
      } else if (name === "token") {
        if (data.error) errors.push(data.error);
        if (!data.text) continue;
        if (!text) answer.replaceChildren();
        text += data.text;
        answer.classList.remove("waiting");
        answer.append(piece(data.text, errors));
        told.push(...errors);
        errors = [];
      } else if (name === "error") {
        throw new Error(data.error.message);
      } else if (name === "done") {
        done = data;
      }
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    card.append(el("p", { className: "problem", textContent: stopped ? "stopped" : error.message }));
    if (!text) answer.remove();
  } finally {
    state.abort = null;
    busy(false);
  }
  if (done) {
    answer.classList.remove("waiting");
    if (!text) answer.textContent = "(nothing)";
    state.turns.push({ question, answer: text });
    card.append(figures(done, [...told, ...errors]), ...places(done));
  } else if (!text && $("question").value === "") {
    $("question").value = question; // nothing is lost
  }
  card.scrollIntoView({ block: "nearest" });
}

/** Above these a token is marked: expected KL from full attention, in nats; risk that it is another one. */
const DOUBTS = { kl: 0.01, flip: 0.1 };
const isDoubtful = (error) => error.kl > DOUBTS.kl || error.flip > DOUBTS.flip;

/** Text of an answer; marked if one of its tokens is doubtful, in the words of the worst. */
function piece(text, errors) {
  const doubtful = errors.filter(isDoubtful);
  if (!doubtful.length) return text;
  const most = (name) => Math.max(...doubtful.map((error) => error[name]));
  const mark = el("span", { className: "doubt", textContent: text });
  mark.title = `${percent(most("flip"))} risk that full attention says something else here; expected distance from it `
    + `${most("kl").toPrecision(2)} nats, 9 of 10 such tokens stay below ${most("kl_bar").toPrecision(2)}`;
  return mark;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.095 ? 1 : 0)}%`;

/** The server keeps the latest documents only: one that it has forgotten is sent again. */
async function askAgain(content) {
  try {
    return await post("/hybrid_kv/ask", content, state.abort.signal);
  } catch (error) {
    if (error.status !== 404 || !state.document) throw error;
    await call("/hybrid_kv/documents", {
      method: "POST", body: state.document.body, signal: state.abort.signal,
      headers: { "content-type": "application/octet-stream" },
    });
    return post("/hybrid_kv/ask", content, state.abort.signal);
  }
}

function figures(done, errors) {
  const rows = [];
  const add = (name, value, small) => rows.push(
    el("div", {}, el("dt", { textContent: name }), el("dd", {}, value, ...(small ? [" ", el("small", { textContent: small })] : []))));
  const share = `${(100 * done.prompt_share).toFixed(1)}%`;
  add("attended per token", Math.round(done.attended_per_token).toLocaleString("en"), `${share} of the context`);
  if (done.tpot_ms !== null) add("per token", `${done.tpot_ms.toFixed(1)} ms`);
  if (done.ttft_s !== null) add("to the first", `${done.ttft_s.toFixed(2)} s`);
  add("prompt", `${done.prompt_tokens.toLocaleString("en")} tokens`, `${done.reused_tokens.toLocaleString("en")} known`);
  if (typeof done.prefill_error === "number") add("of the prompt read", `${(100 * done.prefill_density).toFixed(1)}%`, `error ${(100 * done.prefill_error).toFixed(1)}%`);
  if (errors.length) {
    add("doubtful tokens", `${errors.filter(isDoubtful).length} of ${errors.length}`, `risk above ${percent(DOUBTS.flip)}, or far from full attention`);
  }
  if (done.recall !== null) add("recall", `${(100 * done.recall).toFixed(1)}%`);
  if (done.missed_mass !== null) add("attention missed", `${(100 * done.missed_mass).toFixed(2)}%`);
  if (typeof done.mass_error === "number") add("mass estimated", `${done.mass_error < 0 ? "" : "+"}${(100 * done.mass_error).toFixed(2)}%`, "too much or too little");
  add("device", bytes(done.device_kv_bytes));
  add("host", bytes(done.host_kv_bytes), `+ ${bytes(done.host_index_bytes)} index`);
  if (done.ended_by !== "stop") add("ended by", done.ended_by === "length" ? "its longest length" : done.ended_by);
  return el("dl", {}, ...rows);
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < units.length - 1) { count /= 1024; power += 1; }
  return `${count.toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** Where the answer looked: near tokens are one place, the heaviest first. */
function places(done) {
  if (!state.document || !done.places.length) return [];
  const spans = done.places.map((span) => ({ ...span, begin: toUnits(span.begin), end: toUnits(span.end) }));
  const text = state.document.text, groups = [];
  for (const span of [...spans].sort((a, b) => a.begin - b.begin)) {
    const last = groups.at(-1);
    if (last && span.begin - last.end < 40) {
      last.end = Math.max(last.end, span.end);
      last.weight += span.weight;
    } else groups.push({ ...span });
  }
  groups.sort((a, b) => b.weight - a.weight);
  const items = groups.slice(0, 5).map((group) => {
    const snippet = el("span", { className: "snippet" });
    let end = Math.max(0, group.begin - 40);
    if (end) snippet.append("…");
    for (const span of spans.filter((one) => one.begin >= group.begin && one.end <= group.end)
      .sort((a, b) => a.begin - b.begin)) {
      snippet.append(text.slice(end, span.begin), el("mark", { textContent: text.slice(span.begin, span.end) }));
      end = span.end;
    }
    snippet.append(text.slice(end, group.end + 40), group.end + 40 < text.length ? "…" : "");
    const share = el("span", { className: "share", textContent: `${(100 * group.weight).toFixed(1)}%` });
    share.append(el("span", { className: "unseen", textContent: " of the attention; show in the text" }));
    const button = el("button", { type: "button" }, snippet, share);
    button.addEventListener("click", () => goTo(spans, group));
    return el("li", {}, button);
  });
  showText(spans);
  return [el("h4", { textContent: "Where it looked" }), el("ol", { className: "places" }, ...items)];
}

function busy(is) {
  $("send").disabled = is;
  $("stop").hidden = !is;
  $("clear").hidden = is;
}

function forgetAnswers() {
  state.turns = [];
  $("answers").replaceChildren();
  $("clear").hidden = true;
}

// What people do ----------------------------------------------------------------------------------

$("give").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("paste").value.trim()) take($("paste").value, "Pasted text");
  else problem("paste some text, or choose a file");
});
$("paste").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("give").requestSubmit();
});
$("choose").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { if ($("file").files[0]) takeFile($("file").files[0]); });
$("replace").addEventListener("click", () => {
  state.abort?.abort();
  state.document = null;
  forgetAnswers();
  $("given").hidden = true;
  $("give").hidden = false;
  $("file").value = "";
  $("paste").focus();
});

async function takeFile(file) {
  try {
    await take(new Uint8Array(await file.arrayBuffer()), file.name);
  } catch {
    problem(`${file.name} cannot be read`);
  }
}

document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  const [file] = event.dataTransfer.files;
  if (file) takeFile(file);
  else if (event.dataTransfer.getData("text")) take(event.dataTransfer.getData("text"), "Dropped text");
});

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || state.abort) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => state.abort?.abort());
$("clear").addEventListener("click", () => { forgetAnswers(); $("question").focus(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.abort?.abort();
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("question").focus();
  }
});
$("doubts").addEventListener("change", () => $("answers").classList.toggle("calm", !$("doubts").checked));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  try { sessionStorage.setItem("hybrid-kv-key", state.key); } catch { /* kept here alone */ }
  connect();
});

connect();
