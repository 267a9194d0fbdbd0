"""Names and instructions of Python code, including the functions inside it."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator


def read_code(code: types.CodeType) -> tuple[frozenset[str], list[dis.Instruction]]:
    """Return the names and the instructions of code, including the functions inside it."""
    instructions = [it for each in with_inner(code) for it in dis.get_instructions(each)]
    return names_in_code(code), instructions


def names_in_code(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, including the functions inside it, looks up or imports.

    Names of globals, attributes and modules are not distinguished; instructions would do that.
    """
    return frozenset(name for each in with_inner(code) for name in each.co_names)


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code of the functions, lambdas and comprehensions inside it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from with_inner(value)
