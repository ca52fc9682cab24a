"""Launches that rotate a step's heads and store its keys and values."""

from torch import Tensor

from engine.models.rotary import RotaryTable
from engine.ops.protocol import HeadNorms
from engine.triton.kv_cache import TritonKVCache
from engine.triton.rotary_kernel import rotate_and_store_kernel, store_kv_kernel
from lora_kernels.kernel_call import KernelCall

_HEADS_A_PROGRAM = 4


class TritonRotation:
    """The rotation of a step's tokens: a `RotationOp`, also fused with norms and the KV cache."""

    def __init__(self, table: RotaryTable, positions: Tensor) -> None:
        """`positions`: [rows] int64, on the table's device."""
        assert positions.device == table.cos.device and positions.is_contiguous()
        self._table = table
        self._positions = positions

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate heads [rows, heads, head_dim] in place."""
        self._call(heads, heads.shape[1], 0, None, 0, None, None).run()
        return heads

    def store(
        self,
        heads: Tensor,
        num_heads: int,
        kv_cache: TritonKVCache,
        layer: int,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Norm and rotate a step's queries and keys, and store its keys and values, in one launch.

        Args:
            heads: [rows, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values. Queries
                are changed in place; keys are only changed where they are stored.
            num_heads: query heads.
            kv_cache: takes the keys and values.
            layer: layer of the cache.
            slot_mapping: [tokens] int64, no more than `rows`; tokens past it, and those whose slot
                is negative, are not stored.
            norms: of queries and keys, before the rotation (Qwen3).

        Returns:
            The queries, [rows, num_heads, head_dim]: a view of `heads`.

        """
        self.store_call(heads, num_heads, kv_cache, layer, slot_mapping, norms).run()
        return heads[:, :num_heads]

    def store_call(
        self,
        heads: Tensor,
        num_heads: int,
        kv_cache: TritonKVCache,
        layer: int,
        slot_mapping: Tensor,
        norms: HeadNorms | None,
    ) -> KernelCall:
        """The launch of `store`."""
        num_kv = (heads.shape[1] - num_heads) // 2
        return self._call(heads, num_heads, num_kv, kv_cache, layer, slot_mapping, norms)

    def _call(
        self,
        heads: Tensor,
        num_heads: int,
        num_kv: int,
        kv_cache: TritonKVCache | None,
        layer: int,
        slot_mapping: Tensor | None,
        norms: HeadNorms | None,
    ) -> KernelCall:
        rows, total, head_dim = heads.shape
        half = self._table.cos.shape[1]
        assert heads.stride()[1:] == (head_dim, 1) and rows <= self._positions.shape[0]
        assert total == num_heads + 2 * num_kv and 2 * half <= head_dim
        if kv_cache is None or slot_mapping is None:
            keys, values, scales = heads, heads, self._table.cos
            stride_kv_head, num_slots = 0, 0
            slot_mapping = self._positions
        else:
            keys, values = kv_cache.layer(layer)
            scales = kv_cache.layer_scales(layer)
            stride_kv_head, num_slots = keys.stride(0), slot_mapping.shape[0]
        tiles = sum(-(-count // _HEADS_A_PROGRAM) for count in (num_heads, num_kv))
        rest = head_dim - 2 * half
        return KernelCall(
            kernel=rotate_and_store_kernel,
            grid=(rows, tiles),
            arguments={
                "x_ptr": heads,
                "k_ptr": keys,
                "v_ptr": values,
                "kv_scales_ptr": scales,
                "slots_ptr": slot_mapping,
                "positions_ptr": self._positions,
                "cos_ptr": self._table.cos,
                "sin_ptr": self._table.sin,
                "q_weight_ptr": heads if norms is None else norms.query,
                "k_weight_ptr": heads if norms is None else norms.key,
                "num_slots": num_slots,
                "eps": 0.0 if norms is None else norms.eps,
                "stride_x": heads.stride(0),
                "stride_kv_head": stride_kv_head,
            },
            constants={
                "NUM_Q": num_heads,
                "NUM_KV": num_kv,
                "HEAD_DIM": head_dim,
                "HALF": half,
                "BLOCK_H": _HEADS_A_PROGRAM,
                "BLOCK_HALF": _power_of_two(half),
                "BLOCK_REST": _power_of_two(rest),
                "BLOCK_D": _power_of_two(head_dim),
                "HAS_NORM": norms is not None,
                "ROUNDS_FIRST": norms is not None and norms.query.dtype is heads.dtype,
                "KV_IS_FP8": kv_cache is not None and kv_cache.is_fp8,
            },
            num_warps=1 if head_dim <= 128 else 2,
            num_stages=1,
        )


def store_kv_call(
    kv_cache: TritonKVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
) -> KernelCall:
    """Store keys and values, each [tokens, num_kv_heads, head_dim], as they are."""
    tokens, num_kv, head_dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    keys, values = kv_cache.layer(layer)
    return KernelCall(
        kernel=store_kv_kernel,
        grid=(tokens, -(-num_kv // _HEADS_A_PROGRAM)),
        arguments={
            "key_ptr": key,
            "value_ptr": value,
            "k_ptr": keys,
            "v_ptr": values,
            "kv_scales_ptr": kv_cache.layer_scales(layer),
            "slots_ptr": slot_mapping,
            "num_kv": num_kv,
            "stride_key": key.stride(0),
            "stride_value": value.stride(0),
            "stride_kv_head": keys.stride(0),
        },
        constants={
            "HEAD_DIM": head_dim,
            "BLOCK_H": _HEADS_A_PROGRAM,
            "BLOCK_D": _power_of_two(head_dim),
            "KV_IS_FP8": kv_cache.is_fp8,
        },
        num_warps=1 if head_dim <= 128 else 2,
        num_stages=1,
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
