"""Random sequences in a paged cache whose unused memory is poison, and attention's definition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.runner.attention import AttentionShape
from engine.runner.batch_inputs import BatchInputs, build_batch_inputs
from engine.runner.kv_cache import KVShape
from engine.scheduled_batch import ScheduledRow
from engine.triton.attention import StaticAttentionPlan, TritonAttention
from engine.triton.kv_cache import FP8, TritonKVCache

Part = tuple[int, int, int]
"""Sequence, first position and the one past the last."""


class PagedSequences:
    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        lengths: Sequence[int],
        *,
        is_fp8: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """`shape`: query heads, KV heads, channels; `options` of `TritonAttention`."""
        self.heads, self.kv_heads, self.dim = shape
        self.dtype = dtype
        self.scale = options.pop("scale", None) or self.dim**-0.5
        self.softcap = options.pop("softcap", None)
        options = {"max_positions": max(lengths), "architecture": 90, **options}
        attention_shape = AttentionShape(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            block_size=16,
            windows=(None,),
            scale=self.scale,
            softcap=self.softcap,
        )
        self.attention = TritonAttention(attention_shape, device="cpu", **options)
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.query = [random(n, self.heads, self.dim) for n in lengths]
        self.key = [random(n, self.kv_heads, self.dim) for n in lengths]
        self.value = [random(n, self.kv_heads, self.dim) for n in lengths]
        each = -(-max(lengths) // 16)
        order = torch.randperm(each * len(lengths), generator=generator).tolist()
        self._written = [0] * len(lengths)
        self.tables = [order[i :: len(lengths)] for i in range(len(lengths))]
        kv_shape = KVShape(
            num_layers=2,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            block_size=16,
            dtype=FP8 if is_fp8 else dtype,
        )
        self.cache = TritonKVCache(kv_shape, len(order), "cpu")
        self.cache._storage.fill_(0x7F if is_fp8 else float("nan"))
        if is_fp8:
            scales = 0.01 + torch.rand(self.cache.scales.shape, generator=generator) / 50
            self.cache.set_scales(scales)

    def inputs(self, parts: Sequence[Part]) -> BatchInputs:
        """A step of these parts, whose keys and values are now in the cache, in layer 1."""
        rows = [
            ScheduledRow(
                sequence_id=s,
                token_ids=[0] * (stop - start),
                start=start,
                block_table=self.tables[s][: -(-stop // 16)],
                slot=None,
                sampling=None,
            )
            for s, start, stop in parts
        ]
        for s, _, stop in parts:
            positions = np.arange(self._written[s], stop)
            if len(positions):
                slots = np.array(self.tables[s])[positions // 16] * 16 + positions % 16
                fresh = slice(self._written[s], stop)
                self.cache.write(
                    1, self.key[s][fresh], self.value[s][fresh], torch.from_numpy(slots)
                )
                self._written[s] = stop
        return build_batch_inputs(rows, 16)

    def run(
        self,
        parts: Sequence[Part],
        window: int | None = None,
        plan: StaticAttentionPlan | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Attention of a step; [tokens, heads * dim] for each part."""
        inputs = self.inputs(parts)
        query = torch.full((len(inputs.token_ids), self.heads + 3, self.dim), float("nan"))
        query = query.to(self.dtype)[:, : self.heads]
        tokens = torch.cat([self.query[s][start:stop] for s, start, stop in parts])
        query[: inputs.num_tokens] = tokens
        out = torch.full((len(query), self.heads * self.dim), float("nan"), dtype=self.dtype)
        if plan is not None:
            plan.update(inputs)
        step = plan or self.attention.plan(inputs, self.cache)
        self.attention.attend(query, self.cache, 1, window, step, out=out)
        if plan is None:
            assert not out[inputs.num_tokens :].any()
        return out[: inputs.num_tokens].split([stop - start for _, start, stop in parts])

    def stored(self, s: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the cache rounds them, float64."""
        both: list[torch.Tensor] = []
        for index, values in enumerate((self.key[s], self.value[s])):
            if not self.cache.is_fp8:
                both.append(values.double())
                continue
            scale = self.cache.layer_scales(1)[index][:, None]
            codes = (values.float() / scale).clamp(-448, 448).to(FP8)
            both.append(codes.double() * scale.double())
        return both[0], both[1]

    def dense(self, s: int, window: int | None) -> torch.Tensor:
        """The definition, in float64."""
        group = self.heads // self.kv_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in self.stored(s))
        scale = self.scale
        scores = torch.einsum("qhd,khd->hqk", self.query[s].double(), key) * scale
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        position = torch.arange(len(key))
        hidden = position[None, :] > position[:, None]
        if window is not None:
            hidden |= position[None, :] <= position[:, None] - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)

    def assert_right(self, parts: Sequence[Part], window: int | None = None) -> None:
        """Run a step and compare with the definition."""
        for (s, start, stop), got in zip(parts, self.run(parts, window), strict=True):
            expected = self.dense(s, window)[start:stop]
            difference = (got.double() - expected).abs().max().item()
            assert difference < (1e-5 if self.dtype is torch.float32 else 4e-3)  # and no NaN
