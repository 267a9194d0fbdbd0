"""Batches as trees: structures, shards, and what is cast on the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fastdata import CudaPrefetcher, SampleBatch
from fastdata.errors import DeviceError
from fastdata.sources import ItemKeys
from recording import RecordingBackend, place_of

TWO = ["cuda:0", "cuda:1"]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Labelled:
    image: Any
    name: str


def moved(batch: Any, device: Any = "cuda:0", **options: Any) -> tuple[Any, RecordingBackend, Any]:
    """What arrives of one batch, where, and the report."""
    backend = RecordingBackend()
    batches = CudaPrefetcher([batch], device, backend=backend, **options)
    (arrived,) = batches
    for name in TWO:
        backend.finish(name)
    report = batches.report()
    batches.close()
    assert backend.violations == []
    return arrived, backend, report


def test_structures_keep_their_types() -> None:
    """Every container comes back as what it was, and other values untouched."""
    one = torch.ones(2)
    default = defaultdict(list, {"a": one})
    mapping = UserDict({"u": one, "name": "v"})
    batch = (Point(one, "p"), Labelled(one, "n"), OrderedDict(b=one), default, [one, b"x"], mapping, {"k": 3})
    point, labelled, ordered, other, listed, user, plain = moved(batch)[0]
    kinds = [type(each) for each in (point, labelled, ordered, other, user)]
    assert kinds == [Point, Labelled, OrderedDict, defaultdict, UserDict]
    assert other.default_factory is list
    assert (point.y, labelled.name, listed[1], user["name"]) == ("p", "n", b"x", "v")
    for tensor in (point.x, labelled.image, ordered["b"], other["a"], listed[0], user["u"]):
        assert tensor.tolist() == [1, 1]
        assert tensor is not one
    assert plain is batch[-1]
    assert default["a"] is batch[1].image is mapping["u"] is one


def test_a_sample_batch_stays_one() -> None:
    """Its samples are views of the images on the device."""
    arrived, _, _ = moved(SampleBatch(torch.zeros(2, 3), torch.tensor([4, 5]), [4, 5]))
    assert isinstance(arrived, SampleBatch)
    assert arrived.stacked is not None
    assert arrived.stacked[1].tolist() == [4, 5]
    assert (arrived[1][0].tolist(), arrived[1][1]) == ([0, 0, 0], 5)
    assert place_of(arrived[1][0]) == place_of(arrived.stacked[0])


def test_a_sample_batch_of_dicts_stays_one() -> None:
    """Its items are dicts whose images are views of those on the device."""
    keys = ItemKeys(("label", "image"), "image")
    arrived, _, _ = moved(SampleBatch(torch.zeros(2, 3), torch.tensor([4, 5]), [4, 5], torch.Tensor, keys))
    assert isinstance(arrived, SampleBatch)
    assert (list(arrived.stacked), arrived[1]["label"]) == (["label", "image"], 5)
    assert place_of(arrived[1]["image"]) == place_of(arrived.stacked["image"])


@pytest.mark.parametrize(
    ("samples", "devices", "sizes"), [(10, 4, [3, 3, 2, 2]), (2, 4, [1, 1]), (0, 2, [0]), (6, 1, [6]), (4, 2, [2, 2])]
)
def test_shards_are_nearly_equal(samples: int, devices: int, sizes: list[int]) -> None:
    """They differ by one sample at most, and none is empty but that of an empty batch."""
    (parts,) = CudaPrefetcher([torch.arange(samples)], ["cpu"] * devices)
    assert [len(part) for part in parts] == sizes
    assert torch.cat(parts).tolist() == list(range(samples))


def test_only_tensors_as_long_as_the_batch_are_cut() -> None:
    """Class weights and scalars go to every shard whole."""
    weights, scale = torch.ones(7), torch.tensor(2.0)
    (first, second), _, _ = moved([torch.arange(3), weights, scale, "name"], TWO)
    assert (first[0].tolist(), second[0].tolist()) == ([0, 1], [2])
    assert first[1].tolist() == second[1].tolist() == [1] * 7
    assert first[2].item() == second[2].item() == 2
    assert second[3] == "name"


# On the way to a device


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
    if tensor.stride() == torch.empty_like(tensor).stride():
        assert arrived.stride() == tensor.stride()


def test_a_strided_tensor_whose_shards_are_single_samples_is_staged_whole() -> None:
    """Rows with gaps between them arrive right on every device."""
    (first, second), _, _ = moved(torch.arange(16.0).view(4, 4)[::2], TWO)
    assert (first.tolist(), second.tolist()) == ([[0, 1, 2, 3]], [[8, 9, 10, 11]])


def test_a_tensor_that_stands_twice_is_copied_once() -> None:
    """One copy to the device serves both places."""
    tensor = torch.ones(3)
    (first, second), backend, report = moved([tensor, tensor])
    assert first is second
    assert sum(entry[0] == "copy" for entry in backend.log) == report.copies.staged == 1


def test_small_tensors_go_in_one_copy() -> None:
    """Labels, draws and other small tensors share a block on each device; a larger tensor's memory is its own."""
    image = torch.arange(4 * 20_000).view(4, 20_000)
    batch = {"image": image, "label": torch.arange(4), "weight": torch.arange(4.0), "flag": torch.tensor([True] * 4)}
    for device in ("cuda:0", TWO):
        arrived, backend, report = moved(batch, device)
        parts = arrived if isinstance(arrived, list) else [arrived]
        assert [len(copies) for copies in backend.copied_from.values()] == [2] * len(parts)
        for name, tensor in batch.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
        for part in parts:
            assert place_of(part["label"]) == place_of(part["weight"]) == place_of(part["flag"])
            assert place_of(part["image"]) != place_of(part["label"])
        assert (report.copies.staged, report.copies.staged_bytes) == (4, image.nbytes + 4 * (8 + 4 + 1))


