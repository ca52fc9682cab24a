# pyright: basic
"""Queries and keys of a step: normed by head, rotated, and keys and values stored in their blocks.

Halves of a head are rotated against each other (the layout of Hugging Face checkpoints), by
``x1 * cos - x2 * sin`` and ``x2 * cos + x1 * sin`` in float32. Channels past the rotated ones stay.
"""

import triton
import triton.language as tl

from engine.triton import fp8


@triton.jit(do_not_specialize=["num_slots"])  # of each step; else each kind of it is compiled
def rotate_and_store_kernel(
    x_ptr,  # [tokens, NUM_Q + 2 * NUM_KV, HEAD_DIM]: queries, keys, values; queries in place
    k_ptr,  # [KV heads, blocks, BLOCK_SIZE, HEAD_DIM]
    v_ptr,
    kv_scales_ptr,  # [2, NUM_KV] float32; read where KV_IS_FP8
    slots_ptr,  # [tokens] int64: block * BLOCK_SIZE + offset; negative: is not stored
    positions_ptr,  # [tokens] int64
    cos_ptr,  # [positions, HALF] float32
    sin_ptr,
    q_weight_ptr,  # [HEAD_DIM], with HAS_NORM
    k_weight_ptr,
    num_slots,
    eps,
    stride_x,
    stride_kv_head,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    KV_IS_FP8: tl.constexpr,
):
    """A program takes BLOCK_H heads of a token. Grid: tokens, tiles of query and of KV heads.

    Tokens from `num_slots` on have no slot: their keys and values are not stored. NUM_KV 0: queries
    only, which are then any heads.
    """
    token = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    o_c = tl.arange(0, BLOCK_HALF)
    m_c = o_c < HALF
    p_cos = cos_ptr + position * HALF + o_c
    p_sin = sin_ptr + position * HALF + o_c
    b_cos = tl.load(p_cos, mask=m_c, other=0.0)[None, :]
    b_sin = tl.load(p_sin, mask=m_c, other=0.0)[None, :]

    QUERY_TILES: tl.constexpr = (NUM_Q + BLOCK_H - 1) // BLOCK_H
    is_query = i_tile < QUERY_TILES
    o_h = tl.where(is_query, i_tile, i_tile - QUERY_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < tl.where(is_query, NUM_Q, NUM_KV)
    x_row_ptr = x_ptr + token * stride_x
    head_ptr = x_row_ptr + (o_h + tl.where(is_query, 0, NUM_Q))[:, None] * HEAD_DIM
    m_x = m_h[:, None] & m_c[None, :]
    o_r = tl.arange(0, BLOCK_REST)
    m_r = m_h[:, None] & (2 * HALF + o_r < HEAD_DIM)[None, :]
    p_x = head_ptr + o_c[None, :]
    b_first = tl.load(p_x, mask=m_x, other=0.0)
    p_x = head_ptr + HALF + o_c[None, :]
    b_second = tl.load(p_x, mask=m_x, other=0.0)
    p_rest = head_ptr + 2 * HALF + o_r[None, :]
    HAS_REST: tl.constexpr = 2 * HALF < HEAD_DIM
    b_rest = b_first
    if HAS_REST:
        b_rest = tl.load(p_rest, mask=m_r, other=0.0)
    dtype = b_first.dtype

    if HAS_NORM:
        wide_1, wide_2 = b_first.to(tl.float32), b_second.to(tl.float32)
        b_sum = tl.sum(wide_1 * wide_1 + wide_2 * wide_2, axis=1)
        if HAS_REST:
            wide_rest = b_rest.to(tl.float32)
            b_sum += tl.sum(wide_rest * wide_rest, axis=1)
        b_factor = (1.0 / tl.sqrt_rn(b_sum / HEAD_DIM + eps))[:, None]
        weight_ptr = k_weight_ptr
        if is_query:
            weight_ptr = q_weight_ptr
        b_first = _weighed(b_first, b_factor, weight_ptr + o_c, m_c, ROUNDS_FIRST)
        b_second = _weighed(b_second, b_factor, weight_ptr + HALF + o_c, m_c, ROUNDS_FIRST)
        if HAS_REST:
            m_w = 2 * HALF + o_r < HEAD_DIM
            b_rest = _weighed(b_rest, b_factor, weight_ptr + 2 * HALF + o_r, m_w, ROUNDS_FIRST)

    wide_1, wide_2 = b_first.to(tl.float32), b_second.to(tl.float32)
    b_first = (wide_1 * b_cos - wide_2 * b_sin).to(dtype)
    b_second = (wide_2 * b_cos + wide_1 * b_sin).to(dtype)
    if is_query:
        p_x = head_ptr + o_c[None, :]
        tl.store(p_x, b_first, mask=m_x)
        p_x = head_ptr + HALF + o_c[None, :]
        tl.store(p_x, b_second, mask=m_x)
        if HAS_REST and HAS_NORM:
            tl.store(p_rest, b_rest, mask=m_r)
    else:
        slot = tl.load(slots_ptr + token, mask=token < num_slots, other=-1)
        if slot >= 0:
            place = o_h.to(tl.int64)[:, None] * stride_kv_head + slot * HEAD_DIM
            b_scale = _inverse_scale(kv_scales_ptr, o_h, m_h, KV_IS_FP8)
            p_k = k_ptr + place + o_c[None, :]
            tl.store(p_k, stored(b_first, b_scale, KV_IS_FP8), mask=m_x)
            p_k = k_ptr + place + HALF + o_c[None, :]
            tl.store(p_k, stored(b_second, b_scale, KV_IS_FP8), mask=m_x)
            if HAS_REST:
                p_rest = k_ptr + place + 2 * HALF + o_r[None, :]
                tl.store(p_rest, stored(b_rest, b_scale, KV_IS_FP8), mask=m_r)
            _store_heads(
                v_ptr + place, head_ptr + NUM_KV * HEAD_DIM, kv_scales_ptr + NUM_KV, o_h, m_h,
                HEAD_DIM, BLOCK_D, KV_IS_FP8,
            )  # fmt: skip


@triton.jit
def store_kv_kernel(
    key_ptr,  # [tokens, KV heads, HEAD_DIM]
    value_ptr,
    k_ptr,  # [KV heads, blocks, BLOCK_SIZE, HEAD_DIM]
    v_ptr,
    kv_scales_ptr,  # [2, KV heads] float32; read where KV_IS_FP8
    slots_ptr,  # [tokens] int64; negative: is not stored
    num_kv,
    stride_key,
    stride_value,
    stride_kv_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_IS_FP8: tl.constexpr,
):
    """Store keys and values as they are. Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < num_kv
    place = o_h.to(tl.int64)[:, None] * stride_kv_head + slot * HEAD_DIM
    head = o_h[:, None] * HEAD_DIM
    _store_heads(
        k_ptr + place, key_ptr + token * stride_key + head, kv_scales_ptr, o_h, m_h,
        HEAD_DIM, BLOCK_D, KV_IS_FP8,
    )  # fmt: skip
    _store_heads(
        v_ptr + place, value_ptr + token * stride_value + head, kv_scales_ptr + num_kv, o_h, m_h,
        HEAD_DIM, BLOCK_D, KV_IS_FP8,
    )  # fmt: skip


@triton.jit
def _store_heads(
    to_ptr,
    from_ptr,
    scales_ptr,
    o_h,
    m_h,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_IS_FP8: tl.constexpr,
):
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m = m_h[:, None] & (o_d < HEAD_DIM)
    p_new = from_ptr + o_d
    b_new = tl.load(p_new, mask=m, other=0.0)
    b_scale = _inverse_scale(scales_ptr, o_h, m_h, KV_IS_FP8)
    p_kv = to_ptr + o_d
    tl.store(p_kv, stored(b_new, b_scale, KV_IS_FP8), mask=m)


@triton.jit
def _inverse_scale(scales_ptr, o_h, m_h, KV_IS_FP8: tl.constexpr):
    if KV_IS_FP8:
        return (1.0 / tl.load(scales_ptr + o_h, mask=m_h, other=1.0))[:, None]
    else:
        return 1.0


@triton.jit
def stored(values, inverse_scale, KV_IS_FP8: tl.constexpr):
    """As the cache holds it."""
    if KV_IS_FP8:
        return fp8.to_bytes(values.to(tl.float32) * inverse_scale)
    else:
        return values


@triton.jit
def _weighed(values, factor, p_weight, mask, ROUNDS_FIRST: tl.constexpr):
    b_w = tl.load(p_weight, mask=mask, other=0.0).to(tl.float32)[None, :]
    b_y = values.to(tl.float32) * factor
    if ROUNDS_FIRST:
        b_y = b_y.to(values.dtype).to(tl.float32)
    return (b_y * b_w).to(values.dtype)
