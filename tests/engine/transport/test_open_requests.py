"""Who reads which outputs, and what becomes of readers when their engine is lost."""

import pytest

from engine.errors import EngineUnavailable, RequestRefused
from engine.messages import RequestOutput
from engine.transport.open_requests import OpenRequests

pytestmark = pytest.mark.anyio


async def test_an_output_reaches_its_reader_and_the_last_one_closes_its_request():
    requests = OpenRequests()
    first, second = requests.open(1), requests.open(2)
    requests.push([RequestOutput(2), RequestOutput(1, finished=True), RequestOutput(3)])
    assert first.is_over is False and first.take() == RequestOutput(1, finished=True)
    assert first.is_over and second.take() == RequestOutput(2) and not second.is_over
    assert requests.ids == [2] and 1 not in requests and 2 in requests
    requests.push([RequestOutput(1)])
    assert first.take() is None


async def test_a_request_that_was_aborted_or_refused_is_open_no_more():
    requests = OpenRequests()
    aborted, refused = requests.open(1), requests.open(2)
    requests.accept(1)
    requests.accept(7)
    assert requests.end(1) and not requests.end(1)
    await aborted.wait_accepted()
    requests.fail(2, RequestRefused("queue_full", "later"))
    requests.fail(2, RequestRefused("queue_full", "later"))
    with pytest.raises(RequestRefused, match="later"):
        await refused.wait_accepted()
    assert requests.ids == []


async def test_when_the_engine_is_lost_every_reader_is_told_after_what_came_before():
    requests = OpenRequests()
    streams = [requests.open(number) for number in (1, 2)]
    requests.push([RequestOutput(1)])
    requests.fail_all("the engine was restarted")
    assert requests.ids == [] and streams[0].take() == RequestOutput(1)
    for stream in streams:
        with pytest.raises(EngineUnavailable, match="restarted"):
            stream.take()
