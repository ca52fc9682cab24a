"""What was read from the engine and is not written yet, by subject and bucket."""

import heapq
from collections.abc import Iterable, Sequence
from itertools import count

from adapter_store.model_ref import BASE_NAME
from engine.engine_stats import EngineStats, TenantLoad
from engine.telemetry.records import AdapterOwner, Objective, RequestRecord, StepRecord
from loraplex.recorder.engine_bucket import EngineBucket
from loraplex.recorder.traffic import Subject, Traffic, subject_of
from loraplex.recorder.widths import FINE, bucket

SLOW_PER_HOUR = 5
"""Requests of an adapter that are kept one by one."""
HOUR = 3600

SlowKey = tuple[str, str, int]
"""Tenant, adapter, when its hour began."""


class Ledger:
    """Sums by the finest bucket; coarser ones follow from them."""

    def __init__(self) -> None:
        self.traffic: dict[tuple[Subject, int], Traffic] = {}
        self.engine: dict[int, EngineBucket] = {}
        self._slow: dict[SlowKey, list[tuple[float, int, RequestRecord]]] = {}
        self._order = count()

    @property
    def size(self) -> int:
        """Buckets that it holds."""
        return len(self.traffic) + len(self.engine)

    def add_requests(self, records: Iterable[RequestRecord], objective: Objective) -> None:
        """Count requests, each in the bucket that it ended in."""
        for record in records:
            subject = subject_of(record.tenant, record.label)
            ended = record.arrived + record.seconds
            self._traffic(subject, ended).add_request(record, objective)
            slow = self._slow.setdefault((subject.tenant, subject.adapter, bucket(ended, HOUR)), [])
            item = (slowness(record), next(self._order), record)
            if len(slow) < SLOW_PER_HOUR:
                heapq.heappush(slow, item)
            else:
                heapq.heappushpop(slow, item)

    def add_steps(self, steps: Iterable[StepRecord]) -> None:
        """Count steps: the engine's, and whose tokens they computed."""
        for step in steps:
            self._engine(step.at).add_step(step)
            for share in step.shares:
                subject = subject_of(share.tenant, share.label) if share.tenant else Subject()
                traffic = self._traffic(subject, step.at)
                traffic.prefill_tokens += share.prefill_tokens
                traffic.decode_tokens += share.decode_rows

    def add_sample(self, at: float, stats: EngineStats) -> None:
        """Count a look at the engine."""
        self._engine(at).add_sample(stats)

    def add_loads(self, at: float, loads: Iterable[TenantLoad]) -> None:
        """Count what runs and waits of each tenant at this look at the engine."""
        for load in loads:
            traffic = self._traffic(Subject(load.tenant), at)
            traffic.running += load.running
            traffic.waiting += load.waiting

    def add_watched(self, since: float, until: float, *, is_up: bool = True) -> None:
        """Of these seconds all is known; or that there was no engine."""
        while since < until:
            end = min(until, bucket(since, FINE) + FINE)
            part = self._engine(since)
            if is_up:
                part.covered += end - since
            else:
                part.down += end - since
            since = end

    def add_missed(self, at: float, records: int) -> None:
        """So many records are lost."""
        self._engine(at).missed += records

    def add_load(self, owner: AdapterOwner, at: float) -> None:
        """An adapter came into a slot."""
        self._traffic(subject_of(owner.tenant, owner.label), at).loads += 1

    def add_residence(self, owners: Sequence[AdapterOwner], since: float, until: float) -> None:
        """Weights held a slot, and with them each adapter that has them; of an adapter's versions,
        the first one stands for all."""
        subjects = [subject_of(owner.tenant, owner.label) for owner in owners]
        first = {subject[:2]: subject for subject in reversed(subjects)}
        while since < until:
            end = min(until, bucket(since, FINE) + FINE)
            for subject in first.values():
                self._traffic(subject, since).resident_seconds += end - since
            since = end

    def add_refusals(
        self, tenant: str, adapter: str | None, code: str, number: int, at: float
    ) -> None:
        """Requests were refused; which version they were for is not told."""
        subject = Subject(tenant, adapter or BASE_NAME, 0) if tenant else Subject()
        self._traffic(subject, at).refuse(code, number)

    @property
    def slow(self) -> list[tuple[SlowKey, float, RequestRecord]]:
        """The slowest requests of each adapter and hour: its key, how slow, the record."""
        return [
            (key, seconds, record)
            for key, items in self._slow.items()
            for seconds, _, record in items
        ]

    def _traffic(self, subject: Subject, at: float) -> Traffic:
        return self.traffic.setdefault((subject, bucket(at, FINE)), Traffic())

    def _engine(self, at: float) -> EngineBucket:
        return self.engine.setdefault(bucket(at, FINE), EngineBucket())


def slowness(record: RequestRecord) -> float:
    """Seconds before its first token, and the longest between two: not what long replies take."""
    return max(0.0, record.seconds - record.decode_seconds) + record.longest_gap
