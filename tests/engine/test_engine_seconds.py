"""A step's time is its requests', by their tokens: together all that the engine is busy."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import ChoiceDelta, RequestOutput
from engine.transport.request_stream import merge_outputs
from tests.support.memory_engine import MemoryEngine, request


def slowly(engine: MemoryEngine, seconds: Callable[[int], float]) -> None:
    """Let each step take as long as its number of tokens says."""
    execute = engine.runner.execute

    def run(batch: Any) -> Any:
        engine.clock.now += seconds(batch.num_tokens)
        return execute(batch)

    engine.runner.execute = run  # type: ignore[method-assign]


def test_a_step_is_shared_by_tokens():
    engine = MemoryEngine(max_num_batched_tokens=64, enable_prefix_cache=False)
    slowly(engine, lambda num_tokens: 8.0)
    engine.add(request(1, [1] * 12, max_tokens=1))
    engine.add(request(2, [2] * 4, max_tokens=2))
    engine.clock.now += 100.0  # nothing runs
    told = {o.request_id: o.engine_seconds for _, o in engine.core.step()}
    assert told == {1: pytest.approx(6.0), 2: pytest.approx(2.0)}
    [(_, last)] = engine.core.step()
    assert (last.request_id, last.finished) == (2, True)
    assert last.engine_seconds == pytest.approx(10.0)
    assert engine.core.stats().busy_seconds == pytest.approx(16.0)


@pytest.mark.parametrize("policy", ["chunked", "prefill_first", "static"])
def test_all_shares_sum_to_the_busy_time_over_preemptions_forks_and_chunks(policy: str):
    engine = MemoryEngine(
        num_kv_blocks=12, block_size=4, max_num_seqs=6, max_num_batched_tokens=9, policy=policy
    )
    slowly(engine, lambda num_tokens: 0.25 + num_tokens / 8)
    for number in range(1, 9):
        prompt = [number] * (3 * number)
        engine.add(request(number, prompt, tenant=f"t{number % 3}", max_tokens=7, n=1 + number % 2))
    shares: dict[int, float] = {}
    while engine.core.has_work:
        for _, output in engine.core.step():
            assert output.engine_seconds > shares.get(output.request_id, 0.0)
            shares[output.request_id] = output.engine_seconds
    stats = engine.core.stats()
    assert len(shares) == 8 and stats.busy_seconds > 0
    assert sum(shares.values()) == pytest.approx(stats.busy_seconds)
    if policy == "chunked":
        assert stats.preemptions > 0, "the case is to have some"


def test_outputs_that_are_read_together_say_the_last_share():
    outputs = [
        RequestOutput(1, [ChoiceDelta(0, [token])], engine_seconds=seconds)
        for token, seconds in ((5, 0.5), (6, 0.75))
    ]
    assert merge_outputs(outputs).engine_seconds == 0.75
