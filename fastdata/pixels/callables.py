"""The user's own callables that do nothing but call steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from fastdata.pixels.bytecode import read_code
from fastdata.pixels.known import is_changed
from fastdata.pixels.own_transforms import Views
from fastdata.pixels.resize import TO_RGB

# The user's own callables


def seen_through(call: Any) -> tuple[Any, ...] | None:
    """The steps of a callable that does nothing but call steps; None if it does more.

    It is tried, on a stand-in for an image, with stand-ins for what it reads. These can only be
    called, and code without a condition does the same each time.
    """
    function, owner = code_of_call(call)
    if not isinstance(function, FunctionType):
        return None
    names = _names_read(function.__code__)
    if names is None:
        return None
    log: list[Any] = []
    try:
        made = _try(function, names, owner, _Image(log))
        views = made if type(made) in (list, tuple) else (made,)
        calls = [view._calls for view in views]
    except Exception:  # noqa: BLE001  # it asked for more
        return None
    # Each call is for one result, else it is for nothing, or two views share what it draws.
    if not log or () in calls or sorted(chain(*calls)) != list(range(len(log))):
        return None
    transforms = [tuple(log[k] for k in numbers) for numbers in calls]
    if views is not made:
        return transforms[0]
    several = Views(*transforms)
    several.kind = type(made)
    return (several,)


def code_of_call(call: Any) -> tuple[Any, Any]:
    """The function that runs where this is called, and whose method it is."""
    if isinstance(call, FunctionType):
        return call, None
    if isinstance(call, MethodType):
        return call.__func__, call.__self__
    kind: Any = type(call)
    called = kind.__call__ if callable(call) else None
    if called is torch.nn.Module.__call__:
        called = None if is_changed(call) else kind.forward
    return called, call


_MORE = ("_IF_", "STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_", "EXC", "SETUP_", "IMPORT_")
"""Parts of the names of instructions that decide, keep something, or catch errors."""


@cache
def _names_read(code: CodeType) -> frozenset[str] | None:
    """Names that a function looks up; None if it does more than to call."""
    names, steps = read_code(code)
    return None if any(word in step.opname for step in steps for word in _MORE) else names


def outside_of(call: Any) -> dict[str, Any]:
    """What the code of a callable that may be seen through reads from outside now, by name."""
    function, owner = code_of_call(call)
    if not isinstance(function, FunctionType):
        return {}
    names = _names_read(function.__code__) or frozenset()
    found: dict[str, Any] = {}
    for held in (function.__globals__, getattr(owner, "__dict__", {})):
        found |= {name: held[name] for name in names & held.keys()}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    with suppress(ValueError):  # nothing was assigned yet
        found |= {name: cell.cell_contents for name, cell in cells}
    return found


def _try(function: FunctionType, names: frozenset[str], owner: Any, image: _Image) -> Any:
    outside = _stand_ins(function.__globals__, names)
    outside["__builtins__"] = {"range": range}
    cells = [CellType(_stand_in(cell.cell_contents)) for cell in function.__closure__ or ()]
    run = FunctionType(function.__code__, outside, closure=tuple(cells))
    if owner is None:
        return run(image)
    held = {**vars(owner), **vars(owner).get("_modules", {})}  # those of an nn.Module
    return run(SimpleNamespace(**_stand_ins(held, names)), image)


class _Image:
    """Stands for an image: the steps that it went through, as their numbers in a log."""

    def __init__(self, log: list[Any], calls: tuple[int, ...] = ()) -> None:
        self._log = log
        self._calls = calls

    def _through(self, step: Any) -> _Image:
        self._log.append(step)
        return _Image(self._log, (*self._calls, len(self._log) - 1))

    def convert(self, mode: str) -> _Image:
        if mode != "RGB":
            raise ValueError(mode)
        return self._through(TO_RGB)


def _stand_ins(values: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: _stand_in(values[name]) for name in names & values.keys()}


def _stand_in(value: Any) -> Any:
    """What stands for a step, or several in a row; numbers stand for themselves."""
    if isinstance(value, (list, tuple, torch.nn.ModuleList)):
        return tuple(map(_stand_in, value))
    return value if isinstance(value, int) else lambda image: image._through(value)
