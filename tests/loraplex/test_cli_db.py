"""`loraplex db` on databases that are fine, and on those that are not."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loraplex.cli import main
from loraplex.supervisor.data_dir import open_data_dir
from tests.support.postgres import PostgresServer


def db(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["db", *arguments])


def test_a_new_data_directory_is_unmigrated_until_it_is_upgraded(tmp_path: Path):
    before = db("check", "--data-dir", str(tmp_path))
    assert before.exit_code == 1
    assert "run: loraplex db upgrade" in before.output
    assert db("upgrade", "--data-dir", str(tmp_path)).exit_code == 0
    after = db("check", "--data-dir", str(tmp_path))
    assert after.exit_code == 0
    assert "at revision" in after.output


def test_the_variable_names_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAPLEX_DATABASE_URL", f"sqlite:///{tmp_path / 'other.db'}")
    assert db("upgrade").exit_code == 0
    assert (tmp_path / "other.db").is_file()


def test_a_data_directory_in_use_is_not_upgraded_under_its_service(tmp_path: Path):
    with open_data_dir(tmp_path):
        refused = db("upgrade", "--data-dir", str(tmp_path))
    assert refused.exit_code == 1
    assert "in use" in refused.output


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mysql://host/name", "'mysql' is not supported"),
        ("postgresql://127.0.0.1:1/name", "does not answer"),
        ("nonsense", "has no form like"),
    ],
)
def test_a_database_that_cannot_be_used_is_one_clear_line(url: str, expected: str):
    for command in ("upgrade", "check"):
        refused = db(command, "--database-url", url)
        assert refused.exit_code == 1
        assert expected in refused.output
        assert refused.output.count("\n") == 1


def test_postgresql_goes_up_and_down_again(postgres: PostgresServer):
    with postgres.database() as url:
        assert "run: loraplex db upgrade" in db("check", "--database-url", url).output
        assert db("upgrade", "--database-url", url).exit_code == 0
        assert db("check", "--database-url", url).exit_code == 0
        assert db("downgrade", "0001", "--database-url", url).exit_code == 1  # not confirmed
        assert db("downgrade", "0001", "--yes", "--database-url", url).exit_code == 0
        before = db("check", "--database-url", url)
        assert (before.exit_code, "revision 0001" in before.output) == (1, True)
        unknown = db("downgrade", "7", "--yes", "--database-url", url)
        assert (unknown.exit_code, "no revision '7'" in unknown.output) == (1, True)
        assert db("downgrade", "base", "--yes", "--database-url", url).exit_code == 0


def test_a_missing_driver_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    refused = db("check", "--database-url", "postgresql://host/name")
    assert refused.exit_code == 1
    assert "pip install 'loraplex[postgres]'" in refused.output


def test_a_damaged_database_is_one_clear_line(tmp_path: Path):
    (tmp_path / "registry.db").write_bytes(b"this is no database" * 100)
    refused = db("check", "--data-dir", str(tmp_path))
    assert refused.exit_code == 1
    assert "does not answer" in refused.output
    assert "Traceback" not in refused.output
