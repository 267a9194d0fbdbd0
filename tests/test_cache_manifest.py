"""Manifests of caches that anybody may have written, with checksums that match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdata import CachedDataset, ImageFolder
from fastdata.errors import CacheError
from fastdata.pixels.samples import SampleSpec
from fastdata.sources.remote import Place
from fastdata.stores.cache import INDEX, Cache
from fastdata.stores.writer import StoredPart

Folder = Callable[..., Path]
WRONG = [
    (["version"], 6),
    (["version"], None),
    (["classes"], []),
    (["key"], "source"),
    (["root"], None),
    (["parts", 0], []),
    (["parts", 0, "codec"], 0),
    (["parts", 0, "spec", "dtype"], ["u1"]),
    (["parts", 0, "spec", "form"], "jpg"),
    (["layout", "is_tuple"], "yes"),
    (["layout", "target_is_part"], True),
    (["layout", "keys"], {"names": ["image", "label"], "image": "pixels"}),
    (["layout", "keys"], {"names": ["image", "image"], "image": "image"}),
]
WRONG_SHARDS = {
    "shards.names": [[b"../0123456789abc"], [b"0123456789abcdef"] * 2, []],
    "shards.rows": [[-6], [1 << 62], [5], []],
    "shards.bytes": [[[-1]], [[0]], [[1, 2]], [0]],
}


def rewrite(home: Path, column: str, value: Any) -> None:
    columns = Cache.read(Place(home)).columns
    index = Cache.read(Place(home))
    columns["manifest.json"] = dataclasses.asdict(index.manifest)
    columns[column] = value
    (home / INDEX).write_bytes(dataclasses.replace(index, columns=columns).pack())


def images(root: Path, **options: Any) -> np.ndarray:
    options = {"cache_dir": root.parent / "cache", "resize": (7, 9)} | options
    with ImageFolder(root, **options) as dataset:
        return np.stack([np.asarray(image) for image, _ in dataset])


@pytest.mark.parametrize(("place", "value"), WRONG, ids=lambda it: str(it)[:30])
def test_a_manifest_of_other_kinds_of_values_is_a_rebuild(
    image_folder: Folder, caplog: pytest.LogCaptureFixture, place: list[Any], value: Any
) -> None:
    """Values of wrong types are a CacheError, and the next run has the samples of a first run."""
    root = image_folder(size=(13, 11))
    wanted = images(root)
    home = next((root.parent / "cache").glob(f"*/{INDEX}")).parent
    document = dataclasses.asdict(Cache.read(Place(home)).manifest)
    entry: Any = document
    for step in place[:-1]:
        entry[step] = list(entry[step]) if isinstance(entry[step], tuple) else entry[step]
        entry = entry[step]
    entry[place[-1]] = value
    rewrite(home, "manifest.json", document)
    with pytest.raises(CacheError, match="cannot be read: "):
        Cache.read(Place(home))
    assert np.array_equal(images(root), wanted)
    assert "the cache is written again" in caplog.text


@pytest.mark.parametrize(
    ("column", "value"), [(name, value) for name in WRONG_SHARDS for value in WRONG_SHARDS[name]]
)
def test_shards_that_cannot_be_are_a_rebuild(
    image_folder: Folder, caplog: pytest.LogCaptureFixture, column: str, value: Any
) -> None:
    """Names, sample counts and sizes of shards are compared with each other and with the samples."""
    root = image_folder(size=(13, 11))
    wanted = images(root)
    home = next((root.parent / "cache").glob(f"*/{INDEX}")).parent
    rewrite(home, column, np.array(value, "S16" if column == "shards.names" else np.int64))
    with pytest.raises(CacheError, match="cannot be read: "):
        Cache.read(Place(home))
    assert np.array_equal(images(root), wanted)
    assert "the cache is written again" in caplog.text


def test_a_shape_that_no_sample_has_is_a_rebuild(
    image_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """No memory is reserved for encoded samples of 288 GiB that a manifest claims."""
    root = image_folder(size=(13, 11))
    wanted = images(root, codec="zstd")
    home = next((root.parent / "cache").glob(f"*/{INDEX}")).parent
    document = dataclasses.asdict(Cache.read(Place(home)).manifest)
    document["parts"][0]["spec"]["shape"] = [3, 7, 1 << 40]
    rewrite(home, "manifest.json", document)
    assert np.array_equal(images(root, codec="zstd"), wanted)
    assert "has an impossible offset, size or shape" in caplog.text


def test_shapes_of_fewer_dimensions_are_not_believed(tmp_path: Path) -> None:
    """For samples that are cubes, a shape with one side is refused, although it determines the others."""
    items = [(np.zeros((3, 3, 3), np.uint8), 0)] * 5
    CachedDataset(items, cache_dir=tmp_path, cache_key="k", codec="zstd").close()
    home = next(tmp_path.glob(f"*/{INDEX}")).parent
    cache = Cache.read(Place(home))
    document = dataclasses.asdict(cache.manifest)
    document["parts"][0]["dimensions"] = 1
    cache.columns["part0.shapes"] = cache.columns["part0.shapes"][:, :1]
    cache.columns["manifest.json"] = document
    (home / INDEX).write_bytes(cache.pack())
    with pytest.raises(CacheError, match=r"part0.shapes are int32\[5, 1\]"):
        Cache.read(Place(home))


def test_a_flipped_bit_of_an_index_is_damage_or_means_nothing(image_folder: Folder) -> None:
    """A flipped bit anywhere, also in the zip's directory, gives the same samples or a CacheError."""
    root = image_folder(size=(13, 11))
    wanted = images(root)
    path = next((root.parent / "cache").glob(f"*/{INDEX}"))
    whole = path.read_bytes()
    refused = 0
    for k in [*range(0, len(whole), 97), *range(len(whole) - 400, len(whole), 3)]:
        path.write_bytes(whole[:k] + bytes([whole[k] ^ 1 << k % 8]) + whole[k + 1 :])
        try:
            with CachedDataset.from_cache(path.parent) as dataset:
                assert all(map(np.array_equal, (image for image, _ in dataset), wanted))
        except CacheError:
            refused += 1
    assert refused > 20


def test_a_column_that_hides_its_end_is_damage(tmp_path: Path) -> None:
    """A flipped bit that makes 8 labels look like none is found by the checksum of the whole column."""
    items = [(np.zeros((2, 3), np.uint8), np.arange(8)) for _ in range(600)]
    CachedDataset(items, cache_dir=tmp_path, cache_key="k").close()
    path = next(tmp_path.glob(f"*/{INDEX}"))
    whole = path.read_bytes()
    assert whole.count(b"(600, 8)") == 1
    path.write_bytes(whole.replace(b"(600, 8)", b"(600, 0)"))
    with pytest.raises(CacheError, match="its columns are longer than their headers state"):
        CachedDataset.from_cache(path.parent)


@pytest.mark.parametrize("dtype", ["str", "bytes", "void", "object"])
def test_elements_without_bytes_are_no_samples(dtype: str) -> None:
    """A dtype of 0 bytes is refused, because its sizes would match any shape."""
    spec = SampleSpec(shape=None, dtype=dtype, form="array")
    with pytest.raises(ValueError, match="cannot be stored"):
        StoredPart(spec=spec, dimensions=3, codec={"name": "zstd"})
