"""The table of adapters, and the page of one."""

import time
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text

from adapter_store.registry.records import ResidencyLimits
from loraplex.dashboard.adapter_views import Adapters, AdapterView
from loraplex.recorder.standings import Standings
from loraplex.recorder.widths import SPANS
from tests.support.dashboard import Recording, dashboard, fill, get, just_now
from tests.support.records import ToldEngine
from tests.support.registry import FINGERPRINT, open_registry, upload

pytestmark = pytest.mark.anyio

KEPT_LIMITS = ResidencyLimits(
    base_fingerprint=FINGERPRINT, max_pinned=2, max_warm=1, max_bytes=2**30
)


async def test_the_table_is_sorted_searched_and_paged_and_knows_idle_adapters(
    tmp_path: Path, registry_url: str
):
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        await at.service.registry.register_version("acme", "idle", upload("one"), FINGERPRINT)
        await at.service.registry.register_version("acme", "tone", upload("two"), FINGERPRINT)
        await fill(at)
        for range_ in SPANS:
            table: Adapters = await get(
                browser, "adapters", Adapters, range=range_, sort="queue_p95"
            )
            names = [(row.tenant, row.adapter) for row in table.rows]
            assert names[0] == ("zen", "secret")
            assert names[1] == ("acme", "tone")
            assert names[-1] == ("acme", "idle")
            assert (table.total, table.known) == (5, 5)
        tone = table.rows[1]
        assert (tone.requests, tone.finishes.length, tone.finishes.abort) == (3, 1, 1)
        assert sum(tone.spark_requests) == 3
        assert tone.queue.p50 == pytest.approx(0.4, rel=0.011)
        odd: Adapters = await get(browser, "adapters", Adapters, search="to\0ne")
        assert (odd.rows, odd.total, odd.known) == ([], 0, 5)
        up: Adapters = await get(browser, "adapters", Adapters, sort="queue_p95", order="asc")
        assert up.rows[-1].adapter == "idle"  # without a figure: last either way
        page: Adapters = await get(
            browser, "adapters", Adapters, sort="adapter", order="asc", offset=1, limit=2
        )
        assert [row.adapter for row in page.rows] == ["idle", "other"]
        registry = at.service.registry
        await registry.register_version("zen", "tone", upload("three"), FINGERPRINT)
        await registry.set_residency("acme", "idle", "warm", KEPT_LIMITS)
        await registry.set_residency("zen", "tone", "pinned", KEPT_LIMITS)
        page = await get(browser, "adapters", Adapters, search="acme/")
        assert {row.adapter: (row.residency, row.kept) for row in page.rows} == {
            "tone": ("absent", "auto"), "other": ("absent", "auto"), "idle": ("host", "warm"),
            "base": ("base", "auto"),
        }  # fmt: skip
        page = await get(browser, "adapters", Adapters, search="zen/tone")
        assert [(row.residency, row.kept) for row in page.rows] == [("host", "pinned")]
        await registry.delete_adapter("zen", "tone")
        found: Adapters = await get(browser, "adapters", Adapters, search="ZEN/s")
        assert ([row.adapter for row in found.rows], found.total, found.known) == (["secret"], 1, 5)
        assert (await get(browser, "adapters", Adapters, search="%")).total == 0
        await at.recording.record([just_now(adapter="slow", decode_seconds=2.0, seconds=3.0)])
        table = await get(browser, "adapters", Adapters, sort="token_time_p95")
        assert table.rows[0].adapter == "slow"
        assert table.rows[0].token_time.p95 == pytest.approx(0.2, rel=0.011)
        endings = [*["length"] * 3, *["stop"] * 4]
        await at.recording.record(
            [just_now(adapter="half", finish_reasons=(reason,)) for reason in endings]
        )
        table = await get(browser, "adapters", Adapters, sort="length_share")
        assert [row.adapter for row in table.rows[:2]] == ["tone", "half"]  # 1 of 2, and 3 of 7


async def test_one_adapters_page_adds_up(tmp_path: Path, registry_url: str):
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        registry = at.service.registry
        for number, content in enumerate(("one", "two"), start=1):
            made = await registry.register_version("acme", "tone", upload(content), FINGERPRINT)
            assert made.version == number
        await fill(at)
        view: AdapterView = await get(browser, "adapters/acme/tone", AdapterView, range="5m")
        assert view.row.requests == sum(v or 0 for v in view.requests) == 3
        columns = msgspec.to_builtins(view.causes)
        for cause, seconds in msgspec.to_builtins(view.row.causes).items():
            assert sum(v or 0 for v in columns[cause]) == pytest.approx(seconds)
        assert [(v.version, v.requests, v.share) for v in view.versions] == [
            (2, 1, pytest.approx(1 / 3)), (1, 2, pytest.approx(2 / 3)),
        ]  # fmt: skip
        assert {k: sum(x or 0 for x in v) for k, v in view.version_requests.items()} == {
            "1": 2, "2": 1,
        }  # fmt: skip
        assert [(a.alias, a.version) for a in view.aliases] == [("default", 2)]
        slowest = view.slow_requests[0]
        assert (slowest.version, slowest.ttft_seconds, slowest.finish_reason) == (2, 2.0, "abort")
        assert sum(msgspec.to_builtins(slowest.causes).values()) == slowest.queue_seconds
        assert slowest.timeline[0].state == "queued"
        assert (await get(browser, "adapters/zen/base", AdapterView)).row.requests == 0
        for path in ("adapters/ghost/base", "adapters/acme/ghost", "adapters/acme/a%00b"):
            assert (await browser.get(f"/dashboard/api/{path}")).status_code == 404


async def test_an_adapter_that_lost_its_traffic_leaves_the_table(registry_url: str):
    now = time.time()
    async with open_registry(registry_url) as registry:
        recording = Recording(registry, ToldEngine())
        await recording.record([just_now()])
        standings = Standings(registry.database, clock=lambda: now)
        assert await standings.refresh("5m") == 1
        assert await standings.refresh("5m") == 0  # nothing has changed
        now += SPANS["5m"].seconds + 20
        assert await standings.refresh("5m") == 1
        rows = await registry.database.read(
            lambda s: s.execute(text("SELECT 1 FROM adapter_standing WHERE span = 300"))
        )
        assert rows.all() == []
