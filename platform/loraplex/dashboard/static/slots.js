// Which adapter held which slot when, and who waits for one now.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { useData } from "./api.js";
import { CAUSES, adapterLabel, causeColor } from "./causes.js";
import * as format from "./format.js";
import { Key } from "./marks.js";
import { Figures, Freshness, Panel, Waiting } from "./panel.js";
import { Link, href, rangeOf } from "./router.js";
import { SlotTimeline } from "./slot_timeline.js";

export function Slots({ route, stream }) {
  const range = rangeOf(route.query);
  const query = { range: range.key };
  const data = useData("slots", query, { every: range.refreshSeconds, again: stream.recoveries });
  if (!data.data) return html`<${Waiting} data=${data} />`;
  const view = data.data;
  const waits = stream.slots?.waits ?? view.waits;
  return html`
    <${Freshness} data=${data} />
    <p class="muted summary">${format.count(view.slots_total)} slots. In this range:
      ${` ${format.count(view.loads)}`} loads,
      ${` ${format.count(view.evictions)}`} evictions.
      ${view.truncated_before != null && ` Left out, for their number: what ended before ${format.moment(view.truncated_before)}.`}</p>
    <div class="panels">
      <${Panel} title="Slots over time" wide csv=${{ table: "slots", query }}
        table=${() => html`<${Spans} view=${view} />`}>
        <${SlotTimeline} view=${view} /><//>
      <${Waits} waits=${waits} range=${range.key} csv=${{ table: "waits", query }} />
    </div>`;
}

function Spans({ view }) {
  const columns = [
    { label: "slot", head: true, text: true, cell: (row) => row.slot },
    {
      label: "adapter",
      text: true,
      cell: (row) =>
        adapterLabel(row.tenant, row.adapter) + (row.version != null ? `@${row.version}` : ""),
    },
    { label: "state", text: true, cell: (row) => row.kind },
    { label: "from", text: true, cell: (row) => format.moment(row.start) },
    { label: "to", text: true, cell: (row) => (row.end == null ? "now" : format.moment(row.end)) },
    { label: "for", cell: (row) => format.seconds((row.end ?? view.window.end) - row.start) },
  ];
  return html`<${Figures} caption="Slots over time" columns=${columns}
    rows=${[...view.spans].sort((a, b) => b.start - a.start)} />`;
}

/** Who waits at this moment, and what for. */
function Waits({ waits, range, csv }) {
  const columns = [
    {
      label: "adapter",
      head: true,
      text: true,
      cell: (row) =>
        html`<${Link} to=${href(["adapters", row.tenant, row.adapter], { range })}>${adapterLabel(
          row.tenant,
          row.adapter,
        )}<//>${row.version != null && html`<span class="muted">@${row.version}</span>`}`,
    },
    {
      label: "waits for",
      text: true,
      cell: (row) =>
        html`<span class="pair"><${Key} color=${causeColor(row.cause)} /> ${row.cause}</span>`,
    },
    { label: "waiting", cell: (row) => format.count(row.waiting) },
    { label: "running", cell: (row) => format.count(row.running) },
    { label: "oldest", cell: (row) => format.seconds(row.oldest_seconds) },
    { label: "why", text: true, cell: why },
  ];
  return html`<${Panel} title="Who waits now" wide csv=${csv}><div class="scroll" tabindex="0"
    role="region"
    aria-label="Who waits now, table"><${Figures} caption="Who waits now" columns=${columns}
      rows=${waits} empty="Nobody waits." /></div><//>`;
}

function why({ cause, reserved_slot: slot }) {
  const { about } = CAUSES.find(({ key }) => key === cause);
  if (slot == null) return about;
  return cause === "slot"
    ? `slot ${slot} is reserved for it and being drained`
    : `${about}; slot ${slot} is its own`;
}
