"""What every codec can do, and what a user's own object must bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastdata.errors import CodecError
from fastdata.spec import SampleSpec

__all__ = [
    "Array",
    "Codec",
    "OwnCodec",
    "Settings",
    "adopt",
    "bytes_of",
    "check_out",
    "refuse",
    "size_error",
    "too_large",
]

Array = npt.NDArray[Any]
Settings = dict[str, "int | str | bool"]
"""Plain values that JSON keeps: ``name``, ``format`` (the version of the byte format), and the codec's arguments."""


class Codec(Protocol):
    """Encodes prepared samples; safe from several threads and processes at once; pickles as its settings."""

    @property
    def name(self) -> str:
        """What reports and cache files call it."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether every sample comes back bit for bit."""
        ...

    def encode(self, sample: Array) -> bytes:
        """Encode a C-contiguous sample.

        Raises:
            ValueError: it cannot keep such a sample; ``obstacle`` says so beforehand.
        """
        ...

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``, which is C-contiguous and has the sample's shape and dtype, completely.

        No more memory is taken than a few times ``out.nbytes``, whatever the data claim.

        Raises:
            CodecError: the data are damaged or belong to a sample of another size; ``out`` is undefined then.
        """
        ...

    def obstacle(self, spec: SampleSpec) -> str | None:
        """Why samples of this spec are refused; None if they are not."""
        ...

    def settings(self) -> Settings:
        """What ``codec_of`` builds an equal codec from."""
        ...


def bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """View the memory of a C-contiguous array of any dtype as bytes."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous; "
            "codecs take np.ascontiguousarray of it"
        )
    if array.dtype.hasobject:
        raise ValueError(f"an array of {array.dtype} holds Python objects, which no codec keeps; give a numeric dtype")
    return array.reshape(-1).view(np.uint8) if array.dtype.itemsize else np.empty(0, np.uint8)


def check_out(out: Array) -> npt.NDArray[np.uint8]:
    """View the memory to decode into as bytes.

    Raises:
        ValueError: it is read-only or not C-contiguous.
    """
    if not out.flags.writeable:
        raise ValueError(f"the array of shape {out.shape} to decode into is read-only")
    return bytes_of(out)


def refuse(name: str, sample: Array, reason: str) -> ValueError:
    """Say that a codec cannot keep a sample."""
    return ValueError(f"codec {name!r} cannot keep a sample of shape {sample.shape} and {sample.dtype}: {reason}")


@dataclass(frozen=True, slots=True)
class OwnCodec:
    """A user's object that has ``encode`` and ``decode``, with what else a codec has.

    ``name`` is the object's, or its class's; ``lossless`` the object's, or True. Pickles if the object does.
    """

    codec: Any

    @property
    def name(self) -> str:
        """What reports call it."""
        return str(getattr(self.codec, "name", type(self.codec).__name__))

    @property
    def lossless(self) -> bool:
        """What the object says of itself."""
        return bool(getattr(self.codec, "lossless", True))

    def encode(self, sample: Array) -> bytes:
        """Let the object encode, and hold it to bytes."""
        data = self.codec.encode(sample)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"encode of codec {self.name!r} gave a {type(data).__name__}; it must give bytes")
        return bytes(data)

    def decode(self, data: memoryview, out: Array) -> None:
        """Let the object decode."""
        self.codec.decode(data, out)

    def obstacle(self, spec: SampleSpec) -> str | None:
        """What the object says of such samples, if it says anything."""
        says = getattr(self.codec, "obstacle", None)
        reason = says(spec) if says is not None else None
        return None if reason is None else str(reason)

    def settings(self) -> Settings:
        """Only the name: the object itself is needed again to decode."""
        return {"name": self.name}


def adopt(codec: object) -> OwnCodec:
    """Take a user's object as a codec.

    Raises:
        TypeError: it lacks ``encode`` or ``decode``, or is a class.
    """
    if isinstance(codec, type):
        raise TypeError(f"codec={codec.__name__} is a class; give an instance of it: codec={codec.__name__}()")
    missing = [name for name in ("encode", "decode") if not callable(getattr(codec, name, None))]
    if missing:
        raise TypeError(
            f"an object of type {type(codec).__name__} is no codec: it has no method {' and no '.join(missing)}. "
            "A codec has encode(sample) -> bytes and decode(data, out), which fills the array out."
        )
    return OwnCodec(codec)


def size_error(name: str, found: str, out: Array) -> CodecError:
    """Say that data do not give the sample that is to be filled."""
    return CodecError(
        f"codec {name!r} found {found}, but a sample of shape {out.shape} and {out.dtype} needs {out.nbytes:,} bytes. "
        "The data are damaged or belong to another sample; prepare the samples anew."
    )


def too_large(spec: SampleSpec, most_bytes: int) -> str | None:
    """Why samples of more bytes are refused, as an ``obstacle``."""
    if spec.shape is None or spec.sample_bytes <= most_bytes:
        return None
    return f"a sample has {spec.sample_bytes:,} bytes, {most_bytes:,} at most can be encoded; store them raw"
