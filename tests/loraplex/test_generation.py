"""A call's pieces: offered to a sink in the turn that brought them, returned where it refuses."""

import asyncio

import pytest

from engine.messages import ChoiceDelta, EngineRequest, RequestOutput
from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream
from loraplex.openai.generation import Choice, Generation, Piece
from tests.support.fake_engine import TIMING, FakeEngine

pytestmark = pytest.mark.anyio


class Letters:
    """A detokenizer: 0 is `a`."""

    num_held = 0

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


async def started(engine: FakeEngine, stop: str = "") -> Generation:
    request = EngineRequest(
        request_id=1,
        tenant="acme",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=8, seed=0),
    )
    text = TextStream(Letters(), [stop] if stop else [])
    generation = Generation(engine, [request], [Choice(0, text, shows_stop=False)])
    await generation.start()
    return generation


def texts(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


async def test_a_sink_gets_tokens_at_once_and_the_caller_the_last_ones():
    engine, taken = FakeEngine(), []
    generation = await started(engine)
    asked = asyncio.ensure_future(
        generation.next(lambda pieces: taken.append(texts(pieces)) or True)
    )
    await asyncio.sleep(0)
    for token in (0, 1):
        engine.say(1, [token])
    assert taken == ["a", "b"]  # no turn of the loop has passed
    engine.say(1, [2], reason="length", finished=True)
    assert texts(await asked) == "c"
    assert generation.is_done and taken == ["a", "b"]
    assert await generation.next() == []


async def test_what_a_sink_refuses_is_returned_with_nothing_lost_meanwhile():
    engine = FakeEngine()
    generation = await started(engine)
    asked = asyncio.ensure_future(generation.next(lambda pieces: False))
    await asyncio.sleep(0)
    for token in (0, 1, 2):
        engine.say(1, [token])
    assert texts(await asked) == "a"
    assert texts(await generation.next()) == "bc"


async def test_a_sink_that_breaks_ends_its_own_call_only():
    engine = FakeEngine()
    generation = await started(engine)

    def broken(pieces: list[Piece]) -> bool:
        raise ZeroDivisionError

    asked = asyncio.ensure_future(generation.next(broken))
    await asyncio.sleep(0)
    engine.say(1, [0])  # on the engine client's own turn: nothing is raised here
    with pytest.raises(ZeroDivisionError):
        await asked


async def test_a_stop_string_ends_the_request_from_within_the_wake_up():
    engine = FakeEngine()
    generation = await started(engine, stop="c")
    asked = asyncio.ensure_future(generation.next(lambda pieces: True))
    await asyncio.sleep(0)
    engine.say(1, [0, 1])
    engine.say(1, [2, 3])
    [last] = await asked
    assert (last.text, last.finish_reason) == ("", "stop")
    assert engine.aborted == [1] and generation.is_done


async def test_an_abort_ends_a_caller_that_waits():
    engine = FakeEngine()
    generation = await started(engine)
    asked = asyncio.ensure_future(generation.next(lambda pieces: True))
    await asyncio.sleep(0)
    generation.abort()
    assert await asked == [] and not generation.is_done


async def test_decode_time_goes_on_where_the_engine_does_not_see_the_end():
    engine = FakeEngine()
    generation = await started(engine, stop="c")
    engine.push(RequestOutput(1, [ChoiceDelta(0, [0])], timing=TIMING))
    await generation.next()
    assert generation.timing is TIMING
    engine.say(1, [2])
    await generation.next()
    assert generation.is_done
    assert 0 < generation.timing.decode != TIMING.decode
    assert (generation.timing.queue, generation.timing.prefill) == (TIMING.queue, TIMING.prefill)
