# pyright: basic
"""Norms and gated activations: each row for itself, in float32, rounded where PyTorch rounds."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [rows, heads, size], contiguous
    x_ptr,  # [rows, heads, size]; with HAS_UPDATE it becomes x + update
    update_ptr,  # [rows, size]
    weight_ptr,  # [size]
    num_heads,
    size,
    stride_x,
    stride_update,
    eps,
    HAS_UPDATE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out = x / rms(x) * weight``, a program a row and head. Grid: rows, heads.

    ROUNDS_FIRST: what is normed is rounded before it meets the weight (Llama), else after (Gemma).
    """
    row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o = tl.arange(0, BLOCK)
    m = o < size
    p_x = x_ptr + row * stride_x + i_head * size + o
    b_x = tl.load(p_x, mask=m, other=0.0)
    dtype = b_x.dtype
    if HAS_UPDATE:
        p_u = update_ptr + row * stride_update + o
        b_u = tl.load(p_u, mask=m, other=0.0)
        b_x = (b_x.to(tl.float32) + b_u.to(tl.float32)).to(dtype)
        tl.store(p_x, b_x, mask=m)
    b_wide = b_x.to(tl.float32)
    variance = tl.sum(b_wide * b_wide, axis=0) / size
    b_y = b_wide * (1.0 / tl.sqrt_rn(variance + eps))
    p_w = weight_ptr + o
    b_w = tl.load(p_w, mask=m, other=0.0)
    if ROUNDS_FIRST:
        b_y = b_y.to(dtype).to(tl.float32)
    b_y = (b_y * b_w.to(tl.float32)).to(dtype)
    p_out = out_ptr + (row * num_heads + i_head) * size + o
    tl.store(p_out, b_y, mask=m)


@triton.jit
def gated_activation_kernel(
    out_ptr,  # [rows, size], contiguous
    x_ptr,  # [rows, 2 * size]: gate, then up
    size,
    stride_x,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``activation(gate) * up``, the first factor rounded before. Grid: rows, column tiles."""
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < size
    p_gate = x_ptr + row * stride_x + o
    p_up = x_ptr + row * stride_x + size + o
    b_gate = tl.load(p_gate, mask=m, other=0.0)
    b_up = tl.load(p_up, mask=m, other=0.0)
    dtype = b_gate.dtype
    b_wide = b_gate.to(tl.float32)
    if IS_GELU:
        inner = 0.7978845608028654 * (b_wide + 0.044715 * b_wide * b_wide * b_wide)
        b_y = 0.5 * b_wide * (1.0 + tanh(inner))
    else:
        b_exp = tl.exp(-tl.abs(b_wide))
        b_y = b_wide * tl.where(b_wide < 0.0, b_exp, 1.0) / (1.0 + b_exp)
    b_y = b_y.to(dtype).to(tl.float32) * b_up.to(tl.float32)
    p_out = out_ptr + row * size + o
    tl.store(p_out, b_y.to(dtype), mask=m)


@triton.jit
def tanh(values):
    """To 1e-7, by an exponential that cannot overflow."""
    b_exp = tl.exp(-2.0 * tl.abs(values))
    b_y = (1.0 - b_exp) / (1.0 + b_exp)
    return tl.where(values < 0.0, -b_y, b_y)
