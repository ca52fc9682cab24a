"""What the service's alerts would say of simulated engines: for a terminal, and for a report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.simulation.failure_modes import Recognised
from engine.simulation.intervals import Sighting
from engine.simulation.study import Row, grouped
from engine.telemetry.alerts import Figure, Finding
from loraplex.reports.plots import Note, Section, TextTable

MOST_NAMED = 3
SILENT = "No alert of the service would sound."
LEAD = (
    "What the running service would raise, by the same rules, while requests come; one entry for "
    "each kind, in the words of its worst case."
)


@dataclass(frozen=True, slots=True)
class Alert:
    """All sightings of one kind under one policy at one rate."""

    policy: str
    rate: float
    where: str
    worst: Finding

    @property
    def name(self) -> str:
        """As a heading."""
        return self.worst.kind.replace("_", " ")


def alerts(rows: Sequence[Row]) -> list[Alert]:
    """By policy, rate and kind, in the order of the rows."""
    found: list[Alert] = []
    for (policy, rate), group in grouped(rows).items():
        num_runs = sum(row.num_replicas for row in group)
        seen = [(run, s) for run, row in enumerate(group) for s in row.sightings]
        unit = "replicas" if group[0].num_replicas > 1 else "runs"
        found += _by_kind(policy, rate, seen, num_runs, unit)
    return found


def replica_alerts(sightings: Iterable[Sighting], rate: float, num_replicas: int) -> list[Alert]:
    """Of the replicas of one fleet."""
    return _by_kind("", rate, [(0, s) for s in sightings], num_replicas, "replicas")


def alert_lines(found: Sequence[Alert]) -> list[str]:
    """For a terminal."""
    if not found:
        return [SILENT]
    lines: list[str] = []
    for alert in found:
        setup = f"{alert.policy} at {_rate(alert.rate)}: " if alert.policy else ""
        lines += [
            f"{setup}{alert.worst.kind} ({alert.worst.severity}, {alert.where})",
            f"    {alert.worst.what}",
            f"    {alert.worst.change}",
        ]
    return lines


def alert_section(found: Sequence[Alert]) -> Section:
    """For a report."""
    return Section(
        title="Alerts",
        text=LEAD if found else SILENT,
        notes=[
            Note(
                title=alert.name,
                level=alert.worst.severity,
                source=f"{alert.policy} at {_rate(alert.rate)}, {alert.where}"
                if alert.policy
                else alert.where,
                text=alert.worst.what,
                advice=alert.worst.change,
                figures=[_figure(figure) for figure in alert.worst.figures],
            )
            for alert in found
        ],
    )


def recognised_table(found: Sequence[Recognised]) -> TextTable:
    """The failure modes, and whether each was named."""
    return TextTable(
        ["failure", "made by", "alert", "cured by", "then"],
        [
            [
                one.mode.kind, one.mode.made_by, "sounds" if one.is_named else "IS SILENT",
                one.mode.cured_by, "silent" if one.is_silent else "STILL SOUNDS",
            ]
            for one in found
        ],
        is_prose=True,
    )  # fmt: skip


def _by_kind(
    policy: str, rate: float, seen: Sequence[tuple[int, Sighting]], num_runs: int, unit: str
) -> list[Alert]:
    by_kind: dict[str, list[tuple[int, Sighting]]] = {}
    for run, sighting in seen:
        by_kind.setdefault(sighting.finding.kind, []).append((run, sighting))
    found: list[Alert] = []
    for group in by_kind.values():
        worst = min((s.finding for _, s in group), key=lambda f: f.severity != "critical")
        in_runs = len({(run, s.replica) for run, s in group})
        where = f"in {in_runs} of {num_runs} {unit}" if num_runs > 1 else ""
        names = list(dict.fromkeys(s.finding.adapter for _, s in group if s.finding.adapter))
        where = "; ".join(filter(None, (_names(names), where)))
        found.append(Alert(policy, rate, where or "the engine", worst))
    return found


def _names(adapters: Sequence[str]) -> str:
    if len(adapters) > MOST_NAMED:
        named = ", ".join(adapters[:MOST_NAMED])
        return f"{len(adapters)} adapters: {named} and others"
    return ("adapter " if len(adapters) == 1 else "adapters ") * bool(adapters) + ", ".join(
        adapters
    )


def _rate(rate: float) -> str:
    return f"{rate:g}/s" if rate else "the trace's rate"


def _figure(figure: Figure) -> tuple[str, str]:
    limit = "" if figure.limit is None else f" (limit {_value(figure.limit, figure.unit)})"
    return figure.name, _value(figure.value, figure.unit) + limit


def _value(value: float, unit: str) -> str:
    match unit:
        case "share":
            return f"{value:.0%}"
        case "s":
            return f"{value:,.2f} s"
        case "per_second":
            return f"{value:,.1f}/s"
        case "count" | "tokens":
            return f"{value:,.0f}"
        case _:
            return f"{value:,.2f}"
