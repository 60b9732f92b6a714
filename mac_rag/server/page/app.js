"use strict";
// Everything that comes from the server becomes text (textContent), never markup.

const $ = (id) => document.getElementById(id);
const WAYS = [
  ["memory", { memory: true, retriever: false }],
  ["retrieval", { memory: false, retriever: true }],
  ["both", { memory: true, retriever: true }],
];
let model = "";
let asking = null;
let last = null; // id of the last listed document
let dates = [];
let sentences = new Map(); // document id -> the sentence that the last answer rests on
let listing = 0; // number of the newest listing; results of older ones are dropped

const key = () => sessionStorage.getItem("key") || "";

async function call(method, path, body, signal) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const isForm = body instanceof FormData;
  if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
  const content = body === undefined || isForm ? body : JSON.stringify(body);
  const response = await fetch(path, { method, headers, body: content, signal });
  if (!response.ok) {
    let message = `${response.status} ${response.statusText}`;
    try { message = (await response.json()).error.message; } catch (error) { /* no JSON */ }
    if (response.status === 401) { $("key-box").open = true; $("key").focus(); }
    throw new Error(message);
  }
  return response;
}

const getJSON = async (path) => (await call("GET", path)).json();
const place = () => `/v1/banks/${encodeURIComponent($("bank").value)}`;

function say(text, failed = false) {
  $("status").textContent = text;
  $("status").classList.toggle("failed", failed);
}

function guarded(work) {
  return async (event) => {
    if (event && event.preventDefault) event.preventDefault();
    try { await work(event); } catch (error) { if (error.name !== "AbortError") say(error.message, true); }
  };
}

