"""Texts and tables of datasets: their ``repr``, and HTML for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdata.datasets.dataset import PreparedDataset


def text_of(dataset: PreparedDataset) -> str:
    """Return a dataset's size, storage and transforms as text, as torchvision's ``repr``."""
    samples = dataset._fastdata
    storage = "closed"
    if samples.handle.reader is not None:
        storage = samples.storage_plan.reason.replace("; ", "\n")
        share = samples.stored.filled_share()
        if samples.stored.kept is not None and share < 1:
            storage += f"\n{share:.0%} prepared so far, the rest on first read"
    shown = {
        "Storage": storage,
        "Transform": samples.transforms.of_sample,
        "Target transform": samples.transforms.of_target,
        "Transforms": samples.transforms.of_both,
    }
    lines = [f"Dataset {type(dataset).__name__}", f"Number of datapoints: {len(dataset)}"]
    lines += dataset.extra_repr().splitlines()
    for title, value in shown.items():
        if value is not None:
            indent = " " * len(f"    {title}: ")
            lines.append(f"{title}: {value}".replace("\n", f"\n{indent}"))
    return "\n    ".join(lines)


def html_of(dataset: PreparedDataset) -> str:
    """Return a dataset's size, storage and plan as HTML."""
    name, *lines = repr(dataset).splitlines()
    # The transform is in the plan's table.
    texts = [
        text for text in map(str.strip, lines) if text.startswith(("Number", "Storage", "Root"))
    ]
    rows = [f"<b>{escape(name)}</b>", *map(escape, texts)]
    return f"{'<br>'.join(rows)}{dataset.plan._repr_html_()}"
