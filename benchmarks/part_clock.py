"""Where a step's time goes: functions of the engine wrapped, each charged with its own time.

A wrapped function that calls another is not charged for it, so the parts add up to the whole.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A function to charge: an attribute of a class or a module."""

    owner: Any
    attribute: str
    part: str | Callable[..., str]
    """The part's name, or what makes it of the call's arguments."""


class PartClock:
    """Nanoseconds by part."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._charged = Counter[str]()
        self._stack: list[str] = []
        self._since = 0

    def take(self) -> dict[str, int]:
        """What was charged since the last call."""
        charged, self._charged = self._charged, Counter[str]()
        return dict(charged)

    @contextlib.contextmanager
    def watching(self, targets: Sequence[Target]) -> Generator[None]:
        """Wrap the targets; raises AttributeError for one that does not exist (any more)."""
        with contextlib.ExitStack() as stack:
            for target in targets:
                function = getattr(target.owner, target.attribute)
                is_own = target.attribute in vars(target.owner)
                setattr(target.owner, target.attribute, self._wrapped(function, target.part))
                if is_own:
                    stack.callback(setattr, target.owner, target.attribute, function)
                else:
                    stack.callback(delattr, target.owner, target.attribute)
            yield

    def _wrapped(
        self, function: Callable[..., Any], part: str | Callable[..., str]
    ) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._enter(part if isinstance(part, str) else part(*args))
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return wrapper

    def _enter(self, part: str) -> None:
        self._charge()
        self._stack.append(part)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = self._clock()
        if self._stack:
            self._charged[self._stack[-1]] += now - self._since
        self._since = now
