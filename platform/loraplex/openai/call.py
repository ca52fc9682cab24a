"""One generation call from admission to its usage row."""

import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from adapter_store.registry.records import TenantInfo, UsageRecord
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream
from loraplex.errors import ApiError
from loraplex.limits.rate_limiter import Admission
from loraplex.openai.deadline import Deadline
from loraplex.openai.fields import GenerationFields
from loraplex.openai.generation import Choice, Generation
from loraplex.openai.replies import PromptTokensDetails, Timing, Usage, timing_of
from loraplex.openai.requests import stop_strings
from loraplex.openai.resolve import Target
from loraplex.openai.response_format import TextFormat
from loraplex.services import Services
from loraplex.tracing.tracing import CallReport


class Call:
    """Made by `open_call`, once the engine has queued all of it. `close` must always run."""

    def __init__(
        self, call_id: str, services: Services, tenant: TenantInfo, target: Target,
        generation: Generation, admission: Admission, began: float,
    ) -> None:  # fmt: skip
        self.id = call_id
        self.created = int(began)
        self.target = target
        self.generation = generation
        self.tenant_name = tenant.name
        self._admission = admission
        self._recorder = services.usage
        self._tracing = services.backends.tracing
        self._model = services.model_name
        self._began = began
        self._is_closed = False
        self._has_failed = False

    @property
    def rate_headers(self) -> dict[str, str]:
        """What is left of its tenant's rates, `x-ratelimit-*`."""
        return self._admission.headers

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, output = self.generation.num_prompt_tokens, self.generation.num_output_tokens
        cached = PromptTokensDetails(self.generation.num_cached_tokens)
        return Usage(prompt, output, prompt + output, cached)

    @property
    def timing(self) -> Timing:
        """Where the time went so far."""
        return timing_of(self.target.label, self.generation.timing)

    def fail(self) -> None:
        """The engine gave the call up: it is neither finished nor aborted by the client."""
        self._has_failed = True

    def close(self) -> None:
        """Abort what still runs and record the usage, once; works while a task is cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        self.generation.abort()
        self._admission.settle(self.usage.total_tokens)
        timing, finish_reason = self.generation.timing, self._finish_reason()
        adapter = self.target.adapter
        self._tracing.call_over(
            CallReport(
                call_id=self.id,
                tenant=self.tenant_name,
                label=self.target.label,
                model=self._model,
                began=self._began,
                timing=timing,
                prompt_tokens=self.generation.num_prompt_tokens,
                cached_tokens=self.generation.num_cached_tokens,
                output_tokens=self.generation.num_output_tokens,
                finish_reason=finish_reason,
            )
        )
        self._recorder.record(
            UsageRecord(
                request_id=self.id,
                tenant=self.tenant_name,
                adapter=adapter.name if adapter else None,
                version=adapter.version if adapter else None,
                prompt_tokens=self.generation.num_prompt_tokens,
                cached_tokens=self.generation.num_cached_tokens,
                output_tokens=self.generation.num_output_tokens,
                finish_reason=finish_reason,
                queue_seconds=timing.queue_seconds,
                load_seconds=timing.queue.get("load", 0.0),
                prefill_seconds=timing.prefill,
                decode_seconds=timing.decode,
                engine_seconds=self.generation.engine_seconds,
            )
        )

    async def finish(self) -> None:
        """As `close`; then wait for the usage row, so that it is there before the last frame."""
        self.close()
        await self._recorder.written()

    def _finish_reason(self) -> str:
        if self.generation.has_expired:
            return "timeout"
        if self._has_failed:
            return "error"
        if not self.generation.is_done:
            return "abort"
        return ",".join(sorted({choice.finish_reason or "" for choice in self.generation.choices}))


async def admit_call(services: Services, tenant: TenantInfo, target: Target) -> Admission:
    """Count a call before its prompt is looked at, so that mistakes count as well.

    Raises what `RateLimiter.admit` raises.
    """
    with _noting_refusals(services, tenant, target):
        return await services.limiter.admit(tenant)


@contextmanager
def _noting_refusals(services: Services, tenant: TenantInfo, target: Target) -> Generator[None]:
    try:
        yield
    except ApiError as refusal:
        adapter = target.adapter.name if target.adapter else None
        services.backends.engine.note_refusal(tenant.name, adapter, refusal.code)
        raise


async def open_call(
    services: Services,
    tenant: TenantInfo,
    target: Target,
    admission: Admission,
    fields: GenerationFields,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    id_prefix: str,
    deadline: Deadline,
) -> Call:
    """Queue one engine request for each prompt.

    Raises what `RateLimiter.reserve` and `Generation.start` raise; the admission counts no more
    then.
    """
    engine = services.backends.engine
    call_id = f"{id_prefix}-{uuid.uuid4().hex}"
    requests = [
        EngineRequest(
            request_id=engine.next_request_id(),
            tenant=tenant.name,
            prompt_token_ids=prompt,
            sampling=params,
            adapter=target.digest,
            label=target.label,
            call=call_id,
            weight=tenant.weight,
            max_concurrent=tenant.quota.max_concurrent,
            max_slots=tenant.quota.max_slots,
            max_queued=tenant.quota.max_queued,
            cache_salt=fields.cache_salt or "",
        )
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    choices = _choices(services, fields, prompts, sampling)
    is_text = fields.response_format is None or isinstance(fields.response_format, TextFormat)
    grammar_field = "tools" if is_text else "response_format"
    generation = Generation(engine, requests, choices, grammar_field)
    # A prompt is computed once for all its choices.
    num_tokens = generation.num_prompt_tokens + sum(p.n * p.max_tokens for p in sampling)
    with _noting_refusals(services, tenant, target):
        await services.limiter.reserve(admission, tenant, num_tokens)
    began = time.time()
    try:
        await generation.start()
    except BaseException:
        engine.settle([call_id])
        admission.cancel()
        raise
    generation.end_at(deadline)
    return Call(call_id, services, tenant, target, generation, admission, began)


def _choices(
    services: Services,
    fields: GenerationFields,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
) -> list[Choice]:
    stop = stop_strings(fields)
    shows_stop = bool(fields.include_stop_str_in_output)
    skips_special = fields.skip_special_tokens is not False
    n = fields.n or 1
    return [
        Choice(
            number * n + index,
            TextStream(
                services.backends.tokenizer.new_detokenizer(prompt, skips_special),
                stop,
                include_stop_in_output=shows_stop,
                min_tokens=params.min_tokens,
            ),
            shows_stop=shows_stop,
        )
        for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        for index in range(n)
    ]
