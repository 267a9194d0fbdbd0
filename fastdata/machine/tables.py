"""Paths, targets and class names of samples, packed in a block that processes share.

Reading a list of a million Python strings changes their reference counts, so that every forked
worker would get its own copy of the memory pages. Arrays stay shared.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from fastdata.machine.blocks import ArrayBlock

_T = TypeVar("_T")

_READ_ONLY_LIST = (
    "this is a read-only view of what the dataset holds. Change a copy, and assign it before a "
    "sample is read: samples = list(dataset.samples); ...; dataset.samples = samples. The same "
    "works for targets."
)


class ListView(Sequence[_T]):
    """A read-only list whose items are made when they are read.

    Slices, sums and copies are real lists. The view itself is not a ``list``, because C code reads
    the memory of a list without calling its methods, and would find no items. For JSON, use
    ``json.dumps(view, default=list)``.

    Args:
        length: number of items.
        item: function from an index to its item. It is a method of the object that holds the items,
            so that a view can be pickled together with that object.
    """

    def __init__(self, length: int, item: Callable[[int], _T]) -> None:
        self._length = length
        self._item = item

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice) -> Any:
        found = range(self._length)[index]
        if isinstance(found, range):
            return list(map(self._item, found))
        return self._item(found)

    def __iter__(self) -> Iterator[_T]:
        return map(self._item, range(self._length))

    def chosen(self, indices: Iterable[int]) -> list[_T]:
        """Return the items at these indices in [0, length), twice as fast as by indexing."""
        return list(map(self._item, indices))

    @property
    def _fastdata_identity(self) -> list[_T]:
        """The items, which stand for this view in the fingerprint of a dataset."""
        return list(self)

    def __setitem__(self, index: Any, item: Any) -> None:
        raise TypeError(f"an item cannot be assigned: {_READ_ONLY_LIST}")

    def __delitem__(self, index: Any) -> None:
        raise TypeError(f"an item cannot be deleted: {_READ_ONLY_LIST}")

    def __getattr__(self, name: str) -> Any:
        # For ``append`` and the like, the message shows how to change the list.
        if not name.startswith("_") and hasattr(list, name):
            raise AttributeError(f"{name}() is not available: {_READ_ONLY_LIST}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | ListView):
            return NotImplemented
        return list(self) == list(other)

    def __add__(self, other: Iterable[_T]) -> list[_T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[_T]) -> list[_T]:
        return [*other, *self]

    def copy(self) -> list[_T]:
        return list(self)

    def __repr__(self) -> str:
        if len(self) <= 6:
            return repr(list(self))
        first = ", ".join(map(repr, self[:3]))
        return f"[{first}, ... {len(self) - 4} more ..., {self[-1]!r}]"


@dataclass(slots=True)
class Packed:
    """Byte strings stored end to end: string i is ``blob[ends[i - 1] : ends[i]]``.

    A million file names are checked and copied without creating Python strings.
    """

    blob: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> Packed:
        strings = list(strings)
        lengths = [len(string) for string in strings]
        ends = np.cumsum(lengths, dtype=np.int64)
        blob = np.frombuffer(b"".join(strings), np.uint8)
        return cls(blob, ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        start = self.ends[index - 1] if index else 0
        return self.blob[start : self.ends[index]].tobytes()

    def all(self) -> list[bytes]:
        """Return all strings, four times as fast as one by one."""
        blob = self.blob.tobytes()
        return [blob[start:end] for start, end in pairwise([0, *self.ends.tolist()])]


class SampleTable:
    """Targets, paths and class names of all samples. Pickles as a handle.

    Targets that are numbers, or arrays, scalars or tensors of one shape and dtype, become one
    array. Tuples of one length and dicts with the same keys become one column per place or key. All
    other targets are pickled.

    Args:
        targets: target of each sample.
        paths: path of each sample without ``prefix``; None if the samples are not files.
        prefix: beginning of every path.
        class_to_idx: target of each class, by the name of the class.
        stat: size and tag of each remote file, int64 (N, 2); -1 if unknown.

    Attributes:
        columns: all of these, as arrays in one block.
        target_kind: kind of the targets: one of ``target_columns``, or ``"tuple"`` or ``"dict"``,
            where each place has its own kind.
        has_paths: True if the samples are files.
    """

    def __init__(
        self,
        targets: Sequence[Any] | np.ndarray | torch.Tensor,
        *,
        paths: Iterable[str] | Packed | None = None,
        prefix: bytes = b"",
        class_to_idx: Mapping[str, int] | None = None,
        stat: Sequence[tuple[int, int]] | np.ndarray | None = None,
    ) -> None:
        columns, self.target_kind = target_columns(targets)
        self._places: dict[Any, str] = {}  # the kind of each place of a tuple or dict
        if self.target_kind == "object":
            place_columns, kinds = _columns_of_places(targets)
            # If every place would be pickled, one pickle is read faster than several.
            if set(kinds.values()) - {"object"}:
                columns = place_columns
                self.target_kind = type(targets[0]).__name__
                self._places = kinds
        self.has_paths = paths is not None
        self._length = len(targets)
        self._prefix = prefix
        if paths is not None:
            if not isinstance(paths, Packed):
                paths = Packed.of(map(os.fsencode, paths))
            columns["path"] = paths.blob
            columns["path_ends"] = paths.ends
        if class_to_idx is not None:
            columns["classes"] = np.frombuffer(json.dumps(dict(class_to_idx)).encode(), np.uint8)
        if stat is not None:
            columns["stat"] = np.array(stat, np.int64).reshape(-1, 2)
        self.columns = ArrayBlock.of(columns)

    def __len__(self) -> int:
        return self._length

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        text = self.columns.get("classes")
        if text is None:
            return None
        found: dict[str, int] = json.loads(text.tobytes())
        return found

    @property
    def stat(self) -> np.ndarray | None:
        return self.columns.get("stat")

    @property
    def targets(self) -> ListView[Any]:
        return ListView(self._length, self.target)

    @property
    def paths(self) -> ListView[str]:
        return ListView(self._length, self.path)

    @property
    def pairs(self) -> ListView[tuple[str, Any]]:
        return ListView(self._length, self.pair)

    def target(self, index: int) -> Any:
        if not self._places:
            return self._value(self.target_kind, index)
        values = {
            name: self._value(kind, index, f" of {name}") for name, kind in self._places.items()
        }
        if self.target_kind == "dict":
            return values
        return tuple(values.values())

    def _value(self, kind: str, index: int, place: str = "") -> Any:
        """Return a target, or the value at a place of it."""
        if kind == "object":
            # Unpickling is safe: this process or its parent wrote the pickle, and the block has
            # been sealed since.
            blob = self.columns[f"object{place}"]
            ends = self.columns[f"object_ends{place}"]
            return pickle.loads(Packed(blob, ends)[index])
        value = self.columns[f"targets{place}"][index]
        if kind == "number":
            return value.item()
        if kind == "scalar":
            return value
        # A copy, because the block is read-only. It may have no dimensions.
        row = np.array(value)
        if kind == "tensor":
            return torch.from_numpy(row)
        return row

    def path(self, index: int) -> str:
        packed = Packed(self.columns["path"], self.columns["path_ends"])
        return os.fsdecode(self._prefix + packed[index])

    def all_paths(self) -> list[str]:
        packed = Packed(self.columns["path"], self.columns["path_ends"])
        return [os.fsdecode(self._prefix + name) for name in packed.all()]

    def pair(self, index: int) -> tuple[str, Any]:
        return self.path(index), self.target(index)

    def collated_targets(self, index_B: np.ndarray) -> Any:
        """Return the targets of a batch as ``default_collate`` stacks them."""
        if not self._places:
            return self._collated(self.target_kind, index_B)
        found = {
            name: self._collated(kind, index_B, f" of {name}")
            for name, kind in self._places.items()
        }
        if self.target_kind == "dict":
            return found
        return list(found.values())

    def _collated(self, kind: str, index_B: np.ndarray, place: str = "") -> Any:
        """Return the targets of a batch, or their values at one place, stacked."""
        if kind == "object":
            values = [self._value(kind, index, place) for index in index_B.tolist()]
            # A batch of strings is a list under the key of a dict, and else a tuple.
            return (default_collate if self.target_kind == "dict" else collate_targets)(values)
        return torch.from_numpy(self.columns[f"targets{place}"][index_B])

    def reduced_to(self, kept: Sequence[int]) -> SampleTable:
        """Return a table of the samples with the indices ``kept`` only."""
        return SampleTable(
            list(map(self.target, kept)),
            paths=list(map(self.path, kept)),
            class_to_idx=self.class_to_idx,
            stat=None if self.stat is None else self.stat[kept],
        )

    def close(self) -> None:
        self.columns.close()


def collate_targets(targets: list[Any]) -> Any:
    return default_collate([(target,) for target in targets])[0]


_KINDS = {
    int: "number",
    bool: "number",
    float: "number",
    torch.Tensor: "tensor",
    np.ndarray: "array",
    np.memmap: "array",
}


def _places_of(targets: Any) -> dict[Any, Sequence[Any]]:
    """Return the values at each place of tuples, or under each key of dicts.

    The result is empty if the tuples differ in length, or the dicts in their keys.
    """
    types = {*map(type, targets)}
    if types == {tuple} and len({*map(len, targets)}) == 1:
        return dict(enumerate(zip(*targets, strict=True)))
    if types == {dict}:
        names = targets[0].keys()
        are_texts = all(isinstance(name, str) for name in names)
        if are_texts and all(target.keys() == names for target in targets):
            return {name: [target[name] for target in targets] for name in names}
    return {}


def _columns_of_places(targets: Any) -> tuple[dict[str, np.ndarray], dict[Any, str]]:
    """Return the arrays that hold the places of targets, and the kind of each place."""
    columns = {}
    kinds = {}
    for name, values in _places_of(targets).items():
        place_columns, kinds[name] = target_columns(values)
        for column, array in place_columns.items():
            columns[f"{column} of {name}"] = array
    return columns, kinds


def target_columns(
    targets: Sequence[Any] | np.ndarray | torch.Tensor,
) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays that hold targets, and their kind.

    Kinds are ``"number"`` (Python's), ``"scalar"`` (NumPy's), ``"array"``, ``"tensor"``, and
    ``"object"`` for pickles of anything else.
    """
    if isinstance(targets, torch.Tensor):
        return {"targets": targets.numpy()}, "tensor"
    if (
        isinstance(targets, np.ndarray)
        and targets.ndim == 1
        and targets.dtype.kind in "biufc"
        and targets.dtype.isnative
    ):
        return {"targets": targets}, "number"
    types = {*map(type, targets)} or {int}
    only = types.pop() if len(types) == 1 else object
    kind = _KINDS.get(only, "object")
    if issubclass(only, np.generic):
        kind = "scalar"
    # NumPy refuses numbers beyond int64, and tensors of bfloat16, with gradients or on a device.
    # These are pickled.
    with contextlib.suppress(OverflowError, TypeError, RuntimeError):
        if kind == "number":
            # Python's ints become int64 on every platform, although NumPy's default may be smaller.
            return {"targets": np.array(targets, np.int64 if only is int else None)}, kind
        if kind != "object":
            rows = [np.asarray(target) for target in targets]
            forms = {(row.shape, row.dtype) for row in rows}
            if len(forms) == 1 and rows[0].dtype.kind in "iufb":
                return {"targets": np.stack(rows)}, kind
    packed = Packed.of(pickle.dumps(target, protocol=5) for target in targets)
    return {"object": packed.blob, "object_ends": packed.ends}, "object"
