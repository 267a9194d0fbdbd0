"""CudaPrefetcher over fastdata's and torch's loaders: their rings, attributes and states."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler

from data import level_samples
from fastdata import CachedDataset, CudaPrefetcher, DataLoader, RingCollate
from fastdata.loaders import loop_copies
from fastdata.loaders.iterators import BatchMaker
from fastdata.loaders.pinned import allocated_bytes
from fastdata.machine import limits
from fastdata.machine.budget import RESERVE_SHARE
from fastdata.machine.limits import Available
from simcuda import Sim

CUDA = torch.device("cuda", 0)


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    """Return a dataset whose image i is 3 x 4 x 5 of value i."""
    samples = level_samples(23, (3, 4, 5))
    with CachedDataset(samples) as cached:
        yield cached


class Numbers(Dataset[Any]):
    """Sample i is a 2 x 3 tensor full of i, and i; reading ``kill_at`` kills the worker once the test allows it."""

    def __init__(self, length: int = 40, kill_at: int = -1) -> None:
        self.length, self.kill_at = length, kill_at
        self.may_die = multiprocessing.Event()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.kill_at:
            self.may_die.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((2, 3), float(index)), index


def on_device(loader: Any, **options: Any) -> CudaPrefetcher:
    return CudaPrefetcher(loader, CUDA, **options)


def values(batches: Any) -> list[list[float]]:
    """Return the number in each image, after checking that it equals the label."""
    found = []
    for images, labels in batches:
        assert images.flatten(1).unique(dim=1).flatten().tolist() == labels.tolist()
        found.append(labels.tolist())
        del images, labels
    return found


def in_batches(count: int, size: int) -> list[list[int]]:
    return [list(range(count))[start : start + size] for start in range(0, count, size)]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_gathered_images_are_written_once(
    dataset: CachedDataset, gpu: Sim, num_workers: int
) -> None:
    """Threads write images into pinned memory, where the device reads them; only labels are copied on the host."""
    batches = on_device(DataLoader(dataset, batch_size=4, num_workers=num_workers))
    for _ in range(3):
        assert values(batches) == in_batches(23, 4)
        report = batches.report()
        assert (report.in_place_bytes, report.staged_bytes) == (23 * 60, 23 * 8)
        assert (report.pageable_bytes, report.fresh_batches) == (0, 0)
    assert report.path.startswith("whole batches")


def test_the_ring_is_pinned_before_the_first_batch(dataset: CachedDataset, gpu: Sim) -> None:
    """All slots are pinned at the same time, so that pinning delays no later step; later epochs pin nothing."""
    batches = on_device(DataLoader(dataset, batch_size=4, num_workers=2))
    iterator = iter(batches)
    next(iterator)
    slots = 2 * 2 + 1 + 3  # two threads, two batches ahead each, one that is read, three held
    pinned = gpu.counts["cudaHostAlloc"]
    assert pinned >= slots
    for _ in iterator:
        pass
    values(batches)
    assert gpu.counts["cudaHostAlloc"] <= pinned + 4  # labels
    batches.close()
    assert batches.report().pinned_bytes == 0


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_pinned_sizes_follow_the_allocators_settings(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Sizes are powers of two, up to the threshold that the user has set."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert list(map(allocated_bytes, (0, 1, 3, 4096, 5 << 20))) == [1, 1, 4, 4096, 8 << 20]
    monkeypatch.setenv(name, "expandable_segments:True,pinned_max_round_threshold_mb:4")
    assert list(map(allocated_bytes, (3 << 20, 5 << 20))) == [4 << 20, 5 << 20]


def test_gathered_batches_that_are_held_are_never_overwritten(
    dataset: CachedDataset, gpu: Sim
) -> None:
    """All batches are right, also if their copies run as late as they can."""
    batches = list(on_device(DataLoader(dataset, batch_size=4, num_workers=2)))
    assert [images.unique().tolist() for images, _ in batches] == in_batches(23, 4)


def test_plain_iteration_gets_no_pinned_memory(dataset: CachedDataset, gpu: Sim) -> None:
    """Batches of the loader itself are never in the prefetcher's pinned memory."""
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    batches = on_device(loader)
    next(iter(batches))
    assert not any(images.is_pinned() for images, _ in loader)


