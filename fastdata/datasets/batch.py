"""Batches: a list of samples for torch's collate, its tensors; visits; batches as trees."""

from __future__ import annotations

import copy
import dataclasses
import gc
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cache
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from fastdata.errors import counted
from fastdata.machine.tables import collate_targets
from fastdata.pixels.arrays import Array
from fastdata.pixels.random_numbers import sample_keys

if TYPE_CHECKING:
    from fastdata.datasets.reader import Reader


def as_numbers(indices: Any) -> Array:
    """Indices of samples as int64 (B,).

    Raises:
        TypeError: they are no whole numbers, as of torch's datasets.
    """
    if isinstance(indices, (np.ndarray, torch.Tensor)):
        found = np.asarray(indices)
        if found.ndim == 1 and found.dtype.kind in "iu":
            return found.astype(np.int64, copy=False)
    return np.asarray(array("q", indices))


def positions(index_B: Array, length: int) -> Array:
    """Indices (int64, B) of [-length, length), negative ones counted from the end."""
    # As unsigned numbers, negative ones are too large as well.
    if not (index_B.view(np.uint64) >= length).any():
        return index_B
    wrong = index_B[(index_B < -length) | (index_B >= length)]
    if len(wrong):
        raise IndexError(
            f"index {wrong[0]} is out of range for a dataset of {counted(length, 'sample')}"
        )
    return index_B % length


# Keeps what is drawn where a batch is read apart from what is where it is collated.
_READ_SALT = 0x72656164


Collate = Callable[[Any], Any]


class IndexBatch(list[int]):
    """The sample indices of one batch, and what the samples' random draws are made from.

    As the sampler gave them, or those in the fastdata dataset where that lies behind a ``Subset``;
    of several in a ``ConcatDataset``, those in all of them in a row.

    Attributes:
        positions: int64 (B,), the same, none of them negative.
        visits: int64 (B,), which visit to each sample this is: the epoch, and how often the sample
            came before in the same epoch (as with ``WeightedRandomSampler``).
        seed: the dataset's, or the epoch's base seed.
        draws: what a ``collate_fn`` draws from, wherever the batch is made; None where no loader
            counts batches.
        channels_last: whether images are to lie so in memory, where they can be served so.
    """

    positions: Array
    visits: Array
    seed: int
    draws: DrawKey | None = None
    channels_last: bool = False

    @classmethod
    def of(cls, indices: Iterable[int], positions: Array, visits: Array, seed: int) -> IndexBatch:
        batch = cls(indices)
        batch.positions = positions
        batch.visits = visits
        batch.seed = seed
        return batch


@dataclasses.dataclass
class OwnItem:
    """The item that a subclass's own ``__getitem__`` is making for a loader.

    With a seed, every read of a fastdata dataset in it has a visit of its own. The first read has
    that of the item if it is of the same index. The others follow from it and from how many reads
    came before, of any dataset: two crops of one image differ, and so do those of two datasets.

    Attributes:
        samples: of the dataset whose item this is.
        position: of the item in the dataset.
        visit: of the item; see ``IndexBatch``.
        seed: None where the dataset was made without one. Reads then draw from torch's generator.
        reads: how many came before.
    """

    samples: object
    position: int
    visit: int
    seed: int | None
    reads: int = 0

    def visits(self, index_B: Array) -> Array:
        """Count one read for each index, and return their visits: int64 (B,)."""
        first = self.reads
        self.reads += len(index_B)
        given = [self.visit] if first == 0 and self.position in index_B[:1] else []
        if len(given) == len(index_B):  # most items read their own sample once
            return np.array(given, np.int64)
        read_B = np.arange(first, self.reads)
        visit_B: Array = sample_keys(self.visit, read_B, np.array([self.position])).view(np.int64)
        visit_B[: len(given)] = given
        return visit_B


OWN_ITEM: ContextVar[OwnItem | None] = ContextVar("fastdata_item", default=None)
"""Set around a user's ``__getitem__``, which has no argument to pass it in."""


def draw_seed() -> int:
    """Draw 63 bits from torch's CPU generator; in a loader's threads from the batch's draws.

    This is the one draw from a global generator: torchvision's transforms draw from it too, so that
    ``manual_seed``, ``fork_rng`` and worker processes have the effect that users know.
    """
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu").item())


