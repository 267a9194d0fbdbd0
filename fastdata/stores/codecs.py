"""Codecs of prepared samples, and the only imports of lz4 and zstandard.

LZ4 is the fastest to decode. Zstandard, after the reversible prediction of ``prediction.py``, makes
photographs half as large. JPEG makes them seven to nine times smaller, but changes them slightly.
The codec ``"source"``, which keeps a file's own bytes, is the ``SourceDecoder`` of
``source_codec.py``.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from fastdata.errors import CodecError
from fastdata.pixels.arrays import Array, Bytes
from fastdata.pixels.decode import decode_planes_into, encode_jpeg
from fastdata.pixels.fingerprint import fingerprint
from fastdata.pixels.scratch import Scratch
from fastdata.stores.prediction import LEFT, WORD_BYTES, apply_filter, layout_of, undo_filter

CodecSettings = dict[str, "int | str | bool"]
"""Values that JSON can store: ``name``, ``format`` (the version of the byte format), arguments."""


class Codec(ABC):
    """Encodes and decodes prepared samples.

    A codec is safe to use from several threads and processes at once, and pickles as its settings.

    Attributes:
        name: name of the codec in options, caches and messages.
        lossless: True if samples come back bit for bit.
        makes_jpeg_files: True if the encoded bytes are JPEG files, which the compiled core decodes.
    """

    name: str
    lossless: bool = True
    makes_jpeg_files: ClassVar[bool] = False

    @abstractmethod
    def encode(self, sample: Array) -> bytes:
        """Encode a sample.

        Raises:
            ValueError: this codec cannot store such a sample. The message says why.
        """

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out`` completely, with at most a few times ``out.nbytes`` of other memory.

        Raises:
            CodecError: the data are damaged, or belong to a sample of another size.
            ValueError: ``out`` is read-only or not C-contiguous.
        """
        if not out.flags.carray:
            raise ValueError("samples can be decoded only into a writeable, C-contiguous array")
        try:
            self._decode(data, out)
        except (ImportError, MemoryError):
            raise
        except Exception as problem:  # libraries raise errors of their own
            raise CodecError(
                f"codec {self.name!r} cannot decode {len(data):,} bytes to a sample of shape "
                f"{out.shape} and {out.dtype}: {problem}. The bytes are damaged or belong to "
                "another sample; prepare the samples again."
            ) from problem

    @abstractmethod
    def _decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``. Any error means that the data are damaged."""

    def settings(self) -> CodecSettings:
        """Return the values from which ``codec_of`` builds this codec again."""
        return {"name": self.name, "format": 1, **vars(self)}


@cache
def _library(name: str) -> Any:
    """Import a codec's library when it is first needed, because not every Python has a build."""
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        package = name.partition(".")[0]
        raise ImportError(
            f"the codec needs the package {package}: pip install {package}, or use another codec "
            f"({missing})"
        ) from missing


@dataclass(frozen=True)
class Lz4Codec(Codec):
    """Lossless and fast. Photographs become 1.06 times smaller, masks and drawings much more.

    Pass ``codec="lz4"`` to a dataset, or this object: ``codec=Lz4Codec()``.

    Encoded bytes, format 1: one block of the LZ4 Block Format
    (github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without a size before it or a checksum
    after it. It holds the sample's memory in C order and the byte order of its dtype. A wrong size
    is always found, a flipped bit not always; the store's checksums find that.
    """

    name = "lz4"

    def encode(self, sample: Array) -> bytes:
        block: bytes = _library("lz4.block").compress(_bytes_of(sample), store_size=False)
        return block

    def _decode(self, data: memoryview, out: Array) -> None:
        raw = _library("lz4.block").decompress(data, uncompressed_size=out.nbytes)
        if len(raw) != out.nbytes:
            raise ValueError(f"the block has {len(raw):,} bytes")
        _bytes_of(out)[:] = np.frombuffer(raw, np.uint8)


def _bytes_of(sample: Array) -> Bytes:
    return sample.reshape(-1).view(np.uint8)


_HEAD_BYTES = 5

_TRIAL_BYTES = 24 * 1024

_NOISE = {"strategy": 1, "min_match": 7, "hash_log": 6, "window_log": 15}
"""Parameters for residuals of photographs. These hardly repeat, so a new Huffman table for every
32 KiB matters most: ratio 2.18 and 130 us to decode 3 x 256 x 256. Level 1 gives 2.12 and 144 us,
level 3 gives 2.06 and 195 us."""


