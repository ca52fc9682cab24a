"""What batches were made of: recent steps one by one, and steps over a window."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from engine.engine_info import EngineInfo
from engine.telemetry.records import StepRecord
from loraplex.dashboard.bucket_query import axis_of, engine_buckets
from loraplex.dashboard.engine_views import Batch
from loraplex.dashboard.progress_query import progress
from loraplex.dashboard.steps_view import MAX_STEPS, steps_view
from loraplex.dashboard.views import PercentileColumns
from loraplex.recorder.engine_bucket import EngineBucket
from loraplex.recorder.widths import Range

T = TypeVar("T")


async def batch(
    session: AsyncSession,
    tenant: str | None,
    range_: Range,
    now: float,
    recent: Sequence[StepRecord],
    info: EngineInfo | None,
) -> Batch:
    """The batch page: two statements, and the steps that were read from the engine."""
    done = await progress(session)
    engine = await engine_buckets(session, range_, now)
    axis = axis_of(range_, now, engine)

    def column(value: Callable[[EngineBucket], T]) -> list[T | None]:
        return [
            value(engine[start]) if start in engine and engine[start].covered else None
            for start in axis.starts
        ]

    def mean(name: str) -> list[float | None]:
        return column(lambda part: getattr(part, name) / part.steps if part.steps else None)

    quantiles = [
        engine[start].step_quantiles() if start in engine else [None] * 3 for start in axis.starts
    ]
    return Batch(
        window=axis.window(done.complete_until),
        recent=steps_view(recent[-MAX_STEPS:], tenant),
        step_seconds=PercentileColumns(*(list(part) for part in zip(*quantiles, strict=True))),
        steps=column(lambda part: part.steps),
        prefill_tokens=column(lambda part: part.prefill_tokens),
        decode_tokens=column(lambda part: part.decode_tokens),
        base_tokens=column(lambda part: part.base_tokens),
        adapters_mean=mean("adapters"),
        rows_mean=mean("rows"),
        max_batch_tokens=info.max_num_batched_tokens if info is not None else 0,
        max_rows=info.max_num_seqs if info is not None else 0,
    )
