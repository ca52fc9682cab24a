# pyright: basic, reportArgumentType=false
"""Attention over paged keys and values: decode, chunks of prefill and mixtures of both.

For query t of a tile, at position p, and head h of the group that shares a KV head:
``out[t, h] = softmax(cap(scale * q[t, h] @ K.T)) @ V`` over the positions that p sees. A program
takes the queries of one tile with all heads of a group as rows of one matrix (GQA packing), and
walks over their keys and values in tiles anchored at position 0, with a running maximum
(FlashAttention-2, arXiv:2307.08691). Split KV: NUM_SPLITS programs take a share of the positions
each, and `combine_splits_kernel` puts their results together (Flash-Decoding).

A position that no query of the tile sees is never read, so what unused blocks hold is no matter. A
query at position -1 sees nothing: its output is zeros.
"""

import triton
import triton.language as tl

from engine.triton import fp8
from engine.triton.row_kernels import tanh
from lora_kernels.triton_common import dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stride_table"])  # of each step; else each kind of it is compiled
def paged_attention_kernel(
    out_ptr,  # [tokens, heads, HEAD_DIM]; split: [tiles, heads, NUM_SPLITS, HEAD_DIM] float32
    lse_ptr,  # split: [tiles, heads, NUM_SPLITS] float32, base-2 logarithm of a share's sum
    q_ptr,  # [tokens, heads, HEAD_DIM]
    k_ptr,  # [KV heads, blocks, BLOCK_SIZE, HEAD_DIM]
    v_ptr,
    kv_scales_ptr,  # [2, KV heads] float32, of keys and values; read where KV_IS_FP8
    tables_ptr,  # [rows, stride_table] int32
    tiles_ptr,  # [tiles, 4] int32: row, first token, tokens, position of the first
    scale,
    softcap,
    window,
    stride_q,
    stride_out,
    stride_kv_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV_IS_FP8: tl.constexpr,
    FP8_IS_NATIVE: tl.constexpr,
    HAS_WHOLE_TILES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: tiles, KV heads, NUM_SPLITS. Split tiles have one token each."""
    i_head = tl.program_id(1)
    i_split = tl.program_id(2)
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    row = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    if count == 0:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_query = o_m // GROUP
    o_head = i_head * GROUP + o_m % GROUP
    m_q = (o_query < count)[:, None] & (o_d < HEAD_DIM)[None, :]
    tokens = (first + o_query).to(tl.int64)
    p_q = q_ptr + tokens[:, None] * stride_q + o_head[:, None] * HEAD_DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)  # [M, D]

    begin = position * 0
    end = position + count
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), NUM_SPLITS) * BLOCK_N
        begin += i_split * share
        end = tl.minimum(end, begin + share)

    score_scale = scale
    value_scale = 1.0
    if KV_IS_FP8:
        num_heads = tl.num_programs(1)
        score_scale *= tl.load(kv_scales_ptr + i_head) * fp8.unit(FP8_IS_NATIVE)
        value_scale *= tl.load(kv_scales_ptr + num_heads + i_head) * fp8.unit(FP8_IS_NATIVE)
    if HAS_SOFTCAP:
        score_scale /= softcap
        cap = softcap * LOG2_E
    else:
        score_scale *= LOG2_E
        cap = 0.0

    head_offset = i_head.to(tl.int64) * stride_kv_head
    table_ptr = tables_ptr + row.to(tl.int64) * stride_table
    o_position = position + o_query
    b_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if HAS_WHOLE_TILES:
        # Tiles that every query sees all of need no mask.
        whole = tl.minimum((position + 1) // BLOCK_N * BLOCK_N, end)
        for i_n in range(begin, whole, BLOCK_N):
            b_max, b_sum, b_out = attend_tile(
                b_max, b_sum, b_out, b_q, k_ptr + head_offset, v_ptr + head_offset, table_ptr,
                i_n, end, o_position, window, score_scale, cap,
                HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, False, HAS_WINDOW, HAS_SOFTCAP,
                KV_IS_FP8, FP8_IS_NATIVE, UPCAST,
            )  # fmt: skip
        begin = tl.maximum(begin, whole)
    for i_n in range(begin, end, BLOCK_N):
        b_max, b_sum, b_out = attend_tile(
            b_max, b_sum, b_out, b_q, k_ptr + head_offset, v_ptr + head_offset, table_ptr,
            i_n, end, o_position, window, score_scale, cap,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True, HAS_WINDOW, HAS_SOFTCAP,
            KV_IS_FP8, FP8_IS_NATIVE, UPCAST,
        )  # fmt: skip

    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out *= (value_scale / b_divisor)[:, None]
    if NUM_SPLITS == 1:
        p_out = out_ptr + tokens[:, None] * stride_out + o_head[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_q)
    else:
        num_heads = tl.num_programs(1) * GROUP
        i_tile = tl.program_id(0).to(tl.int64)
        places = (i_tile * num_heads + o_head) * NUM_SPLITS + i_split
        b_lse = tl.where(b_sum == 0.0, -float("inf"), b_max + tl.log2(b_divisor))
        tl.store(lse_ptr + places, b_lse, mask=o_query < count)
        p_out = out_ptr + places[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(p_out, b_out, mask=m_q & (b_sum > 0.0)[:, None])


@triton.jit
def attend_tile(
    b_max,
    b_sum,
    b_out,
    b_q,
    k_ptr,
    v_ptr,
    table_ptr,
    i_n,
    end,
    o_position,
    window,
    score_scale,
    cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV_IS_FP8: tl.constexpr,
    FP8_IS_NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Take in positions [i_n, i_n + BLOCK_N): new maximum, sum and weighted values of each row.

    A tile of which a row sees nothing changes none of its bits: its weights are 0, the decay is 1.
    """
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    m_n = o_n < end if IS_MASKED else o_n >= 0
    blocks = tl.load(table_ptr + o_n // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64)
    places = (blocks * BLOCK_SIZE + o_n % BLOCK_SIZE) * HEAD_DIM
    p_k = k_ptr + places[None, :] + o_d[:, None]
    p_v = v_ptr + places[:, None] + o_d[None, :]
    zero = 0 if KV_IS_FP8 else 0.0
    b_k = tl.load(p_k, mask=m_n[None, :] & m_d[:, None], other=zero)  # [D, N]
    b_v = tl.load(p_v, mask=m_n[:, None] & m_d[None, :], other=zero)  # [N, D]
    if KV_IS_FP8:
        b_k = fp8.from_bytes(b_k, b_q.dtype, FP8_IS_NATIVE)
        b_v = fp8.from_bytes(b_v, b_q.dtype, FP8_IS_NATIVE)

    b_s = dot(b_q, b_k, tl.zeros([b_q.shape[0], BLOCK_N], dtype=tl.float32), UPCAST)
    b_s *= score_scale
    if HAS_SOFTCAP:
        b_s = cap * tanh(b_s)
    if IS_MASKED:
        m_s = o_n[None, :] <= o_position[:, None]
        if HAS_WINDOW:
            m_s &= o_n[None, :] > o_position[:, None] - window
        b_s = tl.where(m_s, b_s, -float("inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
    # Where nothing was seen yet both are -inf, whose difference is no number.
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_decay = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_decay + tl.sum(b_p, axis=1)
    b_out = dot(b_p.to(b_v.dtype), b_v, b_out * b_decay[:, None], UPCAST)
    return b_new, b_sum, b_out


@triton.jit
def combine_splits_kernel(
    out_ptr,  # [tokens, heads, HEAD_DIM]
    part_ptr,  # [tiles, heads, NUM_SPLITS, HEAD_DIM] float32
    lse_ptr,  # [tiles, heads, NUM_SPLITS] float32
    tiles_ptr,  # [tiles, 4] int32, of one token each
    stride_out,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Weigh the shares of a token's positions by their sums. Grid: tiles, heads."""
    i_tile = tl.program_id(0).to(tl.int64)
    tile_ptr = tiles_ptr + i_tile * 4
    token = tl.load(tile_ptr + 1).to(tl.int64)
    if tl.load(tile_ptr + 2) == 0:
        return
    i_head = tl.program_id(1)
    o_s = tl.arange(0, NUM_SPLITS)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    places = (i_tile * tl.num_programs(1) + i_head) * NUM_SPLITS + o_s
    b_lse = tl.load(lse_ptr + places)
    largest = tl.max(b_lse, axis=0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    b_w = tl.exp2(b_lse - largest)
    # A share without positions was never written.
    p_part = part_ptr + places[:, None] * HEAD_DIM + o_d[None, :]
    b_part = tl.load(p_part, mask=(b_w > 0.0)[:, None] & m_d[None, :], other=0.0)
    total = tl.sum(b_w, axis=0)
    b_out = tl.sum(b_w[:, None] * b_part, axis=0) / tl.where(total == 0.0, 1.0, total)
    p_out = out_ptr + token * stride_out + i_head * HEAD_DIM + o_d
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_d)
