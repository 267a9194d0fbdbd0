"""From what a user writes, or a cache file says, to a codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastdata.codecs.base import Codec, OwnCodec, Settings, adopt
from fastdata.codecs.jpeg import JpegCodec
from fastdata.codecs.lz4 import Lz4Codec
from fastdata.codecs.zstd import ZstdCodec

__all__ = ["KNOWN_CODECS", "codec_of", "find_codec"]

_CODECS: dict[str, Callable[..., Codec]] = {"lz4": Lz4Codec, "zstd": ZstdCodec, "jpeg": JpegCodec}
KNOWN_CODECS = tuple(_CODECS)


def find_codec(codec: str | object, **settings: Any) -> Codec:
    """Make the codec of that name, or take a user's object as one.

    Args:
        codec: ``"lz4"``, ``"zstd"``, ``"jpeg"``, one of fastdata's codecs, or an object with
            ``encode(sample) -> bytes`` and ``decode(data, out)``; its ``name``, ``lossless`` and ``obstacle(spec)`` are
            used where it has them.
        settings: arguments of the named codec.

    Raises:
        ValueError: no codec has that name.
        TypeError: the object lacks a method, or the codec has no such argument.

    Example:
        >>> find_codec("zstd", level=3)
        ZstdCodec(level=3)
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
    return adopt(codec)


def codec_of(settings: Settings) -> Codec:
    """Make the codec whose ``settings()`` these are, without pickle.

    Raises:
        ValueError: no codec of fastdata has that name, or this version does not know its format or arguments.

    Example:
        >>> codec_of({"name": "zstd", "format": 1, "level": 3})
        ZstdCodec(level=3)
    """
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
