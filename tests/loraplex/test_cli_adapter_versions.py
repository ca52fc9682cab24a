"""`loraplex adapters` where versions come and go: what is written is whole, what goes is named."""

import http.server
import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loraplex.cli import main

ZIP = b"PK" + bytes(200_000)
EXPORT = "/v1/adapters/legal/versions/2/export"
CUT_OFF = "/v1/adapters/legal/versions/3/export"


REPLIES: dict[str, Any] = {
    "/v1/adapters?limit=1": {"data": []},
    **{f"/v1/adapters/{name}": {"aliases": {"default": 1}} for name in ("same", "other")},
}


def pushed(declared: str, *, same_name: bool) -> dict[str, Any]:
    match = {"name": "Base", "declared": declared, "same_name": same_name}
    report = {"base_match": match, "warnings": []}
    return {"name": "legal", "version": 1, "digest": "d" * 64, "report": report}


class Handler(http.server.BaseHTTPRequestHandler):
    """Has one version to export, breaks off in another, and says what it was asked to delete."""

    def do_GET(self) -> None:
        if self.path in REPLIES:
            self._reply(REPLIES[self.path])
            return
        if self.path not in (EXPORT, CUT_OFF):
            self._refuse(404, "version_not_found")
            return
        self.send_response(200)
        self.send_header("content-length", str(len(ZIP)))
        self.end_headers()
        self.wfile.write(ZIP if self.path == EXPORT else ZIP[:1000])
        self.close_connection = True

    def do_POST(self) -> None:
        is_other = b"other" in self.rfile.read(int(self.headers["content-length"]))
        self._reply(pushed("org/Other" if is_other else "org/Base", same_name=not is_other))

    def do_DELETE(self) -> None:
        if self.path.endswith("/versions/2"):
            self._refuse(409, "version_in_use")
            return
        self.server.deleted.append(self.path)  # type: ignore[attr-defined]
        self.send_response(204)
        self.end_headers()

    def _reply(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"error": {"message": "no", "code": code}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Generator[tuple[str, list[str]]]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        deleted: list[str] = []
        server.deleted = deleted  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", deleted
        server.shutdown()
        thread.join()


def run(url: str, *arguments: str, answer: str | None = None) -> Result:
    command = ["adapters", *arguments, "--url", url, "--api-key", "lpx_test"]
    return CliRunner().invoke(main, command, input=answer)


def test_an_export_is_written_as_it_came(
    service: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = run(service[0], "export", "legal", "2")
    assert (result.exit_code, result.stdout) == (0, "legal@2 is in legal-2.zip, 200.0 kB\n")
    assert (tmp_path / "legal-2.zip").read_bytes() == ZIP
    assert [path.name for path in tmp_path.iterdir()] == ["legal-2.zip"]


def test_an_export_leaves_a_file_that_is_there_and_no_half_of_one(
    service: tuple[str, list[str]], tmp_path: Path
):
    mine = tmp_path / "mine.zip"
    mine.write_bytes(b"mine")
    for version, out, said in (
        ("2", mine, "is there already"),
        ("3", tmp_path / "cut.zip", "no answer from"),
        ("4", tmp_path / "none.zip", "version_not_found"),
        ("2", tmp_path / "no folder" / "a.zip", "cannot be written: No such file"),
    ):
        result = run(service[0], "export", "legal", version, "--out", str(out))
        assert result.exit_code == 1 and said in result.stderr, said
    assert [path.name for path in tmp_path.iterdir()] == ["mine.zip"]
    assert mine.read_bytes() == b"mine"


def test_rm_says_what_goes_and_asks_first(service: tuple[str, list[str]]):
    url, deleted = service
    refused = run(url, "rm", "legal", answer="n\n")
    assert refused.exit_code == 1 and "Remove legal with all its versions?" in refused.stdout
    assert deleted == []
    one = run(url, "rm", "legal", "1", answer="y\n")
    assert one.exit_code == 0 and one.stdout.endswith("Removed legal@1.\n")
    assert run(url, "rm", "legal", "--yes", "--abort").exit_code == 0
    assert run(url, "unalias", "legal", "canary").stdout == "Removed legal:canary.\n"
    assert deleted == [
        "/v1/adapters/legal/versions/1",
        "/v1/adapters/legal?abort=true",
        "/v1/adapters/legal/aliases/canary",
    ]
    in_use = run(url, "rm", "legal", "2", "--yes")
    assert in_use.exit_code == 1 and "version_in_use" in in_use.stderr


def test_a_push_says_where_the_config_names_another_base(
    service: tuple[str, list[str]], tmp_path: Path
):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    same = run(service[0], "push", "same", str(tmp_path))
    other = run(service[0], "push", "other", str(tmp_path))
    assert (same.exit_code, other.exit_code) == (0, 0)
    assert "the base" not in same.stderr
    assert "names the base org/Other; this service has Base" in other.stderr
