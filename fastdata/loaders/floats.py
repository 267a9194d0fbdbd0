"""The form of a prefetcher's tensors, and the conversion of images to floats on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.cuda

from fastdata.pixels.steps import Step

Tensor = torch.Tensor


class Form(NamedTuple):
    """The form of the tensors that a prefetcher serves.

    Attributes:
        dtype: dtype of floating-point tensors and of images; None to keep their own.
        channels_last: True if tensors of four dimensions have this memory format.
    """

    dtype: torch.dtype | None = None
    channels_last: bool = False


AS_MADE = Form()
"""The form in which a dataset makes its tensors."""


class ToFloats:
    """Converts uint8 to floats and normalises them, in one pass over the pixels.

    The pass computes in float32 (in float64 if the dataset's batches are float64), rounds once to
    the final dtype, and writes the final memory format. The result is bitwise the same as a float32
    batch that is cast with ``Tensor.to``. Its error is at most half a unit in the last place of the
    final dtype, plus the error of float32.

    Args:
        cast: the step that makes floats.
        form: the final dtype and memory format. If the dataset's batches are float16, values must
            be rounded to float16 first, so the final dtype is left to a later cast.

    Attributes:
        dtype: dtype of the floats.
        is_channels_last: True if they have this memory format; otherwise it is that of the uint8.
        is_float64: True if the pass computes in float64.
        divides: True if values are divided, False if they are multiplied and shifted.
    """

    def __init__(self, cast: Step, form: Form = AS_MADE) -> None:
        scaling = cast.fields["scaling"]
        is_unscaled = scaling in ("SCALE_NONE", "SCALE_AFTER")
        unit = 1.0 if is_unscaled else 255.0
        normalizes = cast.fields["means"] > 0
        mean = np.array(cast.fields["mean"] if normalizes else [0.0])
        std = np.array(cast.fields["std"] if normalizes else [1.0])
        if scaling == "SCALE_AFTER":
            std = 1 / std  # the field holds a factor
        # The divisor is a tensor on the device: instead of dividing by a number of the host, CUDA
        # multiplies with its rounded inverse.
        has_one_divisor = normalizes == is_unscaled and not mean.any()
        self.divides = has_one_divisor and scaling in ("SCALE_DIVIDE", "SCALE_NONE")
        scale = unit * std
        if not self.divides:
            scale = 1 / scale
        both = np.stack([scale, -mean / std])
        own: torch.dtype = getattr(torch, cast.fields["dtype"].lower())
        # Half floats are computed as float32 and rounded once, as on the CPU.
        kind = torch.promote_types(own, torch.float32)
        self._both_2C11 = torch.tensor(both[:, :, None, None], dtype=kind)
        self.is_float64 = kind is torch.float64
        wanted = form.dtype or own
        rounds_once = own is kind and wanted.is_floating_point
        self.dtype = wanted if rounds_once else own
        self.is_channels_last = form.channels_last

    def __call__(self, source_BChw: Tensor) -> Tensor:
        scale, offset = self.constants(source_BChw.device)
        # One channel becomes three if there are three means and deviations.
        channels = max(source_BChw.shape[1], scale.shape[0])
        # On the CPU and on CUDA, both ops compute in the promoted dtype of their inputs, and round
        # when they write. ``addcmul(...).to(...)`` makes a float32 copy in between: 424 MB of
        # memory traffic for 256 images of 224 x 224 in float16, instead of 116 MB.
        like = source_BChw.expand(-1, channels, -1, -1)
        layout = torch.channels_last if self.is_channels_last else torch.preserve_format
        out = torch.empty_like(like, dtype=self.dtype, memory_format=layout)
        if self.divides:
            return torch.div(source_BChw, scale, out=out)
        return torch.addcmul(offset, source_BChw, scale, out=out)

    def constants(self, device: torch.device) -> Tensor:
        """Return (2, C, 1, 1): factors, or divisors if ``divides``, and summands.

        They are copied to the device once, and kept for the current stream.
        """
        if self._both_2C11.device != device:
            # From pinned memory, so this thread does not wait for the copy.
            pinned = self._both_2C11.pin_memory()
            self._both_2C11 = pinned.to(device, non_blocking=True)
        if device.type == "cuda":
            # Several streams may use it, and it may be freed while one of them still reads it.
            self._both_2C11.record_stream(torch.cuda.current_stream(device))
        return self._both_2C11
