"""What a transform consists of: its steps, each known by name or the user's own.

torchvision and timm are never imported: a step counts as theirs only if its class is exactly one of
theirs. Of the user's own callables those are seen through, or known as a step, whose code is one of
``_TEMPLATES``, which the same interpreter compiles.
"""

from __future__ import annotations

import dis
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from fastdata.pixels.images import TO_RGB


def names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PREPARABLE = names_in("Resize CenterCrop Grayscale Pad RGB Identity exif_transpose")
_REFORMING = names_in("ToImage PILToTensor ToPureTensor timm.MaybePILToTensor")
_REPEATABLE = names_in(
    "ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat ConvertImageDtype FiveCrop "
    "LinearTransformation Normalize SanitizeBoundingBoxes SanitizeKeyPoints SetClampingMode "
    "TenCrop ToDtype ToPILImage ToTensor UniformTemporalSubsample"
)
"""Torchvision's other steps that do the same to the same sample each time."""
_RANDOM = names_in(
    "AlternatingFlip AugMix AutoAugment ColorJitter CutMix ElasticTransform GaussianNoise "
    "MixUp ScaleJitter"
)
"""Those that draw, beside all whose names begin with Rand or Trivial."""
_RANGES = {"GaussianBlur": "sigma", "JPEG": "quality", "RandomRotation": "degrees"}
"""Those that draw from a range, and the attribute that holds it."""


class Views:
    """Several transforms of one image: what each makes of it, in a list, as contrastive training takes it.

    As ``transform=`` or the last step of one, batches are lists of one stacked tensor for each
    transform, whose shapes need not agree. All of them are made of the same prepared samples, by
    draws of their own. Anywhere else, as in torchvision's datasets, it is a callable like others.

    Args:
        transforms: each is called with the image; one may stand there several times.

    Example:
        >>> crops = Views(lambda image: image + 1, *[lambda image: image * 2] * 2)
        >>> crops(5)
        [6, 10, 10]
    """

    def __init__(self, *transforms: Any) -> None:
        if not transforms:
            raise ValueError("Views() needs one transform or more")
        self.transforms = transforms
        self.kind: type = list

    def __call__(self, image: Any) -> Any:
        return self.kind(run_steps(transform, image) for transform in self.transforms)

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.transforms))})"


class AlternatingFlip:
    """Mirror each image left to right in every second epoch: half of them begin with it.

    So any two epochs in a row show both sides of each image, where ``RandomHorizontalFlip`` shows
    half of the images twice alike (K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU",
    arXiv 2404.00498). Epochs are those of the random draws: a dataset with a ``seed`` counts them,
    else ``loader.set_epoch(epoch)`` says them.

    Outside of fastdata's batches, where a step is told neither index nor epoch, half of the images
    are mirrored at random.

    Example:
        >>> image = torch.arange(3).view(1, 1, 3)
        >>> AlternatingFlip()(image).flatten().tolist() in ([0, 1, 2], [2, 1, 0])
        True
    """

    __torchvision_equal__ = "AlternatingFlip"

    def __call__(self, image: Any) -> Any:
        if torch.rand(()) < 0.5:
            return image
        if isinstance(image, torch.Tensor):
            return image.flip(-1)
        return image.transpose(0)  # Pillow's FLIP_LEFT_RIGHT

    def __repr__(self) -> str:
        return "AlternatingFlip()"


def run_steps(transform: Any, sample: Any) -> Any:
    """Call a transform, or those of a tuple one after the other."""
    for step in transform if type(transform) is tuple else (transform,):
        sample = step(sample)
    return sample


def flatten(transform: Any) -> tuple[Any, ...]:
    """The steps of a transform, nested or not, of several in a tuple, a single one, or None.

    Callables of the user's own are seen through where they only call steps. One that returns
    several results, as MoCo's two crops, is read as ``Views``.
    """
    if transform is None:
        return ()
    kind = type(transform)
    name = known_name(transform)
    parts: Any = None
    if kind is tuple or (kind is torch.nn.Sequential and not changed_part(transform)):
        parts = transform
    elif name == "Compose":
        parts = transform.transforms
    elif name == "ImageClassification" or kind.__module__.startswith("albumentations."):
        if transform not in _INSTEAD:
            _INSTEAD[transform] = _preset_steps(transform) if name else (_Named(transform),)
        return _INSTEAD[transform]
    elif name is None:
        parts = seen_through(transform, "wrapper")
    elif name == "Lambda" and getattr(transform, "types", (object,)) == (object,):
        parts = seen_through(transform.lambd, "wrapper")
    if parts is None:
        return (transform,)
    return tuple(chain.from_iterable(map(flatten, parts)))


