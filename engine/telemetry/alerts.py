"""The failure modes of continuous batching, found in sums: what goes wrong, numbers, what to do.

Pure functions of sums, so that the service's recorder and the simulator judge by the same rules.
The modes and their cures are those of "Continuous batching" (POFE): preemption thrash, decode
stalls, queueing collapse, runaway generations, adapter churn. Another one is a version that was
published and never stops. A finding names the limits that were reached.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

FindingKind = Literal[
    "preemption_thrash",
    "decode_stall",
    "queueing_collapse",
    "runaway_generation",
    "adapter_churn",
    "never_stops",
]
Severity = Literal["warning", "critical"]
Unit = Literal["s", "share", "per_second", "count", "tokens", "ratio"]
Verdict = Literal["fine", "never_stops", "too_few"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The whole engine over a while, usually a minute. Times are in seconds; None: no data."""

    seconds: float
    requests: int
    """That ended."""
    output_tokens: int
    preemptions: int
    running: float
    """Sequences, on average; so with `waiting`."""
    waiting: float
    kv_share: float
    """Used KV blocks of all, on average."""
    token_time_p50: float | None
    """Of requests' mean time per output token."""
    token_gap_p95: float | None
    """Of requests' longest time between two tokens."""
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInterval:
    """One adapter's requests over some seconds. `queue` is their seconds by cause, summed."""

    tenant: str
    adapter: str
    version: int | None = None
    requests: int
    stop: int
    length: int
    """Of those that might have stopped: one with `ignore_eos` says nothing about its adapter."""
    queue: dict[str, float] = field(default_factory=dict[str, float])
    queue_p95: float | None = None
    loads: int = 0
    """Times that it came into a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where each mode begins."""

    preemptions_per_request: float = 0.1
    min_preemptions: int = 5
    full_kv_share: float = 0.5
    """With a lower average, sequences are preempted for slots and not for blocks."""
    stall_ratio: float = 5.0
    """Longest gap (p95) over the median time per token."""
    stall_seconds: float = 0.25
    min_requests: int = 10
    waiting_growth: float = 1.5
    """The last interval's waiting sequences over the first one's."""
    waiting_per_running: float = 1.0
    flat_throughput: float = 1.1
    length_share: float = 0.9
    churn_share: float = 0.5
    """Of the queue time, what is due to slots and loads."""
    churn_seconds: float = 0.5
    """A request's mean wait for slot and load."""
    requests_per_load: float = 4.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that a finding rests on, and the limit that it met, where it has one."""

    name: str
    value: float
    unit: Unit
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that goes wrong. Without a tenant it is about the whole engine."""

    kind: FindingKind
    severity: Severity
    what: str
    change: str
    figures: tuple[Figure, ...]
    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None


DEFAULT_LIMITS = Limits()


def engine_findings(
    intervals: Sequence[Interval], limits: Limits = DEFAULT_LIMITS
) -> list[Finding]:
    """What is wrong with the engine in consecutive intervals, the oldest first."""
    judges = (preemption_thrash, decode_stall, queueing_collapse)
    return [found for judge in judges if (found := judge(intervals, limits)) is not None]


def adapter_findings(
    adapters: Sequence[AdapterInterval], limits: Limits = DEFAULT_LIMITS
) -> list[Finding]:
    """What is wrong with single adapters, over the same seconds."""
    judges = (runaway_generation, adapter_churn)
    return [
        found
        for adapter in adapters
        for judge in judges
        if (found := judge(adapter, limits)) is not None
    ]


