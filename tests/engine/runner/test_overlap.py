"""Steps planned before it is known what the one before draws: the same answers, the same counts."""

import threading
from collections import Counter
from itertools import groupby
from random import Random
from typing import Any

import msgspec
import pytest

from engine.messages import EndCalls
from engine.runner.overlapped_runner import OverlappedRunner
from engine.runner.protocol import Runner
from engine.scheduled_batch import ScheduledBatch, StepResult
from engine.scheduling.plan_ahead import MAX_IN_A_ROW
from tests.support.memory_engine import MemoryEngine, request
from tests.support.memory_runner import Overlap, draw, expected_output
from tests.support.scripted_engine import ScriptedRunner

OVERLAPS: list[Overlap] = ["early", "late"]


def engine_of(overlap: Overlap | None, **config: Any) -> MemoryEngine:
    return MemoryEngine(overlap=overlap, **config)


def ahead_batches(engine: MemoryEngine) -> list[ScheduledBatch]:
    return [batch for batch in engine.runner.batches if batch.follows]


def num_rows(engine: MemoryEngine) -> int:
    return sum(len(batch.rows) for batch in engine.runner.batches)


def traffic(engine: MemoryEngine, seed: int) -> dict[int, tuple[list[int], str | None]]:
    """Random requests and aborts in random steps; what became of each request."""
    random = Random(seed)
    aborted: set[int] = set()
    for number in range(40):
        if random.random() < 0.6:
            for _ in range(random.randrange(1, 6)):
                engine.step()
        message = request(
            number,
            [random.randrange(40) for _ in range(random.randrange(1, 12))],
            tenant=f"t{number % 3}",
            adapter=random.choice([None, "a", "b", "c"]),
            max_tokens=random.randrange(1, 25),
            n=random.choice([1, 1, 1, 2]),
            ignore_eos=random.random() < 0.4,
            stop_token_ids=(random.randrange(40),),
        )
        engine.add(message)
        live = [key[1] for key in engine.messages if not engine.is_over(key)]
        if random.random() < 0.2:
            aborted.add(random.choice(live))
            engine.core.abort("c", max(aborted & set(live)))
    engine.run()
    engine.assert_at_rest()
    return {
        number: engine.choice(number)
        for number in range(40)
        if engine.is_over(("c", number)) and number not in aborted
    }


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("num_kv_blocks", [14, 64])
def test_random_traffic_gets_the_tokens_of_the_synchronous_engine(
    overlap: Overlap, num_kv_blocks: int
):
    num_ahead = preemptions = 0
    for seed in range(8):
        engine = engine_of(overlap, num_kv_blocks=num_kv_blocks, max_num_seqs=4)
        answers = traffic(engine, seed)
        assert len(answers) > 20
        for number, answer in answers.items():
            message = engine.messages["c", number]
            assert answer == expected_output(message, 0, engine.config.max_sequence_len)
        num_ahead += len(ahead_batches(engine))
        preemptions += engine.core.stats().preemptions
    assert num_ahead > 100, "the case is to have some"
    assert preemptions > 0 or num_kv_blocks > 14


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_decodes_alone_is_always_planned_ahead_and_no_row_is_run_in_vain(overlap: Overlap):
    engine = engine_of(overlap)
    for number in range(3):
        engine.add(request(number, [number] * 5, max_tokens=20))
    engine.run()
    assert len(ahead_batches(engine)) == 19, "all but the prefill"
    assert num_rows(engine) == 3 * 20, "an end by length is seen in time"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_batches_of_a_full_engine_with_a_queue_are_those_of_the_synchronous_one(
    overlap: Overlap,
):
    """Ends by length, and seats that are all taken: nothing there is seen too late."""

    def run(overlap: Overlap | None) -> MemoryEngine:
        engine = engine_of(overlap, max_num_seqs=3)
        for number in range(12):
            engine.add(request(number, [number] * 4, max_tokens=10 + number, tenant=f"t{number}"))
        engine.run()
        return engine

    def rows_of(engine: MemoryEngine) -> list[list[tuple[int, int]]]:
        return [[(r.sequence_id, r.start) for r in b.rows] for b in engine.runner.batches]

    ahead, alone = run(overlap), run(None)
    assert rows_of(ahead) == rows_of(alone)
    assert len(ahead_batches(ahead)) > len(ahead.runner.batches) / 2


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_while_somebody_waits_one_step_in_so_many_is_planned_as_ever(overlap: Overlap):
    engine = engine_of(overlap, max_num_seqs=1)
    engine.add(request(1, [1], max_tokens=3 * MAX_IN_A_ROW))
    engine.add(request(2, [2], max_tokens=2))
    engine.run()
    is_ahead = [bool(batch.follows) for batch in engine.runner.batches]
    runs = [len(list(group)) for key, group in groupby(is_ahead) if key]
    assert max(runs) == MAX_IN_A_ROW and len(runs) >= 3
    engine.assert_as_alone(1)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_stop_token_costs_one_row_that_is_dropped_and_counted_nowhere(overlap: Overlap):
    history = [1, 2, 3]
    for _ in range(6):
        history.append(draw(history, None, 7, 0))
    stop = history[8]
    first = history.index(stop, 3)
    engine = engine_of(overlap)
    engine.add(request(7, [1, 2, 3], max_tokens=50, stop_token_ids=(stop,)))
    engine.add(request(8, [4], max_tokens=30))
    engine.run()
    assert engine.choice(7) == (history[3 : first + 1], "stop")
    length = first + 1 - 3
    assert engine.core.stats().output_tokens == length + 30
    assert num_rows(engine) == length + 30 + 1, "one row was run in vain"
    engine.assert_as_alone(8)
    engine.assert_at_rest()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ends", ["abort", "client", "end_calls"])
