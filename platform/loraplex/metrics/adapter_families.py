"""The engine's sums by adapter, as metrics."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric as Family

from adapter_store.model_ref import BASE_NAME
from engine.telemetry import buckets
from engine.telemetry.records import AdapterTotals, Histogram
from loraplex.metrics import names
from loraplex.metrics.families import counter, histogram
from loraplex.metrics.names import Metric

OTHER = "other"
"""Label of all adapters that have no metrics of their own, together. No name is without a `/`."""

_HISTOGRAMS: tuple[tuple[Metric, buckets.Bounds, Callable[[AdapterTotals], Histogram]], ...] = (
    (names.QUEUE_TOTAL_SECONDS, buckets.QUEUE_SECONDS, lambda t: t.queue_total),
    (names.TTFT_SECONDS, buckets.TTFT_SECONDS, lambda t: t.ttft),
    (names.SECONDS_PER_TOKEN, buckets.SECONDS_PER_TOKEN, lambda t: t.seconds_per_token),
    (names.REQUEST_SECONDS, buckets.REQUEST_SECONDS, lambda t: t.seconds),
    (names.LOAD_SECONDS, buckets.LOAD_SECONDS, lambda t: t.load_seconds),
)
_COUNTERS: tuple[tuple[Metric, Callable[[AdapterTotals], float]], ...] = (
    (names.RESIDENT_SECONDS, lambda t: t.resident_seconds),
    (names.PROMPT_TOKENS, lambda t: t.prompt_tokens),
    (names.CACHED_TOKENS, lambda t: t.cached_tokens),
    (names.OUTPUT_TOKENS, lambda t: t.output_tokens),
    (names.GOOD_REQUESTS, lambda t: t.good),
    (names.PREEMPTIONS, lambda t: t.preemptions),
)
_COUNTERS_BY: tuple[tuple[Metric, Callable[[AdapterTotals], dict[str, int]]], ...] = (
    (names.REQUESTS, lambda t: t.requests),
    (names.REFUSALS, lambda t: t.refused),
)


def label_of(totals: AdapterTotals) -> str:
    """The value of the label `adapter`."""
    if not totals.tenant:
        return OTHER
    return f"{totals.tenant}/{totals.adapter or BASE_NAME}"


def adapter_families(adapters: Sequence[AdapterTotals]) -> Iterator[Family]:
    """Every metric that has the label `adapter`. An adapter without loads has no load times."""
    labelled = [(label_of(totals), totals) for totals in adapters]
    yield histogram(
        names.QUEUE_SECONDS,
        buckets.QUEUE_SECONDS,
        {
            (label, cause): value
            for label, totals in labelled
            for cause, value in totals.queue.items()
        },
    )
    for metric, bounds, read in _HISTOGRAMS:
        told = {(label,): read(totals) for label, totals in labelled}
        yield histogram(metric, bounds, {key: value for key, value in told.items() if value.count})
    for metric, read_sum in _COUNTERS:
        yield counter(metric, {(label,): read_sum(totals) for label, totals in labelled})
    for metric, read_sums in _COUNTERS_BY:
        yield counter(
            metric,
            {
                (label, key): value
                for label, totals in labelled
                for key, value in read_sums(totals).items()
            },
        )
