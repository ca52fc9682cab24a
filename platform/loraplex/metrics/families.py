"""Metrics as `prometheus_client` prints them, made anew for each page from numbers told."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import (
    Metric as Family,
)

from engine.telemetry.buckets import Bounds
from engine.telemetry.records import Histogram
from loraplex.metrics.names import Metric

Labels = tuple[str, ...]


def gauge(metric: Metric, samples: Mapping[Labels, float]) -> Family:
    """Values by the labels' values."""
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


def counter(metric: Metric, samples: Mapping[Labels, float]) -> Family:
    """Sums by the labels' values."""
    name = metric.name.removesuffix("_total")
    family = CounterMetricFamily(name, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


def histogram(metric: Metric, bounds: Bounds, samples: Mapping[Labels, Histogram]) -> Family:
    """Histograms by the labels' values; all have these bounds."""
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    uppers = [*(str(float(bound)) for bound in bounds), "+Inf"]
    for labels, value in samples.items():
        family.add_metric(labels, _buckets(uppers, value.counts), value.sum)
    return family


def _buckets(uppers: Sequence[str], counts: Sequence[int]) -> list[tuple[str, float]]:
    return list(zip(uppers, accumulate(counts), strict=True))
