// Documents: their list, search, reading and deleting; files and texts that become memory; jobs.

import { bank, call, getJSON, place, server, wait } from "./api.js";
import { $, button, confirmed, element, fail, say } from "./view.js";

const PAGE = 50;
const FOUND = 20;

let last = null; // id of the last document of the list
let listing = 0; // number of the newest list; results of older ones are dropped

const query = (id) => `id=${encodeURIComponent(id)}`;
const plural = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

export async function showDocuments(further = false) {
  const mine = ++listing;
  if (!bank()) {
    $("documents").replaceChildren();
    $("count").textContent = "";
    return;
  }
  const after = further && last !== null ? `&after=${encodeURIComponent(last)}` : "";
  const [page, info] = await Promise.all([getJSON(`${place()}/documents?limit=${PAGE}${after}`), getJSON(place())]);
  if (mine !== listing) return;
  server.banks.set(info.name, info);
  if (!further) $("documents").replaceChildren();
  $("documents").append(...page.data.map((one) => row(one)));
  last = page.data.length ? page.data.at(-1).id : last;
  $("more").hidden = !page.has_more;
  $("count").textContent = `(${info.documents})`;
  $("search").hidden = info.retriever === "none" || !info.documents;
  $("found").textContent = "";
  $("end-search").hidden = true;
}

export async function search() {
  const mine = ++listing;
  const text = $("search-text").value;
  if (!text.trim()) return;
  const hits = (await (await call("POST", `${place()}/search`, { query: text, k: FOUND })).json()).data;
  if (mine !== listing) return;
  $("documents").replaceChildren(...hits.map((hit) => row(hit, hit.text)));
  $("found").textContent = hits.length ? `The best ${plural(hits.length, "document")} for ${text}` : `Nothing is found for ${text}`;
  $("end-search").hidden = false;
  $("more").hidden = true;
}

export async function endSearch() {
  $("search-text").value = "";
  await showDocuments();
}

function row(one, text) {
  const item = element("li");
  const remove = button("Delete", async () => {
    if (!await confirmed(`Delete ${one.id}? This cannot be undone.`, "Delete")) return;
    const name = bank();
    const { deleted } = await (await call("DELETE", `${place()}/document?${query(one.id)}`)).json();
    for (const id of deleted) document.dispatchEvent(new CustomEvent("deleted", { detail: { name, id } }));
    say(`${one.id} is deleted.`);
    await showDocuments();
  }, `Delete ${one.id}`);
  const open = button(one.metadata.title || one.id, () => read(one.id));
  open.className = "open";
  item.append(open, element("small", one.date ? one.date.slice(0, 10) : ""), remove);
  if (text) item.append(element("p", text.length > 200 ? `${text.slice(0, 200)} ...` : text, "quiet"));
  return item;
}

// Shows a document, with a mark on a sentence of it.
export async function read(id, sentence) {
  const one = await getJSON(`${place()}/document?${query(id)}`);
  $("reader-title").textContent = one.metadata.title ? `${one.metadata.title} (${one.id})` : one.id;
  const text = one.text === null ? "This bank keeps no texts." : one.text;
  const start = sentence ? text.indexOf(sentence) : -1;
  const parts = start < 0 ? [text] : [text.slice(0, start), element("mark", sentence), text.slice(start + sentence.length)];
  const about = Object.entries(one.metadata).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
  if (one.merged_with.length) about.push(`merged with ${one.merged_with.join(", ")}`);
  $("reader-about").textContent = about.join("; ");
  $("reader-text").replaceChildren(...parts);
  $("reader").showModal();
  const mark = $("reader-text").querySelector("mark");
  if (mark) mark.scrollIntoView({ block: "center" });
}

// Jobs. Those that this tab has seen are shown until they are closed, also after a reload.

const WATCHED = "jobs";
const RUNS = new Set(["waiting", "running"]);
const boxes = new Map(); // id -> the job's box

const watched = () => JSON.parse(sessionStorage.getItem(WATCHED) || "[]");

