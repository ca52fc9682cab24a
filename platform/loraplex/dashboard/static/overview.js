// The service, or a tenant's part of it, at this moment and over the range.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { AlertList } from "./alerts.js";
import { useData } from "./api.js";
import { CAUSES, causeColor } from "./causes.js";
import { Chart, percentileSeries } from "./chart.js";
import * as format from "./format.js";
import { CauseTable, FinishBar, FinishCounts, Key } from "./marks.js";
import { Freshness, Panel, Waiting } from "./panel.js";
import { Quota } from "./quota.js";
import { rangeOf } from "./router.js";

export function Overview({ session, route, stream }) {
  const range = rangeOf(route.query);
  const query = { range: range.key };
  const data = useData("overview", query, {
    every: range.refreshSeconds,
    again: stream.recoveries,
  });
  if (!data.data) return html`<${Waiting} data=${data} />`;
  const view = data.data;
  const lasting = stream.alerts?.alerts.filter(({ ended }) => ended == null) ?? [];
  return html`
    <${Freshness} data=${data} />
    <${Now} live=${stream.live ?? view.live} session=${session} />
    ${lasting.length > 0 && html`<${AlertList} alerts=${lasting} now=${view.window.end} brief />`}
    <div class="panels">
      <${Charts} view=${view} query=${query} session=${session} />
      <${Panel} title="Waiting by cause, summed" double csv=${{ table: "causes", query }}>
        <div class="scroll" tabindex="0" role="region" aria-label="Waiting by cause, table">
          <${CauseTable} causes=${view.totals.causes} advise /></div>
      <//>
      <${Sums} totals=${view.totals} />
      ${!session.is_admin && html`<${Quota} range=${range} again=${stream.recoveries} />`}
    </div>`;
}

/** The last ten seconds, in tiles. */
function Now({ live, session }) {
  if (!live) return html`<p class="notice">Nothing was heard of the engine yet.</p>`;
  const { engine } = live;
  return html`<dl class="tiles" aria-label="Now">
    <${Tile} name="goodput" value=${format.rate(live.goodput_rate)}
      title="Requests that ended within both targets, of all that ended"
      more=${`${format.share(live.goodput_share)} of ${format.rate(live.requests_rate)}`} />
    <${Tile} name="output tokens" value=${format.rate(live.output_tokens_rate)}
      more=${`prompt ${format.rate(live.prompt_tokens_rate)}`} />
    <${Spread} name="first token" of=${live.ttft} limit=${session.slo_ttft_seconds} />
    <${Spread} name="time per token" of=${live.token_time} limit=${session.slo_token_seconds}
      title=${`The mean of each request. Longest gap between two tokens of one: p95 ${format.seconds(
        live.token_gap.p95,
      )}`} />
    <${Tile} name="running" value=${format.count(live.running)}
      more=${engine && `of ${format.count(engine.max_running)} seats`} />
    <${Tile} name="waiting" value=${format.count(live.waiting)} more=${html`<${WaitingFor}
      by=${live.waiting_by_cause} />`} />
    ${
      engine &&
      html`
      <${Tile} name="KV blocks"
        value=${format.share(part(engine.kv_blocks_used, engine.kv_blocks_total))}
        title=${`${format.count(engine.kv_blocks_used)} of ${format.count(engine.kv_blocks_total)}`}
        more=${`prefix hits ${format.share(engine.prefix_hit_share)}`} />
      <${Tile} name="slots" value=${`${engine.slots_used} of ${engine.slots_total}`}
        title=${`A step takes ${format.seconds(engine.step_seconds.p50)} (p50)`}
        more=${`step p99 ${format.seconds(engine.step_seconds.p99)}`} />`
    }
    ${
      live.missed_records > 0 &&
      html`<${Tile} name="records missed" value=${format.count(live.missed_records)}
      more="the figures lack them" />`
    }
  </dl>`;
}

const Tile = ({ name, value, more, title }) => html`<div class="tile" title=${title}><dt>${name}</dt>
  <dd class="value">${value}</dd><dd class="more">${more || "\u00a0"}</dd></div>`;

/** A percentile beside the target that goodput counts by. */
function Spread({ name, of, limit, title = "Beside the target that goodput counts by" }) {
  const late = of.p95 != null && of.p95 > limit;
  return html`<div class="tile" title=${title}><dt>${name}, p95</dt>
    <dd class="value"><span class=${late ? "late" : ""}>${format.seconds(of.p95)}</span>${
      late ? html`<span class="hidden"> over the target</span>` : ""
    } <span class="target">/<span class="hidden"> target</span> ${format.tick(limit, "s")}</span></dd>
    <dd class="more">p50 ${format.seconds(of.p50)}, p99 ${format.seconds(of.p99)}</dd></div>`;
}

