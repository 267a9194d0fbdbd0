"""Read samples, prepare them, and split them into parts for a store.

If the compiled core can run all steps, it prepares several image files at once, without the GIL. If
not, the loader and the steps run as the user wrote them, on one sample after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import CacheError, IngestError, RemoteError, SampleError
from fastdata.faults import sample_error
from fastdata.pixels.arrays import Array, Shape
from fastdata.pixels.core import library
from fastdata.pixels.decode import OpenedImages
from fastdata.pixels.openings import Opening
from fastdata.pixels.plan import Transform
from fastdata.pixels.program import Program
from fastdata.pixels.samples import Form, SampleSpec, is_image, is_pil, to_stored
from fastdata.pixels.split import split_transform, split_upright
from fastdata.report import log
from fastdata.sources.files import FileSource
from fastdata.sources.source import Source
from fastdata.stores.kept import Layout
from fastdata.stores.source_codec import SourceDecoder
from fastdata.stores.store import ShapesDifferError

READ_AT_ONCE = 16
"""Number of samples that are read together."""


class ReadSample(NamedTuple):
    """A prepared sample, split into parts.

    Attributes:
        number: index of the sample in its source.
        parts: values and original form of each part.
        target: target without its images, which are parts; None for files, whose table has it.
        layout: how the parts are put together again.
    """

    number: int
    parts: Sequence[tuple[Array, Form]]
    target: Any
    layout: Layout


class SampleRun(NamedTuple):
    """Prepared samples of one shape, split into parts.

    Attributes:
        numbers: indices of the samples in their source.
        parts: values (n, *shape) and original form of each part.
        targets: see ``ReadSample``.
        layout: see ``ReadSample``.
    """

    numbers: Sequence[int]
    parts: Sequence[tuple[Array, Form]]
    targets: Sequence[Any]
    layout: Layout = Layout()

    def copies(self) -> list[ReadSample]:
        """Copy each sample to new memory."""
        samples = []
        for k, number in enumerate(self.numbers):
            parts = [(values[k, ...].copy(), form) for values, form in self.parts]
            samples.append(ReadSample(number, parts, self.targets[k], self.layout))
        return samples


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a transform that run one after the other. Can be pickled if the steps can."""

    steps: tuple[Transform, ...]

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample


@dataclass(frozen=True)
class FilePreparer:
    """Function that prepares image files with the compiled core: bytes to planes (C, h, w), uint8.

    Args:
        prepare: function that yields planes (n, C, h, w), uint8, for each run of opened images of
            one size. The memory is reused for the next run.
        opening: the user's loader, which the core replaces; Pillow opens other formats as it does.
        upright: True if images are first rotated as their EXIF requires.
    """

    prepare: Callable[[OpenedImages], Iterator[Array]]
    opening: Opening
    upright: bool = False

    def __call__(self, data: bytes | memoryview) -> Array:
        def by_pillow(_: int) -> Array:
            return self.opening.decode_pixels(data, upright=self.upright)

        images = OpenedImages.of_files(
            [data], by_pillow, upright=self.upright, channels=self.opening.channels
        )
        return np.array(next(self.prepare(images))[0])


class Preparer(NamedTuple):
    """Reads samples of a source, and prepares each before it is stored.

    Attributes:
        source: source of the samples.
        prepare: steps that run on each sample.
        shape: shape of every prepared sample, if it follows from the steps; else None.
        by_core: function that opens and prepares samples without the GIL; None if Python code does
            this.
    """

    source: Source
    prepare: Steps
    shape: Shape | None = None
    by_core: FilePreparer | None = None

    @property
    def decoder(self) -> SourceDecoder | None:
        """Decoder for files that are stored unchanged; None if the user's own code opens them."""
        if self.by_core is not None:
            is_whole = not (self.prepare.steps or self.by_core.upright)
            return SourceDecoder(self.by_core, None, makes_jpeg_files=is_whole)
        opening = self.source.opening
        return None if opening is None else SourceDecoder(opening.decode, self.prepare)


def choose_preparer(source: Source, steps: tuple[Transform, ...]) -> Preparer:
    """Choose how samples are read and prepared: by the core if it can run all steps on files."""
    as_written = Preparer(source, Steps(steps))
    opening = source.opening
    # torchvision resizes tensors without rounding between its two passes. The core rounds there, as
    # Pillow does.
    if opening is None or (steps and opening.form == "tensor"):
        return as_written
    obstacle = library.obstacle()
    if obstacle is not None:
        log.info("Pillow prepares the images, which takes longer: %s", obstacle)
        return as_written
    upright, served = split_upright(steps)
    plan = split_transform(served, form=opening.form, channels=opening.channels, prepared=0)
    # There is a step that the core cannot run, or one whose result is not an image.
    if plan.kind != opening.form or plan.per_sample:
        return as_written
    program = Program(plan.batch_ops, SampleSpec(shape=None, dtype="uint8", form="pil"))
    # If a loader returns one channel for gray files, they differ in shape from the other files.
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
"""Errors that already name a sample, or that are not the fault of a sample."""


