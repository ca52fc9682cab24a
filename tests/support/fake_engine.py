"""An `EngineClient` that a test plays by hand or by script; it keeps all that it was asked."""

import itertools
from collections.abc import Callable, Sequence

from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from engine.errors import EngineError, EngineUnavailable
from engine.messages import (
    AbortReason,
    CallUsage,
    ChoiceDelta,
    EndCalls,
    EngineRequest,
    FinishReason,
    RequestOutput,
    RequestTiming,
    TokenLogprob,
)
from engine.telemetry.journal import Journal
from engine.telemetry.records import Cursor, GetTelemetry, Telemetry
from engine.transport.request_stream import RequestStream

EOS = 2
VOCAB_SIZE = 400
TIMING = RequestTiming(queue={"turn": 0.004, "load": 0.006}, prefill=0.02, decode=0.03)

Script = Callable[[EngineRequest], Sequence[int] | None]
"""The tokens of every choice; None leaves the request to the test."""


def info(**changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "model": "tiny",
        "fingerprint": "f" * 64,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [EOS],
        "max_model_len": 64,
        "block_size": 16,
        "num_kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_loras": 2,
        "max_lora_rank": 64,
        "dtype": "float32",
        "device": "cpu",
    }
    return EngineInfo(**{**values, **changes})  # type: ignore[arg-type]


def statistics(**changes: object) -> EngineStats:
    values = dict.fromkeys(
        ("running", "waiting", "kv_blocks_used", "slots_used", "preemptions", "steps",
         "prompt_tokens", "cached_tokens", "output_tokens", "host_adapters", "host_adapter_bytes"),
        0,
    )  # fmt: skip
    fixed = {"kv_blocks_total": 64, "slots_total": 2, "resident": []}
    return EngineStats(**{**values, **fixed, **changes})  # type: ignore[arg-type]