def test_a_request_that_is_ended_while_its_step_runs_gets_no_more_tokens(
    overlap: Overlap, ends: str
):
    engine = engine_of(overlap, max_loras=1)
    engine.add(request(1, [1], adapter="a", max_tokens=40))
    engine.add(request(2, [2], max_tokens=40), client="other")
    for _ in range(6):
        engine.step()
    assert engine.runner.is_running
    before, told = engine.core.stats().output_tokens, len(engine.outputs["c", 1])
    if ends == "end_calls":
        engine.core.end_calls(EndCalls(tenant="t", code="gone", reason="gone"))
    elif ends == "client":
        engine.core.abort_client("c")
    else:
        engine.core.abort("c", 1)
    if ends == "end_calls":
        engine.run()
        assert engine.last(1).error_code == "gone"
        assert engine.core.stats().output_tokens == before
        engine.assert_at_rest()
        return
    assert engine.core.stats().running == 1
    engine.add(request(3, [3], adapter="b", max_tokens=3))  # takes the slot, and the blocks
    engine.run()
    assert len(engine.outputs["c", 1]) == told
    engine.assert_as_alone(2, "other")
    engine.assert_as_alone(3)
    assert engine.core.stats().output_tokens == before + (40 - 6) + 3
    engine.assert_at_rest()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_who_arrives_while_a_step_runs_is_admitted_with_the_next_one_but_one(overlap: Overlap):
    engine = engine_of(overlap)
    engine.add(request(1, [1], max_tokens=40))
    for _ in range(5):
        engine.step()
    engine.add(request(2, [2], max_tokens=3))
    engine.step()  # the step that was under way
    engine.step()
    assert engine.choice(2)[0], "its first token came"
    engine.run()
    engine.assert_as_alone(2)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_adapter_that_arrives_while_others_decode_gets_its_slot_at_once(overlap: Overlap):
    engine = engine_of(overlap, max_num_seqs=4)
    engine.source.auto = False
    engine.add(request(1, [1], max_tokens=60))
    engine.add(request(2, [2], adapter="a", max_tokens=3))
    for _ in range(5):
        engine.step()
    assert len(ahead_batches(engine)) >= 3, "who waits for a load holds up nobody"
    engine.source.deliver("a")
    for _ in range(3):
        engine.step()
    assert engine.choice(2)[0]
    engine.run()
    engine.assert_as_alone(1)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_who_waits_for_a_quota_holds_up_nobody_and_is_admitted_when_it_may(overlap: Overlap):
    engine = engine_of(overlap)
    engine.add(request(1, [1], max_tokens=12, max_concurrent=1))
    engine.add(request(2, [2], max_tokens=3, max_concurrent=1))
    engine.add(request(3, [3], tenant="u", max_tokens=30))
    for _ in range(9):
        engine.step()
    assert len(ahead_batches(engine)) >= 7 and not engine.choice(2)[0]
    engine.run()
    for number in (1, 2, 3):
        engine.assert_as_alone(number)
    assert engine.first_token_at[2] - engine.finished_at[1] <= 2 * engine.step_seconds


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "{}"},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
    ],
)
def test_rows_that_are_drawn_by_their_history_force_synchronous_steps(
    overlap: Overlap, fields: dict[str, Any]
):
    engine = engine_of(overlap)
    engine.core._prepare_grammar = lambda *_: None  # pyright: ignore[reportPrivateUsage]
    engine.add(request(1, [1], max_tokens=12))
    plain = request(2, [2], max_tokens=6)
    sampling = msgspec.structs.replace(plain.sampling, **fields)
    engine.add(msgspec.structs.replace(plain, sampling=sampling))
    engine.run()
    for batch in ahead_batches(engine):
        assert all(row.sampling and not row.sampling.params.reads_history for row in batch.rows)
    assert len(ahead_batches(engine)) == 5, "once the row has ended"
    engine.assert_as_alone(1)
    engine.assert_as_alone(2)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_steps_that_overlap_are_not_counted_twice_as_busy_time(overlap: Overlap):
    engine = engine_of(overlap, step_seconds=2.0)
    for number in range(3):
        engine.add(request(number, [1], max_tokens=10))
    engine.run()
    shares = sum(engine.last(number).engine_seconds for number in range(3))
    assert shares == pytest.approx(engine.core.stats().busy_seconds)
    assert engine.core.stats().busy_seconds == pytest.approx(engine.clock.now, rel=0.02)


