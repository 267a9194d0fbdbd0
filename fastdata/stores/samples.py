"""Samples: how they are read and taken apart before they are stored, and how kept ones are given.

A sample is a sequence of parts: the image, or each value of a tuple such as (image, mask), and
behind these the targets that are images themselves.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import (
    CacheError,
    ChannelsError,
    IngestError,
    RemoteError,
    SampleError,
    sample_error,
)
from fastdata.machine.processes import Leader
from fastdata.machine.shared import SampleTable, collate_targets
from fastdata.pixels import core, plan_transform, split_upright
from fastdata.pixels.images import (
    Form,
    OpenedImages,
    Opening,
    SampleSpec,
    SourceDecoder,
    is_image,
    is_pil,
    present,
    to_stored,
)
from fastdata.pixels.program import Program
from fastdata.report import log
from fastdata.sources import FileSource, ItemKeys, Source, chosen
from fastdata.stores.readers import ShapesDifferError, Store

SOURCE = "source"
AT_ONCE = 16
"""Samples that are read together."""


Part = tuple[np.ndarray, Form]
"""Of a sample: its values, and what it was."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How samples are put together of their parts.

    Args:
        is_tuple: whether they are tuples of parts.
        target_is_part: whether targets are the last part.
        keys: of items that are dicts.
        mask_places: of targets that are tuples, the places of images, which are the last parts.
    """

    is_tuple: bool = False
    target_is_part: bool = False
    keys: ItemKeys | None = None
    mask_places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        keys = self.keys
        if keys and (keys.image not in keys.names or len({*keys.names}) < len(keys.names)):
            raise ValueError(f"its keys do not fit: {keys}")


class ReadSample(NamedTuple):
    """A prepared sample, taken apart; its target has None where that is a part."""

    number: int
    parts: Sequence[Part]
    target: Any
    layout: Layout


PLAIN_LAYOUT = Layout()
_PLAIN = {int, float, bool, str, bytes, type(None)}
"""Types of targets that hold no images."""


def take_apart(index: int, parts: list[Part], target: Any, *, is_tuple: bool = False) -> ReadSample:
    """A sample of these parts, with those of its target behind them."""
    if type(target) in _PLAIN and not is_tuple:
        return ReadSample(index, parts, target, PLAIN_LAYOUT)
    target_is_part = is_image(target)
    places: tuple[int, ...] = ()
    if target_is_part:
        parts.append(to_stored(target, is_mask=True))
        target = None
    elif type(target) is tuple:
        places = tuple(k for k, value in enumerate(target) if is_pil(value))
        parts += [to_stored(target[k], is_mask=True) for k in places]
        target = tuple(None if k in places else value for k, value in enumerate(target))
    layout = Layout(is_tuple=is_tuple, target_is_part=target_is_part, mask_places=places)
    return ReadSample(index, parts, target, layout)


# Reading


@dataclass(frozen=True, slots=True)
class Steps:
    steps: tuple[Callable[[Any], Any], ...]

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample


@dataclass(frozen=True)
class FilePreparer:
    """Prepares an image file by the core, without an image in between: planes (C, h, w), uint8.

    Args:
        prepare: of opened images makes planes (n, C, h, w), uint8, of neighbours of one size; they
            stay until the next are asked for.
        opening: of the loader that it stands for.
        upright: whether images are turned as their EXIF says first.
    """

    prepare: Callable[[OpenedImages], Iterator[np.ndarray]]
    opening: Opening
    upright: bool = False

    def __call__(self, data: bytes | memoryview) -> np.ndarray:
        def by_pillow(_: int) -> np.ndarray:
            return self.opening.decode_pixels(data, upright=self.upright)

        images = OpenedImages.of_files(
            [data], by_pillow, upright=self.upright, channels=self.opening.channels
        )
        return np.array(next(self.prepare(images))[0])


class ReadPath(NamedTuple):
    """Where samples come from, and what is done to each before it is stored."""

    source: Source
    prepare: Steps
    shape: tuple[int, ...] | None = None
    """Of every prepared sample, where it follows from the steps."""

    by_core: FilePreparer | None = None
    """What opens and prepares samples without the GIL; None where it is others' code."""

    @property
    def decoder(self) -> SourceDecoder | None:
        """Prepares the bytes of files; None where samples are none, or are opened by others."""
        if self.by_core is not None:
            return SourceDecoder(self.by_core, Steps(()))
        opening = self.source.opening
        return None if opening is None else SourceDecoder(opening.decode, self.prepare)


def read_path(source: Source, steps: tuple[Callable[[Any], Any], ...]) -> ReadPath:
    """How samples to be stored are read: image files by the core, where it knows all steps."""
    as_written = ReadPath(source, Steps(steps))
    opening = source.opening
    if opening is None or (steps and opening.form == "tensor"):  # whose resize the core rounds
        return as_written
    obstacle = core.obstacle()
    if obstacle is not None:
        log.info("Pillow prepares the images, which takes longer: %s", obstacle)
        return as_written
    upright, served = split_upright(steps)
    plan = plan_transform(served, form=opening.form, channels=opening.channels, prepared=0)
    if plan.kind != opening.form or plan.per_sample:
        return as_written
    program = Program(plan.batch_ops, SampleSpec(shape=None, dtype="uint8", form="pil"))
    output = None if opening.channels is None else program.output((opening.channels, 1, 1))
    by_core = FilePreparer(program.prepare, opening, upright or opening.is_upright)
    return as_written._replace(by_core=by_core, shape=None if output is None else output[0])


NO_FAULT_OF_A_SAMPLE = (
    MemoryError,
    SampleError,
    IngestError,
    RemoteError,
    CacheError,
    ShapesDifferError,
)
"""Errors that name what they are of, or that no sample is to blame for."""


