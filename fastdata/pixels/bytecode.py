"""Names and instructions of Python code, with those of the functions in it."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

# Code


def read_code(code: types.CodeType) -> tuple[frozenset[str], list[dis.Instruction]]:
    """The names that code and the functions in it look up, and their instructions."""
    steps = [step for each in with_inner(code) for step in dis.get_instructions(each)]
    return names_in_code(code), steps


def names_in_code(code: types.CodeType) -> frozenset[str]:
    """The names that code and the functions in it look up or import."""
    return frozenset(name for each in with_inner(code) for name in each.co_names)


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of the functions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from with_inner(value)
