"""Functions that find out which transforms and callables draw random numbers.

Transforms of torchvision, timm and albumentations are recognised by name. For the user's callables,
all objects that their code may use are searched for random number generators.
"""

from __future__ import annotations

import dis
import gc
import random
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from fastdata.pixels.albumentations_objects import is_of_albumentations, names_in, varies
from fastdata.pixels.bytecode import names_in_code, with_inner
from fastdata.pixels.compose import flatten_transform
from fastdata.pixels.fingerprint import ATOMS, BY_NAME, closed_over, is_installed, is_plain, name_of
from fastdata.pixels.known import PREPARABLE, REFORMING, known_name
from fastdata.pixels.own_transforms import Views

_REPEATABLE = names_in(
    "ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat ConvertImageDtype FiveCrop "
    "LinearTransformation Normalize SanitizeBoundingBoxes SanitizeKeyPoints SetClampingMode "
    "TenCrop ToDtype ToPILImage ToTensor UniformTemporalSubsample timm.MaybeToTensor "
    "timm.ToNumpy"
)
"""Other transforms of torchvision and timm that give the same result for the same sample."""
_RANDOM = names_in(
    "AlternatingFlip AugMix AutoAugment ColorJitter CutMix ElasticTransform GaussianNoise "
    "MixUp ScaleJitter"
)
"""Transforms that draw random numbers, although their names do not begin with Rand or Trivial."""
_RANGES = {"GaussianBlur": "sigma", "JPEG": "quality", "RandomRotation": "degrees"}
"""Transforms that draw from a range -> the attribute that holds the range."""


def is_random(transform: Any) -> bool | None:
    """Return True if a transform draws random numbers, None if that is not known."""
    if type(transform) is Views:
        drawn = set(map(is_random, flatten_transform(transform.transforms)))
        return next((answer for answer in (True, None) if answer in drawn), False)
    name = known_name(transform)
    if not name:
        return None
    if name.startswith("A."):
        return varies(getattr(transform, "transform", transform))
    if name in _RANGES:
        return len(set(getattr(transform, _RANGES[name]))) > 1
    plain = name.removeprefix("timm.")
    if plain in _RANDOM or plain.startswith(("Rand", "Trivial")):
        return True
    return False if name in _REPEATABLE | PREPARABLE | REFORMING else None


def draws_in_vain(transform: Any) -> bool:
    """Return True if a transform advances torch's generator, but gives the same result each time.

    An example is ``GaussianBlur(3, sigma=1.0)``, which draws its sigma from 1.0 to 1.0.
    """
    return known_name(transform) in _RANGES and is_random(transform) is False


def is_always_applied(transform: Any) -> bool | None:
    """Return True if a transform of albumentations, and all inside it, apply to every image.

    Return None for objects of other libraries.
    """
    is_theirs = is_of_albumentations(transform) and not isinstance(transform, type)
    probability = getattr(transform, "p", None) if is_theirs else None
    if probability is None:
        return None
    parts = getattr(transform, "transforms", ())
    is_applied = probability >= 1 or getattr(transform, "always_apply", False)
    return is_applied and all(map(is_always_applied, parts))


def may_draw(call: Any, *, from_torch: bool = True) -> bool:
    """Return True if a callable may draw from Python's or NumPy's generators, or from torch's.

    All objects that its code names are searched: globals, closures, defaults, attributes, methods.
    The code of torch, NumPy and Python itself is not searched, and that of other installed packages
    only within one module. The answer is also True if the code imports a module when it is called,
    or if there are more objects than can be searched in a few milliseconds.

    Args:
        call: a function, a method, or an object that can be called.
        from_torch: True to count any use of torch's functions as a draw; False to ignore torch.

    Example:
        >>> may_draw(len), may_draw(torch.rand), may_draw(torch.rand, from_torch=False)
        (False, True, False)
    """
    for number, value in enumerate(reachable(call)):
        is_torch = from_torch and _package_of(value) == "torch"
        if is_torch or value is _IMPORT or isinstance(value, _GENERATORS):
            return True
        if number > _MOST_FOLLOWED:
            return True
    return False


def reachable(value: Any, *, skips_installed: bool = False) -> Iterator[Any]:
    """Yield a value and every object that calling it may use, the nearest first.

    Args:
        value: any object.
        skips_installed: True to skip the code of installed packages.

    Only the first 1,000 items of a collection are followed.
    """
    # Breadth first: a caller that stops after some objects has seen the nearest.
    queue = deque([value])
    met: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again
    while queue:
        value = queue.popleft()
        if id(value) in met or isinstance(value, _DATA):
            continue
        met[id(value)] = value
        yield value
        is_code = isinstance(value, (type, types.FunctionType))
        if not (skips_installed and is_code and name_of(value) is not None):
            queue.extend(islice(_used_by(value), _MOST_PARTS))


_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
_DATA = (*ATOMS, np.ndarray, torch.Tensor, types.ModuleType)
_MOST_FOLLOWED = 1000
"""Most objects that are searched for one callable."""
_MOST_PARTS = 1000
"""Most items of one collection that are followed."""
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_IMPORT = object()
"""Stands for the unknown modules that a function imports when it is called."""


def _used_by(value: Any) -> Collection[Any]:
    """Return the objects that calling a value may use directly."""
    if isinstance(value, (type, types.FunctionType)):
        if _is_leaf(value):
            return ()
        return _members_of(value) if isinstance(value, type) else _named_by(value)
    if isinstance(value, (list, tuple)) and is_plain(value):
        return ()
    # Python's garbage collector lists all references: attributes, slots, items, a method's object,
    # and the class.
    return gc.get_referents(value)


def _members_of(kind: type) -> list[Any]:
    """Return the bases, methods and values of a class, without its constructor.

    Its objects exist already, so the constructor is not called again.
    """
    members = [it for name, it in vars(kind).items() if name not in ("__init__", "__new__")]
    return [*kind.__bases__, *members]


def _named_by(function: types.FunctionType) -> list[Any]:
    """Return the values that a function can use: globals that it names, closures and defaults."""
    code = function.__code__
    names = names_in_code(code)
    held = [function.__globals__[name] for name in names & function.__globals__.keys()]
    module = function.__module__
    if is_installed(getattr(sys.modules.get(module), "__file__", None) or ""):
        held = [it for it in held if _is_leaf(it) or getattr(it, "__module__", None) == module]
    # Each instruction is one byte, followed by its argument. The module `dis` would take 1 ms.
    elif any(_IMPORT_NAME in each.co_code[::2] for each in with_inner(code)):
        return [_IMPORT]
    held += [*closed_over(function), *(function.__defaults__ or ())]
    held += (function.__kwdefaults__ or {}).values()
    return [used for value in held for used in _named_in(value, names)]


def _named_in(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yield a value; for a module, yield instead the values that code with these names can use."""
    if not isinstance(value, types.ModuleType):
        yield value
        return
    for name in names & vars(value).keys():
        yield from _named_in(vars(value)[name], names - {name})


def _is_leaf(value: Any) -> bool:
    """Return True for a module, function or class whose code is not searched.

    The code of torchvision and timm is searched: some of their transforms use Python's generator.
    """
    package = _package_of(value)
    return package in BY_NAME and package not in ("timm", "torchvision")


def _package_of(value: Any) -> str:
    attribute = "__name__" if isinstance(value, types.ModuleType) else "__module__"
    return str(getattr(value, attribute, "")).partition(".")[0]
