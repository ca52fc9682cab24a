"""What a chart or a table shows, as rows of cells."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from loraplex.csv_table import Cell, Table
from loraplex.dashboard.adapter_views import AdapterRow, AdapterView
from loraplex.dashboard.engine_views import Batch, Slots
from loraplex.dashboard.views import (
    Alerts,
    CauseColumns,
    FinishColumns,
    Overview,
    PercentileColumns,
    Window,
)
from loraplex.recorder.traffic import CAUSES, FINISHES


def moment(at: float | None) -> str | None:
    """A time, in UTC."""
    return (
        None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    )


def throughput(view: Overview) -> Table:
    """Tokens, requests and goodput a second."""
    names = ("requests_rate", "goodput_rate", "prompt_tokens_rate", "output_tokens_rate")
    return _columns(view.window, {name: getattr(view, name) for name in names})


def latency(view: Overview | AdapterView) -> Table:
    """Percentiles by bucket."""
    columns = {**_percentiles("ttft", view.ttft), **_percentiles("token_gap", view.token_gap)}
    if isinstance(view, Overview):
        columns |= _percentiles("token_time", view.token_time)
    else:
        columns = {**_percentiles("queue", view.queue), **columns}
    return _columns(view.window, columns)


def load(view: Overview) -> Table:
    """Running and waiting, and the engine's gauges; those not for a tenant."""
    names = ("running", "waiting", "kv_share", "slots_used")
    return _columns(view.window, {name: getattr(view, name) for name in names})


def causes(window: Window, columns: CauseColumns) -> Table:
    """Queue seconds by cause."""
    return _columns(window, {cause: getattr(columns, cause) for cause in CAUSES})


def finishes(window: Window, columns: FinishColumns) -> Table:
    """Requests by how they ended."""
    return _columns(window, {reason: getattr(columns, reason) for reason in FINISHES})


def adapters(rows: Iterable[AdapterRow]) -> Table:
    """The table of adapters."""
    heading = (
        "tenant", "adapter", "requests", "running", "waiting", "waits_for", "queue_p50",
        "queue_p95", "queue_p99", *(f"queue_{cause}" for cause in CAUSES), "load_p95", "loads",
        "ttft_p50", "ttft_p95", "token_time_p50", "token_time_p95", "token_gap_p95",
        "prompt_tokens", "cached_tokens", "output_tokens", *FINISHES, "preemptions", "residency",
        "kept", "resident_share", "last_request",
    )  # fmt: skip
    return Table(
        heading,
        [
            (
                r.tenant, r.adapter, r.requests, r.running, r.waiting, r.waits_for, r.queue.p50,
                r.queue.p95, r.queue.p99, *(getattr(r.causes, cause) for cause in CAUSES),
                r.load.p95, r.loads, r.ttft.p50, r.ttft.p95, r.token_time.p50, r.token_time.p95,
                r.token_gap.p95, r.prompt_tokens, r.cached_tokens, r.output_tokens,
                *(getattr(r.finishes, e) for e in FINISHES), r.preemptions, r.residency, r.kept,
                r.resident_share, moment(r.last_request),
            )
            for r in rows
        ],
    )  # fmt: skip


def traffic(view: AdapterView) -> Table:
    """Requests and tokens, by version."""
    return _columns(
        view.window,
        {
            "requests": view.requests,
            "output_tokens": view.output_tokens,
            **{f"version {number}": of for number, of in view.version_requests.items()},
        },
    )


def versions(view: AdapterView) -> Table:
    """An adapter's versions."""
    heading = (
        "version", "published", "state", "rank", "bytes", "requests", "share", "output_tokens",
        "queue_p95", "ttft_p95", *FINISHES,
    )  # fmt: skip
    return Table(
        heading,
        [
            (
                v.version, moment(v.published), v.state, v.rank, v.bytes, v.requests, v.share,
                v.output_tokens, v.queue.p95, v.ttft.p95,
                *(getattr(v.finishes, e) for e in FINISHES),
            )
            for v in view.versions
        ],
    )  # fmt: skip


