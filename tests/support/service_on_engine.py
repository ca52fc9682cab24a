"""The service on the engine's own core: scheduler, adapter host and fetches are real."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from adapter_store.blobs import LocalBlobStore
from engine.config import SchedulerConfig
from engine.transport.inline_client import InlineEngineClient
from loraplex.adapter_cache import fetch_from
from tests.support.scripted_engine import ScriptedRunner, scripted_parts
from tests.support.service import TestService, running_service


@contextlib.asynccontextmanager
async def service_on_engine(
    root: Path,
    runner: ScriptedRunner,
    *,
    threaded: bool = False,
    config: SchedulerConfig | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[TestService, InlineEngineClient, list[str]]]:
    """A service, its engine, and the digests that were fetched; `settings` as `running_service`."""
    config = config or SchedulerConfig(
        num_kv_blocks=256, max_num_seqs=16, max_loras=2, max_model_len=512
    )
    parts = scripted_parts(runner, root / "cache", config=config)
    fetch = fetch_from(LocalBlobStore(root / "blobs"), root / "cache")
    fetched: list[str] = []

    async def counted(digest: str) -> None:
        fetched.append(digest)
        await fetch(digest)

    async with (
        InlineEngineClient(parts, counted, threaded=threaded) as engine,
        running_service(root, engine, **settings) as service,
    ):
        yield service, engine, fetched
