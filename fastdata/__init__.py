"""Feed the GPU from an image folder: prepare images once, keep them in shared memory, serve whole batches.

Swap two imports and keep the script::

    from fastdata import DataLoader, ImageFolder     # were torch.utils.data's and torchvision.datasets'
"""

from typing import TYPE_CHECKING

from fastdata.batch import SampleBatch, collate
from fastdata.dataset import CachedDataset
from fastdata.errors import FastDataError, FastDataWarning
from fastdata.folder import ImageFolder, ImageManifest
from fastdata.loader import DataLoader
from fastdata.prefetch import CudaPrefetcher
from fastdata.ring import RingCollate
from fastdata.transforms import plan_transform

__all__ = [
    "CachedDataset",
    "ChunkedLoader",
    "CudaPrefetcher",
    "DataLoader",
    "FastDataError",
    "FastDataWarning",
    "ImageFolder",
    "ImageManifest",
    "RingCollate",
    "SampleBatch",
    "collate",
    "plan_transform",
]

if TYPE_CHECKING:
    from fastdata.chunked import ChunkedLoader
else:

    def __getattr__(name: str) -> object:
        """Import the room of ChunkedLoader when it is asked for, since most scripts do without (PEP 562)."""
        if name != "ChunkedLoader":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastdata.chunked import ChunkedLoader

        return ChunkedLoader

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
