// A lane a slot, a bar for each stay of an adapter: hatched on its way in and out.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { adapterColor, adapterLabel } from "./causes.js";
import * as format from "./format.js";

const LANE = 22;
const LEFT = 34;
const AXIS = 20;
const LETTER = 6.2;
const HATCHED = ["loading", "reserved", "draining"];
const STEPS = [5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400];

export function SlotTimeline({ view }) {
  const [box, width] = useWidth();
  const lanes = Math.max(view.slots_total, ...view.spans.map(({ slot }) => slot + 1));
  if (!lanes) return html`<p class="notice" ref=${box}>This engine has no adapter slots.</p>`;
  const seen = view.spans.filter((span) => (span.end ?? view.window.end) > view.window.start);
  return html`<div ref=${box} class="lanes">
    ${width > 0 && html`<${Lanes} view=${view} seen=${seen} lanes=${lanes} width=${width} />`}
    <${Legend} kinds=${new Set(seen.map(({ kind }) => kind))} />
  </div>`;
}

function Lanes({ view, seen, lanes, width }) {
  const { start, end } = view.window;
  const inside = (time) => Math.min(Math.max(time, start), end);
  const at = (time) => LEFT + ((inside(time) - start) / (end - start)) * (width - LEFT - 1);
  const bottom = lanes * LANE;
  const slots = Array.from({ length: lanes }, (_, slot) => slot);
  const marks = view.marks.filter((mark) => mark.kind !== "loaded" && mark.at >= start);
  const said = `${lanes} slots, ${seen.length} stays. All of them: the button “table”.`;
  return html`<svg width=${width} height=${bottom + AXIS} role="img" aria-label=${said}>
    <defs>${HATCHED.map((kind) => html`<${Hatch} kind=${kind} />`)}</defs>
    ${ticks(start, end, width).map(
      (time) => html`<g class="tick" key=${time}>
        <line x1=${at(time)} x2=${at(time)} y1="0" y2=${bottom} />
        <text x=${at(time)} y=${bottom + AXIS - 5} text-anchor="middle">${label(time, end - start)}</text>
      </g>`,
    )}
    ${slots.map(
      (slot) => html`<g key=${slot} class="lane">
        <text x="0" y=${slot * LANE + 15}>${slot}</text>
        <line x1=${LEFT} x2=${width} y1=${(slot + 1) * LANE - 0.5} y2=${(slot + 1) * LANE - 0.5} />
      </g>`,
    )}
    ${seen.map(
      (span) => html`<${Stay} key=${`${span.slot} ${span.start} ${span.kind}`} span=${span}
        left=${at(span.start)} right=${at(span.end ?? end)} end=${end} />`,
    )}
    ${marks.map(
      (mark) => html`<${Mark} key=${`${mark.slot} ${mark.at}`} mark=${mark} x=${at(mark.at)} />`,
    )}
  </svg>`;
}

const Swatch = ({ children }) =>
  html`<svg width="14" height="10" aria-hidden="true">
    <rect class="key-plain" width="14" height="10" />${children}
  </svg>`;

function Legend({ kinds }) {
  return html`<p class="legend">
    <span class="pair"><${Swatch} /> resident, one colour an adapter</span>
    ${HATCHED.filter((kind) => kinds.has(kind)).map(
      (kind) => html`<span class="pair" key=${kind}>
        <${Swatch}><rect width="14" height="10" fill=${`url(#hatch-${kind})`} /><//> ${kind}</span>`,
    )}
    <span class="pair"><svg width="8" height="10" aria-hidden="true">
      <line class="evicted" x1="4" x2="4" y1="0" y2="10" /></svg> evicted</span>
  </p>`;
}

function Stay({ span, left, right, end }) {
  // A slot is reserved while another adapter is still to leave it: below that one, at half height.
  const half = span.kind === "reserved" ? (LANE - 4) / 2 : 0;
  const y = span.slot * LANE + 2 + half;
  const height = LANE - 4 - half;
  const width = Math.max(1, right - left);
  const name =
    adapterLabel(span.tenant, span.adapter) + (span.version != null ? `@${span.version}` : "");
  const short = span.adapter ?? "others";
  const fits =
    width > 8 + LETTER * name.length ? name : width > 8 + LETTER * short.length ? short : null;
  const said = `slot ${span.slot}: ${name} ${span.kind}${half ? " for it" : ""} from ${format.time(span.start)} ${
    span.end == null ? "until now" : `to ${format.time(span.end)}`
  }, ${format.seconds((span.end ?? end) - span.start)}${span.is_pinned ? ", pinned" : ""}`;
  return html`<g class="stay"><title>${said}</title>
    <rect x=${left} y=${y} width=${width} height=${height}
      style=${{ fill: `var(${adapterColor(span.tenant, span.adapter)})` }} />
    ${
      span.kind !== "resident" &&
      html`<rect x=${left} y=${y} width=${width} height=${height}
      fill=${`url(#hatch-${span.kind})`} />`
    }
    ${fits && !half && html`<text x=${left + 4} y=${y + 13}>${fits}</text>`}</g>`;
}

function Mark({ mark, x }) {
  const name = adapterLabel(mark.tenant, mark.adapter);
  const said = `slot ${mark.slot}: ${name} ${mark.kind} at ${format.time(mark.at)}`;
  return html`<line
    class=${mark.kind} x1=${x} x2=${x} y1=${mark.slot * LANE + 1} y2=${mark.slot * LANE + LANE - 1}>
      <title>${said}</title></line>`;
}

/** Lines that lean right while loading, left while draining, and cross while reserved. */
function Hatch({ kind }) {
  const paths = { loading: "M-1 7L7 -1", draining: "M-1 -1L7 7", reserved: "M0 3H6M3 0V6" };
  return html`<pattern id=${`hatch-${kind}`} width="6" height="6" patternUnits="userSpaceOnUse">
    <path class="hatch" d=${paths[kind]} /></pattern>`;
}

function ticks(start, end, width) {
  const most = Math.max(2, Math.floor(width / 90));
  const step = STEPS.find((one) => (end - start) / one <= most) ?? STEPS.at(-1);
  const offset = new Date(start * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((start - offset) / step) * step + offset;
  return Array.from({ length: Math.floor((end - first) / step) + 1 }, (_, i) => first + i * step);
}

const label = (time, span) => (span <= 600 ? format.time(time) : format.time(time).slice(0, 5));

function useWidth() {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const sizes = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, []);
  return [box, width];
}
