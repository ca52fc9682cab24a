"""A tenant's adapters over HTTP: upload, versions, aliases, deletion, and nobody else's."""

import asyncio
import io
import json
import struct
import zipfile
from typing import Any

import httpx
import pytest

from tests.support.service import TestService, adapter_files, running_service

pytestmark = pytest.mark.anyio


def form(seed: int = 0, **kwargs: Any) -> dict[str, Any]:
    config, weights = adapter_files(seed, **kwargs)
    return {"config": ("adapter_config.json", config), "weights": ("w.safetensors", weights)}


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "."), content)
    return buffer.getvalue()


def leftovers(service: TestService) -> list[str]:
    """Files of uploads that are over."""
    return [str(path) for path in (service.root / "uploads").rglob("*")]


async def test_an_upload_becomes_a_version_and_the_next_one_moves_the_default(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        reply = await client.post("/v1/adapters", data={"name": "legal"}, files=form())
        assert reply.status_code == 201, reply.text
        first = reply.json()
        assert set(first) == {"name", "version", "digest", "report"}
        assert (first["name"], first["version"]) == ("legal", 1)
        assert first["report"]["rank"] == 4
        assert await service.blobs.list() == [first["digest"]]

        again = await client.post("/v1/adapters", data={"name": "legal"}, files=form())
        assert again.status_code == 200
        assert again.json() == {**first, "unchanged": True}

        second = (await client.post("/v1/adapters", data={"name": "legal"}, files=form(1))).json()
        assert second["version"] == 2
        hidden = await client.post(
            "/v1/adapters", data={"name": "legal", "publish": "false"}, files=form(2)
        )
        assert hidden.json()["version"] == 3
        shown = (await client.get("/v1/adapters/legal")).json()
        assert shown["aliases"] == {"default": 2}
        assert (shown["versions"], shown["latest_version"]) == (3, 3)
        assert (await client.get("/v1/adapters")).json() == {"data": [shown]}
        versions = (await client.get("/v1/adapters/legal/versions")).json()["data"]
        assert [v["version"] for v in versions] == [3, 2, 1]
        assert [v["digest"] for v in versions] == [
            hidden.json()["digest"], second["digest"], first["digest"],
        ]  # fmt: skip
        assert leftovers(service) == []


async def test_an_alias_moves_with_its_guard_and_tells_how_to_go_back(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for seed in range(2):
            await service.upload("legal", seed=seed)
        url = "/v1/adapters/legal/aliases"
        moved = await client.put(f"{url}/default", json={"version": 1})
        assert moved.json() == {"alias": "default", "version": 1, "previous": 2}
        fresh = await client.put(f"{url}/canary", json={"version": 2})
        assert fresh.json() == {"alias": "canary", "version": 2, "previous": None}
        conflict = await client.put(f"{url}/default", json={"version": 2, "expect": 2})
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "alias_conflict")
        guarded = await client.put(f"{url}/default", json={"version": 2, "expect": 1})
        assert guarded.json()["previous"] == 1
        for body, status in [
            ({"version": 9}, 404), ({"version": 0}, 400), ({"version": "1"}, 400), ({}, 400),
            ({"version": 1, "extra": 1}, 400), ({"version": None}, 400),
            ({"version": 10**30}, 400), ({"version": 1, "expect": 10**30}, 400),
        ]:  # fmt: skip
            reply = await client.put(f"{url}/default", json=body)
            assert reply.status_code == status, (body, reply.text)
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.put(f"{url}/No-Such", json={"version": 1})).status_code == 400


