"""What a plan recommends, line by line, each with its reason."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.simulation.plan import INDIFFERENT, LOADS, Demand, Plan, Setup, Trial
from loraplex.reports.of_alerts import replica_alerts

GIB = 2**30


class Answer(NamedTuple):
    """One line."""

    label: str
    value: str
    why: str


def answers(demand: Demand, found: Plan, gpu_price: float | None) -> list[Answer]:
    """What to deploy, what comes of it, and why."""
    study, operating, expected = demand.study, found.operating, found.expected
    machine = study.gpu.name if study.step_model is None else "machine"
    budget = max(demand.max_num_batched_tokens, found.max_num_seqs)
    wanting = "" if found.meets_slo else f", less than the {demand.share:.0%} wanted"
    lines = [
        Answer("replicas", f"{found.num_replicas} x {machine}", _why_replicas(demand, found)),
        Answer(
            "max_num_seqs", f"{found.max_num_seqs}",
            _why_setting(found.by_seats, lambda setup: setup.max_num_seqs),
        ),
        Answer(
            "max_num_batched_tokens", f"{budget}",
            "as asked for" if budget == demand.max_num_batched_tokens
            else "one for each sequence, which is more than was asked for",
        ),
    ]  # fmt: skip
    if study.popularity:
        why = _why_setting(found.by_slots, lambda setup: setup.max_loras)
        lines.append(Answer("max_loras", f"{found.max_loras}", why))
    lines += [
        Answer("KV at its peak", _kv(demand, found), "at once; beside weights and slots"),
        Answer(
            "operating point", f"{operating.setup.rate:,.2f} requests/s a replica",
            _why_operating(demand, found),
        ),
        Answer(
            "there", f"{operating.tokens_per_second:,.0f} output tokens/s a replica",
            f"{operating.figures.goodput:.1%} of the requests within the SLO",
        ),
        Answer(
            "demand met", f"{expected.figures.goodput:.1%} within the SLO{wanting}",
            f"{demand.rate:g} requests/s on {found.num_replicas}: simulated once more",
        ),
        Answer("alerts", *_alerts(expected)),
        Answer(
            "GPU-hours a million output tokens", f"{found.gpu_hours_per_million:,.3f}",
            f"{expected.offered_tokens_per_second:,.0f} tokens/s are asked of a replica; its idle "
            "time counts",
        ),
    ]  # fmt: skip
    if gpu_price is not None:
        cost = gpu_price * found.gpu_hours_per_million
        why = f"at {gpu_price:g} a GPU-hour"
        lines.append(Answer("cost a million output tokens", f"{cost:,.2f}", why))
    return lines


def load_words(demand: Demand, found: Plan) -> str:
    """What the rows of `Plan.by_load` and the last one are."""
    return (
        f"Each row is a simulation at that rate: {LOADS[0]:.0%} to {LOADS[-1]:.0%} of the "
        f"{found.burst_rate:,.2f} requests/s that a replica gets through when all come at once. "
        f"The operating point is {_operating_rule(demand, found)}. The last row is the demand: "
        f"{demand.rate:g} requests/s on {found.num_replicas} "
        f"{'replicas' if found.num_replicas > 1 else 'replica'}."
    )


def load_label(found: Plan, trial: Trial) -> str:
    """A row's name: its share of the burst's rate, and what it is to the plan."""
    if trial is found.expected:
        return "the demand"
    label = f"{trial.setup.rate / found.burst_rate:.0%}"
    return f"{label}, operating point" if trial is found.operating else label


def _operating_rule(demand: Demand, found: Plan) -> str:
    if found.operating.figures.goodput >= demand.share:
        return (
            "the one with the most good requests/s of those that keep at least "
            f"{demand.share:.0%} within the SLO"
        )
    return f"the one with the largest share within the SLO, as none reaches {demand.share:.0%}"


def _why_operating(demand: Demand, found: Plan) -> str:
    return f"of the rates below {_operating_rule(demand, found)}"


def _why_replicas(demand: Demand, found: Plan) -> str:
    rate = found.operating.setup.rate
    at_least = max(1, math.ceil(demand.rate / rate))
    why = f"{demand.rate:g} requests/s, at {rate:,.2f} a replica"
    more = found.num_replicas - at_least
    if not more:
        return why
    until = "until enough meet the SLO" if found.meets_slo else "which did not suffice"
    return f"{why} are {at_least}; {more} more, {until}"


def _why_setting(trials: Sequence[Trial], value: Callable[[Setup], int]) -> str:
    tried = ", ".join(f"{value(trial.setup)} ({trial.figures.goodput:.3f})" for trial in trials)
    if len(trials) == 1:
        return f"the only one that could be tried: {tried}"
    if all(trial.figures.goodput == 0.0 for trial in trials):
        tokens = ", ".join(f"{value(t.setup)} ({t.tokens_per_second:,.0f})" for t in trials)
        return f"the smallest within 1% of the most tokens/s, as nothing meets the SLO: {tokens}"
    return f"the smallest whose goodput is within {INDIFFERENT:g} of the best: {tried}"


def _kv(demand: Demand, found: Plan) -> str:
    study, peak = demand.study, found.expected.figures.use.kv_peak
    words = f"{peak:,} of {found.kv_blocks:,} blocks"
    if study.step_model is not None:
        return words
    gib = study.model.kv_bytes_per_token * study.block_size / GIB
    return f"{words} ({peak * gib:.1f} of {found.kv_blocks * gib:.1f} GiB)"


def _alerts(expected: Trial) -> tuple[str, str]:
    found = replica_alerts(expected.figures.sightings, expected.setup.rate, expected.num_sampled)
    names = ", ".join(alert.worst.kind for alert in found)
    return names or "none", "what the running service would raise at the demand"
