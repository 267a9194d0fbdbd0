"""Serving: single samples and whole batches from what a dataset holds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from multiprocessing import current_process
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from fastdata.batch import IndexBatch, SampleBatch, collate_targets
from fastdata.contents import Contents, Table
from fastdata.decode import Planes, decode_pixels, present, sample_error, tensor_class, to_image, without_exif
from fastdata.draws import sample_keys
from fastdata.errors import StoreGoneError
from fastdata.options import Options
from fastdata.preparation import Road
from fastdata.ring import BatchRing
from fastdata.sources import Source
from fastdata.transforms import TransformPlan
from fastdata.transforms.cpu import Program
from fastdata.visits import SharedVisits

__all__ = ["ServingDataset"]


class _Item:
    """The item of a batch that a subclass's own ``__getitem__`` is making: says what its reads are drawn from.

    A dataset's first read is on the item's visit if it is of the same index. All others are on visits of their own that
    follow from it, so that two crops of one image differ, and are the same whoever reads them.
    """

    def __init__(self, batch: IndexBatch, k: int) -> None:
        self._position, self._visit, self._seed = batch.positions[k : k + 1], batch.visits[k : k + 1], batch.seed
        self._reads: Counter[int] = Counter()

    def batch_of(self, position: int, dataset: ServingDataset) -> IndexBatch:
        """A batch of the next sample that is read from a dataset."""
        read = self._reads[id(dataset)]
        self._reads[id(dataset)] += 1
        visit = self._visit
        if read or position != self._position[0]:
            visit = sample_keys(read, self._visit, self._position).view(np.int64)
        return IndexBatch([position], np.array([position]), visit, dataset.seed_of(self._seed))


_ITEM: ContextVar[_Item | None] = ContextVar("fastdata_item", default=None)


class ServingDataset(Dataset[Any], ABC):
    """How every dataset answers a loader, once it is known where its samples are and what is done to them.

    A subclass may have a ``__getitem__``, ``__getitems__`` or ``__len__`` of its own, over these: then they are asked
    for every batch, and what an index means is theirs to say.
    """

    target_transform: Callable[[Any], Any] | None
    _options: Options
    _contents: Contents | None
    """What samples are served from; None where they are kept nowhere, and come from ``_source`` by ``_reader``."""
    _source: Source | None
    _reader: Road
    _table: Table | None
    _visits: SharedVisits
    _plan: TransformPlan
    _program: Program | None
    _is_upright = False
    """Whether samples were turned as their EXIF says before they were stored, so that nothing of it is missed."""
    _served: tuple[tuple[int, ...], np.dtype[Any]] | None
    """Shape and dtype of every sample served; None where they differ."""
    transforms: Callable[[Any, Any], Any] | None = None
    _gone = ""
    """Why there is nothing to read from any more; empty while there is."""
    batch_ring: BatchRing | None = None
    """Where ``__getitems__`` takes memory from; set in worker processes."""

    def __len__(self) -> int:
        return self.sample_count

    @property
    def sample_count(self) -> int:
        """How many samples there are, whatever a subclass says that its length is."""
        if self._table is not None:
            return len(self._table)
        assert self._source is not None
        return len(self._source)

    @property
    def served_bytes(self) -> int | None:
        """Bytes of each sample in a whole batch; None where there are no whole batches."""
        if self.batch_obstacle is not None or self._served is None:
            return None
        shape, dtype = self._served
        return math.prod(shape) * dtype.itemsize

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Sample and target, transformed as the user's transforms say.

        Raises:
            IndexError: ``index`` is not in [-N, N).
        """
        self._check_open()
        position = range(self.sample_count)[index]
        item = _ITEM.get()
        if item is not None:
            return self._pair(item.batch_of(position, self), 0)
        self.refresh()
        return self._pair(self._visit([position]), 0)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """A whole batch: a ``SampleBatch`` if the transform allows, else a list of samples."""
        self._check_open()
        batch = indices if isinstance(indices, IndexBatch) else None
        if batch is None or get_worker_info() is not None:  # else the epoch began with it, and other threads read
            self.refresh()
        if self._has_own("__getitem__"):
            return [self[index] if batch is None else self._own_item(batch, k) for k, index in enumerate(indices)]
        batch = self._visit(indices)
        if self._serving_obstacle is None:
            return self.sample_batch(batch, self.batch_ring)
        if self._program is None or self._served is None or self._contents is None or self.transforms is not None:
            return [self._pair(batch, k) for k in range(len(batch))]
        images = self._read_images(batch, None)  # what comes before the first step that is not served
        finish, target = self._plan.finish_sample, self._target
        return [
            (finish(self._shown(image)), target(i)) for image, i in zip(images, batch.positions.tolist(), strict=True)
        ]

    def read_batch(self, batch: IndexBatch, ring: BatchRing | None = None) -> list[Any]:
        """Read a batch in one go, as ``[images, targets]``; only if ``batch_obstacle`` is None.

        Args:
            batch: which samples, and what their random draws are made from.
            ring: where the batch's memory comes from; fresh memory if None.

        Returns:
            images (B, *shape) and what ``default_collate`` makes of the targets. Safe from several threads at once.
        """
        return [self._read_images(batch, ring), self._targets(batch.positions)]

    def _visit(self, indices: Sequence[int]) -> IndexBatch:
        """The batch itself, or that of a reader that is told nothing but indices, such as torch's own loader."""
        index_B = self.positions(np.asarray(indices, dtype=np.int64), self.sample_count)
        if isinstance(indices, IndexBatch) and np.array_equal(index_B, indices.positions):  # else it was changed
            return indices
        base_seed, reader = _who_reads()
        if self._options.seed is not None:
            reader = 0  # all draw from one seed
        visits_B = self._visits.take(index_B, reader) if self._program else np.zeros_like(index_B)
        return IndexBatch(indices, index_B, visits_B, self.seed_of(base_seed))

    def seed_of(self, base_seed: int) -> int:
        """What random draws are made from in an epoch of this base seed: the user's ``seed``, if there is one."""
        return base_seed if self._options.seed is None else self._options.seed

    def _read_images(self, batch: IndexBatch, ring: BatchRing | None) -> torch.Tensor:
        self._check_open()
        assert self._served is not None
        shape, dtype = self._served
        full_shape = (len(batch), *shape)
        out = np.empty(full_shape, dtype) if ring is None else ring.take(full_shape, dtype)
        if self._contents is None:
            assert self._program is not None
            pixels = [self._decode(index) for index in batch.positions.tolist()]
            self._program.run_decoded(pixels, batch.positions, batch.visits, batch.seed, out)
            return self._program.as_tensor(out)
        with self._contents.naming_damage():
            if self._program:
                self._program.run(self._contents.images, batch.positions, batch.visits, batch.seed, out)
            else:
                self._contents.images.gather_into(batch.positions, out)
        return torch.from_numpy(out) if self._program is None else self._program.as_tensor(out)

    def sample_batch(self, batch: IndexBatch, ring: BatchRing | None = None) -> SampleBatch:
        """Like ``read_batch``, as the list of samples that collate functions expect."""
        images = self._read_images(batch, ring)
        each_target = [self._target(index) for index in batch.positions.tolist()]
        return SampleBatch(images, collate_targets(each_target), each_target, tensor_class(self._plan.kind))

    @property
    def batch_obstacle(self) -> str | None:
        """Why whole batches cannot be served without Python work per sample; None if they can."""
        own = self.own_reader
        return self._serving_obstacle if own is None else f"{type(self).__name__} has a {own} of its own"

    @property
    def own_reader(self) -> str | None:
        """The method of a subclass that knows what an index means; None where it is the number of a sample."""
        return next((name for name in ("__getitem__", "__getitems__") if self._has_own(name)), None)

    @property
    def index_count(self) -> int:
        """Indices from 0 to this, exclusive, may be asked for."""
        return self.sample_count if self.own_reader is None else len(self)

    @property
    def _serving_obstacle(self) -> str | None:
        if self._contents is None and self._program is None:
            return "storage='none' prepares every sample when it is read"
        if self.transforms is not None or (self._contents is not None and self._contents.is_tuple):
            return "samples have several parts, such as image and mask"
        if not self._plan.is_batched:
            return f"the transform works per sample: {self._plan.obstacle}"
        if self._served is None:
            return "prepared samples differ in shape; a crop or resize to one size would make them batches"
        return None

    @staticmethod
    def positions(index_B: np.ndarray, length: int) -> np.ndarray:
        """Check indices (int64, B) and make negative ones count from the end.

        Raises:
            IndexError: an index is not in [-length, length).
        """
        if not (index_B.view(np.uint64) >= length).any():  # as unsigned numbers, negative ones are too large as well
            return index_B
        if not ((index_B >= -length) & (index_B < length)).all():
            wrong = next(i for i in index_B.tolist() if not -length <= i < length)
            raise IndexError(f"index {wrong} is out of range for a dataset of {length} samples")
        return np.where(index_B < 0, index_B + length, index_B)

    @abstractmethod
    def refresh(self) -> None:
        """Serve what the transform says now."""

    def _has_own(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(ServingDataset, name)

    # One sample, one target

    def _own_item(self, batch: IndexBatch, k: int) -> Any:
        """What a subclass's own ``__getitem__`` makes of the k-th index of a batch."""
        token = _ITEM.set(_Item(batch, k))
        try:
            return self[batch[k]]
        finally:
            _ITEM.reset(token)

    def _pair(self, batch: IndexBatch, k: int) -> tuple[Any, Any]:
        index = int(batch.positions[k])
        if self._program is not None and self._contents is None:
            shape, dtype = cast("tuple[tuple[int, ...], np.dtype[Any]]", self._served)
            pixels, one = np.empty((1, *shape), dtype), slice(k, k + 1)
            self._program.run_decoded(
                [self._decode(index)], batch.positions[one], batch.visits[one], batch.seed, pixels
            )
            sample, target = self._shown(self._program.as_tensor(pixels[0])), self._stored_target(index)
        elif self._contents is None:
            sample, target = self._read_source(index)
        else:
            sample, target = self._read_store(index, batch.visits[k], batch.seed), self._stored_target(index)
        if self.transforms is not None:
            transformed: tuple[Any, Any] = self.transforms(sample, target)
            return transformed
        return self._plan.finish_sample(sample), self._transform_target(target)

    def _read_store(self, index: int, visit: int, seed: int) -> Any:
        """One sample after the batch ops, as the rest of the transform wants it."""
        contents = self._contents
        assert contents is not None
        if self._program is None:
            sample = contents.sample(index)
        else:
            with contents.naming_damage():
                pixels = self._program.run_one(contents.images, index, visit, seed)
            return self._shown(self._program.as_tensor(pixels))
        return sample if self._is_upright else without_exif(sample)

    def _shown(self, served: torch.Tensor) -> Any:
        """A sample that the program served, as the rest of the transform wants it."""
        kind = self._plan.kind
        if kind == "pil":
            image = present(served.numpy(), kind)
            return image if self._is_upright else without_exif(image)
        return served.as_subclass(tensor_class(kind))

    def _decode(self, index: int) -> np.ndarray:
        """The pixels of one file, (H, W, 3)."""
        assert self._source is not None
        path = cast("str", self._source.path(index))
        try:
            with open(path, "rb") as stream:
                return decode_pixels(stream)
        except OSError as cause:
            raise sample_error(path, index, cause) from cause

    def _read_source(self, index: int) -> tuple[Any, Any]:
        """Read and prepare one sample that is kept nowhere."""
        try:
            sample, target = self._reader.source.read(index)
        except OSError as cause:
            raise sample_error(self._reader.source.path(index), index, cause) from cause
        prepared = self._reader.prepare(sample)
        return to_image(prepared) if isinstance(prepared, Planes) else prepared, target

    def _stored_target(self, index: int) -> Any:
        if self._contents is not None:
            return self._contents.target(index)
        if self._table is not None:
            return self._table.target(index)
        assert self._source is not None
        return self._source.read(index)[1]

    def _transform_target(self, target: Any) -> Any:
        return target if self.target_transform is None else self.target_transform(target)

    def _target(self, index: int) -> Any:
        return self._transform_target(self._stored_target(index))

    def _targets(self, index_B: np.ndarray) -> Any:
        array = None
        if self._contents is not None and self.target_transform is None:
            array = self._contents.target_array(index_B)
        if array is not None:
            return torch.from_numpy(array)
        return collate_targets([self._target(index) for index in index_B.tolist()])

    def _check_open(self) -> None:
        if self._gone:
            raise StoreGoneError(self._gone)


def _who_reads() -> tuple[int, int]:
    """The base seed of the iterator of torch's that reads in this process, and a number that tells it from others.

    torch starts an iterator's workers one after the other, and multiprocessing numbers processes as they are made.
    """
    worker = get_worker_info()
    if worker is None:
        return torch.initial_seed(), torch.initial_seed()
    return worker.seed - worker.id, worker.id - getattr(current_process(), "_identity", (0,))[-1]
