"""Batches as trees: structures, shards, and what is cast on the device."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fastdata import CudaPrefetcher, DeviceError, DevicePrefetcher, SampleBatch
from fastdata.prefetch import Prefetcher
from fastdata.prefetch.batches import is_dense, map_tensors, memory_of, shard_sizes, split_batch, tensors_in
from fastdata.prefetch.finish import Finish
from recording import RecordingBackend


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Labelled:
    image: Any
    name: str


def plus_one(tensor: Any) -> Any:
    return tensor + 1


def test_structures_keep_their_types() -> None:
    """Every container comes back as what it was, and other values untouched."""
    zero = torch.zeros(2)
    default = defaultdict(list, {"a": zero})
    batch = (Point(zero, "p"), Labelled(zero, "n"), OrderedDict(b=zero), default, [zero, b"x"], {"k": 3})
    point, labelled, ordered, other, listed, plain = map_tensors(batch, plus_one)
    assert (type(point), type(labelled), type(ordered), type(other)) == (Point, Labelled, OrderedDict, defaultdict)
    assert other.default_factory is list
    assert (point.y, labelled.name, listed[1]) == ("p", "n", b"x")
    for tensor in (point.x, labelled.image, ordered["b"], other["a"], listed[0]):
        assert tensor.tolist() == [1, 1]
    assert plain is batch[-1]
    assert default["a"] is zero


def test_a_sample_batch_stays_one() -> None:
    """Its samples are views of the new images."""
    samples = SampleBatch(torch.zeros(2, 3), torch.tensor([4, 5]), [4, 5])
    changed = map_tensors(samples, plus_one)
    assert isinstance(changed, SampleBatch)
    assert changed.stacked is not None
    assert changed.stacked[1].tolist() == [5, 6]
    assert (changed[1][0].tolist(), changed[1][1]) == ([1, 1, 1], 5)
    assert changed[1][0].untyped_storage().data_ptr() == changed.stacked[0].untyped_storage().data_ptr()


def test_a_tensor_that_stands_twice_is_changed_once() -> None:
    """Both places hold the same new tensor."""
    zero = torch.zeros(2)
    first, second = map_tensors([zero, zero], plus_one)
    assert first is second
    assert len(tensors_in([zero, zero])) == 1


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3, 4), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 3).T, True),
        (torch.zeros(4, 3)[::2], False),
        (torch.zeros(1, 3).expand(2, 3), False),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(4, 4)[:, :1], False),
    ],
)
def test_dense_tensors_fill_a_range_of_memory(tensor: torch.Tensor, dense: bool) -> None:
    """Transposed ones do, strided and expanded ones do not."""
    assert is_dense(tensor) is dense


@pytest.mark.parametrize(
    ("samples", "devices", "sizes"), [(10, 4, [3, 3, 2, 2]), (2, 4, [1, 1]), (0, 2, [0]), (6, 1, [6]), (4, 2, [2, 2])]
)
def test_shards_are_nearly_equal(samples: int, devices: int, sizes: list[int]) -> None:
    """They differ by one sample at most, and none is empty but that of an empty batch."""
    assert shard_sizes(samples, devices) == sizes


def test_only_tensors_as_long_as_the_batch_are_cut() -> None:
    """Class weights and scalars go to every shard whole."""
    weights, scale = torch.ones(7), torch.tensor(2.0)
    first, second = split_batch([torch.arange(3), weights, scale, "name"], [2, 1])
    assert (first[0].tolist(), second[0].tolist()) == ([0, 1], [2])
    assert first[1] is second[1] is weights
    assert first[2] is second[2] is scale
    assert second[3] == "name"


def test_memory_of_odd_tensors_is_that_of_their_parts() -> None:
    """Indices and values of sparse tensors, data of packed ones: all that a stream must be known to use."""
    eye = torch.eye(3)
    assert [part.numel() for part in memory_of(eye)] == [9]
    assert [part.numel() for part in memory_of(eye.to_sparse())] == [6, 3]
    assert memory_of(pack_sequence([torch.ones(2)]))[0].tolist() == [1, 1]


# On the way to a device


def moved(batch: Any, **options: Any) -> tuple[Any, RecordingBackend, Any]:
    """What arrives of one batch, where, and the report."""
    backend = RecordingBackend()
    batches = Prefetcher([batch], devices=[torch.device("cuda", 0)], backend=backend, **options)
    (arrived,) = batches
    backend.finish()
    report = batches.report()
    batches.close()
    assert backend.violations == []
    return arrived, backend, report


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(120).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(12).view(3, 4).T,
        torch.arange(24).view(4, 6)[::2, ::3],
        torch.arange(3).expand(2, 3),
        torch.tensor(5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(4).to(torch.bfloat16),
    ],
)
def test_values_and_dense_strides_are_kept(tensor: torch.Tensor) -> None:
    """Every dtype and layout arrives equal; a dense tensor with its own strides."""
    arrived, _, _ = moved(tensor)
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)
    if is_dense(tensor):
        assert arrived.stride() == tensor.stride()


def test_a_strided_tensor_whose_shards_are_single_samples_is_staged_whole() -> None:
    """Rows with gaps between them arrive right on every device."""
    backend = RecordingBackend()
    rows = torch.arange(16.0).view(4, 4)[::2]
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    ((first, second),) = Prefetcher([rows], devices=devices, backend=backend, in_shards=True)
    backend.finish("cuda:0")
    backend.finish("cuda:1")
    assert (first.tolist(), second.tolist()) == ([[0, 1, 2, 3]], [[8, 9, 10, 11]])


def test_a_tensor_that_stands_twice_is_copied_once() -> None:
    """One copy to the device serves both places."""
    tensor = torch.ones(3)
    (first, second), backend, report = moved([tensor, tensor])
    assert first is second
    assert sum(entry[0] == "copy" for entry in backend.log) == report.copies.staged == 1


def test_odd_tensors_go_by_their_own_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse, gradient-requiring and packed tensors are moved by ``to``, not by a copy of bytes."""
    calls: list[Any] = []

    def to(self: Any, device: Any) -> Any:
        calls.append((type(self).__name__, device))
        return self

    sparse = torch.eye(3).to_sparse()
    learnt = torch.ones(2, requires_grad=True)
    packed = pack_sequence([torch.ones(2)])
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(PackedSequence, "to", to)
    _, backend, _ = moved([sparse, learnt, packed])
    assert [name for name, _ in calls] == ["Tensor", "Tensor", "PackedSequence"]
    assert all(device == torch.device("cuda", 0) for _, device in calls)
    assert not any(entry[0] == "copy" for entry in backend.log)


