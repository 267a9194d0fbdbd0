"""Random draws of torchvision's MixUp and CutMix, and of timm's Mixup, for one batch.

A mixer draws what the user's own object would draw for the batch, as a ``Blend``. Its settings are
read when a batch is drawn, because training loops change them (timm's ``mixup_enabled``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch

from fastdata.datasets.draws import DrawKey
from fastdata.pixels.arrays import Shape
from fastdata.pixels.blend import Blend
from fastdata.pixels.known import is_v2, known_name
from fastdata.pixels.random_numbers import sample_keys

_CHOOSING = ("RandomChoice", "RandomApply", "Identity")


class NotServedError(Exception):
    """An object mixes batches, but with settings that fastdata does not support."""


@dataclass(frozen=True, kw_only=True)
class TorchvisionMixer:
    """Draws for ``v2.MixUp``, ``v2.CutMix``, and ``RandomChoice`` or ``RandomApply`` of them.

    Attributes:
        transform: the user's transform.
        classes: number of classes in the soft labels.
        name: names of the mixes, for reports.
        label_values: the label's values before labels are mixed: for all other classes, and for the
            class of the sample.
        takes_samples: True if the object takes a list of samples, and not stacked tensors.
    """

    transform: Any
    classes: int
    name: str
    label_values: tuple[float, float] = (0.0, 1.0)
    takes_samples: bool = False

    @classmethod
    def of(cls, transform: Any) -> TorchvisionMixer | None:
        """Return the mixer of a transform; None if it mixes no batches.

        Raises:
            NotServedError: it does, but not in a way that fastdata supports.
        """
        if not is_v2(transform):
            return None
        mixes = list(_mixes_in(transform))
        if not any(mixes):
            return None
        if None in mixes:
            raise NotServedError(f"{known_name(transform)} has other transforms than mixes")
        classes = {mix.num_classes for mix in mixes}
        getters = {getattr(mix._labels_getter, "__name__", "") for mix in mixes}
        if getters != {"_find_labels_default_heuristic"}:
            raise NotServedError("a mix has a labels_getter=")
        if len(classes) > 1 or None in classes:
            raise NotServedError("mixes need one num_classes=")
        names = dict.fromkeys(type(mix).__name__ for mix in mixes)
        return cls(transform=transform, classes=classes.pop(), name=" or ".join(names))

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True if images of a dtype can be mixed: torchvision's MixUp refuses integers."""
        names = {type(mix).__name__ for mix in _mixes_in(self.transform)}
        return dtype.is_floating_point or names == {"CutMix"}

    def draw(self, key: DrawKey, shape_BChw: Shape, dtype: torch.dtype) -> Blend | None:
        """Draw for a batch as the transform does; None if images and labels do not change."""
        height, width = shape_BChw[-2:]
        return _draw(self.transform, key.generator(), height, width)


def _mixes_in(transform: Any) -> Iterator[Any]:
    """Yield the mixes that a transform chooses from; None for any other transform among them."""
    name = known_name(transform) if is_v2(transform) else ""
    if name in ("MixUp", "CutMix"):
        yield transform
    elif name in ("RandomChoice", "RandomApply"):
        inner = list(transform.transforms)
        for each in inner:
            yield from _mixes_in(each)
        if name == "RandomApply" and len(inner) > 1:
            yield None
    elif name != "Identity":
        yield None


def _draw(transform: Any, generator: torch.Generator, height: int, width: int) -> Blend | None:
    # These are the numbers that the transform itself would draw from `BatchDraws`, in the order of
    # torchvision's transforms/v2/_container.py and _augment.py, but in a tenth of the time.
    name = known_name(transform)
    if name == "RandomChoice":
        shares = torch.tensor(transform.p)
        number = int(torch.multinomial(shares, 1, generator=generator))
        return _draw(transform.transforms[number], generator, height, width)
    if name == "RandomApply":
        if torch.rand(1, generator=generator) >= transform.p:
            return None
        return _draw(transform.transforms[0], generator, height, width)
    if name == "Identity":
        return None
    # The draw of torch.distributions.Beta, which uses a Dirichlet distribution.
    pair_12 = transform._dist._dirichlet.concentration
    share = float(torch._sample_dirichlet(pair_12, generator=generator)[0, 0])
    if name == "MixUp":
        shares_12 = _shares(share)
        return Blend(is_mirrored=False, shares=shares_12, label_shares=shares_12.float())
    column = int(torch.randint(width, (1,), generator=generator))
    row = int(torch.randint(height, (1,), generator=generator))
    half_side = 0.5 * math.sqrt(1.0 - share)
    half_width = int(half_side * width)
    half_height = int(half_side * height)
    left = max(column - half_width, 0)
    top = max(row - half_height, 0)
    right = min(column + half_width, width)
    bottom = min(row + half_height, height)
    cut_px = (right - left) * (bottom - top)
    return Blend(
        is_mirrored=False,
        boxes=torch.tensor([[top, left, bottom, right]]) if cut_px else None,
        label_shares=_shares(1.0 - cut_px / (width * height)).float(),
    )


