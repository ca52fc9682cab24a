// The table of adapters: sorted, searched and paged by the service, so that thousands are no load.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { COLUMNS } from "./adapter_columns.js";
import { useData } from "./api.js";
import { CAUSES, causeColor } from "./causes.js";
import { ColumnChoice, useColumns } from "./column_choice.js";
import * as format from "./format.js";
import { FinishLegend, Key } from "./marks.js";
import { CsvLink, Freshness, Waiting } from "./panel.js";
import { Link, go, href, rangeOf } from "./router.js";

const PAGE_ROWS = 100;
const TYPING_MS = 200;

export function Adapters({ route, stream }) {
  const range = rangeOf(route.query);
  const sort = route.query.sort ?? "queue_p95";
  const order = route.query.order ?? "desc";
  const page = Math.max(1, Number.parseInt(route.query.page, 10) || 1);
  const search = route.query.q ?? "";
  const listed = { range: range.key, sort, order, search };
  const data = useData(
    "adapters",
    { ...listed, offset: (page - 1) * PAGE_ROWS, limit: PAGE_ROWS },
    { every: range.refreshSeconds, again: stream.recoveries },
  );
  const columns = useColumns("adapters", COLUMNS, sort);
  const change = (query, how) => go(href(route.parts, { ...route.query, ...query }), how);
  return html`
    <${Freshness} data=${data} />
    <div class="bar-above">
      <${Search} value=${search}
        onSearch=${(q) => change({ q, page: undefined }, { replace: true })} />
      <${SortChoice} columns=${COLUMNS} sort=${sort} order=${order}
        onSort=${(query) => change({ ...query, page: undefined })} />
      <p role="status" class="muted">${data.data && counted(data.data)}</p>
      <${ColumnChoice} columns=${COLUMNS} sort=${sort} ...${columns} />
      <${CsvLink} table="adapters" title="All adapters found" query=${listed} />
    </div>
    <p class="legend"><span>waited for:</span>${CAUSES.map(
      ({ key, label }) => html`<span
      class="pair"><${Key} color=${causeColor(key)} />${label}</span>`,
    )}</p>
    ${columns.shown.some(({ key }) => key === "finishes") && html`<${FinishLegend} />`}
    ${
      data.data
        ? html`<${Table} columns=${columns.shown} view=${data.data} range=${range.key} sort=${sort}
          order=${order}
        onSort=${(query) => change({ ...query, page: undefined })} />
      <${Pages} total=${data.data.total} page=${page}
        onPage=${(to) => change({ page: to > 1 ? String(to) : "" })} />`
        : html`<${Waiting} data=${data} />`
    }`;
}

function counted({ total, known, rows, offset }) {
  if (!known) return "There is no adapter yet, and the base was not called.";
  if (!total) return `None of ${format.count(known)} matches.`;
  const shown = rows.length
    ? `${format.count(offset + 1)} to ${format.count(offset + rows.length)} of `
    : "";
  const others = total < known ? ` found, ${format.count(known)} in all` : "";
  return `${shown}${format.count(total)}${others}`;
}

function Search({ value, onSearch }) {
  const [text, setText] = useState(value);
  const timer = useRef(null);
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    const focus = (event) => {
      if (event.key !== "/" || /^(input|select|textarea)$/i.test(event.target.tagName)) return;
      event.preventDefault();
      document.getElementById("search").focus();
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, []);
  const type = (event) => {
    const typed = event.target.value;
    setText(typed);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => onSearch(typed.trim()), TYPING_MS);
  };
  return html`<label class="search"><span class="hidden">Search adapters</span>
    <input id="search" type="search" value=${text} onInput=${type}
      placeholder="tenant/adapter   ( / )"
      spellcheck="false" maxlength="128" /></label>`;
}

function Table({ columns, view, range, sort, order, onSort }) {
  const now = view.window.end;
  return html`<div class="scroll tall" tabindex="0" role="region" aria-label="Adapters, table">
    <table class="figures adapters" aria-rowcount=${view.total + 1}>
      <caption class="hidden">Adapters with their figures over the range</caption>
      <thead><tr>${columns.map(
        (column) => html`<${Heading} key=${column.key} column=${column} sort=${sort}
        order=${order} onSort=${onSort} />`,
      )}</tr></thead>
      <tbody>${view.rows.map(
        (row) => html`<tr key=${`${row.tenant}/${row.adapter}`}>
        <th scope="row" class="text" title=${`${row.tenant}/${row.adapter}`}><${Link}
          to=${href(["adapters", row.tenant, row.adapter], { range })}
          ><span class="muted">${row.tenant}/</span>${row.adapter}<//></th>
        ${columns.slice(1).map(
          ({ key, cell, text, label, long = label }) => html`<td key=${key} data-label=${long}
          class=${text ? "text" : ""}>${cell(row, now)}</td>`,
        )}
      </tr>`,
      )}</tbody>
    </table></div>`;
}

/** What a phone has instead of the headings: there, each row is a card. */
function SortChoice({ columns, sort, order, onSort }) {
  return html`<label class="sort-choice"><span>sorted by</span>
    <select value=${`${sort} ${order}`} onChange=${(event) => {
      const [sort, order] = event.target.value.split(" ");
      onSort({ sort, order });
    }}>${columns
      .filter(({ sort }) => sort)
      .flatMap(({ sort: name, label, long = label }) =>
        ["desc", "asc"].map(
          (way) =>
            html`<option value=${`${name} ${way}`}>${long} ${way === "desc" ? "▼" : "▲"}</option>`,
        ),
      )}</select></label>`;
}

function Heading({ column: { sort: name, label, text, first = "desc" }, sort, order, onSort }) {
  if (!name) return html`<th scope="col" class=${text ? "text" : ""}>${label}</th>`;
  const present = name === sort;
  const next = present ? (order === "asc" ? "desc" : "asc") : first;
  return html`<th scope="col" class=${text ? "text" : ""}
    aria-sort=${present ? (order === "asc" ? "ascending" : "descending") : undefined}>
    <button type="button" onClick=${() => onSort({ sort: name, order: next })}>${label}<span
      aria-hidden="true"
      class="arrow">${present ? (order === "asc" ? "▲" : "▼") : ""}</span></button></th>`;
}

function Pages({ total, page, onPage }) {
  const pages = Math.ceil(total / PAGE_ROWS);
  if (pages < 2) return null;
  return html`<nav class="pages" aria-label="Pages of the table">
    <button type="button" disabled=${page <= 1} onClick=${() => onPage(page - 1)}>Previous</button>
    <span>page ${page} of ${pages}</span>
    <button type="button" disabled=${page >= pages} onClick=${() => onPage(page + 1)}>Next</button>
  </nav>`;
}
