"""Stores that are filled by their readers."""

from __future__ import annotations

import copy
import os
import pickle
import signal
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
from fastdata import CachedDataset, DataLoader, FastDataWarning, ImageFolder
from fastdata.errors import FastDataError, MemoryBudgetError, SampleError
from fastdata.pixels.images import CenterCrop, Resize

Folder = Callable[..., Path]
STEPS = v1.Compose([v1.Resize((6, 8)), v1.RandomCrop(5), v1.ToTensor()])


class Logged:
    """Samples that write down in a file who read them."""

    def __init__(self, folder: Path, count: int = 40, shapes: int = 1, wait_s: float = 0.0) -> None:
        self.log, self.count, self.shapes, self.wait_s = folder / "log", count, shapes, wait_s
        self.targets = [i * 10 for i in range(count)]
        self.log.touch()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        with open(self.log, "a") as stream:
            stream.write(f"{index}\n")
        time.sleep(self.wait_s)
        return np.full((3, 4 + index % self.shapes, 5), index, np.uint8), index * 10

    def reads(self) -> list[int]:
        return sorted(map(int, self.log.read_text().split()))


def _lazily(samples: Any, **options: Any) -> CachedDataset:
    dataset = CachedDataset(samples, fill="lazy", progress=False, **options)
    if isinstance(samples, Logged):
        samples.log.write_text("")  # what was looked at beforehand
    return dataset


@pytest.mark.parametrize(
    "options", [{}, {"storage": "compressed", "codec": "zstd"}], ids=["raw", "zstd"]
)
@pytest.mark.parametrize("shapes", [1, 3])
def test_each_sample_is_prepared_once_on_its_first_read(
    tmp_path: Path, shapes: int, options: Any
) -> None:
    """Reads in any order and number prepare each sample once, and give what the source gives."""
    samples = Logged(tmp_path, shapes=shapes)
    with _lazily(samples, **options) as dataset:
        samples.log.write_text("")
        before = dataset.filled_share()
        order = np.random.default_rng(0).permutation(40).tolist()
        for index in [*order, *order]:
            array, target = dataset[index]
            assert np.array_equal(array, samples[index][0])
            assert target == index * 10
            # The comparison's.
            samples.log.write_text("".join(samples.log.read_text().splitlines(keepends=True)[:-1]))
        assert samples.reads() == sorted(set(range(40)) - ({0} if before else set()))
        assert dataset.filled_share() == 1


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_workers_share_what_each_has_prepared(tmp_path: Path, workers: Any) -> None:
    """Over two epochs with two workers every sample is read once from the source, and every batch is right."""
    samples = Logged(tmp_path)
    with _lazily(samples) as dataset:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, workers=workers)
        for _ in range(2):
            seen = []
            for batch, targets in loader:
                values = torch.as_tensor(batch)[:, 0, 0, 0].tolist()
                assert [value * 10 for value in values] == targets.tolist()
                seen += values
            assert sorted(seen) == list(range(40))
        assert samples.reads() == list(range(40))


def test_a_spawned_process_fills_the_same_store(image_folder: Folder) -> None:
    """Workers that got the dataset as a pickle write where this process reads."""
    steps = Compose([Resize(8), CenterCrop((6, 6)), PILToTensor()])
    with ImageFolder(
        image_folder(per_class=6), steps, fill="lazy", seed=0, progress=False
    ) as dataset:
        loader = DataLoader(
            dataset, batch_size=4, num_workers=2, multiprocessing_context="spawn", workers="process"
        )
        first = [images for images, _ in loader]
        assert dataset.filled_share() == 1
        loader.set_epoch(0)
        assert all(map(torch.equal, first, [images for images, _ in loader]))


def test_a_first_epoch_that_fastdata_decodes_is_read_by_threads(image_folder: Folder) -> None:
    """Decoding and resizing hold no GIL: there is no process to start."""
    with ImageFolder(image_folder(per_class=6), STEPS, progress=False) as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        assert len(list(loader)) == 3
        assert loader.report().engine == "thread"
        assert dataset.filled_share() == 1


def test_a_first_epoch_by_a_loader_of_ones_own_is_read_by_processes(image_folder: Folder) -> None:
    """What is prepared is served by threads. Persistent workers end then."""
    with ImageFolder(
        image_folder(per_class=6), STEPS, loader=open_plainly, fill="lazy", progress=False
    ) as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
        assert len(list(loader)) == 3
        assert (
            loader.report().path
            == "2 worker processes over a shared ring: samples are prepared on their first read"
        )
        assert len(list(loader)) == 3
        assert loader.report().engine == "thread"


