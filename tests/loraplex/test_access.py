"""Who may call what: every route and method, with every wrong key."""

import asyncio
from datetime import timedelta

import pytest

from tests.support.service import ADMIN_KEY, TestService, running_service

pytestmark = pytest.mark.anyio

PUBLIC = ("/health", "/docs", "/dashboard")
CONCRETE = {
    "{tenant_name:str}": "acme", "{key_id:str}": "key_1", "{model:path}": "base",
    "{name:str}": "legal", "{alias:str}": "default", "{path:str}": "x",
    "{version:int}": "1", "{name:path}": "app.js", "{page:path}": "adapters",
}  # fmt: skip
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")


def routes(service: TestService) -> list[tuple[str, str]]:
    """(method, path): every route with every method."""
    found: list[tuple[str, str]] = []
    for route in service.app.routes:
        path = route.path
        for pattern, value in CONCRETE.items():
            path = path.replace(pattern, value)
        found += [(method, path) for method in METHODS]
    return found


def statuses_without_a_key(method: str, path: str) -> set[int]:
    """What may come; the dashboard's pages hold no data, and what they read asks for a session."""
    if (method, path) == ("POST", "/dashboard/api/session"):
        return {403}  # from no page of ours
    if path == "/":
        return {200, 401, 405}  # which methods there are asks for a key
    if path.startswith(PUBLIC) and not path.startswith("/dashboard/api/"):
        return {200, 204, 404, 405}
    if path.startswith("/dashboard/api/") and method == "OPTIONS":
        return {204, 401, 405}  # which methods there are, at most
    return {401, 405}


async def raw_reply(service: TestService, method: str, path: str, key: str | None = None) -> bytes:
    """Send a path exactly as it is written: clients clean it up."""
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = f"host: {host}\r\nconnection: close\r\n"
    if key is not None:
        headers += f"authorization: Bearer {service.keys[key]}\r\n"
    writer.write(f"{method} {path} HTTP/1.1\r\n{headers}\r\n".encode())
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return reply


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


async def test_without_a_good_key_only_the_allow_list_answers(tmp_path):
    async with running_service(tmp_path) as service, service.client(None) as client:
        key = service.keys["acme:inference"]
        wrong = [
            None, "", "Bearer", "Bearer wrong", "Bearer lpx_" + "A" * 43, f"Basic {key}", key,
            f"Token {key}", f"Bearer {key}x", "Bearer " + "x" * 10_000, f"Bearer {key} {key}",
            f"Bearer {ADMIN_KEY[:-1]}", f"Bearer {ADMIN_KEY}x", "Bearer \u00e9\u00e9",
        ]  # fmt: skip
        for number, (method, path) in enumerate(routes(service)):
            # Every route and method meets a few of them, and all of them meet every method.
            for authorization in (None, *wrong[1 + number % 3 :: 3]):
                headers = {} if authorization is None else {"authorization": authorization.encode()}
                reply = await client.request(method, path, headers=headers)
                allowed = statuses_without_a_key(method, path)
                assert reply.status_code in allowed, (method, path, authorization)
                if reply.status_code == 401 and not path.startswith("/dashboard/"):
                    assert reply.headers["www-authenticate"] == "Bearer"


async def test_a_bad_key_is_told_apart_from_none_and_by_nobody_from_another_bad_one(tmp_path):
    async with running_service(tmp_path) as service, service.client(None) as client:
        revoked = await service.registry.create_key("acme", ["inference"])
        await service.registry.revoke_key(revoked.key_id)
        expired = await service.registry.create_key("acme", ["inference"])
        await service.registry.rotate_key(expired.key_id, timedelta(0))
        for path in ("/v1/models", "/admin/tenants"):

            async def told(*authorizations: str | None, path: str = path) -> str:
                bodies: set[str] = set()
                for value in authorizations:
                    headers = {} if value is None else {"authorization": value}
                    reply = await client.get(path, headers=headers)
                    assert (reply.status_code, "invalid_api_key" in reply.text) == (401, True)
                    bodies.add(reply.text)
                (body,) = bodies
                return body

            bad = [revoked.plain, expired.plain, "lpx_" + "A" * 43, "x", "x" * 10_000]
            assert "unknown, revoked or past its time" in await told(*(f"Bearer {k}" for k in bad))
            assert "send one as `Authorization: Bearer <key>`" in await told(
                None, "", "Bearer", f"Basic {service.keys['acme:inference']}"
            )


async def test_spellings_of_a_path_do_not_go_around_the_key(tmp_path):
    spellings = [
        "//v1/models", "/v1//models", "/v1/models/", "/v1/models//", "/V1/MODELS", "/v1/Models",
        "/v1/%6dodels", "/%76%31/models", "/health/../v1/models", "/health/%2e%2e/v1/models",
        "/health%2f..%2fv1/models", "/docs/../v1/models", "/docs/%2e%2e/v1/adapters",
        "/t/acme/v1/models", "/t//v1/models", "/t/%2e%2e/v1/models", "/t/acme%2fv1/models",
        "/v1/models?exclude_from_auth=true", "/v1/models%00", "/v1/./models", "/admin//tenants",
        "/admin/tenants/", "/health/live/../../admin/tenants", "/v1/models/../../health/live",
    ]  # fmt: skip
    async with running_service(tmp_path) as service:
        for path in spellings:
            for method in METHODS:
                status = status_of(await raw_reply(service, method, path))
                assert status in {400, 401, 404, 405}, (method, path, status)


