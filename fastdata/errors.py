"""The errors fastdata raises on its own account.

Each also derives from the built-in class that a caller would catch anyway, so that a swapped import keeps existing
handlers working.
"""

from __future__ import annotations

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

    def __init__(self, message: str, *, index: int, path: str | None = None) -> None:
        super().__init__(message)
        self.index = index
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_sample_error, (str(self), self.index, self.path)


class IngestError(FastDataError, RuntimeError):
    """Preparation stopped for a reason that is no single sample's fault, such as a killed worker process."""


class CacheError(FastDataError, OSError):
    """A cache on disk cannot be written, or what it holds cannot be used."""


class CodecError(FastDataError, ValueError):
    """Encoded bytes are not what a sample of this shape and dtype was encoded to: damaged, cut off, or another's."""


class StoreGoneError(FastDataError, RuntimeError):
    """A pickled dataset was opened after the process that holds its samples had ended."""


def _restore_sample_error(message: str, index: int, path: str | None) -> SampleError:
    return SampleError(message, index=index, path=path)
