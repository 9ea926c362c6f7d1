// Sends requests to the server of this page. The API key is kept only in this module's memory.

let key = "";
let asking = null; // the promise of a key while the dialog is open

export class ApiError extends Error {}

/** fetch with the API key. Asks for a key while the server answers 401. Throws ApiError with the server's message. */
export async function request(path, options = {}) {
  for (;;) {
    const used = key;
    const response = await fetch(path, {
      ...options,
      headers: { "content-type": "application/json", ...(used && { authorization: `Bearer ${used}` }) },
    });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(await errorMessage(response));
    if (used === key) await askForKey();
  }
}

async function errorMessage(response) {
  const text = await response.text();
  return attempt(() => JSON.parse(text).error.message) ?? `${response.status} ${response.statusText}: ${text.slice(0, 200)}`;
}

/** What `read` returns; undefined if it throws, as texts do that are not JSON, and storage that is full or switched off. */
export function attempt(read) {
  try {
    return read();
  } catch {
    return undefined;
  }
}

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.querySelector("#key-dialog");
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    document.querySelector("#key-form").addEventListener("submit", () => {
      key = document.querySelector("#key").value.trim();
      document.querySelector("#key").value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** The JSON of each server-sent event, until `[DONE]`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
