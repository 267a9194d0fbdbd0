"""Caches as class folders or tars: nobody is locked in.

``export_cache`` writes beside the place where they shall be, and renames at the end.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fastdata.datasets.cached import CachedDataset
from fastdata.errors import refuse_remote
from fastdata.machine.memory import parse_bytes, usable_cores
from fastdata.pixels.images import encode_image
from fastdata.report import progress_bar

ImageFormat = Literal["png", "jpeg"]
_ENDINGS = {"png": "png", "jpeg": "jpg"}
_FOLDER_NAME = re.compile(r"(?!\.)[^/\\\0]+")


class Exported(NamedTuple):
    """What ``export_cache`` has written.

    Attributes:
        folder: where it is.
        samples: how many.
        lossless: whether images have the very pixels of the cache.
    """

    folder: Path
    samples: int
    lossless: bool


class _Sample(NamedTuple):
    number: int
    image: bytes
    target: Any


def export_cache(
    cache: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Literal["webdataset", "folder"],
    image_format: ImageFormat = "png",
    quality: int | None = None,
    shard_size: int | str = "256MiB",
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the samples of a cache as files that others read, images at their prepared size.

    Args:
        cache: a cache, or the ``cache_dir`` that holds only this one.
        out: the folder to make; it may be there if it is empty.
        to: ``"folder"``: class folders of image files, as ``ImageFolder`` and Hugging Face's
            ``imagefolder`` read them. ``"webdataset"``: tars of images beside ``.cls``, or
            ``.json`` for targets that are no whole numbers; class names lie in ``classes.json``.
        image_format: ``"png"`` is lossless, ``"jpeg"`` is not.
        quality: of JPEG, 1 to 100; by default 95.
        shard_size: most bytes of image files in one tar.
        progress: show a progress bar on standard error.
        storage_options: for a cache behind a URL; see ``fastdata.stores.options.DatasetOptions``.

    Raises:
        FileExistsError: ``out`` is not empty.
        ValueError: samples are no images, or their targets cannot be kept so; says which.

    Example:
        >>> import tempfile
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(3)]
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cache, tars = f"{root}/cache", f"{root}/tars"
        ...     options = {"cache_dir": cache, "cache_key": "squares"}
        ...     CachedDataset(squares, **options).close()
        ...     export = export_cache(cache, tars, to="webdataset", progress=False)
        ...     print(export.samples, export.lossless, sorted(os.listdir(export.folder)))
        3 True ['shard-000000.tar']
    """
    refuse_remote(out)
    folder = Path(out).expanduser().absolute()
    limit_bytes = parse_bytes(shard_size, of=1 << 40)
    if quality is not None and (image_format == "png" or not 1 <= quality <= 100):
        raise ValueError(
            f"quality={quality} is for image_format='jpeg', from 1 to 100; PNG is lossless"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and not empty; give a folder that is to be made")
    options = {} if image_format == "png" else {"quality": quality or 95}
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    opened = CachedDataset.from_cache(cache, as_tensors=True, storage_options=storage_options)
    with opened as dataset:
        targets = [pytree.tree_map(_plain, target) for target in dataset.targets]
        classes = _class_names(dataset, targets)
        samples = _encoded(dataset, targets, image_format, options)
        ending = _ENDINGS[image_format]
        bar = progress_bar(len(targets), f"exporting {len(targets):,} images", enabled=progress)
        try:
            part.mkdir(parents=True)
            if to == "folder":
                written = _write_folder(samples, part, ending, targets, classes)
            else:
                if classes:
                    (part / "classes.json").write_text(json.dumps(classes, indent=1), "utf-8")
                written = _write_tars(samples, part, ending, targets, limit_bytes)
            with bar:
                for _ in written:
                    bar.update()
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return Exported(folder, len(targets), image_format == "png")


def _plain(leaf: Any) -> Any:
    return leaf.tolist() if hasattr(leaf, "tolist") else leaf


def _class_names(dataset: CachedDataset, targets: list[Any]) -> list[str]:
    """Names of the classes that all targets are numbers of; none where some are not."""
    classes: list[str] = getattr(dataset, "classes", [])
    is_named = all(type(target) is int and 0 <= target < len(classes) for target in targets)
    return classes if is_named else []


def _encoded(
    dataset: CachedDataset, targets: list[Any], kind: str, options: dict[str, int]
) -> Iterator[_Sample]:
    """All samples in their order, encoded by several threads, a few at a time."""

    def encode(index: int) -> _Sample:
        leaves = pytree.tree_leaves(dataset[index])
        images = [leaf for leaf in leaves if getattr(leaf, "ndim", 0) > 1]
        if len(images) != 1:
            raise ValueError(
                f"sample {index} has {len(images)} images, and one can be exported: samples with "
                "masks or several views are read by from_cache instead"
            )
        image = images[0]
        try:
            data = encode_image(_planes(image), kind, **options)
        except (TypeError, ValueError, OSError, LookupError) as cause:
            found = f"{image.dtype} of shape {tuple(image.shape)}".removeprefix("torch.")
            raise ValueError(
                f"sample {index}, {found}, is no image that {kind.upper()} keeps: {cause}"
            ) from cause
        return _Sample(index, data, targets[index])

    at_once = 16 * usable_cores()
    with ThreadPoolExecutor(usable_cores()) as pool:
        for first in range(0, len(targets), at_once):
            yield from pool.map(encode, range(first, min(first + at_once, len(targets))))


def _planes(image: Any) -> np.ndarray:
    """An image as planes; arrays may have their channels last."""
    pixels: np.ndarray = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[None]
    elif not isinstance(image, torch.Tensor) and pixels.shape[-1] in (1, 3, 4):
        pixels = pixels.transpose(2, 0, 1)
    return pixels


def _write_folder(
    samples: Iterator[_Sample], folder: Path, ending: str, targets: list[Any], classes: list[str]
) -> Iterator[None]:
    if not all(type(target) is int and target >= 0 for target in targets):
        raise ValueError(
            "class folders keep class names, or whole numbers from 0 on, and some targets are "
            "others; use to='webdataset'"
        )
    for name in classes:
        if not _FOLDER_NAME.fullmatch(name):
            raise ValueError(f"the class {name!r} cannot name a folder; use to='webdataset'")
        (folder / name).mkdir()
    # Of so many digits, numbers sort as their names do.
    digits = len(str(max(targets, default=0)))
    for index, image, target in samples:
        home = folder / (classes[target] if classes else f"{target:0{digits}}")
        home.mkdir(exist_ok=True)
        (home / f"{index:08}.{ending}").write_bytes(image)
        yield


def _write_tars(
    samples: Iterator[_Sample], folder: Path, ending: str, targets: list[Any], limit_bytes: int
) -> Iterator[None]:
    target_ending = "cls" if all(type(target) is int for target in targets) else "json"
    for number, shard in groupby(_numbered(samples, limit_bytes), itemgetter(0)):
        name = folder / f"shard-{number:06}.tar"
        with tarfile.open(name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for _, (index, image, target) in shard:
                _add(tar, f"{index:08}.{ending}", image)
                _add(tar, f"{index:08}.{target_ending}", json.dumps(target).encode())
                yield


def _numbered(samples: Iterator[_Sample], limit_bytes: int) -> Iterator[tuple[int, _Sample]]:
    """Samples with the number of their shard, whose images have so many bytes at most."""
    number = 0
    filled_bytes = 0
    for sample in samples:
        if filled_bytes and filled_bytes + len(sample.image) > limit_bytes:
            number += 1
            filled_bytes = 0
        filled_bytes += len(sample.image)
        yield number, sample


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # of no time and nobody: one cache gives one file
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
