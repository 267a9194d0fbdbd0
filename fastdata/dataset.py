"""Datasets: torch map-style datasets composed of samples, kept or read anew, the plan of a transform, and its program.

``CachedDataset`` is any dataset, prepared once; those of image files are in folder.py. ``read_for_device`` is what a
prefetcher reads whose device runs the batch ops.

Shape letters: N stored samples, B batch, C channels, H W size sent, h w size served.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from difflib import get_close_matches
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

import numpy as np
from torch.utils.data import Dataset, Subset, get_worker_info

from fastdata import core
from fastdata.batch import IndexBatch, SharedVisits
from fastdata.describe import describe_dataset
from fastdata.draws import sample_keys
from fastdata.errors import SampleError, StoreGoneError, kind_of
from fastdata.images import (
    Bound,
    OpenedImages,
    Resize,
    SampleSpec,
    decoder_of,
    shown_class,
    tensor_class,
)
from fastdata.memory import StoragePlan, StorageReport, format_bytes
from fastdata.prepare import (
    KeptSamples,
    OnError,
    Options,
    Prepared,
    ReadPath,
    Steps,
    is_fetched,
    prepare_storage,
    read_path,
    report_storage,
)
from fastdata.reader import CLOSED, Lane, Lease, Reader
from fastdata.report import log, warn_user
from fastdata.ring import BatchRing
from fastdata.shared import ListView, SampleTable, position_of
from fastdata.sources import Columns, DatasetSource, FileSource, ItemForm, Source
from fastdata.stores.readers import Store, UndecodableError
from fastdata.transforms import (
    TransformPlan,
    Views,
    describe_steps,
    fingerprint,
    is_same,
    plan_pairs,
    plan_transform,
    split_upright,
)
from fastdata.transforms.cpu import Program
from fastdata.transforms.device import device_obstacle
from fastdata.transforms.steps import cure_for, flatten, is_random, known_name

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Self, Unpack

    from fastdata.cache import Listing

_Init = TypeVar("_Init", bound=Callable[..., None])


class DatasetOptions(TypedDict, total=False):
    """The keyword arguments that all fastdata datasets share.

    Attributes:
        storage: ``"shared"`` keeps prepared samples in shared memory; ``"compressed"`` keeps them encoded there, and
            decodes on every read; ``"disk"`` keeps them in ``cache_dir``; ``"none"`` keeps nothing and prepares on
            every read; ``"auto"`` (default) is ``"disk"`` where ``cache_dir`` is given, else takes the first of the
            others that fits the memory budget. ``"device"``: like ``"shared"``, and each ``CudaPrefetcher`` copies all
            of them to its GPU once, to gather batches there; never chosen by ``"auto"``.
        codec: how ``"compressed"`` samples, or those on disk, are encoded. ``"source"``: their own files as they are,
            prepared on every read. ``"lz4"``, ``"zstd"``: lossless. ``"jpeg"``: lossy. An object with
            ``encode(array) -> bytes`` and ``decode(memoryview, out)``. A tuple of these, one for each part of a sample.
            ``"auto"`` (default): the lossless one that decodes fastest of those that fit, tried on samples of the data,
            see ``storage_report``; on disk none where samples fit as they are.
        resize: size in pixels that images are resized to before they are stored, as torchvision's ``Resize``: an int
            for the shorter side, or (height, width); or ``"short:320"``, ``"long:500"``: at most that, never enlarged.
        fill: ``"eager"`` prepares all samples now, ``"lazy"`` each on its first read. ``"auto"`` (default) is lazy
            where the memory that samples need follows from the transform, as it may for image files, else eager;
            without a transform image files wait for one, or for the first read.
        memory_limit: the most memory to use: bytes, ``"8GiB"``, or a fraction of what is free.
        progress: show a progress bar on standard error; default: True.
        seed: of the random draws of batch ops. ``None`` (default) takes the base seed that torch's loaders draw in each
            epoch, so that ``torch.manual_seed`` and ``generator=`` decide; with a number draws depend on it, the epoch
            and the sample only.
        batch_ops: ``"auto"`` (default) runs known random transforms on whole batches, with fastdata's own draws;
            ``"off"`` runs them per sample exactly as written.
        on_error: ``"raise"`` (default), or ``"skip"`` to leave out samples that cannot be prepared, with one warning.
        num_workers: threads that prepare, or processes where code of your own reads or prepares samples; default: all
            usable cores.
        cache_dir: folder that keeps prepared samples for the next run, which maps them into memory and prepares only
            those whose file has changed since. The page cache holds one copy for all workers, ranks and runs. It is
            found by the prepare part, the codec and the files (relative path, size, time); any number of datasets may
            share a folder. Not with a ``storage`` in memory. Every sample is held against a checksum when it is first
            read.
        cache_key: stands for what fastdata cannot see: the samples of a dataset that does not list its files in
            ``samples``, and what only C code knows of steps and loaders. Change it whenever these change.
        storage_options: for URLs, of files and of ``cache_dir``: what their file system in fsspec takes, such as
            credentials. They get into no pickle, cache or message.
        local_cache: folder in which all runs and ranks of a machine keep what they need of caches behind URLs; by
            default ``~/.cache/fastdata/remote``.
        local_limit: the most disk space for it: bytes, ``"200GiB"``, or a share of what is free; by default half. What
            was needed least lately leaves first.
        share: ``"auto"`` (default): ranks of one machine (torchrun, mpirun, srun, ``mp.spawn``, Lightning, Accelerate)
            that make the same dataset prepare it together and hold one copy. Where fastdata cannot see all of a dataset
            that lists neither ``samples`` nor ``targets``, only with ``cache_key``. ``"off"``: each rank its own.
        return_index: add each sample's index to its item, as the last value or under the key ``"index"``: what datasets
            are wrapped for that keep a loss or a weight of each sample. Whole batches have the indices as int64 (B,).
            Those of a ``Subset`` or ``ConcatDataset`` are of the dataset behind it.
        engine: what writes a cache: ``"local"`` (default), processes of this machine; ``"ray"``, a Ray cluster (extra
            ``ray``); or any ``concurrent.futures.Executor``. All but the first write shards, which a build that was
            stopped goes on from; the result does not depend on who writes them.
        shard_bytes: about how large a shard is, as ``memory_limit``; ``"local"`` then writes shards, too. Default: 16
            to 64 MiB, or as much as 200 shards take.
    """

    storage: Literal["auto", "device", "shared", "compressed", "disk", "none"]
    codec: Any
    resize: Bound | None
    fill: Literal["auto", "eager", "lazy"]
    memory_limit: int | float | str | None
    progress: bool
    seed: int | None
    batch_ops: Literal["auto", "off"]
    on_error: OnError
    num_workers: int | None
    cache_dir: str | os.PathLike[str] | None
    cache_key: str | None
    storage_options: Mapping[str, Any] | None
    local_cache: str | os.PathLike[str] | None
    local_limit: int | float | str | None
    share: Literal["auto", "off"]
    return_index: bool
    engine: Literal["local", "ray"] | Executor
    shard_bytes: int | str | None


def show_options(init: _Init) -> _Init:
    """Have ``help`` and ``inspect.signature`` list the options of an ``__init__``, with their defaults."""
    shown = inspect.signature(init)
    own = [each for each in shown.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = inspect.signature(Options).parameters.values()
    init.__signature__ = shown.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return init


def read_options(made: type, given: Mapping[str, Any]) -> Options:
    """The options that a dataset's constructor was given; a TypeError for a name that none of its arguments has."""
    for name in given:
        if name not in Options.__dataclass_fields__:
            close = get_close_matches(name, inspect.signature(made).parameters, n=1)
            advice = f"Did you mean {close[0]}=?" if close else f"help({made.__name__}) lists those it has."
            raise TypeError(f"{made.__name__}() has no argument {name}=. {advice}")
    return Options(**given)


