"""Settings that `loraplex serve` refuses before it starts anything, each by its name."""

import json
from pathlib import Path

import pytest

from loraplex.supervisor.data_dir import DataDir
from loraplex.supervisor.serve_options import (
    ServeError,
    ServeOptions,
    engine_args_of,
    settings_of,
)


def settings(folder: Path, *roots: str):
    options = ServeOptions(model="m", data_dir=folder, adapter_roots=roots)
    return settings_of(options, folder, DataDir(folder), "socket")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LORAPLEX_BLOB_URL", "s3://Not-A-Bucket", "LORAPLEX_BLOB_URL: the blob URL has no form"),
        ("LORAPLEX_REDIS_URL", "http://host", "LORAPLEX_REDIS_URL has no form"),
        ("REDIS_URL", "redis://user:secret@host:port", "LORAPLEX_REDIS_URL has no form"),
        ("LORAPLEX_SOURCES_FILE", "/no/such/file", "LORAPLEX_SOURCES_FILE: /no/such/file"),
        ("LORAPLEX_ADAPTER_ROOTS", "relative", "--adapter-root relative"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ServeError) as caught:
        settings(tmp_path)
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_credential_whose_variable_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "sources.json"
    file.write_text(json.dumps({"credentials": {"hub": {"type": "hub", "token_env": "MY_TOKEN"}}}))
    monkeypatch.setenv("LORAPLEX_SOURCES_FILE", str(file))
    with pytest.raises(ServeError, match="needs the variable MY_TOKEN"):
        settings(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "value")
    assert "value" not in repr(settings(tmp_path))


@pytest.mark.parametrize(("model", "name"), [("org/Name-1B", "Name-1B"), (None, "folder")])
def test_the_base_is_called_after_its_folder_or_its_name_on_the_hub(
    tmp_path: Path, model: str | None, name: str
):
    folder = tmp_path / "folder"
    folder.mkdir()
    options = ServeOptions(model=model or str(folder), data_dir=tmp_path)
    snapshot = tmp_path / ("5" * 40)
    snapshot.mkdir()
    given = settings_of(options, snapshot, DataDir(tmp_path), "socket")
    assert given.engine.model_name == name
    assert engine_args_of(options, snapshot, DataDir(tmp_path), tmp_path).model_name == name


def test_what_is_given_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAPLEX_BLOB_URL", "s3://bucket/prefix?region=eu-west-1")
    monkeypatch.setenv("REDIS_URL", "redis://plain:6379/0")
    given = settings(tmp_path, str(tmp_path))
    assert given.storage.blob_url == "s3://bucket/prefix?region=eu-west-1"
    assert given.storage.redis_url == "redis://plain:6379/0"
    assert given.sources.adapter_roots == (str(tmp_path),)
    monkeypatch.setenv("LORAPLEX_REDIS_URL", "redis://ours:6379/0")
    assert settings(tmp_path).storage.redis_url == "redis://ours:6379/0"


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, "PostgreSQL (LORAPLEX_DATABASE_URL) and Redis (LORAPLEX_REDIS_URL)"),
        ({"REDIS_URL": "redis://plain:6379/0"}, "PostgreSQL (LORAPLEX_DATABASE_URL):"),
        ({"DATABASE_URL": "postgresql://host/name"}, "Redis (LORAPLEX_REDIS_URL):"),
    ],
)
def test_several_api_processes_need_what_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], missing: str
):
    monkeypatch.delenv("REDIS_URL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = ServeOptions(model="m", data_dir=tmp_path, workers=2)
    with pytest.raises(ServeError) as caught:
        settings_of(options, tmp_path, DataDir(tmp_path), "socket")
    assert f"--workers 2 needs {missing}".rstrip(":") in str(caught.value)
    assert ("Redis" in str(caught.value)) == ("Redis" in missing)
    assert ("PostgreSQL" in str(caught.value)) == ("PostgreSQL" in missing)
