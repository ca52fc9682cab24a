"""Launches of norms and gated activations."""

from torch import Tensor

from engine.triton.row_kernels import gated_activation_kernel, rms_norm_kernel
from lora_kernels.kernel_call import KernelCall

_MAX_SIZE = 32768
"""Numbers of a row that one program holds."""
_ACTIVATION_BLOCK = 1024


def norm_call(
    out: Tensor, x: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> KernelCall:
    """Root-mean-square norm of x [rows, size] or [rows, heads, size] into `out`, contiguous.

    With `update` [rows, size], x becomes their sum first. Rounds as `DecoderOps.norm` says.
    """
    size = x.shape[-1]
    num_heads = 1 if x.dim() == 2 else x.shape[1]
    assert size <= _MAX_SIZE and weight.shape == (size,) and weight.is_contiguous()
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == size) and out.is_contiguous()
    assert update is None or (num_heads == 1 and update.shape == x.shape)
    assert update is None or update.stride(1) == 1
    block = 1 << (size - 1).bit_length()
    return KernelCall(
        kernel=rms_norm_kernel,
        grid=(x.shape[0], num_heads),
        arguments={
            "out_ptr": out,
            "x_ptr": x,
            "update_ptr": x if update is None else update,
            "weight_ptr": weight,
            "num_heads": num_heads,
            "size": size,
            "stride_x": x.stride(0),
            "stride_update": 0 if update is None else update.stride(0),
            "eps": eps,
        },
        constants={
            "HAS_UPDATE": update is not None,
            "ROUNDS_FIRST": weight.dtype is x.dtype,
            "BLOCK": block,
        },
        num_warps=min(16, max(1, block // 512)),
        num_stages=1,
    )


def activation_call(out: Tensor, gate_up: Tensor, activation: str) -> KernelCall:
    """``activation(gate) * up`` of gate_up [rows, 2 * n] into `out` [rows, n], contiguous.

    `activation` is `silu` or `gelu_pytorch_tanh`.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert activation in ("silu", "gelu_pytorch_tanh")
    assert gate_up.stride(1) == 1 and out.is_contiguous() and out.shape == (rows, size)
    block = min(_ACTIVATION_BLOCK, max(16, 1 << (size - 1).bit_length()))
    return KernelCall(
        kernel=gated_activation_kernel,
        grid=(rows, -(-size // block)),
        arguments={
            "out_ptr": out,
            "x_ptr": gate_up,
            "size": size,
            "stride_x": gate_up.stride(0),
        },
        constants={"IS_GELU": activation == "gelu_pytorch_tanh", "BLOCK": block},
        num_warps=max(1, block // 256),
        num_stages=1,
    )