class Sample(tuple[Any, ...]):
    """One (image, target) of a ``SampleBatch``; its class tells ``default_collate`` what to do."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class SampleBatch(list[Any]):
    """A list of (image, target) samples that are views of one stacked tensor.

    torch's ``default_collate`` and ``fastdata.collate`` take the stacked tensors as they are, so
    that a ``collate_fn`` that calls the former, as those of MixUp and CutMix do, copies nothing.
    Where one has put other samples into the list, or other values into a sample, these are stacked
    as any.

    Args:
        images: (B, C, h, w); sample i is a view of ``images[i]``.
        targets: what ``default_collate`` makes of the targets: int64 (B,) for class numbers. None:
            it is made when it is asked for, if it can be.
        each_target: one Python object per sample.
        image_class: of the images in the list, such as ``tv_tensors.Image`` or ``np.ndarray``.

    Attributes:
        parts: these arguments.
    """

    def __init__(
        self,
        images: torch.Tensor,
        targets: Any,
        each_target: Iterable[Any],
        image_class: type[torch.Tensor] | type[np.ndarray] = torch.Tensor,
    ) -> None:
        each_target = list(each_target)
        self.parts = images, targets, each_target, image_class
        pairs = zip(rows_of(images, image_class), each_target, strict=True)
        super().__init__(map(Sample, pairs))
        self._made_of = list(self)
        # Torch's own way to say how a class is collated.
        default_collate_fn_map.setdefault(Sample, _collate_samples)

    @property
    def is_intact(self) -> bool:
        """True if the list still consists of the very samples that it was made of."""
        are_same = all(map(operator.is_, self, self._made_of))
        return are_same and len(self) == len(self._made_of)

    @property
    def is_stacked(self) -> bool:
        """True if samples are still views of one tensor."""
        return self.is_intact and self.parts[3] is not np.ndarray

    @property
    def stacked(self) -> Any:
        """``[images, targets]``; None once another object is in it.

        Raises what ``default_collate`` raises of targets that it cannot collate.
        """
        if not self.is_intact:
            return None
        images, targets, each_target, _ = self.parts
        return [images, collate_targets(each_target) if targets is None else targets]

    def __reduce__(self) -> Any:
        return list, (list(self),)


def rows_of(images: torch.Tensor, kind: type) -> Sequence[Any]:
    """The images of a batch, views of it."""
    if kind is np.ndarray:
        arrays = images.numpy()
        return [arrays[row, ...] for row in range(len(arrays))]
    rows = images.unbind(0)
    return rows if kind is torch.Tensor else [row.as_subclass(kind) for row in rows]


def collate(samples: list[Any]) -> Any:
    """Turn samples into a batch as torch's ``default_collate`` does; a SampleBatch is not copied.

    Args:
        samples: of one kind, as torch's.

    Example:
        >>> images = torch.zeros(2, 3, 4, 4)
        >>> batch = SampleBatch(images, torch.tensor([0, 1]), [0, 1])
        >>> collate(batch)[0] is images
        True
    """
    return default_collate(samples)  # which calls the function below for a SampleBatch


def _collate_samples(samples: list[Any], *, collate_fn_map: Any = None) -> Any:
    whole = samples.stacked if isinstance(samples, SampleBatch) else None
    return default_collate(list(map(tuple, samples))) if whole is None else whole


# What a batch's own draws are made from


class DrawKey(NamedTuple):
    """What a ``collate_fn`` draws from: its batch among those of all epochs and ranks."""

    seed: int
    epoch: int
    number: int

    def apart(self) -> DrawKey:
        """For what is drawn where the batch is read."""
        return self._replace(seed=self.seed ^ _READ_SALT)

    def collated(self, collate_fn: Collate, samples: Any) -> Any:
        inner = collate_fn.collate_fn if isinstance(collate_fn, ChannelsLast) else collate_fn
        # These two draw nothing, and take a quarter of the time outside of a dispatch mode.
        with nullcontext() if inner in (collate, default_collate) else BatchDraws(self):
            return collate_fn(samples)


class BatchDraws(TorchDispatchMode):
    """What would draw from torch's global generator draws from the batch's, in this thread only.

    So what a ``collate_fn`` draws is the same whoever makes the batch, and the user's generator is
    left alone. What is drawn on a device, and from Python's or NumPy's generators, is drawn as
    ever.
    """

    def __init__(self, key: DrawKey) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        start = sample_keys(key.seed, key.epoch, np.array([key.number]))
        self._generator = torch.Generator().manual_seed(int(start[0]))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _can_be_seeded(function):
            given = pytree.tree_leaves((args, kwargs))
            is_seeded = any(isinstance(it, torch.Generator) for it in given)
            devices = [getattr(it, "device", it) for it in given]
            is_on_cpu = all(it.type == "cpu" for it in devices if isinstance(it, torch.device))
            if is_on_cpu and not is_seeded:
                return function.overloadpacket(*args, **kwargs, generator=self._generator)
        return function(*args, **kwargs)


@cache
def _can_be_seeded(function: Any) -> bool:
    """Whether an operation draws, and it or another of its name takes a generator."""
    named = f"{function._schema} {function.overloadpacket.overloads()}"
    return torch.Tag.nondeterministic_seeded in function.tags and "generator" in named


# Which visit to a sample this is: the number that its random draws are made from
#
# A visit is ``epoch + (k << 32)`` where k tells visits to the sample in the same epoch apart.
# Samplers that repeat samples thus get different draws for each repetition, and everyone else gets
# the epoch.

REPEAT_SHIFT = 32


class RepeatedIndex(int):
    """An index that came before in its epoch, on any rank: so that no two draw the same.

    Attributes:
        occurrence: how often, 1 or more.
    """

    occurrence: int

    @classmethod
    def mark(cls, index: int, occurrence: int) -> int:
        """The index, as it is where this is its first occurrence."""
        if not occurrence:
            return index
        marked = cls(index)
        marked.occurrence = occurrence
        return marked


def occurrences(given: Any) -> list[tuple[int, int]]:
    """Place and occurrence of each RepeatedIndex."""
    if not isinstance(given, list) or RepeatedIndex not in set(map(type, given)):
        return []
    return [
        (k, index.occurrence) for k, index in enumerate(given) if isinstance(index, RepeatedIndex)
    ]


def count_repetitions(given: Any, index_B: Array) -> Array:
    """Return how often each index of a batch came before, in the batch or on another rank."""
    before_B = count_within(index_B, np.zeros(len(index_B), np.int64))
    for row, occurrence in occurrences(given):
        before_B[row] = occurrence
    return before_B


def count_earlier(seen: Array, index_B: Array) -> Array:
    """Return how often each index came before, also in this batch; count it in ``seen``."""
    before_B: Array = seen[index_B].astype(np.int64)
    # Counts repetitions; a plain 1 takes fifty times as long.
    np.add.at(seen, index_B, seen.dtype.type(1))
    return count_within(index_B, before_B)


def count_within(index_B: Array, before_B: Array) -> Array:
    """Add to ``before_B`` how often each index came before in this batch, and return it."""
    if len(index_B) < 2:  # as where samples are read one by one
        return before_B
    order = index_B.argsort(kind="stable")
    sorted_B = index_B[order]
    if (sorted_B[1:] == sorted_B[:-1]).any():  # else it takes half the time
        before_B[order] += np.arange(len(order)) - sorted_B.searchsorted(sorted_B)
    return before_B


def index_batch(indices: Sequence[int], reader: Reader, epoch: int | None) -> IndexBatch:
    """Return the batch of these indices, with the numbers that its random draws follow.

    A loader of fastdata's gives an ``IndexBatch``, which holds them already. Other reads draw a
    seed from torch's generator, unless the dataset has a ``seed`` and the user set its ``epoch``.
    """
    if not isinstance(indices, (list, np.ndarray, torch.Tensor)):
        indices = list(indices)  # read once: a second pass may give other indices, or none
    index_B = positions(as_numbers(indices), reader.length)
    if isinstance(indices, IndexBatch) and np.array_equal(index_B, indices.positions):
        return indices  # not changed by a method of a subclass
    item = OWN_ITEM.get()
    if item is not None and item.seed is not None:
        return IndexBatch.of(indices, index_B, item.visits(index_B), item.seed)
    before_B = count_repetitions(indices, index_B)
    seed = reader.stored.options.seed
    if seed is None or epoch is None:
        seed = draw_seed() if reader.may_draw else 0
    visit_B = (before_B << REPEAT_SHIFT) + (epoch or 0)
    return IndexBatch.of(indices, index_B, visit_B, seed)


# Batches as trees


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, PackedSequence))


def is_container(value: Any) -> bool:
    """True if ``map_batch`` maps the parts of a value."""
    if isinstance(value, (list, tuple, Mapping)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def moves_itself(value: Any) -> bool:
    """True if a value goes to a device by a ``to`` method of its own.

    Besides tensors these are objects of classes that have one. A container must also have
    ``pin_memory``, as torch's own containers have: others are copied item by item.
    """
    if isinstance(value, torch.Tensor):
        return True
    kind = type(value)
    if not callable(getattr(kind, "to", None)) or isinstance(value, _NOT_HELD):
        return False
    return hasattr(kind, "pin_memory") or not is_container(value)


def map_batch(
    function: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] = is_tensor
) -> Any:
    """Return a batch in which ``function`` has replaced each tensor.

    Tuples, namedtuples, lists, mappings, dataclasses and ``SampleBatch`` keep their type. One in
    which nothing is replaced is returned itself, like every other value. A tensor that occurs twice
    is replaced once. A ``PackedSequence`` counts as a tensor.

    Args:
        function: is called with each tensor.
        batch: any value.
        is_leaf: returns True for values that ``function`` is called with, instead of tensors.

    Example:
        >>> map_batch(len, {"image": torch.zeros(2), "name": "a"})
        {'image': 2, 'name': 'a'}
    """
    return _map_value(function, batch, is_leaf, {})


def leaves_of(batch: Any, is_leaf: Callable[[Any], bool] = is_tensor) -> list[Any]:
    """Return the tensors in a batch, or other leaves, each once.

    Example:
        >>> leaves_of({"image": torch.zeros(2), "name": "a"})
        [tensor([0., 0.])]
    """
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_batch(note, batch, is_leaf)
    return found


def _map_value(
    function: Callable[[Any], Any],
    value: Any,
    is_leaf: Callable[[Any], bool],
    results: dict[int, Any],
) -> Any:
    # Not a closure that calls itself: such a cycle would keep the tensors until garbage collection.
    if is_leaf(value):
        if id(value) not in results:
            results[id(value)] = function(value)
        return results[id(value)]
    parts = _parts_of(value)
    mapped = [_map_value(function, part, is_leaf, results) for part in parts]
    if all(map(operator.is_, mapped, parts)):
        return value
    return _rebuilt(value, mapped)


def _parts_of(value: Any) -> Sequence[Any]:
    """Return the values in a container; none of anything else."""
    match value:
        case SampleBatch() if value.is_stacked:
            return value.parts
        case list() | tuple():
            return value
        case Mapping():
            return list(dict(value).values())
    if not is_container(value):
        return ()
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    """Return a container like ``value`` of other parts."""
    match value:
        case SampleBatch():
            return SampleBatch(*parts) if value.is_stacked else parts
        case tuple() if hasattr(value, "_make"):
            return value._make(parts)
        case list() | tuple():
            return type(value)(parts)
        case MutableMapping():  # a copy keeps the rest of it, such as a default factory
            new = copy.copy(value)
            new.update(zip(value, parts, strict=True))
            return new
        case Mapping():
            return dict(zip(value, parts, strict=True))
    new = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        object.__setattr__(new, field.name, part)  # a frozen one too: the copy is not shared yet
    return new


def as_channels_last(batch: Any) -> Any:
    """Return the batch with its tensors of four dimensions in ``torch.channels_last``."""
    return map_batch(_channels_last, batch)


def _channels_last(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelsLast:
    """A ``collate_fn`` whose batches come ``as_channels_last``."""

    collate_fn: Collate

    def __call__(self, samples: Any) -> Any:
        return as_channels_last(self.collate_fn(samples))


# Tensors in any object

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_NOT_HELD = (type, ModuleType, FunctionType, Dataset, torch.nn.Module)
"""Objects that a batch may refer to, but that are not part of it."""
_PARTS_OF = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return the strided tensors of a layout."""


