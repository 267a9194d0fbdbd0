"""Take over the transform of a dataset that calls it on the items that it reads.

torchvision's datasets, and most that people write, end with ``self.transform(image)``. If nothing
else happens to an image after it was read, the image can be stored as it was read, and the
transform can run on whole batches.

To find out, a few items are read through a copy of the dataset with a stand-in for its transform,
which returns its argument. The stand-in must be called exactly once for an item, and the sample of
the item must be the very object that the stand-in returned.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils.data import Subset

from fastdata.datasets.stored import Transforms
from fastdata.pixels.compose import flatten_transform
from fastdata.pixels.draws import is_random
from fastdata.pixels.samples import to_stored
from fastdata.pixels.split import split_transform
from fastdata.sources.items import DatasetSource
from fastdata.stores.frozen import contents_of
from fastdata.stores.generators import find_generators, set_state, state_of


class Lifted(NamedTuple):
    """A copy of a dataset without its transform, and the transform."""

    dataset: Any
    transforms: Transforms


def lift_transforms(dataset: Any) -> Lifted | None:
    """Take over the transform of a dataset; return None if it has to stay, or there is none.

    A transform that neither draws random numbers nor runs on whole batches stays in the dataset,
    and runs once for each item. A ``target_transform`` always stays.
    """
    if type(dataset) is Subset:
        inner = lift_transforms(dataset.dataset)
        return inner and Lifted(_changed(dataset, dataset=inner.dataset), inner.transforms)
    held = getattr(dataset, "__dict__", {})
    both = held.get("transforms")
    is_joint = both is not None and type(both).__name__ != "StandardTransform"
    name = "transforms" if is_joint else "transform"
    transform = both if is_joint else held.get(name)
    if not callable(transform) or not len(dataset):
        return None
    try:
        with _unmoved_generators(dataset):
            items = _read_by_stand_in(dataset, name)
            if not _is_worth_lifting(transform, items):
                return None
    except Exception:  # noqa: BLE001  # the user's code meets stand-ins, and may raise anything
        return None
    takes_both = any(len(item) > 1 for item in items)
    found = Transforms(of_both=transform) if takes_both else Transforms(transform)
    return Lifted(_with_transform(dataset, name, PassThrough()), found)


def _read_by_stand_in(dataset: Any, name: str) -> list[tuple[Any, ...]]:
    """Return the arguments of the transform for a few items: the sample, or sample and target.

    Return an empty list if the dataset changes one of them after the transform.
    """
    stand_in = _StandIn()
    source = DatasetSource(_with_transform(dataset, name, stand_in))
    last = len(source) - 1
    items = []
    for index in sorted({0, last // 2, last}):
        stand_in.met.clear()
        read = source.read(index)
        [given] = stand_in.met
        if not all(map(operator.is_, given, read)):
            return []
        items.append(given)
    return items


def _is_worth_lifting(transform: Any, items: list[tuple[Any, ...]]) -> bool:
    """Return True if a transform draws random numbers, or can run on whole batches."""
    if not items or _draws(transform, items):
        return bool(items)
    sample, *target = items[0]
    return not target and split_transform(transform, form=to_stored(sample)[1]).is_batched


def _draws(transform: Any, items: list[tuple[Any, ...]]) -> bool:
    """Return True if a transform is known to draw, or changes a generator when it is called."""
    drawn = set(map(is_random, flatten_transform(transform)))
    if True in drawn or None not in drawn:
        return True in drawn
    generators = [each.generator for each in find_generators(transform, moves_torch=False)]
    before = contents_of(map(state_of, generators))
    for item in items:
        transform(*item)
    return before != contents_of(map(state_of, generators))


class PassThrough:
    """A transform that returns its arguments. It replaces one that was taken over."""

    def __call__(self, *values: Any, **named: Any) -> Any:
        # albumentations' transforms are called as transform(image=image)["image"].
        return named or (values[0] if len(values) == 1 else values)


class _StandIn(PassThrough):
    """A transform that records its arguments and returns them."""

    def __init__(self) -> None:
        self.met: list[tuple[Any, ...]] = []

    def __call__(self, *values: Any, **named: Any) -> Any:
        if named.keys() - {"image", "mask"}:
            raise TypeError("only image= and mask= can be lifted, not boxes and the like")
        self.met.append((*values, *named.values()))
        return super().__call__(*values, **named)


def _with_transform(dataset: Any, name: str, transform: Any) -> Any:
    """Return a copy of a dataset with another transform."""
    both = vars(dataset).get("transforms")
    # If ``transform`` was assigned later, ``transforms`` still has the first one, which datasets
    # that call ``transforms`` go on to use.
    if name == "transforms" or both is None or both.transform is not vars(dataset)[name]:
        return _changed(dataset, **{name: transform})
    # torchvision's datasets call one of the two. The class is torchvision's StandardTransform.
    pair = type(both)(transform, both.target_transform)
    return _changed(dataset, transform=transform, transforms=pair)


def _changed(value: Any, **attributes: Any) -> Any:
    other = copy.copy(value)
    vars(other).update(attributes)
    return other


@contextmanager
def _unmoved_generators(dataset: Any) -> Iterator[None]:
    """Restore the state of every random generator that the dataset may change."""
    found = [each.generator for each in find_generators(dataset, moves_torch=True)]
    before = list(map(state_of, found))
    try:
        yield
    finally:
        for generator, state in zip(found, before, strict=True):
            set_state(generator, state)