def open_plainly(path: str) -> Image.Image:
    return Image.open(path).convert("RGB")


def test_who_prepares_nothing_more_is_served_by_threads(image_folder: Folder) -> None:
    """A rank's sampler never reads the samples of the others, so that they are never prepared."""
    with ImageFolder(
        image_folder(per_class=6), STEPS, loader=open_plainly, fill="lazy", progress=False
    ) as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2, sampler=range(6))
        engines = [len(list(loader)) and loader.report().engine for _ in range(3)]
        assert engines == ["process", "process", "thread"]
        assert dataset.filled_share() == 0.5


def test_the_report_tells_how_much_is_prepared(image_folder: Folder) -> None:
    """In the middle of a first epoch a share of the loader's own samples; nothing is said once all are there."""
    with ImageFolder(image_folder(per_class=6), STEPS, progress=False) as dataset:
        loader = DataLoader(Subset(dataset, range(4)), batch_size=1)
        next(iter(loader))
        assert loader.report().prepared == 0.25
        assert str(loader.report()).splitlines()[-1] == "25% of the samples are prepared so far"
        list(loader)
        assert loader.report().prepared == 1
        assert "prepared so far" not in str(loader.report())


def test_a_subset_that_is_filled_is_served_by_threads(image_folder: Folder) -> None:
    """Samples that a loader does not see need not be there."""
    with ImageFolder(image_folder(per_class=6), STEPS, progress=False) as dataset:
        loader = DataLoader(Subset(dataset, range(4)), batch_size=2, num_workers=1)
        for _ in range(2):
            list(loader)
        assert loader.report().engine == "thread"
        assert dataset.filled_share() == pytest.approx(4 / 12)
        assert "; 33% prepared so far, the rest on first read\n" in repr(dataset)


def test_lazy_and_eager_give_the_same_batches(image_folder: Folder) -> None:
    """How the store is filled changes no pixel."""
    root = image_folder(per_class=6)
    batches = []
    for fill in ("lazy", "eager"):
        with ImageFolder(root, STEPS, fill=fill, seed=0, progress=False) as dataset:  # type: ignore[arg-type]
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
        ([v1.Resize((6, 8))], {"fill": "eager"}, False),
        ([v1.Resize((6, 8))], {"storage": "compressed", "codec": "lz4"}, False),
        ([v1.Resize((6, 8))], {"loader": lambda path: torch.zeros(3, 2, 2)}, False),
    ],
    ids=shown,
)
def test_auto_is_lazy_where_what_samples_need_is_certain(
    image_folder: Folder, steps: list[Any], options: dict[str, Any], is_lazy: bool
) -> None:
    """Training begins at once if the sizes follow from the steps; else all is prepared beforehand."""
    with ImageFolder(
        image_folder(), v1.Compose([*steps, v1.ToTensor()]), progress=False, **options
    ) as dataset:
        assert dataset.filled_share() == (0 if is_lazy else 1)


def test_threads_that_want_one_sample_prepare_it_once(tmp_path: Path) -> None:
    """While one prepares a sample the others wait for it."""
    samples = Logged(tmp_path, wait_s=0.05)
    with _lazily(samples) as dataset:
        got: list[Any] = []
        threads = [threading.Thread(target=lambda: got.append(dataset[7][0])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert samples.reads() == [7]
        assert [int(array[0, 0, 0]) for array in got] == [7] * 4


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="asks Linux who waits for a lock")
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))]
)
def test_closing_a_copy_leaves_a_sample_to_who_prepares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: Any
) -> None:
    """While a thread prepares a sample another process waits for it, although a copy of the dataset was closed."""
    samples, is_begun, may_end = Logged(tmp_path), threading.Event(), threading.Event()
    with _lazily(samples) as dataset:
        read, reader = Logged.__getitem__, os.getpid()

        def read_slowly(self: Logged, index: int) -> Any:
            sample = read(self, index)
            if os.getpid() == reader:
                is_begun.set()
                may_end.wait(60)
            return sample

        monkeypatch.setattr(Logged, "__getitem__", read_slowly)
        thread = threading.Thread(target=lambda: dataset[7])
        thread.start()
        assert is_begun.wait(60)
        copied(dataset).close()
        pid = os.fork()
        if pid == 0:
            os._exit(int(dataset[7][0][0, 0, 0]))
        while samples.reads() == [7] and "->" not in Path("/proc/locks").read_text():
            time.sleep(0.01)
        may_end.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert samples.reads() == [7]


