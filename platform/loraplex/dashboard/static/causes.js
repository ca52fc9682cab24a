// The causes of waiting: their order, names and colours are the same on every page.

export const CAUSES = [
  {
    key: "quota",
    label: "quota",
    about: "the tenant runs as many requests, or uses as many slots, as it may",
    change: "raise the tenant's limit of concurrency or of slots, or let it wait",
  },
  {
    key: "load",
    label: "load",
    about: "the adapter's weights are on their way",
    change: "keep the adapter warm or pinned; look at disk and blob store",
  },
  {
    key: "slot",
    label: "slot",
    about: "the adapter has no slot, or its slot is being drained",
    change: "more slots (max_loras), or fewer adapters at a time",
  },
  {
    key: "kv",
    label: "kv",
    about: "no free KV blocks for the request at the head",
    change: "more KV memory, or shorter prompts and replies",
  },
  {
    key: "budget",
    label: "budget",
    about: "no tokens or no seat left in the step",
    change: "more seats (max_num_seqs) or tokens a step, or another replica",
  },
  {
    key: "turn",
    label: "turn",
    about: "others are served first, in fair order",
    change: "nothing is wrong with this adapter: the service is busy",
  },
];

/** The CSS variable that holds a cause's colour. */
export const causeColor = (key) => `--cause-${key}`;

/** Seconds over all causes. */
export const causeSum = (causes) => CAUSES.reduce((sum, { key }) => sum + (causes[key] ?? 0), 0);

/** The cause with the most seconds; undefined where nothing waited. */
export function worstCause(causes) {
  const waited = CAUSES.filter(({ key }) => causes[key] > 0);
  return waited.sort((a, b) => causes[b.key] - causes[a.key])[0];
}

export const FINISHES = [
  { key: "stop", label: "stop", color: "--end-stop" },
  { key: "length", label: "length", color: "--end-length" },
  { key: "abort", label: "abort", color: "--end-abort" },
  { key: "timeout", label: "timeout", color: "--end-timeout" },
  { key: "error", label: "error", color: "--end-error" },
];

/** Requests over all endings. */
export const finishSum = (finishes) =>
  FINISHES.reduce((sum, { key }) => sum + (finishes[key] ?? 0), 0);

/** The share of replies that ran into their limit, of those that ended by themselves. */
export function lengthShare(finishes) {
  const ended = finishes.stop + finishes.length;
  return ended ? finishes.length / ended : null;
}

const ADAPTER_COLORS = 8;

/** The CSS variable of an adapter's colour: the same for a name on every page and every day. */
export function adapterColor(tenant, adapter) {
  if (adapter == null) return "--adapter-other";
  if (adapter === "base") return "--adapter-base";
  let hash = 2166136261;
  for (const character of `${tenant}/${adapter}`) {
    hash = Math.imul(hash ^ character.codePointAt(0), 16777619);
  }
  return `--adapter-${(hash >>> 0) % ADAPTER_COLORS}`;
}

/** `tenant/adapter`, or who it is when the session may not know. */
export const adapterLabel = (tenant, adapter) =>
  adapter == null ? "others" : tenant ? `${tenant}/${adapter}` : adapter;
