"""Logs of the engine, the supervisor and the recorder: a JSON object a line on standard error.

No prompts, and no local variables in tracebacks.
"""

import logging
import sys

import structlog


def configure_logs(**fields: object) -> None:
    """Set structlog up for this process; `fields` are part of every line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**fields)
