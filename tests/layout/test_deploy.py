"""What is deployed names only what exists: paths, options, variables."""

import configparser
import re
import shlex
from pathlib import Path

from click.testing import CliRunner

from loraplex.cli import main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def _instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def _serve_help() -> str:
    return CliRunner().invoke(main, ["serve", "--help"]).output


def test_the_image_copies_what_is_there_and_every_package_of_the_wheel():
    copied = [
        name
        for word, rest in _instructions()
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    ]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    packages = {"adapter_store", "engine", "lora_kernels", "migrations", "platform"}
    assert packages | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= set(copied)


def test_the_image_runs_as_its_own_user_and_answers_to_sigterm():
    instructions = dict(_instructions())
    assert instructions["USER"] == "loraplex"
    assert instructions["STOPSIGNAL"] == "SIGTERM"
    assert instructions["ENTRYPOINT"] == '["loraplex"]', "a shell would not pass SIGTERM on"


def test_the_image_health_check_asks_a_page_that_needs_no_key():
    assert "/health/live" in dict(_instructions())["HEALTHCHECK"]


def test_the_unit_starts_the_service_with_options_that_it_has():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "loraplex.service")
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[:2] == ["/opt/loraplex/bin/loraplex", "serve"]
    options = [word for word in command if word.startswith("--")]
    assert options and [option for option in options if option not in _serve_help()] == []


def test_the_unit_gives_running_requests_their_time_before_it_kills():
    service = configparser.RawConfigParser(strict=False)
    service.read(DEPLOY / "systemd" / "loraplex.service")
    drain = re.search(r"--drain-seconds.*?default:\s*([\d.]+)", _serve_help(), re.S)
    assert drain is not None
    assert float(service["Service"]["TimeoutStopSec"]) > float(drain[1]) + 10
    assert service["Service"]["KillMode"] == "mixed", "SIGTERM goes to the supervisor alone"
