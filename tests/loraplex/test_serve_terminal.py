"""What `loraplex serve` shows in a terminal: lines for people, the greeting last, and an end."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from loraplex.database import upgrade
from loraplex.settings import EngineSettings, Settings, StorageSettings
from loraplex.supervisor.data_dir import DataDir, write_admin_key
from loraplex.supervisor.registry_start import prepare_registry, show_admin_key
from tests.support.tiny_models import make_tiny_model


class TerminalProcess:
    """A process whose three streams are one pseudo-terminal of 80 columns."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, words: str) -> str:
        """What came until then; all of it where the process ends before it says that."""
        start = len(self.text)
        while words not in self.text[start:]:
            try:
                self.text += os.read(self._ours, 4096).decode().replace("\r\n", "\n")
            except OSError:  # Linux's way to say that nobody holds the other end any more
                break
        return self.text[start:]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        os.close(self._ours)


def test_the_greeting_with_the_key_comes_last_and_ctrl_c_ends_with_a_closing_line(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", "smollm", num_hidden_layers=1)
    data = tmp_path / "data"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    environment |= {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}
    command = [sys.executable, "-m", "loraplex", "serve", "--model", str(model), "--port", "0"]
    terminal = TerminalProcess([*command, "--data-dir", str(data)], environment)
    try:
        start = terminal.read_until("Ctrl-C stops it.")
        terminal.process.send_signal(signal.SIGINT)
        end = terminal.read_until("Stopped.\n")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    logs, _, greeting = start.partition("\nLoraplex serves model at http://127.0.0.1:")
    assert "{" not in start + end
    assert len(re.findall(r"^\d\d:\d\d:\d\d \[info\] ", logs, re.MULTILINE)) >= 4
    assert re.search(r"engine_ready \[engine\]", logs) and "engine_connected [api]" in logs
    lines = greeting.splitlines()
    names = [line.split("  ")[1] for line in lines[1:5]]
    assert names == ["API page", "Dashboard", "Data", "Admin key"]
    assert re.fullmatch(r"  Admin key  lpx_\S+", lines[4]) and str(data) in lines[3]
    assert "lpx_" not in logs + end and not (data / "admin.key").exists()
    assert end.lstrip().startswith("Stopping: ") and " stopping " not in end
    assert end.endswith("\nStopped.\n")


class Screen(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.anyio
async def test_a_start_that_fails_has_used_up_no_key_and_the_next_one_shows_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    data = DataDir(tmp_path)
    storage = StorageSettings(
        database_url=f"sqlite+aiosqlite:///{tmp_path / 'registry.db'}",
        blobs_dir=str(tmp_path / "blobs"), cache_dir=str(tmp_path / "cache"),
        uploads_dir=str(tmp_path / "uploads"), usage_dir=str(tmp_path / "usage"),
    )  # fmt: skip
    engine = EngineSettings(engine_socket=str(tmp_path / "socket"), model_dir=str(tmp_path))
    settings = Settings(storage=storage, engine=engine)
    await upgrade(settings.storage.database_url)
    monkeypatch.setattr(sys, "stdout", Screen())
    await prepare_registry(data, settings, ("base",))  # and then the engine does not come up
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    await prepare_registry(data, settings, ("base",))
    await show_admin_key(data, settings)
    assert re.search(r"Admin key  lpx_\S+\n +shown this once", screen.getvalue())
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    await show_admin_key(data, settings)
    made = "  Admin key  shown when it was made; another: loraplex admin-keys create\n"
    assert screen.getvalue() == made
    registry = Registry(Database(settings.storage.database_url))
    assert await registry.ensure_admin_key() is None
    [key] = await registry.list_keys(None)
    other = await registry.create_key(None, ["admin"])
    await registry.revoke_own_key(key.key_id)
    # The file is named as long as its key works.
    write_admin_key(data, other.plain)
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    await show_admin_key(data, settings)
    assert screen.getvalue() == f"  Admin key  in {data.admin_key_file}\n"
    await registry.revoke_own_key(other.key_id, may_be_last=True)
    await registry.close()
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    await show_admin_key(data, settings)
    assert screen.getvalue() == made
