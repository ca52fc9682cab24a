// Which adapter held which slot when, and who waits for one now.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { useData } from "./api.js";
import { CAUSES, adapterColor, adapterLabel, causeColor } from "./causes.js";
import * as format from "./format.js";
import { Key } from "./marks.js";
import { Figures, Freshness, Panel, Waiting } from "./panel.js";
import { Link, href, rangeOf } from "./router.js";
import { SlotTimeline } from "./slot_timeline.js";

export function Slots({ session, route, stream }) {
  const range = rangeOf(route.query);
  const query = { range: range.key };
  const data = useData("slots", query, { every: range.refreshSeconds, again: stream.recoveries });
  if (!data.data) return html`<${Waiting} data=${data} />`;
  const view = data.data;
  const { spans, waits } = stream.slots ?? view;
  return html`
    <${Freshness} data=${data} />
    <p class="muted summary">${format.counted(view.slots_total, "slot")}. In this range:
      ${` ${format.counted(view.loads, "load")}`},
      ${` ${format.counted(view.evictions, "eviction")}`}.
      ${!session.is_admin && " All tenants share these slots: “others” are adapters that are not yours."}
      ${view.truncated_before != null && ` Left out, for their number: what ended before ${format.moment(view.truncated_before)}.`}</p>
    <div class="panels">
      <${Panel} title="Slots over time" wide csv=${{ table: "slots", query }}
        table=${() => html`<${Spans} view=${view} />`}>
        <${SlotTimeline} view=${view} /><//>
      <${Holders} spans=${spans} view=${view} range=${range.key}
        now=${stream.slots?.window.end ?? view.window.end} />
      <${Waits} waits=${waits} spans=${spans} range=${range.key} csv=${{ table: "waits", query }} />
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

/** Who holds each slot at this moment, and for whom it is reserved. */
function Holders({ spans, view, range, now }) {
  const lasting = spans.filter(({ end }) => end == null);
  const of = (slot, wanted) =>
    lasting.find((span) => span.slot === slot && (span.kind === "reserved") === wanted);
  const rows = Array.from({ length: view.slots_total }, (_, slot) => ({
    slot,
    holder: of(slot, false),
    next: of(slot, true),
  }));
  const columns = [
    { label: "slot", head: true, text: true, cell: ({ slot }) => slot },
    {
      label: "adapter",
      text: true,
      cell: ({ holder }) => html`<${Name} of=${holder} range=${range} />`,
    },
    {
      label: "state",
      text: true,
      cell: ({ holder }) =>
        holder
          ? html`${holder.kind}${holder.is_pinned && html` <span class="tag">pinned</span>`}`
          : "free",
    },
    { label: "for", cell: ({ holder }) => format.seconds(holder && now - holder.start) },
    {
      label: "reserved for",
      text: true,
      cell: ({ next }) => html`<${Name} of=${next} range=${range} />`,
    },
  ];
  return html`<${Panel} title="Slots now" wide><div class="scroll" tabindex="0" role="region"
    aria-label="Slots now, table"><${Figures} caption="Slots now" columns=${columns} rows=${rows}
      empty="This engine has no adapter slots." /></div><//>`;
}

function Name({ of: span, range }) {
  if (!span) return html`<span class="muted">${format.NONE}</span>`;
  if (span.adapter == null) return adapterLabel(span.tenant, span.adapter);
  return html`<${Link} to=${href(["adapters", span.tenant, span.adapter], { range })}
    ><${Key} color=${adapterColor(span.tenant, span.adapter)} /> ${adapterLabel(
      span.tenant,
      span.adapter,
    )}<//>${span.version != null && html`<span class="muted">@${span.version}</span>`}`;
}

/** Who waits at this moment, and what for. */
function Waits({ waits, spans, range, csv }) {
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
    { label: "why", text: true, prose: true, cell: (row) => why(row, reservedFor(row, spans)) },
  ];
  return html`<${Panel} title="Who waits now" wide csv=${csv}><div class="scroll" tabindex="0"
    role="region"
    aria-label="Who waits now, table"><${Figures} caption="Who waits now" columns=${columns}
      rows=${waits} empty="Nobody waits." /></div><//>`;
}

const reservedFor = (wait, spans) =>
  wait.reserved_slot ??
  spans.find(
    ({ kind, end, tenant, adapter, version }) =>
      kind === "reserved" &&
      end == null &&
      tenant === wait.tenant &&
      adapter === wait.adapter &&
      version === wait.version,
  )?.slot;

function why({ cause }, slot) {
  const { about } = CAUSES.find(({ key }) => key === cause);
  if (slot == null) return about;
  return cause === "slot"
    ? `slot ${slot} is reserved for it and being drained`
    : `${about}; slot ${slot} is its own`;
}
