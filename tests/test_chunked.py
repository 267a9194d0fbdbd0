"""ChunkedLoader over samples in memory, and what holds for every ChunkedLoader."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torchvision import transforms

from conftest import FolderMaker
from data import Stream
from fastdata import CachedDataset, ChunkedLoader, DataLoader, FastDataError, ImageFolder
from fastdata.datasets.buffers import BatchRing
from fastdata.errors import MemoryBudgetError
from fastdata.loaders.chunk_order import chunked as chunked_order
from fastdata.loaders.chunk_plan import CHUNKS_HELD, plan_chunks
from fastdata.loaders.chunk_reader import ChunkReader
from fastdata.machine import limits

MIB = 1 << 20
LIMIT = "64GiB"  # far from binding: the machine of a test has less, and chunks are as small as the tests ask for


def square(index: int, size: tuple[int, int] = (6, 5)) -> torch.Tensor:
    """Return a tensor (1, H, W) whose values tell the index and the column."""
    return (torch.arange(size[1]) + 8 * index).to(torch.uint8).expand(1, *size).contiguous()


class Squares:
    """``count`` square tensors with their numbers, and a list of the indices that this process has read."""

    def __init__(self, count: int, size: tuple[int, int] = (6, 5)) -> None:
        self.count, self.size = count, size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        return square(index, self.size), index


class Damaged(Squares):
    """Squares of which some cannot be read."""

    damaged = (4, 9)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.damaged:
            raise OSError(f"no such disk for {index}")
        return super().__getitem__(index)


def chunked(data: Any, batch_size: int = 4, **arguments: Any) -> ChunkedLoader:
    """Return a loader with one worker, and with small chunks if samples are on disk."""
    return ChunkedLoader(
        data,
        batch_size,
        **{"memory_limit": LIMIT, "chunk_samples": 8, "num_workers": 1, **arguments},
    )


def labels(loader: Any) -> list[list[int]]:
    """Return the targets of an epoch, batch by batch."""
    return [targets.tolist() for _, targets in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [label for batch in batches for label in batch]


def same(first: Any, second: Any) -> bool:
    """Return True if two epochs are equal in every pixel and target."""
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


# What is served


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mix", [None, 3])
def test_every_sample_comes_once_an_epoch(workers: int, mix: int | None) -> None:
    """Each sample comes once, with its own target; all batches but the last are full, and epochs differ."""
    with chunked(Squares(37), num_workers=workers, mix_chunks=mix) as loader:
        epochs = []
        for _ in range(2):
            epoch = []
            for images, targets in loader:
                assert all(
                    torch.equal(image, square(int(t)))
                    for image, t in zip(images, targets, strict=True)
                )
                epoch.append(targets.tolist())
            assert [len(batch) for batch in epoch] == [4] * 9 + [1]
            assert sorted(flat(epoch)) == list(range(37))
            epochs.append(flat(epoch))
        assert len(loader) == 10
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_pixels_are_those_of_the_loader_in_memory(image_folder: FolderMaker) -> None:
    """For the same seed and epoch, crops, mirrors and values equal those of a DataLoader in the same order."""
    steps = transforms.Compose(
        [
            transforms.Resize((10, 12)),
            transforms.RandomCrop((7, 9)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    root = str(image_folder(per_class=9))
    with (
        ImageFolder(root, steps, storage="none", seed=5) as kept_nowhere,
        ImageFolder(root, steps, storage="shared", seed=5) as in_memory,
        chunked(kept_nowhere, num_workers=2) as loader,
        chunked(in_memory) as copying,
    ):
        order = chunked_order(18).draw(0, 3, 18).tolist()
        usual = DataLoader(in_memory, batch_size=4, sampler=order)
        for each in (usual, loader, copying):
            each.set_epoch(3)
        expected = list(usual)
        assert same(loader, expected)
        assert same(copying, expected)
        loader.set_epoch(4)
        assert not same(loader, expected)


def test_masks_travel_with_their_images() -> None:
    """A target that is an image is stored with the sample, and both are returned as the dataset gives them."""
    data = [(square(i), square(i + 1)[0]) for i in range(10)]
    with CachedDataset(data, storage="none") as dataset, chunked(dataset, shuffle=False) as loader:
        batches = list(loader)
    assert torch.equal(
        torch.cat([images for images, _ in batches]), torch.stack([image for image, _ in data])
    )
    assert torch.equal(
        torch.cat([masks for _, masks in batches]), torch.stack([mask for _, mask in data])
    )


def test_a_transform_per_sample_runs_on_each() -> None:
    """An unknown step runs on each sample as the user wrote it, and the report says why."""
    with (
        CachedDataset(
            Squares(10), transform=lambda image: image.float() + 0.5, storage="none"
        ) as dataset,
        chunked(dataset, shuffle=False) as loader,
    ):
        images = torch.cat([images for images, _ in loader])
        assert "1 worker process" in loader.report().path
    assert torch.equal(images, torch.stack([square(i).float() + 0.5 for i in range(10)]))


def test_a_subset_serves_its_own_samples() -> None:
    """A loader over a Subset gives exactly the samples of the Subset."""
    with (
        CachedDataset(Squares(30), storage="none") as dataset,
        chunked(Subset(dataset, range(5, 16))) as loader,
    ):
        assert sorted(flat(labels(loader))) == list(range(5, 16))


@pytest.mark.parametrize("storage", ["none", "shared"])
def test_dicts_are_served(storage: Any) -> None:
    """Items that are dicts come as one dict of batches, whether samples are stored or not."""
    samples = [{"number": i, "image": square(i)} for i in range(9)]
    with (
        CachedDataset(samples, storage=storage) as dataset,
        chunked(dataset, shuffle=False) as loader,
    ):
        batches = list(loader)
    assert [list(batch) for batch in batches] == [["number", "image"]] * 3
    assert [number for batch in batches for number in batch["number"].tolist()] == list(range(9))
    assert torch.equal(
        torch.cat([batch["image"] for batch in batches]), torch.stack([square(i) for i in range(9)])
    )


def test_joined_datasets_are_served() -> None:
    """An epoch over a ConcatDataset has each of its samples."""
    with (
        CachedDataset(Squares(9)) as one,
        CachedDataset(Squares(30)) as other,
        chunked(ConcatDataset([one, Subset(other, range(9, 20))])) as loader,
    ):
        assert sorted(flat(labels(loader))) == list(range(20))


@pytest.mark.parametrize("workers", [1, 2])
def test_joined_datasets_have_the_epochs_of_a_loader(workers: int) -> None:
    """In each epoch a ConcatDataset with a repeated part has the pixels of a DataLoader."""
    data = [(torch.arange(400).reshape(1, 20, 20).to(torch.uint8), n) for n in range(9)]
    crop = transforms.RandomCrop(2)
    with (
        CachedDataset(data, transform=crop) as one,
        CachedDataset(data, transform=crop, seed=3) as other,
        chunked(
            both := ConcatDataset([one, Subset(one, [4, 5]), other]), num_workers=workers
        ) as loader,
    ):
        epochs = []
        for epoch in (2, 3):
            order = chunked_order(20).draw(0, epoch, 20).tolist()
            usual = DataLoader(both, batch_size=4, sampler=order)
            for each in (usual, loader):
                each.set_epoch(epoch)
            epochs.append(list(loader))
            assert same(epochs[-1], usual)
        assert not same(*epochs)


class Drawing(Squares):
    """Squares with random numbers that are drawn when they are read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return square(index), torch.tensor(
            [torch.rand(()).item(), random.random(), np.random.rand()]
        )


