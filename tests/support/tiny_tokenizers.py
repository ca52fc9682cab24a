"""Tiny trained tokenizers of two families, as folders that a model would ship.

`byte_level` is of the GPT-2, SmolLM and Llama-3 kind: every token is a run of bytes. `metaspace` is
of the Llama-2 and Mistral kind: tokens carry their leading space as "▁", decoding strips the first
one, and characters that training did not see fall back to bytes. Both are trained here, in
milliseconds, so no file has to be kept.
"""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HERMES = (
    "{% if tools %}{{ '<|im_start|>system\\nCall as <tool_call>{json}</tool_call>:\\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As the templates of Hermes and Qwen teach calls, in short."""

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "Hello world, hello there! How are you today?",
    "a stop string may span several tokens, or fail half way",
    "numbers 0 1 2 3 4 5 6 7 8 9 10 100 1000",
    '{"intent": "refund", "order": 42}',
    "naïve café façade, über, señor",
    "def add(a, b):\n    return a + b\n",
    "  indented   text with   runs of spaces",
)

BYTE_LEVEL_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
METASPACE_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE; ids 0 to 2 are `BYTE_LEVEL_SPECIAL`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BYTE_LEVEL_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace(vocab_size: int = 400) -> Tokenizer:
    """BPE with byte fallback; ids 0 to 4 are `METASPACE_SPECIAL`, then come the 256 bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    seen = {char for line in CORPUS for char in line if char.isascii() and char.isprintable()}
    # Accented letters and the like are to fall back to bytes.
    alphabet = (seen - {" "}) | {"▁"}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*METASPACE_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer has made the bytes special tokens; Llama's are plain entries of the vocabulary.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] in METASPACE_SPECIAL
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write_byte_level_folder(folder: Path, chat_template: str | None = CHATML) -> Path:
    """`folder` as SmolLM2-Instruct ships its tokenizer."""
    return _write_folder(
        folder,
        byte_level,
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        chat_template,
    )


def write_metaspace_folder(folder: Path, chat_template: str | None = CHATML) -> Path:
    """`folder` as a Llama-2 chat model ships its tokenizer."""
    return _write_folder(
        folder,
        metaspace,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True},
        chat_template,
    )


def _write_folder(
    folder: Path,
    build: Callable[[], Tokenizer],
    config: dict[str, object],
    chat_template: str | None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    config = {
        **config,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
