"""One step of the core on one image, to compare with what the installed OpenCV makes of it."""

from __future__ import annotations

import numpy as np

from fastdata.pixels.arrays import Array
from fastdata.pixels.core.calls import Keys, Samples, describe_output, draw, serve
from fastdata.pixels.steps import Step, compile_table, flatten_steps


def try_step(step: Step, image_HWC: Array) -> tuple[Array, Array]:
    """Return what a step makes of an image, (height, width, channels), and the ops drawn for it."""
    image_CHW = np.ascontiguousarray(image_HWC.transpose(2, 0, 1))
    table = compile_table(flatten_steps((step,)))
    samples = Samples(np.array([image_CHW.ctypes.data]), np.array([image_CHW.shape], np.int32))
    zero_1 = np.zeros(1, np.int64)
    keys = Keys(0, zero_1, zero_1)
    ops_1S, shapes_13 = draw(table, keys, samples.shapes_B3)
    made_1CHW = np.empty((1, *shapes_13[0]), np.uint8)
    serve(samples, keys, [describe_output(table, made_1CHW)], first=0, last=1)
    return made_1CHW[0].transpose(1, 2, 0), ops_1S[0]
