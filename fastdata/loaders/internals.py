"""The state that fastdata adds to a loader, and the start of an epoch."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from fastdata.datasets.batch import Collate, collate
from fastdata.datasets.buffers import BatchRing
from fastdata.datasets.transport import RingCollate
from fastdata.datasets.trees import ChannelsLast
from fastdata.loaders.engine import Engine, choose_engine, plan_pinning
from fastdata.loaders.fallbacks import warn_of_masks, warn_of_ranks, warn_of_samples
from fastdata.loaders.iterators import (
    HELD_BY_USER,
    BatchMaker,
    CountedIterator,
    InlineIter,
    LoopCounts,
    MakeBatch,
    ThreadIter,
)
from fastdata.loaders.mixing import MixedBatches, Mixing, served_mixing
from fastdata.loaders.parts import Parts
from fastdata.loaders.progress import Progress
from fastdata.loaders.resume import Resume
from fastdata.loaders.sampler_chain import SamplerChain
from fastdata.loaders.worker_processes import ProcessIter
from fastdata.machine.budget import PinningPlan
from fastdata.report import EpochReport

if TYPE_CHECKING:
    from fastdata.loaders.loader import DataLoader

Workers = Literal["auto", "thread", "process"]

CHOICES: dict[str, tuple[Any, ...]] = {
    "workers": ("auto", "thread", "process"),
    "distributed": ("off", "auto", "exact"),
    "memory_format": (torch.contiguous_format, torch.channels_last),
}

_MOST_EPOCHS = 100
"""Epochs whose times are kept for ``report().plot()``."""


class LoaderInternals:
    """Everything that fastdata adds to a loader, in one object: its attribute ``_fastdata``.

    All other attributes of a loader are torch's, or belong to the user's subclass. Methods take the
    loader as an argument and do not keep it: the loader holds this object, and a cycle would keep a
    dropped loader and its workers alive.

    Attributes:
        resume: the loader's epochs, and the fastdata datasets that it reads.
        engine: engine of the latest epoch; before the first epoch, the engine it would have.
        is_channels_last: True if the loader was made or copied with this memory format.
        has_own_sampler: True if ``distributed=`` made the loader's sampler.
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
        self._latest_counts: LoopCounts | None = None  # of an epoch that had batches
        self._epochs: deque[tuple[float, float]] = deque(maxlen=_MOST_EPOCHS)

    def copied(self, loader: DataLoader[Any]) -> LoaderInternals:
        """Return the internals of a copy of the loader, which begins the same next epoch."""
        other = copy.copy(self)
        other.resume = self.resume.copied()
        other.is_channels_last = self._wants_channels_last(loader)
        other._ring = None
        other._counts = LoopCounts()
        other._latest_counts = None
        other._epochs = deque(maxlen=_MOST_EPOCHS)
        return other

    def iterate(
        self,
        loader: DataLoader[Any],
        ring: BatchRing | None = None,
        held: int = HELD_BY_USER,
        read: MakeBatch | None = None,
        inline_reason: str = "",
    ) -> CountedIterator:
        """Begin an epoch, as ``iter`` does.

        Args:
            loader: the loader that has these internals.
            ring: a prefetcher's ring, which threads write batches to. ``pin_memory="auto"`` then
                leaves pinning to the prefetcher.
            held: number of batches that the user may hold at a time before new memory is needed.
            read: makes a batch from indices instead of the dataset; for threads only.
            inline_reason: reason to read batches in the training loop, whatever the number of
                workers; empty to use them.
        """
        parts = self._refresh(loader)
        self.engine = self.choose_engine(loader)
        if inline_reason:
            self.engine = Engine("thread", inline_reason, 0)
        pins = loader.pin_memory and not inline_reason
        if ring is None:
            # One ring for all epochs, so that each epoch reuses the buffers of the one before.
            ring = self._ring = self._ring or BatchRing(self.ring_slots(loader, held))
        elif self._pinning.reason:  # "auto": the prefetcher pins
            pins = False
        progress = self.resume.begin(SamplerChain.of(loader))
        is_channels_last = self._wants_channels_last(loader)
        handle = parts.handle()
        mixing = self._mixing(loader)
        # The user's own collate_fn gets samples in the usual memory format.
        is_ours = loader.collate_fn is collate or mixing is not None
        self.resume.channels_last = is_channels_last and is_ours
        if read is None and mixing is not None and handle is not None:
            read = MixedBatches(mixing, handle)
        view = EpochLoader(
            loader,
            dataset=parts.fetched(loader.dataset),
            index_sampler=self.resume,
            pin_memory=pins,
            collate_fn=_channels_last(loader.collate_fn) if is_channels_last else loader.collate_fn,
            draws_seed=progress.base_seed is None,
        )
        has_own_method = any(dataset._fastdata.own_method for dataset in parts.datasets)
        maker = BatchMaker(
            fetch=_MapDatasetFetcher(view.dataset, True, _as_they_are, False).fetch,
            # A subclass of the user may override methods that return items: they must be called.
            handle=None if has_own_method else handle,
            ring=ring,
            collate_fn=loader.collate_fn,
            in_thread=self.engine.workers > 0,
            channels_last=is_channels_last,
            read=read,
        )
        # torch's iterators draw a base seed. The rest of a resumed epoch already has one, so the
        # global generator must not advance.
        with torch.random.fork_rng(devices=[], enabled=progress.is_begun):
            iterator = self._iterator(loader, view, progress, maker, held)
        if self._counts.batches:
            self._latest_counts = self._counts
            self._epochs.append(self._counts.times())
        iterator.counts = self._counts = LoopCounts(ring=iterator.ring)
        if iterator.ring:
            iterator.ring.fresh_count = 0
        iterator.handle = handle
        return iterator

    def _iterator(
        self,
        loader: DataLoader[Any],
        view: EpochLoader,
        progress: Progress,
        maker: BatchMaker,
        held: int,
    ) -> CountedIterator:
        """Return an iterator of the chosen engine; persistent workers are used again."""
        # The loader drops its persistent workers until the epoch has begun. If Ctrl-C comes in
        # between, they are not used again: they might still send batches of the aborted epoch.
        idle: Any = loader._iterator
        loader._iterator = None
        if self.engine.kind == "thread":
            return ThreadIter(view, progress, maker, threads=self.engine.workers)
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

    def _refresh(self, loader: DataLoader[Any]) -> Parts:
        """Return the datasets of an epoch that begins now, with all changes by the user."""
        parts = self.resume.parts
        if parts.subset is not None:  # its indices may have been replaced
            parts = self.resume.parts = Parts.find(loader.dataset)
        parts.reader()  # compiles the datasets again if the user changed them in place
        if not self._has_warned:
            self._has_warned = True
            warn_of_ranks(loader.sampler)
            warn_of_masks(parts)
            # Otherwise the user chose worker processes, or single samples (batch_size=None).
            if self._workers_of(loader) != "process" and loader.batch_sampler is not None:
                warn_of_samples(loader.dataset, parts)
        return parts

    def report(self) -> EpochReport:
        """Return how the latest epoch went."""
        engine = self.engine
        counts = self._counts
        if not counts.batches and self._latest_counts is not None:
            counts = self._latest_counts  # the epoch that has begun has no batch yet
        ring = counts.ring
        return EpochReport(
            path=engine.path,
            engine=engine.kind if engine.workers else "inline",
            workers=engine.workers,
            fresh_batches=ring.fresh_count if ring else 0,
            bytes_held=ring.bytes_held if ring else 0,
            pinning=self._pinning.reason,
            prepared=self.resume.parts.prepared_share,
            epochs=(*self._epochs, *([self._counts.times()] if self._counts.batches else [])),
            **counts.figures(),
        )

    # For a prefetcher

    def ring_slots(self, loader: DataLoader[Any], held: int) -> int:
        """Return the number of buffers for threads, if the user keeps ``held`` batches."""
        return self.engine.workers * (loader.prefetch_factor or 0) + 1 + held

    def device_obstacle(self, loader: DataLoader[Any]) -> str | None:
        """Return why a device cannot finish the batches of this loader, or None."""
        self.engine = self.choose_engine(loader)
        if self.engine.kind == "process":
            return f"batches come from {self.engine.path}"
        if loader.collate_fn is collate:
            return None
        found = served_mixing(loader.collate_fn, self.resume.parts.latest())
        if isinstance(found, Mixing):
            return None
        return found or "collate_fn= is your own"

    # Decisions

    def _mixing(self, loader: DataLoader[Any]) -> Mixing | None:
        """Return the mixing that threads run instead of the ``collate_fn``, or None."""
        found = served_mixing(loader.collate_fn, self.resume.parts.latest())
        return found if isinstance(found, Mixing) and self.engine.kind == "thread" else None

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
        """Return the engine of an epoch that would begin now."""
        return choose_engine(loader, self.resume.parts, self._workers_of(loader))

    def choose_pinning(self, loader: DataLoader[Any], pin_memory: bool | Literal["auto"]) -> bool:
        """Decide for ``pin_memory=`` whether to pin batches; ``report`` gives the reason."""
        self.engine = self.choose_engine(loader)
        if pin_memory == "auto":
            self._pinning = plan_pinning(loader, self.resume.parts.latest())
        else:
            self._pinning = PinningPlan(pin=pin_memory)
        return self._pinning.pin


