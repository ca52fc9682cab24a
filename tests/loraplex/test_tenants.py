"""Tenants and keys, for an admin."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.service import running_service

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


async def test_a_key_may_have_an_end(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        end = datetime.now(UTC) + timedelta(seconds=0.3)
        body = {"expires_at": end.isoformat(), "scopes": ["tenant", "inference"]}
        created = (await admin.post("/admin/tenants/acme/keys", json=body)).json()
        assert created["scopes"] == ["inference", "tenant"]
        service.keys["short"] = created["key"]
        async with service.client("short") as client:
            assert (await client.get("/v1/models")).status_code == 200
            while datetime.now(UTC) <= end:
                await client.get("/health/live")
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
