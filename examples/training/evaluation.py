"""Ask questions greedily through the chat template, all in one batch."""

from typing import Any

import torch


@torch.inference_mode()
def greedy_answers(
    model: Any, tokenizer: Any, questions: list[str], max_tokens: int
) -> list[tuple[str, bool]]:
    """For each question the answer, and whether it ended by itself. Needs left padding."""
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
    )
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    answers = output[:, inputs["input_ids"].shape[1] :]
    return [
        (tokenizer.decode(ids, skip_special_tokens=True), tokenizer.eos_token_id in ids)
        for ids in answers
    ]
