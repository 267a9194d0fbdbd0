"""Feed the GPU from an image folder: prepare images once, keep them in shared memory, serve whole batches.

Swap two imports and keep the script::

    from fastdata import DataLoader, ImageFolder     # were torch.utils.data's and torchvision.datasets'
"""

from typing import TYPE_CHECKING, Any

from fastdata.batch import SampleBatch, collate
from fastdata.chunked import ChunkedLoader
from fastdata.dataset import CachedDataset
from fastdata.errors import FastDataError, FastDataWarning
from fastdata.folder import ImageFolder, ImageManifest
from fastdata.loader import DataLoader
from fastdata.prefetch import CudaPrefetcher
from fastdata.ring import RingCollate
from fastdata.transforms import Views, plan_transform

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
    "Views",
    "collate",
    "plan_transform",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> Any:
        if name != "__version__":
            raise AttributeError(f"module 'fastdata' has no attribute {name!r}")
        from importlib.metadata import version  # reads files, which an import must not wait for

        return version("fastdata")
