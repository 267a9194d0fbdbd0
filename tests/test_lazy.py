"""Stores that are filled by their readers."""

from __future__ import annotations

import contextlib
import copy
import errno
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import transforms as v1

from children import Compose, PILToTensor
from conftest import shown
from fastdata import DataLoader, FastDataError, ImageFolder, ImageManifest
from fastdata.errors import IngestError, MemoryBudgetError, SampleError
from fastdata.machine.blocks import Block
from fastdata.pixels.resize import Resize
from leftovers import open_descriptors

FORK = multiprocessing.get_context("fork")
Folder = Callable[..., Path]
STEPS = v1.Compose([v1.Resize((6, 8)), v1.RandomCrop(5), v1.ToTensor()])
RESIZED = v1.Compose([v1.Resize((6, 8)), v1.PILToTensor()])


class Pending:
    """The file of a sample: opening it waits until the test provides it."""

    def __init__(self, dataset: ImageFolder, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = dataset.samples[index][0]
        self.gate = Path(f"{self.path}.gate")
        os.mkfifo(self.gate)
        self.open_file = os.open
        monkeypatch.setattr(os, "open", self.open)

    def open(self, path: Any, *how: Any, **options: Any) -> int:
        if path == self.path:
            with contextlib.suppress(FileNotFoundError):
                self.gate.read_bytes()
        return self.open_file(path, *how, **options)

    def wait(self) -> int:
        """Return the descriptor to write to, once another process has opened the file."""
        while True:
            try:
                return self.open_file(self.gate, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.01)

    def give(self, fd: int) -> None:
        """Let every process that opens the file read it."""
        self.gate.unlink()
        os.close(fd)


def _pixels(root: Path) -> list[torch.Tensor]:
    with ImageFolder(root, RESIZED, storage="none") as dataset:
        return [image for image, _ in dataset]


def test_each_sample_is_prepared_once_on_its_first_read(image_folder: Folder) -> None:
    """Reads in any order and number prepare each sample once, and return the content of the files."""
    root = image_folder(per_class=6)
    wanted = _pixels(root)
    with ImageFolder(root, RESIZED) as dataset:
        assert dataset.filled_share() == 0
        for index in np.random.default_rng(0).permutation(12).tolist():
            assert torch.equal(dataset[index][0], wanted[index])
            os.unlink(dataset.samples[index][0])
        assert dataset.filled_share() == 1
        assert all(map(torch.equal, wanted, [image for image, _ in dataset]))


def test_two_readers_that_race_prepare_a_sample_once(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that found a sample missing, and waited for another reader, reads the other's sample."""
    root = image_folder()
    wanted = _pixels(root)
    plain = Block.hold
    with ImageFolder(root, RESIZED) as dataset:

        def come_second(block: Block, *places: int) -> Any:
            monkeypatch.undo()
            assert torch.equal(dataset[2][0], wanted[2])  # by the other reader, who is first
            os.unlink(dataset.samples[2][0])
            return plain(block, *places)

        monkeypatch.setattr(Block, "hold", come_second)
        assert torch.equal(dataset[2][0], wanted[2])
        assert Block.hold is plain


def test_two_first_readers_that_race_prepare_a_dataset_once(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a transform the first read prepares all; a second reader waits and prepares nothing."""
    opened = []

    def load(path: str) -> Image.Image:
        opened.append(path)
        return Image.open(path).convert("RGB")

    class Second:
        """The lock of the first read, for the second reader."""

        def __enter__(self) -> None:
            monkeypatch.undo()
            assert dataset[0][0].size == (12, 10)

        def __exit__(self, *_: object) -> None:
            pass

    options: dict[str, Any] = {"loader": load, "prepare_workers": 0}
    root = image_folder()
    with ImageFolder(root, **options) as alone:
        alone[0]
    wanted = sorted(opened)
    opened.clear()
    with ImageFolder(root, **options) as dataset:
        samples: Any = dataset._fastdata
        monkeypatch.setattr(samples, "_lock", Second())
        assert dataset[1][0].size == (12, 10)
        assert not isinstance(samples._lock, Second)
        assert sorted(opened) == wanted


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_workers_share_what_each_has_prepared(image_folder: Folder, workers: Any) -> None:
    """After an epoch with two workers no file is needed any more, and every batch is right."""
    root = image_folder(per_class=6)
    wanted = torch.stack(_pixels(root))
    rows = [(str(path), 0, number) for number, path in enumerate(sorted(root.rglob("*.jpg")))]
    with ImageManifest(rows, id="number", transform=RESIZED) as dataset:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, workers=workers)
        for _ in range(2):
            seen = []
            for images, (_, indices) in loader:
                assert torch.equal(images, wanted[indices])
                seen += indices.tolist()
            assert sorted(seen) == list(range(12))
            if dataset.filled_share() == 1:
                for path, _ in dataset.samples:
                    Path(path).unlink(missing_ok=True)


def test_another_process_fills_the_same_store(image_folder: Folder) -> None:
    """Workers that got the dataset as a pickle write to the memory that this process reads."""
    steps = Compose([Resize((6, 6)), PILToTensor()])
    with ImageFolder(image_folder(per_class=6), steps, seed=0) as dataset:
        options = {"multiprocessing_context": "forkserver", "workers": "process"}
        loader = DataLoader(dataset, batch_size=4, num_workers=2, **options)
        first = [images for images, _ in loader]
        assert dataset.filled_share() == 1
        loader.set_epoch(0)
        assert all(map(torch.equal, first, [images for images, _ in loader]))


def test_a_first_epoch_that_fastdata_decodes_is_read_by_threads(image_folder: Folder) -> None:
    """Decoding and resizing release the GIL, so no process is started."""
    with ImageFolder(image_folder(per_class=6), STEPS) as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        assert len(list(loader)) == 3
        assert loader.report().engine == "thread"
        assert dataset.filled_share() == 1


def test_the_report_tells_how_much_is_prepared(image_folder: Folder) -> None:
    """During a first epoch it shows the share of the loader's own samples; nothing once all are prepared."""
    with ImageFolder(image_folder(per_class=6), STEPS) as dataset:
        loader = DataLoader(Subset(dataset, range(4)), batch_size=1)
        next(iter(loader))
        assert loader.report().prepared == 0.25
        assert str(loader.report()).splitlines()[-1] == "25% of the samples are prepared so far"
        list(loader)
        assert loader.report().prepared == 1
        assert "prepared so far" not in str(loader.report())


def test_a_subset_that_is_filled_is_served_by_threads(image_folder: Folder) -> None:
    """Samples outside of a loader's subset need not be prepared."""
    with ImageFolder(image_folder(per_class=6), STEPS) as dataset:
        loader = DataLoader(Subset(dataset, range(4)), batch_size=2, num_workers=1)
        for _ in range(2):
            list(loader)
        assert loader.report().engine == "thread"
        assert dataset.filled_share() == pytest.approx(4 / 12)
        assert "\n             33% prepared so far, the rest on first read\n" in repr(dataset)


def test_lazy_and_eager_give_the_same_batches(image_folder: Folder) -> None:
    """The way in which the store is filled changes no pixel."""
    root = image_folder(per_class=6)
    batches = []
    for is_asked in (False, True):
        with ImageFolder(root, STEPS, seed=0) as dataset:
            if is_asked:
                assert dataset.prepare() is dataset
            assert dataset.filled_share() == is_asked
            batches.append([images for images, _ in DataLoader(dataset, batch_size=5)])
    assert all(map(torch.equal, *batches))


@pytest.mark.parametrize(
    ("steps", "options", "is_lazy"),
    [
        ([v1.Resize((6, 8))], {}, True),
        ([v1.Resize(8), v1.CenterCrop(6)], {}, True),
        ([v1.Resize(8)], {}, False),
        ([], {"resize": (6, 8)}, True),
        ([], {"resize": 8}, False),
        ([v1.Resize((6, 8))], {"on_error": "skip"}, False),
        ([v1.Resize((6, 8))], {"storage": "compressed", "codec": "lz4"}, False),
        ([v1.Resize((6, 8))], {"loader": lambda path: torch.zeros(3, 2, 2)}, False),
    ],
    ids=shown,
)
def test_auto_is_lazy_if_the_size_of_samples_is_certain(
    image_folder: Folder, steps: list[Any], options: dict[str, Any], is_lazy: bool
) -> None:
    """Training begins at once if the sizes follow from the steps; if not, all samples are prepared first."""
    with ImageFolder(image_folder(), v1.Compose([*steps, v1.ToTensor()]), **options) as dataset:
        assert dataset.filled_share() == (0 if is_lazy else 1)


def test_threads_that_want_one_sample_prepare_it_once(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread prepares a sample, the others wait for it."""
    root = image_folder(per_class=6)
    wanted = _pixels(root)[7]
    with ImageFolder(root, RESIZED) as dataset:
        pending = Pending(dataset, 7, monkeypatch)
        got: list[Any] = []
        threads = [threading.Thread(target=lambda: got.append(dataset[7][0])) for _ in range(4)]
        for thread in threads:
            thread.start()
        pending.give(pending.wait())
        for thread in threads:
            thread.join()
        assert [torch.equal(image, wanted) for image in got] == [True] * 4


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="asks Linux who waits for a lock")
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))]
)
def test_closing_a_copy_does_not_release_a_lock(
    image_folder: Folder, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process waits for a thread's sample, although a copy of the dataset was closed."""
    root = image_folder(per_class=6)
    wanted = _pixels(root)[7]
    with ImageFolder(root, RESIZED) as dataset:
        pending = Pending(dataset, 7, monkeypatch)
        thread = threading.Thread(target=lambda: dataset[7])
        thread.start()
        fd = pending.wait()
        copied(dataset).close()

        def read() -> None:
            os.close(fd)
            assert (dataset[7][0].numpy() == wanted.numpy()).all()

        process = FORK.Process(target=read)
        process.start()
        while not somebody_waits_for_a_lock():
            assert process.is_alive()
            time.sleep(0.01)
        pending.give(fd)
        thread.join()
        process.join()
        assert process.exitcode == 0
        process.close()


def somebody_waits_for_a_lock() -> bool:
    """Return True if a process waits for a lock on a file that this process has open too."""
    inodes = {os.stat(f"/proc/self/fd/{number}").st_ino for number, _ in open_descriptors()}
    lines = map(str.split, Path("/proc/locks").read_text().splitlines())
    return any(words[1] == "->" and int(words[6].split(":")[2]) in inodes for words in lines)


def test_a_killed_reader_leaves_the_sample_to_the_next(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it prepares a sample blocks no other, and no partial sample is read."""
    root = image_folder(per_class=6)
    wanted = _pixels(root)[3]
    with ImageFolder(root, RESIZED) as dataset:
        pending = Pending(dataset, 3, monkeypatch)
        process = FORK.Process(target=lambda: dataset[3])
        process.start()
        fd = pending.wait()
        process.kill()
        process.join()
        process.close()
        pending.give(fd)
        assert torch.equal(dataset[3][0], wanted)


def test_a_damaged_file_is_named_when_it_is_read_and_the_others_are_served(
    image_folder: Folder,
) -> None:
    """The error has path, index and cause; a file that is mended in the meantime is read."""
    root = image_folder(per_class=4)
    path = root / "cat" / "001.jpg"
    whole = path.read_bytes()
    with ImageFolder(root, STEPS) as dataset:
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SampleError, match=r"sample 1, .*001\.jpg.*cut off"):
            dataset[1]
        assert dataset[2][0].shape == (3, 5, 5)
        path.write_bytes(whole)
        assert dataset[1][0].shape == (3, 5, 5)


def test_too_little_memory_is_an_error_at_once(image_folder: Folder) -> None:
    """The block is reserved first, so a lazy store cannot run out of memory later."""
    with pytest.raises(MemoryBudgetError, match="storage='shared' needs"):
        ImageFolder(image_folder(), STEPS, storage="shared", memory_limit=99)


def test_an_epoch_of_threads_ends_at_a_limit_of_the_machine(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stop reading, the error is raised once, and the state is that of the missing batch."""
    refused = 0

    def refuse(*_: Any) -> Any:
        nonlocal refused
        refused += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with ImageFolder(image_folder(per_class=9), STEPS) as dataset:
        loader = DataLoader(dataset, batch_size=1, num_workers=1)
        epoch = iter(loader)
        next(epoch)
        monkeypatch.setattr("fastdata.sources.files.FileSource.read_files", refuse)
        with pytest.raises(IngestError, match=r"Too many open files.*ulimit -n"):
            list(epoch)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"no more batches: .*IngestError: sample"):
                next(epoch)
        assert not [it for it in threading.enumerate() if "fastdata-loader" in it.name]
        assert 1 <= loader.state_dict()["num_yielded"] == loader.report().batches
    assert refused <= 2 * 3


def test_a_closed_dataset_says_so(image_folder: Folder) -> None:
    """Reading or pickling a closed dataset is an error; closing it twice is not."""
    dataset = ImageFolder(image_folder(), STEPS)
    dataset.close()
    dataset.close()
    with pytest.raises(FastDataError, match="was closed"):
        dataset[0]
    with pytest.raises(FastDataError, match="was closed"):
        pickle.dumps(dataset)


def test_prepare_takes_a_dataset_without_a_transform(image_folder: Folder) -> None:
    """Samples that wait for a transform are prepared once, as decoded."""
    with ImageFolder(image_folder()) as dataset:
        assert dataset.storage == "none"
        assert dataset.prepare().prepare().filled_share() == 1
