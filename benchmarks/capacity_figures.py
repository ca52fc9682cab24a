"""The plots of docs/capacity.md, by simulation: `python -m benchmarks.capacity_figures`.

    --out DIR       where the SVG files go; docs/img by default
    --only NAME     figure3, orders or slots
    --processes N   one a core by default

`figure3` redraws an article's sweep of the arrival rate with prompts in steps of their own and in
chunks. `orders` and `slots` serve 2,000 adapters of 200 tenants, popularity by Zipf's law, on one
simulated H100, `orders` over three seeds. Prints what it draws as tables. Takes 10 minutes on two
cores.
"""

import argparse
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.serving.figures import markdown
from engine.simulation.fairness_figures import Fairness, fairness
from engine.simulation.figures import Figures, figures
from engine.simulation.lengths import LognormalLength
from engine.simulation.model_shape import LLAMA_3_1_8B
from engine.simulation.popularity import zipf
from engine.simulation.published import STUDY
from engine.simulation.rivals import ORDERS, Order
from engine.simulation.roofline import H100
from engine.simulation.study import CHUNKED_512, PREFILL_FIRST, Study, run, spread
from loraplex.reports.chart import chart
from loraplex.reports.plots import LinePlot, Point, Series, line_table

FIGURE3_RATES = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0)
FIGURE3_SEEDS = 5
ORDER_RATES = (10.0, 12.0, 14.0, 16.0, 20.0, 28.0)
ORDER_SEEDS = 3
SLOTS = (2, 4, 8, 16, 32, 64, 96, 128)
SLOT_RATE = 4.0
SECONDS = 240
MANY = Study(
    model=LLAMA_3_1_8B, gpu=H100, popularity=zipf(2000), num_tenants=200, max_loras=16,
    prompts=LognormalLength(mean=500, sigma=0.8, shortest=16, longest=4096),
    outputs=LognormalLength(mean=150, sigma=0.8, shortest=4, longest=1024),
    max_model_len=5121, adapter_rank=16,
)  # fmt: skip
"""One replica."""


@dataclass(frozen=True, slots=True)
class Served:
    """One run of many adapters."""

    rate: float
    max_loras: int
    figures: Figures
    fairness: Fairness


def serve(study: Study, rate: float, seed: int = 0) -> Served:
    """Simulate `SECONDS` of traffic, and judge the second half of it."""
    simulation = study.replica(CHUNKED_512)
    for at, request in study.requests(rate, seed=seed):
        simulation.send(at, request)
    report = simulation.run()
    return Served(
        rate,
        study.max_loras,
        figures(report, study.slo, 0.1, num_kv_blocks=study.kv_blocks),
        fairness(report.requests, SECONDS / 2, SECONDS),
    )


def serve_all(jobs: Sequence[tuple[Study, float, int]], num_processes: int) -> list[Served]:
    """In the order of the jobs."""
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(serve, *zip(*jobs, strict=True)))


def figure3(num_processes: int) -> Iterable[tuple[str, LinePlot]]:
    """Throughput, time to first token, time per token and stalls over the arrival rate."""
    policies = (PREFILL_FIRST, CHUNKED_512)
    rows = list(
        run(STUDY, policies, FIGURE3_RATES, range(FIGURE3_SEEDS), num_processes=num_processes)
    )

    def plot(y_label: str, field: str) -> LinePlot:
        series: list[Series] = []
        for policy in policies:
            points: list[Point] = []
            for rate in FIGURE3_RATES:
                chosen = [r for r in rows if (r.policy, r.rate) == (policy.name, rate)]
                found = spread(chosen, lambda row: float(getattr(row.figures, field)))
                points.append(Point(rate, found.mean, found.deviation))
            series.append(Series(policy.name, points))
        return LinePlot(x_label="requests/s", y_label=y_label, series=series)

    yield "figure3-throughput", plot("output tokens/s", "output_tokens_per_second")
    yield "figure3-ttft", replace(plot("TTFT p50, ms", "ttft_p50_ms"), y_scale="log")
    yield "figure3-tpot", plot("time per output token p50, ms", "tpot_p50_ms")
    yield "figure3-gap", replace(plot("p99 gap between tokens, ms", "gap_p99_ms"), y_scale="log")


