"""Encoding prepared samples, and decoding them: the door to lz4 and zstandard.

LZ4 is the fastest to decode, Zstandard behind reversible prediction makes photographs half as
large, JPEG seven to nine times smaller for the price of exactness; ``"source"`` keeps a file's own
bytes.

Reversible prediction is a sample minus what its neighbours let one expect.
A sample is taken as planes of rows, each row filled up to whole words of 8 bytes, and a word as
**one integer**. So one ``add.accumulate`` of words undoes "minus the row above" for 8 bytes at a
time, and one multiplication undoes "minus the element to the left" within each word, because modulo
2**64

    word - (word << 8)  ==  word * (1 - 2**8)     and     (1 - 2**8) * 0x0101010101010101  ==  1.

Borrows between the bytes of a word are part of the residual and vanish with it: exact, and 0.4 %
larger than byte by byte. Both undone, 3 x 256 x 256 bytes take 65 us on one core, 3.0 GB/s, where
``np.cumsum`` of bytes takes 430 us (benchmarks/codecs.py). The two together are the planar
predictor left + above - (left of above), except that the first element of each word is predicted
from above alone.

Elements of 2, 4 or 8 bytes use the same words with wider elements (``lane``); their residuals are
then split into byte planes, so that the bytes that are nearly always equal stand together.

Shape letters: P planes, R rows, K words of a row.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntFlag
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fastdata.errors import CodecError, kind_of
from fastdata.pixels.describe import describe
from fastdata.pixels.images import (
    Array,
    SampleSpec,
    Scratch,
    decode_planes_into,
    encode_image,
    round_up_8,
)
from fastdata.stores.readers import Bytes

Settings = dict[str, "int | str | bool"]
"""Plain values that JSON keeps: ``name``, ``format`` (the version of the byte format),
arguments."""


class Codec(ABC):
    """Encodes prepared samples; safe from any threads and processes; pickles as its settings."""

    name: str
    lossless: bool = True
    library: ClassVar[str] = ""
    """What must be installed."""
    most_bytes: ClassVar[float] = math.inf
    """Of a sample."""

    @abstractmethod
    def encode(self, sample: Array) -> bytes:
        """Encode a C-contiguous sample; ``ValueError`` for one that has an ``obstacle``."""

    @abstractmethod
    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out`` completely, with no more memory than a few times ``out.nbytes``.

        Raises:
            CodecError: the data are damaged, or of a sample of another size.
        """

    def obstacle(self, spec: SampleSpec) -> str | None:
        """Why samples of this spec are refused."""
        if self.library and importlib.util.find_spec(self.library) is None:
            return _to_install(self.library)
        if spec.shape is None or spec.sample_bytes <= self.most_bytes:
            return None
        size = f"{spec.sample_bytes:,} bytes, {self.most_bytes:,} at most can be encoded"
        return f"a sample has {size}; store them raw"

    def settings(self) -> Settings:
        return {"name": self.name, "format": 1, **vars(self)}