def preemption_thrash(
    intervals: Sequence[Interval], limits: Limits = DEFAULT_LIMITS
) -> Finding | None:
    """Sequences are preempted again and again, and each time their prefill is computed anew."""
    preemptions = sum(part.preemptions for part in intervals)
    requests = sum(part.requests for part in intervals)
    per_request = preemptions / max(requests, 1)
    if preemptions < limits.min_preemptions or per_request < limits.preemptions_per_request:
        return None
    kv_share = _mean(intervals, "kv_share")
    seconds = sum(part.seconds for part in intervals)
    what, change = (
        "KV memory runs out",
        "Give the KV pool more memory (num_kv_blocks, gpu_memory_utilization), or lower "
        "max_num_seqs or max_model_len.",
    )
    if kv_share < limits.full_kv_share:
        what, change = (
            "Adapters take turns in too few slots",
            "Raise max_loras, or pin the adapters that most requests use.",
        )
    return Finding(
        kind="preemption_thrash",
        severity="critical" if per_request >= 5 * limits.preemptions_per_request else "warning",
        what=f"{what}: {preemptions} preemptions over {requests} requests, each of "
        "which computes a prefill once more.",
        change=change,
        figures=(
            Figure("preemptions a request", per_request, "ratio", limits.preemptions_per_request),
            Figure("preemptions", preemptions, "count", limits.min_preemptions),
            Figure("preemptions a second", preemptions / max(seconds, 1e-9), "per_second"),
            Figure("KV blocks used", kv_share, "share"),
        ),
    )


def decode_stall(intervals: Sequence[Interval], limits: Limits = DEFAULT_LIMITS) -> Finding | None:
    """Tokens of running requests come late, while the prompts of others are computed.

    Gaps that preemptions make are not these.
    """
    parts = [p for p in intervals if p.token_gap_p95 is not None and p.token_time_p50]
    requests = sum(part.requests for part in parts)
    if requests < limits.min_requests or sum(part.preemptions for part in parts) > requests / 20:
        return None
    gap = sum((p.token_gap_p95 or 0.0) * p.requests for p in parts) / requests
    usual = sum((p.token_time_p50 or 0.0) * p.requests for p in parts) / requests
    if gap < limits.stall_seconds or gap < limits.stall_ratio * usual:
        return None
    prefill = sum(part.prefill_tokens for part in parts) / max(sum(p.seconds for p in parts), 1e-9)
    return Finding(
        kind="decode_stall",
        severity="critical" if gap >= 4 * limits.stall_ratio * usual else "warning",
        what=f"Replies stall: the longest gap between two tokens is {gap:.2f} s (p95), "
        f"{gap / usual:.0f} times the usual {usual:.3f} s.",
        change="Let prompts in by smaller chunks: lower max_num_batched_tokens.",
        figures=(
            Figure("longest gap, p95", gap, "s", limits.stall_seconds),
            Figure("over the median time per token", gap / usual, "ratio", limits.stall_ratio),
            Figure("prompt tokens computed a second", prefill, "per_second"),
        ),
    )


def queueing_collapse(
    intervals: Sequence[Interval], limits: Limits = DEFAULT_LIMITS
) -> Finding | None:
    """More comes than can be served: the queue grows while throughput does not."""
    if len(intervals) < 3:
        return None
    first, last = intervals[0], intervals[-1]
    grows = all(b.waiting >= a.waiting for a, b in pairwise(intervals))
    enough = last.waiting >= max(
        4.0, limits.waiting_growth * first.waiting, limits.waiting_per_running * last.running
    )
    rates = [part.output_tokens / part.seconds for part in intervals if part.seconds > 0]
    if not grows or not enough or len(rates) < 3:
        return None
    earlier = sum(rates[:-1]) / len(rates[:-1])
    if earlier <= 0 or rates[-1] > limits.flat_throughput * earlier:
        return None
    ended = sum(part.requests for part in intervals) / sum(part.seconds for part in intervals)
    figures = [
        Figure("waiting now", last.waiting, "count"),
        Figure(
            "waiting now over then", last.waiting / max(first.waiting, 1.0), "ratio",
            limits.waiting_growth,
        ),
        Figure("requests served a second", ended, "per_second"),
        Figure("throughput over before", rates[-1] / earlier, "ratio", limits.flat_throughput),
    ]  # fmt: skip
    if ended > 0:
        figures.append(Figure("wait of the last in the queue", last.waiting / ended, "s"))
    return Finding(
        kind="queueing_collapse",
        severity="critical",
        what=f"More comes than can be served: {last.waiting:.0f} wait, {first.waiting:.0f} did "
        f"{sum(p.seconds for p in intervals[:-1]):.0f} s before, and throughput does not rise.",
        change="Admit less, by quotas (requests or tokens a minute, max_queued) of the tenants "
        "that send most, or add another replica.",
        figures=tuple(figures),
    )


