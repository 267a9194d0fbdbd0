"""Options of remote file systems, which may be secret."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from multiprocessing.context import get_spawning_popen
from typing import Any

_OPTIONS_TRAVEL = ContextVar("fastdata_options_travel", default=False)


StorageChoice = Mapping[str, Any] | None


class StorageOptions(dict[str, Any]):
    """Options of a file system, such as credentials. Never shown, and pickled empty by default."""

    def __repr__(self) -> str:
        return "{...}" if self else "{}"

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle for a process that is being started goes through a pipe, and never to a disk.
        travel = get_spawning_popen() is not None or _OPTIONS_TRAVEL.get()
        return StorageOptions, (dict(self) if travel else {},)

    def __copy__(self) -> StorageOptions:
        return StorageOptions(self)

    def __deepcopy__(self, memo: dict[int, object]) -> StorageOptions:
        """Return a shallow copy, because options such as sessions cannot be copied."""
        return StorageOptions(self)


@contextlib.contextmanager
def options_travel() -> Iterator[None]:
    """Let pickles made in this block carry storage_options. For tasks of workers, never for files.

    It sets a context variable, because pickle passes no arguments to ``__reduce__``.
    """
    token = _OPTIONS_TRAVEL.set(True)
    try:
        yield
    finally:
        _OPTIONS_TRAVEL.reset(token)
