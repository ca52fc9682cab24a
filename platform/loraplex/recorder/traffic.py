"""What requests and steps add up to, for one subject in one stretch of time.

A subject is the whole service, a tenant, or one version of an adapter (version 0 of `base`: a
tenant's use of the base). Sums of a stretch and of the next add up to those of both.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from adapter_store.model_ref import BASE_NAME
from engine.scheduling.wait_causes import CAUSES
from engine.telemetry.adapter_totals import is_good
from engine.telemetry.labels import name_of, version_of
from engine.telemetry.records import Objective, RequestRecord
from loraplex.recorder.sketch import Sketch, merge_packed, pack_all

FINISHES = ("stop", "length", "abort", "timeout", "error")
COUNTS = (
    "requests", "good", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions",
    *FINISHES, "prefill_tokens", "decode_tokens", "loads", "length_asked", "running", "waiting",
)  # fmt: skip
SECONDS = (*CAUSES, "resident_seconds")
_SUMMED = (*COUNTS, *SECONDS)


class Subject(NamedTuple):
    """Whose traffic. "" and 0 stand for all."""

    tenant: str = ""
    adapter: str = ""
    version: int = 0

    @property
    def family(self) -> tuple["Subject", ...]:
        """The subjects that a version's traffic counts for, itself included."""
        if not self.tenant:
            return (Subject(),)
        return (Subject(), self) if not self.adapter else (Subject(), Subject(self.tenant), self)


def subject_of(tenant: str, label: str | None) -> Subject:
    """Whom `name@N` of a tenant names; None is the base."""
    if label is None:
        return Subject(tenant, BASE_NAME)
    return Subject(tenant, name_of(label), version_of(label) or 0)


@dataclass(slots=True)
class Traffic:
    """Sums and distributions. `prefill_tokens` and `decode_tokens` are those of steps, which come
    while a request runs; all else of a request comes when it ends."""

    requests: int = 0
    good: int = 0
    """Within the objective."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    stop: int = 0
    length: int = 0
    abort: int = 0
    timeout: int = 0
    error: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    loads: int = 0
    """Times that the adapter came into a slot."""
    length_asked: int = 0
    """Of `length`, requests that asked for all their tokens (`RequestRecord.may_stop`)."""
    running: int = 0
    """A tenant's sequences, summed over the looks at the engine; so `waiting`."""
    waiting: int = 0
    quota: float = 0.0
    load: float = 0.0
    slot: float = 0.0
    kv: float = 0.0
    budget: float = 0.0
    turn: float = 0.0
    resident_seconds: float = 0.0
    last_request: float = 0.0
    """Unix seconds; 0: none."""
    refused: dict[str, int] = field(default_factory=dict[str, int])
    sketches: dict[str, Sketch] = field(default_factory=dict[str, Sketch])
    """Seconds: `queue`, `ttft`, `token_gap` (the longest of a request), `token_time` (the mean of
    one), `load_time`, `end_to_end`."""

    def add_request(self, record: RequestRecord, objective: Objective) -> None:
        """Count a request that is over."""
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.output_tokens += record.output_tokens
        self.preemptions += record.preemptions
        self.last_request = max(self.last_request, record.arrived + record.seconds)
        reason = record.finish_reason
        setattr(self, reason, getattr(self, reason) + 1)
        self.length_asked += reason == "length" and not record.may_stop
        for cause, seconds in record.queue.items():
            setattr(self, cause, getattr(self, cause) + seconds)
        self._observe("queue", record.queue_seconds)
        self._observe("end_to_end", record.seconds)
        if record.load_seconds:
            self._observe("load_time", record.load_seconds)
        per_token = record.seconds_per_token
        if per_token is not None:
            self._observe("token_time", per_token)
            self._observe("token_gap", record.longest_gap)
        if record.ttft is not None:
            self._observe("ttft", record.ttft)
        self.good += is_good(record, objective)

    def refuse(self, code: str, count: int) -> None:
        """Count refusals."""
        self.refused[code] = self.refused.get(code, 0) + count

    def merge(self, other: "Traffic") -> None:
        """Count all that the other has counted."""
        for name in _SUMMED:
            if value := getattr(other, name):
                setattr(self, name, getattr(self, name) + value)
        self.last_request = max(self.last_request, other.last_request)
        for code, count in other.refused.items():
            self.refuse(code, count)
        for name, sketch in other.sketches.items():
            mine = self.sketches.get(name)
            if mine is None:
                mine = self.sketches[name] = Sketch()
            mine.merge(sketch)

    def merge_packed(self, sketches: bytes) -> None:
        """Take in distributions as a row holds them."""
        merge_packed(self.sketches, sketches)

    def pack_sketches(self) -> bytes:
        """Its distributions, for a row."""
        return pack_all(self.sketches)

    def quantiles(self, name: str) -> list[float | None]:
        """p50, p95 and p99 of a distribution."""
        return self.sketches.get(name, Sketch()).quantiles(0.5, 0.95, 0.99)

    @property
    def cut(self) -> int:
        """Requests that ran until their limit, and might have stopped before."""
        return self.length - self.length_asked

    @property
    def queue_seconds(self) -> float:
        """Over all causes."""
        return sum(getattr(self, cause) for cause in CAUSES)

    def _observe(self, name: str, seconds: float) -> None:
        self.sketches.setdefault(name, Sketch()).add(max(seconds, 0.0))


def sum_of(parts: Iterable[Traffic]) -> Traffic:
    """All of them as one."""
    total = Traffic()
    for part in parts:
        total.merge(part)
    return total
