# pyright: basic
"""Eight-bit floats (OCP e4m3: 4 exponent bits, 3 of mantissa) as bytes, on any GPU.

Triton knows the type only from compute capability 8.9 on, so a cache of it is read and written as
bytes. What is stored is the nearest such number, even on ties; what is past 448 becomes 448.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def to_bytes(values):
    """float32 -> bytes of e4m3; NaN stays NaN."""
    magnitude = tl.minimum(tl.abs(values), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Adding half of the last place that is kept, less one where that place is even, carries.
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (rounded >> 20) - ((127 - 7) << 3)
    # 2**23 has a last place of 1: the sum is a whole number of steps of 2**-9.
    steps = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, steps, normal)
    code = tl.where(values != values, 0x7F, code)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def from_bytes(codes, dtype: tl.constexpr, IS_NATIVE: tl.constexpr):
    """Bytes of e4m3 -> `dtype`; without native conversion, 2**-8 times the value (see `unit`).

    A float16 has the same fields with one more exponent bit and 7 more of mantissa, so a shift is
    a conversion up to the exponents' offset, for subnormal numbers too.
    """
    if IS_NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    bits = tl.where((wide & 0x7F) == 0x7F, bits | 0x7E00, bits)
    return bits.to(tl.float16, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def unit(IS_NATIVE: tl.constexpr):
    """What `from_bytes` is to be multiplied by, best together with a scale."""
    if IS_NATIVE:
        return 1.0
    else:
        return 256.0
