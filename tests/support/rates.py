"""A moment that lasts, for rates that are counted in this process."""

from functools import partial
from types import SimpleNamespace

import pytest

AT_A_BEGIN = 1_800_000_000.0
"""When a window of the memory begins."""


@pytest.fixture
def standing_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are counted at one moment: none of them fades, and no minute ends, in between."""
    import limits.aio.storage.memory

    from loraplex.limits import rate_counter, shared_rates

    def clock() -> float:
        return AT_A_BEGIN

    monkeypatch.setattr(limits.aio.storage.memory, "time", SimpleNamespace(time=clock))
    counter = partial(rate_counter.RateCounter, clock=clock)
    monkeypatch.setattr(shared_rates, "RateCounter", counter)
