"""A base whose layers are quantised: values, bits, and PEFT on the same quantised base."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from engine.device.build import build_device_runner
from engine.device.setup import interpreter_setup
from engine.engine_args import EngineArgs
from engine.errors import ConfigError
from engine.process import build_parts
from engine.quantization.choose import QUANTIZATIONS, choose_scheme
from engine.quantization.scheme import Scheme
from engine.runner.build_runner import build_runner
from tests.support.hand_driver import GreedySampler, HandDriver
from tests.support.model_lab import ModelLab, prompt_of
from tests.support.peft_reference import PeftReference, assert_exact
from tests.support.quantized_models import dequantized_copy
from tests.support.tiny_models import ALL_LINEARS, make_tiny_model, modules_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
LOGIT_TOLERANCE = 2e-4
WIDE = {"intermediate_size": 128}
"""All linears have a multiple of 64 inputs, as nf4 wants them."""


def scheme_of(name: str, dtype: torch.dtype = torch.float32) -> Scheme:
    scheme = choose_scheme(name, dtype=dtype)
    assert scheme is not None and scheme.name == name
    return scheme


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_linear_multiplies_with_the_quantised_values(name, dtype):
    scheme = scheme_of(name, dtype)
    weight, bias = random(48, 128, dtype=dtype), random(48, dtype=dtype, seed=1)
    x = random(5, 128, dtype=dtype, seed=2)
    values = scheme.dequantized(weight)
    assert values.shape == weight.shape and values.dtype is dtype
    expected = F.linear(x.double(), values.double(), bias.double())
    got = scheme.make_linear([weight], bias)(x)
    assert got.dtype is dtype
    assert (got.double() - expected).abs().max() < TOLERANCES[dtype] * expected.abs().max()
    assert not torch.equal(values, weight)
    assert F.cosine_similarity(values.float().flatten(), weight.float().flatten(), dim=0) > 0.99


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_members_of_a_fused_linear_are_quantised_each_by_itself(name):
    scheme = scheme_of(name)
    # The second is so large that a scale which both shared would crush the first.
    weights = [random(32, 64, dtype=torch.float32), 1000 * random(16, 64, dtype=torch.float32)]
    x = random(16, 64, dtype=torch.float32, seed=2)
    fused = scheme.make_linear(weights)(x)
    alone = torch.cat([scheme.make_linear([weight])(x) for weight in weights], dim=1)
    torch.testing.assert_close(fused, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_rows_bits_are_its_own(name, dtype):
    linear = scheme_of(name, dtype).make_linear([random(48, 128, dtype=dtype)])
    x = random(130, 128, dtype=dtype, seed=2)
    together = linear(x)
    for first, count in ((0, 1), (3, 2), (7, 5), (40, 17), (1, 33), (2, 128)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_values_are_those_of_the_library_that_users_train_with(dtype):
    import bitsandbytes
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    weight = random(64, 128, dtype=dtype)
    for name, config in (("int8", Int8WeightOnlyConfig()), ("fp8", Float8WeightOnlyConfig())):
        module = torch.nn.Linear(128, 64, bias=False, dtype=dtype)
        module.weight.data = weight.clone()
        quantize_(module, config)
        expected: Any = module.weight
        difference = scheme_of(name, dtype).dequantized(weight) - expected.dequantize()
        assert difference.abs().max() <= torch.finfo(dtype).eps * weight.abs().max()
    four_bits = bitsandbytes.nn.Params4bit(
        weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True
    ).to("cpu")
    expected = bitsandbytes.functional.dequantize_4bit(four_bits.data, four_bits.quant_state)
    assert torch.equal(scheme_of("nf4", dtype).dequantized(weight), expected)


def test_int4_has_sixteen_values_a_group():
    weight = random(16, 96, dtype=torch.float32)
    values = scheme_of("int4").dequantized(weight).view(16, 3, 32)
    groups = weight.view(16, 3, 32)
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    assert ((values - groups).abs().amax(-1) <= 0.51 * steps).all()
    assert all(len(group.unique()) <= 16 for group in values.flatten(0, 1))


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, str], tuple[ModelLab, Path]] = {}

    def lab(name: str, family: str) -> tuple[ModelLab, Path]:
        if (name, family) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{family}")
            lab = ModelLab(folder, family, quantization=name, **WIDE)
            copy = dequantized_copy(lab.model_dir, folder / "dequantized", scheme_of(name))
            made[name, family] = lab, copy
        return made[name, family]

    return lab


CASES = [
    ("int8", "llama", {"target_modules": ALL_LINEARS}),
    ("int8", "phi3", {"target_modules": modules_of("phi3", ALL_LINEARS)}),
    ("int8", "llama", {"target_modules": ALL_LINEARS, "use_dora": True}),
    ("fp8", "qwen2", {"target_modules": ALL_LINEARS, "r": 3}),
    ("nf4", "qwen2", {"target_modules": ALL_LINEARS}),
    ("nf4", "llama", {"target_modules": ["q_proj", "lm_head"]}),
    ("nf4", "llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    ("int4", "llama", {"target_modules": ALL_LINEARS}),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT: of biases where the base has none
@pytest.mark.parametrize(
    ("name", "family", "config"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_it_equals_peft_on_the_same_quantised_base(labs, name, family, config):
    lab, dequantized = labs(name, family)
    dora = bool(config.get("use_dora"))
    adapter = lab.adapter(f"adapter-{dora}", seed=4, **config)
    lab.install(1, adapter)
    requests = [(prompt_of(40), 1), (prompt_of(7), None), (prompt_of(21), 1)]

    def run(requests, chunk):
        driver = lab.driver()
        sequences = [driver.add(tokens, slot) for tokens, slot in requests]
        driver.generate(sequences, 6, chunk=chunk)
        return sequences

    references = {1: PeftReference(dequantized, adapter), None: PeftReference(dequantized)}
    for sequence, (tokens, slot) in zip(run(requests, 13), requests, strict=True):
        [alone] = run([(tokens, slot)], 64)
        assert torch.equal(torch.stack(alone.logits), torch.stack(sequence.logits))
        reference = references[slot].greedy(tokens, 6)
        assert_exact(sequence.output, reference)
        if sequence.output == reference.token_ids:
            difference = torch.stack(sequence.logits) - reference.logits
            assert difference.abs().max() < LOGIT_TOLERANCE
    # It must matter: the original base gives other logits.
    original = lab.reference().greedy(prompt_of(7), 1)
    assert not torch.allclose(original.logits, references[None].greedy(prompt_of(7), 1).logits)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_nf4_equals_transformers_and_peft_with_bitsandbytes(labs):
    """The stack that QLoRA adapters are trained with, none of it ours."""
    from peft import PeftModel

    lab, _ = labs("nf4", "qwen2")
    adapter = lab.adapter("qlora", seed=5, target_modules=ALL_LINEARS)
    lab.install(2, adapter)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        lab.model_dir, dtype=torch.float32, quantization_config=settings, device_map="cpu"
    )
    model = PeftModel.from_pretrained(base, adapter)
    # In eval mode bitsandbytes computes in bfloat16 on CPUs that can; nothing here drops out.
    model.train()
    prompt = prompt_of(30)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    driver = lab.driver()
    sequence = driver.add(prompt, 2)
    driver.generate([sequence], 1, chunk=64)
    assert (sequence.logits[0] - expected).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_mixed_batch_changes_no_bit_in_bfloat16(tmp_path, name):
    lab = ModelLab(tmp_path, "llama", dtype="bfloat16", quantization=name, **WIDE)
    lab.install(0, lab.adapter("zero", target_modules=ALL_LINEARS))
    requests = [(70, 0), (3, None), (41, 0), (17, None)]

    def run(requests, chunk):
        driver = lab.driver()
        sequences = [driver.add(prompt_of(n, seed=n), slot) for n, slot in requests]
        driver.generate(sequences, 5, chunk=chunk)
        return sequences

    for crowded, request in zip(run(requests, 23), requests, strict=True):
        [alone] = run([request], 90)
        assert torch.equal(torch.stack(alone.logits), torch.stack(crowded.logits))


def test_the_engine_reports_it_and_adapters_bind_as_they_did(tmp_path):
    lab = ModelLab(tmp_path, "llama", quantization="int8")
    plain = build_runner(lab.model_dir, num_kv_blocks=4, self_test=False)
    assert lab.built.base.fingerprint == plain.base.fingerprint
    args = EngineArgs(
        model_dir=str(lab.model_dir), socket_path="/x", cache_dir=str(tmp_path / "cache"),
        generation=1, quantization="int8", num_kv_blocks=4,
    )  # fmt: skip
    parts = build_parts(args)
    try:
        assert parts.info.quantization == "int8"
        assert parts.info.fingerprint == plain.base.fingerprint
    finally:
        parts.close()


def test_a_devices_runner_takes_it_too(tmp_path):
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    folder = make_tiny_model(tmp_path / "model", "llama", **shape)
    sampler = GreedySampler()
    built = build_device_runner(
        folder,
        interpreter_setup(max_loras=1, max_lora_rank=8),
        dtype="float32",
        num_kv_blocks=8,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=64,
        make_sampler=lambda vocab_size, eos: sampler,
        quantization="nf4",
    )
    driver = HandDriver(built.runner, sampler, 8)
    sequence = driver.add(prompt_of(9), None)
    driver.generate([sequence], 2, chunk=16)
    copy = dequantized_copy(folder, tmp_path / "dequantized", scheme_of("nf4"))
    reference = PeftReference(copy).greedy(prompt_of(9), 2)
    assert_exact(sequence.output, reference)
    assert (sequence.logits[0] - reference.logits[0]).abs().max() < LOGIT_TOLERANCE


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_the_self_test_at_start_holds(tmp_path, name, dtype):
    folder = make_tiny_model(tmp_path / "model", "qwen2", **WIDE)
    built = build_runner(folder, dtype=dtype, num_kv_blocks=4, quantization=name)
    assert built.invariance is not None and built.invariance.holds


@pytest.mark.parametrize(
    ("name", "library"),
    [("int8", "torchao"), ("fp8", "torchao"), ("int4", "torchao"), ("nf4", "bitsandbytes")],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    model_dir, monkeypatch, name, library
):
    for module in [key for key in sys.modules if key.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"quantization '{name}' needs {library}.* pip install 'loraplex\[quantization\]'"
    with pytest.raises(ConfigError, match=message):
        build_runner(model_dir, num_kv_blocks=4, quantization=name)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("int5", {}, r"quantization must be one of \('int8', 'fp8', 'nf4', 'int4'\), not 'int5'"),
        ("int4", {"intermediate_size": 72}, "multiple of 16 outputs, not 72|multiple of 32 inputs"),
        (
            "nf4",
            {"intermediate_size": 96},
            "'nf4' takes linears with a multiple of 64 inputs, not 96",
        ),
    ],
)
def test_what_a_scheme_does_not_take_is_refused(tmp_path, name, overrides, message):
    folder = make_tiny_model(tmp_path / "model", "llama", **overrides)
    with pytest.raises(ConfigError, match=message):
        build_runner(folder, num_kv_blocks=4, quantization=name)


def test_int4_takes_bfloat16_only_on_cuda():
    with pytest.raises(ConfigError, match="on CUDA takes dtype bfloat16 only"):
        choose_scheme("int4", dtype=torch.float32, device="cuda")


def test_libraries_load_without_a_word(capfd):
    for name in QUANTIZATIONS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheme_of(name)
    assert capfd.readouterr() == ("", "")
