"""The engine in the caller's own process and event loop: for tests."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Self

import structlog

from engine.adapters.fetcher import AdapterFetcher
from engine.client import FetchAdapter, OnJoin, OnOrphans
from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from engine.errors import AdapterUnavailable, EngineUnavailable
from engine.messages import AbortReason, EndCalls, EngineRequest, FetchFailed, Have
from engine.parts import EngineParts
from engine.telemetry.records import Cursor, GetTelemetry, Telemetry
from engine.transport.open_requests import OpenRequests
from engine.transport.request_stream import RequestStream

CLIENT = b"inline"
GENERATION = 1


async def _no_fetch(digest: str) -> None:
    raise AdapterUnavailable(digest, "this client fetches no adapters")


class InlineEngineClient:
    """`engine.client.EngineClient` around an engine, without sockets.

    `async with InlineEngineClient(parts) as client: ...`; leaving closes the parts. Steps run on
    the event loop one at a time, or with `threaded` on a worker thread. Everything else that
    touches the core happens between two steps.
    """

    def __init__(
        self, parts: EngineParts, fetch: FetchAdapter = _no_fetch, *, threaded: bool = False
    ) -> None:
        self._parts = parts
        self._fetch = fetch
        self._threaded = threaded
        self._request_ids = itertools.count(1)
        self._requests = OpenRequests()
        self._inbox: list[Callable[[], None]] = []
        """Actions on the core, to be done once no step is running."""
        self._work = asyncio.Event()
        self._error: BaseException | None = None
        self._is_draining = False
        self._is_closing = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._fetcher = AdapterFetcher(self._fetch, self._on_fetched)
        loop.add_reader(self._parts.wake.fileno(), self._work.set)
        self._pump = loop.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_closing = True
        self._work.set()
        await self._pump  # not cancelled: a step on a thread must have ended before its parts go
        asyncio.get_running_loop().remove_reader(self._parts.wake.fileno())
        await self._fetcher.close()
        self._requests.fail_all("the engine was closed")
        self._parts.close()

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        return self._error is None and not self._is_draining

    @property
    def is_warming(self) -> bool:
        """Whether the engine still loads what it starts with."""
        return self._parts.residency.is_warming

    @property
    def info(self) -> EngineInfo:
        """The engine's limits."""
        return self._parts.info

    def next_request_id(self) -> int:
        """A number that was not used before."""
        return next(self._request_ids)

    async def generate(self, request: EngineRequest) -> RequestStream:
        """Queue a request, then iterate over its outputs; see `EngineClient`."""
        self._check_ready()
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        stream = self._requests.open(request.request_id)
        try:
            await self._between_steps(lambda: self._parts.core.add(CLIENT, request))
        except BaseException:
            self.abort(request.request_id)
            raise
        stream.accept()
        return stream

    def abort(
        self, request_id: int, reason: AbortReason = "abort", num_tokens: int | None = None
    ) -> None:
        """Forget a request; harmless if it is unknown or over. See `EngineClient`."""
        self._requests.end(request_id)
        self._post(lambda: self._parts.core.abort(CLIENT, request_id, reason, num_tokens))

    def settle(self, calls: Sequence[str]) -> None:
        """Nothing to do: this engine keeps no usage, since it dies with its only client."""

    def on_orphans(self, told: OnOrphans) -> None:
        """Nothing to do: there are no other clients."""

    def end_calls(self, order: EndCalls) -> None:
        """End requests of a tenant; see `EndCalls`."""
        self._post(lambda: self._parts.core.end_calls(order))

    def forget(self, tenant: str, adapter: str | None = None) -> None:
        """An adapter, or a whole tenant, was deleted; see `EngineClient`."""
        self._post(lambda: self._parts.journal.forget(tenant, adapter))

    def note_refusal(self, tenant: str, adapter: str | None, code: str) -> None:
        """The service refused a request; see `EngineClient`."""
        self._post(lambda: self._parts.journal.note_refusals(tenant, adapter, code, 1))

    def unload(self, digest: str) -> None:
        """Drop an adapter that no live version names any more."""
        self._post(lambda: self._parts.core.unload(digest))

    def set_residency(
        self, pinned: Sequence[str], warm: Sequence[str], recent: Sequence[str] = ()
    ) -> None:
        """Say which adapters are pinned and warm."""
        self._post(lambda: self._parts.residency.set(pinned, warm, recent))

    def on_join(self, joined: OnJoin) -> None:
        """Call at once: this engine is always there."""
        joined(self._parts.host.recent)

    async def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        if self._error is not None:
            raise EngineUnavailable("the engine failed")
        answer: list[EngineStats] = []
        await self._between_steps(lambda: answer.append(self._parts.stats()))
        return answer[0]

    async def telemetry(
        self, cursor: Cursor | None = None, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        """Records since a cursor; see `EngineClient`."""
        if self._error is not None:
            raise EngineUnavailable("the engine failed")
        question = GetTelemetry(cursor=cursor or Cursor(), limit=limit, with_totals=with_totals)
        answer: list[Telemetry] = []
        await self._between_steps(
            lambda: answer.append(self._parts.journal.telemetry(question, GENERATION))
        )
        return answer[0]

    async def drain(self) -> None:
        """Stop taking requests; those queued or running go on."""
        self._is_draining = True

    def _check_ready(self) -> None:
        if self._error is not None:
            raise EngineUnavailable("the engine failed") from self._error
        if self._is_draining:
            raise EngineUnavailable("the engine is shutting down")

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._work.set()

    async def _between_steps(self, action: Callable[[], None]) -> None:
        """Run an action once no step is running, and raise here what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if done.done():
                return  # cancelled meanwhile
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._post(run)
        await done

    def _on_fetched(self, answer: Have | FetchFailed) -> None:
        host, desk = self._parts.host, self._parts.desk

        def tell() -> None:
            desk.close(answer.digest)
            if isinstance(answer, Have):
                host.have(answer.digest)
            else:
                host.fetch_failed(answer.digest, answer.reason)

        self._post(tell)

    async def _run(self) -> None:
        core, wake = self._parts.core, self._parts.wake
        try:
            while not self._is_closing:
                self._work.clear()
                inbox, self._inbox = self._inbox, []
                for action in inbox:
                    action()
                if wake.clear() or core.has_work:
                    outputs = await asyncio.to_thread(core.step) if self._threaded else core.step()
                    self._requests.push(output for _, output in outputs)
                for _, digest in self._parts.desk.assign([CLIENT]):
                    self._fetcher.start(digest)
                if core.has_work:
                    await asyncio.sleep(0)
                else:
                    await self._work.wait()
        except Exception as error:
            structlog.get_logger("engine.inline").exception("engine_failed")
            self._error = error
            self._requests.fail_all("the engine failed")
