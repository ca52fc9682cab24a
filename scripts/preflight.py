"""Check a fresh machine before anything is installed, and name the fix for what is missing.

Run by `make` with the Python that will build the virtual environment, so it must parse on an
old Python 3 and needs nothing but the standard library.
"""

import os
import shutil
import sys

MIN_PYTHON = (3, 11)
MIN_DISK_BYTES = 5 * 10**9
MIN_MEMORY_BYTES = 4 * 10**9


def _memory_bytes():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            pass  # no such control group, or "max"
    return total


def problems(folder):
    """Return a (what is wrong, how to mend it) pair for each failed check."""
    found = []
    version = "{}.{}".format(*sys.version_info)
    if not sys.platform.startswith("linux"):
        found.append((f"This is {sys.platform}; Loraplex runs on Linux.", "Use a Linux machine."))
    if sys.version_info[:2] < MIN_PYTHON:
        found.append(
            (
                f"Python {version} is too old; 3.11 or newer is needed.",
                "Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv), then run"
                " `make PYTHON=python3.11 ...`.",
            )
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        found.append(
            (
                "This Python cannot make a virtual environment (no `ensurepip`).",
                f"Debian, Ubuntu: apt install python{version}-venv",
            )
        )
    installed = os.path.exists(os.path.join(folder, ".venv", ".installed"))
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES and not installed:
        found.append(
            (
                f"Only {free / 1e9:.1f} GB of disk are free here; 5 GB are needed.",
                "Free some space, or clone to a larger disk.",
            )
        )
    memory = _memory_bytes()
    if memory < MIN_MEMORY_BYTES:
        found.append(
            (
                f"This machine has {memory / 1e9:.1f} GB of memory; 4 GB are needed.",
                "Use a larger machine, or raise the container's memory limit.",
            )
        )
    return found


def main():
    """Print each problem with its fix; exit 1 if there is any."""
    found = problems(os.getcwd())
    for what, fix in found:
        sys.stderr.write(f"preflight: {what}\n           {fix}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
