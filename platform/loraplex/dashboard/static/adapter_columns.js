// What the table of adapters can show of a row, column by column.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { causeColor, worstCause } from "./causes.js";
import * as format from "./format.js";
import { CauseBar, FinishBar, Key, LengthShare, Spark } from "./marks.js";

/**
 * `key` names a column in what a browser remembers; `sort` is the service's name of the order, and
 * without one a column does not sort. `label` is its heading, `long` what it is called elsewhere.
 * Those that are `usual` are shown until others are chosen: they fit a small desktop.
 */
export const COLUMNS = [
  { key: "adapter", sort: "adapter", label: "adapter", text: true, first: "asc" },
  {
    key: "now",
    sort: "waiting",
    label: "now",
    long: "state now",
    usual: true,
    text: true,
    cell: (row) => html`<${Now} row=${row} />`,
  },
  {
    key: "queue_p50",
    sort: "queue_p50",
    label: "queue p50",
    cell: (row) => format.seconds(row.queue.p50),
  },
  {
    key: "queue_p95",
    sort: "queue_p95",
    label: "queue p95, worst cause",
    long: "queue p95",
    usual: true,
    cell: (row) => html`<${QueueAndCause} row=${row} />`,
  },
  {
    key: "queue_p99",
    sort: "queue_p99",
    label: "queue p99",
    cell: (row) => format.seconds(row.queue.p99),
  },
  {
    key: "spark_queue",
    label: "p95 over time",
    long: "queue p95 over time",
    usual: true,
    text: true,
    cell: (row) => html`<${Spark} values=${row.spark_queue} label="p95 of queue time" unit="s" />`,
  },
  {
    key: "causes",
    sort: "queue_seconds",
    label: "waited, by cause",
    usual: true,
    text: true,
    cell: (row) => html`<${CauseBar} causes=${row.causes} />`,
  },
  {
    key: "ttft_p95",
    sort: "ttft_p95",
    label: "first token p95",
    usual: true,
    cell: (row) => format.seconds(row.ttft.p95),
  },
  {
    key: "token_time_p95",
    sort: "token_time_p95",
    label: "per token p95",
    long: "time per token p95",
    usual: true,
    cell: (row) => format.seconds(row.token_time.p95),
  },
  {
    key: "token_gap_p95",
    sort: "token_gap_p95",
    label: "longest gap p95",
    cell: (row) => format.seconds(row.token_gap.p95),
  },
  {
    key: "load_p95",
    sort: "load_p95",
    label: "load p95",
    usual: true,
    cell: (row) => format.seconds(row.load.p95),
  },
  {
    key: "requests",
    sort: "requests",
    label: "requests",
    usual: true,
    cell: (row) => format.count(row.requests),
  },
  {
    key: "spark_requests",
    label: "requests over time",
    text: true,
    cell: (row) => html`<${Spark} values=${row.spark_requests} label="requests" unit="count" />`,
  },
  {
    key: "output_tokens",
    sort: "output_tokens",
    label: "output tokens",
    cell: (row) => format.count(row.output_tokens),
  },
  {
    key: "finishes",
    label: "endings",
    text: true,
    cell: (row) => html`<${FinishBar} finishes=${row.finishes} />`,
  },
  {
    key: "length_share",
    sort: "length_share",
    label: "length",
    long: "length endings",
    usual: true,
    cell: (row) => html`<${LengthShare} finishes=${row.finishes} />`,
  },
  {
    key: "resident_share",
    sort: "resident_share",
    label: "in a slot",
    long: "time in a slot",
    cell: (row) =>
      row.is_base ? html`<span class="muted">always</span>` : format.share(row.resident_share),
  },
  {
    key: "last_request",
    sort: "last_request",
    label: "last request",
    cell: (row, now) => format.ago(row.last_request, now),
  },
];

/** How many wait at this moment, and what for. */
export function WaitsNow({ row }) {
  if (!row.waiting)
    return html`<span class="muted">${row.running ? `${row.running} running` : "nobody waits now"}</span>`;
  return html`<span class="pair">${
    row.waits_for && html`<${Key} color=${causeColor(row.waits_for)} />`
  }${format.count(row.waiting)} wait${row.waits_for ? ` for ${row.waits_for}` : ""}</span>`;
}

const RESIDENCY = {
  slot: "in a slot",
  loading: "loading",
  host: "in host memory",
  absent: "not in a slot",
  base: "the base",
};

/** Where an adapter's weights are now. */
export const placeOf = ({ residency }) => RESIDENCY[residency];

/** Whether an adapter is to stay where it is, whatever its use. */
export const Kept = ({ row: { kept } }) =>
  kept !== "auto" &&
  html`<span class="tag" title=${
    kept === "pinned" ? "it always holds a slot" : "it stays in host memory"
  }>${kept}</span>`;

/** Where an adapter is at this moment, and who waits for it. */
function Now({ row }) {
  const isIdle = !row.waiting && !row.running;
  if (isIdle && row.kept === "auto" && row.residency !== "slot")
    return html`<span class="muted">${placeOf(row)}</span>`;
  return html`<span>${placeOf(row)}${row.kept !== "auto" && html` <${Kept} row=${row} />`}${
    !isIdle && html`, <${WaitsNow} row=${row} />`
  }</span>`;
}

/** The p95 of queue time, and what most of all the waiting was for. */
function QueueAndCause({ row }) {
  const cause = worstCause(row.causes);
  return html`<span>${format.seconds(row.queue.p95)}<span class="worst">${
    cause && html`<${Key} color=${causeColor(cause.key)} /> ${cause.label}`
  }</span></span>`;
}
