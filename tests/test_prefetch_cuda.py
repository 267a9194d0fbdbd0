"""The prefetcher on a real GPU. A slow kernel is ``torch.cuda._sleep``, which spins for some clock cycles."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1
from torchvision.transforms import v2

from data import Levels
from fastdata import CachedDataset, CudaPrefetcher, DataLoader, FastDataWarning
from fastdata.errors import DeviceError, MemoryBudgetError
from fastdata.loaders import resident

pytestmark = pytest.mark.cuda

SLOW_CYCLES = 20_000_000
"""About 10 ms at 2 GHz."""
MIB = 1 << 20


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    with CachedDataset(Levels(96, (3, 64, 48))) as cached:
        yield cached


def loaders(dataset: CachedDataset) -> dict[str, Any]:
    """Return loaders for every way of a batch: from threads, from slots of workers, new, and pinned by the loader."""
    fresh = [
        (torch.full((32, 3, 64, 48), i, dtype=torch.uint8), torch.arange(32)) for i in range(6)
    ]
    return {
        "threads": DataLoader(dataset, batch_size=32, num_workers=2),
        "training loop": DataLoader(dataset, batch_size=32),
        "processes": DataLoader(Levels(96, (3, 64, 48)), batch_size=32, num_workers=2),
        "pinned": DataLoader(
            Levels(96, (3, 64, 48)), batch_size=32, num_workers=1, pin_memory=True
        ),
        "fresh": fresh,
    }


ROADS = ("threads", "training loop", "processes", "pinned", "fresh")


@pytest.mark.parametrize("road", ROADS)
def test_batches_arrive_whole(dataset: CachedDataset, road: str) -> None:
    """Every batch is on the GPU and equal to the loader's, in two epochs."""
    loader = loaders(dataset)[road]
    expected = [(images.clone(), labels.clone()) for images, labels in loader]
    with CudaPrefetcher(loader) as batches:
        for _ in range(2):
            arrived = list(batches)
            assert len(arrived) == len(expected)
            for (images, labels), (right, numbers) in zip(arrived, expected, strict=True):
                assert images.device.type == labels.device.type == "cuda"
                assert torch.equal(images.cpu(), right)
                assert torch.equal(labels.cpu(), numbers)
        report = batches.report()
    assert report.pageable_bytes == 0
    images_bytes = sum(images.nbytes for images, _ in expected)
    whole_bytes = images_bytes + sum(labels.nbytes for _, labels in expected)
    in_place = {"threads": images_bytes, "training loop": images_bytes, "pinned": whole_bytes}
    assert report.in_place_bytes == in_place.get(road, 0)


