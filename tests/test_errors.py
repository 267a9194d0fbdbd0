"""Errors of the package keep their type and what they say on the way from another process."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchLoader

from fastdata import CachedDataset, DataLoader, ImageFolder, ImageManifest, errors
from fastdata.errors import SampleError, StoreGoneError, sample_error

ODD_PATH = "/data/a, b: 'c'\nsample 7, d.jpg"


def classes_of_errors() -> list[type[errors.FastDataError]]:
    found = [getattr(errors, name) for name in errors.__all__]
    return [
        each for each in found if issubclass(each, errors.FastDataError) and each is not SampleError
    ]


def raised_by_torch(error: Exception) -> Exception:
    """What torch's loader raises where a worker process has raised ``error``."""
    try:
        try:
            raise sample_error("/data/other.jpg", 8, ValueError("x"))
        except SampleError as cause:
            raise error from cause
    except Exception:  # noqa: BLE001  # whatever it is
        sent = pickle.dumps(ExceptionWrapper(where="in DataLoader worker process 0"))
    try:
        pickle.loads(sent).reraise()
    except Exception as came:  # noqa: BLE001
        return came
    raise AssertionError


@pytest.mark.parametrize("kind", classes_of_errors())
def test_every_error_keeps_its_type(kind: type[errors.FastDataError]) -> None:
    """An error of the package is of the same class after pickling, and as torch's loader raises it; so is its text."""
    error = kind("what was found")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is kind
        assert str(copied) == "what was found"
    came = raised_by_torch(error)
    assert type(came) is kind
    assert "what was found" in str(came)


SAMPLE_ERRORS = {
    "file": sample_error("/data/a.jpg", 3, OSError("cut off")),
    "no file": sample_error(None, 3, KeyError("x")),
    "odd path": sample_error(ODD_PATH, 3, OSError("cut off")),
    "of another dataset": sample_error(
        "/data/a.jpg", 3, sample_error("/data/b.jpg", 5, OSError("cut off"))
    ),
    "other words": SampleError("it is\nno image", index=3, path="/data/a.jpg"),
    "other words, no file": SampleError("it is no image", index=3),
}


@pytest.mark.parametrize("error", SAMPLE_ERRORS.values(), ids=SAMPLE_ERRORS.keys())
def test_a_sample_error_keeps_index_and_path(error: SampleError) -> None:
    """Index and path are the same after pickling, and as torch's loader raises it; its text names both."""
    came = raised_by_torch(error)
    for each in (
        error,
        pickle.loads(pickle.dumps(error)),
        copy.copy(error),
        came,
        pickle.loads(pickle.dumps(came)),
    ):
        assert isinstance(each, SampleError)
        assert (each.index, each.path) == (3, error.path)
        assert str(error) in str(each)
    assert str(error).startswith("sample 3 " if error.path is None else f"sample 3, {error.path}, ")


def test_a_sample_error_needs_an_index() -> None:
    """Words that name no sample are refused without ``index=``."""
    with pytest.raises(TypeError, match="needs index="):
        SampleError("it is no image")


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_a_file_that_is_no_image_is_named_once(image_folder: Any, storage: Any) -> None:
    """By its path, and not by a stream that it was read from."""
    root = image_folder()
    path = root / "cat" / "001.jpg"
    path.write_bytes(b"no image")
    with (
        ImageFolder(root, resize=(8, 8), storage=storage) as dataset,
        pytest.raises(SampleError) as caught,
    ):
        dataset[1]
    said = f"sample 1, {path}, cannot be read: UnidentifiedImageError: cannot identify image file. "
    assert str(caught.value).startswith(said)


MACHINE_ERRORS = [
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("can't allocate memory. Error code 12 (Cannot allocate memory)"),
    MemoryError("no room"),
]


@pytest.mark.parametrize("cause", MACHINE_ERRORS, ids=repr)
@pytest.mark.parametrize("prepare_workers", [1, 2])
def test_what_a_machine_lacks_is_no_fault_of_a_sample(
    image_folder: Any, cause: Exception, prepare_workers: int
) -> None:
    """No sample is left out for it, and no file is called damaged."""

    def load(path: str) -> Image.Image:
        if path.endswith("001.jpg"):
            raise copy.copy(cause)
        return Image.new("RGB", (8, 8))

    kind = MemoryError if isinstance(cause, MemoryError) else errors.IngestError
    with pytest.raises(kind) as caught:
        ImageFolder(
            image_folder(per_class=6),
            loader=load,
            on_error="skip",
            prepare_workers=prepare_workers,
        )
    assert "Delete or replace" not in str(caught.value)


@pytest.mark.parametrize("storage", ["shared", "none"])
@pytest.mark.parametrize("make_loader", [TorchLoader, DataLoader])
def test_a_damaged_file_is_named_by_worker_processes(
    image_folder: Any, make_loader: Any, storage: Any
) -> None:
    """A file that a worker process cannot read is a SampleError and an OSError with its index and path."""
    root = image_folder()
    path = root / "cat" / "001.jpg"
    path.write_bytes(path.read_bytes()[:100])
    with ImageFolder(root, lambda image: image.size, resize=(8, 8), storage=storage) as dataset:
        loader = make_loader(dataset, batch_size=2, num_workers=1, collate_fn=list)
        with pytest.raises(OSError, match="in DataLoader worker process 0") as caught:
            list(loader)
        assert isinstance(caught.value, SampleError)
        assert (caught.value.index, caught.value.path) == (1, str(path))


@pytest.mark.parametrize("make_loader", [TorchLoader, DataLoader])
def test_a_store_that_is_gone_is_told_by_a_spawned_worker(tmp_path: Path, make_loader: Any) -> None:
    """A spawned worker that finds the cache deleted lets the loop raise StoreGoneError, as a pickled dataset does."""
    data = [(torch.full((2, 3), i, dtype=torch.uint8), i) for i in range(4)]
    with CachedDataset(data, cache_dir=tmp_path / "cache", cache_key="k") as dataset:
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(StoreGoneError, match="was deleted or changed while it was in use"):
            pickle.loads(pickle.dumps(dataset))
        options: Any = {} if make_loader is TorchLoader else {"workers": "process"}
        loader = make_loader(
            dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn", **options
        )
        with pytest.raises(StoreGoneError, match="was deleted or changed while it was in use"):
            list(loader)


@pytest.mark.parametrize(
    "make",
    [
        ImageFolder,
        ImageManifest,
        CachedDataset.from_cache,
        lambda root: ImageManifest([("1.jpg", 0)], root=root, storage="shared").prepare(),
        lambda root: CachedDataset([(torch.zeros(1, 2, 2), 0)], cache_dir=root, cache_key="x"),
    ],
    ids=["folder", "manifest", "from_cache", "manifest root", "cache_dir"],
)
@pytest.mark.parametrize(
    "root", ["adl://bucket/train", Path("adl://bucket/train")], ids=["text", "path"]
)
def test_a_remote_root_needs_its_package(
    make: Callable[[object], object], root: str | Path
) -> None:
    """A URL, also one that ``Path`` has taken a slash from, is none of a missing folder, but of a missing package."""
    with pytest.raises(ImportError, match=r"adlfs"):
        make(root)


def test_a_folder_that_looks_like_a_url_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exists is a folder, whatever its name."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("s3:/bucket/cat")
    assert ImageFolder("s3://bucket", allow_empty=True).classes == ["cat"]
