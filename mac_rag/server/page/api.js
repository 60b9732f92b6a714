// Requests to the server that sent this page.

import { $, say } from "./view.js";

// What the server has: the name of its model, the ways of answering whose confidence it computes, and its banks by name.
export const server = { model: "", confidence: [], banks: new Map() };

export const key = {
  get: () => sessionStorage.getItem("key") || "",
  set: (value) => sessionStorage.setItem("key", value),
};

export const bank = () => $("bank").value;
export const place = () => {
  if (!bank()) throw new Error("There is no bank yet: make one.");
  return `/v1/banks/${encodeURIComponent(bank())}`;
};

const MOST_TRIES = 10;
let free = 0; // when the server takes requests again, in milliseconds of the clock

export function wait(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    if (signal) signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

// Sends a request. After a 429, which says that nothing was done, it is sent again when the server wants it.
export async function call(method, path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const isForm = body instanceof FormData;
  if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
  const content = body === undefined || isForm ? body : JSON.stringify(body);
  for (let tries = 1; ; tries += 1) {
    if (signal) signal.throwIfAborted();
    while (free > Date.now()) await wait(free - Date.now(), signal);
    const response = await sent(path, { method, headers, body: content, signal });
    if (tries > 1) say("");
    if (response.ok) return response;
    if (response.status !== 429 || tries === MOST_TRIES) throw await refusal(response);
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    free = Math.max(free, Date.now() + 1000 * seconds);
    say(`The server is busy; trying again in ${seconds} s ...`);
  }
}

async function sent(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it running?");
  }
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try { message = (await response.json()).error.message; } catch (error) { /* no JSON */ }
  if (response.status === 401) {
    $("settings").open = true;
    $("key").focus();
    if (!key.get()) message = "This server asks for a key; give one under Settings.";
  }
  // The server's log tells more about what went wrong in this request.
  const request = response.headers.get("X-Request-Id");
  if (request && response.status >= 500) message += ` (request ${request})`;
  const error = new Error(message);
  error.status = response.status;
  return error;
}

export const getJSON = async (path) => (await call("GET", path)).json();

// The events of a streamed answer.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The connection broke before the answer was complete; ask again.");
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
