"""Samples that lie in files, one after the other: what all formats have in common."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import RemoteError
from fastdata.remote import Coming, Place

_HEADERS_BYTES = 8 << 20
"""Read at once of a remote file of headers: as much as comes in two round trips."""


class File(NamedTuple):
    place: Place
    name: str
    size_bytes: int
    tag: int

    def __str__(self) -> str:
        return self.place.at(self.name)

    def open(self) -> Any:
        """A stream that can seek."""
        if self.place.is_remote:
            return io.BufferedReader(_Stream(self), _HEADERS_BYTES)
        return open(self.place.at(self.name), "rb")

    def read(self, start: int, stop: int) -> bytes:
        return self.place.read(self.name, start, stop)


class _Stream(io.RawIOBase):
    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.size_bytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._file.size_bytes - self._at))
        buffer[:count] = self._file.read(self._at, self._at + count) if count else b""
        self._at += count
        return count


class Shards:
    """Samples that lie in files, one after the other; pickles, and is safe from several threads."""

    def __init__(self, files: Sequence[File], counts: Sequence[int], only: Collection[str] | None) -> None:
        self._files, self._only = list(files), None if only is None else set(only)
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._kept = threading.local()
        self._coming = Coming()
        self.is_remote = any(file.place.is_remote for file in files)
        facts = repr(sorted({(file.name, file.size_bytes, file.tag) for file in files})).encode()
        self._identity = f"{len(files)} files {hashlib.blake2b(facts, digest_size=8).hexdigest()}"
        """The same in every run, until a file is another."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number, row = self._locate(index)
        try:
            return self._item(number, row, index)
        except (ImportError, MemoryError, RemoteError):
            raise
        except Exception as problem:  # decoders raise anything
            said = f"number {row} of {self._files[number]}: {type(problem).__name__}: {problem}"
            raise ValueError(said) from problem

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_kept"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kept = threading.local()

    def _locate(self, index: int) -> tuple[int, int]:
        """Number of the file, and of the sample in it."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    def _item(self, number: int, row: int, index: int) -> Any:
        raise NotImplementedError

    def _span(self, number: int, row: int, index: int) -> tuple[int, int] | None:
        """First and last byte of a sample in its file; None where it is read with others."""
        return None

    def expect(self, indices: Sequence[int]) -> None:
        """Fetch these samples in the background, where they lie behind a URL and by themselves."""
        self._coming.expect(indices, self._submit)

    def _submit(self, index: int) -> Future[bytes] | None:
        number, row = self._locate(index)
        file = self._files[number]
        with contextlib.suppress(OSError, ValueError):  # whoever reads the sample is told
            span = self._span(number, row, index) if file.place.is_remote else None
            return None if span is None else file.place.submit(file.name, *span)
        return None

    def fetch(self, number: int, index: int, span: tuple[int, int]) -> bytes:
        coming = self._coming.here().pop(index, None)
        return self._files[number].read(*span) if coming is None else coming.result()

    def keep(self, what: str, key: object, make: Callable[[], Any]) -> Any:
        """What ``make`` gives; made anew where this thread's last was of another key."""
        kept = vars(self._kept)
        if kept.get(what, (None,))[0] != key:
            kept.pop(what, None)  # before there is another
            kept[what] = key, make()
        return kept[what][1]

    def wanted(self, names: Collection[str]) -> list[str]:
        """The columns to read, of those that there are."""
        if self._only is None:
            return list(names)
        if missing := self._only - set(names):
            there = ", ".join(map(repr, names))
            raise ValueError(f"there is no column {', '.join(map(repr, sorted(missing)))}; columns are {there}")
        return [name for name in names if name in self._only]


def array_of(data: bytes, dtype: Any, shape: Sequence[int] | None = None) -> np.ndarray:
    """Values of this shape and dtype, in fresh memory, if they fill the data; without a shape as many as there are."""
    dtype = np.dtype(dtype)
    sides = (len(data) // max(dtype.itemsize, 1),) if shape is None else tuple(shape)
    if dtype.kind not in "biufc":
        raise ValueError(f"values of {dtype} are not read")
    if min(sides, default=0) < 0 or math.prod(sides) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data):,} bytes are no {dtype} values of shape {sides}")
    return np.array(np.frombuffer(data, dtype)).reshape(sides)