def memory_of(value: Any) -> list[Any]:
    """Return the strided tensors that a value consists of or holds, at any depth.

    Containers and the attributes of objects of any class are searched, and so are tensors that
    consist of others: sparse, nested and wrapped ones. An object in which no tensor is found, but
    whose class has a ``record_stream`` method, is returned itself.

    Example:
        >>> from types import SimpleNamespace
        >>> batch = SimpleNamespace(images=torch.zeros(2), boxes={"left": [torch.ones(3)]})
        >>> sorted(len(tensor) for tensor in memory_of(batch))
        [2, 3]
    """
    return _memory_of([value], {})


def _memory_of(values: Iterable[Any], seen: dict[int, Any]) -> list[Any]:
    found: list[Any] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if type(value) in _PLAIN or id(value) in seen or isinstance(value, _NOT_HELD):
            continue
        seen[id(value)] = value  # keeps its id from being used for another object
        # Items, attributes and slots, of classes written in C too. NumPy does not tell the
        # garbage collector what an array of objects refers to.
        parts = gc.get_referents(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            parts += value.flat
        if isinstance(value, torch.Tensor):
            found += _strided_parts(value)
        elif hasattr(type(value), "record_stream"):
            found += _memory_of(parts, seen) or [value]
            continue
        waiting += parts
    return found


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that own a tensor's memory, without those in its attributes."""
    if tensor.layout in _PARTS_OF:
        return [getattr(tensor, name)() for name in _PARTS_OF[tensor.layout]]
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # A wrapper, such as a jagged, masked or distributed tensor, has no memory of its own.
        held = vars(tensor).values()
        return [] if any(isinstance(it, torch.Tensor) for it in held) else [tensor]
    return [tensor.detach().values()] if tensor.is_nested else [tensor]
