"""Datasets: torch map-style datasets over a store, read one sample or a whole batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from fastdata.batch import SampleBatch
from fastdata.batchops import Program, compile_ops
from fastdata.decode import Planes, Resize, Size, present, sample_error, to_image
from fastdata.errors import StoreGoneError
from fastdata.ingest import OnError
from fastdata.options import Options
from fastdata.plan import TransformPlan, plan_transform
from fastdata.preparation import Steps, prepare_storage
from fastdata.ring import BatchRing
from fastdata.sources import DatasetSource, Source
from fastdata.table import ListView, SampleTable
from fastdata.visits import SharedVisits

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CachedDataset"]


def _collate_targets(targets: list[Any]) -> Any:
    """What ``default_collate`` makes of the targets of a batch; inside of samples, where strings become a tuple."""
    return default_collate([(target,) for target in targets])[0]


class CachedDataset(Dataset[Any]):
    """Any map-style dataset of (sample, target), prepared once and kept in shared memory.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` giving (PIL image | tensor | array, target). Read once, from forked
            worker processes; give it no transform of its own that should stay random.
        prepare: called on each sample before it is stored, e.g. ``lambda image: image.convert("RGB")``.
        transform: as torchvision's. Its leading deterministic steps run once per sample, before it is stored; see
            ``plan``.
        target_transform: called on each target when it is read.
        storage: ``"shared"`` keeps prepared samples in shared memory; ``"none"`` keeps nothing and prepares on every
            read; ``"auto"`` takes the first of these that fits the memory budget.
        resize: size in pixels that images are resized to before they are stored, as torchvision's ``Resize``: an int
            for the shorter side, or (height, width).
        fill: ``"eager"`` prepares all samples now.
        memory_limit: the most memory to use: bytes, ``"8GiB"``, or a fraction of what is free.
        progress: show a progress bar on standard error.
        seed: of the random draws of batch ops, which depend on (seed, epoch, sample) only.
        batch_ops: ``"auto"`` runs known random transforms on whole batches, with fastdata's own draws; ``"off"`` runs
            them per sample exactly as written.
        on_error: ``"raise"``, or ``"skip"`` to leave out samples that cannot be prepared, with one warning.
        num_workers: processes that prepare; default: all usable cores.

    Raises:
        SampleError: a sample cannot be read or prepared; names its path and index.
        MemoryBudgetError: ``storage="shared"`` does not fit; raised before anything is allocated.

    A pickled dataset is a handle of a few hundred bytes plus the transforms; it opens only on the same machine, while
    the process that made it lives. ``close()`` gives the memory back; so does dropping the last reference.

    Example:
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
        >>> with CachedDataset(squares, progress=False) as dataset:
        ...     images, targets = dataset.__getitems__([1, 3]).stacked
        >>> images.shape, targets
        (torch.Size([2, 3, 4, 4]), tensor([1, 9]))
    """

    def __init__(
        self,
        dataset: Any,
        *,
        prepare: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        storage: Literal["auto", "shared", "none"] = "auto",
        resize: Size | None = None,
        fill: Literal["eager"] = "eager",
        memory_limit: int | float | str | None = None,
        progress: bool = True,
        seed: int = 0,
        batch_ops: Literal["auto", "off"] = "auto",
        on_error: OnError = "raise",
        num_workers: int | None = None,
    ) -> None:
        options = Options(
            storage=storage,
            resize=resize,
            fill=fill,
            memory_limit=memory_limit,
            progress=progress,
            seed=seed,
            batch_ops=batch_ops,
            on_error=on_error,
            num_workers=num_workers,
        )
        self._build(DatasetSource(dataset), options, transform, target_transform, prepare=prepare)

    # Building

    def _build(
        self,
        source: Source,
        options: Options,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        *,
        prepare: Callable[[Any], Any] | None = None,
        table: SampleTable | None = None,
    ) -> None:
        """Choose the storage and fill it.

        Args:
            source: the samples.
            options: as given by the user.
            transform: the user's.
            target_transform: the user's.
            prepare: runs first, before ``resize`` and the leading part of the transform.
            table: paths and targets where they are known beforehand; else they come from the source.
        """
        self.target_transform = target_transform
        self._options = options
        resize = None if options.resize is None else Resize(options.resize)
        self._first_steps = tuple(step for step in (prepare, resize) if step is not None)
        self._plan = plan_transform(transform, batch_ops=options.batch_ops)
        self._transform = transform
        self._epoch: int | None = None
        self._epochs_begun = 0
        prepared = prepare_storage(*self._road(source, (*self._first_steps, *self._plan.prepare)), options, table)
        self.storage_plan, self.skipped = prepared.storage_plan, prepared.skipped
        self._store, self._table = prepared.store, prepared.table
        self._source = source if prepared.store is None else None
        self._visits = SharedVisits(len(self))
        self._compile()

    def _road(self, source: Source, steps: tuple[Callable[[Any], Any], ...]) -> tuple[Source, Steps]:
        """Where samples are read from and what prepares them."""
        return source, Steps(steps)

    def _compile(self) -> None:
        """Derive what serving needs from the plan and the store."""
        self._program: Program | None = None
        self._served: tuple[tuple[int, ...], np.dtype[Any]] | None = None  # shape and dtype of every sample served
        if self._store is None:
            assert self._source is not None
            self._plan = plan_transform(self._transform, batch_ops="off")
            self._reader, self._prepare = self._road(self._source, (*self._first_steps, *self._plan.prepare))
            return
        spec, shape = self._store.spec, self._store.shape(0)
        batch_ops = self._options.batch_ops if len(shape) == 3 else "off"
        self._plan = plan_transform(self._transform, form=spec.form, dtype=spec.dtype, batch_ops=batch_ops)
        if self._plan.batch_ops:
            self._program = compile_ops(self._plan, spec)
            self._served = self._program.output(shape)
        elif spec.is_dense:
            self._served = shape, np.dtype(spec.dtype)

    # What torchvision's datasets show

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """The user's transform. It may be replaced by one that begins with the same deterministic steps."""
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        plan = plan_transform(transform, batch_ops=self._options.batch_ops)
        if self._store and plan.prepare_key() != self._plan.prepare_key():
            raise ValueError(
                f"samples are stored after {self._plan.prepare_key() or 'no step'}, but the new transform begins with "
                f"{plan.prepare_key() or 'none'}. Give it the same first steps, or make a new dataset."
            )
        self._transform = transform
        self._compile()

    @property
    def targets(self) -> ListView[Any]:
        """Target of every sample, before ``target_transform``."""
        return ListView(len(self), self._stored_target)

    @property
    def plan(self) -> TransformPlan:
        """How the transform is split; ``print(dataset.plan)`` shows it."""
        return self._plan

    @property
    def storage(self) -> str:
        """Where samples are kept: ``"shared"`` or ``"none"``."""
        return self.storage_plan.storage

    def __len__(self) -> int:
        if self._table is not None:
            return len(self._table)
        assert self._source is not None
        return len(self._source)

    def __repr__(self) -> str:
        lines = [
            f"Dataset {type(self).__name__}",
            f"    Number of datapoints: {len(self)}",
            *(f"    {line}" for line in self._extra_repr()),
            f"    Storage: {self.storage_plan.reason}",
        ]
        if self._transform is not None:
            lines.append("    Transform: " + repr(self._transform).replace("\n", "\n               "))
        return "\n".join(lines)

    def _extra_repr(self) -> list[str]:
        return []

    # Serving

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Sample and target, transformed as the user's transforms say.

        Raises:
            IndexError: ``index`` is not in [-N, N).
        """
        self._check_open()
        position = range(len(self))[index]
        visits = self._visits.take(np.array([position])) if self._program else None
        return self._pair(position, visits)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """A whole batch: a ``SampleBatch`` if the transform allows, else a list of samples."""
        self._check_open()
        index_B = self.positions(np.asarray(indices, dtype=np.int64))
        visits_B = getattr(indices, "visits", None)
        if visits_B is None and self._program:
            visits_B = self._visits.take(index_B)
        if self.batch_obstacle is None:
            return self.sample_batch(index_B, visits_B, self.batch_ring)
        return [
            self._pair(index, None if visits_B is None else visits_B[k : k + 1])
            for k, index in enumerate(index_B.tolist())
        ]

    def read_batch(self, index_B: np.ndarray, visits_B: np.ndarray | None, ring: BatchRing | None = None) -> list[Any]:
        """Read a batch in one go, as ``[images, targets]``; only if ``batch_obstacle`` is None.

        Args:
            index_B: int64, each in [0, N).
            visits_B: int64, what random draws are made from; see ``IndexBatch``.
            ring: where the batch's memory comes from; fresh memory if None.

        Returns:
            images (B, *shape) and what ``default_collate`` makes of the targets. Safe from several threads at once.
        """
        return [self._read_images(index_B, visits_B, ring), self._targets(index_B)]

    def _read_images(self, index_B: np.ndarray, visits_B: np.ndarray | None, ring: BatchRing | None) -> torch.Tensor:
        self._check_open()
        assert self._store is not None
        assert self._served is not None
        shape, dtype = self._served
        full_shape = (len(index_B), *shape)
        out = np.empty(full_shape, dtype) if ring is None else ring.take(full_shape, dtype)
        if self._program:
            assert visits_B is not None
            self._program.run(self._store, index_B, visits_B, self._options.seed, out)
        else:
            self._store.gather_into(index_B, out)
        return torch.from_numpy(out)

    def sample_batch(
        self, index_B: np.ndarray, visits_B: np.ndarray | None, ring: BatchRing | None = None
    ) -> SampleBatch:
        """Like ``read_batch``, as the list of samples that collate functions expect."""
        images = self._read_images(index_B, visits_B, ring)
        each_target = [self._target(index) for index in index_B.tolist()]
        return SampleBatch(images, _collate_targets(each_target), each_target)

    @property
    def batch_obstacle(self) -> str | None:
        """Why whole batches cannot be served without Python work per sample; None if they can."""
        if self._store is None:
            return "storage='none' prepares every sample when it is read"
        if not self._plan.is_batched:
            return f"the transform works per sample: {self._plan.obstacle}"
        if self._served is None:
            return "prepared samples differ in shape; a crop or resize to one size would make them batches"
        return None

    def positions(self, index_B: np.ndarray) -> np.ndarray:
        """Check indices (int64, B) and make negative ones count from the end.

        Raises:
            IndexError: an index is not in [-N, N).
        """
        length = len(self)
        if not (index_B.view(np.uint64) >= length).any():  # as unsigned numbers, negative ones are too large as well
            return index_B
        if not ((index_B >= -length) & (index_B < length)).all():
            wrong = next(i for i in index_B.tolist() if not -length <= i < length)
            raise IndexError(f"index {wrong} is out of range for a dataset of {length} samples")
        return np.where(index_B < 0, index_B + length, index_B)

    def begin_epoch(self, last: int | None = None) -> int:
        """Number of the epoch that a loader begins: the one that was set, else the one after its last.

        Args:
            last: the loader's last epoch; None for a new loader, which goes on where others have got to.
        """
        if self._epoch is not None:
            return self._epoch
        epoch = self._epochs_begun if last is None else last + 1
        self._epochs_begun = max(self._epochs_begun, epoch + 1)
        return epoch

    @property
    def epochs_begun(self) -> int:
        """How many epochs loaders have begun, and so the number of the coming one."""
        return self._epochs_begun

    def set_epoch(self, epoch: int) -> None:
        """Make random draws those of ``epoch``, until it is set again."""
        self._epoch = epoch
        self._visits.restart(epoch)

    def close(self) -> None:
        """Give the memory back; batches already served stay valid. Idempotent."""
        if self._store:
            self._store.close()
        if self._table:
            self._table.close()
        self._visits.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_plan", "_program", "_served", "_reader", "_prepare", "skipped", "batch_ring")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.skipped = []
        self._compile()

    # One sample, one target

    def _pair(self, index: int, visits: np.ndarray | None) -> tuple[Any, Any]:
        if self._store is None:
            sample, target = self._read_source(index)
        else:
            sample, target = self._read_store(index, visits), self._stored_target(index)
        return self._plan.finish_sample(sample), self._transform_target(target)

    def _read_store(self, index: int, visits: np.ndarray | None) -> Any:
        """One sample after the batch ops, as the rest of the transform wants it."""
        assert self._store is not None
        if self._program is None:
            return present(self._store.read(index).copy(), self._plan.out_form)
        assert visits is not None
        return present(self._program.run_one(self._store, index, visits, self._options.seed), self._plan.out_form)

    def _read_source(self, index: int) -> tuple[Any, Any]:
        """Read and prepare one sample that is kept nowhere."""
        try:
            sample, target = self._reader.read(index)
        except OSError as cause:
            raise sample_error(self._reader.path(index), index, cause) from cause
        prepared = self._prepare(sample)
        return to_image(prepared) if isinstance(prepared, Planes) else prepared, target

    def _stored_target(self, index: int) -> Any:
        if self._table is not None:
            return self._table.target(index)
        assert self._source is not None
        return self._source.read(index)[1]

    def _transform_target(self, target: Any) -> Any:
        return target if self.target_transform is None else self.target_transform(target)

    def _target(self, index: int) -> Any:
        return self._transform_target(self._stored_target(index))

    def _targets(self, index_B: np.ndarray) -> Any:
        assert self._table is not None
        array = self._table.target_array()
        if array is not None and self.target_transform is None:
            return torch.from_numpy(array[index_B])
        return _collate_targets([self._target(index) for index in index_B.tolist()])

    def _check_open(self) -> None:
        if self._closed:
            raise StoreGoneError("the dataset was closed; create it again to read from it")

    _closed = False
    batch_ring: BatchRing | None = None
    """Where ``__getitems__`` takes memory from; set in worker processes."""
