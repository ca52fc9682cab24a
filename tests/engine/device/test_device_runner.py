"""What a device's runner puts into slots."""

from pathlib import Path

import pytest
import torch

from engine.device.device_runner import DeviceRunner
from engine.device.setup import interpreter_setup
from tests.support.device_lab import make_device_lab
from tests.support.model_lab import digest_of
from tests.support.tiny_models import make_tiny_adapter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_of_an_adapters_own_arrive_in_the_models_dtype(tmp_path: Path, dtype: str):
    setup = interpreter_setup(max_loras=2, max_lora_rank=8)
    lab = make_device_lab(tmp_path, setup, dtype=dtype, decode_ladder=False, max_num_seqs=1,
                          max_num_batched_tokens=1)  # fmt: skip
    own = {"target_modules": ["v_proj"], "modules_to_save": ["norm", "lm_head", "embed_tokens"]}
    path = make_tiny_adapter(tmp_path / "own", lab.model_dir, r=2, **own)
    weights = lab.built.load_adapter(digest_of(path), path)
    runner = lab.runner
    assert isinstance(runner, DeviceRunner) and weights.own is not None
    assert runner.install_adapter(1, weights) is None
    held = runner._decoder.own_weights._slots[1]
    assert held is not None
    sent = {*held.norms.values(), held.embedding, held.output_layer}
    loaded = {*weights.own.norms.values(), weights.own.embedding, weights.own.output_layer}
    assert len(sent) == len(loaded) > 2 and not sent & loaded
    for there in sent:
        assert there is not None and there.dtype is getattr(torch, dtype)
        assert any(there.shape == here.shape and torch.equal(there, here) for here in loaded)