class _Item:
    """The item of a batch that a subclass's own ``__getitem__`` is making: says what its reads are drawn from.

    A dataset's first read is on the item's visit if it is of the same index. All others are on visits of their own that
    follow from it, so that two crops of one image differ, and are the same whoever reads them.
    """

    def __init__(self, batch: IndexBatch, k: int) -> None:
        self._position, self._visit, self._seed = batch.positions[k : k + 1], batch.visits[k : k + 1], batch.seed
        self._reads: Counter[int] = Counter()

    def batch_of(self, position: int, dataset: PreparedDataset) -> IndexBatch:
        read = self._reads[id(dataset)]
        self._reads[id(dataset)] += 1
        visit = self._visit
        if read or position != self._position[0]:
            visit = sample_keys(read, self._visit, self._position).view(np.int64)
        return IndexBatch([position], np.array([position]), visit, dataset.seed_of(self._seed))


_ITEM: ContextVar[_Item | None] = ContextVar("fastdata_item", default=None)


_ENDING = threading.RLock()
"""Held where a dataset's first read has it prepared: by one of several threads."""
_ADVISED_PX = 256
"""Shorter side of images that are prepared for crops of 224 px."""
_LOOKED_AT = 8
_WORTH_SHARE = 0.8
"""Of the memory: what is saved beyond it is not worth a word."""
_WORTH_TIMES = 1.1
"""Of the rate: less of a gain may be chance."""


@dataclass(frozen=True, slots=True)
class StandardTransform:
    """torchvision's: a transform of the sample and one of the target, called with both."""

    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None

    def __call__(self, sample: Any, target: Any) -> tuple[Any, Any]:
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target


