"""What the dashboard's pages read: from records as the recorder wrote them, on both databases."""

import csv
import io
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from sqlalchemy import text

from adapter_store.registry.records import Quota, ResidencyLimits
from engine.messages import QueueStats, TenantLoad
from engine.telemetry.records import (
    AdapterOwner,
    RequestRecord,
    SlotEvent,
    StepShare,
)
from loraplex.csv_table import FORMULA
from loraplex.dashboard.adapter_views import Adapters, AdapterView
from loraplex.dashboard.engine_views import Batch, Slots
from loraplex.dashboard.views import Alerts, Export, Overview
from loraplex.dashboard.views import Quota as QuotaView
from loraplex.recorder.alert_desk import CALM_SECONDS, PUBLISH_EVIDENCE_SECONDS, AlertDesk
from loraplex.recorder.standings import Standings
from loraplex.recorder.traffic import CAUSES
from loraplex.recorder.widths import SPANS
from tests.support.dashboard import Dashboard, Recording, dashboard
from tests.support.fake_engine import FakeEngine, statistics
from tests.support.records import ToldEngine, request_record, stats, step_record
from tests.support.registry import FINGERPRINT, counted_statements, open_registry, upload

pytestmark = pytest.mark.anyio

KEPT_LIMITS = ResidencyLimits(
    base_fingerprint=FINGERPRINT, max_pinned=2, max_warm=1, max_bytes=2**30
)


def just_now(**changes: object) -> RequestRecord:
    """A request that ended a moment ago."""
    record = request_record(**changes)
    return msgspec.structs.replace(record, arrived=time.time() - 1.0 - record.seconds)


async def get(browser: httpx.AsyncClient, path: str, type_: Any, **query: Any) -> Any:
    reply = await browser.get(f"/dashboard/api/{path}", params=query)
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=type_)


async def fill(at: Dashboard) -> None:
    """Two tenants' requests: five of `acme` for two versions of `tone`, one of `zen`."""
    await at.recording.record(
        [
            just_now(queue={"slot": 0.3, "turn": 0.1}),
            just_now(queue={"slot": 0.1}, finish_reasons=("length",)),
            just_now(
                version=2, ttft=2.0, seconds=4.0, queue={"kv": 1.5}, finish_reasons=("abort",)
            ),
            just_now(adapter="other", queue={}),
            just_now(adapter=None, version=None, queue={}),
            just_now(tenant="zen", adapter="secret", queue={"load": 3.0}),
        ],
        [
            step_record(
                time.time() - 2,
                [StepShare("acme", "tone@1", 1, 30, 1), StepShare("zen", "secret@1", 0, 0, 5)],
            )
        ],
    )


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
        known = [value is not None for value in view.causes.turn]
        assert known[-2:] == [True, True] and not any(known[:-4])
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


async def test_a_version_that_forgot_its_end_is_called_out(tmp_path: Path, registry_url: str):
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        registry = at.service.registry
        await registry.register_version("acme", "tone", upload("one"), FINGERPRINT)
        await at.recording.record([just_now() for _ in range(20)])
        await registry.register_version("acme", "tone", upload("two"), FINGERPRINT)
        runaway = [just_now(version=2, finish_reasons=("length",)) for _ in range(12)]
        await at.recording.record(runaway)
        view: AdapterView = await get(browser, "adapters/acme/tone", AdapterView)
        newest, first = view.publishes
        assert (newest.version, newest.previous, newest.verdict) == (2, 1, "never_stops")
        assert (newest.before.stop, newest.after.length) == (20, 12)
        assert (newest.before_length_share, newest.after_length_share) == (0.0, 1.0)
        assert (first.version, first.previous, first.verdict) == (1, None, "fine")
        desk = AlertDesk(registry.database)
        await desk.look(time.time())
        found: Alerts = await get(browser, "alerts", Alerts)
        alert = next(alert for alert in found.alerts if alert.kind == "never_stops")
        assert (alert.tenant, alert.adapter, alert.version) == ("acme", "tone", 2)
        assert alert.severity == "critical" and alert.ended is None
        assert "12 of 12 replies of version 2" in alert.what and "0 of 20 of the v" in alert.what
        await desk.look(time.time())  # again: still one
        again: Alerts = await get(browser, "alerts", Alerts)
        assert len(again.alerts) == len(found.alerts)


