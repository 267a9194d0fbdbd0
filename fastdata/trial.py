"""Codecs tried on a few of the user's samples: how small they make them, and how fast they give them back."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdata.codecs import Codec, SourceDecoder, find_codec
from fastdata.ingest import Forecast
from fastdata.sources import FileBytes
from fastdata.storage import CodecTrial
from fastdata.stores.encoded import Decoder

__all__ = ["Choice", "choices_for", "try_codecs", "try_source"]

_LOSSLESS, _LOSSY = ("lz4", "zstd"), ("jpeg",)
_SECOND_PART = "zstd"
_ROUNDS = 3
_FILE_SIZES = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to encode samples.

    Args:
        codecs: one for each part of a sample.
    """

    codecs: tuple[Codec, ...]

    @property
    def name(self) -> str:
        """The codecs' names, each once."""
        return "+".join(dict.fromkeys(codec.name for codec in self.codecs))


def choices_for(codec: Any, parts: int) -> list[Choice]:
    """The codecs that ``codec=`` leaves open, the source's own bytes aside.

    Args:
        codec: ``"auto"``, a name, an object, or one of these for each part.
        parts: of a sample.

    Raises:
        ValueError: an unknown name, or another number of codecs than of parts.
    """
    if codec == "auto":
        return [_choice_of(name, parts) for name in (*_LOSSLESS, *_LOSSY)]
    if isinstance(codec, (tuple, list)):
        if len(codec) != parts:
            raise ValueError(f"codec= has {len(codec)} codecs, but samples have {parts} parts; give one for each")
        return [Choice(tuple(map(find_codec, codec)))]
    return [Choice((find_codec(codec),) * parts)]


def _choice_of(name: str, parts: int) -> Choice:
    """One of the built-in codecs for the first part, a lossless one for masks and the like."""
    return Choice((find_codec(name), *[find_codec(_SECOND_PART)] * (parts - 1)))


def try_codecs(choice: Choice, expected: Forecast, count: int) -> CodecTrial:
    """Encode and decode the samples looked at on one core.

    Args:
        choice: with one codec for each part.
        expected: whose samples are tried.
        count: number of samples of the whole dataset.
    """
    obstacle = _obstacle(choice.codecs, expected)
    lossless = all(codec.lossless for codec in choice.codecs)
    if obstacle is not None:
        return CodecTrial(codec=choice.name, obstacle=obstacle, lossless=lossless)
    columns = [
        [np.ascontiguousarray(sample.parts[part].array) for sample in expected.looked_at]
        for part in range(len(choice.codecs))
    ]
    encodings = [
        [codec.encode(array) for array in column] for codec, column in zip(choice.codecs, columns, strict=True)
    ]
    seconds = sum(map(_decode_s, choice.codecs, encodings, columns))
    looked_at = len(expected.looked_at)
    encoded_bytes = [sum(map(len, column)) for column in encodings]
    return CodecTrial(
        codec=choice.name,
        part_bytes=tuple(math.ceil(size / looked_at * count) for size in encoded_bytes),
        ratio=sum(array.nbytes for column in columns for array in column) / max(sum(encoded_bytes), 1),
        decode_per_s=looked_at / seconds,
        lossless=lossless,
    )


def try_source(decoder: SourceDecoder, files: FileBytes, expected: Forecast) -> CodecTrial:
    """Try keeping the files' own bytes; their sizes are those of files spread over the whole dataset."""
    count = len(files)
    spread = sorted({round(k * (count - 1) / _FILE_SIZES) for k in range(_FILE_SIZES + 1)})
    mean_bytes = sum(files.size_bytes(index) for index in spread) / len(spread)
    samples = [sample.parts[0].array for sample in expected.looked_at]
    data = [files.read(sample.position)[0].data for sample in expected.looked_at]
    return CodecTrial(
        codec=decoder.name,
        part_bytes=(math.ceil(mean_bytes * count),),
        ratio=sum(sample.nbytes for sample in samples) / max(sum(map(len, data)), 1),
        decode_per_s=len(data) / _decode_s(decoder, data, samples, rounds=1),
    )


def _obstacle(codecs: Sequence[Codec], expected: Forecast) -> str | None:
    """Why a codec cannot keep one of the samples looked at."""
    for part, (codec, spec) in enumerate(zip(codecs, expected.specs, strict=True)):
        shapes = dict.fromkeys(sample.parts[part].array.shape for sample in expected.looked_at)
        obstacle = next((found for shape in shapes if (found := codec.obstacle(replace(spec, shape=shape)))), None)
        if obstacle is not None and part:
            names = ", ".join(map(repr, [codecs[0].name, *[_SECOND_PART] * (len(codecs) - 1)]))
            return f"{obstacle} (part {part + 1} of each sample; one codec for each part: codec=({names}))"
        if obstacle is not None:
            return obstacle
    return None


def _decode_s(
    codec: Decoder, encodings: Sequence[bytes | memoryview], samples: Sequence[np.ndarray], rounds: int = _ROUNDS
) -> float:
    """Seconds that decoding all of them takes, the best of some rounds."""
    outs = [np.zeros_like(sample, order="C") for sample in samples]
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for encoding, out in zip(encodings, outs, strict=True):
            codec.decode(memoryview(encoding), out)
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)