@contextlib.contextmanager
def naming_sample(source: Source, index: int, *, is_read: bool = False) -> Iterator[None]:
    """Make what goes wrong with a sample an error that names its path and index.

    A SampleError, if it is the sample that is at fault.
    """
    try:
        yield
    except NO_FAULT_OF_A_SAMPLE:
        raise
    except Exception as cause:  # user code and decoders raise anything; all of it is named and kept
        raise sample_error(source.path(index), index, cause, is_read=is_read) from cause


def open_files(source: FileSource, indices: Sequence[int], *, upright: bool) -> OpenedImages:
    """The files of samples, for the core; what is wrong with one is a SampleError."""
    try:
        files = source.read_files(indices)
    except OSError:  # of one of them
        files = []
        for index in indices:
            with naming_sample(source, index):
                files += source.read_files([index])

    opening = source.opening
    assert opening is not None

    def by_pillow(b: int) -> np.ndarray:
        with naming_sample(source, indices[b]):
            return opening.decode_pixels(files[b], upright=upright)

    return OpenedImages.of_files(files, by_pillow, upright=upright, channels=opening.channels)


def read_samples(path: ReadPath, indices: Sequence[int]) -> Iterator[ReadSample | SampleError]:
    """Read and prepare samples, in order, or say what is wrong with one.

    Each may lie over those before.
    """
    for first in range(0, len(indices), AT_ONCE):
        group = indices[first : first + AT_ONCE]
        done = 0
        if path.by_core is not None:
            # One after the other tells whose an error is.
            with contextlib.suppress(SampleError, ValueError):
                for read in _read_together(path, path.by_core, group):
                    done += 1
                    yield read
        for index in group[done:]:
            try:
                yield _read_one(path, index)
            except SampleError as error:
                yield error


def _read_together(
    path: ReadPath, by_core: FilePreparer, indices: Sequence[int]
) -> Iterator[ReadSample]:
    source = path.source
    assert isinstance(source, FileSource)
    images = open_files(source, indices, upright=by_core.upright)
    form = by_core.opening.form
    prepared = itertools.chain.from_iterable(by_core.prepare(images))
    targets = chosen(source.targets, indices)
    for index, target, pixels in zip(indices, targets, prepared, strict=True):
        yield take_apart(index, [(pixels, form)], target)


def _read_one(path: ReadPath, index: int) -> ReadSample:
    with naming_sample(path.source, index):
        sample, target = path.source.read(index)
    with naming_sample(path.source, index, is_read=True):
        prepared = path.prepare(sample)
        is_tuple = isinstance(prepared, (tuple, list))
        parts = list(map(to_stored, prepared if is_tuple else [prepared]))
        return take_apart(index, parts, target, is_tuple=is_tuple)


# What is kept


@dataclass(frozen=True)
class KeptSamples(Layout):
    """The kept samples of a dataset, and their targets; a source of them, too.

    Args:
        stores: one for each part.
        table: of the targets that are no parts; or what has its ``has_paths``, ``path``,
            ``target``, ``collated_targets``, ``close`` and length.
        shared_by: tells other ranks of the machine where they lie.
    """

    stores: tuple[Store, ...]
    table: SampleTable | Any
    opening = None
    is_remote = False
    shared_by: Leader | None = None

    @property
    def images(self) -> Store:
        """The first part."""
        return self.stores[0]

    def filled_share(self, index: np.ndarray | None = None) -> float:
        """Share of the samples, or of those of ``index``, that are kept already."""
        return self.stores[0].filled_share(index)

    def __len__(self) -> int:
        return len(self.table)

    def expect(self, indices: Sequence[int]) -> None:
        self.images.expect(indices)

    def path(self, index: int) -> str | None:
        return self.table.path(index) if self.table.has_paths else None

    def read(self, index: int) -> tuple[Any, Any]:
        """Sample and target as they were before they were stored, in memory of the caller's own."""
        count = len(self.stores) - self.target_is_part - len(self.mask_places)
        parts = tuple(self._owned(store, index) for store in self.stores[:count])
        sample = parts if self.is_tuple else parts[0]
        return sample, self.target(index)

    def target(self, index: int) -> Any:
        if self.target_is_part:
            return self._owned(self.stores[-1], index)
        target = self.table.target(index)
        if not self.mask_places:
            return target
        values = list(target)
        stores = self.stores[-len(self.mask_places) :]
        for place, store in zip(self.mask_places, stores, strict=True):
            values[place] = self._owned(store, index)
        return tuple(values)

    def collated_targets(self, index_B: np.ndarray) -> Any:
        """What ``default_collate`` makes of the targets of a batch."""
        if self.target_is_part or self.mask_places:
            return collate_targets([self.target(index) for index in index_B.tolist()])
        return self.table.collated_targets(index_B)

    def _owned(self, store: Store, index: int) -> Any:
        with self.naming_damage():
            array = store.read(index)
        return present(array.copy() if store.gives_views else array, store.spec.form)

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Have a store's error of a damaged sample name its path."""
        try:
            yield
        except SampleError as damaged:
            index = damaged.index
            path = self.path(index)
            if damaged.path == path:
                raise
            cause = damaged.__cause__
            if cause is not None and self.images.codec == SOURCE:  # what is wrong with the file
                raise sample_error(path, index, cause) from cause
            what = str(damaged).partition("cannot be read: ")[2]
            raise SampleError(what, index=index, path=path) from cause
        except ChannelsError as wrong:
            path = self.path(wrong.index)
            raise SampleError(wrong.reason, index=wrong.index, path=path) from wrong