async def test_an_alert_of_a_version_ends_when_its_endings_are_an_hour_old(registry_url: str):
    now = time.time()
    async with open_registry(registry_url) as registry:
        desk = AlertDesk(registry.database, clock=lambda: now)
        recording = Recording(registry)
        await registry.register_version("acme", "tone", upload("one"), FINGERPRINT)
        await recording.record([just_now(finish_reasons=("length",)) for _ in range(12)])

        async def look() -> set[str]:
            await desk.look(now)
            rows = await registry.database.read(
                lambda s: s.execute(text("SELECT kind FROM alert WHERE ended IS NULL"))
            )
            return {row.kind for row in rows}

        assert "never_stops" in await look()
        now += PUBLISH_EVIDENCE_SECONDS - 60
        assert "never_stops" in await look()
        now += 180
        await look()
        now += CALM_SECONDS
        assert "never_stops" not in await look()


async def test_requests_that_had_to_run_until_their_limit_are_no_evidence(
    tmp_path: Path, registry_url: str
):
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        registry = at.service.registry
        await registry.register_version("acme", "tone", upload("one"), FINGERPRINT)
        await at.recording.record(
            [just_now(finish_reasons=("length",), may_stop=False) for _ in range(30)]
        )
        await AlertDesk(registry.database).look(time.time())
        assert (await get(browser, "alerts", Alerts)).alerts == []
        view: AdapterView = await get(browser, "adapters/acme/tone", AdapterView)
        assert view.row.finishes.length == 30
        [publish] = view.publishes
        assert (publish.verdict, publish.after.length) == ("too_few", 0)
        await at.recording.record([just_now(finish_reasons=("length",)) for _ in range(12)])
        await AlertDesk(registry.database).look(time.time())
        found = {alert.kind for alert in (await get(browser, "alerts", Alerts)).alerts}
        assert found == {"never_stops", "runaway_generation"}


async def test_who_waits_is_told_which_slot_is_to_be_its_own(tmp_path: Path, registry_url: str):
    now = time.time()

    def happened(kind: str, ago: float, digest: str, label: str) -> SlotEvent:
        owners = (AdapterOwner("acme", label),)
        return SlotEvent(at=now - ago, slot=1, digest=digest * 64, owners=owners, kind=kind)

    waits = QueueStats(
        tenant="acme", adapter="e" * 64, label="late@2", waiting=1, running=0, cause="slot",
        waited={}, oldest=2.0,
    )  # fmt: skip
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        at.recording.engine.stats_now = stats([waits])
        await at.recording.record(
            events=[
                happened("loading", 9, "d", "tone@1"), happened("resident", 8, "d", "tone@1"),
                happened("reserved", 2, "e", "late@2"), happened("draining", 2, "d", "tone@1"),
            ]
        )  # fmt: skip
        view: Slots = await get(browser, "slots", Slots)
        assert [(w.adapter, w.version, w.reserved_slot) for w in view.waits] == [("late", 2, 1)]
        assert [(s.slot, s.kind, s.adapter) for s in view.spans if s.end is None] == [
            (1, "reserved", "late"), (1, "draining", "tone"),
        ]  # fmt: skip
        at.recording.engine.stats_now = stats()
        await at.recording.record(
            events=[happened("evicted", 1, "d", "tone@1"), happened("loading", 1, "e", "late@2")]
        )
        view = await get(browser, "slots", Slots)
        assert [(s.slot, s.kind) for s in view.spans if s.end is None] == [(1, "loading")]


