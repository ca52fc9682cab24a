// Slow requests, each with the states that it went through. Nothing of what was asked or said.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { CAUSES } from "./causes.js";
import * as format from "./format.js";
import { CauseBar, Key } from "./marks.js";
import { Panel } from "./panel.js";

/** What a request is in from the moment it enters a state, and the state's colour. */
const STATES = {
  queued: { label: "queued", color: "--state-queued" },
  loaded: { label: "adapter loaded", color: "--state-loaded" },
  prefill: { label: "prefill chunk", color: "--state-prefill" },
  decode: { label: "decode", color: "--state-decode" },
  preempted: { label: "preempted", color: "--state-preempted" },
};
const TICKS = 4;

export function Requests({ requests, csv }) {
  const longest = Math.max(...requests.map((one) => one.end_to_end_seconds), 1e-9);
  return html`<${Panel} title="Slow requests" wide csv=${csv}
    about="the longest of the range, on one scale">
    <p class="legend">${Object.values(STATES).map(
      ({ label, color }) => html`<span class="pair">
      <${Key} color=${color} /> ${label}</span>`,
    )}</p>
    ${
      requests.length
        ? html`<div class="scroll" tabindex="0" role="region" aria-label="Slow requests, table">
      <table class="figures requests"><caption class="hidden">Slow requests</caption>
      <thead><tr><th scope="col" class="text">request</th><th scope="col" class="text">arrived</th>
        <th scope="col" class="text line">from arrival to ${format.seconds(longest)}</th><th
          scope="col">took</th>
        <th scope="col">queued</th><th scope="col" class="text">by cause</th><th
          scope="col">load</th>
        <th scope="col">first token</th><th scope="col">decode</th><th scope="col">longest gap</th><th scope="col">prompt</th>
        <th scope="col">cached</th><th scope="col">output</th><th scope="col"
          class="text">ended</th>
        <th scope="col">preempted</th></tr></thead>
      <tbody>${requests.map(
        (one) => html`<${Row} key=${one.request_id} one=${one}
        longest=${longest} />`,
      )}</tbody>
      </table></div>`
        : html`<p class="notice">No request ended in this range.</p>`
    }
  <//>`;
}

function Row({ one, longest }) {
  return html`<tr data-request=${one.request_id}>
    <th scope="row" class="text"><code>${one.request_id}</code>${
      one.version != null &&
      html` <span
      class="muted">@${one.version}</span>`
    }</th>
    <td class="text">${format.time(one.arrived)}</td>
    <td class="text line"><${Timeline} one=${one} longest=${longest} /></td>
    <td>${format.seconds(one.end_to_end_seconds)}</td>
    <td>${format.seconds(one.queue_seconds)}</td>
    <td class="text" title=${causesText(one.causes)}><${CauseBar} causes=${one.causes} /></td>
    <td>${format.seconds(one.load_seconds)}</td>
    <td>${format.seconds(one.ttft_seconds)}</td>
    <td title="without waits after a preemption, which are in “queued”">${format.seconds(
      decodeSeconds(one),
    )}</td>
    <td>${format.seconds(one.longest_gap_seconds)}</td>
    <td>${format.count(one.prompt_tokens)}</td>
    <td>${format.count(one.cached_tokens)}</td>
    <td>${format.count(one.output_tokens)}</td>
    <td class="text">${one.finish_reason}</td>
    <td>${one.preemptions ? format.count(one.preemptions) : format.NONE}</td>
  </tr>`;
}

/** The first changes and the last of a timeline are kept: then more would be told of none. */
const MAX_MOMENTS = 32;

const spansOf = (one) =>
  one.timeline.map(([start, state], i) => ({
    start,
    state,
    end: one.timeline[i + 1]?.[0] ?? one.end_to_end_seconds,
  }));

/** Seconds in `decode` alone: what was waited for after a preemption is queue time. */
function decodeSeconds(one) {
  if (!one.preemptions) return one.decode_seconds;
  if (one.timeline.length > MAX_MOMENTS) return null;
  return spansOf(one)
    .filter(({ state }) => state === "decode")
    .reduce((sum, { start, end }) => sum + end - start, 0);
}

const causesText = (causes) =>
  CAUSES.filter(({ key }) => causes[key] > 0)
    .map(({ key, label }) => `${label} ${format.seconds(causes[key])}`)
    .join(", ");

/** The states as a bar; prefill chunks are told apart by the gaps between them. */
function Timeline({ one, longest }) {
  const spans = spansOf(one);
  const said = one.timeline
    .map(([offset, state]) => `${state} at ${format.seconds(offset)}`)
    .join(", ");
  return html`<svg class="timeline" viewBox="0 0 1000 14" preserveAspectRatio="none" role="img"
    aria-label=${said}><title>${said}</title>
    ${Array.from({ length: TICKS + 1 }, (_, i) => (i * 1000) / TICKS).map(
      (x) => html`<line x1=${x} x2=${x} y1="0" y2="14" />`,
    )}
    ${spans
      .filter(({ state }) => state !== "done")
      .map(
        ({ start, end, state }, i) => html`<rect key=${i}
      x=${(start / longest) * 1000} y="2" height="10"
        style=${{ fill: `var(${STATES[state]?.color})` }}
      width=${Math.max(1.5, ((end - start) / longest) * 1000 - (state === "prefill" ? 1.5 : 0))} />`,
      )}
  </svg>`;
}