@pytest.mark.parametrize("road", ROADS)
def test_a_slow_kernel_never_sees_later_memory(dataset: CachedDataset, road: str) -> None:
    """A kernel that reads a dropped batch late never reads the pattern that is written to all freed memory."""
    loader = loaders(dataset)[road]
    right = [int(images.long().sum()) for images, _ in loader]

    def poison(batch: Any) -> Any:
        # Takes the block of a batch that was freed too early, and drops it.
        torch.full_like(batch[0], 255)
        return batch

    sums = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), CudaPrefetcher(loader, depth=1, transform=poison) as batches:
        for _ in range(2):
            for images, labels in batches:
                torch.cuda._sleep(SLOW_CYCLES)
                sums.append(images.long().sum())
                del images, labels
                torch.full((32, 3, 64, 48), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert [int(total) for total in sums] == right * 2


def test_fifty_epochs_reserve_no_more_memory(dataset: CachedDataset) -> None:
    """Neither device memory nor pinned memory grows (a batch kept in each epoch would be 29 MiB)."""
    batch_bytes = 32 * 3 * 64 * 48
    with CudaPrefetcher(
        DataLoader(dataset, batch_size=32, num_workers=2), dtype=torch.float16
    ) as batches:
        reserved = []
        for _ in range(50):
            for images, _ in batches:
                images.mean()
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
        slots = 2 * 2 + 1 + 3  # two workers, two batches ahead each, one that is read, three held
        assert batches.report().pinned_bytes <= 2 * slots * batch_bytes + 4 * 4096  # powers of two
    # Two segments of the allocator for small blocks.
    assert max(reserved[10:]) <= max(reserved[:10]) + 4 * MIB


def test_a_loop_that_runs_ahead_of_the_gpu_holds_few_batches() -> None:
    """Device memory in use is that of depth + 3 batches, although the loop never waits."""
    batch_bytes = 16 * MIB
    batch = torch.zeros(batch_bytes, dtype=torch.uint8)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    with CudaPrefetcher([batch] * 40, depth=2) as batches:
        for moved in batches:
            torch.cuda._sleep(SLOW_CYCLES // 4)
            moved.add_(1)
            del moved
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before <= 5 * batch_bytes


def test_copies_overlap_with_kernels() -> None:
    """A loop of slow kernels takes about as long with copies of batches as without."""
    batch = torch.zeros(64 * MIB, dtype=torch.uint8)
    steps = 20

    def run(batches: Any) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in batches:
            torch.cuda._sleep(SLOW_CYCLES)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    with CudaPrefetcher([batch] * steps, depth=2) as batches:
        run(batches)
        resident = min(run(range(steps)) for _ in range(3))
        prefetched = min(run(batches) for _ in range(3))
    copying = run(batch.to("cuda") for _ in range(steps))
    assert prefetched < resident * 1.25
    assert prefetched < copying


def test_the_side_stream_is_made_once(dataset: CachedDataset) -> None:
    """All epochs and the transform use one stream, which is not the user's."""
    seen: set[int] = set()

    def note(batch: Any) -> Any:
        seen.add(torch.cuda.current_stream().cuda_stream)
        return batch

    with CudaPrefetcher(DataLoader(dataset, batch_size=32), transform=note) as batches:
        for _ in range(5):
            list(batches)
    assert len(seen) == 1
    assert torch.cuda.current_stream().cuda_stream not in seen


def test_casts_happen_on_the_gpu() -> None:
    """Images arrive as float16 in channels last, labels unchanged."""
    batch = [torch.full((2, 3, 8, 6), 7, dtype=torch.uint8), torch.tensor([1, 2])]
    ((images, labels),) = CudaPrefetcher([batch], dtype=torch.float16, channels_last=True)
    assert images.dtype is torch.float16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.mean().item() == 7
    assert labels.tolist() == [1, 2]
    assert labels.dtype is torch.int64


def test_odd_tensors_and_device_tensors_arrive() -> None:
    """Sparse tensors are moved; tensors on the GPU are returned themselves."""
    on_gpu = torch.ones(3, device="cuda")
    ((sparse, passed, empty),) = CudaPrefetcher(
        [[torch.eye(3).to_sparse(), on_gpu, torch.zeros(0, 3)]]
    )
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense().cpu(), torch.eye(3))
    assert passed is on_gpu
    assert empty.shape == (0, 3)
    assert empty.device.type == "cuda"


def test_a_break_leaves_no_thread_and_no_memory(dataset: CachedDataset) -> None:
    """After a break the thread has ended, and device memory is as before."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        for batch in CudaPrefetcher(DataLoader(dataset, batch_size=32, num_workers=2)):
            del batch
            break
    torch.cuda.synchronize()
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "fastdata-prefetch"]
    assert torch.cuda.memory_allocated() == before


def test_auto_pinning_pins_batches_worth_it(dataset: CachedDataset) -> None:
    """The loader's own batches are pinned; with a prefetcher they are not copied a second time."""
    loader = DataLoader(dataset, batch_size=32, num_workers=1, pin_memory="auto")
    assert loader.pin_memory is True
    assert all(images.is_pinned() for images, _ in loader)
    with CudaPrefetcher(loader) as batches:
        list(batches)
        assert batches.report().in_place_bytes


def test_a_missing_device_is_an_error() -> None:
    """The error for a number that is too high has the number of devices."""
    with pytest.raises(DeviceError, match=f"torch sees {torch.cuda.device_count()} CUDA device"):
        CudaPrefetcher([], device=f"cuda:{torch.cuda.device_count()}")


# Beside what training loops do


def test_next_inside_a_capture_is_refused() -> None:
    """``next`` raises an error, and the capture is not ended."""
    moving = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with CudaPrefetcher([torch.ones(2)] * 3) as batches:
        epoch = iter(batches)
        with torch.cuda.graph(graph):
            with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
                next(epoch)
            moving.add_(1)
        graph.replay()
        assert moving.tolist() == [2] * 8
        assert len(list(batches)) == 3


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_graph_is_captured_beside_loader_threads(dataset: CachedDataset, mode: str) -> None:
    """A graph can be captured while threads of the loader pin slots of its ring."""
    moving = torch.ones(MIB, device="cuda")
    loader = DataLoader(dataset, batch_size=4, num_workers=4)
    expected = [int(images.long().sum()) for images, _ in loader]
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with CudaPrefetcher(loader) as batches:
            epoch = iter(batches)
            sums = [next(epoch)[0].long().sum()]
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(200):
                    moving.mul_(1.0)
            sums += [images.long().sum() for images, _ in epoch]
        assert [int(total) for total in sums] == expected


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_graph_is_captured_beside_the_prefetcher(mode: str) -> None:
    """Captures during an epoch succeed and batches are right, whatever the thread calls in CUDA."""
    moving = torch.ones(MIB, device="cuda")
    seen = []
    with CudaPrefetcher(
        [torch.full((MIB,), i % 251, dtype=torch.uint8) for i in range(60)]
    ) as batches:
        for number, batch in enumerate(batches):
            if number % 10 == 5:
                graph = torch.cuda.CUDAGraph()  # holds one capture
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    for _ in range(200):
                        moving.mul_(1.0)
                graph.replay()
            seen.append(batch.max())
    assert [int(value) for value in seen] == list(range(60))
    assert moving.mean().item() == 1


def test_a_compiled_net_with_graphs_gets_right_batches() -> None:
    """Batches are right if ``torch.compile(mode='reduce-overhead')`` captures and replays graphs in the loop."""
    pytest.importorskip("triton")
    done = run_alone(  # the compiler keeps threads and processes
        """
import torch
from fastdata import CudaPrefetcher
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
net = torch.compile(layers, mode="reduce-overhead")
loader = [torch.full((32, 64), float(i % 7)) for i in range(40)]
with torch.no_grad(), CudaPrefetcher(loader) as batches:
    for number, batch in enumerate(batches):
        expected = layers(loader[number].cuda())
        torch.testing.assert_close(net(batch).clone(), expected, rtol=1e-3, atol=1e-3)
print(number)
"""
    )
    assert done.stdout.split() == ["39"], done.stderr


def test_a_loop_bound_by_launches_is_hardly_slowed() -> None:
    """With hundreds of tiny kernels in a step, the copy thread makes the loop less than 1.5 times as slow."""
    batch, small = torch.zeros(MIB, dtype=torch.uint8), torch.ones(8, device="cuda")

    def run(batches: Any) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in batches:
            for _ in range(300):
                small.mul_(1.0)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    with CudaPrefetcher([batch] * 100) as batches:
        run(batches)
        resident = min(run(range(100)) for _ in range(3))
        assert min(run(batches) for _ in range(3)) < resident * 1.5


def test_copies_that_the_loop_queues_cost_it_little(dataset: CachedDataset) -> None:
    """With hundreds of tiny kernels in a step, and loader threads, copies in ``next()`` take little time."""
    small = torch.ones(8, device="cuda")

    def run(batches: Any) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in batches:
            names = [thread.name for thread in threading.enumerate()]
            assert "fastdata-prefetch" not in names
            for _ in range(300):
                small.mul_(1.0)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    loader = DataLoader(dataset, batch_size=8, num_workers=2)
    with CudaPrefetcher(loader) as batches:
        run(batches)
        resident = min(run(range(len(loader))) for _ in range(3))
        assert min(run(batches) for _ in range(3)) < resident * 1.3


def test_a_loop_that_runs_ahead_without_a_thread_holds_few_batches(dataset: CachedDataset) -> None:
    """``next()`` limits the batches on the device, and a slow kernel reads the right values late."""
    loader = DataLoader(dataset, batch_size=32, num_workers=2)
    right = [int(images.long().sum()) for images, _ in loader]
    batch_bytes = 32 * 3 * 64 * 48
    with CudaPrefetcher(loader, depth=2) as batches:
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["active_bytes.all.current"]
            sums = torch.zeros(len(right), dtype=torch.int64, device="cuda")
            for number, (images, labels) in enumerate(batches):
                torch.cuda._sleep(SLOW_CYCLES // 4)
                torch.sum(images.view(-1), 0, dtype=torch.int64, out=sums[number])
                del images, labels
            torch.cuda.synchronize()
            peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
            assert peak <= 5 * batch_bytes + MIB
            assert sums.tolist() == right


def test_a_transform_has_neither_gradients_nor_the_loops_autocast() -> None:
    """Only modes that the transform itself enters apply to it."""
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)
    seen: list[Any] = []

    def transform(batch: torch.Tensor) -> torch.Tensor:
        seen.append((batch @ weight).dtype)
        with torch.autocast("cuda", torch.bfloat16):
            return batch @ weight

    with (
        torch.autocast("cuda", torch.float16),
        CudaPrefetcher([torch.ones(2, 4)] * 3, transform=transform) as batches,
    ):
        made = list(batches)
    assert seen == [torch.float32] * 3
    assert all(batch.dtype is torch.bfloat16 and not batch.requires_grad for batch in made)
    assert [batch.unique().item() for batch in made] == [4] * 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_torch_has_pinned_are_copied_in_place(num_workers: int) -> None:
    """Batches of torch's loader with pin_memory=True are right, although its allocator may reuse the memory."""
    loader = TorchLoader(
        Levels(96, (3, 64, 48)), batch_size=32, num_workers=num_workers, pin_memory=True
    )
    expected = [
        int(images.long().sum())
        for images, _ in TorchLoader(Levels(96, (3, 64, 48)), batch_size=32)
    ]
    with CudaPrefetcher(loader) as batches:
        for _ in range(3):
            sums = []
            for images, _ in batches:
                torch.cuda._sleep(SLOW_CYCLES // 4)
                sums.append(images.long().sum())
                del images
            assert [int(total) for total in sums] == expected
            report = batches.report()
            assert report.in_place_bytes
            assert (report.staged_bytes, report.pageable_bytes) == (0, 0)


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError('left')"])
def test_a_process_ends_with_batches_in_flight(ending: str) -> None:
    """The process ends with its own exit status, and the prefetcher prints nothing."""
    done = run_alone(
        f"""
import sys, torch
from fastdata import CudaPrefetcher
batches = iter(CudaPrefetcher([torch.zeros(1 << 24, dtype=torch.uint8)] * 50))
next(batches)
torch.cuda._sleep({SLOW_CYCLES})
{ending}
"""
    )
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert "fastdata" not in done.stderr


def test_a_lost_device_is_an_error_and_no_hang() -> None:
    """After an illegal index in a kernel the loop gets CUDA's error, and the process ends.

    It may end with an abort, after the traceback: torch's allocators do that where memory dies that a stream may still
    use, and no one can ask the device for the use's end.
    """
    done = run_alone(
        """
import torch
from fastdata import CudaPrefetcher
with CudaPrefetcher([torch.zeros(1 << 20)] * 50) as batches:
    for number, batch in enumerate(batches):
        if number == 3:
            batch[torch.tensor([1 << 40], device="cuda")]
"""
    )
    assert done.returncode in (1, -6)
    assert "Traceback (most recent call last)" in done.stderr
    assert "device-side assert triggered" in done.stderr
    assert "Exception in thread" not in done.stderr


# Batch ops on the GPU

CROP = [v1.RandomCrop((56, 40), padding=2), v1.RandomHorizontalFlip()]
FLOATS = [v1.ConvertImageDtype(torch.float32), v1.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))]
STEPS = {
    "crop": CROP,
    "crop, normalised": [*CROP, *FLOATS],
    "resized": [v2.RandomResizedCrop((32, 24), antialias=True), v2.RandomHorizontalFlip()],
    "grayscale": [v1.Grayscale(3), v1.RandomVerticalFlip(), *FLOATS],
}