async def test_names_with_the_same_files_are_in_a_slot_each_as_itself(
    tmp_path: Path, registry_url: str
):
    now = time.time()
    first = AdapterOwner("acme", "tone@1")
    owners = (first, AdapterOwner("acme", "copy@1"), AdapterOwner("zen", "secret@3"))

    def happened(kind: str, ago: float, owners: tuple[AdapterOwner, ...]) -> SlotEvent:
        return SlotEvent(at=now - ago, slot=0, digest="d" * 64, owners=owners, kind=kind)

    async with dashboard(tmp_path, registry_url) as at, at.logged_in("acme:tenant") as browser:
        for name in ("tone", "copy"):
            await at.service.registry.register_version("acme", name, upload("one"), FINGERPRINT)
        await at.recording.record(
            events=[
                happened("loading", 60, (first,)), happened("resident", 50, (first,)),
                happened("shared", 20, owners),
            ]
        )  # fmt: skip
        view: Slots = await get(browser, "slots", Slots)
        *_, span = view.spans
        assert (span.kind, span.adapter, span.end) == ("resident", "tone", None)
        assert [(also.adapter, also.version) for also in span.also] == [("copy", 1)]
        assert (view.loads, len(view.marks)) == (1, 1)
        table: Adapters = await get(browser, "adapters", Adapters, range="5m")
        places = {row.adapter: (row.residency, row.loads) for row in table.rows}
        assert places == {"tone": ("slot", 1), "copy": ("slot", 0)}
        shares = {row.adapter: row.resident_share or 0.0 for row in table.rows}
        assert shares["tone"] > shares["copy"] > 0


async def test_a_pin_is_shown_to_its_tenant_and_to_no_other(tmp_path: Path, registry_url: str):
    async with dashboard(tmp_path, registry_url) as at:
        registry = at.service.registry
        events: list[SlotEvent] = []
        for slot, (tenant, name) in enumerate((("acme", "tone"), ("zen", "mine"), ("zen", "own"))):
            content = "own" if name == "own" else "same"
            made = await registry.register_version(tenant, name, upload(content), FINGERPRINT)
            events.append(
                SlotEvent(
                    at=time.time() - 9, slot=slot, digest=made.digest, kind="resident",
                    owners=(AdapterOwner(tenant, f"{name}@1"),),
                )
            )  # fmt: skip
        for name in ("mine", "own"):
            await registry.set_residency("zen", name, "pinned", KEPT_LIMITS)
        await at.recording.record(events=events)
        for key, expected in (
            ("admin", [("tone", True), ("mine", True), ("own", True)]),
            ("zen:tenant", [(None, True), ("mine", True), ("own", True)]),
            ("acme:tenant", [("tone", False), (None, False), (None, False)]),
        ):
            async with at.logged_in(key) as browser:
                view: Slots = await get(browser, "slots", Slots)
                assert [(span.adapter, span.is_pinned) for span in view.spans] == expected


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


async def test_alerts_are_found_in_what_was_recorded(tmp_path: Path, registry_url: str):
    now = time.time()
    churning = [
        just_now(tenant="zen", adapter="tossed", queue={"slot": 2.0, "load": 1.0})
        for _ in range(12)
    ]
    events = [
        SlotEvent(
            at=now - 30 + n, slot=0, digest="d" * 64, owners=(AdapterOwner("zen", "tossed@1"),),
            kind="resident" if n % 2 else "loading",
        )
        for n in range(10)
    ]  # fmt: skip
    async with dashboard(tmp_path, registry_url) as at:
        at.recording.engine.missed = 3
        await at.recording.record(churning, [step_record(now - 5, preemptions=6)], events)
        await AlertDesk(at.service.registry.database).look(time.time())
        async with at.logged_in("admin") as browser:
            found: Alerts = await get(browser, "alerts", Alerts)
            assert {(a.kind, a.tenant, a.adapter) for a in found.alerts} == {
                ("preemption_thrash", None, None), ("records_missed", None, None),
                ("adapter_churn", "zen", "tossed"),
            }  # fmt: skip
            assert all(alert.figures and alert.change for alert in found.alerts)
        async with at.logged_in("zen:tenant") as browser:
            own: Alerts = await get(browser, "alerts", Alerts)
            assert [alert.kind for alert in own.alerts] == ["adapter_churn"]
        async with at.logged_in("acme:tenant") as browser:
            assert (await get(browser, "alerts", Alerts)).alerts == []


