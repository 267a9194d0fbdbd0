"""What a dataset serves from: the stores of its samples' parts, and the table of paths and targets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fastdata.decode import present, sample_error, tensor_class
from fastdata.errors import SampleError
from fastdata.lazy import LazyStore
from fastdata.stores.base import Store
from fastdata.stores.encoded import UndecodableError

__all__ = ["Contents", "Table"]


class Table(Protocol):
    """The face of a ``SampleTable`` that serving needs."""

    @property
    def has_paths(self) -> bool:
        """Whether the samples are files."""
        ...

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """Path of one sample."""
        ...

    def target(self, index: int) -> Any:
        """The target of one sample."""
        ...

    def target_array(self) -> np.ndarray | None:
        """All targets as one array; None where they are not kept as one."""
        ...

    def close(self) -> None:
        """Give back the memory. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Contents:
    """The kept samples of a dataset and their targets.

    Args:
        stores: one for each part of a sample, at least one.
        table: paths, and targets unless they are a part.
        is_tuple: whether samples are tuples of parts.
        target_is_part: whether the last part is the target.
    """

    stores: tuple[Store, ...]
    table: Table
    is_tuple: bool = False
    target_is_part: bool = False

    @property
    def images(self) -> Store:
        """The store of the first part."""
        return _settled(self.stores[0])

    def filled_share(self, index: np.ndarray | None = None) -> float:
        """How many of the samples, or of those of ``index``, are kept already; 1 unless they are prepared lazily."""
        store = self.stores[0]
        if not isinstance(store, LazyStore):
            return 1.0
        filled = store.fill.filled
        chosen = filled if index is None else filled[index]
        return float(np.count_nonzero(chosen) / max(chosen.size, 1))

    def tensor_classes(self) -> list[type]:
        """Those of the samples' parts: what a process needs to have imported before it reads them."""
        return [tensor_class(store.spec.form) for store in self.stores]

    def sample(self, index: int) -> Any:
        """One sample as it was before it was stored, a tuple if it was one; its memory is the caller's own."""
        stores = self.stores[:-1] if self.target_is_part else self.stores
        with self.naming_damage():
            parts = tuple(present(_owned(store, index), store.spec.form) for store in stores)
        return parts if self.is_tuple else parts[0]

    def __len__(self) -> int:
        return len(self.table)

    def read(self, index: int) -> tuple[Any, Any]:
        """One stored sample and its target: a dataset's contents are a source as well."""
        return self.sample(index), self.target(index)

    def path(self, index: int) -> str | None:
        """File of one sample, where it has one."""
        return self.table.path(index) if self.table.has_paths else None

    def target(self, index: int) -> Any:
        """The target of one sample, as it was given."""
        if not self.target_is_part:
            return self.table.target(index)
        store = self.stores[-1]
        with self.naming_damage():
            return present(_owned(store, index), store.spec.form)

    def target_array(self, index_B: np.ndarray) -> np.ndarray | None:
        """The targets of a batch stacked, where they are numbers or arrays of one shape; else None."""
        if not self.target_is_part:
            array = self.table.target_array()
            return None if array is None else array[index_B]
        store = self.stores[-1]
        if store.spec.shape is None or store.spec.form == "pil":
            return None
        out = np.empty((len(index_B), *store.spec.shape), store.spec.dtype)
        with self.naming_damage():
            store.gather_into(index_B, out)
        return out

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Say of a damaged sample which it is.

        Raises:
            SampleError: in place of a store's own error.
        """
        try:
            yield
        except UndecodableError as damaged:
            path = self.path(damaged.index)
            if damaged.codec == "source" and damaged.__cause__ is not None:  # the decoder's own complaint of the file
                raise sample_error(path, damaged.index, damaged.__cause__) from damaged.__cause__
            name = f"sample {damaged.index}" if path is None else f"sample {damaged.index}, {path},"
            cure = "" if damaged.is_on_disk else "; make the dataset again to mend it"
            raise SampleError(
                f"{name} cannot be read from the store: {damaged}. The others can{cure}.",
                index=damaged.index,
                path=path,
            ) from damaged

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        closing: Sequence[Any] = (*self.stores, self.table)
        for part in closing:
            part.close()


def _settled(store: Store) -> Store:
    return store.settled if isinstance(store, LazyStore) else store


def _owned(store: Store, index: int) -> np.ndarray:
    """A sample in memory of its own."""
    array = store.read(index)
    return array.copy() if store.gives_views else array
