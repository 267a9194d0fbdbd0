"""Datasets and caches in S3, over s3fs: the right samples, or an error that names the file."""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastdata import CachedDataset, ChunkedLoader, DataLoader, ImageFolder
from fastdata.errors import RemoteError, SampleError
from fastdata.sources.remote import Place
from s3 import FaultPlan, MotoS3, ThrottledS3

BROKEN_OFF = ("error", "slow_down", "reset", "cut", "short")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of 24 images, which the throttled server has as ``bucket/train``."""
    for index in range(24):
        path = tmp_path / f"s3/bucket/train/class{index % 3}/{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 30, 3), 10 * index, np.uint8)).save(path)
    return tmp_path / "s3/bucket/train"


def targets_of(loader: Any, colours: list[int]) -> list[int]:
    """Return targets in the loader's order, after checking that every image has a colour of its class."""
    found = []
    for images, targets in loader:
        for image, target in zip(images, targets.tolist(), strict=True):
            assert colours.index(int(image.flatten()[0])) // 8 == target
            assert image.float().std() == 0
            found.append(target)
    return found


def tensor_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy())


def colours_of(dataset: ImageFolder) -> list[int]:
    return [10 * int(Path(path).stem) for path, _ in dataset.samples]


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("options", [{"storage": "none"}, {}, {"resize": (8, 8)}], ids=str)
def test_a_folder_in_s3_through_faults(
    throttled: ThrottledS3, folder: Path, options: dict[str, Any], workers: Any
) -> None:
    """Every sample is right, although a third of the requests fail, break off or return too little."""
    throttled.set_faults(FaultPlan(rate=0.3, kinds=BROKEN_OFF, attempts=3))
    dataset = ImageFolder(
        "s3://bucket/train",
        tensor_of,
        storage_options=throttled.storage_options,
        **options,
    )
    with dataset:
        loader = DataLoader(dataset, 8, num_workers=2, workers=workers)
        for _ in range(2):
            assert targets_of(loader, colours_of(dataset)) == list(dataset.targets)
    assert sum(throttled.stats().faults.values()) > 0
    assert folder.is_dir()


