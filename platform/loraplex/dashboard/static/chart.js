// uPlot as a component: lines, percentile bands and stacks, with a legend that reads the cursor.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import uPlot from "./vendor/uplot-1.6.32.js";
import * as format from "./format.js";
import { Figures, Panel } from "./panel.js";

const HEIGHT = 168;
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].flatMap((ten) => [
  ten,
  2 * ten,
  5 * ten,
]);
const SECONDS = [
  ...[1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1].flatMap((ten) => [ten, 2 * ten, 5 * ten]),
  ...[10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400],
];
const INCREMENTS = { count: WHOLE, tokens: WHOLE, s: SECONDS };
const SYNC = uPlot.sync("time");

/** A CSS variable's colour in the present theme. */
export const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * A chart in a panel. `x` are unix seconds, or step numbers when `ordinal`; each of `series` is
 * `{ label, values, color, dash, fill }`. `stacked` adds them up, the first at the bottom. `unit`
 * is one of format.inUnit's. `marks` are `{ at, label }`: vertical lines.
 */
export function Chart(props) {
  const { title, about, csv, x, series, unit, stacked, ordinal, wide, double, tools } = props;
  // Nothing to stack is said in words; a line at zero is a figure.
  const isDrawn = stacked ? Boolean : (value) => value != null;
  const hasData = x.length > 0 && series.some(({ values }) => values.some(isDrawn));
  const table =
    () => html`<${Figures} caption=${title} rows=${x.map((at, i) => ({ at, i })).reverse()}
    columns=${[
      {
        label: ordinal ? "step" : "time",
        head: true,
        text: true,
        cell: ({ at }) => (ordinal ? at : format.moment(at)),
      },
      ...series.map(({ label, values }) => ({
        label,
        cell: ({ i }) => format.inUnit(values[i], unit),
      })),
    ]} />`;
  return html`<${Panel} title=${title} about=${about} csv=${csv} table=${table} wide=${wide}
    double=${double} tools=${tools}>
    ${
      hasData
        ? html`<${Plot} ...${props} />`
        : html`<p class="notice empty">${props.empty ?? "Nothing in this range."}</p>`
    }
  <//>`;
}

/** The canvas itself; see `Chart`. */
export function Plot(props) {
  const { title, x, series, unit, stacked, ordinal, height = HEIGHT } = props;
  const box = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  const shown = useRef(props);
  shown.current = props;
  const shape = JSON.stringify([
    series.map((one) => [one.label, one.color, one.dash, one.fill]),
    unit,
    stacked,
    ordinal,
    height,
    theme,
  ]);

  useEffect(() => {
    const made = new uPlot(
      options(shown, box.current.clientWidth),
      dataOf(shown.current),
      box.current,
    );
    plot.current = made;
    const sizes = new ResizeObserver(() => {
      const width = box.current?.clientWidth;
      if (width && width !== made.width) made.setSize({ width, height });
    });
    sizes.observe(box.current);
    return () => {
      sizes.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => plot.current?.setData(dataOf(props)), [x, ...series.map(({ values }) => values)]);

  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const made = plot.current;
    if (!by || !made) return;
    event.preventDefault();
    const at = Math.min(x.length - 1, Math.max(0, (made.cursor.idx ?? x.length - 1) + by));
    made.setCursor({ left: made.valToPos(x[at], "x"), top: 10 });
  };
  return html`<div class=${stacked ? "plot" : "plot lines"} ref=${box} tabindex="0" role="img"
    onKeyDown=${move}
    aria-label=${summary(title, series, unit)}></div>`;
}

function summary(title, series, unit) {
  const newest = series.map(({ label, values }) => {
    const value = values.findLast((one) => one != null);
    return `${label} ${format.inUnit(value, unit)}`;
  });
  return `${title}, newest values: ${newest.join(", ")}. All of them: the button “table”.`;
}

/** Columns for uPlot. A stack is drawn from its sums, the largest first: none hides another. */
function dataOf({ x, series, stacked }) {
  if (!stacked) return [x, ...series.map(({ values }) => values)];
  const sums = [];
  series.forEach(({ values }, i) => {
    sums.push(values.map((value, at) => (value ?? 0) + (i ? sums[i - 1][at] : 0)));
  });
  return [x, ...sums.reverse()];
}

function options(shown, width) {
  const { series, unit, stacked, ordinal, height = HEIGHT } = shown.current;
  const grid = { stroke: color("--grid"), width: 1 };
  const axis = {
    stroke: color("--muted"),
    font: `11px ${color("--font")}`,
    grid,
    ticks: { show: false },
  };
  const drawn = stacked ? series.map((_, i) => series.length - 1 - i) : series.map((_, i) => i);
  return {
    width,
    height,
    scales: {
      x: { time: !ordinal, range: () => wholeBuckets(shown.current.x) },
      y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] },
    },
    cursor: {
      sync: ordinal ? undefined : { key: SYNC.key },
      y: false,
      drag: { setScale: false, x: false },
      points: { size: 5 },
    },
    padding: [6, 28, 0, 0],
    legend: {
      markers: stacked
        ? { width: 0, fill: (_, i) => color(series[drawn[i - 1]].color) }
        : {
            width: 2,
            fill: () => "transparent",
            dash: (_, i) => dashName(series[i - 1]),
            stroke: (_, i) => color(series[i - 1].color),
          },
    },
    axes: [
      { ...axis, size: 30, gap: 9, space: 70, ...(ordinal ? { incrs: WHOLE } : { values: clockTicks }) },
      {
        ...axis,
        size: 54,
        space: 34,
        ...(INCREMENTS[unit] ? { incrs: INCREMENTS[unit] } : {}),
        values: (_, ticks) => ticks.map((tick) => format.tick(tick, unit)),
      },
    ],
    series: [
      {
        label: ordinal ? "step" : "time",
        value: (u, at) => (at == null ? "newest" : ordinal ? at : format.time(at)),
      },
      ...drawn.map((at) => lineOf(series[at], at, { stacked, ordinal, unit, shown })),
    ],
    hooks: { drawAxes: [(u) => drawMarks(u, shown.current.marks ?? [])] },
  };
}

