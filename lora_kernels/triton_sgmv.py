# pyright: basic
"""SGMV: a program takes rows of one segment, so that they share a read of the weights.

Semantics, for segment i of slot s, its rows r = permutation[indptr[i]:indptr[i + 1]] and each
slice j: ``t = x[r] @ A[s, j].T`` (shrink), ``y[r, slice j] += scaling[s, j] * (t @ B[s, j].T)``
(expand). After Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285); by true rank and paged.
"""

import triton
import triton.language as tl

from lora_kernels.triton_common import (
    ROW_MULTIPLE,
    column_tile,
    dot,
    dot_float32,
    load_shrunk,
    rank_rows,
    read_scaling,
    read_tile,
    slice_pool,
    slot_record,
)


@triton.jit
def sgmv_shrink_kernel(
    t_ptr,  # [SPLIT_K, NUM_SLICES, entries, ranks] float32, out
    x_ptr,  # [rows, in_features]
    a_ptr,  # [pool rows, stride_a]
    slots_ptr,  # [slots, NUM_SLICES, 2 + 2 * MAX_PAGES] int32
    tiles_ptr,  # [tiles, 3] int32
    permutation_ptr,  # [entries] int32
    in_features,
    stride_x,
    stride_a,
    stride_split,
    stride_slice,
    stride_entry,
    NUM_SLICES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
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

    o_m = tl.arange(0, BLOCK_M)
    o_r = i_r + tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < count
    m_r = o_r < rank
    x_rows = tl.load(permutation_ptr + start + o_m, mask=m_m, other=0).to(tl.int64)
    a_rows = rank_rows(record_ptr + 2, o_r, m_r)
    x_row_ptr = x_ptr + x_rows[:, None] * stride_x
    a_row_ptr = a_ptr + a_rows[None, :] * stride_a

    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K)
    k_begin = i_split * steps * BLOCK_K
    k_end = tl.minimum(k_begin + steps * BLOCK_K, in_features)
    b_t = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for i_k in range(k_begin, k_end, BLOCK_K):
        m_k = i_k + o_k < in_features
        m_a = i_k + o_k < tl.cdiv(in_features, ROW_MULTIPLE) * ROW_MULTIPLE
        p_x = x_row_ptr + (i_k + o_k)[None, :]
        p_a = a_row_ptr + (i_k + o_k)[:, None]
        b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)  # [M, K]
        b_a = tl.load(p_a, mask=m_r[None, :] & m_a[:, None], other=0.0)  # [K, R]
        b_t = dot(b_x, b_a, b_t, UPCAST)

    t_base = t_ptr + i_split.to(tl.int64) * stride_split + i_slice.to(tl.int64) * stride_slice
    p_t = t_base + (start + o_m).to(tl.int64)[:, None] * stride_entry + o_r[None, :]
    # Ranks past the slot's own are stored as zeros: a mask of unknown alignment would cut stores
    # here, and loads in the expand, to 4 bytes.
    tl.store(p_t, b_t, mask=m_m[:, None])


@triton.jit
def sgmv_expand_kernel(
    y_ptr,  # [rows, sum of slices], in place
    t_ptr,  # [SPLIT_K, NUM_SLICES, entries, ranks] float32
    b0_ptr,  # [pool rows, stride_b0], one pool a slice
    b1_ptr,
    b2_ptr,
    slots_ptr,  # [slots, NUM_SLICES, 2 + 2 * MAX_PAGES] int32
    tiles_ptr,  # [tiles, 3] int32
    permutation_ptr,  # [entries] int32
    slice_offsets_ptr,  # [NUM_SLICES + 1] int32
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
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
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

    o_m = tl.arange(0, BLOCK_M)
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_m = o_m < count
    m_n = o_n < size
    m_b = o_n < tl.cdiv(size, ROW_MULTIPLE) * ROW_MULTIPLE
    b_ptr, stride_b = slice_pool(i_slice, b0_ptr, b1_ptr, b2_ptr, stride_b0, stride_b1, stride_b2)
    t_base = t_ptr + i_slice.to(tl.int64) * stride_slice
    t_row_ptr = t_base + (start + o_m).to(tl.int64)[:, None] * stride_entry
    pages_ptr = record_ptr + 2 + MAX_PAGES
    b_y = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i_r in range(0, rank, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        p_t = t_row_ptr + o_r[None, :]
        b_t = load_shrunk(p_t, m_m[:, None], stride_split, SPLIT_K)  # [M, R]
        p_b = b_ptr + rank_rows(pages_ptr, o_r, m_r)[:, None] * stride_b + o_n[None, :]
        b_b = tl.load(p_b, mask=m_r[:, None] & m_b[None, :], other=0.0)  # [R, N]
        b_y = dot_float32(b_t, b_b, b_y, UPCAST)

    y_rows = tl.load(permutation_ptr + start + o_m, mask=m_m, other=0).to(tl.int64)
    p_y = y_ptr + y_rows[:, None] * stride_y + (offset + o_n)[None, :]
    m_y = m_m[:, None] & m_n[None, :]
    b_y = tl.load(p_y, mask=m_y, other=0.0).to(tl.float32) + read_scaling(record_ptr) * b_y
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_y)
