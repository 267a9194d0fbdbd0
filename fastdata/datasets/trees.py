"""Batches as trees: find or replace the tensors in any nesting of containers."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fastdata.datasets.batch import SampleBatch

if TYPE_CHECKING:
    from fastdata.datasets.batch import Collate


IsLeaf = Callable[[Any], bool]
MapLeaf = Callable[[Any], Any]


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, PackedSequence))


def is_container(value: Any) -> bool:
    """Return True if ``map_batch`` maps the parts of a value."""
    if isinstance(value, (list, tuple, Mapping)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def map_batch(function: MapLeaf, batch: Any, is_leaf: IsLeaf = is_tensor) -> Any:
    """Return a batch in which each tensor is replaced by the result of ``function``.

    Tuples, namedtuples, lists, mappings, dataclasses and ``SampleBatch`` keep their type. A
    container in which nothing is replaced is returned itself, as is any other value. For a tensor
    that occurs twice, ``function`` is called once. A ``PackedSequence`` counts as a tensor.

    Args:
        function: function that is called with each tensor.
        batch: any value.
        is_leaf: function that returns True for the values to replace. Default: tensors.

    Example:
        >>> map_batch(len, {"image": torch.zeros(2), "name": "a"})
        {'image': 2, 'name': 'a'}
    """
    return _map_value(function, batch, is_leaf, {})


def leaves_of(batch: Any, is_leaf: IsLeaf = is_tensor) -> list[Any]:
    """Return the tensors in a batch, or the values for which ``is_leaf`` is True, each once.

    Example:
        >>> leaves_of({"image": torch.zeros(2), "name": "a"})
        [tensor([0., 0.])]
    """
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_batch(note, batch, is_leaf)
    return found


def _map_value(
    function: MapLeaf,
    value: Any,
    is_leaf: IsLeaf,
    results: dict[int, Any],
) -> Any:
    # Not a closure that calls itself: it would be part of a reference cycle, which would keep the
    # tensors alive until the garbage collector runs.
    if is_leaf(value):
        if id(value) not in results:
            results[id(value)] = function(value)
        return results[id(value)]
    parts = _parts_of(value)
    mapped = [_map_value(function, part, is_leaf, results) for part in parts]
    if all(map(operator.is_, mapped, parts)):
        return value
    return _rebuilt(value, mapped)


def _parts_of(value: Any) -> Sequence[Any]:
    """Return the values in a container; an empty sequence for other values."""
    match value:
        case SampleBatch() if value.is_stacked:
            return value.parts  # the samples are views of one tensor of images
        case list() | tuple():
            return value
        case Mapping():
            return list(dict(value).values())  # a class may define ``values`` as something else
    if not is_container(value):
        return ()
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    """Return a container like ``value`` with other parts."""
    match value:
        case SampleBatch():
            return SampleBatch(*parts) if value.is_stacked else parts
        case tuple() if hasattr(value, "_make"):
            return value._make(parts)
        case list() | tuple():
            return type(value)(parts)
        case MutableMapping():  # a copy keeps everything else, such as a default factory
            new = copy.copy(value)
            new.update(zip(value, parts, strict=True))
            return new
        case Mapping():
            return dict(zip(value, parts, strict=True))
    new = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        # Also for a frozen dataclass: no other code has seen the copy yet.
        object.__setattr__(new, field.name, part)
    return new


def as_channels_last(batch: Any) -> Any:
    """Return the batch with its tensors of four dimensions in ``torch.channels_last``."""
    return map_batch(_channels_last, batch)


def _channels_last(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelsLast:
    """A ``collate_fn`` that returns the batches of another one ``as_channels_last``."""

    collate_fn: Collate

    def __call__(self, samples: Any) -> Any:
        return as_channels_last(self.collate_fn(samples))
