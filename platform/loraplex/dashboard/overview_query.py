"""The overview: a tenant's traffic, or all of it and the engine's state, over a window."""

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.dashboard.bucket_query import axis_of, engine_buckets, subject_buckets
from loraplex.dashboard.progress_query import progress
from loraplex.dashboard.views import Live, Overview, Totals
from loraplex.dashboard.windows import Axis, causes_of, finishes_of, percentiles_of
from loraplex.recorder.engine_bucket import EngineBucket
from loraplex.recorder.traffic import Subject, Traffic, sum_of
from loraplex.recorder.widths import Range


async def overview(
    session: AsyncSession, tenant: str | None, range_: Range, now: float, live: Live | None
) -> Overview:
    """Three statements, whatever the number of adapters."""
    done = await progress(session)
    engine = await engine_buckets(session, range_, now)
    parts = await subject_buckets(session, Subject(tenant or ""), range_, now)
    axis = axis_of(range_, now, engine)
    seen = engine if tenant is None else {}
    return Overview(
        window=axis.window(done.complete_until),
        live=live,
        totals=totals_of(sum_of(parts.values())),
        requests_rate=axis.rates(parts, lambda part: part.requests),
        goodput_rate=axis.rates(parts, lambda part: part.good),
        prompt_tokens_rate=axis.rates(parts, lambda part: part.prefill_tokens),
        output_tokens_rate=axis.rates(parts, lambda part: part.decode_tokens),
        running=_gauges(axis, engine, parts, "running", tenant),
        waiting=_gauges(axis, engine, parts, "waiting", tenant),
        kv_share=axis.gauges(seen, "kv_share") if tenant is None else [],
        slots_used=axis.gauges(seen, "slots_used") if tenant is None else [],
        causes=axis.causes(parts),
        ttft=axis.percentiles(parts, "ttft"),
        token_gap=axis.percentiles(parts, "token_gap"),
        token_time=axis.percentiles(parts, "token_time"),
    )


def _gauges(
    axis: Axis,
    engine: Mapping[int, EngineBucket],
    parts: Mapping[int, Traffic],
    name: str,
    tenant: str | None,
) -> list[float | None]:
    """Sequences of a tenant, or of all, on average over the looks at the engine."""
    if tenant is None:
        return axis.gauges(engine, name)
    nothing = Traffic()
    return [
        getattr(parts.get(start, nothing), name) / looks.samples
        if (looks := engine.get(start)) is not None and looks.samples
        else None
        for start in axis.starts
    ]


def totals_of(total: Traffic) -> Totals:
    """Sums as the page reads them."""
    return Totals(
        requests=total.requests,
        prompt_tokens=total.prompt_tokens,
        cached_tokens=total.cached_tokens,
        output_tokens=total.output_tokens,
        good_requests=total.good,
        preemptions=total.preemptions,
        refusals=total.refused,
        causes=causes_of(total),
        queue=percentiles_of(total, "queue"),
        ttft=percentiles_of(total, "ttft"),
        token_gap=percentiles_of(total, "token_gap"),
        token_time=percentiles_of(total, "token_time"),
        end_to_end=percentiles_of(total, "end_to_end"),
        finishes=finishes_of(total),
    )
