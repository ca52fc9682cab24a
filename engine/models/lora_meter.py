"""How long adapters' updates take within a forward pass: measured in some steps, else estimated."""

MEASURE_EVERY = 16
"""Steps. A measured one reads the clock twice for each projection: tens of microseconds."""


class LoraMeter:
    """Shared by a decoder's projections, which add to `seconds` while it `is_on`.

    For other steps it assumes the share of the run that updates had in the last measured step of
    the same kind: steps with prefills, or steps that only decode. On a device it is never on,
    because the host's clock sees only launches.
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
        """The step ended after `run_seconds`; returns how many of them its updates took."""
        if self.is_on:
            self.is_on = False
            self._shares[self._is_prefill] = self.seconds / run_seconds if run_seconds else 0.0
            return self.seconds
        return run_seconds * (self._shares[self._is_prefill] or 0.0)
