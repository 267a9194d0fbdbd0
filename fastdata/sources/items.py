"""Items of any map-style dataset as a source.

Items are (sample, target) pairs, or the first item that is read decides how all are split. A later
item of another form is an error, because its values would be stored in the wrong columns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fastdata.errors import kind_of
from fastdata.faults import with_retries
from fastdata.paths import hide_secrets
from fastdata.pixels.decode import decode_image, load_image
from fastdata.pixels.openings import Opening
from fastdata.pixels.samples import is_image
from fastdata.sources.source import ItemKeys, field_names
from fastdata.sources.tars import TarSamples

if TYPE_CHECKING:
    from fastdata.sources.source import Indices, Pair


class DatasetSource:
    """Items of any map-style dataset; its own transform runs in ``read``.

    Args:
        dataset: any object with ``__getitem__`` and ``__len__``.
        columns: keys of sample and target, if the items are dicts.

    Attributes:
        is_format: True for tars, which never change an item at random.
    """

    opening: ClassVar[Opening | None] = None

    def __init__(self, dataset: Any, columns: ItemKeys | None = None) -> None:
        # A str can be read by index and has a length, too.
        if isinstance(dataset, str | bytes | os.PathLike):
            raise TypeError(
                f"{hide_secrets(repr(dataset))} is a path, but a dataset is needed. Open a folder "
                "of class folders with fastdata.ImageFolder, a CSV file with "
                "fastdata.ImageManifest, and a cache with CachedDataset.from_cache. For other "
                "files, give CachedDataset a dataset that reads them, such as "
                "datasets.load_dataset(...) or litdata.StreamingDataset(...)."
            )
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(
                f"{type(dataset).__name__} has no __getitem__ or no __len__, so its samples cannot "
                "be read by index. Give a map-style dataset, or collect an iterable one first: "
                "list(dataset)."
            )
        self.dataset = dataset
        self.columns = columns
        self.keys: ItemKeys | None = None
        self.is_format = isinstance(dataset, TarSamples)
        self.is_remote = self.is_format and dataset.is_remote
        self._form = ""  # form of the items read so far

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> Pair:
        item: Any = with_retries(getitem, self.dataset, index)
        # Images that are left as bytes are decoded first, so that they count as images below.
        if isinstance(item, Mapping):
            item = {name: _opened(value) for name, value in item.items()}
        which = f"item {index} of {type(self.dataset).__name__}"
        if self.columns is not None:
            return _split_by_columns(item, self.columns, which)
        form = _form_of(item)
        if not self._form:
            # The keys are set before the form: another thread that sees the form needs the keys.
            self.keys = _keys_of(item, form, which)
            self._form = form
        if form != self._form:
            raise TypeError(
                f"{which} is {form}, but items before it are {self._form}. "
                "All items must have the same form."
            )
        return tuple(item) if self.keys is None else self.keys.split(item)

    def expect(self, indices: Indices) -> None:
        if self.is_remote:
            self.dataset.expect(indices)

    def path(self, index: int) -> str | None:
        return next(iter(self.paths(index)), None)

    def paths(self, index: int) -> list[str]:
        """Return the sample's files if the dataset has a list ``samples`` of them, else no files.

        Datasets of torchvision have one. For a subset, the dataset inside it is used. An entry of
        the list may be a tuple, such as (image, mask) or (image, label). A label that is a text is
        returned, too.
        """
        dataset = self.dataset
        while getattr(dataset, "indices", None) is not None and hasattr(dataset, "dataset"):
            # The indices of a subset are positions in the dataset inside it.
            index = int(dataset.indices[index])
            dataset = dataset.dataset
        samples = getattr(dataset, "samples", None)
        if not isinstance(samples, Sequence) or index >= len(samples):
            return []
        entry = samples[index]
        values = entry if isinstance(entry, tuple | list) else (entry,)
        return [os.fspath(value) for value in values if isinstance(value, str | os.PathLike)]


def _split_by_columns(item: Any, columns: ItemKeys, which: str) -> Pair:
    """Split an item by ``columns=``.

    Raises:
        TypeError: the item is not a dict.
        ValueError: the item lacks a column. The message names the columns that it has.
    """
    if not isinstance(item, Mapping):
        raise TypeError(f"{which} is {_form_of(item)}, but columns= needs items that are dicts")
    missing = [name for name in columns.names if name not in item]
    if missing:
        raise ValueError(
            f"{which} has no {', '.join(map(repr, missing))}, but columns= names it. It has "
            f"{', '.join(map(repr, item)) or 'nothing'}."
        )
    return columns.split(item)


def _opened(value: Any) -> Any:
    """Open the image of Hugging Face's ``Image(decode=False)``, rotated as its EXIF requires.

    ``datasets`` also rotates the images that it decodes. Other values are returned unchanged.
    """
    if not isinstance(value, Mapping) or value.keys() != {"bytes", "path"}:
        return value
    if value["bytes"] is None:
        return with_retries(partial(load_image, upright=True), value["path"])
    return decode_image(value["bytes"], upright=True)


_ALONE = "an image alone"

_IMAGE_NAMES = ("image", "images", "img", "pixel_values", "input", "inputs", "x")
"""Names of the image in a dict or dataclass that holds several arrays, such as image and mask."""


def _form_of(item: Any) -> str:
    if isinstance(item, dict):
        return f"a dict of {', '.join(sorted(map(str, item)))}"
    if isinstance(item, tuple | list):
        return f"a tuple of length {len(item)}"
    if is_dataclass(item):
        return f"{kind_of(item)} of {', '.join(sorted(field_names(item) or ()))}"
    is_alone = isinstance(item, torch.Tensor | np.ndarray) or is_image(item)
    return _ALONE if is_alone else kind_of(item)


def _keys_of(item: Any, form: str, which: str) -> ItemKeys | None:
    """Return how an item of this form is split; None for a pair."""
    if isinstance(item, dict) or is_dataclass(item):
        return _named_keys(item, form, which)
    if isinstance(item, tuple | list):
        # A pair needs no keys, but a namedtuple of two values has names and a class to restore.
        names = getattr(item, "_fields", tuple(map(str, range(len(item)))))
        named = _class_name(item) if hasattr(item, "_fields") else ""
        place = _sample_place(item)
        is_pair = names == ("0", "1") and place == 0
        return None if is_pair else ItemKeys(names, names[place], "tuple", named)
    if form == _ALONE:
        return ItemKeys(("0",), "0", "alone")
    raise TypeError(
        f"{which} is {form}, but a (sample, target) pair, a tuple, a dict with an image or an "
        "image is needed. Wrap the dataset in one whose __getitem__ returns one of these."
    )


def _sample_place(item: Sequence[Any]) -> int:
    """Return the place of the sample in a tuple: 0, or that of the only image.

    It is 1 for (label, image). In a tuple that begins with a tensor, an array or a nested tuple,
    the first value is the sample.
    """
    images = [place for place, value in enumerate(item) if is_image(value)]
    if len(images) != 1 or isinstance(item[0], torch.Tensor | np.ndarray | tuple | list):
        return 0
    return images[0]


def _named_keys(item: Any, form: str, which: str) -> ItemKeys:
    """Return the keys of a dict or dataclass, in which one value is the sample.

    Raises:
        TypeError: it is not clear which value that is.
    """
    is_dict = isinstance(item, dict)
    values = item if is_dict else {name: getattr(item, name) for name in field_names(item) or ()}
    images = [name for name, value in values.items() if is_image(value)]
    if len(images) > 1:  # such as image and mask
        images = [name for name in _IMAGE_NAMES if name in images][:1] or images
    if len(images) == 1 and all(isinstance(name, str) for name in values):
        named = "" if is_dict else _class_name(item)
        return ItemKeys(tuple(values), images[0], "dict" if is_dict else "dataclass", named)
    found = f"with the images {', '.join(map(str, images))}" if images else "without an image"
    raise TypeError(
        f"{which} is {form}, {found}, but one image under a name is needed: a PIL image, array "
        "or tensor. Wrap the dataset in one whose __getitem__ returns ((image, mask), "
        "target), or name the image, such as columns={'sample': 'image', 'target': 'label'}."
    )


def _class_name(item: object) -> str:
    """Return module and name of an item's class, by which ``ItemKeys`` finds it again."""
    return f"{type(item).__module__}:{type(item).__qualname__}"