@contextlib.contextmanager
def naming_sample(source: Source, index: int, *, is_read: bool = False) -> Iterator[None]:
    """Turn an error into one that names the sample's path and index; see ``sample_error``."""
    try:
        yield
    except NO_FAULT_OF_A_SAMPLE:
        raise
    except Exception as cause:  # user code and decoders raise anything
        raise sample_error(source.path(index), index, cause, is_read=is_read) from cause


def open_files(source: FileSource, indices: Sequence[int], *, upright: bool) -> OpenedImages:
    """Read image files for the core.

    Raises:
        SampleError: a file cannot be read, or its image cannot be decoded.
    """
    try:
        files = source.read_files(indices)
    except OSError:  # one file failed: read them one by one to find it
        files = []
        for index in indices:
            with naming_sample(source, index):
                files += source.read_files([index])

    opening = source.opening
    assert opening is not None

    # Called for files that the core does not decode: other formats than JPEG, and damaged files, so
    # that Pillow raises its error.
    def by_pillow(b: int) -> Array:
        with naming_sample(source, indices[b]):
            return opening.decode_pixels(files[b], upright=upright)

    return OpenedImages.of_files(files, by_pillow, upright=upright, channels=opening.channels)


def read_samples(preparer: Preparer, indices: Sequence[int]) -> Iterator[SampleRun | SampleError]:
    """Yield runs of prepared samples, in order, and the error of each sample that fails.

    A run may overwrite the memory of the run before it.
    """
    for first in range(0, len(indices), READ_AT_ONCE):
        group = indices[first : first + READ_AT_ONCE]
        done = 0
        if preparer.by_core is not None:
            # After an error, the rest of the group is read one by one. This finds the bad sample,
            # and Pillow may open a file that the core refuses.
            with contextlib.suppress(SampleError, ValueError):
                for run in _read_together(preparer, preparer.by_core, group):
                    done += len(run.numbers)
                    yield run
        for index in group[done:]:
            try:
                run = _read_one(preparer, index)
            except SampleError as error:
                yield error
            else:
                yield run


def _read_together(
    preparer: Preparer, by_core: FilePreparer, indices: Sequence[int]
) -> Iterator[SampleRun]:
    source = preparer.source
    assert isinstance(source, FileSource)
    images = open_files(source, indices, upright=by_core.upright)
    form = by_core.opening.form
    first = 0
    # The core reuses the memory of one run for the next, and prepares a run when it is requested.
    # New memory would cost more time than the kernels that fill it.
    for planes in by_core.prepare(images):
        last = first + len(planes)
        yield SampleRun(indices[first:last], [(planes, form)], [None] * len(planes))
        first = last


def _read_one(preparer: Preparer, index: int) -> SampleRun:
    """Read and prepare a sample, and split it into parts; images of its target come last."""
    with naming_sample(preparer.source, index):
        sample, target = preparer.source.read(index)
    with naming_sample(preparer.source, index, is_read=True):
        prepared = preparer.prepare(sample)
        is_tuple = isinstance(prepared, (tuple, list))
        parts = list(map(to_stored, prepared if is_tuple else [prepared]))
        if isinstance(preparer.source, FileSource):
            target = None  # it is in the table of the files
        target_is_part = is_image(target)
        places: tuple[int | str, ...] = ()
        if target_is_part:
            parts.append(to_stored(target, is_mask=True))
            target = None
        else:
            places = _images_in(target, parts[0][0].shape[-2:])
            parts += [to_stored(target[place], is_mask=True) for place in places]
            if places:
                target = _without(target, places)
        layout = Layout(is_tuple=is_tuple, target_is_part=target_is_part, mask_places=places)
        return SampleRun(
            [index], [(values[None], form) for values, form in parts], [target], layout
        )


def _images_in(target: Any, size: Shape) -> tuple[int | str, ...]:
    """Return the positions of images in a tuple, or their names in a dict.

    In a dict, arrays count as images too if they have the height and width of the sample, which
    excludes boxes.
    """
    if type(target) is tuple:
        return tuple(k for k, value in enumerate(target) if is_pil(value))
    if type(target) is not dict:
        return ()
    return tuple(
        name
        for name, value in target.items()
        if is_pil(value) or (is_image(value) and tuple(value.shape[-2:]) == size)
    )


def _without(target: Any, places: tuple[int | str, ...]) -> Any:
    """Return a tuple or dict with None at these positions or names."""
    if type(target) is tuple:
        return tuple(None if k in places else value for k, value in enumerate(target))
    return {name: None if name in places else value for name, value in target.items()}