function watchLater(id, yes) {
  const others = watched().filter((other) => other !== id);
  sessionStorage.setItem(WATCHED, JSON.stringify(yes ? [...others, id] : others));
}

function jobBox(what, cancel) {
  const box = element("div", undefined, "box job");
  const note = element("p", what);
  const bar = element("progress");
  bar.setAttribute("aria-label", what);
  box.append(note, bar, button("Cancel", cancel, `Cancel: ${what}`));
  $("jobs").append(box);
  return { box, note, bar };
}

// Shows the jobs that run, and the ended ones that this tab has seen.
export async function showJobs() {
  const seen = new Set(watched());
  for (const job of (await getJSON("/v1/jobs")).data) {
    if (RUNS.has(job.state) || seen.has(job.id)) watch(job);
  }
}

async function watch(job) {
  if (boxes.has(job.id)) return;
  const what = `Adding documents to ${job.bank}`;
  const view = jobBox(what, async () => {
    await call("DELETE", `/v1/jobs/${job.id}`);
    view.note.textContent = `${what}: it is being cancelled ...`;
  });
  boxes.set(job.id, view.box);
  watchLater(job.id, true);
  try {
    for (let pause = 300; RUNS.has(job.state); pause = Math.min(2000, 1.2 * pause)) {
      if (job.total) {
        view.bar.max = job.total;
        view.bar.value = job.finished;
      }
      // How many there are is not known before all files have been read.
      view.note.textContent = `${what}: ${job.finished} ${job.total ? `of ${job.total}` : "so far"}`;
      await wait(pause);
      job = await again(job);
    }
    endJob(job, view.box);
    if (job.bank === bank()) await showDocuments();
  } catch (error) {
    closeJob(job.id);
    fail(error.message);
  }
}

// The job's present state. A lost connection is no end of a job.
async function again(job) {
  try {
    return await getJSON(`/v1/jobs/${job.id}`);
  } catch (error) {
    if (error.status) throw error;
    fail(error.message);
    await wait(2000);
    return job;
  }
}

function closeJob(id) {
  boxes.get(id)?.remove();
  boxes.delete(id);
  watchLater(id, false);
}

function endJob(job, box) {
  const counts = [`${job.added} added`, `${job.updated} updated`, `${job.unchanged} unchanged`].join(", ");
  const note = element("p", `${job.bank}: ${counts}${job.state === "done" ? "" : ` (${job.state})`}`);
  const parts = [note];
  if (job.error) parts.push(element("p", job.error, "failed"));
  if (job.left_out_count) {
    const list = element("ul", undefined, "failed");
    list.append(...job.left_out.map((one) => element("li", `${one.document}: ${one.reason}`)));
    parts.push(element("p", `${plural(job.left_out_count, "document")} left out${job.left_out.length < job.left_out_count ? "; the first are" : ""}:`, "failed"), list);
  }
  box.classList.toggle("failed", Boolean(job.error || job.left_out_count));
  box.replaceChildren(...parts, button("Close", () => { closeJob(job.id); $("question").focus(); }, `Close: ${note.textContent}`));
}

export async function upload(files) {
  if (!files.length) return;
  const path = `${place()}/files`;
  $("add").close();
  const form = new FormData();
  for (const file of files) form.append("file", file, file.name);
  const sending = new AbortController();
  const { box } = jobBox(`Sending ${plural(files.length, "file")}`, () => sending.abort());
  try {
    watch(await (await call("POST", path, form, sending.signal)).json());
  } finally {
    box.remove();
  }
}

export async function paste() {
  const metadata = $("paste-date").value ? { date: $("paste-date").value } : {};
  const pasted = { id: $("paste-name").value, text: $("paste-text").value, metadata };
  $("add").close();
  const job = await (await call("POST", `${place()}/documents`, { documents: [pasted], wait: false })).json();
  $("paste").reset(); // not before: a text that was refused is still there
  watch(job);
}
