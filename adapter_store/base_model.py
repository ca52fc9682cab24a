"""The base model as an adapter sees it: which linears it has, and of which shape. No torch."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from adapter_store.errors import AdapterFormatError, BaseModelError
from adapter_store.safetensors_header import TensorInfo, read_header

_SINGLE_FILE = "model.safetensors"
_SHARD_INDEX = "model.safetensors.index.json"
_LAYER_WEIGHT = re.compile(r"(?P<module>model\.layers\.(?P<layer>\d+)\..+)\.weight")
EMBEDDING, OUTPUT_LAYER = "model.embed_tokens", "lm_head"
_FLOAT_DTYPES = ("F32", "F16", "BF16")
_SAMPLE_BYTES = 64
_ARCHITECTURE_FIELDS = (
    "architectures",
    "attention_bias",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "sliding_window",
    "vocab_size",
)
_LATER_ARCHITECTURE_FIELDS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "query_pre_attn_scalar",
)
"""Told apart only where a config has them: fingerprints of the families before them stay."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear's sizes; its weight is [out_features, in_features]."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the base and the file it lies in."""

    file: Path
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A decoder whose linears adapters may target.

    `linears` maps the module path (`model.layers.0.self_attn.q_proj`) to its sizes: every module
    of a decoder layer with a two-dimensional weight. `ends` are the same for `model.embed_tokens`
    (from ids to hidden_size) and `lm_head`. `other_modules` are the paths that an adapter may not
    target: norms and containers. `tensors` are the weights by their name, `lm_head.weight`
    included where it is tied to the embedding.

    `fingerprint` is a SHA-256 over the fields of the config that shape the computation, every
    tensor's name, dtype and shape, and 64 bytes from the start, middle and end of each.
    """

    name: str
    fingerprint: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    linears: Mapping[str, LinearShape]
    ends: Mapping[str, LinearShape]
    other_modules: frozenset[str]
    tensors: Mapping[str, StoredTensor]


