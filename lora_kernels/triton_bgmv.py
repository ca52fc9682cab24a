# pyright: basic
"""BGMV: a program takes one row, on plain float32 units; for decode, where adapters have few rows.

Semantics, for each entry e of slot s, its row r = permutation[e] and each slice j:
``t = A[s, j] @ x[r]`` (shrink), ``y[r, slice j] += scaling[s, j] * (B[s, j] @ t)`` (expand).
After Punica (arXiv:2310.18547); by true rank and paged. Arguments as in `triton_sgmv`; a tile has
one entry.
"""

import triton
import triton.language as tl

from lora_kernels.triton_common import (
    ROW_MULTIPLE,
    column_tile,
    load_shrunk,
    rank_rows,
    read_scaling,
    read_tile,
    slice_pool,
    slot_record,
)


@triton.jit
def bgmv_shrink_kernel(
    t_ptr,
    x_ptr,
    a_ptr,
    slots_ptr,
    tiles_ptr,
    permutation_ptr,
    in_features,
    stride_x,
    stride_a,
    stride_split,
    stride_slice,
    stride_entry,
    NUM_SLICES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: tiles, rank tiles, NUM_SLICES * SPLIT_K."""
    i_map = tl.program_id(0)
    i_r = tl.program_id(1) * BLOCK_R
    i_slice = tl.program_id(2) % NUM_SLICES
    i_split = tl.program_id(2) // NUM_SLICES
    slot, start, count = read_tile(tiles_ptr, i_map)
    record_ptr = slot_record(slots_ptr, slot, i_slice, NUM_SLICES, MAX_PAGES)
    rank = tl.load(record_ptr)
    if (count == 0) | (i_r >= rank):
        return

    o_r = i_r + tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, BLOCK_K)
    m_r = o_r < rank
    x_row_ptr = x_ptr + tl.load(permutation_ptr + start).to(tl.int64) * stride_x
    a_row_ptr = a_ptr + rank_rows(record_ptr + 2, o_r, m_r)[:, None] * stride_a

    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K)
    k_begin = i_split * steps * BLOCK_K
    k_end = tl.minimum(k_begin + steps * BLOCK_K, in_features)
    # Summed over K once, after the loop: within it, threads add without talking to each other.
    b_sum = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
    for i_k in range(k_begin, k_end, BLOCK_K):
        m_k = i_k + o_k < in_features
        m_a = i_k + o_k < tl.cdiv(in_features, ROW_MULTIPLE) * ROW_MULTIPLE
        p_x = x_row_ptr + i_k + o_k
        p_a = a_row_ptr + (i_k + o_k)[None, :]
        b_x = tl.load(p_x, mask=m_k, other=0.0)  # [K]
        b_a = tl.load(p_a, mask=m_r[:, None] & m_a[None, :], other=0.0)  # [R, K]
        b_sum += b_a.to(tl.float32) * b_x.to(tl.float32)[None, :]

    t_base = t_ptr + i_split.to(tl.int64) * stride_split + i_slice.to(tl.int64) * stride_slice
    p_t = t_base + start.to(tl.int64) * stride_entry + o_r
    tl.store(p_t, tl.sum(b_sum, axis=1))  # zeros past the slot's rank


@triton.jit
def bgmv_expand_kernel(
    y_ptr,
    t_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    slots_ptr,
    tiles_ptr,
    permutation_ptr,
    slice_offsets_ptr,
    stride_y,
    stride_b0,
    stride_b1,
    stride_b2,
    stride_split,
    stride_slice,
    stride_entry,
    NUM_SLICES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Grid: tiles, column tiles of all slices."""
    i_map = tl.program_id(0)
    slot, start, count = read_tile(tiles_ptr, i_map)
    i_slice, i_n, offset, size = column_tile(
        tl.program_id(1), slice_offsets_ptr, NUM_SLICES, BLOCK_N, ALIGNMENT
    )
    record_ptr = slot_record(slots_ptr, slot, i_slice, NUM_SLICES, MAX_PAGES)
    rank = tl.load(record_ptr)
    if (count == 0) | (rank == 0):
        return

    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < size
    m_b = o_n < tl.cdiv(size, ROW_MULTIPLE) * ROW_MULTIPLE
    b_ptr, stride_b = slice_pool(i_slice, b0_ptr, b1_ptr, b2_ptr, stride_b0, stride_b1, stride_b2)
    t_base = t_ptr + i_slice.to(tl.int64) * stride_slice + start.to(tl.int64) * stride_entry
    pages_ptr = record_ptr + 2 + MAX_PAGES
    # Summed over ranks once, after the loop; see the shrink.
    b_sum = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for i_r in range(0, rank, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        b_t = load_shrunk(t_base + o_r, None, stride_split, SPLIT_K)  # [R]
        p_b = b_ptr + rank_rows(pages_ptr, o_r, m_r)[:, None] * stride_b + o_n[None, :]
        b_b = tl.load(p_b, mask=m_r[:, None] & m_b[None, :], other=0.0)  # [R, N]
        b_sum += b_t[:, None] * b_b.to(tl.float32)

    y_row = tl.load(permutation_ptr + start).to(tl.int64)
    p_y = y_ptr + y_row * stride_y + offset + o_n
    b_y = tl.load(p_y, mask=m_n, other=0.0).to(tl.float32)
    b_y += read_scaling(record_ptr) * tl.sum(b_sum, axis=0)
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_n)
