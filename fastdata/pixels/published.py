"""Transforms that were published with papers, recognised by their code.

MoCo, VICReg, DINO and Barlow Twins define their own blur and solarize transforms, which people copy
into their scripts. A callable with the same instructions as a template in this file is one of them.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any

from fastdata.pixels.callables import code_of_call

PublishedOp = tuple[str, float, float, float]
"""An op, the range that its number is drawn from, and its probability."""
_PUBLISHED: dict[str, Callable[[Any], PublishedOp]] = {
    # In order: the blurs of MoCo, VICReg and DINO, and solarize of the last two.
    """
def f(self, x):
    sigma = random.uniform(self.sigma[0], self.sigma[1])
    x = x.filter(ImageFilter.GaussianBlur(radius=sigma))
    return x
""": lambda transform: ("BOX_BLUR", *transform.sigma, 1.0),
    """
def f(self, img):
    if np.random.rand() < self.p:
        sigma = np.random.rand() * 1.9 + 0.1
        return img.filter(ImageFilter.GaussianBlur(sigma))
    else:
        return img
""": lambda transform: ("BOX_BLUR", 0.1, 2.0, transform.p),
    """
def f(self, img):
    do_it = random.random() <= self.prob
    if not do_it:
        return img
    return img.filter(
        ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max))
    )
""": lambda transform: ("BOX_BLUR", transform.radius_min, transform.radius_max, transform.prob),
    """
def f(self, img):
    if np.random.rand() < self.p:
        return ImageOps.solarize(img)
    else:
        return img
""": lambda transform: ("SOLARIZE", 128.0, 128.0, transform.p),
}
"""Published code of transforms of PIL images -> function that reads the op from the attributes."""
_TO_RGB = {
    # The second has the mode as its first argument: denoising-diffusion-pytorch makes a partial.
    """
def f(image):
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image
""": (),
    """
def f(mode, image):
    if image.mode != mode:
        return image.convert(mode)
    return image
""": ("RGB",),
    """
def f(image):
    if image.mode != "RGB":
        return image.convert("RGB")
    return image
""": (),
    """
f = lambda image: image.convert("RGB") if image.mode != "RGB" else image
""": (),
}
"""Code that makes gray images RGB -> the first arguments that a partial gives it."""
_IMPORTS = "import random\nimport numpy as np\nfrom PIL import ImageFilter, ImageOps\n"


def published(transform: Any) -> PublishedOp | None:
    """Return the op of a transform with published code, else None."""
    function, _ = code_of_call(transform)
    if not isinstance(function, FunctionType):
        return None
    read = _templates().get(_body(function.__code__))
    return None if read is None else read(transform)


def converts_to_rgb(call: Any) -> bool:
    """Return True if a callable converts images of other modes to RGB, and does nothing else."""
    given: tuple[Any, ...] = ()
    if type(call) is partial and not call.keywords:
        call, given = call.func, call.args
    if not isinstance(call, FunctionType):
        return False
    return _rgb_templates().get(_body(call.__code__)) == given


@cache
def _rgb_templates() -> dict[tuple[Any, ...], tuple[str, ...]]:
    """Return the compiled templates of ``converts_to_rgb``, and their first arguments."""
    found = {}
    for source, given in _TO_RGB.items():
        for code in compile(source, "template", "exec", dont_inherit=True).co_consts:
            if isinstance(code, CodeType):
                found[_body(code)] = given
    return found


@cache
def _body(code: CodeType) -> tuple[Any, ...]:
    """Return the instructions of code with their arguments, without its docstring.

    Local variables are identified by their position, so their names may differ.
    """
    return tuple(
        (each.opname, each.arg if "_FAST" in each.opname else each.argval)
        for each in dis.get_instructions(code)
    )


@cache
def _templates() -> dict[tuple[Any, ...], Callable[[Any], PublishedOp]]:
    """Return the compiled templates.

    Python compiles ``ImageFilter.GaussianBlur`` differently if the module imports ImageFilter
    itself, so each template is compiled with imports and without, as in a notebook's cell. It is
    also compiled with ``random.random`` for ``np.random.rand``, as in DINO and Barlow Twins.
    """
    found = {}
    for source, read in _PUBLISHED.items():
        for text in (source, source.replace("np.random.rand", "random.random")):
            for imports in ("", _IMPORTS):
                module = compile(imports + text, "template", "exec", dont_inherit=True)
                for code in module.co_consts:
                    if isinstance(code, CodeType):
                        found[_body(code)] = read
    return found
