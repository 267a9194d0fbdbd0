"""Encoding prepared samples and decoding them into the caller's memory: the door to lz4 and zstandard."""

from fastdata.codecs.base import Codec, OwnCodec, Settings
from fastdata.codecs.find import KNOWN_CODECS, codec_of, find_codec
from fastdata.codecs.jpeg import JpegCodec
from fastdata.codecs.lz4 import Lz4Codec
from fastdata.codecs.source import SourceDecoder
from fastdata.codecs.zstd import ZstdCodec

__all__ = [
    "KNOWN_CODECS",
    "Codec",
    "JpegCodec",
    "Lz4Codec",
    "OwnCodec",
    "Settings",
    "SourceDecoder",
    "ZstdCodec",
    "codec_of",
    "find_codec",
]
