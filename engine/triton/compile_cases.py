"""What the ahead-of-time report compiles: launches of every kernel, tile, dtype and feature."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.models.rotary import RotaryTable
from engine.ops.protocol import HeadNorms
from engine.runner.attention import AttentionShape
from engine.runner.kv_cache import KVShape
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SamplingRow
from engine.triton.attention import TritonAttention
from engine.triton.kv_cache import FP8, TritonKVCache
from engine.triton.query_tiles import chunk_tiles, decode_tiles
from engine.triton.rotary import TritonRotation, store_kv_call
from engine.triton.rows import activation_call, norm_call
from engine.triton.sampling_batch import RowPacker
from engine.triton.sampling_calls import sampling_calls
from lora_kernels.kernel_call import KernelCall

ARCHITECTURES = (80, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROWS, _HIDDEN, _VOCAB = 16, 4096, 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(ABC):
    """Launches to compile, by what they are for."""

    name: str
    dtype: str = "bf16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the model."""
        return DTYPES[self.dtype]

    @abstractmethod
    def calls(self, architecture: int) -> Iterator[KernelCall]:
        """The launches on an architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase(Case):
    """Attention of one launch, and what combines its splits."""

    kind: str
    group: int = 4
    head_dim: int = 128
    is_fp8: bool = False
    window: int | None = None
    softcap: float | None = None
    batch_invariant: bool = False
    is_split: bool = True

    def calls(self, architecture: int) -> Iterator[KernelCall]:
        """See `Case.calls`."""
        group, kv_heads, tokens = self.group, 2, 64
        shape = AttentionShape(
            num_heads=group * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            block_size=16,
            windows=(self.window,),
            scale=self.head_dim**-0.5,
            softcap=self.softcap,
        )
        attention = TritonAttention(
            shape,
            max_positions=8192 if self.is_split else 1,
            device="cpu",
            batch_invariant=self.batch_invariant,
            architecture=architecture,
        )
        cache = _cache(kv_heads, self.head_dim, FP8 if self.is_fp8 else self.torch_dtype)
        row, position = np.array([0]), np.array([200])
        if self.kind == "decode":
            tiles = decode_tiles(row, row, position)
        else:
            rows = attention.tile("chunk", cache.layer(0)[0].dtype).rows
            tiles = chunk_tiles(row, row, np.array([tokens]), position, rows // group)
        query = torch.zeros(tokens, (group + 2) * kv_heads, self.head_dim, dtype=self.torch_dtype)
        plan = attention.plan_of(
            [("decode" if self.kind == "decode" else "chunk", tiles)],
            np.zeros((1, 16), dtype=np.int64),
            tokens,
        )
        out = query.new_zeros(tokens, group * kv_heads * self.head_dim)
        query = query[:, : group * kv_heads]
        return attention.calls(out, query, cache, 0, self.window, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCase(Case):
    """Norms and activations."""

    def calls(self, architecture: int) -> Iterator[KernelCall]:
        """See `Case.calls`."""
        x = torch.zeros(_ROWS, _HIDDEN, dtype=self.torch_dtype)
        weight = torch.zeros(_HIDDEN, dtype=self.torch_dtype)
        yield norm_call(torch.empty_like(x), x, x.clone(), weight, 1e-5)
        yield norm_call(torch.empty_like(x), x, None, weight.float(), 1e-5)
        gate_up = torch.zeros(_ROWS, 2 * _HIDDEN, dtype=self.torch_dtype)
        for activation in ("silu", "gelu_pytorch_tanh"):
            yield activation_call(torch.empty_like(x), gate_up, activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationCase(Case):
    """Rotation with what it is fused with."""

    head_dim: int = 128
    rotated: int = 128
    has_norms: bool = False
    is_fp8: bool = False

    def calls(self, architecture: int) -> Iterator[KernelCall]:
        """See `Case.calls`."""
        heads, kv_heads = 8, 2
        table = RotaryTable(tuple([1.0] * (self.rotated // 2)), 1.0, 64)
        rotation = TritonRotation(table, torch.zeros(_ROWS, dtype=torch.int64))
        x = torch.zeros(_ROWS, heads + 2 * kv_heads, self.head_dim, dtype=self.torch_dtype)
        weight = torch.zeros(self.head_dim, dtype=self.torch_dtype)
        cache = _cache(kv_heads, self.head_dim, FP8 if self.is_fp8 else self.torch_dtype)
        slots = torch.zeros(_ROWS, dtype=torch.int64)
        norms = HeadNorms(weight, weight, 1e-6) if self.has_norms else None
        yield rotation.store_call(x, heads, cache, 0, slots, norms)
        if self.rotated == self.head_dim and norms is None:
            yield store_kv_call(cache, 0, x[:, :kv_heads], x[:, -kv_heads:], slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingCase(Case):
    """All that draws a token."""

    def calls(self, architecture: int) -> Iterator[KernelCall]:
        """See `Case.calls`."""
        params = SamplingParams(
            max_tokens=9, seed=1, top_k=50, top_p=0.9, logprobs=5, repetition_penalty=1.1
        )
        packer = RowPacker(_VOCAB, (2,))
        rows = [packer.prepare(0, SamplingRow(params, (0,), [1, 2, 3], 2))]
        packed = packer.pack(1, rows)
        logits = torch.zeros(1, _VOCAB, dtype=self.torch_dtype)
        out = torch.zeros(1, 2 + 2 * packed.top, dtype=torch.int32)
        token_ids = torch.zeros(1, dtype=torch.int64)
        return sampling_calls(out, token_ids, logits, packed, 4096)


def all_cases() -> list[Case]:
    """Every tile in every dtype; other head sizes and features in bfloat16."""
    cases: list[Case] = []
    for kind in ("decode", "chunk"):
        cases += [
            AttentionCase(name=f"{kind} {head_dim}", kind=kind, head_dim=head_dim, dtype=dtype)
            for head_dim in (128, 256)
            for dtype in DTYPES
        ]
        cases += [
            AttentionCase(name=f"{kind} {head_dim}", kind=kind, head_dim=head_dim)
            for head_dim in (64, 80, 96)
        ]
        for head_dim in (128, 256):
            capped: dict[str, Any] = {
                "kind": kind, "head_dim": head_dim, "window": 4096, "softcap": 50.0,
            }  # fmt: skip
            cases.append(AttentionCase(name=f"{kind} {head_dim} window cap", **capped))
            cases.append(AttentionCase(name=f"{kind} {head_dim} all, fp8", is_fp8=True, **capped))
        cases.append(AttentionCase(name=f"{kind} 64 of 7", kind=kind, head_dim=64, group=7))
        cases.append(AttentionCase(name=f"{kind} 128 fp8", kind=kind, is_fp8=True))
        cases.append(AttentionCase(name=f"{kind} 128 invariant", kind=kind, batch_invariant=True))
    cases.append(AttentionCase(name="decode 128 unsplit", kind="decode", is_split=False))
    cases += [RowCase(name="rows", dtype=dtype) for dtype in DTYPES]
    cases += [RotationCase(name="128", dtype=dtype) for dtype in DTYPES]
    cases += [
        RotationCase(name="128 norms", has_norms=True),
        RotationCase(name="128 fp8", is_fp8=True),
        RotationCase(name="96 of 128", rotated=96),
        RotationCase(name="64", head_dim=64, rotated=64),
        RotationCase(name="256", head_dim=256, rotated=256),
    ]
    cases += [SamplingCase(name="sampling", dtype=dtype) for dtype in DTYPES]
    return cases


def _cache(kv_heads: int, head_dim: int, dtype: torch.dtype) -> TritonKVCache:
    shape = KVShape(
        num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=dtype
    )
    return TritonKVCache(shape, 15, "cpu")
