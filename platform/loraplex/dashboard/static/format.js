// Figures as text: exact units, no rounding that hides a digit that matters. Null is an en dash.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const three = new Intl.NumberFormat("en", {
  maximumSignificantDigits: 3,
  minimumSignificantDigits: 3,
});
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const dayAndClock = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** Seconds: `850 µs`, `34.2 ms`, `1.24 s`, `2 min 03 s`, `1 h 02 min`. */
export const seconds = (value) => secondsIn(three, value);

function secondsIn(digits, value) {
  if (value == null) return NONE;
  if (value === 0) return "0 s";
  if (value < 0) return `−${secondsIn(digits, -value)}`;
  if (value < 0.0009995) return `${digits.format(value * 1e6)} µs`;
  if (value < 0.9995) return `${digits.format(value * 1e3)} ms`;
  if (value < 59.95) return `${digits.format(value)} s`;
  const rounded = Math.round(value);
  if (rounded < 3600) return `${Math.floor(rounded / 60)} min ${two(rounded % 60)} s`;
  const minutes = Math.round(value / 60);
  return `${whole.format(Math.floor(minutes / 60))} h ${two(minutes % 60)} min`;
}

/** A whole number with separators. */
export const count = (value) => (value == null ? NONE : whole.format(value));

/** A whole number and what it counts: `1 load`, `2 loads`. */
export const counted = (value, one, many = `${one}s`) =>
  `${count(value)} ${value === 1 ? one : many}`;

/** A number with three significant digits, or all of those before the point. */
export const number = (value) => digitsOf(three, value);

function digitsOf(digits, value) {
  if (value == null) return NONE;
  if (value === 0) return "0";
  return Math.abs(value) >= 999.5 ? whole.format(value) : digits.format(value);
}

/** A rate a second. */
export const rate = (value) => (value == null ? NONE : `${number(value)}/s`);

/** A share from 0 to 1 in per cent; what is not quite none or all never reads as 0 % or 100 %. */
export function share(value) {
  if (value == null) return NONE;
  if (value > 0 && value < 0.001) return "<0.1 %";
  if (value < 1 && value > 0.999) return ">99.9 %";
  return `${(value * 100).toFixed(value === 0 || value === 1 ? 0 : 1)} %`;
}

/** Bytes, in powers of 1024. */
export function bytes(value) {
  if (value == null) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; value >= 1024 && power < units.length - 1; power++) value /= 1024;
  return `${digitsOf(short, value)} ${units[power]}`;
}

/** A unix time as the clock shows it here. */
export const time = (value) => (value == null ? NONE : clock.format(value * 1000));

/** A unix time with its day. */
export const moment = (value) => (value == null ? NONE : dayAndClock.format(value * 1000));

/** How long ago, from `now` in unix seconds. */
export const ago = (value, now) =>
  value == null ? NONE : `${seconds(Math.max(0, Math.round(now - value)))} ago`;

/** A whole number where it is one, else three digits: means of counts. */
export const mean = (value) => (Number.isInteger(value) ? count(value) : number(value));

/** What writes a value of each unit. */
const BY_UNIT = { s: seconds, share, per_second: rate, count, tokens: count, ratio: number, mean };

/** A value by the name of its unit, as alerts and charts give it. */
export const inUnit = (value, unit) => (BY_UNIT[unit] ?? number)(value);

/** The same on an axis: no zeros that say nothing. */
export function tick(value, unit) {
  if (unit === "s" && value >= 60) {
    if (value % 3600 === 0) return `${whole.format(value / 3600)} h`;
    return value % 60 === 0 ? `${whole.format(value / 60)} min` : `${whole.format(value)} s`;
  }
  if (unit === "s") return secondsIn(short, value);
  if (unit === "share") return value == null ? NONE : `${short.format(value * 100)} %`;
  if (unit === "per_second") return `${digitsOf(short, value)}/s`;
  return digitsOf(short, value);
}

const two = (value) => String(value).padStart(2, "0");
