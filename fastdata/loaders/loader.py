"""The arguments and methods of ``DataLoader``; ``internals`` runs its epochs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from html import escape
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data import dataloader as torch_loader

from fastdata.datasets.batch import Collate, collate
from fastdata.errors import check_choices, kind_of
from fastdata.loaders.internals import CHOICES, LoaderInternals
from fastdata.loaders.iterators import CountedIterator
from fastdata.loaders.parts import Parts
from fastdata.loaders.sampler_chain import SamplerChain, length_of
from fastdata.loaders.samplers import RankSampler, StateDict, Uneven
from fastdata.machine import limits
from fastdata.machine.ranks import local_ranks
from fastdata.report import EpochReport, warn_user

if TYPE_CHECKING:
    from fastdata.loaders.internals import Workers


_T_co = TypeVar("_T_co", covariant=True)

Distributed = Literal["off", "auto", "exact"]

_HAS_IN_ORDER = "in_order" in inspect.signature(torch_loader.DataLoader).parameters  # torch 2.6

_NO_ORDER = (
    "with in_order=False batches can overtake each other, but a state only counts them: an epoch "
    "that is resumed from it may repeat some samples and leave out others. Use in_order=True."
)

_NO_STREAM = (
    "a DataLoader cannot resume an IterableDataset: only the dataset itself can return to a "
    "position, so the epoch would start from its beginning. Save the dataset's own state next to "
    "the loader's, or use a map-style dataset."
)


class DataLoader(torch_loader.DataLoader, Generic[_T_co]):  # type: ignore[type-arg]
    """torch's DataLoader. It reads with threads if the dataset can make whole batches.

    The arguments up to ``in_order`` are torch's. These differ or are new:

    - ``dataset``: any dataset. fastdata's datasets, and ``Subset`` and ``ConcatDataset`` of them,
      are read in whole batches if no step of the transform is Python code for each sample.
    - ``num_workers``: number of threads or processes; 0 reads in the training loop. ``"auto"``
      divides the usable cores (affinity, container quota) among the ranks of this machine
      (``LOCAL_WORLD_SIZE``) and leaves one core of each rank for its training loop. So it may be
      0, but is at least 1 if another argument needs workers, such as ``prefetch_factor``.
      ``fastdata.tune(dataset)`` measures which number is best.
    - ``collate_fn``: by default ``fastdata.collate``, which returns whole batches unchanged. One
      that only stacks samples and mixes them with MixUp or CutMix of torchvision or timm is
      replaced by an equal step on whole batches. If yours uses torch's global generator, it gets
      the same random numbers with any number of threads or processes: they follow from the
      dataset's ``seed`` (else from torch's base seed of the epoch) and the number of the batch. If
      its code uses Python's or NumPy's random generators, it is called in worker processes, which
      are seeded as torch seeds them.
    - ``pin_memory``: ``"auto"`` pins batches if there is a CUDA or XPU device, the size of a batch
      is known, and all batches on their way take at most an eighth of the free memory.
      ``report().pinning`` is the decision with its reason. A ``CudaPrefetcher`` pins by itself.
    - ``worker_init_fn``: called in worker processes only. If you also pass a ``collate_fn``, which
      may depend on it, the loader uses worker processes.
    - ``persistent_workers``: with threads it only has the effect that one base seed is used for
      all epochs, as in torch.
    - ``in_order``: threads always keep the order.
    - ``workers``: ``"thread"``, ``"process"`` or ``"auto"``. ``"auto"`` uses threads if the dataset
      reads whole batches and the code of ``target_transform`` uses no random generator; else it
      uses worker processes, which are seeded as torch seeds them.
    - ``distributed``: ``"off"`` (default) reads all samples on each rank, as torch does.
      ``"auto"`` divides each epoch among the ranks of ``torch.distributed``, or those of the
      launcher's environment variables. All ranks get equally many batches: a few samples are
      repeated, or with ``drop_last`` left out. ``"exact"`` is for evaluation: it gives each sample
      once, so that some ranks may get one batch more. The order depends on the dataset's ``seed``
      (None: 0) and on the epoch, which the loader counts. The ``sampler`` is then a
      ``fastdata.loaders.samplers.RankSampler``, whose states can be resumed with another number of
      ranks, or another ``batch_size``. A ``sampler`` or ``batch_sampler`` of your own is used
      unchanged.
    - ``memory_format``: ``torch.channels_last`` gives tensors of four dimensions this memory
      format. Whole batches are written in it directly; others are converted.

    ``print(loader.report())`` shows how batches are read and why, and how the latest epoch went.

    Raises:
        ValueError: an argument is not one of those allowed, or contradicts another, as in torch.

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
        added = {"workers": workers, "distributed": distributed, "memory_format": memory_format}
        check_choices(CHOICES, **added)
        for name, value in added.items():
            if not hasattr(self, name):  # a subclass may use the name for something else
                setattr(self, name, value)
        if isinstance(pin_memory, str) and pin_memory != "auto":
            raise ValueError(f"pin_memory={pin_memory!r} is neither True, False nor 'auto'")
        needs_workers = prefetch_factor or persistent_workers or multiprocessing_context or timeout
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
            _worker_count(num_workers, least=int(bool(needs_workers))),
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

    def __iter__(self) -> CountedIterator:
        return self._get_iterator()

    def _get_iterator(self) -> CountedIterator:  # torch's name for it, which subclasses override
        return self._fastdata.iterate(self)

    def check_worker_number_rationality(self) -> None:
        """Warn if there are more worker processes than cores, as torch does; not for threads.

        torch's constructor calls it.
        """
        if self.num_workers and self._fastdata.choose_engine(self).kind == "process":
            super().check_worker_number_rationality()

    if not TYPE_CHECKING:

        def __class_getitem__(cls, kinds: Any) -> GenericAlias:
            """Accept any number of type arguments: torch takes one until 2.13, then two."""
            return GenericAlias(cls, kinds)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch on which random numbers, and the order of a ``RankSampler``, depend.

        You need it only to choose another number than the loader's own count. If the dataset has no
        ``seed``, random numbers also depend on torch's base seed, which differs in each epoch.
        """
        self._fastdata.resume.set_epoch(epoch, SamplerChain.of(self))

    def report(self) -> EpochReport:
        """Return figures of the latest epoch; ``.path`` describes how batches are read, and why."""
        return self._fastdata.report()

    def show(self, n: int = 8) -> Any:
        """Return a figure of the first ``n`` images of a batch; see ``show`` of datasets.

        The batch is read by a copy of this loader: its own epochs and generators do not change.
        """
        from fastdata.datasets.showing import show_batch

        other = copy.copy(self)
        other.num_workers = 0
        other.timeout = 0  # torch's iterator refuses another one without workers
        # The copy may share its samplers with this loader, and their generators.
        chain = SamplerChain.of(self)
        ranked = chain.ranked
        before = {} if ranked is None else vars(ranked).copy()
        start = chain.capture()
        with torch.random.fork_rng(devices=[]):
            batch = next(iter(other))
        chain.restore(start, is_begun=True)
        if ranked is not None:  # ``restore`` leaves it out
            vars(ranked).update(before)
        return show_batch(batch, self._fastdata.resume.parts.datasets or [self.dataset], n)

    def _repr_html_(self) -> str:
        shown = escape(repr(self)).replace("\n", "<br>")
        tables = [dataset._repr_html_() for dataset in self._fastdata.resume.parts.datasets]
        return "<br>".join([shown, *tables])

    def __repr__(self) -> str:
        length = length_of(self)
        count = "an unknown number of" if length is None else length
        return (
            f"{type(self).__name__} of {type(self.dataset).__name__}: {count} batches of "
            f"batch_size={self.batch_size}, num_workers={self.num_workers}\n"
            f"{self._fastdata.engine.path}"
        )

    def state_dict(self) -> StateDict:
        """Return the position in the latest epoch, as a small dict of plain values.

        A batch counts when the training loop gets it, not when it is read ahead. Before the first
        batch and after the last one, the state is the beginning of the next epoch, as Lightning
        expects.

        - torch's samplers, a ``RankSampler``, and samplers with a ``state_dict`` return to their
          order: their states are included. Any other sampler must give the same indices again,
          because the state only counts its batches. The batch size must also be the same.
        - With a ``RankSampler`` (``distributed=``) the state is the position in the order of all
          ranks. The state of rank 0 can be resumed on any number of ranks, and with another batch
          size.
        - With ``in_order=False`` and worker processes the state is not exact, and for an
          ``IterableDataset`` it is empty, because only the dataset itself can return to a
          position. Both cases give a warning.
        """
        # Warnings, not errors: Lightning calls this for every loader, also if nothing is resumed.
        if isinstance(self.dataset, IterableDataset):
            warn_user(_NO_STREAM)
            return {}
        if not self.in_order and self.num_workers > 1 and self._fastdata.engine.kind == "process":
            warn_user(_NO_ORDER)
        return self._fastdata.resume.state(_identity_of(self), SamplerChain.of(self))

    def load_state_dict(self, state: StateDict) -> None:
        """Continue the epoch of ``state`` with the next iterator, after the batches it counts.

        Earlier batches are skipped without reading their samples. The order and fastdata's own
        random numbers continue as in a run that was not interrupted. Random numbers that a
        transform takes from a global generator in a worker process do not: the generator begins
        again. ``generator=`` returns to its saved state. The global generators do not change;
        restore them yourself if later epochs must be those of an uninterrupted run.

        The state is kept until the first batch is returned: Lightning may drop a first iterator
        without reading a batch from it.

        Args:
            state: the dict that ``state_dict`` returned, in this process or another one; an empty
                dict forgets a loaded state.

        Raises:
            ValueError: the state comes from a loader over a dataset of another length, with another
                sampler or order, or (without a ``RankSampler``) with another batch size. The
                message names the differences.
        """
        if state and isinstance(self.dataset, IterableDataset):
            raise ValueError(_NO_STREAM)
        self._fastdata.resume.load(state, _identity_of(self), SamplerChain.of(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, which gets its own epochs and workers."""
        state = vars(self) | {"_fastdata": self._fastdata.copied(self), "_iterator": None}
        if self._fastdata.has_own_sampler:  # copied in one call, because one refers to the other
            samplers = {name: state[name] for name in ("sampler", "batch_sampler")}
            state |= copy.deepcopy(samplers)
        if isinstance(state.get("memory_format"), torch.memory_format):
            # Pickle can write a torch.memory_format from protocol 4 on, and torch.save uses 2.
            del state["memory_format"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not hasattr(self, "memory_format"):  # left out of the pickle
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
    """Return the sampler for ``distributed="auto"`` or ``"exact"``."""
    if isinstance(dataset, IterableDataset) or length_of(dataset) is None:
        raise ValueError(
            f"distributed={distributed!r} divides the indices of a dataset among ranks, but "
            f"{kind_of(dataset)} has no indices or no length. Use distributed='off', and let the "
            "dataset give each rank its own samples."
        )
    uneven: Uneven = "drop" if drop_last else "pad"
    if distributed == "exact":
        uneven = "keep"
        if drop_last:
            raise ValueError(
                "distributed='exact' gives every sample once, but drop_last=True would leave some "
                "out. Use only one of them."
            )
    seed = Parts.find(dataset).seed  # torch's generators may differ between ranks
    return RankSampler(dataset, shuffle=shuffle, seed=seed or 0, uneven=uneven)
