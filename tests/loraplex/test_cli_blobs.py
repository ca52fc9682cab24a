"""`loraplex blobs sweep` on both kinds of store."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from adapter_store.blob_url import open_blob_store
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from loraplex.cli import main
from tests.support.blobs import CONFIG, adapter_files
from tests.support.registry import FINGERPRINT, upload
from tests.support.s3 import S3Server

pytestmark = pytest.mark.usefixtures("aws_credentials")


@pytest.fixture(params=["local", "s3"])
def blob_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    if request.param == "local":
        return None
    server: S3Server = request.getfixturevalue("s3_server")
    url = f"s3://{server.make_bucket()}?endpoint={server.endpoint}"
    monkeypatch.setenv("LORAPLEX_BLOB_URL", url)
    return url


def run(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--data-dir", str(data)])


def sweep(data: Path, *arguments: str) -> Result:
    return run(data, "blobs", "sweep", "--min-age", "0", *arguments)


async def fill(data: Path, blob_url: str | None) -> tuple[str, str]:
    """A version with its files, and files whose upload died before its row."""
    blobs = open_blob_store(blob_url, data / "blobs")
    registry = Registry(Database(f"sqlite:///{data / 'registry.db'}"))
    await registry.create_tenant("acme")
    live, weights = adapter_files(data, 1)
    orphan, other = adapter_files(data, 2)
    await blobs.put(live, CONFIG, weights)
    await blobs.put(orphan, CONFIG, other)
    await registry.register_version("acme", "a", replace(upload("x"), digest=live), FINGERPRINT)
    await registry.close()
    return live, orphan


def test_a_sweep_tells_and_then_mends_what_crashes_left(tmp_path: Path, blob_url: str | None):
    assert run(tmp_path, "db", "upgrade").exit_code == 0
    live, orphan = asyncio.run(fill(tmp_path, blob_url))
    blobs = open_blob_store(blob_url, tmp_path / "blobs")

    dry = sweep(tmp_path, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert f"orphan {orphan} would be removed" in dry.output
    assert asyncio.run(blobs.list()) == sorted([live, orphan])

    wet = sweep(tmp_path, "--json")
    assert json.loads(wet.output) == {
        "dry_run": False, "orphans": [orphan], "leftovers": 0, "missing": [],
    }  # fmt: skip
    assert asyncio.run(blobs.list()) == [live]

    asyncio.run(blobs.delete(live))
    missing = sweep(tmp_path)
    assert missing.exit_code == 1
    assert f"missing {live}" in missing.output


def test_the_files_of_another_registry_are_left_alone(tmp_path: Path, blob_url: str | None):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, "db", "upgrade").exit_code == 0
    asyncio.run(fill(tmp_path / "one", blob_url))
    if blob_url is None:
        (tmp_path / "one" / "blobs").rename(tmp_path / "two" / "blobs")
    refused = sweep(tmp_path / "two")
    assert refused.exit_code == 1
    assert "another registry" in refused.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "loraplex db upgrade"),
        (("--blob-url", "s3://Nonsense"), "blob URL has no form"),
    ],
)
def test_what_cannot_be_opened_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
):
    refused = sweep(tmp_path, *arguments)
    assert refused.exit_code == 1
    assert expected in refused.output
    assert "Traceback" not in refused.output
