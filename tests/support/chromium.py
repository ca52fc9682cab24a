"""Where the tests' browser comes from: a Chromium that is there, else one that npm brings.

Searched in this order: the program that `LORAPLEX_CHROMIUM` names, Chromium on PATH, Playwright's
own, npm's `@sparticuz/chromium` (unpacked into `.cache/chromium`, with the libraries and fonts that
a bare machine lacks).
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
PACKAGE = "@sparticuz/chromium@153.0.0"
INSTALL_COMMAND = "apt-get install -y chromium"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
"""A container's root has no sandbox, and a closed network no use for what a browser tells home."""

# Its own loader unpacks the libraries only where it believes to be on Amazon's Lambda.
_UNPACK = """
import chromium from "@sparticuz/chromium";
console.log(await chromium.executablePath());
"""

_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""


class NoChromium(Exception):
    """The message ends with the one command that brings a Chromium."""


@dataclass(frozen=True, slots=True)
class Chromium:
    program: Path
    variables: Mapping[str, str]
    """Of its environment, beyond ours."""


def find_chromium(own: Path, environment: Mapping[str, str] = os.environ) -> Chromium:
    """Return a Chromium; `own` is where Playwright would have put its own. Raises `NoChromium`."""
    if named := environment.get("LORAPLEX_CHROMIUM"):
        if not os.access(named, os.X_OK):
            raise NoChromium(f"LORAPLEX_CHROMIUM names no program: {named}")
        return Chromium(Path(named), {})
    for name in NAMES:
        if found := shutil.which(name, path=environment.get("PATH", "")):
            return Chromium(Path(found), {})
    if own.exists():
        return Chromium(own, {})
    return from_npm(ROOT / ".cache" / "chromium", environment)


def from_npm(folder: Path, environment: Mapping[str, str] = os.environ) -> Chromium:
    """Return npm's Chromium, fetched into `folder` unless it lies there."""
    unpacked = folder / "unpacked"
    program = unpacked / "chromium"
    variables = {
        "LD_LIBRARY_PATH": str(unpacked / "al2023" / "lib"),
        "FONTCONFIG_PATH": str(unpacked / "fonts"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(unpacked, ignore_errors=True)
            unpacked.mkdir()
            (folder / "unpack.mjs").write_text(_UNPACK)
            _run(
                ["npm", "install", "--prefix", str(folder), "--no-save", "--no-audit", "--no-fund",
                 PACKAGE], folder, environment,
            )  # fmt: skip
            loader = {**environment, "TMPDIR": str(unpacked), "AWS_LAMBDA_JS_RUNTIME": "nodejs22.x"}
            _run(["node", "unpack.mjs"], folder, loader)
            if not program.exists():
                raise NoChromium(f"npm's {PACKAGE} held no browser. Run: {INSTALL_COMMAND}")
            # The package's own names folders of Lambda's, and a page without fonts has no text.
            (unpacked / "fonts" / "fonts.conf").write_text(
                _FONTS.format(fonts=unpacked / "fonts" / "fonts", cache=unpacked / "fonts-cache")
            )
            (folder / "complete").touch()
    return Chromium(program, variables)


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=300
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoChromium(f"no Chromium, and {error}. Run: {INSTALL_COMMAND}") from error
    if done.returncode != 0:
        raise NoChromium(
            f"no Chromium, and `{' '.join(command[:2])}` failed:\n{done.stderr[-800:]}\n"
            f"Run: {INSTALL_COMMAND}"
        )
