"""Stored samples of a dataset, put together from their parts.

A sample is a sequence of parts: the image, or each value of a tuple such as (image, mask), and
after these the images of the target. Each part has its own store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastdata.errors import ChannelsError, SampleError
from fastdata.faults import sample_error
from fastdata.machine.ranks import Leader
from fastdata.machine.tables import SampleTable, collate_targets
from fastdata.pixels.arrays import Array
from fastdata.pixels.samples import from_stored
from fastdata.sources.source import ItemKeys
from fastdata.stores.source_codec import SOURCE

if TYPE_CHECKING:
    from fastdata.stores.store import Store


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parts of a sample, and how it is put together from them.

    Args:
        is_tuple: True if samples are tuples of parts.
        target_is_part: True if the target is an image, which is the last part.
        keys: keys of items that are not pairs, such as dicts and namedtuples.
        mask_places: positions or names of the images in targets that are tuples or dicts. These
            images are the last parts.
    """

    is_tuple: bool = False
    target_is_part: bool = False
    keys: ItemKeys | None = None
    mask_places: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        keys = self.keys
        if keys and (keys.image not in keys.names or len({*keys.names}) < len(keys.names)):
            raise ValueError(f"its keys must be distinct and include that of the image: {keys}")

    @property
    def target_parts(self) -> int:
        """Number of parts that are images of targets. These are the last parts."""
        return self.target_is_part + len(self.mask_places)


@dataclass(frozen=True)
class KeptSamples(Layout):
    """Stored samples and their targets, with the interface of a ``Source``.

    Each read returns new memory, which the user may change.

    Args:
        stores: store of each part.
        table: table of the targets, except for those that are parts.
        shared_by: leader through which other ranks of the machine attach to the stores.
    """

    stores: tuple[Store, ...]
    table: SampleTable
    shared_by: Leader | None = None

    # Attributes of a Source: no file is opened or fetched to read a stored sample.
    opening = None
    is_remote = False

    @property
    def images(self) -> Store:
        """The store of the first part."""
        return self.stores[0]

    def __len__(self) -> int:
        return len(self.table)

    def expect(self, indices: Sequence[int]) -> None:
        self.images.expect(indices)

    def path(self, index: int) -> str | None:
        """Return the sample's file, for messages; None if samples are not files."""
        return self.table.path(index) if self.table.has_paths else None

    def read(self, index: int) -> tuple[Any, Any]:
        """Return sample and target in the form they had before they were stored, in new memory."""
        stores = self.stores[: len(self.stores) - self.target_parts]
        parts = tuple(self._owned(store, index) for store in stores)
        return (parts if self.is_tuple else parts[0]), self.target(index)

    def target(self, index: int) -> Any:
        """Return the target of a sample, with its images in their places."""
        if self.target_is_part:
            return self._owned(self.stores[-1], index)
        target = self.table.target(index)
        if not self.mask_places:
            return target
        # The table has None in the places of the images.
        is_dict = isinstance(target, dict)
        values: Any = target if is_dict else list(target)
        for place, store in self._masks():
            values[place] = self._owned(store, index)
        return values if is_dict else tuple(values)

    def _masks(self) -> Iterator[tuple[int | str, Store]]:
        """Yield the position and the store of each image in targets that are tuples or dicts."""
        stores = self.stores[len(self.stores) - len(self.mask_places) :]
        return zip(self.mask_places, stores, strict=True)

    def collated_targets(self, index_B: Array) -> Any:
        """Return the targets of a batch as ``default_collate`` makes them."""
        if not self.target_parts:
            return self.table.collated_targets(index_B)
        if self.target_is_part and (masks := self._gathered(self.stores[-1], index_B)) is not None:
            return masks
        return collate_targets([self.target(index) for index in index_B.tolist()])

    def _gathered(self, store: Store, index_B: Array) -> torch.Tensor | None:
        """Return one part of a batch as one tensor; None if its samples cannot be stacked."""
        spec = store.spec
        if spec.shape is None or spec.form not in ("tensor", "array"):
            return None
        out_B = np.empty((len(index_B), *spec.shape), spec.dtype)
        with self.naming_damage():
            store.gather_into(index_B, out_B)
        return torch.from_numpy(out_B)

    def _owned(self, store: Store, index: int) -> Any:
        """Read a part into new memory."""
        with self.naming_damage():
            array = store.read(index)
        if store.gives_views:
            array = array.copy()
        return from_stored(array, store.spec.form)

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Add the path of a sample to the error that a store raises for it."""
        try:
            yield
        except SampleError as damaged:
            index = damaged.index
            path = self.path(index)
            if damaged.path == path:  # the error has the path already, or there is no file
                raise
            cause = damaged.__cause__
            if cause is not None and self.images.codec == SOURCE:  # decoding the file failed
                raise sample_error(path, index, cause) from cause
            raise SampleError(damaged.reason, index=index, path=path) from cause
        except ChannelsError as wrong:
            path = self.path(wrong.index)
            raise SampleError(wrong.reason, index=wrong.index, path=path) from wrong
