"""`make install` says what it does while it takes its minutes, and nothing when all is there."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = f"""#!/bin/sh
# In place of Python: makes no environment, and notes what pip is asked for.
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  -c*) exec {sys.executable} "$@" ;;
  *"/dev/stdin") cat > asked.txt ;;
esac
"""


def make(folder: Path, target: str) -> list[str]:
    command = ["make", "--no-print-directory", target, "PYTHON=./python"]
    # Not as a part of the make that runs the tests.
    environment = {
        key: os.environ[key] for key in os.environ if not key.startswith(("MAKE", "MFL"))
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_an_install_is_told_step_by_step_and_a_second_one_is_silent(tmp_path: Path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    first = make(tmp_path, "install")
    assert first[0].startswith("Setting up .venv")
    assert [line.split()[:2] for line in first[1:]] == [
        ["the", "virtual"], ["PyTorch", "and"], ["Loraplex", "and"],
    ]  # fmt: skip
    assert max(map(len, first)) <= 80
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (tmp_path / "asked.txt").read_text().splitlines() == project["dependencies"]
    assert make(tmp_path, "install") in ([], ["make: Nothing to be done for 'install'."])
    assert len(make(tmp_path, "dev")) == 1
