"""Datasets that read through open files, prepared by several processes."""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastdata import CachedDataset, FastDataWarning, ImageFolder
from fastdata.errors import IngestError

PARENT = os.getpid()
SHAPE = (5, 6, 3)
BYTES = int(np.prod(SHAPE))
PIXELS = np.random.default_rng(0).integers(0, 256, (80, *SHAPE), np.uint8)

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux forks workers")


class Items:
    """Items that ``read(index)`` returns."""

    def __init__(self, read: Callable[[int], np.ndarray]) -> None:
        self.read = read

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.read(index), index


def is_right(dataset: Any) -> bool:
    """Return True if each sample is the one of its index."""
    return all(np.array_equal(image, PIXELS[index]) for index, (image, _) in enumerate(dataset))


def flat(path: Path) -> Callable[[int], np.ndarray]:
    PIXELS.tofile(path)
    return reader_of(open(path, "rb"))


def unbuffered(path: Path) -> Callable[[int], np.ndarray]:
    PIXELS.tofile(path)
    return reader_of(open(path, "rb", buffering=0))


def nameless(_: Path) -> Callable[[int], np.ndarray]:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(PIXELS.tobytes())
    file.flush()
    return reader_of(file)


def opened_by_the_first_read(path: Path) -> Callable[[int], np.ndarray]:
    PIXELS.tofile(path)
    opened: list[Any] = []

    def read(index: int) -> np.ndarray:
        if not opened:
            opened.append(open(path, "rb"))  # noqa: SIM115
        return reader_of(opened[0])(index)

    return read


def reader_of(file: Any) -> Callable[[int], np.ndarray]:
    def read(index: int) -> np.ndarray:
        file.seek(index * BYTES)
        return np.frombuffer(file.read(BYTES), np.uint8).reshape(SHAPE)

    return read


def zipped(path: Path) -> Callable[[int], np.ndarray]:
    with zipfile.ZipFile(path, "w") as archive:
        for index, pixels in enumerate(PIXELS):
            archive.writestr(str(index), pixels.tobytes())
    archive = zipfile.ZipFile(path)
    return lambda index: np.frombuffer(archive.read(str(index)), np.uint8).reshape(SHAPE)


def tarred(path: Path) -> Callable[[int], np.ndarray]:
    with tarfile.open(path, "w") as archive:
        for index, pixels in enumerate(PIXELS):
            member = tarfile.TarInfo(str(index))
            member.size = BYTES
            archive.addfile(member, io.BytesIO(pixels.tobytes()))
    archive = tarfile.open(path)  # noqa: SIM115

    def read(index: int) -> np.ndarray:
        member: Any = archive.extractfile(str(index))
        return np.frombuffer(member.read(), np.uint8).reshape(SHAPE)

    return read


def arrays(path: Path) -> Callable[[int], np.ndarray]:
    np.savez(path.with_suffix(".npz"), *PIXELS)
    archive = np.load(path.with_suffix(".npz"))
    return lambda index: archive[f"arr_{index}"]


def pages(path: Path) -> Callable[[int], np.ndarray]:
    first, *others = map(Image.fromarray, PIXELS)
    first.save(path, "TIFF", save_all=True, append_images=others)
    image = Image.open(path)

    def read(index: int) -> np.ndarray:
        image.seek(index)
        return np.array(image)

    return read


@pytest.mark.parametrize(
    "make", [flat, unbuffered, nameless, opened_by_the_first_read, zipped, tarred, arrays, pages]
)
@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dataset_that_holds_an_open_file_gives_its_own_samples(
    tmp_path: Path, make: Any, is_on_disk: bool
) -> None:
    """Three processes store the samples of one process, whatever reads through the file."""
    options: Any = {"cache_dir": tmp_path / "cache", "cache_key": "1"} if is_on_disk else {}
    with CachedDataset(Items(make(tmp_path / "file")), prepare_workers=3, **options) as dataset:
        assert is_right(dataset)


