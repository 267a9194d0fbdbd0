"""Indices to batches to the device. Here the DataLoader: torch's, with an engine of threads.

Threads start in microseconds, share the dataset without copying anything, and hand batches over by
reference. Kernels leave the GIL while they copy, so threads run side by side.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    default_collate,
)
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from fastdata import machine
from fastdata.datasets.batch import ChannelsLast, Collate, collate
from fastdata.datasets.dataset import PreparedDataset, latest_reader, own_reader
from fastdata.datasets.reader import BatchRing
from fastdata.datasets.ring import RingCollate
from fastdata.errors import counted
from fastdata.loaders.epochs import (
    HELD_BY_USER,
    AnyReader,
    BatchMaker,
    Engine,
    InlineIter,
    LoaderView,
    LoopCounts,
    ProcessIter,
    Progress,
    Read,
    ThreadIter,
)
from fastdata.loaders.order import Epochs, length_of
from fastdata.loaders.samplers import RankSampler, Uneven
from fastdata.machine import PinningPlan, budget_bytes, choose_pinning
from fastdata.machine.processes import find_rank, local_ranks
from fastdata.pixels.describe import draws_nothing
from fastdata.pixels.images import jpeg_obstacle
from fastdata.report import EpochReport, warn_user

_T_co = TypeVar("_T_co", covariant=True)
_TORCHS = inspect.signature(torch_loader.DataLoader).parameters
_NO_ORDER = (
    "with in_order=False batches overtake each other, and a state counts them only: an epoch that "
    "is resumed from it may repeat some and leave out others. Use in_order=True."
)
_NO_STREAM = (
    "a DataLoader cannot resume an IterableDataset, which alone knows where it stands: its epochs "
    "begin anew. Save the dataset's own state beside the loader's, or use a map-style dataset."
)

if TYPE_CHECKING:
    _TorchLoader = torch_loader.DataLoader
else:  # in as many type variables as torch's has: one until torch 2.13, then two
    _TorchLoader = {_T_co: torch_loader.DataLoader[torch_loader.DataLoader.__parameters__]}


class DataLoader(_TorchLoader[_T_co]):
    """torch's DataLoader, with an engine of threads where the dataset serves whole batches.

    The arguments up to ``in_order`` are torch's. What there is to say of some:

    - ``dataset``: any. Whole batches are served by fastdata's datasets, and by ``Subset`` and
      ``ConcatDataset`` of them, when no step of the transform needs Python per sample.
    - ``num_workers``: threads or processes; 0 reads in the training loop. ``"auto"`` takes the
      usable cores (affinity, container quota) shared among the ranks of this machine
      (``LOCAL_WORLD_SIZE``), less one for the training loop: 0 on a single core, but 1 where
      another argument asks for workers. ``fastdata.tune(dataset)`` measures a better number.
    - ``collate_fn``: the default is ``fastdata.collate``, which takes whole batches as they are.
      What another one draws from torch's global generator, as MixUp and CutMix do, follows from the
      base seed, or the ``seed`` of a fastdata dataset, and the batch's number among those of all
      ranks: any number of threads or processes gives the same batches.
    - ``pin_memory``: ``"auto"`` pins if there is a CUDA or XPU device, batches are large enough to
      gain from it, and all that are under way are a small part of the free memory; ``report()``
      says what was decided and why. A ``CudaPrefetcher`` pins by itself.
    - ``worker_init_fn``: called in worker processes only; it asks for them where a ``collate_fn``
      of your own may need it.
    - ``persistent_workers``: threads only draw their base seed once, as torch then does.
    - ``in_order``: threads always keep the order.
    - ``workers``: ``"thread"``, ``"process"``, or ``"auto"`` for threads where whole batches are
      served and the dataset has no ``target_transform`` that may draw, by all that it names: worker
      processes are seeded as torch's.
    - ``distributed``: ``"auto"`` shares each epoch among the ranks of ``torch.distributed``, or of
      the launcher's variables, by a ``fastdata.loaders.samplers.RankSampler``, which is the
      loader's ``sampler``: equally many batches for all, a few samples repeated, or with
      ``drop_last`` left out. ``"exact"`` gives each sample once, so that some ranks may have a
      batch more: for evaluation. The order follows from the dataset's ``seed`` (None: 0) and the
      epoch, which is counted; a state goes on with another number of ranks, workers, or another
      ``batch_size``. A ``sampler`` or ``batch_sampler`` of your own is taken as it is.
    - ``memory_format``: with ``torch.channels_last`` tensors of four dimensions come so in memory,
      as a model in that format wants them. Whole batches are written so at once; others are
      converted.

    ``print(loader.report())`` says how batches are read and why, and how the latest epoch went.

    Example:
        >>> from fastdata import CachedDataset
        >>> samples = [(torch.full((1, 2, 2), i), i) for i in range(5)]
        >>> dataset = CachedDataset(samples)
        >>> loader = DataLoader(dataset, batch_size=2, num_workers=1)
        >>> [labels.tolist() for images, labels in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool | Literal["auto"] = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: Literal["auto", "thread", "process"] = "auto",
        distributed: Literal["off", "auto", "exact"] = "off",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        if memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"memory_format={memory_format!r} is neither torch.contiguous_format nor "
                "torch.channels_last"
            )
        if workers not in ("auto", "thread", "process"):
            raise ValueError(f"workers={workers!r} is not one of 'auto', 'thread', 'process'")
        if distributed not in ("off", "auto", "exact"):
            raise ValueError(f"distributed={distributed!r} is not one of 'off', 'auto', 'exact'")
        if distributed != "off" and sampler is None and batch_sampler is None:
            sampler = _share(dataset, bool(shuffle), drop_last, distributed)
            shuffle = None
        if isinstance(pin_memory, str) and pin_memory != "auto":
            raise ValueError(f"pin_memory={pin_memory!r} is neither True, False nor 'auto'")
        if isinstance(num_workers, str):
            if num_workers != "auto":
                raise ValueError(f"num_workers={num_workers!r} is neither a number nor 'auto'")
            asks = prefetch_factor or persistent_workers or multiprocessing_context or timeout
            num_workers = max(int(bool(asks)), machine.usable_cores() // local_ranks() - 1)
        makes_batches = batch_size is not None or batch_sampler is not None
        if collate_fn is None and makes_batches:
            collate_fn = collate
        # ``in_order`` is torch 2.6's.
        arguments = {name: value for name, value in locals().items() if name in _TORCHS}
        self.workers = workers
        self.distributed = distributed
        self.memory_format = memory_format
        self._served = LoaderView.find(dataset if makes_batches else None)
        self._ring: BatchRing | None = None
        super().__init__(**arguments | {"pin_memory": pin_memory is True})
        self.in_order = in_order
        self._epochs = Epochs(
            super()._index_sampler,
            self._served,
            generator,
            seeds_once=persistent_workers,
            is_batched=makes_batches,
        )
        self._has_warned = False
        self._pinning = self._choose_pinning(pin_memory)
        self.pin_memory = self._pinning.pin
        self._engine = self._choose_engine()
        self._counts = LoopCounts()

    def __iter__(self) -> Any:
        return self._get_iterator()

    def _get_iterator(self) -> Any:  # torch's name for it, which subclasses override
        return self.iterate()

    def iterate(
        self,
        ring: BatchRing | None = None,
        held: int = HELD_BY_USER,
        read: Read | None = None,
        alone: str = "",
    ) -> Any:
        """Begin an epoch, as ``iter`` does; the iterator's ``progress`` is how far it is.

        Args:
            ring: a prefetcher's, where threads gather batches; ``pin_memory="auto"`` leaves pinning
                to it.
            held: batches that the one who takes them may hold at a time without costing new memory.
            read: makes a batch of indices in place of the dataset; threads only.
            alone: why it is called in the training loop, whatever threads there were to be.
        """
        if self._served.subset is not None:  # which may have other indices now
            self._served = self._epochs.served = LoaderView.find(self.dataset)
        self._served.reader()  # which notices what was changed in place
        if not self._has_warned:
            self._has_warned = True
            _warn(self.dataset, self.sampler, self._served, is_asked=self.workers == "process")
        handle = self._served.handle()
        engine = self._engine = Engine("thread", alone, 0) if alone else self._choose_engine()
        if ring is None:
            ring = self._ring = self._ring or BatchRing(self.ring_slots(held))
        progress = self._epochs.begin()
        is_seeded = self.persistent_workers and progress.base_seed is not None
        is_channels_last = self.memory_format is torch.channels_last
        # A collate_fn of the user's own gets samples that lie as ever.
        self._epochs.channels_last = is_channels_last and self.collate_fn is collate
        dataset = self._served.fetched(self.dataset)
        view = object.__new__(type(self))  # as torch's iterators see the loader
        vars(view).update(
            vars(self),
            dataset=dataset,
            generator=torch.Generator() if is_seeded else self.generator,
            pin_memory=self.pin_memory
            and not (alone or (self._pinning.reason and ring is not self._ring)),
            collate_fn=_channels_last(self.collate_fn) if is_channels_last else self.collate_fn,
        )
        with torch.random.fork_rng(devices=[], enabled=progress.is_begun):
            if engine.kind == "process":
                iterator = self._iterate_torch(view, progress, held)
            else:
                self._iterator = None  # persistent worker processes that have done their part
                # Where a subclass's own methods make items, only it can be asked for batches.
                has_own = any(map(own_reader, self._served.parts))
                fetcher = _MapDatasetFetcher(dataset, True, lambda samples: samples, False)
                maker = BatchMaker(
                    fetch=fetcher.fetch,
                    handle=None if has_own else handle,
                    ring=ring,
                    collate_fn=self.collate_fn,
                    in_thread=engine.workers > 0,
                    channels_last=is_channels_last,
                    read=read,
                )
                iterator = ThreadIter(view, progress, maker, threads=engine.workers)
        iterator.counts = self._counts = LoopCounts(ring=iterator.ring)
        if iterator.ring:
            iterator.ring.fresh_count = 0
        iterator.handle = handle
        return iterator

    def _iterate_torch(self, view: Any, progress: Progress, held: int) -> Any:
        if self.num_workers == 0:
            return InlineIter(view, progress)
        iterator: Any = self._iterator  # of workers that persist
        self._iterator = None  # where Ctrl-C comes now, nobody knows what they send next
        if iterator is None:
            self.check_worker_number_rationality()
            iterator = ProcessIter(view, progress, held=held)
        else:
            iterator.progress = progress
            iterator._reset(view)
        self._iterator = iterator if self.persistent_workers else None
        return iterator

    @property
    def _index_sampler(self) -> Any:
        return self._epochs

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does; threads may be many."""
        if self.num_workers and self._choose_engine().kind == "process":
            super().check_worker_number_rationality()

    def set_epoch(self, epoch: int) -> None:
        """Make the random draws of coming epochs those of ``epoch``; a RankSampler is told too.

        They follow from the base seed too, where the dataset has no ``seed``.
        """
        self._epochs.set_epoch(epoch)

    def report(self) -> EpochReport:
        """How the latest epoch went; ``.path`` says how batches are read, and why."""
        engine = self._engine
        ring = self._counts.ring
        return EpochReport(
            path=engine.path,
            engine=engine.kind if engine.workers else "inline",
            workers=engine.workers,
            fresh_batches=ring.fresh_count if ring else 0,
            bytes_held=ring.bytes_held if ring else 0,
            pinning=self._pinning.reason,
            prepared=self._served.prepared_share,
            **self._counts.figures(),
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} of {type(self.dataset).__name__}: {length_of(self)} batches of "
            f"batch_size={self.batch_size}, num_workers={self.num_workers}\n"
            f"{self._engine.path}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest epoch stands, as a small dict of plain values.

        Batches count once they are handed to the user, not when they are read ahead. Once the last
        one is, or before the first, the state is the beginning of the next epoch: Lightning goes on
        there. A sampler with a ``state_dict`` adds its own. What a sampler of one's own draws from
        Python's or NumPy's global generators is not found again. With a ``RankSampler`` the state
        is the place in the order of all ranks: rank 0's does for any number of them, and for other
        batches. With ``in_order=False`` a state of worker processes is not exact, and for an
        ``IterableDataset``, which alone knows where it stands, it is empty; both are said.
        """
        # No errors: Lightning asks every loader, resumed or not.
        if isinstance(self.dataset, IterableDataset):
            warn_user(_NO_STREAM)
            return {}
        if not self.in_order and self.num_workers > 1 and self._engine.kind == "process":
            warn_user(_NO_ORDER)
        return self._epochs.state(self._identity())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the one of ``state``, without the batches handed over before.

        The state holds until a batch is handed over: Lightning may drop a first iterator without
        asking it for one. Their samples are not read again. ``generator`` is put back to where it
        was; the global random generators are left as they are, and decide later epochs. Resumed are
        the order and fastdata's own draws; what a transform draws in worker processes from global
        generators begins anew.

        Args:
            state: what ``state_dict`` returned, here or in another process; an empty dict forgets a
                loaded state.

        Raises:
            ValueError: the state is of a loader over another dataset, or with other batches.
        """
        if state and isinstance(self.dataset, IterableDataset):
            raise ValueError(_NO_STREAM)
        self._epochs.load(state, self._identity())

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset_length": length_of(self.dataset),
            "sampler_length": length_of(self.sampler),
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }

    # For a prefetcher

    def ring_slots(self, held: int) -> int:
        """How many buffers threads and a user who holds ``held`` batches need."""
        return self._engine.workers * (self.prefetch_factor or 0) + 1 + held

    def device_obstacle(self) -> str | None:
        """Why nobody can read its batches in another way, for a device to finish them, or None."""
        engine = self._engine = self._choose_engine()
        if engine.kind == "process":
            return f"batches come from {engine.path}"
        return None if self.collate_fn is collate else "collate_fn= is your own"

    # Decisions

    def _choose_engine(self) -> Engine:
        count = index(self.num_workers)  # which may be NumPy's
        reader = self._served.latest()
        obstacle = self._thread_obstacle(reader)
        if obstacle is not None and (count or reader is None):
            path = f"{count} worker process{'es' * (count > 1)} over a shared ring"
            path = path if count else "torch's engine in the training loop"
            return Engine("process", f"{path}: {obstacle}", count)
        path = "whole batches"
        is_whole = reader is not None and reader.obstacle is None
        if not is_whole:
            path = "samples one by one" + (f" ({reader.obstacle})" if reader else "")
        elif getattr(reader, "kept", True) is None and jpeg_obstacle():
            path += f" of files that Pillow decodes whole ({jpeg_obstacle()})"
        if count == 0:
            return Engine("thread", f"{path}, read in the training loop: num_workers=0", 0)
        if not threading.main_thread().is_alive():
            return Engine("thread", f"{path}, read at exit, when no thread can be started", 0)
        # Samples one by one by more threads than cores, which read ahead where reading waits for a
        # disk or a network.
        threads = min(count, machine.usable_cores()) if is_whole else count
        return Engine("thread", f"{path}, read by {counted(threads, 'thread')}", threads)

    def _thread_obstacle(self, reader: AnyReader | None) -> str | None:
        if isinstance(self.dataset, IterableDataset):
            return "an IterableDataset is read in order"
        if self.batch_sampler is None:
            return "batch_size=None asks for single samples"
        if self.workers != "auto":
            return "workers='process'" if self.workers == "process" else None
        if reader is None:
            return f"{type(self.dataset).__name__} is no fastdata dataset"
        init = getattr(self.worker_init_fn, "func", self.worker_init_fn)
        is_lightnings = getattr(init, "__name__", "") == "pl_worker_init_function"  # only seeds
        # Whether code of the user's runs that it might have prepared.
        is_prepared = self.collate_fn not in (collate, default_collate)
        if init is not None and is_prepared and not is_lightnings:
            return "worker_init_fn is for worker processes"
        if not all(draws_nothing(part.target_transform) for part in self._served.parts):
            return "target_transform= may draw random numbers"
        return reader.obstacle

    def _choose_pinning(self, asked: bool | Literal["auto"]) -> PinningPlan:
        if asked != "auto":
            return PinningPlan(pin=asked)
        reader = self._served.latest()
        sample_bytes = None if reader is None else reader.served_bytes
        pinned_bytes = None
        if sample_bytes and self.batch_size:
            under_way = max(1, self.num_workers * (self.prefetch_factor or 0)) + 1
            pinned_bytes = sample_bytes * self.batch_size * under_way
        has_accelerator = torch.cuda.is_available() or torch.xpu.is_available()
        budget = budget_bytes(machine.available_bytes())
        return choose_pinning(pinned_bytes, budget, has_accelerator=has_accelerator)


_SAID: weakref.WeakValueDictionary[int, PreparedDataset] = weakref.WeakValueDictionary()
"""Datasets of which it was said what keeps them from being served in whole batches."""


def _warn(dataset: Any, sampler: Any, served: LoaderView, *, is_asked: bool) -> None:
    """Warn of samples that every rank reads, and of batches that are not whole unless asked so."""
    ranks = find_rank().world_size
    if type(sampler) is RandomSampler and ranks > 1:
        warn_user(
            f"this is one of {ranks} ranks, and each of them reads all samples of the dataset: the "
            "loader's sampler shares out none. Give the loader distributed='auto', or a sampler "
            "that knows its rank."
        )
    new = [part for part in served.parts if id(part) not in _SAID]
    _SAID.update((id(part), part) for part in new)
    notice = next(filter(None, map(_fallback_notice, new)), "")
    if not served.parts and not isinstance(dataset, IterableDataset):
        notice = _wrapped_notice(dataset)
    if notice and not is_asked:
        warn_user(f"batches are not served whole: {notice}")


def _fallback_notice(dataset: PreparedDataset) -> str:
    """Which code of the user's own runs on each sample unasked, and the cure; else empty."""
    own = own_reader(dataset)
    if own:
        return (
            f"{type(dataset).__name__}.{own} is called for each sample. Write what it does as "
            "transform= or target_transform= instead."
        )
    reader = latest_reader(dataset)
    plan = reader.plan
    kept = reader.kept
    is_known = not any(view.per_sample for view in plan.each)
    is_asked_for = not reader.stored.options.batch_ops or reader.pair_transform is not None
    if is_asked_for or kept is None or kept.is_tuple or is_known:
        return ""
    return (
        f"{plan.obstacle}, so that it runs in Python on each sample. Give it as prepare= if it "
        "does the same each time, or as CudaPrefetcher(transform=) if it can take whole batches; "
        "or write steps that are served in its place: docs/served-steps.md."
    )


def _wrapped_notice(dataset: Any) -> str:
    """How to have whole batches where a fastdata dataset is asked for sample after sample."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    for inner in (*getattr(dataset, "datasets", ()), *getattr(dataset, "__dict__", {}).values()):
        if isinstance(inner, Dataset) and LoaderView.find(inner).parts:
            name = type(inner).__name__
            return (
                f"{type(dataset).__name__} asks its {name} for each sample. Give the loader the "
                f"{name} itself: what is done to its items can be transform= or target_transform=. "
                "Beside it in a ConcatDataset, make a CachedDataset of any other."
            )
    return ""


def _channels_last(collate_fn: Any) -> Any:
    if isinstance(collate_fn, RingCollate):
        return RingCollate(ChannelsLast(collate_fn.collate), slots=collate_fn.slots)
    return ChannelsLast(collate_fn)


def _share(
    dataset: Any, shuffle: bool, drop_last: bool, distributed: Literal["auto", "exact"]
) -> RankSampler:
    if distributed == "exact" and drop_last:
        raise ValueError(
            "distributed='exact' gives every sample once, and drop_last=True would drop some: "
            "choose one"
        )
    seed = LoaderView.find(dataset).seed  # torch's generators may differ between ranks
    uneven: Uneven = "keep" if distributed == "exact" else "drop" if drop_last else "pad"
    return RankSampler(dataset, shuffle=shuffle, seed=seed or 0, uneven=uneven)
