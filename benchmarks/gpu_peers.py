"""What else serves these requests: transformers with PEFT's `adapter_names`, and its own batching.

Greedy, the same prompts, the same number of new tokens for each.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LlamaForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_MAX_SECONDS = 30.0
"""That a peer may take for a batch which takes us one or two."""


def peft_tokens_per_second(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_adapters: int,
    rank: int,
    new_tokens: int,
    wait: Callable[[], None],
) -> float:
    """`generate` with another adapter for each row, in turn; the model is left as it was."""
    names = [f"adapter{index}" for index in range(num_adapters)]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.24 has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        # In the model's dtype, as ours are, where PEFT's default is float32 for training.
        wrapped = get_peft_model(model, config, names[0], autocast_adapter_dtype=False)
        for name in names[1:]:
            wrapped.add_adapter(name, config, autocast_adapter_dtype=False)
    wrapped.eval()
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
    rows = [names[index % num_adapters] for index in range(len(prompts))]
    settings = _settings(new_tokens)

    def generate(tokens: GenerationConfig) -> None:
        wrapped.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            adapter_names=rows,
            generation_config=tokens,
        )

    try:
        with torch.inference_mode():
            generate(_settings(2))
            wait()
            began = time.perf_counter()
            generate(settings)
            wait()
            return len(prompts) * new_tokens / (time.perf_counter() - began)
    finally:
        wrapped.unload()


def continuous_tokens_per_second(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    wait: Callable[[], None],
) -> float:
    """Transformers' continuous batching, of the base: it has no adapters for each request.

    Its manager warms up (and captures its graphs) before it is timed. Raises what it raises where
    this device or this version cannot, TimeoutError where it gets nowhere.
    """
    inputs = [list(prompt) for prompt in prompts]
    settings = _settings(new_tokens)
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=settings, block=True, timeout=5.0
        ) as manager,
    ):
        for tokens in (2, new_tokens):  # the first for what is only made once
            wait()
            began = time.perf_counter()
            manager.add_requests(inputs=inputs, max_new_tokens=tokens)
            count = _count_tokens(manager, len(inputs))
            wait()
            seconds = time.perf_counter() - began
    return count / seconds


def _count_tokens(manager: Any, num_requests: int) -> int:
    """Of all replies; `generate_batch` would wait for ever, and leave out those that failed."""
    deadline = time.monotonic() + _MAX_SECONDS
    finished, count = 0, 0
    while finished < num_requests:
        if time.monotonic() > deadline:
            manager.stop(block=True, timeout=5.0, hard_stop=True)
            raise TimeoutError(f"{finished} of {num_requests} replies after {_MAX_SECONDS:.0f} s")
        reply = manager.get_result(timeout=1.0)
        if reply is None:
            if not manager.is_running():
                raise RuntimeError(f"it ended after {finished} of {num_requests} replies")
        elif reply.is_finished():
            if reply.error is not None:
                raise RuntimeError(f"a request failed: {reply.error}")
            finished += 1
            count += len(reply.generated_tokens)
    return count


def _settings(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
