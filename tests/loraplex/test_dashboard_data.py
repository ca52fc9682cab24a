"""What the dashboard's pages read: from records as the recorder wrote them, on both databases."""

import csv
import io
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from adapter_store.registry.records import Quota
from engine.engine_stats import QueueStats, TenantLoad
from engine.telemetry.records import (
    AdapterOwner,
    SlotEvent,
)
from loraplex.csv_table import FORMULA
from loraplex.dashboard.adapter_views import Adapters, AdapterView
from loraplex.dashboard.engine_views import Batch, Slots
from loraplex.dashboard.views import Alerts, Export, Overview
from loraplex.dashboard.views import Quota as QuotaView
from loraplex.recorder.traffic import CAUSES
from loraplex.recorder.widths import SPANS
from tests.support.dashboard import Recording, dashboard, fill, get, just_now
from tests.support.fake_engine import FakeEngine, statistics
from tests.support.records import stats
from tests.support.registry import FINGERPRINT, counted_statements, upload

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("range_", list(SPANS))
async def test_the_overview_has_the_sums_of_what_was_recorded(
    tmp_path: Path, registry_url: str, range_: str
):
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        await fill(at)
        view: Overview = await get(browser, "overview", Overview, range=range_)
        assert (view.totals.requests, view.totals.output_tokens) == (6, 66)
        assert view.totals.good_requests == 5  # one was aborted
        causes = msgspec.to_builtins(view.totals.causes)
        assert sum(causes.values()) == pytest.approx(5.0)
        columns = msgspec.to_builtins(view.causes)
        for cause in CAUSES:
            assert sum(v or 0 for v in columns[cause]) == pytest.approx(causes[cause])
        assert len(view.window.times) == SPANS[view.window.range].seconds / view.window.step_seconds
        assert view.totals.ttft.p50 == pytest.approx(0.4, rel=0.011)
        assert {v for v in view.running if v is not None} == {3.0}


async def test_gaps_are_no_zeros(tmp_path: Path, registry_url: str):
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        await fill(at)  # the engine was watched for the last two minutes
        view: Overview = await get(browser, "overview", Overview, range="1h")
        times, width = view.window.times, view.window.step_seconds
        known = {t for t, v in zip(times, view.causes.turn, strict=True) if v is not None}
        # Another bucket may have begun since.
        written = view.window.complete_until
        watched = {t for t in times if written - 110 < t + width and t < written - 1}
        assert watched and watched <= known
        assert all(written - 130 < t + width and t < written for t in known)
        assert view.requests_rate[0] is None and view.ttft.p50[0] is None


async def test_a_restart_of_everything_loses_nothing_of_any_range(
    tmp_path: Path, registry_url: str
):
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        await fill(at)
        restarted = Recording(at.service.registry, run="run-2")  # with an engine that knows nothing
        await restarted.record([just_now(queue={"slot": 0.5})])
        for range_ in SPANS:
            view: Overview = await get(browser, "overview", Overview, range=range_)
            assert view.totals.requests == 7
            assert view.totals.causes.slot == pytest.approx(0.9)
            assert sum(v or 0 for v in view.causes.slot) == pytest.approx(0.9)
            table: Adapters = await get(
                browser, "adapters", Adapters, range=range_, search="tone", sort="requests"
            )
            assert [row.requests for row in table.rows] == [4]
            one: AdapterView = await get(browser, "adapters/acme/tone", AdapterView, range=range_)
            assert sum(v or 0 for v in one.requests) == 4 == len(one.slow_requests)


async def test_a_tenant_sees_its_own_and_nothing_of_others(tmp_path: Path, registry_url: str):
    async with dashboard(tmp_path, registry_url) as at:
        now = time.time()
        owners = (AdapterOwner("zen", "secret@1"),)
        at.recording.engine.stats_now = stats(
            [
                QueueStats(
                    tenant=tenant, adapter=None, label="base", waiting=2, running=1, cause="turn",
                    waited={}, oldest=1.0,
                )
                for tenant in ("acme", "zen")
            ]
        )  # fmt: skip
        await fill(at)
        at.recording.engine.generation = 1
        await at.recording.record(
            events=[SlotEvent(at=now, slot=0, digest="d" * 64, owners=owners, kind="resident")]
        )
        async with at.logged_in("acme:tenant") as browser:
            pages = {
                "overview": await get(browser, "overview", Overview),
                "adapters": await get(browser, "adapters", Adapters),
                "slots": await get(browser, "slots", Slots),
                "batch": await get(browser, "batch", Batch),
                "alerts": await get(browser, "alerts", Alerts),
            }
            texts = b"".join(map(msgspec.json.encode, pages.values()))
            assert b"zen" not in texts and b"secret" not in texts
            assert pages["overview"].totals.requests == 5
            running, waiting = pages["overview"].running, pages["overview"].waiting
            assert {n for n in running if n is not None} == {1.0}
            assert {n for n in waiting if n is not None} == {2.0}
            assert pages["overview"].kv_share == pages["overview"].slots_used == []
            assert {row.adapter for row in pages["adapters"].rows} == {"tone", "other", "base"}
            [span] = pages["slots"].spans
            assert (span.tenant, span.adapter) == (None, None)
            assert [(w.tenant, w.waiting) for w in pages["slots"].waits] == [("acme", 2)]
            for path in ("adapters/zen/secret", "adapters/zen/nothing", "adapters/acme/nothing"):
                reply = await browser.get(f"/dashboard/api/{path}")
                assert (reply.status_code, reply.json()["code"]) == (404, "adapter_not_found")
            for table in ("adapters", "slots", "waits", "steps", "alerts"):
                reply = await browser.get(f"/dashboard/api/export/{table}.csv")
                assert reply.status_code == 200
                assert "zen" not in reply.text and "secret" not in reply.text
            reply = await browser.get(
                "/dashboard/api/export/adapter-causes.csv?tenant=zen&adapter=secret"
            )
            assert reply.status_code == 404
        async with at.logged_in("admin") as browser:
            everything = await get(browser, "slots", Slots)
            assert everything.spans[0].adapter == "secret"
            assert len((await get(browser, "adapters", Adapters)).rows) == 4