/** From the first bucket's begin to the last one's end. */
function wholeBuckets(x) {
  return x.length > 1 ? [x[0], 2 * x.at(-1) - x.at(-2)] : [x[0], x[0] + 1];
}

const dashName = ({ dash }) => (!dash ? "solid" : dash[0] < 4 ? "dotted" : "dashed");

function lineOf(line, at, { stacked, ordinal, unit, shown }) {
  const stroke = color(line.color);
  return {
    label: line.label,
    stroke,
    width: stacked ? 0 : (line.width ?? 1.5),
    dash: line.dash,
    fill: stacked ? stroke : line.fill ? `${stroke}${line.fill}` : undefined,
    paths: stacked ? uPlot.paths.bars({ size: [1, Infinity], align: 1 }) : undefined,
    points: { show: stacked ? false : pointsWhereAlone, size: 4, fill: stroke },
    value: (u, _, __, i) => {
      const { values } = shown.current.series[at];
      return format.inUnit(i == null ? values.findLast((one) => one != null) : values[i], unit);
    },
  };
}

/** A value between two gaps is no line: it is shown as a point. */
function pointsWhereAlone(u, seriesIndex) {
  const values = u.data[seriesIndex];
  return values.some((value, i) => value != null && values[i - 1] == null && values[i + 1] == null);
}

const hoursAndMinutes = new Intl.DateTimeFormat("en-GB", { timeStyle: "short" });
const clockTicks = (_, ticks, __, ___, step) =>
  ticks.map((tick) => (step < 60 ? format.time(tick) : hoursAndMinutes.format(tick * 1000)));

function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color("--text");
  ctx.font = `${11 * devicePixelRatio}px ${color("--font")}`;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  let [taken, row] = [-Infinity, 0];
  for (const { at, label } of [...marks].sort((a, b) => a.at - b.at)) {
    if (at < u.scales.x.min || at > u.scales.x.max) continue;
    const left = Math.round(u.valToPos(at, "x", true));
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    row = left < taken ? row + 1 : 0; // a label below those that it would run into
    taken = left + ctx.measureText(label).width + 8 * devicePixelRatio;
    const atEdge = left > bbox.left + bbox.width * 0.9;
    ctx.textAlign = atEdge ? "right" : "left";
    ctx.fillText(
      label,
      left + (atEdge ? -4 : 4) * devicePixelRatio,
      bbox.top + (10 + 12 * row) * devicePixelRatio,
    );
  }
  ctx.restore();
}

/** Changes when the theme does: colours are read from CSS when a chart is made. */
function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const change = () => setTheme((old) => old + 1);
    addEventListener("loraplex-theme", change);
    return () => removeEventListener("loraplex-theme", change);
  }, []);
  return theme;
}

/** The three series of a percentile's columns: line styles tell them apart without colour. */
export const percentileSeries = (columns, hue = "--line") => [
  { label: "p99", values: columns.p99, color: hue, dash: [2, 3], width: 1 },
  { label: "p95", values: columns.p95, color: hue, dash: [7, 3], width: 1.5 },
  { label: "p50", values: columns.p50, color: hue, width: 2, fill: "22" },
];
