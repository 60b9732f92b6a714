// The page: banks, settings, and what its controls do.

import { bank, getJSON, key, call, place, server } from "./api.js";
import { address, ask, clearHistory, forgetDocument, forgetHistory, moveHistory, reopen, showHistory, stop } from "./asking.js";
import { endSearch, paste, search, showDocuments, showJobs, upload } from "./documents.js";
import { $, confirmed, element, fail, guarded, kept, say } from "./view.js";

async function loadBanks() {
  const [banks, models] = [(await getJSON("/v1/banks")).data, (await getJSON("/v1/models")).data];
  server.model = models[0].id;
  server.confidence = models[0].confidence;
  server.banks = new Map(banks.map((one) => [one.name, one]));
  $("model").textContent = server.model;
  $("least-label").hidden = !server.confidence.length;
  const chosen = [bank(), kept.get("bank")].find((name) => server.banks.has(name));
  $("bank").replaceChildren(...banks.map((one) => {
    const option = element("option", one.state === "broken" ? `${one.name} (cannot be opened)` : one.name);
    option.value = one.name;
    option.disabled = one.state === "broken";
    return option;
  }));
  if (chosen) $("bank").value = chosen;
  const any = banks.some((one) => one.state !== "broken");
  $("banks").open = $("banks").open || !any;
  $("rename").hidden = $("delete-bank").hidden = !any;
  if (!any) say("There is no bank yet: make one.");
}

async function showBank() {
  kept.set("bank", bank());
  $("delete-bank").textContent = `Delete ${bank()}`;
  $("rename-label").textContent = `New name of ${bank()}`;
  showHistory();
  await showDocuments();
}

// Goes to a bank, and shows it and its address.
async function enter(name) {
  $("bank").value = name;
  history.pushState(null, "", name ? address(name) : location.pathname);
  await showBank();
}

// Shows the bank and the question that the page's address names.
async function follow() {
  const link = new URLSearchParams(location.hash.slice(1));
  const named = link.get("bank");
  if (named !== null && !server.banks.has(named)) fail(`There is no bank ${named} that you may use.`);
  else if (named !== null) $("bank").value = named;
  stop();
  await showBank();
  if (!link.get("q") || named !== bank()) return;
  $("question").value = link.get("q");
  $("as-of").value = link.get("as_of") || "";
  if (!reopen($("question").value, $("as-of").value)) await ask($("question").value, $("as-of").value);
}

let loaded; // what loads the banks, for a question that is asked before they are there

async function begin() {
  loaded = loadBanks();
  await loaded;
  await Promise.all([follow(), showJobs()]);
}

const on = (id, event, work) => $(id).addEventListener(event, guarded(work));

on("ask", "submit", async () => {
  await loaded;
  history.pushState(null, "", address(bank(), $("question").value, $("as-of").value));
  await ask($("question").value, $("as-of").value);
});
on("stop", "click", () => { stop(); say(""); });
on("bank", "change", async () => { stop(); await enter(bank()); });
on("clear-history", "click", clearHistory);

on("new-bank", "submit", async () => {
  const name = $("new-name").value;
  await call("POST", "/v1/banks", { name });
  $("new-bank").reset();
  $("banks").open = false;
  await loadBanks();
  await enter(name);
  say(`Bank ${name} is made.`);
});
on("rename", "submit", async () => {
  const [name, other] = [bank(), $("other-name").value];
  await call("PATCH", place(), { name: other });
  moveHistory(name, other);
  $("rename").reset();
  $("banks").open = false;
  await loadBanks();
  await enter(other);
  say(`Bank ${name} is now ${other}.`);
});
on("delete-bank", "click", async () => {
  const name = bank();
  const { documents } = await getJSON(place());
  if (!await confirmed(`Delete the bank ${name} with all of its documents (${documents})? This cannot be undone.`, "Delete the bank")) return;
  stop();
  await call("DELETE", `/v1/banks/${encodeURIComponent(name)}`);
  forgetHistory(name);
  await loadBanks();
  await enter(bank());
  say(`Bank ${name} is deleted.`);
});

on("open-add", "click", async () => { await loaded; place(); $("add").showModal(); });
on("files", "change", async () => {
  const files = [...$("files").files];
  $("files").value = "";
  await upload(files);
});
on("paste", "submit", paste);
on("close-add", "click", () => $("add").close());
on("search", "submit", search);
on("end-search", "click", endSearch);
on("more", "click", () => showDocuments(true));

const carriesFiles = (event) => event.dataTransfer && event.dataTransfer.types.includes("Files");
document.addEventListener("deleted", ({ detail }) => forgetDocument(detail.name, detail.id));

document.addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("over");
});
document.addEventListener("dragleave", () => document.body.classList.remove("over"));
document.addEventListener("drop", (event) => {
  if (!carriesFiles(event)) return;
  document.body.classList.remove("over");
  guarded(() => upload([...event.dataTransfer.files]))(event);
});

on("key-form", "submit", async () => {
  key.set($("key").value);
  $("key-form").reset();
  $("settings").open = false;
  $("errors").replaceChildren();
  say("");
  await begin();
});
$("theme").value = kept.get("theme") || "";
on("theme", "change", () => {
  kept.set("theme", $("theme").value);
  document.documentElement.dataset.theme = $("theme").value;
});
window.addEventListener("hashchange", guarded(async () => { await loaded; await follow(); }));
// The address names a bank, and goes on to do so.
on("skip", "click", () => $("question").focus());

guarded(begin)();
