// Small drawings inside tables: sparklines, a bar of causes, a bar of endings.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { CAUSES, FINISHES, causeColor, causeSum, finishSum } from "./causes.js";
import * as format from "./format.js";

const SPARK_WIDTH = 84;
const SPARK_HEIGHT = 18;
const DASH = 4;

/**
 * A sparkline; gaps stay gaps, a value between two of them is a dash. `label` says what it shows, its
 * largest value is in the text.
 */
export function Spark({ values, label, unit }) {
  const known = values.filter((value) => value != null);
  const top = Math.max(0, ...known);
  if (!known.length || top === 0) return html`<span class="muted">${format.NONE}</span>`;
  const dx = SPARK_WIDTH / Math.max(1, values.length - 1);
  let pen = "M";
  const path = values
    .map((value, i) => {
      if (value == null) {
        pen = "M";
        return "";
      }
      const y = SPARK_HEIGHT - 1.5 - (value / top) * (SPARK_HEIGHT - 3);
      const isAlone = pen === "M" && values[i + 1] == null;
      const x = isAlone ? Math.min(i * dx, SPARK_WIDTH - DASH) : i * dx;
      const point = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
      return isAlone ? `${point}h${DASH}` : point;
    })
    .join("");
  return html`<svg class="spark" width=${SPARK_WIDTH} height=${SPARK_HEIGHT} role="img"
    aria-label=${`${label}, at most ${format.inUnit(top, unit)}`}><path d=${path} /></svg>`;
}

/** Shares side by side: `parts` are `{ key, label, color, value }`. */
export function ShareBar({ parts, label, text }) {
  const total = parts.reduce((sum, { value }) => sum + value, 0);
  const said = parts
    .filter(({ value }) => value > 0)
    .map((part) => `${part.label} ${text(part.value)} (${format.share(part.value / total)})`)
    .join(", ");
  if (!total) return html`<span class="muted">${format.NONE}</span>`;
  let left = 0;
  return html`<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"
    aria-label=${`${label}: ${said}`}><title>${said}</title>
    ${parts.map(({ key, color, value }) => {
      const width = (value / total) * 100;
      const rect = html`<rect key=${key} x=${left} y="0" width=${width} height="10"
        style=${{ fill: `var(${color})` }} />`;
      left += width;
      return width > 0 && rect;
    })}
  </svg>`;
}

/** Queue seconds by cause as one bar. */
export const CauseBar = ({ causes }) => html`<${ShareBar} label="Queue time by cause"
  text=${format.seconds} parts=${CAUSES.map(({ key, label }) => ({
    key,
    label,
    color: causeColor(key),
    value: causes[key] ?? 0,
  }))} />`;

/** Endings as one bar. */
export const FinishBar = ({ finishes }) => html`<${ShareBar} label="Endings" text=${format.count}
  parts=${FINISHES.map((one) => ({ ...one, value: finishes[one.key] ?? 0 }))} />`;

/** What a bar of endings is made of: colour, name and number of each that there is. */
export const FinishCounts = ({ finishes }) =>
  FINISHES.filter(({ key }) => finishes[key] > 0).map(
    ({ key, label, color }) =>
      html`<span class="pair" key=${key}><${Key} color=${color} />${label} ${format.count(
        finishes[key],
      )}</span> `,
  );

/** The colours of all endings, above a table that has bars of them. */
export const FinishLegend = () => html`<p class="legend"><span>endings:</span>${FINISHES.map(
  ({ key, label, color }) =>
    html`<span class="pair" key=${key}><${Key} color=${color} />${label}</span>`,
)}</p>`;

/** The causes with their seconds and shares, largest first, and what would help. */
export function CauseTable({ causes, advise }) {
  const total = causeSum(causes);
  const rows = CAUSES.filter(({ key }) => causes[key] > 0).sort(
    (a, b) => causes[b.key] - causes[a.key],
  );
  return html`<table class="figures causes" data-total-seconds=${total}>
    <caption class="hidden">Queue time by cause, summed over the range</caption>
    <thead><tr><th scope="col" class="text">cause</th><th scope="col">seconds waited</th>
      <th scope="col">share</th><th scope="col" class="text">what it means</th>
      ${advise && html`<th scope="col" class="text">what would help</th>`}</tr></thead>
    <tbody>${rows.map(
      ({
        key,
        label,
        about,
        change,
      }) => html`<tr key=${key} data-cause=${key} data-seconds=${causes[key]}>
      <th scope="row" class="text"><${Key} color=${causeColor(key)} /> ${label}</th>
      <td>${format.seconds(causes[key])}</td><td>${format.share(causes[key] / total)}</td>
      <td class="text prose">${about}</td>
      ${advise && html`<td class="text prose">${change}</td>`}</tr>`,
    )}
    <tr class="total"><th scope="row" class="text">all</th><td>${format.seconds(total)}</td>
      <td>${total ? "100 %" : format.NONE}</td><td class="text prose">${finishNote(total)}</td>
      ${advise && html`<td></td>`}</tr></tbody>
  </table>`;
}

const finishNote = (total) => (total ? "the requests' queue time, exactly" : "no request waited");

/** A swatch of a colour; the text beside it says the same. */
export const Key = ({ color }) => html`<span class="key" aria-hidden="true"
  style=${{ background: `var(${color})` }}></span>`;

/** A share of `length` endings, marked when it is high. */
export function LengthShare({ finishes }) {
  const ended = finishes.stop + finishes.length;
  if (!ended) return html`<span class="muted">${format.NONE}</span>`;
  return html`<span
    title=${`${format.count(finishes.length)} of ${format.count(ended)}, ${format.count(
      finishSum(finishes),
    )} endings in all`}>${format.share(finishes.length / ended)}</span>`;
}
