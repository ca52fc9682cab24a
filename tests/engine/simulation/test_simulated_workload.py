"""Step times, workloads and formulas: what goes into a simulation."""

import doctest
import itertools
import json
import statistics
from collections import Counter
from random import Random

import pytest

from engine.config import SchedulerConfig
from engine.errors import ConfigError
from engine.simulation import capacity, fleet_figures, roofline
from engine.simulation.arrivals import bursty, gamma, poisson
from engine.simulation.driver import Simulation
from engine.simulation.lengths import EmpiricalLength, FixedLength, LognormalLength
from engine.simulation.model_shape import LLAMA_3_1_8B, ModelShape
from engine.simulation.popularity import one_hot, uniform, zipf
from engine.simulation.roofline import GPUS, H100, RooflineStepTime
from engine.simulation.study import CHUNKED_512, STATIC_16, Study, run, spread
from engine.simulation.workload import TraceError, Traffic, replay
from tests.support.memory_engine import request


def _gaps(arrivals, number=20_000):
    times = [0.0, *itertools.islice(arrivals, number)]
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 2.0])
def test_arrivals_have_their_rate_and_variation(variation):
    gaps = _gaps(gamma(8.0, variation, Random(0)))
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(gaps) * 8 == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_bursts_have_the_rate_of_a_poisson_process_and_vary_more():
    assert sum(_gaps(poisson(8.0, Random(1)))) / 20_000 == pytest.approx(1 / 8, rel=0.05)
    gaps = _gaps(bursty(8.0, Random(1)), 50_000)
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.1) and min(gaps) >= 0
    assert statistics.pstdev(gaps) * 8 > 1.15


def test_lengths_are_what_their_distribution_says():
    random = Random(0)
    drawn = [LognormalLength(mean=250, longest=2048, shortest=8).draw(random) for _ in range(20000)]
    assert statistics.fmean(drawn) == pytest.approx(249, rel=0.03)
    assert min(drawn) >= 8 and max(drawn) == 2048
    assert {FixedLength(7).draw(random) for _ in range(9)} == {7}
    assert {EmpiricalLength([3, 5]).draw(random) for _ in range(99)} == {3, 5}
    for wrong in (lambda: FixedLength(0), lambda: EmpiricalLength([]), lambda: EmpiricalLength([0]),
                  lambda: LognormalLength(mean=9, shortest=9, longest=8)):  # fmt: skip
        with pytest.raises(ValueError, match="length"):
            wrong()


@pytest.mark.parametrize(
    ("popularity", "share"), [(uniform(10), 0.1), (zipf(10), 1 / 2.929), (one_hot(10, 0.7), 0.7)]
)
def test_the_first_adapter_has_its_share(popularity, share):
    random = Random(0)
    drawn = Counter(popularity.draw(random) for _ in range(20_000))
    assert drawn[0] / 20_000 == pytest.approx(share, rel=0.05) and len(drawn) == 10


def test_traffic_is_the_same_for_a_seed_and_owned_by_tenants_in_turn():
    traffic = Traffic(
        arrivals=lambda random: poisson(5.0, random), prompts=LognormalLength(mean=90),
        outputs=FixedLength(5), num_requests=60, popularity=uniform(7), num_tenants=3,
    )  # fmt: skip
    assert list(traffic.requests(1)) == list(traffic.requests(1)) != list(traffic.requests(2))
    for _, sent in traffic.requests(1):
        assert sent.tenant == f"t{int(sent.adapter[1:]) % 3}"


def test_a_trace_is_replayed_in_the_order_of_time(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"at": 2.5, "prompt_tokens": 3, "output_tokens": 4, "tenant": "b", "adapter": "x"}\n\n'
        '{"at": 1, "prompt_tokens": 5, "output_tokens": 6}\n'
    )
    sent = [
        (at, r.tenant, r.adapter, len(r.prompt_token_ids), r.sampling.max_tokens)
        for at, r in replay(trace)
    ]
    assert sent == [(1.0, "t0", None, 5, 6), (2.5, "b", "x", 3, 4)]
    for line, message in (
        ('{"at": 1}', "trace.jsonl:1: .*prompt_tokens"), ("no", "trace.jsonl:1: "),
        ('{"at": 1, "prompt_tokens": 0, "output_tokens": 6}', "prompt_tokens must be at least 1"),
        ('{"at": -1, "prompt_tokens": 1, "output_tokens": 6}', "at must be at least 0"),
    ):  # fmt: skip
        trace.write_text(line)
        with pytest.raises(TraceError, match=message):
            replay(trace)


