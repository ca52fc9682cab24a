"""`x-request-timeout` ends a call in whatever state it is, and frees all that it held."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import SchedulerConfig
from engine.parts import EngineParts
from engine.scheduled_batch import ScheduledBatch
from engine.transport.inline_client import InlineEngineClient
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_engine import (
    ScriptedRunner,
    endless,
    put_fake_adapter,
    scripted_parts,
)
from tests.support.service import TestService, running_service
from tests.support.waiting import SECONDS as SECONDS_TO_WAIT
from tests.support.waiting import eventually, until_idle

pytestmark = pytest.mark.anyio

SECONDS = 8.0
"""Of the deadline: shorter than any other limit that a test lets come by."""


@pytest.fixture
async def jump() -> Callable[[], None]:
    """Lets the deadline come: the event loop's clock jumps past it, and never back."""
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, [0.0]
    loop.time = lambda: real() + ahead[0]  # type: ignore[method-assign]

    def past_deadline() -> None:
        ahead[0] += SECONDS + 0.1

    return past_deadline


class Gate:
    """Holds a step at the first batch that `matches`, until it is opened; `before` holds others."""

    def __init__(
        self, matches: Callable[[ScheduledBatch], bool], before: "Gate | None" = None
    ) -> None:
        self.matches = matches
        self.before = before
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, batch: ScheduledBatch) -> None:
        if self.before is not None:
            self.before(batch)
        if not self.reached.is_set() and self.matches(batch):
            self.reached.set()
            assert self.open.wait(SECONDS_TO_WAIT)


class Bench:
    def __init__(
        self, service: TestService, engine: InlineEngineClient, parts: EngineParts,
        runner: ScriptedRunner,
    ) -> None:  # fmt: skip
        self.service, self.engine, self.parts, self.runner = service, engine, parts, runner

    async def ask(self, deadline: float | None = SECONDS, **fields: Any) -> httpx.Response:
        headers = {} if deadline is None else {"x-request-timeout": f"{deadline:g}"}
        asked = {
            "model": "base", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, **fields,
        }  # fmt: skip
        async with self.service.client() as client:
            return await client.post("/v1/completions", json=asked, headers=headers)

    async def until_sent(self, num_requests: int) -> None:
        """Wait until the service has sent so many, which a step that is held keeps waiting."""
        await eventually(lambda: len(self.engine._requests.ids) == num_requests)

    async def until_held(self, num_requests: int) -> None:
        """Wait until the service knows that so many are queued: from then on they have a row.

        The engine has them some turns of the event loop earlier.
        """
        streams = self.engine._requests._streams
        await eventually(
            lambda: sum(s._on_change != s._changed.set for s in streams.values()) == num_requests
        )

    async def until_idle(self) -> None:
        await until_idle(self.engine)
        self.parts.core.check_integrity()
        slots = self.parts.core._scheduler._lifecycle.slots  # pyright: ignore
        assert all(adapter.references == adapter.wanted == 0 for adapter in slots.placed)


@contextlib.asynccontextmanager
async def bench(root: Path, gate: Gate | None = None, **config: Any) -> AsyncIterator[Bench]:
    runner = ScriptedRunner(endless)
    if gate is not None:
        runner.before_step = gate
    limits = {"num_kv_blocks": 64, "max_num_seqs": 4, "max_loras": 2, "max_model_len": 1024}
    parts = scripted_parts(
        runner, root / "cache", config=SchedulerConfig(**{**limits, **config}, block_size=4)
    )

    async def fetch_never(digest: str) -> None:
        await asyncio.Event().wait()

    async with (
        InlineEngineClient(parts, fetch_never, threaded=True) as engine,
        running_service(root, engine) as service,
    ):
        yield Bench(service, engine, parts, runner)