async def test_the_scheme_is_read_without_case(tmp_path):
    async with running_service(tmp_path) as service, service.client(None) as client:
        for scheme in ("Bearer", "bearer", "BEARER"):
            headers = {"authorization": f"{scheme} {service.keys['acme:inference']}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_scopes_reach_as_far_as_they_say(tmp_path):
    async with running_service(tmp_path) as service:
        reached = {
            ("acme:inference", "GET", "/v1/models"): 200,
            ("acme:tenant", "GET", "/v1/models"): 200,
            ("acme:inference", "GET", "/v1/adapters"): 403,
            ("acme:inference", "POST", "/v1/adapters"): 403,
            ("acme:inference", "DELETE", "/v1/adapters/x"): 403,
            ("acme:inference", "PUT", "/v1/adapters/x/aliases/y"): 403,
            ("acme:tenant", "GET", "/v1/adapters"): 200,
            ("acme:tenant", "POST", "/v1/chat/completions"): 403,
            ("acme:tenant", "POST", "/v1/completions"): 403,
            ("acme:tenant", "GET", "/admin/tenants"): 403,
            ("acme:inference", "POST", "/admin/tenants"): 403,
            ("acme:tenant", "POST", "/admin/tenants/acme/keys"): 403,
            ("admin", "GET", "/admin/tenants"): 200,
            ("admin", "GET", "/v1/models"): 403,
            ("admin", "GET", "/t/acme/v1/models"): 200,
            ("admin", "GET", "/t/acme/v1/adapters"): 200,
        }
        for (key, method, path), status in reached.items():
            async with service.client(key) as client:
                reply = await client.request(method, path)
            assert reply.status_code == status, (key, method, path, reply.text)


async def test_an_unknown_and_a_foreign_tenant_are_the_same_404(tmp_path, registry_url: str):
    async with running_service(tmp_path, database_url=registry_url) as service:
        for method, path in [
            ("GET", "v1/models"), ("GET", "v1/adapters"), ("GET", "v1/adapters/legal/versions"),
            ("DELETE", "v1/adapters/legal"), ("POST", "v1/chat/completions"),
        ]:  # fmt: skip
            bodies: set[bytes] = set()
            key = "acme:tenant" if "adapters" in path else "acme:inference"
            for tenant in ("zen", "nobody", "ACME", "acme%20", "%00", "acme%2fx"):
                reply = await raw_reply(service, method, f"/t/{tenant}/{path}", key)
                assert status_of(reply) == 404, (tenant, path, reply)
                if tenant != "acme%2fx":  # that is no route at all
                    bodies.add(reply.partition(b"\r\n\r\n")[2])
            assert len(bodies) == 1, bodies
        async with service.client("admin") as admin:
            reply = await admin.get("/t/nobody/v1/models")
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "tenant_not_found")


async def test_no_route_shows_or_changes_what_is_anothers(tmp_path):
    async with running_service(tmp_path) as service:
        digest = (await service.upload("legal"))["digest"]
        for method, path in routes(service):
            if method == "OPTIONS":
                continue
            is_admins = path.startswith("/admin/")
            for key in ("zen:tenant", "zen:inference"):
                reply = await raw_reply(service, method, path, key)
                assert digest.encode() not in reply, (method, path, key)
                if not is_admins and not path.startswith("/t/acme/"):
                    # What `zen` has not, though another tenant has it under this name.
                    assert "/legal" not in path or status_of(reply) >= 400, (method, path, key)
                    continue
                allowed = {403, 405} if is_admins else {403, 404, 405}
                assert status_of(reply) in allowed, (method, path, key, reply)
                other = await raw_reply(service, method, path.replace("/acme", "/nobody"), key)
                assert status_of(other) == status_of(reply), (method, path, key)
        async with service.client("acme:tenant") as acme:
            shown = (await acme.get("/v1/adapters/legal")).json()
        assert (shown["aliases"], shown["versions"]) == ({"default": 1}, 1)


async def test_a_revoked_key_and_an_expired_one_stop_at_once(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        created = (await admin.post("/admin/tenants/acme/keys", json={})).json()
        headers = {"authorization": f"Bearer {created['key']}"}
        async with service.client(None) as client:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
            gone = await admin.delete(f"/admin/tenants/acme/keys/{created['id']}")
            assert gone.status_code == 204
            assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_a_key_of_one_tenant_is_not_revoked_through_another(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        created = (await admin.post("/admin/tenants/acme/keys", json={})).json()
        reply = await admin.delete(f"/admin/tenants/zen/keys/{created['id']}")
        assert (reply.status_code, reply.json()["code"]) == (404, "key_not_found")
        listed = (await admin.get("/admin/tenants/acme/keys")).json()["data"]
        assert {k["id"]: k["revoked_at"] for k in listed}[created["id"]] is None
        assert created["key"] not in (await admin.get("/admin/tenants/acme/keys")).text
