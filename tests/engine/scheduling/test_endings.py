"""However a request ends, it gives back all that it held, while another tenant streams on."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import RequestRefused
from engine.scheduling.sequence import Sequence
from tests.support.memory_engine import FakeSource, MemoryEngine, request
from tests.support.memory_runner import EOS, VOCAB_SIZE, draw

Ending = Callable[[MemoryEngine, int], None]
SUBJECT, OTHER = 1, 2
PROMPT = [5] * 10


def _start(engine: MemoryEngine, n: int, prompt: list[int] = PROMPT, **fields: Any) -> None:
    engine.add(request(SUBJECT, prompt, tenant="t", adapter="a", n=n, **fields))


def _tokens_of(engine: MemoryEngine) -> int:
    return sum(len(d.token_ids) for o in engine.outputs["c", SUBJECT] for d in o.deltas)


def _step_until(engine: MemoryEngine, condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        engine.step()
    raise AssertionError("it does not come to that")


def length(engine: MemoryEngine, n: int) -> None:
    _start(engine, n, max_tokens=3)
    _step_until(engine, lambda: engine.is_over(("c", SUBJECT)))
    engine.assert_as_alone(SUBJECT)


def stop_token(engine: MemoryEngine, n: int) -> None:
    first = {draw(PROMPT, "a", SUBJECT, choice) for choice in range(n)}
    _start(engine, n, max_tokens=9, stop_token_ids=tuple(first - {EOS}))
    _step_until(engine, lambda: engine.is_over(("c", SUBJECT)))
    assert engine.choice(SUBJECT)[1] == "stop"


def context_full(engine: MemoryEngine, n: int) -> None:
    _start(engine, n, [5] * 86, max_tokens=1000)
    _step_until(engine, lambda: engine.is_over(("c", SUBJECT)))
    assert engine.choice(SUBJECT)[1] == "length"


def sampling_error(engine: MemoryEngine, n: int) -> None:
    _start(engine, n, max_tokens=9)
    _step_until(engine, lambda: _tokens_of(engine) > 0)
    engine.runner.failing_requests.add(SUBJECT)
    _step_until(engine, lambda: engine.is_over(("c", SUBJECT)))
    assert engine.last(SUBJECT).error_code == "sampling_failed"


def load_error(engine: MemoryEngine, n: int) -> None:
    engine.source.auto = False
    _start(engine, n)
    engine.source.fail("a")
    _step_until(engine, lambda: engine.is_over(("c", SUBJECT)))
    assert engine.last(SUBJECT).error_code == "adapter_unavailable"


def device_error(engine: MemoryEngine, n: int) -> None:
    engine.runner.broken_adapters.add("a")
    _start(engine, n)
    _step_until(engine, lambda: engine.is_over(("c", SUBJECT)))
    assert engine.last(SUBJECT).error_code == "adapter_unavailable"
    engine.runner.broken_adapters.clear()


def refused(engine: MemoryEngine, n: int) -> None:
    with pytest.raises(RequestRefused):
        engine.core.add("c", request(SUBJECT, [VOCAB_SIZE], adapter="a", n=n))


def refused_for_its_id(engine: MemoryEngine, n: int) -> None:
    _start(engine, n, max_tokens=2)
    with pytest.raises(RequestRefused):
        engine.core.add("c", request(SUBJECT, PROMPT, adapter="a", n=n))
    _step_until(engine, lambda: engine.is_over(("c", SUBJECT)))


def gone_while_queued(engine: MemoryEngine, n: int) -> None:
    _start(engine, n)
    engine.core.abort("c", SUBJECT)


def gone_while_loading(engine: MemoryEngine, n: int) -> None:
    engine.source.auto = False
    _start(engine, n)
    engine.step()
    engine.core.abort("c", SUBJECT)
    engine.source.deliver("a")


def gone_while_prefilling(engine: MemoryEngine, n: int) -> None:
    _start(engine, n)
    _step_until(engine, lambda: any(s.is_prefilling for s in _running(engine)))
    assert _tokens_of(engine) == 0
    engine.core.abort("c", SUBJECT)


def gone_mid_stream(engine: MemoryEngine, n: int) -> None:
    _start(engine, n, max_tokens=20)
    _step_until(engine, lambda: _tokens_of(engine) > n)
    engine.core.abort("c", SUBJECT)
    engine.core.abort("c", SUBJECT)


def gone_while_preempted(engine: MemoryEngine, n: int) -> None:
    _start(engine, n, max_tokens=20)
    _step_until(engine, lambda: _tokens_of(engine) > n)
    engine.core._scheduler._lifecycle.preempt(_running(engine)[0])
    assert engine.core.stats().preemptions == 1
    engine.core.abort("c", SUBJECT)


def client_gone(engine: MemoryEngine, n: int) -> None:
    engine.add(request(SUBJECT, PROMPT, adapter="a", n=n, max_tokens=20), client="dying")
    for _ in range(5):
        engine.step()
    engine.core.abort_client("dying")


def _running(engine: MemoryEngine, request_id: int = SUBJECT) -> list[Sequence]:
    running = engine.core._scheduler._lifecycle.running
    return [s for s in running if s.request.key.request_id == request_id]


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    "ending",
    [
        length, stop_token, context_full, sampling_error, load_error, device_error, refused,
        refused_for_its_id, gone_while_queued, gone_while_loading, gone_while_prefilling,
        gone_mid_stream, gone_while_preempted, client_gone,
    ],
)  # fmt: skip
def test_every_ending_gives_all_back_and_its_adapter_can_go_while_another_tenant_streams(
    ending: Ending, n: int
):
    engine = MemoryEngine(
        source=FakeSource(), num_kv_blocks=120, max_model_len=90, max_num_batched_tokens=8
    )
    engine.add(request(OTHER, [9] * 4, tenant="u", adapter="b", max_tokens=80))
    _step_until(engine, lambda: bool(engine.outputs["c", OTHER]))

    ending(engine, n)
    engine.core.unload("a")
    engine.step()
    engine.step()

    assert not engine.is_over(("c", OTHER)), "the other one streams all the while"
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.resident) == (1, 0, ["b"])
    [other] = _running(engine, OTHER)
    assert stats.kv_blocks_used == len(other.block_table)
    assert "a" in engine.source.forgotten
    assert set(engine.runner.slots.values()) == {"b"}
    engine.run()
    engine.assert_as_alone(OTHER)
    engine.assert_at_rest()