def test_a_tensor_on_another_device_passes_through() -> None:
    """It is handed over as it is: not moved, not cast."""
    elsewhere = torch.empty(2, 3, device="meta")
    (arrived,), backend, _ = moved([elsewhere], finish=Finish(dtype=torch.float16))
    assert arrived is elsewhere
    assert not any(entry[0] == "copy" for entry in backend.log)


def test_images_and_floats_are_cast_and_labels_are_not() -> None:
    """``dtype=`` casts floating-point tensors and uint8 images; ``channels_last`` is for four dimensions."""
    images = torch.zeros(2, 3, 4, 5, dtype=torch.uint8)
    batch = [images, torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.uint8)]
    cast = next(iter(CudaPrefetcher([batch], device="cpu", dtype=torch.bfloat16, channels_last=True)))
    assert [t.dtype for t in cast] == [torch.bfloat16, torch.bfloat16, torch.int64, torch.uint8]
    assert cast[0].is_contiguous(memory_format=torch.channels_last)


def test_dtype_must_be_a_floating_point_one() -> None:
    """Anything else is refused at once."""
    for wrong in (torch.int64, "float16", float):
        with pytest.raises(ValueError, match="floating-point"):
            CudaPrefetcher([], device="cpu", dtype=wrong)  # type: ignore[arg-type]


# Without a device


def no_accelerator() -> bool:
    return not torch.cuda.is_available() and DevicePrefetcher([]).device.type == "cpu"


@pytest.mark.skipif(not no_accelerator(), reason="this machine has an accelerator")
@pytest.mark.parametrize("kind", [CudaPrefetcher, DevicePrefetcher])
def test_without_a_device_batches_stay_what_they_are(kind: type[CudaPrefetcher]) -> None:
    """The very objects of the loader come, and nothing is pinned."""
    batches = [torch.zeros(2), (torch.ones(2), "a")]
    prefetcher = kind(batches)
    assert all(got is given for got, given in zip(prefetcher, batches, strict=True))
    report = prefetcher.report()
    assert (report.batches, report.samples, report.devices, report.pinned_bytes) == (2, 4, ("cpu",), 0)
    assert "stay on the CPU" in str(report)


def test_a_transform_works_without_a_device() -> None:
    """It is called on each batch in order, and its exception names the batch."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if batch.item() == 2:
            raise KeyError("two")
        return batch * 10

    batches = iter(CudaPrefetcher([torch.tensor(i) for i in range(4)], device="cpu", transform=transform))
    assert [next(batches).item(), next(batches).item()] == [0, 10]
    with pytest.raises(KeyError, match="batch 2"):
        next(batches)
    assert next(batches).item() == 30


def test_shards_without_devices() -> None:
    """A list of CPU devices splits batches in the same way."""
    (parts,) = CudaPrefetcher([torch.arange(5)], device=["cpu", "cpu"])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_an_error() -> None:
    """It says what torch sees and what to do."""
    with pytest.raises(DeviceError, match=r"torch sees no CUDA device.*is built for.*device=None"):
        CudaPrefetcher([], device="cuda")


@pytest.mark.parametrize(
    ("device", "words"), [([], "names no device"), (["cpu", "meta"], "mixes kinds"), (["meta", "meta"], "twice")]
)
def test_devices_that_do_not_go_together_are_refused(device: Any, words: str) -> None:
    """No device, devices of two kinds, or one device twice."""
    with pytest.raises(DeviceError, match=words):
        CudaPrefetcher([], device=device)


def test_a_device_number_too_high_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many there are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"device='cuda:5'.*torch sees 2 CUDA devices"):
        CudaPrefetcher([], device="cuda:5")
