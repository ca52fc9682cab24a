"""What adapters may have beside LoRA of the layers' linears, against PEFT in float32."""

from typing import Any

import pytest
import torch

from tests.support.model_lab import ModelLab, prompt_of
from tests.support.peft_reference import assert_exact
from tests.support.tiny_models import ALL_LINEARS

# PEFT warns of tied weights, of biases where the base has none, and of embeddings in the file.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LOGIT_TOLERANCE = 1e-4
BIASED = {"attention_bias": True, "mlp_bias": True}

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biased": ("llama", BIASED),
    "smollm": ("smollm", {}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "output layer": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "output layer alone": ("llama", {"r": 3, "target_modules": ["lm_head"]}),
    "tied output layer": ("smollm", {"target_modules": ["v_proj", "lm_head"]}),
    "output layer under a soft cap": ("gemma2", {"target_modules": ["lm_head", "up_proj"]}),
    "embedding": ("llama", {"r": 5, "target_modules": ["embed_tokens", "o_proj"]}),
    "embedding alone": ("llama", {"target_modules": ["embed_tokens"]}),
    "tied embedding": ("smollm", {"target_modules": ["embed_tokens", "q_proj"]}),
    "scaled embedding": ("gemma2", {"target_modules": ["embed_tokens", "down_proj"]}),
    "both ends": (
        "llama",
        {
            "target_modules": ["embed_tokens", "lm_head", "v_proj"],
            "rank_pattern": {"lm_head": 2, "embed_tokens": 11},
            "use_rslora": True,
        },
    ),
    "bias of B": ("llama", {"lora_bias": True, "target_modules": ["q_proj", "v_proj", "lm_head"]}),
    "bias of B on biased linears": ("biased", {"lora_bias": True, "target_modules": ALL_LINEARS}),
    "biases of the targets": ("biased", {"bias": "lora_only", "target_modules": ["k_proj"]}),
    "all biases": ("biased", {"bias": "all", "target_modules": ["v_proj", "down_proj"]}),
    "all biases of q, k and v": ("qwen2", {"bias": "all", "target_modules": ["q_proj", "up_proj"]}),
    "all biases and those of B": (
        "qwen2",
        {"bias": "all", "lora_bias": True, "target_modules": ["q_proj"]},
    ),
    "own norms": (
        "llama",
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"],
        },
    ),
    "own last norm": ("qwen2", {"target_modules": ["v_proj"], "modules_to_save": ["model.norm"]}),
    "own norms with an offset": (
        "gemma2",
        {"target_modules": ["o_proj"], "modules_to_save": ["layernorm", "embed_tokens"]},
    ),
    "own output layer": ("llama", {"target_modules": ALL_LINEARS, "modules_to_save": ["lm_head"]}),
    "own output layer beside a tied embedding": (
        "smollm",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "own output layer under a soft cap": (
        "gemma2",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "own embedding beside a tied output layer": (
        "smollm",
        {"target_modules": ["down_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "own everything with DoRA": (
        "llama",
        {
            "use_dora": True,
            "target_modules": ["q_proj", "up_proj"],
            "modules_to_save": ["embed_tokens", "lm_head", "norm"],
        },
    ),
    "DoRA": ("llama", {"use_dora": True, "target_modules": ALL_LINEARS}),
    "DoRA of a part": ("smollm", {"use_dora": True, "r": 3, "target_modules": ["v_proj"]}),
    "DoRA of biased linears": ("biased", {"use_dora": True, "target_modules": ALL_LINEARS}),
    "DoRA with all biases": (
        "biased",
        {"use_dora": True, "bias": "all", "target_modules": ["q_proj", "gate_proj"]},
    ),
    "DoRA of modules that the checkpoint fuses": (
        "phi3",
        {"use_dora": True, "use_rslora": True, "target_modules": ["qkv_proj", "gate_up_proj"]},
    ),
}


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, ModelLab] = {}

    def lab(name: str) -> ModelLab:
        if name not in made:
            family, overrides = BASES[name]
            made[name] = ModelLab(tmp_path_factory.mktemp(name), family, **overrides)
        return made[name]

    return lab


@pytest.mark.parametrize("name", CASES)
def test_it_equals_peft_alone_and_between_others(labs, name):
    base, config = CASES[name]
    lab: ModelLab = labs(base)
    adapter = lab.adapter(name, seed=len(name), **config)
    plain = lab.adapter("plain", target_modules="all-linear")
    lab.install(0, plain)
    lab.install(2, adapter)
    prompt = prompt_of(40)
    requests = [(prompt, 0), (prompt, 2), (prompt_of(7), None), (prompt_of(21), 2)]

    def run(requests, chunk):
        driver = lab.driver()
        sequences = [driver.add(tokens, slot) for tokens, slot in requests]
        driver.generate(sequences, 8, chunk=chunk)
        return sequences

    crowd = run(requests, 13)
    paths = {0: plain, 2: adapter, None: None}
    for sequence, request in zip(crowd, requests, strict=True):
        tokens, slot = request
        [alone] = run([request], 64)
        assert alone.output == sequence.output
        assert torch.equal(torch.stack(alone.logits), torch.stack(sequence.logits))
        reference = lab.reference(paths[slot]).greedy(tokens, 8)
        assert_exact(sequence.output, reference)
        if sequence.output == reference.token_ids:
            difference = torch.stack(sequence.logits) - reference.logits
            assert difference.abs().max() < LOGIT_TOLERANCE
    # It must matter: the base answers otherwise.
    [base_run] = run([(prompt, None)], 64)
    assert not torch.allclose(base_run.logits[0], crowd[1].logits[0], atol=1e-2)


@pytest.mark.parametrize("name", ["both ends", "DoRA", "bias of B", "own everything with DoRA"])
def test_a_cleared_slot_shows_nothing_of_it(labs, name):
    base, config = CASES[name]
    lab: ModelLab = labs(base)

    def run(slot):
        driver = lab.driver()
        sequence = driver.add(prompt_of(20), slot)
        driver.generate([sequence], 4, chunk=64)
        return torch.stack(sequence.logits)

    lab.install(3, lab.adapter(name, seed=len(name), **config))
    assert not torch.equal(run(3), run(None))
    lab.runner.clear_slot(3)
    assert torch.equal(run(3), run(None))


def test_a_mixed_batch_changes_no_bit_in_bfloat16(tmp_path):
    lab = ModelLab(tmp_path, "llama", dtype="bfloat16", **BIASED)
    ends = {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}
    lab.install(0, lab.adapter("ends", **ends))
    lab.install(
        1, lab.adapter("dora", seed=1, use_dora=True, bias="all", target_modules=["q_proj"])
    )
    own = {"modules_to_save": ["embed_tokens", "lm_head", "norm"], "target_modules": ["o_proj"]}
    lab.install(3, lab.adapter("own", seed=2, **own))
    requests = [(70, 0), (3, None), (41, 1), (64, 3), (17, None), (90, 1), (33, 3), (8, 0)]
    lab.check_alone_as_in_a_crowd(requests)
