"""Turn the GGUF file of a SmolLM2 chat model into a Hugging Face folder.

Owns the conversion and the sanity check of its result; `loraplex.weights` fetches the file and
decides where the folder lives. torch and transformers are imported on use, so that importing
this module costs nothing.
"""

import contextlib
import io
from collections.abc import Generator
from pathlib import Path
from typing import Any

SANITY_QUESTION = "What is the capital of France?"
SANITY_WORD = "Paris"
STALE_CONFIG_FIELDS = ("_name_or_path", "_model_name_or_path", "quantization_config")


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    """Keep transformers' warnings and its own bars out of the terminal, then restore them."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader has a bar of its own
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def convert_gguf(gguf_file: Path, folder: Path, *, name: str) -> None:
    """Write config, bf16 safetensors, tokenizer and generation config into `folder`.

    transformers refuses `save_pretrained` on a model that it dequantised, so the weights are
    copied into a fresh `LlamaForCausalLM`. `name` becomes the config's `_name_or_path`.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True
        )
        config = LlamaConfig.from_dict(
            {k: v for k, v in loaded.config.to_dict().items() if k not in STALE_CONFIG_FIELDS}
        )
        config.name_or_path = name
        config.architectures = ["LlamaForCausalLM"]
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.bfloat16().save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True
        )
        # The GGUF says `pre = smollm`: digits are split off one by one *before* the byte-level
        # pattern. transformers' reader leaves that out, which changes e.g. "\n\n2".
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)


def sanity_answer(folder: Path) -> str:
    """The model's greedy answer to `SANITY_QUESTION`; a good conversion names `SANITY_WORD`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": SANITY_QUESTION}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        prompt_length = inputs["input_ids"].shape[1]
        return tokenizer.decode(output[0, prompt_length:], skip_special_tokens=True)
