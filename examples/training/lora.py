"""Train one LoRA adapter on a CPU with peft, and save it as a small folder."""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from .dataset import Example
from .recipes import Recipe

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH_SIZE = 8
WARMUP_STEPS = 10


def load_base(weights: Path) -> tuple[Any, Any]:
    """The base in bfloat16, which the adapters are served on, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(weights, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16), tokenizer


def train_adapter(
    base: Any,
    tokenizer: Any,
    recipe: Recipe,
    examples: list[Example],
    on_step: Callable[[int, int, float], None],
) -> PeftModel:
    """Return the base wrapped with a trained adapter; `on_step(step, num_steps, loss)` hears."""
    torch.manual_seed(recipe.seed)
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **recipe.lora)
    model = get_peft_model(base, config)
    decoder = model.get_base_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    encoded = [_encode(tokenizer, example) for example in examples]
    num_steps = recipe.num_epochs * math.ceil(len(encoded) / BATCH_SIZE)
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))
        ),
    )
    model.train()
    for step, batch in enumerate(_batches(encoded, recipe), start=1):
        input_ids, mask, labels = _collate(batch, tokenizer.pad_token_id)
        hidden = decoder.model(
            input_ids=input_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
        # Logits only where an answer token is predicted: the vocabulary is most of the cost.
        predicts = labels[:, 1:] != -100  # [batch, seq - 1]
        logits = decoder.lm_head(hidden[:, :-1][predicts]).float()  # [num_answer_tokens, vocab]
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][predicts])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step, num_steps, float(loss.detach()))
    return model.eval()


def save_adapter(model: PeftModel, recipe: Recipe, folder: Path) -> None:
    """Write config, bf16 tensors and `demo.json`; the config names the base by its hub id."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    demo = {
        "description": recipe.description,
        "predicate": recipe.predicate,
        "max_tokens": recipe.max_tokens,
    }
    (folder / "demo.json").write_text(json.dumps(demo, indent=2) + "\n")


def _encode(tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
    """Prompt ids and answer ids; the answer ends with the end-of-turn token."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": example.question}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
    return prompt, [*answer, tokenizer.eos_token_id]


def _batches(
    encoded: list[tuple[list[int], list[int]]], recipe: Recipe
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Shuffled batches of similar length, so that little is padding."""
    rng = random.Random(recipe.seed)
    for _ in range(recipe.num_epochs):
        ordered = sorted(encoded, key=lambda pair: (len(pair[0]) + len(pair[1]), rng.random()))
        batches = [ordered[i : i + BATCH_SIZE] for i in range(0, len(ordered), BATCH_SIZE)]
        rng.shuffle(batches)
        yield from batches


def _collate(
    batch: list[tuple[list[int], list[int]]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, mask and labels, each [batch, seq]; -100 where nothing is learned."""
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    input_ids, mask, labels = [], [], []
    for prompt, answer in batch:
        padding = length - len(prompt) - len(answer)
        input_ids.append(prompt + answer + [pad_id] * padding)
        mask.append([1] * (length - padding) + [0] * padding)
        labels.append([-100] * len(prompt) + answer + [-100] * padding)
    return torch.tensor(input_ids), torch.tensor(mask), torch.tensor(labels)
