"""A decoder's operations on a GPU: PyTorch's GEMMs, and Triton for everything between them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.rotary import RotaryTable
from engine.ops.protocol import Draw
from engine.ops.torch_ops import TorchLinear, TorchOps
from engine.runner.attention import AttentionShape
from engine.runner.kv_cache import KVShape
from engine.triton.attention import TritonAttention
from engine.triton.kv_cache import TritonKVCache
from engine.triton.rotary import TritonRotation
from engine.triton.rows import activation_call, norm_call


class TritonOps:
    """`DecoderOps` for CUDA tensors, and for CPU tensors in Triton's interpreter.

    Only `draw` and `argmax` wait for the device, so that a step can be captured. The bits of
    PyTorch's linears depend on the number of rows; those of all other operations do not.
    """

    name = "triton"
    fallback_reason: str | None = None

    def __init__(
        self,
        device: torch.device | str,
        *,
        max_positions: int,
    ) -> None:
        """`device` is that of all tensors; `max_positions`, the length of the longest sequence."""
        self.device = torch.device(device)
        self._max_positions = max_positions
        self._architecture = architecture_of(self.device)
        self._torch = TorchOps()

    def row_tile(self, dtype: torch.dtype) -> int:
        """See `DecoderOps.row_tile`."""
        return 1 if self.device.type == "cuda" else self._torch.row_tile(dtype)

    def make_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, keep_rows: bool = False
    ) -> TorchLinear:
        """See `DecoderOps.make_linear`."""
        return self._torch.make_linear(weight, bias, keep_rows=keep_rows)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps.norm`."""
        out = x.new_empty(x.shape)
        norm_call(out, x, None, weight, eps).run()
        return out

    def add_and_norm_(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps.add_and_norm_`."""
        out = x.new_empty(x.shape)
        norm_call(out, x, update, weight, eps).run()
        return out

    def activate(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `DecoderOps.activate`."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        activation_call(out, gate_up, activation).run()
        return out

    def rotation(self, table: RotaryTable, positions: Tensor) -> TritonRotation:
        """See `DecoderOps.rotation`; its `store` also norms, and fills the KV cache."""
        return TritonRotation(table, positions)

    def make_kv_cache(self, shape: KVShape, num_blocks: int) -> TritonKVCache:
        """See `DecoderOps.make_kv_cache`; the shape's dtype may be torch.float8_e4m3fn."""
        return TritonKVCache(shape, num_blocks, self.device)

    def make_attention(self, shape: AttentionShape) -> TritonAttention:
        """See `DecoderOps.make_attention`."""
        return TritonAttention(
            shape,
            max_positions=self._max_positions,
            device=self.device,
            architecture=self._architecture,
        )

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """See `DecoderOps.draw`."""
        return self._torch.draw(logits, draws)

    def argmax(self, logits: Tensor) -> list[int]:
        """See `DecoderOps.argmax`."""
        return self._torch.argmax(logits)


def architecture_of(device: torch.device) -> int:
    """A CUDA device's compute capability x 10; that of H100 in the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
