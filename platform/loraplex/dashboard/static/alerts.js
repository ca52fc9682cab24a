// What goes wrong: since when, its numbers, and what to change.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { useData } from "./api.js";
import { adapterLabel } from "./causes.js";
import * as format from "./format.js";
import { CsvLink, Freshness, Waiting } from "./panel.js";
import { Link, href, rangeOf } from "./router.js";

const KINDS = {
  preemption_thrash: "Preemption thrash",
  decode_stall: "Decode stall",
  queueing_collapse: "Queueing collapse",
  runaway_generation: "Runaway generation",
  adapter_churn: "Adapter churn",
  never_stops: "A version that does not stop",
  engine_down: "The engine is gone",
  records_missed: "Records missed",
};

export function Alerts({ route, stream }) {
  const range = rangeOf(route.query);
  const query = { range: range.key };
  const lasts = stream.alerts?.alerts.map(({ kind, since }) => kind + since);
  const again = `${stream.recoveries} ${lasts}`;
  const data = useData("alerts", query, { every: range.refreshSeconds, again });
  if (!data.data) return html`<${Waiting} data=${data} />`;
  const { alerts } = data.data;
  const now = Date.now() / 1000;
  const lasting = alerts.filter(({ ended }) => ended == null);
  const over = alerts.filter(({ ended }) => ended != null);
  return html`
    ${
      data.error &&
      html`<p class="notice bad"
      role="status">These alerts are from before: the service does not answer.</p>`
    }
    <div class="bar-above"><p role="status"
      class="muted">${lasting.length} active, ${over.length} over in this range</p>
      <${CsvLink} table="alerts" title="Alerts" query=${query} /></div>
    ${
      lasting.length
        ? html`<${AlertList} alerts=${lasting} now=${now} />`
        : html`<p
          class="notice">Nothing is wrong: no preemption thrash, decode stall,
            queueing collapse, runaway generation or adapter churn.</p>`
    }
    ${
      over.length > 0 &&
      html`<h2 class="between">Over</h2><${AlertList} alerts=${over}
      now=${now} />`
    }`;
}

/** The given alerts; `brief` leaves out what to change. */
export function AlertList({ alerts, now, brief }) {
  return html`<ul class="alerts" aria-label="Alerts">${alerts.map(
    (alert) => html`
    <li key=${`${alert.kind} ${alert.tenant} ${alert.adapter} ${alert.since}`}
      class=${alert.ended == null ? alert.severity : "over"} data-kind=${alert.kind}>
      <p class="what"><strong>${KINDS[alert.kind] ?? alert.kind}</strong> <span
        class="severity">${alert.severity}</span>
        ${
          alert.adapter &&
          html` <${Link} to=${href(["adapters", alert.tenant, alert.adapter])}>${adapterLabel(
            alert.tenant,
            alert.adapter,
          )}${alert.version != null ? `@${alert.version}` : ""}<//>`
        }
        ${" "}<span class="muted">${span(alert, now)}</span></p>
      <p>${alert.what}</p>
      ${!brief && html`<p><span class="muted">What to change:</span> ${alert.change}</p>`}
      <dl class="facts">${alert.figures.map(
        ({ name, value, unit, limit }) => html`<div><dt>${name}</dt>
        <dd>${format.inUnit(value, unit)}${
          limit != null &&
          html` <span
          class="muted">(limit ${format.tick(limit, unit)})</span>`
        }</dd></div>`,
      )}</dl>
    </li>`,
  )}</ul>`;
}

const span = ({ since, ended }, now) =>
  ended == null
    ? `since ${format.moment(since)}, for ${format.seconds(Math.max(0, Math.round(now - since)))}`
    : `${format.moment(since)} to ${format.time(ended)}, for ${format.seconds(ended - since)}`;