def joint_steps(transforms: Any) -> tuple[Any, ...]:
    """The steps of v2's nested Compose: what else is seen through takes one sample at a time."""
    if known_name(transforms) != "Compose" or not is_v2(transforms):
        return (transforms,)
    return tuple(step for part in transforms.transforms for step in joint_steps(part))


_INSTEAD: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Steps that stand for one of the user's; kept, so that they are the same at each call."""


def _preset_steps(preset: Any) -> tuple[Any, ...]:
    """The steps of what ``weights.transforms()`` gives, torchvision's transforms/_presets.py."""
    theirs = sys.modules["torchvision.transforms"]  # which the preset is a part of
    options = {"interpolation": preset.interpolation, "antialias": preset.antialias}
    return (
        theirs.Resize(preset.resize_size, **options),
        theirs.CenterCrop(preset.crop_size),
        theirs.PILToTensor(),
        theirs.ConvertImageDtype(torch.float),
        theirs.Normalize(preset.mean, preset.std),
    )


@dataclass(frozen=True)
class _Named:
    """An albumentations transform, which takes arrays by name and gives dicts, as a step."""

    step: Any

    def __call__(self, image: Any) -> Any:
        return self.step(image=np.asarray(image))["image"]

    def __repr__(self) -> str:
        return repr(self.step)


# Names

_LIBRARIES = ("torchvision.transforms", "timm.data")


def known_name(step: Any) -> str | None:
    """Class name of torchvision's transforms, of timm's after ``"timm."``, name of ImageOps' functions; else None.

    A step that was changed on the object itself is nobody's but the user's. A class that says
    ``__torchvision_equal__ = "RandomCrop"`` is taken at its word: same attributes, same pixels.
    """
    kind = type(step)
    if kind.__module__.startswith(_LIBRARIES):
        prefix = "timm." if kind.__module__.startswith("timm.") else ""
        return None if changed_part(step) else prefix + kind.__name__
    if getattr(step, "__module__", None) == "PIL.ImageOps":
        return str(step.__name__)
    # Vars: a subclass is not equal any more.
    name: str | None = vars(kind).get("__torchvision_equal__")
    return name