def _shares(share: float) -> torch.Tensor:
    return torch.tensor([[share, 1.0 - share]], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class TimmMixer:
    """Draws for timm's ``Mixup``, and for ``FastCollateMixup``, which mixes uint8.

    NumPy's global generator, which timm draws from, is replaced by one of the batch.

    Attributes:
        mixup: the user's object.
        mode: its mode: ``"batch"``, ``"pair"`` or ``"elem"``.
        name: name of its class, for reports.
    """

    mixup: Any
    mode: str
    name: str

    @classmethod
    def of(cls, mixup: Any) -> TimmMixer | None:
        """Return the mixer of an object; None if it is not timm's.

        Raises:
            NotServedError: it is, but with settings that fastdata does not support.
        """
        name = known_name(mixup).removeprefix("timm.")
        if name not in ("Mixup", "FastCollateMixup"):
            return None
        if mixup.mode == "half":
            raise NotServedError(f"{name} has mode='half'")
        if getattr(mixup, "multi_label", False):
            raise NotServedError(f"{name} has multi_label=True")
        mode = mixup.mode if mixup.mode in ("elem", "pair") else "batch"
        return cls(mixup=mixup, mode=mode, name=name)

    @property
    def takes_samples(self) -> bool:
        """True if the object takes a list of samples instead of stacked tensors."""
        return self.name == "FastCollateMixup"

    @property
    def classes(self) -> int:
        return int(self.mixup.num_classes)

    @property
    def label_values(self) -> tuple[float, float]:
        """The label's smoothed values: for all other classes, and for the class of the sample."""
        off = self.mixup.label_smoothing / self.mixup.num_classes
        return off, 1.0 - self.mixup.label_smoothing + off

    def takes(self, dtype: torch.dtype) -> bool:
        if self.takes_samples:
            return dtype is torch.uint8
        return dtype in (torch.float32, torch.float16, torch.bfloat16)

    def draw(self, key: DrawKey, shape_BChw: Shape, dtype: torch.dtype) -> Blend:
        """Draw for a batch, with the distributions and in the order of timm's data/mixup.py.

        Raises:
            AssertionError: the batch has an odd length; the error is timm's.
        """
        count = shape_BChw[0]
        if count % 2:
            raise AssertionError("Batch size should be even when using this")
        number_1 = np.array([key.number])
        seed_1 = sample_keys(key.seed, key.epoch, number_1)
        random = np.random.RandomState(seed_1.view(np.uint32))
        functions = _seeded(self.mixup, random)
        if self.mode == "batch":
            share, cuts = functions["_params_per_batch"](self.mixup)
            return self._blend(functions, shape_BChw, [share], [cuts], torch.float64)
        drawn = count // 2 if self.mode == "pair" else count
        shares, cuts = functions["_params_per_elem"](self.mixup, drawn)
        label_dtype = torch.float32 if dtype is torch.uint8 else dtype
        return self._blend(functions, shape_BChw, list(shares), cuts.tolist(), label_dtype)

    def _blend(
        self,
        functions: dict[str, Any],
        shape_BChw: Shape,
        shares: list[Any],
        cuts: list[bool],
        label_dtype: torch.dtype,
    ) -> Blend:
        """Return the blend for drawn shares: one for the batch, for each pair or for each row."""
        boxes = [(0, 0, 0, 0)] * len(shares)
        image_shares = [(1.0, 0.0)] * len(shares)
        kind = type(shares[0])  # NumPy's float32 if there is more than one share
        for number, share in enumerate(shares):
            if share == 1:
                continue
            if not cuts[number]:
                image_shares[number] = float(share), float(1 - share)
                continue
            (top, bottom, left, right), share_left = functions["cutmix_bbox_and_lam"](
                shape_BChw[1:],
                share,
                ratio_minmax=self.mixup.cutmix_minmax,
                correct_lam=self.mixup.correct_lam,
            )
            boxes[number] = int(top), int(left), int(bottom), int(right)
            shares[number] = kind(share_left)
        labels_B = torch.tensor(list(map(float, shares)), dtype=label_dtype)
        parts = [
            torch.tensor(image_shares, dtype=torch.float64),
            torch.tensor(boxes),
            torch.stack([labels_B, 1.0 - labels_B], 1).float(),
        ]
        if self.mode == "pair":  # the second half of a batch has the partners of the first
            parts = [torch.cat([part, part.flip(0)]) for part in parts]
        shares_B2, boxes_B4, label_shares_B2 = parts
        is_shared = any(own != 1 for own, _ in image_shares)
        return Blend(
            is_mirrored=True,
            shares=shares_B2 if is_shared else None,
            boxes=boxes_B4 if boxes_B4.any() else None,
            label_shares=label_shares_B2,
        )


class _Numpy:
    """Stands for the module NumPy, but has another generator as its global one."""

    def __init__(self, random: np.random.RandomState) -> None:
        self.random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def _seeded(mixup: Any, random: np.random.RandomState) -> dict[str, Any]:
    """Return copies of timm's functions and methods that draw from another generator."""
    # timm (0.4 to 1.0) draws from NumPy's global generator, which all threads share and users seed.
    # The copies have the globals of timm's module, except that `np` is replaced.
    kind = type(mixup)
    module = vars(sys.modules[kind.__module__])
    seen = {**module, "np": _Numpy(random)}
    methods = {name: getattr(kind, name) for name in ("_params_per_batch", "_params_per_elem")}
    for name, value in (module | methods).items():
        if isinstance(value, FunctionType) and value.__globals__ is module:
            seen[name] = FunctionType(value.__code__, seen, name, value.__defaults__)
    return seen


Mixer = TorchvisionMixer | TimmMixer


def mixer_of(value: Any) -> Mixer | None:
    """Return the mixer of a transform that mixes batches; None for any other object.

    Raises:
        NotServedError: it mixes batches, but not in a way that is served.
    """
    return TorchvisionMixer.of(value) or TimmMixer.of(value)
