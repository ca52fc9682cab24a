"""What the recorder writes of the engine's records, on both databases."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import func, select

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.registry import Registry
from adapter_store.registry.rollup_models import (
    EngineRollup,
    RecorderState,
    SlotSpan,
    SlowRequest,
    TrafficRollup,
    TrafficSubject,
    WaitingQueue,
)
from engine.engine_stats import QueueStats
from engine.telemetry.records import AdapterOwner, AdapterTotals, Objective, SlotEvent, StepShare
from loraplex.recorder.recorder import Recorder
from loraplex.recorder.refusals import RefusalCounts
from loraplex.recorder.rows import TRAFFIC_COLUMNS, traffic_of
from loraplex.recorder.store import RollupStore
from loraplex.recorder.sweep import sweep
from loraplex.recorder.traffic import CAUSES, Subject, Traffic
from loraplex.recorder.widths import FINE, KEPT_SECONDS, MINUTE, QUARTER
from tests.support.records import (
    NOW,
    ToldEngine,
    adapter_totals,
    request_record,
    stats,
    step_record,
    totals,
)
from tests.support.registry import open_registry

pytestmark = pytest.mark.anyio

VERSION = Subject("acme", "tone", 1)


@dataclass
class Lab:
    registry: Registry
    engine: ToldEngine
    now: float = NOW + 5.0

    def recorder(self, run: str = "run-1") -> Recorder:
        store = RollupStore(self.registry.database)
        return Recorder(self.engine, store, run, clock=lambda: self.now)

    async def traffic(self, subject: Subject, width: int) -> dict[int, Traffic]:
        async def work(session: Any) -> dict[int, Traffic]:
            rows = await session.execute(
                select(TrafficRollup.start, *TRAFFIC_COLUMNS)
                .join(TrafficSubject)
                .where(
                    TrafficSubject.tenant == subject.tenant,
                    TrafficSubject.adapter == subject.adapter,
                    TrafficSubject.version == subject.version,
                    TrafficRollup.width == width,
                )
            )
            return {row.start: traffic_of(row) for row in rows}

        return await self.registry.database.read(work)

    async def all(self, table: Any) -> list[Any]:
        async def work(session: Any) -> list[Any]:
            return list(await session.scalars(select(table)))

        return await self.registry.database.read(work)


@asynccontextmanager
async def lab(url: str) -> AsyncIterator[Lab]:
    async with open_registry(url) as registry:
        yield Lab(registry, ToldEngine())


async def test_requests_add_up_in_buckets_of_every_width_for_version_tenant_and_service(
    registry_url: str,
):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        at.engine.tell(
            [
                request_record(),
                request_record(arrived=NOW + 11, ttft=0.9, queue={"kv": 0.5}),
                request_record(tenant="zen", adapter=None, version=None, queue={}),
            ]
        )
        at.now = NOW + 13
        assert await recorder.read()
        assert await recorder.write() == {VERSION, Subject("zen", "base", 0)}
        fine = await at.traffic(VERSION, FINE)
        assert {start: part.requests for start, part in fine.items()} == {
            int(NOW): 1, int(NOW) + 10: 1,
        }  # fmt: skip
        for width in (MINUTE, QUARTER):
            [part] = (await at.traffic(VERSION, width)).values()
            assert (part.requests, part.good, part.output_tokens) == (2, 1, 22)
            assert part.queue_seconds == pytest.approx(0.75)
            assert (part.slot, part.turn, part.kv) == pytest.approx((0.2, 0.05, 0.5))
            assert part.quantiles("ttft")[0] == pytest.approx(0.4, rel=0.01)
            assert part.sketches["ttft"].count == 2
        [zen] = (await at.traffic(Subject("zen"), QUARTER)).values()
        [service] = (await at.traffic(Subject(), QUARTER)).values()
        assert (zen.requests, service.requests) == (1, 3)


async def test_what_comes_later_is_added_to_what_is_there(registry_url: str):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        for number in range(3):
            at.engine.tell([request_record(ttft=0.1 * (number + 1))], [step_record()])
            await recorder.read()
            await recorder.write()
        [part] = (await at.traffic(VERSION, FINE)).values()
        assert (part.requests, part.prefill_tokens, part.decode_tokens) == (3, 36, 6)
        assert part.quantiles("ttft") == pytest.approx([0.2, 0.2, 0.2], rel=0.01)
        [engine] = [row for row in await at.all(EngineRollup) if row.width == FINE and row.steps]
        assert (engine.steps, engine.rows, engine.samples) == (3, 9, 3)


async def test_a_new_recorder_of_the_run_goes_on_and_counts_nothing_twice(registry_url: str):
    async with lab(registry_url) as at:
        first = at.recorder()
        await first.start()
        at.engine.tell([request_record()])
        await first.read()
        await first.write()
        at.engine.tell([request_record(), request_record()])
        await first.read()  # and dies before it writes
        second = at.recorder()
        await second.start()
        at.now += 60
        await second.read()
        await second.write()
        [part] = (await at.traffic(VERSION, QUARTER)).values()
        assert part.requests == 3
        covered = [row.covered for row in await at.all(EngineRollup) if row.width == QUARTER]
        assert sum(covered) == pytest.approx(165.0)  # from the engine's start, without a gap


@pytest.mark.parametrize("step", [-3600.0, 50 * 365 * 86_400.0])
async def test_a_clock_that_is_set_makes_no_time_of_which_something_is_known(
    registry_url: str, step: float
):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        owner = AdapterOwner("acme", "tone@1")
        resident = SlotEvent(at=NOW, slot=0, digest="d" * 64, owners=(owner,), kind="resident")
        at.engine.tell(events=[resident])
        await recorder.read()
        at.now += step
        at.engine.refused = [adapter_totals("acme", "tone", {"queue_full": 1})]
        await recorder.read()
        at.now += 20.0
        await recorder.read()
        await recorder.write()
        rows = [row for row in await at.all(EngineRollup) if row.width == QUARTER]
        assert sum(row.covered for row in rows) == pytest.approx(105.0 + 20.0)
        parts = (await at.traffic(VERSION, QUARTER)).values()
        assert sum(part.resident_seconds for part in parts) == pytest.approx(5.0 + 20.0)
        refused = [part.refused for part in (await at.traffic(Subject(), QUARTER)).values()]
        assert [part for part in refused if part] == [{"queue_full": 1}]


async def test_an_engine_of_before_the_clock_was_set_is_watched_from_now_on(registry_url: str):
    async with lab(registry_url) as at:
        at.engine.started = 100.0
        recorder = at.recorder()
        await recorder.start()
        await recorder.read()
        at.now += 1.0
        await recorder.read()
        await recorder.write()
        rows = [row for row in await at.all(EngineRollup) if row.width == QUARTER]
        assert sum(row.covered for row in rows) == pytest.approx(1.0)


async def test_a_write_whose_answer_was_lost_is_not_done_again(registry_url: str):
    async with lab(registry_url) as at:
        store = RollupStore(at.registry.database)

        class Deaf(RollupStore):
            async def write(self, batch):
                await store.write(batch)
                raise RegistryUnavailable("the connection was cut after the commit")

        recorder = Recorder(at.engine, Deaf(at.registry.database), "run-1", clock=lambda: at.now)
        await recorder.start()
        at.engine.tell([request_record()])
        await recorder.read()
        with pytest.raises(RegistryUnavailable):
            await recorder.write()
        recorder._store = store
        await recorder.write()
        [part] = (await at.traffic(VERSION, QUARTER)).values()
        assert part.requests == 1


async def test_what_is_read_while_the_database_is_away_is_written_later(registry_url: str):
    async with lab(registry_url) as at:

        class Away(RollupStore):
            async def write(self, batch):
                raise RegistryUnavailable("away")

        store = RollupStore(at.registry.database)
        recorder = Recorder(at.engine, Away(at.registry.database), "run-1", clock=lambda: at.now)
        await recorder.start()
        for _ in range(3):
            at.engine.tell([request_record()])
            await recorder.read()
            with pytest.raises(RegistryUnavailable):
                await recorder.write()
        recorder._store = store
        await recorder.write()
        await recorder.write()
        [part] = (await at.traffic(VERSION, QUARTER)).values()
        assert part.requests == 3


async def test_time_without_an_engine_is_marked_and_time_without_a_recorder_is_not_known(
    registry_url: str,
):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        at.engine.started = NOW
        await recorder.start()
        at.now = NOW + 20
        await recorder.read()
        at.now = NOW + 50
        at.engine.restart(started=NOW + 40)  # gone at 20, there again at 40
        await recorder.read()
        await recorder.write()
        rows = {r.start - int(NOW): r for r in await at.all(EngineRollup) if r.width == FINE}
        assert {start: (row.covered, row.down) for start, row in rows.items()} == {
            0: (10.0, 0.0), 10: (10.0, 0.0), 20: (0.0, 10.0), 30: (0.0, 10.0), 40: (10.0, 0.0),
            50: (0.0, 0.0),  # the sample
        }  # fmt: skip
        # The service is stopped for a while: of that no row tells anything.
        at.engine.restart(started=NOW + 100)
        at.engine.generation = 1
        later = at.recorder("run-2")
        await later.start()
        at.now = NOW + 110
        await later.read()
        await later.write()
        rows = {r.start - int(NOW): r for r in await at.all(EngineRollup) if r.width == FINE}
        assert set(rows) == {0, 10, 20, 30, 40, 50, 100, 110}
        assert (rows[100].covered, rows[100].down) == (10.0, 0.0)


async def test_missed_records_are_counted(registry_url: str):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        at.engine.missed = 7
        await recorder.read()
        await recorder.write()
        [state] = await at.all(RecorderState)
        assert state.missed == 7
        assert sum(r.missed for r in await at.all(EngineRollup) if r.width == QUARTER) == 7


async def test_an_engine_that_does_not_answer_changes_nothing(registry_url: str):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        at.engine.generation = 0
        assert not await recorder.read()
        assert recorder.heard_at == 0


async def test_the_slowest_requests_of_an_adapter_and_hour_are_kept(registry_url: str):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        for first in (0, 10):
            at.engine.tell(
                [
                    request_record(call=f"c{n}", seconds=1.0 + n / 100, arrived=NOW - 2)
                    for n in range(first, first + 10)
                ]
            )
            await recorder.read()
            await recorder.write()
        kept = sorted(row.seconds for row in await at.all(SlowRequest))
        assert kept == pytest.approx([0.4 + n / 100 + 0.1 for n in range(15, 20)])


async def test_stays_in_slots_have_a_begin_an_end_and_owners(registry_url: str):
    owner = AdapterOwner("acme", "tone@1")

    def event(kind: str, at: float, slot: int | None = 0, digest: str = "d" * 64) -> SlotEvent:
        return SlotEvent(at=NOW + at, slot=slot, digest=digest, owners=(owner,), kind=kind)

    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        waits = QueueStats(
            tenant="acme", adapter="d" * 64, label="tone@1", waiting=1, running=0, cause="slot",
            waited={}, oldest=2.0,
        )  # fmt: skip
        at.engine.stats_now = stats([waits])
        at.engine.tell(events=[event("reserved", 0, None)])
        await recorder.read()
        await recorder.write()
        [span] = await at.all(SlotSpan)
        assert (span.kind, span.slot, span.ended) == ("reserved", None, None)
        [queue] = await at.all(WaitingQueue)
        assert (queue.tenant, queue.adapter, queue.version, queue.cause) == (
            "acme", "tone", 1, "slot",
        )  # fmt: skip
        assert queue.waits_since == pytest.approx(at.now - 2)
        at.engine.stats_now = stats()
        at.engine.tell(
            events=[event("loading", 1), event("resident", 2), event("draining", 20),
                    event("evicted", 30)]
        )  # fmt: skip
        at.now = NOW + 40
        await recorder.read()
        await recorder.write()
        spans = sorted((await at.all(SlotSpan)), key=lambda span: span.began)
        assert [(s.kind, s.slot, s.began - NOW, s.ended - NOW) for s in spans] == [
            ("reserved", 0, 0, 1), ("loading", 0, 1, 2), ("resident", 0, 2, 20),
            ("draining", 0, 20, 30),
        ]  # fmt: skip
        assert spans[0].owners == [["acme", "tone@1"]]
        assert await at.all(WaitingQueue) == []
        [part] = (await at.traffic(VERSION, QUARTER)).values()
        assert (part.loads, part.resident_seconds) == (1, pytest.approx(28.0))


async def test_stays_end_with_their_engine(registry_url: str):
    event = SlotEvent(at=NOW, slot=1, digest="d" * 64, owners=(), kind="resident")
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        at.engine.tell(events=[event])
        await recorder.read()
        await recorder.write()
        heard = at.now
        at.now += 100
        at.engine.restart(started=at.now - 1)
        at.engine.generation = 1
        await at.recorder("run-2").start()
        [span] = await at.all(SlotSpan)
        assert span.ended == heard


async def test_refusals_are_counted_once_also_by_the_next_recorder(registry_url: str):
    async with lab(registry_url) as at:
        at.engine.refused = [adapter_totals("acme", "tone", {"queue_full": 3})]
        recorder = at.recorder()
        await recorder.start()
        await recorder.read()
        await recorder.write()
        at.now += 20
        at.engine.refused = [adapter_totals("acme", "tone", {"queue_full": 5})]
        recorder = at.recorder()
        await recorder.start()
        await recorder.read()
        await recorder.write()
        [part] = (await at.traffic(Subject("acme"), QUARTER)).values()
        assert part.refused == {"queue_full": 5}


def test_what_the_engine_folds_into_others_is_not_refused_again():
    counts = RefusalCounts()

    def take(*adapters: AdapterTotals) -> list[tuple[str, str | None, str, int]]:
        return list(counts.take(1, totals(adapters=adapters)))

    rare, busy = adapter_totals("acme", "rare", {"x": 3}), adapter_totals("acme", "busy", {"x": 2})
    assert take(rare, busy) == [("acme", "rare", "x", 3), ("acme", "busy", "x", 2)]
    assert take(rare, busy) == []
    others = adapter_totals("", None, {"x": 4})  # `rare`, and one more that was refused
    busy = adapter_totals("acme", "busy", {"x": 5})
    assert take(busy, others) == [("acme", "busy", "x", 3), ("", None, "x", 1)]


async def test_nothing_of_a_deleted_tenant_is_left_and_nothing_comes_back(registry_url: str):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        at.engine.tell([request_record()], [step_record(shares=[StepShare("acme", None, 0, 0, 1)])])
        await recorder.read()
        await recorder.write()
        await at.registry.delete_tenant("acme", with_usage=True)
        at.engine.tell([request_record()])
        await recorder.read()
        await recorder.write()
        subjects = {(row.tenant, row.adapter) for row in await at.all(TrafficSubject)}
        assert subjects == {("", "")}
        assert await at.all(SlowRequest) == []
        [service] = (await at.traffic(Subject(), QUARTER)).values()
        assert service.requests == 2  # of the service's sums nothing is lost


async def test_what_is_past_its_time_is_dropped(registry_url: str):
    async with lab(registry_url) as at:
        recorder = at.recorder()
        await recorder.start()
        at.engine.tell([request_record()], [step_record()])
        await recorder.read()
        await recorder.write()

        async def widths(now: float) -> set[int]:
            await at.registry.database.write(lambda s: sweep(s, now))
            rows = await at.registry.database.read(
                lambda s: s.execute(select(TrafficRollup.width, func.count()).group_by("width"))
            )
            return {row[0] for row in rows}

        assert await widths(at.now) == {FINE, MINUTE, QUARTER}
        assert await widths(at.now + KEPT_SECONDS[FINE] + FINE) == {MINUTE, QUARTER}
        assert await widths(at.now + KEPT_SECONDS[MINUTE] + MINUTE) == {QUARTER}
        assert await at.all(SlowRequest) == []
        assert await widths(at.now + KEPT_SECONDS[QUARTER] + QUARTER) == set()
        assert await at.all(TrafficSubject) == []


def test_the_causes_of_a_bucket_are_its_queue_time():
    part = Traffic()
    record = request_record(queue={cause: 0.1 * n for n, cause in enumerate(CAUSES)})
    part.add_request(record, Objective())
    assert part.queue_seconds == record.queue_seconds
