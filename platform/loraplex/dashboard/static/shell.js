// What stands around every page: where one can go, the range, the state of the connection.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import * as format from "./format.js";
import { Link, RANGES, go, href, rangeOf } from "./router.js";

const PAGES = [
  { key: "", label: "Overview" },
  { key: "adapters", label: "Adapters" },
  { key: "slots", label: "Slots" },
  { key: "batch", label: "Batch" },
  { key: "alerts", label: "Alerts" },
];

export function Shell({ session, route, stream, onLogOut, children }) {
  const [page = "", tenant, adapter] = route.parts;
  const label = adapter
    ? `${tenant}/${adapter}`
    : (PAGES.find(({ key }) => key === page)?.label ?? "");
  const main = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    document.title = `${label} · Loraplex`;
    scrollTo(0, 0);
    if (!isFirst.current) main.current.focus({ preventScroll: true });
    isFirst.current = false;
  }, [label]);
  return html`
    <a class="skip" href="#page">To the page's content</a>
    <header class="top">
      <span class="name">Loraplex</span>
      <nav aria-label="Pages"><ul>${PAGES.map(
        ({ key, label }) => html`<li>
        <${Link} to=${href([key].filter(Boolean), { range: route.query.range })}
          aria-current=${key === page ? "page" : undefined}>${label}${
            key === "alerts" ? html`<${AlertCount} alerts=${stream.alerts} />` : ""
          }<//></li>`,
      )}</ul></nav>
      <${Range} route=${route} />
      <${Connection} stream=${stream} />
      <span class="who" title=${`until ${format.moment(session.expires)}`}>${
        session.is_admin ? "admin" : session.tenant
      }</span>
      <${Theme} />
      <button type="button" class="quiet" onClick=${onLogOut}>Log out</button>
    </header>
    <${Banner} stream=${stream} />
    <main id="page" tabindex="-1" ref=${main}><h1
      class=${adapter ? "adapter-name" : "hidden"}>${label}</h1>${children}</main>
    <footer class="muted">${session.base_model} · goodput: first token within
      ${` ${format.tick(session.slo_ttft_seconds, "s")}`}, ${format.tick(session.slo_token_seconds, "s")} a token ·
      Loraplex ${session.version}</footer>`;
}

function AlertCount({ alerts }) {
  const lasting = alerts?.alerts.filter(({ ended }) => ended == null) ?? [];
  if (!lasting.length) return null;
  const critical = lasting.some(({ severity }) => severity === "critical");
  return html`<span class=${critical ? "badge bad" : "badge warn"}>${lasting.length}<span
    class="hidden"
    > active</span></span>`;
}

function Range({ route }) {
  const present = rangeOf(route.query);
  const choose = (key) => go(href(route.parts, { ...route.query, range: key, page: undefined }));
  return html`<div class="choice" role="group" aria-label="Range">${RANGES.map(
    ({ key, label }) => html`
    <button type="button" aria-pressed=${String(key === present.key)} onClick=${() => choose(key)}
      >${label}</button>`,
  )}</div>`;
}

const STATES = {
  connecting: { label: "connecting", mark: "◌" },
  open: { label: "live", mark: "●" },
  silent: { label: "silent", mark: "◐" },
  lost: { label: "disconnected", mark: "○" },
};

function Connection({ stream }) {
  const { label, mark } = STATES[stream.state];
  return html`<span class=${`connection ${stream.state}`} data-state=${stream.state}><span
    aria-hidden="true"
    >${mark}</span> ${label}</span>`;
}

/** What is wrong with the connection or the engine, where it cannot be missed. */
function Banner({ stream }) {
  const text = bannerText(stream);
  return html`<div role="status" aria-live="polite">${
    text &&
    html`<p
    class="banner">${text}</p>`
  }</div>`;
}

function bannerText({ state, since, live }) {
  const from = format.time(since / 1000);
  if (state === "lost") {
    return `Disconnected since ${from}. The figures are from before; trying again.`;
  }
  if (state === "silent") {
    return `Connected, but nothing new has come since ${from}. The figures may be old.`;
  }
  if (live && !live.engine_up) {
    const heard = live.at ? `; it was last heard at ${format.time(live.at)}` : "";
    return `The engine does not answer${heard}. Calls get 503 until it is back.`;
  }
  return null;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("loraplex-theme") ?? "");
  const choose = (event) => {
    const { value } = event.target;
    if (value) localStorage.setItem("loraplex-theme", value);
    else localStorage.removeItem("loraplex-theme");
    setTheme(value);
    dispatchEvent(new Event("loraplex-theme"));
  };
  return html`<select class="quiet" aria-label="Colours" value=${theme} onChange=${choose}>
    <option value="">system</option><option value="light">light</option><option
      value="dark">dark</option>
  </select>`;
}
