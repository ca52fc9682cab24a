"""Tells the engine which adapters are pinned and warm: the registry knows, the engine forgets."""

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import structlog

from adapter_store.errors import RegistryUnavailable
from adapter_store.registry.records import Residency, ResidencyLimits
from adapter_store.registry.registry import Registry
from engine.client import EngineClient
from engine.engine_info import EngineInfo
from engine.errors import EngineUnavailable
from loraplex.auth import Caller
from loraplex.errors import Forbidden

EVERY_SECONDS = 10.0
"""How long a change by another process, or a failed fetch of the engine's, may go unnoticed."""
RETRY_SECONDS = 0.5
"""Pause after the registry did not answer: a new engine waits to be told."""

_log = structlog.get_logger("loraplex.residency")


class ResidencyKeeper:
    """An async context manager. While it is open a new engine is told at once, and the engine that
    runs again every few seconds.

    A new engine names the adapters that it has found on its disk, which outlives it. Those that no
    version names any more were deleted while no engine ran, and are unloaded.
    """

    def __init__(
        self,
        engine: EngineClient,
        registry: Registry,
        base_fingerprint: str,
        *,
        every_seconds: float = EVERY_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._base_fingerprint = base_fingerprint
        self._every_seconds = every_seconds
        self._retry_seconds = retry_seconds
        self._recent: Sequence[str] | None = None
        """What a new engine has on its disk, until it is told what of it still lives."""
        self._poke = asyncio.Event()
        self._turn = asyncio.Lock()
        """From the registry's answer until the engine is told it: a later answer is told later."""

    async def refresh(self) -> None:
        """Something changed: tell the engine now, or as soon as the registry answers again."""
        try:
            await self._tell()
        except RegistryUnavailable:
            self._poke.set()

    def _on_join(self, recent: Sequence[str]) -> None:
        self._recent = recent
        self._poke.set()

    async def _tell(self) -> None:
        async with self._turn:
            limits = self._adapter_limits()
            found = await self._registry.resident_adapters(self._base_fingerprint, *limits)
            recent = self._recent
            live: list[str] = []
            if recent is not None:
                known = await self._registry.live_digests(recent)
                served = await self._registry.live_digests(recent, *limits)
                live = [digest for digest in recent if digest in served]
                for digest in recent:
                    if digest not in known:
                        self._engine.unload(digest)
                live = live[: self._engine.info.max_cpu_loras]  # more are not read ahead
            self._engine.set_residency(found.pinned, found.warm, live)
            if self._recent is recent:
                self._recent = None

    def _adapter_limits(self) -> tuple[int | None, int | None]:
        """Of rank and full values: what is beyond them the engine would try in vain to read, again
        and again."""
        try:
            info = self._engine.info
        except EngineUnavailable:  # none has joined yet, so nobody is told anything
            return None, None
        return info.max_lora_rank, info.max_full_values

    async def _run(self) -> None:
        pause = self._every_seconds
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), pause)
            self._poke.clear()
            pause = self._every_seconds
            try:
                await self._tell()
            except RegistryUnavailable:
                pause = self._retry_seconds
            except Exception as error:
                # It is told again soon; a keeper that ended would never tell the next engine.
                _log.error("residency_not_told", error=type(error).__name__)

    async def __aenter__(self) -> Self:
        self._engine.on_join(self._on_join)
        self._task = asyncio.create_task(self._run(), name="residency")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def limits_of(info: EngineInfo) -> ResidencyLimits:
    """Return how many adapters an engine can keep; one slot is left to those that are not kept.

    Warm adapters leave as many places in host memory as there are slots.
    """
    return ResidencyLimits(
        base_fingerprint=info.fingerprint,
        max_pinned=max(0, info.max_loras - 1),
        max_warm=max(0, info.max_cpu_loras - info.max_loras),
        max_bytes=info.cpu_lora_bytes,
        max_rank=info.max_lora_rank,
        max_full_values=info.max_full_values,
    )


def check_may_change(caller: Caller, current: Residency, wanted: Residency) -> None:
    """Raise `Forbidden` unless an admin pins and unpins: a slot is taken from all tenants."""
    if "pinned" in (current, wanted) and not caller.is_admin:
        raise Forbidden("admin_required", "pinning and unpinning an adapter needs an admin key")
