"""Copies adapters into slots beside the steps: queued by a thread, run on a side stream.

A step neither waits for a transfer nor queues its copies, of which there are hundreds. Transfers
and clearings happen in the order in which they were requested. Each begins after the steps that
were queued before it, since those may still read the pages that change hands. No step waits for a
transfer on the device either: rows use a slot only after the host has seen the transfer's mark.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.device.device import Device, Mark


class SlotTransfer:
    """An `engine.runner.protocol.Transfer`."""

    def __init__(self, queued: "Future[Mark]") -> None:
        self._queued = queued

    def is_done(self) -> bool:
        """See `Transfer.is_done`."""
        if not self._queued.done():
            return False
        return self._queued.exception() is not None or self._queued.result().is_done()

    def error(self) -> str | None:
        """See `Transfer.error`."""
        error = self._queued.exception()
        return None if error is None else str(error) or type(error).__name__


class AdapterTransfers:
    """Changes slots while steps run."""

    def __init__(
        self,
        device: Device,
        install: Callable[[int, Any], None],
        clear: Callable[[int], None],
    ) -> None:
        """`install` and `clear` run on the thread, and queue copies on the current stream."""
        self._device = device
        self._install = install
        self._clear = clear
        self._thread = ThreadPoolExecutor(1, "adapter-transfer")

    def install(self, slot: int, weights: Any) -> SlotTransfer:
        """Begin to fill a slot, after everything that is queued by now."""
        after = self._device.mark()
        return SlotTransfer(self._thread.submit(self._queue, after, self._install, slot, weights))

    def clear(self, slot: int) -> None:
        """Clear a slot, after everything that is queued by now."""
        self._thread.submit(self._queue, self._device.mark(), self._clear, slot)

    def close(self) -> None:
        """Wait for the copies to be queued, and stop the thread."""
        self._thread.shutdown()

    def _queue(self, after: Mark, change: Callable[..., None], *arguments: Any) -> Mark:
        with self._device.aside(after):
            try:
                change(*arguments)
            except Exception:
                # Give back the pages of a slot that was filled only in part.
                self._clear(arguments[0])
                raise
            return self._device.mark()
