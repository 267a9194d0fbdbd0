"""Datasets of the pytest-benchmark comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from _helper import class_folders


@pytest.fixture(scope="session")
def photos() -> Iterator[Path]:
    """Class folders of 400 photographs: real ones if FASTDATA_IMAGENET names a folder, otherwise synthetic."""
    with class_folders(None, count=400) as (root, _):
        yield root