_scratch = Scratch()


@dataclass(frozen=True, kw_only=True)
class ZstdCodec(Codec):
    """Lossless. It may replace values by differences from neighbours before it compresses them.

    PNG does this, too. Each sample is encoded in the way that makes it smallest. Photographs of
    3 x 256 x 256 become 2.1 times smaller. Pass ``codec="zstd"`` to a dataset, or
    ``codec=ZstdCodec(level=3)``.

    Encoded bytes, format 1: the filter (1 byte, the sum of its steps), the length of the rest
    (4 bytes, little-endian, unsigned), and one Zstandard frame (RFC 8878) with its content size and
    without a checksum. The frame holds the sample's memory in C order, after ``apply_filter``. A
    wrong size is always found, a flipped bit not always; the store's checksums find that.

    Args:
        level: zstd's level for samples whose values are not replaced by differences from the left
            neighbour. Negative levels are faster; 22 is the highest.
    """

    level: int = 1

    name = "zstd"

    def encode(self, sample: Array) -> bytes:
        # The filter is chosen on a strip, so that the whole sample is compressed once and not four
        # times: 1.6 times the rate.
        strip = _middle_rows(sample)
        filters = layout_of(sample.shape, sample.dtype).filters
        best = min(filters, key=lambda chosen: len(self._frame(strip, chosen)))
        frame = self._frame(sample, best)
        return bytes((best,)) + len(frame).to_bytes(_HEAD_BYTES - 1, "little") + frame

    def _frame(self, sample: Array, chosen: int) -> bytes:
        layout = layout_of(sample.shape, sample.dtype)
        filtered = apply_filter(_bytes_of(sample), layout, chosen)
        # A compressor is made for each frame, which takes 8 us, because threads cannot share one.
        library = _library("zstandard")
        if chosen & LEFT:
            parameters = library.ZstdCompressionParameters(**_NOISE)
            compressor = library.ZstdCompressor(compression_params=parameters)
        else:
            compressor = library.ZstdCompressor(level=self.level)
        frame: bytes = compressor.compress(filtered)
        return frame

    def _decode(self, data: memoryview, out: Array) -> None:
        target = out.reshape(-1).view(np.uint8)
        layout = layout_of(out.shape, out.dtype)
        # Every value is checked before it is used, because the data may come from anybody.
        length = _HEAD_BYTES + int.from_bytes(data[1:_HEAD_BYTES], "little")
        if length != len(data):
            raise ValueError(f"their header states {length:,} bytes")
        chosen = data[0]
        if chosen & ~layout.filters[-1]:
            raise ValueError(f"filter {chosen} does not exist for such samples in format 1")
        # Rows of whole words are decompressed in place, others to memory that the thread reuses.
        filtered = target
        is_in_place = layout.size == target.size and target.ctypes.data % WORD_BYTES == 0
        if chosen and (layout.lane > 1 or not is_in_place):
            filtered = _scratch.take("filtered", (layout.size,))
        self._decompress(data[_HEAD_BYTES:], filtered)
        if chosen:
            undo_filter(filtered, layout, chosen, target)

    def _decompress(self, frame: memoryview, filtered: Bytes) -> None:
        """Fill ``filtered``. The size that a frame states is checked before it is decompressed."""
        library = _library("zstandard")
        size = library.frame_content_size(frame)
        written = 0
        # Because its size is that of `filtered`, zstd writes there directly, without a buffer.
        if 0 < size == filtered.size:
            written = library.ZstdDecompressor().stream_reader(frame).readinto(filtered)
        if not written == size == filtered.size:
            raise ValueError(
                f"the frame has {size:,} bytes, but {filtered.size:,} are needed; {written:,} "
                "could be decompressed"
            )


