"""The alerts that are found in what the recorder has written."""

import time
from pathlib import Path

import pytest
from sqlalchemy import text

from engine.telemetry.records import (
    AdapterOwner,
    SlotEvent,
)
from loraplex.dashboard.adapter_views import AdapterView
from loraplex.dashboard.views import Alerts
from loraplex.recorder.alert_desk import CALM_SECONDS, PUBLISH_EVIDENCE_SECONDS, AlertDesk
from tests.support.dashboard import Recording, dashboard, get, just_now
from tests.support.records import step_record
from tests.support.registry import FINGERPRINT, open_registry, upload

pytestmark = pytest.mark.anyio


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
