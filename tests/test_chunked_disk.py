"""ChunkedLoader over samples on disk: reading ahead, memory, and the page cache."""

from __future__ import annotations

import gc
import inspect
import mmap
import multiprocessing
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torchvision import transforms

from conftest import FolderMaker
from data import level_samples, save_image
from fastdata import CachedDataset, ChunkedLoader, CudaPrefetcher, DataLoader, ImageFolder
from fastdata.errors import SampleError, StoreGoneError
from fastdata.loaders.chunk_order import chunked as chunked_order
from fastdata.loaders.chunk_plan import ChunkPlan, empties_cache
from fastdata.machine import limits
from fastdata.stores import disk_file as disk_file_module
from fastdata.stores.disk import DiskStore
from simcuda import Sim

CODECS = ["auto", "zstd", "source"]  # raw, encoded, and the files' own bytes
STEPS = [transforms.RandomCrop((7, 9)), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
TO_ONE_SIZE = transforms.Compose([transforms.Resize((10, 12)), *STEPS])
RAGGED = transforms.Compose([transforms.Resize(10), *STEPS])


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the samples of each call that reads a part of a chunk into memory."""
    together: list[list[int]] = []
    plain = DiskStore.load

    def noting(self: DiskStore, index_B: np.ndarray) -> None:
        together.append(index_B.tolist())
        plain(self, index_B)

    monkeypatch.setattr(DiskStore, "load", noting)
    return together


def on_disk(root: Path, transform: Any = TO_ONE_SIZE, **options: Any) -> ImageFolder:
    return ImageFolder(
        str(root),
        transform,
        cache_dir=root.parent / "cache",
        seed=5,
        prepare_workers=1,
        **options,
    )


def in_memory(root: Path, transform: Any = TO_ONE_SIZE) -> ImageFolder:
    return ImageFolder(str(root), transform, storage="shared", seed=5, prepare_workers=1).prepare()


def chunked(data: Any, **arguments: Any) -> ChunkedLoader:
    """Return a loader with one thread and small chunks, each of three pieces of the dataset."""
    usual = {
        "batch_size": 4,
        "memory_limit": "64GiB",
        "chunk_samples": 12,
        "mix_chunks": 3,
        "num_workers": 1,
    }
    return ChunkedLoader(data, **{**usual, **arguments})


def order_of(loader: ChunkedLoader, epoch: int) -> Any:
    """Return an epoch's samples of all ranks, from the loader's state."""
    told = loader.state_dict()["loader"]["order"]
    names = inspect.signature(chunked_order).parameters
    order = chunked_order(**{name: told[name] for name in names})
    return order.draw(told["seed"], epoch, order.num_samples)


def usual_batches(dataset: Any, loader: ChunkedLoader, epoch: int, rank: int = 0) -> list[Any]:
    """Return the batches of a ``DataLoader`` over a dataset in memory, in the order of a ChunkedLoader's epoch."""
    world_size = loader.state_dict()["loader"]["world_size"]
    order = order_of(loader, epoch)[rank::world_size].tolist()
    usual = DataLoader(dataset, batch_size=loader.batch_size, sampler=order)
    usual.set_epoch(epoch)
    return list(usual)


def same(first: Any, second: Any) -> bool:
    """Return True if two epochs are equal in every pixel and target."""
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def mixed_sizes(root: Path) -> Path:
    """Make class folders with images of several shapes."""
    for index in range(26):
        folder = root / "images" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        save_image(folder / f"{index:02}.png", index, (14 + index % 3, 12 + index % 5))
    return root / "images"


def damage(folder: Path, pattern: str, at: int) -> None:
    """Change one byte of the first file in a cache that matches ``pattern``."""
    path = min(path for path in folder.rglob(pattern) if "-sums" not in path.name)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


def mapped_bytes(folder: Path) -> int:
    """Return the bytes of this process's memory that map shards in a folder."""
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    shards = [entry for entry in entries if f"{folder}/" in entry.partition("\n")[0]]
    assert shards
    return (
        sum(int(found) for entry in shards for found in re.findall(r"(?m)^Rss: +(\d+) kB", entry))
        << 10
    )


def least_mapped_bytes(folder: Path, most_bytes: int) -> int:
    """Return the least of up to three measurements: chunks may be released and read while the table is being read."""
    looks = [mapped_bytes(folder)]
    while len(looks) < 3 and looks[-1] > most_bytes:
        looks.append(mapped_bytes(folder))
    return min(looks)


# What is served


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("workers", [1, 2])
def test_pixels_are_those_of_the_loader_in_memory(
    image_folder: FolderMaker, codec: str, workers: int
) -> None:
    """Each sample comes once, with the crop, mirror and values of a DataLoader over the data in memory."""
    root = image_folder(per_class=13, size=(17, 14))
    with (
        on_disk(root, codec=codec) as dataset,
        in_memory(root) as kept,
        chunked(dataset, num_workers=workers) as loader,
    ):
        for epoch in (0, 1):
            assert same(loader, usual_batches(kept, loader, epoch))
        assert sorted(order_of(loader, 0).tolist()) == list(range(26))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("workers", [1, 2])
def test_images_of_many_sizes_are_cropped_to_one(tmp_path: Path, codec: str, workers: int) -> None:
    """Samples of several shapes give the same batches from disk as from memory."""
    root = mixed_sizes(tmp_path)
    with (
        on_disk(root, RAGGED, codec=codec) as dataset,
        in_memory(root, RAGGED) as kept,
        chunked(dataset, num_workers=workers) as loader,
    ):
        assert same(loader, usual_batches(kept, loader, 0))


@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_masks_travel_with_their_images(tmp_path: Path, codec: str) -> None:
    """Images and masks are in separate files, and come in the same rows of a batch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (20, 3, 6, 5), generator=generator, dtype=torch.uint8)
    masks = torch.arange(20).view(-1, 1, 1).expand(20, 6, 5).to(torch.int16).contiguous()
    data = list(zip(images, masks, strict=True))
    options = {"cache_dir": tmp_path / "cache", "cache_key": "pairs"}
    with CachedDataset(data, codec=codec, **options) as dataset, chunked(dataset) as loader:
        batches = list(loader)
        order = torch.from_numpy(order_of(loader, 0))
    assert torch.equal(torch.cat([batch for batch, _ in batches]), images[order])
    assert torch.equal(torch.cat([batch for _, batch in batches]), masks[order])


# How it is read


@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_pieces_are_read_together(image_folder: FolderMaker, loads: Any, codec: str) -> None:
    """A chunk is read piece by piece, whatever the order of its samples, and each sample once in an epoch."""
    with on_disk(image_folder(per_class=18), codec=codec) as dataset, chunked(dataset) as loader:
        for _ in range(2):
            loads.clear()
            list(loader)
            assert "read ahead" in loader.report().path
            assert sorted(index for samples in loads for index in samples) == list(range(36))
            for samples in loads:
                assert samples == [first + k for first in samples[::4] for k in range(4)]
                assert samples == sorted(samples)
                assert {first % 4 for first in samples[::4]} == {0}


@pytest.mark.parametrize(
    ("data", "arguments", "pages"),
    [
        (lambda dataset: Subset(dataset, range(3, 30)), {}, 0),
        (lambda dataset: Subset(dataset, [7, 3, 30, 12, 8, 25]), {}, 2),
        (lambda dataset: dataset, {"rank": 1, "world_size": 2}, 0),
        (
            lambda dataset: dataset,
            {"rank": 1, "world_size": 2, "shuffle": False, "mix_chunks": None},
            2,
        ),
        (lambda dataset: dataset, {"mix_chunks": 2000}, 0),
    ],
    ids=["neighbours", "scattered", "rank", "every other", "single samples"],
)
def test_samples_without_neighbours_are_counted_with_the_pages_they_take(
    image_folder: FolderMaker, data: Any, arguments: Any, pages: int
) -> None:
    """If no two samples are neighbours, the plan counts more memory for each; pixels are the same."""
    root = image_folder(per_class=18, size=(17, 14))
    with (
        on_disk(root) as dataset,
        in_memory(root) as kept,
        chunked(data(dataset), **arguments) as loader,
    ):
        assert same(loader, usual_batches(data(kept), loader, 0, arguments.get("rank", 0)))
        least = 3 * 10 * 12 + pages * mmap.PAGESIZE
        assert least <= loader.plan.chunk_bytes / loader.plan.chunk_samples < least + 512


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the system does not tell what is mapped"
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_more_than_two_chunks_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    """During an epoch of 12 MiB the files take at most the planned memory, and none after a break."""
    data = level_samples(160, (3, 160, 160))
    with CachedDataset(data, cache_dir=tmp_path, cache_key="k") as dataset:
        pieces = 2 if shuffle else None
        with chunked(dataset, chunk_samples=16, shuffle=shuffle, mix_chunks=pieces) as loader:
            most_bytes = 2 * (loader.plan.chunk_bytes + (pieces or 1) * 2 * mmap.PAGESIZE)
            held = [least_mapped_bytes(tmp_path, most_bytes) for _ in loader]
            assert 0 < max(held) <= most_bytes
            assert loader.plan.chunk_bytes - 16 * 3 * 160 * 160 in range(16 * 512)
            for _ in loader:
                break
            assert mapped_bytes(tmp_path) == 0


@pytest.mark.parametrize("transform", [TO_ONE_SIZE, RAGGED])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the system does not tell what is mapped"
)
def test_an_epoch_leaves_nothing_of_the_files_in_this_process(
    tmp_path: Path, transform: Any, codec: str
) -> None:
    """However samples are read, no page of the shards is mapped afterwards, where it would count against the limit."""
    with (
        on_disk(mixed_sizes(tmp_path), transform, codec=codec) as dataset,
        chunked(dataset) as loader,
    ):
        for index in range(len(dataset)):
            dataset[index]
        assert mapped_bytes(tmp_path / "cache") > 0
        list(loader)
        assert mapped_bytes(tmp_path / "cache") == 0


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the system does not tell what is mapped"
)
def test_nothing_is_mapped_around_a_sample_that_was_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel maps the neighbours of a page that is touched, but not of pages that were read ahead."""
    data = level_samples(100, (3, 50, 41))
    with CachedDataset(data, cache_dir=tmp_path, cache_key="k") as dataset:
        store: Any = dataset.reader().kept.images
        store.load(np.array([50]))
        store.read(50).sum()
        assert 0 < mapped_bytes(tmp_path) <= 3 * 50 * 41 + 2 * mmap.PAGESIZE
        store.evict(np.array([50]))
        assert mapped_bytes(tmp_path) == 0
        store.read(50).sum()
        with chunked(dataset):  # it counts only what it cannot have back
            assert mapped_bytes(tmp_path) == 0


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was forked while its parent read samples can read samples itself."""
    data = level_samples(8, (3, 50, 41))
    advise: Any = disk_file_module._advise
    children: list[Any] = []

    def forking(*advice: Any) -> None:
        if not children and multiprocessing.parent_process() is None:
            fork = multiprocessing.get_context("fork")
            children.append(fork.Process(target=store.load, args=(np.array([1]),), daemon=True))
            children[0].start()
            children[0].join(60)
        advise(*advice)

    with CachedDataset(data, cache_dir=tmp_path, cache_key="k") as dataset:
        store: Any = dataset.reader().kept.images
        monkeypatch.setattr(disk_file_module, "_advise", forking)
        store.load(np.array([0]))
        children[0].kill()
        children[0].join()
        assert children[0].exitcode == 0


@pytest.mark.parametrize("most", [0, 1])
def test_too_many_pieces_only_take_more_memory(
    image_folder: FolderMaker, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """If there are too many pieces to track, batches are the same."""
    monkeypatch.setattr(disk_file_module, "_MOST_AREAS", most)
    root = image_folder(per_class=13, size=(17, 14))
    with on_disk(root) as dataset, in_memory(root) as kept, chunked(dataset) as loader:
        assert same(loader, usual_batches(kept, loader, 0))


@pytest.mark.parametrize("transform", [TO_ONE_SIZE, RAGGED])
@pytest.mark.parametrize("codec", CODECS)
def test_released_samples_can_be_read_again(tmp_path: Path, transform: Any, codec: str) -> None:
    """Samples are the same after all memory of a cache was released, also that in the page cache."""
    with on_disk(mixed_sizes(tmp_path), transform, codec=codec) as dataset:
        store: Any = dataset.reader().kept.images
        views = [store.read(index) for index in range(len(store))]
        copies = [view.copy() for view in views]
        store.evict(np.arange(len(store)), from_cache=True)
        for index, (view, copy) in enumerate(zip(views, copies, strict=True)):
            assert np.array_equal(view, copy)
            assert np.array_equal(store.read(index), copy)
            store.evict(np.array([index]))


def test_many_cores_do_not_take_the_memory_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 cores, batches that are read ahead take at most a quarter of the free memory."""
    monkeypatch.setattr(limits, "usable_cores", lambda: 64)
    # Measured, it changes with what other processes share.
    monkeypatch.setattr(limits, "tree_pss_bytes", lambda: 500 << 20)
    data = level_samples(64, (3, 100, 100))
    with CachedDataset(data, cache_dir=tmp_path, cache_key="k", prepare_workers=1) as dataset:
        limit = limits.tree_pss_bytes() + (100 << 20)
        arguments = {
            "batch_size": 32,
            "memory_limit": limit,
            "num_workers": None,
            "chunk_samples": None,
        }
        with chunked(dataset, **arguments) as loader:
            assert loader.plan.batches_bytes < 50 << 20
            assert sorted(int(label) for _, labels in loader for label in labels) == list(range(64))
            assert 1 < loader.report().workers < 64
        with chunked(dataset, **{**arguments, "num_workers": 0}) as loader:
            assert loader.plan.workers == 1  # not the default, which is all cores


def test_the_order_does_not_follow_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with different free memory have one order, and a state of one can be resumed on the other."""
    data = level_samples(160, (3, 160, 160))
    options = {"memory_limit": (500 + 64 + 10) << 20, "chunk_samples": None, "batch_size": 8}

    def rank_of(dataset: Any, number: int, in_use_mib: int) -> ChunkedLoader:
        monkeypatch.setattr(limits, "tree_pss_bytes", lambda: in_use_mib << 20)
        return chunked(dataset, rank=number, world_size=2, mix_chunks=5, **options)

    def labels(batches: Any) -> list[int]:
        return [label for _, labels in batches for label in labels.tolist()]

    with CachedDataset(data, cache_dir=tmp_path, cache_key="k") as dataset:
        sizes = []
        seen = []
        for number, in_use_mib in enumerate([500, 504]):
            with rank_of(dataset, number, in_use_mib) as loader:
                seen += labels(loader)
                sizes.append(loader.plan.chunk_samples)
        assert sizes[0] > sizes[1] >= 8
        assert sorted(seen) == list(range(160))
        with rank_of(dataset, 0, 500) as loader:
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            state = loader.state_dict()
        with rank_of(dataset, 0, 504) as again:
            again.load_state_dict(state)
            assert labels(again) == seen[24:80]


def test_parts_of_a_chunk_have_room_for_their_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a whole chunk does not fit, the plan counts the pages around each sample, which is then read alone."""
    data = level_samples(160, (3, 160, 160))
    with CachedDataset(data, cache_dir=tmp_path, cache_key="k") as dataset:
        bytes_each = []
        for limit_mib in (500 + 64 + 10, 1000):
            monkeypatch.setattr(limits, "tree_pss_bytes", lambda: 500 << 20)
            limit = {"memory_limit": limit_mib << 20, "chunk_samples": None, "batch_size": 8}
            with chunked(dataset, mix_chunks=5, **limit) as loader:
                bytes_each.append(loader.plan.chunk_bytes / loader.plan.chunk_samples)
        assert round(bytes_each[0] - bytes_each[1]) == 2 * mmap.PAGESIZE


# The page cache


@pytest.mark.parametrize(
    ("disk", "free", "is_emptied"),
    [(0, 0, True), (100, 650, False), (101, 650, True), (0, 550, False)],
)
def test_the_page_cache_is_kept_where_it_fits(disk: int, free: int, is_emptied: bool) -> None:
    """Files stay in the page cache if they fit there with the loader's 500 bytes and a reserve of 50."""
    plan = ChunkPlan(
        limit_bytes=1000,
        in_use_bytes=300,
        reserve_bytes=50,
        batches_bytes=100,
        workers=1,
        chunk_samples=4,
        chunk_bytes=200,
    )
    assert empties_cache(disk, free, plan) == is_emptied


@pytest.mark.parametrize("is_large", [True, False])
def test_the_page_cache_is_emptied_where_memory_is_short(
    image_folder: FolderMaker, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """Each sample is released after its batch; it leaves the page cache only if not all samples fit there."""
    dropped: list[int] = []
    emptied: set[bool] = set()

    def evict(self: DiskStore, index_B: np.ndarray, *, from_cache: bool) -> None:
        dropped.extend(index_B.tolist())
        emptied.add(from_cache)

    with on_disk(image_folder(per_class=18)) as dataset:
        if is_large:
            monkeypatch.setattr(dataset.reader().kept.images, "size_bytes", 1 << 60)
        monkeypatch.setattr(DiskStore, "evict", evict)
        with chunked(dataset) as loader:
            dropped.clear()
            emptied.clear()
            list(loader)
            assert ("page cache" in loader.report().path) == is_large
    assert sorted(dropped) == list(range(36))
    assert emptied == {is_large}


# Damage


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_sample_is_named(image_folder: FolderMaker, codec: str, workers: int) -> None:
    """Its batch raises an error with its path, all others arrive, and the next run repairs it."""
    root = image_folder(per_class=13, size=(17, 14))
    with on_disk(root, codec=codec) as dataset:
        wanted = dataset.reader().kept.images.read(0).copy()
    damage(root.parent / "cache", "part0-*", 140 if codec == "auto" else 3)
    with (
        on_disk(root, codec=codec) as dataset,
        chunked(dataset, shuffle=False, num_workers=workers) as loader,
    ):
        batches = iter(loader)
        with pytest.raises(
            SampleError, match=r"sample 0, .*cat.000\.jpg, cannot be read: .* next run"
        ) as caught:
            next(batches)
        assert caught.value.index == 0
        assert [targets.tolist() for _, targets in batches] == [[0] * 4] * 2 + [[0, 1, 1, 1]] + [
            [1] * 4
        ] * 2 + [[1, 1]]
        del caught
    with on_disk(root, codec=codec) as dataset:
        assert np.array_equal(dataset.reader().kept.images.read(0), wanted)


def test_a_damaged_sample_does_not_keep_a_loader_from_being_made(image_folder: FolderMaker) -> None:
    """A loader can be made if the first sample, which is read to learn its form, is damaged."""
    root = image_folder(per_class=5)
    on_disk(root).close()
    damage(root.parent / "cache", "part0-*.npy", 140)
    with on_disk(root) as dataset, chunked(dataset, shuffle=False) as loader:
        batches = iter(loader)
        with pytest.raises(SampleError, match=r"sample 0, .*000\.jpg"):
            next(batches)
        assert [len(targets) for _, targets in batches] == [4, 2]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_cache_that_is_deleted_in_use_is_served_to_the_end(
    image_folder: FolderMaker, codec: str, workers: int
) -> None:
    """The files are mapped, so all epochs are complete until the dataset is closed."""
    root = image_folder(per_class=13, size=(17, 14))
    with (
        on_disk(root, codec=codec) as dataset,
        in_memory(root) as kept,
        chunked(dataset, num_workers=workers) as loader,
    ):
        shutil.rmtree(root.parent / "cache")
        for epoch in (0, 1):
            assert same(loader, usual_batches(kept, loader, epoch))


# With others


def test_batches_reach_the_device_as_they_are(gpu: Sim, image_folder: FolderMaker) -> None:
    """A prefetcher gives the same batches in each epoch, and reads no memory that was reused."""
    root = image_folder(per_class=13, size=(17, 14))
    with on_disk(root) as dataset, in_memory(root) as kept, chunked(dataset) as loader:
        prefetcher = CudaPrefetcher(
            loader, "cuda:0", transform=lambda batch: [part.cpu() for part in batch]
        )
        for epoch in (0, 1):
            assert same(prefetcher, usual_batches(kept, loader, epoch))


@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_the_path_of_a_cache_is_enough(image_folder: FolderMaker, codec: str) -> None:
    """From a cache or a cache_dir images come as PILToTensor gives them, also if their folder no longer exists."""
    root = image_folder(per_class=13, size=(17, 14))
    resize = transforms.Resize((10, 12))
    with on_disk(root, resize, codec=codec) as dataset:
        wanted = [(transforms.PILToTensor()(image), label) for image, label in dataset]
    shutil.rmtree(root)
    cache_dir = root.parent / "cache"
    (home,) = (path.parent for path in cache_dir.glob("*/fastdata.npz"))
    for path in (home, str(cache_dir), str(home).encode()):
        with (
            CachedDataset.from_cache(os.fsdecode(path), as_tensors=True) as opened,
            chunked(opened, batch_size=8, chunk_samples=8, mix_chunks=2) as loader,
        ):
            batches = list(loader)
            assert "whole batches" in loader.report().path
            assert opened.classes == ["cat", "dog"]
        images, labels = (torch.cat(column) for column in zip(*batches, strict=True))
        assert images.dtype == torch.uint8
        served = sorted(
            (image.numpy().tobytes(), label)
            for image, label in zip(images, labels.tolist(), strict=True)
        )
        assert served == sorted((image.numpy().tobytes(), label) for image, label in wanted)


class Mirror:
    """A codec that accepts any bytes of the right number."""

    name = "mirror"

    def encode(self, array: np.ndarray) -> bytes:
        return array.tobytes()[::-1]

    def decode(self, data: memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(data, out.dtype)[::-1].reshape(out.shape)


def test_bytes_that_a_codec_would_take_are_checked_too(tmp_path: Path) -> None:
    """Each encoded sample is compared with its checksum, whatever its codec accepts."""
    data = level_samples(8, (1, 6, 5))
    options: dict[str, Any] = {
        "cache_dir": tmp_path,
        "cache_key": "k",
        "codec": Mirror(),
    }
    CachedDataset(data, **options).close()
    damage(tmp_path, "part0-*.bin", 3)
    with (
        CachedDataset(data, **options) as dataset,
        chunked(dataset, shuffle=False, mix_chunks=None) as loader,
    ):
        batches = iter(loader)
        with pytest.raises(SampleError, match=r"sample 0 .* are not those that were written"):
            next(batches)
        assert [images[:, 0, 0, 0].tolist() for images, _ in batches] == [[4, 5, 6, 7]]


@pytest.mark.parametrize("is_error_kept", [False, True])
def test_a_dataset_is_closed_after_an_epoch_that_failed(
    image_folder: FolderMaker, is_error_kept: bool
) -> None:
    """close() releases the chunks without an error, also if a traceback still holds the failed iterator."""
    batches: list[int] = []
    errors: list[Exception] = []

    def collate(samples: Any) -> Any:
        batches.append(len(samples))
        if len(batches) == 3:
            raise ArithmeticError("no batch of these")
        return torch.stack([image for image, _ in samples])

    with (
        on_disk(image_folder(per_class=16)) as dataset,
        chunked(dataset, collate_fn=collate) as loader,
    ):
        try:
            list(loader)
        except ArithmeticError as error:
            errors += [error] * is_error_kept
        loader.dataset.close()
        errors.clear()
        gc.collect()
        with pytest.raises(StoreGoneError):
            iter(loader)
    assert len(batches) >= 3
