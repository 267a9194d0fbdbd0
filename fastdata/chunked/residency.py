"""Which samples of an epoch are in memory: two chunks, one being served while a thread brings the next.

Batches never cross chunks, because chunks are whole batches. A batch is made as soon as its own samples are there, so
that the first one waits for no whole chunk. A chunk is dropped when its last batch is made: a batch is a copy.

Samples that are kept are served from where they lie; of files on disk, a chunk is mapped. Others are prepared, or
decoded in Python, by worker processes that put them into one of two slots of shared memory. How large those will be is
foreseen from a few: a batch with samples that turn out to have no room is made without a slot, of one after another.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, dropwhile, islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from fastdata.batch import DrawKey, IndexBatch
from fastdata.chunked.plan import CHUNKS_HELD
from fastdata.codecs import KNOWN_CODECS
from fastdata.dataset import PreparedDataset
from fastdata.draws import sample_keys
from fastdata.errors import MemoryBudgetError, SampleError
from fastdata.images import SampleSpec
from fastdata.loader.epochs import make_batch
from fastdata.prepare import KeptSamples, ReadPath, ReadSample, Steps, WritePath, forecast
from fastdata.report import log
from fastdata.ring import BatchRing
from fastdata.shared import collate_targets
from fastdata.stores.mirror import FETCH_BYTES, Ahead, MirroredStore
from fastdata.stores.readers import DiskStore, Store
from fastdata.stores.writers import ALIGN_BYTES, Extent, Writer, WriterPlan
from fastdata.workers import WorkerPool

_PREPARED_PER_TASK = 8
_MAPPED_PER_TASK = 128
_RAGGED_SLACK = 1.25  # room for samples of many shapes, as a multiple of the mean of those looked at


class _Task(NamedTuple):
    """Samples that a worker brings at once, and the slot of their chunk."""

    slot: int
    positions: list[int]

    def __str__(self) -> str:
        return f"samples {', '.join(map(str, self.positions))}"


class _Result(NamedTuple):
    """What became of a sample: where its parts lie, if it is copied, or why it is not there."""

    position: int
    extents: Sequence[Extent] = ()
    error: SampleError | None = None
    is_roomless: bool = False
    target: Any = None  # where only reading the sample tells it


class _Here(dict[int, tuple[Sequence[np.ndarray], Any]]):
    """Samples in memory, by position: parts, none where they are not copied, and target, if only reading tells it."""

    def __missing__(self, index: int) -> NoReturn:
        raise LookupError(
            f"sample {index} is not in memory with the one asked for: a __getitem__ that reads other samples than its "
            "own needs a DataLoader, not a ChunkedLoader"
        )


@dataclass(eq=False, slots=True)
class Chunk:
    slot: int = 0
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # in the order they are brought in
    batches: dict[int, list[int]] = field(default_factory=dict)  # positions of those still to be made, by number
    there: _Here = field(default_factory=_Here)
    errors: dict[int, SampleError] = field(default_factory=dict)
    roomless: set[int] = field(default_factory=set)  # positions that the slot had no room for
    readers: set[int] = field(default_factory=set)  # threads that are making batches
    view: PreparedDataset = field(init=False)

    def has(self, batch: int) -> bool:
        positions = self.batches[batch]
        return all(place in self.there or place in self.errors or place in self.roomless for place in positions)

    def cut(self) -> list[int]:
        """Let go of the first batch that has samples missing, and of all after it; return their numbers."""
        rest = list(dropwhile(self.has, sorted(self.batches)))
        for number in rest:
            del self.batches[number]
        return rest


class Samples:
    """How a dataset's samples are brought into memory and dropped.

    Attributes:
        on_disk: the parts of samples that lie in mapped files.
        is_copied: whether samples are put into slots; else they are served from where they lie.
        mirrored: those of them that are fetched first.
        slot_bytes: of a sample in a slot.
        chunk_batches: batches in a chunk; fewer once samples have turned out larger than foreseen.
        empties_cache: whether the system's page cache lets go of samples that are dropped, too.

    Raises:
        SampleError: none of the samples looked at can be read.
    """

    def __init__(self, dataset: PreparedDataset) -> None:
        self.dataset, self.chunk_batches, self.empties_cache = dataset, 1, False
        kept = dataset.kept
        stores: tuple[Store, ...] = () if kept is None else kept.stores
        self.on_disk = [store for store in stores if isinstance(store, DiskStore)]
        self.mirrored = [store for store in self.on_disk if isinstance(store, MirroredStore)]
        path = dataset.unkept_path() if kept is None else ReadPath(source=kept, prepare=Steps(()))
        assert path is not None
        self._found = forecast(path.source, path.prepare)
        for store in self.on_disk:
            store.release()  # it is no memory that is in use: chunks will be there in its place
        codecs = {getattr(store, "codec", dataset.storage_plan.codec or "raw") for store in stores}
        # Of work in Python processes do more than threads.
        self.is_copied = dataset.filled_share() < 1 or not codecs <= {"raw", *KNOWN_CODECS}
        self._path = path if self.is_copied else None
        self._specs = self._found.specs
        self._some_shapes = [part.array.shape for part in self._found.looked_at[0].parts]
        self._part_bytes = [
            total / len(path.source) * (1 if spec.is_dense else _RAGGED_SLACK) + ALIGN_BYTES
            for spec, total in zip(self._specs, self._found.part_bytes, strict=True)
        ]
        self.slot_bytes = sum(self._part_bytes)
        self._slots: list[list[Writer]] = []

    @property
    def fetch_bytes(self) -> int:
        """Of what is on its way at once."""
        return CHUNKS_HELD * FETCH_BYTES * len(self.mirrored)

    @property
    def room_bytes(self) -> int:
        """For all chunks of all ranks, where those are fetched."""
        return min((store.mirror.limit_bytes for store in self.mirrored), default=1 << 62)

    def open(self, samples: int) -> None:
        """Reserve the memory of two chunks."""
        try:
            while self.is_copied and len(self._slots) < CHUNKS_HELD:
                self._slots.append([])
                for spec, part_bytes in zip(self._specs, self._part_bytes, strict=True):
                    spec, size_bytes = replace(spec, shape=None), int(part_bytes * samples)
                    plan = WriterPlan(spec=spec, first_bytes=size_bytes, limit_bytes=size_bytes)
                    self._slots[-1].append(Writer(plan))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        while self._slots:
            for writer in self._slots.pop():
                writer.close()

    def view(self, chunk: Chunk) -> PreparedDataset:
        """What batches of a chunk are read from."""
        if not self.is_copied:
            return self.dataset
        shapes = enumerate(self._some_shapes)
        stores = tuple(_ChunkStore(self._specs[part], chunk.there, part, shape) for part, shape in shapes)
        table = self.dataset.table or _ChunkTargets(self.dataset.sample_count, chunk.there)
        found = self._found
        kinds = found.is_tuple, found.target_is_part, found.keys
        return self.dataset.served_from(KeptSamples(stores, table, *kinds, mask_places=found.mask_places))

    def begin(self, chunk: Chunk) -> list[_Task]:
        chunk.view = self.view(chunk)
        for writer in self._slots[chunk.slot] if self.is_copied else ():
            writer.rewind()
        size = _PREPARED_PER_TASK if self.is_copied else _MAPPED_PER_TASK
        positions = chunk.positions.tolist()
        return [_Task(chunk.slot, positions[start : start + size]) for start in range(0, len(positions), size)]

    def enter(self, chunk: Chunk, result: _Result) -> bool:
        """Note what became of a sample; return whether views are to change, because it has another shape."""
        if result.is_roomless:
            chunk.roomless.add(result.position)
            return self._allow_any_shape()
        if result.error is not None:
            chunk.errors[result.position] = result.error
        elif not self.is_copied:
            chunk.there[result.position] = (), None
        else:
            pairs = zip(self._slots[chunk.slot], result.extents, strict=True)
            arrays = [writer.file.array(writer.spec.dtype, place.shape, place.start) for writer, place in pairs]
            for array in arrays:
                array.flags.writeable = False
            chunk.there[result.position] = arrays, result.target
            if any(spec.shape not in (None, array.shape) for spec, array in zip(self._specs, arrays, strict=True)):
                log.info("sample %d has another shape than those before it; each keeps its own", result.position)
                return self._allow_any_shape()
        return False

    def _allow_any_shape(self) -> bool:
        """Return whether that is new."""
        had_one = any(spec.is_dense for spec in self._specs)
        self._specs = tuple(replace(spec, shape=None) for spec in self._specs)
        return had_one

    def load(self, task: _Task) -> list[_Result]:
        """Bring samples, in a worker; those that are served from where they lie stay there until they are dropped."""
        index_B = np.array(task.positions, np.int64)
        for store in self.on_disk:
            store.bring(index_B)
        if not self.is_copied:
            return self._check(index_B)
        try:
            return [self._prepare(task.slot, position) for position in task.positions]
        finally:
            self.drop(index_B)

    def drop(self, index_B: np.ndarray) -> None:
        for start in range(0, len(index_B), _MAPPED_PER_TASK):  # those that were brought at once, at once
            for store in self.on_disk:
                store.drop(index_B[start : start + _MAPPED_PER_TASK], from_cache=self.empties_cache)

    def read(self, position: int, slot: int = 0) -> tuple[WritePath, ReadSample]:
        """Prepare a sample; and the way into a slot."""
        assert self._path is not None
        path = WritePath(self._path.source, self._path.prepare, tuple(self._slots[slot]))
        sample = path.read(position)
        is_told = self.dataset.table is not None  # beforehand, so that the target need not be sent
        return path, sample._replace(target=None) if is_told else sample

    def _prepare(self, slot: int, position: int) -> _Result:
        try:
            path, sample = self.read(position, slot)
            return _Result(position, path.write(sample), target=sample.target)
        except MemoryBudgetError:  # which would keep the sample alive with its traceback
            return _Result(position, is_roomless=True)
        except SampleError as error:
            return _Result(position, error=error)

    def _check(self, index_B: np.ndarray) -> list[_Result]:
        """Find out which samples on disk are damaged."""
        try:
            kept = self.dataset.kept
            with contextlib.nullcontext() if kept is None else kept.naming_damage():
                for store in self.on_disk:
                    store.check(index_B)
        except SampleError as error:
            if len(index_B) == 1:
                return [_Result(int(index_B[0]), error=error)]
            return [result for index in index_B for result in self._check(np.array([index]))]
        return [_Result(position) for position in index_B.tolist()]


class _ChunkStore(Store):
    """One part of a chunk's samples, by their positions in the dataset."""

    gives_views, size_bytes = True, 0

    def __init__(self, spec: SampleSpec, there: _Here, part: int, some_shape: tuple[int, ...]) -> None:
        self.spec, self._there, self._part, self._some_shape = spec, there, part, some_shape

    def __len__(self) -> int:
        return len(self._there)

    def shape(self, index: int) -> tuple[int, ...]:
        return self.read(index).shape if index in self._there else self._some_shape

    def read(self, index: int) -> np.ndarray:
        return self._there[index][0][self._part]

    def read_into(self, index: int, out: np.ndarray) -> None:
        out[...] = self.read(index)

    def close(self) -> None: ...


