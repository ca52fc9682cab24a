"""Sums over all steps, and the shares of a step as its record has them."""

from engine.scheduling.step_report import Composition
from engine.telemetry.buckets import (
    STEP_ADAPTERS,
    STEP_ROWS,
    STEP_SECONDS,
    STEP_TOKENS,
    empty,
    observe,
)
from engine.telemetry.records import (
    AdapterTotals,
    EngineTotals,
    Objective,
    StepRecord,
    StepSeconds,
    StepShare,
)

MAX_SHARES = 16
PARTS = StepSeconds.__struct_fields__


class StepTotals:
    """Adds step records up."""

    def __init__(self) -> None:
        self.count = 0
        self._parts = [0.0] * len(PARTS)
        self._seconds = empty(STEP_SECONDS)
        self._rows = empty(STEP_ROWS)
        self._tokens = empty(STEP_TOKENS)
        self._adapters = empty(STEP_ADAPTERS)

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self.count += 1
        seconds, parts = record.seconds, self._parts
        parts[0] += seconds.schedule
        parts[1] += seconds.prepare
        parts[2] += seconds.forward
        parts[3] += seconds.lora
        parts[4] += seconds.sample
        parts[5] += seconds.post
        num_rows = num_tokens = 0
        for share in record.shares:
            num_rows += share.prefill_rows + share.decode_rows
            num_tokens += share.prefill_tokens + share.decode_rows
        observe(self._seconds, STEP_SECONDS, seconds.total)
        observe(self._rows, STEP_ROWS, num_rows)
        observe(self._tokens, STEP_TOKENS, num_tokens)
        observe(self._adapters, STEP_ADAPTERS, record.adapters)

    def totals(
        self, started: float, objective: Objective, adapters: list[AdapterTotals]
    ) -> EngineTotals:
        """All sums there are, those of adapters included."""
        return EngineTotals(
            started=started,
            objective=objective,
            adapters=adapters,
            steps=self.count,
            step_parts=dict(zip(PARTS, self._parts, strict=True)),
            step_seconds=self._seconds,
            step_rows=self._rows,
            step_tokens=self._tokens,
            step_adapters=self._adapters,
        )


def shares_of(composition: Composition) -> tuple[StepShare, ...]:
    """The `MAX_SHARES` with most tokens; if there are more, the rest as one."""
    if len(composition) <= MAX_SHARES:
        return tuple([StepShare(*key, *numbers) for key, numbers in composition.items()])
    ordered = sorted(composition.items(), key=lambda item: -(item[1][1] + item[1][2]))
    rest = [sum(numbers) for numbers in zip(*(n for _, n in ordered[MAX_SHARES:]), strict=True)]
    named = [StepShare(*key, *numbers) for key, numbers in ordered[:MAX_SHARES]]
    return (*named, StepShare("", None, *rest))
