"""Counter-based sampling noise: a pure function of (seed, choice, output position, vocabulary id).

No generator state exists, so a seeded request draws the same tokens alone, in a crowd, and again
after a preemption. The bits are SplitMix64's: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, with D. Stafford's mix 13 as in
https://prng.di.unimi.it/splitmix64.c. Its i-th output is mix(state + (i + 1) * gamma): a counter
turned into a number without the numbers before it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_LARGEST_BELOW_ONE = 1 - 2**-24  # in float32


def stream_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one draw.

    Each part is added and mixed in turn, a bijection in that part: draws that differ in one part
    never share a key, others only by a 64-bit coincidence.
    """
    key = _mix(seed + _GAMMA)
    key = _mix(key + choice + _GAMMA)
    return _mix(key + position + _GAMMA)


def random_bits(keys: Sequence[int], token_ids: Tensor) -> Tensor:
    """SplitMix64's output number `token_ids[...]` (from 0) of the streams that start at `keys`.

    `token_ids`: [count] shared by all keys, or [len(keys), count], int64. Returns
    [len(keys), count] int64 that holds the 64 bits.
    """
    states = torch.tensor([_signed(key + _GAMMA) for key in keys], dtype=torch.int64)
    bits = token_ids * _signed(_GAMMA) + states.to(token_ids.device).unsqueeze(1)
    bits ^= _shift_right(bits, 30)
    bits *= _signed(_MULTIPLIER_1)
    bits ^= _shift_right(bits, 27)
    bits *= _signed(_MULTIPLIER_2)
    bits ^= _shift_right(bits, 31)
    return bits


def exponential_noise(keys: Sequence[int], token_ids: Tensor) -> Tensor:
    """Standard exponential variates, one for each (key, token id); float32, above 0, finite.

    Shapes as in `random_bits`. The token with the least noise / weight is a draw from the
    distribution proportional to the weights (an exponential race, equal to the Gumbel-max trick).
    53 bits keep the small variates, which decide the race, apart down to 2**-54.
    """
    uniform = _shift_right(random_bits(keys, token_ids), 11).to(torch.float32)
    uniform += 0.5
    uniform *= 2.0**-53
    uniform.clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * _MULTIPLIER_1 & _MASK
    value = (value ^ (value >> 27)) * _MULTIPLIER_2 & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(bits: Tensor, places: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask takes the copies of the sign bit away.
    shifted = bits >> places
    shifted &= (1 << (64 - places)) - 1
    return shifted
