from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.errors import ConfigError
from engine.ops import TorchOps
from engine.runner import build_runner as module
from engine.runner.build_runner import build_runner
from engine.sampling.sampler import Sampler
from tests.support.model_lab import digest_of
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


def test_a_runner_reports_what_the_engine_needs_to_know(model_dir):
    built = build_runner(model_dir, num_kv_blocks=20, max_model_len=400)
    assert built.vocab_size == 272
    assert built.eos_token_ids == (258,)
    assert built.max_position_embeddings == 512
    assert built.max_model_len == 320  # 20 blocks of 16
    assert (built.num_kv_blocks, built.dtype, built.device) == (20, "float32", "cpu")
    assert built.base.name == "tiny" and len(built.base.fingerprint) == 64
    assert built.invariance is not None and built.invariance.holds
    assert isinstance(built.runner._sampler, Sampler)


def test_the_kv_cache_holds_every_sequence_at_full_length_where_memory_allows(model_dir):
    built = build_runner(model_dir, max_num_seqs=3, max_model_len=100, self_test=False)
    assert built.num_kv_blocks == 3 * 7
    assert built.max_model_len == 100


def test_a_short_model_length_is_no_hindrance_to_the_self_test(model_dir):
    built = build_runner(model_dir, num_kv_blocks=4, max_model_len=10)
    assert built.max_model_len == 10
    assert built.invariance is not None and built.invariance.holds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "dtype must be auto, float32 or bfloat16"),
        ({"block_size": 24}, "block_size must divide 64, not 24"),
        ({"max_model_len": 513}, "max_model_len 513 is more than .* 512"),
        ({"num_kv_blocks": 2**40}, "num_kv_blocks 1099511627776 would take"),
    ],
)
def test_a_setting_that_can_never_work_is_refused(model_dir, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_runner(model_dir, **settings)


def test_a_model_that_cannot_be_read_is_refused(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        for name in ("config.json", "generation_config.json"):
            (tmp_path / name).write_bytes((model_dir / name).read_bytes())
        build_runner(tmp_path)


def test_threads_are_set(model_dir):
    before = torch.get_num_threads()
    try:
        build_runner(model_dir, num_kv_blocks=4, threads=2, self_test=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_self_test_sees_a_row_that_depends_on_its_batch(model_dir, monkeypatch):
    """A row count in the last bit of a norm is enough, and is logged."""
    exact = TorchOps.norm

    def depends(self: TorchOps, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return exact(self, x, weight, eps) * (1 + 1e-6 * x.shape[0])

    warnings: list[str] = []

    class Log:
        def warning(self, event: str, **values: object) -> None:
            warnings.append(event)

        def info(self, event: str, **values: object) -> None:
            pass

    monkeypatch.setattr(TorchOps, "norm", depends)
    monkeypatch.setattr(module.structlog, "get_logger", lambda name: Log())
    built = build_runner(model_dir, num_kv_blocks=4, cpu_kernels="torch")
    assert built.invariance is not None and not built.invariance.holds
    assert built.invariance.max_logit_difference > 0
    assert len(warnings) == 1 and "share" in warnings[0]


def test_the_self_test_does_not_depend_on_what_its_memory_held(model_dir, monkeypatch):
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    built = build_runner(model_dir, num_kv_blocks=4)
    assert built.invariance is not None and built.invariance.holds


def test_a_thread_that_reads_adapters_takes_no_team_of_its_own(model_dir, tmp_path):
    built = build_runner(model_dir, num_kv_blocks=4, self_test=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        folder = make_tiny_adapter(tmp_path / "adapter", model_dir)

        def read() -> int:
            built.load_adapter(digest_of(folder), folder)
            return torch.get_num_threads()

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(read).result() == 1
        assert torch.get_num_threads() == 2
        built.load_adapter(digest_of(folder), folder)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
