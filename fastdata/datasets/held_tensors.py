"""Tensors in objects of any class, whose memory must stay while a device reads it."""

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
"""Methods that return the strided tensors of a layout."""


def moves_itself(value: Any) -> bool:
    """True if a value goes to a device by a ``to`` method of its own.

    Besides tensors these are objects of classes that have one. A container must also have
    ``pin_memory``, as torch's own containers have: others are copied item by item.
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
        seen[id(value)] = value  # keeps its id from being used for another object
        # Items, attributes and slots, of classes written in C too. NumPy does not tell the garbage
        # collector about the objects in an array.
        parts = gc.get_referents(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            parts += value.flat
        if isinstance(value, torch.Tensor):
            found += _strided_parts(value)
        elif hasattr(type(value), "record_stream"):
            # Of a class written in C that keeps its tensors to itself, only the object can be used.
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
