"""The report of a plan: what to deploy, and why."""

from collections.abc import Callable, Sequence

from engine.simulation.log_histogram import LogHistogram
from engine.simulation.plan import Demand, Plan, Setup, Trial
from loraplex.reports.of_alerts import alert_section, replica_alerts
from loraplex.reports.of_queues import queue_section
from loraplex.reports.plan_answers import answers, load_label, load_words
from loraplex.reports.plots import LinePlot, Point, Report, Section, Series, TextTable

COLUMNS: tuple[tuple[str, Callable[[Trial], str], str], ...] = (
    ("requests/s a replica", lambda t: f"{t.setup.rate:,.2f}", "that are sent to it"),
    ("tokens/s a replica", lambda t: f"{t.tokens_per_second:,.0f}", "output tokens it gives"),
    ("TTFT p50", lambda t: _ms(t.figures.ttft, 0.5, 0), "time to first token, ms: the median"),
    ("TTFT p99", lambda t: _ms(t.figures.ttft, 0.99, 0), "of all but 1%"),
    ("TPOT p50", lambda t: _ms(t.figures.tpot, 0.5, 1), "time per output token after it, ms"),
    ("gap p99", lambda t: _ms(t.figures.gap, 0.99, 1), "between two tokens, ms, of all but 1%"),
    ("goodput", lambda t: f"{t.figures.goodput:.3f}", "requests within the SLO, as a share"),
    ("good requests/s", lambda t: f"{t.good_per_second:,.2f}", "of a replica, within the SLO"),
    (
        "running",
        lambda t: f"{t.figures.use.mean(t.figures.use.running_seconds):,.1f}",
        "sequences at a time, on average",
    ),
    (
        "slots",
        lambda t: f"{t.figures.use.mean(t.figures.use.slot_seconds):,.1f}",
        "adapters in a slot, on average",
    ),
    ("KV peak, blocks", lambda t: f"{t.figures.use.kv_peak:,}", "of a replica"),
    ("preempted", lambda t: f"{t.figures.num_preemptions:,}", "sequences that lost their blocks"),
    ("loads", lambda t: f"{t.figures.num_installs:,}", "adapters that came into a slot"),
)


def trial_table(trials: Sequence[Trial], *more: tuple[str, Callable[[Trial], str]]) -> TextTable:
    """Trials in figures; times in milliseconds."""
    columns = [*more, *((heading, value) for heading, value, _ in COLUMNS)]
    return TextTable(
        [heading for heading, _ in columns],
        [[value(trial) for _, value in columns] for trial in trials],
    )


def load_table(found: Plan) -> TextTable:
    """The rates that were tried, and the demand."""
    return trial_table(
        [*found.by_load, found.expected], ("load", lambda trial: load_label(found, trial))
    )


def plan_report(
    demand: Demand, found: Plan, gpu_price: float | None, settings: Sequence[tuple[str, str]]
) -> Report:
    """Of one plan."""
    lines, expected = answers(demand, found, gpu_price), found.expected
    alerts = replica_alerts(expected.figures.sightings, expected.setup.rate, expected.num_sampled)
    return Report(
        title="Capacity plan",
        lead=f"{demand.rate:g} requests/s, of which {demand.share:.0%} are to meet the SLO: "
        "by simulation of the scheduler that serves.",
        facts=[(line.label, line.value) for line in lines],
        sections=[
            Section(title="Why", table=TextTable(["", "", "because"], lines, is_prose=True)),
            *_by_load(demand, found),
            *_by_setting("max_num_seqs", found.by_seats, lambda s: s.max_num_seqs),
            *_by_setting("max_loras", found.by_slots, lambda s: s.max_loras),
            *queue_section(expected.figures.adapter_waits()),
            alert_section(alerts),
            Section(
                title="The columns",
                table=TextTable(
                    ["column", "meaning"],
                    [[heading, meaning] for heading, _, meaning in COLUMNS],
                    is_prose=True,
                ),
            ),
        ],
        settings=settings,
    )


def _line(trials: Sequence[Trial], name: str, value: Callable[[Trial], float]) -> Series:
    return Series(name, [Point(trial.setup.rate, value(trial)) for trial in trials])


def _by_load(demand: Demand, found: Plan) -> list[Section]:
    trials = found.by_load
    marks = [(found.operating.setup.rate, "operating point")]
    x_label = "requests/s a replica"

    def section(title: str, y_label: str, *series: Series, log: bool = False) -> Section:
        scale = "log" if log else "linear"
        return Section(
            title=title,
            plot=LinePlot(
                x_label=x_label, y_label=y_label, series=series, marks=marks, y_scale=scale
            ),
        )

    return [
        section(
            "Where goodput peaks", "requests/s",
            _line(trials, "within the SLO", lambda t: t.good_per_second),
            _line(trials, "sent", lambda t: t.setup.rate),
        ),
        section(
            "Output tokens a second", "tokens/s",
            _line(trials, "a replica", lambda t: t.tokens_per_second),
        ),
        section(
            "Time to first token", "ms",
            _line(trials, "p50", lambda t: 1e3 * t.figures.ttft.quantile(0.5)),
            _line(trials, "p99", lambda t: 1e3 * t.figures.ttft.quantile(0.99)), log=True,
        ),
        section(
            "Time per output token, and gaps", "ms",
            _line(trials, "TPOT p50", lambda t: 1e3 * t.figures.tpot.quantile(0.5)),
            _line(trials, "gap p99", lambda t: 1e3 * t.figures.gap.quantile(0.99)),
        ),
        Section(
            title="All rates that were tried", text=load_words(demand, found),
            table=load_table(found),
        ),
    ]  # fmt: skip


def _by_setting(name: str, trials: Sequence[Trial], value: Callable[[Setup], int]) -> list[Section]:
    if len(trials) < 2:
        return []
    points = [Point(value(trial.setup), trial.figures.goodput) for trial in trials]
    return [
        Section(
            title=f"Goodput over {name}",
            text="The smallest that does about as well as the best one is recommended.",
            plot=LinePlot(
                x_label=name, y_label="share within the SLO", x_scale="log",
                series=[Series("goodput", points)],
            ),
            table=trial_table(trials, (name, lambda trial: f"{value(trial.setup)}")),
        )
    ]  # fmt: skip


def _ms(seconds: LogHistogram, share: float, digits: int) -> str:
    return f"{1e3 * seconds.quantile(share):,.{digits}f}"