def test_a_models_shape_is_read_from_its_config(tmp_path):
    assert (LLAMA_3_1_8B.num_parameters, LLAMA_3_1_8B.kv_bytes_per_token) == (8030261248, 131072)
    fields = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert ModelShape.read(tmp_path).num_parameters == 134_515_008
    for wrong, message in (({"hidden_size": None}, "hidden_size"), ({"num_experts": 8}, "dense")):
        with pytest.raises(ConfigError, match=message):
            ModelShape.from_config("m", fields | wrong)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        ModelShape.read(tmp_path)


def test_a_step_takes_what_its_bytes_or_its_operations_take():
    step_time = RooflineStepTime(LLAMA_3_1_8B, H100)
    bandwidth, flops = 0.8 * 3.35e12, 0.6 * 989e12
    decode = 0.0005 + (2 * 8030261248 + 131072 * 64 * 1125) / bandwidth
    assert step_time.decode_seconds(64, 1125) == pytest.approx(decode)
    attention = 4 * 32 * 4096 * 2000**2 / 2
    prefill = 0.0005 + (2 * 8030261248 * 2000 + attention) / flops
    assert step_time.prefill_seconds(2000) == pytest.approx(prefill)


def test_faster_memory_decodes_faster_and_more_operations_prefill_faster():
    by_name = {gpu.name: RooflineStepTime(LLAMA_3_1_8B, gpu) for gpu in GPUS}
    decode = sorted(by_name, key=lambda name: by_name[name].decode_seconds(8, 1000))
    assert decode == ["H200", "H100", "A100", "L40S"]
    assert by_name["A100"].prefill_seconds(4000) > 2 * by_name["H100"].prefill_seconds(4000)


def test_the_formulas_are_what_their_doctests_say():
    for module, number in ((capacity, 8), (roofline, 3), (fleet_figures, 2)):
        found = doctest.testmod(module)
        assert (found.attempted >= number, found.failed) == (True, 0), module.__name__


OUTPUTS = (8, 2, 3, 1, 3, 4, 2, 5)


@pytest.mark.parametrize(
    ("policy", "steps", "slot_steps", "completions"),
    [
        ("static", 13, 52, [8, 8, 8, 8, 13, 13, 13, 13]),
        ("chunked", 9, 36, [8, 2, 3, 1, 4, 6, 5, 9]),
    ],
)
def test_the_example_worked_by_hand(policy, steps, slot_steps, completions):
    config = SchedulerConfig(
        num_kv_blocks=64, max_num_seqs=4, policy=policy, enable_prefix_cache=False
    )
    simulation = Simulation(config, step_time=lambda batch: 1.0)
    for number, output in enumerate(OUTPUTS):
        simulation.send(0.0, request(number, [1], max_tokens=output))
    # A prompt of one token is prefilled and decoded in the same step.
    report = simulation.run()
    finished = [record.finished for record in report.requests]
    assert report.num_steps == steps and steps * 4 == slot_steps
    if policy == "static":  # a batch returns when its last row has finished
        finished = [max(finished[:4])] * 4 + [max(finished[4:])] * 4
        assert report.num_rows == slot_steps
    assert finished == completions and report.num_output_tokens == 28


def test_a_study_runs_every_combination_and_is_the_same_in_processes():
    study = Study(
        model=LLAMA_3_1_8B, gpu=H100, prompts=FixedLength(40), outputs=LognormalLength(mean=20),
        num_requests=40, popularity=zipf(6), num_tenants=2, max_loras=2,
    )  # fmt: skip
    kinds = [STATIC_16, CHUNKED_512], [5.0, 50.0], range(2)
    rows = list(run(study, *kinds))
    assert [(r.policy, r.rate, r.seed) for r in rows[:4]] == [
        ("static_16", 5.0, 0), ("static_16", 50.0, 0), ("chunked_512", 5.0, 0),
        ("chunked_512", 50.0, 0),
    ]  # fmt: skip
    assert len(rows) == 8 and list(run(study, *kinds, num_processes=2)) == rows
    assert all(row.figures.num_requests == 36 and row.figures.num_loads for row in rows)
    assert spread(rows[:1], lambda row: row.rate).deviation == 0


def test_a_model_that_does_not_fit_is_refused():
    big = ModelShape(
        name="big", num_parameters=70 * 10**9, num_layers=80, attention_width=8192, kv_width=1024
    )
    study = Study(model=big, gpu=H100, prompts=FixedLength(4), outputs=FixedLength(4))
    with pytest.raises(ConfigError, match="big does not fit into the memory of H100"):
        study.kv_blocks  # noqa: B018
