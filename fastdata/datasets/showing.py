"""Pictures and tables of datasets and loaders: images with their labels, plans in notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastdata.pictures import new_figure
from fastdata.pixels.arrays import Array
from fastdata.pixels.compose import flatten_transform, joint_transforms
from fastdata.pixels.known import known_name
from fastdata.pixels.own_transforms import Views
from fastdata.pixels.samples import is_image, is_pil

if TYPE_CHECKING:
    from fastdata.datasets.dataset import PreparedDataset

_IMAGE_INCHES = 1.6

_MOST_LETTERS = 24
"""Length of a label above an image."""


def show_dataset(dataset: PreparedDataset, count: int) -> Any:
    """Return a figure of ``count`` items, spread over the dataset."""
    last = len(dataset) - 1
    indices = np.linspace(0, last, min(count, last + 1)).round().astype(int).tolist()
    with torch.random.fork_rng(devices=[]):  # items draw from torch's generator
        items = [dataset[index] for index in indices]
    return show_items(items, dataset)


def show_batch(batch: Any, datasets: Sequence[Any], count: int) -> Any:
    """Return a figure of the first ``count`` items of a batch that was made of datasets."""
    tensors = [part for part in _parts(batch) if isinstance(part, torch.Tensor) and part.ndim]
    if not tensors:
        raise ValueError("there is no image to show: the batch has no tensors")
    length = min(len(tensor) for tensor in tensors)
    return show_items([_item_of(batch, k) for k in range(min(count, length))], datasets[0])


def _parts(batch: Any) -> list[Any]:
    """Return the values of a batch, and those of its lists and dicts."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, (list, tuple)):
        return [batch]
    return [part for value in batch for part in _parts(value)]


def _item_of(batch: Any, number: int) -> Any:
    """Return one item of a batch that ``default_collate`` has made."""
    if isinstance(batch, torch.Tensor):
        return batch[number]
    if isinstance(batch, Mapping):
        return {name: _item_of(value, number) for name, value in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return batch
    if batch and isinstance(batch[0], (str, bytes)):
        return batch[number]
    return [_item_of(value, number) for value in batch]


def show_items(items: Sequence[Any], dataset: Any) -> Any:
    """Return a figure of items, each with its images and its label.

    Args:
        items: pairs, tuples or dicts; their images may be tensors (C, H, W), arrays (H, W, C) or
            PIL images, and lists of these for several views. Masks are shown beside their image.
        dataset: the one that they come from. If its transform has a Normalize, colours are shown
            as before it. Its ``classes`` are shown in place of their numbers.
    """
    transform = getattr(dataset, "transform", None) or getattr(dataset, "transforms", None)
    undo = _undo_normalize(transform)
    classes = getattr(dataset, "classes", ())
    cells = [_cell(item, undo, classes) for item in items]
    images = max((len(pictures) for pictures, _ in cells), default=0)
    if not images:
        raise ValueError("there is no image to show: give a dataset or loader of images")
    per_row = max(1, min(8 // images, len(cells)))
    rows = -(-len(cells) // per_row)
    columns = per_row * images
    figure = new_figure(columns * _IMAGE_INCHES, rows * (_IMAGE_INCHES + 0.3))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (pictures, text) in enumerate(cells):
        row, place = divmod(number, per_row)
        for column, picture in enumerate(pictures, place * images):
            is_gray = picture.ndim == 2
            axes[row, column].imshow(picture, cmap="gray" if is_gray else None)
        axes[row, place * images].set_title(text, fontsize=8)
    return figure


Undo = Callable[[Array], Array]


def _cell(item: Any, undo: Undo, classes: Sequence[str]) -> tuple[list[Array], str]:
    """Return the pictures of an item, and the text of all else."""
    values = list(item.values()) if isinstance(item, Mapping) else item
    pictures: list[Array] = []
    texts: list[str] = []
    for value in values if isinstance(values, (list, tuple)) else [values]:
        views = value if isinstance(value, (list, tuple)) else [value]
        if views and all(map(is_image, views)):
            pictures += [_to_picture(view, undo) for view in views]
        else:
            texts.append(_label(value, classes))
    text = ", ".join(texts)
    return pictures, text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def _label(value: Any, classes: Sequence[str]) -> str:
    """Return the text of a label: the name of its class, or those of a mix of two."""
    if isinstance(value, torch.Tensor) and value.ndim == 1 and value.is_floating_point():
        if len(value) < 2:
            return str(value.tolist())
        shares, numbers = value.topk(2)
        parts = zip(shares.tolist(), numbers.tolist(), strict=True)
        return ", ".join(f"{_name(k, classes)} {share:.2f}" for share, k in parts if share > 0)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    return _name(value, classes)


def _name(value: Any, classes: Sequence[str]) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(classes[value] if is_number and 0 <= value < len(classes) else value)


def _to_picture(image: Any, undo: Undo) -> Array:
    """Return an image as uint8 or floats in [0, 1], (H, W, 3), or (H, W) for grays and masks."""
    if is_pil(image):
        return np.asarray(image.convert("RGB"))
    values = image.detach().cpu() if isinstance(image, torch.Tensor) else image
    if isinstance(values, torch.Tensor):
        values = (values.float() if values.is_floating_point() else values).numpy()
    if values.ndim == 2:
        return values
    if isinstance(image, torch.Tensor) and values.shape[0] in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    if values.dtype.kind == "f":
        values = undo(values).clip(0, 1)
    return values[..., 0] if values.shape[-1] == 1 else values[..., :3]


def _undo_normalize(transform: Any) -> Undo:
    """Return what gives images the colours that they had before the last Normalize."""
    singles = [each for part in joint_transforms(transform) for each in flatten_transform(part)]
    if singles and isinstance(singles[-1], Views):
        singles = list(flatten_transform(singles[-1].transforms[0]))
    for step in reversed(singles):
        name = known_name(step)
        if name in ("Normalize", "A.Normalize"):
            step = getattr(step, "transform", step)
            mean, std = np.asarray(step.mean, np.float32), np.asarray(step.std, np.float32)
            return lambda image: image * std + mean
    return lambda image: image


# Tables in notebooks


def html_of(dataset: PreparedDataset) -> str:
    """Return a dataset's size, storage and plan as HTML."""
    name, *lines = repr(dataset).splitlines()
    told = [line.strip() for line in lines]
    # The transform is in the plan's table.
    shown = [line for line in told if line.startswith(("Number", "Storage", "Root"))]
    rows = "<br>".join(map(escape, shown))
    return f"<b>{escape(name)}</b><br>{rows}{dataset.plan._repr_html_()}"
