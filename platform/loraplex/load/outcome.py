"""What a client saw of one call."""

from itertools import pairwise

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One call, from when it was due to its end. Times are seconds since the run's start."""

    model: str
    tenant: str
    due: float
    """The intended start: latencies count from here, however late the call was sent."""
    sent: float
    ended: float
    token_times: list[float] = []
    """When events with text arrived."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the usage says; the events with text where there is none."""
    finish_reason: str | None = None
    error: str | None = None
    """Why it has no reply, or only part of one: a reason code, a status, or what broke."""
    queue: dict[str, float] = {}
    """Milliseconds in the queue by cause, where the reply tells."""
    load_ms: float = 0.0

    @property
    def is_served(self) -> bool:
        """Whether it got a whole reply."""
        return self.error is None and bool(self.token_times)

    @property
    def ttft(self) -> float:
        """Seconds to the first token. Only of what `is_served`."""
        return self.token_times[0] - self.due

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        if self.output_tokens < 2:
            return 0.0
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def queue_ms(self) -> float:
        """Over all causes."""
        return sum(self.queue.values())
