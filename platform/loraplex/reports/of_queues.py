"""For how long each adapter's requests waited, and for what: for a terminal, and for a report."""

from collections.abc import Sequence

from engine.simulation.figures import AdapterWait
from engine.simulation.study import Groups
from loraplex.reports.plots import BarPlot, Section, TextTable

TITLE = "Queue time by adapter and cause"


def last_waits(groups: Groups) -> tuple[str, Sequence[AdapterWait]]:
    """Of one seed of the last policy at its highest rate, and a title that says so."""
    if not groups:
        return TITLE, ()
    (policy, rate), group = max(groups.items(), key=lambda item: item[0][1])
    where = f"{policy} at {rate:g} requests/s" if rate else policy
    seed = f", seed {group[0].seed}" if len(group) > 1 else ""
    return f"{TITLE}: {where}{seed}", group[0].adapters


def queue_table(waits: Sequence[AdapterWait]) -> TextTable | None:
    """Mean milliseconds of their requests, a column for each cause; None if nobody waited."""
    causes = _causes(waits)
    if not causes:
        return None
    has_times = any(wait.ttft_p99_ms is not None for wait in waits)
    rows: list[list[str]] = []
    for wait in waits:
        times = [f"{wait.ttft_p99_ms or 0.0:,.0f}"] if has_times else []
        means = [f"{wait.queue_ms.get(cause, 0.0):,.1f}" for cause in causes]
        longest = f"{wait.longest_wait_ms:,.0f}"
        rows.append([wait.adapter, f"{wait.num_requests:,}", *times, longest, *means])
    times = ["TTFT p99, ms"] if has_times else []
    return TextTable(["adapter", "requests", *times, "longest wait, ms", *causes], rows)


def queue_section(waits: Sequence[AdapterWait], title: str = TITLE) -> list[Section]:
    """Bars and the table; nothing if nobody waited."""
    causes = _causes(waits)
    if not causes:
        return []
    bars = [(wait.adapter, [wait.queue_ms.get(c, 0.0) for c in causes]) for wait in waits]
    return [
        Section(
            title=title,
            text="The adapters that waited longest in all; mean milliseconds of their requests.",
            plot=BarPlot(x_label="ms", parts=causes, bars=bars),
            table=queue_table(waits),
        )
    ]


def _causes(waits: Sequence[AdapterWait]) -> list[str]:
    return list(dict.fromkeys(cause for wait in waits for cause in wait.queue_ms))
