"""What an engine's silence means: it says nothing while a step lasts, and a step may last long."""

_DOUBT_SECONDS = 30.0
_LONGER_THAN_A_HANG = 1.25


def doubt_after(hang_seconds: float) -> float:
    """Seconds after which an engine counts as not ready, whose steps may last `hang_seconds`."""
    return min(_DOUBT_SECONDS, hang_seconds / 2)


def dead_after(hang_seconds: float) -> float:
    """Seconds after which it is given up: its own watch should have ended it by then."""
    return _LONGER_THAN_A_HANG * hang_seconds