class _ChunkTargets:
    """The targets of a chunk's samples where only reading these tells them, with the face of a ``SampleTable``."""

    has_paths = False

    def __init__(self, length: int, there: _Here) -> None:
        self._length, self._there = length, there

    def __len__(self) -> int:
        return self._length

    def target(self, index: int) -> Any:
        return self._there[index][1]

    def collated_targets(self, index_B: np.ndarray) -> Any:
        return collate_targets([self.target(index) for index in index_B.tolist()])

    def close(self) -> None: ...


class _OneByOne:
    """Reads a batch of samples that are not all in memory, of which it holds one at a time."""

    def __init__(self, samples: Samples, reading: threading.Lock) -> None:
        self._samples, self._reading = samples, reading

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        alone = Chunk()
        view, made = self._samples.view(alone), []
        for k, position in enumerate(batch.positions.tolist()):
            one = slice(k, k + 1)
            with self._reading:
                _, sample = self._samples.read(position)
            alone.there.clear()
            alone.there[position] = [part.array for part in sample.parts], sample.target
            made += view.__getitems__(IndexBatch(batch[one], batch.positions[one], batch.visits[one], batch.seed))
        return made


class Residency:
    """Brings the chunks of one epoch, one ahead of the one that is served, and drops each with its last batch.

    Batches are asked for in any thread, each once. Whoever makes it closes it.

    Args:
        samples: of the dataset; ``samples.open`` was called.
        collate_fn: the user's.
        batch_size: samples in a batch; the last one may have fewer.
        workers: processes that prepare samples; 1 is the thread that brings them.
        in_sequence: whether a chunk is brought in the order of the dataset, not in that of the batches.
    """

    def __init__(
        self, samples: Samples, collate_fn: Callable[[Any], Any], batch_size: int, workers: int, *, in_sequence: bool
    ) -> None:
        self._samples, self._collate_fn = samples, collate_fn
        self._batch_size, self._workers, self._in_sequence = batch_size, workers, in_sequence
        self._reading = threading.Lock()  # a dataset of the user's own may be no thing for two threads at once
        self._changed = threading.Condition()  # guards what follows
        self._open: list[Chunk] = []
        self._ended: BaseException | None = None  # why no more chunks come
        self._is_closed, self._pid = False, os.getpid()
        self._ahead: list[Ahead] = []
        self._pool: WorkerPool[list[_Result]] | None = None
        self._filler = threading.Thread(target=self._fill, name="fastdata-chunks", daemon=True)

    def begin(self, stream: np.ndarray, visits: np.ndarray, first_batch: int, epoch: int, seed: int) -> None:
        """Start with a batch of an epoch, whose samples are at the positions of ``stream``: int64, in their order."""
        self._stream, self._visits, self._epoch, self._seed = stream, visits, epoch, seed
        self._coming: Iterator[int] = iter(range(first_batch, -(-len(stream) // self._batch_size)))
        self._pool = WorkerPool(self._load, self._workers)
        self._filler.start()

    def close(self, reason: str) -> None:
        """End what works for it; who asks for a batch is told the reason. Idempotent; nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._ended = self._ended or RuntimeError(f"this iterator has no more batches: {reason}")
            if self._pool is not None:
                self._pool.kill()
            self._changed.notify_all()
        if self._filler.is_alive() and self._filler is not threading.current_thread():
            self._filler.join()
        with self._changed:
            chunks, self._open = self._open, []
            own = {threading.get_ident()}  # of the last one to let go of an iterator, whose batch nobody gets
            self._changed.wait_for(lambda: all(chunk.readers <= own for chunk in chunks))
        for chunk in chunks:
            self._samples.drop(chunk.positions)

    def read(self, numbers: Sequence[int], ring: BatchRing) -> Any:
        """Make a batch, in memory of ``ring``, once its samples are there; they have these numbers in the epoch.

        Raises:
            SampleError: one is damaged, and may not be left out.
            Exception: no more chunks come; why.
        """
        number = numbers[0] // self._batch_size
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or self._holder(number) is not None)
            chunk = self._holder(number)
            if chunk is None:
                assert self._ended is not None
                raise copy.copy(self._ended) from self._ended.__cause__  # a raised one holds on to whom it reaches
            positions = chunk.batches.pop(number)
            chunk.readers.add(threading.get_ident())
        try:
            return self._make(chunk, number, positions, ring)
        finally:
            with self._changed:
                chunk.readers.discard(threading.get_ident())
                is_over = not chunk.batches and not chunk.readers
            if is_over:
                self._samples.drop(chunk.positions)
            with self._changed:
                self._open = [each for each in self._open if each is not chunk or not is_over]
                self._changed.notify_all()

    def _holder(self, number: int) -> Chunk | None:
        """The chunk that has all samples of a batch; None while they are not there."""
        for chunk in self._open:
            if number in chunk.batches and chunk.has(number):
                return chunk
        return None

    def _make(self, chunk: Chunk, number: int, positions: list[int], ring: BatchRing) -> Any:
        damaged = [position for position in positions if position in chunk.errors]
        view = chunk.view
        if damaged and (view.options.on_error == "raise" or len(damaged) == len(positions)):
            raise copy.copy(chunk.errors[damaged[0]])
        is_sound_B = np.array([position not in chunk.errors for position in positions], np.bool_)
        index_B, first = np.array(positions, np.int64)[is_sound_B], number * self._batch_size
        visits_B = self._visits[first : first + len(positions)][is_sound_B]
        batch = IndexBatch(index_B.tolist(), index_B, visits_B, self._seed)
        draws = DrawKey(self._seed, self._epoch, number)
        make = partial(make_batch, ring=ring, collate_fn=self._collate_fn, draws=draws, in_thread=True)
        if not chunk.roomless.isdisjoint(positions):
            return make(_OneByOne(self._samples, self._reading), None, batch)
        return make(view, None if view.has_own_items else view.lease()(), batch)

    # In the thread that brings chunks

    def _fill(self) -> None:
        assert self._pool is not None
        try:
            while numbers := list(islice(self._coming, self._samples.chunk_batches)):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._open) < CHUNKS_HELD or self._ended is not None)
                    if self._ended is not None:
                        return
                    (slot, *_) = {*range(CHUNKS_HELD)} - {chunk.slot for chunk in self._open}
                self._bring(self._chunk_of(numbers, slot), self._pool)
        except BaseException as error:  # noqa: BLE001  # raised where the batches would have come
            with self._changed:
                self._ended = self._ended or error.with_traceback(None)
                for chunk in self._open:
                    chunk.cut()  # batches that are there behind one that never comes are not served in its place
                self._changed.notify_all()
        finally:
            for ahead in self._ahead:
                ahead.drop()
            with self._changed:
                self._pool.close()

    def _load(self, task: _Task) -> list[_Result]:
        if os.getpid() != self._pid:  # the generators are the parent's, as they are in each worker and each epoch
            key = int(sample_keys(self._seed, self._epoch, np.array(task.positions[:1]))[0])
            random.seed(key)
            torch.default_generator.manual_seed(key)
            np.random.seed(key & 0xFFFFFFFF)
        with self._reading:
            return self._samples.load(task)

    def _chunk_of(self, numbers: list[int], slot: int) -> Chunk:
        size = self._batch_size
        batches = {number: self._stream[number * size : (number + 1) * size].tolist() for number in numbers}
        positions = np.array([*chain.from_iterable(batches.values())], np.int64)
        return Chunk(slot, np.sort(positions) if self._in_sequence else positions, batches)

    def _bring(self, chunk: Chunk, pool: WorkerPool[list[_Result]]) -> None:
        tasks = self._samples.begin(chunk)
        with self._changed:
            self._open.append(chunk)
        self._fetch_ahead(chunk)
        with contextlib.closing(pool.run(tasks)) as finished:
            for results in finished:
                with self._changed:
                    has_changed = [self._samples.enter(chunk, result) for result in results]
                    for each in self._open if any(has_changed) else ():
                        each.view = self._samples.view(each)
                    self._changed.notify_all()
                    if self._is_closed:
                        return
        if chunk.roomless:
            log.info("%d of %d samples have no room in their chunk", len(chunk.roomless), len(chunk.positions))
            fitting = self._samples.chunk_batches * len(chunk.there) // len(chunk.positions)
            self._samples.chunk_batches = max(fitting, 1)

    def _fetch_ahead(self, chunk: Chunk) -> None:
        """Begin to fetch what of a chunk is not on its way yet, and the chunk after it, so that no request waits."""
        if not self._samples.mirrored:
            return
        chunks = [chunk.positions]
        if self._ahead:  # the first chunk, which the loop waits for, has the network for itself
            first = (max(chunk.batches) + 1) * self._batch_size
            chunks.append(self._stream[first : first + len(chunk.positions)])
        for before in self._ahead:
            before.asks_no_more.set()
        self._ahead = [before for before in self._ahead if before.is_alive()]
        self._ahead += [store.fetch_ahead(*chunks) for store in self._samples.mirrored]
