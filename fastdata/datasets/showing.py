"""Figures of datasets and loaders: images with their labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastdata.datasets.trees import leaves_of
from fastdata.pictures import new_figure
from fastdata.pixels.arrays import Array
from fastdata.pixels.compose import flatten_transform, joint_transforms
from fastdata.pixels.known import known_name
from fastdata.pixels.own_transforms import Views
from fastdata.pixels.samples import is_image, is_pil

if TYPE_CHECKING:
    from fastdata.datasets.dataset import PreparedDataset

_IMAGE_INCHES = 1.6
_TITLE_INCHES = 0.3

_IMAGES_PER_ROW = 8
_MOST_LETTERS = 24
"""Length of a label above an image."""

Undo = Callable[[Array], Array]
"""Gives an image the colours that it had before Normalize."""


def show_dataset(dataset: PreparedDataset, count: int) -> Any:
    """Return a figure of ``count`` items, spread over the dataset."""
    length = len(dataset)
    indices = np.linspace(0, length - 1, min(count, length)).round().astype(int)
    with torch.random.fork_rng(devices=[]):  # because items draw from torch's generator
        items = [dataset[index] for index in indices.tolist()]
    return show_items(items, dataset)


def show_batch(batch: Any, datasets: Sequence[Any], count: int) -> Any:
    """Return a figure of the first ``count`` items of a batch from datasets."""
    leaves = leaves_of(batch)
    lengths = [len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not lengths:
        raise ValueError("the batch has no tensors, so no image can be shown")
    items = [_item_of(batch, number) for number in range(min(count, *lengths))]
    return show_items(items, datasets[0])


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


class _Cell(NamedTuple):
    """The pictures of an item, which are shown side by side, and the text above them."""

    pictures: list[Array]
    text: str


def show_items(items: Sequence[Any], dataset: Any) -> Any:
    """Return a figure of items, each with its images and its label.

    Args:
        items: pairs, tuples or dicts. Images may be tensors (C, H, W), arrays (H, W, C), PIL
            images, or lists of these for several views. Masks are shown next to their image.
        dataset: the dataset of the items. If its transform has a Normalize, images have the colours
            before it. Labels are shown as the names in its ``classes``.
    """
    undo = _undo_normalize(
        getattr(dataset, "transform", None) or getattr(dataset, "transforms", None)
    )
    classes = getattr(dataset, "classes", ())
    cells = [_cell(item, undo, classes) for item in items]
    images = max((len(cell.pictures) for cell in cells), default=0)
    if not images:
        raise ValueError("no image can be shown. Give a dataset or loader of images")
    cells_per_row = max(1, _IMAGES_PER_ROW // images)
    return _draw_grid(cells, images, min(cells_per_row, len(cells)))


def _draw_grid(cells: Sequence[_Cell], images: int, cells_per_row: int) -> Any:
    """Return a figure of cells in rows, each as wide as ``images`` pictures."""
    rows = -(-len(cells) // cells_per_row)
    columns = cells_per_row * images
    figure = new_figure(columns * _IMAGE_INCHES, rows * (_IMAGE_INCHES + _TITLE_INCHES))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, cell in enumerate(cells):
        row, place = divmod(number, cells_per_row)
        first = place * images
        axes[row, first].set_title(cell.text, fontsize=8)
        for column, picture in enumerate(cell.pictures, first):
            # matplotlib uses the colour map only for pictures without colours.
            axes[row, column].imshow(picture, cmap="gray")
    return figure


def _cell(item: Any, undo: Undo, classes: Sequence[str]) -> _Cell:
    """Return the pictures of an item, and the text of all other values."""
    pictures: list[Array] = []
    texts: list[str] = []
    for value in _values_of(item):
        views = value if isinstance(value, (list, tuple)) else [value]
        if views and all(map(is_image, views)):
            pictures += [_to_picture(view, undo) for view in views]
        else:
            texts.append(_label(value, classes))
    text = ", ".join(texts)
    if len(text) > _MOST_LETTERS:
        text = f"{text[:_MOST_LETTERS]}..."
    return _Cell(pictures, text)


def _values_of(item: Any) -> Sequence[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple)):
        return item
    return [item]


def _label(value: Any, classes: Sequence[str]) -> str:
    """Return the text of a label: the name of its class, or two names for a mixed label."""
    if isinstance(value, torch.Tensor) and value.ndim == 1 and value.is_floating_point():
        return _soft_label(value, classes)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _name(value.tolist(), classes)
    return _name(value, classes)


def _soft_label(shares: torch.Tensor, classes: Sequence[str]) -> str:
    """Return the two classes with the largest shares, or the number if there is only one."""
    if len(shares) < 2:
        return str(shares.tolist())
    largest, numbers = shares.topk(2)
    pairs = zip(largest.tolist(), numbers.tolist(), strict=True)
    return ", ".join(
        f"{_name(number, classes)} {share:.2f}" for share, number in pairs if share > 0
    )


def _name(value: Any, classes: Sequence[str]) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and 0 <= value < len(classes):
        return str(classes[value])
    return str(value)


def _to_picture(image: Any, undo: Undo) -> Array:
    """Return an image as uint8 or floats in [0, 1], (H, W, 3), or (H, W) for grays and masks."""
    if is_pil(image):
        return np.asarray(image.convert("RGB"))
    values: Array = _array_of(image) if isinstance(image, torch.Tensor) else image
    if values.ndim == 2:
        return values
    if values.dtype.kind == "f":
        values = undo(values)
        values = values.clip(0, 1)
    if values.shape[-1] == 1:
        return values[..., 0]
    return values[..., :3]


def _array_of(image: torch.Tensor) -> Array:
    """Return the values of a tensor (H, W), (C, H, W) or (H, W, C), with channels last."""
    tensor = image.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.float()
    if tensor.ndim > 2 and len(tensor) in (1, 3, 4):
        tensor = tensor.permute(1, 2, 0)
    values: Array = tensor.numpy()
    return values


def _undo_normalize(transform: Any) -> Undo:
    """Return a function that gives images the colours that they had before the last Normalize."""
    singles = flatten_transform(joint_transforms(transform))
    if singles and isinstance(singles[-1], Views):
        first_view = singles[-1].transforms[0]
        singles = flatten_transform(first_view)
    for step in reversed(singles):
        if known_name(step) in ("Normalize", "A.Normalize"):
            # albumentations' transforms are in a wrapper. Those of v2 have a method ``transform``.
            normalize = step if hasattr(step, "mean") else step.transform
            mean = np.asarray(normalize.mean, np.float32)
            std = np.asarray(normalize.std, np.float32)
            return lambda image: image * std + mean
    return lambda image: image