@pytest.mark.parametrize("kinds", [BROKEN_OFF, ("corrupted",)], ids=str)
def test_a_cache_in_s3_through_faults(
    throttled: ThrottledS3, folder: Path, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """Every sample of a streamed cache is right, although the first answer for each block is not."""
    with ImageFolder(folder, resize=(300, 300), cache_dir=tmp_path / "built") as dataset:
        colours, targets = colours_of(dataset), sorted(dataset.targets)
    (home,) = (path.parent for path in (tmp_path / "built").glob("*/fastdata.npz"))
    shutil.copytree(home, tmp_path / "s3/bucket/cache")
    throttled.set_faults(FaultPlan(rate=1, kinds=kinds, attempts=1, within="part0"))
    options: dict[str, Any] = {
        "storage_options": throttled.storage_options,
        "local_cache": tmp_path / "local",
    }
    with (
        CachedDataset.from_cache("s3://bucket/cache", as_tensors=True, **options) as cached,
        ChunkedLoader(cached, 4, chunk_samples=8, memory_limit="3GiB") as loader,
    ):
        for _ in range(2):
            assert sorted(targets_of(loader, colours)) == targets
    assert sum(throttled.stats().faults.values()) > 0


def test_credentials_that_are_not_valid_any_more(throttled: ThrottledS3, folder: Path) -> None:
    """An expired token is an error at once, with the file and the cure, and without a secret."""
    dataset = ImageFolder(
        "s3://bucket/train", storage="none", storage_options=throttled.storage_options
    )
    throttled.set_faults(FaultPlan(rate=1, kinds=("expired",)))
    with pytest.raises(
        RemoteError, match=r"s3://bucket/train/class0/0\.png: PermissionError.*Give valid cred"
    ) as raised:
        dataset[0]
    assert throttled.storage_options["secret"] not in str(raised.value)
    assert folder.is_dir()


def test_a_server_that_is_silent(
    throttled: ThrottledS3, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without an answer are given up, and the file is named."""
    monkeypatch.setattr("fastdata.sources.remote.ATTEMPT_S", 0.3)
    place = Place("s3://bucket/train", throttled.storage_options)
    assert len(place.find().result()) == 24
    throttled.set_faults(FaultPlan(rate=1, kinds=("stall",)))
    with pytest.raises(RemoteError, match=r"class0/0\.png: .*no answer in time \(tried twice\)"):
        place.read("class0/0.png")
    assert folder.is_dir()


def test_files_are_written_to_s3(s3: MotoS3, tmp_path: Path) -> None:
    """Files that are written and uploaded can be found, replaced and removed."""
    s3.make_bucket("bucket")
    place = Place("s3://bucket/folder", s3.storage_options)
    (tmp_path / "large").write_bytes(bytes(6 << 20))
    place.upload("large", tmp_path / "large")
    place.write("small", b"bytes")
    place.write("small", b"other")
    assert [(name, size) for name, (size, _) in place.find().result().items()] == [
        ("large", 6 << 20),
        ("small", 5),
    ]
    assert place.submit("small", 1, 3).result() == b"th"
    for name in ("small", "large", "none"):
        place.remove(name)
    assert place.find().result() == {}


def test_a_missing_bucket(s3: MotoS3, tmp_path: Path) -> None:
    """A folder or a cache in a bucket that does not exist is a missing file."""
    options = {"storage_options": s3.storage_options}
    with pytest.raises(FileNotFoundError, match=r"s3://none/train"):
        ImageFolder("s3://none/train", **options)
    with pytest.raises(FileNotFoundError, match=r"s3://none/cache is not a cache"):
        CachedDataset.from_cache("s3://none/cache", local_cache=tmp_path, **options)


def colours_in(dataset: Any) -> list[int]:
    return [int(np.asarray(dataset[index][0])[0, 0, 0]) for index in range(len(dataset))]


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_a_cache_is_built_in_s3(s3: MotoS3, tmp_path: Path, folder: Path, engine: Any) -> None:
    """Files in S3 become a cache in S3; the next run finds it, and prepares a changed file again."""
    s3.make_bucket("bucket")
    s3.upload_folder("bucket", "train", folder)
    options: dict[str, Any] = {
        "cache_dir": "s3://bucket/caches",
        "storage_options": s3.storage_options,
    }
    options |= {
        "local_cache": tmp_path / "local",
        "resize": (8, 8),
    }
    with contextlib.ExitStack() as cleanup:
        if engine == "processes":
            engine = cleanup.enter_context(ProcessPoolExecutor(2, get_context("spawn")))
        writing = {"engine": engine, "shard_bytes": 192 * 4}
        with ImageFolder.build_cache("s3://bucket/train", **writing, **options) as dataset:
            colours, targets = colours_of(dataset), list(dataset.targets)
            assert colours_in(dataset) == colours
    place = Place("s3://bucket/caches", s3.storage_options)
    built = place.find().result()
    parts = [name for name in built if "part0" in name]
    assert len(parts) > 3
    assert len([name for name in built if "shard" in name]) == len(parts)
    assert s3.storage_options["secret"].encode() not in b"".join(map(place.read, built))
    with ImageFolder("s3://bucket/train", **options) as dataset:
        assert colours_in(dataset) == colours
    assert place.find().result() == built
    streamed = {name: options[name] for name in ("storage_options", "local_cache")}
    with (
        CachedDataset.from_cache("s3://bucket/caches", as_tensors=True, **streamed) as cached,
        ChunkedLoader(cached, 4, memory_limit="3GiB") as loader,
    ):
        assert sorted(targets_of(loader, colours)) == targets
    s3.put("bucket", "train/class0/0.png", (folder / "class1/1.png").read_bytes())
    with ImageFolder("s3://bucket/train", **options) as dataset:
        assert colours_in(dataset) == [10, *colours[1:]]


def test_a_build_in_s3_continues(s3: MotoS3, tmp_path: Path, folder: Path) -> None:
    """A build that a damaged file ended leaves no cache, but its shards, which the next build uses."""
    s3.make_bucket("bucket")
    options: dict[str, Any] = {
        "cache_dir": "s3://bucket/caches",
        "storage_options": s3.storage_options,
    }
    options |= {
        "local_cache": tmp_path / "local",
        "resize": (8, 8),
        "shard_bytes": 192 * 4,
    }
    whole = (folder / "class2/23.png").read_bytes()
    (folder / "class2/23.png").write_bytes(b"no image")
    place = Place("s3://bucket/caches", s3.storage_options)
    with pytest.raises(SampleError, match=r"class2/23\.png"):
        ImageFolder.build_cache(folder, prepare_workers=1, **options)
    left = place.find().result()
    assert left
    assert not [name for name in left if name.endswith("fastdata.npz")]
    with pytest.raises(SampleError, match=r"class2/23\.png"):
        ImageFolder.build_cache(folder, prepare_workers=1, **options)
    assert place.find().result() == left
    (folder / "class2/23.png").write_bytes(whole)
    with ImageFolder.build_cache(folder, **options) as dataset:
        assert colours_in(dataset) == colours_of(dataset)
    assert [name for name in place.find().result() if name.endswith("fastdata.npz")]
