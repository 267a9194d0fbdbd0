"""Samples that were requested ahead of the reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future

_MOST_EXPECTED = 1024


Submit = Callable[[int], Future[bytes]]
"""Requests the file of a sample, or the sample's part of a file."""


class Requests(dict[tuple[int, int], Future[bytes]]):
    """Samples that were requested and not read yet, by process and index.

    A forked process makes its own requests: the answers to those of its parent never reach it.
    """

    def take(self, index: int, submit: Submit) -> Future[bytes]:
        """Return the request for a sample, made earlier or now."""
        return self.pop((os.getpid(), index), None) or submit(index)

    def expect(self, indices: Sequence[int], submit: Submit) -> None:
        # Keys hold the process: a fork copies this dict, but not the threads that answer.
        pid = os.getpid()
        for index in indices:
            if (pid, index) not in self:
                self[pid, index] = submit(index)
        # Readers that stopped early left requests that nothing will take.
        own = [key for key in list(self) if key[0] == pid]
        for key in own[: -max(_MOST_EXPECTED, len(indices))]:
            self.pop(key, Future()).cancel()

    def __reduce__(self) -> tuple[object, ...]:
        return Requests, ()
