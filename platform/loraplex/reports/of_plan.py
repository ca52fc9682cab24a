"""The report of a plan: what to deploy, and why."""

from collections.abc import Callable, Sequence

from engine.simulation.plan import Demand, Plan, Setup, Trial
from loraplex.reports.plots import BarPlot, LinePlot, Point, Report, Section, Series, TextTable

NUM_ADAPTERS = 20
GIB = 2**30
COLUMNS: tuple[tuple[str, Callable[[Trial], str]], ...] = (
    ("requests/s a replica", lambda t: f"{t.setup.rate:,.2f}"),
    ("tokens/s a replica", lambda t: f"{t.tokens_per_second:,.0f}"),
    ("TTFT p50", lambda t: f"{1e3 * t.figures.ttft.quantile(0.5):,.0f}"),
    ("TTFT p99", lambda t: f"{1e3 * t.figures.ttft.quantile(0.99):,.0f}"),
    ("TPOT p50", lambda t: f"{1e3 * t.figures.tpot.quantile(0.5):,.1f}"),
    ("gap p99", lambda t: f"{1e3 * t.figures.gap.quantile(0.99):,.1f}"),
    ("goodput", lambda t: f"{t.figures.goodput:.3f}"),
    ("good requests/s", lambda t: f"{t.good_per_second:,.2f}"),
    ("running", lambda t: f"{t.figures.use.mean(t.figures.use.running_seconds):,.1f}"),
    ("slots", lambda t: f"{t.figures.use.mean(t.figures.use.slot_seconds):,.1f}"),
    ("KV peak, blocks", lambda t: f"{t.figures.use.kv_peak:,}"),
    ("preempted", lambda t: f"{t.figures.num_preemptions:,}"),
    ("loads", lambda t: f"{t.figures.num_installs:,}"),
)


def answers(demand: Demand, found: Plan, gpu_price: float | None) -> list[tuple[str, str]]:
    """What a plan amounts to: labels and values."""
    study, expected = demand.study, found.expected
    block_bytes = study.model.kv_bytes_per_token * study.block_size
    measured = study.step_model is not None
    peak = expected.figures.use.kv_peak
    machine = "machine" if measured else study.gpu.name
    kv = f"{peak:,} of {found.kv_blocks:,} blocks"
    if not measured:
        kv += f" ({peak * block_bytes / GIB:.1f} of {found.kv_blocks * block_bytes / GIB:.1f} GiB)"
    wanting = "" if found.meets_slo else f", less than the {demand.share:.0%} wanted"
    lines = [
        ("replicas", f"{found.num_replicas} x {machine}"),
        ("max_num_seqs", f"{found.max_num_seqs}"),
        ("max_num_batched_tokens", f"{max(demand.max_num_batched_tokens, found.max_num_seqs)}"),
        *([("max_loras", f"{found.max_loras}")] if study.popularity else []),
        ("KV at its peak", kv),
        ("operating point", f"{found.operating.setup.rate:,.2f} requests/s a replica"),
        ("there", f"{found.operating.tokens_per_second:,.0f} output tokens/s a replica"),
        ("demand met", f"{expected.figures.goodput:.1%} within the SLO{wanting}"),
        ("GPU-hours a million output tokens", f"{found.gpu_hours_per_million:,.3f}"),
    ]  # fmt: skip
    if gpu_price is not None:
        cost = gpu_price * found.gpu_hours_per_million
        lines.append(("cost a million output tokens", f"{cost:,.2f}"))
    return lines


def trial_table(trials: Sequence[Trial], *more: tuple[str, Callable[[Trial], str]]) -> TextTable:
    """Trials in figures; times in milliseconds."""
    columns = [*more, *COLUMNS]
    return TextTable(
        [heading for heading, _ in columns],
        [[value(trial) for _, value in columns] for trial in trials],
    )


def plan_report(
    demand: Demand, found: Plan, gpu_price: float | None, settings: Sequence[tuple[str, str]]
) -> Report:
    """Of one plan."""
    return Report(
        title="Capacity plan",
        lead=f"{demand.rate:g} requests/s, of which {demand.share:.0%} are to meet the SLO: "
        "by simulation of the scheduler that serves.",
        facts=answers(demand, found, gpu_price),
        sections=[
            *_by_load(found),
            *_by_setting("max_num_seqs", found.by_seats, lambda s: s.max_num_seqs),
            *_by_setting("max_loras", found.by_slots, lambda s: s.max_loras),
            *_queues(found.expected),
            Section(
                title="The whole demand on these replicas", table=trial_table([found.expected])
            ),
        ],
        settings=settings,
    )


def _line(trials: Sequence[Trial], name: str, value: Callable[[Trial], float]) -> Series:
    return Series(name, [Point(trial.setup.rate, value(trial)) for trial in trials])


def _by_load(found: Plan) -> list[Section]:
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
        Section(title="All rates that were tried", table=trial_table(trials)),
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


def _queues(trial: Trial) -> list[Section]:
    tallies = sorted(trial.figures.adapters.items(), key=lambda item: -sum(item[1].queue.values()))[
        :NUM_ADAPTERS
    ]
    causes = list(dict.fromkeys(cause for _, tally in tallies for cause in tally.queue))
    if not causes:
        return []
    means = [
        (adapter, [1e3 * tally.queue.get(c, 0.0) / tally.num_requests for c in causes])
        for adapter, tally in tallies
    ]
    return [
        Section(
            title="Queue time by adapter and cause",
            text="The adapters that waited longest in all; mean milliseconds of their requests.",
            plot=BarPlot(x_label="ms", parts=causes, bars=means),
            table=TextTable(
                ["adapter", "requests", "longest wait, ms", *causes],
                [
                    [
                        adapter, f"{tally.num_requests:,}", f"{1e3 * tally.longest_wait:,.0f}",
                        *(f"{value:,.1f}" for value in values),
                    ]
                    for (adapter, tally), (_, values) in zip(tallies, means, strict=True)
                ],
            ),
        )
    ]  # fmt: skip
