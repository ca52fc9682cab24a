"""The preflight names what is missing on a machine, and the fix."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "preflight.py"


@pytest.fixture
def preflight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_machine_passes(preflight: ModuleType, tmp_path: Path):
    assert preflight.problems(str(tmp_path)) == []


def test_an_old_python_is_named_with_the_fix(
    preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    [(what, fix)] = preflight.problems(str(tmp_path))
    assert "3.9 is too old" in what
    assert "python3.11" in fix


def test_a_python_without_ensurepip_is_named_with_the_fix(
    preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    [(what, fix)] = preflight.problems(str(tmp_path))
    assert "ensurepip" in what
    assert "-venv" in fix


def test_a_full_disk_is_named_unless_everything_is_installed(
    preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    [(what, _)] = preflight.problems(str(tmp_path))
    assert "1.0 GB" in what
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    assert preflight.problems(str(tmp_path)) == []


def test_little_memory_is_named(
    preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preflight, "_memory_bytes", lambda: 2 * 10**9)
    [(what, _)] = preflight.problems(str(tmp_path))
    assert "2.0 GB of memory" in what
