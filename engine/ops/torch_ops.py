"""A decoder's operations in PyTorch; a row's bits never depend on its neighbours."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.rotary import RotaryTable
from engine.ops.protocol import Draw
from engine.runner.attention import AttentionShape
from engine.runner.cpu_attention import CpuAttention
from engine.runner.kv_cache import KVCache, KVShape
from engine.runner.padding import ROW_TILE
from engine.sampling.noise import exponential_noise


class TorchOps:
    """`DecoderOps` that work wherever PyTorch does."""

    name = "torch"

    def __init__(self, fallback_reason: str | None = None) -> None:
        self.fallback_reason = fallback_reason

    def row_tile(self, dtype: torch.dtype) -> int:
        """See `DecoderOps.row_tile`."""
        return ROW_TILE

    def make_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, keep_rows: bool = False
    ) -> "TorchLinear":
        """See `DecoderOps.make_linear`."""
        return TorchLinear(weight, bias, pack=not keep_rows)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps.norm`."""
        wide = x.to(torch.float32)
        variance = wide.square().mean(-1, keepdim=True)
        normed = wide * variance.add_(eps).rsqrt_()
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_and_norm_(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps.add_and_norm_`."""
        return self.norm(x.add_(update), weight, eps)

    def activate(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `DecoderOps.activate`."""
        size = gate_up.shape[1] // 2
        activated = _ACTIVATIONS[activation](gate_up[:, :size].to(torch.float32))
        return activated.to(gate_up.dtype).mul_(gate_up[:, size:])

    def rotation(self, table: RotaryTable, positions: Tensor) -> "TorchRotation":
        """See `DecoderOps.rotation`."""
        return TorchRotation(table.cos[positions], table.sin[positions])

    def make_kv_cache(self, shape: KVShape, num_blocks: int) -> KVCache:
        """See `DecoderOps.make_kv_cache`."""
        return KVCache(shape, num_blocks)

    def make_attention(self, shape: AttentionShape) -> CpuAttention:
        """See `DecoderOps.make_attention`."""
        return CpuAttention(shape)

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """See `DecoderOps.draw`."""
        token_ids = torch.arange(logits.shape[1], device=logits.device)
        drawn: list[int] = []
        for row, best, key, temperature, min_p in draws:  # one row at a time stays in the cache
            scores = logits[row].to(torch.float32)
            scores = (scores - scores[best]) / temperature
            weights = scores.exp().masked_fill_(scores < lowest_score(min_p), 0.0)
            times = exponential_noise([key], token_ids)[0] / weights
            drawn.append(int(times.argmin()))
        return drawn

    def argmax(self, logits: Tensor) -> list[int]:
        """See `DecoderOps.argmax`."""
        # amax and amin propagate NaN.
        is_finite = torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))
        return torch.where(is_finite, logits.argmax(dim=-1), -1).tolist()


class TorchLinear:
    """A linear with the weight in oneDNN's own layout where there is one.

    The packed layout saves a reorder in each call: a quarter of a decode step's GEMM time in
    bfloat16, nearly half in float32 (Zen 4, 16 to 32 rows).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, pack: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        if pack and _can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2 * ROW_TILE)
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """See `LinearOp`."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias)

    def take_rows(self, indices: Tensor) -> Tensor:
        """See `LinearOp`."""
        assert self._weight is not None
        return F.embedding(indices, self._weight)


class TorchRotation:
    """Rotates halves of heads (the layout of Hugging Face checkpoints), in float32.

    Where there are fewer angles than channels, the last channels of a head stay as they are.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
        self._signed_sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def __call__(self, heads: Tensor) -> Tensor:
        """See `RotationOp`."""
        size = self._cos.shape[-1]
        wide = heads[..., :size].to(torch.float32)
        swapped = wide.roll(size // 2, -1)
        rotated = wide.mul(self._cos).add_(swapped.mul_(self._signed_sin)).to(heads.dtype)
        if size == heads.shape[-1]:
            return rotated
        return torch.cat((rotated, heads[..., size:]), dim=-1)


def lowest_score(min_p: float) -> float:
    """The logit, over temperature and below the best one, under which `min_p` drops a token."""
    return min(math.log(min_p), 0.0) if min_p > 0 else -math.inf


def _silu(gate: Tensor) -> Tensor:
    # `torch.nn.functional.silu` uses a different exp for the last elements of each thread's share,
    # so its bits depend on the batch's size; those of `exp` and a division do not.
    return gate / gate.neg().exp_().add_(1.0)


def _gelu_tanh(gate: Tensor) -> Tensor:
    # Written out for the same reason; `tanh` alone has no such tail.
    inner = gate.square().mul_(gate).mul_(0.044715).add_(gate).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(gate).mul_(0.5)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and weight.dtype is not torch.float16  # most CPUs have no instructions for it
        and (weight.dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
