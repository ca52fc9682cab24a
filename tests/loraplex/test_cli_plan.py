"""`loraplex plan`, and what it shares with `simulate`, as one types it."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from engine.simulation.fitted import StepCosts, StepModel
from loraplex.cli import main

SMALL = ["--requests", "60", "--prompts", "fixed:300", "--outputs", "fixed:20", "--processes", "1",
         "--max-model-len", "400"]  # fmt: skip


def _run(*arguments):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def _step_model(folder):
    file = folder / "step.json"
    costs = StepCosts(
        step=0.02, row=1e-3, padded_token=5e-4, token=0, context_token=0, adapter=1e-3, lora_token=0
    )
    model = StepModel(
        costs=costs, mean_error=0.0, num_steps=99, num_kv_blocks=900, max_num_seqs=16,
        max_num_batched_tokens=128, max_model_len=1024, max_loras=4, machine="a laptop",
    )  # fmt: skip
    file.write_bytes(msgspec.json.encode(model))
    return file


def test_a_plan_is_printed_and_written_with_its_price(tmp_path):
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    result = _run("plan", "--rate", 50, "--adapters", 4, "--gpu-price", 2.5, *SMALL,
                  "--json", file, "--html", page)  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    hours = document["gpu_hours_per_million_output_tokens"]
    assert document["cost_per_million_output_tokens"] == pytest.approx(2.5 * hours)
    assert document["meets_slo"] and document["expected"]["goodput"] >= 0.95
    assert {"queue_ms", "kv_blocks_peak", "ttft_p99_ms"} <= document["expected"].keys()
    assert f"{document['replicas']} x H100" in result.output
    assert document["findings"] == [] and document["why"].keys() >= {"replicas", "max_loras"}
    assert "the smallest whose goodput is within 0.005 of the best: 16 (" in result.output
    assert result.output.count("operating point") >= 2 and "the demand  " in result.output
    text = page.read_text()
    assert "because" in text and "The columns" in text
    assert document["adapters"][0].keys() >= {"adapter", "queue_ms", "longest_wait_ms"}
    assert "Queue time by adapter and cause, of the demand" in result.output
    assert text.count("<svg") >= 5 and "operating point" in text and "<script" not in text


def test_a_demand_that_no_number_of_replicas_meets_ends_with_an_error(tmp_path):
    result = _run("plan", "--rate", 5, *SMALL, "--slo-ttft-ms", 0)
    assert result.exit_code == 1 and "less than the 95% wanted" in result.output


def test_a_measured_engine_is_planned_with_and_simulated(tmp_path):
    model, page, rows = _step_model(tmp_path), tmp_path / "page.html", tmp_path / "rows.json"
    small = [*SMALL, "--step-model", model, "--adapters", 6]
    result = _run("plan", "--rate", 20, *small, "--slo-ttft-ms", 2000, "--html", page)
    assert "x machine" in result.output and "a laptop" in page.read_text()
    result = _run("simulate", "--rate", 2, "--rate", 4, "--seeds", 1, *small, "--json", rows,
                  "--html", page)  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(rows.read_text())
    assert list(document["saturation"]) == ["chunked_128"]
    assert all(row["adapters"] and row["queue_ms"] for row in document["rows"])
    assert "Queue time by adapter and cause" in page.read_text()


def test_a_trace_gives_a_plan_its_rate_and_lengths(tmp_path):
    trace, file = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    trace.write_text("".join(
        json.dumps({"at": n / 10, "prompt_tokens": 200, "output_tokens": 10, "adapter": "x"}) + "\n"
        for n in range(50)
    ))  # fmt: skip
    result = _run("plan", "--trace", trace, *SMALL, "--json", file)
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["rate"] == pytest.approx(50 / 4.9)


def test_replicas_are_simulated_behind_a_router(tmp_path):
    file, page = tmp_path / "rows.json", tmp_path / "page.html"
    rows = {}
    for routing in ("affinity", "round_robin"):
        result = _run("simulate", "--replicas", 3, "--routing", routing, "--rate", 90, "--seeds", 1,
                      "--policy", "chunked_512", "--adapters", 12, "--max-loras", 4, *SMALL,
                      "--json", file, "--html", page)  # fmt: skip
        assert result.exit_code == 0, result.output
        [rows[routing]] = json.loads(file.read_text())["rows"]
    assert rows["affinity"]["num_installs"] < rows["round_robin"]["num_installs"]
    waits = rows["round_robin"]["adapters"]
    totals = [wait["num_requests"] * sum(wait["queue_ms"].values()) for wait in waits]
    assert totals == sorted(totals, reverse=True) and waits[0]["queue_ms"]["load"] > 0
    assert sum(wait["num_requests"] for wait in waits) == 0.9 * 60
    told = "Queue time by adapter and cause: chunked_512 at 90 requests/s"
    assert told in page.read_text() and told in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "--rate is missing"),
        (["plan", "--rate", "1", "--gpu", "L40S", "--adapter-rank", "9999", "--adapters", "9"],
         "do not fit into memory"),
        (["simulate", "--replicas", "2", "--trace", __file__], ":1: "),
        (["simulate", "--step-model", __file__], "test_cli_plan.py: Expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_by_name(arguments, message):
    result = _run(*arguments)
    assert result.exit_code != 0 and message in result.output


def test_few_seeds_are_said_to_be_noise(monkeypatch):
    from engine.simulation import published

    monkeypatch.setattr(published, "jobs", lambda seeds, with_curves: [])
    monkeypatch.setattr(
        published, "compare",
        lambda rows: [published.Comparison("x", 1, 1, 0.05, published.Spread(2.0, 0.0))],
    )  # fmt: skip
    result = _run("simulate", "--preset", "seeds", "--seeds", 2, "--processes", 1)
    assert result.exit_code == 1 and "2 seeds are few" in result.output and "OFF" in result.output
    result = _run("simulate", "--preset", "seeds", "--processes", 1)
    assert "seeds: 10 ..." in result.output and "are few" not in result.output
