"""The step loop of `EngineCore` for `QuickScheduler`: loads instead of batches."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.config import SchedulerConfig
from engine.core import ClientOutput, EngineCore
from engine.simulation.adapters import SimulatedAdapters
from engine.simulation.quick_scheduler import QuickScheduler
from engine.simulation.record import SimulatedRequest
from engine.simulation.rivals import Order
from engine.simulation.runner import SimulatedClock, SimulatedRunner
from engine.simulation.step_time import LoadTime


class QuickCore(EngineCore):
    """Moves the clock by itself; of the runner it uses the slots and the totals."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: SimulatedRunner,
        adapters: SimulatedAdapters,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        clock: SimulatedClock,
        step_time: LoadTime,
        record_of: Callable[[int], SimulatedRequest],
        order: Order = "fair",
    ) -> None:
        options: dict[str, Any] = {
            "eos_token_ids": eos_token_ids, "vocab_size": vocab_size, "clock": clock,
        }  # fmt: skip
        super().__init__(config, runner, adapters, **options)
        self._scheduler = self._quick = QuickScheduler(
            config, record_of=record_of, order=order, **options
        )
        self._totals = runner
        self._clock = clock
        self._step_time = step_time

    def step(self) -> list[ClientOutput]:
        """As `EngineCore.step`."""
        quick = self._quick
        self._take_adapter_events()
        if quick.has_notices:
            self._change_slots(*quick.take_slot_changes())
        plan = quick.plan()
        if quick.has_notices:
            changes = quick.take_slot_changes()
            self._tell_source()
            self._change_slots(*changes)
        if plan.grants or plan.fillers:
            load = quick.step_load()
            self._clock.now += self._step_time.seconds(load)
            self._totals.count(1, load.num_rows)
            quick.commit_fillers(self._clock.now)
        return quick.take_outputs()

    def skip(self, until: float) -> list[ClientOutput] | None:
        """Take all steps at once that begin before `until` and change nothing but tokens; or one
        in which, besides, some of what runs draws its last token.

        None, and no change, if the next step is no such one.
        """
        quick, now = self._quick, self._clock.now
        if now >= until or (steady := quick.steady()) is None:
            return None
        num_steps, load, num_growing, longest = steady
        seconds = self._step_time.seconds
        if not num_steps:
            self._clock.now = now + seconds(load)
            self._totals.count(1, load.num_rows)
            quick.take_last_step(self._clock.now)
            return quick.take_outputs()
        times: list[float] = []
        while len(times) < num_steps and now < until:
            now += seconds(load)
            times.append(now)
            load.next_decode(num_growing, longest + len(times))
        self._clock.now = now
        self._totals.count(len(times), load.num_rows * len(times))
        quick.take_steps(times)
        return []

    def in_use(self) -> tuple[int, int, int]:
        """KV blocks, adapter slots, and sequences that run."""
        return self._quick.in_use()
