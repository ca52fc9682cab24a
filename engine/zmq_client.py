"""The service's side of the engine's socket."""

from pathlib import Path

from engine.client import FetchAdapter


class ZmqEngineClient:
    """`engine.client.EngineClient` over ZeroMQ; works under asyncio and uvloop."""

    def __init__(
        self,
        socket_path: Path,
        fetch: FetchAdapter,
        *,
        beat_seconds: float = 0.5,
        dead_after: float = 30.0,
    ) -> None: ...

    async def start(self) -> None:
        """Connect and begin to say hello; returns without waiting for the engine."""

    async def wait_ready(self, timeout: float) -> None:
        """Wait for the engine's welcome; raises `EngineUnavailable`."""

    async def close(self) -> None:
        """End pending requests and let go of the socket."""
