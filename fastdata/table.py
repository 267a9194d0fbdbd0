"""The table of samples: paths, targets and class names in one shared block, with list-like views over it.

Lists of a million Python strings are copied into every worker by touching their reference counts; arrays are not.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch

from fastdata.blocks import ArrayBlock

__all__ = ["ListView", "PackedPaths", "SampleTable"]

_T = TypeVar("_T")


class ListView(Sequence[_T], Generic[_T]):
    """A read-only list whose items are made when asked for; copies, slices and sums are real lists.

    It is no ``list`` itself: C code reads a list's memory past its methods, and would find no item there. So
    ``json.dumps(view, default=list)``.

    Args:
        length: number of items.
        item: makes item i, 0 <= i < length; a method of the table, so that a pickled view is a pickled table.

    Example:
        >>> view = ListView(1_000_000, str)
        >>> view[-1], view[:2], view
        ('999999', ['0', '1'], ['0', '1', '2', ... 999996 more ..., '999999'])
    """

    def __init__(self, length: int, item: Callable[[int], _T]) -> None:
        self._length, self._item = length, item

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(self._length))]
        return self._item(range(self._length)[index])  # range has list's own rules for negative and wrong indices

    def __iter__(self) -> Iterator[_T]:
        return map(self._item, range(self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, ListView)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __add__(self, other: Iterable[_T]) -> list[_T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[_T]) -> list[_T]:
        return [*other, *self]

    def copy(self) -> list[_T]:
        """All items, as a list."""
        return list(self)

    def __repr__(self) -> str:
        if len(self) <= 6:
            return repr(list(self))
        return f"[{', '.join(map(repr, self[:3]))}, ... {len(self) - 4} more ..., {self[-1]!r}]"


@dataclass(frozen=True, slots=True)
class PackedPaths:
    """File names end to end: name i is ``prefix`` and the bytes of ``blob`` from ``ends[i - 1]`` to ``ends[i]``.

    A million of them are checked and copied as three arrays, without one Python string.
    """

    blob: np.ndarray
    ends: np.ndarray
    prefix: bytes = b""

    @classmethod
    def of(cls, paths: Iterable[str]) -> PackedPaths:
        """Pack names given one by one."""
        columns = _pack("path", [os.fsencode(path) for path in paths])
        return cls(columns["path"], columns["path_ends"])

    def __len__(self) -> int:
        return len(self.ends)

    def names(self) -> list[bytes]:
        """All names without the prefix."""
        blob, ends = self.blob.tobytes(), self.ends.tolist()
        return [blob[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


class SampleTable:
    """Paths, targets and class names of all samples.

    Args:
        targets: one per sample. Numbers, and arrays or tensors of one shape and dtype, become one array; anything else
            is kept as it is.
        paths: one per sample, packed or not, or None where samples are no files.
        class_to_idx: number of each class in the order of the class list, or None where there are no classes.

    Pickles as a handle of a few hundred bytes.
    """

    def __init__(
        self,
        targets: Sequence[Any] | np.ndarray,
        *,
        paths: Sequence[str] | PackedPaths | None = None,
        class_to_idx: Mapping[str, int] | None = None,
    ) -> None:
        columns, self._kind = _target_columns(targets)
        if paths is not None:
            packed = paths if isinstance(paths, PackedPaths) else PackedPaths.of(paths)
            prefix = np.frombuffer(packed.prefix, np.uint8)
            columns |= {"path": packed.blob, "path_ends": packed.ends, "path_prefix": prefix}
        if class_to_idx is not None:
            columns["classes"] = np.frombuffer(json.dumps(dict(class_to_idx)).encode(), np.uint8)
        self._length = len(targets)
        self._block = ArrayBlock(columns)
        self._open()

    def _open(self) -> None:
        self._arrays = dict(self._block)
        self._prefix = self._arrays["path_prefix"].tobytes() if self.has_paths else b""

    def __len__(self) -> int:
        return self._length

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        """Number of each class, in the order of the class list; None where there are no classes."""
        return json.loads(self._arrays["classes"].tobytes()) if "classes" in self._arrays else None

    @property
    def targets(self) -> ListView[Any]:
        """All targets."""
        return ListView(self._length, self.target)

    @property
    def has_paths(self) -> bool:
        """Whether the samples are files."""
        return "path" in self._arrays

    @property
    def paths(self) -> ListView[str]:
        """All paths; only if the samples are files."""
        return ListView(self._length, self.path)

    @property
    def pairs(self) -> ListView[tuple[str, Any]]:
        """All (path, target) pairs; only if the samples are files."""
        return ListView(self._length, self.pair)

    def target(self, index: int) -> Any:
        """Target of one sample, as it was given."""
        if self._kind == "object":  # pickled by this process's family, in memory that nobody else can write
            return pickle.loads(self._bytes("object", index))
        value = self._arrays["targets"][index]
        if self._kind == "number":
            return value.item()
        return torch.from_numpy(value.copy()) if self._kind == "tensor" else value.copy()

    def path(self, index: int) -> str:
        """Path of one sample; only if the samples are files."""
        return os.fsdecode(self._prefix + self._bytes("path", index))

    def pair(self, index: int) -> tuple[str, Any]:
        """Path and target of one sample."""
        return self.path(index), self.target(index)

    @property
    def target_kind(self) -> str:
        """What each target is: a ``"number"``, a ``"tensor"``, an ``"array"``, or any other ``"object"``."""
        return self._kind

    def target_array(self) -> np.ndarray | None:
        """Targets with the samples on the first axis (read-only view), or None if they are no numbers."""
        return self._arrays.get("targets")

    def reduced_to(self, kept: Sequence[int]) -> SampleTable:
        """The table of these samples alone, which takes the place of this one: this one is closed."""
        with contextlib.closing(self):
            paths, targets = [self.path(index) for index in kept], [self.target(index) for index in kept]
            return SampleTable(targets, paths=paths, class_to_idx=self.class_to_idx)

    def close(self) -> None:
        """Give back the block. Idempotent."""
        self._arrays = {}
        self._block.close()

    def __getstate__(self) -> tuple[str, int, ArrayBlock]:
        return self._kind, self._length, self._block

    def __setstate__(self, state: tuple[str, int, ArrayBlock]) -> None:
        self._kind, self._length, self._block = state
        self._open()

    def _bytes(self, column: str, index: int) -> bytes:
        blob, ends = self._arrays[column], self._arrays[f"{column}_ends"]
        return blob[int(ends[index - 1]) if index else 0 : int(ends[index])].tobytes()


def _target_columns(targets: Sequence[Any] | np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    """Choose how targets are kept: as one array where that loses nothing, else pickled one by one."""
    if isinstance(targets, np.ndarray) and targets.ndim == 1:
        return {"targets": targets}, "number"
    types = {type(target) for target in targets}
    if not types or types == {int} or types == {bool} or types == {float}:
        array = np.array(targets, dtype=np.int64 if types <= {int} else None)
        return {"targets": array}, "number"
    if types == {torch.Tensor} or (len(types) == 1 and isinstance(targets[0], np.ndarray)):
        arrays = [np.asarray(target) for target in targets]
        if len({(array.shape, array.dtype) for array in arrays}) == 1 and arrays[0].dtype.kind in "iufb":
            return {"targets": np.stack(arrays)}, "tensor" if isinstance(targets[0], torch.Tensor) else "array"
    return _pack("object", [pickle.dumps(target, protocol=5) for target in targets]), "object"


def _pack(column: str, strings: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Lay byte strings end to end: string i reaches from ``ends[i - 1]`` to ``ends[i]``."""
    ends = np.cumsum([len(string) for string in strings], dtype=np.int64)
    return {column: np.frombuffer(b"".join(strings), np.uint8), f"{column}_ends": ends}
