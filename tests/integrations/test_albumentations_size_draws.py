"""Boxes and sizes of albumentations' crops and resizes, in enough draws to tell distributions apart."""

from __future__ import annotations

import pytest

from test_albumentations_sizes import CROPS, compare_borders, compare_crops, compare_sizes

DRAWS = 20_000


@pytest.mark.parametrize("case", CROPS)
def test_boxes_have_albumentations_distributions(case: str) -> None:
    """Heights, widths, areas and places of what is cropped and resized."""
    compare_crops(CROPS[case](), DRAWS)


def test_borders_have_albumentations_distributions() -> None:
    """All four sides that RandomCropFromBorders leaves."""
    compare_borders(DRAWS)


def test_sizes_have_albumentations_distributions() -> None:
    """The sizes of RandomScale, and of SmallestMaxSize with several lengths."""
    compare_sizes(DRAWS)
