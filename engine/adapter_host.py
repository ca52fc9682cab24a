"""Adapters in host memory and on local disk: fetched once, read on threads, evicted when idle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class AdapterHost:
    """The engine's `AdapterSource`."""

    def __init__(
        self,
        cache_dir: Path,
        load: Callable[[str, Path], Any],
        *,
        need: Callable[[str], None],
        max_cpu_loras: int,
        cpu_lora_bytes: int,
        disk_lora_bytes: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None: ...
