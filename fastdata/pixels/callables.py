"""The user's own callables that only call transforms, such as MoCo's two crops.

Such a callable is run once on stand-ins: for an image, and for every global, attribute and closure
that its code reads. A stand-in for a transform records that it was called. Code without a condition
makes the same calls each time, so the recorded calls are all that it ever does. Code with other
instructions is not run, and code that does anything else fails on a stand-in; in both cases the
callable runs as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastdata.pixels.albumentations_objects import is_of_albumentations
from fastdata.pixels.bytecode import read_code
from fastdata.pixels.known import is_changed
from fastdata.pixels.own_transforms import LONG_MASK, AlbumentationsTransform, Views
from fastdata.pixels.resize import TO_RGB


def seen_through(call: Any) -> tuple[Any, ...] | None:
    """Return the transforms that a callable calls in order; None if it does anything else.

    A callable that returns several results is one ``Views``.
    """
    log: list[Any] = []
    try:
        run = _run_copy(*_parts_of(call), _stand_in)
        made = run(_Image(log))
        views = made if type(made) in (list, tuple) else (made,)
        calls = [view._calls for view in views]
    except Exception:  # noqa: BLE001  # a stand-in refuses everything but calls
        return None
    if LONG_MASK in log:  # only masks become labels
        return None
    # `made` is an image, or a list or tuple of them; anything else has failed above. Numbers of
    # calls stand for the calls, because one transform may be called several times.
    # Each call must count for exactly one result. A call for no result could still draw random
    # numbers, and two views of one call would share what it draws.
    counted = sorted(chain.from_iterable(calls))
    if not log or () in calls or counted != list(range(len(log))):
        return None
    transforms = [tuple(log[number] for number in numbers) for numbers in calls]
    if views is not made:
        return transforms[0]
    several = Views(*transforms)
    several.type = type(made)
    return (several,)


def seen_through_pair(call: Any) -> tuple[Any, ...] | None:
    """Return the transforms of albumentations that a callable calls with an image and its mask.

    ``LONG_MASK`` after them stands for ``mask.long()``: losses need class numbers of int64. Return
    None if the callable does anything else.
    """
    image_log: list[Any] = []
    mask_log: list[Any] = []
    try:
        run = _run_copy(*_parts_of(call), _stand_in)
        image, mask = run(_Image(image_log), _Image(mask_log))
        # Each call must take both: two calls would draw different random numbers for the image and
        # for its mask.
        are_joint = all(isinstance(call, _Joint) for call in image_log)
        are_of_both = mask_log in (image_log, [*image_log, LONG_MASK])
        is_whole = image._log is image_log and image._has_all_calls
        is_whole_mask = mask._log is mask_log and mask._has_all_calls
    except Exception:  # noqa: BLE001  # a stand-in refuses everything but calls of transforms
        return None
    if not (image_log and are_joint and are_of_both and is_whole and is_whole_mask):
        return None
    return tuple(LONG_MASK if call is LONG_MASK else call.transform for call in mask_log)


def code_of_call(call: Any) -> tuple[Callable[..., Any] | None, Any]:
    """Return the function that runs when an object is called, and the ``self`` of a method."""
    if isinstance(call, FunctionType):
        return call, None
    if isinstance(call, MethodType):
        return call.__func__, call.__self__
    kind: Any = type(call)
    # Python looks up `__call__` in the class. That of a torch module calls `forward` and hooks.
    called = kind.__call__ if callable(call) else None
    if called is torch.nn.Module.__call__:
        called = None if is_changed(call) else kind.forward
    return called, call


_MORE = ("_IF_", "STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_", "EXC", "SETUP_", "IMPORT_")
"""Parts of the names of instructions that branch, change outside values, or catch errors."""


@cache
def _names_read(code: CodeType) -> frozenset[str] | None:
    """Return the names that a function looks up; None if it does more than call other objects."""
    names, instructions = read_code(code)
    does_more = any(word in each.opname for each in instructions for word in _MORE)
    return None if does_more else names


def _parts_of(call: Any) -> tuple[FunctionType, frozenset[str], Any]:
    """Return the function that a callable runs, the names that it looks up, and its ``self``.

    Raises:
        TypeError: it does more than call other objects, or is not Python code.
    """
    function, owner = code_of_call(call)
    names = _names_read(function.__code__) if isinstance(function, FunctionType) else None
    if not isinstance(function, FunctionType) or names is None:
        name = getattr(call, "__qualname__", type(call).__name__)
        raise TypeError(f"the code of {name} does more than call other objects")
    return function, names, owner


def outside_of(call: Any) -> dict[str, Any]:
    """Return the outside values that a callable's code would read now, by name.

    They are empty unless ``seen_through`` would run the callable.
    """
    try:
        function, names, owner = _parts_of(call)
    except TypeError:
        return {}
    found: dict[str, Any] = {}
    for held in (function.__globals__, getattr(owner, "__dict__", {})):
        found |= {name: held[name] for name in names & held.keys()}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    with suppress(ValueError):  # a variable of the closure that has no value yet
        found |= {name: cell.cell_contents for name, cell in cells}
    return found


def copy_on_stand_ins(call: Any, stand_in: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a copy of a callable (also of a ``partial``) that can reach only stand-ins.

    ``stand_in`` is called with each outside value that the code reads, and returns its stand-in.
    For a module it is called with the values in the module that the code names.

    Raises:
        TypeError: the code does more than call other objects, or is not Python code.
    """
    if type(call) is partial:
        keywords = {name: stand_in(value) for name, value in call.keywords.items()}
        inside = copy_on_stand_ins(call.func, stand_in)
        return partial(inside, *map(stand_in, call.args), **keywords)
    function, names, owner = _parts_of(call)

    def of_any(value: Any, names: frozenset[str] = names) -> Any:
        if not isinstance(value, ModuleType):
            return stand_in(value)
        named = names & vars(value).keys()
        inner = {name: of_any(vars(value)[name], names - {name}) for name in named}
        return SimpleNamespace(**inner)

    run = _run_copy(function, names, owner, of_any)
    plain = run.__func__ if isinstance(run, MethodType) else run
    plain.__defaults__ = tuple(map(of_any, function.__defaults__ or ()))
    named = function.__kwdefaults__ or {}
    plain.__kwdefaults__ = {name: of_any(named[name]) for name in named}
    return run


