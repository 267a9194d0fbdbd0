"""Datasets and caches in Google Cloud Storage, by gcsfs: they work as in S3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import gcsfs
import numpy as np
import pytest
import torch
from gcp_storage_emulator.server import create_server
from PIL import Image

from fastdata import CachedDataset, DataLoader, ImageFolder, ImageManifest
from fastdata.errors import SampleError


@pytest.fixture
def options() -> Iterator[dict[str, Any]]:
    """Return the options for a server with an empty bucket."""
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    with redirect_stderr(StringIO()):  # it tells of connections that were closed
        server.start()
        port = server._api._httpd.server_address[1]
        yield {"token": "anon", "endpoint_url": f"http://127.0.0.1:{port}"}
        server.stop()
    gcsfs.GCSFileSystem.clear_instance_cache()


def tensor_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy())


def test_folder_manifest_and_cache(options: dict[str, Any], tmp_path: Path) -> None:
    """Images and caches of a bucket equal those of a local folder; a missing file is named."""
    files, rows = gcsfs.GCSFileSystem(**options), ["file,label"]
    for index in range(12):
        path = tmp_path / f"train/class{index % 3}/{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 30, 3), 10 * index, np.uint8)).save(path)
        files.put(str(path), f"bucket/train/{path.parent.name}/{path.name}")
        rows.append(f"train/{path.parent.name}/{path.name},{path.parent.name}")
    files.pipe("bucket/train.csv", "\n".join(rows).encode())

    def seen(dataset: Any) -> list[tuple[list[int], int]]:
        with dataset:
            batches = DataLoader(dataset, 4, num_workers=2)
            return sorted(
                (image.flatten()[:2].tolist(), int(target))
                for images, targets in batches
                for image, target in zip(images, targets, strict=True)
            )

    local = seen(ImageFolder(tmp_path / "train", tensor_of))
    there: dict[str, Any] = {"storage_options": options}
    assert seen(ImageFolder("gs://bucket/train", tensor_of, **there)) == local
    assert seen(ImageManifest("gs://bucket/train.csv", transform=tensor_of, **there)) == local
    cached = {**there, "cache_dir": "gs://bucket/caches", "local_cache": tmp_path / "mirror"}
    assert seen(ImageFolder("gs://bucket/train", tensor_of, **cached)) == local
    opened = CachedDataset.from_cache(
        "gs://bucket/caches",
        transform=tensor_of,
        storage_options=options,
        local_cache=tmp_path / "other",
    )
    assert seen(opened) == local
    with ImageFolder("gs://bucket/train", tensor_of, storage="none", **there) as dataset:
        files.rm(f"bucket/train/{'/'.join(Path(dataset.samples[5][0]).parts[-2:])}")
        with pytest.raises(
            SampleError, match=r"sample 5, gs://bucket/train/class1/04.png, .* does not exist"
        ):
            dataset[5]
