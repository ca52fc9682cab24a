import numpy as np
import torch

from engine.sampling.noise import exponential_noise, random_bits, stream_key

IDS = torch.arange(49_152)


def uniforms(key: int, count: int = 49_152) -> np.ndarray:
    bits = random_bits([key], torch.arange(count))[0].numpy().view(np.uint64)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def chi_square(values: np.ndarray, bins: int) -> float:
    """Deviation of the chi-square statistic from its mean, in standard deviations."""
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / np.sqrt(2 * (bins - 1))


def test_bits_equal_the_published_splitmix64_sequence():
    # First outputs of splitmix64.c with the state 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    bits = random_bits([1234567], torch.arange(5))[0].numpy().view(np.uint64)
    assert bits.tolist() == expected


def test_each_part_of_the_key_matters_and_keys_do_not_collide():
    keys = {
        stream_key(seed, choice, position)
        for seed in (0, 1, 2, -1, 2**63, 2**64 - 2)
        for choice in range(16)
        for position in range(512)
    }
    assert len(keys) == 6 * 16 * 512


def test_uniform_over_ids_positions_choices_and_seeds():
    by_id = uniforms(stream_key(7, 0, 0))
    by_position = np.array([uniforms(stream_key(7, 0, p), 4)[3] for p in range(8192)])
    by_choice = np.array([uniforms(stream_key(7, c, 5), 4)[3] for c in range(8192)])
    by_seed = np.array([uniforms(stream_key(s, 0, 5), 4)[3] for s in range(8192)])
    for values in (by_id, by_position, by_choice, by_seed):
        assert abs(chi_square(values, 64)) < 4


def test_neighbouring_draws_are_uncorrelated():
    base = uniforms(stream_key(7, 0, 0))
    neighbours = [
        uniforms(stream_key(8, 0, 0)),
        uniforms(stream_key(7, 1, 0)),
        uniforms(stream_key(7, 0, 1)),
        np.roll(base, 1),
    ]
    for other in neighbours:
        correlation = float(np.corrcoef(base, other)[0, 1])
        assert abs(correlation) < 4 / np.sqrt(len(base))
        # Pairs fill the square evenly, which a correlation alone does not say.
        pairs = (np.floor(base * 8) * 8 + np.floor(other * 8)) / 64
        assert abs(chi_square(pairs, 64)) < 4


def test_every_bit_is_fair():
    bits = random_bits([stream_key(3, 0, 9)], IDS)[0].numpy().view(np.uint64)
    for place in range(64):
        ones = int(((bits >> np.uint64(place)) & np.uint64(1)).sum())
        assert abs(ones - len(bits) / 2) < 4.5 * np.sqrt(len(bits)) / 2


def test_exponential_noise_has_the_exponential_distribution():
    noise = exponential_noise([stream_key(1, 0, 0)], IDS)[0]
    assert noise.dtype == torch.float32
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    assert abs(chi_square(1 - np.exp(-noise.double().numpy()), 64)) < 4


def test_noise_of_an_id_is_the_same_in_any_selection_of_ids_and_keys():
    keys = [stream_key(seed, 0, 0) for seed in range(5)]
    together = exponential_noise(keys, IDS)
    some = torch.tensor([40_000, 3, 17, 49_151])
    for row, key in enumerate(keys):
        assert torch.equal(exponential_noise([key], IDS)[0], together[row])
        assert torch.equal(exponential_noise([key], some)[0], together[row, some])
        assert torch.equal(exponential_noise([key], some.unsqueeze(0))[0], together[row, some])
