"""Batches: a list of samples for torch's collate, its tensors; visits; batches as trees."""

from __future__ import annotations

import copy
import dataclasses
import operator
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from fastdata.errors import counted
from fastdata.machine.shared import ArrayBlock, collate_targets
from fastdata.pixels.draws import sample_keys
from fastdata.sources import ItemKeys


def as_numbers(indices: Any) -> np.ndarray:
    """Indices of samples as int64 (B,).

    Raises:
        TypeError: they are no whole numbers, as of torch's datasets.
    """
    if isinstance(indices, (np.ndarray, torch.Tensor)):
        found = np.asarray(indices)
        if found.ndim == 1 and found.dtype.kind in "iu" and np.can_cast(found.dtype, np.int64):
            return found.astype(np.int64, copy=False)
    try:
        return np.asarray(array("q", indices))
    except TypeError as error:
        raise TypeError(f"indices of samples must be a list of whole numbers: {error}") from None


def positions(index_B: np.ndarray, length: int) -> np.ndarray:
    """Indices (int64, B) of [-length, length), negative ones counted from the end."""
    if not (
        index_B.view(np.uint64) >= length
    ).any():  # as unsigned numbers, negative ones are too large as well
        return index_B
    wrong = index_B[(index_B < -length) | (index_B >= length)]
    if len(wrong):
        raise IndexError(
            f"index {wrong[0]} is out of range for a dataset of {counted(length, 'sample')}"
        )
    return np.where(index_B < 0, index_B + length, index_B)


# Keeps what is drawn where a batch is read apart from what is where it is collated.
_READ_SALT = 0x72656164


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

    positions: np.ndarray
    visits: np.ndarray
    seed: int
    draws: DrawKey | None = None
    channels_last: bool = False

    @classmethod
    def of(
        cls, indices: Iterable[int], positions: np.ndarray, visits: np.ndarray, seed: int
    ) -> IndexBatch:
        batch = cls(indices)
        batch.positions = positions
        batch.visits = visits
        batch.seed = seed
        return batch


class OwnItem:
    """The item that a subclass's own ``__getitem__`` makes: says what its reads are drawn from.

    A dataset's first read is on the item's visit if it is of the same index. All others are on
    visits of their own that follow from it, so that two crops of one image differ, and are the same
    whoever reads them.
    """

    def __init__(self, batch: IndexBatch, k: int) -> None:
        self._batch = batch
        self._rows = slice(k, k + 1)
        self._reads: Counter[int] = Counter()

    def batch_of(self, position: int, reader: int, own_seed: int | None) -> IndexBatch:
        """Of a read by the dataset of this id and, where the user gave it one, this seed."""
        item_1, visit_1 = self._batch.positions[self._rows], self._batch.visits[self._rows]
        read = self._reads[reader]
        self._reads[reader] += 1
        if read or position != item_1[0]:
            visit_1 = sample_keys(read, visit_1, item_1).view(np.int64)
        seed = self._batch.seed if own_seed is None else own_seed
        return IndexBatch.of([position], np.array([position]), visit_1, seed)


OWN_ITEM: ContextVar[OwnItem | None] = ContextVar("fastdata_item", default=None)


class Sample(tuple[Any, ...]):
    """One (image, target) of a ``SampleBatch``; its class tells ``default_collate`` what to do."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class SampleDict(dict[str, Any]):
    """One item of a ``SampleBatch`` whose items are dicts; as ``Sample``."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def stacked(
    images: torch.Tensor | list[torch.Tensor] | Padded, targets: Any, keys: ItemKeys | None
) -> Any:
    """What ``default_collate`` makes of samples whose images and targets it makes these of."""
    if keys is None:
        return [images, targets]
    # Texts, of dicts in a list.
    return keys.join(images, list(targets) if type(targets) is tuple else targets)


