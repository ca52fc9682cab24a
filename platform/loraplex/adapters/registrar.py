"""Registrations by reference at work.

They belong to the process and not to the call that began them, so a client may go away. What the
process leaves unfinished its successor marks as failed.
"""

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import structlog

from adapter_store.errors import RegistryUnavailable
from adapter_store.references.reference import Reference
from adapter_store.registry.registrations import (
    INTERRUPTED,
    Outcome,
    RegistrationInfo,
    Registrations,
    State,
)
from loraplex.errors import as_api_error
from loraplex.settings import SourceSettings

_log = structlog.get_logger("loraplex.registrar")

_NOTE_SECONDS = 1.0
_LIFE_SIGN_SECONDS = 10.0
"""After a minute of silence others take this process for dead."""
_SWEEP_SECONDS = 30.0
_WRITE_ATTEMPTS = 10


@dataclass(slots=True)
class RegistrationProgress:
    """How far a registration is."""

    state: State = "queued"
    received_bytes: int = 0
    total_bytes: int | None = None

    def take(self, received_bytes: int, total_bytes: int | None) -> None:
        """Note the bytes that came, and those to come where that is known."""
        self.received_bytes, self.total_bytes = received_bytes, total_bytes


Work = Callable[[RegistrationProgress], Awaitable[Outcome]]
"""Fetches, checks and publishes, and says meanwhile how far it is."""


class Registrar:
    """Runs registrations, `max_parallel_sources` at a time. For one event loop; to be entered.

    A tenant has at most half of those places, so that slow sources of its own hold up no other's.
    """

    def __init__(self, registrations: Registrations, settings: SourceSettings) -> None:
        self._registrations = registrations
        self._settings = settings
        self._places = asyncio.Semaphore(settings.max_parallel_sources)
        self._tenant_places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._running: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def registrations(self) -> Registrations:
        """What is known of them, also of those of other processes."""
        return self._registrations

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        assert self._sweeper is not None
        tasks = [self._sweeper, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(
        self, tenant: str, name: str, reference: Reference, work: Work
    ) -> RegistrationInfo:
        """Take a registration on; raises `TooManyRegistrations`."""
        begun = await self._registrations.create(
            tenant, name, str(reference), max_unfinished=self._settings.max_tenant_registrations
        )
        task = asyncio.create_task(self._run(tenant, begun.registration_id, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return begun

    async def _run(self, tenant: str, registration_id: str, work: Work) -> None:
        progress = RegistrationProgress()
        own_places = self._tenant_places.get(tenant)
        if own_places is None:
            own_places = asyncio.Semaphore(max(1, self._settings.max_parallel_sources // 2))
            self._tenant_places[tenant] = own_places
        try:
            async with self._noted(registration_id, progress), own_places, self._places:
                outcome = await work(progress)
            await _insisting(lambda: self._registrations.succeed(registration_id, outcome))
        except asyncio.CancelledError:
            message = "the service stopped before the adapter was registered; ask again"
            with contextlib.suppress(Exception):  # the next process will say so
                await self._registrations.fail(registration_id, INTERRUPTED, message)
            raise
        except Exception as error:  # whatever it was: who ordered it looks here for why
            answer = as_api_error(error)
            if answer.code == "internal_error":
                _log.error("registration_failed", error=type(error).__name__)
            with contextlib.suppress(RegistryUnavailable):  # failed for its silence then
                await _insisting(
                    lambda: self._registrations.fail(
                        registration_id, answer.code, answer.message, answer.param
                    )
                )

    @contextlib.asynccontextmanager
    async def _noted(
        self, registration_id: str, progress: RegistrationProgress
    ) -> AsyncGenerator[None]:
        """Write down now and then how far it is, which is also the sign that we live."""

        async def note() -> None:
            noted, silent_seconds = replace(progress), 0.0
            while True:
                await asyncio.sleep(_NOTE_SECONDS)
                silent_seconds += _NOTE_SECONDS
                if progress == noted and silent_seconds < _LIFE_SIGN_SECONDS:
                    continue
                noted, silent_seconds = replace(progress), 0.0
                with contextlib.suppress(RegistryUnavailable):
                    await self._registrations.note(
                        registration_id, progress.state, progress.received_bytes,
                        progress.total_bytes,
                    )  # fmt: skip

        noting = asyncio.create_task(note())
        try:
            yield
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)

    async def _sweep(self) -> None:
        is_first = True
        while True:
            with contextlib.suppress(RegistryUnavailable):
                await self._registrations.fail_interrupted(own=is_first)
                is_first = False
                await self._registrations.purge()
            await asyncio.sleep(1.0 if is_first else _SWEEP_SECONDS)


def owner_of(uploads_dir: str) -> str:
    """Who does the work: this process and its successors, which have the same folder."""
    return hashlib.sha256(f"{socket.gethostname()}:{uploads_dir}".encode()).hexdigest()[:32]


async def _insisting(write: Callable[[], Awaitable[None]]) -> None:
    """Write an end, also when the registry is away for some seconds."""
    for _ in range(_WRITE_ATTEMPTS - 1):
        try:
            return await write()
        except RegistryUnavailable:
            await asyncio.sleep(_NOTE_SECONDS)
    return await write()
