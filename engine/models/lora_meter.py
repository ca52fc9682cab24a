"""How long adapters' updates take within a forward pass: clocked in some steps, told for all."""

MEASURE_EVERY = 16
"""Steps. A clocked one costs two readings of the clock for each projection: tens of
microseconds."""


class LoraMeter:
    """Shared by a decoder's projections, which add to `seconds` while it `is_on`.

    Of a step that is not clocked it tells the share of the run that the last clocked one of its
    kind had: steps with prefills are one kind, those that only decode the other. On a device, where
    a clock on the host sees only launches, it is never on.
    """

    __slots__ = ("_is_prefill", "_num_steps", "_shares", "is_on", "seconds")

    def __init__(self) -> None:
        self.is_on = False
        self.seconds = 0.0
        self._shares: list[float | None] = [None, None]
        self._num_steps = 0
        self._is_prefill = False

    def begin(self, *, is_prefill: bool) -> None:
        """A step with adapters begins."""
        self._num_steps += 1
        self._is_prefill = is_prefill
        is_unknown = self._shares[is_prefill] is None
        self.is_on = is_unknown or self._num_steps % MEASURE_EVERY == 0
        self.seconds = 0.0

    def end(self, run_seconds: float) -> float:
        """It ended, after so many seconds: those of its adapters' updates."""
        if self.is_on:
            self.is_on = False
            self._shares[self._is_prefill] = self.seconds / run_seconds if run_seconds else 0.0
            return self.seconds
        return run_seconds * (self._shares[self._is_prefill] or 0.0)
