// One adapter: how long it waited and for what, its versions, how replies end, slow requests.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { Kept, WaitsNow, placeOf } from "./adapter_columns.js";
import { useData } from "./api.js";
import { CAUSES, FINISHES, causeColor, causeSum, lengthShare } from "./causes.js";
import { Chart, percentileSeries } from "./chart.js";
import * as format from "./format.js";
import { CauseTable } from "./marks.js";
import { Freshness, Panel, Waiting } from "./panel.js";
import { Requests } from "./requests.js";
import { Link, go, href, rangeOf } from "./router.js";
import { Aliases, NeverStops, Publishes, Versions } from "./versions.js";

const VERSION_COLORS = [
  "--adapter-0",
  "--adapter-5",
  "--adapter-2",
  "--adapter-6",
  "--adapter-1",
  "--adapter-3",
];

export function Adapter({ route, stream }) {
  const [, tenant, adapter] = route.parts;
  const range = rangeOf(route.query);
  const query = { range: range.key };
  const path = `adapters/${encodeURIComponent(tenant)}/${encodeURIComponent(adapter)}`;
  const data = useData(path, query, { every: range.refreshSeconds, again: stream.recoveries });
  const back = html`<p class="trail"><${Link} to=${href(["adapters"], query)}>All adapters<//></p>`;
  if (!data.data || data.data.row.adapter !== adapter || data.data.row.tenant !== tenant) {
    return html`${back}<${Waiting} data=${{ ...data, data: null }} />`;
  }
  const view = data.data;
  const csv = (table) => ({ table, query: { ...query, tenant, adapter } });
  return html`${back}
    <${Freshness} data=${data} />
    <${NeverStops} publishes=${view.publishes} />
    <${Figures} row=${view.row} now=${view.window.end} />
    <div class="panels">
      <${QueueTime} view=${view} route=${route} csv=${csv("adapter-causes")} />
      <${Panel} title="What it waited for" double csv=${csv("adapter-causes")}><div
        class="scroll" tabindex="0" role="region" aria-label="Causes, table"><${CauseTable}
          causes=${view.row.causes} advise /></div><//>
      <${Charts} view=${view} csv=${csv} />
      ${
        !view.row.is_base &&
        html`
        <${Versions} view=${view} csv=${csv("adapter-versions")} />
        <${Aliases} aliases=${view.aliases} />
        <${Publishes} publishes=${view.publishes} csv=${csv("adapter-publishes")} />`
      }
      <${Requests} requests=${view.slow_requests} csv=${csv("adapter-requests")} />
    </div>`;
}

function Figures({ row, now }) {
  const facts = [
    ["requests", format.count(row.requests), `last ${format.ago(row.last_request, now)}`],
    [
      "queue time p95",
      format.seconds(row.queue.p95),
      `p50 ${format.seconds(row.queue.p50)}, p99 ${format.seconds(row.queue.p99)}`,
    ],
    ["waited in all", format.seconds(causeSum(row.causes)), html`<${WaitsNow} row=${row} />`],
    [
      "first token p95",
      format.seconds(row.ttft.p95),
      `p50 ${format.seconds(row.ttft.p50)}, p99 ${format.seconds(row.ttft.p99)}`,
    ],
    [
      "time per token p95",
      format.seconds(row.token_time.p95),
      `longest gap p95 ${format.seconds(row.token_gap.p95)}`,
    ],
    [
      "output tokens",
      format.count(row.output_tokens),
      `of prompts ${format.count(row.prompt_tokens)}`,
    ],
    [
      "length endings",
      format.share(lengthShare(row.finishes)),
      format.counted(row.preemptions, "preemption"),
    ],
    [
      row.is_base ? "loads" : "time in a slot",
      row.is_base ? format.NONE : html`${format.share(row.resident_share)} <${Kept} row=${row} />`,
      row.is_base
        ? "the base is always there"
        : `${placeOf(row)} now; ${format.counted(row.loads, "load")}`,
    ],
  ];
  return html`<dl class="tiles" aria-label="Over the range"
    data-queue-seconds=${causeSum(row.causes)}>
    ${facts.map(
      ([name, value, more]) => html`<div class="tile"><dt>${name}</dt>
      <dd class="value">${value}</dd><dd class="more">${more}</dd></div>`,
    )}</dl>`;
}

const FILLED = { color: "--line", width: 2, fill: "22" };
const VIEWS = { request: "a request", sum: "summed" };

/** Queue time over time, stacked by cause: a request's mean, or summed over the requests. */
function QueueTime({ view, route, csv }) {
  const present = route.query.view === "sum" ? "sum" : "request";
  const divide = (values) =>
    values.map((value, i) => (view.requests[i] ? value / view.requests[i] : null));
  const choose = (key) =>
    go(href(route.parts, { ...route.query, view: key === "sum" ? "sum" : "" }), { replace: true });
  const tools = html`<span class="choice small" role="group"
    aria-label="Queue time">${Object.entries(VIEWS).map(
      ([key, label]) => html`
    <button type="button" aria-pressed=${String(key === present)}
      onClick=${() => choose(key)}>${label}</button>`,
    )}</span>`;
  return html`<${Chart} title="Queue time by cause" unit="s" stacked wide height=${210}
    x=${view.window.times} csv=${csv} tools=${tools}
    about=${`${present === "sum" ? "seconds waited by" : "mean of"} the requests that ended, per bucket`}
    marks=${publishMarks(view)} empty="No request waited."
    series=${CAUSES.map(({ key, label }) => ({
      label,
      color: causeColor(key),
      values: present === "sum" ? view.causes[key] : divide(view.causes[key]),
    }))} />`;
}

const publishMarks = (view) =>
  view.publishes.map(({ at, version }) => ({ at, label: `@${version}` }));

function Charts({ view, csv }) {
  const x = view.window.times;
  const marks = publishMarks(view);
  const versions = Object.entries(view.version_requests).sort(
    (a, b) => Number(a[0]) - Number(b[0]),
  );
  return html`
    <${Chart} title="Queue time percentiles" unit="s" x=${x} marks=${marks}
      csv=${csv("adapter-latency")}
      series=${percentileSeries(view.queue)} />
    <${Chart} title="Time to first token" unit="s" x=${x} marks=${marks}
      csv=${csv("adapter-latency")}
      series=${percentileSeries(view.ttft)} />
    <${Chart} title="Longest token gap" about="of each request" unit="s" x=${x} marks=${marks} csv=${csv("adapter-latency")}
      series=${percentileSeries(view.token_gap, "--line-2")} />
    <${Chart} title="Requests by version" about="that ended, per bucket" unit="count" stacked x=${x}
      marks=${marks}
      csv=${csv("adapter-traffic")} series=${
        versions.length
          ? versions.map(([version, values], i) => ({
              label: `@${version}`,
              values,
              color: VERSION_COLORS[i % VERSION_COLORS.length],
            }))
          : [{ label: "requests", values: view.requests, color: "--adapter-base" }]
      } />
    <${Chart} title="How replies ended" about="requests per bucket" unit="count" stacked x=${x}
      marks=${marks}
      csv=${csv("adapter-finishes")} series=${FINISHES.map(({ key, label, color }) => ({
        label,
        color,
        values: view.finishes[key],
      }))} />
    <${Chart} title="Output tokens" about="per bucket" unit="tokens" x=${x} marks=${marks}
      csv=${csv("adapter-traffic")}
      series=${[{ label: "tokens", values: view.output_tokens, ...FILLED }]} />`;
}
