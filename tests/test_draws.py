"""Draws are a pure function of (seed, epoch, index, op, draw), and uniform."""

from __future__ import annotations

import numpy as np
import pytest

from fastdata.pixels.random_numbers import draw_integers, draw_uniform, sample_keys

INDEX = np.arange(4096)


def uniform(
    seed: int, epoch_B: int | np.ndarray, index_B: np.ndarray, op: int, draw: int
) -> np.ndarray:
    return draw_uniform(sample_keys(seed, epoch_B, index_B), op, draw)


def splitmix64(state: int, steps: int) -> int:
    """Output number ``steps`` of the published SplitMix64, in Python's integers."""
    mask = (1 << 64) - 1
    z = (state + steps * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_published_constants() -> None:
    """From state 1234567 SplitMix64 gives the first outputs that its authors' code gives."""
    assert [splitmix64(1234567, n) for n in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_draws_are_splitmix64_outputs() -> None:
    """Draw d of op o is output 1024 * o + d + 1 of the sample's stream, cut to 53 bits."""
    keys = sample_keys(5, 2, np.array([9]))
    for op, draw in ((0, 0), (0, 1), (3, 7)):
        expected = (splitmix64(int(keys[0]), 1024 * op + draw + 1) >> 11) * 2.0**-53
        assert draw_uniform(keys, op, draw)[0] == expected


@pytest.mark.parametrize(
    ("seed", "epoch", "index", "key", "first", "late", "integer"),
    [
        (0, 0, 0, 0x33FE8BD4F9C57863, "0x1.67404d700e558p-3", "0x1.42d9b81866be6p-1", 521),
        (7, 3, 1, 0x6BFC273DBACE04E7, "0x1.f5d0f661b462cp-2", "0x1.ca1baaacede0cp-2", 739),
        (
            -1,
            2**33 + 5,
            12345678,
            0x3544A906F512E777,
            "0x1.f9efd9884e366p-1",
            "0x1.041ddb8fcac96p-1",
            774,
        ),
    ],
)
def test_draws_are_those_of_every_version(
    seed: int, epoch: int, index: int, key: int, first: str, late: str, integer: int
) -> None:
    """Written down once: other values would let every resumed run, and every seed, go on with other pixels."""
    keys = sample_keys(seed, epoch, np.array([index]))
    assert keys.tolist() == [key]
    assert [draw_uniform(keys, 0, 0)[0].hex(), draw_uniform(keys, 2, 39)[0].hex()] == [first, late]
    assert draw_integers(keys, 1, 1, 1000).tolist() == [integer]


def test_a_draw_does_not_depend_on_its_batch() -> None:
    """A sample draws the same alone, in a batch, in any order and after other draws."""
    whole = uniform(3, 1, INDEX, 2, 4)
    order = np.random.default_rng(0).permutation(len(INDEX))
    assert (uniform(3, 1, order, 2, 4) == whole[order]).all()
    assert uniform(3, 1, np.array([77]), 2, 4)[0] == whole[77]


def test_epochs_may_differ_within_a_batch() -> None:
    """An epoch per sample gives what one call per epoch gives."""
    epochs = np.array([0, 5, 0, 1])
    mixed = uniform(3, epochs, np.arange(4), 0, 0)
    assert [
        uniform(3, int(e), np.array([i]), 0, 0)[0] for i, e in enumerate(epochs)
    ] == mixed.tolist()


@pytest.mark.parametrize(
    "other", [(4, 1, 2, 4), (3, 2, 2, 4), (3, 1, 3, 4), (3, 1, 2, 5), (-3, 1, 2, 4)]
)
def test_every_argument_matters(other: tuple[int, int, int, int]) -> None:
    """Another seed, epoch, op or draw gives draws that are not correlated with the first."""
    seed, epoch, op, draw = other
    first, second = uniform(3, 1, INDEX, 2, 4), uniform(seed, epoch, INDEX, op, draw)
    assert not (first == second).any()
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(len(INDEX))


def test_uniform_over_samples_and_over_epochs() -> None:
    """Over 4096 samples, and over 4096 epochs of one sample, each of 16 bins gets its share."""
    for draws in (uniform(0, 0, INDEX, 0, 0), uniform(0, INDEX, np.zeros_like(INDEX), 0, 0)):
        counts = np.bincount((draws * 16).astype(int), minlength=16)
        assert (
            (counts - 256) ** 2 / 256
        ).sum() < 40  # chi-squared, 15 degrees of freedom: exceeded once in 2000
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 4 / np.sqrt(len(INDEX))


def test_integers_reach_both_ends() -> None:
    """Integers below 5 are 0 to 4, each about equally often; below 1 always 0."""
    keys = sample_keys(1, 0, INDEX)
    counts = np.bincount(draw_integers(keys, 0, 0, 5))
    assert len(counts) == 5
    assert counts.min() > 4096 / 5 * 0.85
    assert not draw_integers(keys, 0, 0, 1).any()
    assert (draw_integers(keys, 0, 0, np.where(INDEX % 2, 1, 1000))[1::2] == 0).all()


def test_the_users_generators_are_left_alone() -> None:
    """Drawing does not move NumPy's global generator."""
    np.random.seed(0)
    expected = np.random.RandomState(0).random_sample()
    uniform(0, 0, INDEX, 0, 0)
    assert np.random.random_sample() == expected
