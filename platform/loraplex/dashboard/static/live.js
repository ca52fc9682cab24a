// One stream of events for the whole document, opened again whenever it breaks.
import { useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { apiUrl, call } from "./api.js";

const SILENCE_MS = 5_000;
const MAX_PAUSE_MS = 8_000;

/**
 * `{ state, live, alerts, steps, slots, since, recoveries }`: the newest event of each kind.
 *
 * `state` is `connecting`, `open`, `lost` (no connection; tried again with growing pauses) or
 * `silent` (connected, but nothing came for five seconds). `since` is when that began, `recoveries`
 * how often a lost connection came back: what was read before is old.
 */
export function useStream(topics, { onEnded }) {
  const [stream, setStream] = useState({ state: "connecting", since: Date.now(), recoveries: 0 });
  const ended = useRef(onEnded);
  ended.current = onEnded;

  useEffect(() => {
    let source, retry, silence;
    let pause = 500;
    let closed = false;
    let lost = false;

    const enter = (state, more = {}) =>
      setStream((old) => ({
        ...old,
        ...more,
        state,
        since: old.state === state ? old.since : Date.now(),
      }));
    const listenForSilence = () => {
      clearTimeout(silence);
      silence = setTimeout(() => {
        enter("silent");
        silence = setTimeout(lose, 2 * SILENCE_MS); // a connection may break without a word
      }, SILENCE_MS);
    };
    const lose = async () => {
      source.close();
      clearTimeout(silence);
      lost = true;
      enter("lost");
      retry = setTimeout(open, pause);
      pause = Math.min(pause * 2, MAX_PAUSE_MS);
      try {
        await call("session");
      } catch (error) {
        if (!closed && error.status === 401) ended.current("expired");
      }
    };
    const open = () => {
      source = new EventSource(apiUrl("events", { topics }));
      source.onopen = () => {
        pause = 500;
        listenForSilence();
        const recovered = lost ? 1 : 0;
        lost = false;
        setStream((old) => ({
          ...old,
          state: "open",
          since: Date.now(),
          recoveries: old.recoveries + recovered,
        }));
      };
      source.onerror = lose;
      for (const name of ["live", "alerts", "steps", "slots"]) {
        source.addEventListener(name, (event) => {
          listenForSilence();
          enter("open", { [name]: JSON.parse(event.data) });
        });
      }
      source.addEventListener("ended", (event) => {
        const { reason } = JSON.parse(event.data);
        if (reason === "stopping") return;
        closed = true;
        source.close();
        clearTimeout(silence);
        ended.current(reason);
      });
    };

    const wake = () => {
      clearTimeout(retry);
      if (!closed && source.readyState === EventSource.CLOSED) open();
    };
    open();
    addEventListener("online", wake);
    return () => {
      closed = true;
      removeEventListener("online", wake);
      clearTimeout(retry);
      clearTimeout(silence);
      source.close();
    };
  }, [topics]);

  return stream;
}
