"""Properties that fastdata adds to torchvision's datasets, which a subclass may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastdata.errors import kind_of

if TYPE_CHECKING:
    from fastdata.datasets.samples import DatasetSamples


class AddedProperty:
    """A property that fastdata adds to datasets.

    A subclass may assign its own value to this name, because fastdata does not read the property.
    """

    def __init__(self, read: Callable[[DatasetSamples], Any]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, dataset: Any, owner: type | None = None) -> Any:
        if dataset is None:
            return self
        own = vars(dataset)
        if self._name in own:
            return own[self._name]
        return self._read(dataset._fastdata)

    def __set__(self, dataset: Any, value: Any) -> None:
        if type(dataset).__module__.startswith("fastdata."):
            raise AttributeError(
                f"{self._name} of {kind_of(dataset)} cannot be assigned: it describes the dataset. "
                "Pass the options when you make the dataset; its transform may be assigned."
            )
        vars(dataset)[self._name] = value


def added_property(read: Callable[[DatasetSamples], Any]) -> Any:
    """Return an ``AddedProperty`` that type checkers accept for the declared type of the name."""
    return AddedProperty(read)
