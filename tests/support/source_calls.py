"""Fetch an adapter by reference, as a service would, and what it is to be."""

import os
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import SourceError
from adapter_store.references.reference import parse_reference
from adapter_store.references.sources import AdapterSources, FetchedAdapter

CONFIG, WEIGHTS = b'{"peft_type": "LORA"}', bytes(range(256)) * 8192


async def fetch(
    sources: AdapterSources,
    text: str,
    into: Path,
    *,
    tenant: str = "acme",
    is_admin: bool = False,
    max_bytes: int = 10 << 20,
    seconds: float = 20.0,
    seen: list[tuple[int, int | None]] | None = None,
) -> FetchedAdapter:
    os.makedirs(into, exist_ok=True)
    told = [] if seen is None else seen
    return await sources.fetch(
        parse_reference(text), tenant, into, is_admin=is_admin, max_bytes=max_bytes,
        seconds=seconds, progress=lambda *step: told.append(step),
    )  # fmt: skip


async def refused(sources: AdapterSources, text: str, into: Path, **options: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        await fetch(sources, text, into, **options)
    return caught.value
