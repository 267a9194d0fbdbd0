"""The loader for data larger than memory."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from fastdata.batch import collate
from fastdata.cached import CachedDataset
from fastdata.chunked.budget import ChunkPlan
from fastdata.chunked.iteration import ChunkedIter
from fastdata.chunked.order import EpochOrder, ShuffleQuality, shuffle_quality
from fastdata.chunked.pipeline import Pipeline
from fastdata.chunked.supply import Supply, Wishes
from fastdata.engine import Engine
from fastdata.iterators import Tally
from fastdata.randomness import draw_base_seed, undisturbed
from fastdata.report import EpochReport
from fastdata.resume import VERSION, Progress, check_state
from fastdata.ring import BatchRing
from fastdata.served import LoaderEpochs, Served

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ChunkedLoader"]


class ChunkedLoader:
    """Trains on data larger than memory: chunk k + 1 loads in the background while chunk k is served, then is dropped.

    Every sample comes exactly once an epoch, with the pixels that ``DataLoader`` over the same dataset held in memory
    would serve in the epoch that is set to the same number. It is no subclass of torch's loader, but has ``__iter__``
    and ``__len__``, ``dataset``, ``batch_size`` and ``drop_last``.

    Args:
        dataset: a fastdata dataset, ``Subset`` of one, or any map-style dataset of (sample, target). With
            ``storage="none"`` samples are prepared anew each epoch, by worker processes; else they are read from where
            they are kept. A path is opened as ``CachedDataset.from_cache(path, as_tensors=True)``: images come as
            tensors (C, H, W) of the pixels that the cache holds, uint8 of photographs, without any transform.
        batch_size: samples in a batch.
        memory_limit: for all memory of this process and its children, Python and torch included (the sum of their
            proportional set sizes): bytes, ``"1GiB"``, or a fraction of what is free. What is in use now, batches and
            workers are taken off, chunks get the rest, so make the loader after the model. See ``plan``. Each rank has
            a limit of its own.
        shuffle: whether to shuffle; else samples come in the order of the dataset.
        drop_last: whether to drop the last batch if it is not full. Over several ranks, samples that cannot be shared
            out evenly are dropped too; else the first ones are repeated, as torch's ``DistributedSampler`` does.
        chunk_samples: samples in a chunk, rounded down to whole batches; by default what fits.
        mix_chunks: of how many pieces of neighbouring samples a chunk is made, from all over the dataset; within the
            chunk they are mixed. Reading is sequential then, and the shuffle not quite global: see
            ``shuffle_quality``. By default 32 where samples lie on disk and are best read in sequence, elsewhere the
            shuffle is global.
        num_workers: processes that prepare samples, at most; by default the usable cores. Fewer where memory is short.
        collate_fn: as torch's; the default is ``fastdata.collate``.
        seed: of the order, which all ranks must share. Random draws of transforms follow the dataset's own seed; where
            that is None, a base seed that is drawn for each epoch from torch's generator, as by torch's loader.
        rank: which share of each epoch to serve; by default that of ``torch.distributed``, or of the environment that
            torchrun sets.
        world_size: number of shares.

    Raises:
        MemoryBudgetError: ``memory_limit`` leaves no room for two chunks of one batch.
        SampleError: none of the samples looked at can be read.

    A damaged sample raises ``SampleError`` where its batch would come, and the next batch can be asked for. Under the
    dataset's ``on_error="skip"`` it is left out, and its batch is smaller. One iterator is open at a time: the next
    one ends it.

    Example:
        >>> squares = [(torch.full((1, 2, 2), i), i * i) for i in range(10)]
        >>> with ChunkedLoader(squares, batch_size=4, memory_limit="2GiB", num_workers=1) as loader:
        ...     batches = [targets.tolist() for images, targets in loader]
        >>> [len(batch) for batch in batches], sorted(sum(batches, []))
        ([4, 4, 2], [0, 1, 4, 9, 16, 25, 36, 49, 64, 81])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        memory_limit: int | float | str,
        shuffle: bool = True,
        drop_last: bool = False,
        chunk_samples: int | None = None,
        mix_chunks: int | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.batch_size, self.drop_last, self.shuffle = batch_size, drop_last, shuffle
        self.collate_fn = collate if collate_fn is None else collate_fn
        wishes = Wishes(
            batch_size=batch_size,
            memory_limit=memory_limit,
            chunk_samples=chunk_samples,
            mix_chunks=mix_chunks,
            num_workers=num_workers,
            collate_fn=self.collate_fn,
        )
        rank, world_size = _ranks(rank, world_size)
        self._epochs = LoaderEpochs()
        self._progress = Progress(is_finished=True)
        self._resumed: dict[str, Any] | None = None
        self._iterator: weakref.ref[ChunkedIter] | None = None
        self._is_closed = False
        self._tally = Tally(Engine(kind="thread", path="no epoch has begun"))
        self._supply: Supply | None = None
        with contextlib.ExitStack() as cleanup:
            if isinstance(dataset, (str, bytes, os.PathLike)):
                dataset = cleanup.enter_context(_open_path(os.fsdecode(dataset)))
            served = _find_served(dataset, cleanup)
            self.dataset, self._data = dataset, served.dataset
            length = len(served.dataset) if served.subset is None else len(served.subset)
            _check_indices(served)
            self._order = EpochOrder(
                length=length, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
            )
            if self._order.rank_samples:
                self._supply = Supply(served, self._order, wishes)
                self._order = self._supply.order
            self._owned = cleanup.pop_all()

    # What the user sees

    def __len__(self) -> int:
        """Batches in an epoch of this rank."""
        samples = self._order.rank_samples
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> ChunkedIter:
        if self._is_closed:
            raise RuntimeError("the loader was closed; make it again to go on")
        self._end_iterator("another one of the same loader was begun")
        if self._supply is not None:
            self._supply.refresh()
        self._progress = progress = self._begin_epoch()
        supply, batches = self._supply, len(self)
        if supply is None:
            return ChunkedIter(_nothing, _raise, progress=progress, batches=0, ahead=0, tally=self._tally)
        ring = BatchRing(supply.batches_held)
        self._tally = Tally(Engine(kind="thread", path=supply.path, workers=supply.threads), ring)
        iterator = ChunkedIter(
            lambda first: supply.start(progress, first, batches, ring),
            supply.adapt,
            progress=progress,
            batches=batches,
            ahead=supply.ahead,
            tally=self._tally,
        )
        self._iterator = weakref.ref(iterator)
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Make the order and the random draws of the coming epochs those of ``epoch``, until it is set again."""
        self._epochs.set(epoch)

    @property
    def plan(self) -> ChunkPlan | None:
        """What is in memory at once; None for an empty dataset."""
        return None if self._supply is None else self._supply.plan

    def shuffle_quality(self, epoch: int = 0) -> ShuffleQuality:
        """How far the order of an epoch is from a global shuffle, of this rank; reads no data."""
        return shuffle_quality(self._order, epoch, self.batch_size)

    def report(self) -> EpochReport:
        """How the latest epoch went, complete or not; ``.path`` says which road the batches take."""
        return self._tally.report()

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest epoch stands, as a small dict of plain values.

        Batches count once they are handed over. After the last one the state is the beginning of the next epoch.
        """
        if self._resumed is not None:
            return copy.deepcopy(self._resumed)
        progress = self._progress
        is_over = progress.is_finished or progress.first >= len(self)
        if is_over:
            with undisturbed():
                progress = Progress(epoch=self._epochs.coming(), base_seed=self._draw_base_seed())
        return {
            "version": VERSION,
            "epoch": progress.epoch,
            "base_seed": progress.base_seed,
            "num_yielded": progress.first,
            "is_begun": not is_over,
            "loader": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the one of ``state``, without the batches handed over before; only the rest is read.

        Raises:
            ValueError: the state is of a loader over another dataset, or with other batches or another order.
        """
        if state:
            check_state(state, self._identity())
        self._resumed = copy.deepcopy(state) or None

    def close(self) -> None:
        """End what runs and give the memory back; batches handed over stay valid. Idempotent."""
        self._is_closed = True
        self._end_iterator("the loader was closed")
        if self._supply is not None:
            self._supply.close()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Epochs

    def _begin_epoch(self) -> Progress:
        """Go on to the next epoch, or to the one of a loaded state."""
        state, self._resumed = self._resumed, None
        if state is None:
            self._epochs.begin(self._epochs.coming(), self._data)
            return Progress(epoch=self._epochs.current, base_seed=self._draw_base_seed())
        self._epochs.resume(state, self._data)
        if not state["is_begun"]:
            self._draw_base_seed()  # torch's generator moves on as at the start of any epoch
        return Progress(epoch=self._epochs.current, base_seed=state["base_seed"], first=state["num_yielded"])

    def _draw_base_seed(self) -> int | None:
        """Draw from torch's generator as torch's loader does for an epoch, where random draws are made from it."""
        return draw_base_seed() if self._data.options.seed is None else None

    def _end_iterator(self, reason: str) -> None:
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None:
            iterator.end(reason)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same batches."""
        order = asdict(self._order)
        del order["rank"]  # all ranks stand at the same batch: one's state does for all
        if order["piece_samples"] == 1:
            order["chunk_samples"] = None  # says nothing about the order
        return {"batch_size": self.batch_size, **order}


def _nothing(first_batch: int) -> Pipeline:
    raise LookupError("an empty dataset has no batches")


def _raise(error: Exception) -> None:
    raise error


def _find_served(dataset: Any, owned: contextlib.ExitStack) -> Served:
    """The fastdata dataset behind what the user gives, or one made of it.

    Args:
        dataset: as given.
        owned: gets the close of a dataset that is made here.

    Raises:
        TypeError: it cannot be read by index.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"ChunkedLoader reads samples by index, which {type(dataset).__name__} has no way for. Give it a map-style "
            "dataset, such as fastdata.ImageFolder(root, storage='none')."
        )
    served = Served.find(dataset)
    if served is not None:
        return served
    return Served(owned.enter_context(CachedDataset(dataset, storage="none", progress=False)), None)


def _check_indices(served: Served) -> None:
    """Check that each index is a sample's.

    Raises:
        ValueError: there are more, which only the dataset's own ``__getitem__`` knows the samples of.
    """
    dataset = served.dataset
    count = len(dataset) if served.subset is None else int(served.subset.max(initial=-1)) + 1
    if count > dataset.sample_count:
        raise ValueError(
            f"ChunkedLoader brings the sample of each index, but {type(dataset).__name__} has {count} indices and "
            f"{dataset.sample_count} samples. Use a DataLoader, or leave __len__ as it is."
        )


def _open_path(path: str) -> CachedDataset:
    """Open a cache; see ``CachedDataset.from_cache``.

    Raises:
        TypeError: the path is no cache; says what to give.
    """
    try:
        return CachedDataset.from_cache(path, as_tensors=True)
    except FileNotFoundError as missing:
        raise TypeError(
            f"{path!r} is neither a dataset nor a cache; open it first, as in ImageFolder({path!r}, storage='none')"
        ) from missing


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which share to serve, of how many.

    Raises:
        ValueError: there is no such share.
    """
    is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world_size is None:
        world_size = torch.distributed.get_world_size() if is_running else int(os.environ.get("WORLD_SIZE", "1"))
    if rank is None:
        rank = torch.distributed.get_rank() if is_running else int(os.environ.get("RANK", "0"))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of the world_size={world_size} ranks, which count from 0")
    return rank, world_size