def test_workers_draw_for_a_dataset_of_the_users_own() -> None:
    """Two processes never draw the same numbers, with any generator, in any epoch."""
    with chunked(Drawing(40), num_workers=2) as loader:
        drawn = torch.cat([numbers for _ in range(3) for _, numbers in loader])
    assert [len(set(column)) for column in drawn.T.tolist()] == [120] * 3


def test_targets_of_any_kind_come_with_their_samples() -> None:
    """Text targets become a list, as in torch's loader, in the order of their samples."""
    with chunked([(square(i), f"name {i}") for i in range(9)], shuffle=False) as loader:
        assert [name for _, names in loader for name in names] == [f"name {i}" for i in range(9)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_dropped_only_on_request(drop_last: bool) -> None:
    """Ten samples in batches of four are three batches, or two with drop_last."""
    with chunked(Squares(10), drop_last=drop_last) as loader:
        assert [len(batch) for batch in labels(loader)] == ([4, 4] if drop_last else [4, 4, 2])
        assert len(loader) == (2 if drop_last else 3)


def test_batches_are_gathered_in_the_memory_of_a_prefetcher() -> None:
    """Batches use a ring that is passed to ``iterate``, and the marks of its progress count what the user got."""
    with CachedDataset(Squares(20)) as dataset, chunked(dataset) as loader:
        ring = BatchRing(loader.ring_slots(3))
        batches = loader.iterate(ring, 3)
        progress = batches.progress
        progress.mark_delivered(progress.mark())
        kept = [next(batches) for _ in range(2)]
        assert ring.bytes_held >= 2 * 4 * 6 * 5
        assert loader.state_dict()["num_yielded"] == 0
        progress.mark_delivered(progress.mark())
        assert loader.state_dict()["num_yielded"] == 2
        kept += list(batches)
    assert sorted(int(target) for _, targets in kept for target in targets) == list(range(20))


def test_an_empty_dataset_has_no_batches() -> None:
    """An empty dataset has neither batches nor chunks."""
    with ChunkedLoader([], 4, memory_limit="8GiB") as loader:
        assert list(loader) == []
        assert len(loader) == 0


# Memory


NEEDS: dict[str, Any] = {
    "in_use_bytes": 300 * MIB,
    "fixed_bytes": 20 * MIB,
    "batch_bytes": 2 * MIB,
    "batch_size": 10,
    "samples": 10_000,
    "worker_bytes": 0,
    "most_workers": 4,
    "sample_bytes": MIB,
    "most_samples": 1 << 40,
}


@pytest.mark.parametrize("limit_mib", [460, 600, 1024, 4096])
def test_the_plan_stays_under_the_limit(limit_mib: int) -> None:
    """Planned peak and reserve are within the limit, and one more batch would exceed it."""
    plan = plan_chunks(limit_mib * MIB, **NEEDS)
    spare = limit_mib * MIB - plan.peak_bytes - plan.reserve_bytes
    assert 0 <= spare < CHUNKS_HELD * 10 * MIB
    assert plan.chunk_samples % 10 == 0


@pytest.mark.parametrize(("chunk_samples", "chunk"), [(1, 10), (17, 10), (20, 20), (100_000, 30)])
def test_chunks_are_whole_batches(chunk_samples: int, chunk: int) -> None:
    """A chunk is a whole number of batches, and never larger than an epoch."""
    plan = plan_chunks(64 << 30, **NEEDS | {"samples": 25}, chunk_samples=chunk_samples)
    assert plan.chunk_samples == chunk


def test_there_are_fewer_workers_if_memory_is_short() -> None:
    """A low limit gives one worker, a few hundred MiB more give all four, also if no samples are on disk."""
    tight = (300 + 20 + 4 + 64) * MIB + CHUNKS_HELD * 40 * MIB
    assert plan_chunks(tight, **NEEDS).workers == 1
    assert plan_chunks(tight + 100 * MIB, **NEEDS).workers == 4
    unkept = NEEDS | {"sample_bytes": 0, "worker_bytes": 48 * MIB}
    assert plan_chunks(470 * MIB, **unkept).workers == 1
    assert plan_chunks(700 * MIB, **unkept).workers == 4
    assert "no chunks" in str(plan_chunks(700 * MIB, **unkept))


def test_a_limit_that_is_too_low_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has limit, need and cure; nothing was started; and the stated need is enough."""
    # Measured twice, it differs by what other processes share.
    monkeypatch.setattr(limits, "tree_pss_bytes", lambda: 500 * MIB)
    with pytest.raises(
        MemoryBudgetError, match=r"memory_limit=1\.0 MiB .* at least .* Raise memory_limit"
    ) as caught:
        ChunkedLoader(Squares(10), 4, memory_limit=MIB, num_workers=1)
    found = re.search(r"need at least ([\d,]+) MiB", str(caught.value))
    assert found is not None
    limit = f"{found[1].replace(',', '')}MiB"
    with ChunkedLoader(Squares(10), 4, memory_limit=limit, num_workers=1) as loader:
        assert sorted(flat(labels(loader))) == list(range(10))
    with pytest.raises(MemoryBudgetError, match="chunk_samples"):
        plan_chunks(500 * MIB, **NEEDS, chunk_samples=1000)


def test_the_limit_counts_what_is_in_use() -> None:
    """A limit that leaves the same room above the memory in use gives chunks of the same size."""
    plans = [plan_chunks((n + 200) * MIB, **NEEDS | {"in_use_bytes": n * MIB}) for n in (100, 300)]
    assert plans[0].chunk_samples == plans[1].chunk_samples


# Order


@pytest.mark.parametrize("piece", [1, 3])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_an_order_is_a_permutation_and_follows_from_seed_and_epoch(piece: int, length: int) -> None:
    """An order has each sample once. It is the same for the same seed and epoch, and another one for others."""
    order = chunked_order(length, piece_samples=piece, chunk_samples=12)
    planned = order.draw(0, 2, length)
    assert sorted(planned.tolist()) == list(range(length))
    assert np.array_equal(planned, order.draw(0, 2, length))
    if length == 40:
        assert not np.array_equal(planned, order.draw(0, 3, length))
        assert not np.array_equal(planned, order.draw(1, 2, length))


def test_a_mixed_chunk_is_made_of_whole_pieces() -> None:
    """A chunk of 20 samples in 4 pieces has 4 runs of 5 neighbours, in mixed order."""
    planned = chunked_order(100, piece_samples=5, chunk_samples=20).draw(0, 0, 100)
    for start in range(0, 100, 20):
        chunk = planned[start : start + 20]
        assert len(set((chunk // 5).tolist())) == 4
        assert not np.array_equal(chunk // 5, np.sort(chunk // 5))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("piece", [1, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_share_every_epoch(shuffle: bool, piece: int, drop_last: bool) -> None:
    """Three ranks get equally many of 31 samples: together all but one of them, or all and two of them twice."""
    order = chunked_order(
        31,
        shuffle=shuffle,
        piece_samples=piece,
        chunk_samples=8,
        drop_last=drop_last,
        world_size=3,
    )
    planned = order.draw(0, 1, order.num_samples)
    shares = [planned[rank::3].tolist() for rank in range(3)]
    assert [len(share) for share in shares] == [10 if drop_last else 11] * 3
    together = [position for share in shares for position in share]
    assert len(set(together)) == (30 if drop_last else 31)


def test_ranks_in_order_are_those_of_torch() -> None:
    """Without shuffling, each rank gets the samples that torch's DistributedSampler gives it."""
    for rank in range(3):
        theirs = torch.utils.data.DistributedSampler(
            range(10), num_replicas=3, rank=rank, shuffle=False
        )
        with chunked(Squares(10), shuffle=False, rank=rank, world_size=3) as loader:
            assert flat(labels(loader)) == list(theirs)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_no_two_ranks_draw_the_same_for_a_sample(shuffle: bool, joined: bool) -> None:
    """A sample that several ranks get is augmented differently on each."""
    data, crop = (
        [(torch.arange(400).reshape(1, 20, 20).to(torch.uint8), n) for n in range(3)],
        transforms.RandomCrop(2),
    )
    seen = []
    for rank in range(2):
        with CachedDataset(data, transform=crop, seed=3) as dataset:
            half = Subset(dataset, [1, 1, 1, 1])
            each = ConcatDataset([half, half]) if joined else Subset(dataset, [1] * 8)
            with chunked(each, batch_size=2, shuffle=shuffle, rank=rank, world_size=2) as loader:
                seen += [
                    tuple(image.flatten().tolist()) for images, _ in loader for image in images
                ]
    assert len(set(seen)) == 8


def test_a_rank_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's variables choose the share of the samples; a rank beyond their number is an error."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with chunked(Squares(10), shuffle=False) as loader:
        assert flat(labels(loader)) == [1, 3, 5, 7, 9]
    with pytest.raises(ValueError, match="rank=2 is not one of the world_size=2"):
        chunked(Squares(10), rank=2, world_size=2)


def test_a_loader_made_alone_finds_its_ranks_when_an_epoch_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning starts ranks after loaders are made: such a loader has the share of one that was made on a rank."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"batch_size": 1, "chunk_samples": 2, "drop_last": True}
    with chunked(Squares(11), **options) as alone:
        assert len(alone) == 11
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with chunked(Squares(11), **options) as ranked:
            for _ in range(2):
                assert labels(alone) == labels(ranked)
            assert len(alone) == len(ranked) == 5
            told = [each.state_dict()["loader"]["order"] for each in (alone, ranked)]
            assert told[0] == told[1]


# Resuming


@pytest.mark.parametrize("mix", [None, 3])
@pytest.mark.parametrize("seen", [1, 2, 5, 9])
def test_a_resumed_epoch_has_exactly_the_rest(seen: int, mix: int | None) -> None:
    """A loader that loads a state gives the remaining batches, and then the same next epoch."""
    data = Squares(37)
    with chunked(data, mix_chunks=mix) as loader:
        loader.set_epoch(3)
        batches = iter(loader)
        for _ in range(seen):
            next(batches)
        state = copy.deepcopy(loader.state_dict())
        rest = [targets.tolist() for _, targets in batches]
    with chunked(data, mix_chunks=mix) as resumed:
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert labels(resumed) == rest
        following = labels(resumed)
        resumed.set_epoch(4)
        assert following == labels(resumed)


def test_a_state_after_the_last_batch_is_the_next_epoch() -> None:
    """A state after the last batch gives the next epoch, and no sample of the finished one."""
    with chunked(Squares(10)) as loader:
        first = labels(loader)
        state = loader.state_dict()
        second = labels(loader)
    assert (state["num_yielded"], state["is_begun"]) == (0, False)
    with chunked(Squares(10)) as resumed:
        resumed.load_state_dict(state)
        assert labels(resumed) == second != first


def test_a_state_of_another_order_is_refused() -> None:
    """The error names the values that differ."""
    with chunked(Squares(10)) as loader:
        state = loader.state_dict()
    with (
        chunked(Squares(10), seed=1) as other,
        pytest.raises(ValueError, match=r"'seed': 1.*in the state .*'seed': 0"),
    ):
        other.load_state_dict(state)


# Errors and ends


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_sample_raises_where_its_batch_would_come(workers: int) -> None:
    """Earlier batches come first, the error names the sample, and the next call gives the next batch."""
    with chunked(Damaged(24), shuffle=False, num_workers=workers) as loader:
        batches = iter(loader)
        assert next(batches)[1].tolist() == [0, 1, 2, 3]
        for index in (4, 9):
            with pytest.raises(OSError, match=f"no such disk for {index}"):
                next(batches)
        assert next(batches)[1].tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_break_ends_threads_and_processes(workers: int) -> None:
    """When the iterator is freed, its threads and processes end, although the loader still exists."""
    before = set(psutil.Process().children())
    with chunked(Squares(400), num_workers=workers) as loader:
        for _ in loader:
            break
        gc.collect()
        assert set(psutil.Process().children()) <= before
        assert sorted(flat(labels(loader))) == list(range(400))


def test_a_second_iterator_ends_the_first() -> None:
    """The new iterator gives a whole epoch; the old one gives what was read, then an error with the reason."""
    with chunked(Squares(40)) as loader:
        first = iter(loader)
        next(first)
        assert len(labels(loader)) == 10
        with pytest.raises(RuntimeError, match="another iterator of the same loader was begun"):
            list(first)


def test_a_closed_loader_ends_its_epoch_but_its_batches_live() -> None:
    """Batches that the user holds stay valid after close(), and a later epoch is complete."""
    loader = chunked(Squares(40), shuffle=False)
    batches = iter(loader)
    batch = next(batches)
    loader.close()
    loader.close()
    assert torch.equal(batch[0][3], square(3))
    with pytest.raises(RuntimeError, match="was closed"):
        next(batches)
    assert len(labels(loader)) == 10


@pytest.mark.parametrize("kept", [True, False])
def test_a_pickled_loader_has_the_plan_and_goes_on_alone(tmp_path: Path, kept: bool) -> None:
    """A copy, also one made during an epoch, has the same plan and epochs, and does not disturb its original."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "cache_key": "k"} if kept else {}
    with CachedDataset(Squares(20), **options) as data, chunked(data) as loader:
        epoch = iter(loader)
        next(epoch)
        with pickle.loads(pickle.dumps(loader)) as again:
            assert again.plan == loader.plan
            batches = list(again)
        assert len(list(epoch)) == 4
        assert same(loader, batches)


@pytest.mark.parametrize("kept", [True, False])
def test_a_copy_of_a_loader_counts_its_own_epochs(tmp_path: Path, kept: bool) -> None:
    """A copy reads the same dataset with the same plan, but has its own position and states."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "cache_key": "k"} if kept else {}
    with CachedDataset(Squares(20), **options) as data, chunked(data) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
        with copy.copy(loader) as other:
            assert other.dataset is data
            assert other.plan == loader.plan
            list(other)
            assert loader.state_dict() == state
            other.load_state_dict(state)
            assert len(list(other)) == 4
        assert len(list(epoch)) == 4


def test_batches_kept_by_the_user_are_not_overwritten() -> None:
    """All batches of an epoch, kept at the same time, have their own samples."""
    with chunked(Squares(60), chunk_samples=4) as loader:
        kept = list(loader)
    for images, targets in kept:
        assert all(
            torch.equal(image, square(int(t))) for image, t in zip(images, targets, strict=True)
        )


@pytest.mark.parametrize(
    "data", [Squares(8), Subset(Squares(8), [1, 2, 5])], ids=["whole", "subset"]
)
def test_a_dataset_of_the_users_own_stays_open(data: Any) -> None:
    """Closing the loader does not close the user's dataset."""
    with CachedDataset(data) as own:
        chunked(own).close()
        assert int(own[0][1]) == int(data[0][1])
    chunked(data).close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(()), "map-style"),
        ("a/folder", "from_cache"),
        (3, "map-style"),
    ],
)
def test_datasets_without_an_index_are_refused(data: Any, words: str) -> None:
    """A stream, a path and a number are errors that give the cure."""
    with pytest.raises(TypeError, match=words):
        ChunkedLoader(data, 4, memory_limit="1GiB")


