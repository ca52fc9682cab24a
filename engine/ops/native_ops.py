"""A decoder's operations through the compiled kernels, where they take the model's shapes."""

from collections.abc import Sequence

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.models.rotary import RotaryTable
from engine.ops import native_attention, native_linear
from engine.ops.native_attention import NativeAttention, NativeKVCache
from engine.ops.native_library import NativeLibrary
from engine.ops.native_linear import NativeLinear
from engine.ops.protocol import Draw, LinearOp
from engine.ops.torch_ops import TorchOps, lowest_score
from engine.runner.attention import AttentionBackend, AttentionShape
from engine.runner.kv_cache import KVCache, KVShape


class NativeOps:
    """`DecoderOps` of one instruction set; what the kernels do not take is left to PyTorch."""

    fallback_reason: str | None = None

    def __init__(self, library: NativeLibrary, instruction_set: str) -> None:
        self.name = f"native/{instruction_set}"
        self._library = library
        self._instruction_set = library.instruction_sets[instruction_set]
        self._has_linear = instruction_set == native_linear.INSTRUCTION_SET
        self._torch = TorchOps()

    def row_tile(self, dtype: torch.dtype) -> int:
        """See `DecoderOps.row_tile`."""
        if self._has_linear and dtype is torch.bfloat16:
            return 1
        return self._torch.row_tile(dtype)

    def make_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, keep_rows: bool = False
    ) -> LinearOp:
        """See `DecoderOps.make_linear`."""
        if self._has_linear and native_linear.can_run(weight):
            return NativeLinear(self._library, weight, bias)
        return self._torch.make_linear(weight, bias, keep_rows=keep_rows)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps.norm`."""
        out = torch.empty(x.shape, dtype=x.dtype)
        self._norm(x, None, weight, eps, out)
        return out

    def add_and_norm_(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps.add_and_norm_`."""
        assert update.is_contiguous() and update.shape == x.shape and update.dtype is x.dtype
        out = torch.empty_like(x)
        self._norm(x, update, weight, eps, out)
        return out

    def _norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        size = x.shape[-1]
        assert (
            x.stride(-1) == 1 and weight.shape == (size,) and (x.dim() == 2 or x.stride(1) == size)
        )
        self._library.norm(
            self._instruction_set,
            x.dtype is torch.bfloat16,
            torch.get_num_threads(),
            x.shape[0],
            1 if x.dim() == 2 else x.shape[1],
            size,
            x.data_ptr(),
            x.stride(0),
            None if update is None else update.data_ptr(),
            weight.data_ptr(),
            weight.dtype is torch.float32,
            eps,
            out.data_ptr(),
            out.stride(0),
        )

    def activate(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `DecoderOps.activate`."""
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._library.activate(
            self._instruction_set,
            gate_up.dtype is torch.bfloat16,
            torch.get_num_threads(),
            rows,
            size,
            gate_up.data_ptr(),
            activation == "gelu_pytorch_tanh",
            out.data_ptr(),
        )
        return out

    def rotation(self, table: RotaryTable, positions: Tensor) -> "NativeRotation":
        """See `DecoderOps.rotation`."""
        return NativeRotation(self._library, self._instruction_set, table, positions)

    def make_kv_cache(self, shape: KVShape, num_blocks: int) -> KVCache:
        """See `DecoderOps.make_kv_cache`."""
        if native_attention.why_not(shape.head_dim, shape.block_size) is None:
            return NativeKVCache(self._library, shape, num_blocks)
        return self._torch.make_kv_cache(shape, num_blocks)

    def make_attention(self, shape: AttentionShape) -> AttentionBackend:
        """See `DecoderOps.make_attention`."""
        reason = native_attention.why_not(shape.head_dim, shape.block_size)
        if reason is None:
            return NativeAttention(self._library, self._instruction_set, shape)
        log = structlog.get_logger("engine.kernels")
        log.warning("attention runs on the slow path, through PyTorch", reason=reason)
        return self._torch.make_attention(shape)

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """See `DecoderOps.draw`."""
        assert logits.stride(1) == 1
        rows = np.array([draw.row for draw in draws], dtype=np.int64)
        best = np.array([draw.best for draw in draws], dtype=np.int64)
        keys = np.array([draw.key for draw in draws], dtype=np.uint64)
        temperatures = np.array([draw.temperature for draw in draws], dtype=np.float32)
        lowest = np.array([lowest_score(draw.min_p) for draw in draws], dtype=np.float32)
        drawn = np.empty(len(draws), dtype=np.int64)
        self._library.draw(
            self._instruction_set,
            logits.dtype is torch.bfloat16,
            torch.get_num_threads(),
            len(draws),
            logits.shape[1],
            logits.data_ptr(),
            logits.stride(0),
            rows.ctypes.data,
            best.ctypes.data,
            keys.ctypes.data,
            temperatures.ctypes.data,
            lowest.ctypes.data,
            drawn.ctypes.data,
        )
        return drawn.tolist()

    def argmax(self, logits: Tensor) -> list[int]:
        """See `DecoderOps.argmax`."""
        assert logits.stride(1) == 1
        best = np.empty(logits.shape[0], dtype=np.int64)
        self._library.argmax(
            self._instruction_set,
            logits.dtype is torch.bfloat16,
            torch.get_num_threads(),
            logits.shape[0],
            logits.shape[1],
            logits.data_ptr(),
            logits.stride(0),
            best.ctypes.data,
        )
        return best.tolist()


class NativeRotation:
    """Rotates heads in place; see `TorchRotation`."""

    def __init__(
        self, library: NativeLibrary, instruction_set: int, table: RotaryTable, positions: Tensor
    ) -> None:
        self._rotate = library.rotate
        self._instruction_set = instruction_set
        self._table = table
        self._positions = positions

    def __call__(self, heads: Tensor) -> Tensor:
        """See `RotationOp`."""
        rows, num_heads, channels = heads.shape
        assert heads.stride()[1:] == (channels, 1)
        self._rotate(
            self._instruction_set,
            heads.dtype is torch.bfloat16,
            torch.get_num_threads(),
            rows,
            num_heads,
            channels,
            self._table.cos.shape[1],
            heads.data_ptr(),
            heads.stride(0),
            self._positions.data_ptr(),
            self._table.cos.data_ptr(),
            self._table.sin.data_ptr(),
        )
        return heads
