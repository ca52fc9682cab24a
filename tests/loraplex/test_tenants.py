"""Tenants and keys, for an admin."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from loraplex.auth import Authenticator, Caller
from tests.support.service import running_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.anyio


async def test_a_tenant_and_its_key_work_at_once(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        reply = await admin.post("/admin/tenants", json={"name": "newco", "weight": 2.5})
        assert reply.status_code == 201
        assert (reply.json()["name"], reply.json()["weight"]) == ("newco", 2.5)
        names = [t["name"] for t in (await admin.get("/admin/tenants")).json()["data"]]
        assert names == ["acme", "newco", "zen"]
        key = (await admin.post("/admin/tenants/newco/keys")).json()
        assert key["scopes"] == ["inference"]
        service.keys["new"] = key["key"]
        service.engine.script = lambda request: [7]
        async with service.client("new") as client:
            body = {"model": "base", "prompt": "x"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        (request,) = service.engine.requests.values()
        assert (request.tenant, request.weight) == ("newco", 2.5)


async def test_a_key_may_have_an_end(tmp_path, monkeypatch):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        end = datetime.now(UTC) + timedelta(hours=1)
        body = {"expires_at": end.isoformat(), "scopes": ["tenant", "inference"]}
        created = (await admin.post("/admin/tenants/acme/keys", json=body)).json()
        assert created["scopes"] == ["inference", "tenant"]
        service.keys["short"] = created["key"]
        async with service.client("short") as client:
            assert (await client.get("/v1/models")).status_code == 200
            monkeypatch.setattr(service.registry, "_clock", lambda: end)
            assert (await client.get("/v1/models")).status_code == 401


BAD = [
    ("", {}, 400, "name"),
    ("", {"name": 5}, 400, "name"),
    ("", {"name": "Bad Name"}, 400, None),
    ("", {"name": "../x"}, 400, None),
    ("", {"name": "acme"}, 409, None),
    ("", {"name": "x", "weight": 0}, 400, "weight"),
    ("", {"name": "x", "weight": -1}, 400, "weight"),
    ("", {"name": "x", "weight": 1e-300}, 400, "weight"),
    ("", {"name": "x", "weight": 1001}, 400, "weight"),
    ("", {"name": "x", "weight": "1"}, 400, "weight"),
    ("", {"name": "x", "extra": 1}, 400, "extra"),
    ("", [], 400, None),
    ("/nobody/keys", {}, 404, None),
    ("/acme/keys", {"scopes": ["root"]}, 400, "scopes[0]"),
    ("/acme/keys", {"scopes": ["admin"]}, 400, "scopes"),
    ("/acme/keys", {"scopes": []}, 400, "scopes"),
    ("/acme/keys", {"scopes": "tenant"}, 400, "scopes"),
    ("/acme/keys", {"expires_at": "tomorrow"}, 400, "expires_at"),
    ("/acme/keys", {"expires_at": "2040-01-01T00:00:00"}, 400, "expires_at"),
    ("/acme/keys", {"expires_at": "2001-01-01T00:00:00Z"}, 400, "expires_at"),
    ("/acme/keys", {"expires_at": "9999-12-31T23:59:59-12:00"}, 400, "expires_at"),
    ("/acme/keys", {"unknown": 1}, 400, "unknown"),
]  # fmt: skip


async def test_bad_input_is_a_problem_that_names_the_field(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        for path, body, status, param in BAD:
            reply = await admin.post(f"/admin/tenants{path}", json=body)
            problem = reply.json()
            assert (reply.status_code, problem.get("param")) == (status, param), (body, problem)
        assert len(await service.registry.list_tenants()) == 2


async def test_a_suspended_tenant_is_out_at_once_until_it_may_go_on(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("admin") as admin,
        service.client() as client,
    ):
        body = {"model": "base", "prompt": "x", "max_tokens": 4}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await eventually(lambda: bool(service.engine.open_requests))
        suspended = await admin.post("/admin/tenants/acme/suspend")
        assert suspended.status_code == 200 and suspended.json()["suspended_at"] is not None
        ended = await running
        assert (ended.status_code, ended.json()["error"]["code"]) == (403, "tenant_suspended")
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")
        assert (await admin.get("/t/acme/v1/models")).status_code == 200
        async with service.client("zen:inference") as other:
            assert (await other.get("/v1/models")).status_code == 200
        resumed = await admin.post("/admin/tenants/acme/resume")
        assert resumed.json()["suspended_at"] is None
        assert (await client.get("/v1/models")).status_code == 200
        assert (await admin.post("/admin/tenants/nobody/suspend")).status_code == 404


async def test_a_deleted_tenant_is_gone_with_its_files(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("admin") as admin,
        service.client() as client,
    ):
        ours = await service.upload("legal", seed=1)
        both = await service.upload("shared", seed=2)
        await service.upload("theirs", seed=2, key="zen:tenant")
        assert (await admin.delete("/admin/tenants/acme")).status_code == 204
        assert await service.blobs.list() == [both["digest"]]
        assert service.engine.unloaded == [ours["digest"]]
        assert (await client.get("/v1/models")).status_code == 401
        assert (await admin.get("/admin/tenants/acme")).status_code == 404
        assert (await admin.get("/t/acme/v1/adapters")).status_code == 404
        taken = await admin.post("/admin/tenants", json={"name": "acme"})
        assert (taken.status_code, "usage is kept" in taken.json()["detail"]) == (409, True)
        wrong = await admin.delete("/admin/tenants/acme?usage=burn")
        assert (wrong.status_code, wrong.json()["param"]) == (400, "usage")
        assert (await admin.delete("/admin/tenants/acme?usage=delete")).status_code == 204
        assert (await admin.post("/admin/tenants", json={"name": "acme"})).status_code == 201


async def test_a_key_is_rotated_with_an_overlap_or_at_once(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        created = (await admin.post("/admin/tenants/acme/keys")).json()
        url = f"/admin/tenants/acme/keys/{created['id']}/rotate"
        new = (await admin.post(url)).json()
        assert set(new) == {"key", "id", "tenant", "scopes", "expires_at"}
        service.keys.update(old=created["key"], new=new["key"])
        for key in ("old", "new"):
            async with service.client(key) as client:
                assert (await client.get("/v1/models")).status_code == 200
        assert (await admin.post(url, json={"overlap_seconds": 0})).status_code == 201
        async with service.client("old") as client:
            assert (await client.get("/v1/models")).status_code == 401
        again = await admin.post(url)
        assert (again.status_code, again.json()["code"]) == (409, "key_inactive")
        for body, param in [
            ({"overlap_seconds": -1}, "overlap_seconds"),
            ({"overlap_seconds": 1e9}, "overlap_seconds"),
            ({"expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
            ({"x": 1}, "x"),
        ]:
            refused = await admin.post(f"/admin/tenants/acme/keys/{new['id']}/rotate", json=body)
            assert (refused.status_code, refused.json()["param"]) == (400, param)
        await service.registry.record_key_use()
        keys = (await admin.get("/admin/tenants/acme/keys")).json()["data"]
        assert {k["id"]: k["last_used_at"] is not None for k in keys}[new["id"]]


async def test_the_audit_names_who_did_what_in_pages(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("admin") as admin,
    ):
        await service.upload("legal")
        newest = (await admin.get("/admin/audit?limit=2&tenant=acme")).json()
        assert [(e["action"], e["subject"]) for e in newest["data"]] == [
            ("alias.set", "legal:default"), ("version.create", "legal@1"),
        ]  # fmt: skip
        [key] = [k for k in await service.registry.list_keys("acme") if "tenant" in k.scopes]
        assert {e["actor"] for e in newest["data"]} == {key.key_id}
        rest = (await admin.get(f"/admin/audit?tenant=acme&before={newest['next']}")).json()
        assert [e["action"] for e in rest["data"]] == ["key.create", "key.create", "tenant.create"]
        assert "next" not in rest
        assert (await admin.get("/admin/audit?tenant=%00")).json() == {"data": []}
        for query in ("before=0", f"before={2**63}", "limit=0", "before=x"):
            assert (await admin.get(f"/admin/audit?{query}")).status_code == 400, query
        async with service.client("acme:tenant") as client:
            assert (await client.get("/admin/audit")).status_code == 403


@pytest.mark.parametrize(
    ("take_away", "status", "code"),
    [("suspend", 403, "tenant_suspended"), ("revoke", 401, "invalid_api_key"),
     ("delete", 401, "invalid_api_key")],
)  # fmt: skip
async def test_a_body_that_takes_its_time_does_not_outlive_its_key(
    tmp_path, monkeypatch, take_away: str, status: int, code: str
):
    known = asyncio.Event()
    authenticate = Authenticator.authenticate

    async def noted(self: Authenticator, authorization: str | None) -> Caller:
        caller = await authenticate(self, authorization)
        known.set()
        return caller

    monkeypatch.setattr(Authenticator, "authenticate", noted)
    async with running_service(tmp_path) as service, service.client() as client:

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"model": "base", '
            await known.wait()
            match take_away:
                case "suspend":
                    await service.registry.suspend_tenant("acme")
                case "revoke":
                    for key in await service.registry.list_keys("acme"):
                        await service.registry.revoke_key(key.key_id)
                case _:
                    await service.registry.delete_tenant("acme", with_usage=True)
                    await service.registry.create_tenant("acme")
            yield b'"prompt": "x"}'

        reply = await client.post("/v1/completions", content=slow())
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert service.engine.requests == {}
