// What a tenant may use, and how much of it it uses now.
import { html } from "./vendor/htm-preact-3.1.1.js";
import { useData } from "./api.js";
import * as format from "./format.js";
import { Panel, Waiting } from "./panel.js";

const LINES = {
  requests_per_minute: { label: "requests in the last minute" },
  tokens_per_minute: { label: "tokens in the last minute" },
  max_concurrent: { label: "running at once" },
  max_queued: { label: "waiting" },
  max_slots: { label: "slots in use" },
  max_adapters: { label: "adapters" },
  max_adapter_bytes: { label: "bytes of all versions", write: format.bytes },
  max_rank: { label: "rank of an adapter" },
};
const NEARLY = 0.9;

/** The limits of the session's tenant; what has none is told too, for its use. */
export function Quota({ range, again }) {
  const data = useData("quota", {}, { every: range.refreshSeconds, again });
  return html`<${Panel} title="Your quota" about="what you may use, and what of it you use now">${
    data.data ? html`<${Uses} quota=${data.data} />` : html`<${Waiting} data=${data} />`
  }<//>`;
}

function Uses({ quota }) {
  const shown = quota.uses.filter(({ limit, used }) => limit != null || used != null);
  return html`
    ${quota.is_suspended && html`<p class="notice bad">The tenant is suspended: its calls get 403.</p>`}
    <table class="figures quota">
      <caption class="hidden">Your quota</caption>
      <thead><tr><th scope="col" class="text">what</th><th scope="col">used</th>
        <th scope="col">limit</th><th scope="col" class="text">share</th></tr></thead>
      <tbody>${shown.map((use) => html`<${Use} key=${use.name} use=${use} />`)}
      <tr><th scope="row" class="text">weight in the fair order</th><td></td>
        <td>${format.mean(quota.weight)}</td><td></td></tr></tbody>
    </table>`;
}

function Use({ use: { name, limit, used } }) {
  const { label, write = format.count } = LINES[name] ?? { label: name };
  const share = limit && used != null ? used / limit : null;
  return html`<tr data-quota=${name}><th scope="row" class="text">${label}</th>
    <td class=${share >= NEARLY ? "late" : ""}>${write(used)}</td>
    <td>${limit == null ? html`<span class="muted">none</span>` : write(limit)}</td>
    <td class="text">${share != null && html`<${Meter} share=${share} label=${label} />`}</td></tr>`;
}

function Meter({ share, label }) {
  const said = `${label}: ${format.share(share)} of the limit`;
  return html`<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"
    aria-label=${said}><title>${said}</title>
    <rect class="meter-back" width="100" height="10" />
    <rect class=${share >= NEARLY ? "meter late" : "meter"} width=${Math.min(100, share * 100)}
      height="10" /></svg>`;
}
