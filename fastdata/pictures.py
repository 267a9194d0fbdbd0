"""Matplotlib figures for notebooks, and bar charts of times.

A figure is made without pyplot, so that the user's settings stay unchanged and no window opens. A
notebook displays it, and its method ``savefig`` writes it to a file.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = ("#c44e52", "#4c72b0")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, which a notebook displays; ``width`` and ``height`` are in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "pictures are drawn by matplotlib, which is not installed: pip install matplotlib"
        ) from None

    class Picture(Figure):
        """A figure that a notebook displays without pyplot."""

        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png", dpi=100)
            return stream.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def show_bars(names: Sequence[str], shares: Mapping[str, Sequence[float]], unit: str) -> Any:
    """Return a figure of horizontal bars, each made of several parts.

    Args:
        names: name of each bar.
        shares: length of a part in each bar, by the name of the part.
        unit: unit of the lengths, written below the axis.
    """
    figure = new_figure(7, 1 + 0.3 * len(names))
    axis = figure.subplots()
    left = [0.0] * len(names)
    for (part, lengths), colour in zip(shares.items(), _COLOURS, strict=False):
        axis.barh(range(len(names)), lengths, left=left, color=colour, label=part)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure
