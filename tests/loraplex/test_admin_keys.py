"""Admin keys: over HTTP for who has one, and on the service's machine for who has none."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loraplex.cli import main
from tests.support.registry import FakeClock, open_registry
from tests.support.service import running_service

pytestmark = pytest.mark.anyio


def admin_keys(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["admin-keys", *arguments, "--database-url", url])


async def beside(url: str, *arguments: str) -> Result:
    """The command beside what runs here, which goes on meanwhile."""
    return await asyncio.to_thread(admin_keys, url, *arguments)


async def test_admin_keys_are_made_listed_and_revoked_over_http(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url, admin_key=None) as service,
        service.client("admin") as admin,
    ):
        [own] = (await admin.get("/admin/keys")).json()["data"]
        refused = await admin.delete(f"/admin/keys/{own['id']}")
        assert (refused.status_code, refused.json()["code"]) == (409, "last_admin_key")
        end = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        created = await admin.post("/admin/keys", json={"expires_at": end})
        assert created.status_code == 201
        new = created.json()
        assert set(new) == {"key", "id", "scopes", "expires_at"} and new["scopes"] == ["admin"]
        service.keys["new"] = new["key"]
        async with service.client("new") as other:
            assert (await other.delete(f"/admin/keys/{own['id']}")).status_code == 204
            assert (await admin.get("/admin/keys")).status_code == 401
            listed = (await other.get("/admin/keys")).json()["data"]
            assert [(k["id"], k["revoked_at"] is None) for k in listed] == [
                (own["id"], False), (new["id"], True),
            ]  # fmt: skip
            assert new["key"] not in str(listed)
            [entry, *_] = (await other.get("/admin/audit")).json()["data"]
            assert (entry["action"], entry["actor"], entry["subject"]) == (
                "key.revoke", new["id"], own["id"],
            )  # fmt: skip


async def test_the_key_of_the_settings_lets_the_last_one_go(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        assert (await admin.get("/admin/keys")).json() == {"data": []}
        made = (await admin.post("/admin/keys")).json()
        assert (await admin.delete(f"/admin/keys/{made['id']}")).status_code == 204
        assert (await admin.get("/admin/keys")).status_code == 200


async def test_a_key_for_metrics_reads_them_and_nothing_else(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        made = (await admin.post("/admin/keys", json={"scopes": ["metrics"]})).json()
        service.keys["metrics"] = made["key"]
        async with service.client("metrics") as client:
            assert (await client.get("/metrics")).status_code == 200
            for path in ("/admin/keys", "/admin/tenants", "/v1/models", "/t/acme/v1/models"):
                assert (await client.get(path)).status_code in (403, 404), path


async def test_a_wrong_order_names_its_field_and_tenants_keys_are_not_found_here(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        for body, param in [
            ({"scopes": []}, "scopes"),
            ({"scopes": ["tenant"]}, "scopes[0]"),
            ({"expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
            ({"x": 1}, "x"),
        ]:
            reply = await admin.post("/admin/keys", json=body)
            assert (reply.status_code, reply.json().get("param")) == (400, param), body
        [key, *_] = await service.registry.list_keys("acme")
        for key_id in (key.key_id, "key_none"):
            gone = await admin.delete(f"/admin/keys/{key_id}")
            assert (gone.status_code, gone.json()["code"]) == (404, "key_not_found")
        async with service.client("acme:tenant") as tenant:
            for method, path in [("GET", ""), ("POST", ""), ("DELETE", f"/{key.key_id}")]:
                assert (await tenant.request(method, f"/admin/keys{path}")).status_code == 403


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/tenants/acme/keys"])
async def test_keys_come_in_pages(tmp_path, path: str):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        for _ in range(3):
            assert (await admin.post(path)).status_code == 201
        whole = (await admin.get(path)).json()
        assert "next" not in whole and len(whole["data"]) >= 3
        listed, after = [], ""
        while after is not None:
            page = (await admin.get(path, params={"limit": 2, "after": after})).json()
            assert 1 <= len(page["data"]) <= 2
            listed += page["data"]
            after = page.get("next")
        assert listed == whole["data"]
        for query, param in [("limit=0", "limit"), ("limit=1001", "limit"), ("after=x", "after")]:
            reply = await admin.get(f"{path}?{query}")
            assert (reply.status_code, reply.json()["param"]) == (400, param), query


async def test_who_lost_the_key_gets_back_in_beside_the_running_service(
    tmp_path, registry_url: str
):
    async with (
        running_service(tmp_path, database_url=registry_url, admin_key=None) as service,
        service.client("admin") as lost,
    ):
        [old] = await service.registry.list_keys(None)
        assert (await lost.get("/admin/tenants")).status_code == 200
        made = await beside(registry_url, "create")
        assert made.exit_code == 0, made.output
        service.keys["new"] = made.stdout.strip()
        async with service.client("new") as admin:
            assert (await admin.get("/admin/tenants")).status_code == 200
            revoked = await beside(registry_url, "revoke", old.key_id)
            assert (revoked.exit_code, revoked.output) == (0, f"Revoked {old.key_id}.\n")
            actors = {e["actor"] for e in (await admin.get("/admin/audit?limit=2")).json()["data"]}
            assert actors == {"cli"}


async def test_a_running_process_refuses_within_a_second_what_the_command_revoked(
    registry_url: str,
):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as process:
        leaked = await process.create_key(None, {"admin"})
        await process.create_key(None, {"admin"})
        assert await process.authenticate(leaked.plain) is not None  # known from here on
        assert (await beside(registry_url, "revoke", leaked.key_id)).exit_code == 0
        clock.advance(1)
        assert await process.authenticate(leaked.plain) is None


def test_keys_are_listed_without_their_secret(registry_url: str):
    made = json.loads(
        admin_keys(registry_url, "create", "--scope", "metrics", "--days", "2", "--json").stdout
    )
    assert made["scopes"] == ["metrics"] and made["expires_at"].endswith("Z")
    other = admin_keys(registry_url, "create").stdout.strip()
    listed = admin_keys(registry_url, "list")
    assert other not in listed.output and made["key"] not in listed.output
    heading, *rows = listed.stdout.splitlines()
    assert heading.split()[:3] == ["id", "key", "scopes"]
    assert [row.split()[2] for row in rows] == ["metrics", "admin"]
    shown = json.loads(admin_keys(registry_url, "list", "--json").stdout)["data"]
    assert shown[0] == {k: v for k, v in made.items() if k != "key"}
    assert shown[1]["hint"] == f"lpx_…{other[-4:]}"


def test_the_last_key_goes_only_when_it_is_meant(registry_url: str):
    admin_keys(registry_url, "create")
    [key] = json.loads(admin_keys(registry_url, "list", "--json").stdout)["data"]
    refused = admin_keys(registry_url, "revoke", key["id"])
    assert refused.exit_code == 1
    assert "last admin key that works" in refused.output and "--last" in refused.output
    unknown = admin_keys(registry_url, "revoke", "key_none", "--last")
    assert unknown.exit_code == 1 and "there is no key 'key_none'" in unknown.output
    assert admin_keys(registry_url, "revoke", key["id"], "--last").exit_code == 0
    [key] = json.loads(admin_keys(registry_url, "list", "--json").stdout)["data"]
    assert key["revoked_at"] is not None


@pytest.mark.parametrize("command", [("create",), ("list",), ("revoke", "key_none")])
def test_a_data_directory_without_a_registry_is_one_clear_line(
    tmp_path: Path, command: tuple[str, ...]
):
    arguments = ["admin-keys", *command, "--data-dir", str(tmp_path)]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1
    assert "run: loraplex db upgrade" in refused.output and refused.output.count("\n") == 1
    assert not (tmp_path / "registry.db").exists()
