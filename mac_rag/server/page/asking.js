// Questions: their answers, the sources, and the history that this browser keeps for each bank.

import { bank, call, events, server } from "./api.js";
import { read } from "./documents.js";
import { $, button, confirmed, copy, element, kept, marked } from "./view.js";

const MEMORY = { name: "memory", title: "Memory", asks: { memory: true, retriever: false }, fits: ["memory"] };
const RETRIEVAL = { name: "retrieval", title: "Retrieval", asks: { memory: false, retriever: true }, fits: ["memory", "documents"] };
const BOTH = { name: "both", title: "Both", asks: { memory: true, retriever: true }, fits: ["memory", "documents"] };
const SOURCES = 5;

// The ways in which a bank is asked. The sources of the last one are shown.
const waysOf = (name) => (server.banks.get(name).retriever === "none" ? [MEMORY] : [MEMORY, RETRIEVAL, BOTH]);
const percent = (share) => `${Math.round(100 * share)} %`;

let running = null; // the question that is being answered

// The history: a list of records for each bank, the newest first.

const MOST_RECORDS = 50;
const MOST_CHARACTERS = 500_000;

export function recordsOf(name) {
  try {
    const found = JSON.parse(kept.get(`history:${name}`));
    return Array.isArray(found) ? found : [];
  } catch (error) { return []; }
}

function keep(name, records) {
  // Of what is too much for us or for the browser, the oldest goes.
  for (let most = Math.min(records.length, MOST_RECORDS); most > 0; most -= 1) {
    const text = JSON.stringify(records.slice(0, most));
    if (text.length <= MOST_CHARACTERS && kept.set(`history:${name}`, text)) return;
  }
  kept.set(`history:${name}`, "");
}

export function moveHistory(name, other) {
  keep(other, recordsOf(name).map((record) => ({ ...record, bank: other })));
  keep(name, []);
}

export const forgetHistory = (name) => keep(name, []);

// What is deleted is no longer quoted.
export function forgetDocument(name, id) {
  keep(name, recordsOf(name).map((record) => ({ ...record, sources: record.sources.filter((source) => source.document_id !== id) })));
  showHistory();
}

export function showHistory() {
  const boxes = [];
  for (const record of recordsOf(bank())) {
    try { boxes.push(drawn(record).box); } catch (error) { /* not one of ours: someone else writes here */ }
  }
  $("entries").replaceChildren(...boxes);
  showClear();
}

function showClear() {
  $("clear-history").hidden = !$("entries").children.length;
}

export async function clearHistory() {
  if (!await confirmed(`Clear all questions to ${bank()} from this browser?`, "Clear")) return;
  stop();
  forgetHistory(bank());
  showHistory();
}

// The address of a bank or a question. What follows # is not sent to any server.
export function address(name, question, asOf) {
  const parts = { bank: name };
  if (question) parts.q = question;
  if (asOf) parts.as_of = asOf;
  return `#${new URLSearchParams(parts)}`;
}

// Opens the last answer to a question. Returns false if there is none.
export function reopen(question, asOf) {
  const box = [...$("entries").children].find((one) => one.dataset.question === question && one.dataset.asOf === asOf);
  if (!box) return false;
  box.open = true;
  box.scrollIntoView({ block: "nearest" });
  return true;
}

export function stop() {
  if (running) running.abort();
  running = null;
  $("stop").hidden = true;
}

// Asks in all ways. Each question has a box and a signal of its own, so that nothing of an earlier one gets into it.
export async function ask(question, asOf) {
  if (!bank()) throw new Error("There is no bank yet: make one.");
  stop();
  const mine = running = new AbortController();
  $("stop").hidden = false;
  const name = bank();
  const least = server.confidence.length ? Number($("least").value) / 100 : null;
  const ways = waysOf(name);
  const answers = Object.fromEntries(ways.map((way) => [way.name, null]));
  const record = { asked: Date.now(), question, as_of: asOf, bank: name, model: server.model, least, answers, sources: [] };
  const view = drawn(record);
  for (const box of $("entries").children) box.open = false;
  view.box.open = true;
  $("entries").prepend(view.box);
  showClear();
  await Promise.all(ways.map((way) => answer(way, way === ways.at(-1), record, view, mine.signal)));
  if (!mine.signal.aborted && Object.values(record.answers).some((one) => one)) keep(name, [record, ...recordsOf(name)]);
  if (running === mine) stop();
}

