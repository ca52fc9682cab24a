"""Who holds a slot, waits for one, and what batches were made of."""

import time
from pathlib import Path

import pytest

from adapter_store.registry.records import ResidencyLimits
from engine.engine_stats import QueueStats
from engine.telemetry.records import (
    AdapterOwner,
    SlotEvent,
)
from loraplex.dashboard.adapter_views import Adapters
from loraplex.dashboard.engine_views import Batch, Slots
from tests.support.dashboard import dashboard, get
from tests.support.records import stats, step_record
from tests.support.registry import FINGERPRINT, upload

pytestmark = pytest.mark.anyio

KEPT_LIMITS = ResidencyLimits(
    base_fingerprint=FINGERPRINT, max_pinned=2, max_warm=1, max_bytes=2**30
)


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
