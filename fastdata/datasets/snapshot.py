"""Snapshots of transforms, to detect that one was changed in place.

The next epoch, or the next ``dataset[i]``, uses the changed transform. Compiling the transform each
time would have the same effect, but takes 2.3 ms (RandomCrop, flip, float32 and Normalize, on one
core of a busy Xeon), and loses the scratch memory of the program. A comparison takes 4 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fastdata.pixels.albumentations_objects import PACKAGE, settings_of
from fastdata.pixels.callables import outside_of
from fastdata.pixels.known import LIBRARIES

Container = dict[object, object] | list[object]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, Enum)


class Snapshot:
    """The contents of transforms when they were compiled."""

    def __init__(self, transforms: Sequence[object], unknown: Iterable[object]) -> None:
        """Copy everything that transforms consist of, at any depth.

        ``unknown`` steps are left out: the user's own objects are called, so changes have an effect
        anyway, and every call may change them.
        """
        self._float = torch.get_default_dtype()  # ToTensor converts to it
        # Containers (including the attributes of objects), and shallow copies of them. Shallow is
        # enough, because containers inside of them are in this list too.
        self._parts: list[Container] = []
        self._copies: list[Container] = []
        # For other contents: the function that reads them, the object, and the contents at this
        # time.
        self._others: list[tuple[Callable[[Any], object], object, object]] = []
        met = {id(step): step for step in unknown}
        waiting = list(transforms)
        while waiting:
            value = waiting.pop()
            if id(value) in met or isinstance(value, _ATOMS):
                continue
            met[id(value)] = value
            if isinstance(value, (dict, list)):
                self._parts.append(value)
                self._copies.append(value.copy())
                waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, tuple):
                waiting += value
            elif isinstance(value, (torch.Tensor, np.ndarray)):
                self._others.append((_octets, value, _octets(value)))
            else:
                module = str(type(value).__module__)
                if module.startswith(PACKAGE):
                    # Only the settings: calls of a step per sample change its other attributes.
                    self._others.append((settings_of, value, settings_of(value)))
                    waiting += settings_of(value).values()
                    continue
                waiting.append(getattr(value, "__dict__", None))
                if callable(value) and not module.startswith(LIBRARIES):
                    outside = outside_of(value)
                    self._others.append((outside_of, value, outside))
                    waiting += outside.values()

    def is_outdated(self) -> bool:
        """Return True if a part of the transforms has been changed since the snapshot."""
        if torch.get_default_dtype() != self._float:
            return True
        try:
            # This is fast, because containers compare the identity of their items first.
            if self._parts != self._copies:
                return True
            for read, value, contents in self._others:
                if read(value) != contents:
                    return True
        except (TypeError, ValueError, RuntimeError):  # an array was replaced by another one
            return True
        return False


def _octets(array: torch.Tensor | np.ndarray) -> bytes:
    try:
        return np.asarray(array).tobytes()
    except (TypeError, RuntimeError):  # bfloat16, or an array on a device: only replacing it counts
        return b""
