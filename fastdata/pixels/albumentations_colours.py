"""Readers of albumentations' transforms that change values of pixels."""

from __future__ import annotations

from fastdata.pixels.state import Reader

READERS: dict[str, Reader] = {}
"""A reader for each transform, by its name with ``A.`` before it."""
