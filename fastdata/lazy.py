"""Stores that are filled by their readers: each sample is prepared on its first read, in whatever process that is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdata.blocks import ArrayBlock
from fastdata.decode import sample_error
from fastdata.errors import MemoryBudgetError
from fastdata.ingest import ReadSample, SampleRoad
from fastdata.locks import ByteLocks
from fastdata.report import warn_user
from fastdata.spec import SampleSpec
from fastdata.stores.base import Store
from fastdata.stores.writers import ShapesDifferError

__all__ = ["LazyFill", "LazyStore"]


class LazyFill:
    """Fills the stores of all parts of a dataset's samples, each sample once.

    Who reads a sample that is not there prepares and writes it, while others who want the same one wait. A reader that
    dies leaves the sample to the next one.

    Args:
        road: of the samples; what its writers write to is reserved.
        length: number of samples.
        dimensions: of each part's samples.
    """

    def __init__(self, road: SampleRoad, length: int, dimensions: Sequence[int]) -> None:
        self._road = road
        self._is_out_of_room = False
        zeros = np.zeros(length, np.int64)
        self._indices = [
            ArrayBlock({"offsets": zeros, "sizes": zeros, "shapes": np.zeros((length, count), np.int32)}, seal=False)
            for count in dimensions
        ]
        self._marks = ArrayBlock({"is_there": np.zeros(max(length, 1), np.uint8)}, seal=False)
        self._length = length
        self._open()

    def _open(self) -> None:
        self._is_there = self._marks["is_there"]
        self._locks = ByteLocks(self._marks.block)

    def stores(self) -> tuple[LazyStore, ...]:
        """The stores that are being filled."""
        live = [writer.live(index) for writer, index in zip(self._road.writers, self._indices, strict=True)]
        return tuple(LazyStore(store, self, part) for part, store in enumerate(live))

    @property
    def filled(self) -> np.ndarray:
        """Whether each sample is there: bool (N,), a view that goes with the time."""
        return self._is_there[: self._length].view(np.bool_)

    def want(self, index: int) -> ReadSample | None:
        """See to it that a sample is there; where there is no room for it, return it.

        Raises:
            SampleError: it cannot be read or prepared.
        """
        if self._is_there[index]:
            return None
        with self._locks.hold(index):
            if self._is_there[index]:
                return None
            sample = self._road.read(index)
            if self._is_out_of_room:
                return sample
            try:
                self._write(index, sample)
            except MemoryBudgetError:
                self._is_out_of_room = True
                there = int(np.count_nonzero(self._is_there))
                warn_user(
                    f"the store is full with {there} of {self._length} samples; the others are prepared each time"
                )
                return sample
        return None

    def _write(self, index: int, sample: ReadSample) -> None:
        try:
            places = self._road.write(sample)
        except ShapesDifferError as found:
            cause = ValueError(f"{found}, and fill='lazy' has taken these for the shape of all; use fill='eager'")
            raise sample_error(self._road.source.path(index), index, cause) from None
        for live, place in zip(self._indices, places, strict=True):
            live["offsets"][index], live["sizes"][index], live["shapes"][index] = place
        self._is_there[index] = 1

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._is_there = self._is_there[:0].copy()
        self._marks.close()
        for writer in self._road.writers:
            writer.close()
        for index in self._indices:
            index.close()

    def __getstate__(self) -> dict[str, object]:
        derived = ("_is_there", "_locks")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()


class LazyStore:
    """One part of samples that are filled in as they are read; see ``fastdata.stores.base.Store``.

    Args:
        store: of the part, over memory that is still written to.
        fill: fills it.
        part: which one it is.
    """

    def __init__(self, store: Store, fill: LazyFill, part: int) -> None:
        self._store, self.fill, self._part = store, fill, part
        self._is_full = False

    @property
    def spec(self) -> SampleSpec:
        """Shape, dtype and form of the samples."""
        return self._store.spec

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that are reserved."""
        return self._store.size_bytes

    @property
    def settled(self) -> Store:
        """What to read from: the plain store once all samples are there, until then this one."""
        self._is_full = self._is_full or bool(self.fill.filled.all())
        return self._store if self._is_full else self

    @property
    def gives_views(self) -> bool:
        """Whole samples should be asked for, because some may have to be prepared to know their shape."""
        return True

    def __len__(self) -> int:
        return len(self.fill.filled)

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one sample; of ragged ones, that prepares it."""
        return self._store.spec.shape or self.read(index).shape

    def read(self, index: int) -> np.ndarray:
        """One sample, prepared now if it is not there."""
        unsaved = self.fill.want(index)
        return self._store.read(index) if unsaved is None else unsaved.parts[self._part].array

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Put one sample into ``out``."""
        unsaved = self.fill.want(index)
        if unsaved is None:
            self._store.read_into(index, out)
        else:
            out[...] = unsaved.parts[self._part].array

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Put the chosen samples into ``out_B`` (B, *shape)."""
        unsaved = [(b, sample) for b, i in enumerate(index_B.tolist()) if (sample := self.fill.want(i)) is not None]
        if not unsaved:
            self._store.gather_into(index_B, out_B)
            return
        for b, index in enumerate(index_B.tolist()):
            self.read_into(index, out_B[b])

    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""
        self._store.close()
        self.fill.close()