def test_a_batch_without_samples_is_refused() -> None:
    """batch_size=0 raises torch's error, as in a DataLoader."""
    with pytest.raises(ValueError, match="positive integer value, but got batch_size=0"):
        chunked(Squares(8), batch_size=0)


def test_the_report_counts_the_epoch() -> None:
    """The report has the batches and samples of the latest epoch, and how they were read."""
    with chunked(Squares(10)) as loader:
        list(loader)
        report = loader.report()
    assert (report.batches, report.samples) == (3, 10)
    assert report.path.startswith("1 worker process, with batches in shared memory")
    assert issubclass(MemoryBudgetError, FastDataError)


def test_repeated_and_negative_indices_are_a_loaders() -> None:
    """Repeated indices of a Subset get their own draws, and -1 is the last sample, as in a DataLoader."""
    pixels = torch.arange(3 * 400).reshape(1, 3, 20, 20).to(torch.uint8).expand(4, -1, -1, -1)
    crop = transforms.RandomCrop(2)
    data = [(image, n) for n, image in enumerate(pixels)]
    indices = [1, 1, 1, -1, 1]
    with CachedDataset(data, transform=crop, seed=3) as dataset:
        wanted, _ = next(iter(DataLoader(Subset(dataset, indices), batch_size=5)))
    kept = CachedDataset(data, transform=crop, seed=3)
    with kept, chunked(Subset(kept, indices), shuffle=False, batch_size=5) as loader:
        found, targets = next(iter(loader))
    assert torch.equal(found, wanted)
    assert targets.tolist() == [1, 1, 1, 3, 1]


def test_samples_that_batches_fetched_are_released() -> None:
    """All samples of a remote chunk are released, also those that a batch fetched before the thread did."""
    dropped: list[int] = []

    class Store:
        def load(self, positions: Any) -> None:
            while not (made and made[0]._released):
                time.sleep(0.001)

        def evict(self, positions: Any, from_cache: bool) -> None:
            dropped.extend(positions.tolist())

    made: list[ChunkReader] = []
    made.append(
        ChunkReader(
            np.arange(16),
            locate=lambda samples: [(cast("Any", Store()), samples)],
            chunk_samples=8,
            batch_size=4,
            is_remote=True,
            from_cache=False,
        )
    )
    assert made[0]._coming[1].cancel()  # whose batches were ahead of the thread
    made[0].close()
    assert dropped == list(range(16))
