"""What one API process counts itself: its replies."""

from prometheus_client import CollectorRegistry, Counter

from loraplex.metrics import names

OTHER = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_MAX_REASONS = 200
"""Reason codes are the service's own and few; no more than these are told apart."""


class ProcessMetrics:
    """Counters in a registry of their own: Prometheus adds processes up, not we."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            names.HTTP_REQUESTS.name, names.HTTP_REQUESTS.help, names.HTTP_REQUESTS.labels,
            registry=self.registry,
        )  # fmt: skip
        self._refusals = Counter(
            names.HTTP_REFUSALS.name, names.HTTP_REFUSALS.help, names.HTTP_REFUSALS.labels,
            registry=self.registry,
        )  # fmt: skip
        self._reasons: set[str] = set()

    def replied(self, method: str, route: str, status: int) -> None:
        """A reply begins; `route` is the template of a path, never the path."""
        if method not in _METHODS:  # a client may call anything a method
            method = OTHER
        self._requests.labels(method, route, str(status)).inc()

    def refused(self, reason: str, status: int) -> None:
        """A reply says why it is no success."""
        if reason not in self._reasons:
            if len(self._reasons) >= _MAX_REASONS:
                reason = OTHER
            self._reasons.add(reason)
        self._refusals.labels(reason, str(status)).inc()
