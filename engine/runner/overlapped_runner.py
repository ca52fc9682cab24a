"""Runs the steps of any runner on a thread, so that the next one is planned meanwhile."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from engine.runner.protocol import Runner, Transfer
from engine.scheduled_batch import SampledRow, ScheduledBatch, ScheduledRow, StepResult


class OverlappedRunner:
    """An `OverlappingRunner` made of a plain one; steps run in the order of their launches.

    What a step draws is handed to the step behind it on that thread.
    """

    def __init__(self, runner: Runner, *, threads: int = 0) -> None:
        """`threads`: of a forward pass; 0 keeps PyTorch's setting."""
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "step", initializer=_use_threads, initargs=(threads,))
        self._drawn: Sequence[SampledRow | None] = ()
        """What the last step drew, in the order of its rows. Only the thread uses it."""

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
    """The rows of a batch that was planned ahead, with the tokens that the step before drew.

    A row whose draw failed keeps its placeholder: its request has ended, and what is drawn for it
    now will be dropped.
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
