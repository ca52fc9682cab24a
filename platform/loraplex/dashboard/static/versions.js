// An adapter's versions and aliases, and what a publish did to how replies end.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { finishSum } from "./causes.js";
import * as format from "./format.js";
import { FinishBar, FinishLegend, LengthShare } from "./marks.js";
import { Figures, Panel } from "./panel.js";

/** A call-out for a version that runs to its limit where the one before it stopped. */
export function NeverStops({ publishes }) {
  const bad = publishes.filter(({ verdict }) => verdict === "never_stops");
  return bad.map(
    (one) => html`<div class="callout" role="alert" key=${one.version} data-version=${one.version}>
    <h2>Version ${one.version} does not stop</h2>
    <p>${format.share(one.after_length_share)} of its replies run into their token limit
      (${format.count(one.after.length)} of ${format.count(one.after.stop + one.after.length)}
      ${" "}ended with <code>length</code>)${before(one)}. A fine-tune that forgot its
      ${" "}end-of-sequence token looks like this: it pays for tokens that nobody reads, and holds
      ${" "}seats and KV blocks.</p>
    <p>What to do: ${one.previous != null && `move the alias back to version ${one.previous}, then `}
      train again with the end token in the labels (not masked, not the padding token), or set
      ${" "}<code>stop</code> tokens for the version, or a smaller <code>max_tokens</code>.</p>
  </div>`,
  );
}

const before = ({ previous, before_length_share: share }) =>
  previous == null ? "" : `, of version ${previous} it was ${format.share(share)}`;

/** The versions of the adapter, and which share of its traffic each had. */
export function Versions({ view, csv }) {
  const pointed = (version) =>
    view.aliases
      .flatMap((alias) => [
        ...(alias.version === version
          ? [
              alias.canary_version == null
                ? alias.alias
                : `${alias.alias} ${format.share(1 - alias.canary_share)}`,
            ]
          : []),
        ...(alias.canary_version === version
          ? [`${alias.alias} ${format.share(alias.canary_share)}`]
          : []),
      ])
      .join(", ");
  const columns = [
    { label: "version", head: true, text: true, cell: (row) => `@${row.version}` },
    { label: "aliases", text: true, cell: (row) => pointed(row.version) || format.NONE },
    { label: "published", text: true, cell: (row) => format.moment(row.published || null) },
    { label: "state", text: true, cell: (row) => row.state },
    { label: "rank", cell: (row) => format.count(row.rank) },
    { label: "size", cell: (row) => format.bytes(row.bytes) },
    { label: "requests", cell: (row) => format.count(row.requests) },
    { label: "traffic", cell: (row) => format.share(row.share) },
    { label: "output tokens", cell: (row) => format.count(row.output_tokens) },
    { label: "queue p95", cell: (row) => format.seconds(row.queue.p95) },
    { label: "first token p95", cell: (row) => format.seconds(row.ttft.p95) },
    {
      label: "endings",
      text: true,
      cell: (row) => html`<${FinishBar} finishes=${row.finishes} />`,
    },
    { label: "length", cell: (row) => html`<${LengthShare} finishes=${row.finishes} />` },
  ];
  return html`<${Panel} title="Versions" csv=${csv} wide><${FinishLegend} /><div class="scroll" tabindex="0"
    role="region"
    aria-label="Versions, table"><${Figures} caption="Versions" columns=${columns}
      rows=${[...view.versions].sort((a, b) => b.version - a.version)}
        empty="No version is left." /></div><//>`;
}

/** Where the aliases point. */
export function Aliases({ aliases }) {
  const columns = [
    { label: "alias", head: true, text: true, cell: (row) => row.alias },
    { label: "version", cell: (row) => `@${row.version}` },
    {
      label: "canary",
      cell: (row) => (row.canary_version == null ? format.NONE : `@${row.canary_version}`),
    },
    {
      label: "canary's share",
      cell: (row) => (row.canary_version == null ? format.NONE : format.share(row.canary_share)),
    },
  ];
  return html`<${Panel} title="Aliases"><${Figures} caption="Aliases" columns=${columns}
    rows=${aliases}
    empty="No alias points to a version." /><//>`;
}

const VERDICTS = { fine: "fine", never_stops: "does not stop", too_few: "too few to tell" };

/** How replies ended before and after each publish. */
export function Publishes({ publishes, csv }) {
  const columns = [
    { label: "version", head: true, text: true, cell: (row) => `@${row.version}` },
    { label: "since", text: true, cell: (row) => format.moment(row.at) },
    {
      label: "before",
      text: true,
      cell: (row) =>
        row.previous == null ? format.NONE : html`<${FinishBar} finishes=${row.before} />`,
    },
    {
      label: "length before",
      cell: (row) =>
        row.previous == null
          ? format.NONE
          : `${format.share(row.before_length_share)} of ${format.count(finishSum(row.before))}`,
    },
    { label: "after", text: true, cell: (row) => html`<${FinishBar} finishes=${row.after} />` },
    {
      label: "length after",
      cell: (row) =>
        `${format.share(row.after_length_share)} of ${format.count(finishSum(row.after))}`,
    },
    {
      label: "verdict",
      text: true,
      cell: (row) =>
        html`<span
          class=${row.verdict === "never_stops" ? "late" : ""}>${VERDICTS[row.verdict]}</span>`,
    },
  ];
  return html`<${Panel} title="Endings before and after each publish" double csv=${csv}><${FinishLegend} /><div
    class="scroll" tabindex="0" role="region"
    aria-label="Publishes, table"><${Figures} caption="Endings before and after each publish"
      columns=${columns}
      rows=${publishes} empty="No version began to answer in what is kept." /></div><//>`;
}