async def test_an_archive_is_the_same_adapter(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        config, weights = adapter_files()
        archive = zipped(adapter_config__json=config, adapter_model__safetensors=weights)
        reply = await client.post(
            "/v1/adapters", data={"name": "zipped"}, files={"archive": ("a.zip", archive)}
        )
        assert reply.status_code == 201, reply.text
        assert reply.json()["digest"] == (await service.upload("legal"))["digest"]
        assert leftovers(service) == []


async def test_deleting_removes_the_files_only_when_nobody_else_has_them(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        digest = (await service.upload("legal"))["digest"]
        await service.upload("theirs", key="zen:tenant")
        assert (await client.delete("/v1/adapters/legal")).status_code == 204
        assert await service.blobs.list() == [digest]
        assert service.engine.unloaded == []
        async with service.client("zen:tenant") as other:
            assert (await other.delete("/v1/adapters/theirs")).status_code == 204
        assert await service.blobs.list() == []
        assert service.engine.unloaded == [digest]
        assert (await client.delete("/v1/adapters/legal")).status_code == 404
        assert (await service.upload("legal"))["version"] == 2


async def test_many_rounds_of_upload_and_deletion_leave_nothing(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for seed in range(10):
            await service.upload("legal", seed=seed)
            assert (await client.delete("/v1/adapters/legal")).status_code == 204
        assert await service.blobs.list() == []
        assert leftovers(service) == []
        assert len(service.engine.unloaded) == 10


async def test_parallel_uploads_and_deletions_of_one_name_keep_rows_and_files_in_step(
    tmp_path, registry_url: str
):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("acme:tenant") as client,
    ):

        async def upload(seed: int) -> int:
            data = {"name": "legal"}
            reply = await client.post("/v1/adapters", data=data, files=form(seed % 3))
            return reply.status_code

        async def delete() -> int:
            return (await client.delete("/v1/adapters/legal")).status_code

        calls = [upload(i) if i % 4 else delete() for i in range(24)]
        statuses = await asyncio.gather(*calls)
        assert set(statuses) <= {200, 201, 204, 404}
        versions = (await client.get("/v1/adapters/legal/versions")).json().get("data", [])
        assert sorted({v["digest"] for v in versions}) == await service.blobs.list()
        for digest in await service.blobs.list():
            await service.blobs.fetch(digest, service.root / "cache" / digest)
        assert leftovers(service) == []


async def test_a_reserved_or_ill_formed_name_is_refused_before_the_weights_are_read(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for name, code in [
            ("base", "name_reserved"), ("tiny", "name_reserved"), ("tiny-chat", "name_reserved"),
            ("../evil", "invalid_name"), ("/etc/passwd", "invalid_name"), ("a/b", "invalid_name"),
            ("a\\b", "invalid_name"), ("C:\\x", "invalid_name"), ("a%2fb", "invalid_name"),
            ("", "invalid_name"), (" ", "invalid_name"), ("Legal", "invalid_name"),
            ("l\u0435gal", "invalid_name"), ("x" * 65, "invalid_name"), (".", "invalid_name"),
            ("..", "invalid_name"), ("-a", "invalid_name"), ("a@1", "invalid_name"),
            ("a:b", "invalid_name"), ("nul\x00", "invalid_name"),
            ("x" * 10_000, "upload_too_large"),
        ]:  # fmt: skip
            files = {**form(), "weights": ("w", b"never looked at")}
            reply = await client.post("/v1/adapters", data={"name": name}, files=files)
            assert reply.json()["error"]["code"] == code, (name, reply.text)
            assert 400 <= reply.status_code < 500
        assert await service.blobs.list() == []
        assert leftovers(service) == []


ODD_NAMES = [
    "..", "%2e%2e", "..%2f..%2fetc", "%2fetc%2fpasswd", "a%00b", "C:%5Cx", "x" * 10_000,
    "l%D0%B5gal", "legal%20", "LEGAL", "%ff",
]  # fmt: skip


async def test_odd_names_in_a_path_find_nothing(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("acme:tenant") as client,
    ):
        await service.upload("legal")
        for path in ODD_NAMES:
            for method, url in [
                ("GET", f"/v1/adapters/{path}"),
                ("DELETE", f"/v1/adapters/{path}"),
                ("GET", f"/v1/adapters/{path}/versions"),
                ("PUT", f"/v1/adapters/{path}/aliases/default"),
                ("PUT", f"/v1/adapters/legal/aliases/{path}"),
            ]:
                reply = await client.request(method, url, json={"version": 1})
                assert 400 <= reply.status_code < 500, (method, url, reply.status_code)
        assert (await client.get("/v1/adapters/legal")).json()["aliases"] == {"default": 1}


async def test_tenants_see_nothing_of_each_other(tmp_path, registry_url: str):
    async with running_service(tmp_path, database_url=registry_url) as service:
        mine = await service.upload("legal", seed=1)
        await service.upload("secret-plans", seed=2)
        theirs = await service.upload("legal", seed=3, key="zen:tenant")
        assert (mine["version"], theirs["version"]) == (1, 1)
        async with service.client("zen:tenant") as zen, service.client("zen:inference") as caller:
            for reply in [
                await zen.get("/v1/adapters"), await zen.get("/v1/models"),
                await zen.get("/v1/adapters/secret-plans"),
                await zen.delete("/v1/adapters/secret-plans"),
                await zen.get("/v1/adapters/secret-plans/versions"),
                await zen.put("/v1/adapters/secret-plans/aliases/default", json={"version": 1}),
                await zen.get("/v1/models/secret-plans"),
                await zen.get("/v1/adapters/legal/versions"),
                await caller.post("/v1/completions", json={"model": "secret-plans", "prompt": "x"}),
            ]:  # fmt: skip
                shown = reply.text.replace("secret-plans' does not exist", "")
                shown = shown.replace("secret-plans", "") if reply.status_code == 404 else shown
                assert "secret" not in shown, reply.text
                assert "acme" not in shown
                assert mine["digest"] not in shown
            service.engine.script = lambda request: [7]
            await caller.post("/v1/completions", json={"model": "legal", "prompt": "x"})
            (request,) = service.engine.requests.values()
            assert (request.tenant, request.adapter) == ("zen", theirs["digest"])
            assert [row.tenant for row in await service.usage("zen")] == ["zen"]
            assert await service.registry.list_usage("acme") == []
            assert (await zen.delete("/v1/adapters/legal")).status_code == 204
        async with service.client("acme:tenant") as acme:
            assert (await acme.get("/v1/adapters/legal")).status_code == 200


async def test_an_adapter_that_cannot_be_served_leaves_no_trace(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        config, weights = adapter_files()
        wide = json.dumps({**json.loads(config), "use_dora": True}).encode()
        for files, status in [
            ({"config": ("c", wide), "weights": ("w", weights)}, 422),
            ({"config": ("c", b"not json"), "weights": ("w", weights)}, 422),
            ({"config": ("c", config), "weights": ("w", b"")}, 422),
            ({"config": ("c", config), "weights": ("w", weights[:-4])}, 422),
            ({"config": ("c", config), "weights": ("w", b"\x80\x04pickle")}, 422),
            (form(rank=65), 422),
            ({"config": ("c", config), "weights": ("w", struct.pack("<Q", 2) + b"{}")}, 422),
            ({"config": ("c", config), "weights": ("w", struct.pack("<Q", 2**62) + b"{}")}, 422),
            ({"config": ("c", config), "weights": ("w", weights[:-4] + b"\x00\x00\xc0\x7f")}, 422),
            ({"archive": ("a.zip", b"PK not a zip")}, 422),
            ({"archive": ("a.zip", zipped(adapter_model__bin=b"\x80\x04", x=b""))}, 422),
        ]:
            reply = await client.post("/v1/adapters", data={"name": "legal"}, files=files)
            assert reply.status_code == status, reply.text
            assert reply.json()["error"]["code"]
        assert await service.blobs.list() == []
        assert (await client.get("/v1/adapters")).json() == {"data": []}
        assert leftovers(service) == []


def hostile_archives() -> dict[str, bytes]:
    config, weights = adapter_files()
    files = {"adapter_config__json": config, "adapter_model__safetensors": weights}
    bomb, many = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_config.json", config)
        archive.writestr("adapter_model.safetensors", bytes(40_000_000))
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(2000):
            archive.writestr(f"f{number}", b"")
    damaged = bytearray(zipped(**files))
    damaged[damaged.rfind(b"PK\1\2") + 16] ^= 1  # the checksum of the weights
    return {
        "zip_bomb": bomb.getvalue(),
        "too_many_members": many.getvalue(),
        "unsafe_member": zipped(**files, **{"../evil": b"x"}),
        "missing_member": zipped(inner__zip=bomb.getvalue()),
        "invalid_archive": bytes(damaged),
        "not_a_zip": zipped(**files)[:-30],
        "not_safetensors": zipped(adapter_config__json=config, adapter_model__bin=b"\x80\x04"),
    }


async def test_a_hostile_archive_is_refused_and_leaves_no_trace(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        outside = {path for path in tmp_path.parent.rglob("*") if "registry.db" not in path.name}
        for code, archive in hostile_archives().items():
            reply = await client.post(
                "/v1/adapters", data={"name": "legal"}, files={"archive": ("a.zip", archive)}
            )
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, code), reply.text
            assert leftovers(service) == []
        assert await service.blobs.list() == []
        assert (await client.get("/v1/adapters")).json() == {"data": []}
        after = {path for path in tmp_path.parent.rglob("*") if "registry.db" not in path.name}
        assert after == outside


async def test_uploading_again_mends_a_damaged_file(tmp_path):
    async with running_service(tmp_path) as service:
        digest = (await service.upload("legal"))["digest"]
        (stored,) = (service.root / "blobs").rglob("*.safetensors")
        stored.write_bytes(b"damaged")
        assert (await service.upload("legal"))["unchanged"]
        await service.blobs.fetch(digest, service.root / "cache" / digest)


async def test_an_admin_acts_for_a_tenant_in_its_path_only(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        refused = await admin.post("/v1/adapters", data={"name": "x"}, files=form())
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (403, "tenant_required")
        assert "admin's key" in error["message"] and "/t/{tenant}/v1/" in error["message"]
        assert "--" not in error["message"], "over HTTP there are no options"
        reply = await admin.post("/t/zen/v1/adapters", data={"name": "x"}, files=form())
        assert reply.status_code == 201, reply.text
        entries = await service.registry.list_audit()
        assert entries[0].actor == "admin"
        assert httpx.codes.is_success((await admin.get("/t/zen/v1/adapters/x")).status_code)
