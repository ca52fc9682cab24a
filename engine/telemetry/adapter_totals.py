"""One adapter's sums: made, added to, and poured into another's."""

from collections import Counter

from engine.telemetry.buckets import (
    LOAD_SECONDS,
    QUEUE_SECONDS,
    REQUEST_SECONDS,
    SECONDS_PER_TOKEN,
    TTFT_SECONDS,
    add,
    empty,
    observe,
)
from engine.telemetry.records import AdapterTotals, Objective, RequestRecord


def new_totals(tenant: str, adapter: str | None) -> AdapterTotals:
    """Totals of nothing so far."""
    return AdapterTotals(
        tenant=tenant,
        adapter=adapter,
        requests={},
        queue={},
        queue_total=empty(QUEUE_SECONDS),
        ttft=empty(TTFT_SECONDS),
        seconds_per_token=empty(SECONDS_PER_TOKEN),
        seconds=empty(REQUEST_SECONDS),
        load_seconds=empty(LOAD_SECONDS),
        resident_seconds=0.0,
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        preemptions=0,
        refused={},
        good=0,
    )


def is_good(record: RequestRecord, objective: Objective) -> bool:
    """Whether a request counts for goodput: it ended by itself, within both parts of the objective.

    One token has no time between tokens.
    """
    if record.finish_reason not in ("stop", "length") or record.ttft is None:
        return False
    per_token = record.seconds_per_token
    is_steady = per_token is None or per_token <= objective.seconds_per_token
    return record.ttft <= objective.ttft and is_steady


def add_request(totals: AdapterTotals, record: RequestRecord, objective: Objective) -> None:
    """Count a request that is over."""
    reason = record.finish_reason
    totals.requests[reason] = totals.requests.get(reason, 0) + 1
    for cause, seconds in record.queue.items():
        histogram = totals.queue.get(cause)
        if histogram is None:
            histogram = totals.queue[cause] = empty(QUEUE_SECONDS)
        observe(histogram, QUEUE_SECONDS, seconds)
    observe(totals.queue_total, QUEUE_SECONDS, record.queue_seconds)
    if record.ttft is not None:
        observe(totals.ttft, TTFT_SECONDS, record.ttft)
    per_token = record.seconds_per_token
    if per_token is not None:
        observe(totals.seconds_per_token, SECONDS_PER_TOKEN, per_token)
    observe(totals.seconds, REQUEST_SECONDS, record.seconds)
    totals.prompt_tokens += record.prompt_tokens
    totals.cached_tokens += record.cached_tokens
    totals.output_tokens += record.output_tokens
    totals.preemptions += record.preemptions
    totals.good += is_good(record, objective)


def pour(into: AdapterTotals, gone: AdapterTotals) -> None:
    """Add the totals of an adapter that is to have none of its own any more."""
    into.requests = dict(Counter(into.requests) + Counter(gone.requests))
    into.refused = dict(Counter(into.refused) + Counter(gone.refused))
    for cause, histogram in gone.queue.items():
        add(into.queue.setdefault(cause, empty(QUEUE_SECONDS)), histogram)
    for mine, other in (
        (into.queue_total, gone.queue_total),
        (into.ttft, gone.ttft),
        (into.seconds_per_token, gone.seconds_per_token),
        (into.seconds, gone.seconds),
        (into.load_seconds, gone.load_seconds),
    ):
        add(mine, other)
    into.resident_seconds += gone.resident_seconds
    into.prompt_tokens += gone.prompt_tokens
    into.cached_tokens += gone.cached_tokens
    into.output_tokens += gone.output_tokens
    into.preemptions += gone.preemptions
    into.good += gone.good
