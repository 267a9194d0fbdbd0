"""Structures of batches in a prefetcher: containers, objects, odd tensors, and casts on the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.masked import MaskedTensor, masked_tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from fastdata import CudaPrefetcher, FastDataWarning, SampleBatch
from fastdata.datasets.held_tensors import memory_of
from fastdata.errors import DeviceError
from simcuda import Sim


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Labelled:
    image: Any
    name: str


def moved(batch: Any, **options: Any) -> tuple[Any, Any]:
    """Return one batch as it arrives, and the report."""
    with CudaPrefetcher([batch], "cuda:0", **options) as batches:
        (arrived,) = batches
        return arrived, batches.report()


def test_structures_keep_their_types(gpu: Sim) -> None:
    """Every container keeps its type, and values that are not tensors are unchanged."""
    one = torch.ones(2)
    default = defaultdict(list, {"a": one})
    mapping = UserDict({"u": one, "name": "v"})
    batch = (
        Point(one, "p"),
        Labelled(one, "n"),
        OrderedDict(b=one),
        default,
        [one, b"x"],
        mapping,
        {"k": 3},
    )
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


def test_a_sample_batch_stays_one(gpu: Sim) -> None:
    """A SampleBatch arrives as one; its samples are views of the images on the device."""
    arrived, _ = moved(SampleBatch(torch.zeros(2, 3), torch.tensor([4, 5]), [4, 5]))
    assert isinstance(arrived, SampleBatch)
    assert arrived.stacked is not None
    assert arrived.stacked[1].tolist() == [4, 5]
    assert (arrived[1][0].tolist(), arrived[1][1]) == ([0, 0, 0], 5)
    assert arrived[1][0].block is arrived.stacked[0].block


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
        torch.tensor([[1 + 2j], [3j]], dtype=torch.complex128),
        torch.tensor([1.5]).to(torch.float8_e4m3fn),
        torch.arange(4).to(torch.bfloat16),
    ],
)
def test_values_and_dense_strides_are_kept(gpu: Sim, tensor: torch.Tensor) -> None:
    """Every dtype and layout arrives equal; a dense tensor keeps its strides."""
    arrived, _ = moved(tensor)
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived.cpu(), tensor)
    if tensor.stride() == torch.empty_like(tensor).stride():
        assert arrived.stride() == tensor.stride()


def test_a_repeated_tensor_is_copied_once(gpu: Sim) -> None:
    """A tensor that is twice in a batch is copied once."""
    tensor = torch.ones(3)
    (first, second), report = moved([tensor, tensor])
    assert first is second
    assert gpu.sent == [report.staged_bytes] == [12]


def test_memory_of_odd_tensors_is_kept_for_the_users_stream(gpu: Sim) -> None:
    """Memory of odd tensors, such as packed sequences, is not reused before the loop's stream has read it."""
    packed = moved(pack_sequence([torch.ones(2)]))[0]
    assert packed.data.tolist() == [1, 1]
    assert packed.data.block.uses == {gpu.current_stream()}


def attached(gpu: Sim) -> list[Any]:
    """Return objects in which a tensor is an attribute of another one, in a set."""
    image, mask = torch.zeros(2, device="cuda"), torch.zeros(3, device="cuda")
    image.mask = SimpleNamespace(masks={mask})  # type: ignore[attr-defined]
    return [image, image, mask]


def cyclic(gpu: Sim) -> list[Any]:
    """Return two objects that refer to each other."""
    tensor = torch.zeros(2, device="cuda")
    first = SimpleNamespace(tensor=tensor)
    first.second = SimpleNamespace(first=first, function=len, kind=int, module=torch)
    return [first.second, tensor]


@pytest.mark.parametrize("make", [attached, cyclic])
def test_every_tensor_in_an_object_is_kept_for_the_users_stream(gpu: Sim, make: Any) -> None:
    """Memory in any object of a transform is not reused before the loop's stream has read it."""
    parts: list[Any] = []

    def transform(batch: Any) -> Any:
        made, *parts[:] = make(gpu)
        return made

    made, _ = moved(torch.zeros(2), transform=transform)
    assert made is not None
    assert [part.block.uses for part in parts] == [{gpu.current_stream()}] * len(parts)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "learnt": lambda: torch.nested.nested_tensor([torch.ones(2)], requires_grad=True),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "masked": lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of", "ignore:Sparse", "ignore:.*prototype")
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_tensors_of_any_layout_consist_of_strided_ones(make: Callable[[], torch.Tensor]) -> None:
    """``memory_of`` gives strided tensors, as ``record_stream`` needs, with all values of a tensor of any layout."""
    tensor = make()
    parts = memory_of(tensor)
    assert all(part.layout is torch.strided and not part.is_nested for part in parts)
    whole = tensor.get_data() if isinstance(tensor, MaskedTensor) else tensor.detach()
    values = whole.values() if whole.is_nested else whole.to_dense()
    assert sum(part.sum() for part in parts if part.is_floating_point()) == values.sum()


