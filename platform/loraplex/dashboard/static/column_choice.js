// Which columns of a table are shown: a choice that the browser remembers, and the list to make it.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";

const CARDS = "(max-width: 640px)";

/**
 * `{ shown, chosen, choose }` of a table's columns: those to draw, the keys of those chosen, and what
 * takes other keys (null: the usual ones). The first column and the one that the table is sorted by
 * are always shown; on a phone, where a row is a card, all are.
 */
export function useColumns(name, columns, sort) {
  const store = `loraplex-columns-${name}`;
  const [remembered, setRemembered] = useState(() => localStorage.getItem(store));
  const areCards = useMedia(CARDS);
  const chosen = new Set(
    remembered == null
      ? columns.filter(({ usual }) => usual).map(({ key }) => key)
      : remembered.split(" ").filter(Boolean),
  );
  const choose = (keys) => {
    const text = keys == null ? null : [...keys].join(" ");
    if (text == null) localStorage.removeItem(store);
    else localStorage.setItem(store, text);
    setRemembered(text);
  };
  const isShown = (column, place) =>
    areCards || !place || chosen.has(column.key) || column.sort === sort;
  return { shown: columns.filter(isShown), chosen, choose };
}

function useMedia(query) {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const update = () => setMatches(list.matches);
    list.addEventListener("change", update);
    return () => list.removeEventListener("change", update);
  }, [query]);
  return matches;
}

/** A list that opens, one box a column. Escape and whatever is elsewhere close it. */
export function ColumnChoice({ columns, sort, shown, chosen, choose }) {
  const box = useRef(null);
  const close = () => {
    box.current.open = false;
  };
  useEffect(() => {
    const elsewhere = ({ target }) => box.current.contains(target) || close();
    for (const kind of ["pointerdown", "focusin"]) addEventListener(kind, elsewhere);
    return () => {
      for (const kind of ["pointerdown", "focusin"]) removeEventListener(kind, elsewhere);
    };
  }, []);
  const escape = (event) => {
    if (event.key !== "Escape" || !box.current.open) return;
    close();
    box.current.querySelector("summary").focus();
  };
  const toggle = (key) => {
    const keys = new Set(chosen);
    if (!keys.delete(key)) keys.add(key);
    choose(keys);
  };
  return html`<details class="columns" ref=${box} onKeyDown=${escape}>
    <summary>Columns<span class="muted"> ${shown.length} of ${columns.length}</span></summary>
    <div class="list">
      <fieldset><legend class="hidden">Columns of the table</legend>${columns.slice(1).map(
        ({ key, label, long = label, sort: order }) => {
          const isOrder = order === sort;
          return html`<label key=${key}><input type="checkbox" disabled=${isOrder}
            checked=${isOrder || chosen.has(key)} onChange=${() => toggle(key)} />${long}${
              isOrder && html`<span class="muted"> (the order)</span>`
            }</label>`;
        },
      )}</fieldset>
      <p><button type="button" onClick=${() => choose(null)}>The usual ones</button>
        <button type="button"
          onClick=${() => choose(columns.map(({ key }) => key))}>All</button></p>
    </div>
  </details>`;
}
