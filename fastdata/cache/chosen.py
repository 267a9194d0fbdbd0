"""Some of a source's samples, prepared under numbers of their own."""

from __future__ import annotations

from typing import Any

from fastdata.errors import SampleError
from fastdata.sources import Source

__all__ = ["ChosenSource", "renumbered"]


class ChosenSource:
    """Some of a source's samples.

    Args:
        source: all of them.
        chosen: the number there of each.
    """

    def __init__(self, source: Source, chosen: list[int]) -> None:
        self._source, self._chosen = source, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def read(self, index: int) -> tuple[Any, Any]:
        """See ``Source``."""
        return self._source.read(self._chosen[index])

    def path(self, index: int) -> str | None:
        """See ``Source``."""
        return self._source.path(self._chosen[index])


def renumbered(error: SampleError, index: int) -> SampleError:
    """The same error under the number that the sample has in the whole source."""
    message = str(error).replace(f"sample {error.index}", f"sample {index}", 1)
    return SampleError(message, index=index, path=error.path)