def _as_they_are(samples: Any) -> Any:
    return samples


class EpochLoader:
    """A view of a loader for torch's iterators, with some attributes replaced for one epoch.

    torch's iterators take all settings from the loader's attributes. If the attributes of the
    loader itself were changed, the user and other iterators would see the change.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        dataset: Dataset[Any],
        index_sampler: Resume,
        pin_memory: bool,
        collate_fn: Collate,
        draws_seed: bool,
    ) -> None:
        self._loader = loader
        self.dataset = dataset
        self._index_sampler = index_sampler
        self.pin_memory = pin_memory
        self.collate_fn = collate_fn
        self.generator = loader.generator
        self.multiprocessing_context = loader.multiprocessing_context
        is_stream = isinstance(loader.dataset, IterableDataset)  # datapipes draw another seed
        if loader.persistent_workers and not draws_seed and not is_stream:
            # Each of torch's iterators draws a base seed, but persistent workers have theirs
            # already. The draw comes from a new generator, so that the loader's does not advance.
            self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:  # all other settings come from the loader
        return getattr(self._loader, name)


def _channels_last(collate_fn: Collate) -> Collate:
    """Return a ``collate_fn`` with batches in channels last; a ``RingCollate`` keeps its slots."""
    if isinstance(collate_fn, RingCollate):
        return RingCollate(ChannelsLast(collate_fn.collate), slots=collate_fn.slots)
    return ChannelsLast(collate_fn)
