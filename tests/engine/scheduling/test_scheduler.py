"""The scheduler's answers: endings, refusals, prefixes, forks and aborts; and what a step costs."""

import subprocess
import sys

import pytest

from engine.config import SchedulerConfig
from engine.errors import ConfigError, RequestRefused
from engine.scheduled_batch import SampledRow, SampledToken, StepResult
from engine.scheduling.scheduler import Scheduler
from tests.support.memory_engine import MemoryEngine, request
from tests.support.memory_runner import EOS, VOCAB_SIZE, draw


def test_a_budget_that_cannot_decode_all_sequences_is_refused_at_start():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        MemoryEngine(max_num_seqs=8, max_num_batched_tokens=7)


def test_the_same_calls_give_the_same_batches():
    def batches() -> list[object]:
        engine = MemoryEngine(num_kv_blocks=12, max_num_seqs=4, max_num_batched_tokens=12)
        for number in range(12):
            engine.add(
                request(
                    number,
                    [1 + number % 3] * (1 + 3 * number % 17),
                    tenant=f"t{number % 3}",
                    adapter=[None, "a", "b", "c"][number % 4],
                    max_tokens=9,
                    n=1 + number % 2,
                )
            )
        engine.run()
        return [
            [(row.sequence_id, row.start, list(row.block_table), row.slot) for row in batch.rows]
            for batch in engine.runner.batches
        ]

    assert batches() == batches()


# -- endings


def _request_drawing(token: int, *, at: int, **fields):
    """A request whose output has `token` at this position and not before."""
    for number in range(1, 10_000):
        tokens = [5, 6]
        while len(tokens) <= 2 + at:
            tokens.append(draw(tokens, None, number, 0))
        if token not in tokens[2:-1] and tokens[-1] == token:
            return request(number, [5, 6], **fields)
    raise AssertionError("no such seed")


def test_eos_exactly_at_max_tokens_is_a_stop():
    engine = MemoryEngine()
    message = _request_drawing(EOS, at=3, max_tokens=4, ignore_eos=False)
    engine.add(message)
    engine.run()
    tokens, reason = engine.choice(message.request_id)
    assert (len(tokens), tokens[-1], reason) == (4, EOS, "stop")
    delta = engine.last(message.request_id).deltas[-1]
    assert delta.stop_token_id == EOS


def test_ignore_eos_goes_on_and_stop_ids_end_it_all_the_same():
    message = _request_drawing(EOS, at=2, max_tokens=9, ignore_eos=True)
    engine = MemoryEngine()
    engine.add(message)
    engine.run()
    tokens, reason = engine.choice(message.request_id)
    assert len(tokens) == 9 and reason == "length" and tokens[2] == EOS

    stopping = request(
        message.request_id, [5, 6], max_tokens=9, ignore_eos=True, stop_token_ids=(EOS,)
    )
    engine = MemoryEngine()
    engine.add(stopping)
    engine.run()
    assert engine.choice(message.request_id) == (tokens[:3], "stop")


def test_a_prompt_one_short_of_the_context_gets_one_token_and_one_at_it_is_refused():
    engine = MemoryEngine(max_model_len=20)
    engine.add(request(1, [1] * 19, max_tokens=100))
    engine.run()
    tokens, reason = engine.choice(1)
    assert len(tokens) == 1 and reason == "length"
    for length in (20, 21):
        with pytest.raises(RequestRefused) as refusal:
            engine.add(request(2, [1] * length))
        assert refusal.value.code == "context_length_exceeded"
        assert refusal.value.limit == 20 and refusal.value.param == "prompt"


def test_a_prompt_larger_than_the_pool_is_refused_with_the_effective_limit():
    engine = MemoryEngine(num_kv_blocks=5, block_size=4, max_model_len=1000)
    with pytest.raises(RequestRefused) as refusal:
        engine.add(request(1, [1] * 20))
    assert refusal.value.limit == 20
    engine.add(request(2, [1] * 19))
    engine.run()
    engine.assert_as_alone(2)


