"""Check a fresh machine before anything is installed, and name the fix for what is missing.

Run by `make` with the Python that will build the virtual environment, so it must parse on any
Python 3 and needs nothing but the standard library.
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
    if not sys.platform.startswith("linux"):
        found.append(("This is %s; Loraplex runs on Linux." % sys.platform, "Use a Linux machine."))
    if sys.version_info[:2] < MIN_PYTHON:
        found.append(
            (
                "Python %d.%d is too old; 3.11 or newer is needed." % sys.version_info[:2],
                "Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv), then run"
                " `make PYTHON=python3.11 ...`.",
            )
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        version = "%d.%d" % sys.version_info[:2]
        found.append(
            (
                "This Python cannot make a virtual environment (no `ensurepip`).",
                "Debian, Ubuntu: apt install python%s-venv" % version,
            )
        )
    installed = os.path.exists(os.path.join(folder, ".venv", ".installed"))
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES and not installed:
        found.append(
            (
                "Only %.1f GB of disk are free here; 5 GB are needed." % (free / 1e9),
                "Free some space, or clone to a larger disk.",
            )
        )
    memory = _memory_bytes()
    if memory < MIN_MEMORY_BYTES:
        found.append(
            (
                "This machine has %.1f GB of memory; 4 GB are needed." % (memory / 1e9),
                "Use a larger machine, or raise the container's memory limit.",
            )
        )
    return found


def main():
    """Print each problem with its fix; exit 1 if there is any."""
    found = problems(os.getcwd())
    for what, fix in found:
        sys.stderr.write("preflight: %s\n           %s\n" % (what, fix))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
