"""What became of each request of a simulation, and the totals of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Literal

from engine.messages import EngineRequest, FinishReason, RequestTiming
from engine.simulation.use import UseMeter

Ending = FinishReason | Literal["refused"]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request. Times are simulated seconds since the start, None until the event happens."""

    request: EngineRequest
    arrival: float
    """When it was sent."""
    queued: float | None = None
    """When the engine took it in, between two steps."""
    first_token: float | None = None
    finished: float | None = None
    finish_reason: Ending | None = None
    """That of the first choice to end; `error` and `refused` come with an `error_code`."""
    error_code: str | None = None
    timing: RequestTiming | None = None
    """As told to the client; None if it was told none."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Summed over all choices."""
    token_times: list[float] = field(default_factory=list[float])
    """Times of the steps that gave it tokens; one entry for a step, however many choices."""

    @property
    def first_admitted(self) -> float | None:
        """When it began to run."""
        if self.first_token is None or self.timing is None:
            return None
        return self.first_token - self.timing.prefill

    @property
    def time_to_first_token(self) -> float | None:
        """From when it was sent."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def queue(self) -> dict[str, float]:
        """Seconds in the queue by cause, waits after preemptions included."""
        return {} if self.timing is None else self.timing.queue

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        times = self.token_times
        return list(map(sub, times[1:], times))


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """A run: its requests in the order of arrival, and totals."""

    requests: Sequence[SimulatedRequest]
    seconds: float
    """When its last request was over."""
    num_steps: int
    num_preemptions: int
    num_rows: int
    """Rows, summed over all steps."""
    num_loads: int
    """Adapters brought to host memory."""
    num_installs: int
    """Adapters put into a slot."""
    use: UseMeter = field(default_factory=UseMeter)
    """Empty unless the simulation is a quick one."""

    @property
    def num_output_tokens(self) -> int:
        """Over all requests."""
        return sum(record.num_output_tokens for record in self.requests)

    def first_token_seconds(self) -> list[float]:
        """Times to first token of all that got one."""
        times = (record.time_to_first_token for record in self.requests)
        return [seconds for seconds in times if seconds is not None]

    def gap_seconds(self) -> list[float]:
        """All gaps between tokens of all requests."""
        return [gap for record in self.requests for gap in record.gaps]

    def queue_seconds_by_adapter(self) -> dict[str | None, dict[str, float]]:
        """Seconds in the queue by adapter and cause."""
        totals: dict[str | None, dict[str, float]] = {}
        for record in self.requests:
            total = totals.setdefault(record.request.adapter, {})
            for cause, seconds in record.queue.items():
                total[cause] = total.get(cause, 0.0) + seconds
        return totals