async function answer(way, isLast, record, view, signal) {
  const target = view.answers[way.name];
  target.setAttribute("aria-busy", "true");
  target.textContent = "";
  const body = { model: `${record.model}:${record.bank}`, messages: [{ role: "user", content: record.question }], stream: true, ...way.asks };
  body.sources = isLast ? SOURCES : 0;
  if (record.as_of) body.as_of = `${record.as_of}T23:59:59`;
  // The end of an answer decides how sure it is, so that it comes as a whole.
  if (record.least !== null && way.fits.every((mode) => server.confidence.includes(mode))) body.min_confidence = record.least;
  try {
    const response = await call("POST", "/v1/chat/completions", body, signal);
    let text = "";
    let end = null;
    for await (const event of events(response)) {
      const choice = event.choices[0];
      text += choice.delta.content || "";
      if (choice.finish_reason) end = { ...event, cut: choice.finish_reason === "length" };
      target.textContent = text;
    }
    const { confidence = null, guess = null, notes = [], truncated = false, cut = false, sources = [] } = end || {};
    record.answers[way.name] = { text, confidence, guess, notes, truncated, cut };
    if (isLast) record.sources = sources;
    view.fill(way.name);
  } catch (error) {
    if (error.name === "AbortError") target.append(element("span", " (stopped)", "quiet"));
    else target.replaceChildren(element("span", error.message, "failed"));
  } finally {
    target.setAttribute("aria-busy", "false");
  }
}

// Draws a record. `fill` draws an answer that has arrived since.
function drawn(record) {
  const box = element("details", undefined, "entry");
  box.dataset.question = record.question;
  box.dataset.asOf = record.as_of;
  box.append(element("summary", record.question));
  const grid = element("div", undefined, "answers");
  const sources = element("div");
  const answers = {};
  const abouts = {};
  const fill = (name) => {
    if (record.answers[name]) fillAnswer(answers[name], abouts[name], record.answers[name]);
    sources.replaceChildren(...drawnSources(record.sources));
  };
  for (const way of [MEMORY, RETRIEVAL, BOTH].filter((one) => one.name in record.answers)) {
    const card = element("article", undefined, way.name);
    answers[way.name] = element("p", "No answer.", "answer");
    answers[way.name].setAttribute("aria-live", "polite");
    abouts[way.name] = element("p", "", "about");
    card.append(element("h3", way.title), answers[way.name], abouts[way.name]);
    grid.append(card);
    fill(way.name);
  }
  box.append(grid, sources, foot(record, box));
  return { box, answers, fill };
}

function fillAnswer(target, about, found) {
  target.replaceChildren(found.text.trim() ? found.text : element("span", "The answer is empty.", "quiet"));
  const facts = [];
  if (found.confidence !== null) facts.push(`Confidence ${percent(found.confidence)}`);
  if (found.guess !== null) facts.push(`withheld: ${found.guess}`);
  if (found.cut) facts.push("cut: it has the most tokens that an answer may have");
  if (found.truncated) facts.push("documents were shortened to fit");
  about.replaceChildren([...facts, ...found.notes].join("; "), " ");
  if (found.text.trim()) about.append(button("Copy", () => copy(found.text, "The answer")));
}

// A document that gets no attention and holds nothing of the answer is no source; how many there are is said.
function drawnSources(sources) {
  const isShown = (source) => Math.round(100 * (source.attention || 0)) > 0 || (source.retrieved && source.highlights.length > 0);
  const shown = sources.filter(isShown);
  if (!sources.length) return [];
  const list = element("ol", undefined, "sources");
  for (const source of shown) {
    const item = element("li");
    const share = source.attention || 0;
    item.append(button(source.document_id, () => read(source.document_id, source.sentence)), " ");
    const facts = [source.date ? source.date.slice(0, 10) : "", source.retrieved ? "retrieved" : ""];
    if (Math.round(100 * share) > 0) {
      const bar = element("meter");
      bar.value = share;
      bar.setAttribute("aria-label", `attention to ${source.document_id}`);
      item.append(bar);
      facts.unshift(`${percent(share)} of the attention`);
    }
    item.append(element("small", ` ${facts.filter(Boolean).join(", ")}`));
    if (source.sentence) {
      const quote = element("blockquote");
      quote.append(...marked(source.sentence, source.highlights));
      item.append(quote);
    }
    list.append(item);
  }
  const others = sources.length - shown.length;
  const parts = [element("h3", "Sources"), list];
  if (others) parts.push(element("p", `${others} more with less than 1 % of the attention`, "quiet others"));
  return parts;
}

function foot(record, box) {
  const line = element("p", undefined, "foot");
  const facts = [`${record.model}:${record.bank}`, record.as_of ? `as of ${record.as_of}` : "all dates"];
  if (record.least) facts.push(`"I don't know" below ${percent(record.least)}`);
  facts.push(new Date(record.asked).toLocaleString());
  const link = () => new URL(address(record.bank, record.question, record.as_of), location.href).href;
  const remove = () => {
    keep(record.bank, recordsOf(record.bank).filter((other) => other.asked !== record.asked));
    box.remove();
    showClear();
    $("question").focus();
  };
  line.append(
    element("span", facts.join(" · "), "asked"),
    button("Copy link", () => copy(link(), "The link")),
    button("Ask again", () => ask(record.question, record.as_of)),
    button("Remove", remove, `Remove the question: ${record.question}`),
  );
  return line;
}