class Waiting:
    """A runner whose steps wait until they may go on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.may_go_on = threading.Semaphore(0)
        self.threads = Counter[str]()

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.threads[threading.current_thread().name] += 1
        assert self.may_go_on.acquire(timeout=10)
        return self._runner.execute(batch)

    def install_adapter(self, slot: int, weights: object) -> None:
        self._runner.install_adapter(slot, weights)

    def clear_slot(self, slot: int) -> None:
        self._runner.clear_slot(slot)


def test_the_thread_runs_a_step_with_what_the_one_before_it_drew():
    engine = MemoryEngine()
    waiting = Waiting(engine.runner)
    runner = OverlappedRunner(waiting)
    engine.core._launch = runner.launch  # pyright: ignore[reportPrivateUsage]
    engine.add(request(1, [1, 2], max_tokens=8))
    engine.add(request(2, [3], max_tokens=8))
    waiting.may_go_on.release(100)
    engine.run()
    runner.close()
    engine.assert_as_alone(1)
    engine.assert_as_alone(2)
    assert len(ahead_batches(engine)) == 7, "all but the prefill"
    assert set(waiting.threads) == {"step_0"} and waiting.threads["step_0"] == 8


def test_a_step_that_fails_on_the_thread_fails_the_core():
    def fail(batch: ScheduledBatch) -> None:
        raise RuntimeError("no device")

    runner = OverlappedRunner(ScriptedRunner(before_step=fail))
    engine = MemoryEngine()
    engine.core._launch = runner.launch  # pyright: ignore[reportPrivateUsage]
    engine.add(request(1, [1]))
    with pytest.raises(RuntimeError, match="no device"):
        engine.core.step()
    runner.close()
