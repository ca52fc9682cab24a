"""The report of a load test."""

from collections.abc import Callable, Sequence

from loraplex.load.figures import LoadFigures, ModelFigures, after_warm_up, by_model
from loraplex.load.run import LoadRun
from loraplex.reports.plots import (
    BarPlot,
    LinePlot,
    Point,
    Report,
    Section,
    Series,
    TextTable,
)

NUM_MODELS = 25


def load_report(
    runs: Sequence[LoadRun], warm_up: float, settings: Sequence[tuple[str, str]]
) -> Report:
    """Of at least one run."""
    best = max(runs, key=lambda run: run.figures.output_tokens_per_second)
    good = max(runs, key=_good_rate)
    num_failed = sum(run.figures.num_failed for run in runs)
    sections = [_overview(runs)]
    for kind, x_label in (("open", "requests/s"), ("closed", "calls under way")):
        chosen = [run for run in runs if run.loop.kind == kind]
        if len(chosen) > 1:
            sections += _sweep(chosen, x_label)
    sections += _models(runs[-1], warm_up)
    return Report(
        title="Load test",
        lead="What clients of the endpoint saw. Latencies count from when a call was due.",
        facts=[
            ("most output tokens/s", f"{best.figures.output_tokens_per_second:,.0f}"),
            ("at", best.loop.label),
            ("most good requests/s", f"{_good_rate(good):,.2f}"),
            ("at", good.loop.label),
            ("failed", f"{num_failed:,}"),
        ],
        sections=sections,
        settings=[*settings, ("warm-up", f"the first {warm_up:.0%} of each run")],
    )


def _good_rate(run: LoadRun) -> float:
    """Requests a second that meet the SLO."""
    figures = run.figures
    return figures.goodput * figures.num_requests / figures.seconds if figures.seconds else 0.0


def _overview(runs: Sequence[LoadRun]) -> Section:
    columns: list[tuple[str, Callable[[LoadRun], str]]] = [
        ("load", lambda run: run.loop.label),
        ("requests", lambda run: f"{run.figures.num_requests:,}"),
        ("failed", lambda run: f"{run.figures.num_failed:,}"),
        ("output tokens/s", lambda run: f"{run.figures.output_tokens_per_second:,.1f}"),
        ("TTFT p50, ms", lambda run: f"{run.figures.ttft_p50_ms:,.1f}"),
        ("TTFT p99, ms", lambda run: f"{run.figures.ttft_p99_ms:,.1f}"),
        ("TPOT p50, ms", lambda run: f"{run.figures.tpot_p50_ms:,.2f}"),
        ("gap p99, ms", lambda run: f"{run.figures.gap_p99_ms:,.1f}"),
        ("latency p99, ms", lambda run: f"{run.figures.latency_p99_ms:,.0f}"),
        ("goodput", lambda run: f"{run.figures.goodput:.3f}"),
        ("sent late, p99, ms", lambda run: f"{run.figures.late_p99_ms:,.1f}"),
    ]
    table = TextTable(
        [heading for heading, _ in columns], [[cell(run) for _, cell in columns] for run in runs]
    )
    return Section(title="Runs", table=table)


def _sweep(runs: Sequence[LoadRun], x_label: str) -> list[Section]:
    def line(name: str, value: Callable[[LoadFigures], float]) -> Series:
        ordered = sorted(runs, key=lambda run: run.loop.amount)
        return Series(name, [Point(run.loop.amount, value(run.figures)) for run in ordered])

    def plot(y_label: str, *series: Series) -> LinePlot:
        return LinePlot(x_label=x_label, y_label=y_label, series=series)

    return [
        Section(
            title=f"Throughput over {x_label}",
            plot=plot("tokens/s", line("output tokens/s", lambda f: f.output_tokens_per_second)),
        ),
        Section(
            title=f"Time to first token over {x_label}",
            plot=plot(
                "ms",
                line("TTFT p50", lambda f: f.ttft_p50_ms),
                line("TTFT p99", lambda f: f.ttft_p99_ms),
            ),
        ),
        Section(
            title=f"Time per output token and gaps over {x_label}",
            plot=plot(
                "ms",
                line("TPOT p50", lambda f: f.tpot_p50_ms),
                line("gap p99", lambda f: f.gap_p99_ms),
            ),
        ),
        Section(
            title=f"Goodput over {x_label}",
            text="The share of calls that meet the SLO.",
            plot=plot("share", line("goodput", lambda f: f.goodput)),
        ),
    ]


def _models(run: LoadRun, warm_up: float) -> list[Section]:
    models = by_model(after_warm_up(run.outcomes, warm_up))[:NUM_MODELS]
    causes = list(dict.fromkeys(cause for model in models for cause in model.queue_ms))
    if not causes:
        return []
    return [
        Section(
            title=f"Queue time by model and cause, at {run.loop.label}",
            text="Mean milliseconds in the queue, as the replies tell.",
            plot=BarPlot(
                x_label="ms",
                parts=causes,
                bars=[
                    (model.model[:22], [model.queue_ms.get(c, 0.0) for c in causes])
                    for model in models
                ],
            ),
            table=_model_table(models, causes),
        )
    ]


def _model_table(models: Sequence[ModelFigures], causes: Sequence[str]) -> TextTable:
    return TextTable(
        ["model", "requests", "TTFT p50", "TTFT p99", *causes],
        [
            [
                model.model, f"{model.num_requests:,}", f"{model.ttft_p50_ms:,.1f}",
                f"{model.ttft_p99_ms:,.1f}",
                *(f"{model.queue_ms.get(c, 0.0):,.1f}" for c in causes),
            ]
            for model in models
        ],
    )  # fmt: skip
