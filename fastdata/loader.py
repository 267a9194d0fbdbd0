"""The DataLoader: torch's, with a thread engine for datasets that serve whole batches.

Threads start in microseconds, share the dataset without copying anything, and hand batches over by reference. Kernels
leave the GIL while they copy, so threads run side by side.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data import dataloader as torch_loader

from fastdata import machine
from fastdata.batch import IndexBatch, collate
from fastdata.engine import Engine, Workers, choose_engine, choose_workers, decide_pinning
from fastdata.iterators import HELD_BY_USER, InlineIter, Prefetched, ProcessIter, Tally, ThreadIter
from fastdata.randomness import Randomness, draw_base_seed, undisturbed
from fastdata.report import EpochReport
from fastdata.resume import VERSION, Bookmark, IndexBatches, Progress, ReadAhead, check_state
from fastdata.ring import BatchRing
from fastdata.served import LoaderEpochs, Served

__all__ = ["DataLoader"]

_T_co = TypeVar("_T_co", covariant=True)
_TORCH_ARGUMENTS = inspect.signature(torch_loader.DataLoader.__init__).parameters


class DataLoader(torch_loader.DataLoader[_T_co]):
    """torch's DataLoader with torch's arguments, and an engine of threads where the dataset serves whole batches.

    Args:
        dataset: any dataset. Whole batches are served by fastdata's datasets, and ``Subset`` of them, when no step of
            the transform needs Python per sample.
        batch_size: as in torch, like every argument up to ``in_order``.
        shuffle: as in torch.
        sampler: as in torch.
        batch_sampler: as in torch.
        num_workers: threads or processes; 0 reads in the training loop. ``"auto"`` takes the usable cores (affinity,
            container quota) shared among the ranks of this machine (``LOCAL_WORLD_SIZE``), less one for the training
            loop: 0 on a single core, but 1 where another argument asks for workers. The attribute is the number.
        collate_fn: as in torch; the default is ``fastdata.collate``, which takes whole batches as they are.
        pin_memory: as in torch, or ``"auto"`` to pin if there is a CUDA or XPU device, batches are large enough to gain
            from it, and all that are under way are a small part of the free memory; ``report()`` says what was decided
            and why. The attribute is True or False. A ``CudaPrefetcher`` pins by itself.
        drop_last: as in torch.
        timeout: as in torch.
        worker_init_fn: as in torch; called in worker processes only.
        multiprocessing_context: as in torch.
        generator: as in torch.
        prefetch_factor: as in torch.
        persistent_workers: as in torch; threads only draw their base seed once, as torch then does.
        pin_memory_device: as in torch.
        in_order: as in torch; threads always keep the order.
        workers: ``"thread"``, ``"process"``, or ``"auto"`` for threads where whole batches are served.

    ``print(loader.report())`` says which road batches take and why, and how the latest epoch went.

    Example:
        >>> from fastdata import CachedDataset
        >>> dataset = CachedDataset([(torch.full((1, 2, 2), i), i) for i in range(5)], progress=False)
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
        collate_fn: Callable[[list[Any]], Any] | None = None,
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
    ) -> None:
        if workers not in ("auto", "thread", "process"):
            raise ValueError(f"workers={workers!r} is not one of 'auto', 'thread', 'process'")
        if isinstance(pin_memory, str) and pin_memory != "auto":
            raise ValueError(f"pin_memory={pin_memory!r} is neither True, False nor 'auto'")
        if isinstance(num_workers, str):
            if num_workers != "auto":
                raise ValueError(f"num_workers={num_workers!r} is neither a number nor 'auto'")
            asks = (
                prefetch_factor is not None or persistent_workers or multiprocessing_context is not None or timeout > 0
            )
            num_workers = choose_workers(machine.usable_cores(), machine.local_ranks(), asks_for_workers=asks)
        makes_batches = batch_size is not None or batch_sampler is not None
        self.workers = workers
        self._served = Served.find(dataset) if makes_batches else None
        self._epochs = LoaderEpochs()
        self._bookmark = Bookmark()
        self._resumed: dict[str, Any] | None = None
        self._ring: BatchRing | None = None
        self._prefetched: Prefetched | None = None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate if collate_fn is None and makes_batches else collate_fn,
            False if pin_memory == "auto" else pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if "in_order" in _TORCH_ARGUMENTS else {}),
        )
        self.in_order = in_order
        self._pinning = decide_pinning(self, pin_memory)
        self.pin_memory = self._pinning.pin
        self._tally = Tally(choose_engine(self), pinning=self._pinning)

    def __iter__(self) -> Any:
        return self.iterate()

    def iterate(self, prefetched: Prefetched | None = None) -> Any:
        """Begin an epoch, as ``iter`` does.

        Args:
            prefetched: how, where a prefetcher reads it; then ``pin_memory="auto"`` leaves pinning to that.
        """
        if self._served:
            self._served.dataset.refresh()
        engine = choose_engine(self)
        if engine.kind == "thread":
            self._iterator = None  # persistent worker processes that have done their part
        self._prefetched = prefetched
        self._bookmark.progress, self._bookmark.handed = self._begin_epoch(), None
        progress = self._bookmark.progress
        with undisturbed() if progress.is_begun else nullcontext():
            seen = self._rewind_stream(progress) if isinstance(self.dataset, IterableDataset) else 0
            iterator: Any = super().__iter__() if engine.kind == "process" else self._read_ahead(engine)
            iterator._progress = progress
            for _ in range(seen):
                next(iterator, None)
        if self._leaves_pinning:
            iterator._pin_memory = False
        ring = getattr(iterator, "arrivals", prefetched.ring if prefetched else self._ring)
        iterator._tally = self._tally = Tally(engine, ring, self._pinning)
        self._prefetched = None
        return iterator

    def ring_slots(self, held: int) -> int:
        """How many buffers threads and a user who holds ``held`` batches need, so that none is allocated anew."""
        return choose_engine(self).workers * (self.prefetch_factor or 0) + 1 + held

    def read_ahead(self) -> ReadAhead:
        """Count the batches of the epoch just begun where they are handed over; for a prefetcher."""
        return ReadAhead(self._bookmark)

    def set_epoch(self, epoch: int) -> None:
        """Make the random draws of the coming epochs those of ``epoch``, until it is set again.

        Where the dataset's ``seed`` is None they still follow the base seed of each epoch.
        """
        self._epochs.set(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest epoch stands, as a small dict of plain values.

        Batches count once they are handed to the user, not when they are read ahead. Once the last one is, or before
        the first, the state is the beginning of the next epoch: Lightning goes on there, and an epoch without a batch
        would end its fit. A sampler with a ``state_dict`` adds its own.
        """
        held = self._resumed or self._bookmark.seen.resumed_from
        if held is not None:
            return copy.deepcopy(held)
        progress = self._bookmark.seen
        is_over = progress.is_finished or (progress.first == _length(self._index_sampler) and not progress.ahead)
        if is_over:
            progress = self._coming_epoch()
        return {
            "version": VERSION,
            "num_yielded": progress.first,
            "ahead": list(progress.ahead),
            "is_begun": not is_over,
            "epoch": progress.epoch,
            "base_seed": progress.base_seed,
            "keeps_seed": progress.keeps_seed,
            "start": copy.deepcopy(progress.start) or self._randomness().capture(),
            "loader": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the one of ``state``, without the batches that were handed over before it was saved.

        The state holds until a batch is handed over: Lightning may drop a first iterator without asking it for one.
        Their samples are not read again; an ``IterableDataset`` is read from its beginning, its first batches are
        dropped. ``generator`` is put back to where it was; the global random generators are left as they are, and
        decide later epochs. Resumed are the order and fastdata's own draws; what a transform draws in worker processes
        from global generators begins anew.

        Args:
            state: what ``state_dict`` returned, here or in another process; an empty dict forgets a loaded state.

        Raises:
            ValueError: the state is of a loader over another dataset, or with other batches.
        """
        if state:
            check_state(state, self._identity())
        self._resumed = copy.deepcopy(state) or None
        self._bookmark.progress.resumed_from = self._bookmark.seen.resumed_from = None

    def report(self) -> EpochReport:
        """How the latest epoch went, complete or not; ``.path`` says which road the batches take and why."""
        return self._tally.report()

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does; threads are never more than cores."""
        if choose_engine(self).kind == "process":
            super().check_worker_number_rationality()

    def _read_ahead(self, engine: Engine) -> ThreadIter:
        if self._prefetched is not None:
            return ThreadIter(self, _prefetched_reader(self, self._prefetched), threads=engine.workers)
        if self._ring is None:
            self._ring = BatchRing(self.ring_slots(HELD_BY_USER))
        return ThreadIter(self, _reader(self, self._ring), threads=engine.workers)

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return InlineIter(self)
        self.check_worker_number_rationality()
        held = self._prefetched.held if self._prefetched else HELD_BY_USER
        return ProcessIter(self, held=held, **({"pin_memory": False} if self._leaves_pinning else {}))

    @property
    def _leaves_pinning(self) -> bool:
        """Whether a prefetcher pins what torch would pin once more."""
        return self._pinning.is_own_choice and self._prefetched is not None

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators draw indices from; here with the visits that random draws are made from."""
        sampler = super()._index_sampler
        if isinstance(self.dataset, IterableDataset):
            return sampler
        return IndexBatches(sampler, self._served, self._randomness(), self._bookmark)

    # Resuming

    def _begin_epoch(self) -> Progress:
        """Go on to the next epoch, or to the one of a loaded state."""
        state, self._resumed = self._resumed or self._bookmark.seen.resumed_from, None
        kept = self._kept_seed
        if state is None:
            if self._served:
                self._epochs.begin(self._coming_number(), self._served.dataset)
            return Progress(epoch=self._epochs.current, base_seed=kept, keeps_seed=kept is not None)
        if self._served and state["epoch"] is not None:
            self._epochs.resume(state, self._served.dataset)
        return Progress(
            epoch=self._epochs.current,
            start=state["start"],
            is_begun=state["is_begun"],
            base_seed=state["base_seed"],
            keeps_seed=kept is not None or state["keeps_seed"],
            first=state["num_yielded"],
            ahead=tuple(state["ahead"]),
            resumed_from=state,
        )

    def _coming_epoch(self) -> Progress:
        """How the next epoch would begin if it began now."""
        randomness, kept = self._randomness(), self._kept_seed
        with undisturbed(randomness.generators):
            seed = draw_base_seed(self.generator) if kept is None else kept
            return Progress(
                epoch=self._coming_number() if self._served else None,
                start=randomness.capture(),
                base_seed=seed,
                keeps_seed=kept is not None,
            )

    def _coming_number(self) -> int:
        """Number of the epoch that would begin now, as random draws count it: those of a new base seed from 0."""
        assert self._served is not None
        follows_base = self._served.dataset.options.seed is None
        return self._epochs.coming(is_counted_anew=follows_base and self._kept_seed is None)

    @property
    def _kept_seed(self) -> int | None:
        """The base seed of the latest epoch where workers persist, for which torch draws one only once."""
        return self._bookmark.progress.base_seed if self.persistent_workers and self.num_workers > 0 else None

    def _rewind_stream(self, progress: Progress) -> int:
        """Draw from where a resumed stream began; return how many of its batches were seen."""
        if progress.start is None or not progress.is_begun:
            progress.start = self._randomness().capture()
            return 0
        self._randomness().restore(progress.start)
        return progress.first

    def _randomness(self) -> Randomness:
        is_stream = isinstance(self.dataset, IterableDataset)
        return Randomness.behind(None if is_stream else super()._index_sampler, self.generator)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same batches."""
        randomness = self._randomness()
        identity = {
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "generators": len(randomness.generators),
        }
        if isinstance(self.dataset, IterableDataset):
            return identity | {"num_workers": self.num_workers}
        lengths = {"dataset_length": _length(self.dataset), "sampler_length": _length(self.sampler)}
        return lengths | identity | {"sampler": randomness.name}


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _reader(loader: DataLoader[Any], ring: BatchRing) -> Callable[[Any], Any]:
    """Make the function that turns a batch's indices into a batch, from any thread; it must not hold the iterator."""
    collate_fn, served = loader.collate_fn, loader._served
    assert collate_fn is not None
    dataset = loader.dataset if served is None else served.fetched(loader.dataset)

    def read(indices: IndexBatch) -> Any:
        if served is None or served.obstacle is not None:  # asked anew: the transform may have been replaced meanwhile
            return collate_fn(_read_samples(dataset, indices))
        if collate_fn is collate:
            return served.dataset.read_batch(indices, ring)
        return collate_fn(served.dataset.sample_batch(indices, ring))

    return read


def _prefetched_reader(loader: DataLoader[Any], prefetched: Prefetched) -> Callable[[Any], Any]:
    """Make the function for a prefetcher: it may finish batches on the device."""
    stored, ring = prefetched.stored, prefetched.ring
    if stored is None:
        return _reader(loader, ring)
    return lambda indices: stored.read(indices, ring)


def _read_samples(dataset: Any, indices: Any) -> list[Any]:
    if getattr(dataset, "__getitems__", None):
        samples: list[Any] = dataset.__getitems__(indices)
        return samples
    return [dataset[index] for index in indices]
