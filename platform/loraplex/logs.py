"""Structured logs that carry no prompt, no reply, no key and no header.

Litestar's own logging middleware is left out: it logs one line for each SSE chunk. Tracebacks come
without local variables, since those hold prompts and keys.
"""

import logging
import sys
from typing import Any, cast

import structlog
from litestar.logging.config import LoggingConfig, StructLoggingConfig
from litestar.plugins.structlog import StructlogConfig, StructlogPlugin
from litestar.types import Message, Scope
from structlog.typing import EventDict

from engine.logs import line_renderer, time_stamp
from loraplex.request_id import request_id

_log = structlog.get_logger("loraplex.access")
_QUIET = "/health"
_TEXTS = frozenset(("exc_value", "exc_notes", "syntax_error"))


def structlog_plugin() -> StructlogPlugin:
    """Return the logging set-up of an API process: one JSON object a line, or for a terminal lines
    for people."""
    out = sys.stdout
    names = [_name_process] if out.isatty() else []
    return StructlogPlugin(
        StructlogConfig(
            structlog_logging_config=StructLoggingConfig(
                processors=[
                    structlog.contextvars.merge_contextvars,
                    structlog.processors.add_log_level,
                    *names,
                    time_stamp(out),
                    structlog.processors.ExceptionRenderer(
                        structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
                    ),
                    without_exception_texts,
                    *line_renderer(out),
                ],
                logger_factory=structlog.PrintLoggerFactory(),
                wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
                log_exceptions="never",
                standard_lib_logging_config=LoggingConfig(
                    root={"level": "WARNING", "handlers": ["queue_listener"]},
                    log_exceptions="never",
                ),
            ),
            enable_middleware_logging=False,
        )
    )


def without_exception_texts(_: object, __: str, event: EventDict) -> EventDict:
    """Processor that leaves of rendered exceptions the types and frames: texts may quote values."""
    if "exception" in event:
        event["exception"] = _without_texts(event["exception"])
    return event


def _name_process(_: object, __: str, event: EventDict) -> EventDict:
    """Among the lines of the engine and the supervisor; JSON tells them by their stream."""
    return {"process": "api", **event}


def _without_texts(rendered: Any) -> Any:
    if isinstance(rendered, dict):
        parts = cast(dict[str, Any], rendered)
        return {key: _without_texts(part) for key, part in parts.items() if key not in _TEXTS}
    if isinstance(rendered, list | tuple):
        return [_without_texts(part) for part in cast(list[Any], rendered)]
    return rendered


async def log_access(message: Message, scope: Scope) -> None:
    """Litestar `before_send` hook: one line when a reply starts."""
    if message["type"] != "http.response.start" or scope["type"] != "http":
        return
    if scope["path"].startswith(_QUIET):  # asked every second; the engine's log says why it is not
        return
    _log.info(
        "request",
        method=scope["method"],
        path=scope["path"],
        status=message["status"],
        request_id=request_id(scope),
    )


def log_unexpected(scope: Scope, error: Exception) -> None:
    """Log an exception that nobody foresaw, with its traceback and without any value."""
    _log.error(
        "unexpected_error",
        path=scope["path"],
        request_id=request_id(scope),
        exc_info=error,
    )