def orders(num_processes: int) -> Iterable[tuple[str, LinePlot]]:
    """Fairness and starvation under three orders of service."""
    kinds: list[tuple[Order, float]] = [(order, rate) for order in ORDERS for rate in ORDER_RATES]
    jobs = [
        (replace(MANY, order=order, num_requests=int(rate * SECONDS)), rate, seed)
        for order, rate in kinds
        for seed in range(ORDER_SEEDS)
    ]
    served = serve_all(jobs, num_processes)
    found = {
        kind: served[number * ORDER_SEEDS : (number + 1) * ORDER_SEEDS]
        for number, kind in enumerate(kinds)
    }
    _print_orders(found)

    def plot(y_label: str, value: str, *, is_log: bool) -> LinePlot:
        series = [
            Series(
                order,
                [Point(rate, _fairness_mean(found[order, rate], value)) for rate in ORDER_RATES],
            )
            for order in ORDERS
        ]
        return LinePlot(
            x_label="requests/s", y_label=y_label, series=series,
            y_scale="log" if is_log else "linear",
        )  # fmt: skip

    yield "orders-jain", plot("Jain's index, backlogged tenants", "jain", is_log=False)
    yield (
        "orders-light-wait",
        plot("longest TTFT of a light tenant, s", "longest_light_wait", is_log=True),
    )
    yield "orders-wait", plot("longest TTFT of any request, s", "longest_wait", is_log=True)


def slots(num_processes: int) -> Iterable[tuple[str, LinePlot]]:
    """What too few adapter slots cost, and too many: of rank 64, 335 MB each."""
    study = replace(MANY, adapter_rank=64, num_requests=int(SLOT_RATE * SECONDS))
    found = serve_all([(replace(study, max_loras=n), SLOT_RATE, 0) for n in SLOTS], num_processes)
    columns = (
        "max_loras", "KV blocks", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "loads",
        "preempted",
    )  # fmt: skip
    print(
        markdown(
            columns,
            [
                [
                    str(s.max_loras), f"{replace(study, max_loras=s.max_loras).kv_blocks:,}",
                    f"{s.figures.output_tokens_per_second:,.0f}", f"{s.figures.ttft_p50_ms:,.0f}",
                    f"{s.figures.ttft_p99_ms:,.0f}", f"{s.figures.tpot_p50_ms:.1f}",
                    f"{s.figures.num_installs:,}", f"{s.figures.num_preemptions:,}",
                ]
                for s in found
            ],
        )
    )  # fmt: skip

    def line(name: str, field: str) -> Series:
        return Series(
            name, [Point(s.max_loras, float(getattr(s.figures, field))) for s in found]
        )  # fmt: skip

    yield "slots-ttft", LinePlot(
        x_label="max_loras", y_label="ms", x_scale="log", y_scale="log",
        series=[
            line("TTFT p50", "ttft_p50_ms"), line("TTFT p99", "ttft_p99_ms"),
            line("TPOT p50", "tpot_p50_ms"),
        ],
    )  # fmt: skip


def _fairness_mean(served: Sequence[Served], field: str) -> float:
    return statistics.mean(float(getattr(one.fairness, field)) for one in served)


def _figures_mean(served: Sequence[Served], field: str) -> float:
    return statistics.mean(float(getattr(one.figures, field)) for one in served)


def _print_orders(found: Mapping[tuple[Order, float], Sequence[Served]]) -> None:
    columns = (
        "order", "requests/s", "tokens/s", "backlogged", "unserved", "Jain", "service difference",
        "longest TTFT s", "of light tenants", "loads",
    )  # fmt: skip
    rows = [
        [
            order, f"{rate:g}", f"{_figures_mean(served, 'output_tokens_per_second'):,.0f}",
            f"{_fairness_mean(served, 'num_backlogged'):.0f}",
            f"{_fairness_mean(served, 'num_unserved'):.0f}",
            f"{_fairness_mean(served, 'jain'):.3f}",
            f"{_fairness_mean(served, 'service_difference'):,.0f}",
            f"{_fairness_mean(served, 'longest_wait'):,.1f}",
            f"{_fairness_mean(served, 'longest_light_wait'):,.1f}",
            f"{_figures_mean(served, 'num_installs'):,.0f}",
        ]
        for (order, rate), served in found.items()
    ]  # fmt: skip
    print(markdown(columns, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "img")
    parser.add_argument("--only", choices=["figure3", "orders", "slots"])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("figure3", figure3), ("orders", orders), ("slots", slots)):
        if options.only not in (None, name):
            continue
        for file, plot in draw(options.processes):
            (options.out / f"capacity-{file}.svg").write_text(chart(plot, title=file) + "\n")
            table = line_table(plot, 2)
            print(f"\n{file}: {plot.y_label}\n{markdown(table.columns, table.rows)}", flush=True)


if __name__ == "__main__":
    main()
