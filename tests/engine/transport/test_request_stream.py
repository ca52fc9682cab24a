"""A request's outputs reach one reader in order, merged where it falls behind."""

import asyncio

import pytest

from engine.errors import EngineUnavailable
from engine.messages import ChoiceDelta, RequestOutput, RequestTiming, TokenLogprob
from engine.transport.request_stream import RequestStream, merge_outputs

pytestmark = pytest.mark.anyio


def output(*deltas: ChoiceDelta, finished: bool = False, cached: int = 0) -> RequestOutput:
    timing = RequestTiming(queue={}, prefill=0.0, decode=0.0) if finished else None
    return RequestOutput(1, list(deltas), cached, finished=finished, timing=timing)


async def test_a_reader_that_keeps_up_gets_each_output() -> None:
    stream = RequestStream()
    first, last = (
        output(ChoiceDelta(0, [1])),
        output(ChoiceDelta(0, [2], None, "stop"), finished=True),
    )
    stream.push(first)
    assert await anext(stream) is first
    stream.push(last)
    assert await anext(stream) is last
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_slow_reader_gets_one_output_that_says_all() -> None:
    stream = RequestStream()
    for token in range(100):
        logprobs = [TokenLogprob(token, -1.0, [])]
        stream.push(output(ChoiceDelta(token % 2, [token], logprobs), cached=3))
    stream.push(
        output(
            ChoiceDelta(1, [0], None, "stop", 0), ChoiceDelta(0, [], None, "length"), finished=True
        )
    )
    merged = await anext(stream)
    assert [delta.index for delta in merged.deltas] == [0, 1]
    even, odd = merged.deltas
    assert even.token_ids == list(range(0, 100, 2)) and even.finish_reason == "length"
    assert odd.token_ids == [*range(1, 100, 2), 0] and odd.finish_reason == "stop"
    assert odd.stop_token_id == 0 and len(even.logprobs or []) == 50
    assert merged.finished and merged.timing is not None and merged.num_cached_tokens == 3
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


def test_a_merged_output_keeps_the_newest_timing() -> None:
    timings = [RequestTiming(queue={"turn": t}, prefill=0.0, decode=0.0) for t in (1.0, 2.0)]
    outputs = [RequestOutput(1, [ChoiceDelta(0, [t])], timing=timings[t]) for t in range(2)]
    merged = merge_outputs([*outputs, output(ChoiceDelta(0, [2]))])
    assert merged.timing is timings[1] and not merged.finished


def test_one_output_is_not_copied() -> None:
    only = output(ChoiceDelta(0, [1]))
    assert merge_outputs([only]) is only


async def test_an_error_comes_after_the_outputs_that_are_there() -> None:
    stream = RequestStream()
    stream.accept()
    stream.push(output(ChoiceDelta(0, [1])))
    stream.fail(EngineUnavailable("gone"))
    stream.push(output(ChoiceDelta(0, [2])))
    assert (await anext(stream)).deltas[0].token_ids == [1]
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="gone"):
            await anext(stream)


async def test_a_reader_that_waits_is_woken_by_the_end() -> None:
    stream = RequestStream()
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    stream.end()
    assert await waiting is None


async def test_a_failure_before_the_acceptance_is_raised_there() -> None:
    stream = RequestStream()
    waiting = asyncio.ensure_future(stream.wait_accepted())
    await asyncio.sleep(0)
    stream.fail(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable):
        await waiting


async def test_a_listener_is_told_of_each_change_and_takes_what_is_there():
    stream = RequestStream()
    stream.push(output(ChoiceDelta(0, [1])))
    found: list[list[int]] = []

    def take() -> None:
        taken = stream.take()
        assert taken is not None
        found.append(taken.deltas[0].token_ids)

    stream.listen(take)  # at once: something is there
    stream.push(output(ChoiceDelta(0, [2])))
    assert not stream.is_over
    stream.push(output(ChoiceDelta(0, [3], None, "stop"), finished=True))
    assert found == [[1], [2], [3]]
    assert stream.is_over and stream.take() is None


async def test_a_listener_that_comes_after_the_end_is_told_of_it():
    stream = RequestStream()
    stream.push(output(ChoiceDelta(0, [1])))
    stream.fail(EngineUnavailable("gone"))
    calls: list[bool] = []
    stream.listen(lambda: calls.append(stream.is_over))
    assert calls == [False]
    first = stream.take()
    assert first is not None and first.deltas[0].token_ids == [1]
    assert stream.is_over
    with pytest.raises(EngineUnavailable, match="gone"):
        stream.take()
