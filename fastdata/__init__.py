"""Feed the GPU from an image folder: prepare images once, keep them in shared memory, serve whole batches.

Swap two imports and keep the script::

    from fastdata import DataLoader, ImageFolder     # were torch.utils.data's and torchvision.datasets'
"""

from fastdata.batch import SampleBatch, collate
from fastdata.cached import CachedDataset
from fastdata.chunked import ChunkedLoader
from fastdata.errors import (
    CacheError,
    CodecError,
    DeviceError,
    FastDataError,
    FastDataWarning,
    IngestError,
    MemoryBudgetError,
    SampleError,
    StoreGoneError,
)
from fastdata.folder import ImageFolder, ImageManifest
from fastdata.loader import DataLoader
from fastdata.prefetch import CudaPrefetcher, DevicePrefetcher
from fastdata.transforms import TransformPlan, plan_transform
from fastdata.transport import RingCollate

__all__ = [
    "CacheError",
    "CachedDataset",
    "ChunkedLoader",
    "CodecError",
    "CudaPrefetcher",
    "DataLoader",
    "DeviceError",
    "DevicePrefetcher",
    "FastDataError",
    "FastDataWarning",
    "ImageFolder",
    "ImageManifest",
    "IngestError",
    "MemoryBudgetError",
    "RingCollate",
    "SampleBatch",
    "SampleError",
    "StoreGoneError",
    "TransformPlan",
    "collate",
    "plan_transform",
]
