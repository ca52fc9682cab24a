"""Keys and values in 8-bit floats, from requests to tokens, against a reference that rounds alike.

The kernels run in Triton's interpreter. The reference is transformers + PEFT in the same dtype,
whose cache hands on what is stored: the nearest number of OCP's e4m3, in the dtype of the model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.device.build import build_device_runner
from engine.device.device_runner import DeviceRunner
from engine.device.setup import interpreter_setup
from engine.messages import EngineRequest, TokenLogprob
from engine.runner.build_runner import BuiltRunner
from engine.sampling_params import SamplingParams
from engine.triton.kv_cache import TritonKVCache
from tests.support.loaded_adapters import LoadedAdapters
from tests.support.model_lab import digest_of, prompt_of
from tests.support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_adapter, make_tiny_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MAX_TOKENS = 3


class RoundingCache(DynamicCache):
    """Keys and values as a cache of 8-bit floats gives them back."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any):
        rounded = [
            part.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(part.dtype)
            for part in (key_states, value_states)
        ]
        return super().update(*rounded, layer_idx, *rest, **more)


def build(model_dir: Path, **settings: Any) -> BuiltRunner:
    options = {"dtype": "float16", "num_kv_blocks": 8, "max_num_seqs": 2} | settings
    return build_device_runner(
        model_dir,
        interpreter_setup(max_loras=1, max_lora_rank=8),
        max_num_batched_tokens=12,
        max_model_len=64,
        **options,
    )


def logprobs_of(
    built: BuiltRunner, weights: Any, requests: list[EngineRequest]
) -> dict[int, list[TokenLogprob]]:
    """Of each request what is told of its tokens."""
    assert isinstance(built.runner, DeviceRunner)
    config = SchedulerConfig(
        num_kv_blocks=built.num_kv_blocks,
        max_num_seqs=2,
        max_num_batched_tokens=12,
        max_model_len=built.max_model_len,
        max_loras=1,
    )
    core = EngineCore(
        config,
        built.runner,
        LoadedAdapters(weights),
        eos_token_ids=[EOS_TOKEN_ID],
        vocab_size=VOCAB_SIZE,
        clock=iter(range(1_000_000)).__next__,
        launch=built.runner.launch,
    )
    for request in requests:
        core.add("client", request)
    told: dict[int, list[TokenLogprob]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for _, output in core.step():
            assert output.error is None
            for delta in output.deltas:
                told[output.request_id] += delta.logprobs or []
        core.check_integrity()
    return told


def reference(
    model_dir: Path, adapter: Path | None, prompt: list[int], tokens: list[int], cache: Any
) -> torch.Tensor:
    """[tokens, vocab] log-probabilities by transformers, of each token after those before it."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float16)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = model.eval()(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0, len(prompt) - 1 :].float().log_softmax(-1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    return make_tiny_model(folder / "base", "llama", dtype=torch.float16, **SMALL)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft 0.21 reads a renamed attribute
def test_tokens_are_those_of_a_reference_that_rounds_keys_and_values_alike(model_dir: Path):
    adapter = make_tiny_adapter(model_dir.parent / "all", model_dir, target_modules="all-linear")
    built = build(model_dir, kv_cache_dtype="fp8")
    runner: Any = built.runner
    assert isinstance(runner._kv_cache, TritonKVCache) and runner._kv_cache.is_fp8
    digest = digest_of(adapter)
    cases = [(None, prompt_of(17, 0)), (adapter, prompt_of(5, 1))]  # one prefill in two parts
    requests = [
        EngineRequest(
            request_id=number,
            tenant="t",
            adapter=None if path is None else digest,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS, seed=0, temperature=0.0, ignore_eos=True, logprobs=5
            ),
        )
        for number, (path, prompt) in enumerate(cases)
    ]
    told = logprobs_of(built, {digest: built.load_adapter(digest, adapter)}, requests)
    for number, (path, prompt) in enumerate(cases):
        tokens = [logprob.token_id for logprob in told[number]]
        assert len(tokens) == MAX_TOKENS
        rounds, plain = (
            reference(model_dir, path, prompt, tokens, cache)
            for cache in (RoundingCache(), DynamicCache())
        )
        assert tokens == rounds.argmax(-1).tolist()
        far = [distance(told[number], values) for values in (rounds, plain)]
        assert far[0] < 0.04 and far[0] < far[1] / 5, far


def distance(told: list[TokenLogprob], expected: torch.Tensor) -> float:
    """The largest between log-probabilities that were told and a reference's."""
    return max(
        abs(value - expected[place, token].item())
        for place, logprob in enumerate(told)
        for token, value in logprob.top
    )
