"""However a call ends over HTTP, it gives all back in the next step, while another one streams.

Steps are held while a call ends and while its adapter is deleted: a deletion that waited for the
engine would not answer, and a call that nobody ended would be there for ever.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.stepped_service import FAILING, SteppedService, stepped_service

pytestmark = pytest.mark.anyio

CONFIG = {
    "num_kv_blocks": 128, "block_size": 4, "max_model_len": 512, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "max_loras": 2, "max_queued_per_adapter": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """The calls of `acme` for its adapter `legal`, one at a time."""

    bench: SteppedService
    digest: str
    n: int
    stream: bool

    def ask(self, **fields: Any) -> asyncio.Task[httpx.Response]:
        asked = {
            "model": "legal", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True,
            "n": self.n, "stream": self.stream, **fields,
        }  # fmt: skip

        async def post() -> httpx.Response:
            async with self.bench.service.client() as client:
                return await client.post("/v1/completions", json=asked)

        return asyncio.create_task(post())

    async def asked(self, **fields: Any) -> asyncio.Task[httpx.Response]:
        """A call that has been sent to the engine, which is within a step."""
        before = self.bench.num_open
        call = self.ask(**fields)
        await self.bench.until(lambda: self.bench.num_open > before)
        return call

    async def ended(self, call: asyncio.Task[httpx.Response]) -> str | None:
        """Step until the call is over; the code of its error, however that is told."""
        await self.bench.step_until(lambda: self.bench.num_open == 1)
        reply = await call
        if reply.status_code != 200:
            return reply.json()["error"]["code"]
        if not self.stream:
            return None
        *_, last = [line for line in reply.text.splitlines() if line.startswith("data: ")]
        return None if last == "data: [DONE]" else json.loads(last[6:])["error"]["code"]

    async def goes_away(self, call: asyncio.Task[httpx.Response]) -> None:
        """Close the call's connection, and see that the service noticed, within this step."""
        before = len(self.bench.steps.batches)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await self.bench.until(lambda: self.bench.num_open == 1)
        assert len(self.bench.steps.batches) == before

    @property
    def has_output(self) -> bool:
        return any(len(s.token_ids) > s.num_prompt_tokens for s in self.bench.running("acme"))


Ending = Callable[[Subject], Awaitable[str | None]]
"""Makes a call that ends so; returns what its usage row says of it, None if it has none."""


async def length(subject: Subject) -> str | None:
    assert await subject.ended(await subject.asked(max_tokens=3)) is None
    return "length"


async def stop_token(subject: Subject) -> str | None:
    assert await subject.ended(await subject.asked(stop_token_ids=[7])) is None
    return "stop"


async def stop_string(subject: Subject) -> str | None:
    said = subject.bench.service.tokenizer.decode([7])
    call = await subject.asked(stop=said * 3)
    assert await subject.ended(call) is None
    return "stop"


async def failed_row(subject: Subject) -> str | None:
    assert await subject.ended(await subject.asked(prompt=[FAILING])) == "sampling_failed"
    return "error"


async def failed_load(subject: Subject) -> str | None:
    subject.bench.broken.add(subject.digest)
    assert await subject.ended(await subject.asked()) == "adapter_unavailable"
    return "error"


async def refused_after_others_were_queued(subject: Subject) -> str | None:
    call = await subject.asked(prompt=[[5], [6], [7], [8]])
    assert await subject.ended(call) == "adapter_queue_full"
    return None


async def gone_before_it_was_queued(subject: Subject) -> str | None:
    call = await subject.asked()
    call.cancel()
    await subject.bench.step_until(lambda: subject.bench.num_open == 1)
    return "abort"


async def gone_while_queued(subject: Subject) -> str | None:
    bench = subject.bench
    crowd = asyncio.create_task(
        ask_other(bench, n=7, model="base", max_tokens=250)
    )  # takes every seat that is left
    await bench.until(lambda: bench.num_open == 2)
    await bench.step_until(lambda: bench.parts.core.stats().running == 8)
    call = await subject.asked()
    await bench.step(3)
    assert bench.parts.core.stats().waiting > 0 and not bench.running("acme")
    call.cancel()
    await bench.until(lambda: bench.num_open == 2)
    crowd.cancel()
    await asyncio.gather(crowd, return_exceptions=True)
    await bench.until(lambda: bench.num_open == 1)
    return "abort"


