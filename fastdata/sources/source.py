"""The interface of all sources, and the keys by which items that are not pairs are split."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fastdata.pixels.openings import Opening

Indices = Sequence[int]

Pair = tuple[Any, Any]
"""Sample and target."""


@dataclass(frozen=True, slots=True)
class ItemKeys:
    """Keys by which items that are not pairs are split into sample and target, and joined again.

    The sample is the value of ``image``, whose name in a tuple is its place, such as "0". The
    target is the value of the other key, or a dict of several; of a tuple the other value, a tuple
    of several, or 0 if there is none.

    ``named`` is the module and class of a namedtuple or dataclass, as text, so that a cache can
    store it. The joined item has this class if the module is imported, else it is a tuple or dict.
    """

    names: tuple[str, ...]
    image: str
    kind: Literal["dict", "tuple", "alone", "dataclass"] = "dict"
    named: str = ""

    def split(self, item: Any) -> Pair:
        if self.kind == "alone":
            return item, 0
        if self.kind == "tuple":
            rest = list(item)
            sample = rest.pop(self._place())
            return sample, rest[0] if len(rest) == 1 else tuple(rest) or 0
        if self.kind == "dataclass":
            item = {name: getattr(item, name) for name in self.names}
        # One other value is the target itself, so that a batch of labels is one tensor.
        others = {name: item[name] for name in self.names if name != self.image}
        sample = item[self.image]
        return sample, others if len(others) != 1 else others.popitem()[1]

    def join(self, sample: Any, target: Any, kind: Callable[[Any], Any] = tuple) -> Any:
        """Return an item, or a batch of items if ``kind`` is list, as in ``default_collate``."""
        if self.kind == "alone":
            return sample
        if self.kind in ("dict", "dataclass"):
            # A batch of strings is a tuple here, but a list in the batches of default_collate.
            target = kind(target) if type(target) is tuple else target
            # With one other key the target is its value, else a dict of the other values.
            others = dict.fromkeys(self.names, target) if len(self.names) == 2 else target
            item = {name: sample if name == self.image else others[name] for name in self.names}
            return item if self.kind == "dict" else self._as_dataclass(item)
        values: list[Any] = []
        if len(self.names) == 2:
            values.append(target)
        elif len(self.names) > 2:
            values += target
        values.insert(self._place(), sample)
        named = self._named_class()
        return kind(values) if named is None else named._make(values)

    def _place(self) -> int:
        """Return the place of the sample in a tuple."""
        return self.names.index(self.image)

    def _as_dataclass(self, item: dict[str, Any]) -> Any:
        """Return an item of the dataclass; a dict if its class is not found."""
        named = self._named_class()
        if named is None:
            return item
        # ``__init__`` is not called: it may check or change the values of a single sample, but
        # these may be the values of a batch.
        made = object.__new__(named)
        for name, value in item.items():
            object.__setattr__(made, name, value)
        return made

    def _named_class(self) -> Any:
        """Return the class of the items; None if it is not imported or has other fields now."""
        module, _, name = self.named.partition(":")
        # The name may come from a cache on disk. So nothing is imported: that would run code.
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return found if field_names(found) == self.names else None


def with_index(item: Any, index: Any, kind: Callable[[Any], Any] = tuple) -> Any:
    """Return an item with its index after its values, or a batch with the indices of its items.

    Raises:
        ValueError: the item is a dict that has an ``index`` of its own.
    """
    if isinstance(item, dict):
        if "index" in item:
            raise ValueError(
                "return_index=True adds the index of each sample as 'index', but the items of this "
                "dataset have a value of this name. Rename it in the dataset, or leave out "
                "return_index=."
            )
        return {**item, "index": index}
    values = item if isinstance(item, (tuple, list)) else (item,)  # an image alone
    return kind((*values, index))


def field_names(kind: Any) -> tuple[str, ...] | None:
    """Return the fields of a namedtuple or dataclass, or of its class; None for anything else."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return getattr(kind, "_fields", None)


def chosen_keys(columns: object) -> ItemKeys:
    """Return the keys that ``columns=`` names as sample and target.

    Raises:
        ValueError: ``columns`` has other keys than ``sample`` and ``target``, or no names as
        values.
    """
    given: Mapping[str, Any] = columns if isinstance(columns, Mapping) else {}
    target = given.get("target")
    names = [given.get("sample"), *(target if isinstance(target, (list, tuple)) else [target])]
    are_texts = all(isinstance(name, str) for name in names)
    if len(given) != 2 or len(names) < 2 or not are_texts:
        raise ValueError(
            f"columns={columns!r} does not name sample and target. Give a name for each, or a list "
            "of names for the target: columns={'sample': 'image', 'target': 'label'}."
        )
    return ItemKeys(tuple(names), names[0])


class Source(Protocol):
    """Samples by index in [0, len). Each is read again whenever it is needed.

    Attributes:
        keys: keys by which items that are not pairs are split; known once one item was read.
        opening: the way fastdata opens the files itself; None if it cannot.
        is_remote: True if reading waits for a network, so that ``expect`` makes it faster.

    ``read`` returns (sample, target). Several threads may call it at once if the user's loader or
    dataset allows that. ``expect`` announces the indices that this process reads next. ``path``
    returns the sample's file, for messages.
    """

    @property
    def keys(self) -> ItemKeys | None: ...
    @property
    def opening(self) -> Opening | None: ...
    @property
    def is_remote(self) -> bool: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> Pair: ...
    def expect(self, indices: Indices) -> None: ...
    def path(self, index: int) -> str | None: ...
