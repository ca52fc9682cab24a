"""What `loraplex serve` says when it cannot start: one line that names the fix."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.database import DatabaseNotMigrated, check, newest_revision
from loraplex.supervisor.listeners import open_listener
from loraplex.supervisor.serve_options import ServeError
from loraplex.supervisor.served_model import check_model
from tests.support.postgres import PostgresServer
from tests.support.tiny_models import make_tiny_model


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "smollm", num_hidden_layers=1)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def holding(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


def cut_short(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20_000)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (without("config.json"), "config.json"),
    "no JSON": (holding("config.json", b"{"), "config.json"),
    "JSON of another shape": (holding("config.json", b"[]"), "config.json"),
    "bottomless JSON": (holding("config.json", b"[" * 100_000), "cannot be served"),
    "no weights": (without("model.safetensors"), "model.safetensors"),
    "weights cut short": (cut_short, "the file ends inside the tensor"),
    "no tokenizer": (without("tokenizer.json"), "tokenizer.json"),
    "damaged tokenizer": (holding("tokenizer.json", b"{}"), "tokenizer.json"),
    "damaged tokenizer config": (holding("tokenizer_config.json", b"{"), "tokenizer_config.json"),
    "template that does not compile": (holding("chat_template.jinja", b"{% for %}"), "template"),
    "template in no encoding": (holding("chat_template.jinja", b"\xff\xfe"), "utf-8"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_no_servable_model_is_refused_by_what_is_wrong(
    model_dir: Path, damage: str
):
    do_damage, named = DAMAGES[damage]
    check_model("m", model_dir)
    do_damage(model_dir)
    with pytest.raises(ServeError) as refused:
        check_model("m", model_dir)
    assert str(refused.value).startswith("--model m cannot be served: ")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def serve(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    environment |= settings
    environment["LORAPLEX_ADMIN_KEY"] = "k" * 32  # else a first start says where it wrote one
    return subprocess.run(
        [sys.executable, "-m", "loraplex", "serve", *arguments],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip


def test_a_refused_model_is_one_line_and_no_process_is_started(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    refused = serve("--model", str(tmp_path / "empty"), "--data-dir", str(tmp_path / "data"))
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert line.startswith(f"Error: --model {tmp_path / 'empty'} cannot be served: ")
    assert not (tmp_path / "data").exists()


def test_what_the_engine_refuses_is_one_line_too(model_dir: Path, tmp_path: Path):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    refused = serve("--model", str(model_dir), "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert line.startswith("engine: config.json: model_type 'gpt2'")
    assert refused.stdout == ""


def test_an_address_that_cannot_be_listened_on_is_refused_with_the_option_to_change():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServeError, match=rf"127.0.0.1:{port}: Address already in use; .*--port"
        ):
            open_listener("127.0.0.1", port)
    for host in ("192.0.2.1", "300.1.1.1"):
        with pytest.raises(ServeError, match=r"^cannot listen on \S+: [^()]+; .*--host"):
            open_listener(host, 0)


def test_a_damaged_database_is_refused_with_what_is_wrong_and_what_to_do(
    model_dir: Path, tmp_path: Path
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "registry.db").write_bytes(b"this is no database" * 1000)
    refused = serve("--model", str(model_dir), "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert "file is not a database" in line
    assert "--data-dir" in line


def test_a_server_that_is_not_migrated_is_refused_with_the_command_and_left_alone(
    model_dir: Path, tmp_path: Path, postgres: PostgresServer
):
    arguments = ("--model", str(model_dir), "--data-dir", str(tmp_path / "data"), "--port", "0")
    with postgres.database() as url:
        refused = serve(*arguments, DATABASE_URL=url)
        with pytest.raises(DatabaseNotMigrated, match="has no schema"):
            asyncio.run(check(url))
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert line.endswith("the database has no schema; this release needs "
                         f"{newest_revision()}; run: loraplex db upgrade")  # fmt: skip