function WaitingFor({ by }) {
  const waiting = CAUSES.filter(({ key }) => by[key]);
  if (!waiting.length) return "nobody";
  return waiting.map(
    ({ key, label }) =>
      html`<span class="pair"><${Key} color=${causeColor(key)} />${label} ${by[key]} </span>`,
  );
}

const part = (used, total) => (total ? used / total : null);

const FILLED = { color: "--line", width: 2, fill: "22" };

function Charts({ view, query, session }) {
  const x = view.window.times;
  const csv = (table) => ({ table, query });
  return html`
    <${Chart} title="Queue time by cause"
      about="seconds waited by the requests that ended, per bucket" unit="s" stacked
      double x=${x} csv=${csv("causes")} series=${causeSeries(view.causes)}
        empty="No request waited." />
    <${Chart} title="Tokens" unit="per_second" x=${x} csv=${csv("throughput")} series=${[
      { label: "output", values: view.output_tokens_rate, color: "--line", width: 2 },
      { label: "prompt", values: view.prompt_tokens_rate, color: "--line-2", dash: [6, 3] },
    ]} />
    <${Chart} title="Time to first token"
      about=${`target ${format.tick(session.slo_ttft_seconds, "s")}`} unit="s" x=${x}
      csv=${csv("latency")} series=${percentileSeries(view.ttft)} />
    <${Chart} title="Time per token" unit="s" x=${x} csv=${csv("latency")}
      about=${`mean of a request, target ${format.tick(session.slo_token_seconds, "s")}`}
      series=${percentileSeries(view.token_time, "--line-2")} />
    <${Chart} title="Longest token gap" about="of each request; it has no target"
      unit="s" x=${x}
      csv=${csv("latency")} series=${percentileSeries(view.token_gap, "--line-2")} />
    <${Chart} title="Requests" unit="per_second" x=${x} csv=${csv("throughput")} series=${[
      { label: "ended", values: view.requests_rate, color: "--line-2", dash: [6, 3] },
      { label: "within both targets", values: view.goodput_rate, color: "--line", width: 2 },
    ]} />
    <${Chart} title="Running and waiting" unit="mean" x=${x} csv=${csv("load")} series=${[
      { label: "running", values: view.running, color: "--line", width: 2 },
      { label: "waiting", values: view.waiting, color: "--line-2", dash: [6, 3] },
    ]} />
    ${
      session.is_admin &&
      html`<${Chart} title="KV blocks in use" unit="share" x=${x} csv=${csv("load")}
      series=${[{ label: "used", values: view.kv_share, ...FILLED }]} />
    <${Chart} title="Slots in use" unit="mean" x=${x} csv=${csv("load")}
      series=${[{ label: "used", values: view.slots_used, ...FILLED }]} />`
    }`;
}

/** The six causes as series, in their fixed order. */
export const causeSeries = (columns) =>
  CAUSES.map(({ key, label }) => ({ label, values: columns[key], color: causeColor(key) }));

function Sums({ totals }) {
  const refused = Object.entries(totals.refusals).sort((a, b) => b[1] - a[1]);
  const good = part(totals.good_requests, totals.requests);
  const cached = part(totals.cached_tokens, totals.prompt_tokens);
  const rows = [
    ["requests", format.count(totals.requests)],
    ["within both targets", `${format.count(totals.good_requests)} (${format.share(good)})`],
    ["queue time, p50 / p95 / p99", spread(totals.queue)],
    ["first token, p50 / p95 / p99", spread(totals.ttft)],
    ["time per token, p50 / p95 / p99", spread(totals.token_time)],
    ["longest token gap, p50 / p95 / p99", spread(totals.token_gap)],
    ["end to end, p50 / p95 / p99", spread(totals.end_to_end)],
    ["prompt tokens", `${format.count(totals.prompt_tokens)}, ${format.share(cached)} cached`],
    ["output tokens", format.count(totals.output_tokens)],
    ["preemptions", format.count(totals.preemptions)],
    [
      "endings",
      html`<${FinishBar} finishes=${totals.finishes} /><${FinishCounts}
        finishes=${totals.finishes} />`,
    ],
    [
      "refused",
      refused.length ? refused.map(([code, n]) => `${code} ${format.count(n)}`).join(", ") : "none",
    ],
  ];
  return html`<${Panel} title="Sums over the range"><table class="figures sums">
    <caption class="hidden">Sums over the range</caption>
    <tbody>${rows.map(
      ([name, value]) => html`<tr><th scope="row" class="text">${name}</th>
      <td>${value}</td></tr>`,
    )}</tbody>
  </table><//>`;
}

const spread = ({ p50, p95, p99 }) => [p50, p95, p99].map(format.seconds).join(" / ");