class PreparedDataset(Dataset[Any]):
    """What all fastdata datasets are, once their source is known; made by its subclasses only.

    A subclass of these may have a ``__getitem__``, ``__getitems__`` or ``__len__`` of its own, over those here: then
    they are asked for every batch, and what an index means is theirs to say.
    """

    storage_plan: StoragePlan
    skipped: list[SampleError]
    target_transform: Callable[[Any], Any] | None
    pair_transform: Callable[[Any, Any], Any] | None = None
    """Takes sample and target together, in place of the two transforms of one of them."""
    epoch: int | None = None
    """As set by ``set_epoch``; None where loaders count theirs."""
    _was_read = False
    is_fallback_said = False
    """Whether a loader has warned of what keeps whole batches from being served."""
    batch_ring: BatchRing | None = None
    """Where ``__getitems__`` takes memory from; set in worker processes."""
    options: Options
    _samples: KeptSamples | Source
    _source: Source | None = None
    """What samples were read from, to prepare them again for another transform; copies elsewhere do not know it."""
    _views: weakref.WeakSet[PreparedDataset]
    """The datasets over the same kept samples; the last one to be closed gives their memory back."""
    table: SampleTable | None
    """Paths and targets; None where they are asked of the source."""
    _is_waiting = False
    """Whether samples are to be prepared once one is read, or there is a transform."""
    _visits: SharedVisits
    _reader: Reader
    """What is served now, and how; once the dataset is closed, how it was."""
    _lease: Lease
    """The reader, for those who read by it."""
    _leases: weakref.WeakSet[Lease]
    """It, and those that epochs began with before another transform came."""
    _copies: weakref.WeakSet[PreparedDataset]
    """That epochs read by, and that end with this one."""
    _seen: Any
    """Of the transform, to notice steps that are changed in place."""
    _transform: Callable[[Any], Any] | None
    _first_steps: tuple[Callable[[Any], Any], ...] = ()
    _stored_after: tuple[int, str] | None = None
    """How many leading steps of the transform samples are stored after, and their key; None where none are stored."""
    _stored_text = ""
    """These steps as they were then, for errors."""
    _unfit_after: str | None = None
    """The text of the steps that samples did not fit after, so that ``storage="auto"`` keeps none."""
    _is_upright = False
    """Whether samples were turned as their EXIF says before they were stored, so that nothing of it is missed."""
    _is_remote = False
    """Whether samples that are not kept are fetched from behind a URL."""
    _list_name: str | None = ""
    """Of the file that lists the samples, which may change; empty where a folder does, None for a list made by code."""

    # Making

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
        """Choose the storage and fill it; the table has paths and targets where they are known beforehand."""
        self.options, self._transform, self.target_transform = options, transform, target_transform
        resize = None if options.resize is None else Resize(options.resize)
        self._first_steps = tuple(step for step in (prepare, resize) if step is not None)
        is_asked_for = options.fill != "auto" or options.cache_dir is not None or options.on_error == "skip"
        is_asked_for = is_asked_for or options.storage == "none" or len(source) == 0  # which take nothing
        if transform is None and table is not None and not is_asked_for:
            # timm assigns a transform later: as decoded, samples may take ten times as much as after its first steps.
            self._source, self._is_remote = source, is_fetched(source)
            reason = "chosen at the first read, or once there is a transform"
            self._serve(Prepared(storage_plan=StoragePlan(storage="none", reason=reason)), source, table)
            self._is_waiting = True
        else:
            self._prepare(source, table)

    def _end_waiting(self) -> None:
        with _ENDING:
            if not self._is_waiting:  # another thread was first
                return
            if get_worker_info() is None:
                self._prepare(self._origin(), self.table)
            else:
                reason = "storage='none': the first read came in a worker process, which has nobody to share with"
                warn_user(
                    f"{reason}. Files are decoded at each read. Give the {type(self).__name__} a transform, or "
                    "fill='eager', or read it by fastdata.DataLoader."
                )
                self.storage_plan = StoragePlan(storage="none", reason=reason)
                self._compile()
            self._is_waiting = False

    def _prepare(self, source: Source, table: SampleTable | None) -> None:
        options, self._source, self._is_remote = self.options, source, is_fetched(source)
        plan = self._split(self._transform, batch_ops=options.batch_ops)
        steps, path = self._steps(plan), self._path(source, plan)
        self._is_upright = "exif_transpose" in map(known_name, steps)
        if options.cache_dir is None or len(source) == 0:
            prepared = prepare_storage(path, options, table, by=(*steps, getattr(source, "loader", None)))
        else:
            # 20 ms with filelock, which only caches take
            from fastdata.cache import prepare_on_disk

            listing, root = self._list_files(source)
            is_pil = False
            if isinstance(source, FileSource):
                opened = describe_steps([source.loader], options.cache_key)
                opened += f", {self._list_name}" if self._list_name else ""
                is_pil = decoder_of(source.loader) is not None
            else:
                opened = _describe_source(cast("DatasetSource", source), listing, options.cache_key)
            text = describe_steps(steps, options.cache_key, is_pil=is_pil)
            where: dict[str, Any] = {"listing": listing, "root": root, "is_own_list": self._list_name is None}
            prepared = prepare_on_disk(path, options, table, opened=opened, steps=text, **where)
        self._was_read = False
        is_kept, key = prepared.kept is not None, plan.prepare_key()
        self._stored_after = (len(plan.prepare), key) if is_kept else None
        self._stored_text = plan.prepare_text
        self._unfit_after = key if options.storage == "auto" and not is_kept and len(source) else None
        self._serve(prepared, source, table)

    def _list_files(self, source: Source) -> tuple[Listing | None, str]:
        """The files of a source and their folder, for a cache; nothing where samples are no files."""
        return None, ""

    def _serve(self, prepared: Prepared, source: Source, table: SampleTable | None) -> None:
        """Serve what is kept, else the source, whose paths and targets the table has where they are known."""
        self.storage_plan, self.skipped, kept = prepared.storage_plan, prepared.skipped, prepared.kept
        self._samples, self.table = (source, table) if kept is None else (kept, kept.table)
        self._visits, self._views = SharedVisits(self.sample_count), weakref.WeakSet([self])
        self._leases, self._copies = weakref.WeakSet(), weakref.WeakSet()
        modes = [] if kept is None else kept.modes()
        if len(modes) > 1 and self.pair_transform is None and self._split(self._transform, form="pil").is_batched:
            warn_user(
                f"images are of several modes, {', '.join(modes)}, and a batch is of one. Convert them before they are "
                "stored: prepare=lambda image: image.convert('RGB')."
            )
        self._compile()
        advice = ""
        with contextlib.suppress(ValueError, SampleError, UndecodableError):  # of which whoever reads it is told
            advice = self._resize_advice()
        if advice:
            log.info("%s", advice)
            self.storage_plan = self.storage_plan._replace(reason=f"{self.storage_plan.reason}; {advice}")

    def _split(self, transform: Callable[[Any], Any] | None, **facts: Any) -> TransformPlan:
        """Split a transform; a ValueError if it does not begin with the steps that samples are stored after."""
        count, key = self._stored_after or (None, None)
        plan = plan_transform(transform, prepared=count, **facts)
        if key is not None and plan.prepare_key() != key:
            raise ValueError(
                f"samples are stored after {self._stored_text or 'no step'}, but the transform now begins with "
                f"{plan.prepare_text or 'none'}. Give it the same first steps, or assign another "
                "transform to dataset.transform in the process that made the dataset, which prepares samples again."
            )
        return plan

    def _compile(self) -> None:
        options, samples = self.options, self._samples
        seen = fingerprint((self._transform, self.pair_transform))
        lanes: tuple[Lane, ...] = (Lane(None, None),)
        path = None
        beforehand = self._first_steps
        if isinstance(samples, KeptSamples):
            spec, shape = samples.images.spec, samples.images.shape(0)
            is_image = len(shape) == 3
            obstacle = "samples have several parts" if samples.is_tuple else core.obstacle()
            facts: dict[str, Any] = {"form": spec.form, "dtype": spec.dtype, "batch_ops": options.batch_ops}
            facts["channels"] = _channels_of(samples.images) if is_image else None
            facts["obstacle"] = obstacle or (None if is_image else f"samples have {len(shape)} dimensions")
            plan = self._split(self._transform, **facts)
            if any(view.batch_texts for view in plan.each) or (plan.views and plan.is_batched):
                with samples.naming_damage():
                    lanes = _lanes(plan, spec, shape)
            elif spec.is_dense:
                lanes = (Lane(None, (shape, np.dtype(spec.dtype))),)
        else:
            known = "last" if options.batch_ops == "auto" else "off"
            plan = self._split(self._transform, batch_ops=known, obstacle=core.obstacle())
            self._is_upright = "exif_transpose" in map(known_name, self._steps(plan))
            path = self._path(samples, plan, pixels_only=False)
            if self._decodes_itself and self.pair_transform is None and core.obstacle() is None:
                every, before = (*self._first_steps, self._transform), -len(self._first_steps)
                upright, served = split_upright(every)
                whole = plan_transform(
                    served, channels=3, batch_ops=options.batch_ops, prepared=0, first=before + upright
                )
                spec = SampleSpec(shape=None, dtype="uint8", form="pil")
                decoding = _lanes(whole, spec, (3, 1, 1)) if whole.is_batched else ()
                if decoding and all(lane.output for lane in decoding):
                    plan, lanes, beforehand = whole, decoding, ()
                    self._is_upright = upright
        if self.pair_transform is not None:
            if options.return_index:
                raise ValueError("return_index=True goes with transform= and target_transform=, not with transforms=")
            plan = self._plan_pairs()
            lanes = (Lane(None, None),)
            if isinstance(samples, KeptSamples) and not plan.per_sample:
                lanes = _lanes(plan, samples.images.spec, samples.images.shape(0))
                if plan.mask is not None:
                    lanes += _lanes(plan.mask, samples.stores[1].spec, samples.stores[1].shape(0), part=1)
        plan = replace(plan, beforehand=beforehand)
        decoded = SampleSpec(shape=None, dtype="uint8", form="pil")
        lasts = tuple(Program(view.last_ops, decoded) if view.last_steps else None for view in plan.each)
        outputs = [lane.output for lane in lanes if lane.output is not None]
        reader = Reader(
            samples=samples,
            table=self.table,
            visits=self._visits,
            seed=options.seed,
            plan=plan,
            lanes=lanes,
            outputs=outputs if len(outputs) == len(lanes) else None,
            lasts=lasts,
            path=path,
            target_transform=self.target_transform,
            pair_transform=self.pair_transform,
            is_upright=self._is_upright,
            is_remote=self._is_remote,
            return_index=options.return_index,
        )
        self._seen = seen
        self._read_by(reader)

    def _read_by(self, reader: Reader) -> None:
        """Have coming epochs read by it; those that have begun go on as they did."""
        self._reader, self._lease = reader, Lease(reader)
        self._leases.add(self._lease)

    def _plan_pairs(self) -> TransformPlan:
        """Split ``transforms``, which takes sample and target together."""
        kept, obstacle = self.kept, core.obstacle()
        if self.options.batch_ops == "off":
            obstacle = "batch_ops='off'"
        if kept is None or not kept.target_is_part:
            return plan_pairs(self.pair_transform, obstacle="only images with a tv_tensors.Mask are served")
        image = kept.images
        size = image.shape(0)[1:]
        mask = kept.stores[1]
        if (image.spec.dtype, mask.spec.dtype, mask.spec.form) != ("uint8", "uint8", "mask"):
            obstacle = "only uint8 images with a uint8 tv_tensors.Mask are served"
        if obstacle is None and (len(size) != 2 or mask.shape(0)[:-2] not in ((), (1,))):
            obstacle = f"images of shape {image.shape(0)} and masks of {mask.shape(0)} are not served"
        return plan_pairs(self.pair_transform, form=image.spec.form, channels=_channels_of(image), obstacle=obstacle)

    def _steps(self, plan: TransformPlan) -> tuple[Callable[[Any], Any], ...]:
        return (*self._first_steps, *plan.prepare)

    def _path(self, source: Source, plan: TransformPlan, *, pixels_only: bool = True) -> ReadPath:
        return read_path(source, self._steps(plan), pixels_only=pixels_only)

    def refresh(self) -> None:
        """Serve what the transform says now, whose steps may have been changed in place; cheap where none were."""
        self._lease()
        if self._is_waiting:
            self._end_waiting()
        self._was_read = True
        if not is_same(fingerprint((self._transform, self.pair_transform)), self._seen):
            self._compile()
        elif self.target_transform is not self._reader.target_transform:
            self._read_by(replace(self._reader, target_transform=self.target_transform))

    def lease(self) -> Lease:
        """What an epoch that begins now reads by, until the dataset is closed."""
        return self._lease

    def _origin(self) -> Source:
        """What samples were read from, where that is still known, else the kept samples."""
        return self._source or self._samples

    @property
    def _decodes_itself(self) -> bool:
        """Whether fastdata alone decodes the files, so that batches can be made of them as they are read."""
        source = self._origin()
        return isinstance(source, FileSource) and decoder_of(source.loader) is not None

    def _resize_advice(self) -> str:
        """What ``resize=`` would gain where whole images are kept for a random crop of them, measured in 10 ms."""
        kept, (program, output, _) = self.kept, self._reader.lanes[0]
        if kept is None or kept.images.spec.is_dense or program is None or not self._decodes_itself:
            return ""
        store, step = kept.images, max(1, len(kept.images) // _LOOKED_AT)
        planes = [store.read(index) for index in range(0, len(store), step)][:_LOOKED_AT]
        whole = [np.ascontiguousarray(image.transpose(1, 2, 0)) for image in planes]
        small = plan_transform(Resize(f"short:{_ADVISED_PX}"), channels=planes[0].shape[0], prepared=0)
        shrunk = Program(small.batch_ops, store.spec).prepare(OpenedImages.decoded(whole))
        less = [np.array(image.transpose(1, 2, 0), order="C") for image in shrunk]
        share = sum(image.size for image in less) / sum(image.size for image in whole)
        if share > _WORTH_SHARE or output is None:
            return ""
        out, index_B = np.empty((len(whole), *output[0]), output[1]), np.arange(len(whole))
        seconds = []
        for images in (whole, less, whole, less):
            start = time.perf_counter()
            program.run_images(OpenedImages.decoded(images), index_B, 0, 0, out)
            seconds.append(time.perf_counter() - start)
        bytes_then, times = format_bytes(int(share * store.size_bytes)), min(seconds[::2]) / min(seconds[1::2])
        bound = f"resize='short:{_ADVISED_PX}'"
        if times < _WORTH_TIMES:
            return ""
        return f"images are kept as decoded; {bound} would keep {bytes_then}, served {times:.1f} times as fast"

    # Serving

    def __len__(self) -> int:
        return self.sample_count

    def __getitem__(self, index: int) -> Any:
        """Sample and target, transformed as the user's transforms say; a dict where the items are dicts.

        Raises:
            IndexError: ``index`` is not in [-N, N).
        """
        position, item = position_of(index, self.sample_count), _ITEM.get()
        if item is None:
            self.refresh()
        reader = self.lease()()
        return reader.item(reader.visit([position]) if item is None else item.batch_of(position, self), 0)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A whole batch: a ``SampleBatch`` if the transform allows, else a list of samples."""
        batch = indices if isinstance(indices, IndexBatch) else None
        if batch is None or get_worker_info() is not None:  # else the epoch began with it, and other threads read
            self.refresh()
        if self._has_own("__getitem__"):
            return [self[index] if batch is None else self.own_item(batch, k) for k, index in enumerate(indices)]
        reader = self.lease()()
        return reader.items(reader.visit(indices), self.batch_ring)

    @property
    def item_keys(self) -> ItemForm | None:
        """What items are that are no pairs, as far as that is known."""
        return self._reader.item_keys

    @property
    def sample_count(self) -> int:
        return len(self._samples)

    @property
    def batch_obstacle(self) -> str | None:
        """Why whole batches cannot be served without Python work per sample; None if they can."""
        own = self.own_reader
        return self._reader.obstacle if own is None else f"{type(self).__name__} has a {own} of its own"

    def prepared_share(self, index: np.ndarray | None) -> float:
        """Share of the samples, or of those of ``index``, that will not be prepared and kept when they are read."""
        return 1.0 if self.kept is None else self.filled_share(index)

    @property
    def image_form(self) -> str:
        """Shape and type of each image in a whole batch."""
        kinds = [self.plan.kind, self.plan.mask.kind] if self.plan.mask else [self.plan.kind] * len(self._reader.lanes)
        names = [shown_class(kind).__name__ for kind in kinds]
        pairs = zip(names, self._reader.as_tensors(self._reader.room(0, None)), strict=True)
        form = ", ".join(f"{name}{tuple(each.shape[1:])} of {str(each.dtype)[6:]}" for name, each in pairs)
        return form if self.item_keys is None else f"{form} in {self.item_keys}"

    def fallback_notice(self) -> str:
        """Which code of the user's own runs on each sample unasked, what that costs and the way back; else empty.

        None of it is run to find out.
        """
        own, kept = self.own_reader, self.kept
        if own is not None:
            return (
                f"{type(self).__name__}.{own} is called for each sample. Write what it does as transform= or "
                "target_transform= instead."
            )
        plan, unknown = self.plan, self.plan.first_unknown
        is_asked_for = self.options.batch_ops == "off" or self.pair_transform is not None
        if is_asked_for or kept is None or kept.is_tuple or unknown is None:
            return ""
        cure, views = cure_for(unknown)
        rate = self._rate_without_unknown(kept.images, self._transform if views is None else views)
        cost = f" Without it one core would serve {rate:,.0f} samples/s." if rate else ""
        if not cure and plan.views:
            cure = "Write steps that are served in its place: docs/served-steps.md."
        elif not cure:
            cure = (
                "Give it as prepare= if it does the same each time, or as CudaPrefetcher(transform=) if it can take "
                "whole batches."
            )
        return f"{plan.obstacle}, so that it runs in Python on each sample.{cost} {cure}"

    def _rate_without_unknown(self, store: Store, transform: Any) -> float | None:
        """Samples a second that one core serves by the steps that are known, measured on a few; None if by none."""
        shape, prepared = store.shape(0), len(self.plan.prepare)
        facts: dict[str, Any] = {"form": store.spec.form, "dtype": store.spec.dtype, "obstacle": core.obstacle()}
        facts |= {"channels": shape[0], "prepared": prepared}
        *before, last = flatten(transform)
        ways = [(*before, *flatten(each)) for each in last.transforms] if type(last) is Views else [(*before, last)]
        index_B, total_s = np.arange(min(_LOOKED_AT, len(store))), 0.0
        for steps in ways:
            while (whole := plan_transform(steps, **facts)).per_sample:
                at = len(steps) - len(whole.per_sample)
                steps = (*steps[:at], *steps[at + 1 :])
            program = Program(whole.batch_ops, store.spec) if whole.batch_ops and whole.is_batched else None
            output = None if program is None else program.output(shape)
            if program is None or output is None:
                return None
            out, seconds = np.empty((len(index_B), *output[0]), output[1]), []
            for _ in range(2):
                start = time.perf_counter()
                program.run(store, index_B, 0, 0, out)
                seconds.append(time.perf_counter() - start)
            total_s += min(seconds)
        return len(index_B) / total_s

    @property
    def device_obstacle(self) -> str | None:
        """Why batch ops cannot run on the device that batches are sent to; None if they can."""
        if self.batch_obstacle is not None:
            return self.batch_obstacle
        if self.kept is None:
            return "samples are kept nowhere, and files are decoded on the CPU"
        if len(self._reader.lanes) > 1:
            return "several views of an image, or image and mask, are made on the CPU"
        return device_obstacle(self.plan, self.kept.images.spec)

    @property
    def served_bytes(self) -> int | None:
        """Bytes of each sample in a whole batch; None where there are no whole batches."""
        outputs = None if self.batch_obstacle else self._reader.outputs
        return None if outputs is None else sum(math.prod(shape) * dtype.itemsize for shape, dtype in outputs)

    @property
    def own_reader(self) -> str | None:
        """The method of a subclass that knows what an index means; None where it is the number of a sample."""
        return next((name for name in ("__getitem__", "__getitems__") if self._has_own(name)), None)

    @property
    def has_own_items(self) -> bool:
        """Whether a subclass makes them, so that only it can be asked for batches."""
        return self.own_reader is not None

    @property
    def index_count(self) -> int:
        """Indices from 0 to this, exclusive, may be asked for."""
        return self.sample_count if self.own_reader is None else len(self)

    def seed_of(self, base_seed: int) -> int:
        """What random draws are made from in an epoch of this base seed: the user's ``seed``, if there is one."""
        return base_seed if self.options.seed is None else self.options.seed

    def _has_own(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(PreparedDataset, name)

    def own_item(self, batch: IndexBatch, k: int) -> Any:
        """What a subclass's own ``__getitem__`` makes of index ``k`` of a batch; its reads are drawn from its visit."""
        token = _ITEM.set(_Item(batch, k))
        try:
            return self[batch[k]]
        finally:
            _ITEM.reset(token)

    # What torchvision's datasets show

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        self._lease()
        before, self._transform = self._transform, transform
        if self._is_waiting and transform is None:
            return
        try:
            if self._is_waiting:
                self._end_waiting()
            elif self._is_to_prepare_again():
                self._prepare_again()
            else:
                self._compile()
        except BaseException:
            self._transform = before
            raise

    @property
    def transforms(self) -> Callable[[Any, Any], Any] | None:
        """What sample and target are called with together: the user's ``transforms=``, or both of his transforms."""
        if self.pair_transform is not None or (self._transform is None and self.target_transform is None):
            return self.pair_transform
        return StandardTransform(self._transform, self.target_transform)

    @transforms.setter
    def transforms(self, transforms: Callable[[Any, Any], Any] | None) -> None:
        self.pair_transform = transforms

    def with_transform(self, transform: Callable[[Any], Any] | None) -> Self:
        """The same samples under another transform: a second view of one store, as for training and validation.

        A transform that begins with other steps than those that samples are stored after gets a store of its own. The
        memory is given back when the last view is closed or let go.

        Example:
            >>> import torch
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with CachedDataset(squares, progress=False) as train:
            ...     val = train.with_transform(lambda image: image / 2)
            ...     print(train[3][0].max().item(), val[3][0].max().item())
            3 1.5
        """
        self._lease()
        other = self._copied()
        other._visits, other._was_read = SharedVisits(self.sample_count), True  # by the first view, maybe
        self._views.add(other)
        other.transform = transform
        return other

    def __copy__(self) -> Self:
        return self.with_transform(self._transform)

    def _is_to_prepare_again(self) -> bool:
        """Whether the store is after steps that the transform does not begin with, or another would be better, unused.

        timm makes a dataset without a transform and assigns one later: images were kept whole, and nobody has read any.
        """
        if self._unfit_after is not None and self._source is not None:  # after other steps samples may fit
            return plan_transform(self._transform).prepare_key() != self._unfit_after
        if self._stored_after is None:
            return False
        count, stored_key = self._stored_after
        if plan_transform(self._transform, prepared=count).prepare_key() != stored_key:
            return True
        is_unused = self.filled_share() == 0 or (not stored_key and not self._was_read)
        return is_unused and self._source is not None and plan_transform(self._transform).prepare_key() != stored_key

    def _prepare_again(self) -> None:
        source, stored = self._origin(), self._stored_after
        if self._unfit_after is None and (source is self._samples or stored is None):
            self._compile()  # which says what is wrong
            return
        if stored is not None and self.filled_share() > 0 and (self._was_read or stored[1]):
            first = ", ".join(map(repr, self.plan.prepare))
            log.warning("samples are prepared again: the new transform does not begin with %s", first)
        table, self._stored_after = self.table if isinstance(source, FileSource) else None, None
        self._views.discard(self)
        if table is not None and self._views:  # whose table it is too
            self.table = table = SampleTable(
                list(table.targets), paths=table.all_paths(), class_to_idx=table.class_to_idx
            )
            source = self._origin()
        self._lease = Lease(None, "the dataset could not be prepared again for another transform; create it anew")
        self._samples, self._reader = source, self._reader.emptied()  # lets go of the store before room is looked for
        self._prepare(source, table)

    @property
    def targets(self) -> ListView[Any]:
        """Target of every sample, before ``target_transform``; read-only."""
        return ListView(self.sample_count, lambda index: self._lease().stored_target(index))

    @targets.setter
    def targets(self, _: object) -> None:
        self._refuse_list("targets")

    @property
    def samples(self) -> ListView[tuple[str, Any]]:
        """(path, target) of every sample, in torchvision's order; only where samples are files. Read-only."""
        return self._files("samples").pairs

    @samples.setter
    def samples(self, _: object) -> None:
        self._refuse_list("samples")

    imgs = samples

    def _refuse_list(self, name: str) -> None:
        raise AttributeError(
            f"{name} of {kind_of(self)} cannot be assigned: samples are kept by their number. Take some "
            "of them by torch.utils.data.Subset(dataset, indices), other labels by target_transform= or by "
            "ImageManifest([(path, label), ...])."
        )

    @property
    def classes(self) -> list[str]:
        """Class names, sorted; empty where labels are plain numbers. Only where samples are files."""
        return list(self._files("classes").class_to_idx or ())

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Number of each class; only where samples are files."""
        return self._files("class_to_idx").class_to_idx or {}

    def _files(self, asked_for: str) -> SampleTable:
        self._lease()
        if self.table is None or not self.table.has_paths:  # so that hasattr says what it would of torchvision's own
            raise AttributeError(f"{type(self).__name__} has no {asked_for}: it does not list files")
        return self.table

    # What is kept, and why

    @property
    def plan(self) -> TransformPlan:
        return self._reader.plan

    @property
    def storage(self) -> str:
        return self.storage_plan.storage

    @property
    def kept(self) -> KeptSamples | None:
        """What the dataset serves from; None where it keeps nothing."""
        return self._samples if isinstance(self._samples, KeptSamples) else None

    def filled_share(self, index: np.ndarray | None = None) -> float:
        """Share of the samples, or of those of ``index``, that are kept already; 0 where none ever are."""
        return 0.0 if self.kept is None else self.kept.filled_share(index)

    def unkept_path(self) -> ReadPath | None:
        """How samples that are kept nowhere would be read to be kept, for a time; None where they are kept."""
        if self.kept is not None:
            return None
        return self._path(self._samples, self._split(self._transform, batch_ops=self.options.batch_ops))

    def read_after(self) -> tuple[Source | None, str]:
        """What ``unkept_path`` follows from: the source, and the key of the steps that samples are read after."""
        return None if self.kept is not None else self._samples, self.plan.prepare_key()

    def served_from(self, kept: KeptSamples) -> Self:
        """This dataset over other memory of the same samples, such as some of them; never closed itself."""
        other = self.frozen()
        other._samples = kept
        other._compile()
        return other

    def frozen(self) -> Self:
        """This dataset as it is now, for an epoch: what is assigned to it later does not reach the copy."""
        self._lease()
        other = self._copied()
        self._copies.add(other)
        return other

    def prepared_anew(self, index: Sequence[int], **options: Any) -> Self:
        """Some of the samples, read again and kept as ``options`` say: a dataset of its own, to be closed.

        Raises:
            ValueError: what samples were read from is not known, as in copies in other processes.
        """
        origin, table = self._origin(), None
        source: Source
        if isinstance(origin, FileSource):
            paths, targets = ([values[place] for place in index] for values in (origin.paths, origin.targets))
            table = SampleTable(targets, paths=paths, class_to_idx=self.table.class_to_idx if self.table else None)
            source = FileSource(paths, targets, origin.loader)
        elif isinstance(origin, DatasetSource):
            source = DatasetSource(Subset(origin.dataset, list(index)), origin.columns)
        else:
            raise ValueError(f"this {type(self).__name__} does not know what its samples were read from")
        other = self._copied()
        usual = {"cache_dir": None, "cache_key": None, "fill": "eager", "progress": False, "share": "off"}
        other.options = replace(self.options, **usual | options)
        other._stored_after = None
        other._prepare(source, table)
        return other

    @property
    def _identity(self) -> Any:
        """What stands for this dataset where another one is made of it."""
        source, kind = self._origin(), type(self)
        if not kind.__module__.startswith("fastdata.") or isinstance(source, KeptSamples):
            raise TypeError(f"a {kind.__name__} is a subclass, or a copy in another process")
        made = self._first_steps, self._transform, self.target_transform, self.pair_transform
        if isinstance(source, FileSource):
            return made, list(source.paths), list(source.targets), source.loader
        return made, vars(source)

    def _copied(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._leases, other._copies = weakref.WeakSet(), weakref.WeakSet()
        return other

    def storage_report(self) -> StorageReport:
        """Try every codec on samples spread over the dataset; ``print(dataset.storage_report())`` shows the outcome.

        Takes about a second: up to 25 samples are read, encoded and decoded.
        """
        source = self._origin()
        path = ReadPath(source=source, prepare=Steps(())) if source is self.kept else self._path(source, self.plan)
        return report_storage(path, self.options)

    def __repr__(self) -> str:
        share = self.filled_share()
        filling = f"; {share:.0%} prepared so far, the rest on first read" if self.kept and share < 1 else ""
        lines = [f"Dataset {type(self).__name__}", f"    Number of datapoints: {len(self)}"]
        lines += [f"    {line}" for line in self._extra_repr()]
        lines.append(f"    Storage: {self.storage_plan.reason}{filling}")
        if self._transform is not None:
            lines.append("    Transform: " + repr(self._transform).replace("\n", "\n               "))
        return "\n".join(lines)

    def _extra_repr(self) -> list[str]:
        return []

    # Epochs, and the end

    def set_epoch(self, epoch: int) -> None:
        """Make random draws those of ``epoch``, until it is set again."""
        self.epoch = epoch
        self._lease()
        self._visits.restart(epoch)

    def close(self) -> None:
        """Give the memory back, unless other views are open; batches already served stay valid. Idempotent.

        An epoch that runs ends with StoreGoneError, and a batch that is being read is read to its end.
        """
        self._views.discard(self)
        if self.kept is not None and not self._views:
            self.kept.end_sharing()
        self._let_go()

    def _let_go(self) -> None:
        """End all reading; the memory goes with the last batch that is being read from it: nothing is dismantled."""
        for lease in {*self._leases, self._lease}:
            lease.end(CLOSED)
        for copy in list(self._copies):
            copy._let_go()
        self._reader = self._reader.emptied()
        self._samples = self._reader.samples
        self.table = self._source = None
        self.__dict__.pop("_visits", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None and _is_saved_by_torch():
            raise TypeError(
                f"this {type(self).__name__} cannot be saved: it is a handle to samples in this process's memory. Give "
                "cache_dir= to keep them on disk, from where the next run serves them at once, and make it anew there."
            )
        self.refresh()  # what a copy cannot serve is said here, not where it is opened
        derived = ("_reader", "_lease", "_leases", "_copies", "_seen", "skipped", "batch_ring", "_source", "_views")
        state = {name: value for name, value in self.__dict__.items() if name not in derived}
        state["options"] = replace(self.options, engine="local")  # an executor stays with the process that has it
        stores = self.kept.stores if self.kept else ()
        state["_imported"] = [tensor_class(store.spec.form) for store in stores]
        if get_spawning_popen() is not None:
            # An error while a process starts would end it, and nobody would be told why: it is raised when it reads.
            opened = {name: state.pop(name) for name in ("_samples", "table", "_visits")}
            state["_sent"] = bytes(ForkingPickler.dumps(opened))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        del state["_imported"]  # unpickling it has imported what samples are
        sent = state.pop("_sent", None)
        self.__dict__.update(state)
        self.skipped, self._views = [], weakref.WeakSet([self])
        self._leases, self._copies = weakref.WeakSet(), weakref.WeakSet()
        try:
            self.__dict__.update({} if sent is None else pickle.loads(sent))
            self._compile()
        except StoreGoneError as gone:
            if sent is None:
                raise
            self._lease = Lease(None, str(gone))


class CachedDataset(PreparedDataset):
    """Any map-style dataset of (sample, target) or of dicts, prepared once and kept in shared memory.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` giving (PIL image | tensor | array, target). Read once, from forked
            worker processes, so that what its own transforms draw would stay the same: those of torchvision that are
            random are refused, those that fastdata does not know are warned of. The sample may be a tuple of these,
            and the target an image or array too, such as a mask: all of them are stored. Of an item of three or more
            values the first is the sample; an image or tensor alone has no target. Of an item that is a dict the one
            value that is an image is the sample, and the target that of the other key, or a dict of several; items
            and batches are dicts of the same keys then. Or the path or URL of another format's files, a pattern such
            as ``"train-{000..009}.tar"``, or a list of these: WebDataset's tars, Parquet and Arrow; see
            docs/other-datasets.md.
        columns: of items that are dicts the names of those that are sample and target, such as
            ``{"sample": "image", "target": "label"}``; items are pairs then, and a list of names makes the target a
            dict.
        prepare: called on each sample before it is stored, e.g. ``lambda image: image.convert("RGB")``.
        transform: as torchvision's. Its leading deterministic steps run once per sample, before it is stored; see
            ``plan``.
        target_transform: called on each target when it is read.
        transforms: in place of both, called with sample and target together, as torchvision's: for masks and boxes. One
            of v2's known steps, on images with a ``tv_tensors.Mask``, runs on whole batches.
        options: where and how samples are kept, and more: see ``fastdata.dataset.DatasetOptions``.

    ``CachedDataset.from_cache`` opens what ``cache_dir`` keeps without ``dataset``.

    Raises:
        SampleError: a sample cannot be read or prepared; names its path and index.
        CacheError: ``cache_dir`` cannot be written, or its disk is full.
        MemoryBudgetError: ``storage="shared"`` does not fit; raised before anything is allocated.

    A pickled dataset is a handle of a few hundred bytes plus the transforms; it opens only on the same machine, while
    the process that made it lives. ``close()`` gives the memory back; so does dropping the last reference.

    Example:
        >>> import torch
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
        >>> with CachedDataset(squares, progress=False) as dataset:
        ...     images, targets = dataset.__getitems__([1, 3]).stacked
        >>> images.shape, targets
        (torch.Size([2, 3, 4, 4]), tensor([1, 9]))
    """

    root: str
    """Of ``from_cache``: the folder of the files when the cache was written; empty where samples were no files."""

    @show_options
    def __init__(
        self,
        dataset: Any,
        *,
        prepare: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen, chosen_columns = read_options(CachedDataset, options), None if columns is None else Columns.of(columns)
        self.pair_transform = _checked(transforms, transform, target_transform)
        if _are_paths(dataset):
            from fastdata.formats import open_dataset  # 20 ms, which only files of others take

            only = None if chosen_columns is None else chosen_columns.names
            found = open_dataset(dataset, chosen.storage_options, only)
            dataset = dataset if found is None else found
        source = DatasetSource(dataset, chosen_columns)
        if chosen.storage != "none":
            _refuse_frozen_draws(dataset)
        self._build(source, chosen, transform, target_transform, prepare=prepare)

    def _list_files(self, source: Source) -> tuple[Listing | None, str]:
        from fastdata.cache import list_paths

        root, paths = "", [path for index in range(len(source)) if (path := source.path(index)) is not None]
        if not paths or len(paths) < len(source):
            return None, ""
        with contextlib.suppress(ValueError):  # relative paths and others, or several drives: no common folder
            root = os.path.commonpath({os.path.dirname(path) for path in paths})
        listing = list_paths(paths, root)
        if (listing["file_sizes"] < 0).all():  # names of another kind, such as keys of an LMDB
            return None, ""
        return listing, root

    @classmethod
    def from_cache(
        cls,
        path: str | os.PathLike[str],
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        as_tensors: bool = False,
        seed: int | None = None,
        batch_ops: Literal["auto", "off"] = "auto",
        storage_options: Mapping[str, Any] | None = None,
        local_cache: str | os.PathLike[str] | None = None,
        local_limit: int | float | str | None = None,
    ) -> Self:
        """Open a cache on its own: the dataset and the files that it was made from need not be there.

        Serves what was kept when the cache was last brought up to date, in that order; ``skipped`` lists what was left
        out. Where samples are files, ``samples``, ``classes`` and ``class_to_idx`` are those of the dataset then, and
        ``root`` is the folder that it had.

        Args:
            path: a cache, or the ``cache_dir`` that holds only this one, or the URL of such. Any dataset or ``fastdata
                build`` may have written it, but not with ``codec="source"`` or a codec object of your own.
            transform: called on each sample as the cache holds it. All of its steps run when a sample is read; those
                that fastdata knows on whole batches.
            target_transform: called on each target when it is read.
            transforms: in place of both, called with sample and target together.
            as_tensors: give images as tensors (C, H, W) of their stored pixels, those of torchvision's
                ``PILToTensor``, and not as PIL images, which a ``transform`` would have to make tensors of.
            seed: of the random draws of batch ops; see ``fastdata.dataset.DatasetOptions``.
            batch_ops: ``"off"`` runs known random transforms per sample exactly as written.
            storage_options: for a URL; see ``fastdata.dataset.DatasetOptions``.
            local_cache: as there.
            local_limit: as there.

        Raises:
            FileNotFoundError: there is no cache.
            ValueError: there are several; says which.
            CacheError: it is damaged, or cannot be served without its dataset; says how to open it.

        Example:
            >>> import tempfile, torch
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     CachedDataset(squares, cache_dir=folder, cache_key="squares", progress=False).close()
            ...     with CachedDataset.from_cache(folder) as dataset:
            ...         print(len(dataset), list(dataset.targets))
            5 [0, 1, 4, 9, 16]
        """
        from fastdata.cache import Mirroring, find_cache, open_cache

        dataset = cls.__new__(cls)
        dataset.pair_transform = _checked(transforms, transform, target_transform)
        dataset.options, dataset._stored_after = Options(seed=seed, batch_ops=batch_ops), (0, "")
        dataset._transform, dataset.target_transform = transform, target_transform
        home = find_cache(path, storage_options)
        prepared, manifest = open_cache(home, as_tensors=as_tensors, mirroring=Mirroring(local_cache, local_limit))
        assert prepared.kept is not None
        dataset.root, dataset._is_upright = manifest.root, "PIL.ImageOps.exif_transpose" in manifest.key["prepare"]
        dataset._serve(prepared, prepared.kept, None)
        return dataset


def _describe_source(source: DatasetSource, listing: Listing | None, cache_key: str | None) -> str:
    inner = source.dataset
    while hasattr(inner, "indices") and hasattr(inner, "dataset"):
        inner = inner.dataset
    if cache_key is None and listing is None and not hasattr(inner, "_identity"):
        raise ValueError(
            f"cache_dir= must know in the next run whether the samples of {type(inner).__name__} are still the same, "
            "but it does not list their files in an attribute samples. Give cache_key='a name' and change it whenever "
            "the data change."
        )
    described = describe_dataset(source.dataset, cache_key)
    return described if source.columns is None else f"{described} {source.columns}"


def _is_saved_by_torch() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.serialization":
        frame = frame.f_back
    return frame is not None


def _checked(transforms: Any, transform: Any, target_transform: Any) -> Any:
    if transforms is not None and (transform is not None or target_transform is not None):
        raise ValueError("transforms= takes sample and target together; give it alone, or transform= and the like")
    return transforms


def _are_paths(dataset: Any) -> bool:
    kinds = {type(each) for each in dataset} if isinstance(dataset, list) and dataset else {type(dataset)}
    return all(issubclass(kind, (str, os.PathLike)) for kind in kinds)


_USUAL_NAMES = ("transforms", "transform", "target_transform")


def _refuse_frozen_draws(dataset: Any) -> None:
    """See to it that what a dataset, or one inside of it, draws at random is not drawn once and kept."""
    steps: dict[int, tuple[str, str, Any]] = {}
    for owner, name, step in _own_steps(dataset):
        steps.setdefault(id(step), (owner, name, step))
    texts = {True: "", None: ""}
    for owner, name, step in steps.values():
        drawn = is_random(step) if name in _USUAL_NAMES else None  # under another name it may stay unused
        if drawn or (drawn is None and name != "target_transform"):  # labels are renamed, not augmented
            texts[drawn] += f"{', ' if texts[drawn] else ''}{' '.join(repr(step).split())} in {owner}.{name}"
    if texts[True]:
        raise ValueError(
            f"{texts[True]}: random, but samples are kept as they are first read, so that every epoch would see the "
            "same draws. Make the dataset without it, and give it to CachedDataset as transform=, or as transforms= "
            "where it takes the target too; or use storage='none'."
        )
    if texts[None]:
        advice = (
            f"{texts[None]}: what it does is not known to fastdata. If it draws at random, every epoch sees the same "
            "draws, because samples are kept as they are first read. Make the dataset without it, and give it to "
            "CachedDataset as transform= or transforms=; or as prepare= if it does the same each time."
        )
        if any(name == "set_transform" for _, name, _ in steps.values()):
            advice += " What set_transform calls takes a batch of items; these take one image."
        warn_user(advice)


def _own_steps(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """The steps of a dataset's transforms and of those inside of it: whose, under which name, and the step."""
    owner, shown = type(dataset).__name__, getattr(dataset, "format", None)
    if isinstance(shown, dict) and shown.get("type") == "custom":  # Hugging Face's, by ``set_transform``
        yield owner, "set_transform", shown.get("format_kwargs", {}).get("transform")
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    for name in _USUAL_NAMES:
        call: Any = getattr(dataset, name, None)
        if type(call).__name__ != "StandardTransform":
            yield from ((owner, name, step) for step in flatten(call))
        elif "transforms" in getattr(code, "co_names", ()):  # else it holds both, and its dataset asks for each
            yield from ((owner, "transforms", step) for step in flatten(call.transform))
            yield from ((owner, "target_transform", step) for step in flatten(call.target_transform))
    for name, call in getattr(dataset, "__dict__", {}).items():
        if name not in _USUAL_NAMES and callable(call):
            yield from ((owner, name, step) for step in flatten(call) if is_random(step))
    parts = getattr(dataset, "datasets", None)
    parts = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, (list, tuple)) else ()
    for part in (getattr(dataset, "dataset", None), *parts):
        if part is not None:
            yield from _own_steps(part)


def _channels_of(images: Store) -> int | None:
    """Of all images; None where they differ."""
    if images.spec.shape is not None:
        return images.spec.shape[0]
    shapes = images.shapes()
    channels = {images.shape(0)[0]} if shapes is None else set(np.unique(shapes[:, 0]).tolist())
    return channels.pop() if len(channels) == 1 else None


def _lanes(plan: TransformPlan, spec: SampleSpec, shape: tuple[int, ...], part: int = 0) -> tuple[Lane, ...]:
    programs = [Program(view.batch_ops, spec) for view in plan.views or (plan,)]
    return tuple(Lane(program, program.output(shape), part) for program in programs)
