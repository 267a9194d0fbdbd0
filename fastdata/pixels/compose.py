"""What a transform consists of: its steps, each known by name or the user's own.

torchvision and timm are never imported: a step counts as theirs only if its class is exactly one of
theirs. Of the user's own callables those are seen through that only call steps, and those known
whose code is ``_PUBLISHED``.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastdata.pixels.describe import read_code
from fastdata.pixels.images import TO_RGB


def names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PREPARABLE = names_in("Resize CenterCrop Grayscale Pad RGB Identity exif_transpose")
_REFORMING = names_in("ToImage PILToTensor ToPureTensor timm.MaybePILToTensor")
_REPEATABLE = names_in(
    "ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat ConvertImageDtype FiveCrop "
    "LinearTransformation Normalize SanitizeBoundingBoxes SanitizeKeyPoints SetClampingMode "
    "TenCrop ToDtype ToPILImage ToTensor UniformTemporalSubsample timm.MaybeToTensor "
    "timm.ToNumpy"
)
"""Other steps of torchvision and timm that do the same to the same sample each time."""
_RANDOM = names_in(
    "AlternatingFlip AugMix AutoAugment ColorJitter CutMix ElasticTransform GaussianNoise "
    "MixUp ScaleJitter"
)
"""Those that draw, beside all whose names begin with Rand or Trivial."""
_RANGES = {"GaussianBlur": "sigma", "JPEG": "quality", "RandomRotation": "degrees"}
"""Those that draw from a range, and the attribute that holds it."""


class Views:
    """Several transforms of one image: what each makes of it, in a list, for contrastive training.

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
    steps: list[Any] = []
    waiting = [transform]
    while waiting:
        step = waiting.pop()
        if step is None:
            continue
        parts = _parts_of(step)
        if parts is None:
            steps.append(step)
        else:
            waiting += reversed(parts)
    return tuple(steps)


def _parts_of(step: Any) -> Sequence[Any] | None:
    """The steps that a step consists of; None where it is a single one."""
    kind = type(step)
    name = known_name(step)
    if kind is tuple or (kind is torch.nn.Sequential and not is_changed(step)):
        return tuple(step)
    if name == "Compose":
        return tuple(step.transforms)
    if name == "ImageClassification":
        return _steps_of_preset(step, str(vars(step)))
    if kind.__module__.startswith("albumentations."):
        return (AlbumentationsStep(step),)
    if name == "Lambda" and getattr(step, "types", (object,)) == (object,):
        return seen_through(step.lambd)
    return None if name or kind is AlbumentationsStep else seen_through(step)


def joint_steps(transforms: Any) -> tuple[Any, ...]:
    """The steps of v2's nested Compose: what else is seen through takes one sample at a time."""
    if known_name(transforms) != "Compose" or not is_v2(transforms):
        return (transforms,)
    return tuple(step for part in transforms.transforms for step in joint_steps(part))


@lru_cache(maxsize=16)  # so that they are the same at each call, until attributes change
def _steps_of_preset(preset: Any, attributes: str) -> tuple[Any, ...]:
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
class AlbumentationsStep:
    """An albumentations transform, which takes arrays by name and gives dicts, as a step."""

    step: Any

    def __call__(self, image: Any) -> Any:
        return self.step(image=np.asarray(image))["image"]

    def __repr__(self) -> str:
        return repr(self.step)


# Names

LIBRARIES = ("torchvision.transforms", "timm.data")


def known_name(step: Any) -> str:
    """Name of torchvision's or timm's transforms' class, or of ImageOps' functions; else empty.

    Timm's stand behind ``"timm."``.
    A step that was changed on the object itself is nobody's but the user's. A class that says
    ``__torchvision_equal__ = "RandomCrop"`` is taken at its word: same attributes, same pixels.
    """
    kind = type(step)
    if not kind.__module__.startswith(LIBRARIES):
        of_pillow = getattr(step, "__module__", None) == "PIL.ImageOps"
        # Vars: a subclass is not equal any more.
        return str(step.__name__ if of_pillow else vars(kind).get("__torchvision_equal__", ""))
    if is_changed(step):
        return ""
    return f"timm.{kind.__name__}" if kind.__module__.startswith("timm.") else str(kind.__name__)


