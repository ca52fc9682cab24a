# pyright: basic, reportGeneralTypeIssues=false
"""What the Triton kernels share: reading a tile map, a slot's record, rank rows and columns."""

import triton
import triton.language as tl

from lora_kernels.pool import PAGE_ROWS, ROW_ALIGNMENT

PAGE = tl.constexpr(PAGE_ROWS)
# Pool rows are padded with zeros to a multiple of it, which masks of A and B include: they then
# cut no access short, however odd the projection's size.
ROW_MULTIPLE = tl.constexpr(ROW_ALIGNMENT)


@triton.jit
def read_tile(tiles_ptr, i_map):
    """Slot, first entry and number of entries of a tile; an unused tile has 0 entries."""
    p = tiles_ptr + i_map * 3
    return tl.load(p), tl.load(p + 1), tl.load(p + 2)


@triton.jit
def slot_record(slots_ptr, slot, i_slice, NUM_SLICES: tl.constexpr, MAX_PAGES: tl.constexpr):
    """Address of [rank, scaling's bits, A pages, B pages]."""
    return slots_ptr + (slot * NUM_SLICES + i_slice) * (2 + 2 * MAX_PAGES)


@triton.jit
def read_scaling(record_ptr):
    """A slice's scaling, from its bits in the record."""
    return tl.load(record_ptr + 1).to(tl.float32, bitcast=True)


@triton.jit
def rank_rows(pages_ptr, o_r, m_r):
    """Pool rows (int64) of ranks o_r."""
    pages = tl.load(pages_ptr + o_r // PAGE, mask=m_r, other=0)
    return pages.to(tl.int64) * PAGE + o_r % PAGE


@triton.jit
def column_tile(
    i_n,
    slice_offsets_ptr,
    NUM_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The slice that program i_n writes, its first column there, the slice's offset and size."""
    i_slice = i_n * 0
    i_tile = i_n
    for i in tl.static_range(NUM_SLICES - 1):
        size = tl.load(slice_offsets_ptr + i + 1) - tl.load(slice_offsets_ptr + i)
        num_tiles = tl.cdiv(size, BLOCK_N)
        is_past = (i_slice == i) & (i_tile >= num_tiles)
        i_tile = tl.where(is_past, i_tile - num_tiles, i_tile)
        i_slice = tl.where(is_past, i + 1, i_slice)
    offset = tl.load(slice_offsets_ptr + i_slice)
    size = tl.load(slice_offsets_ptr + i_slice + 1) - offset
    # Loaded numbers have no known divisor; without one, accesses to y are an element wide.
    offset = tl.multiple_of(offset, ALIGNMENT)
    size = tl.multiple_of(size, ALIGNMENT)
    return i_slice, i_tile * BLOCK_N, offset, size


@triton.jit
def slice_pool(i_slice, b0_ptr, b1_ptr, b2_ptr, stride_b0, stride_b1, stride_b2):
    """B pool and row stride of a slice."""
    b_ptr = b0_ptr
    stride = stride_b0
    if i_slice == 1:
        b_ptr = b1_ptr
        stride = stride_b1
    elif i_slice == 2:
        b_ptr = b2_ptr
        stride = stride_b2
    return b_ptr, stride


@triton.jit
def load_shrunk(p_t, mask, stride_split, SPLIT_K: tl.constexpr):
    """Sum of the splits' parts, in the order of the splits."""
    other = None if mask is None else 0.0
    b_t = tl.load(p_t, mask=mask, other=other)
    for _ in tl.static_range(SPLIT_K - 1):
        p_t += stride_split
        b_t += tl.load(p_t, mask=mask, other=other)
    return b_t


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in float32; UPCAST for the interpreter, which multiplies bfloat16 as integers."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_float32(s, b, acc, UPCAST: tl.constexpr):
    """acc + s @ b for a float32 s and a b of 16 bits on tensor cores.

    s is cut in two parts of b's dtype: 16 (bfloat16) or 22 (float16) bits of its mantissa count.
    """
    if b.dtype == tl.float32:
        return dot(s, b, acc, UPCAST)
    high = s.to(b.dtype)
    low = (s - high.to(tl.float32)).to(b.dtype)
    acc = dot(low, b, acc, UPCAST)
    return dot(high, b, acc, UPCAST)