def check_reply(reply: httpx.Response, stream: bool, *, has_tokens: bool = False) -> None:
    # A stream that ends before its head is on its way has a status, too.
    if not stream or (reply.status_code == 504 and not has_tokens):
        assert reply.status_code == 504
        error = reply.json()["error"]
    else:
        assert reply.status_code == 200
        events = [e.removeprefix("data: ") for e in reply.text.split("\n\n") if e[:5] == "data:"]
        assert "[DONE]" not in events
        error = json.loads(events[-1])["error"]
        assert any(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == has_tokens
    assert (error["code"], error["type"]) == ("deadline_exceeded", "server_error")
    assert "8 s" in error["message"]


streamed_or_not = pytest.mark.parametrize("stream", [False, True])
counts = pytest.mark.parametrize("n", [1, 3])


@streamed_or_not
async def test_a_queued_call_ends_and_the_running_one_goes_on(tmp_path, jump, stream):
    begun = Gate(lambda batch: True)
    gate = Gate(lambda batch: batch.rows[0].start >= 20, before=begun)
    async with bench(tmp_path, gate, max_num_seqs=1, num_kv_blocks=256) as b:
        first = asyncio.create_task(b.ask(None, max_tokens=60, prompt=[1]))
        await eventually(begun.reached.is_set)
        late = asyncio.create_task(b.ask(stream=stream))
        await b.until_sent(2)
        begun.open.set()
        await eventually(gate.reached.is_set)
        await b.until_held(2)
        assert b.parts.core.stats().waiting == 1
        jump()
        check_reply(await late, stream)
        gate.open.set()
        reply = await first
        assert reply.json()["usage"]["completion_tokens"] == 60
        await b.until_idle()
        reasons = {row.finish_reason: row for row in await b.service.usage(num_rows=2)}
        assert set(reasons) == {"length", "timeout"}
        assert (reasons["timeout"].prompt_tokens, reasons["timeout"].output_tokens) == (3, 0)


@streamed_or_not
async def test_a_call_whose_adapter_never_comes_ends(tmp_path, jump, stream):
    async with bench(tmp_path) as b:
        await b.service.upload("legal")
        late = asyncio.create_task(b.ask(stream=stream, model="legal"))
        await b.until_held(1)
        assert (await b.engine.stats()).waiting == 1
        jump()
        check_reply(await late, stream)
        await b.until_idle()
        (row,) = await b.service.usage()
        assert (row.finish_reason, row.adapter) == ("timeout", "legal")


@counts
@streamed_or_not
async def test_a_call_ends_in_the_middle_of_its_prefill(tmp_path, jump, stream, n):
    gate = Gate(lambda batch: bool(batch.rows) and batch.rows[0].start >= 32)
    async with bench(tmp_path, gate, max_num_batched_tokens=16) as b:
        digest = (await b.service.upload("legal"))["digest"]
        put_fake_adapter(tmp_path / "cache", digest)
        late = asyncio.create_task(b.ask(stream=stream, model="legal", prompt=[5] * 100, n=n))
        await eventually(gate.reached.is_set)
        jump()
        check_reply(await late, stream)  # though a step is under way
        num_steps = b.runner.num_steps
        gate.open.set()
        await b.until_idle()
        assert b.runner.num_steps == num_steps, "not one more step"
        (row,) = await b.service.usage()
        assert (row.finish_reason, row.output_tokens) == ("timeout", 0)


@counts
@streamed_or_not
async def test_a_call_ends_while_it_decodes_and_its_tokens_are_counted(tmp_path, jump, stream, n):
    gate = Gate(lambda batch: bool(batch.rows) and batch.rows[0].start >= 20)
    async with bench(tmp_path, gate, num_kv_blocks=400) as b:
        digest = (await b.service.upload("legal"))["digest"]
        put_fake_adapter(tmp_path / "cache", digest)
        late = asyncio.create_task(b.ask(stream=stream, model="legal", n=n))
        await eventually(gate.reached.is_set)
        jump()
        check_reply(await late, stream, has_tokens=True)
        num_steps = b.runner.num_steps
        gate.open.set()
        await b.until_idle()
        assert b.runner.num_steps == num_steps, "not one more step"
        (row,) = await b.service.usage()
        assert row.finish_reason == "timeout" and row.output_tokens >= 17 * n - n


@streamed_or_not
async def test_a_preempted_call_ends_and_the_other_one_gets_its_blocks(tmp_path, jump, stream):
    begun = Gate(lambda batch: True)
    gate = Gate(lambda batch: bool(batch.preempted), before=begun)
    async with bench(tmp_path, gate, num_kv_blocks=20) as b:
        first = asyncio.create_task(b.ask(None, max_tokens=60))
        await eventually(begun.reached.is_set)
        late = asyncio.create_task(b.ask(stream=stream, max_tokens=70))
        await b.until_sent(2)
        begun.open.set()
        await eventually(gate.reached.is_set)
        assert b.parts.core.stats().preemptions == 1
        jump()
        check_reply(await late, stream, has_tokens=True)
        gate.open.set()
        assert (await first).json()["usage"]["completion_tokens"] == 60
        await b.until_idle()
        assert (await b.service.usage(num_rows=2))[0].finish_reason in ("length", "timeout")


async def test_a_call_that_ends_in_time_is_left_alone_and_its_timer_too(tmp_path, jump):
    async with bench(tmp_path) as b:
        reply = await b.ask(max_tokens=5)
        jump()
        assert reply.json()["usage"]["completion_tokens"] == 5
        assert (await b.ask(max_tokens=5)).status_code == 200
        rows = await b.service.usage(num_rows=2)
        assert [row.finish_reason for row in rows] == ["length", "length"]


class DeafEngine(FakeEngine):
    """Never says that it has queued a request."""

    async def generate(self, request):
        self.requests[request.request_id] = request
        try:
            await asyncio.Event().wait()
        finally:
            self.aborted.append(request.request_id)


async def test_a_call_that_is_not_even_queued_in_time_ends(tmp_path, jump):
    engine = DeafEngine()
    async with running_service(tmp_path, engine) as service, service.client() as client:
        headers = {"x-request-timeout": "8"}
        asked = {"model": "base", "prompt": ["x", "y"]}
        late = asyncio.create_task(client.post("/v1/completions", json=asked, headers=headers))
        await eventually(lambda: len(engine.requests) == 2)
        jump()
        check_reply(await late, stream=False)
        assert sorted(engine.aborted) == sorted(engine.requests)


@pytest.mark.parametrize(
    "value", ["0", "-1", "", "x", "nan", "inf", "1e3", "1_0", "3600.1", "\uff19", "0x10", "1 2"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_header_that_is_no_number_of_seconds_is_refused_by_name(service, path, value):
    async with service.client() as client:
        reply = await client.post(
            path,
            json={"model": "base", "prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            headers={"x-request-timeout": value.encode()},
        )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "x-request-timeout")
    assert error["code"] == "invalid_value" and "3600" in error["message"]
    assert service.engine.requests == {}


@pytest.fixture(scope="module")
async def service(tmp_path_factory) -> AsyncIterator[TestService]:
    async with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running
