"""The simulated clock around the real core: times, reports, and that nothing is left to chance."""

import subprocess
import sys

import pytest

from engine.config import SchedulerConfig
from engine.simulation.driver import Simulation, SimulationStalled
from engine.simulation.step_time import LinearStepTime
from tests.support.memory_engine import request


def _simulation(*, seconds_a_step: float = 1.0, **fields) -> Simulation:
    config = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_loras": 2}
    config |= {key: fields.pop(key) for key in list(fields) if key in SchedulerConfig.__slots__}
    fields.setdefault("step_time", lambda batch: seconds_a_step)
    return Simulation(SchedulerConfig(**config), **fields)


def test_a_request_alone_has_the_times_that_one_computes_by_hand():
    simulation = _simulation(step_time=LinearStepTime(base=1, per_row=0.5, per_prefill_token=0.25))
    record = simulation.send(10.0, request(1, [1] * 5, max_tokens=3))
    report = simulation.run()
    prefill = 1 + 0.5 + 4 * 0.25
    assert record.queued == record.first_admitted == 10.0
    assert record.token_times == [10 + prefill, 10 + prefill + 1.5, 10 + prefill + 3.0]
    assert record.time_to_first_token == prefill and record.gaps == [1.5, 1.5]
    assert (record.finished, record.finish_reason) == (record.token_times[-1], "length")
    assert record.queue == {}
    assert (report.seconds, report.num_steps, report.num_rows) == (record.finished, 3, 3)
    assert report.num_output_tokens == 3


def test_what_arrives_during_a_step_is_seen_after_it():
    simulation = _simulation()
    simulation.send(0.0, request(1, [1], max_tokens=3))
    late = simulation.send(0.25, request(2, [1], max_tokens=1))
    simulation.run()
    assert (late.queued, late.first_token, late.time_to_first_token) == (1.0, 2.0, 1.75)


def test_a_cold_adapter_is_loaded_once_and_only_its_own_requests_wait():
    simulation = _simulation(load_seconds=lambda digest: 5.5)
    cold = [simulation.send(0.0, request(n, [1], adapter="a", tenant=f"t{n}")) for n in range(4)]
    base = simulation.send(0.0, request(9, [1], max_tokens=20))
    report = simulation.run()
    assert base.first_token == 1.0 and max(base.gaps) == 1.0
    assert all(record.queue == {"load": 6.0} for record in cold), "noticed after the sixth step"
    assert {record.first_token for record in cold} == {7.0}
    assert (report.num_loads, report.num_installs) == (1, 1)
    assert report.queue_seconds_by_adapter() == {"a": {"load": 24.0}, None: {}}


def test_readers_load_so_many_at_a_time_and_a_failed_load_fails_its_requests():
    seconds = {"a": 2.0, "b": 2.0, "c": None}
    simulation = _simulation(load_seconds=seconds.__getitem__, num_readers=1, seconds_a_step=0.5)
    records = {
        adapter: simulation.send(0.0, request(number, [1], adapter=adapter, max_tokens=1))
        for number, adapter in enumerate("abc")
    }
    simulation.run()
    assert [records[a].first_token for a in "ab"] == [2.5, 4.5]
    assert (records["c"].finish_reason, records["c"].error_code) == (
        "error",
        "adapter_unavailable",
    )


def test_aborts_refusals_unloads_and_pins_happen_at_their_time():
    simulation = _simulation(max_model_len=32)
    gone = simulation.send(0.0, request(1, [1], max_tokens=30))
    refused = simulation.send(0.0, request(2, [1] * 40))
    served = simulation.send(0.0, request(3, [1], adapter="a", max_tokens=2))
    simulation.abort(4.5, 1)
    simulation.abort(4.6, 1)
    simulation.abort(9.0, 77)
    simulation.pin(20.0, frozenset({"p"}))
    simulation.unload(30.0, "a")
    simulation.run()
    assert (gone.finish_reason, gone.finished, gone.num_output_tokens) == ("abort", 5.0, 5)
    assert (refused.finish_reason, refused.error_code) == ("refused", "context_length_exceeded")
    assert served.finish_reason == "length"
    assert simulation.core.stats().resident == ["p"]
    simulation.core.check_integrity()


def test_a_script_ends_replies_and_closed_loops_send_the_next_request():
    def follow_up(record):
        number = record.request.request_id + 1
        return [(record.finished + 2.0, request(number, [1], max_tokens=9))] if number < 4 else []

    simulation = _simulation(
        script=lambda row: 0 if row.output_position == 1 else 5, follow_up=follow_up
    )
    simulation.send(0.0, request(1, [1], max_tokens=9, ignore_eos=False))
    report = simulation.run()
    assert [record.arrival for record in report.requests] == [0.0, 4.0, 15.0]
    assert [record.finish_reason for record in report.requests] == ["stop", "length", "length"]


def test_a_run_can_stop_and_go_on():
    def report(*, stops):
        simulation = _simulation(num_kv_blocks=12)
        for number in range(12):
            simulation.send(
                number * 0.7, request(number, [1 + number] * 6, adapter="abc"[number % 3])
            )
        for stop in stops:
            simulation.run(until=stop)
            assert simulation.clock.now >= stop
        return [
            (r.first_token, r.finished, r.queue, r.token_times) for r in simulation.run().requests
        ]

    assert report(stops=[0.1, 3.0, 7.7]) == report(stops=[])


def test_an_engine_that_waits_for_nothing_is_an_error_and_not_the_end():
    simulation = _simulation()
    simulation.send(0.0, request(1, [1], adapter="a"))
    simulation.adapters.prefetch = lambda digest: None
    with pytest.raises(SimulationStalled, match="1 requests wait for nothing"):
        simulation.run()


def test_the_simulation_needs_no_torch():
    code = "import sys, engine.simulation.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("width", [16, 32])
def test_a_static_batch_computes_its_padding_and_its_finished_rows(width):
    lengths = [1 + 3 * (number % 7) for number in range(width)]
    prompts = [5 + number % 4 for number in range(width)]
    tokens = []
    simulation = _simulation(
        policy="static", max_num_seqs=width, max_num_batched_tokens=512, num_kv_blocks=16 * width,
        observe=lambda simulation, batch: tokens.append((len(batch.rows), batch.num_tokens)),
    )  # fmt: skip
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        simulation.send(0.0, request(number, [1 + number] * prompt, max_tokens=length))
    late = simulation.send(0.5, request(1000, [1], max_tokens=1))
    report = simulation.run()
    num_decodes = max(lengths) - 1
    decodes, prefills = tokens[-1 - num_decodes : -1], tokens[: -1 - num_decodes]
    assert decodes == [(width, width)] * num_decodes, "every row, until the longest has finished"
    assert sum(count for _, count in prefills) == width * max(prompts)
    ends = {r.finished for r in report.requests if r is not late}
    assert len(ends) == 1 and late.first_token > ends.pop(), "one batch after the other"
