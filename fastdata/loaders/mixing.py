"""A ``collate_fn`` that mixes batches by MixUp or CutMix, run on whole batches by the core.

A ``collate_fn`` that only stacks samples and calls a transform that mixes them need not be called.
To find that out, its code is run once on stand-ins instead of samples. After that a ``Mixer`` makes
the random draws, and the rows of a batch are mixed while the core writes them, or by a prefetcher
on its device.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastdata.datasets.batch import Collate, collate
from fastdata.datasets.buffers import BatchRing, allocate_batch
from fastdata.datasets.reader import Reader
from fastdata.datasets.trees import as_channels_last, map_batch
from fastdata.datasets.visits import IndexBatch
from fastdata.errors import StoreGoneError
from fastdata.loaders.mixers import Mixer, NotServedError, TimmMixer, mixer_of
from fastdata.loaders.parts import AnyHandle, AnyReader, JoinedReader
from fastdata.pixels.arrays import Array
from fastdata.pixels.blend import Blend, RowBlender, serving_order
from fastdata.pixels.callables import copy_on_stand_ins
from fastdata.pixels.scratch import Scratch
from fastdata.pixels.steps import Step

Tensor = torch.Tensor

# Recognition


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """A ``collate_fn`` that only stacks samples and mixes them.

    Attributes:
        mixer: makes the random draws of its transform.
        form: the value that it returns, with ``_Part`` in the places of images and labels.
    """

    mixer: Mixer
    form: Any

    def obstacle(self, reader: AnyReader) -> str:
        """Return why the core cannot mix the batches of a reader; empty if it can."""
        if reader.obstacle is not None:
            return reader.obstacle
        readers = reader.readers if isinstance(reader, JoinedReader) else [reader]
        for each in readers:
            numbers = each.targets.numbers
            is_pair = each.keys is None and not each.has_index
            if len(each.columns) > 1 or not is_pair or each.plan.views:
                return "samples are not pairs of one image and its label"
            if numbers is None or numbers.dtype != np.int64:
                return "the targets are not class numbers"
            is_planar = len(each.outputs[0][0]) == 3 and each.columns[0].plan.kind != "hwc"
            if not is_planar or not self.mixer.takes(each.dtypes[0]):
                return f"{self.mixer.name} does not take {each.image_form}"
        return ""

    def draw(self, batch: IndexBatch, reader: AnyReader) -> Blend | None:
        """Draw how a batch is mixed; None if it stays unchanged."""
        assert batch.draws is not None
        [(shape, _)] = reader.outputs
        return self.mixer.draw(batch.draws, (len(batch), *shape), _dtype_of(reader))

    def to_batch(self, images: Tensor, labels: Tensor, blend: Blend | None) -> Any:
        """Return what the ``collate_fn`` returns, for images that are mixed already."""
        if blend is not None:
            labels = blend.labels(labels, self.mixer.classes, *self.mixer.label_values)
        made = (images, labels)
        return map_batch(lambda part: made[part.number], self.form, _is_part)

    def labels_of(self, batch: IndexBatch, reader: AnyReader) -> Tensor:
        """Return the class numbers of a batch.

        Raises:
            RuntimeError: a number is not a class; the error is torch's.
        """
        if isinstance(reader, JoinedReader):
            labels: Tensor = reader.collated_targets(batch)
        else:
            labels = reader.targets.collated(batch)
        array = labels.numpy()
        if array.min() < 0 or array.max() >= self.mixer.classes:
            torch.nn.functional.one_hot(labels, self.mixer.classes)  # raises
        return labels


def find_mixing(collate_fn: Collate) -> Mixing | str:
    """Return the mixing of a ``collate_fn``, or the reason why it must be called."""
    finding = _Finding()
    try:
        call = finding.stand_in(collate_fn) or copy_on_stand_ins(collate_fn, finding.stand_in)
        form = call(finding.samples)
    except Exception:  # noqa: BLE001  # stand-ins refuse all but stacking and mixing
        return finding.reason
    if len(finding.mixers) != 1 or not _is_mixed(form):
        return finding.reason
    return Mixing(mixer=finding.mixers[0], form=form)


def served_mixing(collate_fn: Collate, reader: AnyReader | None) -> Mixing | str:
    """Return the mixing of a ``collate_fn`` for a reader's batches, or why it must be called.

    The reason is empty if ``collate_fn`` does not mix at all, or if there is no reader.
    """
    if collate_fn in (collate, default_collate) or reader is None:
        return ""
    mixing = find_mixing(collate_fn)
    if isinstance(mixing, str):
        return mixing
    obstacle = mixing.obstacle(reader)
    return f"collate_fn= is called on each batch: {obstacle}" if obstacle else mixing


@dataclass(frozen=True)
class _Part:
    """A stand-in for images (0) or labels (1), before or after they are mixed."""

    number: int
    is_mixed: bool = False


def _is_part(value: Any) -> bool:
    return type(value) is _Part


def _is_mixed(form: Any) -> bool:
    """Return True if a form holds mixed images and mixed labels, and nothing else."""
    if _is_part(form):
        return bool(form.is_mixed)
    parts = list(form.values()) if type(form) is dict else form
    return type(parts) in (list, tuple) and bool(parts) and all(map(_is_mixed, parts))


class _Finding:
    """Stand-ins for samples, stacking and mixing, which record the mixer that is called.

    Attributes:
        samples: stand-in for the list of samples.
        mixers: mixers of the transforms that were called.
        reason: why the ``collate_fn`` must be called, if its code does anything else.
    """

    def __init__(self) -> None:
        self.samples = object()
        self.mixers: list[Mixer] = []
        self.reason = "collate_fn= is your own"

    def stand_in(self, value: Any) -> Any:
        if value is collate or value is default_collate:
            return self._stack
        try:
            mixer = mixer_of(value)
        except NotServedError as why:
            self.reason = f"collate_fn= is your own: {why}"
            return None
        return None if mixer is None else partial(self._mix, mixer)

    def _stack(self, samples: Any) -> Any:
        if samples is not self.samples:
            raise TypeError("something else is stacked")
        return [_Part(0), _Part(1)]

    def _mix(self, mixer: Mixer, *given: Any) -> Any:
        is_timms = isinstance(mixer, TimmMixer)
        # torchvision's transforms also accept a list or tuple, and return the same type.
        inputs = given[0] if len(given) == 1 and not is_timms else given
        expected = [self.samples] if mixer.takes_samples else [_Part(0), _Part(1)]
        if type(inputs) not in (list, tuple) or list(inputs) != expected:
            raise TypeError("something else is mixed")
        self.mixers.append(mixer)
        return type(inputs)((_Part(0, is_mixed=True), _Part(1, is_mixed=True)))


# Batches on the CPU


class MixedBatches:
    """Reads and mixes the batches of an epoch, in any thread.

    Args:
        mixing: mixing of the loader's ``collate_fn``.
        handle: handle of the reader. Only the handle is kept, because a reader keeps the samples in
            memory.
    """

    def __init__(self, mixing: Mixing, handle: AnyHandle) -> None:
        self._mixing = mixing
        self._handle = handle
        self._scratch = Scratch()
        self._blender: RowBlender | None = None

    def __call__(self, batch: IndexBatch, ring: BatchRing) -> Any:
        reader = reader_of(self._handle)
        labels = self._mixing.labels_of(batch, reader)
        blend = self._mixing.draw(batch, reader)
        source, cast = _staged_from(reader)
        can_write = reader.can_write_channels_last and source.can_write_channels_last
        is_last = batch.channels_last and can_write
        outs = allocate_batch(len(batch), reader.outputs, ring.lease, channels_last=[is_last])
        if blend is None or blend.keeps_images:
            reader.read_into(outs, batch)
        else:
            if self._blender is None:
                self._blender = RowBlender(cast, str(_dtype_of(reader)).removeprefix("torch."))
            self._write(blend, self._blender, source, batch, outs[0], is_last=is_last)
        images = torch.from_numpy(outs[0]).view(_dtype_of(reader))
        made = self._mixing.to_batch(images, labels, blend)
        return as_channels_last(made) if batch.channels_last else made

    def _write(
        self,
        blend: Blend,
        blender: RowBlender,
        source: AnyReader,
        batch: IndexBatch,
        out: Array,
        *,
        is_last: bool,
    ) -> None:
        """Read samples from ``source`` to scratch memory, and write the mixed rows to ``out``."""
        order_B = places_B = np.arange(len(batch))
        is_one_by_one = isinstance(source, Reader) and source.programs[0].can_blend
        if is_one_by_one:
            order_B, places_B = serving_order(len(batch), is_mirrored=blend.is_mirrored)
        lease = partial(_take, self._scratch)
        count = int(places_B.max()) + 1
        [staged] = allocate_batch(count, source.outputs, lease, channels_last=[is_last])
        blending = blender.blending(blend, staged, places_B, order_B, out)
        if isinstance(source, Reader) and is_one_by_one:
            served = batch.rows(order_B)
            source.read_into([staged], served, places_B[order_B], blending=blending)
        else:
            source.read_into([staged], batch)
            blending.write()


def reader_of(handle: AnyHandle) -> AnyReader:
    """Return the reader of a handle.

    Raises:
        StoreGoneError: the dataset was closed.
    """
    reader = handle.reader
    if reader is None:
        raise StoreGoneError(handle.reason)
    return reader


def _take(scratch: Scratch, size_bytes: int) -> memoryview:
    return scratch.take("staged", (size_bytes,)).data


def _dtype_of(reader: AnyReader) -> torch.dtype:
    first = reader.readers[0] if isinstance(reader, JoinedReader) else reader
    return first.dtypes[0]


def _staged_from(reader: AnyReader) -> tuple[AnyReader, Step | None]:
    """Return a reader of samples to mix, and the conversion that follows it, or None.

    Samples are read as uint8 where possible, which is a quarter of the memory, and converted when
    they are mixed. Several datasets may convert differently, and steps may follow the conversion:
    then finished samples are read.
    """
    if not isinstance(reader, Reader):
        return reader, None
    sent, [cast] = reader.without_cast
    # The conversion may turn one channel into three.
    is_alike = sent.outputs[0][0] == reader.outputs[0][0]
    return (sent, cast) if is_alike and cast is not None else (reader, None)


# Batches for a device


def read_parts(
    mixing: Mixing, handle: Callable[[], Reader], batch: IndexBatch, ring: BatchRing
) -> list[Any]:
    """Return what is sent to a device: the images of a batch, its labels, and its blend."""
    reader = handle()
    sent, _ = reader.without_cast
    [images, _] = sent.read_batch(batch, ring.lease, lambda _: None)
    return [images, mixing.labels_of(batch, reader), mixing.draw(batch, reader)]


def mix_parts(mixing: Mixing, convert: Callable[[Tensor], Tensor] | None, parts: list[Any]) -> Any:
    """Convert and mix the parts of a batch on the device where they are."""
    images, labels, blend = parts
    if convert is not None:
        images = convert(images)
    if blend is not None:
        images = blend.images(images)
    return mixing.to_batch(images, labels, blend)
