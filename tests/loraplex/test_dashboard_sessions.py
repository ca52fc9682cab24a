"""Logging in to the dashboard: what a session opens, what it does not, and when it ends."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from litestar.routes import HTTPRoute
from sqlalchemy import select

from adapter_store.registry.registry import Registry
from adapter_store.registry.rollup_models import DashboardSession
from adapter_store.registry.session import Database
from loraplex.auth import Caller
from loraplex.dashboard.access import COOKIE
from loraplex.dashboard.pages import SECURITY_HEADERS
from loraplex.dashboard.session_controller import MAX_FAILED_LOGINS
from loraplex.dashboard.sessions import SESSION_SECONDS, SessionRequired, Sessions
from tests.support.dashboard import Dashboard, dashboard
from tests.support.registry import FakeClock, open_registry
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.anyio

SESSION = "/dashboard/api/session"
OVERVIEW = "/dashboard/api/overview"


async def test_a_login_gives_a_cookie_that_only_the_dashboard_gets(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.browser() as browser:
        assert (await browser.get(OVERVIEW)).status_code == 401
        reply = await at.log_in(browser, at.service.keys["acme:tenant"])
        cookie = reply.headers["set-cookie"]
        for part in (
            "HttpOnly",
            "SameSite=strict",
            "Path=/dashboard",
            f"Max-Age={SESSION_SECONDS}",
        ):
            assert part.lower() in cookie.lower()
        assert "secure" not in cookie.lower()
        session = reply.json()
        assert (session["tenant"], session["is_admin"]) == ("acme", False)
        assert (session["slo_ttft_seconds"], session["slo_token_seconds"]) == (0.5, 0.08)
        assert (await browser.get(OVERVIEW)).status_code == 200
        assert (await browser.get(SESSION)).json() == session


async def test_the_cookie_opens_nothing_else_and_a_key_opens_no_page(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.logged_in("admin") as browser:
        token = browser.cookies[COOKIE]
        for path in ("/v1/models", "/admin/tenants", "/t/acme/v1/models", "/admin/engine/info"):
            async with httpx.AsyncClient(base_url=at.service.url) as other:
                headers = {"cookie": f"{COOKIE}={token}"}
                assert (await other.get(path, headers=headers)).status_code == 401
                headers = {"authorization": f"Bearer {token}"}
                assert (await other.get(path, headers=headers)).status_code == 401
        async with at.service.client("admin") as client:
            assert (await client.get(OVERVIEW)).status_code == 401


async def test_a_session_changes_nothing_but_itself(tmp_path: Path):
    async with dashboard(tmp_path) as at:
        routes = {
            route.path: set(route.methods) - {"OPTIONS", "HEAD"}
            for route in at.service.app.routes
            if isinstance(route, HTTPRoute) and route.path.startswith("/dashboard")
        }
        assert routes.pop(SESSION) == {"GET", "POST", "DELETE"}
        assert len(routes) > 8 and all(methods == {"GET"} for methods in routes.values())


async def test_only_a_hash_of_the_token_is_kept(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.logged_in("acme:tenant") as browser:
        token = browser.cookies[COOKIE]
        rows = await at.service.registry.database.read(
            lambda s: s.execute(select(DashboardSession))
        )
        [row] = rows.scalars().all()
        kept = json.dumps([row.token_hash, row.key_hash])
        assert token not in kept and at.service.keys["acme:tenant"] not in kept


async def test_what_another_site_sends_is_refused(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.logged_in("admin") as browser:
        for origin in (None, "http://evil.example", "null", "http://127.0.0.1:1"):
            headers = {} if origin is None else {"origin": origin}
            async with httpx.AsyncClient(
                base_url=at.service.url, cookies=browser.cookies
            ) as forged:
                key = at.service.keys["admin"]
                for reply in (
                    await forged.post(SESSION, json={"key": key}, headers=headers),
                    await forged.delete(SESSION, headers=headers),
                ):
                    assert (reply.status_code, reply.json()["code"]) == (403, "origin_mismatch")
                    assert "set-cookie" not in reply.headers
        assert (await browser.get(OVERVIEW)).status_code == 200


async def test_over_https_the_cookie_is_secure_also_behind_a_proxy(tmp_path: Path):
    async with dashboard(tmp_path) as at:
        headers = {"host": "loraplex.example", "origin": "https://loraplex.example"}
        async with httpx.AsyncClient(base_url=at.service.url) as browser:
            reply = await browser.post(
                SESSION, json={"key": at.service.keys["admin"]}, headers=headers
            )
        assert reply.status_code == 200
        assert "secure" in reply.headers["set-cookie"].lower().replace("securet", "")


async def test_logging_out_ends_the_session_everywhere(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.logged_in("acme:tenant") as browser:
        token = browser.cookies[COOKIE]
        reply = await browser.delete(SESSION)
        assert reply.status_code == 204
        assert "Max-Age=0" in reply.headers["set-cookie"]
        browser.cookies.set(COOKIE, token, path="/dashboard")
        assert (await browser.get(OVERVIEW)).status_code == 401


async def test_bad_keys_are_counted_and_then_refused_for_a_while(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.browser() as browser:
        for _ in range(MAX_FAILED_LOGINS - 1):
            reply = await at.log_in(browser, "lpx_" + "x" * 43)
            assert (reply.status_code, reply.json()["code"]) == (401, "invalid_api_key")
        for _ in range(3):  # a good one costs nothing
            assert (await at.log_in(browser, at.service.keys["admin"])).status_code == 200
        await at.log_in(browser, "nonsense")
        reply = await at.log_in(browser, at.service.keys["admin"])
        assert (reply.status_code, reply.json()["code"]) == (429, "login_rate_exceeded")
        assert int(reply.headers["retry-after"]) >= 1


async def test_a_key_that_manages_nothing_sees_nothing(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.browser() as browser:
        reply = await at.log_in(browser, at.service.keys["acme:inference"])
        assert (reply.status_code, reply.json()["code"]) == (403, "insufficient_scope")
        await at.service.registry.suspend_tenant("acme")
        reply = await at.log_in(browser, at.service.keys["acme:tenant"])
        assert (reply.status_code, reply.json()["code"]) == (403, "tenant_suspended")
        reply = await browser.post(SESSION, json={"key": "x", "remember": True})
        assert (reply.status_code, reply.json()["code"]) == (400, "unknown_field")


async def test_every_answer_tells_the_browser_what_it_may_load(tmp_path: Path):
    paths = ("/dashboard", "/dashboard/adapters", "/dashboard/api/nowhere", OVERVIEW, SESSION)
    async with dashboard(tmp_path) as at, at.browser() as browser:
        for path in paths:
            reply = await browser.get(path)
            for name, value in SECURITY_HEADERS.items():
                assert reply.headers.get_list(name) == [value]
            if "/api/" in path:
                assert reply.headers["cache-control"] == "no-store"
            policy = reply.headers["content-security-policy"]
            assert "default-src 'self'" in policy and "unsafe" not in policy


async def end_of(at: Dashboard, key: str, end) -> str:
    """The reason that a stream ends with, and that the session is over too."""
    async with at.logged_in(key) as browser:
        async with browser.stream("GET", "/dashboard/api/events") as reply:
            assert reply.status_code == 200
            lines = reply.aiter_lines()
            async for line in lines:
                if line == "event: live":
                    break
            await end(browser)
            async with asyncio.timeout(SECONDS):
                rest = [line async for line in lines]
        at_end = rest[rest.index("event: ended") + 1]
        assert (await browser.get(OVERVIEW)).status_code == 401
        reason: str = json.loads(at_end.removeprefix("data: "))["reason"]
        return reason


async def test_a_stream_ends_with_its_session(tmp_path: Path):
    async with dashboard(tmp_path) as at:

        async def log_out(browser: httpx.AsyncClient) -> None:
            assert (await browser.delete(SESSION)).status_code == 204

        assert await end_of(at, "acme:tenant", log_out) == "logged_out"
        assert at.service.app.state.services.live.num_streams == 0


async def test_a_stream_ends_when_another_process_revokes_the_key_or_suspends_the_tenant(
    tmp_path: Path, registry_url: str
):
    async with dashboard(tmp_path, registry_url) as at:
        other = Registry(Database(registry_url))
        made = await other.create_key("acme", ["tenant"])
        at.service.keys["made"] = made.plain

        async def revoke(_: httpx.AsyncClient) -> None:
            await other.revoke_key(made.key_id)

        async def suspend(_: httpx.AsyncClient) -> None:
            await other.suspend_tenant("zen")

        async def remove(_: httpx.AsyncClient) -> None:
            await other.delete_tenant("acme")

        assert await end_of(at, "made", revoke) == "revoked"
        assert await end_of(at, "zen:tenant", suspend) == "revoked"
        assert await end_of(at, "acme:tenant", remove) == "logged_out"  # with its key, it is gone
        await other.close()


async def test_a_session_ends_with_its_time_and_with_its_keys(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        sessions = Sessions(registry, "the-admin-key", clock=lambda: clock.now.timestamp())
        soon = clock.now + timedelta(hours=1)
        short = await registry.create_key("acme", ["tenant"], soon)
        long = await registry.create_key("acme", ["tenant"])
        tokens = {}
        for name, made in (("short", short), ("long", long)):
            caller = Caller(made.key_id, None, frozenset({"tenant"}))
            tokens[name], viewer = await sessions.log_in(caller, made.plain)
            assert viewer.tenant == "acme"
        clock.advance(3601)
        with pytest.raises(SessionRequired):
            await sessions.viewer(tokens["short"])
        viewer = await sessions.viewer(tokens["long"])
        assert viewer.expires == datetime(2030, 1, 1, 8, tzinfo=UTC).timestamp()
        clock.advance(SESSION_SECONDS)
        with pytest.raises(SessionRequired):
            await sessions.viewer(tokens["long"])
        await registry.purge_logins()
        rows = await registry.database.read(lambda s: s.execute(select(DashboardSession)))
        assert rows.all() == []


async def test_sessions_of_a_former_admin_key_are_over(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.logged_in("admin") as browser:
        token = browser.cookies[COOKIE]
        registry = at.service.registry
        assert (await Sessions(registry, at.service.keys["admin"]).viewer(token)).is_admin
        for key in ("another-admin-key-of-32-characters!", None):
            with pytest.raises(SessionRequired):
                await Sessions(registry, key).viewer(token)


@pytest.mark.parametrize("token", ["", "x", "x" * 10_000, "\u00e9"])
async def test_nonsense_is_no_session(tmp_path: Path, token: str):
    async with open_registry(tmp_path) as registry:
        with pytest.raises(SessionRequired):
            await Sessions(registry, None).viewer(token)