def test_growing_past_the_pool_ends_with_length_and_others_go_on():
    engine = MemoryEngine(num_kv_blocks=6, block_size=4, max_num_seqs=3)
    engine.add(request(1, [1] * 9, tenant="a", max_tokens=1000))
    engine.add(request(2, [2] * 3, tenant="b", max_tokens=6))
    engine.add(request(3, [3] * 3, tenant="c", max_tokens=6))
    engine.run()
    tokens, reason = engine.choice(1)
    assert len(tokens) == 24 - 9 and reason == "length"
    for number in (1, 2, 3):
        engine.assert_as_alone(number)
    engine.assert_at_rest()


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": []}, "empty_prompt", "prompt"),
        ({"prompt": [1, VOCAB_SIZE]}, "invalid_token_id", "prompt"),
        ({"prompt": [-1]}, "invalid_token_id", "prompt"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "invalid_token_id", "stop_token_ids"),
        ({"n": 9}, "n_too_large", "n"),
        ({"n": 0}, "invalid_value", "n"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"weight": 0.0}, "invalid_value", "weight"),
        ({"weight": 1e-18}, "invalid_value", "weight"),  # counters would lose others' tokens
        ({"weight": float("inf")}, "invalid_value", "weight"),
        ({"weight": float("nan")}, "invalid_value", "weight"),
        ({"n": 3, "max_concurrent": 2}, "concurrency_limit_exceeded", "n"),
    ],
)
def test_what_can_never_run_is_refused_by_name_and_leaves_nothing(fields, code, param):
    engine = MemoryEngine(max_num_seqs=8)
    with pytest.raises(RequestRefused) as refusal:
        engine.add(request(1, fields.pop("prompt", [1]), **fields))
    assert (refusal.value.code, refusal.value.param) == (code, param)
    assert not engine.core.has_work
    engine.assert_at_rest()


def test_a_full_queue_a_used_id_and_adapters_without_slots_are_refused():
    engine = MemoryEngine(max_queue_len=2, max_loras=0)
    with pytest.raises(RequestRefused, match="no adapters"):
        engine.add(request(9, [1], adapter="a"))
    engine.add(request(1, [1]))
    with pytest.raises(RequestRefused) as refusal:
        engine.add(request(1, [1]))
    assert refusal.value.code == "duplicate_request_id"
    engine.add(request(1, [1]), client="another client's numbers are its own")
    with pytest.raises(RequestRefused) as refusal:
        engine.add(request(3, [1]))
    assert (refusal.value.code, refusal.value.limit) == ("queue_full", 2)


def test_a_failed_row_ends_its_request_only():
    engine = MemoryEngine()
    engine.add(request(1, [1, 2], max_tokens=9, n=3))
    engine.add(request(2, [3, 4], max_tokens=9))
    engine.step()
    engine.runner.failing_requests.add(1)
    engine.run()
    output = engine.last(1)
    assert (output.error_code, output.error) == ("sampling_failed", "no distribution left")
    assert [delta.finish_reason for delta in output.deltas] == ["error"] * 3
    engine.assert_as_alone(2)
    engine.assert_at_rest()


