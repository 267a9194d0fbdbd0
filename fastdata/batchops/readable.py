"""The face of a store that batch ops need."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastdata.spec import SampleSpec

__all__ = ["Readable"]


class Readable(Protocol):
    """What can be read by index; see ``fastdata.stores.base.Store``."""

    @property
    def spec(self) -> SampleSpec:
        """Shape and dtype of the samples."""
        ...

    @property
    def gives_views(self) -> bool:
        """Whether ``read`` costs nothing."""
        ...

    def shape(self, index: int, /) -> tuple[int, ...]:
        """Shape of one sample."""
        ...

    def read(self, index: int, /) -> npt.NDArray[Any]:
        """One sample, read-only."""
        ...

    def read_into(self, index: int, out: npt.NDArray[Any], /) -> None:
        """Put one sample into ``out``."""
        ...

    def gather_into(self, index_B: npt.NDArray[np.int64], out_B: npt.NDArray[Any], /) -> None:
        """Copy the chosen samples, which all have one shape."""
        ...
