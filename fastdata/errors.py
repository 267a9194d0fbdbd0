"""The errors that fastdata defines, and words that their texts share.

Each class also derives from the built-in class that a caller would catch anyway, so that existing
handlers work after the import is swapped. Each can be made from its text alone, because torch's
loader sends only the class and the traceback as text from a worker process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastdata.paths import hide_secrets

__all__ = [
    "CacheError",
    "ChannelsError",
    "CodecError",
    "DeviceError",
    "FastDataError",
    "FastDataWarning",
    "IngestError",
    "MemoryBudgetError",
    "MixedSizesError",
    "RemoteError",
    "SampleError",
    "StoreGoneError",
]

_NAMED = re.compile(
    r"^(?:[\w.]+: )?sample (\d+)(?:, (.+?),)? cannot be read", re.DOTALL | re.MULTILINE
)
"""The beginning of a ``SampleError``'s text: index and path. In a traceback the last match
counts."""


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article: ``"an ImageFolder"``, ``"a Tensor"``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def check_choices(choices: Mapping[str, Sequence[Any]], **given: object) -> None:
    """Raise ValueError if an argument is not one of its choices."""
    for name, value in given.items():
        allowed = choices[name]
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``"1 row"``, ``"2,000 rows"``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


class FastDataError(Exception):
    """Base of every error that fastdata defines. Secrets of URLs are hidden in its text."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*(hide_secrets(it) if isinstance(it, str) else it for it in parts))


class FastDataWarning(UserWarning):
    """A warning that training continues, but slower or with less data than requested."""


class MemoryBudgetError(FastDataError, MemoryError):
    """Prepared samples need more memory than is free. Raised before anything is allocated."""


class ChannelsError(FastDataError, ValueError):
    """A step of the transform needs another number of channels than a sample has.

    Convert all images to one number of channels, for example by ``Grayscale(3)``.
    """

    def __init__(self, reason: str, index: int = 0) -> None:
        super().__init__(reason, index)
        self.reason = reason
        self.index = index

    def __str__(self) -> str:
        return f"sample {self.index} cannot be transformed: {self.reason}"


class MixedSizesError(FastDataError, RuntimeError):
    """The samples of a batch differ in shape, so they cannot be stacked.

    Crop or resize them to one size, pad them in a ``collate_fn``, or use a ``BucketSampler``.
    """


class DeviceError(FastDataError, RuntimeError):
    """torch does not see the requested device on this machine."""


class SampleError(FastDataError, OSError):
    """One sample cannot be read, decoded or prepared.

    Attributes:
        index: position of the sample in its dataset.
        path: file of the sample, or None where the sample has none.
        reason: the cause in words.
        may_pass: True if the next run with the same ``cache_dir`` reads the sample again, because
            its bytes are not known to be damaged.
    """

    may_pass = False

    def __init__(self, message: str, *, index: int | None = None, path: str | None = None) -> None:
        self.reason = hide_secrets(message)
        # An error that is copied, unpickled or sent by torch is made from its text alone.
        if index is None:
            named = _NAMED.findall(message)
            if not named:
                raise TypeError(
                    "SampleError needs index=, the position of the sample in its dataset"
                )
            index = int(named[-1][0])
            path = named[-1][1] or None
        elif not _NAMED.match(message):
            message = f"sample {index}{f', {path},' if path else ''} cannot be read: {message}"
        super().__init__(message)
        self.index = index
        self.path = None if path is None else hide_secrets(path)


class IngestError(FastDataError, RuntimeError):
    """Preparation stopped: it would not help to leave out single samples.

    Too many are damaged, a worker process was killed, or memory, disk or open files ran out.
    """


class CacheError(FastDataError, OSError):
    """A cache on disk cannot be written, or its contents cannot be used."""


class RemoteError(FastDataError, OSError):
    """A file behind a URL, or on a disk or mount that fails, cannot be read or written.

    A request to a server was tried twice, a read from a disk or mount four times. The file itself
    is not known to be damaged. ``errno`` is set if the operating system gave a number.
    """


class CodecError(FastDataError, ValueError):
    """Encoded bytes are damaged or cut off: they do not give a sample of this shape and dtype."""


class StoreGoneError(FastDataError, RuntimeError):
    """The dataset was closed, or the process that holds its samples has ended. Make it again."""