async def gone_while_loading(subject: Subject) -> str | None:
    bench = subject.bench
    bench.never.add(subject.digest)
    call = await subject.asked()
    await bench.step(3)
    assert bench.parts.core.stats().waiting > 0
    await subject.goes_away(call)
    return "abort"


async def gone_while_prefilling(subject: Subject) -> str | None:
    bench = subject.bench
    call = await subject.asked(prompt=[5] * 300)
    await bench.step_until(lambda: any(s.is_prefilling for s in bench.running("acme")))
    assert not subject.has_output
    await subject.goes_away(call)
    return "abort"


async def gone_while_decoding(subject: Subject) -> str | None:
    call = await subject.asked()
    await subject.bench.step_until(lambda: subject.has_output)
    await subject.bench.step(5)
    await subject.goes_away(call)
    return "abort"


async def gone_while_preempted(subject: Subject) -> str | None:
    bench = subject.bench
    preemptions = bench.parts.core.stats().preemptions
    call = await subject.asked(prompt=[5] * 400, max_tokens=110)
    await bench.step_until(lambda: bench.parts.core.stats().preemptions > preemptions)
    assert bench.parts.core.stats().waiting > 0 and bench.running("zen")
    await subject.goes_away(call)
    return "abort"


async def ask_other(bench: SteppedService, **fields: Any) -> httpx.Response:
    """A call of the tenant `zen`."""
    asked = {
        "model": "other", "prompt": [1, 2], "max_tokens": 500, "ignore_eos": True,
        "stream": True, **fields,
    }  # fmt: skip
    async with bench.service.client("zen:inference") as client:
        return await client.post("/v1/completions", json=asked)


ENDINGS: list[Ending] = [
    length, stop_token, stop_string, failed_row, failed_load, refused_after_others_were_queued,
    gone_before_it_was_queued, gone_while_queued, gone_while_loading, gone_while_prefilling,
    gone_while_decoding, gone_while_preempted,
]  # fmt: skip


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_ending_gives_all_back_at_once_and_its_adapter_can_be_deleted_meanwhile(
    tmp_path, stream: bool, n: int
):
    async with stepped_service(tmp_path, **CONFIG) as bench:
        other = (await bench.service.upload("other", seed=99, key="zen:tenant"))["digest"]
        num_rows = 0
        for number, ending in enumerate(ENDINGS):
            before = len(bench.steps.batches)
            beside = asyncio.create_task(ask_other(bench))
            await bench.until(lambda before=before: len(bench.steps.batches) > before)
            await bench.step_until(lambda: len(bench.running("zen")) == 1)
            first = len(bench.steps.batches)
            digest = (await bench.service.upload("legal", seed=number))["digest"]

            reason = await ending(Subject(bench, digest, n, stream))
            async with bench.service.client("acme:tenant") as client:
                deleted = await client.delete("/v1/adapters/legal")
            assert deleted.status_code == 204, (ending, deleted.text)
            await bench.step(2)

            stats = bench.parts.core.stats()
            assert (stats.running, stats.waiting, stats.resident) == (1, 0, [other]), ending
            [sequence] = bench.running("zen")
            assert stats.kv_blocks_used == len(sequence.block_table), ending
            assert len(bench.steps.batches[-1].rows) == 1, ending
            num_drawn = len(sequence.token_ids) - sequence.num_prompt_tokens
            assert num_drawn == len(bench.steps.batches) - first, "a token in every step"
            host = bench.parts.host
            assert not host.has(digest) and not host.is_coming(digest), ending

            assert not beside.done(), ending
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
            bench.files_come.set()
            bench.steps.open()
            await bench.until_idle()
            bench.steps.hold()
            bench.files_come.clear()
            num_rows += reason is not None
            rows = await bench.service.usage(num_rows=num_rows)
            assert len(rows) == num_rows, ending
            assert reason is None or rows[0].finish_reason == reason, ending
        await bench.until(lambda: [f.name for f in bench.cache_dir.iterdir()] == [other])