def _middle_rows(sample: Array) -> Array:
    """Return the middle rows of each plane, to choose the filter; a small sample as a whole."""
    if sample.nbytes <= 2 * _TRIAL_BYTES or sample.ndim < 2:
        return sample
    rows = sample.shape[-2]
    count = max(1, rows * _TRIAL_BYTES // sample.nbytes)
    start = (rows - count) // 2
    return np.ascontiguousarray(sample[..., start : start + count, :])


_LONGEST_SIDE_PX = 65_500
"""The longest side that libjpeg can write."""


@dataclass(frozen=True, kw_only=True)
class JpegCodec(Codec):
    """**Lossy**: samples are re-encoded at their prepared size and come back slightly changed.

    It takes only uint8 images, (3, H, W) or (1, H, W), because anything else (labels, depths,
    tables) must not change. ImageNet photographs at 256 x 256 become 7 times smaller with the
    defaults. Pass ``codec="jpeg"`` to a dataset, or ``codec=JpegCodec(quality=85)``.

    Encoded bytes, format 1: one baseline JPEG file (ITU-T T.81) with a JFIF header, in grey or in
    YCbCr as JFIF defines it. The decoded pixels are those of libjpeg-turbo (accurate integer
    inverse DCT, smooth chroma upsampling).

    Args:
        quality: 1 to 95, libjpeg's scale. 92 changes ImageNet pixels by 2 levels of 255 on average.
        subsampling: subsampling of the colours: ``"4:4:4"`` (none), ``"4:2:2"`` or ``"4:2:0"``.

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

    def encode(self, sample: Array) -> bytes:
        are_planes = sample.dtype == np.uint8 and sample.ndim == 3 and sample.shape[0] in (1, 3)
        if not are_planes or max(sample.shape) > _LONGEST_SIDE_PX:
            raise ValueError(
                "codec 'jpeg' can store images of uint8 and shape (1, H, W) or (3, H, W), up to "
                f"{_LONGEST_SIDE_PX:,} px a side, but not {sample.dtype} of shape {sample.shape}: "
                "it would change labels or depths. Use "
                "codec='zstd' or 'lz4', which keep them exactly"
            )
        return encode_jpeg(sample, self.quality, self.subsampling)

    def _decode(self, data: memoryview, out: Array) -> None:
        # The size in the file's header is checked before any pixel is decoded.
        decode_planes_into(data, out)


class OwnCodec(Codec):
    """A user's object with ``encode`` and ``decode``. Can be pickled if the object can."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.name = str(getattr(codec, "name", type(codec).__name__))
        self.lossless = bool(getattr(codec, "lossless", True))

    def encode(self, sample: Array) -> bytes:
        data: bytes = self.codec.encode(sample)
        return data

    def _decode(self, data: memoryview, out: Array) -> None:
        self.codec.decode(data, out)

    def settings(self) -> CodecSettings:
        return {"name": self.name}


_CODECS: dict[str, type[Codec]] = {"lz4": Lz4Codec, "zstd": ZstdCodec, "jpeg": JpegCodec}

KNOWN_CODECS = tuple(_CODECS)


def describe_codec(codec: Any, cache_key: str | None = None) -> str:
    """Describe the value of ``codec=``. Equal texts mean equal encoded bytes."""
    if codec in ("auto", "source"):
        return str(codec)
    if isinstance(codec, tuple | list):
        return " + ".join(describe_codec(each, cache_key) for each in codec)
    made = find_codec(codec)
    if isinstance(made, OwnCodec):
        return f"{type(made.codec).__qualname__} {made.name} {fingerprint(made.codec, cache_key)}"
    return json.dumps(made.settings(), sort_keys=True)


def find_codec(codec: str | object) -> Codec:
    """Make a codec from its name or from a user's object.

    The object has ``encode(sample)`` and ``decode(data, out)``, and may have ``name`` and
    ``lossless``.

    Raises:
        ValueError: ``codec`` is neither.
    """
    if isinstance(codec, Codec):
        return codec
    if isinstance(codec, str) and codec in _CODECS:
        return _CODECS[codec]()
    if not (hasattr(codec, "encode") and hasattr(codec, "decode")):
        known = ", ".join(map(repr, ("auto", "source", *KNOWN_CODECS)))
        raise ValueError(
            f"codec={codec!r} is neither one of {known} nor an object with encode and decode"
        )
    return OwnCodec(codec)


def codec_of(settings: CodecSettings) -> Codec:
    """Make the codec of fastdata that has these ``settings()``, without pickle."""
    arguments = dict(settings)
    name = arguments.pop("name", None)
    version = arguments.pop("format", None)
    if name not in _CODECS or version != 1:
        raise ValueError(
            f"the data were encoded by codec {name!r}, format {version}, but this fastdata reads "
            f"only format 1 of {', '.join(KNOWN_CODECS)}"
        )
    return _CODECS[str(name)](**arguments)
