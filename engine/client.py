"""The seam between the service and the engine."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from engine.messages import AbortReason, CallUsage, EndCalls, EngineRequest
from engine.telemetry.records import Cursor, Telemetry
from engine.transport.request_stream import RequestStream

FetchAdapter = Callable[[str], Awaitable[None]]
"""Puts the verified files of a digest into the shared cache folder, or raises."""

OnJoin = Callable[[Sequence[str]], None]
"""Called with all digests on an engine's disk, the last used first."""

OnOrphans = Callable[[Sequence[CallUsage]], None]
"""Called with the calls of a client that is gone, to be written and settled in its place."""


class EngineClient(Protocol):
    """One service process's view of the engine. All methods run on that process's event loop."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine answers now and takes requests."""
        ...

    @property
    def is_warming(self) -> bool:
        """Whether the engine is new and still loads what it starts with; it serves all the same."""
        ...

    @property
    def info(self) -> EngineInfo:
        """The engine's effective limits; raises `EngineUnavailable` before the first welcome."""
        ...

    async def generate(self, request: EngineRequest) -> RequestStream:
        """Queue a request, then read its outputs until `finished`.

        Awaiting returns once the engine has queued it; raises `RequestRefused` or
        `EngineUnavailable`. Reading raises `EngineUnavailable` if the engine is lost midway.
        """
        ...

    def next_request_id(self) -> int:
        """A number that this client has not used before."""
        ...

    def abort(
        self, request_id: int, reason: AbortReason = "abort", num_tokens: int | None = None
    ) -> None:
        """Forget a request; synchronous, so that it works while a task is being cancelled.

        `reason` and `num_tokens`, the output tokens that its client was shown, are only recorded;
        see `engine.messages.Abort`.
        """
        ...

    def settle(self, calls: Sequence[str]) -> None:
        """The usage of these calls is written, or billed to nobody: the engine may forget it."""
        ...

    def on_orphans(self, told: OnOrphans) -> None:
        """Have `told` called with calls that other clients left; at once with those that wait."""
        ...

    def end_calls(self, order: EndCalls) -> None:
        """End requests of a tenant, those of other clients included; see `EndCalls`."""
        ...

    def forget(self, tenant: str, adapter: str | None = None) -> None:
        """An adapter, or a whole tenant, was deleted: its statistics lose its name."""
        ...

    def note_refusal(self, tenant: str, adapter: str | None, code: str) -> None:
        """Count a request that the service refused among the engine's own refusals.

        `adapter` is the adapter's name; None for the base.
        """
        ...

    def unload(self, digest: str) -> None:
        """Drop an adapter that no live version names any more."""
        ...

    def set_residency(
        self, pinned: Sequence[str], warm: Sequence[str], recent: Sequence[str] = ()
    ) -> None:
        """Say which adapters are pinned and warm, all of them; every new engine must be told.

        `recent` lists adapters to read ahead; a new engine uses it the first time it is told.
        """
        ...

    def on_join(self, joined: OnJoin) -> None:
        """Have `joined` called whenever an engine welcomes this client; at once if one has."""
        ...

    async def stats(self) -> EngineStats:
        """A snapshot of the engine; raises `EngineUnavailable`."""
        ...

    async def telemetry(
        self, cursor: Cursor | None = None, *, limit: int = 500, with_totals: bool = False
    ) -> Telemetry:
        """What the engine did since `cursor`, which is that of the last answer.

        None asks for everything it keeps. An answer has at most `limit` records of each kind, and
        with `with_totals` also the sums since the engine's start. Raises `EngineUnavailable`.
        """
        ...

    async def drain(self) -> None:
        """Stop taking requests; those queued or running go on."""
        ...
