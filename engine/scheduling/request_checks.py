"""What is refused before it is queued: requests that could never run, or not now."""

from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.messages import EngineRequest
from engine.scheduling.backpressure import Pressure
from engine.scheduling.waiting import Waiting

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
"""A counter grows by tokens / weight. Past 2**53 further tokens would vanish in it, and since
others are lifted to it, fairness would end for them too."""


def check_request(request: EngineRequest, config: SchedulerConfig, *, vocab_size: int) -> None:
    """Raise `RequestRefused`, with a reason code, the field at fault and the effective limit."""
    _check_numbers(request)
    _check_prompt(request, config)
    _check_vocabulary(request, vocab_size)
    _check_capacity(request, config)


def _check_numbers(request: EngineRequest) -> None:
    for name, value in (("n", request.sampling.n), ("max_tokens", request.sampling.max_tokens)):
        if value < 1:
            raise RequestRefused(
                "invalid_value", f"{name} must be at least 1, not {value}", param=name
            )
    if not MIN_WEIGHT <= request.weight <= MAX_WEIGHT:  # NaN is refused too
        raise RequestRefused(
            "invalid_value",
            f"weight must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {request.weight}",
            param="weight",
        )


def _check_prompt(request: EngineRequest, config: SchedulerConfig) -> None:
    num_tokens, limit = len(request.prompt_token_ids), config.max_sequence_len
    if not num_tokens:
        raise RequestRefused("empty_prompt", "the prompt has no tokens", param="prompt")
    if num_tokens >= limit:
        raise RequestRefused(
            "context_length_exceeded",
            f"the prompt has {num_tokens} tokens; prompt and output together may have {limit}",
            param="prompt",
            limit=limit,
        )


def _check_vocabulary(request: EngineRequest, vocab_size: int) -> None:
    for param, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("logit_bias", request.sampling.logit_bias),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            unknown = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise RequestRefused(
                "invalid_token_id",
                f"{param}: {unknown} is not in the vocabulary of {vocab_size} tokens",
                param=param,
                limit=vocab_size,
            )


def check_room(
    request: EngineRequest, config: SchedulerConfig, waiting: Waiting, *, now: int
) -> None:
    """Raise `RequestRefused` with the `congestion` of the narrowest queue that is full.

    `now` in nanoseconds.
    """
    tenant = waiting.tenants.get(request.tenant)
    queue = None if tenant is None else tenant.queues.get(request.adapter)
    if queue is not None:
        what = "the base model" if request.adapter is None else "this adapter"
        _refuse_if_full(
            "adapter_queue_full", f"the tenant's queue for {what}",
            len(queue), config.max_queued_per_adapter, queue.pressure, now,
        )  # fmt: skip
    if tenant is not None:
        _refuse_if_full(
            "tenant_queue_full", "the tenant's queue",
            tenant.num_waiting, _tenant_limit(request, config), tenant.pressure, now,
        )  # fmt: skip
    _refuse_if_full(
        "queue_full", "the engine's queue",
        waiting.num_waiting, config.max_queue_len, waiting.pressure, now,
    )  # fmt: skip


def _tenant_limit(request: EngineRequest, config: SchedulerConfig) -> int | None:
    limits = (request.max_queued, config.max_queued_per_tenant)
    return min((limit for limit in limits if limit is not None), default=None)


def _refuse_if_full(
    code: str, name: str, queued: int, limit: int | None, pressure: Pressure, now: int
) -> None:
    if limit is not None and queued >= limit:
        raise RequestRefused(
            code,
            f"{name} is full: {queued} requests wait, at most {limit} may; try again later",
            limit=limit,
            congestion=pressure.refuse(queued, limit, now),
        )


def _check_capacity(request: EngineRequest, config: SchedulerConfig) -> None:
    n = request.sampling.n
    if n > config.max_num_seqs:
        raise RequestRefused(
            "n_too_large",
            f"n is {n}; the engine runs {config.max_num_seqs} sequences at a time",
            param="n",
            limit=config.max_num_seqs,
        )
    if request.max_concurrent is not None and n > request.max_concurrent:
        raise RequestRefused(
            "concurrency_limit_exceeded",
            f"n is {n}; the tenant may run {request.max_concurrent} sequences at a time",
            param="n",
            limit=request.max_concurrent,
        )
    if request.adapter is not None and config.max_loras == 0:
        raise RequestRefused("adapters_disabled", "the engine serves no adapters", param="model")
