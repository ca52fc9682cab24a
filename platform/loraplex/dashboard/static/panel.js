// A titled part of a page: its CSV, its table alternative, and what to show without data.
import { html, useState } from "./vendor/htm-preact-3.1.1.js";
import { apiUrl } from "./api.js";
import * as format from "./format.js";

/**
 * A section with a heading, over one column, two (`double`) or all (`wide`). `csv` is
 * `{ table, query }`; `table` draws the chart's figures.
 */
export function Panel({ title, about, csv, table, wide, double, children, tools }) {
  const [asTable, setAsTable] = useState(false);
  const id = `panel-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  return html`<section class=${`panel ${wide ? "wide" : double ? "double" : ""}`}
    aria-labelledby=${id}>
    <header>
      <h2 id=${id}>${title}</h2>
      ${about && html`<p class="about">${about}</p>`}
      <div class="tools">
        ${tools}
        ${
          table &&
          html`<button type="button" class="quiet" aria-pressed=${String(asTable)}
          aria-label=${`${title} as a table`} onClick=${() => setAsTable(!asTable)}>table</button>`
        }
        ${csv && html`<${CsvLink} title=${title} ...${csv} />`}
      </div>
    </header>
    ${
      asTable
        ? html`<div class="scroll" tabindex="0" role="region" aria-label=${`${title}, table`}>
      ${table()}</div>`
        : children
    }
  </section>`;
}

/** A link to what a chart or table shows, as CSV. */
export function CsvLink({ table, query, title }) {
  return html`<a class="quiet" href=${apiUrl(`export/${table}.csv`, query)} download
    aria-label=${`${title} as CSV`}>CSV</a>`;
}

/** What stands where data will be, or would have been. */
export function Waiting({ data }) {
  if (data.error && !data.data) {
    return html`<div class="notice bad" role="alert">
      <p>${problem(data.error)}</p>
      <button type="button" onClick=${data.reload}>Try again</button>
    </div>`;
  }
  return html`<p class="notice" role="status">Reading …</p>`;
}

/** A line over a page whose figures are old, and why. Nothing when they are fresh. */
export function Freshness({ data }) {
  if (!data.data) return null;
  const { window } = data.data;
  if (data.error) {
    return html`<p class="notice bad" role="status">
      ${problem(data.error)} The figures end at ${format.time(window.end)}.</p>`;
  }
  if (!window.complete_until) {
    return html`<p class="notice warn" role="status">The recorder has written nothing
      since the service started.</p>`;
  }
  const behind = window.end - window.complete_until;
  if (behind > Math.max(30, 3 * window.step_seconds)) {
    return html`<p class="notice warn" role="status">
      The recorder is ${format.seconds(behind)} behind: what came after
      ${` ${format.moment(window.complete_until)}`} is not in these figures.</p>`;
  }
  return null;
}

/** A sentence about a failed call. */
export function problem(error) {
  if (error.status === 404) return "There is nothing here that this session may see.";
  if (error.status) return `The service answered with ${error.status}: ${error.message}.`;
  if (error.name === "TimeoutError") return "The service did not answer within 15 s.";
  return "The service does not answer.";
}

/** A plain table of figures: `columns` are `{ label, cell, text, prose }`, `cell(row)` draws. */
export function Figures({ caption, columns, rows, empty = "Nothing in this range." }) {
  if (!rows.length) return html`<p class="notice">${empty}</p>`;
  return html`<table class="figures">
    <caption class="hidden">${caption}</caption>
    <thead><tr>${columns.map(
      ({ label, text }) => html`<th scope="col" class=${text ? "text" : ""}>${label}</th>`,
    )}</tr></thead>
    <tbody>${rows.map(
      (row) =>
        html`<tr>${columns.map(({ cell, text, head, prose }) =>
          head
            ? html`<th scope="row" class="text">${cell(row)}</th>`
            : html`<td class=${`${text ? "text" : ""} ${prose ? "prose" : ""}`}>${cell(row)}</td>`,
        )}</tr>`,
    )}</tbody>
  </table>`;
}
