"""The loader for data larger than memory: chunks are loaded ahead, served and dropped."""

from fastdata.chunked.loader import ChunkedLoader
from fastdata.chunked.order import ShuffleQuality

__all__ = ["ChunkedLoader", "ShuffleQuality"]
