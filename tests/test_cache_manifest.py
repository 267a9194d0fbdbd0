"""Manifests that somebody else wrote, with a checksum that fits them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdata import ImageFolder
from fastdata.errors import CacheError
from fastdata.sources.remote import Place
from fastdata.stores.cache import MANIFEST, Manifest

Folder = Callable[..., Path]
WRONG = [
    (["index_crc32"], "0"),
    (["classes"], []),
    (["key"], "source"),
    (["root"], None),
    (["parts", 0], []),
    (["parts", 0, "codec"], 0),
    (["parts", 0, "spec", "dtype"], ["u1"]),
    (["shards", 0], -1),
    (["shards", 0, "rows"], float("nan")),
    (["shards", 0, "sizes"], []),
    (["shards", 0, "name"], "../0123456789ab"),
    (["is_tuple"], "yes"),
    (["target_is_part"], True),
    (["keys"], {"names": ["image", "label"], "image": "pixels"}),
    (["keys"], {"names": ["image", "image"], "image": "image"}),
    (["skipped"], "none"),
    (["skipped"], [{"index": "0"}]),
]


@pytest.mark.parametrize(("place", "value"), WRONG, ids=lambda it: str(it)[:30])
def test_a_manifest_of_other_kinds_of_values_is_a_rebuild(
    image_folder: Folder, caplog: pytest.LogCaptureFixture, place: list[Any], value: Any
) -> None:
    """Whatever stands where, reading it is a CacheError, and the next run serves what a first one does."""
    root = image_folder(size=(13, 11))

    def images() -> np.ndarray:
        with ImageFolder(root, cache_dir=root.parent / "cache", resize=(7, 9)) as dataset:
            return np.stack([np.asarray(image) for image, _ in dataset])

    wanted = images()
    path = next((root.parent / "cache").glob(f"*/{MANIFEST}"))
    document = json.loads(path.read_text())
    del document["crc32"]
    entry = document
    for step in place[:-1]:
        entry = entry[step]
    entry[place[-1]] = value
    document["crc32"] = zlib.crc32(json.dumps(document, sort_keys=True).encode())
    path.write_text(json.dumps(document))
    with pytest.raises(CacheError, match="cannot be read: "):
        Manifest.read(Place(path.parent))
    assert np.array_equal(images(), wanted)
    assert "the cache is written anew" in caplog.text


def test_a_shape_that_no_sample_has_is_a_rebuild(
    image_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """Encoded samples of 288 GiB, as a manifest may have it, are not believed: no memory is taken for them."""
    root = image_folder(size=(13, 11))
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "resize": (7, 9),
        "codec": "zstd",
    }
    ImageFolder(root, **options).close()
    path = next((root.parent / "cache").glob(f"*/{MANIFEST}"))
    document = json.loads(path.read_text())
    del document["crc32"]
    document["parts"][0]["spec"]["shape"] = [3, 7, 1 << 40]
    document["crc32"] = zlib.crc32(json.dumps(document, sort_keys=True).encode())
    path.write_text(json.dumps(document))
    with ImageFolder(root, **options) as dataset:
        assert dataset[0][0].size == (9, 7)
    assert "samples have other shapes than" in caplog.text
