"""The load generator reads streams as a client does, and believes no reply of a wrong length."""

import json
from collections import Counter
from typing import Any

import httpx
import pytest

from benchmarks.churn import Case, choose_adapters, poisson_arrivals, saturation_rate
from benchmarks.serving.load import (
    MIXES,
    Call,
    LoadError,
    Reply,
    Result,
    complete,
    read_workload,
)
from benchmarks.serving.passes import Passes, ratio, row, throughput

CALL = Call("a00", (1, 2, 3), 3)


def replying(*events: Any, status: int = 200) -> httpx.AsyncClient:
    """A client of a server that sends these events, each as one chunk."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    body = "".join(f"data: {line}\n\n" for line in lines)

    def handle(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        assert request.url.path == "/v1/completions"
        assert (sent["model"], sent["max_tokens"], sent["min_tokens"]) == ("a00", 3, 3)
        assert sent["ignore_eos"] and sent["stream"]
        return httpx.Response(status, text=body)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://127.0.0.1/v1")


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


@pytest.mark.anyio
async def test_a_stream_is_timed_chunk_by_chunk():
    async with replying(chunk("a"), chunk("bc"), usage(3), "[DONE]") as http:
        reply = await complete(http, CALL)
    assert reply.tokens == 3
    assert len(reply.gaps) == 1
    assert reply.started <= reply.first <= reply.last
    assert reply.last - reply.first == pytest.approx(sum(reply.gaps))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("events", "status", "words"),
    [
        ((chunk("a"), usage(2), "[DONE]"), 200, "2 tokens, not 3"),
        ((chunk("a"), {"error": {"code": "engine_failed"}}), 200, "engine_failed"),
        (({"error": "busy"},), 429, "status 429"),
    ],
    ids=["length", "error event", "refused"],
)
async def test_what_was_not_asked_for_fails_the_run(events, status, words):
    async with replying(*events, status=status) as http:
        with pytest.raises(LoadError, match=words):
            await complete(http, CALL)


def test_the_workload_is_the_published_one():
    for mix in MIXES:
        calls = read_workload(mix, base="the-base")
        assert len(calls) == 64
        assert sum(len(call.prompt) for call in calls) == 8154
        assert sum(call.max_tokens for call in calls) == 3414
    assert {call.model for call in read_workload("base", base="the-base")} == {"the-base"}
    assert set(Counter(call.model for call in read_workload("mix8")).values()) == {8}
    assert len({call.model for call in read_workload("zipf16")}) <= 16


def test_figures_of_a_run():
    result = Result((Reply(0.0, 1.0, 3.0, 3, (0.5, 1.5)), Reply(1.0, 1.5, 1.5, 1, ())), seconds=4.0)
    assert (result.tokens, result.tokens_per_second, result.gaps) == (4, 1.0, [0.5, 1.5])
    assert [reply.ttft for reply in result.replies] == [1.0, 0.5]
    assert [reply.tpot for reply in result.replies] == [1.0, 0.0]
    assert result.as_dict()["gap_ms"]["p99"] == pytest.approx(1490.0)
    assert row("ours", Passes([result]))[:3] == ["ours", "1", "0.75"]


def test_ratios_are_taken_within_a_pass():
    def passes(*seconds: float) -> Passes:
        return Passes([Result((Reply(0.0, 1.0, 1.0, 8, ()),), s) for s in seconds])

    taken = {"fast": passes(1.0, 4.0), "slow": passes(2.0, 16.0)}
    assert ratio(taken, "fast", "slow", throughput) == [2.0, 4.0]


def test_arrivals_come_at_the_rate_and_are_the_same_each_time():
    arrivals = poisson_arrivals(20.0, 100.0, seed=1)
    assert arrivals == poisson_arrivals(20.0, 100.0, seed=1) != poisson_arrivals(20.0, 100.0, 2)
    assert arrivals == sorted(arrivals) and arrivals[0] > 0 and arrivals[-1] < 100
    assert 1800 < len(arrivals) < 2200  # 2,000 expected, standard deviation 45


def test_popularity_follows_zipf_or_is_even():
    zipf = Counter(choose_adapters(Case("", 64, 1.0), 10_000, seed=0))
    harmonic = sum(1 / rank for rank in range(1, 65))
    assert len(zipf) == 64
    for rank in (1, 2, 4):
        assert zipf[f"a{rank - 1:02d}"] == pytest.approx(10_000 / harmonic / rank, rel=0.1)
    even = Counter(choose_adapters(Case("", 16, 0.0), 16_000, seed=0))
    assert min(even.values()) > 850 and max(even.values()) < 1150


def test_saturation_counts_neither_the_start_nor_the_end():
    steady = [Reply(0.0, 0.0, 10.0 + index / 4, 1, ()) for index in range(60)]
    late = [Reply(0.0, 0.0, 100.0 + 10 * index, 1, ()) for index in range(10)]
    assert saturation_rate([*late, *steady]) == pytest.approx(4.0)
