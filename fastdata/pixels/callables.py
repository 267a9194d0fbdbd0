"""What a callable of the user's does, where that can be read from its code: which steps it calls, or which one it is.

``read_calls`` runs its bytecode once on stand-ins: of the image, and of all that it names. They can
be called and handed on, and refuse everything else, so that nothing of the user's runs. ``is_like``
holds bytecode against that of published source, which the same interpreter compiles.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

from fastdata.pixels.images import TO_RGB

_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_STATEFUL = {
    "SETUP_FINALLY",
    "PUSH_EXC_INFO",
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "STORE_DEREF",
    "DELETE_DEREF",
}
"""Instructions that catch errors, or change what outlives the call."""
_ATTRIBUTES = (object.__getattribute__, ModuleType.__getattribute__, type.__getattribute__)
_PLAIN = (bool, int, float, str, type(None))
_MODULES = {
    "random": "random",
    "np": "numpy",
    "ImageFilter": "PIL.ImageFilter",
    "ImageOps": "PIL.ImageOps",
}
"""What global names of published code mean."""
_IMPORTS = "import random\nimport numpy as np\nfrom PIL import ImageFilter, ImageOps\n"


# Wrappers around steps


def read_calls(
    function: FunctionType, owner: Any = None
) -> tuple[type | None, list[tuple[Any, ...]]] | None:
    """The steps that a function, or a method of ``owner``, calls on its argument one after the other; else None.

    They are one tuple, or several with the type, list or tuple, in which their results are
    returned.
    """
    code = function.__code__
    if not _is_readable(code, owner is not None):
        return None
    images: list[_Image] = []
    image = _Image((), images)
    try:
        held = function.__globals__
        names: dict[str, Any] = {
            name: _stand_in(held[name]) for name in _names_in(code) if name in held
        }
        names["__builtins__"] = {"range": range}
        closure = tuple(
            CellType(_stand_in(cell.cell_contents)) for cell in function.__closure__ or ()
        )
        run = FunctionType(code, names, closure=closure)
        result = run(image) if owner is None else run(_StandIn(owner), image)
    except Exception:  # noqa: BLE001  # it asked a stand-in for more, or raises what it likes
        return None
    results = list(result) if type(result) in (list, tuple) else [result]
    if not results or any(type(each) is not _Image for each in results):
        return None
    # What one step has made and two take would be drawn twice, what none takes not at all.
    if any(made._uses + sum(each is made for each in results) != 1 for made in images[1:]):
        return None
    return (None if result is results[0] else type(result)), [each._steps for each in results]


def _refuse(*_: Any) -> NoReturn:
    raise TypeError("a stand-in is only called and handed on")


class _Image:
    """Stands for the image, or for what steps have made of it."""

    __slots__ = ("_all", "_steps", "_uses")
    __bool__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, steps: tuple[Any, ...], images: list[_Image]) -> None:
        self._steps, self._all, self._uses = steps, images, 0
        images.append(self)

    def convert(self, mode: Any) -> _Image:
        return self._after(TO_RGB) if mode == "RGB" else _refuse()

    def _after(self, step: Any) -> _Image:
        self._uses += 1
        return _Image((*self._steps, step), self._all)


class _StandIn:
    """Stands for a value that the code names."""

    __slots__ = ("__value",)
    __bool__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.__value = value

    def __getattr__(self, name: str) -> Any:
        kind: Any = type(self.__value)
        held = vars(self.__value)
        if kind.__getattribute__ not in _ATTRIBUTES or isinstance(
            getattr(kind, name, None), property
        ):
            _refuse()
        return _stand_in(held[name] if name in held else held["_modules"][name])

    def __call__(self, image: Any) -> _Image:
        return (
            image._after(self.__value)
            if callable(self.__value) and type(image) is _Image
            else _refuse()
        )


def _stand_in(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(map(_stand_in, value))
    return value if type(value) in _PLAIN else _StandIn(value)


@cache
def _is_readable(code: CodeType, is_method: bool) -> bool:
    """Whether it takes one argument, keeps nothing, and asks nobody what it is, which a stand-in would say wrong."""
    if code.co_argcount != 1 + is_method or code.co_kwonlyargcount or code.co_flags & _VARIADIC:
        return False
    if any(name.startswith("__") for name in _names_in(code)):
        return False
    return not any(
        step.opname in _STATEFUL for part in _codes_in(code) for step in dis.get_instructions(part)
    )


@cache
def _names_in(code: CodeType) -> set[str]:
    return {name for part in _codes_in(code) for name in part.co_names}


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes_in(value)


# Published code

MOCO_BLUR = """
def blur(self, x):
    sigma = random.uniform(self.sigma[0], self.sigma[1])
    x = x.filter(ImageFilter.GaussianBlur(radius=sigma))
    return x
"""
VICREG_BLUR = """
def blur(self, img):
    if np.random.rand() < self.p:
        sigma = np.random.rand() * 1.9 + 0.1
        return img.filter(ImageFilter.GaussianBlur(sigma))
    else:
        return img
"""
VICREG_SOLARIZATION = """
def solarize(self, img):
    if np.random.rand() < self.p:
        return ImageOps.solarize(img)
    else:
        return img
"""
DINO_BLUR = """
def blur(self, img):
    do_it = random.random() <= self.prob
    if not do_it:
        return img
    return img.filter(ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max)))
"""


def is_like(step: Any, source: str) -> bool:
    """Whether what runs where a step is called is this code, but for the names of local variables.

    With ``random.random`` in the place of ``np.random.rand`` as well, as DINO and Barlow Twins have
    it.
    """
    kind: Any = type(step)
    call = getattr(kind, "__call__", None)  # noqa: B004
    if not isinstance(call, FunctionType) or kind.__getattribute__ is not object.__getattribute__:
        return False
    listing = _listing(call.__code__)
    for code in _compiled(source):
        if listing == _listing(code):
            meant = (
                (call.__globals__.get(name), _MODULES[name])
                for name in code.co_names
                if name in _MODULES
            )
            # "random" is an attribute of np, too, which then need not be a global.
            return all(value is None or value is sys.modules.get(module) for value, module in meant)
    return False


@cache
def _compiled(source: str) -> list[CodeType]:
    """The code of a function, in a file with its imports and in a notebook's cell, which Python compiles otherwise."""
    codes: list[CodeType] = []
    for text in (source, source.replace("np.random.rand", "random.random")):
        for imports in ("", _IMPORTS):
            module = compile(imports + text, "published", "exec", dont_inherit=True)
            codes += (value for value in module.co_consts if isinstance(value, CodeType))
    return codes


@cache
def _listing(code: CodeType) -> list[Any]:
    """What it takes, and its instructions with what each is about: a local variable by its number."""
    numbers = {name: number for number, name in enumerate(code.co_varnames)}
    listing: list[Any] = [code.co_argcount, code.co_kwonlyargcount, code.co_flags & _VARIADIC]
    for step in dis.get_instructions(code):
        about = step.argval
        if "_FAST" in step.opname:
            about = [
                numbers.get(name) for name in (about if isinstance(about, tuple) else (about,))
            ]
        listing.append((step.opname, about))
    return listing
