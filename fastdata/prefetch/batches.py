"""Batches as trees: what is in them, the same tree with other tensors, and its shards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fastdata.batch import SampleBatch
from fastdata.transport import is_plain

__all__ = [
    "count_samples",
    "is_dense",
    "is_host_tensor",
    "map_tensors",
    "memory_of",
    "shard_sizes",
    "split_batch",
    "tensors_in",
]

Change = Callable[[Any], Any]


def map_tensors(batch: Any, change: Change) -> Any:
    """Return ``batch`` with ``change(tensor)`` in place of each tensor; a ``PackedSequence`` counts as one.

    Tuples, namedtuples, lists, mappings, dataclasses and ``SampleBatch`` keep their type; one that holds no tensor is
    returned as it is, like every other value. A tensor that stands in several places is changed once.
    """
    changed: dict[int, tuple[Any, Any]] = {}  # with the tensor itself, whose id must not be given to another

    def change_once(tensor: Any) -> Any:
        if id(tensor) not in changed:
            changed[id(tensor)] = tensor, change(tensor)
        return changed[id(tensor)][1]

    return _map(batch, change_once)


def tensors_in(batch: Any) -> list[Any]:
    """Tensors of a batch in their order, each once."""
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def count_samples(batch: Any) -> int:
    """Length of the first tensor that has one; 0 if none has."""
    return next((t.size(0) for t in tensors_in(batch) if isinstance(t, torch.Tensor) and t.ndim), 0)


def shard_sizes(samples: int, devices: int) -> list[int]:
    """Lengths of nearly equal shards, larger ones first; as many as there are samples where those are fewer.

    Example:
        >>> shard_sizes(10, 4), shard_sizes(2, 4)
        ([3, 3, 2, 2], [1, 1])
    """
    shards = max(1, min(samples, devices))
    share, rest = divmod(samples, shards)
    return [share + (number < rest) for number in range(shards)]


def split_batch(batch: Any, sizes: list[int]) -> list[Any]:
    """Cut tensors as long as all shards together along their first dimension; anything else goes to every shard."""
    if len(sizes) == 1:
        return [batch]
    samples, start = sum(sizes), 0
    shards = []
    for size in sizes:
        shards.append(map_tensors(batch, partial(_cut, samples=samples, start=start, size=size)))
        start += size
    return shards


def is_host_tensor(value: Any) -> bool:
    """Whether it is a CPU tensor that its bytes, dtype, shape and strides tell all about."""
    return type(value) is torch.Tensor and is_plain(value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory without gaps and overlaps, in any order of dimensions.

    Example:
        >>> image = torch.zeros(2, 3, 4)
        >>> is_dense(image.permute(2, 0, 1)), is_dense(image[:, :, :2]), is_dense(image[:1].expand(2, 3, 4))
        (True, False, False)
    """
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= length
    return True


def memory_of(tensor: Any) -> list[torch.Tensor]:
    """The strided tensors that a tensor is made of: itself, or indices and values of a sparse or packed one."""
    if isinstance(tensor, PackedSequence):
        return [part for part in tensor if isinstance(part, torch.Tensor)]
    if tensor.layout is torch.strided:
        return [] if tensor.is_nested else [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values(), tensor.offsets()] if tensor.layout is torch.jagged else []


def _cut(tensor: Any, samples: int, start: int, size: int) -> Any:
    is_batch = isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and len(tensor) == samples
    return tensor.narrow(0, start, size) if is_batch else tensor


def _map(value: Any, change: Change) -> Any:
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return change(value)
    if isinstance(value, SampleBatch) and value.stacked is not None:
        return _map_samples(value, change)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: _map(part, change) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return _like_sequence(value, [_map(part, change) for part in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _like_dataclass(value, change)
    return value


def _map_samples(samples: SampleBatch, change: Change) -> SampleBatch:
    assert samples.stacked is not None
    images, targets = samples.stacked
    return SampleBatch(change(images), _map(targets, change), [_map(target, change) for _, target in samples])


def _like_mapping(old: Any, parts: dict[Any, Any]) -> Any:
    if all(parts[key] is old[key] for key in parts):
        return old
    if type(old) is not dict and isinstance(old, MutableMapping):
        new = copy.copy(old)  # keeps what a subclass knows besides, such as a default factory
        new.update(parts)
        return new
    return parts


def _like_sequence(old: Any, parts: list[Any]) -> Any:
    if all(new is part for new, part in zip(parts, old, strict=True)):
        return old
    if hasattr(old, "_fields"):
        return type(old)(*parts)
    if type(old) in (list, SampleBatch):
        return parts
    try:
        return type(old)(parts)
    except TypeError:  # a subclass that is made otherwise
        return tuple(parts) if isinstance(old, tuple) else parts


def _like_dataclass(old: Any, change: Change) -> Any:
    parts = {field.name: _map(getattr(old, field.name), change) for field in _set_fields(old)}
    if all(part is getattr(old, name) for name, part in parts.items()):
        return old
    new = copy.copy(old)
    for name, part in parts.items():
        object.__setattr__(new, name, part)  # a frozen one too: nobody else sees the copy yet
    return new


def _set_fields(value: Any) -> Iterator[dataclasses.Field[Any]]:
    return (field for field in dataclasses.fields(value) if hasattr(value, field.name))
