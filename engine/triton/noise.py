# pyright: basic
"""The noise of `engine.sampling.noise` on a device: the same 64 bits for a key and a token id."""

import triton
import triton.language as tl

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def random_bits(key, token_ids):
    """SplitMix64's output number `token_ids` of the stream that starts at `key`; all uint64."""
    bits = token_ids * GAMMA + (key + GAMMA)
    bits ^= bits >> 30
    bits *= MULTIPLIER_1
    bits ^= bits >> 27
    bits *= MULTIPLIER_2
    bits ^= bits >> 31
    return bits


@triton.jit
def exponential_noise(key, token_ids):
    """Standard exponential variates, float32: ``-log1p(-u)`` of a uniform u in (0, 1)."""
    uniform = ((random_bits(key, token_ids) >> 11).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    uniform = tl.minimum(uniform, 0.999999940395355)
    # W. Kahan's log1p: what rounding 1 - u loses, it loses in both factors.
    rest = 1.0 - uniform
    kept = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    return tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / kept))
