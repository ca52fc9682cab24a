"""Any runner on a thread of its own: the next step is planned while one runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from engine.runner import Runner, Transfer
from engine.scheduled_batch import SampledRow, ScheduledBatch, ScheduledRow, StepResult


class OverlappedRunner:
    """An `OverlappingRunner` over a plain one; steps run in the order of their launches.

    What a step draws reaches the one launched behind it on the runner's thread.
    """

    def __init__(self, runner: Runner, *, threads: int = 0) -> None:
        """`threads` of a forward pass; 0: as PyTorch sets them."""
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "step", initializer=_use_threads, initargs=(threads,))
        self._drawn: Sequence[SampledRow | None] = ()
        """By the last step, in the order of its rows. Belongs to the thread."""

    def launch(self, batch: ScheduledBatch) -> Future[StepResult]:
        """See `OverlappingRunner.launch`."""
        # A request that ends while its row runs empties its block table.
        rows = [row._replace(block_table=tuple(row.block_table)) for row in batch.rows]
        return self._thread.submit(self._run, replace(batch, rows=rows))

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """See `Runner.execute`."""
        return self.launch(batch).result()

    def install_adapter(self, slot: int, weights: Any) -> Transfer | None:
        """See `Runner.install_adapter`; no step runs."""
        return self._runner.install_adapter(slot, weights)

    def clear_slot(self, slot: int) -> None:
        """See `Runner.clear_slot`; no step runs."""
        self._runner.clear_slot(slot)

    def close(self) -> None:
        """Wait for the step that runs, if one does, and stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _run(self, batch: ScheduledBatch) -> StepResult:
        if batch.follows:
            batch = replace(batch, rows=with_drawn_tokens(batch, self._drawn))
        result = self._runner.execute(batch)
        self._drawn = result.rows
        return result


def with_drawn_tokens(
    batch: ScheduledBatch, drawn: Sequence[SampledRow | None]
) -> list[ScheduledRow]:
    """The rows of a batch that was planned ahead, with what the step before drew.

    A row that could not be drawn keeps its placeholder: its request has ended, and whatever is
    drawn for it now is dropped.
    """
    rows = list(batch.rows)
    for index, before in enumerate(batch.follows):
        sampled = drawn[before]
        if sampled is not None and sampled.tokens:
            rows[index] = rows[index]._replace(token_ids=(sampled.tokens[0].token_id,))
    return rows


def _use_threads(threads: int) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)
