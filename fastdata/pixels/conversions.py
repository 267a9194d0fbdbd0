"""Readers of transforms that convert a sample: to a tensor, to floats, or to normalised floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastdata.pixels.arguments import value_for
from fastdata.pixels.known import is_v2, known_name
from fastdata.pixels.state import State, UnknownStepError, need_tensor
from fastdata.pixels.steps import Step

_MASK_DTYPES = (torch.int64, torch.int32, torch.float32, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_MEANS = 6  # size of the arrays in the record of a cast


def read_to_image(transform: Any, state: State) -> State:
    return replace(state, kind="image")


def read_to_pil(transform: Any, state: State) -> State:
    if state.kind not in ("pil", "tensor", "image") or state.floats:
        raise UnknownStepError("needs an image or a tensor that is not of floats")
    if (state.channels, transform.mode) not in ((1, None), (1, "L"), (3, None), (3, "RGB")):
        raise UnknownStepError("makes images of a mode that is not supported")
    return replace(state, kind="pil")


def read_to_pure_tensor(transform: Any, state: State) -> State:
    return replace(state, kind="tensor") if state.kind == "image" else state


def read_to_tensor(transform: Any, state: State) -> State:
    """Read ToTensor and PILToTensor of torchvision, and timm's variants of them."""
    name = known_name(transform).removeprefix("timm.")
    if name == "ToNumpy":
        raise UnknownStepError("makes NumPy arrays; use MaybePILToTensor instead")
    if state.kind != "pil":
        if not (is_v2(transform) or name.startswith("Maybe")):
            raise UnknownStepError("does not accept tensors")
        return state
    state = replace(state, kind="tensor")
    if name.endswith("PILToTensor"):
        return state
    return state.add(_cast(state, torch.get_default_dtype(), "SCALE_DIVIDE"))


def read_dtype(transform: Any, state: State) -> Step | State:
    """Read ToDtype, or v1's ConvertImageDtype, which always scales."""
    is_to_dtype = known_name(transform) == "ToDtype"
    dtype = value_for(transform.dtype, state)
    is_for_masks = isinstance(transform.dtype, dict) or not is_to_dtype
    if state.is_mask and dtype is not None and is_for_masks:
        if dtype not in _MASK_DTYPES or state.floats:
            raise UnknownStepError("converts masks to a dtype that is not supported")
        return _cast(state, dtype, "SCALE_NONE")
    if dtype is None or state.is_mask:  # a dtype that is not in a dict does not apply to masks
        return state
    if state.kind == "pil":
        if not is_to_dtype:  # ToDtype leaves PIL images unchanged; ConvertImageDtype raises
            need_tensor(state)
        return state
    if dtype == getattr(torch, state.dtype):
        return state
    if state.floats or dtype not in _FLOATS:
        raise UnknownStepError("converts to a dtype that is not supported")
    if is_to_dtype and not transform.scale:
        return _cast(state, dtype, "SCALE_NONE")
    return _cast(state, dtype, "SCALE_MULTIPLY" if is_v2(transform) else "SCALE_DIVIDE")


def read_long_mask(transform: Any, state: State) -> Step | State:
    """Read ``mask.long()``, which does not change images."""
    if not state.is_mask:
        return state
    if state.kind != "plane":
        raise UnknownStepError("needs tensors; put ToTensorV2() before it")
    return _cast(state, torch.int64, "SCALE_NONE")


def _cast(state: State, dtype: torch.dtype, scaling: str) -> Step:
    name = str(dtype).removeprefix("torch.").upper()
    return state.step("cast", dtype=name, scaling=scaling, means=0)


def read_normalize(transform: Any, state: State) -> State:
    need_tensor(state)
    if not state.floats:
        raise UnknownStepError("does not accept uint8")
    if state.is_normalized:
        raise UnknownStepError("comes after another Normalize")
    # As in torchvision, mean and std are rounded to the dtype of the images before they are used.
    dtype = getattr(torch, state.dtype)
    mean, std = torch.broadcast_tensors(
        torch.as_tensor(transform.mean, dtype=dtype, device="cpu").flatten(),
        torch.as_tensor(transform.std, dtype=dtype, device="cpu").flatten(),
    )
    is_finite = bool(mean.isfinite().all() and std.isfinite().all())
    if not (1 <= len(mean) <= _MOST_MEANS and is_finite and std.all()):
        raise UnknownStepError("has a mean or std that is not supported")
    cast, *others = state.floats
    fields = {
        **cast.fields,
        "means": len(mean),
        # Where torch broadcasts, one channel becomes as many channels as there are means.
        "widens": is_v2(transform) and not transform.inplace,
        "mean": mean.tolist(),
        "std": std.tolist(),
    }
    return replace(state, floats=(replace(cast, fields=fields), *others))