def test_a_jagged_tensor_consists_of_values_offsets_and_lengths() -> None:
    """A jagged tensor has lengths too if there are holes between its rows."""
    parts = torch.ones(7, 2), torch.tensor([0, 3, 7]), torch.tensor([2, 4])
    nested = torch.nested.nested_tensor_from_jagged(*parts)
    assert {it.data_ptr() for it in parts} <= {it.data_ptr() for it in memory_of(nested)}


class ImageList:
    """A batch class with a ``to`` of one parameter, such as detectron's boxes."""

    def __init__(self, tensor: torch.Tensor, moves: int = 0) -> None:
        self.tensor, self.moves = tensor, moves

    def to(self, device: Any) -> ImageList:
        return ImageList(self.tensor.to(device), self.moves + 1)


class PinnedList(ImageList):
    """A batch class that pins itself, in place, and cannot be compared."""

    def to(self, device: Any, non_blocking: bool = False) -> PinnedList:
        return PinnedList(self.tensor.to(device, non_blocking=non_blocking), self.moves + 1)

    def pin_memory(self) -> None:
        self.tensor = self.tensor.pin_memory()

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nothing may compare the objects of a batch")


class PinnedDict(dict[str, Any]):
    """A dict with torch's methods, which may hold more than its items."""

    @property
    def tensor(self) -> torch.Tensor:
        return self["tensor"]

    def __init__(self, tensor: torch.Tensor, moves: int = 0) -> None:
        super().__init__(tensor=tensor)
        self.moves = moves

    def to(self, device: Any, non_blocking: bool = False) -> PinnedDict:
        return PinnedDict(self.tensor.to(device, non_blocking=non_blocking), self.moves + 1)

    def pin_memory(self) -> PinnedDict:
        return PinnedDict(self.tensor.pin_memory(), self.moves)


@pytest.mark.parametrize("kind", [ImageList, PinnedList, PinnedDict])
@pytest.mark.parametrize("nested", [False, True])
def test_objects_go_by_their_own_methods(gpu: Sim, kind: Any, nested: bool) -> None:
    """Objects are moved by ``to``, also in containers, after ``pin_memory`` if they have it; no warning."""
    made = kind(torch.arange(4))
    arrived, report = moved({"a": [made]} if nested else made)
    arrived = arrived["a"][0] if nested else arrived
    assert (type(arrived), arrived.moves, arrived.tensor.tolist()) == (kind, 1, [0, 1, 2, 3])
    assert arrived.tensor.block.uses == {gpu.current_stream()}
    is_pinned = kind is not ImageList
    assert (report.staged_bytes, report.pageable_bytes) == ((32, 0) if is_pinned else (0, 32))


def test_an_object_that_cannot_be_moved_warns_once(gpu: Sim) -> None:
    """One warning for all batches and epochs names the class and what to write; the object comes as it is."""
    kept = SimpleNamespace(tensor=torch.zeros(2))
    words = r"batches hold a SimpleNamespace, whose tensors stay on the CPU: .* method to\(device\)"
    batches = CudaPrefetcher([[kept], [kept]], "cuda:0")
    with pytest.warns(FastDataWarning, match=words) as caught:
        arrived = [*batches, *batches]
    assert len(caught) == 1
    assert all(batch[0] is kept for batch in arrived)


def test_an_object_without_tensors_is_not_moved(gpu: Sim) -> None:
    """The ``to`` of other classes may mean anything; modules and datasets are not part of a batch."""

    class Length:
        def to(self, unit: str) -> Length:
            raise AssertionError(unit)

    values = [Length(), torch.nn.Linear(1, 1), TensorDataset(torch.zeros(1)), torch.long, len]
    arrived, _ = moved([torch.zeros(1), *values])
    assert all(got is given for got, given in zip(arrived[1:], values, strict=True))


def test_an_error_of_an_objects_own_to_is_raised_in_its_place(gpu: Sim) -> None:
    """An error of ``to`` is raised instead of its batch, with its type, and later batches arrive."""

    class Broken(ImageList):
        def to(self, device: Any) -> ImageList:
            raise TypeError("no such field")

    epoch = iter(CudaPrefetcher([Broken(torch.zeros(1)), torch.ones(1)], "cuda:0"))
    with pytest.raises(TypeError, match="no such field"):
        next(epoch)
    assert next(epoch).tolist() == [1]


