"""Load on an OpenAI-compatible `/completions`, closed loop or open, and what its clients saw.

    python -m benchmarks.serving.load --url http://127.0.0.1:8000/v1 --key KEY --mix mix8 --loops 4

sends every request of `w1.jsonl` `--loops` times over without draining in between, at most
`--concurrency` at a time, and prints one JSON line. Greedy, exact output lengths: a reply of any
other length fails the run.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.figures import spread

WORKLOAD = Path(__file__).with_name("w1.jsonl")
MIXES = ("base", "one", "mix8", "mix16", "zipf16")


class LoadError(Exception):
    """A reply was not what was asked for; the message says which."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to come."""

    model: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client saw of one request; seconds."""

    started: float
    first: float
    last: float
    tokens: int
    gaps: tuple[float, ...]
    """Between consecutive chunks."""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first - self.started

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Result:
    """A run's replies and its duration in seconds."""

    replies: tuple[Reply, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Output tokens of all replies."""
        return sum(reply.tokens for reply in self.replies)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole run."""
        return self.tokens / self.seconds

    @property
    def gaps(self) -> list[float]:
        """Gaps between chunks, of all replies."""
        return [gap for reply in self.replies for gap in reply.gaps]

    def as_dict(self) -> dict[str, Any]:
        """Figures for JSON: seconds, but milliseconds per token and between chunks."""
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "ttft_s": spread([reply.ttft for reply in self.replies]),
            "tpot_ms": spread([reply.tpot for reply in self.replies], 1e3),
            "gap_ms": spread(self.gaps, 1e3),
        }


def read_workload(mix: str, path: Path = WORKLOAD, base: str = "base") -> list[Call]:
    """The requests of a workload file under one of its mixes."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Call(row["adapters"][mix] or base, tuple(row["prompt_token_ids"]), row["max_tokens"])
        for row in rows
    ]


@asynccontextmanager
async def client(url: str, key: str = "") -> AsyncGenerator[httpx.AsyncClient]:
    """A client of `url` (which ends with `/v1`) without limits of its own."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False
    ) as http:
        yield http


async def complete(http: httpx.AsyncClient, call: Call) -> Reply:
    """Stream one completion to its end; raises LoadError."""
    body = {
        "model": call.model,
        "prompt": call.prompt,
        "max_tokens": call.max_tokens,
        "min_tokens": call.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    times: list[float] = []
    tokens = 0
    async with http.stream("POST", "completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread())[:500].decode(errors="replace")
            raise LoadError(f"{call.model}: status {response.status_code}: {text}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise LoadError(f"{call.model}: {event['error']}")
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                times.append(time.perf_counter())
    if tokens != call.max_tokens:
        raise LoadError(f"{call.model}: {tokens} tokens, not {call.max_tokens}")
    gaps = tuple(after - before for before, after in pairwise(times))
    return Reply(started, times[0], times[-1], tokens, gaps)


async def closed_loop(url: str, calls: Sequence[Call], concurrency: int, key: str = "") -> Result:
    """Send all calls, at most `concurrency` at a time: what a saturated service does."""
    waiting = list(reversed(calls))
    replies: list[Reply] = []
    async with client(url, key) as http:

        async def worker() -> None:
            while waiting:
                replies.append(await complete(http, waiting.pop()))

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return Result(tuple(replies), time.perf_counter() - started)


async def open_loop(
    url: str, calls: Sequence[Call], arrivals: Sequence[float], key: str = ""
) -> Result:
    """Send call i at `arrivals[i]` seconds whatever became of the others: what clients do.

    Time counts from when a call was due, so that a slow client hides nothing.
    """
    async with client(url, key) as http:
        started = time.perf_counter()

        async def one(call: Call, due: float) -> Reply:
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            reply = await complete(http, call)
            return Reply(started + due, reply.first, reply.last, reply.tokens, reply.gaps)

        tasks = [one(call, due) for call, due in zip(calls, arrivals, strict=True)]
        replies = await asyncio.gather(*tasks)
        return Result(tuple(replies), time.perf_counter() - started)


def run_mix(
    url: str, mix: str, *, key: str = "", loops: int = 1, concurrency: int = 32, base: str = "base",
    workload: Path = WORKLOAD,
) -> Result:  # fmt: skip
    """The workload `loops` times over under one mix."""
    calls = read_workload(mix, workload, base) * loops
    return asyncio.run(closed_loop(url, calls, concurrency, key))


def warm_up(url: str, mixes: Sequence[str], *, key: str = "", base: str = "base") -> None:
    """A few short requests of each mix, and one to every adapter: not counted anywhere."""
    calls: dict[Any, Call] = {}
    for mix in mixes:
        for number, call in enumerate(read_workload(mix, base=base)):
            calls.setdefault(call.model, Call(call.model, call.prompt, 8))
            if number < 8:
                calls[mix, number] = Call(call.model, call.prompt, 16)
    asyncio.run(closed_loop(url, list(calls.values()), 8, key))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="")
    parser.add_argument("--mix", default="mix8", choices=MIXES)
    parser.add_argument("--base", default="base", help="the base model's name")
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    options = parser.parse_args()
    warm_up(options.url, [options.mix], key=options.key, base=options.base)
    result = run_mix(
        options.url, options.mix, key=options.key, loops=options.loops,
        concurrency=options.concurrency, base=options.base, workload=options.workload,
    )  # fmt: skip
    print(json.dumps({"mix": options.mix, "loops": options.loops, **result.as_dict()}))


if __name__ == "__main__":
    main()
