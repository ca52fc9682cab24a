"""An engine in the benchmark's own process: real scheduler, real runner, no sockets, no service.

Adapters are in host memory from the start, so what is timed is the step loop alone.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE, hash_files
from engine.adapters.source import AdapterEvent, AdapterReady
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import EngineRequest, RequestOutput
from engine.runner.build_runner import BuiltRunner
from engine.runner.protocol import Runner
from engine.sampling_params import SamplingParams

CLIENT = "bench"


class ReadyAdapters:
    """An `AdapterSource` that has every adapter already."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        self._events: list[AdapterEvent] = []

    def prefetch(self, digest: str) -> None:
        self._events.append(AdapterReady(digest, 0.0))

    def poll(self) -> Sequence[AdapterEvent]:
        events, self._events = self._events, []
        return events

    def hasten(self, digest: str) -> None:
        pass

    def get(self, digest: str) -> Any | None:
        return self._weights[digest]

    def release(self, digest: str) -> None:
        pass

    def forget(self, digest: str) -> None:
        pass


def read_adapters(built: BuiltRunner, folders: Sequence[Path]) -> dict[str, Any]:
    """Digest -> weights of adapter folders, as the engine holds them."""
    digests = [
        hash_files((folder / CONFIG_FILE).read_bytes(), folder / WEIGHTS_FILE) for folder in folders
    ]
    return {
        digest: built.load_adapter(digest, folder)
        for digest, folder in zip(digests, folders, strict=True)
    }


class EngineLab:
    """One scheduler on a runner that several labs may share, one after the other."""

    def __init__(
        self,
        built: BuiltRunner,
        adapters: Mapping[str, Any],
        *,
        runner: Runner | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        """`settings` are fields of SchedulerConfig; `runner` None is the built one."""
        config = SchedulerConfig(
            num_kv_blocks=built.num_kv_blocks, max_model_len=built.max_model_len
        )
        self.config = dataclasses.replace(config, **settings)
        self.core = EngineCore(
            self.config,
            runner or built.runner,
            ReadyAdapters(adapters),
            eos_token_ids=built.eos_token_ids,
            vocab_size=built.vocab_size,
            clock=clock,
        )
        self._num_requests = 0

    def add(self, prompt: Sequence[int], max_tokens: int, adapter: str | None = None) -> int:
        """Queue a greedy request of an exact output length; returns its number."""
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        request = EngineRequest(
            request_id=self._num_requests,
            tenant="bench",
            prompt_token_ids=list(prompt),
            sampling=sampling,
            adapter=adapter,
        )
        self.core.add(CLIENT, request)
        return self._num_requests

    def step(self) -> list[tuple[Hashable, RequestOutput]]:
        """One iteration of the step loop."""
        return self.core.step()

    def step_until(self, is_reached: Callable[[], bool], limit: int = 100_000) -> int:
        """Step until a condition holds; returns the number of steps."""
        for number in range(limit):
            if is_reached():
                return number
            self.step()
        raise RuntimeError(f"the engine did not get there in {limit} steps")

    def abort_all(self) -> None:
        """End all requests."""
        self.core.abort_client(CLIENT)
        self.core.step()


def random_prompt(vocab_size: int, length: int, *seed: int) -> list[int]:
    """Token ids that depend on the seed's numbers alone; no two seeds share a prefix."""
    return random.Random(repr(seed)).choices(range(vocab_size), k=length)


def num_new_tokens(outputs: Sequence[tuple[Hashable, RequestOutput]]) -> int:
    """Output tokens in a step's messages."""
    return sum(len(delta.token_ids) for _, output in outputs for delta in output.deltas)
