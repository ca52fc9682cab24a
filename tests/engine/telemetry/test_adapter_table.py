"""Totals by adapter: bounded, and their sum is that of all requests at any time."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.telemetry.adapter_table import (
    IDLE_SECONDS,
    LATE_SECONDS,
    OTHER,
    REVIEW_SECONDS,
    AdapterTable,
)
from engine.telemetry.adapter_totals import add_request, is_good
from engine.telemetry.records import Objective, RequestRecord

OBJECTIVE = Objective()


def record(tenant: str, adapter: str | None, tokens: int = 10, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "call": "c", "tenant": tenant, "adapter": adapter, "version": 1, "arrived": 0.0,
        "queue": {"turn": 0.25, "load": 0.5}, "load_seconds": 0.5, "ttft": 0.1, "seconds": 0.6,
        "decode_seconds": 0.5, "longest_gap": 0.1, "prompt_tokens": tokens, "cached_tokens": 0,
        "output_tokens": 11, "finish_reasons": ("stop",), "preemptions": 1,
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def count(table: AdapterTable, told: RequestRecord, now: float = 0.0, arrived: float = 0.0) -> None:
    tokens = told.prompt_tokens
    totals = table.note_traffic(told.tenant, told.adapter, tokens, arrived, now)
    add_request(totals, told, OBJECTIVE)


def named(table: AdapterTable) -> list[tuple[str, str | None]]:
    return [(t.tenant, t.adapter) for t in table.all() if t.tenant != OTHER]


def test_a_request_is_good_within_both_parts_of_the_objective_only():
    assert is_good(record("t", "a", ttft=0.5, decode_seconds=0.8), OBJECTIVE), "just within"
    assert not is_good(record("t", "a", ttft=0.501), OBJECTIVE)
    assert not is_good(record("t", "a", decode_seconds=0.801), OBJECTIVE)
    assert not is_good(record("t", "a", finish_reasons=("abort",)), OBJECTIVE)
    assert not is_good(record("t", "a", ttft=None), OBJECTIVE)
    one_token = record("t", "a", output_tokens=1, decode_seconds=0.0)
    assert is_good(one_token, OBJECTIVE)


def test_adapters_beyond_the_limit_share_and_the_busiest_is_promoted():
    table = AdapterTable(2, now=0.0)
    for name in ("a", "b", "c"):
        count(table, record("t", name))
    assert named(table) == [("t", "a"), ("t", "b")]
    for _ in range(4):
        count(table, record("t", "b"))
    for _ in range(5):
        count(table, record("t", "c"))
    count(table, record("t", "c"), now=REVIEW_SECONDS)
    assert named(table) == [("t", "b"), ("t", "c")]
    assert table.other.requests == {"stop": 8}, "what went before stays where it was counted"


def test_equal_adapters_do_not_change_places():
    table = AdapterTable(4, now=0.0)
    rng, seen = random.Random(0), set[tuple[str, str | None]]()
    for step in range(4000):
        count(table, record("t", f"a{rng.randrange(1000)}"), now=step / 10)
        seen.update(named(table))
    assert len(seen) <= 8, "new series all the time are worse than those of the wrong adapters"


def test_a_deleted_adapter_takes_its_series_along_and_late_requests_do_not_bring_it_back():
    table = AdapterTable(10, now=0.0)
    for name in ("a", "b", None):
        count(table, record("t", name))
    count(table, record("u", "a"))
    table.forget("t", "a", now=5.0)
    count(table, record("t", "a"), now=6.0, arrived=4.0)
    assert named(table) == [("t", "b"), ("t", None), ("u", "a")]
    count(table, record("t", "a"), now=8.0, arrived=7.0)
    assert ("t", "a") in named(table), "made anew under its old name"
    table.forget("t", None, now=9.0)
    assert named(table) == [("u", "a")] and table.other.requests == {"stop": 5}


def test_refusals_that_are_told_after_a_deletion_do_not_bring_it_back():
    table = AdapterTable(10, now=0.0)
    table.refusals_of("t", "a", now=1.0).refused["x"] = 1
    table.forget("t", "a", now=5.0)
    assert table.refusals_of("t", "a", now=5.5) is table.other
    assert named(table) == [] and table.other.refused == {"x": 1}
    table.refusals_of("t", "b", now=5.5)
    table.refusals_of("t", "a", now=5.0 + LATE_SECONDS + 1.0)
    assert named(table) == [("t", "b"), ("t", "a")], "made anew under its old name"


def test_an_adapter_that_nobody_uses_gives_its_place_up():
    table = AdapterTable(10, now=0.0)
    count(table, record("t", "a"))
    count(table, record("t", "b"), now=IDLE_SECONDS)
    table.review(IDLE_SECONDS + 1.0)
    assert named(table) == [("t", "b")]


def test_a_request_whose_adapter_loses_its_place_meanwhile_is_counted_all_the_same():
    table = AdapterTable(1, now=0.0)
    count(table, record("t", "a", 1))
    for _ in range(3):
        count(table, record("t", "b"))
    count(table, record("t", "a", 1), now=REVIEW_SECONDS)
    assert named(table) == [("t", "b")]
    assert table.other.requests == {"stop": 5}


def test_one_that_comes_into_a_free_place_is_no_candidate_for_another():
    table = AdapterTable(1, now=0.0)
    count(table, record("t", "a"))
    count(table, record("t", "b"))
    table.forget("t", "a", now=1.0)
    for _ in range(2):
        count(table, record("t", "b"), now=REVIEW_SECONDS)
    assert named(table) == [("t", "b")]
    assert sum(t.requests["stop"] for t in table.all()) == 4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_the_sums_are_those_of_all_requests(data: st.DataObject):
    table = AdapterTable(data.draw(st.integers(0, 4)), now=0.0)
    told: list[RequestRecord] = []
    now = 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from([0.0, 1.0, 11.0, 4000.0]))
        name = data.draw(st.sampled_from(["a", "b", "c", "d", "e", "f", None]))
        if data.draw(st.integers(0, 9)) == 0:
            table.forget("t", name, now)
            continue
        reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
        told.append(record("t", name, data.draw(st.integers(0, 99)), finish_reasons=(reason,)))
        count(table, told[-1], now, arrived=now)
    everything = table.all()
    assert len(everything) <= table._max_adapters + 1
    assert sum((Counter(t.requests) for t in everything), Counter()) == Counter(
        r.finish_reason for r in told
    )
    assert sum(t.prompt_tokens for t in everything) == sum(r.prompt_tokens for r in told)
    assert sum(t.preemptions for t in everything) == len(told)
    assert sum(t.good for t in everything) == sum(is_good(r, OBJECTIVE) for r in told)
    waited = sum(t.queue["load"].sum for t in everything if "load" in t.queue)
    assert waited == 0.5 * len(told)
    assert sum(t.queue_total.count for t in everything) == len(told)
