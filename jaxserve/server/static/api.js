// The server, as the page sees it: JSON calls and streams, with the key of this tab.

const KEY = "jaxserve.key";

export class ApiError extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The answer to a request as JSON. Throws ApiError. */
export async function call(path, body, { signal } = {}) {
  return (await send(path, body, signal)).json();
}

/** The events of a stream, parsed, up to [DONE]. Throws ApiError, also for an error event. */
export async function* stream(path, body, { signal } = {}) {
  const response = await send(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await received(reader);
      if (done) throw new ApiError(0, "the stream ended before the answer was whole");
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const data = frame.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(0, event.error.message, event.error.param);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have been aborted already
  }
}

async function received(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the connection to the server was lost");
  }
}

async function send(path, body, signal) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(response.status, answer.error?.message ?? `the server answered ${response.status}`, answer.error?.param);
}