def noisy(storage: Any, steps: Any) -> CachedDataset:
    """Return ninety-six random images of 3 x 64 x 48."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (96, 3, 64, 48), dtype=torch.uint8, generator=generator)
    samples = [(image, number) for number, image in enumerate(images)]
    return CachedDataset(samples, transform=v1.Compose(steps), storage=storage, seed=0)


def seeded(dataset: CachedDataset, **options: Any) -> DataLoader:
    """Return a loader with the same batches each time; the last one is smaller."""
    loader = DataLoader(
        dataset, 28, shuffle=True, generator=torch.Generator().manual_seed(5), **options
    )
    loader.set_epoch(2)
    return loader


@pytest.mark.parametrize("storage", ["shared", "device"])
@pytest.mark.parametrize("name", STEPS)
def test_batch_ops_on_the_gpu_give_the_batches_of_the_cpu(name: str, storage: Any) -> None:
    """Bytes are equal and floats within 1e-5, with and without threads, in each epoch."""
    is_cut_there = storage == "device" and name != "resized"
    with noisy(storage, STEPS[name]) as dataset:
        expected = list(seeded(dataset))
        for num_workers in (0, 2):
            with ExitStack() as stack:
                if storage == "device" and not is_cut_there:
                    stack.enter_context(pytest.warns(FastDataWarning, match="runs on the CPU"))
                loader = seeded(dataset, num_workers=num_workers)
                batches = stack.enter_context(CudaPrefetcher(loader, batch_ops="device"))
                arrived = [(images.cpu(), labels.cpu()) for images, labels in batches]
                is_there = batches.report().batch_ops.startswith("on cuda:")
            assert is_there is (is_cut_there or expected[0][0].is_floating_point())
            assert len(arrived) == len(expected)
            for (images, labels), (right, numbers) in zip(arrived, expected, strict=True):
                assert labels.tolist() == numbers.tolist()
                assert (images.shape, images.dtype) == (right.shape, right.dtype)
                torch.testing.assert_close(
                    images, right, rtol=0, atol=1e-5 if right.is_floating_point() else 0
                )


@pytest.mark.parametrize("storage", ["shared", "device"])
def test_a_slow_kernel_sees_what_batch_ops_made(storage: Any) -> None:
    """Temporary memory of batch ops, and dropped batches, are not written to while they are read."""
    with noisy(storage, CROP) as dataset:
        right = [int(images.long().sum()) for images, _ in seeded(dataset)]
        sums = []
        stream = torch.cuda.Stream()
        with (
            torch.cuda.stream(stream),
            CudaPrefetcher(seeded(dataset, num_workers=2), depth=1) as batches,
        ):
            for _ in range(2):
                for images, labels in batches:
                    torch.cuda._sleep(SLOW_CYCLES)
                    sums.append(images.long().sum())
                    del images, labels
                batches.loader.generator.manual_seed(5)  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        assert [int(total) for total in sums] == right * 2


def test_a_store_on_the_gpu_is_copied_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is copied in many chunks, stays while the prefetcher exists, and is freed by ``close``."""
    monkeypatch.setattr(resident, "CHUNK_BYTES", 10 * 3 * 64 * 48)
    store_bytes = 96 * 3 * 64 * 48
    with noisy("device", CROP) as dataset:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        batches = CudaPrefetcher(seeded(dataset))
        held = []
        for _ in range(3):
            for batch in batches:
                del batch
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated() - before)
        assert all(store_bytes <= size < store_bytes + MIB // 2 for size in held)
        assert held[0] == held[2]
        batches.close()
        assert torch.cuda.memory_allocated() - before < MIB // 2
        del batches
        gc.collect()
        assert torch.cuda.memory_allocated() == before


def test_a_store_too_large_for_the_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated, and the error gives the free memory."""
    monkeypatch.setattr("fastdata.machine.budget.DEVICE_SHARE", 1e-9)
    message = r"storage='device' needs 864\.0 KiB on cuda:\d, but takes at most"
    with (
        noisy("device", CROP) as dataset,
        CudaPrefetcher(seeded(dataset)) as batches,
        pytest.raises(MemoryBudgetError, match=message),
    ):
        next(iter(batches))


def test_stored_samples_are_pinned_where_they_are_gathered() -> None:
    """Only labels are copied once more on the host."""
    with noisy("shared", STEPS["crop, normalised"]) as dataset:
        with CudaPrefetcher(seeded(dataset, num_workers=2)) as batches:
            assert len(list(batches)) == 4
            report = batches.report()
        assert (report.in_place_bytes, report.pageable_bytes) == (96 * 3 * 56 * 40, 0)
