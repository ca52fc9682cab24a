// What recent steps were made of and where their time went; step times over the range.
import { html, useEffect, useMemo, useState } from "./vendor/htm-preact-3.1.1.js";
import { useData } from "./api.js";
import { adapterColor, adapterLabel } from "./causes.js";
import { Chart, percentileSeries } from "./chart.js";
import * as format from "./format.js";
import { Freshness, Waiting } from "./panel.js";
import { rangeOf } from "./router.js";

const KEPT = 240;
const PARTS = ["schedule", "prepare", "forward", "sample", "post"];

export function Batch({ session, route, stream }) {
  const range = rangeOf(route.query);
  const query = { range: range.key };
  const data = useData("batch", query, { every: range.refreshSeconds, again: stream.recoveries });
  const [paused, setPaused] = useState(false);
  const recent = useRecent(data.data?.recent, stream.steps, paused);
  if (!data.data) return html`<${Waiting} data=${data} />`;
  const view = data.data;
  const pause = html`<button type="button" class="quiet" aria-pressed=${String(paused)}
    onClick=${() => setPaused(!paused)}>pause</button>`;
  return html`
    <${Freshness} data=${data} />
    <p class="muted summary">At most ${format.counted(view.max_batch_tokens, "token")}
      ${" "}and ${format.counted(view.max_rows, "row")} a step.
      ${
        recent.at.length > 0 &&
        ` The newest step ran at ${format.time(recent.at.at(-1))}: ${format.counted(recent.rows.at(-1), "row")} of ${format.counted(
          recent.adapters.at(-1),
          "adapter",
        )}.`
      }
      ${!session.is_admin && " All tenants share these steps: “others” is what is not yours."}</p>
    <div class="panels">
      <${Recent} recent=${recent} query=${query} tools=${pause} />
      <${Range} view=${view} query=${query} />
    </div>`;
}

function Recent({ recent, query, tools }) {
  const x = recent.at.map((_, i) => i - recent.at.length + 1);
  const csv = { table: "steps", query };
  const sum = (name) =>
    recent.at.map((_, i) => recent.shares.reduce((total, share) => total + share[name][i], 0));
  const parts = PARTS.map((part) => ({
    label: part,
    color: `--part-${part}`,
    values: recent[`${part}_seconds`],
  }));
  const forward = parts.findIndex(({ label }) => label === "forward");
  parts[forward] = {
    ...parts[forward],
    label: "forward, base",
    values: recent.forward_seconds.map((value, i) => value - recent.lora_seconds[i]),
  };
  parts.splice(forward + 1, 0, {
    label: "forward, LoRA",
    color: "--part-lora",
    values: recent.lora_seconds,
  });
  const shared = { x, csv, stacked: true, ordinal: true, empty: "No step ran lately." };
  return html`
    <${Chart} ...${shared} title="Tokens of recent steps, by adapter" wide height=${190}
      unit="tokens" tools=${tools}
      about="one column a step, the newest at the right"
      series=${recent.shares.map((share) => ({
        label: adapterLabel(share.tenant, share.adapter),
        color: adapterColor(share.tenant, share.adapter),
        values: share.prefill_tokens.map((value, i) => value + share.decode_tokens[i]),
      }))} />
    <${Chart} ...${shared} title="Prefill and decode of recent steps" unit="tokens" series=${[
      { label: "decode", color: "--state-decode", values: sum("decode_tokens") },
      { label: "prefill", color: "--state-prefill", values: sum("prefill_tokens") },
    ]} />
    <${Chart} ...${shared} title="Time of recent steps, by part" unit="s" series=${parts} />`;
}