class SampleBatch(list[Any]):
    """A list of (image, target) samples, or dicts of both, that are views of one stacked tensor.

    torch's ``default_collate`` and ``fastdata.collate`` take the stacked tensors as they are, so
    that a ``collate_fn`` that calls the former, as those of MixUp and CutMix do, copies nothing.
    Where one has put other samples into the list, or other values into a sample, these are stacked
    as any.

    Args:
        images: (B, C, h, w); sample i is a view of ``images[i]``. Or a list of such tensors,
            several views of it.
        targets: what ``default_collate`` makes of the targets: int64 (B,) for class numbers. None:
            it is made when it is asked for, if it can be.
        each_target: one Python object per sample.
        image_class: of the images in the list, such as ``tv_tensors.Image`` or ``np.ndarray``.
        keys: of samples that are dicts; None where they are tuples.
        made: of what type a sample's views are.
    """

    def __init__(
        self,
        images: torch.Tensor | list[torch.Tensor],
        targets: Any,
        each_target: Iterable[Any],
        image_class: type[torch.Tensor] | type[np.ndarray] = torch.Tensor,
        keys: ItemKeys | None = None,
        made: type = list,
    ) -> None:
        each_target = list(each_target)
        self._parts = images, targets, each_target, image_class, keys, made
        if isinstance(images, list):
            views = [rows_of(each, image_class) for each in images]
            each_image: Iterable[Any] = map(made, zip(*views, strict=True))
        else:
            each_image = rows_of(images, image_class)
        pairs = zip(each_image, each_target, strict=True)
        super().__init__(
            map(Sample, pairs) if keys is None else (_marked(keys.join(*pair)) for pair in pairs)
        )
        self._items = list(self)
        self._consisted_of = self._objects()
        for kind in (Sample, SampleDict):
            # Torch's own way to say how a class is collated.
            default_collate_fn_map.setdefault(kind, _collate_samples)

    @property
    def is_intact(self) -> bool:
        """Whether list and samples still consist of the very objects that they were made of."""
        return are_same(self, self._items) and are_same(self._objects(), self._consisted_of)

    def _objects(self) -> list[Any]:
        """What may be put in place of another: keys and values of dicts, and views in a list."""
        has_lists = isinstance(self._parts[0], list) and self._parts[-1] is list
        are_dicts = bool(self) and isinstance(self[0], SampleDict)
        if not are_dicts and not has_lists:
            return []
        objects = list(chain.from_iterable(self))
        if are_dicts:
            objects += chain.from_iterable(map(dict.values, self))
        return objects + [view for each in objects if type(each) is list for view in each]

    @property
    def stacked(self) -> Any:
        """``[images, targets]``, or a dict of the samples' keys; None once another object is in it.

        Raises what ``default_collate`` raises of targets that it cannot collate.
        """
        return self._with(self._parts[0]) if self.is_intact else None

    def padded(self) -> Any:
        """As ``stacked``, with ``Padded`` images; None also where there are several views."""
        images = self._parts[0]
        if isinstance(images, list) or not self.is_intact:
            return None
        return self._with(Padded(images, torch.tensor(images.shape[-2:]).repeat(len(images), 1)))

    def _with(self, images: Any) -> Any:
        _, targets, each_target, _, keys, _ = self._parts
        return stacked(images, collate_targets(each_target) if targets is None else targets, keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _marked(item: Any) -> Any:
    """The item in a class that ``default_collate`` knows; a tensor alone as it is."""
    if isinstance(item, dict):
        return SampleDict(item)
    return Sample(item) if isinstance(item, tuple) else item


def rows_of(images: torch.Tensor, kind: type) -> Sequence[Any]:
    """The images of a batch, views of it."""
    if kind is np.ndarray:
        arrays = images.numpy()
        return [arrays[row, ...] for row in range(len(arrays))]
    rows = images.unbind(0)
    return rows if kind is torch.Tensor else [row.as_subclass(kind) for row in rows]


def are_same(objects: list[Any], others: list[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


class Padded(NamedTuple):
    """Images of several sizes as one tensor, each at the top left, of ``collate(pad=...)``.

    Attributes:
        images: (B, C, H, W), as high as the highest and as wide as the widest.
        sizes: int64 (B, 2), height and width of each without what was padded.

    Example:
        >>> batch = collate([(torch.ones(3, 2, 4), 7), (torch.ones(3, 4, 2), 8)], pad=0)
        >>> batch[0].images.shape, batch[0].sizes.tolist(), batch[0].padded_share, batch[1]
        (torch.Size([2, 3, 4, 4]), [[2, 4], [4, 2]], 0.5, tensor([7, 8]))
    """

    images: torch.Tensor
    sizes: torch.Tensor

    @property
    def padded_share(self) -> float:
        """How many of the pixels are padded, in [0, 1)."""
        count, _, height_px, width_px = self.images.shape
        return 1 - int(self.sizes.prod(dim=1).sum()) / max(count * height_px * width_px, 1)


def collate(samples: list[Any], *, pad: float | None = None) -> Any:
    """Turn samples into a batch as torch's ``default_collate`` does; a SampleBatch is not copied.

    Args:
        samples: of one kind, as torch's.
        pad: where images differ in size, the value that fills the right and the bottom of smaller
            ones. The images of the batch are then a ``Padded``, always: its ``images``, the
            ``sizes`` before, and the ``padded_share``. Images are (C, H, W) tensors: the samples
            themselves, the first value of a tuple, or the only such one in a dict. For a loader:
            ``collate_fn=functools.partial(collate, pad=0)``.

    Raises:
        TypeError: with ``pad``, images are no tensors, or differ in more than height and width.
        ValueError: ``pad`` is no value of the images' dtype.

    Example:
        >>> images = torch.zeros(2, 3, 4, 4)
        >>> batch = SampleBatch(images, torch.tensor([0, 1]), [0, 1])
        >>> collate(batch)[0] is images
        True
    """
    if pad is None:
        return default_collate(samples)  # which asks the function below about a SampleBatch
    whole = samples.padded() if isinstance(samples, SampleBatch) else None
    if whole is not None:
        return whole
    first = samples[0]
    if isinstance(first, Mapping):
        key = _image_key(first)
        names = [name for name in first if name != key]
        batch = default_collate([{name: sample[name] for name in names} for sample in samples])
        padded = _pad([sample[key] for sample in samples], pad)
        return {name: padded if name == key else batch[name] for name in first}
    if isinstance(first, (list, tuple)):
        rest = default_collate([tuple(sample[1:]) for sample in samples])
        parts = [_pad([sample[0] for sample in samples], pad), *rest]
        return type(first)(*parts) if hasattr(first, "_fields") else parts
    return _pad(samples, pad)


def _image_key(sample: Mapping[Any, Any]) -> Any:
    images = [
        key for key, value in sample.items() if isinstance(value, torch.Tensor) and value.ndim == 3
    ]
    if len(images) != 1:
        found = ", ".join(map(str, images)) or f"none among {', '.join(map(str, sample))}"
        raise TypeError(
            f"pad= needs one image, a tensor (C, H, W), in each sample, and finds {found}"
        )
    return images[0]


def _pad(images: list[Any], value: float) -> Padded:
    for image in images:
        if isinstance(image, torch.Tensor) and image.ndim == 3:
            continue
        is_tensor = isinstance(image, torch.Tensor)
        found = f"one of shape {tuple(image.shape)}" if is_tensor else type(image).__name__
        raise TypeError(
            f"pad= needs images that are tensors (C, H, W), not {found}; end the transform with "
            "a step that makes tensors, such as ToTensor or PILToTensor."
        )
    kinds = {(image.dtype, image.shape[0]) for image in images}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{dtype} of {channels} channels" for dtype, channels in kinds))
        raise TypeError(
            f"the images of one batch are {found}: pad= makes height and width alike, "
            "and nothing else"
        )
    dtype = images[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        limits = torch.iinfo(dtype)
        if not limits.min <= value <= limits.max or value != int(value):
            raise ValueError(
                f"pad={value} does not fit images of {dtype}, "
                f"whole numbers from {limits.min} to {limits.max}"
            )
    sizes = torch.tensor([image.shape[-2:] for image in images])
    batch = images[0].new_full(
        (len(images), images[0].shape[0], *sizes.amax(dim=0).tolist()), value
    )
    batch = batch.as_subclass(torch.Tensor)  # as torch stacks images that are tv_tensors
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image.as_subclass(torch.Tensor)
    return Padded(batch, sizes)


def _collate_samples(samples: list[Any], *, collate_fn_map: Any = None) -> Any:
    if isinstance(samples, SampleBatch) and samples.is_intact:
        return samples.stacked
    return default_collate(
        [dict(sample) if isinstance(sample, dict) else tuple(sample) for sample in samples]
    )


# What a batch's own draws are made from


class DrawKey(NamedTuple):
    """What a ``collate_fn`` draws from: its batch among those of all epochs and ranks."""

    seed: int
    epoch: int
    number: int

    def apart(self) -> DrawKey:
        """For what is drawn where the batch is read."""
        return self._replace(seed=self.seed ^ _READ_SALT)

    def collated(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        # As a partial, with pad=, too.
        is_ours = getattr(collate_fn, "func", collate_fn) in (collate, default_collate)
        with nullcontext() if is_ours else BatchDraws(self):  # ours draw nothing
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
        if not _can_be_seeded(function):
            return function(*args, **kwargs)
        given = *args, *kwargs.values()
        if not any(isinstance(it, torch.Generator) for it in given):
            devices = [it.device if isinstance(it, torch.Tensor) else it for it in given]
            if all(it.type == "cpu" for it in devices if isinstance(it, torch.device)):
                return function.overloadpacket(*args, **kwargs | {"generator": self._generator})
        return function(*args, **kwargs)


@cache
def _can_be_seeded(function: Any) -> bool:
    """Whether an operation draws, and it or another of its name takes a generator."""
    names = [
        *(argument.name for argument in function._schema.arguments),
        *function.overloadpacket.overloads(),
    ]
    return torch.Tag.nondeterministic_seeded in function.tags and any(
        "generator" in name for name in names
    )


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


class SharedVisits:
    """Visits per sample in shared memory, for readers told no epoch, such as torch's loader.

    They are counted for each reader, such as an iterator with its workers: from 0 for a new one, on
    for one that persists. Reading each sample once per epoch gives each epoch's number, whatever
    process reads it. A sample knows its two latest readers, so that loaders may take turns and the
    visits of one that persists do not begin again.
    """

    def __init__(self, length: int) -> None:
        latest_two = np.zeros((2, length), np.uint32)
        columns: dict[str, np.ndarray] = {
            "epoch": np.zeros(1, np.int64),
            "readers": latest_two,
            "seen": latest_two,
        }
        self._columns = ArrayBlock(columns, seal=False)

    def take(self, index_B: np.ndarray, reader: int, given: Any = ()) -> np.ndarray:
        """Return the visits (int64, B) of a reader to some samples and count them.

        Those of a RepeatedIndex lie apart, as other ranks may have the same sample.
        """
        number = np.uint32(reader & 0xFFFFFFFF)
        readers, seen = self._columns["readers"], self._columns["seen"]
        others = index_B[readers[0, index_B] != number]
        if len(others):
            others = np.unique(others)
            known = np.where(readers[1, others] == number, seen[1, others], 0)
            readers[1, others], seen[1, others] = readers[0, others], seen[0, others]
            readers[0, others], seen[0, others] = number, known
        visits_B: np.ndarray = self._columns["epoch"] + count_earlier(seen[0], index_B)
        for k, occurrence in occurrences(given):
            visits_B[k] += occurrence << REPEAT_SHIFT
        return visits_B

    def restart(self, epoch: int) -> None:
        self._columns["epoch"][:] = epoch
        self._columns["seen"][:] = 0


def count_earlier(seen: np.ndarray, index_B: np.ndarray) -> np.ndarray:
    """Return how often each index came before, also in this batch; count it in ``seen``."""
    before_B: np.ndarray = seen[index_B].astype(np.int64)
    order = np.argsort(index_B, kind="stable")
    sorted_B = index_B[order]
    is_repeat_B = sorted_B[1:] == sorted_B[:-1]
    if not is_repeat_B.any():
        seen[index_B] += 1
        return before_B
    starts = np.flatnonzero(np.concatenate(([True], ~is_repeat_B)))
    lengths = np.diff(np.append(starts, len(order)))
    before_B[order] += np.arange(len(order)) - np.repeat(starts, lengths)
    # Counts repetitions; a plain 1 takes fifty times as long.
    np.add.at(seen, index_B, seen.dtype.type(1))
    return before_B


# Batches as trees

Build = Callable[[Sequence[Any]], Any]


def flatten(batch: Any) -> tuple[list[Any], Build]:
    """Return the tensors in a batch, each once, and what makes the same batch of others.

    Tuples, namedtuples, lists, mappings, dataclasses and ``SampleBatch`` keep their type; one that
    holds no tensor is passed on as it is, like every other value. A ``PackedSequence`` counts as a
    tensor. What makes the batch holds none of its tensors.

    Example:
        >>> tensors, build = flatten({"image": torch.zeros(2), "name": "a"})
        >>> len(tensors), build(["another"])
        (1, {'image': 'another', 'name': 'a'})
    """
    numbered: dict[int, tuple[int, Any]] = {}
    build = _flatten(batch, numbered)
    return [tensor for _, tensor in numbered.values()], build or (lambda _: batch)


def as_channels_last(batch: Any) -> Any:
    """The batch with its tensors of four dimensions in ``torch.channels_last``."""
    tensors, build = flatten(batch)
    converted = [
        tensor.contiguous(memory_format=torch.channels_last)
        if isinstance(tensor, torch.Tensor) and tensor.ndim == 4
        else tensor
        for tensor in tensors
    ]
    return batch if are_same(tensors, converted) else build(converted)


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelsLast:
    """A ``collate_fn`` whose batches come ``as_channels_last``."""

    func: Callable[[Any], Any]  # named as a partial's, by which fastdata's own are known

    def __call__(self, samples: Any) -> Any:
        return as_channels_last(self.func(samples))


def _flatten(value: Any, numbered: dict[int, tuple[int, Any]]) -> Build | None:
    """Number the tensors of a value; None where it holds none."""
    if isinstance(value, (torch.Tensor, PackedSequence)):
        number = numbered.setdefault(id(value), (len(numbered), value))[0]
        return operator.itemgetter(number)
    parts, make = _taken_apart(value)
    found = {key: _flatten(part, numbered) for key, part in parts.items()}
    builds = {key: build for key, build in found.items() if build is not None}
    if not builds:
        return None
    rest = parts | dict.fromkeys(builds)
    return lambda tensors: make(rest | {key: build(tensors) for key, build in builds.items()})


def _taken_apart(value: Any) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]]:
    """The values in a container, and what makes the like of others."""
    if isinstance(value, SampleBatch) and value.is_intact and value._parts[3] is not np.ndarray:
        return dict(enumerate(value._parts)), partial(_make_sequence, SampleBatch)
    if isinstance(value, (list, tuple)):
        # A ``SampleBatch`` that was changed is a list.
        kind = list if type(value) is SampleBatch else type(value)
        return dict(enumerate(value)), partial(_make_sequence, kind)
    if isinstance(value, Mapping):
        return dict(value), _refill(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        parts = {name: getattr(value, name) for name in names}
        return parts, partial(_fill, _fill(value, dict.fromkeys(names)))
    return {}, dict


def _refill(value: Mapping[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    """What fills an empty copy, as its class may refuse None; a dict where it has no copies."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return dict
    parts = dict(value)
    with suppress(Exception):
        shell = copy.copy(value)
        shell.clear()
        if len(value) == len(parts):
            return partial(_fill, shell)
        value.update(parts)  # what a copy shares with it
    return dict


def _make_sequence(kind: Any, parts: dict[int, Any]) -> Any:
    if hasattr(kind, "_fields") or kind is SampleBatch:
        return kind(*parts.values())
    try:
        return kind(parts.values())
    except TypeError:  # a subclass that is made otherwise
        return tuple(parts.values()) if issubclass(kind, tuple) else list(parts.values())


def _fill(old: Any, parts: dict[Any, Any]) -> Any:
    """Copy a mapping or dataclass with other values; it keeps the rest, as a default factory."""
    new = copy.copy(old)
    for key, part in parts.items():
        if isinstance(new, MutableMapping):
            new[key] = part
        else:
            object.__setattr__(new, key, part)  # a frozen one too: nobody else sees the copy yet
    return new


_CSR = ("crow_indices", "col_indices", "values")
_CSC = ("ccol_indices", "row_indices", "values")
_PARTS_OF = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _CSR,
    torch.sparse_bsr: _CSR,
    torch.sparse_csc: _CSC,
    torch.sparse_bsc: _CSC,
    torch.jagged: ("values", "offsets"),
}
"""Methods that give the strided tensors of a layout."""


def memory_of(tensor: Any) -> list[torch.Tensor]:
    """The strided tensors that one of any layout consists of."""
    if isinstance(tensor, PackedSequence):
        return [part for part in tensor if isinstance(part, torch.Tensor)]
    if tensor.layout is torch.strided:
        return [] if tensor.is_nested else [tensor]
    return [getattr(tensor, name)() for name in _PARTS_OF.get(tensor.layout, ())]
