"""The engine's logs: one line an event on standard error; no prompts, no local variables."""

import logging
import sys
from typing import Literal

import structlog


def configure_logs(log_format: Literal["json", "console"], **fields: object) -> None:
    """Set structlog up for this process; `fields` are part of every line."""
    json = log_format == "json"
    exceptions = (
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        )
        if json
        else structlog.processors.format_exc_info
    )
    renderer = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            exceptions,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**fields)
