"""How long the scheduler thinks about a step, by how much waits: `python -m benchmarks.scheduler`.

256 seats stay taken; 100 to 100,000 requests wait, of 200 tenants and 1,000 adapters over 64 slots.
No model: every row draws a token at once, and adapters load within a step. What ends is replaced,
so that the number of those that wait stays the same. Times are of this process's CPU.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence

from engine.config import SchedulerConfig
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SampledRow, SampledToken, ScheduledBatch, StepResult
from engine.scheduling.scheduler import Scheduler

NUM_SEATS, NUM_SLOTS, NUM_ADAPTERS, NUM_TENANTS = 256, 64, 1000, 200
VOCAB_SIZE = 1000
DRAWN = SampledRow((SampledToken(7),))


class Load:
    """A scheduler with so many requests waiting, stepped by hand."""

    def __init__(self, num_waiting: int, *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._num_waiting = num_waiting
        self._num_requests = 0
        self.now = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_kv_blocks=NUM_SEATS * 16,
                max_num_seqs=NUM_SEATS,
                max_num_batched_tokens=1024,
                max_loras=NUM_SLOTS,
                max_queue_len=2 * num_waiting + NUM_SEATS,
            ),
            eos_token_ids=[0],
            vocab_size=VOCAB_SIZE,
            clock=lambda: self.now,
        )

    def refill(self) -> None:
        """Queue requests until the seats and the line are full."""
        scheduler = self.scheduler
        stats = scheduler.stats()
        for _ in range(NUM_SEATS + self._num_waiting - stats.running - stats.waiting):
            self._num_requests += 1
            request = self._request(self._num_requests)
            scheduler.add("client", request)
            if request.adapter is not None and scheduler.needs_fetch(request.adapter):
                scheduler.adapter_fetched(request.adapter)

    def commit(self, batch: ScheduledBatch) -> None:
        """Answer a batch."""
        self.now += 0.01
        for load in batch.loads:
            self.scheduler.adapter_installed(load.digest)
        rows = [None if row.sampling is None else DRAWN for row in batch.rows]
        self.scheduler.commit(StepResult(rows))
        self.scheduler.take_outputs()
        self.scheduler.take_adapter_notices()

    def _request(self, number: int) -> EngineRequest:
        adapter = self._random.randrange(NUM_ADAPTERS)
        prompt = [self._random.randrange(1, VOCAB_SIZE) for _ in range(self._random.randint(8, 64))]
        return EngineRequest(
            request_id=number,
            tenant=f"tenant-{adapter % NUM_TENANTS}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=self._random.randint(16, 128), seed=number),
            adapter=f"adapter-{adapter}",
        )


def measure(num_waiting: int, *, num_steps: int, num_warm_up_steps: int = 200) -> list[float]:
    """Seconds of each `schedule()`."""
    load = Load(num_waiting)
    seconds: list[float] = []
    for step in range(num_warm_up_steps + num_steps):
        load.refill()
        begin = time.process_time_ns()
        batch = load.scheduler.schedule()
        elapsed = time.process_time_ns() - begin
        if step >= num_warm_up_steps:
            seconds.append(elapsed / 1e9)
        load.commit(batch)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps to time for each row")
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    options = parser.parse_args(arguments)
    print(f"{NUM_SEATS} running, {NUM_ADAPTERS} adapters, {NUM_TENANTS} tenants, {NUM_SLOTS} slots")
    print(f"{'waiting':>8} {'median µs':>10} {'p99 µs':>10}")
    gc.disable()  # a pause for all that waits would land on a step at random
    for num_waiting in options.waiting:
        seconds = sorted(measure(num_waiting, num_steps=options.steps))
        p99 = seconds[int(0.99 * len(seconds))]
        print(f"{num_waiting:>8,} {statistics.median(seconds) * 1e6:>10,.0f} {p99 * 1e6:>10,.0f}")


if __name__ == "__main__":
    main()
