"""The engine's records: what they say of requests, steps and slots, and how they are read."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.messages import EngineRequest
from engine.scheduled_batch import RunSeconds
from engine.telemetry.records import (
    Cursor,
    RequestRecord,
    StepRecord,
    StepSeconds,
    StepShare,
    Telemetry,
)
from engine.telemetry.ring import Ring
from engine.telemetry.step_split import split_step
from tests.support.scripted_engine import (
    EOS,
    ScriptedEngine,
    ScriptedRunner,
    digest_of,
    request,
    scripted_engine,
)

pytestmark = pytest.mark.anyio


def labelled(
    number: int, prompt: Sequence[int], label: str | None = None, **options: object
) -> EngineRequest:
    """A request for adapter `label` (one digest a label), or for the base."""
    adapter = None if label is None else digest_of(sum(label.encode()))
    message = request(number, prompt, adapter=adapter, **options)  # type: ignore[arg-type]
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return EngineRequest(**{**fields, "label": label or "tiny", "call": f"call-{number}"})


async def run(engine: ScriptedEngine, *messages: EngineRequest) -> None:
    streams = await asyncio.gather(*(engine.client.generate(message) for message in messages))
    for stream in streams:
        async for _ in stream:
            pass


async def records(engine: ScriptedEngine) -> dict[str, RequestRecord]:
    told = await engine.client.telemetry()
    return {record.call: record for record in told.requests}


async def test_a_request_is_recorded_once_with_its_counts_and_its_way():
    async with scripted_engine(lambda prompt, adapter: [5, 6, EOS]) as engine:
        await run(engine, labelled(1, [1, 2, 3, 4], "legal@7"), labelled(2, [9], max_tokens=2))
        told = await records(engine)
    legal, base = told["call-1"], told["call-2"]
    assert (legal.tenant, legal.adapter, legal.version, legal.label) == (
        "acme", "legal", 7, "legal@7",
    )  # fmt: skip
    assert (legal.prompt_tokens, legal.output_tokens, legal.finish_reasons) == (4, 3, ("stop",))
    assert [state for _, state in legal.timeline] == [
        "queued", "loaded", "prefill", "decode", "done",
    ]  # fmt: skip
    offsets = [offset for offset, _ in legal.timeline]
    assert offsets[0] == 0.0 and offsets == sorted(offsets) and offsets[-1] == legal.seconds
    assert legal.load_seconds > 0.0 and "load" in legal.queue
    assert (base.adapter, base.version, base.label, base.load_seconds) == (None, None, None, 0.0)
    assert base.finish_reasons == ("length",) and base.output_tokens == 2
    assert base.ttft is not None and base.ttft <= base.seconds
    assert base.seconds_per_token == base.decode_seconds


async def test_a_prefill_in_chunks_shows_each_chunk_and_a_long_way_is_cut():
    config = SchedulerConfig(num_kv_blocks=128, max_num_seqs=4, max_num_batched_tokens=16)
    async with scripted_engine(lambda prompt, adapter: [EOS], config=config) as engine:
        await run(engine, labelled(1, range(1, 49)), labelled(2, [k % 500 + 1 for k in range(900)]))
        told = await records(engine)
    states = [state for _, state in told["call-1"].timeline]
    assert states.count("prefill") >= 3 and states[-2:] == ["decode", "done"]
    assert len(told["call-2"].timeline) == 33 and told["call-2"].timeline[-1][1] == "done"


async def test_what_a_client_gave_up_says_why_and_counts_what_was_shown():
    async with scripted_engine(lambda prompt, adapter: [7] * 400) as engine:
        stream = await engine.client.generate(labelled(1, [1], max_tokens=400))
        async for _ in stream:
            break
        engine.client.abort(1, "stop", 2)
        waiting = await engine.client.generate(labelled(2, [1], max_tokens=400, n=3))
        engine.client.abort(2)
        del waiting
        told = await records(engine)
    assert told["call-1"].finish_reasons == ("stop",) and told["call-1"].output_tokens == 2
    assert told["call-2"].finish_reasons == ("abort",) * 3
    assert told["call-2"].finish_reason == "abort" and told["call-2"].seconds_per_token is None


async def test_a_failed_row_and_a_refused_request_are_told_by_code():
    runner = ScriptedRunner(failing_rows=frozenset({99}))
    config = SchedulerConfig(num_kv_blocks=8, max_num_seqs=4)
    async with scripted_engine(runner=runner, config=config) as engine:
        await run(engine, labelled(1, [99, 1]))
        with pytest.raises(RequestRefused):
            await engine.client.generate(labelled(2, range(1, 400), "legal@1"))
        told = await engine.client.telemetry(with_totals=True)
    assert told.requests[0].finish_reasons == ("error",)
    assert told.requests[0].error_code is not None and told.totals is not None
    refused = {t.adapter: t.refused for t in told.totals.adapters if t.refused}
    assert list(refused) == ["legal"] and sum(refused["legal"].values()) == 1


async def test_steps_say_whose_rows_they_had_and_their_parts_sum_to_them():
    runner = ScriptedRunner(lambda prompt, adapter: [7] * 4 + [EOS])
    async with scripted_engine(runner=runner) as engine:
        await run(
            engine, labelled(1, [1] * 20, "legal@1"), labelled(2, [2] * 10, "legal@2"),
            labelled(3, [3] * 5), labelled(4, [4] * 5, "legal@1", tenant="zen"),
        )  # fmt: skip
        told = await engine.client.telemetry()
    assert [step.number for step in told.steps] == list(range(1, runner.num_steps + 1))
    prefilled: dict[tuple[str, str | None], int] = {}
    decoded = 0
    for step in told.steps:
        assert step.adapters == sum(share.label is not None for share in step.shares)
        assert step.seconds.total >= 0 and step.kv_blocks_total == 512
        for share in step.shares:
            key = share.tenant, share.label
            prefilled[key] = prefilled.get(key, 0) + share.prefill_tokens
            decoded += share.decode_rows
    assert prefilled == {
        ("acme", "legal@1"): 20, ("acme", "legal@2"): 10, ("acme", None): 5, ("zen", "legal@1"): 5,
    }  # fmt: skip
    assert decoded == 4 * 4  # the first token of each comes with its prefill
    assert told.steps[-1].running == 0


async def test_of_many_adapters_in_a_step_the_small_ones_are_told_as_one():
    config = SchedulerConfig(num_kv_blocks=256, max_num_seqs=32, max_loras=4)
    async with scripted_engine(lambda prompt, adapter: [EOS], config=config) as engine:
        messages = [labelled(k, [1] * (k + 1), tenant=f"t{k:02}") for k in range(20)]
        await run(engine, *messages)
        told = await engine.client.telemetry()
    largest = max(told.steps, key=lambda step: len(step.shares))
    assert len(largest.shares) == 17 and largest.shares[-1].tenant == ""
    assert largest.num_tokens == sum(range(1, 21)) and largest.num_rows == 20


async def test_slots_tell_who_came_and_who_went_for_whom():
    config = SchedulerConfig(num_kv_blocks=128, max_num_seqs=4, max_loras=1)
    async with scripted_engine(lambda prompt, adapter: [EOS], config=config) as engine:
        await run(engine, labelled(1, [1], "a@1"))
        await run(engine, labelled(2, [1], "b@1"))
        told = await engine.client.telemetry(with_totals=True)
    ways = [(e.owners[0].label, e.kind, e.slot) for e in told.slot_events]
    assert ways == [
        ("a@1", "loading", 0), ("a@1", "resident", 0), ("a@1", "evicted", 0),
        ("b@1", "loading", 0), ("b@1", "resident", 0),
    ]  # fmt: skip
    assert told.totals is not None
    by_name = {t.adapter: t for t in told.totals.adapters}
    assert by_name["a"].load_seconds.count == by_name["b"].load_seconds.count == 1
    assert by_name["a"].resident_seconds > 0 and by_name["b"].resident_seconds > 0


async def test_adapters_with_the_same_files_are_each_told_as_itself():
    config = SchedulerConfig(num_kv_blocks=128, max_num_seqs=2, max_loras=1)
    names = ("tone@1", "tone@2", "copy@1")
    messages = [
        msgspec.structs.replace(
            labelled(number, [1], "tone@1", max_tokens=50), label=names[number % 3]
        )
        for number in range(6)
    ]
    async with scripted_engine(lambda prompt, adapter: [5] * 50, config=config) as engine:
        await run(engine, messages[0])  # the weights are in their slot, for the first name
        streams = [await engine.client.generate(message) for message in messages[1:]]
        now = await engine.client.stats()
        for stream in streams:
            async for _ in stream:
                pass
        told = await engine.client.telemetry(with_totals=True)
    assert {queue.label for queue in now.queues} <= set(names) and len(now.queues) > 1
    assert sum(queue.running for queue in now.queues) == now.running
    assert sum(queue.waiting for queue in now.queues) == now.waiting > 0
    assert [(t.tenant, t.running, t.waiting) for t in now.tenants] == [
        ("acme", now.running, now.waiting)
    ]
    shared = [[o.label for o in e.owners] for e in told.slot_events if e.kind == "shared"]
    assert [len(labels) for labels in shared] == [2, 3] and set(shared[-1]) == set(names)
    assert told.totals is not None
    by_name = {t.adapter: t for t in told.totals.adapters if t.tenant}
    assert by_name.keys() == {"tone", "copy"}
    assert by_name["tone"].resident_seconds > by_name["copy"].resident_seconds > 0
    assert (by_name["tone"].load_seconds.count, by_name["copy"].load_seconds.count) == (1, 0)


async def test_a_request_that_asked_for_all_its_tokens_could_not_stop():
    async with scripted_engine(lambda prompt, adapter: [5] * 8) as engine:
        plain = labelled(1, [1], max_tokens=4)
        forced = [
            msgspec.structs.replace(
                plain, request_id=number, call=f"call-{number}",
                sampling=msgspec.structs.replace(plain.sampling, **options),
            )
            for number, options in ((2, {"ignore_eos": True}), (3, {"min_tokens": 4}))
        ]  # fmt: skip
        await run(engine, plain, *forced)
        told = await records(engine)
    assert {call: record.may_stop for call, record in told.items()} == {
        "call-1": True, "call-2": False, "call-3": False,
    }  # fmt: skip
    assert all(record.finish_reason == "length" for record in told.values())


async def test_every_reader_has_its_own_place_and_hears_what_it_missed():
    async with scripted_engine(lambda prompt, adapter: [EOS]) as engine:
        await run(engine, *[labelled(k, [1]) for k in range(5)])
        first = await engine.client.telemetry(limit=2)
        assert len(first.requests) == 2 and first.has_more and first.missed == 0
        second = await engine.client.telemetry(first.cursor)
        assert len(second.requests) == 3 and not second.has_more
        nothing = await engine.client.telemetry(second.cursor)
        assert (nothing.requests, nothing.steps, nothing.missed) == ([], [], 0)
        other = await engine.client.telemetry()
        assert [r.call for r in other.requests] == [
            r.call for told in (first, second) for r in told.requests
        ]
        of_another = Cursor(generation=99, requests=1000, steps=1000, slot_events=1000)
        assert len((await engine.client.telemetry(of_another)).requests) == 5


def test_a_ring_keeps_the_last_and_counts_what_a_reader_lost():
    ring = Ring[int](3)
    for number in range(10):
        ring.push(number)
    assert ring.read(0, 10) == ([7, 8, 9], 10, 7, False)
    assert ring.read(5, 1) == ([7], 8, 2, True)
    assert ring.read(9, 10) == ([9], 10, 0, False)
    assert ring.read(10, 10) == ring.read(99, 10) == ([], 10, 0, False)


@pytest.mark.parametrize("parts", [None, RunSeconds(prepare=0.125, lora=0.25, sample=0.5)])
def test_the_parts_of_a_step_sum_to_it(parts: RunSeconds | None):
    seconds = split_step(0.5, 2.0, 0.25, parts)
    assert seconds.total == 2.75 and seconds.forward == (2.0 if parts is None else 1.125)


def test_records_are_small_enough_to_keep_thousands():
    record = RequestRecord(
        call="chatcmpl-" + 32 * "f", tenant="t" * 32, adapter="a" * 32, version=12, arrived=1.7e9,
        queue=dict.fromkeys(("quota", "load", "slot", "kv", "budget", "turn"), 0.123),
        load_seconds=0.1, ttft=0.1, seconds=1.0, decode_seconds=0.5, longest_gap=0.1,
        prompt_tokens=100, cached_tokens=64, output_tokens=200, finish_reasons=("stop",),
        preemptions=0, timeline=((0.0, "queued"), (0.1, "prefill"), (0.2, "decode"), (1.0, "done")),
    )  # fmt: skip
    share = StepShare("t" * 32, "a" * 32 + "@1", 1, 100, 8)
    step = StepRecord(
        at=1.7e9, number=1, seconds=StepSeconds(*[0.01] * 6), shares=(share,) * 8, adapters=8,
        running=32, waiting=3, kv_blocks_used=100, kv_blocks_total=4096, slots_used=8,
        slots_total=8, preemptions=0,
    )  # fmt: skip
    told = Telemetry(
        generation=1, call_id=1, cursor=Cursor(), requests=[record], steps=[step], slot_events=[],
        missed=0,
    )  # fmt: skip
    encoded = msgspec.msgpack.encode(told)
    assert msgspec.msgpack.decode(encoded, type=Telemetry) == told
    assert len(msgspec.msgpack.encode(record)) < 400 and len(msgspec.msgpack.encode(step)) < 900