async def test_an_alert_ends_when_it_is_not_found_any_more(registry_url: str):
    now = time.time()
    async with open_registry(registry_url) as registry:
        desk = AlertDesk(registry.database, clock=lambda: now)
        await desk.look(now - 60)

        async def read() -> list[tuple[str, float, float | None]]:
            rows = await registry.database.read(
                lambda s: s.execute(text("SELECT kind, began, ended FROM alert"))
            )
            return [tuple(row) for row in rows]

        began = now
        assert await read() == [("engine_down", began, None)]
        now += 10
        await desk.look(now)
        assert await read() == [("engine_down", began, None)]  # it may flap
        now += CALM_SECONDS
        await desk.look(now)
        assert await read() == [("engine_down", began, began)]


async def test_slots_and_batches(tmp_path: Path, registry_url: str):
    owners = (AdapterOwner("acme", "tone@1"),)
    now = time.time()

    def happened(kind: str, ago: float, slot: int) -> SlotEvent:
        return SlotEvent(at=now - ago, slot=slot, digest="d" * 64, owners=owners, kind=kind)

    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        await at.recording.record(
            events=[
                happened("loading", 90, 0), happened("resident", 80, 0),
                happened("draining", 40, 0), happened("evicted", 30, 0),
                happened("loading", 20, 1), happened("evicted", 10, 1),
            ],
            steps=[step_record(now - 5), step_record(now - 4)],
        )  # fmt: skip
        view: Slots = await get(browser, "slots", Slots)
        assert [(s.slot, s.kind) for s in view.spans] == [
            (0, "loading"), (0, "resident"), (0, "draining"), (1, "loading"),
        ]  # fmt: skip
        assert [(m.slot, m.kind) for m in view.marks] == [
            (0, "loaded"), (0, "evicted"), (1, "failed"),
        ]  # fmt: skip
        assert (view.loads, view.evictions, view.slots_total) == (1, 1, 2)
        batch: Batch = await get(browser, "batch", Batch)
        assert sum(v or 0 for v in batch.steps) == 2
        assert sum(v or 0 for v in batch.prefill_tokens) == 24
        assert {v for v in batch.rows_mean if v is not None} == {3.0}
        assert max(v or 0 for v in batch.step_seconds.p99) == pytest.approx(0.01, rel=0.011)


async def test_an_adapter_whose_drain_was_called_off_was_neither_loaded_again_nor_evicted(
    tmp_path: Path, registry_url: str
):
    owners, now = (AdapterOwner("acme", "tone@1"),), time.time()
    states = {90: "loading", 80: "resident", 40: "draining", 30: "resident", 5: "draining"}
    async with dashboard(tmp_path, registry_url) as at, at.logged_in() as browser:
        await at.recording.record(
            events=[
                SlotEvent(at=now - ago, slot=0, digest="d" * 64, owners=owners, kind=kind)
                for ago, kind in states.items()
            ]
        )
        view: Slots = await get(browser, "slots", Slots)
        assert [span.kind for span in view.spans] == list(states.values())
        assert [mark.kind for mark in view.marks] == ["loaded"]
        assert (view.loads, view.evictions) == (1, 0)
        left = SlotEvent(at=now - 1, slot=0, digest="d" * 64, owners=owners, kind="evicted")
        await at.recording.record(events=[left])
        view = await get(browser, "slots", Slots)
        assert [mark.kind for mark in view.marks] == ["loaded", "evicted"]


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