@pytest.mark.usefixtures("standing_minute")
async def test_a_quota_is_told_with_what_is_used_of_it_and_only_to_its_tenant(
    tmp_path: Path, registry_url: str
):
    engine = FakeEngine(lambda request: [5] * 3)
    loads = [TenantLoad("acme", 3, 2, 1), TenantLoad("zen", 70, 80, 2)]
    engine.statistics = statistics(tenants=loads)
    async with dashboard(tmp_path, registry_url, engine) as at:
        registry = at.service.registry
        for tenant, name in (("acme", "tone"), ("acme", "gone"), ("zen", "secret")):
            await registry.register_version(tenant, name, upload("12345"), FINGERPRINT)
        await registry.register_version("acme", "tone", upload("123"), FINGERPRINT)
        await registry.delete_adapter("acme", "gone")
        limits = Quota(requests_per_minute=5, max_concurrent=4, max_slots=1, max_adapter_bytes=99)
        await registry.set_quota("acme", limits, weight=2.0)
        await registry.set_quota("zen", Quota(requests_per_minute=9))
        for tenant, calls in (("acme", 2), ("zen", 1)):
            async with at.service.client(f"{tenant}:inference") as client:
                for _ in range(calls):
                    call = {"model": "tiny", "prompt": [7, 8], "max_tokens": 4}
                    assert (await client.post("/v1/completions", json=call)).status_code == 200
        async with at.logged_in("acme:tenant") as browser:
            view: QuotaView = await get(browser, "quota", QuotaView)
            assert (view.tenant, view.weight, view.is_suspended) == ("acme", 2.0, False)
            assert {use.name: (use.limit, use.used) for use in view.uses} == {
                "requests_per_minute": (5, 2), "tokens_per_minute": (None, None),
                "max_concurrent": (4, 3), "max_queued": (None, 2), "max_slots": (1, 1),
                "max_adapters": (None, 1), "max_adapter_bytes": (99, 8), "max_rank": (None, None),
            }  # fmt: skip
            with counted_statements(registry) as sent:
                assert await get(browser, "quota", QuotaView, tenant="zen") == view
            selects = [sql for sql in sent if sql.startswith("SELECT")]
            assert len(selects) == 4  # session, tenant, adapters, bytes
            engine.is_ready = False
            view = await get(browser, "quota", QuotaView)
            used = {use.name: use.used for use in view.uses}
            assert used["max_concurrent"] is used["max_queued"] is used["max_slots"] is None
            engine.is_ready = True
        async with at.logged_in("admin") as browser:
            assert (await browser.get("/dashboard/api/quota")).status_code == 404
        async with at.browser() as nobody:
            assert (await nobody.get("/dashboard/api/quota")).status_code == 401


async def test_every_chart_and_table_is_had_as_csv(tmp_path: Path):
    query = {"range": "5m", "tenant": "acme", "adapter": "tone"}
    async with dashboard(tmp_path) as at, at.logged_in() as browser:
        await fill(at)
        for table in get_args(Export):
            reply = await browser.get(f"/dashboard/api/export/{table}.csv", params=query)
            assert reply.status_code == 200, table
            assert reply.headers["content-type"].startswith("text/csv")
            assert f'filename="loraplex-{table}-5m.csv"' in reply.headers["content-disposition"]
            heading, *rows = csv.reader(io.StringIO(reply.text))
            assert all(len(row) == len(heading) for row in rows)
            assert not any(cell.startswith(FORMULA) for row in rows for cell in row)


REFUSED = (
    "overview?range=2h", "adapters?sort=password", "adapters?limit=0", "adapters?limit=1000",
    "adapters?offset=-1", "events?topics=everything", "export/keys.csv",
    "export/adapter-keys.csv?tenant=acme&adapter=base", "adapters?search=" + "x" * 200,
)  # fmt: skip


async def test_what_cannot_be_shown_is_refused(tmp_path: Path):
    async with dashboard(tmp_path) as at, at.logged_in() as browser:
        for path in REFUSED:
            reply = await browser.get(f"/dashboard/api/{path}")
            assert reply.status_code == 400, path
            assert reply.headers["content-type"] == "application/problem+json"