def runaway_generation(adapter: AdapterInterval, limits: Limits = DEFAULT_LIMITS) -> Finding | None:
    """Replies of an adapter run until their limit."""
    ended = adapter.stop + adapter.length
    share = adapter.length / max(ended, 1)
    if ended < limits.min_requests or share < limits.length_share:
        return None
    return Finding(
        kind="runaway_generation",
        severity="warning",
        what=f"{adapter.length} of {ended} replies ran until their limit: either clients ask for "
        "too few tokens, or the adapter does not emit its end token.",
        change="Compare the chat template and the end-of-sequence token with those of training; "
        "set stop tokens with the version, or a lower max_tokens.",
        figures=(
            Figure("ended by length", share, "share", limits.length_share),
            Figure("replies", ended, "count", limits.min_requests),
        ),
        tenant=adapter.tenant,
        adapter=adapter.adapter,
        version=adapter.version,
    )


def adapter_churn(adapter: AdapterInterval, limits: Limits = DEFAULT_LIMITS) -> Finding | None:
    """An adapter's requests wait for a slot, and again after it was pushed out of one."""
    total = sum(adapter.queue.values())
    slots = adapter.queue.get("slot", 0.0) + adapter.queue.get("load", 0.0)
    if adapter.requests < limits.min_requests or adapter.loads < 2 or total <= 0:
        return None
    mean, share = slots / adapter.requests, slots / total
    per_load = adapter.requests / adapter.loads
    if (
        share < limits.churn_share
        or mean < limits.churn_seconds
        or per_load > limits.requests_per_load
    ):
        return None
    return Finding(
        kind="adapter_churn",
        severity="critical" if mean >= 4 * limits.churn_seconds else "warning",
        what=f"Its requests wait {mean:.2f} s for a slot, which it was given {adapter.loads} "
        f"times for {adapter.requests} requests.",
        change="Raise max_loras, pin the adapter, or route it to a replica of its own.",
        figures=(
            Figure("mean wait for slot and load", mean, "s", limits.churn_seconds),
            Figure("of all its queue time", share, "share", limits.churn_share),
            Figure("requests a load", per_load, "ratio", limits.requests_per_load),
            Figure("loads", adapter.loads, "count"),
        ),
        tenant=adapter.tenant,
        adapter=adapter.adapter,
        version=adapter.version,
    )


def judge_publish(
    before: tuple[int, int] | None, after: tuple[int, int], limits: Limits = DEFAULT_LIMITS
) -> Verdict:
    """Whether a new version runs to its limit far more often than the one before it, or than half
    of the time where there was none; (ended by stop, ended by length) of each.

    Chance is left room: Wilson's 95% bounds of both shares must not meet
    (https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval).
    """
    if sum(after) < limits.min_requests:
        return "too_few"
    least = wilson(after[1], sum(after))[0]
    usual = wilson(before[1], sum(before))[1] if before is not None and sum(before) else 0.5
    return "never_stops" if least > max(usual, 0.5) else "fine"


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Bounds of a share of which `hits` of `trials` were seen."""
    share, square = hits / trials, z * z
    middle = share + square / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    scale = 1 + square / trials
    return (middle - spread) / scale, (middle + spread) / scale


def _mean(intervals: Sequence[Interval], name: str) -> float:
    seconds = sum(part.seconds for part in intervals)
    weighed = sum(getattr(part, name) * part.seconds for part in intervals)
    return weighed / seconds if seconds > 0 else 0.0
