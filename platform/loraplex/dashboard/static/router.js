// The URL is the state: the path names the page, the query its range, order, search and page.
import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.js";

export const ROOT = "/dashboard";
export const RANGES = [
  { key: "5m", label: "5 min", refreshSeconds: 5 },
  { key: "1h", label: "1 h", refreshSeconds: 20 },
  { key: "24h", label: "24 h", refreshSeconds: 60 },
];

/** The location as `{ parts, query }`; `parts` are the decoded pieces of the path below root. */
export function readRoute() {
  const parts = location.pathname.slice(ROOT.length).split("/").filter(Boolean);
  return {
    parts: parts.map((part) => decodeURIComponent(part)),
    query: Object.fromEntries(new URLSearchParams(location.search)),
  };
}

/** A path below the root with those of `query` that are set. */
export function href(parts, query = {}) {
  const path = [ROOT, ...parts.map(encodeURIComponent)].join("/");
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value) search.set(key, value);
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}

/** Go to a path, or change the query in place. */
export function go(path, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", path);
  dispatchEvent(new Event("loraplex-route"));
}

/** The current route; the component is drawn again when it changes. */
export function useRoute() {
  const [route, setRoute] = useState(readRoute);
  useEffect(() => {
    const update = () => setRoute(readRoute());
    addEventListener("popstate", update);
    addEventListener("loraplex-route", update);
    return () => {
      removeEventListener("popstate", update);
      removeEventListener("loraplex-route", update);
    };
  }, []);
  return route;
}

/** A link that changes the page without loading the document again. */
export function Link({ to, children, ...rest }) {
  const follow = (event) => {
    if (event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(to);
  };
  return html`<a href=${to} onClick=${follow} ...${rest}>${children}</a>`;
}

/** The range of the query, `1h` unless it names another. */
export const rangeOf = (query) => RANGES.find(({ key }) => key === query.range) ?? RANGES[1];