function Range({ view, query }) {
  const x = view.window.times;
  const decode = view.decode_tokens;
  return html`
    <${Chart} title="Step time" unit="s" x=${x} csv=${{ table: "step-times", query }}
      series=${percentileSeries(view.step_seconds)} />
    <${Chart} title="Tokens computed" about="per bucket" unit="tokens" stacked x=${x}
      csv=${{ table: "step-times", query }} series=${[
        { label: "decode", color: "--state-decode", values: decode },
        { label: "prefill", color: "--state-prefill", values: view.prefill_tokens },
      ]} />
    <${Chart} title="Rows and adapters a step" about="means" unit="mean" x=${x}
      csv=${{ table: "step-times", query }} series=${[
        { label: "rows", values: view.rows_mean, color: "--line", width: 2 },
        { label: "adapters", values: view.adapters_mean, color: "--line-2", dash: [6, 3] },
      ]} />
    <${Chart} title="Share of the base model" about="of the tokens computed" unit="share" x=${x}
      csv=${{ table: "step-times", query }}
      series=${[
        {
          label: "base",
          color: "--adapter-base",
          width: 2,
          fill: "44",
          values: x.map((_, i) => {
            const all = decode[i] + view.prefill_tokens[i];
            return all ? view.base_tokens[i] / all : null;
          }),
        },
      ]} />`;
}

/** The last steps that were read, followed by those that came as events since. */
function useRecent(read, event, paused) {
  const [steps, setSteps] = useState(null);
  useEffect(() => {
    if (read && !paused) setSteps((old) => inOrder(old ?? EMPTY, read));
  }, [read]);
  useEffect(() => {
    if (event && !paused) setSteps((old) => inOrder(old ?? EMPTY, event));
  }, [event]);
  return useMemo(() => steps ?? EMPTY, [steps]);
}

const COLUMNS = [
  "at",
  "rows",
  "adapters",
  "running",
  "waiting",
  "schedule_seconds",
  "prepare_seconds",
  "forward_seconds",
  "lora_seconds",
  "sample_seconds",
  "post_seconds",
];
const EMPTY = Object.freeze({
  ...Object.fromEntries(COLUMNS.map((name) => [name, []])),
  shares: [],
});

/** Both, whichever begins earlier first: an event may come before the first answer. */
const inOrder = (old, more) => (old.at[0] > more.at[0] ? joined(more, old) : joined(old, more));

/** Both, without what `more` repeats; at most `KEPT` steps, and no adapter without a token. */
export function joined(old, more) {
  const newest = old.at.at(-1) ?? -Infinity;
  const from = more.at.findIndex((at) => at > newest);
  if (from < 0) return old;
  const join = (before, after) => [...before, ...after.slice(from)].slice(-KEPT);
  const steps = Object.fromEntries(COLUMNS.map((name) => [name, join(old[name], more[name])]));
  const shares = new Map();
  const zeros = (length) => new Array(length).fill(0);
  for (const [which, source] of [
    ["before", old],
    ["after", more],
  ]) {
    for (const share of source.shares) {
      const key = `${share.tenant}/${share.adapter}`;
      shares.set(key, {
        ...shares.get(key),
        [which]: share,
        tenant: share.tenant,
        adapter: share.adapter,
      });
    }
  }
  steps.shares = [...shares.values()]
    .map(({ tenant, adapter, before, after }) => {
      const column = (name) =>
        join(before?.[name] ?? zeros(old.at.length), after?.[name] ?? zeros(more.at.length));
      return {
        tenant,
        adapter,
        prefill_tokens: column("prefill_tokens"),
        decode_tokens: column("decode_tokens"),
      };
    })
    .filter(
      ({ prefill_tokens: prefill, decode_tokens: decode }) =>
        prefill.some(Boolean) || decode.some(Boolean),
    )
    .sort(byName);
  return steps;
}

/** The base first, the unnamed last, the rest by name: a colour keeps its place in the stack. */
const byName = (a, b) =>
  rankOf(a) - rankOf(b) ||
  adapterLabel(a.tenant, a.adapter).localeCompare(adapterLabel(b.tenant, b.adapter));
const rankOf = ({ adapter }) => (adapter === "base" ? 0 : adapter == null ? 2 : 1);
