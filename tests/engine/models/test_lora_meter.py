"""Adapters' share of a step: clocked now and then, told always."""

import pytest

from engine.models.lora_meter import MEASURE_EVERY, LoraMeter


def step(meter: LoraMeter, lora: float, run: float, *, is_prefill: bool = False) -> float:
    """One step whose projections add to the meter while it is on."""
    meter.begin(is_prefill=is_prefill)
    if meter.is_on:
        meter.seconds += lora
    return meter.end(run)


def test_the_first_step_of_each_kind_is_clocked_and_the_others_have_its_share():
    meter = LoraMeter()
    assert step(meter, 0.25, 1.0) == 0.25
    assert step(meter, 99.0, 2.0) == 0.5
    assert step(meter, 3.0, 4.0, is_prefill=True) == 3.0
    assert step(meter, 99.0, 1.0, is_prefill=True) == 0.75
    assert step(meter, 99.0, 4.0) == 1.0


def test_one_step_of_sixteen_is_clocked_anew():
    meter = LoraMeter()
    told = [step(meter, 0.25 if number == 0 else 0.5, 1.0) for number in range(2 * MEASURE_EVERY)]
    assert told[: MEASURE_EVERY - 1] == [0.25] * (MEASURE_EVERY - 1)
    assert told[MEASURE_EVERY - 1 :] == [0.5] * (MEASURE_EVERY + 1)
    assert not meter.is_on


def test_a_step_without_any_time_has_no_share():
    meter = LoraMeter()
    assert step(meter, 0.0, 0.0) == 0.0 and step(meter, 9.0, 1.0) == pytest.approx(0.0)
