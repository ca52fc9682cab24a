"""What a run of calls amounts to, in the figures that simulations give."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.simulation.figures import Slo
from loraplex.load.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """Of the calls after the warm-up. Latencies count from the intended start; of nothing, 0."""

    num_requests: int
    num_failed: int
    seconds: float
    """From the first of them to be due until the last to end."""
    requests_per_second: float
    """Served."""
    output_tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    latency_p50_ms: float
    """To the end."""
    latency_p99_ms: float
    queue_p50_ms: float
    """In the queue, where replies tell."""
    queue_p99_ms: float
    goodput: float
    """Calls that meet the SLO, as a share of all."""
    late_p99_ms: float
    """From when a call was due until it was sent: the load generator's own delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """Of one model or adapter."""

    model: str
    num_requests: int
    num_failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    queue_p99_ms: float
    queue_ms: dict[str, float]
    """Mean, by cause."""


def after_warm_up(outcomes: Sequence[Outcome], warm_up: float) -> list[Outcome]:
    """Without this share of the calls, the first to be due."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.due)
    return ordered[int(len(ordered) * warm_up) :]


def load_figures(outcomes: Sequence[Outcome], slo: Slo) -> LoadFigures:
    """Of these calls."""
    served = [outcome for outcome in outcomes if outcome.is_served]
    ttft = [outcome.ttft for outcome in served]
    tpot = [outcome.tpot for outcome in served]
    gaps = [gap for outcome in served for gap in outcome.gaps]
    total = [outcome.ended - outcome.due for outcome in served]
    queue = [outcome.queue_ms / 1e3 for outcome in served if outcome.queue]
    ends = max((outcome.ended for outcome in outcomes), default=0.0)
    seconds = ends - min((outcome.due for outcome in outcomes), default=0.0)
    num_good = sum(
        first <= slo.first_token and each <= slo.per_output_token
        for first, each in zip(ttft, tpot, strict=True)
    )
    return LoadFigures(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(served),
        seconds=seconds,
        requests_per_second=len(served) / seconds if seconds else 0.0,
        output_tokens_per_second=_tokens(served) / seconds if seconds else 0.0,
        ttft_p50_ms=_ms(ttft, 50),
        ttft_p99_ms=_ms(ttft, 99),
        tpot_p50_ms=_ms(tpot, 50),
        tpot_p99_ms=_ms(tpot, 99),
        gap_p50_ms=_ms(gaps, 50),
        gap_p99_ms=_ms(gaps, 99),
        latency_p50_ms=_ms(total, 50),
        latency_p99_ms=_ms(total, 99),
        queue_p50_ms=_ms(queue, 50),
        queue_p99_ms=_ms(queue, 99),
        goodput=num_good / len(outcomes) if outcomes else 0.0,
        late_p99_ms=_ms([outcome.sent - outcome.due for outcome in outcomes], 99),
    )


def by_model(outcomes: Sequence[Outcome]) -> list[ModelFigures]:
    """The same calls, model by model; the most asked for first."""
    asked = Counter(outcome.model for outcome in outcomes)
    return [
        _of_model(model, [outcome for outcome in outcomes if outcome.model == model])
        for model, _ in asked.most_common()
    ]


def _of_model(model: str, outcomes: Sequence[Outcome]) -> ModelFigures:
    served = [outcome for outcome in outcomes if outcome.is_served]
    told = [outcome.queue for outcome in served if outcome.queue]
    causes = dict.fromkeys(cause for queue in told for cause in queue)
    return ModelFigures(
        model=model,
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(served),
        ttft_p50_ms=_ms([outcome.ttft for outcome in served], 50),
        ttft_p99_ms=_ms([outcome.ttft for outcome in served], 99),
        queue_p99_ms=_ms([sum(queue.values()) / 1e3 for queue in told], 99),
        queue_ms={
            cause: sum(queue.get(cause, 0.0) for queue in told) / len(told) for cause in causes
        },
    )


def _tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.output_tokens for outcome in outcomes)


def _ms(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else 0.0
