"""The engine's step loop without its process: scheduler, runner and adapters joined.

Single-threaded and free of torch. `engine.process` calls it from the engine's own process,
`engine.inline_client` from a test's event loop.
"""

from collections.abc import Callable, Hashable, Sequence

from engine.adapter_source import AdapterSource, Runner
from engine.config import SchedulerConfig
from engine.messages import EngineRequest, EngineStats, RequestOutput

ClientOutput = tuple[Hashable, RequestOutput]


class EngineCore:
    """Owns the scheduler; knows the runner, the adapter source and the clock only by protocol."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        adapters: AdapterSource,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None: ...

    def add(self, client: Hashable, request: EngineRequest) -> None:
        """Queue a request; raises `RequestRefused`."""
        raise NotImplementedError

    def abort(self, client: Hashable, request_id: int) -> None:
        """End a request; harmless if it is unknown or over. Yields no output."""
        raise NotImplementedError

    def abort_client(self, client: Hashable) -> None:
        """End all requests of a client that is gone."""
        raise NotImplementedError

    def unload(self, digest: str) -> None:
        """Drop an adapter once no sequence wants it."""
        raise NotImplementedError

    def step(self) -> list[ClientOutput]:
        """One iteration, adapter events included; [] if nothing could run."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now: false if all that is left waits for a load."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """A snapshot; `host_adapters` and `host_adapter_bytes` are the source's to fill in."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots, queues and sequences disagree."""
        raise NotImplementedError
