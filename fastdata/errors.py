"""The errors fastdata raises on its own account.

Each also derives from the built-in class that a caller would catch anyway, so that a swapped import keeps existing
handlers working, and can be made of its text alone: of an error in a worker process torch's loader sends no more than
the class and the traceback as text.
"""

from __future__ import annotations

import re

__all__ = [
    "CacheError",
    "CodecError",
    "DeviceError",
    "FastDataError",
    "FastDataWarning",
    "IngestError",
    "MemoryBudgetError",
    "SampleError",
    "StoreGoneError",
]


_NAMED = re.compile(r"^(?:[\w.]+: )?sample (\d+)(?:, (.+?),)? cannot be read", re.DOTALL | re.MULTILINE)
"""How the text of a ``SampleError`` begins: index and path. A traceback has it last."""


class FastDataError(Exception):
    """Base of every error that fastdata defines."""


class FastDataWarning(UserWarning):
    """Training goes on, but slower or with less data than was asked for."""


class MemoryBudgetError(FastDataError, MemoryError):
    """Prepared samples need more memory than the budget leaves; raised before anything is allocated."""


class DeviceError(FastDataError, RuntimeError):
    """A device was asked for that torch does not see on this machine."""


class SampleError(FastDataError, OSError):
    """One sample cannot be read, decoded or prepared.

    Attributes:
        index: position of the sample in its dataset.
        path: file of the sample, or None where the sample has none.
    """

    def __init__(self, message: str, *, index: int | None = None, path: str | None = None) -> None:
        if index is None:  # copied, unpickled or sent by torch: the text has the sample's index and path
            named = _NAMED.findall(message)
            if not named:
                raise TypeError("SampleError needs index=, the position of the sample in its dataset")
            index, path = int(named[-1][0]), named[-1][1] or None
        elif not _NAMED.match(message):
            message = f"sample {index}{f', {path},' if path else ''} cannot be read: {message}"
        super().__init__(message)
        self.index = index
        self.path = path


class IngestError(FastDataError, RuntimeError):
    """Preparation stopped for a reason that is no single sample's fault, such as a killed worker process."""


class CacheError(FastDataError, OSError):
    """A cache on disk cannot be written, or what it holds cannot be used."""


class CodecError(FastDataError, ValueError):
    """Encoded bytes are not what a sample of this shape and dtype was encoded to: damaged, cut off, or another's."""


class StoreGoneError(FastDataError, RuntimeError):
    """A pickled dataset was opened after the process that holds its samples had ended."""