def read_base_model(model_dir: Path, *, name: str | None = None) -> BaseModel:
    """Read `config.json` and the safetensors headers (one file, or shards and their index).

    `name` defaults to the folder's. Raises BaseModelError.
    """
    config = _read_json(model_dir / "config.json")
    architecture = _field(config, "architectures", list)[0]
    num_layers = _field(config, "num_hidden_layers", int)
    try:
        tensors = dict(sorted(_stored_tensors(model_dir)))
    except AdapterFormatError as error:
        raise BaseModelError(f"the weights in {model_dir} cannot be read: {error}") from error
    fingerprint = _fingerprint(config, tensors)
    if "model.embed_tokens.weight" in tensors:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    linears, ends = _linears(tensors), _ends(tensors)
    layers = {int(path.split(".")[2]) for path in linears}
    if layers != set(range(num_layers)):
        raise BaseModelError(
            f"{model_dir} has weights `model.layers.N` for {len(layers)} layers, "
            f"its config.json says {num_layers}"
        )
    return BaseModel(
        name=model_dir.resolve().name if name is None else name,
        fingerprint=fingerprint,
        architecture=str(architecture),
        num_layers=num_layers,
        hidden_size=_field(config, "hidden_size", int),
        vocab_size=_field(config, "vocab_size", int),
        linears=linears,
        ends=ends,
        other_modules=_other_modules(tensors, {*linears, *ends}),
        tensors=tensors,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise BaseModelError(f"{path} is not a JSON object")
    return content


def _field(config: Mapping[str, Any], key: str, kind: type) -> Any:
    value = config.get(key)
    if not isinstance(value, kind) or not value:
        raise BaseModelError(f"config.json has no usable `{key}`")
    return value


def _stored_tensors(model_dir: Path) -> Iterator[tuple[str, StoredTensor]]:
    index = model_dir / _SHARD_INDEX
    single = model_dir / _SINGLE_FILE
    if single.is_file():
        for name, info in read_header(single).tensors.items():
            yield name, StoredTensor(single, info)
        return
    if not index.is_file():
        raise BaseModelError(f"{model_dir} has neither {_SINGLE_FILE} nor {_SHARD_INDEX}")
    weight_map: Any = _field(_read_json(index), "weight_map", dict)
    for file_name in sorted(set(weight_map.values())):
        shard = model_dir / file_name
        if shard.parent != model_dir or not shard.is_file():
            raise BaseModelError(f"{_SHARD_INDEX} names {file_name!r}, which is not there")
        stored = read_header(shard).tensors
        for name in (name for name, where in weight_map.items() if where == file_name):
            if name not in stored:
                raise BaseModelError(f"the shard {file_name!r} lacks the tensor {name!r}")
            yield name, StoredTensor(shard, stored[name])


def _linears(tensors: Mapping[str, StoredTensor]) -> dict[str, LinearShape]:
    linears: dict[str, LinearShape] = {}
    for name, stored in tensors.items():
        match = _LAYER_WEIGHT.fullmatch(name)
        if match is None or len(stored.info.shape) != 2:
            continue
        if stored.info.dtype not in _FLOAT_DTYPES:
            raise BaseModelError(
                f"{name!r} is {stored.info.dtype}; quantized base models are not served"
            )
        out_features, in_features = stored.info.shape
        linears[match["module"]] = LinearShape(in_features, out_features)
    if not linears:
        raise BaseModelError("the base model has no linears under `model.layers.N`")
    return linears


def _ends(tensors: Mapping[str, StoredTensor]) -> dict[str, LinearShape]:
    ends: dict[str, LinearShape] = {}
    for module in (EMBEDDING, OUTPUT_LAYER):
        stored = tensors.get(f"{module}.weight")
        if stored is not None and len(stored.info.shape) == 2:
            vocab_size, hidden_size = stored.info.shape
            sizes = (vocab_size, hidden_size) if module == EMBEDDING else (hidden_size, vocab_size)
            ends[module] = LinearShape(*sizes)
    return ends


def _other_modules(tensors: Mapping[str, StoredTensor], adaptable: Set[str]) -> frozenset[str]:
    modules = {"lm_head"}
    for name in tensors:
        module = name.rpartition(".")[0]
        while module:
            modules.add(module)
            module = module.rpartition(".")[0]
    return frozenset(modules - adaptable)


def _fingerprint(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    digest = hashlib.sha256()
    # Absent, null and false are one: versions of transformers differ in which they write.
    architecture = {key: config.get(key) or None for key in _ARCHITECTURE_FIELDS}
    for key in _LATER_ARCHITECTURE_FIELDS:
        if config.get(key) is not None:
            architecture[key] = config[key]
    heads = config.get("num_attention_heads")
    architecture["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim")
    if not head_dim and isinstance(heads, int) and heads:
        head_dim = _field(config, "hidden_size", int) // heads
    architecture["head_dim"] = head_dim
    architecture["rope"] = _rope(config)
    digest.update(json.dumps(architecture, sort_keys=True).encode())
    with ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for name, stored in tensors.items():
            if stored.file not in files:
                files[stored.file] = stack.enter_context(stored.file.open("rb"))
            info = stored.info
            digest.update(f"\n{name} {info.dtype} {info.shape}\n".encode())
            for offset in (info.begin, (info.begin + info.end) // 2, info.end - _SAMPLE_BYTES):
                begin = max(offset, info.begin)
                files[stored.file].seek(begin)
                digest.update(files[stored.file].read(min(_SAMPLE_BYTES, info.end - begin)))
    return digest.hexdigest()


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.
    rope: dict[str, Any] = {
        "rope_theta": config.get("rope_theta"),
        "rope_type": "default",
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    old_name = rope.pop("type", None)
    if rope["rope_type"] == "default" and old_name is not None:
        rope["rope_type"] = old_name
    # Two fields stand beside the rope's or among them; where they differ, one or the other counts.
    original = "original_max_position_embeddings"
    if config.get(original) is not None:
        rope[original] = config[original]
    share = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        rope["partial_rotary_factor"] = share
    return rope
