"""Logs of every process: a JSON object a line, and in a terminal lines for people.

No prompts, and no local variables in tracebacks.
"""

import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor


def configure_logs(**fields: object) -> None:
    """Set structlog up for this process, on standard error; `fields` are part of every line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            time_stamp(sys.stderr),
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            *line_renderer(sys.stderr),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**fields)


def time_stamp(stream: TextIO) -> Processor:
    """Return the processor that says when: in UTC and whole, in a terminal the time of day."""
    if stream.isatty():
        return structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    return structlog.processors.TimeStamper(fmt="iso", utc=True)


def line_renderer(stream: TextIO) -> list[Processor]:
    """Return the last processors: JSON, or for a terminal structlog's console lines.

    Those are in colours unless `NO_COLOR` is set. What a client sent, such as a path, may stand in
    a line: characters that would steer the terminal are escaped.
    """
    if not stream.isatty():
        return [structlog.processors.JSONRenderer()]
    colors = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    console = structlog.dev.ConsoleRenderer(
        colors=colors, pad_event_to=0, pad_level=False, sort_keys=False,
        exception_formatter=structlog.dev.plain_traceback,
    )  # fmt: skip
    return [_for_people, console]


def _for_people(_: object, __: str, event: EventDict) -> EventDict:
    shown = {key: _escaped(value) for key, value in event.items() if key != "exception"}
    if "process" in shown:
        shown["logger"] = shown.pop("process")  # in brackets, before the other fields
    if "exception" in event:
        shown["exception"] = "\n".join(_traceback_lines(event["exception"]))
    return shown


def _escaped(value: object) -> object:
    """Text without control characters; other values are shown by `repr`, which has none."""
    return value if not isinstance(value, str) or value.isprintable() else ascii(value)[1:-1]


def _traceback_lines(rendered: Any) -> list[str]:
    """The innermost cause first, as `ExceptionDictTransformer` has rendered it."""
    lines: list[str] = []
    for one in reversed(cast(list[dict[str, Any]], rendered)):
        lines += [
            f"  {frame['filename']}:{frame['lineno']} in {frame['name']}"
            for frame in one.get("frames", ())
        ]
        text = one.get("exc_value")  # not there where texts may quote what a client sent
        lines.append(f"{one['exc_type']}: {text}" if text else f"{one['exc_type']}")
    return [str(_escaped(line)) for line in lines]
