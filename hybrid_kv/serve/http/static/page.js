// The page at /. Whatever comes from a model or a document is put in as text, never as HTML.
// Documents and answers lie on the server; a tab shows them, and asks again when it is looked at.
"use strict";

import { markdown } from "./markdown.js";
import { bytes, count, firstWords, percent, several, timeLeft, when } from "./words.js";

const $ = (id) => document.getElementById(id);
const FREE = "none"; // as the server calls the conversation without a document
const state = { info: null, documents: [], document: null, turns: [], marked: [], abort: null, reading: null, opening: null, key: "" };
try { state.key = sessionStorage.getItem("hybrid-kv-key") || ""; } catch { /* no storage */ }
const tabs = "BroadcastChannel" in self ? new BroadcastChannel("hybrid-kv") : null;

function el(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Talking to the server ---------------------------------------------------------------------------

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (state.key) headers.authorization = `Bearer ${state.key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : lost();
  }
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey();
  let message = `the server said ${answer.status}`, code = null;
  try { ({ message, code } = (await answer.json()).error); } catch { /* not from the server */ }
  const wait = answer.headers.get("retry-after");
  if (answer.status === 429 && wait) message = `The server is busy with others; ask again in about ${wait} s.`;
  throw Object.assign(new Error(message), { status: answer.status, code });
}

/** The error of a server that does not answer; the page looks for it until it is back. */
function lost() {
  if (!state.lost) {
    state.lost = true;
    $("served").textContent = "no connection to the server; trying again…";
    $("served").classList.add("lost");
    setTimeout(lookForServer, 1000);
  }
  return new Error("The server does not answer. Is it still running? The page goes on when it is back.");
}

async function lookForServer() {
  try {
    if (!(await fetch("/health")).ok) throw new Error("it is ending");
  } catch {
    setTimeout(lookForServer, 2000);
    return;
  }
  state.lost = false;
  $("served").classList.remove("lost");
  await connect();
}

const post = (path, content, signal) => call(path, {
  method: "POST", signal, body: JSON.stringify(content), headers: { "content-type": "application/json" },
});

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let value, done;
    try {
      ({ value, done } = await reader.read());
    } catch (error) {
      throw error.name === "AbortError" ? error : lost();
    }
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
  const { model, method, methods, context, chat, kept } = state.info;
  const limit = context ? ` · up to ${count(context)} tokens` : "";
  const raw = chat ? "" : " · continues text (no chat template)";
  $("served").textContent = `${model} · ${method}${limit}${raw}`;
  $("keeping").textContent = "Documents and answers stay on the server, for all who may ask it, "
    + (kept ? "until they are removed." : "until it ends; started with --cache-dir it keeps them.");
  document.title = `${model} – hybrid-kv`;
  const chosen = $("method").value;
  $("method").replaceChildren(new Option("as served", ""), ...methods.map((name) => new Option(name, name)));
  $("method").value = chosen;
  $("key-row").hidden = true;
  await refresh();
}

// The documents -----------------------------------------------------------------------------------

function problem(message) {
  $("document-problem").textContent = message;
  $("document-problem").hidden = !message;
}

/** What the server has now: the list, and what other tabs have asked about the document here. */
async function refresh() {
  try {
    const { documents, free_questions } = await (await call("/hybrid_kv/documents")).json();
    state.documents = documents;
    state.free = free_questions;
    const wanted = location.hash.slice(1);
    const there = (ident) => ident === FREE || documents.some((one) => one.document === ident);
    const shown = state.document?.ident ?? FREE;
    if (!there(shown)) {
      await open(FREE);
      problem("The document was removed.");
    } else if (!state.opened) {
      await open(there(wanted) && wanted ? wanted : documents[0]?.document ?? FREE);
    } else if (!state.abort) {
      await showTurns(await whole(shown, false));
    }
    list();
  } catch (error) {
    problem(error.message);
  }
}

const whole = async (ident, text = true) =>
  (await call(`/hybrid_kv/documents/${encodeURIComponent(ident)}?text=${text}`)).json();

/** Tells the other tabs of this browser, and takes in what has changed. */
async function changed() {
  tabs?.postMessage("changed");
  await refresh();
}

function list() {
  const shown = state.document?.ident ?? FREE;
  const items = [{ document: FREE, name: "New document…", questions: state.free }, ...state.documents];
  $("documents").replaceChildren(...items.map((one) => {
    const facts = [];
    if (one.document === FREE) facts.push("or ask without one");
    else facts.push(one.tokens === null ? `${count(one.characters)} characters` : several(one.tokens, "token"), when(one.added));
    if (one.questions) facts.push(several(one.questions, "question"));
    const button = el("button", { type: "button" },
      el("b", { textContent: one.name }), el("small", { textContent: facts.join(" · ") }));
    if (one.document === shown) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => choose(one.document));
    return el("li", {}, button);
  }));
}

async function choose(ident) {
  if (ident === (state.document?.ident ?? FREE)) return;
  state.abort?.abort();
  state.reading?.abort();
  try {
    await open(ident);
    list();
  } catch (error) {
    problem(error.message);
  }
}

async function open(ident) {
  const opening = state.opening = show(ident);
  try {
    await opening;
  } finally {
    if (state.opening === opening) state.opening = null;
  }
}

async function show(ident) {
  problem("");
  const found = await whole(ident);
  state.opened = true;
  state.document = ident === FREE ? null : { ident, text: found.text, points: null };
  state.marked = [];
  history.replaceState(null, "", ident === FREE ? location.pathname : `#${ident}`);
  $("give").hidden = ident !== FREE;
  $("given").hidden = ident === FREE;
  $("reading").hidden = true;
  if (state.document) {
    const size = `${count(found.characters)} characters`;
    const tokens = found.tokens === null ? size : `${several(found.tokens, "token")}, ${size}`;
    $("facts").replaceChildren(el("b", { textContent: found.name }), ` · ${tokens}`);
    showText([]);
  }
  state.turns = null;
  await showTurns(found);
}

