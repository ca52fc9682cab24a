"""How peers are started; starting them takes minutes and is the benchmark's to do."""

from pathlib import Path
from typing import Any

import pytest

from adapter_store.base_model import read_base_model
from adapter_store.peft_format import inspect_adapter
from benchmarks.serving import peers
from benchmarks.serving.bench import engine_rates
from benchmarks.serving.random_adapters import adapter_names, write_adapters
from tests.support.tiny_models import make_tiny_model


def test_vllm_gets_lora_only_with_adapters():
    plain = peers.vllm_command(Path("env"), Path("model"), 8101)
    assert "--no-enable-prefix-caching" in plain and "--enable-lora" not in plain
    lora = peers.vllm_command(Path("env"), Path("model"), 8101, [Path("x/a00"), Path("x/a01")])
    assert lora[: len(plain)] == plain
    assert lora[-2:] == ["a00=x/a00", "a01=x/a01"]
    assert lora[lora.index("--max-loras") + 1] == "8"


def test_vllm_runs_without_an_allocator_of_its_own():
    variables = peers.vllm_environment(Path("env"), None)
    assert variables["LD_PRELOAD"] == "env/lib/libiomp5.so"
    both = peers.vllm_environment(Path("env"), Path("tc.so.4"))
    assert both["LD_PRELOAD"] == "tc.so.4:env/lib/libiomp5.so"


def test_a_server_that_ends_at_once_says_why(tmp_path):
    command = ["python3", "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(peers.PeerError, match="no such model"),
        peers.serving(command, {}, "http://127.0.0.1:1", tmp_path / "log"),
    ):
        pass


def test_random_adapters_are_served_and_differ(tmp_path):
    base_dir = make_tiny_model(tmp_path / "tiny")
    base = read_base_model(base_dir)
    reports = [
        inspect_adapter(
            (folder / "adapter_config.json").read_bytes(),
            folder / "adapter_model.safetensors",
            base,
            max_rank=16,
        )
        for folder in write_adapters(base_dir, tmp_path, adapter_names(2))
    ]
    assert [len(report.bindings) for report in reports] == [21, 21]
    assert all(binding.scaling == 2.0 for report in reports for binding in report.bindings)
    assert len({report.digest for report in reports}) == 2


def test_the_workloads_rate_has_no_lora_on_the_base():
    def steps(gemm: float, lora: float) -> dict[str, Any]:
        """Steps that take twice their floor."""
        return {
            "step_ms": 2 * (gemm + lora),
            "parts_ms": {"GEMM": 2 * gemm, "LoRA": 2 * lora},
            "floor_ms": {"GEMM": gemm, "LoRA": lora},
        }

    profile = {
        "prefill 512, 4 adapters": steps(512.0, 512.0),
        "decode, base": steps(32.0, 0.0),
        "decode, 8 adapters": steps(32.0, 32.0),
    }
    base = engine_rates(profile, "decode, base")
    assert base["floor"] == pytest.approx(3414 / (8.154 + 3.414))
    assert base["engine alone"] == pytest.approx(base["floor"] / 2)
    adapters = engine_rates(profile, "decode, 8 adapters")
    assert adapters["floor"] == pytest.approx(base["floor"] / 2)
    assert adapters["engine alone"] == pytest.approx(base["floor"] / 4)
