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
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
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
from fastdata.loaders.order import Epochs, SamplerChain, length_of
from fastdata.loaders.samplers import RankSampler, Uneven
from fastdata.machine import PinningPlan, budget_bytes, choose_pinning
from fastdata.machine.processes import find_rank, local_ranks
from fastdata.pixels.describe import may_draw
from fastdata.pixels.images import jpeg_obstacle
from fastdata.report import EpochReport, warn_user

_T_co = TypeVar("_T_co", covariant=True)
_TORCHS = inspect.signature(torch_loader.DataLoader).parameters
_WORKERS = ("auto", "thread", "process")
_NO_ORDER = (
    "with in_order=False batches overtake each other, and a state counts them only: an epoch that "
    "is resumed from it may repeat some and leave out others. Use in_order=True."
)
_NO_SIZE = (
    "the batch size was changed within this epoch, and a state counts batches only: an epoch that is "
    "resumed from it may repeat some samples and leave out others. Change the batch size between "
    "epochs, or save a state at the end of the epoch."
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
      ranks: any number of threads or processes gives the same batches. One whose code names
      Python's or NumPy's generators is called in worker processes, which are seeded as torch's.
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

    workers: Literal["auto", "thread", "process"]
    distributed: Literal["off", "auto", "exact"]
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
        workers: Literal["auto", "thread", "process"] = "auto",
        distributed: Literal["off", "auto", "exact"] = "off",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        if memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"memory_format={memory_format!r} is neither torch.contiguous_format nor "
                "torch.channels_last"
            )
        if workers not in _WORKERS:
            raise ValueError(f"workers={workers!r} is not one of 'auto', 'thread', 'process'")
        if distributed not in ("off", "auto", "exact"):
            raise ValueError(f"distributed={distributed!r} is not one of 'off', 'auto', 'exact'")
        has_own_sampler = False
        if distributed != "off" and sampler is None and batch_sampler is None:
            has_own_sampler = True
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
        own = {"workers": workers, "distributed": distributed, "memory_format": memory_format}
        for name, value in own.items():
            if not hasattr(self, name):  # a subclass may use the name for something else
                setattr(self, name, value)
        self._fastdata = LoaderInternals(
            dataset if makes_batches else None,
            workers=workers,
            is_channels_last=memory_format is torch.channels_last,
            is_batched=makes_batches,
            seeds_once=persistent_workers,
            has_own_sampler=has_own_sampler,
        )
        super().__init__(**arguments | {"pin_memory": pin_memory is True})
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
        """Make the random draws of coming epochs those of ``epoch``; a RankSampler is told too.

        They follow from the base seed too, where the dataset has no ``seed``.
        """
        self._fastdata.epochs.set_epoch(epoch, _chain_of(self))

    def report(self) -> EpochReport:
        """How the latest epoch went; ``.path`` says how batches are read, and why."""
        return self._fastdata.report()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} of {type(self.dataset).__name__}: {length_of(self)} batches of "
            f"batch_size={self.batch_size}, num_workers={self.num_workers}\n"
            f"{self._fastdata.engine.path}"
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
        if not self.in_order and self.num_workers > 1 and self._fastdata.engine.kind == "process":
            warn_user(_NO_ORDER)
        state = self._fastdata.epochs.state(_identity_of(self), _chain_of(self))
        if state["is_begun"] and self._fastdata.epochs.has_changed_size:
            warn_user(_NO_SIZE)
        return state

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
        self._fastdata.epochs.load(state, _identity_of(self), _chain_of(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, or of a pickle; its epochs and workers are its own."""
        own = self._fastdata.copied()
        state = vars(self) | {"_fastdata": own, "_iterator": None}
        batches = self.batch_sampler
        if own.has_own_sampler and type(batches) is BatchSampler:
            state["sampler"] = copy.copy(batches.sampler)
            state["batch_sampler"] = copy.copy(batches)
            state["batch_sampler"].sampler = state["sampler"]
        if isinstance(state.get("memory_format"), torch.memory_format):
            # Pickle can write a torch.memory_format from protocol 4 on, and torch.save uses 2.
            own.format_name = str(state.pop("memory_format")).removeprefix("torch.")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        name = self._fastdata.format_name
        if name:
            self.memory_format = getattr(torch, name)


def _chain_of(loader: DataLoader[Any]) -> SamplerChain:
    """Return what an epoch that begins now is drawn from."""
    return SamplerChain.of(loader._index_sampler, loader.generator)


def _identity_of(loader: DataLoader[Any]) -> dict[str, Any]:
    return {
        "dataset_length": length_of(loader.dataset),
        "sampler_length": length_of(loader.sampler),
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
    }


class LoaderInternals:
    """Everything that fastdata adds to a loader, in one object that is called ``_fastdata`` there.

    All other names of a loader are torch's, or belong to the user's subclass. Methods are given the
    loader and do not keep it: a cycle would keep a dropped loader alive.

    Attributes:
        epochs: of the loader.
        engine: reads the batches of the latest epoch, or of the first one.
        has_own_sampler: ``distributed=`` made the loader's sampler.
        format_name: of the loader's ``memory_format``, in a pickle of it.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        workers: Literal["auto", "thread", "process"],
        is_channels_last: bool,
        is_batched: bool,
        seeds_once: bool,
        has_own_sampler: bool,
    ) -> None:
        self._served = LoaderView.find(dataset)
        self._workers = workers
        self._is_channels_last = is_channels_last
        self.epochs = Epochs(self._served, seeds_once=seeds_once, is_batched=is_batched)
        self.engine = Engine("thread", "not chosen yet", 0)
        self.has_own_sampler = has_own_sampler
        self.format_name = ""
        self._ring: BatchRing | None = None
        self._has_warned = False
        self._pinning = PinningPlan(pin=False)
        self._is_pinning_vain = False  # torch has found no accelerator, and warned of it
        self._counts = LoopCounts()

    def copied(self) -> LoaderInternals:
        """Return the internals of another loader that goes on as this one would."""
        other = object.__new__(LoaderInternals)
        own: dict[str, Any] = {"epochs": copy.copy(self.epochs), "_ring": None}
        own |= {"_counts": LoopCounts(), "_is_pinning_vain": False}  # it may go to another machine
        vars(other).update(vars(self), **own)
        return other

    def iterate(
        self,
        loader: DataLoader[Any],
        ring: BatchRing | None = None,
        held: int = HELD_BY_USER,
        read: Read | None = None,
        alone: str = "",
    ) -> Any:
        """Begin an epoch, as ``iter`` does; the iterator's ``progress`` is how far it is.

        Args:
            loader: whose internals these are.
            ring: a prefetcher's, where threads gather batches; ``pin_memory="auto"`` leaves pinning
                to it.
            held: batches that the user may hold at a time without costing new memory.
            read: makes a batch of indices instead of the dataset; threads only.
            alone: why batches are read in the training loop, whatever the number of workers.
        """
        if self._served.subset is not None:  # which may have other indices now
            self._served = self.epochs.served = LoaderView.find(loader.dataset)
        self._served.reader()  # which notices what was changed in place
        if not self._has_warned:
            self._has_warned = True
            is_asked = self._workers_of(loader) == "process"
            _warn(loader.dataset, loader.sampler, self._served, is_asked=is_asked)
        handle = self._served.handle()
        engine = Engine("thread", alone, 0) if alone else self.choose_engine(loader)
        self.engine = engine
        if ring is None:
            ring = self._ring = self._ring or BatchRing(self.ring_slots(loader, held))
        progress = self.epochs.begin(_chain_of(loader))
        is_channels_last = self._wants_channels_last(loader)
        # A collate_fn of the user's own gets samples in the usual layout.
        self.epochs.channels_last = is_channels_last and loader.collate_fn is collate
        dataset = self._served.fetched(loader.dataset)
        collate_fn = loader.collate_fn
        is_pinned_by_prefetcher = self._pinning.reason and ring is not self._ring
        needs_no_pinning = alone or is_pinned_by_prefetcher or self._is_pinning_vain
        view = EpochLoader(
            loader,
            dataset=dataset,
            _index_sampler=self.epochs,
            pin_memory=loader.pin_memory and not needs_no_pinning,
            collate_fn=_channels_last(collate_fn) if is_channels_last else collate_fn,
        )
        with torch.random.fork_rng(devices=[], enabled=progress.is_begun):
            if engine.kind == "process":
                iterator = _iterate_torch(loader, view, progress, held)
            else:
                loader._iterator = None  # worker processes that persist have done their part
                # Where a subclass's own methods make items, only it can be asked for batches.
                has_own = any(map(own_reader, self._served.parts))
                fetcher = _MapDatasetFetcher(dataset, True, lambda samples: samples, False)
                maker = BatchMaker(
                    fetch=fetcher.fetch,
                    handle=None if has_own else handle,
                    ring=ring,
                    collate_fn=collate_fn,
                    in_thread=engine.workers > 0,
                    channels_last=is_channels_last,
                    read=read,
                )
                _draw_no_second_seed(view, progress)
                iterator = ThreadIter(view, progress, maker, threads=engine.workers)
        self._is_pinning_vain |= view.pin_memory and not iterator._pin_memory
        iterator.counts = self._counts = LoopCounts(ring=iterator.ring)
        if iterator.ring:
            iterator.ring.fresh_count = 0
        iterator.handle = handle
        return iterator

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
            prepared=self._served.prepared_share,
            **self._counts.figures(),
        )

    # For a prefetcher

    def ring_slots(self, loader: DataLoader[Any], held: int) -> int:
        """Return how many buffers threads and a user who holds ``held`` batches need."""
        return self.engine.workers * (loader.prefetch_factor or 0) + 1 + held

    def device_obstacle(self, loader: DataLoader[Any]) -> str | None:
        """Return why a device cannot finish the batches of this loader, or None."""
        engine = self.engine = self.choose_engine(loader)
        if engine.kind == "process":
            return f"batches come from {engine.path}"
        return None if loader.collate_fn is collate else "collate_fn= is your own"

    # Decisions

    def _workers_of(self, loader: DataLoader[Any]) -> str:
        """Return ``workers``: the attribute, unless a subclass uses its name for something else."""
        given: object = getattr(loader, "workers", None)
        return given if isinstance(given, str) and given in _WORKERS else self._workers

    def _wants_channels_last(self, loader: DataLoader[Any]) -> bool:
        given = getattr(loader, "memory_format", None)
        is_ours = isinstance(given, torch.memory_format)
        return given is torch.channels_last if is_ours else self._is_channels_last

    def choose_engine(self, loader: DataLoader[Any]) -> Engine:
        count = index(loader.num_workers)  # which may be NumPy's
        reader = self._served.latest()
        obstacle = self._thread_obstacle(loader, reader)
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

    def _thread_obstacle(self, loader: DataLoader[Any], reader: AnyReader | None) -> str | None:
        if isinstance(loader.dataset, IterableDataset):
            return "an IterableDataset is read in order"
        if loader.batch_sampler is None:
            return "batch_size=None asks for single samples"
        workers = self._workers_of(loader)
        if workers != "auto":
            return "workers='process'" if workers == "process" else None
        if reader is None:
            return f"{type(loader.dataset).__name__} is no fastdata dataset"
        init = getattr(loader.worker_init_fn, "func", loader.worker_init_fn)
        is_lightnings = getattr(init, "__name__", "") == "pl_worker_init_function"  # only seeds
        # Whether code of the user's runs that it might have prepared.
        is_prepared = loader.collate_fn not in (collate, default_collate)
        if init is not None and is_prepared and not is_lightnings:
            return "worker_init_fn is for worker processes"
        if any(may_draw(part.target_transform) for part in self._served.parts):
            return "target_transform= may draw random numbers"
        if is_prepared and may_draw(loader.collate_fn, from_torch=False):
            return "collate_fn= may draw from Python's or NumPy's generators"
        return reader.obstacle

    def choose_pinning(self, loader: DataLoader[Any], asked: bool | Literal["auto"]) -> bool:
        """Return whether to pin batches, for ``pin_memory=``; ``report`` says why."""
        self.engine = self.choose_engine(loader)
        if asked != "auto":
            self._pinning = PinningPlan(pin=asked)
            return asked
        reader = self._served.latest()
        sample_bytes = None if reader is None else reader.served_bytes
        pinned_bytes = None
        if sample_bytes and loader.batch_size:
            under_way = max(1, loader.num_workers * (loader.prefetch_factor or 0)) + 1
            pinned_bytes = sample_bytes * loader.batch_size * under_way
        has_accelerator = torch.cuda.is_available() or torch.xpu.is_available()
        budget = budget_bytes(machine.available_bytes())
        self._pinning = choose_pinning(pinned_bytes, budget, has_accelerator=has_accelerator)
        return self._pinning.pin