# -- prefix cache and forks


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_prompts_around_block_boundaries_repeat_exactly_with_at_most_all_but_one_cached(length):
    engine = MemoryEngine(block_size=4)
    prompt = [1 + i for i in range(length)]
    cached = []
    for number in range(3):
        engine.add(request(number, prompt))
        engine.run()
        engine.assert_as_alone(number)
        cached.append(engine.last(number).num_cached_tokens)
    assert cached == [0, (length - 1) // 4 * 4, (length - 1) // 4 * 4]
    engine.assert_at_rest()


def test_the_prefix_cache_never_crosses_adapters_tenants_or_salts():
    engine = MemoryEngine(block_size=4, max_loras=2)
    prompt = list(range(1, 13))
    cached = []
    runs = [
        {"adapter": "a"}, {"adapter": "b"}, {}, {"adapter": "b"}, {},
        {"adapter": "b", "tenant": "other"}, {"tenant": "other"}, {"cache_salt": "s"},
        {"adapter": "a"},
    ]  # fmt: skip
    for number, fields in enumerate(runs):
        engine.add(request(number, prompt, **fields))
        engine.run()
        engine.assert_as_alone(number)
        cached.append(engine.last(number).num_cached_tokens)
    assert cached == [0, 0, 0, 8, 8, 0, 0, 0, 8]


def test_without_the_prefix_cache_nothing_is_found():
    engine = MemoryEngine(enable_prefix_cache=False)
    for number in range(2):
        engine.add(request(number, [1] * 12))
        engine.run()
        assert engine.last(number).num_cached_tokens == 0


def test_output_is_found_by_the_next_turn_of_a_conversation():
    engine = MemoryEngine(block_size=4)
    engine.add(request(1, [1] * 6, max_tokens=7))
    engine.run()
    tokens, _ = engine.choice(1)
    engine.add(request(2, [1] * 6 + tokens + [2]))
    engine.run()
    assert engine.last(2).num_cached_tokens == 12
    engine.assert_as_alone(2)


@pytest.mark.parametrize("length", [1, 4, 6, 8])
def test_n_choices_share_one_prefill_and_differ(length):
    engine = MemoryEngine(block_size=4)
    engine.add(request(1, [1] * length, n=4, max_tokens=6))
    engine.run()
    engine.assert_as_alone(1)
    assert len({tuple(engine.choice(1, choice)[0]) for choice in range(4)}) == 4
    stats = engine.core.stats()
    assert stats.prompt_tokens == length, "the prompt is charged once"
    assert len(engine.runner.batches[0].rows) == 1
    assert engine.runner.num_copies == (3 if length % 4 else 0)


def test_children_that_find_no_block_wait_and_still_answer():
    engine = MemoryEngine(num_kv_blocks=5, block_size=4, max_num_seqs=4)
    engine.add(request(1, [1] * 10, n=4, max_tokens=8))
    engine.run()
    engine.assert_as_alone(1)
    assert engine.last(1).timing.preemptions > 0
    engine.assert_at_rest()


# -- aborts


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stage", ["queued", "loading", "prefilling", "decoding", "preempted"])
def test_an_abort_at_any_stage_frees_all_at_once_and_twice_is_harmless(stage, n):
    adapter = "a" if stage == "loading" else None
    pool = 9 if stage == "preempted" else 64
    engine = MemoryEngine(num_kv_blocks=pool, max_num_batched_tokens=12, max_model_len=30)
    engine.source.auto = stage != "loading"
    engine.add(request(1, [1] * 20, n=n, max_tokens=9, adapter=adapter, tenant="b"))
    if stage == "preempted":
        engine.add(request(2, [2] * 8, max_tokens=20, tenant="a"))
        while not engine.core.stats().preemptions:
            engine.step()
    else:
        for _ in range({"queued": 0, "loading": 2, "prefilling": 1, "decoding": 4}[stage]):
            engine.step()
    engine.core.abort("c", 1)
    engine.core.abort("c", 1)
    engine.core.abort("c", 77)
    engine.core.check_integrity()
    if stage == "preempted":
        engine.run()
        engine.assert_as_alone(2)
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    engine.step()
    assert not engine.core.has_work
    assert not engine.is_over(("c", 1)), "an abort yields no output"
    engine.assert_at_rest()


def test_a_client_that_is_gone_takes_its_requests_along_and_no_others():
    engine = MemoryEngine()
    for number in range(6):
        engine.add(request(number, [1 + number] * 5, max_tokens=9), client=number % 2)
    for _ in range(3):
        engine.step()
    engine.core.abort_client(0)
    engine.core.abort_client("never seen")
    engine.run()
    for number in (1, 3, 5):
        engine.assert_as_alone(number, client=1)
    assert not any(engine.is_over((0, number)) for number in (0, 2, 4))
    engine.assert_at_rest()


def test_every_ending_gives_back_the_slot_reference():
    engine = MemoryEngine(num_kv_blocks=10, max_loras=1)
    engine.add(request(1, [1] * 6, adapter="a", n=4, max_tokens=3))
    engine.add(request(2, [2] * 6, adapter="a", max_tokens=9, ignore_eos=False))
    engine.add(request(3, [3] * 6, adapter="a", n=2, max_tokens=9))
    engine.add(request(4, [4] * 6, adapter="a", max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.runner.failing_requests.add(3)
    engine.core.abort("c", 4)
    with pytest.raises(RequestRefused):
        engine.add(request(5, [VOCAB_SIZE], adapter="a"))
    engine.run()
    engine.core.unload("a")
    engine.run()
    assert engine.source.forgotten == ["a"] and not engine.runner.slots
    engine.assert_at_rest()


# -- cost


def _calls_of_a_step(num_waiting: int) -> int:
    """Function calls of `schedule` with so much waiting; seconds would depend on the machine."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_kv_blocks=4096, max_num_seqs=32, max_num_batched_tokens=256, max_loras=8,
            max_queue_len=num_waiting,
        ),
        eos_token_ids=[EOS], vocab_size=VOCAB_SIZE, clock=lambda: 0.0,
    )  # fmt: skip
    for number in range(num_waiting):
        adapter = number % (num_waiting // 4)
        scheduler.add(
            "c",
            request(
                number, [1] * 8, tenant=f"t{adapter % 20}", adapter=f"a{adapter}", max_tokens=8
            ),
        )
        scheduler.adapter_fetched(f"a{adapter}")
    num_calls = 0

    def count(frame, event, argument) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    for step in range(60):
        if step >= 40:
            sys.setprofile(count)
        batch = scheduler.schedule()
        sys.setprofile(None)
        for load in batch.loads:
            scheduler.adapter_installed(load.digest)
        drawn = [SampledRow((SampledToken(5),)) if row.sampling else None for row in batch.rows]
        scheduler.commit(StepResult(drawn))
        scheduler.take_outputs()
    return num_calls


def test_a_step_costs_what_it_schedules_and_not_what_waits():
    assert _calls_of_a_step(4000) < 1.5 * _calls_of_a_step(400)


def test_the_engine_core_needs_no_torch():
    code = "import sys, engine.core; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
