"""Detect transforms that were changed in place, so that the next epoch runs what they say now."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fastdata.pixels.compose import LIBRARIES, outside_of

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, Enum)
_ARRAYS = (torch.Tensor, np.ndarray)


class Watch:
    """A copy of what transforms consist of when they are compiled, to notice changes in place."""

    def __init__(self, calls: tuple[Any, ...], unknown: Iterable[Any]) -> None:
        """Copy the contents of ``calls``, except those of ``unknown`` steps, which run as they are."""
        met = {id(step): step for step in unknown}
        self._outside: list[tuple[Any, Any]] = []
        held = _held_by(calls, met, self._outside)
        self._parts = [part for part in held if isinstance(part, (dict, list))]
        self._copies = [part.copy() for part in self._parts]  # with the same objects in them
        self._arrays = [array for array in held if isinstance(array, _ARRAYS)]
        self._octets = list(map(_octets, self._arrays))
        self._float = torch.get_default_dtype()  # of ToTensor

    def is_changed(self) -> bool:
        if torch.get_default_dtype() != self._float:
            return True
        try:
            # Quick: all that is in a part is the same object.
            if self._parts != self._copies:
                return True
            for call, read in self._outside:
                if outside_of(call) != read:
                    return True
        except (TypeError, ValueError, RuntimeError):  # arrays cannot be compared so
            return True
        return list(map(_octets, self._arrays)) != self._octets


def _held_by(values: Iterable[Any], met: dict[int, Any], outside: list[Any]) -> list[Any]:
    """Return values, what is inside them and what their code reads, each once and none of ``met``."""
    queue = list(values)
    held = []
    for value in queue:  # which grows
        if id(value) in met or isinstance(value, _ATOMS):
            continue
        met[id(value)] = value
        held.append(value)
        if isinstance(value, dict):
            queue.extend(value.values())
        elif isinstance(value, (list, tuple)):
            queue.extend(value)
        elif not isinstance(value, _ARRAYS):
            queue.append(getattr(value, "__dict__", None))
            if callable(value) and not type(value).__module__.startswith(LIBRARIES):
                outside.append((value, outside_of(value)))
                queue.extend(outside[-1][1].values())
    return held


def _octets(array: Any) -> bytes:
    try:
        return np.asarray(array).tobytes()
    except (TypeError, RuntimeError):  # of bfloat16, or on a device
        return b""
