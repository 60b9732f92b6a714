// The parts of the page that know nothing of the server. Every text becomes text (textContent), never markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function button(text, work, label) {
  const made = element("button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", guarded(work));
  return made;
}

// Shows what happens, until something else happens.
export function say(text) {
  $("status").textContent = text;
}

// Shows an error until it is closed.
export function fail(message) {
  const shown = [...$("errors").children].map((box) => box.firstChild.textContent);
  if (shown.includes(message)) return;
  const box = element("div", undefined, "failed box");
  box.append(element("p", message), button("Close", () => { box.remove(); $("question").focus(); }, `Close the error: ${message}`));
  $("errors").append(box);
}

// A listener whose errors are shown.
export function guarded(work) {
  return async (event) => {
    if (event && event.preventDefault) event.preventDefault();
    try { await work(event); } catch (error) { if (error.name !== "AbortError") fail(error.message); }
  };
}

// Splits a text into parts, with marks between the given starts and ends. The server counts in code points.
export function marked(text, places) {
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

// Asks before something that cannot be undone. Escape says no.
export function confirmed(question, action) {
  const dialog = $("confirm");
  $("confirm-question").textContent = question;
  $("confirm-yes").textContent = action;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// The clipboard exists for pages of https and of this machine only.
export async function copy(text, what) {
  if (!navigator.clipboard) throw new Error("This browser copies for pages of https or localhost only; select the text instead.");
  await navigator.clipboard.writeText(text);
  say(`${what} is copied.`);
}

// What this browser keeps between visits. Without storage, the page works and forgets.
export const kept = {
  get(name) { try { return localStorage.getItem(name); } catch (error) { return null; } },
  set(name, value) {
    try {
      if (value) localStorage.setItem(name, value); else localStorage.removeItem(name);
      return true;
    } catch (error) { return false; }
  },
};
