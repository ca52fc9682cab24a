"""Makes the record of a request from the scheduler's state of it."""

from engine.scheduling.request import Request
from engine.scheduling.wait_causes import seconds_by_cause
from engine.telemetry.labels import name_of, version_of
from engine.telemetry.records import RequestRecord, RequestState


def record_of(request: Request, now: int, offset: float) -> RequestRecord:
    """The record of a request that is over.

    `now` in nanoseconds of the scheduler's clock, `offset` in seconds from there to Unix time.
    """
    message, sampling = request.message, request.message.sampling
    is_base = message.adapter is None
    arrived, first, last = request.arrived, request.first_token, request.last_token
    return RequestRecord(
        call=message.call,
        tenant=message.tenant,
        adapter=None if is_base else name_of(message.label),
        version=None if is_base else version_of(message.label),
        arrived=arrived / 1e9 + offset,
        queue=seconds_by_cause(request.waited),
        load_seconds=request.load_ns / 1e9,
        ttft=None if first is None else (first - arrived) / 1e9,
        seconds=(now - arrived) / 1e9,
        decode_seconds=0.0 if first is None or last is None else (last - first) / 1e9,
        longest_gap=request.longest_gap / 1e9,
        prompt_tokens=len(message.prompt_token_ids),
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        finish_reasons=tuple(request.end_reasons),
        preemptions=request.num_preemptions,
        timeline=_timeline(request, now),
        error_code=request.error_code,
        may_stop=not sampling.ignore_eos and sampling.min_tokens < sampling.max_tokens,
    )


def _timeline(request: Request, now: int) -> tuple[tuple[float, RequestState], ...]:
    changes: list[tuple[int, RequestState]] = [*request.changes, (now, "done")]
    return tuple([((at - request.arrived) / 1e9, state) for at, state in changes])