def test_odd_tensors_go_by_their_own_to(gpu: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse, gradient-requiring and packed tensors are moved by their own ``to``."""
    calls: list[Any] = []

    def to(self: Any, device: Any) -> Any:
        calls.append((type(self).__name__, device))
        return self

    sparse = torch.eye(3).to_sparse()
    learnt = torch.ones(2, requires_grad=True)
    packed = pack_sequence([torch.ones(2)])
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(PackedSequence, "to", to)
    moved([sparse, learnt, packed])
    assert [name for name, _ in calls] == ["Tensor", "Tensor", "PackedSequence"]
    assert all(device == torch.device("cuda", 0) for _, device in calls)
    assert gpu.sent == []


def test_a_tensor_on_another_device_passes_through(gpu: Sim) -> None:
    """A tensor on another device is returned itself."""
    elsewhere = torch.empty(2, 3, device="meta")
    (arrived,), _ = moved([elsewhere])
    assert arrived is elsewhere
    assert gpu.sent == []


def test_images_and_floats_are_cast_and_labels_are_not() -> None:
    """``dtype=`` casts floats and uint8 images; ``channels_last`` changes tensors of four dimensions."""
    images = torch.zeros(2, 3, 4, 5, dtype=torch.uint8)
    batch = [
        images,
        torch.ones(2),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.uint8),
    ]
    cast = next(
        iter(CudaPrefetcher([batch], device="cpu", dtype=torch.bfloat16, channels_last=True))
    )
    assert [t.dtype for t in cast] == [torch.bfloat16, torch.bfloat16, torch.int64, torch.uint8]
    assert cast[0].is_contiguous(memory_format=torch.channels_last)


# Without a device


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_device_batches_stay_what_they_are() -> None:
    """Without a device the user gets the loader's own objects, and nothing is pinned."""
    batches = [torch.zeros(2), (torch.ones(2), "a")]
    prefetcher = CudaPrefetcher(batches)
    assert all(got is given for got, given in zip(prefetcher, batches, strict=True))
    report = prefetcher.report()
    assert (report.batches, report.samples, report.device, report.pinned_bytes) == (2, 4, "cpu", 0)
    assert "stay on the CPU" in str(report)


def test_a_transform_works_without_a_device() -> None:
    """Without a device a transform runs on each batch in order, without gradients, and fails in the batch's place."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        if batch.item() == 2:
            raise KeyError("two")
        return batch * 10

    batches = iter(
        CudaPrefetcher([torch.tensor(i) for i in range(4)], device="cpu", transform=transform)
    )
    assert [next(batches).item(), next(batches).item()] == [0, 10]
    with pytest.raises(KeyError, match="two"):
        next(batches)
    assert next(batches).item() == 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_an_error() -> None:
    """The error has the devices that torch sees, and the cure."""
    with pytest.raises(DeviceError, match=r"torch sees no CUDA device.*this is torch.*device=None"):
        CudaPrefetcher([], device="cuda")


def test_other_devices_are_refused() -> None:
    """Another kind of device is an error with the cure."""
    with pytest.raises(DeviceError, match=r"device='xpu' is neither the CPU nor a CUDA device"):
        CudaPrefetcher([], device="xpu")


def test_a_rank_that_has_not_chosen_its_device_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that uses the device of rank 0 gets a warning, unless it has chosen it."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    with Sim(devices=2).installed():
        with pytest.warns(
            FastDataWarning,
            match=r"LOCAL_RANK=1 go to cuda:0.*Call torch.cuda.set_device\(1\) first",
        ):
            assert CudaPrefetcher([]).device == torch.device("cuda", 0)
        assert (
            CudaPrefetcher([], "cuda").device
            == CudaPrefetcher([], "cuda:0").device
            == torch.device("cuda", 0)
        )
        with torch.cuda.device(1):
            assert CudaPrefetcher([]).device == torch.device("cuda", 1)


def test_a_device_number_too_high_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error gives the number of devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"device='cuda:5'.*torch sees 2 CUDA devices"):
        CudaPrefetcher([], device="cuda:5")


def test_a_mapping_that_cannot_be_written_to_comes_as_a_dict(gpu: Sim) -> None:
    """A read-only mapping arrives as a dict with its values, and the user's own object does not change."""
    own = MappingProxyType({"image": torch.arange(3), "name": "a"})
    [batch] = CudaPrefetcher([own])
    assert (type(batch), batch["name"]) == (dict, "a")
    assert batch["image"].tolist() == own["image"].tolist() == [0, 1, 2]
