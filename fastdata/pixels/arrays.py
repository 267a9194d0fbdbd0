"""Names for the types of arrays and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Shape = tuple[int, ...]

Bytes = npt.NDArray[np.uint8]

Int32s = npt.NDArray[np.int32]

Int64s = npt.NDArray[np.int64]

Float64s = npt.NDArray[np.float64]

UInt64s = npt.NDArray[np.uint64]