def publishes(view: AdapterView) -> Table:
    """When versions began to answer."""
    return Table(
        ("at", "version", "previous", "length_share_before", "length_share_after", "verdict"),
        [
            (
                moment(p.at), p.version, p.previous, p.before_length_share, p.after_length_share,
                p.verdict,
            )
            for p in view.publishes
        ],
    )  # fmt: skip


def slow_requests(view: AdapterView) -> Table:
    """The slowest requests."""
    heading = (
        "request", "version", "arrived", "queue_seconds", *CAUSES, "load_seconds", "ttft_seconds",
        "end_to_end_seconds", "longest_gap_seconds", "prompt_tokens", "output_tokens",
        "finish_reason", "preemptions", "timeline",
    )  # fmt: skip
    return Table(
        heading,
        [
            (
                r.request_id, r.version, moment(r.arrived), r.queue_seconds,
                *(getattr(r.causes, cause) for cause in CAUSES), r.load_seconds, r.ttft_seconds,
                r.end_to_end_seconds, r.longest_gap_seconds, r.prompt_tokens, r.output_tokens,
                r.finish_reason, r.preemptions,
                " ".join(f"{m.state}:{m.offset:.3f}" for m in r.timeline),
            )
            for r in view.slow_requests
        ],
    )  # fmt: skip


def slot_spans(view: Slots) -> Table:
    """Who held which slot when."""
    return Table(
        ("slot", "tenant", "adapter", "version", "state", "start", "end"),
        [
            (s.slot, s.tenant, s.adapter, s.version, s.kind, moment(s.start), moment(s.end))
            for s in view.spans
        ],
    )


def waits(view: Slots) -> Table:
    """What waits now."""
    return Table(
        ("tenant", "adapter", "version", "cause", "waiting", "running", "oldest_seconds"),
        [
            (w.tenant, w.adapter, w.version, w.cause, w.waiting, w.running, w.oldest_seconds)
            for w in view.waits
        ],
    )


def steps(view: Batch) -> Table:
    """Recent steps, and each adapter's tokens in them."""
    recent = view.recent
    names = (
        "rows", "adapters", "running", "waiting", "schedule_seconds", "prepare_seconds",
        "forward_seconds", "lora_seconds", "sample_seconds", "post_seconds",
    )  # fmt: skip
    columns: dict[str, Sequence[Cell]] = {"at": [moment(at) for at in recent.at]}
    columns |= {name: getattr(recent, name) for name in names}
    for share in recent.shares:
        name = "others" if share.adapter is None else f"{share.tenant or ''}/{share.adapter}"
        columns[f"{name} prefill"] = share.prefill_tokens
        columns[f"{name} decode"] = share.decode_tokens
    return Table(list(columns), list(zip(*columns.values(), strict=True)))


def step_times(view: Batch) -> Table:
    """Steps by bucket."""
    names = (
        "steps", "prefill_tokens", "decode_tokens", "base_tokens", "adapters_mean", "rows_mean",
    )  # fmt: skip
    columns = {name: getattr(view, name) for name in names}
    return _columns(view.window, {**_percentiles("step", view.step_seconds), **columns})


def alerts(view: Alerts) -> Table:
    """Alerts and their numbers."""
    return Table(
        (
            "kind", "severity", "tenant", "adapter", "version", "since", "ended", "what", "change",
            "figures",
        ),
        [
            (
                a.kind, a.severity, a.tenant, a.adapter, a.version, moment(a.since),
                moment(a.ended), a.what, a.change,
                "; ".join(f"{f.name}: {f.value:g} {f.unit}" for f in a.figures),
            )
            for a in view.alerts
        ],
    )  # fmt: skip


def _percentiles(name: str, columns: PercentileColumns) -> dict[str, Sequence[Cell]]:
    return {f"{name}_{part}": getattr(columns, part) for part in ("p50", "p95", "p99")}


def _columns(window: Window, columns: dict[str, Sequence[Cell]]) -> Table:
    full = {name: column for name, column in columns.items() if len(column) == len(window.times)}
    times = [moment(at) for at in window.times]
    return Table(["time", *full], list(zip(times, *full.values(), strict=True)))