def test_a_killed_reader_leaves_the_sample_to_the_next(tmp_path: Path) -> None:
    """A process that is killed while it prepares a sample blocks nobody, and nothing half written is served."""
    samples = Logged(tmp_path, wait_s=0.0)
    with _lazily(samples) as dataset:
        samples.wait_s = 60
        pid = os.fork()
        if pid == 0:
            dataset[3]
            os._exit(0)
        while samples.reads() != [3]:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        samples.wait_s = 0
        assert int(dataset[3][0][0, 0, 0]) == 3
        assert samples.reads() == [3, 3]


def test_a_damaged_file_is_named_when_it_is_read_and_the_others_are_served(
    image_folder: Folder,
) -> None:
    """The error names path, index and cause; a file mended meanwhile is read."""
    root = image_folder(per_class=4)
    path = root / "cat" / "001.jpg"
    whole = path.read_bytes()
    with ImageFolder(root, STEPS, fill="lazy", progress=False) as dataset:
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SampleError, match=r"sample 1, .*001\.jpg.*cut off"):
            dataset[1]
        assert dataset[2][0].shape == (3, 5, 5)
        path.write_bytes(whole)
        assert dataset[1][0].shape == (3, 5, 5)


def test_a_sample_of_another_shape_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """What was taken for the shape of all turns out to be wrong for one."""
    samples = [(np.zeros((2, 3), np.uint8), 0)] * 30
    samples[5] = (np.zeros((2, 4), np.uint8), 0)

    class Listed(list[Any]):
        targets = (0,) * 30

    with _lazily(Listed(samples)) as dataset:
        with pytest.raises(
            SampleError,
            match=r"sample 5 has shape \(2, 4\), those before it \(2, 3\).*fill='eager'",
        ):
            dataset[5]
        assert dataset[6][0].shape == (2, 3)


def test_what_does_not_fit_is_prepared_on_every_read(tmp_path: Path) -> None:
    """Samples of unknown size that need more than was reserved are right all the same; one warning says so."""

    class Growing(Logged):
        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            size = (1 << 18) if index % 10 == 2 else 10  # not among those looked at
            super().__getitem__(index)
            return np.full((size, 1 + index // 10 % 2), index, np.uint8), index * 10

    samples = Growing(tmp_path, count=81)
    with _lazily(samples) as dataset:
        with pytest.warns(
            FastDataWarning, match=r"the store is full with \d+ of 81 samples"
        ) as caught:
            first = [dataset[index][0] for index in range(81)]
        assert all((array == index).all() for index, array in enumerate(first))
        assert len(caught) == 1
        assert 0 < dataset.filled_share() < 1
        assert all((dataset[index][0] == index).all() for index in range(81))


def test_targets_must_be_known_beforehand() -> None:
    """A dataset that does not list its targets cannot be filled lazily, and says how else."""
    with pytest.raises(ValueError, match=r"has no attribute targets .* Use fill='eager'"):
        _lazily([(np.zeros(3, np.uint8), 0)] * 3)


def test_targets_that_items_do_not_have_are_refused(tmp_path: Path) -> None:
    """A list of targets that a target_transform changes later is not taken for the targets; a tensor of them is."""
    samples = Logged(tmp_path)
    samples.targets = torch.arange(0, 400, 10)  # type: ignore[assignment]
    with _lazily(samples) as dataset:
        assert dataset.targets[3] == 30
    samples.targets = list(range(40))
    with pytest.raises(ValueError, match=r"that has 4 where item 5|that has 5 where item 5 has 50"):
        _lazily(samples)


def test_skipping_needs_eager() -> None:
    """Samples cannot be left out of a dataset whose length is already known."""
    with pytest.raises(ValueError, match="too late for on_error='skip'; use fill='eager'"):
        _lazily([], on_error="skip")


def test_too_little_memory_is_an_error_at_once(image_folder: Folder) -> None:
    """The block is reserved up front, so that a lazy store cannot run out of memory later."""
    with pytest.raises(MemoryBudgetError, match="storage='shared' needs"):
        ImageFolder(
            image_folder(), STEPS, fill="lazy", storage="shared", memory_limit=99, progress=False
        )


def test_a_closed_dataset_says_so(tmp_path: Path) -> None:
    """Neither reading nor pickling a closed dataset works, and closing twice does."""
    dataset = _lazily(Logged(tmp_path))
    dataset.close()
    dataset.close()
    with pytest.raises(FastDataError, match="was closed"):
        dataset[0]
    with pytest.raises(FastDataError, match="was closed"):
        pickle.dumps(dataset)
