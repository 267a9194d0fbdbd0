"""Feed the GPU from an image folder: prepare images once, keep them in memory, serve batches.

Swap two imports and keep the script::

    from fastdata import DataLoader, ImageFolder
"""

from typing import TYPE_CHECKING, Any

from fastdata.datasets.batch import collate
from fastdata.datasets.cached import CachedDataset
from fastdata.datasets.folder import ImageFolder
from fastdata.datasets.image_manifest import ImageManifest
from fastdata.datasets.transport import RingCollate
from fastdata.errors import FastDataError, FastDataWarning
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.prefetch import CudaPrefetcher
from fastdata.pixels.own_transforms import AlternatingFlip, Views
from fastdata.pixels.split import plan_transform

__all__ = [
    "AlternatingFlip",
    "CachedDataset",
    "ChunkedLoader",
    "CudaPrefetcher",
    "DataLoader",
    "FastDataError",
    "FastDataWarning",
    "ImageFolder",
    "ImageManifest",
    "RingCollate",
    "Views",
    "collate",
    "diagnose",
    "plan_transform",
    "tune",
]

if TYPE_CHECKING:
    from fastdata.datasets.batch import SampleBatch as SampleBatch
    from fastdata.loaders.chunked import ChunkedLoader
    from fastdata.tools.diagnose import diagnose
    from fastdata.tools.tune import tune

    __version__: str
else:
    _LATER = {
        "ChunkedLoader": "loaders.chunked",
        "SampleBatch": "datasets.batch",
        "diagnose": "tools.diagnose",
        "tune": "tools.tune",
    }

    def __getattr__(name: str) -> Any:
        """Import a name that few scripts need when it is first used (PEP 562)."""
        if name in _LATER:
            from importlib import import_module

            return getattr(import_module(f"fastdata.{_LATER[name]}"), name)
        if name == "__version__":
            from importlib.metadata import version  # reads files

            return version("fastdata")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
