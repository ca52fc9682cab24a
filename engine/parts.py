"""An engine put together, with nothing that runs it yet: no thread, no socket."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.adapters.fetch_desk import FetchDesk
from engine.adapters.host import AdapterHost
from engine.adapters.host_memory import HostWeights
from engine.adapters.residency import Residency
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from engine.runner.protocol import Launch, Runner
from engine.telemetry.journal import Journal, JournalConfig
from engine.transport.wake_up import WakeUp


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """How many adapters are kept, and where."""

    cache_dir: Path
    max_cpu_loras: int = 32
    cpu_lora_bytes: int = 2**30
    disk_lora_bytes: int = 20 * 2**30
    warm_up_seconds: float = 0.0
    """How long a new engine may load what it starts with before it says that it is ready."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What `EngineServer` and `InlineEngineClient` run, each in its own way."""

    core: EngineCore
    host: AdapterHost
    desk: FetchDesk
    residency: Residency
    wake: WakeUp
    """Set when an adapter has arrived, so that a step has something to do."""
    info: EngineInfo
    journal: Journal
    """Records of what the engine does, for those who watch."""
    close_runner: Callable[[], None] = lambda: None

    @classmethod
    def assemble(
        cls,
        runner: Runner,
        load_adapter: Callable[[str, Path], HostWeights],
        *,
        config: SchedulerConfig,
        limits: AdapterLimits,
        info: EngineInfo,
        clock: Callable[[], float] = time.monotonic,
        prepare_grammar: Callable[[str, str], None] | None = None,
        telemetry: JournalConfig | None = None,
        launch: Launch | None = None,
        close_runner: Callable[[], None] = lambda: None,
    ) -> "EngineParts":
        """Join runner, adapters and scheduler; `load_adapter` runs on threads.

        `prepare_grammar` and `launch` as in `EngineCore`; `close_runner` stops its threads.
        """
        desk = FetchDesk(clock)
        wake = WakeUp()
        journal = Journal(telemetry, clock=clock)
        host = AdapterHost(
            limits.cache_dir,
            load_adapter,
            need=desk.need,
            max_cpu_loras=limits.max_cpu_loras,
            cpu_lora_bytes=limits.cpu_lora_bytes,
            disk_lora_bytes=limits.disk_lora_bytes,
            wake=wake.set,
            clock=clock,
        )
        core = EngineCore(
            config,
            runner,
            host,
            eos_token_ids=info.eos_token_ids,
            vocab_size=info.vocab_size,
            clock=clock,
            prepare_grammar=prepare_grammar,
            launch=launch,
            journal=journal,
        )
        residency = Residency(
            core,
            host,
            max_pinned=max(0, config.max_loras - 1),
            num_recent=min(limits.max_cpu_loras, 4 * config.max_loras),
            warm_up_seconds=limits.warm_up_seconds,
            clock=clock,
        )
        return cls(core, host, desk, residency, wake, info, journal, close_runner)

    def stats(self) -> EngineStats:
        """A snapshot of the core, the host memory and the residency together."""
        return msgspec.structs.replace(
            self.core.stats(),
            host_adapters=self.host.num_adapters,
            host_adapter_bytes=self.host.num_bytes,
            pinned=list(self.residency.pinned),
            warm=list(self.residency.warm),
            warming=self.residency.is_warming,
        )

    def close(self) -> None:
        """Stop the threads."""
        self.close_runner()
        self.host.close()
        self.wake.close()
