"""Rows of a batch that the core mixes from two samples each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastdata.pixels.blend import Blend, RowBlender, serving_order
from fastdata.pixels.core.calls import Blending, CoreError, describe_output
from fastdata.pixels.core.library import load
from fastdata.pixels.steps import Step, compile_table, flatten_steps

pytestmark = pytest.mark.usefixtures("levels_agree")  # pixels of all levels of instruction sets

COUNT = 6
SHARES = torch.rand(COUNT, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
BOXES = torch.tensor(
    [[1, 2, 4, 6], [0, 0, 9, 7], [3, 3, 3, 5], [0, 6, 1, 7], [8, 0, 9, 1], [2, 1, 7, 5]]
)
BLENDS: dict[str, dict[str, Any]] = {
    "shares": {"shares": SHARES},
    "one share": {"shares": SHARES[:1]},
    "boxes": {"boxes": BOXES},
    "both": {"shares": SHARES, "boxes": BOXES},
}


def blend_of(name: str, *, is_mirrored: bool = False) -> Blend:
    return Blend(is_mirrored=is_mirrored, label_shares=SHARES[:1].float(), **BLENDS[name])


def samples_of(dtype: str, channels: int = 3) -> torch.Tensor:
    noise = torch.randint(
        0, 256, (COUNT, channels, 9, 7), generator=torch.Generator().manual_seed(1)
    )
    return (noise if dtype == "uint8" else noise / 77).to(getattr(torch, dtype))


def written(blend: Blend, samples: torch.Tensor, *, is_last: bool) -> torch.Tensor:
    dtype = str(samples.dtype).removeprefix("torch.")
    layout = torch.channels_last if is_last else torch.contiguous_format
    staged = samples.contiguous(memory_format=layout)
    out = torch.empty_like(staged)
    bits = {1: torch.uint8, 2: torch.int16}.get(staged.element_size(), staged.dtype)
    arrays = [it.view(bits).numpy() for it in (staged, out)]
    row_B = np.arange(COUNT)
    RowBlender(None, dtype).blending(blend, arrays[0], row_B, row_B, arrays[1]).write()
    return out


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", BLENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_rows_are_rounded_as_torch_rounds_them(dtype: str, name: str, is_last: bool) -> None:
    """Each product is rounded to the dtype, then their sum, as torch does with Python's numbers as factors."""
    samples = samples_of(dtype)
    blend = blend_of(name, is_mirrored=is_last)
    partners = blend.partners_of(samples)
    expected = samples.clone()
    for row in range(COUNT):
        if blend.boxes is not None:
            top, left, bottom, right = blend.boxes[row].tolist()
            expected[row, :, top:bottom, left:right] = partners[row, :, top:bottom, left:right]
        if blend.shares is not None:
            own, other = blend.shares.expand(COUNT, 2)[row].tolist()
            expected[row] = partners[row] * other + expected[row] * own
    assert torch.equal(written(blend, samples, is_last=is_last), expected)


def test_uint8_is_rounded_to_the_nearest() -> None:
    """Rounding is that of timm's FastCollateMixup: to the nearest, halves to even."""
    samples, blend = samples_of("uint8"), blend_of("one share")
    shares = SHARES[0] / SHARES[0].sum()
    blend = Blend(is_mirrored=True, shares=shares[None], label_shares=shares[None].float())
    own, other = shares.tolist()
    expected = torch.round(samples.float() * own + samples.flip(0).float() * other).byte()
    assert torch.equal(written(blend, samples, is_last=False), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("scaling", ["SCALE_DIVIDE", "SCALE_MULTIPLY", "SCALE_NONE"])
def test_the_device_and_the_core_mix_alike(dtype: str, scaling: str) -> None:
    """The core converts and mixes in one pass; torch converts, then mixes: floats differ by a last bit at most."""
    bytes_BChw = samples_of("uint8")
    cast = Step(
        "cast",
        {
            "dtype": dtype.upper(),
            "scaling": scaling,
            "means": 3,
            "mean": [0.4] * 3,
            "std": [0.2] * 3,
        },
    )
    scale = 1.0 if scaling == "SCALE_NONE" else 255.0
    floats = ((bytes_BChw.double() / scale - 0.4) / 0.2).to(getattr(torch, dtype))
    bits = {2: torch.int16}.get(floats.element_size(), floats.dtype)
    out = torch.empty_like(floats)
    row_B = np.arange(COUNT)
    for name in ("shares", "boxes"):
        blend = blend_of(name)
        blending = RowBlender(cast, dtype).blending(
            blend, bytes_BChw.numpy(), row_B, row_B, out.view(bits).numpy()
        )
        blending.write()
        rtol = {"float32": 1e-5, "float64": 1e-12}.get(dtype, 2e-2)
        torch.testing.assert_close(out, blend.images(floats), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 9])
def test_samples_are_at_their_places_when_a_row_is_written(count: int, is_mirrored: bool) -> None:
    """Three places are enough for any batch: a place is used again only after the rows of its sample are written."""
    if is_mirrored and count % 2:
        return  # timm refuses those
    order, places = serving_order(count, is_mirrored=is_mirrored)
    assert sorted(order.tolist()) == list(range(count))
    assert places.max() < 3
    partner = [count - 1 - b if is_mirrored else (b - 1) % count for b in range(count)]
    there: dict[int, int] = {}
    waiting = set(range(count))
    for sample in order.tolist():
        there[places[sample]] = sample
        ready = {b for b in waiting if {b, partner[b]} <= set(there.values())}
        waiting -= ready
    assert not waiting


def test_rows_and_boxes_outside_of_their_memory_are_refused() -> None:
    """A row beyond the batch and a box beyond the image are errors, and nothing is written."""
    samples = samples_of("float32")
    out = torch.zeros_like(samples)
    table = compile_table(flatten_steps((Step("cast", {"dtype": "FLOAT32"}),)))
    rows = np.zeros(1, load().records["Blended"])
    rows["own"] = rows["partner"] = samples.data_ptr()
    rows["row"] = COUNT
    with pytest.raises(ValueError, match="must be written to row 6, but the memory for the batch"):
        Blending(rows, describe_output(table, out.numpy()), converts=False).write()
    rows["row"] = 0
    rows["box"]["height"] = 10
    rows["box"]["width"] = 1
    with pytest.raises(CoreError, match="outside"):
        Blending(rows, describe_output(table, out.numpy()), converts=False).write()
    assert not out.any()
