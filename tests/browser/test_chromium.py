"""Where the browser comes from, and what is said where there is none."""

from pathlib import Path

import pytest

from tests.support.chromium import INSTALL_COMMAND, NoChromium, find_chromium, from_npm


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


def test_the_named_program_comes_first_then_that_on_the_path_then_playwrights_own(tmp_path: Path):
    named, on_path = program(tmp_path / "named"), program(tmp_path / "bin" / "chromium")
    own = program(tmp_path / "own" / "chrome")
    environment = {"LORAPLEX_CHROMIUM": str(named), "PATH": str(on_path.parent)}
    assert find_chromium(own, environment).program == named
    del environment["LORAPLEX_CHROMIUM"]
    assert find_chromium(own, environment).program == on_path
    assert find_chromium(own, {"PATH": str(tmp_path)}).program == own


def test_a_name_of_no_program_is_told(tmp_path: Path):
    with pytest.raises(NoChromium, match="LORAPLEX_CHROMIUM names no program"):
        find_chromium(tmp_path / "own", {"LORAPLEX_CHROMIUM": f"{tmp_path}/none"})


def test_without_any_the_one_command_is_told(tmp_path: Path):
    with pytest.raises(NoChromium, match=f"Run: {INSTALL_COMMAND}$"):
        from_npm(tmp_path, {"PATH": str(tmp_path)})


def test_what_npm_brought_is_not_fetched_again(tmp_path: Path):
    (tmp_path / "complete").touch()
    found = from_npm(tmp_path, {"PATH": str(tmp_path)})
    assert found.program == tmp_path / "unpacked" / "chromium"
    assert found.variables["FONTCONFIG_PATH"] == str(tmp_path / "unpacked" / "fonts")
