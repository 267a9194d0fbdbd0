"""Names and instructions of Python code, with those of the functions in it."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator


def read_code(code: types.CodeType) -> tuple[frozenset[str], list[dis.Instruction]]:
    """Return the names and the instructions of code and of the functions in it."""
    instructions = [it for each in with_inner(code) for it in dis.get_instructions(each)]
    return names_in_code(code), instructions


def names_in_code(code: types.CodeType) -> frozenset[str]:
    """Return the names that code and the functions in it look up or import.

    Names of globals, attributes and modules are not told apart: only instructions do that.
    """
    return frozenset(name for each in with_inner(code) for name in each.co_names)


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and that of the functions, lambdas and comprehensions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from with_inner(value)