/** Cards of a conversation, unless they are there. */
async function showTurns({ turns }) {
  const marks = (some) => some?.map((turn) => `${turn.asked}${turn.problem}`).join();
  if (marks(state.turns) === marks(turns)) return;
  state.turns = turns;
  $("answers").replaceChildren(...turns.map((turn) => {
    const { card, answer } = cardOf(turn.question);
    finish(card, answer, turn);
    return card;
  }));
  talk();
  $("answers").scrollTop = $("answers").scrollHeight;
}

function talk() {
  $("hint").hidden = $("answers").childElementCount > 0;
  $("clear").hidden = !$("answers").childElementCount || state.abort !== null;
}

async function take(content, name) {
  problem("");
  $("read").disabled = true;
  try {
    const body = typeof content === "string" ? new TextEncoder().encode(content) : content;
    const answer = await call(`/hybrid_kv/documents?name=${encodeURIComponent(name)}`, {
      method: "POST", body, headers: { "content-type": "application/octet-stream" },
    });
    const found = await answer.json();
    state.abort?.abort();
    state.reading?.abort();
    await open(found.document);
    $("paste").value = "";
    $("file").value = "";
    changed();
    $("question").focus();
    await read();
  } catch (error) {
    problem(error.name === "AbortError" ? "stopped; what is left of it is read with the first question" : error.message);
    if (error.name === "AbortError") $("reading").hidden = true;
  } finally {
    $("read").disabled = false;
  }
}