def _run_copy(
    function: FunctionType, names: frozenset[str], owner: Any, stand_in: Callable[[Any], Any]
) -> FunctionType | MethodType:
    """Return a copy of a function that can reach nothing but stand-ins."""
    # The copy has the function's code, but other globals, closures and `self`: so it cannot change
    # any of the user's objects.
    outside = _stand_ins(function.__globals__, names, stand_in)
    outside["__builtins__"] = {"range": range}  # the only builtin that such callables use
    cells = [CellType(stand_in(cell.cell_contents)) for cell in function.__closure__ or ()]
    run = FunctionType(function.__code__, outside, closure=tuple(cells))
    if owner is None:
        return run
    held = {**vars(owner), **vars(owner).get("_modules", {})}  # those of an nn.Module
    return MethodType(run, SimpleNamespace(**_stand_ins(held, names, stand_in)))


class _Image:
    """A stand-in for an image, with the numbers of the calls in a log that made it."""

    def __init__(self, log: list[Any], calls: tuple[int, ...] = ()) -> None:
        self._log = log
        self._calls = calls
        self._is_array = False

    @property
    def _has_all_calls(self) -> bool:
        """True if each call of the log led to this image, in the log's order."""
        return self._calls == tuple(range(len(self._log)))

    def _through(self, step: Any) -> _Image:
        if self._is_array and not isinstance(step, (_Joint, AlbumentationsTransform)):
            raise TypeError("a step of PIL images or tensors gets an array")
        return self._noted(step)

    def _noted(self, call: Any) -> _Image:
        number = len(self._log)
        self._log.append(call)
        return _Image(self._log, (*self._calls, number))

    def _through_array(self) -> _Image:
        """Return the stand-in for ``np.array(image)``, which only albumentations may get."""
        array = _Image(self._log, self._calls)
        array._is_array = True
        return array

    def long(self) -> _Image:
        return self._noted(LONG_MASK)

    def convert(self, mode: str) -> _Image:
        # The one method of images that such callables use: to make gray images RGB.
        if mode != "RGB":
            raise ValueError(mode)
        return self._through(TO_RGB)


class _Joint:
    """One call of a transform of albumentations with an image and its mask."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform


def _albumentations_stand_in(transform: Any) -> Callable[..., Any]:
    """Return a stand-in with the interface of albumentations: ``transform(image=image)``."""

    def call(*, image: _Image, mask: _Image | None = None) -> dict[str, _Image]:
        if mask is None:
            return {"image": image._through(AlbumentationsTransform(transform))}
        both = _Joint(transform)
        return {"image": image._through(both), "mask": mask._through(both)}

    return call


def _stand_ins(
    values: Mapping[str, Any], names: frozenset[str], stand_in: Callable[[Any], Any]
) -> dict[str, Any]:
    return {name: stand_in(values[name]) for name in names & values.keys()}


def _stand_in(value: Any) -> Any:
    """Return a stand-in for a transform, or a tuple of stand-ins for several.

    Numbers stand for themselves, because they count views.
    """
    if isinstance(value, (list, tuple, torch.nn.ModuleList)):
        return tuple(map(_stand_in, value))
    if isinstance(value, int):
        return value
    if value is np:
        return SimpleNamespace(array=_Image._through_array, asarray=_Image._through_array)
    if is_of_albumentations(value):
        return _albumentations_stand_in(value)
    return lambda image: image._through(value)