def is_v2(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms.v2")


def is_changed(step: Any) -> bool:
    """Whether an object has hooks, or something in the place of its class's."""
    kind: Any = type(step)
    held: dict[str, Any] = getattr(step, "__dict__", {})
    is_hooked = held.get("_forward_pre_hooks") or held.get("_forward_hooks")
    return bool(is_hooked) or not _members(kind).isdisjoint(held)


@cache
def _members(kind: Any) -> frozenset[str]:
    return frozenset(dir(kind))


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
        drawn = set(map(is_random, flatten(step.transforms)))
        return next((answer for answer in (True, None) if answer in drawn), False)
    name = known_name(step)
    if not name:
        return None
    if name in _RANGES:
        return len(set(getattr(step, _RANGES[name]))) > 1
    plain = name.removeprefix("timm.")
    if plain in _RANDOM or plain.startswith(("Rand", "Trivial")):
        return True
    return False if name in _REPEATABLE | _PREPARABLE | _REFORMING else None


def draws_in_vain(step: Any) -> bool:
    """Return True for a step that moves torch's generator but does the same each time.

    Such as ``GaussianBlur(3, sigma=1.0)``, which draws its sigma from 1.0 to 1.0.
    """
    return known_name(step) in _RANGES and is_random(step) is False


def is_always_applied(step: Any) -> bool | None:
    """Return whether a transform of albumentations is applied to every image, with all in it.

    Return None for other objects.
    """
    is_theirs = type(step).__module__.startswith("albumentations.")
    probability = None if isinstance(step, type) or not is_theirs else getattr(step, "p", None)
    if probability is None:
        return None
    parts = getattr(step, "transforms", ())
    is_applied = probability >= 1 or getattr(step, "always_apply", False)
    return is_applied and all(map(is_always_applied, parts))


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


_PUBLISHED: dict[str, Callable[[Any], Any]] = {
    # MoCo, VICReg, DINO, and what the last two share: the op, its range, and the probability.
    """
def f(self, x):
    sigma = random.uniform(self.sigma[0], self.sigma[1])
    x = x.filter(ImageFilter.GaussianBlur(radius=sigma))
    return x
""": lambda step: ("BOX_BLUR", *step.sigma, 1.0),
    """
def f(self, img):
    if np.random.rand() < self.p:
        sigma = np.random.rand() * 1.9 + 0.1
        return img.filter(ImageFilter.GaussianBlur(sigma))
    else:
        return img
""": lambda step: ("BOX_BLUR", 0.1, 2.0, step.p),
    """
def f(self, img):
    do_it = random.random() <= self.prob
    if not do_it:
        return img
    return img.filter(
        ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max))
    )
""": lambda step: ("BOX_BLUR", step.radius_min, step.radius_max, step.prob),
    """
def f(self, img):
    if np.random.rand() < self.p:
        return ImageOps.solarize(img)
    else:
        return img
""": lambda step: ("SOLARIZE", 128.0, 128.0, step.p),
}
"""Published steps of PIL images."""
_IMPORTS = "import random\nimport numpy as np\nfrom PIL import ImageFilter, ImageOps\n"


def published(step: Any) -> Any:
    """The op, range and probability of a step whose code is one of ``_PUBLISHED``; else None."""
    function, _ = code_of_call(step)
    if not isinstance(function, FunctionType):
        return None
    read = _templates().get(_body(function.__code__))
    return None if read is None else read(step)


@cache
def _body(code: CodeType) -> tuple[Any, ...]:
    """Its instructions and what they read, among which a docstring is not."""
    return tuple(
        (step.opname, step.arg if "_FAST" in step.opname else step.argval)
        for step in dis.get_instructions(code)
    )


@cache
def _templates() -> dict[Any, Callable[[Any], Any]]:
    """Published code, as in a file with imports or a notebook's cell.

    And with ``random.random`` in the place of ``np.random.rand``, as DINO and Barlow Twins have it.
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
