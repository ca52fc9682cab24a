"""Compile every Triton kernel for sm_80, sm_90 and sm_100, with the Triton installed and with the
oldest one supported, and print what each costs. Exit status 1: a spill or a narrow access.

`make kernels-report` runs it; it needs no GPU. Arguments are the modules to report with, by default
all. The oldest Triton is installed once into the cache
folder, beside and not over the one of the environment.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST = "3.6.0"
MODULES = ("lora_kernels.compile_report", "engine.triton.compile_report")


def cache_folder() -> Path:
    """The folder that `loraplex` keeps its downloads in."""
    if own := os.environ.get("LORAPLEX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraplex"


def ensure_triton(version: str, cache: Path) -> Path:
    """Install a Triton into a folder of its own, whole or not at all; return the folder."""
    folder = cache / f"triton-{version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=cache, prefix="triton-"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command += ["--no-deps", "--target", str(partial), f"triton=={version}"]
    try:
        subprocess.run(command, check=True)  # noqa: S603 (our own arguments)
        partial.rename(folder)
    except (subprocess.CalledProcessError, OSError):
        shutil.rmtree(partial, ignore_errors=True)
        # Another run may have been faster.
        if not folder.is_dir():
            raise
    return folder


def report(module: str, triton_folder: Path | None) -> int:
    """Print one Triton's table; None is the Triton of the environment. Returns the exit status."""
    path = [str(folder) for folder in (triton_folder, ROOT) if folder is not None]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    # The interpreter's kernels cannot be compiled.
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode  # noqa: S603 (as above)


def main(modules: Sequence[str] = MODULES) -> int:
    """Report on both Tritons, whatever the first one's result."""
    folders = (None, ensure_triton(OLDEST, cache_folder()))
    return max(report(module, folder) for folder in folders for module in modules)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or MODULES))
