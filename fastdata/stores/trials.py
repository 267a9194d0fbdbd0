"""Trials of codecs on a few samples: their compression and their decoding speed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fastdata.machine.budget import CodecTrial
from fastdata.pixels.arrays import Array
from fastdata.sources.files import FileSource
from fastdata.stores.source_codec import SOURCE, SourceDecoder
from fastdata.stores.store import Decoder

if TYPE_CHECKING:
    from fastdata.stores.forecast import Forecast


Coders: TypeAlias = "tuple[Decoder | None, ...]"
"""Coders of the parts of samples; None for a raw part."""


def try_codecs(expected: Forecast, *codecs: Any) -> list[CodecTrial]:
    """Encode and decode the probed samples on one core, with each codec that ``codec=`` allows."""
    choices: dict[str, Coders] = {}
    for codec in codecs:
        choices = _coders_by_name(codec, expected) | choices
    return [_try(name, coders, expected) for name, coders in choices.items()]


def _coders_by_name(codec: Any, expected: Forecast) -> dict[str, Coders]:
    """Return the choices that ``codec=`` allows, each with a coder for every part."""
    from fastdata.stores.codecs import KNOWN_CODECS, find_codec

    parts = len(expected.parts)
    if codec == SOURCE:
        return {SOURCE: (expected.preparer.decoder,)}
    if codec == "auto":
        choices = _coders_by_name(SOURCE, expected)
        # The codec of the images matters most. Other parts, such as masks, shrink best with zstd.
        for name in KNOWN_CODECS:
            choices |= _coders_by_name((name, *["zstd"] * (parts - 1)), expected)
        return choices
    each = codec if isinstance(codec, (tuple, list)) else [codec] * parts
    if len(each) != parts:
        raise ValueError(
            f"codec= has {len(each)} codecs, but samples have {parts} parts; give one codec for "
            "each part"
        )
    coders = tuple(map(find_codec, each))
    return {"+".join(dict.fromkeys(coder.name for coder in coders)): coders}


_LABELS = (
    "codec 'jpeg' would change the labels or depths that arrays (H, W) may hold. Use codec='zstd' "
    "or 'lz4', which keep them exactly, or return gray images as (H, W, 1)"
)


def _try(name: str, coders: Coders, expected: Forecast) -> CodecTrial:
    """Measure the size and the decoding time of the probed samples, or return the obstacle."""
    lossless = all(coder is None or coder.lossless for coder in coders)
    trial = CodecTrial(name, coders=coders, lossless=lossless)
    count = len(expected.probed)
    part_bytes = []
    seconds = 0.0
    for number, coder in enumerate(coders):
        samples = [read.parts[number][0] for read in expected.probed]
        try:
            if coder is None:
                raise ValueError("samples are not files, or your own loader= opens them")
            if expected.parts[number].spec.form == "hw" and coder.name == "jpeg":
                raise ValueError(_LABELS)
            encoded = _encode(coder, samples, expected)
        except (ImportError, ValueError) as obstacle:
            return trial._replace(obstacle=str(obstacle))
        part_bytes.append(math.ceil(sum(map(len, encoded)) / count * expected.count))
        # The first call is not timed, because it may import a library.
        coder.decode(memoryview(encoded[0]), np.empty_like(samples[0]))
        begun = time.perf_counter()
        for data, sample in zip(encoded, samples, strict=True):
            coder.decode(memoryview(data), np.empty_like(sample))
        seconds += time.perf_counter() - begun
    return trial._replace(
        part_bytes=tuple(part_bytes),
        ratio=expected.raw.need_bytes / max(sum(part_bytes), 1),
        decode_per_s=count / max(seconds, 1e-9),
    )


def _encode(coder: Decoder, samples: Sequence[Array], expected: Forecast) -> list[bytes]:
    """Encode one part of the probed samples.

    Raises:
        ValueError: the codec cannot store such samples. The message says why.
    """
    if not isinstance(coder, SourceDecoder):
        return [coder.encode(sample) for sample in samples]
    if len(expected.parts) > 1:
        raise ValueError("samples have several parts")
    source = expected.preparer.source
    assert isinstance(source, FileSource)
    return source.read_files([read.number for read in expected.probed])
