"""What the engine's journal costs a step, without a model: CPU time of the step loop, paired."""

import gc
import time
from collections.abc import Sequence

from engine.adapters.source import AdapterEvent, AdapterReady
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SampledRow, SampledToken, ScheduledBatch, StepResult
from engine.telemetry.journal import Journal

SEQUENCES, ADAPTERS, MAX_TOKENS = 32, 8, 64
_DRAWN = SampledRow((SampledToken(7),))


class _Runner:
    def execute(self, batch: ScheduledBatch) -> StepResult:
        return StepResult([None if row.sampling is None else _DRAWN for row in batch.rows])

    def install_adapter(self, slot: int, weights: object) -> None:
        pass

    def clear_slot(self, slot: int) -> None:
        pass


class _Adapters:
    def __init__(self) -> None:
        self._events: list[AdapterEvent] = []

    def prefetch(self, digest: str) -> None:
        self._events.append(AdapterReady(digest, 0.001))

    def poll(self) -> Sequence[AdapterEvent]:
        events, self._events = self._events, []
        return events

    def hasten(self, digest: str) -> None:
        pass

    def get(self, digest: str) -> str:
        return digest

    def release(self, digest: str) -> None:
        pass

    def forget(self, digest: str) -> None:
        pass


class _Engine:
    """32 sequences of 8 adapters that decode; what ends is replaced, as `mix8` does."""

    def __init__(self, journal: Journal | None) -> None:
        config = SchedulerConfig(
            num_kv_blocks=1024, max_num_seqs=SEQUENCES, max_num_batched_tokens=256,
            max_loras=ADAPTERS, enable_prefix_cache=False,
        )  # fmt: skip
        self._core = EngineCore(
            config, _Runner(), _Adapters(), eos_token_ids=[0], vocab_size=1000,
            clock=time.monotonic, journal=journal,
        )  # fmt: skip
        self._number = 0
        for _ in range(SEQUENCES):
            self._add()
        self.seconds_per_token(200)

    def seconds_per_token(self, num_steps: int) -> float:
        """CPU seconds of this thread for a token, over so many steps."""
        num_tokens, began = 0, time.thread_time()
        for _ in range(num_steps):
            for _, output in self._core.step():
                num_tokens += len(output.deltas)
                if output.finished:
                    self._add()
        return (time.thread_time() - began) / num_tokens

    def _add(self) -> None:
        self._number += 1
        name = self._number % ADAPTERS
        self._core.add(
            "client",
            EngineRequest(
                request_id=self._number, tenant="bench", prompt_token_ids=[1] * 64,
                sampling=SamplingParams(max_tokens=MAX_TOKENS, seed=0, ignore_eos=True),
                adapter=f"{name:064x}", label=f"a{name:02}@1", call=f"cmpl-{self._number:032x}",
            ),
        )  # fmt: skip


def recording_seconds_per_token(rounds: int = 30, steps: int = 200) -> list[float]:
    """What recording adds to a token's CPU time: one difference a round, in seconds."""
    plain, recorded = _Engine(None), _Engine(Journal())
    gc.collect()
    gc.freeze()
    differences: list[float] = []
    for number in range(rounds):
        pair = [plain, recorded] if number % 2 else [recorded, plain]
        taken = {engine: engine.seconds_per_token(steps) for engine in pair}
        differences.append(taken[recorded] - taken[plain])
    gc.unfreeze()
    return differences
