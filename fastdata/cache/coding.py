"""How the parts of samples are encoded on disk, and their writers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fastdata.cache.manifest import Part
from fastdata.cache.writers import HeapWriter, TableWriter, free_bytes
from fastdata.codecs import Codec, SourceDecoder, codec_of, find_codec
from fastdata.errors import CacheError
from fastdata.ingest import Forecast
from fastdata.memory import format_bytes
from fastdata.options import Options
from fastdata.preparation import Road, look_longer, try_all
from fastdata.report import log
from fastdata.spec import SampleSpec
from fastdata.trial import choices_for

__all__ = ["SOURCE", "CacheWriter", "Coders", "Coding", "choose_coding", "coder_of", "make_writer", "make_writers"]

SOURCE = "source"
_SPARE_BYTES = 256 << 20
"""Left on the disk where the choice is ours."""

CacheWriter = TableWriter | HeapWriter
Coders = tuple["Codec | SourceDecoder | None", ...]


class Coding(NamedTuple):
    """What encodes each part, None keeps it raw; its settings; and about what all its samples take."""

    coders: Coders
    settings: tuple[dict[str, Any] | None, ...]
    part_bytes: tuple[int, ...]

    def of_part(self, part: int) -> Coding:
        """The same for one part alone."""
        return Coding((self.coders[part],), (self.settings[part],), (self.part_bytes[part],))


def choose_coding(road: Road, options: Options, expected: Forecast, cache_dir: Path) -> Coding:
    """Keep samples raw where the disk has room for them, else by the fastest lossless codec, or as the user says.

    Raises:
        ValueError: the codec that the user wants cannot encode them.
    """
    parts = len(expected.specs)
    free = max(free_bytes(cache_dir) - _SPARE_BYTES, 0)
    raw = Coding((None,) * parts, (None,) * parts, expected.part_bytes)
    is_free = options.codec == "auto"
    if is_free and expected.need_bytes <= free:
        return raw
    trials = try_all(road, options, look_longer(road))
    usable = [trial for trial in trials if trial.obstacle is None]
    if not is_free and not usable:
        raise ValueError(f"codec={options.codec!r} is not possible here: {trials[0].obstacle}")
    fitting = [trial for trial in usable if not is_free or (trial.lossless and trial.need_bytes <= free)]
    if not fitting:
        return raw  # its writer says need, free and cure
    best = max(fitting, key=lambda trial: trial.decode_per_s)
    if is_free:
        log.info("codec=%r: raw %s, %s free", best.codec, format_bytes(expected.need_bytes), format_bytes(free))
    if best.codec == SOURCE:
        return Coding((road.decoder,), ({"name": SOURCE},), best.part_bytes)
    codecs = next(choice for choice in choices_for(options.codec, parts) if choice.name == best.codec).codecs
    return Coding(codecs, tuple(dict(codec.settings()) for codec in codecs), best.part_bytes)


def coder_of(part: Part, number: int, road: Road, options: Options) -> Codec | SourceDecoder | None:
    """What encodes and decodes a part of a cache; None if it is raw.

    Raises:
        CacheError: this run does not have it.
    """
    if part.codec is None:
        return None
    if part.codec["name"] == SOURCE:
        if road.decoder is None:
            raise CacheError("the cache holds image files as they are, which only fastdata's own loader prepares")
        return road.decoder
    given = options.codec
    if given not in ("auto", SOURCE):
        codec = find_codec(given[number] if isinstance(given, (tuple, list)) else given)
        if codec.settings() == part.codec:
            return codec
    try:
        return codec_of(part.codec)
    except ValueError as unknown:
        raise CacheError(str(unknown)) from unknown


def make_writers(
    folder: Path,
    expected: Forecast,
    coding: Coding,
    length: int,
    shape: tuple[int, ...] | None,
    any_shapes: bool,
) -> list[CacheWriter]:
    """Make the writer of each part, for samples of any shapes if they turned out not to have the expected ones."""
    writers: list[CacheWriter] = []
    try:
        for part, spec in enumerate(expected.specs):
            is_certain = spec.shape == shape and not any_shapes
            spec = replace(spec, shape=None) if any_shapes else spec
            writers.append(make_writer(folder, part, spec, coding.of_part(part), length, is_certain=is_certain))
    except BaseException:
        for writer in writers:
            writer.close()
        raise
    return writers


def make_writer(
    folder: Path,
    part: int,
    spec: SampleSpec,
    coding: Coding,
    length: int,
    first_shard: int = 0,
    *,
    is_certain: bool = False,
) -> CacheWriter:
    """Make the writer of one part.

    Raises:
        CacheError: the disk is too full.
    """
    if coding.coders[0] is None and spec.is_dense and spec.sample_bytes:
        return TableWriter(folder, part, spec, length, first_shard=first_shard)
    return HeapWriter(
        folder,
        part,
        spec,
        coding.coders[0],
        length=length,
        expected_bytes=coding.part_bytes[0],
        settings=coding.settings[0],
        is_certain=is_certain,
        first_shard=first_shard,
    )