def test_a_loader_that_holds_an_open_file_gives_its_own_samples(tmp_path: Path) -> None:
    """A folder's ``loader=`` with an open file, held anywhere, gives the samples of one process."""
    for index in range(len(PIXELS)):
        path = tmp_path / "images" / "a" / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with open(tmp_path / "file", "w+b") as file:
        PIXELS.tofile(file)
        read = reader_of(file)

        def load(path: str) -> Image.Image:
            return Image.fromarray(read(int(Path(path).stem)))

        with ImageFolder(tmp_path / "images", loader=load, prepare_workers=3) as dataset:
            assert is_right(dataset.prepare())


def test_processes_that_read_at_the_same_time_have_their_own_positions(tmp_path: Path) -> None:
    """Two processes seek before either reads, and each reads at its own position."""
    PIXELS.tofile(tmp_path / "flat")
    context = multiprocessing.get_context("fork")
    has_sought = {3: context.Event(), 20: context.Event()}  # samples of two tasks
    with open(tmp_path / "flat", "rb", buffering=0) as file:

        def read(index: int) -> np.ndarray:
            file.seek(index * BYTES)
            if os.getpid() != PARENT and index in has_sought:
                has_sought[index].set()
                assert has_sought[23 - index].wait(60)
            return np.frombuffer(file.read(BYTES), np.uint8).reshape(SHAPE)

        with CachedDataset(Items(read), prepare_workers=2) as dataset:
            assert is_right(dataset)


def test_processes_write_to_one_log(tmp_path: Path) -> None:
    """A file that is only written keeps one position: no process overwrites another's lines."""
    with open(tmp_path / "log", "wb", buffering=0) as log:

        def read(index: int) -> np.ndarray:
            log.write(b"%d\n" % index)
            return PIXELS[index]

        with CachedDataset(Items(read), prepare_workers=2) as dataset:
            assert is_right(dataset)
    lines = (tmp_path / "log").read_text().splitlines()
    assert {int(line) for line in lines} == set(range(len(PIXELS)))
    assert len(lines) > len(PIXELS)


def test_a_file_that_cannot_be_opened_again_is_read_by_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is forked that would share its position; one line names the file and the cure."""
    monkeypatch.setattr(os, "access", lambda path, *_, **__: "flat" not in os.readlink(path))
    makers = set()
    with open(tmp_path / "flat", "w+b") as file:
        PIXELS.tofile(file)
        read = reader_of(file)

        def noted(index: int) -> np.ndarray:
            makers.add(os.getpid())
            return read(index)

        named = r"one after the other in this process.*/flat is open, but .* Close it"
        with (
            pytest.warns(FastDataWarning, match=named),
            CachedDataset(Items(noted), prepare_workers=2) as dataset,
        ):
            assert is_right(dataset)
    assert makers == {PARENT}


def test_an_lmdb_environment_with_locks_is_read_by_this_process(tmp_path: Path) -> None:
    """No process is forked while the lock file of an LMDB environment is open."""
    makers = set()

    def noted(index: int) -> np.ndarray:
        makers.add(os.getpid())
        return PIXELS[index]

    named = r"in this process.* LMDB environment is open \(.*/lock\.mdb\), .* with lock=False"
    with open(tmp_path / "lock.mdb", "w+b"), pytest.warns(FastDataWarning, match=named):
        CachedDataset(Items(noted), prepare_workers=2).close()
    assert makers == {PARENT}
    with open(tmp_path / "data-lock", "w+b"):
        # Of another kind, and no warning, unless LMDB's file is open as well.
        CachedDataset(Items(noted), prepare_workers=2).close()
        named = named.replace("/lock\\.mdb", "/data-lock")
        with open(tmp_path / "data", "w+b"), pytest.warns(FastDataWarning, match=named):
            CachedDataset(Items(noted), prepare_workers=2).close()


def test_a_worker_that_cannot_open_a_file_again_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises an error instead of reading from a shared position."""
    opens = os.open

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if os.getpid() != PARENT and str(path).startswith("/proc/self/fd/"):
            raise OSError(24, "Too many open files")
        return opens(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fail)
    with open(tmp_path / "flat", "w+b") as file:
        PIXELS.tofile(file)
        items = Items(reader_of(file))
        with pytest.raises(IngestError, match=r"Too many open files.* Use prepare_workers=1"):
            CachedDataset(items, prepare_workers=2)
