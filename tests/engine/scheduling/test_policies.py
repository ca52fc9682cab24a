"""How policies divide a step: the worked example, and what each policy promises."""

from tests.support.memory_engine import MemoryEngine, request

# Requests A..H of one prompt token each, their output lengths; four slots, one token a step.
WORKED_EXAMPLE = [8, 2, 3, 1, 3, 4, 2, 5]


def _run_worked_example(policy: str) -> MemoryEngine:
    engine = MemoryEngine(policy=policy, max_num_seqs=4, max_num_batched_tokens=16)
    for number, length in enumerate(WORKED_EXAMPLE):
        engine.add(request(number, [1], max_tokens=length))
    engine.run()
    for number in range(len(WORKED_EXAMPLE)):
        engine.assert_as_alone(number)
    return engine


def _completions(engine: MemoryEngine) -> list[float]:
    return [engine.finished_at[number] for number in range(len(WORKED_EXAMPLE))]


def test_worked_example_static_takes_13_steps_and_computes_52_rows_for_28_tokens():
    engine = _run_worked_example("static")
    batches = engine.runner.batches
    assert len(batches) == 13
    assert sum(len(batch.rows) for batch in batches) == 52
    assert engine.core.stats().output_tokens == 28
    assert _completions(engine) == [8, 8, 8, 8, 13, 13, 13, 13]
    assert sum(_completions(engine)) / 8 == 10.5


def test_worked_example_continuous_takes_9_steps_with_completions_8_2_3_1_4_6_5_9():
    engine = _run_worked_example("chunked")
    batches = engine.runner.batches
    assert len(batches) == 9
    assert 4 * len(batches) == 36 and sum(len(batch.rows) for batch in batches) == 28
    assert _completions(engine) == [8, 2, 3, 1, 4, 6, 5, 9]
    assert sum(_completions(engine)) / 8 == 4.75


# -- the shape of a step


def _rows(engine: MemoryEngine, step: int) -> list[tuple[int, int]]:
    """(start, tokens) of each row."""
    return [(row.start, len(row.token_ids)) for row in engine.runner.batches[step].rows]


def test_decodes_come_first_and_are_never_delayed_by_a_long_prefill():
    engine = MemoryEngine(max_num_batched_tokens=10, max_num_seqs=2, num_kv_blocks=64)
    engine.add(request(1, [1, 2], max_tokens=20))
    engine.step()
    engine.add(request(2, [3] * 50, max_tokens=2))
    while not engine.is_over(("c", 1)):
        engine.step()
    assert all((1 if step else 2) == _rows(engine, step)[0][1] for step in range(20))
    assert all(batch.num_tokens <= 10 for batch in engine.runner.batches)
    assert _rows(engine, 1) == [(2, 1), (0, 9)], "the prefill takes the rest of the budget"


def test_no_prefill_takes_more_than_half_while_another_waits():
    engine = MemoryEngine(max_num_batched_tokens=20, max_num_seqs=4)
    engine.add(request(1, [1] * 40, tenant="a"))
    engine.add(request(2, [2] * 6, tenant="b"))
    engine.step()
    assert _rows(engine, 0) == [(0, 14), (0, 6)], "half, and what the other left"
    engine.add(request(3, [3] * 30, tenant="c"))
    engine.step()
    assert sorted(tokens for _, tokens in _rows(engine, 1)) == [1, 9, 10]


def test_prefill_first_never_mixes_and_cuts_only_what_exceeds_the_budget():
    engine = MemoryEngine(policy="prefill_first", max_num_batched_tokens=10, max_num_seqs=4)
    engine.add(request(1, [1] * 6))
    engine.add(request(2, [2] * 6))
    engine.add(request(3, [3] * 25))
    engine.run()
    prefills = [[row for row in _rows(engine, step) if row[1] > 1] for step in range(5)]
    assert prefills[:2] == [[(0, 6)], [(0, 6)]], "whole prompts, one after another"
    assert prefills[2:] == [[(0, 10)], [(10, 10)], [(20, 5)]]
    for batch in engine.runner.batches:
        decodes = sum(row.start > 0 and len(row.token_ids) == 1 for row in batch.rows)
        assert decodes in (0, len(batch.rows))
    for number in (1, 2, 3):
        engine.assert_as_alone(number)


def test_static_pads_prompts_to_the_longest_of_the_batch():
    engine = MemoryEngine(policy="static", max_num_seqs=2, max_num_batched_tokens=16)
    engine.add(request(1, [1] * 3, max_tokens=1))
    engine.add(request(2, [2] * 23, max_tokens=5))
    engine.run()
    num_decodes = 2 * (5 - 1)  # each of them decodes until both have finished
    assert sum(batch.num_tokens for batch in engine.runner.batches) == 2 * 23 + num_decodes
    assert engine.finished_at[1] == engine.finished_at[2]
    engine.assert_as_alone(1)
    engine.assert_as_alone(2)


def test_static_padding_never_lands_in_a_prefix_that_others_may_find():
    engine = MemoryEngine(policy="static", max_num_seqs=2, max_num_batched_tokens=16)
    prompt = list(range(1, 13))
    for number, prompts in enumerate([[prompt], [prompt, [9] * 23], [prompt]]):
        for index, tokens in enumerate(prompts):
            engine.add(request(10 * number + index, tokens))
        engine.run()
    for number in (0, 10, 11, 20):
        engine.assert_as_alone(number)
