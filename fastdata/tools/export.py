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
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils import _pytree as pytree

from fastdata.datasets.cached import CachedDataset
from fastdata.datasets.dataset import stored_of
from fastdata.errors import SampleError, refuse_remote
from fastdata.machine.memory import parse_bytes, usable_cores
from fastdata.pixels.images import encode_image
from fastdata.report import progress_bar

Target = Literal["webdataset", "folder"]
ImageFormat = Literal["png", "jpeg", "webp"]
_ENDINGS = {"png": "png", "jpeg": "jpg", "webp": "webp"}
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


def export_cache(
    cache: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Target,
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
        image_format: ``"png"`` is lossless, ``"jpeg"`` is not, nor is ``"webp"`` with a
            ``quality``.
        quality: of JPEG, by default 95, or of lossy WebP; 1 to 100.
        shard_size: most bytes of image files in one tar.
        progress: show a progress bar on standard error.
        storage_options: for a cache behind a URL; see ``fastdata.datasets.dataset.DatasetOptions``.

    Raises:
        FileExistsError: ``out`` is not empty.
        ValueError: samples are no images, or their targets cannot be kept so; says which.

    Example:
        >>> import tempfile, torch
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(3)]
        >>> with tempfile.TemporaryDirectory() as root:
        ...     CachedDataset(squares, cache_dir=f"{root}/cache", cache_key="squares", progress=False).close()
        ...     export = export_cache(f"{root}/cache", f"{root}/tars", to="webdataset", progress=False)
        ...     print(export.samples, export.lossless, [path.name for path in export.folder.iterdir()])
        3 True ['shard-000000.tar']
    """
    refuse_remote(out)
    folder = Path(out).expanduser().absolute()
    limit_bytes = parse_bytes(shard_size, of=1 << 40)
    if quality is not None and (image_format == "png" or not 1 <= quality <= 100):
        raise ValueError(
            f"quality={quality} is for image_format='jpeg' or 'webp', from 1 to 100; PNG is lossless"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and not empty; give a folder that is to be made")
    lossless = image_format == "png" or (image_format == "webp" and quality is None)
    options: dict[str, Any] = {"lossless": True} if lossless else {"quality": quality or 95}
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    with CachedDataset.from_cache(
        cache, as_tensors=True, storage_options=storage_options
    ) as dataset:
        samples = _Samples.of(dataset, image_format, {} if image_format == "png" else options)
        write = (
            _write_folder(samples, part)
            if to == "folder"
            else _write_tars(samples, part, limit_bytes)
        )
        try:
            part.mkdir(parents=True)
            with progress_bar(
                len(dataset), f"exporting {len(dataset):,} images", enabled=progress
            ) as bar:
                for count in write:
                    bar.update(count)
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return Exported(folder, len(dataset), lossless)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """The samples of a cache as image files and plain targets, in whose tensors and arrays are lists."""

    kept: Any
    kind: str
    options: dict[str, Any]
    targets: list[Any]
    classes: list[str]

    @classmethod
    def of(cls, dataset: CachedDataset, kind: str, options: dict[str, Any]) -> _Samples:
        kept = stored_of(dataset).kept
        assert kept is not None
        if kept.is_tuple or kept.target_is_part or kept.mask_places:
            what = "several parts" if kept.is_tuple else "images as targets"
            raise ValueError(
                f"samples with {what}, such as masks, are not exported; read them by from_cache instead"
            )
        targets = [_plain(target) for target in dataset.targets]
        classes: list[str] = getattr(dataset, "classes", [])
        if not all(type(target) is int and 0 <= target < len(classes) for target in targets):
            classes = []
        return cls(kept=kept, kind=kind, options=options, targets=targets, classes=classes)

    @property
    def are_numbers(self) -> bool:
        return all(type(target) is int for target in self.targets)

    def __iter__(self) -> Iterator[tuple[int, bytes, Any]]:
        """Of each sample its index, image file and target; encoded by several threads, a few at a time."""
        cores = usable_cores()
        with ThreadPoolExecutor(cores) as pool:
            for first in range(0, len(self.targets), 16 * cores):
                indices = range(first, min(first + 16 * cores, len(self.targets)))
                for index, image in zip(indices, pool.map(self._encode, indices), strict=True):
                    yield index, image, self.targets[index]

    def _encode(self, index: int) -> bytes:
        spec = self.kept.images.spec
        try:
            pixels = np.asarray(self.kept.sample(index))
            if spec.form == "array" and pixels.ndim == 3 and pixels.shape[-1] in (1, 3, 4):
                pixels = pixels.transpose(2, 0, 1)
            return encode_image(
                pixels[None] if pixels.ndim == 2 else pixels, self.kind, **self.options
            )
        except SampleError:
            raise
        except (TypeError, ValueError, OSError, LookupError) as cause:
            raise ValueError(
                f"sample {index}, {spec.dtype} of shape {self.kept.images.shape(index)}, is no image that "
                f"{self.kind.upper()} keeps: {cause}"
            ) from cause


def _plain(target: Any) -> Any:
    if isinstance(target, (int, float, str)):
        return target
    return pytree.tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, target)


def _write_folder(samples: _Samples, folder: Path) -> Iterator[int]:
    if not samples.are_numbers or min(samples.targets, default=0) < 0:
        raise ValueError(
            "class folders keep class names, or whole numbers from 0 on, and some targets are others; use "
            "to='webdataset'"
        )
    for name in samples.classes:
        if not _FOLDER_NAME.fullmatch(name):
            raise ValueError(f"the class {name!r} cannot name a folder; use to='webdataset'")
        (folder / name).mkdir()
    # Of so many digits, numbers sort as their names do.
    digits = len(str(max(samples.targets, default=0)))
    index_digits = len(str(len(samples.targets)))
    for index, image, target in samples:
        home = folder / (samples.classes[target] if samples.classes else f"{target:0{digits}}")
        home.mkdir(exist_ok=True)
        (home / f"{index:0{index_digits}}.{_ENDINGS[samples.kind]}").write_bytes(image)
        yield 1


def _write_tars(samples: _Samples, folder: Path, limit_bytes: int) -> Iterator[int]:
    if samples.classes:
        (folder / "classes.json").write_text(json.dumps(samples.classes, indent=1), "utf-8")
    ending = "cls" if samples.are_numbers else "json"
    for number, shard in groupby(_numbered(samples, limit_bytes), itemgetter(0)):
        with tarfile.open(
            folder / f"shard-{number:06}.tar", "w", format=tarfile.USTAR_FORMAT
        ) as tar:
            for _, (index, image, target) in shard:
                _add(tar, f"{index:08}.{_ENDINGS[samples.kind]}", image)
                _add(tar, f"{index:08}.{ending}", _json(index, target))
                yield 1


def _numbered(samples: _Samples, limit_bytes: int) -> Iterator[tuple[int, tuple[int, bytes, Any]]]:
    """Samples with the number of their shard: the images of one have at most so many bytes, or are one."""
    number = filled_bytes = 0
    for sample in samples:
        image_bytes = len(sample[1])
        if filled_bytes and filled_bytes + image_bytes > limit_bytes:
            number += 1
            filled_bytes = 0
        filled_bytes += image_bytes
        yield number, sample


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # of no time and nobody: one cache gives one file
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _json(index: int, target: Any) -> bytes:
    try:
        return json.dumps(target).encode()
    except (TypeError, ValueError) as cause:
        raise ValueError(
            f"the target of sample {index} cannot be written as JSON: {cause}"
        ) from cause
