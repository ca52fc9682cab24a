"""A step's budget is spent by time: tokens with much context take more of it."""

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.step_work import cost_of, tokens_within
from tests.support.memory_engine import MemoryEngine, request

BUDGET = 16
ATTENTION_CONTEXT = 32


def _engine(attention_context: int | None, block_size: int = 1, **config) -> MemoryEngine:
    return MemoryEngine(
        num_kv_blocks=1024 // block_size,
        block_size=block_size,
        max_model_len=256,
        max_num_batched_tokens=BUDGET,
        attention_context=attention_context,
        **config,
    )


def _rows(engine: MemoryEngine) -> list[list[tuple[int, int]]]:
    """Start and length of each step's rows."""
    return [
        [(row.start, len(row.token_ids)) for row in batch.rows] for batch in engine.runner.batches
    ]


def _work(start: int, num_tokens: int) -> float:
    """What a chunk's linears and attention take, in tokens without context."""
    positions = range(start, start + num_tokens)
    return sum(1 + position / ATTENTION_CONTEXT for position in positions)


@given(
    budget=st.integers(1, 4096),
    context=st.integers(0, 10**6),
    attention_context=st.one_of(st.none(), st.integers(1, 10**5)),
    block_size=st.integers(1, 64),
)
def test_what_fits_a_budget_costs_no_more_unless_it_is_a_block_and_one_token_more_would(
    budget, context, attention_context, block_size
):
    fitting = tokens_within(budget, context, attention_context, block_size)
    assert 1 <= fitting <= budget
    assert cost_of(fitting, context, attention_context) <= budget or fitting <= block_size
    assert cost_of(fitting + 1, context, attention_context) > budget


def test_the_chunks_of_a_long_prompt_take_no_longer_at_its_end_than_near_its_start():
    def longest_chunk(attention_context: int | None) -> float:
        engine = _engine(attention_context)
        engine.add(request(1, [1, 2, 3, 4] * 50, max_tokens=1))
        engine.run()
        rows = [row for (row,) in _rows(engine)]
        assert sum(length for _, length in rows) == 200, "every token once"
        assert rows[0] == (0, BUDGET), "a short context costs nothing"
        return max(_work(*row) for row in rows)

    near_its_start = _work(ATTENTION_CONTEXT // 4, BUDGET)
    assert longest_chunk(None) > 4 * near_its_start
    assert longest_chunk(ATTENTION_CONTEXT) <= 1.2 * near_its_start


def test_a_long_prompt_leaves_half_of_a_step_to_a_short_one_wherever_it_is():
    engine = _engine(ATTENTION_CONTEXT)
    engine.add(request(1, [1, 2, 3, 4] * 50, tenant="long", max_tokens=1))
    for _ in range(20):
        engine.step()
    engine.add(request(2, [5, 6, 7, 8], tenant="short", max_tokens=1))
    engine.add(request(3, [6, 7, 8, 9], tenant="short", max_tokens=1))
    engine.step()
    ((_, of_long),) = [row for row in _rows(engine)[-1] if row[0] > 0]
    assert _rows(engine)[-1].count((0, 4)) == 2
    assert of_long < BUDGET // 4
    engine.run()
    assert all(engine.is_over(key) for key in engine.messages)


def test_a_prefill_goes_on_where_a_block_costs_more_than_the_budget_has_left():
    engine = _engine(1, block_size=4, max_num_seqs=BUDGET)
    engine.add(request(1, [1, 2, 3, 4] * 10, max_tokens=1))
    for number in range(2, BUDGET + 1):
        engine.add(request(number, [number], max_tokens=60, ignore_eos=True))
    engine.run()
    assert any(len(rows) == BUDGET for rows in _rows(engine)), "one token beside all others"
    assert all(engine.is_over(key) for key in engine.messages)
