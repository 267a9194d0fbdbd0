"""What albumentations draws for values and colours, in many draws."""

from __future__ import annotations

import pytest

from test_albumentations_colours import (
    CASES,
    NOISE,
    VARIED,
    assert_drawn_alike,
    assert_noise_alike,
)

DRAWS = 20_000


@pytest.mark.parametrize("name", VARIED)
def test_parameters_are_drawn_alike(name: str) -> None:
    """Each is of the distribution of albumentations' own."""
    assert name in CASES
    assert_drawn_alike(name, DRAWS)


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_drawn_alike(name: str) -> None:
    """Each of the numbers, and neighbours together."""
    assert_noise_alike(name, DRAWS)