def test_a_finished_batch_does_not_wait_for_the_next(
    dataset: CachedDataset, gpu: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop queues finished batches, and gets them while the threads are blocked."""
    goes_on = threading.Event()
    read, made = BatchMaker.__call__, []

    def reading(maker: Any, indices: Any, draws: Any) -> Any:
        if len(made) >= 3:
            assert goes_on.wait(30)
        made.append(read(maker, indices, draws))
        return made[-1]

    monkeypatch.setattr(BatchMaker, "__call__", reading)
    batches = on_device(DataLoader(dataset, batch_size=4, num_workers=1), depth=2)
    iterator = iter(batches)
    assert [next(iterator)[1].tolist() for _ in range(3)] == in_batches(12, 4)
    assert not [thread for thread in threading.enumerate() if thread.name == "fastdata-prefetch"]
    goes_on.set()
    assert [labels.tolist() for _, labels in iterator] == in_batches(23, 4)[3:]


def test_large_host_copies_are_made_by_a_thread(
    dataset: CachedDataset, gpu: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ring is not pinned, a thread copies large batches on the host, and all are right."""
    monkeypatch.setattr(loop_copies, "_LARGE_BYTES", 64)
    gpu.refuses_to_pin = True
    batches = on_device(DataLoader(dataset, batch_size=4, num_workers=2))
    iterator = iter(batches)
    with pytest.warns(UserWarning, match="pageable memory"):
        first = next(iterator)
    assert [thread for thread in threading.enumerate() if thread.name == "fastdata-prefetch"]
    assert values([first, *iterator]) == in_batches(23, 4)


@pytest.mark.parametrize("torchs", [False, True])
def test_batches_of_worker_processes_are_staged(gpu: Sim, torchs: bool) -> None:
    """Slots of workers are ordinary memory; their batches are copied to pinned memory first."""
    loader: Any = DataLoader(Numbers(), batch_size=4, num_workers=2)
    if torchs:
        loader = TorchLoader(Numbers(), batch_size=4, num_workers=2, collate_fn=RingCollate())
    batches = on_device(loader)
    assert values(batches) == in_batches(40, 4)
    report = batches.report()
    assert report.staged_bytes
    assert (report.in_place_bytes, report.pageable_bytes) == (0, 0)


def test_slots_that_are_in_flight_are_not_filled_again(gpu: Sim) -> None:
    """All batches are right, also if their copies run as late as they can."""
    batches = list(on_device(DataLoader(Numbers(), batch_size=4, num_workers=2)))
    assert [labels.tolist() for _, labels in batches] == in_batches(40, 4)
    assert [images.flatten(1)[:, 0].tolist() for images, _ in batches] == in_batches(40, 4)


def test_persistent_workers_serve_epoch_after_epoch(gpu: Sim) -> None:
    """Persistent workers give complete epochs, also after a break, and a new epoch ends an old iterator."""
    loader = DataLoader(Numbers(12), batch_size=4, num_workers=1, persistent_workers=True)
    batches = on_device(loader)
    old = iter(batches)
    next(old)
    assert values(batches) == in_batches(12, 4)
    assert next(old, "end") == "end"
    for _ in batches:
        break
    assert values(batches) == in_batches(12, 4)
    loader._iterator = None


def test_a_killed_worker_is_an_error(gpu: Sim) -> None:
    """A killed worker is an error in the loop, which does not hang, and nothing is left behind."""
    numbers = Numbers(kill_at=13)
    batches = iter(on_device(DataLoader(numbers, batch_size=4, num_workers=1)))
    for _ in range(3):
        next(batches)
    numbers.may_die.set()  # not before: torch's signal handler raises wherever the loop is then
    with pytest.raises(RuntimeError, match=r"DataLoader worker|killed by signal"):
        next(batches)


def test_a_ring_that_may_not_be_pinned_whole_is_copied(
    dataset: CachedDataset, gpu: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room for depth + 2 batches and not for all of a loader's slots, batches go through copies.

    The report says so, and nobody is warned; with room for all they are read in place.
    """
    batch_bytes = 512  # 8 images of 60 bytes
    for room, in_place_bytes in ((40 * batch_bytes, 23 * 60), (5 * batch_bytes, 0)):
        free = math.ceil(8 * room / (1 - RESERVE_SHARE))
        monkeypatch.setattr(
            limits, "available_bytes", lambda free=free: Available(bytes=free, limited_by="cgroup")
        )
        batches = on_device(DataLoader(dataset, batch_size=8, num_workers=4))
        assert values(batches) == in_batches(23, 8)
        report = batches.report()
        assert (report.in_place_bytes, report.pageable_bytes) == (in_place_bytes, 0)
        assert report.fresh_batches == 0
    assert re.match(
        r"ring not pinned: \S+ KiB needed, but at most 12\.5% .*; copies pinned$", report.pinning
    )


# The face


def test_the_loaders_attributes_are_the_prefetchers(dataset: CachedDataset) -> None:
    """A prefetcher has the loader's attributes that training scripts read, and no others."""
    loader = DataLoader(dataset, batch_size=4, num_workers=1, drop_last=True)
    batches = CudaPrefetcher(loader, device="cpu")
    assert len(batches) == len(loader) == 5
    for name in (
        "dataset",
        "sampler",
        "batch_sampler",
        "batch_size",
        "drop_last",
        "num_workers",
        "pin_memory",
    ):
        assert getattr(batches, name) is getattr(loader, name)
    plain = CudaPrefetcher([1, 2], device="cpu")
    assert not hasattr(plain, "dataset")
    assert not hasattr(plain, "state_dict")
    assert not hasattr(plain, "load_state_dict")
    with pytest.raises(TypeError):
        len(CudaPrefetcher(iter([]), device="cpu"))


def test_set_epoch_is_the_loaders(dataset: CachedDataset) -> None:
    """``set_epoch`` sets the epoch of the loader and of its sampler, as without a prefetcher."""
    sampler: DistributedSampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    batches = CudaPrefetcher(loader, device="cpu")
    batches.set_epoch(7)
    batches.sampler.set_epoch(8)
    iter(loader)
    assert loader.state_dict()["epoch"] == 7
    assert sampler.epoch == 8
    assert not hasattr(CudaPrefetcher([], device="cpu"), "set_epoch")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_the_state_counts_what_the_user_got(
    dataset: CachedDataset, gpu: Sim, num_workers: int, workers: Any
) -> None:
    """After each batch, the state resumes with the next one, although more were read ahead."""

    def make() -> DataLoader:
        torch.manual_seed(3)
        return DataLoader(
            dataset, batch_size=4, shuffle=True, num_workers=num_workers, workers=workers
        )

    whole = [labels.tolist() for _, labels in make()]
    loader = make()
    batches = on_device(loader)
    states = [batches.state_dict() for _ in batches]
    assert [state["num_yielded"] if state["is_begun"] else "over" for state in states] == [
        1,
        2,
        3,
        4,
        5,
        "over",
    ]
    assert loader.state_dict() == states[-1]
    for seen, state in enumerate(states[:-1], 1):
        again = on_device(make())
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert values(again) == whole[seen:]


def test_batches_of_an_older_epoch_do_not_change_the_state(
    dataset: CachedDataset, gpu: Sim
) -> None:
    """An older iterator that still gives batches does not change the state of the new epoch."""
    batches = on_device(DataLoader(dataset, batch_size=4))
    older = iter(batches)
    next(older)
    newer = iter(batches)
    next(newer)
    for _ in range(2):
        next(older)
    assert batches.state_dict()["num_yielded"] == 1
    next(newer)
    assert batches.state_dict()["num_yielded"] == 2


def test_a_state_is_kept_until_a_batch_is_returned(dataset: CachedDataset, gpu: Sim) -> None:
    """A resumed epoch that gave no batch can be resumed again."""
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    batches = on_device(loader)
    for _ in batches:
        break
    state = batches.state_dict()
    assert state["num_yielded"] == 1
    batches.load_state_dict(state)
    iter(batches)
    assert values(batches) == in_batches(23, 4)[1:]


class Counting:
    """A loader of another library, with a state that counts its batches."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.read < 8:
            self.read += 1
            yield torch.tensor([self.read])

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def test_the_state_of_another_loader_is_that_of_the_users_batch(gpu: Sim) -> None:
    """The state is saved with each batch that is read, and returned when the user has that batch."""
    batches = on_device(Counting(), depth=3)
    epoch = iter(batches)
    for number in (1, 2, 3):
        next(epoch)
        assert batches.state_dict() == {"read": number}
    del epoch
    batches.load_state_dict({"read": 6})
    assert batches.state_dict() == {"read": 6}
    moved = list(batches)
    assert [batch.item() for batch in moved] == [7, 8]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_global_draws_of_an_epoch_are_those_of_the_bare_loader(
    dataset: CachedDataset, gpu: Sim, num_workers: int, workers: Any
) -> None:
    """For one seed, the order and the user's draws after each epoch are those of the loader alone."""
    told = []
    for is_prefetched in (False, True):
        torch.manual_seed(11)
        batches: Any = DataLoader(
            dataset, batch_size=4, shuffle=True, num_workers=num_workers, workers=workers
        )
        if is_prefetched:
            batches = on_device(batches)
        told.append(
            [([labels.tolist() for _, labels in batches], torch.rand(1).item()) for _ in range(2)]
        )
    assert told[0] == told[1]


# pin_memory="auto"


def test_auto_pinning_without_a_device_is_off_without_a_warning(dataset: CachedDataset) -> None:
    """The attribute is False, the report says why, and torch does not warn."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    loader = DataLoader(dataset, batch_size=4, num_workers=1, pin_memory="auto")
    assert loader.pin_memory is False
    assert len(list(loader)) == 6
    assert loader.report().pinning == "not pinned: there is no CUDA or XPU device"
    assert loader.report().pinning in str(loader.report())


def test_auto_pinning_with_a_device_goes_by_the_batch(
    dataset: CachedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pin_memory='auto' pins batches of known size only."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert DataLoader(dataset, batch_size=4, pin_memory="auto").pin_memory is True
    unknown = DataLoader(Numbers(), batch_size=4, pin_memory="auto")
    assert unknown.pin_memory is False
    assert "not known" in unknown.report().pinning


def test_a_wrong_pin_memory_is_refused(dataset: CachedDataset) -> None:
    """Any pin_memory other than True, False and 'auto' is an error."""
    with pytest.raises(ValueError, match="pin_memory='yes'"):
        DataLoader(dataset, pin_memory="yes")  # type: ignore[arg-type]


def test_a_prefetcher_is_copied_as_itself(dataset: CachedDataset) -> None:
    """A copy of a prefetcher does not use special methods of the loader."""
    batches = CudaPrefetcher(DataLoader(dataset, batch_size=4), device="cpu")
    with pytest.raises(AttributeError, match="__fspath__"):
        batches.__fspath__  # noqa: B018
    assert isinstance(copy.copy(batches), CudaPrefetcher)