// Splits a text into parts, with marks between the given starts and ends. The server counts in code points.
function marked(text, places) {
  const points = Array.from(text);
  const piece = (start, end) => points.slice(start, end).join("");
  const parts = [];
  let end = 0;
  for (const [start, stop] of places) {
    parts.push(piece(end, start), element("mark", piece(start, stop)));
    end = stop;
  }
  return [...parts, piece(end)];
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

async function showBanks(chosen) {
  const names = (await getJSON("/v1/banks")).data.map((bank) => bank.name);
  model = (await getJSON("/v1/models")).data[0].id;
  $("bank").replaceChildren(...names.map((name) => { const one = element("option", name); one.value = name; return one; }));
  if (chosen && names.includes(chosen)) $("bank").value = chosen;
  if (!names.length) { say("There is no bank yet: make one."); return; }
  await showDocuments();
}

async function showDocuments(further = false) {
  if (!$("bank").value) return;
  const mine = ++listing;
  const after = further && last !== null ? `&after=${encodeURIComponent(last)}` : "";
  const [page, info] = await Promise.all([getJSON(`${place()}/documents?limit=50${after}`), getJSON(place())]);
  if (mine !== listing) return;
  if (!further) { last = null; dates = []; $("documents").replaceChildren(); }
  for (const one of page.data) {
    $("documents").append(row(one));
    last = one.id;
    if (one.date) dates.push(one.date.slice(0, 10));
  }
  $("more").hidden = !page.has_more;
  $("count").textContent = `(${info.documents})`;
  dates = [...new Set(dates)].sort();
  $("as-of").max = Math.max(0, dates.length - 1);
  $("as-of").value = $("as-of").max;
  showDate();
}

function row(one) {
  const item = element("li");
  const open = element("button", one.metadata.title || one.id, "open");
  open.type = "button";
  open.addEventListener("click", guarded(() => read(one.id)));
  const remove = element("button", "Delete");
  remove.type = "button";
  remove.setAttribute("aria-label", `Delete ${one.id}`);
  remove.addEventListener("click", guarded(async () => {
    if (!confirm(`Delete ${one.id}?`)) return;
    await call("DELETE", `${place()}/document?id=${encodeURIComponent(one.id)}`);
    say(`${one.id} is deleted.`);
    await showDocuments();
  }));
  item.append(open, element("small", one.date ? one.date.slice(0, 10) : ""), remove);
  return item;
}

async function read(id) {
  const one = await getJSON(`${place()}/document?id=${encodeURIComponent(id)}`);
  $("reader-title").textContent = one.metadata.title ? `${one.metadata.title} (${one.id})` : one.id;
  const text = one.text === null ? "This bank keeps no texts." : one.text;
  const sentence = sentences.get(id);
  const start = sentence ? text.indexOf(sentence) : -1;
  const parts = start < 0 ? [text] : [text.slice(0, start), element("mark", sentence), text.slice(start + sentence.length)];
  $("reader-text").replaceChildren(...parts);
  $("reader").showModal();
}

function showDate() {
  const on = $("use-as-of").checked && dates.length > 0;
  $("as-of").disabled = !on;
  $("as-of-date").textContent = on ? dates[Number($("as-of").value)] : "all dates";
  $("as-of").setAttribute("aria-valuetext", $("as-of-date").textContent);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function answer(name, options, question, signal) {
  const target = $(`a-${name}`);
  target.textContent = "";
  target.classList.remove("failed");
  target.setAttribute("aria-busy", "true");
  try {
    const body = { model: `${model}:${$("bank").value}`, messages: [{ role: "user", content: question }], stream: true, ...options };
    if ($("use-as-of").checked && dates.length) body.as_of = `${dates[Number($("as-of").value)]}T23:59:59`;
    const response = await call("POST", "/v1/chat/completions", body, signal);
    for await (const event of events(response)) {
      target.textContent += event.choices[0].delta.content || "";
      if (name === "both" && event.sources) showSources(event.sources);
    }
  } catch (error) {
    if (error.name === "AbortError") { target.textContent += " (stopped)"; return; }
    target.textContent = error.message;
    target.classList.add("failed");
  } finally {
    target.setAttribute("aria-busy", "false");
  }
}

function showSources(sources) {
  sentences = new Map(sources.map((source) => [source.document_id, source.sentence]));
  $("sources").replaceChildren(...sources.map((source) => {
    const item = element("li");
    const open = element("button", source.document_id);
    open.type = "button";
    open.addEventListener("click", guarded(() => read(source.document_id)));
    const share = source.attention || 0;
    const bar = element("meter");
    bar.min = 0; bar.max = 1; bar.value = share;
    bar.setAttribute("aria-label", `attention to ${source.document_id}`);
    item.append(open, " ", bar, ` ${(100 * share).toFixed(0)} % of the attention${source.retrieved ? ", retrieved" : ""}`);
    if (source.sentence) {
      const quote = element("blockquote");
      quote.append(...marked(source.sentence, source.highlights));
      item.append(quote);
    }
    return item;
  }));
}

async function upload(files) {
  if (!files.length) return;
  if (!$("bank").value) throw new Error("Make a bank first.");
  const form = new FormData();
  for (const file of files) form.append("file", file, file.name);
  const count = `${files.length} file${files.length === 1 ? "" : "s"}`;
  say(`Sending ${count} ...`);
  let job = await (await call("POST", `${place()}/files`, form)).json();
  const box = element("div");
  const bar = element("progress");
  bar.setAttribute("aria-label", `Remembering ${count}`);
  const note = element("p", `Remembering ${count} ...`);
  const cancel = element("button", "Cancel");
  cancel.type = "button";
  cancel.addEventListener("click", guarded(() => call("DELETE", `/v1/jobs/${job.id}`)));
  box.append(bar, note, cancel);
  $("jobs").append(box);
  while (job.state === "waiting" || job.state === "running") {
    await new Promise((resolve) => setTimeout(resolve, 300));
    job = await getJSON(`/v1/jobs/${job.id}`);
    if (job.total !== null) { bar.max = Math.max(1, job.total); bar.value = job.finished; note.textContent = `${job.finished} of ${job.total} documents are memory`; }
  }
  box.remove();
  const left = job.left_out.map((one) => `${one.document}: ${one.reason}`).join("; ");
  say(job.error || `${job.added} added, ${job.updated} updated, ${job.unchanged} unchanged${left ? `; left out: ${left}` : ""}`, Boolean(job.error || left));
  await showDocuments();
}

$("ask").addEventListener("submit", guarded(async () => {
  if (!$("bank").value) throw new Error("Make a bank first.");
  if (asking) asking.abort();
  const mine = asking = new AbortController();
  $("stop").hidden = false;
  sentences = new Map();
  $("sources").replaceChildren();
  const question = $("question").value;
  await Promise.all(WAYS.map(([name, options]) => answer(name, options, question, mine.signal)));
  if (asking === mine) { asking = null; $("stop").hidden = true; }
}));
$("stop").addEventListener("click", () => { if (asking) asking.abort(); $("stop").hidden = true; });
$("bank").addEventListener("change", guarded(() => showDocuments()));
$("more").addEventListener("click", guarded(() => showDocuments(true)));
$("use-as-of").addEventListener("change", showDate);
$("as-of").addEventListener("input", showDate);
$("files").addEventListener("change", guarded(async () => { await upload([...$("files").files]); $("files").value = ""; }));
$("drop").addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
$("drop").addEventListener("dragleave", () => $("drop").classList.remove("over"));
$("drop").addEventListener("drop", guarded(async (event) => { $("drop").classList.remove("over"); await upload([...event.dataTransfer.files]); }));
$("new-bank").addEventListener("submit", guarded(async () => {
  const name = $("new-name").value;
  await call("POST", "/v1/banks", { name });
  $("new-name").value = "";
  await showBanks(name);
  say(`Bank ${name} is made.`);
}));
$("key-form").addEventListener("submit", guarded(async () => {
  sessionStorage.setItem("key", $("key").value);
  $("key").value = "";
  $("key-box").open = false;
  say("");
  await showBanks();
}));
guarded(() => showBanks())();
