"""Encoding prepared samples and decoding them into the caller's memory: the door to lz4 and zstandard.

LZ4 is the fastest to decode, Zstandard behind reversible prediction makes photographs half as large, JPEG seven to
nine times smaller for the price of exactness; ``"source"`` keeps a file's own bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import lz4.block
import numpy as np
import zstandard

from fastdata.codecs.prediction import Bytes, Filter, Layout, apply_filter, layout_of, undo_filter
from fastdata.describe import describe
from fastdata.errors import CodecError, kind_of
from fastdata.images import Array, SampleSpec, Scratch, decode_planes_into, encode_planes, round_up_8

Settings = dict[str, "int | str | bool"]
"""Plain values that JSON keeps: ``name``, ``format`` (the version of the byte format), and the codec's arguments."""


class Codec(Protocol):
    """Encodes prepared samples; safe from several threads and processes at once; pickles as its settings.

    Samples are C-contiguous. ``decode`` fills ``out`` completely, taking no more memory than a few times ``out.nbytes``
    whatever the data claim, or raises ``CodecError`` for data that are damaged or of a sample of another size.
    ``obstacle`` says why samples of a spec are refused, and ``encode`` raises ``ValueError`` for them.
    """

    @property
    def name(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    def encode(self, sample: Array) -> bytes: ...
    def decode(self, data: memoryview, out: Array) -> None: ...
    def obstacle(self, spec: SampleSpec) -> str | None: ...
    def settings(self) -> Settings: ...


def bytes_of(array: Array) -> Bytes:
    """View the memory of a sample to encode as bytes."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous; "
            "codecs take np.ascontiguousarray of it"
        )
    if array.dtype.hasobject:
        raise ValueError(f"an array of {array.dtype} holds Python objects, which no codec keeps; give a numeric dtype")
    return array.reshape(-1).view(np.uint8) if array.dtype.itemsize else np.empty(0, np.uint8)


def bytes_to_fill(out: Array) -> Bytes:
    if not out.flags.writeable:
        raise ValueError(f"the array of shape {out.shape} to decode into is read-only")
    return bytes_of(out)


def size_error(name: str, found: str, out: Array) -> CodecError:
    return CodecError(
        f"codec {name!r} found {found}, but a sample of shape {out.shape} and {out.dtype} needs {out.nbytes:,} bytes. "
        "The data are damaged or belong to another sample; prepare the samples anew."
    )


def too_large(spec: SampleSpec, most_bytes: int) -> str | None:
    if spec.shape is None or spec.sample_bytes <= most_bytes:
        return None
    return f"a sample has {spec.sample_bytes:,} bytes, {most_bytes:,} at most can be encoded; store them raw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lz4Codec:
    """Lossless; photographs hardly shrink (ratio 1.06), masks, drawings, synthetic and medical images do.

    Encoded bytes, format 1: one block as the LZ4 Block Format Description defines it
    (github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without a size before or a checksum behind it, of the
    sample's memory in C order and the byte order of its dtype. A flipped bit may so go unnoticed; a size never does.

    Args:
        level: with ``high_compression`` 1 to 12, 0 for the library's 9; without it the acceleration, where 0
            is none and larger is faster and worse.
        high_compression: search longer while encoding; decoding takes the same time or less.
    """

    level: int = 0
    high_compression: bool = False

    name: ClassVar[str] = "lz4"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.level < 0 or (self.high_compression and self.level > 12):
            most = "12 with high_compression" if self.high_compression else "any acceleration"
            raise ValueError(f"level of codec 'lz4' is {self.level}; it must be 0 to {most}")

    def encode(self, sample: Array) -> bytes:
        how: dict[str, Any] = {"mode": "fast", "acceleration": self.level or 1}
        if self.high_compression:
            how = {"mode": "high_compression", "compression": self.level or 9}
        return bytes(lz4.block.compress(bytes_of(sample), store_size=False, **how))

    def decode(self, data: memoryview, out: Array) -> None:
        target = bytes_to_fill(out)
        try:
            raw = lz4.block.decompress(data, uncompressed_size=target.size)
        except (lz4.block.LZ4BlockError, ValueError, OverflowError) as problem:
            found = f"{len(data):,} bytes that are no block of at most that size"
            raise size_error(self.name, found, out) from problem
        if len(raw) != target.size:
            raise size_error(self.name, f"a block of {len(raw):,} bytes", out)
        target[:] = np.frombuffer(raw, np.uint8)

    def obstacle(self, spec: SampleSpec) -> str | None:
        return too_large(spec, 0x7E000000)  # LZ4_MAX_INPUT_SIZE

    def settings(self) -> Settings:
        return {"name": self.name, "format": 1, "level": self.level, "high_compression": self.high_compression}


_HEAD_BYTES = 5
_TRIAL_BYTES = 24 * 1024
_NOISE: dict[str, int] = {"strategy": 1, "min_match": 7, "hash_log": 6, "window_log": 15}
"""How residuals of photographs are compressed: they hardly repeat, so what counts is a Huffman table for every 32 KiB.
Ratio 2.18 and 130 us to decode 3 x 256 x 256, where level 1 gives 2.12 and 144 us, level 3 gives 2.06 and 195 us."""
_BOTH = Filter.ABOVE | Filter.LEFT
_PLAIN = ((Filter.NONE, "level"), (Filter.ABOVE, "level"), (_BOTH, "noise"))
_WIDE = ((Filter.NONE, "level"), *((Filter.SPLIT | more, "level") for more in (Filter.NONE, Filter.ABOVE, _BOTH)))
_CANDIDATES = {
    (False, False): _PLAIN,
    (False, True): (*_PLAIN, (Filter.GREEN | _BOTH, "noise")),
    (True, False): _WIDE,
    (True, True): (*_WIDE, (Filter.SPLIT | Filter.GREEN | _BOTH, "level")),
}
"""(Elements of several bytes, three planes) -> filters that are tried, and how their results are compressed."""


class _Workers(threading.local):
    """Each thread's own compressors and decompressor: zstandard's are not safe from several."""

    def __init__(self) -> None:
        self.compressors: dict[object, Any] = {}
        self.decompressor = zstandard.ZstdDecompressor()
        self.scratch = Scratch()

    def compress(self, data: Bytes, level: int, how: str) -> bytes:
        key = level if how == "level" else how
        if key not in self.compressors:
            noise = zstandard.ZstdCompressionParameters(**_NOISE)
            options: dict[str, Any] = {"level": level} if how == "level" else {"compression_params": noise}
            self.compressors[key] = zstandard.ZstdCompressor(**options)
        frame: bytes = self.compressors[key].compress(data)
        return frame


_workers = _Workers()


@dataclass(frozen=True, kw_only=True, slots=True)
class ZstdCodec:
    """Lossless; chooses for each sample the prediction that makes it smallest.

    Photographs of 3 x 256 x 256: ratio 2.1, about 5,000 images/s decoded on one core.

    Encoded bytes, format 1: the filter (1 byte, the sum of ``prediction.Filter``'s values), the length of what follows
    (4 bytes, little-endian, unsigned), and one Zstandard frame (RFC 8878) with its content size and without a checksum.
    The frame holds the sample's memory in C order, filtered as ``prediction`` says. A flipped bit may so go unnoticed;
    a size never does.

    Args:
        level: of zstd, for what is not a photograph; negative ones are faster, 22 is the highest.
    """

    level: int = 1

    name: ClassVar[str] = "zstd"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not -131_072 <= self.level <= 22:
            raise ValueError(f"level of codec 'zstd' is {self.level}; it must be -131,072 to 22")

    def encode(self, sample: Array) -> bytes:
        data, layout = bytes_of(sample), layout_of(sample.shape, sample.dtype)
        strip, small = _strip(data, layout)
        candidates = _CANDIDATES[layout.lane > 1, small.green] if data.size else _PLAIN[:1]
        tried = [_workers.compress(apply_filter(strip, small, chosen), self.level, how) for chosen, how in candidates]
        best = min(range(len(tried)), key=lambda k: len(tried[k]))
        chosen, how = candidates[best]
        # A strip stands for the sample: one compression of the whole instead of four, 1.6 times the rate.
        whole = strip is data
        frame = tried[best] if whole else _workers.compress(apply_filter(data, layout, chosen), self.level, how)
        return bytes((chosen,)) + len(frame).to_bytes(_HEAD_BYTES - 1, "little") + frame

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``; besides it only memory that the thread keeps is used, and none where rows are whole words."""
        target, layout = bytes_to_fill(out), layout_of(out.shape, out.dtype)
        chosen = self._filter_of(data, layout, out)
        filtered = target
        if chosen and not (layout.is_whole and Filter.SPLIT not in chosen and target.ctypes.data % 8 == 0):
            filtered = _workers.scratch.take("filtered", (layout.size,))
        self._decompress(data[_HEAD_BYTES:], filtered, out)
        if chosen:
            undo_filter(filtered, layout, chosen, target, _workers.scratch)

    def obstacle(self, spec: SampleSpec) -> str | None:
        return too_large(spec, 4_000_000_000)  # the length of a frame must fit 4 bytes

    def settings(self) -> Settings:
        return {"name": self.name, "format": 1, "level": self.level}

    def _filter_of(self, data: memoryview, layout: Layout, out: Array) -> Filter:
        if len(data) < _HEAD_BYTES:
            raise size_error(self.name, f"{len(data)} bytes, fewer than the {_HEAD_BYTES} of its head,", out)
        length = _HEAD_BYTES + int.from_bytes(data[1:_HEAD_BYTES], "little")
        if length != len(data):
            raise CodecError(
                f"codec {self.name!r} found {len(data):,} bytes where their head says {length:,}: cut off, too long or "
                "damaged. Prepare the samples anew."
            )
        number = data[0]
        # SPLIT is not optional with wide elements, so that there is one way to undo each lane.
        has_split = bool(number & Filter.SPLIT) == (layout.lane > 1) and out.nbytes > 0
        if number > 15 or (number and not has_split) or (number & Filter.GREEN and not layout.green):
            raise CodecError(
                f"codec {self.name!r} found filter {number}, which samples of shape {out.shape} and {out.dtype} cannot "
                "have (format 1). The data are damaged, belong to another sample, or a newer version wrote them."
            )
        return Filter(number)

    def _decompress(self, frame: memoryview, filtered: Bytes, out: Array) -> None:
        """Fill ``filtered``; what the frame claims to hold is held against it before anything is decompressed."""
        try:
            size = zstandard.frame_content_size(frame)
            if size != filtered.size:
                raise size_error(self.name, f"a frame of {size:,} bytes where {filtered.size:,} are due", out)
            # The frame says that it holds as many as fit, so zstd writes to `filtered` without a buffer.
            written = int(_workers.decompressor.stream_reader(frame).readinto(filtered)) if size else 0
        except zstandard.ZstdError as problem:
            raise size_error(self.name, f"a damaged frame ({problem})", out) from problem
        if written != filtered.size:
            raise size_error(self.name, f"a frame that ends after {written:,} bytes of {filtered.size:,}", out)


def _strip(data: Bytes, layout: Layout) -> tuple[Bytes, Layout]:
    """The middle rows of each plane, on which the filter is chosen; all of a small sample."""
    if data.size <= 2 * _TRIAL_BYTES:
        return data, layout
    rows = data.reshape(layout.planes, layout.rows, layout.row_bytes)
    if layout.rows > 1:
        count = max(1, layout.rows * _TRIAL_BYTES // data.size)
        start = (layout.rows - count) // 2
        part = np.ascontiguousarray(rows[:, start : start + count])
    else:
        part = np.ascontiguousarray(rows[..., : max(1, _TRIAL_BYTES // layout.planes // 8) * 8])
    count, row_bytes = part.shape[1:]
    # Where short rows were joined, a plane is no plane of colour any more.
    green = layout.green and layout.planes % 3 == 0
    return part.reshape(-1), replace(layout, rows=count, row_bytes=row_bytes, wide=round_up_8(row_bytes), green=green)


LONGEST_SIDE_PX = 65_500
"""Of libjpeg; the standard's own limit is 65,535."""
SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegCodec:
    """**Lossy**: samples are re-encoded at their prepared size and come back slightly changed.

    Only images of uint8, (3, H, W) or (1, H, W), for in anything else (labels, depths, tables) a change is an error.
    ImageNet photographs at 256 x 256: ratio 7 with the defaults.

    Encoded bytes, format 1: one baseline JPEG file (ITU-T T.81) with a JFIF header, YCbCr as JFIF has it or grey. Which
    pixels it decodes to is libjpeg-turbo's (accurate integer inverse DCT, smooth chroma upsampling).

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

    name: ClassVar[str] = "jpeg"
    lossless: ClassVar[bool] = False
    makes_jpeg_files: ClassVar[bool] = True
    """The core decodes what is served of them."""

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 95:
            raise ValueError(f"quality of codec 'jpeg' is {self.quality}; it must be 1 to 95. Exact codecs: lz4, zstd")
        if self.subsampling not in SUBSAMPLINGS:
            known = ", ".join(SUBSAMPLINGS)
            raise ValueError(f"subsampling of codec 'jpeg' is {self.subsampling!r}; it must be {known}")

    def encode(self, sample: Array) -> bytes:
        self._check(sample)
        bytes_of(sample)
        return encode_planes(sample, quality=self.quality, subsampling=self.subsampling)

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``; the size in the file's header is held against it before any pixel is decoded."""
        bytes_to_fill(out)
        self._check(out)
        try:
            decode_planes_into(data, out)
        except (OSError, ValueError) as problem:
            raise CodecError(
                f"codec {self.name!r} found {len(data):,} bytes that give no image of {out.shape}: {problem}. "
                "The data are damaged or belong to another sample; prepare the samples anew."
            ) from problem

    def obstacle(self, spec: SampleSpec) -> str | None:
        reason, shape = None, spec.shape
        if spec.dtype != "uint8":
            reason = f"JPEG keeps 8 bits, not {spec.dtype}"
        elif shape is not None and len(shape) == 2:
            reason = "an array (H, W) looks like a label mask, and a lossy codec would change labels"
        elif shape is not None and (len(shape) != 3 or shape[0] not in (1, 3)):
            reason = f"JPEG keeps images of 1 or 3 planes (C, H, W), not {shape}"
        elif shape is not None and not all(1 <= side <= LONGEST_SIDE_PX for side in shape[1:]):
            reason = f"JPEG keeps sides of 1 to {LONGEST_SIDE_PX:,} px, not {shape[1]} x {shape[2]}"
        return reason and f"{reason}; use codec='zstd' or 'lz4', which keep them exactly"

    def settings(self) -> Settings:
        return {"name": self.name, "format": 1, "quality": self.quality, "subsampling": self.subsampling}

    def _check(self, sample: Array) -> None:
        spec = SampleSpec(shape=sample.shape, dtype=sample.dtype.name, form="array")
        if (reason := self.obstacle(spec)) is not None:
            raise ValueError(f"codec 'jpeg' cannot keep a sample of shape {sample.shape} and {sample.dtype}: {reason}")


@dataclass(frozen=True, slots=True)
class OwnCodec:
    """A user's object that has ``encode`` and ``decode``, with what else a codec has. Pickles if the object does."""

    codec: Any

    @property
    def name(self) -> str:
        return str(getattr(self.codec, "name", type(self.codec).__name__))

    @property
    def lossless(self) -> bool:
        return bool(getattr(self.codec, "lossless", True))

    def encode(self, sample: Array) -> bytes:
        data = self.codec.encode(sample)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"encode of codec {self.name!r} gave {kind_of(data)}; it must give bytes")
        return bytes(data)

    def decode(self, data: memoryview, out: Array) -> None:
        self.codec.decode(data, out)

    def obstacle(self, spec: SampleSpec) -> str | None:
        reason = self.codec.obstacle(spec) if hasattr(self.codec, "obstacle") else None
        return None if reason is None else str(reason)

    def settings(self) -> Settings:
        return {"name": self.name}


_CODECS: dict[str, Callable[..., Codec]] = {"lz4": Lz4Codec, "zstd": ZstdCodec, "jpeg": JpegCodec}
KNOWN_CODECS = tuple(_CODECS)


def describe_codec(codec: Any, cache_key: str | None = None) -> str:
    """Text that is equal for what ``codec=`` takes where it encodes alike; ``cache_key`` as in ``describe``."""
    if codec in ("auto", "source"):
        return str(codec)
    if isinstance(codec, (tuple, list)):
        return " + ".join(describe_codec(each, cache_key) for each in codec)
    found = find_codec(codec)
    if isinstance(found, OwnCodec):
        return f"{type(found.codec).__qualname__} {found.name} {describe(found.codec, cache_key)}"
    return json.dumps(found.settings(), sort_keys=True)


def find_codec(codec: str | object, **settings: Any) -> Codec:
    """Make the codec of that name, or take a user's object as one: its ``encode(sample)`` and ``decode(data, out)``.

    Its ``name``, ``lossless`` and ``obstacle(spec)`` are used where it has them.
    """
    if isinstance(codec, str):
        if codec not in _CODECS:
            raise ValueError(
                f"codec={codec!r} is not known; {', '.join(map(repr, KNOWN_CODECS))} are, "
                "and so is any object with encode(sample) -> bytes and decode(data, out)"
            )
        return _CODECS[codec](**settings)
    if settings:
        raise TypeError(f"{', '.join(settings)}: arguments are for a codec given by name, not for an object")
    if isinstance(codec, Lz4Codec | ZstdCodec | JpegCodec | OwnCodec):
        return codec
    if isinstance(codec, type):
        raise TypeError(f"codec={codec.__name__} is a class; give an instance of it: codec={codec.__name__}()")
    missing = [name for name in ("encode", "decode") if not callable(getattr(codec, name, None))]
    if missing:
        raise TypeError(
            f"an object of type {type(codec).__name__} is no codec: it has no method {' and no '.join(missing)}. "
            "A codec has encode(sample) -> bytes and decode(data, out), which fills the array out."
        )
    return OwnCodec(codec)


def codec_of(settings: Settings) -> Codec:
    """Make the codec of fastdata whose ``settings()`` these are, without pickle."""
    name = settings.get("name")
    if name not in _CODECS:
        raise ValueError(
            f"the data were encoded by codec {name!r}, which is none of fastdata's ({', '.join(KNOWN_CODECS)}); "
            "give the codec object that encoded them"
        )
    arguments = {key: value for key, value in settings.items() if key not in ("name", "format")}
    try:
        codec = _CODECS[str(name)](**arguments)
    except TypeError as unknown:
        raise ValueError(f"codec {name!r} does not know the settings {arguments}: {unknown}") from unknown
    known = codec.settings()["format"]
    if settings.get("format") != known:
        raise ValueError(
            f"the data have format {settings.get('format')} of codec {name!r}, but this version of fastdata knows "
            f"format {known}; use the version that wrote them or prepare the samples anew"
        )
    return codec