async function read() {
  const own = state.reading = new AbortController(), ident = state.document.ident;
  const left = timeLeft();
  $("reading").hidden = false;
  progress("Waiting for the server", 0, 1);
  const began = performance.now();
  try {
    for await (const [name, data] of events(await post("/hybrid_kv/read", { document: ident }, own.signal))) {
      if (name === "prefill") progress("Reading", data.done, data.total, left(data));
      if (name === "error") throw new Error(data.error.message);
      if (name === "done") {
        const seconds = (performance.now() - began) / 1e3;
        const known = data.reused_tokens ? `; ${several(data.reused_tokens, "token")} ${data.reused_tokens === 1 ? "was" : "were"} known` : "";
        progress(`Read in ${seconds.toFixed(1)} s${known}`, 1, 1);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError" || state.document?.ident === ident) throw error;
  } finally {
    if (state.reading === own) state.reading = null;
  }
}

function progress(label, done, total, left = "") {
  const counts = total > 1 ? ` ${count(done)} of ${several(total, "token")}` : "";
  $("prefill-label").textContent = label + counts + left;
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

function cardOf(question) {
  const answer = el("div", { className: "answer" });
  return { card: el("article", {}, el("h3", { textContent: question }), answer), answer };
}

async function ask(question) {
  const { card, answer } = cardOf(question);
  answer.classList.add("waiting");
  answer.textContent = "…";
  const own = state.abort = new AbortController();
  busy(true);
  await state.opening?.catch(() => {}); // a question is for the document that was chosen
  $("answers").append(card);
  card.scrollIntoView({ block: "end" });
  const turn = { question, answer: "", tokens: [], done: null, problem: null };
  const left = timeLeft();
  let drawn = 0, waited = setTimeout(() => { answer.textContent = "waiting for its turn…"; }, 2000);
  const draw = () => {
    drawn = 0;
    answer.classList.remove("waiting");
    answer.replaceChildren(...markdown(turn.answer, doubts(turn.tokens)));
  };
  try {
    const content = { document: state.document?.ident ?? null, question, ...settings() };
    for await (const [name, data] of events(await post("/hybrid_kv/ask", content, own.signal))) {
      if (name !== "asked") clearTimeout(waited);
      if (name === "asked") turn.asked = data.asked;
      else if (name === "prefill" && !turn.answer) {
        answer.textContent = `reading ${count(data.done)} of ${several(data.total, "token")}${left(data)}…`;
      } else if (name === "token") {
        turn.tokens.push(data);
        turn.answer += data.text;
        if (turn.answer && !drawn) drawn = requestAnimationFrame(draw);
      } else if (name === "error") {
        throw new Error(data.error.message);
      } else if (name === "done") {
        turn.done = data;
      }
    }
  } catch (error) {
    turn.problem = error.name === "AbortError" ? "stopped" : error.message;
    if (error.code === "context_length_exceeded" && state.turns?.length) {
      turn.problem += "; “Clear answers” takes the earlier ones out of the prompt";
    }
  } finally {
    clearTimeout(waited);
    cancelAnimationFrame(drawn);
    if (state.abort === own) state.abort = null;
    busy(state.abort !== null);
  }
  if (!turn.done && !turn.answer && $("question").value === "") $("question").value = question; // nothing is lost
  if (card.isConnected) { // else another document is shown by now
    finish(card, answer, turn);
    if (turn.done && state.document) showText(unitsOf(turn.done.places));
    card.scrollIntoView({ block: "nearest" });
    if (turn.answer || turn.done) state.turns?.push(turn);
    talk();
  }
  setTimeout(changed, turn.done ? 0 : 500); // when the server, too, has seen that it was stopped
}

/** The answer of a card as it stays: its text, what it took, where it looked, and why it ended. */
function finish(card, answer, turn) {
  const { done, problem: why } = turn;
  answer.classList.remove("waiting");
  if (turn.answer) answer.replaceChildren(...markdown(turn.answer, doubts(turn.tokens)));
  else if (done) answer.textContent = "(nothing)";
  else answer.remove();
  if (done?.ended_by === "timeout") card.append(note("cut short: the server’s time for one request ran out"));
  if (done?.not_kept) card.append(note(done.not_kept));
  if (why) card.append(note(why));
  if (done) card.append(...places(done), figures(done, (turn.tokens ?? []).map((one) => one.error).filter(Boolean)));
}

const note = (message) => el("p", { className: "problem", textContent: message });

/** Above these a token is marked: expected KL from full attention, in nats; risk that it is another one. */
const DOUBTS = { kl: 0.01, flip: 0.1 };
const isDoubtful = (error) => error.kl > DOUBTS.kl || error.flip > DOUBTS.flip;

/** Parts of an answer that are doubtful, in the words of the worst token; one without text counts to the next. */
function doubts(tokens) {
  const marks = [];
  let end = 0, held = [];
  for (const token of tokens ?? []) {
    if (token.error) held.push(token.error);
    if (!token.text) continue;
    const begin = end, doubtful = held.filter(isDoubtful);
    end += token.text.length;
    held = [];
    if (!doubtful.length) continue;
    const most = (name) => Math.max(...doubtful.map((error) => error[name]));
    const title = `${percent(most("flip"))} risk that full attention says something else here; expected distance from it `
      + `${most("kl").toPrecision(2)} nats, 9 of 10 such tokens stay below ${most("kl_bar").toPrecision(2)}`;
    marks.push({ begin, end, title });
  }
  return marks;
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

const unitsOf = (spans) => spans.map((span) => ({ ...span, begin: toUnits(span.begin), end: toUnits(span.end) }));

/** Where the answer looked: near tokens are one place, the heaviest first. */
function places(done) {
  if (!state.document || !done.places.length) return [];
  const spans = unitsOf(done.places);
  const text = state.document.text, groups = [];
  for (const span of [...spans].sort((a, b) => a.begin - b.begin)) {
    const last = groups.at(-1);
    if (last && span.begin - last.end < 40) {
      last.end = Math.max(last.end, span.end);
      last.weight += span.weight;
    } else groups.push({ ...span });
  }
  const strip = stripOf(spans, groups);
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
  const shown = groups.reduce((sum, group) => sum + group.weight, 0);
  const where = groups.length === 1 ? "one place" : `${groups.length} places`;
  const remaining = `${(100 * Math.max(0, 1 - shown)).toFixed(shown < 0.095 ? 1 : 0)}%`;
  const rest = `${percent(shown)} of the attention went to the marked words, in ${where} of the document. `
    + `The remaining ${remaining} went to the question and the answer, to the beginning and the end of the prompt, `
    + "which every step reads, and to words that weigh less each.";
  return [el("h4", { textContent: "Where it looked" }), strip,
    el("p", { className: "remaining", textContent: rest }), el("ol", { className: "places" }, ...items)];
}

/** The document from its beginning on the left to its end on the right, and how much of the attention went where. */
function stripOf(spans, groups) {
  const PARTS = 120, length = Math.max(1, state.document.text.length), weights = new Array(PARTS).fill(0);
  for (const span of spans) weights[Math.min(PARTS - 1, Math.floor(PARTS * span.begin / length))] += span.weight;
  const most = Math.max(...weights), svg = $("strip").content.firstElementChild.cloneNode(true);
  const model = svg.firstElementChild;
  model.remove();
  svg.setAttribute("viewBox", `0 0 ${PARTS} 20`);
  const heaviest = [...groups].sort((a, b) => b.weight - a.weight).slice(0, 3)
    .map((one) => `${percent(one.weight)} at ${percent(one.begin / length)}`).join(", ");
  svg.setAttribute("aria-label", `Where in the document it looked, from beginning to end: ${heaviest}`);
  for (const [number, weight] of weights.entries()) {
    if (!weight) continue;
    const bar = model.cloneNode(true), high = Math.max(3, 20 * weight / most);
    for (const [key, value] of Object.entries({ x: number + 0.1, width: 0.8, y: 20 - high, height: high })) bar.setAttribute(key, value);
    bar.firstElementChild.textContent = `${percent(weight)} of the attention, ${percent(number / PARTS)} into the document`;
    svg.append(bar);
  }
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect(), at = length * (event.clientX - box.left) / box.width;
    const distance = (one) => Math.max(one.begin - at, at - one.end, 0);
    goTo(spans, [...groups].sort((a, b) => distance(a) - distance(b))[0]);
  });
  return svg;
}

function busy(is) {
  $("send").disabled = is;
  $("stop").hidden = !is;
  talk();
}

// What people do ----------------------------------------------------------------------------------

$("give").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("paste").value;
  if (text.trim()) take(text, firstWords(text));
  else problem("paste some text, or choose a file");
});
$("paste").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("give").requestSubmit();
});
$("choose").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => takeFiles([...$("file").files]));
$("remove").addEventListener("click", async () => {
  const { ident } = state.document, asked = state.turns?.length;
  if (asked && !confirm(`Remove the document and ${several(asked, "question")} with their answers?`)) return;
  state.abort?.abort();
  state.reading?.abort();
  try {
    await post("/hybrid_kv/remove", { document: ident });
    await open(FREE);
    await changed();
    $("paste").focus();
  } catch (error) {
    problem(error.message);
  }
});

async function takeFiles(files) {
  for (const file of files) await takeFile(file);
}

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
  const text = event.dataTransfer.getData("text");
  if (event.dataTransfer.files.length) takeFiles([...event.dataTransfer.files]);
  else if (text) take(text, firstWords(text));
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
$("clear").addEventListener("click", async () => {
  $("question").focus();
  try {
    await post("/hybrid_kv/clear", { document: state.document?.ident ?? FREE });
    if (state.document) showText([]);
    await changed();
  } catch (error) {
    problem(error.message);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") (state.abort ?? state.reading)?.abort();
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

tabs?.addEventListener("message", () => { if (state.info && !state.lost) refresh(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.info && !state.lost) refresh(); });
addEventListener("hashchange", () => choose(location.hash.slice(1) || FREE));

connect();