class EpochLoader:
    """A loader as torch's iterators see it, with attributes of its own for one epoch."""

    def __init__(self, loader: DataLoader[Any], **attributes: Any) -> None:
        vars(self).update(vars(loader))
        vars(self).update(attributes, _loader=loader)

    def __getattr__(self, name: str) -> Any:  # torch's properties
        return getattr(self._loader, name)


def _draw_no_second_seed(view: EpochLoader, progress: Progress) -> None:
    """Leave the loader's generator alone where an iterator would draw another base seed."""
    if view.persistent_workers and progress.base_seed is not None:
        vars(view)["generator"] = torch.Generator()


def _iterate_torch(
    loader: DataLoader[Any], view: EpochLoader, progress: Progress, held: int
) -> Any:
    if loader.num_workers == 0:
        return InlineIter(view, progress)
    iterator: Any = loader._iterator  # of workers that persist
    loader._iterator = None  # where Ctrl-C comes now, nobody knows what they send next
    if iterator is None:
        loader.check_worker_number_rationality()
        if not isinstance(loader.dataset, IterableDataset):  # datapipes draw a shared seed too
            _draw_no_second_seed(view, progress)
        iterator = ProcessIter(view, progress, held=held)
    else:
        iterator.progress = progress
        iterator._reset(view)
    loader._iterator = iterator if loader.persistent_workers else None
    return iterator


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
    """Return which code of the user's runs on each sample, and the cure; empty if none does."""
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
    """Return how to get whole batches if another dataset reads a fastdata dataset by samples."""
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
