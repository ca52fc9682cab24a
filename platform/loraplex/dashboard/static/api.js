// Reading `/dashboard/api/…`: one function, and a hook that keeps a page's data fresh.
import { useCallback, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";

const API = "/dashboard/api/";
const TIMEOUT_MS = 15_000;

/** The service answered, and not with what was asked. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The URL of a route with those of `query` that are set. */
export function apiUrl(path, query = {}) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value != null && value !== "") search.set(key, value);
  }
  const text = search.toString();
  return API + path + (text ? `?${text}` : "");
}

/** The decoded JSON of a route. Throws `ApiError`, or `TypeError` where nothing answers. */
export async function call(path, { query, method = "GET", body, signal } = {}) {
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  const response = await fetch(apiUrl(path, query), {
    method,
    body: body && JSON.stringify(body),
    headers: body ? { "content-type": "application/json" } : {},
    credentials: "same-origin",
    signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
  });
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response.status === 204 ? null : response.json();
}

async function messageOf(response) {
  try {
    const problem = await response.json();
    return problem.detail || problem.error?.message || problem.title || response.statusText;
  } catch {
    return response.statusText || `status ${response.status}`;
  }
}

/**
 * `{ data, error, loading, reload }` of a route, read again every `every` seconds while the page is
 * visible, and at once when the URL or `again` changes. What was read stays until something newer
 * is there, so that a page never blinks; `error` tells that it is old.
 */
export function useData(path, query, { every, again } = {}) {
  const url = apiUrl(path, query);
  const [state, setState] = useState({ url: null, data: null, error: null, loading: true });
  const latest = useRef(url);
  latest.current = url;

  const read = useCallback(
    async (signal) => {
      try {
        const data = await call(path, { query, signal });
        if (latest.current === url) setState({ url, data, error: null, loading: false });
      } catch (error) {
        if (signal?.aborted || latest.current !== url) return;
        if (error.status === 401) dispatchEvent(new Event("loraplex-unauthorized"));
        setState((old) => ({ ...old, error, loading: false }));
      }
    },
    [url],
  );

  useEffect(() => {
    const controller = new AbortController();
    setState((old) => ({ ...old, loading: true }));
    read(controller.signal);
    const timer =
      every && setInterval(() => document.hidden || read(controller.signal), every * 1000);
    const wake = () => document.hidden || read(controller.signal);
    document.addEventListener("visibilitychange", wake);
    return () => {
      controller.abort();
      clearInterval(timer);
      document.removeEventListener("visibilitychange", wake);
    };
  }, [read, every, again]);

  return { ...state, reload: () => read() };
}
