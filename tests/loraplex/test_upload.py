"""Uploads on the wire: caps, deadlines, malformed bodies, and flat memory."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.numpy import load, save
from structlog import wrap_logger
from structlog.testing import LogCapture

from adapter_store import disk_space
from loraplex.adapters import controller, upload
from loraplex.adapters.residency import limits_of
from loraplex.adapters.upload import Upload
from loraplex.settings import UploadLimits
from tests.support.fake_engine import FakeEngine, info
from tests.support.service import BASE, TestService, adapter_files, running_service
from tests.support.waiting import SECONDS, eventually

pytestmark = pytest.mark.anyio

BOUNDARY = b"frontier"
HEADERS = {"content-type": "multipart/form-data; boundary=frontier"}


def part(name: bytes, content: bytes, filename: bytes | None = None) -> bytes:
    extra = b"" if filename is None else b'; filename="%b"' % filename
    return b'--%b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
        BOUNDARY,
        name,
        extra,
        content,
    )


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY


def good_parts() -> tuple[bytes, bytes, bytes]:
    config, weights = adapter_files()
    return (
        part(b"name", b"legal"),
        part(b"config", config, b"adapter_config.json"),
        part(b"weights", weights, b"adapter_model.safetensors"),
    )


async def post(client: httpx.AsyncClient, content: bytes | AsyncIterator[bytes]) -> httpx.Response:
    return await client.post("/v1/adapters", content=content, headers=HEADERS)


def files_of_uploads(service: TestService) -> list[str]:
    return [path.name for path in (service.root / "uploads").rglob("*")]


WRONG_PARTS = [
    ([part(b"name", b"\xff\xfe")], "name", "invalid_value"),
    ([part(b"name", b"a"), part(b"name", b"b")], "name", "duplicate_part"),
    ([part(b"config", b"{}"), part(b"config", b"{}")], "config", "duplicate_part"),
    ([part(b"weights", b"", b"a"), part(b"weights", b"", b"b")], "weights", "duplicate_part"),
    ([part(b"weight", b"x")], "weight", "unknown_part"),
    ([part(b"", b"x")], "", "unknown_part"),
    ([part(b"config", b"{}"), part(b"weights", b"x")], "name", "missing_field"),
    ([part(b"name", b"a"), part(b"weights", b"x")], "config", "missing_field"),
    ([part(b"name", b"a"), part(b"config", b"x")], "weights", "missing_field"),
    ([part(b"name", b"a")], "config", "missing_field"),
    (
        [part(b"name", b"a"), part(b"config", b"x"), part(b"archive", b"x")],
        "config",
        "invalid_value",
    ),
    ([*good_parts(), part(b"publish", b"maybe")], "publish", "invalid_value"),
    ([*good_parts(), part(b"publish", b"\xff")], "publish", "invalid_value"),
    ([part(b"name", b"x" * 2000)], "name", "upload_too_large"),
    ([part(b"config", b"x" * (2**20 + 1))], "config", "upload_too_large"),
]


async def test_a_wrong_part_is_named(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for parts, param, code in WRONG_PARTS:
            reply = await post(client, body(*parts))
            error = reply.json()["error"]
            assert 400 <= reply.status_code < 500
            assert (error["param"], error["code"]) == (param, code), parts
        assert await service.blobs.list() == []
        assert files_of_uploads(service) == []


MALFORMED = [
    (b"", HEADERS),
    (b"no boundary at all", HEADERS),
    (b"".join(good_parts()), HEADERS),
    (body(*good_parts())[:200], HEADERS),
    (b"--frontier\r\nno-header\r\n\r\nx\r\n--frontier--\r\n", HEADERS),
    (b"--frontier\r\ncontent-disposition: \xff\xfe\r\n\r\nx\r\n--frontier--\r\n", HEADERS),
    (b"--frontier\r\n" + b"x: y\r\n" * 100 + b"\r\n\r\n", HEADERS),
    (b"--frontier\r\nx: " + b"y" * 100_000, HEADERS),
    (body(*[part(b"weights", b"")] * 1) * 50, HEADERS),
    (b"{}", {"content-type": "application/json"}),
    (b"a=b", {"content-type": "application/x-www-form-urlencoded"}),
    (body(*good_parts()), {"content-type": "multipart/form-data"}),
    (body(*good_parts()), {"content-type": "multipart/form-data; boundary="}),
    (body(*good_parts()), {"content-type": "multipart/form-data; boundary=other"}),
    (body(*good_parts()), {}),
]


async def test_a_malformed_body_is_400(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for content, headers in MALFORMED:
            reply = await client.post("/v1/adapters", content=content, headers=headers)
            assert reply.status_code == 400, (content[:100], headers, reply.text)
            assert reply.json()["error"]["code"]
        assert await service.blobs.list() == []
        assert files_of_uploads(service) == []


async def test_file_names_never_become_paths(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        before = {p for p in tmp_path.parent.rglob("*") if "blobs" not in p.parts}
        for filename in [
            b"../../evil", b"/etc/passwd", b"..\\..\\evil", b"C:\\evil", b"a%00b", b"\xff\xfe",
            b"x" * 4000, b"", b".",
        ]:  # fmt: skip
            config, weights = adapter_files()
            content = body(
                part(b"name", b"legal"), part(b"config", config, filename),
                part(b"weights", weights, filename),
            )  # fmt: skip
            reply = await post(client, content)
            assert reply.status_code in {200, 201, 400}, reply.text
        after = {p for p in tmp_path.parent.rglob("*") if "blobs" not in p.parts}
        assert {p for p in after - before if not p.name.startswith("registry.db")} == set()


async def test_bytes_may_come_in_any_pieces(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        content = b"preamble\r\n" + body(*good_parts()) + b"epilogue"

        async def pieces(size: int) -> AsyncIterator[bytes]:
            for start in range(0, len(content), size):
                yield content[start : start + size]

        for size in (1, 7, 64, 100_000):
            reply = await post(client, pieces(size))
            assert reply.status_code in {200, 201}, reply.text


async def test_over_the_cap_is_413_announced_or_not(tmp_path):
    limits = UploadLimits(max_upload_bytes=100_000)
    async with (
        running_service(tmp_path, uploads=limits) as service,
        service.client("acme:tenant") as client,
    ):

        async def endless() -> AsyncIterator[bytes]:
            yield part(b"name", b"legal") + part(b"weights", b"", b"w")[:-2]
            for _ in range(100):
                yield b"x" * 10_000

        for content in (body(part(b"weights", b"x" * 200_000)), endless()):
            reply = await post(client, content)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "upload_too_large")
        assert files_of_uploads(service) == []


@pytest.mark.parametrize(
    "limits",
    [
        UploadLimits(upload_idle_seconds=0.1),
        UploadLimits(upload_idle_seconds=SECONDS, upload_seconds=0.1),
    ],
)
async def test_a_slow_upload_is_408_and_leaves_nothing(tmp_path, limits):
    async with running_service(tmp_path, uploads=limits) as service:
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        start = part(b"name", b"legal") + part(b"weights", b"x" * 1000, b"w")
        writer.write(
            f"POST /v1/adapters HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n"
            f"authorization: Bearer {service.keys['acme:tenant']}\r\n"
            f"content-type: {HEADERS['content-type']}\r\n\r\n".encode()
            + start
        )
        status = (await asyncio.wait_for(reader.readline(), SECONDS)).split(b" ")[1]
        assert status == b"408"
        writer.close()
        assert files_of_uploads(service) == []


async def test_a_client_that_goes_away_leaves_nothing(tmp_path):
    async with running_service(tmp_path) as service:
        host, port = service.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /v1/adapters HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n"
            f"authorization: Bearer {service.keys['acme:tenant']}\r\n"
            f"content-type: {HEADERS['content-type']}\r\n\r\n".encode()
            + part(b"weights", b"x" * 3_000_000, b"w")
        )
        await eventually(lambda: bool(files_of_uploads(service)))
        writer.close()
        await eventually(lambda: not files_of_uploads(service))


async def test_memory_stays_flat_while_two_large_uploads_come_in_at_once(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        chunk = bytes(1 << 20)
        have_begun = asyncio.Barrier(2)

        async def large() -> AsyncIterator[bytes]:
            yield part(b"name", b"legal") + part(b"config", adapter_files()[0], b"c")
            yield part(b"weights", b"", b"w")[:-2]
            await have_begun.wait()
            for _ in range(48):
                yield chunk
            yield b"\r\n" + body()

        tracemalloc.start()
        try:
            replies = await asyncio.gather(post(client, large()), post(client, large()))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for reply in replies:
            assert reply.status_code == 422  # 48 MiB of zeros are no safetensors file
        assert peak < 16 << 20, f"{peak >> 20} MiB"
        assert files_of_uploads(service) == []


@pytest.mark.parametrize("blocks", [40, 10**9])
async def test_uploads_leave_the_registry_room_on_the_disk(tmp_path, monkeypatch, blocks):
    block = 2**20
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:

        def disk_with(num_free: int) -> None:
            state = SimpleNamespace(f_frsize=block, f_blocks=blocks, f_bavail=num_free)
            monkeypatch.setattr(disk_space.os, "statvfs", lambda folder: state)

        reserve = min(512, blocks // 20)
        disk_with(reserve)
        logs = LogCapture()
        monkeypatch.setattr(upload, "_log", wrap_logger(None, processors=[logs]))
        full = await client.post("/v1/adapters", content=body(*good_parts()), headers=HEADERS)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "upload_storage")
        [told] = logs.entries
        assert (told["event"], told["error"]) == ("upload_not_stored", "No space left on device")
        assert list((tmp_path / "uploads").iterdir()) == []
        disk_with(reserve + 1)
        good = await client.post("/v1/adapters", content=body(*good_parts()), headers=HEADERS)
        assert good.status_code == 201, good.text


async def test_a_service_without_slots_refuses_adapters_and_says_why(tmp_path):
    engine = FakeEngine()
    engine.info = info(max_loras=0)
    config, weights = adapter_files()
    async with running_service(tmp_path, engine) as service, service.client("acme:tenant") as http:
        for reply in (
            await http.post(
                "/v1/adapters",
                data={"name": "legal"},
                files={"config": ("c", config), "weights": ("w", weights)},
            ),
            await http.post("/v1/adapters", json={"name": "legal", "source": "hf://a/b"}),
            await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/x"}),
        ):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (409, "adapters_disabled")
            assert "--max-loras 0" in error["message"]
        assert (await http.get("/v1/adapters")).json()["data"] == []


@pytest.mark.parametrize(
    ("key", "status", "code"),
    [("acme:tenant", 401, "invalid_api_key"), ("admin", 404, "tenant_not_found")],
)
async def test_an_upload_is_not_for_the_next_tenant_of_its_tenants_name(
    tmp_path, monkeypatch, key: str, status: int, code: str
):
    is_known = asyncio.Event()
    receive = controller.receive_upload

    async def noted(*args: Any) -> Upload:
        is_known.set()
        return await receive(*args)

    monkeypatch.setattr(controller, "receive_upload", noted)
    async with running_service(tmp_path) as service, service.client(key) as client:
        whole = body(*good_parts())
        handed_over = asyncio.Event()

        async def content() -> AsyncIterator[bytes]:
            yield whole[:100]
            await is_known.wait()
            await service.registry.delete_tenant("acme", with_usage=True)
            await service.registry.create_tenant("acme")
            handed_over.set()
            yield whole[100:]

        reply = await client.post("/t/acme/v1/adapters", content=content(), headers=HEADERS)
        assert handed_over.is_set()
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert await service.registry.list_adapters("acme") == []
        assert await service.blobs.list() == [] and files_of_uploads(service) == []


async def test_no_name_in_a_file_makes_a_database_fail_for_all(tmp_path, registry_url: str):
    config, weights = adapter_files()
    tensors = {key.replace(".weight", ".\0.weight"): t for key, t in load(weights).items()}
    content = body(
        part(b"name", b"odd"), part(b"config", config, b"c"), part(b"weights", save(tensors), b"w")
    )
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("acme:tenant") as client,
    ):
        reply = await post(client, content)
        assert reply.status_code == 201, reply.text
        assert reply.json()["report"]["nesting"].endswith("lora_A.\\x00.weight")
        await service.upload("plain", key="zen:tenant")
        registry, info = service.registry, service.engine.info
        await registry.set_residency("acme", "odd", "warm", limits_of(info))
        await registry.set_residency("zen", "plain", "warm", limits_of(info))
        kept = await registry.resident_adapters(BASE.fingerprint, 64, 0)
        assert len(kept.warm) == 2
        assert await registry.live_digests(kept.warm, 64, 0) == set(kept.warm)
        service.engine.script = lambda request: [7]
        async with service.client() as caller:
            ask = {"model": "odd", "prompt": "x", "max_tokens": 1}
            assert (await caller.post("/v1/completions", json=ask)).status_code == 200


async def test_a_tenants_many_uploads_and_exports_hold_up_no_others(tmp_path):
    async with running_service(tmp_path) as service:
        services = service.app.state.services
        for tenant in ("acme", "zen"):
            await service.upload("legal", key=f"{tenant}:tenant")
        async with service.client("acme:tenant") as ours, service.client("zen:tenant") as theirs:

            async def export(client: httpx.AsyncClient) -> int:
                return (await client.get("/v1/adapters/legal/versions/1/export")).status_code

            async with services.exports.of("acme"), services.inspections.of("acme"):
                waiting = [asyncio.create_task(export(ours)) for _ in range(8)]
                waiting += [asyncio.create_task(_upload_status(ours)) for _ in range(8)]
                assert await export(theirs) == 200
                assert await _upload_status(theirs) == 200
                assert not any(task.done() for task in waiting)
            assert await asyncio.gather(*waiting) == [200] * 16


async def _upload_status(client: httpx.AsyncClient) -> int:
    return (await post(client, body(*good_parts()))).status_code
