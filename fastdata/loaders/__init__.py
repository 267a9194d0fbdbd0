"""Indices to batches to the device. Here the DataLoader: torch's, with an engine of threads.

Threads start in microseconds, share the dataset without copying anything, and hand batches over by
reference. Kernels leave the GIL while they copy, so threads run side by side.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Generic, Literal, TypeVar

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

from fastdata.datasets.batch import Collate, collate
from fastdata.datasets.buffers import BatchRing
from fastdata.datasets.dataset import PreparedDataset, own_reader
from fastdata.datasets.samples import DatasetSamples
from fastdata.datasets.transport import RingCollate
from fastdata.datasets.trees import ChannelsLast
from fastdata.errors import counted
from fastdata.loaders.epochs import (
    HELD_BY_USER,
    AnyReader,
    BatchMaker,
    CountedIterator,
    Engine,
    InlineIter,
    LoopCounts,
    MakeBatch,
    Parts,
    ProcessIter,
    Progress,
    ThreadIter,
)
from fastdata.loaders.order import Resume, SamplerChain, length_of
from fastdata.loaders.samplers import RankSampler, StateDict, Uneven
from fastdata.machine import limits
from fastdata.machine.budget import PinningPlan, budget_bytes, choose_pinning
from fastdata.machine.ranks import find_rank, local_ranks
from fastdata.pixels.decode import jpeg_obstacle
from fastdata.pixels.draws import may_draw
from fastdata.report import EpochReport, warn_user

_T_co = TypeVar("_T_co", covariant=True)
Workers = Literal["auto", "thread", "process"]
Distributed = Literal["off", "auto", "exact"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": ("auto", "thread", "process"),
    "distributed": ("off", "auto", "exact"),
    "memory_format": (torch.contiguous_format, torch.channels_last),
}
_HAS_IN_ORDER = "in_order" in inspect.signature(torch_loader.DataLoader).parameters  # torch 2.6
_NO_ORDER = (
    "with in_order=False batches overtake each other, and a state only counts them: an epoch that "
    "is resumed from it may repeat some samples and leave out others. Use in_order=True."
)
_NO_STREAM = (
    "a DataLoader cannot resume an IterableDataset, because only the dataset itself can return to "
    "a position: its epochs begin again. Save the dataset's own state next to the loader's, or use "
    "a map-style dataset."
)


# Generic in one variable of our own: torch's loader has one until torch 2.13, and two after it.
class DataLoader(torch_loader.DataLoader, Generic[_T_co]):  # type: ignore[type-arg]
    """torch's DataLoader, with an engine of threads where the dataset serves whole batches.

    The arguments up to ``in_order`` are torch's. These differ or are new:

    - ``dataset``: any. Whole batches are served by fastdata's datasets, and by ``Subset`` and
      ``ConcatDataset`` of them, when no step of the transform needs Python per sample.
    - ``num_workers``: threads or processes; 0 reads in the training loop. ``"auto"`` takes the
      usable cores (affinity, container quota) shared among the ranks of this machine
      (``LOCAL_WORLD_SIZE``), less one for the training loop: 0 on a single core, but 1 where
      another argument asks for workers. ``fastdata.tune(dataset)`` measures a better number.
    - ``collate_fn``: the default is ``fastdata.collate``, which takes whole batches as they are.
      Draws of another one from torch's global generator, as by MixUp and CutMix, follow from the
      base seed, or the ``seed`` of a fastdata dataset, and the batch's number among those of all
      ranks: any number of threads or processes gives the same batches. A ``collate_fn`` whose code
      names Python's or NumPy's generators is called in worker processes, which are seeded as
      torch's.
    - ``pin_memory``: ``"auto"`` pins if there is a CUDA or XPU device, batches are large enough to
      gain from it, and all that are under way are a small part of the free memory; ``report()``
      returns the decision and its reason. A ``CudaPrefetcher`` pins by itself.
    - ``worker_init_fn``: called in worker processes only. With a ``collate_fn`` of your own, which
      may need it, worker processes are used.
    - ``persistent_workers``: with threads it only means that the base seed is drawn once, as torch
      then does.
    - ``in_order``: threads always keep the order.
    - ``workers``: ``"thread"``, ``"process"``, or ``"auto"`` for threads where whole batches are
      served and the code of ``target_transform`` names no random generator: worker processes are
      seeded as torch's.
    - ``distributed``: ``"auto"`` shares each epoch among the ranks of ``torch.distributed``, or of
      the launcher's variables, by a ``fastdata.loaders.samplers.RankSampler``, which is the
      loader's ``sampler``: equally many batches for all, a few samples repeated, or with
      ``drop_last`` left out. ``"exact"`` gives each sample once, so that some ranks may have a
      batch more: for evaluation. The order follows from the dataset's ``seed`` (None: 0) and the
      epoch, which is counted; a state can be resumed with another number of ranks, workers, or
      another ``batch_size``. A ``sampler`` or ``batch_sampler`` of your own is used unchanged.
    - ``memory_format``: with ``torch.channels_last`` tensors of four dimensions have this memory
      format. Whole batches are written so at once; others are converted.

    ``print(loader.report())`` shows how batches are read and why, and how the latest epoch went.

    Example:
        >>> from fastdata import CachedDataset
        >>> samples = [(torch.full((1, 2, 2), i), i) for i in range(5)]
        >>> dataset = CachedDataset(samples)
        >>> loader = DataLoader(dataset, batch_size=2, num_workers=1)
        >>> [labels.tolist() for images, labels in loader]
        [[0, 1], [2, 3], [4]]
    """

    workers: Workers
    distributed: Distributed
    memory_format: torch.memory_format

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
        workers: Workers = "auto",
        distributed: Distributed = "off",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        own = {"workers": workers, "distributed": distributed, "memory_format": memory_format}
        for name, value in own.items():
            if value not in CHOICES[name]:
                choices = ", ".join(map(repr, CHOICES[name]))
                raise ValueError(f"{name}={value!r} is not one of {choices}")
            if not hasattr(self, name):  # a subclass may use the name for something else
                setattr(self, name, value)
        if isinstance(pin_memory, str) and pin_memory != "auto":
            raise ValueError(f"pin_memory={pin_memory!r} is neither True, False nor 'auto'")
        asks = prefetch_factor or persistent_workers or multiprocessing_context or timeout
        is_shared = distributed != "off" and sampler is None and batch_sampler is None
        if is_shared:
            sampler = _share(dataset, bool(shuffle), drop_last, distributed)
            shuffle = None
        makes_batches = batch_size is not None or batch_sampler is not None
        if collate_fn is None and makes_batches:
            collate_fn = collate
        self._fastdata = LoaderInternals(
            dataset if makes_batches else None,
            workers=workers,
            is_channels_last=memory_format is torch.channels_last,
            is_batched=makes_batches,
            seeds_once=persistent_workers,
            has_own_sampler=is_shared,
        )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            _worker_count(num_workers, least=int(bool(asks))),
            collate_fn,
            pin_memory is True,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if _HAS_IN_ORDER else {}),
        )
        self.in_order = in_order
        self.pin_memory = self._fastdata.choose_pinning(self, pin_memory)

    def __iter__(self) -> Any:
        return self._get_iterator()

    def _get_iterator(self) -> Any:  # torch's name for it, which subclasses override
        return self._fastdata.iterate(self)

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does; threads may be many."""
        if self.num_workers and self._fastdata.choose_engine(self).kind == "process":
            super().check_worker_number_rationality()

    def set_epoch(self, epoch: int) -> None:
        """Make the random draws of coming epochs those of ``epoch``, and its RankSampler's order.

        Draws also follow from the base seed, if the dataset has no ``seed``.
        """
        self._fastdata.resume.set_epoch(epoch, SamplerChain.of(self))

    def report(self) -> EpochReport:
        """Return how the latest epoch went; ``.path`` tells how batches are read, and why."""
        return self._fastdata.report()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} of {type(self.dataset).__name__}: {length_of(self)} batches of "
            f"batch_size={self.batch_size}, num_workers={self.num_workers}\n"
            f"{self._fastdata.engine.path}"
        )

    def state_dict(self) -> StateDict:
        """Return the position in the latest epoch, as a small dict of plain values.

        Batches count once they are handed to the user, not when they are read ahead. Before the
        first batch, and once the last one is handed over, the state is the beginning of the next
        epoch: Lightning goes on there. The order is found again for torch's samplers, for a
        ``RankSampler``, and for a sampler with a ``state_dict``, whose state is included. Of any
        other sampler batches are counted: it must give the same indices again. With a
        ``RankSampler`` the state is the position in the order of all ranks: the one of rank 0 can
        be resumed on any number of ranks, and with another batch size. With ``in_order=False`` and
        worker processes a state is not exact; for an ``IterableDataset`` it is empty, because only
        the dataset itself can return to a position. A warning is given in both cases.
        """
        # No errors: Lightning asks every loader, resumed or not.
        if isinstance(self.dataset, IterableDataset):
            warn_user(_NO_STREAM)
            return {}
        if not self.in_order and self.num_workers > 1 and self._fastdata.engine.kind == "process":
            warn_user(_NO_ORDER)
        return self._fastdata.resume.state(_identity_of(self), SamplerChain.of(self))

    def load_state_dict(self, state: StateDict) -> None:
        """Let the next epoch be the one of ``state``, without the batches handed over before.

        The state holds until a batch is handed over: Lightning may drop a first iterator without
        asking it for one. Samples of earlier batches are not read again. ``generator`` is put back
        to where it was; the global random generators are not changed, and decide later epochs. The
        order and fastdata's own draws are resumed; draws of a transform in worker processes from
        global generators begin again.

        Args:
            state: as ``state_dict`` returned it, here or in another process; an empty dict forgets
                a loaded state.

        Raises:
            ValueError: the state is of a loader over another dataset, or with other batches.
        """
        if state and isinstance(self.dataset, IterableDataset):
            raise ValueError(_NO_STREAM)
        self._fastdata.resume.load(state, _identity_of(self), SamplerChain.of(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, or of a pickle; its epochs and workers are its own."""
        state = vars(self) | {"_fastdata": self._fastdata.copied(self), "_iterator": None}
        if self._fastdata.has_own_sampler:  # both together: one refers to the other
            samplers = {name: state[name] for name in ("sampler", "batch_sampler")}
            state |= copy.deepcopy(samplers)
        if isinstance(state.get("memory_format"), torch.memory_format):
            # Pickle can write a torch.memory_format from protocol 4 on, and torch.save uses 2.
            del state["memory_format"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not hasattr(self, "memory_format"):
            self.memory_format = CHOICES["memory_format"][self._fastdata.is_channels_last]


def _identity_of(loader: DataLoader[Any]) -> StateDict:
    return {
        "dataset_length": length_of(loader.dataset),
        "sampler_length": length_of(loader.sampler),
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
    }


def _worker_count(num_workers: int | str, least: int) -> int:
    if not isinstance(num_workers, str):
        return num_workers
    if num_workers != "auto":
        raise ValueError(f"num_workers={num_workers!r} is neither a number nor 'auto'")
    return max(least, limits.usable_cores() // local_ranks() - 1)


def _share(dataset: Any, shuffle: bool, drop_last: bool, distributed: Distributed) -> RankSampler:
    """Return the sampler of ``distributed=``."""
    uneven: Uneven = "drop" if drop_last else "pad"
    if distributed == "exact":
        uneven = "keep"
        if drop_last:
            raise ValueError(
                "distributed='exact' gives every sample once, and drop_last=True would drop some: "
                "choose one"
            )
    seed = Parts.find(dataset).seed  # torch's generators may differ between ranks
    return RankSampler(dataset, shuffle=shuffle, seed=seed or 0, uneven=uneven)


class LoaderInternals:
    """Everything that fastdata adds to a loader, in one object that is called ``_fastdata`` there.

    All other names of a loader are torch's, or belong to the user's subclass. Methods are given the
    loader and do not keep it: a cycle would keep a dropped loader alive.

    Attributes:
        resume: epochs of the loader, and the datasets behind it.
        engine: reads the batches of the latest epoch, or of the first one.
        is_channels_last: the memory format that the loader was made or copied with.
        has_own_sampler: ``distributed=`` made the loader's sampler.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | None,
        *,
        workers: Workers,
        is_channels_last: bool,
        is_batched: bool,
        seeds_once: bool,
        has_own_sampler: bool,
    ) -> None:
        parts = Parts.find(dataset)
        self.resume = Resume(parts, seeds_once=seeds_once, is_batched=is_batched)
        self.engine = Engine("thread", "not chosen yet", 0)
        self.is_channels_last = is_channels_last
        self.has_own_sampler = has_own_sampler
        self._workers = workers
        self._ring: BatchRing | None = None
        self._has_warned = False
        self._pinning = PinningPlan(pin=False)
        self._counts = LoopCounts()

    def copied(self, loader: DataLoader[Any]) -> LoaderInternals:
        """Return the internals of a copy of the loader, whose epochs go on as its own would."""
        other = copy.copy(self)
        other.resume = self.resume.copied()
        other.is_channels_last = self._wants_channels_last(loader)
        other._ring = None
        other._counts = LoopCounts()
        return other

    def iterate(
        self,
        loader: DataLoader[Any],
        ring: BatchRing | None = None,
        held: int = HELD_BY_USER,
        read: MakeBatch | None = None,
        alone: str = "",
    ) -> CountedIterator:
        """Begin an epoch, as ``iter`` does.

        Args:
            loader: the one with these internals.
            ring: a prefetcher's, where threads gather batches; ``pin_memory="auto"`` leaves pinning
                to it.
            held: batches that the user may hold at a time without costing new memory.
            read: makes a batch of indices instead of the dataset; threads only.
            alone: why batches are read in the training loop, whatever the number of workers.
        """
        parts = self._refresh(loader)
        handle = parts.handle()
        self.engine = Engine("thread", alone, 0) if alone else self.choose_engine(loader)
        pins = loader.pin_memory and not alone
        if ring is None:
            ring = self._ring = self._ring or BatchRing(self.ring_slots(loader, held))
        elif self._pinning.reason:  # "auto": the prefetcher pins
            pins = False
        progress = self.resume.begin(SamplerChain.of(loader))
        is_channels_last = self._wants_channels_last(loader)
        # A collate_fn of the user's own gets samples in the usual layout.
        self.resume.channels_last = is_channels_last and loader.collate_fn is collate
        view = EpochLoader(
            loader,
            dataset=parts.fetched(loader.dataset),
            index_sampler=self.resume,
            pin_memory=pins,
            collate_fn=_channels_last(loader.collate_fn) if is_channels_last else loader.collate_fn,
            draws_seed=progress.base_seed is None,
        )
        idle: Any = loader._iterator  # worker processes that persist, and have done their part
        loader._iterator = None  # after Ctrl-C here it is unknown what they send next
        # The rest of an epoch draws nothing from the global generator.
        with torch.random.fork_rng(devices=[], enabled=progress.is_begun):
            if self.engine.kind == "process":
                iterator = _iterate_processes(loader, view, progress, idle, held)
            else:
                maker = BatchMaker(
                    fetch=_MapDatasetFetcher(view.dataset, True, _as_they_are, False).fetch,
                    # A subclass's own methods must be called for its items.
                    handle=None if any(map(own_reader, parts.datasets)) else handle,
                    ring=ring,
                    collate_fn=loader.collate_fn,
                    in_thread=self.engine.workers > 0,
                    channels_last=is_channels_last,
                    read=read,
                )
                iterator = ThreadIter(view, progress, maker, threads=self.engine.workers)
        iterator.counts = self._counts = LoopCounts(ring=iterator.ring)
        if iterator.ring:
            iterator.ring.fresh_count = 0
        iterator.handle = handle
        return iterator

    def _refresh(self, loader: DataLoader[Any]) -> Parts:
        """Return the datasets of an epoch that begins now, with all changes made in place."""
        parts = self.resume.parts
        if parts.subset is not None:  # which may have other indices now
            parts = self.resume.parts = Parts.find(loader.dataset)
        parts.reader()  # which notices what was changed in place
        if not self._has_warned:
            self._has_warned = True
            warn_of_ranks(loader.sampler)
            if self._workers_of(loader) != "process":  # else the user chose it
                warn_of_samples(loader.dataset, parts)
        return parts

    def report(self) -> EpochReport:
        engine = self.engine
        ring = self._counts.ring
        return EpochReport(
            path=engine.path,
            engine=engine.kind if engine.workers else "inline",
            workers=engine.workers,
            fresh_batches=ring.fresh_count if ring else 0,
            bytes_held=ring.bytes_held if ring else 0,
            pinning=self._pinning.reason,
            prepared=self.resume.parts.prepared_share,
            **self._counts.figures(),
        )

    # For a prefetcher

    def ring_slots(self, loader: DataLoader[Any], held: int) -> int:
        """Return how many buffers threads and a user who holds ``held`` batches need."""
        return self.engine.workers * (loader.prefetch_factor or 0) + 1 + held

    def device_obstacle(self, loader: DataLoader[Any]) -> str | None:
        """Return why a device cannot finish the batches of this loader, or None."""
        self.engine = self.choose_engine(loader)
        if self.engine.kind == "process":
            return f"batches come from {self.engine.path}"
        return None if loader.collate_fn is collate else "collate_fn= is your own"

    # Decisions

    def _workers_of(self, loader: DataLoader[Any]) -> str:
        """Return ``workers``: the attribute, unless a subclass uses its name for something else."""
        given: object = getattr(loader, "workers", None)
        if isinstance(given, str) and given in CHOICES["workers"]:
            return given
        return self._workers

    def _wants_channels_last(self, loader: DataLoader[Any]) -> bool:
        given: object = getattr(loader, "memory_format", None)
        is_ours = isinstance(given, torch.memory_format)
        return given is torch.channels_last if is_ours else self.is_channels_last

    def choose_engine(self, loader: DataLoader[Any]) -> Engine:
        return choose_engine(loader, self.resume.parts, self._workers_of(loader))

    def choose_pinning(self, loader: DataLoader[Any], asked: bool | Literal["auto"]) -> bool:
        """Return whether to pin batches, for ``pin_memory=``; ``report`` has the reason."""
        self.engine = self.choose_engine(loader)
        if asked == "auto":
            self._pinning = plan_pinning(loader, self.resume.parts.latest())
        else:
            self._pinning = PinningPlan(pin=asked)
        return self._pinning.pin


def _as_they_are(samples: Any) -> Any:
    return samples


class EpochLoader:
    """A loader as torch's iterators read it, with attributes of its own for one epoch.

    torch's iterators take all of a loader's settings from its attributes. Changing those of the
    user's loader would be seen by the user, and by other iterators.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        dataset: Any,
        index_sampler: Resume,
        pin_memory: bool,
        collate_fn: Collate | None,
        draws_seed: bool,
    ) -> None:
        self._loader = loader
        self.dataset = dataset
        self._index_sampler = index_sampler
        self.pin_memory = pin_memory
        self.collate_fn = collate_fn
        self.generator = loader.generator
        is_stream = isinstance(loader.dataset, IterableDataset)  # datapipes draw another seed
        if loader.persistent_workers and not draws_seed and not is_stream:
            # Every iterator of torch's draws a base seed: leave the loader's generator alone.
            self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _iterate_processes(
    loader: DataLoader[Any], view: EpochLoader, progress: Progress, idle: Any, held: int
) -> CountedIterator:
    """Begin an epoch of torch's engines; ``idle`` has worker processes of an earlier one."""
    if loader.num_workers == 0:
        return InlineIter(view, progress)
    if idle is None:
        loader.check_worker_number_rationality()
        iterator = ProcessIter(view, progress, held=held)
    else:
        iterator = idle
        iterator.progress = progress
        iterator._reset(view)
    if loader.persistent_workers:
        loader._iterator = iterator
    return iterator


def choose_engine(loader: DataLoader[Any], parts: Parts, workers: str) -> Engine:
    """Choose what reads the batches of a loader whose option ``workers`` is given."""
    count = index(loader.num_workers)  # which may be NumPy's
    reader = parts.latest()
    obstacle = _thread_obstacle(loader, parts, reader, workers)
    if obstacle is not None and (count or reader is None):
        path = "torch's engine in the training loop"
        if count:
            path = f"{count} worker process{'es' * (count > 1)} over a shared ring"
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
    threads = min(count, limits.usable_cores()) if is_whole else count
    return Engine("thread", f"{path}, read by {counted(threads, 'thread')}", threads)


def _thread_obstacle(
    loader: DataLoader[Any], parts: Parts, reader: AnyReader | None, workers: str
) -> str | None:
    """Return why torch's engine is needed instead of threads, or None."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset is read in order"
    if loader.batch_sampler is None:
        return "batch_size=None asks for single samples"
    if workers != "auto":
        return "workers='process'" if workers == "process" else None
    if reader is None:
        return f"{type(loader.dataset).__name__} is not a fastdata dataset"
    if any(may_draw(dataset.target_transform) for dataset in parts.datasets):
        return "target_transform= may draw random numbers"
    if loader.collate_fn in (collate, default_collate):
        return reader.obstacle
    # A collate_fn of the user's own may need what worker_init_fn prepares.
    init = getattr(loader.worker_init_fn, "func", loader.worker_init_fn)
    is_lightnings = getattr(init, "__name__", "") == "pl_worker_init_function"  # only seeds
    if init is not None and not is_lightnings:
        return "worker_init_fn is for worker processes"
    if may_draw(loader.collate_fn, from_torch=False):
        return "collate_fn= may draw from Python's or NumPy's generators"
    return reader.obstacle


def plan_pinning(loader: DataLoader[Any], reader: AnyReader | None) -> PinningPlan:
    """Decide ``pin_memory="auto"``."""
    pinned_bytes = None
    sample_bytes = None if reader is None else reader.served_bytes
    if sample_bytes and loader.batch_size:
        under_way = max(1, loader.num_workers * (loader.prefetch_factor or 0)) + 1
        pinned_bytes = sample_bytes * loader.batch_size * under_way
    has_accelerator = torch.cuda.is_available() or torch.xpu.is_available()
    budget = budget_bytes(limits.available_bytes())
    return choose_pinning(pinned_bytes, budget, has_accelerator=has_accelerator)


_WARNED: weakref.WeakSet[DatasetSamples] = weakref.WeakSet()
"""Datasets whose obstacle to whole batches was warned of."""


def warn_of_ranks(sampler: Any) -> None:
    """Warn of a sampler by which every rank reads all samples."""
    ranks = find_rank().world_size
    if type(sampler) is RandomSampler and ranks > 1:
        warn_user(
            f"this is one of {ranks} ranks, and each of them reads all samples of the dataset, "
            "because the loader's sampler does not divide them. Give the loader "
            "distributed='auto', or a sampler that knows its rank."
        )


def warn_of_samples(dataset: Dataset[Any], parts: Parts) -> None:
    """Warn once for each dataset that is read sample by sample."""
    new = [part for part in parts.datasets if part._fastdata not in _WARNED]
    _WARNED.update(part._fastdata for part in new)
    notice = next(filter(None, map(_fallback_notice, new)), "")
    if not parts.datasets and not isinstance(dataset, IterableDataset):
        notice = _wrapped_notice(dataset)
    if notice:
        warn_user(f"batches are not served whole: {notice}")


def _fallback_notice(dataset: PreparedDataset) -> str:
    """Return which code of the user's runs on each sample, and the cure; empty if none does."""
    own = own_reader(dataset)
    if own:
        return (
            f"{type(dataset).__name__}.{own} is called for each sample. Move its work to "
            "transform= or target_transform=."
        )
    reader = dataset._fastdata.reader
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
    """Return how to get whole batches if another dataset reads a fastdata dataset by samples."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    for inner in (*getattr(dataset, "datasets", ()), *getattr(dataset, "__dict__", {}).values()):
        if isinstance(inner, Dataset) and Parts.find(inner).datasets:
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
