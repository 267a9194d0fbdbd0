"""Run one step of the core on one image, to compare its pixels with the installed OpenCV."""

from __future__ import annotations

import numpy as np

from fastdata.pixels.arrays import Array
from fastdata.pixels.core.calls import Keys, Samples, describe_output, draw, serve
from fastdata.pixels.steps import Step, compile_table, flatten_steps


def try_step(step: Step, image_HWC: Array) -> tuple[Array, Array]:
    """Return the result of a step for one image (height, width, channels), and the drawn ops."""
    image_CHW = np.ascontiguousarray(image_HWC.transpose(2, 0, 1))
    address_1 = np.array([image_CHW.ctypes.data])
    shape_13 = np.array([image_CHW.shape], np.int32)
    samples = Samples(address_1, shape_13)
    zero_1 = np.zeros(1, np.int64)
    keys = Keys(0, zero_1, zero_1)
    steps = flatten_steps((step,))
    table = compile_table(steps)
    ops_1S, made_shape_13 = draw(table, keys, shape_13)
    made_shape_1CHW = (1, *made_shape_13[0])
    made_1CHW = np.empty(made_shape_1CHW, np.uint8)
    output = describe_output(table, made_1CHW)
    serve(samples, keys, [output], first=0, last=1)
    made_HWC = made_1CHW[0].transpose(1, 2, 0)
    return made_HWC, ops_1S[0]
