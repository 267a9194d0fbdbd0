"""The manifest of a cache: a description of its samples and of their origin."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from fastdata.stores.kept import Layout
from fastdata.stores.writer import StoredPart

VERSION = 9
"""Version of the format. A cache of another version is built again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a cache: the form of its samples, and what they were made from.

    Args:
        version: version of the format.
        key: everything that samples depend on except their files: ``source``, the code that opens
            them; ``prepare``, the steps; and ``codec``, as the user chose it.
        root: folder of the files when the cache was written.
        content: fingerprint of the files, or the number of samples if they are not files.
        classes: number of each class, by its name; None if classes have no names.
        parts: form of each part of a sample.
        layout: how the parts of a sample are put together.
    """

    version: int = VERSION
    key: dict[str, str]
    root: str
    content: str = ""
    classes: dict[str, int] | None = None
    parts: tuple[StoredPart, ...] = ()
    layout: Layout = dataclasses.field(default_factory=Layout)

    def __post_init__(self) -> None:
        if self.key.keys() != {"source", "prepare", "codec"}:
            raise ValueError(f"its key has other names than source, prepare and codec: {self.key}")


def from_json(kind: Any, value: Any) -> Any:
    """Return a value from JSON as a value of type ``kind``, which may be a dataclass.

    Raises:
        Exception: of any kind, if the value is not of this type.
    """
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    # Types are compared exactly: calling the type would turn 1 or "yes" into True.
    if kind is Any or value in arguments:  # one of a Literal
        return value
    if origin is types.UnionType and type(value) in arguments:
        return value
    if types.NoneType in arguments:
        return None if value is None else from_json(arguments[0], value)
    if origin is tuple:
        return tuple(from_json(arguments[0], item) for item in value)
    if origin is dict:
        return {name: from_json(arguments[1], item) for name, item in value.items()}
    if dataclasses.is_dataclass(kind):
        known = typing.get_type_hints(kind)
        fields = {name: from_json(known[name], value[name]) for name in value.keys() & known.keys()}
        return typing.cast(Any, kind)(**fields)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not of type {getattr(kind, '__name__', kind)}")
    return value
