"""Tensors in objects of any class: their memory must stay valid while a device reads it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastdata.datasets.trees import is_container

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_NOT_HELD = (type, ModuleType, FunctionType, Dataset, torch.nn.Module)
"""Objects that a batch may refer to, but that are not part of it."""
_PARTS_OF = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Names of the methods that return the strided tensors of a tensor, by its layout."""


def moves_itself(value: Any) -> bool:
    """Return True if a value is moved to a device by its own ``to`` method.

    This is true for tensors, and for objects whose class has this method. A container must also
    have ``pin_memory``, as torch's own containers do. Other containers are copied item by item.
    """
    if isinstance(value, torch.Tensor):
        return True
    kind = type(value)
    if not callable(getattr(kind, "to", None)) or isinstance(value, _NOT_HELD):
        return False
    return hasattr(kind, "pin_memory") or not is_container(value)


def memory_of(value: Any) -> list[Any]:
    """Return the strided tensors that a value consists of or holds, at any depth.

    Containers and the attributes of objects of any class are searched, and so are tensors that
    consist of others: sparse, nested and wrapped ones. An object in which no tensor is found, but
    whose class has a ``record_stream`` method, is returned itself.

    Example:
        >>> from types import SimpleNamespace
        >>> batch = SimpleNamespace(images=torch.zeros(2), boxes={"left": [torch.ones(3)]})
        >>> sorted(len(tensor) for tensor in memory_of(batch))
        [2, 3]
    """
    return _memory_of([value], {})


def _memory_of(values: Iterable[Any], seen: dict[int, Any]) -> list[Any]:
    found: list[Any] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if type(value) in _PLAIN or id(value) in seen or isinstance(value, _NOT_HELD):
            continue
        seen[id(value)] = value  # holds the object, so that no other object gets its id
        # The garbage collector finds items, attributes and slots, even of classes written in C. But
        # NumPy does not report the objects in an array to it.
        parts = gc.get_referents(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            parts += value.flat
        if isinstance(value, torch.Tensor):
            found += _strided_parts(value)
        elif hasattr(type(value), "record_stream"):
            # If a class written in C hides its tensors, only the object itself can be recorded.
            found += _memory_of(parts, seen) or [value]
            continue
        waiting += parts
    return found


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that own a tensor's memory, without those in its attributes."""
    if tensor.layout in _PARTS_OF:
        return [getattr(tensor, name)() for name in _PARTS_OF[tensor.layout]]
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # A wrapper, such as a jagged, masked or distributed tensor, has no memory of its own.
        held = vars(tensor).values()
        return [] if any(isinstance(it, torch.Tensor) for it in held) else [tensor]
    return [tensor.detach().values()] if tensor.is_nested else [tensor]