def test_memory_of_odd_tensors_is_kept_for_the_users_stream() -> None:
    """Indices and values of sparse tensors, data of packed ones: all that the stream must be known to use."""
    sparse, packed = torch.eye(3).to_sparse(), pack_sequence([torch.ones(2)])
    _, backend, _ = moved(torch.ones(1), transform=lambda batch: [sparse, packed])
    kept = {entry[1] for entry in backend.log if entry[0] == "record_stream"}
    assert {place_of(part) for part in (sparse._indices(), sparse._values(), packed.data)} <= kept


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
    (arrived,), backend, _ = moved([elsewhere], dtype=torch.float16)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_device_batches_stay_what_they_are() -> None:
    """The very objects of the loader come, and nothing is pinned."""
    batches = [torch.zeros(2), (torch.ones(2), "a")]
    prefetcher = CudaPrefetcher(batches)
    assert all(got is given for got, given in zip(prefetcher, batches, strict=True))
    report = prefetcher.report()
    assert (report.batches, report.samples, report.devices, report.pinned_bytes) == (2, 4, ("cpu",), 0)
    assert "stay on the CPU" in str(report)


def test_a_transform_works_without_a_device() -> None:
    """It is called on each batch in order, without gradients as on a device, and its exception names the batch."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        if batch.item() == 2:
            raise KeyError("two")
        return batch * 10

    batches = iter(CudaPrefetcher([torch.tensor(i) for i in range(4)], device="cpu", transform=transform))
    assert [next(batches).item(), next(batches).item()] == [0, 10]
    with pytest.raises(KeyError, match="batch 2"):
        next(batches)
    assert next(batches).item() == 30


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


def test_another_kind_of_device_needs_a_backend() -> None:
    """The error says so; with one of the user's own, it is served."""
    with pytest.raises(DeviceError, match=r"device='xpu' is neither the CPU nor a CUDA device\..*pass backend="):
        CudaPrefetcher([], device="xpu")
    backend = RecordingBackend(is_late=False)
    (batch,) = CudaPrefetcher([torch.ones(2)], device="xpu:0", backend=backend)
    assert batch.tolist() == [1, 1]
    assert list(backend.copied_from) == ["xpu:0"]


def test_a_device_number_too_high_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many there are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"device='cuda:5'.*torch sees 2 CUDA devices"):
        CudaPrefetcher([], device="cuda:5")


class Held(MutableMapping[str, Any]):
    """A mapping whose copies share its items."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_held = items

    def __getitem__(self, key: str) -> Any:
        return self.items_held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_held)

    def __len__(self) -> int:
        return len(self.items_held)


class Frozen(dict[str, Any]):
    def clear(self) -> None:
        raise TypeError("frozen")


@pytest.mark.parametrize("kind", [Held, Frozen])
def test_a_mapping_that_cannot_be_copied_comes_as_a_dict(kind: Any) -> None:
    """Its values arrive, and the user's own keeps them."""
    batch = kind({"x": torch.ones(2), "name": "n"})
    arrived = moved(batch)[0]
    assert (type(arrived), arrived["x"].tolist(), arrived["name"]) == (dict, [1, 1], "n")
    assert batch["x"].tolist() == [1, 1]
