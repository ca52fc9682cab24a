// A key for a session: the key is sent once and kept nowhere.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { call } from "./api.js";
import { problem } from "./panel.js";

const REASONS = {
  expired: "The session is over: it ran out, or its key was revoked.",
  revoked: "The session is over: its key was revoked.",
  logged_out: "You are logged out.",
};

export function Login({ reason, onSession }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => {
    document.title = "Log in · Loraplex";
    field.current.focus();
  }, []);

  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      onSession(
        await call("session", { method: "POST", body: { key: field.current.value.trim() } }),
      );
    } catch (failure) {
      setError(sentence(failure));
      setBusy(false);
      field.current.select();
    }
  };
  return html`<main class="login">
    <form onSubmit=${submit}>
      <h1>Loraplex</h1>
      ${reason && html`<p role="status">${REASONS[reason] ?? reason}</p>`}
      <label for="key">Key</label>
      <input id="key" name="key" type="password" ref=${field} required maxlength="512"
        autocomplete="current-password" spellcheck="false" aria-describedby="key-about"
        aria-invalid=${error ? "true" : undefined} />
      <p id="key-about" class="muted">An admin's key shows everything, a tenant's its own adapters.
        A session lasts eight hours and can only read.</p>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <button type="submit" disabled=${busy}>${busy ? "Logging in …" : "Log in"}</button>
    </form>
  </main>`;
}

function sentence(error) {
  if (error.status === 401) return "This key is not known.";
  if (error.status === 403) return `This key may not look at the dashboard: ${error.message}.`;
  if (error.status === 429) return "Too many attempts. Wait a minute.";
  return problem(error);
}
