"""Exceptions of the engine.

EngineError
├── ConfigError          a setting that can never work; raised at start
├── RequestRefused       a request answered before any work (reason code in `.code`)
├── AdapterUnavailable   the adapter of a request could not be brought to the engine
└── EngineUnavailable    the engine is not there, restarted, or is draining
    └── ClientClosed     this side was closed: the service stops
"""

from engine.scheduling.backpressure import Congestion


class EngineError(Exception):
    """Base of all engine errors."""


class ConfigError(EngineError):
    """A setting, or a combination of settings, that can never work."""


class RequestRefused(EngineError):
    """A request that the engine will not queue.

    `code` is a stable reason code (`context_length_exceeded`, `queue_full`, ...), `param` the
    request field at fault, `limit` the effective limit where there is one, `congestion` the full
    queue if that is the reason.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        limit: int | None = None,
        congestion: Congestion | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.limit = limit
        self.congestion = congestion


class AdapterUnavailable(EngineError):
    """The adapter's files are missing, damaged, or cannot be read."""

    def __init__(self, digest: str, reason: str) -> None:
        super().__init__(f"adapter {digest[:12]} is unavailable: {reason}")
        self.digest = digest
        self.reason = reason


class EngineUnavailable(EngineError):
    """The engine cannot answer now; the request may be sent again."""


class ClientClosed(EngineUnavailable):
    """The engine may be well, but this client of it was closed: its service stops."""
