"""The decoder's element-wise parts, written so that a row's bits never depend on its neighbours."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, rounded as transformers does.

    A weight in x's dtype multiplies what is already rounded to it, as Llama's; a float32 weight is
    applied before the only rounding, as Gemma's.
    """
    wide = x.to(torch.float32)
    variance = wide.square().mean(-1, keepdim=True)
    normed = wide * variance.add_(eps).rsqrt_()
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * n] -> [rows, n]: ``silu(gate) * up``.

    `torch.nn.functional.silu` computes the last elements of each thread's share with another exp
    than the rest, so that bits depend on the batch's size; `exp` and a division do not.
    """
    size = gate_up.shape[1] // 2
    gate = gate_up[:, :size].to(torch.float32)
    activated = gate / gate.neg().exp_().add_(1.0)
    return activated.to(gate_up.dtype).mul_(gate_up[:, size:])


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * n] -> [rows, n]: ``gelu(gate) * up``, gelu in its tanh approximation.

    Written out for the same reason as in `silu_and_mul`; `tanh` alone has no such tail.
    """
    size = gate_up.shape[1] // 2
    gate = gate_up[:, :size].to(torch.float32)
    inner = gate.square().mul_(gate).mul_(0.044715).add_(gate).mul_(math.sqrt(2 / math.pi))
    activated = inner.tanh_().add_(1.0).mul_(gate).mul_(0.5)
    return activated.to(gate_up.dtype).mul_(gate_up[:, size:])


GATED_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_and_mul,
}
"""By the config's name for them."""


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)``, in float32, rounded to the logits' dtype."""
    return logits.to(torch.float32).div(cap).tanh_().mul_(cap).to(logits.dtype)


class RotaryTable:
    """Cosines and sines for every position, so that a position's are always the same bits."""

    def __init__(self, inv_freq: tuple[float, ...], scaling: float, max_positions: int) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(inv_freq, dtype=torch.float32))
        self._cos = angles.cos().mul_(scaling)
        self._sin = angles.sin().mul_(scaling)

    def lookup(self, positions: Tensor) -> "Rotation":
        """The rotation of each row of a step; computed once, used by every layer."""
        cos, sin = self._cos[positions], self._sin[positions]
        return Rotation(
            torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)
        )


class Rotation:
    """Rotates halves of heads (the layout of Hugging Face checkpoints), in float32.

    Where there are fewer angles than channels, the last channels of a head stay as they are.
    """

    def __init__(self, cos: Tensor, signed_sin: Tensor) -> None:
        self._cos = cos
        self._signed_sin = signed_sin

    def __call__(self, heads: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> the same shape and dtype."""
        size = self._cos.shape[-1]
        wide = heads[..., :size].to(torch.float32)
        swapped = wide.roll(size // 2, -1)
        rotated = wide.mul(self._cos).add_(swapped.mul_(self._signed_sin)).to(heads.dtype)
        if size == heads.shape[-1]:
            return rotated
        return torch.cat((rotated, heads[..., size:]), dim=-1)