def bytes_of(array: Array) -> Bytes:
    """View the memory of a sample to encode as bytes."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous; "
            "codecs take np.ascontiguousarray of it"
        )
    if array.dtype.hasobject:
        raise ValueError(
            f"an array of {array.dtype} holds Python objects, which no codec keeps; "
            "give a numeric dtype"
        )
    return array.reshape(-1).view(np.uint8)


def bytes_to_fill(out: Array) -> Bytes:
    if not out.flags.writeable:
        raise ValueError(f"the array of shape {out.shape} to decode into is read-only")
    return bytes_of(out)


def _size_error(codec: Codec, problem: str, out: Array) -> CodecError:
    return CodecError(
        f"codec {codec.name!r} found {problem}, but a sample of shape {out.shape} and {out.dtype} "
        f"needs {out.nbytes:,} bytes. The data are damaged or belong to another sample; "
        "prepare the samples anew."
    )


@cache
def _library(name: str) -> Any:
    """Imported only for a codec that needs it: it is not built for every Python."""
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise ImportError(f"{_to_install(name)} ({missing})") from missing


def _to_install(name: str) -> str:
    package = name.partition(".")[0]
    return f"the codec needs the package {package}: pip install {package}, or use another codec"


@dataclass(frozen=True)
class Lz4Codec(Codec):
    """Lossless; photographs hardly shrink (ratio 1.06), masks, drawings and medical images do.

    Encoded bytes, format 1: one block as the LZ4 Block Format Description defines it
    (github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without a size before or a checksum
    behind it, of the sample's memory in C order and the byte order of its dtype. A flipped bit may
    so go unnoticed; a size never does.
    """

    name = "lz4"
    library = "lz4"
    most_bytes = 0x7E000000  # LZ4_MAX_INPUT_SIZE

    def encode(self, sample: Array) -> bytes:
        return bytes(_library("lz4.block").compress(bytes_of(sample), store_size=False))

    def decode(self, data: memoryview, out: Array) -> None:
        target = bytes_to_fill(out)
        block = _library("lz4.block")
        try:
            raw = block.decompress(data, uncompressed_size=target.size)
        except (block.LZ4BlockError, ValueError, OverflowError) as problem:
            found = f"{len(data):,} bytes that are no block of at most that size"
            raise _size_error(self, found, out) from problem
        if len(raw) != target.size:
            raise _size_error(self, f"a block of {len(raw):,} bytes", out)
        target[:] = np.frombuffer(raw, np.uint8)


# Reversible prediction

_WORD = np.dtype("<u8")
_SHORTEST_ROW_BYTES = 32
"""Shorter rows are joined: to fill them up to whole words would cost more than prediction gains."""


class Filter(IntFlag):
    """What was done to a sample before compression, in order; its first byte when encoded."""

    NONE = 0
    GREEN = 1
    """Plane 1 of 3 was subtracted from planes 0 and 2, element by element."""
    ABOVE = 2
    """From each word the word one row above was subtracted, both little-endian integers."""
    LEFT = 4
    """Within each word, from each element the one to its left: ``word - (word << element
    bits)``."""
    SPLIT = 8
    """A bias was added (0x80 in each byte but the highest), then all lowest bytes, all second
    ..."""


class Layout(NamedTuple):
    """How a sample's bytes are laid out as words."""

    planes: int
    rows: int  # of a plane; a sample of one axis is one row
    row_bytes: int
    wide: int  # bytes of a row filled up to whole words
    lane: int  # bytes of an element, 1, 2, 4 or 8
    green: bool  # whether there are 3 planes of equal size, so that Filter.GREEN is possible

    @property
    def words(self) -> tuple[int, int, int]:
        """Shape (P, R, K); the only row of a one-axis sample becomes a column of words."""
        if self.planes * self.rows == 1:
            return 1, self.wide // 8, 1
        return self.planes, self.rows, self.wide // 8

    @property
    def size(self) -> int:
        return self.planes * self.rows * self.wide


@lru_cache(maxsize=256)
def layout_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Layout:
    lane = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    axes = list(shape)
    row_bytes = dtype.itemsize
    while axes:
        row_bytes *= axes.pop()
        if row_bytes >= _SHORTEST_ROW_BYTES:
            break
    rows = axes.pop() if axes else 1
    return Layout(
        planes=math.prod(axes),
        rows=rows,
        row_bytes=row_bytes,
        wide=round_up_8(row_bytes),
        lane=lane if lane in (1, 2, 4, 8) else 1,
        green=len(shape) >= 3 and shape[0] == 3,
    )


def apply_filter(sample: Bytes, layout: Layout, chosen: Filter) -> Bytes:
    """Filter a sample's bytes.

    Returns:
        New memory of ``layout.size`` bytes, or the sample if nothing is to do.
    """
    if not chosen:
        return sample
    lane = layout.lane
    elements = sample.view(f"<u{lane}")
    if Filter.GREEN in chosen:
        red, green, blue = elements.reshape(3, -1)
        elements = np.stack([red - green, green, blue - green])
    rows = elements.reshape(layout.planes, layout.rows, -1)
    fill = (layout.wide - layout.row_bytes) // lane
    if fill:
        rows = np.pad(rows, ((0, 0), (0, 0), (0, fill)), mode="edge")
    words = np.ascontiguousarray(rows).view(_WORD).reshape(layout.words)
    if Filter.ABOVE in chosen:
        words = np.concatenate([words[:, :1], words[:, 1:] - words[:, :-1]], axis=1)
    if Filter.LEFT in chosen and lane < _WORD.itemsize:
        words = words - (words << np.uint64(8 * lane))
    filtered = words.ravel()
    if Filter.SPLIT in chosen:
        biased = filtered.view(f"<u{lane}") + _bias(lane)
        filtered = biased.view(np.uint8).reshape(-1, lane).T.ravel()
    return filtered.view(np.uint8)


def undo_filter(
    filtered: Bytes, layout: Layout, chosen: Filter, out: Bytes, scratch: Scratch
) -> None:
    """Undo ``apply_filter``, in long calls on whole arrays: NumPy gives up the GIL during each.

    ``filtered``, ``layout.size`` bytes that begin on a multiple of 8, is overwritten and may be
    ``out`` itself.
    """
    lane = layout.lane
    if Filter.SPLIT in chosen:
        filtered = _join(filtered, lane, scratch)
    words = filtered.view(_WORD).reshape(layout.words)
    if Filter.LEFT in chosen and lane < _WORD.itemsize:
        ones = sum(1 << shift for shift in range(0, 64, 8 * lane))  # 1 in each element of a word
        words *= np.uint64(ones)
    if Filter.ABOVE in chosen:
        np.add.accumulate(words, axis=1, out=words)
    if filtered.ctypes.data != out.ctypes.data:
        rows = filtered.reshape(layout.planes, layout.rows, layout.wide)[..., : layout.row_bytes]
        out.reshape(rows.shape)[...] = rows
    if Filter.GREEN in chosen:
        red, green, blue = out.view(f"<u{lane}").reshape(3, -1)
        red += green
        blue += green


def _bias(lane: int) -> Any:
    return np.dtype(f"<u{lane}").type(sum(0x80 << shift for shift in range(0, 8 * lane - 8, 8)))


def _join(split: Bytes, lane: int, scratch: Scratch) -> Bytes:
    """Put byte planes together.

    Widening whole planes is 5 times as fast as copying bytes to every lane-th place.
    """
    dtype = np.dtype(f"<u{lane}")
    joined = scratch.take("joined", (split.size,))
    elements = joined.view(dtype)
    shifted = scratch.take("shifted", (split.size,)).view(dtype)
    lowest, *higher = split.reshape(lane, -1)
    elements[...] = lowest
    for position, plane in enumerate(higher, start=1):
        shifted[...] = plane
        shifted <<= dtype.type(8 * position)
        elements |= shifted
    elements -= _bias(lane)
    return joined


# Zstandard behind it

_HEAD_BYTES = 5
_TRIAL_BYTES = 24 * 1024
_NOISE = {"strategy": 1, "min_match": 7, "hash_log": 6, "window_log": 15}
"""How residuals of photographs are compressed: they hardly repeat, so what counts is a Huffman
table for every 32 KiB. Ratio 2.18 and 130 us to decode 3 x 256 x 256, where level 1 gives 2.12 and
144 us, level 3 gives 2.06 and 195 us."""


class _Workers(threading.local):
    """Each thread's own: zstandard's compressors are not safe from several."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._compressors: dict[int | None, Any] = {}

    @cached_property
    def decompressor(self) -> Any:
        return _library("zstandard").ZstdDecompressor()

    def compressor(self, chosen: Filter, level: int) -> Any:
        is_noise = Filter.LEFT in chosen and Filter.SPLIT not in chosen
        key = None if is_noise else level
        if key not in self._compressors:
            library = _library("zstandard")
            options = {"level": level}
            if is_noise:
                options = {"compression_params": library.ZstdCompressionParameters(**_NOISE)}
            self._compressors[key] = library.ZstdCompressor(**options)
        return self._compressors[key]


_workers = _Workers()


@dataclass(frozen=True, kw_only=True)
class ZstdCodec(Codec):
    """Lossless; chooses for each sample the prediction that makes it smallest.

    Photographs of 3 x 256 x 256: ratio 2.1, about 5,000 images/s decoded on one core.

    Encoded bytes, format 1: the filter (1 byte, the sum of ``Filter``'s values), the
    length of what follows (4 bytes, little-endian, unsigned), and one Zstandard frame (RFC 8878)
    with its content size and without a checksum. The frame holds the sample's memory in C order,
    filtered as ``apply_filter`` does. A flipped bit may so go unnoticed; a size never does.

    Args:
        level: of zstd, for what is not a photograph; negative ones are faster, 22 is the highest.
    """

    level: int = 1

    name = "zstd"
    library = "zstandard"
    most_bytes = 4_000_000_000  # a frame's length must fit 4 bytes

    def __post_init__(self) -> None:
        if not -131_072 <= self.level <= 22:
            raise ValueError(f"level of codec 'zstd' is {self.level}; it must be -131,072 to 22")

    def encode(self, sample: Array) -> bytes:
        # A strip stands for the sample: one compression of the whole, not four, 1.6 times the rate.
        strip = _middle_rows(sample)
        frames = {chosen: self._frame(strip, chosen) for chosen in _filters_for(sample)}
        best = min(frames, key=lambda chosen: len(frames[chosen]))
        frame = frames[best] if strip is sample else self._frame(sample, best)
        return bytes((best,)) + len(frame).to_bytes(_HEAD_BYTES - 1, "little") + frame

    def _frame(self, sample: Array, chosen: Filter) -> bytes:
        filtered = apply_filter(bytes_of(sample), layout_of(sample.shape, sample.dtype), chosen)
        frame: bytes = _workers.compressor(chosen, self.level).compress(filtered)
        return frame

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``; what memory it takes besides the thread keeps, and none for whole words."""
        target = bytes_to_fill(out)
        layout = layout_of(out.shape, out.dtype)
        chosen = self._filter_of(data, layout, out)
        is_in_place = layout.wide == layout.row_bytes and Filter.SPLIT not in chosen
        filtered = target
        if chosen and not (is_in_place and target.ctypes.data % 8 == 0):
            filtered = _workers.scratch.take("filtered", (layout.size,))
        self._decompress(data[_HEAD_BYTES:], filtered, out)
        if chosen:
            undo_filter(filtered, layout, chosen, target, _workers.scratch)

    def _filter_of(self, data: memoryview, layout: Layout, out: Array) -> Filter:
        if len(data) < _HEAD_BYTES:
            found = f"{len(data)} bytes, fewer than the {_HEAD_BYTES} of its head,"
            raise _size_error(self, found, out)
        length = _HEAD_BYTES + int.from_bytes(data[1:_HEAD_BYTES], "little")
        if length != len(data):
            raise CodecError(
                f"codec 'zstd' found {len(data):,} bytes where their head says {length:,}: "
                "cut off, too long or damaged. Prepare the samples anew."
            )
        number = data[0]
        # SPLIT is not optional with wide elements, so that there is one way to undo each lane.
        is_wide = layout.lane > 1
        is_split = bool(number & Filter.SPLIT)
        is_possible = number == 0 or (out.nbytes > 0 and is_split == is_wide and number < 16)
        if not is_possible or (number & Filter.GREEN and not layout.green):
            raise CodecError(
                f"codec 'zstd' found filter {number}, which samples of shape {out.shape} and "
                f"{out.dtype} cannot have (format 1). The data are damaged, belong to another "
                "sample, or a newer version wrote them."
            )
        return Filter(number)

    def _decompress(self, frame: memoryview, filtered: Bytes, out: Array) -> None:
        """Fill ``filtered``; the size that a frame claims is checked before it is decompressed."""
        library = _library("zstandard")
        written = 0
        try:
            size = library.frame_content_size(frame)
            if size != filtered.size:
                claim = f"a frame of {size:,} bytes where {filtered.size:,} are due"
                raise _size_error(self, claim, out)
            # It holds as many bytes as fit, so zstd writes to `filtered` without a buffer.
            if size:
                written = _workers.decompressor.stream_reader(frame).readinto(filtered)
        except library.ZstdError as problem:
            raise _size_error(self, f"a damaged frame ({problem})", out) from problem
        if written != filtered.size:
            found = f"a frame that ends after {written:,} bytes of {filtered.size:,}"
            raise _size_error(self, found, out)


def _filters_for(sample: Array) -> set[Filter]:
    """What is tried; elements of several bytes are split whatever else is done."""
    layout = layout_of(sample.shape, sample.dtype)
    if not sample.nbytes:
        return {Filter.NONE}
    split = Filter.SPLIT if layout.lane > 1 else Filter.NONE
    both = split | Filter.ABOVE | Filter.LEFT
    filters = {Filter.NONE, split, split | Filter.ABOVE, both}
    return filters | {both | Filter.GREEN} if layout.green else filters


def _middle_rows(sample: Array) -> Array:
    """The middle rows of each plane, on which the filter is chosen; all of a small sample."""
    if sample.nbytes <= 2 * _TRIAL_BYTES or sample.ndim < 2:
        return sample
    rows = sample.shape[-2]
    count = max(1, rows * _TRIAL_BYTES // sample.nbytes)
    start = (rows - count) // 2
    return np.ascontiguousarray(sample[..., start : start + count, :])


_LONGEST_SIDE_PX = 65_500
"""Of libjpeg; the standard's own limit is 65,535."""
_SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")


@dataclass(frozen=True, kw_only=True)
class JpegCodec(Codec):
    """**Lossy**: samples are re-encoded at their prepared size and come back slightly changed.

    Only images of uint8, (3, H, W) or (1, H, W), for in anything else (labels, depths, tables) a
    change is an error. ImageNet photographs at 256 x 256: ratio 7 with the defaults.

    Encoded bytes, format 1: one baseline JPEG file (ITU-T T.81) with a JFIF header, YCbCr as JFIF
    has it or grey. Which pixels it decodes to is libjpeg-turbo's (accurate integer inverse DCT,
    smooth chroma upsampling).

    Args:
        quality: 1 to 95, libjpeg's scale. 92 changes ImageNet pixels by 2 levels of 255 on average.
        subsampling: of the colours, ``"4:4:4"`` (none), ``"4:2:2"`` or ``"4:2:0"``.

    Example:
        >>> codec = JpegCodec()
        >>> grey, out = np.full((3, 32, 32), 128, np.uint8), np.empty((3, 32, 32), np.uint8)
        >>> codec.decode(memoryview(codec.encode(grey)), out)
        >>> bool((out == grey).all())
        True
    """

    quality: int = 92
    subsampling: str = "4:4:4"

    name = "jpeg"
    lossless = False
    makes_jpeg_files = True
    """The core decodes what is served of them."""

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 95:
            raise ValueError(
                f"quality of codec 'jpeg' is {self.quality}; it must be 1 to 95. "
                "Exact codecs: lz4, zstd"
            )
        if self.subsampling not in _SUBSAMPLINGS:
            known = ", ".join(_SUBSAMPLINGS)
            raise ValueError(
                f"subsampling of codec 'jpeg' is {self.subsampling!r}; it must be {known}"
            )

    def encode(self, sample: Array) -> bytes:
        self._check(sample)
        bytes_of(sample)
        return encode_image(sample, "JPEG", quality=self.quality, subsampling=self.subsampling)

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``; the size in the file's header is checked before any pixel is decoded."""
        bytes_to_fill(out)
        self._check(out)
        try:
            decode_planes_into(data, out)
        except (OSError, ValueError) as problem:
            raise CodecError(
                f"codec 'jpeg' found {len(data):,} bytes that give no image of {out.shape}: "
                f"{problem}. The data are damaged or belong to another sample; "
                "prepare the samples anew."
            ) from problem

    def obstacle(self, spec: SampleSpec) -> str | None:
        reason = self._spoils(spec)
        return reason and f"{reason}; use codec='zstd' or 'lz4', which keep them exactly"

    @staticmethod
    def _spoils(spec: SampleSpec) -> str | None:
        shape = spec.shape
        if spec.dtype != "uint8":
            return f"JPEG keeps 8 bits, not {spec.dtype}"
        if shape is None:
            return None
        if len(shape) == 2:
            return "an array (H, W) looks like a label mask, and a lossy codec would change labels"
        if len(shape) != 3 or shape[0] not in (1, 3):
            return f"JPEG keeps images of 1 or 3 planes (C, H, W), not {shape}"
        height, width = shape[1:]
        if min(height, width) < 1 or max(height, width) > _LONGEST_SIDE_PX:
            return f"JPEG keeps sides of 1 to {_LONGEST_SIDE_PX:,} px, not {height} x {width}"
        return None

    def _check(self, sample: Array) -> None:
        spec = SampleSpec(shape=sample.shape, dtype=sample.dtype.name, form="array")
        reason = self.obstacle(spec)
        if reason is not None:
            shape = f"shape {sample.shape} and {sample.dtype}"
            raise ValueError(f"codec 'jpeg' cannot keep a sample of {shape}: {reason}")


class OwnCodec(Codec):
    """A user's object that has ``encode`` and ``decode``. Pickles if the object does."""

    is_own = True

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.name = str(getattr(codec, "name", type(codec).__name__))
        self.lossless = bool(getattr(codec, "lossless", True))

    def encode(self, sample: Array) -> bytes:
        data = self.codec.encode(sample)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(
                f"encode of codec {self.name!r} gave {kind_of(data)}; it must give bytes"
            )
        return bytes(data)

    def decode(self, data: memoryview, out: Array) -> None:
        self.codec.decode(data, out)

    def obstacle(self, spec: SampleSpec) -> str | None:
        reason: str | None = getattr(self.codec, "obstacle", super().obstacle)(spec)
        return reason

    def settings(self) -> Settings:
        return {"name": self.name}


_CODECS: dict[str, type[Codec]] = {"lz4": Lz4Codec, "zstd": ZstdCodec, "jpeg": JpegCodec}
KNOWN_CODECS = tuple(_CODECS)


def describe_codec(codec: Any, cache_key: str | None = None) -> str:
    """Text that is equal for what ``codec=`` takes where it encodes alike."""
    if codec in ("auto", "source"):
        return str(codec)
    if isinstance(codec, tuple | list):
        return " + ".join(describe_codec(each, cache_key) for each in codec)
    made = find_codec(codec)
    if isinstance(made, OwnCodec):
        kind = type(made.codec).__qualname__
        return f"{kind} {made.name} {describe(made.codec, cache_key)}"
    return json.dumps(made.settings(), sort_keys=True)


def find_codec(codec: str | object) -> Codec:
    """Make the codec of that name, or take a user's object as one.

    It has ``encode(sample)`` and ``decode(data, out)``; its ``name``, ``lossless`` and
    ``obstacle(spec)`` are used where it has them.
    """
    if isinstance(codec, Codec):
        return codec
    if isinstance(codec, type):
        name = codec.__name__
        raise TypeError(f"codec={name} is a class; give an instance of it: codec={name}()")
    if isinstance(codec, str):
        if codec not in _CODECS:
            known = ", ".join(map(repr, KNOWN_CODECS))
            raise ValueError(
                f"codec={codec!r} is not known; {known} are, "
                "and so is any object with encode(sample) -> bytes and decode(data, out)"
            )
        return _CODECS[codec]()
    missing = [name for name in ("encode", "decode") if not callable(getattr(codec, name, None))]
    if missing:
        raise TypeError(
            f"an object of type {type(codec).__name__} is no codec: "
            f"it has no method {' and no '.join(missing)}. A codec has encode(sample) -> bytes "
            "and decode(data, out), which fills the array out."
        )
    return OwnCodec(codec)


def codec_of(settings: Settings) -> Codec:
    """Make the codec of fastdata whose ``settings()`` these are, without pickle."""
    arguments = dict(settings)
    name = arguments.pop("name", None)
    version = arguments.pop("format", None)
    if name not in _CODECS:
        raise ValueError(
            f"the data were encoded by codec {name!r}, which is none of fastdata's "
            f"({', '.join(KNOWN_CODECS)}); give the codec object that encoded them"
        )
    if version != 1:
        raise ValueError(
            f"the data have format {version} of codec {name!r}, but this version of fastdata "
            "knows format 1; use the version that wrote them or prepare the samples anew"
        )
    try:
        return _CODECS[str(name)](**arguments)
    except TypeError as unknown:
        raise ValueError(
            f"codec {name!r} does not know the settings {arguments}: {unknown}"
        ) from unknown
