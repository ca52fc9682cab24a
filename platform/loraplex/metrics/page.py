"""The metrics page: what the engine tells at this moment, and what this process has counted."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family

from engine.client import EngineClient
from engine.engine_stats import EngineStats
from engine.errors import EngineError
from engine.telemetry.records import Telemetry
from loraplex.metrics import names
from loraplex.metrics.adapter_families import adapter_families
from loraplex.metrics.engine_families import engine_families
from loraplex.metrics.families import gauge
from loraplex.metrics.process_metrics import ProcessMetrics
from loraplex.services import Services


class Page(NamedTuple):
    """A page as it is sent."""

    body: bytes
    content_type: str


class _Told:
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


class MetricsPage:
    """Asks the engine for each page: so all API processes tell the same of it, and lose nothing.

    Pages that are asked for while the engine is being asked share its answer: it gives them between
    two steps, and one that had to give hundreds would run none.
    """

    def __init__(self, services: Services, own: ProcessMetrics) -> None:
        self._services = services
        self._own = own
        self._asking: asyncio.Task[tuple[EngineStats, Telemetry]] | None = None

    async def render(self, accept: str) -> Page:
        """The page, in the format that the `Accept` header asks for.

        While the engine is away there is nothing of it but `loraplex_engine_up 0`.
        """
        told = [*await self._of_engine(self._services.backends.engine), *self._of_process()]
        return await _print([_Told(told), self._own.registry], accept)

    async def render_for(self, tenant: str, accept: str) -> Page:
        """What is a tenant's own of it: its adapters. Raises `EngineUnavailable`."""
        _, told = await self._ask(self._services.backends.engine)
        assert told.totals is not None
        own = [totals for totals in told.totals.adapters if totals.tenant == tenant]
        return await _print([_Told(list(adapter_families(own)))], accept)

    async def _of_engine(self, engine: EngineClient) -> list[Family]:
        try:
            stats, told = await self._ask(engine)
            info = engine.info
        except EngineError:
            return [gauge(names.ENGINE_UP, {(): 0.0})]
        assert told.totals is not None
        families = engine_families(stats, told.totals, info, time.time())
        return [gauge(names.ENGINE_UP, {(): 1.0}), *families]

    async def _ask(self, engine: EngineClient) -> tuple[EngineStats, Telemetry]:
        if self._asking is None or self._asking.done():
            # A task of its own: who asked first may go away, and others go on waiting.
            self._asking = asyncio.create_task(_ask(engine), name="metrics")
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return await asyncio.shield(self._asking)

    def _of_process(self) -> list[Family]:
        is_degraded = self._services.backends.shared_cache.is_degraded
        return [
            gauge(names.DEGRADED, {(): float(is_degraded)}),
            gauge(names.UNWRITTEN_USAGE, {(): self._services.usage.num_pending}),
        ]


async def _ask(engine: EngineClient) -> tuple[EngineStats, Telemetry]:
    return await engine.stats(), await engine.telemetry(limit=1, with_totals=True)


async def _print(collectors: Sequence[_Told | CollectorRegistry], accept: str) -> Page:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    encode, content_type = choose_encoder(accept)
    # Thousands of lines: beside the event loop, so that streams go on meanwhile.
    return Page(await asyncio.to_thread(encode, registry), content_type)
