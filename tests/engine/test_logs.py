"""Logs are JSON for programs, and lines for people where a terminal shows them."""

import io
import json
import re

import pytest
import structlog

from engine.logs import configure_logs


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _own_set_up(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def logged(monkeypatch, stream: io.StringIO, event: str = "warm", **fields: object) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    configure_logs(process="engine", generation=2)
    structlog.get_logger("engine.core").info(event, **fields)
    return stream.getvalue()


def test_elsewhere_a_line_is_one_json_object_with_the_time_in_utc(monkeypatch):
    line = json.loads(logged(monkeypatch, io.StringIO(), adapters=3))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    assert line == {
        "event": "warm", "level": "info", "process": "engine", "generation": 2, "adapters": 3,
    }  # fmt: skip


def test_in_a_terminal_the_process_the_event_and_the_fields_are_a_line_in_colours(monkeypatch):
    text = logged(monkeypatch, Terminal(), adapters=3)
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[\d*m", "", text)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info\] warm \[engine\] adapters=3 generation=2\n", plain)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert "\x1b" not in logged(monkeypatch, Terminal(), adapters=3)


def test_what_a_client_sent_cannot_steer_the_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = logged(monkeypatch, Terminal(), path="/\x1b[2J\r\n\x9bforged", paths=["\x1b]0;x\x07"])
    assert text.count("\n") == 1 and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "forged" in text


def test_a_traceback_in_a_terminal_has_frames_and_causes_and_no_local_variable(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logs(process="engine")
    prompt = "what nobody may read"
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer\x1b[2J") from error
    except RuntimeError:
        structlog.get_logger("engine.core").exception("step_failed")
    lines = stream.getvalue().splitlines()
    assert "step_failed [engine]" in lines[0]
    assert [line for line in lines if line.startswith(("KeyError", "RuntimeError"))] == [
        "KeyError: 'inner'", r"RuntimeError: outer\x1b[2J",
    ]  # fmt: skip
    assert sum("test_logs.py:" in line for line in lines) == 2
    assert prompt not in stream.getvalue()
