// The document: who is here, which page the URL names, and the one stream of events.
import {
  html,
  render,
  useCallback,
  useEffect,
  useErrorBoundary,
  useState,
} from "./vendor/htm-preact-3.1.1.js";
import { Adapter } from "./adapter.js";
import { Adapters } from "./adapters.js";
import { Alerts } from "./alerts.js";
import { call } from "./api.js";
import { Batch } from "./batch.js";
import { useStream } from "./live.js";
import { Login } from "./login.js";
import { Overview } from "./overview.js";
import { problem } from "./panel.js";
import { useRoute } from "./router.js";
import { Shell } from "./shell.js";
import { Slots } from "./slots.js";

const TOPICS = { slots: "slots", batch: "steps" };

function Document() {
  const [session, setSession] = useState(null);
  const [asking, setAsking] = useState(true);
  const [reason, setReason] = useState(null);

  const ask = useCallback(async () => {
    setAsking(true);
    try {
      setSession(await call("session"));
      setReason(null);
    } catch (error) {
      setReason(error.status === 401 ? null : problem(error));
    }
    setAsking(false);
  }, []);
  useEffect(() => void ask(), []);

  const leave = useCallback((why) => {
    setSession(null);
    setReason(why);
  }, []);
  useEffect(() => {
    const unauthorized = () => leave("expired");
    addEventListener("loraplex-unauthorized", unauthorized);
    return () => removeEventListener("loraplex-unauthorized", unauthorized);
  }, []);

  if (session) return html`<${Signed} session=${session} onLeave=${leave} />`;
  if (asking) return html`<p class="notice" role="status">Reading …</p>`;
  return html`<${Login} reason=${reason} onSession=${(made) => {
    setReason(null);
    setSession(made);
  }} />`;
}

function Signed({ session, onLeave }) {
  const route = useRoute();
  const [page = ""] = route.parts;
  const stream = useStream(TOPICS[page] ?? "", { onEnded: onLeave });
  const logOut = async () => {
    try {
      await call("session", { method: "DELETE" });
      onLeave("logged_out");
    } catch (error) {
      if (error.status === 401) onLeave("logged_out");
    }
  };
  const props = { session, route, stream };
  return html`<${Shell} ...${props} onLogOut=${logOut}>
    <${Page} key=${location.pathname} ...${props} /><//>`;
}

/** The page that the path names; a fault in one is told, and leaves the others. */
function Page(props) {
  const [error] = useErrorBoundary();
  if (error) {
    return html`<p class="notice bad" role="alert">This page failed: ${String(error)}.
      ${" "}<a href=${location.href}>Load it again</a></p>`;
  }
  return html`<${pageOf(props.route.parts)} ...${props} />`;
}

function pageOf([page, tenant, adapter, ...rest]) {
  if (rest.length) return Nowhere;
  if (page === "adapters" && tenant && adapter) return Adapter;
  if (tenant) return Nowhere;
  return (
    { "": Overview, adapters: Adapters, slots: Slots, batch: Batch, alerts: Alerts }[page ?? ""] ??
    Nowhere
  );
}

const Nowhere = () => html`<p class="notice bad" role="alert">There is no such page.</p>`;

render(html`<${Document} />`, document.getElementById("app"));
