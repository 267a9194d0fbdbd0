"""Samples that are requested before they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future

_MOST_EXPECTED = 1024
"""Number of requests that are kept for readers, unless one call expects more."""


Submit = Callable[[int], Future[bytes]]
"""Function that requests the file of a sample, or the sample's part of a file."""


class Requests(dict[tuple[int, int], Future[bytes]]):
    """Requests for samples that are not read yet, by process number and index.

    A forked process makes its own requests, because it never gets the answers to its parent's.
    """

    def take(self, index: int, submit: Submit) -> Future[bytes]:
        """Return the request for a sample, made earlier or now."""
        return self.pop((os.getpid(), index), None) or submit(index)

    def expect(self, indices: Sequence[int], submit: Submit) -> None:
        # The process is part of the key: a fork copies this dict, but not the threads that answer.
        pid = os.getpid()
        for index in indices:
            if (pid, index) not in self:
                self[pid, index] = submit(index)
        # A reader that stopped early leaves requests that are never taken.
        own = [key for key in list(self) if key[0] == pid]
        for key in own[: -max(_MOST_EXPECTED, len(indices))]:
            self.pop(key, Future()).cancel()

    def __reduce__(self) -> tuple[object, ...]:
        return Requests, ()