class FakeEngine:
    """Answers each request at once with `script`, one token a step; ends by EOS or length."""

    def __init__(self, script: Script = lambda request: None) -> None:
        self.script = script
        self.info = info()
        self.is_ready = True
        self.refusal: EngineError | None = None
        self.requests: dict[int, EngineRequest] = {}
        self.aborted: list[int] = []
        self.aborts: dict[int, tuple[AbortReason, int | None]] = {}
        """Why, and after how many tokens shown."""
        self.ended: list[int] = []
        """By `end_calls`."""
        self.settled: list[str] = []
        self.leave: Callable[[Sequence[CallUsage]], None] = lambda calls: None
        """Plays the death of another API process, which leaves these calls."""
        self.unloaded: list[str] = []
        self.forgotten: list[tuple[str, str | None]] = []
        """(tenant, adapter) that were deleted."""
        self.is_warming = False
        self.recent: list[str] = []
        self.residencies: list[tuple[list[str], list[str], list[str]]] = []
        """(pinned, warm, recent), as often as it was told."""
        self.journal = Journal()
        """Told of nothing, unless a test does."""
        self.statistics: EngineStats | None = None
        self._joined: list[Callable[[Sequence[str]], None]] = []
        self._streams: dict[int, RequestStream] = {}
        self._ids = itertools.count(1)

    @property
    def open_requests(self) -> list[int]:
        """Requests that neither ended nor were aborted."""
        return list(self._streams)

    def next_request_id(self) -> int:
        return next(self._ids)

    async def generate(self, request: EngineRequest) -> RequestStream:
        if not self.is_ready:
            raise EngineUnavailable("the engine is not there")
        self.requests[request.request_id] = request
        if self.refusal is not None:
            raise self.refusal
        stream = self._streams[request.request_id] = RequestStream()
        reply = self.script(request)
        if reply is not None:
            self._play(request, reply)
        return stream

    def _play(self, request: EngineRequest, reply: Sequence[int]) -> None:
        params = request.sampling
        tokens = [*reply, EOS][: params.max_tokens]
        for position, token in enumerate(tokens):
            is_eos = token == EOS and not params.ignore_eos
            is_stop = is_eos or token in params.stop_token_ids
            is_last = is_stop or position + 1 == len(tokens)
            reason: FinishReason | None = None
            if is_last:
                reason = "stop" if is_stop else "length"
            for index in range(params.n):
                self.say(
                    request.request_id, [token], index=index, reason=reason,
                    stop_token_id=token if is_stop else None,
                    finished=is_last and index + 1 == params.n,
                )  # fmt: skip
            if is_last:
                return

    def say(
        self,
        request_id: int,
        tokens: Sequence[int],
        *,
        index: int = 0,
        reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        finished: bool = False,
        cached: int = 0,
    ) -> None:
        """Send tokens of one choice."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        top = self.requests[request_id].sampling.logprobs
        logprobs = None
        if top is not None:
            logprobs = [
                TokenLogprob(t, -0.5, [(t + k, -0.5 - k) for k in range(top)]) for t in tokens
            ]
        delta = ChoiceDelta(index, list(tokens), logprobs, reason, stop_token_id)
        stream.push(
            RequestOutput(
                request_id, [delta], num_cached_tokens=cached, finished=finished,
                timing=TIMING if finished else None,
            )
        )  # fmt: skip
        if finished:
            del self._streams[request_id]

    def break_down(self, request_id: int, code: str) -> None:
        """End a request with an error code, as the engine does."""
        self.push(RequestOutput(request_id, finished=True, error_code=code, error="it broke"))

    def push(self, output: RequestOutput) -> None:
        """Send this."""
        stream = self._streams[output.request_id]
        if output.finished:
            del self._streams[output.request_id]
        stream.push(output)

    def die(self) -> None:
        """The engine is lost."""
        self.is_ready = False
        for stream in self._streams.values():
            stream.fail(EngineUnavailable("the engine was lost"))
        self._streams.clear()

    def abort(
        self, request_id: int, reason: AbortReason = "abort", num_tokens: int | None = None
    ) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.aborted.append(request_id)
            self.aborts[request_id] = reason, num_tokens
            stream.end()

    def settle(self, calls: Sequence[str]) -> None:
        self.settled += calls

    def on_orphans(self, told: Callable[[Sequence[CallUsage]], None]) -> None:
        self.leave = told

    def end_calls(self, order: EndCalls) -> None:
        for request_id in list(self._streams):
            if order.concerns(self.requests[request_id]):
                self.ended.append(request_id)
                self.push(
                    RequestOutput(
                        request_id, finished=True, error_code=order.code, error=order.reason
                    )
                )

    def forget(self, tenant: str, adapter: str | None = None) -> None:
        self.forgotten.append((tenant, adapter))
        self.journal.forget(tenant, adapter)

    def note_refusal(self, tenant: str, adapter: str | None, code: str) -> None:
        self.journal.note_refusals(tenant, adapter, code, 1)

    def unload(self, digest: str) -> None:
        self.unloaded.append(digest)

    def set_residency(
        self, pinned: Sequence[str], warm: Sequence[str], recent: Sequence[str] = ()
    ) -> None:
        self.residencies.append((list(pinned), list(warm), list(recent)))

    def on_join(self, joined: Callable[[Sequence[str]], None]) -> None:
        self._joined.append(joined)
        joined(self.recent)

    def restart(self, recent: Sequence[str] = ()) -> None:
        """A new engine is there, with files of these adapters on its disk."""
        self.is_ready = True
        self.recent = list(recent)
        for joined in self._joined:
            joined(self.recent)

    async def stats(self) -> EngineStats:
        if self.statistics is None or not self.is_ready:
            raise EngineUnavailable("a fake has no statistics")
        return self.statistics

    async def telemetry(
        self, cursor: Cursor | None = None, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        if not self.is_ready:
            raise EngineUnavailable("the engine is not there")
        question = GetTelemetry(cursor=cursor or Cursor(), limit=limit, with_totals=with_totals)
        return self.journal.telemetry(question, generation=1)

    async def drain(self) -> None:
        self.is_ready = False