def is_v2(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms.v2")


def changed_part(step: Any) -> str:
    """What an object has in the place of its class's, or what runs around it as a hook; else empty."""
    held: dict[str, Any] = getattr(step, "__dict__", {})
    if held.get("_forward_pre_hooks") or held.get("_forward_hooks"):
        return "forward hook"
    return min(held.keys() & set(dir(type(step))), default="")


def is_preparable(step: Any) -> bool:
    """Whether a step may run once per sample, before it is stored: deterministic, keeps uint8."""
    return known_name(step) in _PREPARABLE or is_reforming(step)


def is_reforming(step: Any) -> bool:
    """Whether a step changes what a uint8 sample is, and none of its values."""
    name = known_name(step)
    is_cast = name in ("ToDtype", "ConvertImageDtype")
    return name in _REFORMING or (is_cast and step.dtype == torch.uint8)


def is_random(step: Any) -> bool | None:
    """Whether a step draws at random; None where that is not known."""
    if type(step) is Views:
        drawn = {is_random(each) for transform in step.transforms for each in flatten(transform)}
        return True if True in drawn else None if None in drawn else False
    name = known_name(step)
    if name is None:
        return None
    if name in _RANGES:
        return len(set(getattr(step, _RANGES[name]))) > 1
    plain = name.removeprefix("timm.")
    if plain in _RANDOM or plain.startswith(("Rand", "Trivial")):
        return True
    return False if name in _REPEATABLE | _PREPARABLE | _REFORMING else None


# The user's own callables, known by their code

_WRAPPERS: dict[str, Callable[..., Any]] = {
    "def f(self, x): return self.a(x)": lambda a: [a],
    "def f(self, x): return x.convert('RGB')": lambda: [TO_RGB],
    "def f(self, x): return self.a(x.convert('RGB'))": lambda a: [TO_RGB, a],
    """
def f(self, x):
    x = self.a(x)
    return self.b(x)
""": lambda a, b: [a, b],
    """
def f(self, x):
    for step in self.a:
        x = step(x)
    return x
""": lambda a: a,
    # Views: MoCo and SimSiam, SimCLR, VICReg and Barlow Twins, DINO.
    """
def f(self, x):
    q = self.a(x)
    k = self.a(x)
    return [q, k]
""": lambda a: _views(list, a, a),
    "def f(self, x): return [self.a(x), self.a(x)]": lambda a: _views(list, a, a),
    "def f(self, x): return self.a(x), self.a(x)": lambda a: _views(tuple, a, a),
    "def f(self, x): return [self.a(x), self.b(x)]": lambda a, b: _views(list, a, b),
    "def f(self, x): return self.a(x), self.b(x)": lambda a, b: _views(tuple, a, b),
    "def f(self, x): return [self.a(x) for i in range(self.b)]": lambda a, b: _views(
        list, *[a] * b
    ),
    "def f(self, x): return [a(x) for a in self.b]": lambda a: _views(list, *a),
    """
def f(self, x):
    x1 = self.a(x)
    x2 = self.b(x)
    return x1, x2
""": lambda a, b: _views(tuple, a, b),
    """
def f(self, x):
    crops = []
    crops.append(self.a(x))
    crops.append(self.b(x))
    for _ in range(self.c):
        crops.append(self.d(x))
    return crops
""": lambda a, b, c, d: _views(list, a, b, *[d] * c),
}
"""Code that only calls steps, and the steps, of the values of the names in it."""

_BLURS: dict[str, Callable[..., Any]] = {
    # MoCo, VICReg's two, DINO: the op, the range of its number, and the probability.
    """
def f(self, x):
    sigma = random.uniform(self.a[0], self.a[1])
    x = x.filter(ImageFilter.GaussianBlur(radius=sigma))
    return x
""": lambda a: ("OP_BOX_BLUR", *a, 1.0),
    """
def f(self, x):
    if np.random.rand() < self.a:
        sigma = np.random.rand() * 1.9 + 0.1
        return x.filter(ImageFilter.GaussianBlur(sigma))
    else:
        return x
""": lambda a: ("OP_BOX_BLUR", 0.1, 2.0, a),
    """
def f(self, x):
    if np.random.rand() < self.a:
        return ImageOps.solarize(x)
    else:
        return x
""": lambda a: ("OP_SOLARIZE", 128.0, 128.0, a),
    """
def f(self, x):
    do_it = random.random() <= self.a
    if not do_it:
        return x
    return x.filter(ImageFilter.GaussianBlur(radius=random.uniform(self.b, self.c)))
""": lambda a, b, c: ("OP_BOX_BLUR", b, c, a),
}
"""Published steps of PIL images."""

_TEMPLATES = {"wrapper": _WRAPPERS, "blur": _BLURS}
_MODULES = {"np": "numpy", "random": "random", "ImageFilter": "PIL.ImageFilter"}
_MODULES["ImageOps"] = "PIL.ImageOps"
_WORDS = _MODULES.keys() | names_in(
    "GaussianBlur append convert filter rand range solarize uniform"
)
"""Names of templates that mean themselves; all others stand for any name."""
_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_IMPORTS = "import random\nimport numpy as np\nfrom PIL import ImageFilter, ImageOps\n"


def _views(kind: type, *transforms: Any) -> list[Any]:
    views = Views(*transforms)
    views.kind = kind
    return [views]


def seen_through(call: Any, kind: str) -> Any:
    """What a callable does, if its code is that of a template of this kind; else None."""
    function, owner = _code_of(call)
    if not isinstance(function, FunctionType):
        return None
    listing, names = _listing(function.__code__)
    if listing not in _compiled(kind):
        return None
    read, meant = _compiled(kind)[listing]
    outside = inspect.getclosurevars(function)
    reached = {**outside.globals, **outside.nonlocals}
    # "random" is an attribute of np, too, which then need not be a global.
    if any(reached[n] is not sys.modules.get(_MODULES[n]) for n in _MODULES if n in reached):
        return None
    held = reached if owner is None else {**vars(owner), **vars(owner).get("_modules", {})}
    if not held.keys() >= set(names):
        return None
    return read(**{short: held[name] for short, name in zip(meant, names, strict=True)})


def _code_of(call: Any) -> tuple[Any, Any]:
    """The function that runs where this is called, and whose method it is."""
    if isinstance(call, FunctionType):
        return call, None
    if isinstance(call, MethodType):
        return call.__func__, call.__self__
    kind: Any = type(call)
    if kind.__getattribute__ is not object.__getattribute__ or not hasattr(call, "__dict__"):
        return None, None
    if kind.__call__ is torch.nn.Module.__call__:
        return (None if changed_part(call) else kind.forward), call
    return kind.__call__, call


@cache
def _compiled(kind: str) -> dict[Any, tuple[Callable[..., Any], tuple[str, ...]]]:
    """Templates by their listings, with their names: in a file with imports, or a notebook's cell.

    Also as functions and closures, and with ``random.random`` in the place of ``np.random.rand``,
    as DINO and Barlow Twins have it.
    """
    made = {}
    for source, read in _TEMPLATES[kind].items():
        plain = source.replace("self, ", "").replace("self.", "")
        inner = plain.strip().replace("\n", "\n    ")
        closure = f"def around(a, b=None, c=None, d=None):\n    {inner}\n    return f"
        without_np = source.replace("np.random.rand", "random.random")
        for text in (source, plain, closure, without_np):
            for imports in ("", _IMPORTS):
                code = compile(imports + text, "template", "exec", dont_inherit=True)
                while code.co_name != "f":
                    code = next(value for value in code.co_consts if isinstance(value, CodeType))
                listing, names = _listing(code)
                made[listing] = read, names
    return made


@cache
def _listing(code: CodeType, outer: tuple[str, ...] = ()) -> tuple[Any, tuple[str, ...]]:
    """What it takes, and its instructions, in which names are numbers, as local variables are; and these names."""
    names: list[str] = []
    cells = (*outer, *code.co_varnames, *code.co_cellvars)
    listing: list[Any] = [code.co_argcount, code.co_kwonlyargcount, code.co_flags & _VARIADIC]
    for step in dis.get_instructions(code):
        about = step.argval
        if isinstance(about, CodeType):
            about, inner = _listing(about, cells)
            names += inner
        elif "_FAST" in step.opname:
            about = step.arg
        elif isinstance(about, str) and about.endswith("<listcomp>"):  # of Python 3.10
            about = None
        elif step.opcode in dis.hasfree and about in cells:
            about = cells.index(about)
        elif step.opcode in (*dis.hasname, *dis.hasfree) and about not in _WORDS:
            if about not in names:
                names.append(about)
            about = ("name", names.index(about))
        listing.append((step.opname, about))
    return tuple(listing), tuple(names)


# What would be served in place of the user's own

_INSTEAD_OF = {
    "gaussianblur": "GaussianBlur(23, (0.1, 2.0)), its kernel a tenth of the side,",
    "solarization": "RandomSolarize(128, p)",
    "solarize": "RandomSolarize(128, p)",
    "equalize": "RandomEqualize(p)",
}
"""torchvision's own, for names of classes that people write."""


def cure_for(step: Any) -> str:
    """What to write in the place of a step that is not served, by its class's name."""
    inner = (
        step.transforms
        if known_name(step) in ("RandomApply", "RandomChoice", "RandomOrder")
        else ()
    )
    for part in (step, *flatten(tuple(inner))):
        served = _INSTEAD_OF.get(type(part).__name__.lower())
        if served:
            return f"Write torchvision.transforms.{served} in its place, which is served."
    held = {
        name: value
        for name, value in getattr(step, "__dict__", {}).items()
        if known_name(value) == "Compose"
    }
    if not held or known_name(step) is not None:
        return ""
    each = ", ".join(f"its {name}" for name in held)
    written = f"*[{each}] * 2" if len(held) == 1 else each
    return f"If it makes views of an image, write fastdata.Views({written}) in its place."
