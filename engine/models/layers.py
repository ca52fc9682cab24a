"""The decoder's element-wise parts, written so that a row's bits never depend on its neighbours."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, rounded as transformers does."""
    wide = x.to(torch.float32)
    variance = wide.square().mean(-1, keepdim=True)
    normed = wide * variance.add_(eps).rsqrt_()
    return weight * normed.to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * n] -> [rows, n]: ``silu(gate) * up``.

    `torch.nn.functional.silu` computes the last elements of each thread's share with another exp
    than the rest, so that bits depend on the batch's size; `exp` and a division do not.
    """
    size = gate_up.shape[1] // 2
    gate = gate_up[:, :size].to(torch.float32)
    activated = gate / gate.neg().exp_().add_(1.0)
    return activated.to(gate_up.dtype).mul_(gate_up[:, size:])


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
    """Rotates halves of heads (the layout of Hugging Face checkpoints), in float32."""

    def __init__(self, cos: Tensor, signed_sin: Tensor) -> None:
        self._cos = cos
        self._signed_sin = signed_sin

    def __call__(self, heads: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> the same shape and dtype."""
        wide = heads.to(torch.float32)
        swapped = wide.roll(heads.shape[-1] // 2, -1)
        rotated = wide.mul(self._cos).add_(swapped.mul_(self._signed_sin))
        return rotated.to(heads.dtype)
