"""Reading a model folder's tokenizer files, as transformers reads them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from engine.text.errors import TokenizerError

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_config(model_dir: Path) -> dict[str, Any]:
    """`tokenizer_config.json` with the older `special_tokens_map.json` merged in; {} if absent."""
    config = _read_json(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config.update(_read_json(model_dir / "special_tokens_map.json"))
    return config


def read_backend(model_dir: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """`tokenizer.json`, with the tokens that only the config adds."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{path} does not exist; AutoTokenizer.from_pretrained(...).save_pretrained(...) "
            "of transformers makes one from older tokenizer files"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        # Settings of the model's training, which must not cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        _add_missing_tokens(backend, config)
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    return backend


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as chat templates see them."""
    return {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None}


def read_chat_templates(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name; `default` is the usual one. Files go before the config's field."""
    templates: dict[str, str] = {}
    single = model_dir / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        templates[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if templates:
        return templates
    field = config.get("chat_template")
    if field is None:
        return {}
    if isinstance(field, str):
        return {"default": field}
    try:
        return {template["name"]: template["template"] for template in field}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            "tokenizer_config.json: chat_template is neither a string nor a list of named templates"
        ) from error


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    declared: dict[str, Any] = config.get("added_tokens_decoder") or {}
    for _, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(**fields)
        if repr(token) not in known:
            backend.add_tokens([token])
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    for content in [*named_special_tokens(config).values(), *_extra_special_tokens(config)]:
        if content not in contents:
            backend.add_special_tokens([content])


def _extra_special_tokens(config: Mapping[str, Any]) -> Iterable[str]:
    extra: Any = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    return [_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)]


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is no JSON object")
    return content
