"""Failure modes are found in sums that show them, and in no others."""

from dataclasses import replace

import pytest

from engine.telemetry.alerts import (
    AdapterInterval,
    Interval,
    adapter_findings,
    engine_findings,
    judge_publish,
    wilson,
)

HEALTHY = Interval(
    seconds=60.0, requests=120, output_tokens=12_000, preemptions=0, running=8.0, waiting=1.0,
    kv_share=0.6, token_time_p50=0.03, token_gap_p95=0.1, prefill_tokens=24_000,
)  # fmt: skip
ADAPTER = AdapterInterval(
    tenant="acme", adapter="tone", requests=100, stop=90, length=10,
    queue={"turn": 20.0, "slot": 1.0}, queue_p95=0.4, loads=1,
)  # fmt: skip


def kinds(*intervals: Interval) -> list[str]:
    return [finding.kind for finding in engine_findings(intervals)]


def test_a_healthy_engine_and_adapter_are_left_in_peace():
    assert engine_findings([HEALTHY] * 5) == []
    assert adapter_findings([ADAPTER]) == []
    assert engine_findings([]) == []


def test_preemption_thrash():
    thrashing = replace(HEALTHY, preemptions=30, kv_share=0.99)
    [found] = engine_findings([HEALTHY, thrashing])
    assert (found.kind, found.severity) == ("preemption_thrash", "warning")
    figures = {figure.name: figure for figure in found.figures}
    assert figures["preemptions a request"].value == pytest.approx(30 / 240)
    assert figures["preemptions a request"].limit == 0.1
    assert figures["KV blocks used"].value == pytest.approx(0.795)
    assert "max_num_seqs" in found.change
    assert kinds(replace(HEALTHY, preemptions=4)) == []
    assert engine_findings([replace(thrashing, preemptions=80)])[0].severity == "critical"


def test_preemptions_while_blocks_are_free_are_for_slots():
    [found] = engine_findings([replace(HEALTHY, preemptions=30, kv_share=0.01)])
    assert found.kind == "preemption_thrash"
    assert "slots" in found.what and "max_loras" in found.change
    assert "KV memory" not in found.what


def test_decode_stalls():
    stalled = replace(HEALTHY, token_gap_p95=0.4)
    [found] = engine_findings([stalled])
    assert (found.kind, found.severity) == ("decode_stall", "warning")
    assert "max_num_batched_tokens" in found.change
    assert kinds(replace(stalled, token_time_p50=0.1)) == []  # slow, and even
    assert kinds(replace(stalled, token_gap_p95=0.2)) == []  # nobody notices
    assert kinds(replace(stalled, requests=5)) == []


def test_gaps_that_preemptions_make_are_no_decode_stalls():
    assert kinds(replace(HEALTHY, token_gap_p95=2.0, preemptions=60)) == ["preemption_thrash"]


def test_queueing_collapse():
    growing = [replace(HEALTHY, waiting=float(waiting)) for waiting in (4, 10, 20, 40)]
    [found] = engine_findings(growing)
    assert (found.kind, found.severity) == ("queueing_collapse", "critical")
    wait = next(figure for figure in found.figures if figure.unit == "s")
    assert wait.value == pytest.approx(20.0)  # 40 wait, 2 a second are served


def test_a_queue_that_shrinks_again_or_that_throughput_follows_is_no_collapse():
    waves = [replace(HEALTHY, waiting=float(waiting)) for waiting in (4, 40, 20, 30)]
    rising = [
        replace(HEALTHY, waiting=4.0 * n, output_tokens=12_000 * n) for n in (1, 2, 3, 4)
    ]  # fmt: skip
    short = [replace(HEALTHY, waiting=float(waiting)) for waiting in (1, 2, 3)]
    assert kinds(*waves) == kinds(*rising) == kinds(*short) == []


def test_runaway_generations():
    runaway = replace(ADAPTER, stop=2, length=98)
    [found] = adapter_findings([ADAPTER, runaway])
    assert (found.kind, found.tenant, found.adapter) == ("runaway_generation", "acme", "tone")
    assert found.figures[0].value == pytest.approx(0.98)
    assert adapter_findings([replace(runaway, stop=0, length=9)]) == []


def test_adapter_churn():
    churning = replace(ADAPTER, queue={"slot": 60.0, "load": 30.0, "turn": 10.0}, loads=40)
    [found] = adapter_findings([churning])
    assert (found.kind, found.severity) == ("adapter_churn", "warning")
    assert "max_loras" in found.change
    assert adapter_findings([replace(churning, loads=1)]) == []  # waits once, then stays
    assert adapter_findings([replace(churning, queue={"slot": 30.0, "turn": 70.0})]) == []
    assert adapter_findings([replace(churning, queue={"slot": 5.0})]) == []  # short waits


def test_a_version_that_never_stops_is_told_from_chance():
    assert judge_publish((90, 10), (0, 30)) == "never_stops"
    assert judge_publish((90, 10), (0, 9)) == "too_few"
    assert judge_publish((90, 10), (27, 3)) == "fine"
    assert judge_publish(None, (0, 10)) == "never_stops"
    assert judge_publish(None, (5, 5)) == "fine"
    assert judge_publish((1, 99), (0, 30)) == "fine"  # it was so before
    assert judge_publish((0, 0), (0, 30)) == "never_stops"


@pytest.mark.parametrize("hits, trials", [(0, 1), (1, 1), (3, 10), (10, 10), (500, 1000)])
def test_wilsons_bounds_hold_the_share(hits: int, trials: int):
    low, high = wilson(hits, trials)
    assert -1e-9 <= low <= hits / trials <= high <= 1 + 1e-9
