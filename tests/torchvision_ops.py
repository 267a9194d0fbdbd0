"""Lets torchvision be imported where its compiled operators do not load, as beside a CPU build of torch.

Its Python transforms need none of the operators, but its import registers two of them. Used by tests and benchmarks;
the package itself never needs torchvision.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

_kept_alive: list[torch.library.Library] = []


def import_torchvision() -> bool:
    """Import torchvision, declaring the missing operators first where there are none.

    Returns:
        Whether torchvision is installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_operators()
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")
    return True


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept_alive.append(library)
