"""How long an engine may be silent: it says nothing during a step, and a step may take long."""

_DOUBT_SECONDS = 30.0
_LONGER_THAN_A_HANG = 1.25


def doubt_after(hang_seconds: float) -> float:
    """Seconds of silence after which an engine counts as not ready.

    `hang_seconds`: how long a step may take before the engine ends itself.
    """
    return min(_DOUBT_SECONDS, hang_seconds / 2)


def dead_after(hang_seconds: float) -> float:
    """Seconds of silence after which it is given up; it should have ended itself by then."""
    return _LONGER_THAN_A_HANG * hang_seconds
