"""Where the samples of a chunk are read from: a source that prepares them, or a store that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fastdata.codecs import KNOWN_CODECS
from fastdata.contents import Contents
from fastdata.dataset import PreparedDataset
from fastdata.errors import SampleError
from fastdata.ingest import Part, ReadSample, forecast, read_sample
from fastdata.preparation import Road
from fastdata.sources import Source
from fastdata.spec import SampleSpec
from fastdata.stores.disk import DiskStore

__all__ = ["Layout", "Reader", "StoredSamples", "reader_of"]

_PROBES = 8
_NEIGHBOURS = 256
"""Fewer than a chunk or a piece of one has, mostly: their mean is hardly above that of the heaviest so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a slot has room for.

    Args:
        specs: of each part of a sample; ragged where samples turned out to differ in shape.
        shapes: of each part of some sample: its number of dimensions, and its channels, are those of all.
        part_bytes: of each part of a sample; of ragged ones the mean of those looked at and some more.
        is_tuple: whether samples are tuples of parts.
        target_is_part: whether the last part is the target.
    """

    specs: tuple[SampleSpec, ...]
    shapes: tuple[tuple[int, ...], ...]
    part_bytes: tuple[float, ...]
    is_tuple: bool
    target_is_part: bool

    RAGGED_SLACK = 1.25
    ALIGN_BYTES = 64

    @classmethod
    def of(
        cls, specs: tuple[SampleSpec, ...], looked_at: Sequence[ReadSample], *, is_tuple: bool, target_is_part: bool
    ) -> Layout:
        """The layout of samples like those looked at, at least one."""
        columns = zip(*(sample.parts for sample in looked_at), strict=True)
        return cls(
            specs=specs,
            shapes=tuple(part.array.shape for part in looked_at[0].parts),
            part_bytes=tuple(
                spec.sample_bytes if spec.is_dense else cls._mean_bytes(column)
                for spec, column in zip(specs, columns, strict=True)
            ),
            is_tuple=is_tuple,
            target_is_part=target_is_part,
        )

    @classmethod
    def _mean_bytes(cls, column: Sequence[Part]) -> float:
        padded = [part.array.nbytes + cls.ALIGN_BYTES for part in column]
        return cls.RAGGED_SLACK * sum(padded) / len(padded)

    @property
    def sample_bytes(self) -> float:
        """Of all parts of a sample."""
        return sum(self.part_bytes)

    def with_room(self, factor: float) -> Layout:
        """The layout of samples that are so much larger."""
        return replace(self, part_bytes=tuple(factor * part_bytes for part_bytes in self.part_bytes))

    def any_shapes(self) -> Layout:
        """The layout of samples of which only some have the shape that those looked at have."""
        specs = tuple(replace(spec, shape=None) for spec in self.specs)
        return replace(self, specs=specs, part_bytes=tuple(size + self.ALIGN_BYTES for size in self.part_bytes))


class Reader(Protocol):
    """Gives the parts of one sample as they are stored."""

    @property
    def source(self) -> Source:
        """The same samples, for the names of their files."""
        ...

    def read(self, position: int) -> ReadSample:
        """Read one sample.

        Raises:
            SampleError: it cannot be read or prepared.
        """
        ...

    def copy_part(self, part: int, positions: Sequence[int], out_B: np.ndarray) -> None:
        """Put one part of some samples into ``out_B`` (B, *shape); only where ``is_copied``, of dense parts.

        Raises:
            SampleError: one of them is damaged.
        """
        ...

    def bring(self, positions: Sequence[int]) -> None:
        """Have what reading these needs in memory, where it is cached until they are dropped."""
        ...

    def drop(self, positions: Sequence[int]) -> None:
        """Let go of what reading these has cached."""
        ...

    def release(self) -> None:
        """Let go of all that anybody's reading has cached in this process."""
        ...

    def look(self) -> Layout:
        """Read a few samples to learn what a slot for such samples has room for.

        Raises:
            SampleError: none of them can be read; the first one's error.
        """
        ...

    @property
    def is_sequential(self) -> bool:
        """Whether samples are best read many neighbours at a time."""
        ...

    @property
    def disk_bytes(self) -> int:
        """Of the files that are read in sequence; 0 where there are none."""
        ...

    @property
    def is_copied(self) -> bool:
        """Whether reading is mere copying, so that one thread does it as fast as several processes."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedSamples:
    """Samples that are kept nowhere: prepared whenever they are read."""

    road: Road

    @property
    def source(self) -> Source:
        """See ``Reader``."""
        return self.road.source

    def read(self, position: int) -> ReadSample:
        """See ``Reader``."""
        return read_sample(self.road.source, self.road.prepare, position)

    def copy_part(self, part: int, positions: Sequence[int], out_B: np.ndarray) -> None:
        """See ``Reader``; nothing is copied."""
        raise TypeError("samples that are prepared when they are read cannot be copied")

    def bring(self, positions: Sequence[int]) -> None:
        """See ``Reader``; nothing is cached."""

    def drop(self, positions: Sequence[int]) -> None:
        """See ``Reader``; nothing is cached."""

    def release(self) -> None:
        """See ``Reader``; nothing is cached."""

    def look(self) -> Layout:
        """See ``Reader``."""
        found = forecast(self.road.source, self.road.prepare)
        samples, is_tuple = found.looked_at, found.is_tuple
        return Layout.of(found.specs, samples, is_tuple=is_tuple, target_is_part=found.target_is_part)

    @property
    def is_sequential(self) -> bool:
        """See ``Reader``."""
        return False

    @property
    def disk_bytes(self) -> int:
        """See ``Reader``."""
        return 0

    @property
    def is_copied(self) -> bool:
        """See ``Reader``."""
        return False


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """Samples of a dataset that keeps them.

    Args:
        contents: has them.
        empties_cache: whether ``drop`` has the system's page cache let go as well.
    """

    contents: Contents
    empties_cache: bool = False

    @property
    def source(self) -> Source:
        """See ``Reader``."""
        return self.contents

    def read(self, position: int) -> ReadSample:
        """See ``Reader``."""
        contents = self.contents
        with contents.naming_damage():
            parts = tuple(Part(store.read(position), store.spec.form) for store in contents.stores)
        return ReadSample(position, parts, None, contents.is_tuple, contents.target_is_part)

    def copy_part(self, part: int, positions: Sequence[int], out_B: np.ndarray) -> None:
        """See ``Reader``."""
        with self.contents.naming_damage():
            self.contents.stores[part].gather_into(np.asarray(positions, np.int64), out_B)

    def bring(self, positions: Sequence[int]) -> None:
        """See ``Reader``."""
        for store in self._on_disk:
            store.bring(np.asarray(positions, np.int64))

    def check(self, positions: Sequence[int]) -> None:
        """Find out which samples on disk are damaged.

        Raises:
            SampleError: one of them is.
        """
        with self.contents.naming_damage():
            for store in self._on_disk:
                store.check(np.asarray(positions, np.int64))

    def drop(self, positions: Sequence[int]) -> None:
        """See ``Reader``."""
        for store in self._on_disk:
            store.drop(np.asarray(positions, np.int64), from_cache=self.empties_cache)

    def release(self) -> None:
        """See ``Reader``."""
        for store in self._on_disk:
            store.release()

    @property
    def is_mapped(self) -> bool:
        """Whether the samples are served from mapped files as fast as from any other memory, if only they are there.

        Not where serving them is Python's work, of which processes do more than threads.
        """
        kept = [store for store in self._on_disk if store.codec in ("raw", *KNOWN_CODECS)]
        return len(kept) == len(self.contents.stores)

    @property
    def mapped_bytes(self) -> float:
        """Of a sample where ``is_mapped``: as a mean over neighbours, where they are largest."""
        return sum(store.heaviest_bytes(_NEIGHBOURS) for store in self._on_disk)

    @property
    def _on_disk(self) -> list[DiskStore]:
        return [store for store in self.contents.stores if isinstance(store, DiskStore)]

    def look(self) -> Layout:
        """See ``Reader``."""
        contents, count = self.contents, len(self.contents)
        positions = sorted({k * (count - 1) // _PROBES for k in range(_PROBES + 1)})
        samples, damaged = [], []
        self.bring(positions)
        try:
            for position in positions:
                try:
                    samples.append(self.read(position))
                except SampleError as error:
                    damaged.append(error)
            if not samples:
                raise damaged[0]
            specs = tuple(store.spec for store in contents.stores)
            return Layout.of(specs, samples, is_tuple=contents.is_tuple, target_is_part=contents.target_is_part)
        finally:
            self.drop(positions)

    @property
    def is_sequential(self) -> bool:
        """See ``Reader``."""
        return bool(self._on_disk)

    @property
    def disk_bytes(self) -> int:
        """See ``Reader``."""
        return sum(store.size_bytes for store in self._on_disk)

    @property
    def is_copied(self) -> bool:
        """See ``Reader``; not while samples may have to be prepared on their first read."""
        return self.contents.images.gives_views and self.contents.filled_share() == 1


def reader_of(dataset: PreparedDataset) -> Reader:
    """What reads the samples of a dataset, whether it keeps them or not."""
    road = dataset.unkept_road()
    if road is not None:
        return PreparedSamples(road)
    assert dataset.kept is not None
    return StoredSamples(dataset.kept)
