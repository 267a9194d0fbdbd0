"""Caches as files of other formats: nobody is locked in.

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
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils import _pytree as pytree

from fastdata.dataset import CachedDataset
from fastdata.errors import SampleError, refuse_remote
from fastdata.formats import import_arrow
from fastdata.images import encode_image
from fastdata.memory import parse_bytes, usable_cores
from fastdata.report import progress_bar

Target = Literal["webdataset", "folder", "hf"]
ImageFormat = Literal["png", "jpeg", "webp"]
_ENDINGS = {"png": "png", "jpeg": "jpg", "webp": "webp"}
_PLAIN = re.compile(r"(?!\.)[^/\\\0]+")


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
        to: ``"folder"``: class folders of image files, as ``ImageFolder`` reads them. ``"webdataset"``: tars of images
            beside ``.cls``, or ``.json`` for targets that are no whole numbers; class names lie in ``classes.json``.
            ``"hf"``: Parquet that ``datasets.load_dataset(out)`` opens with ``Image`` and ``ClassLabel`` (extra:
            arrow).
        image_format: ``"png"`` is lossless, ``"jpeg"`` is not, nor is ``"webp"`` with a ``quality``.
        quality: of JPEG, by default 95, or of lossy WebP; 1 to 100.
        shard_size: most bytes of image files in one tar or Parquet file.
        progress: show a progress bar on standard error.
        storage_options: for a cache behind a URL; see ``fastdata.dataset.DatasetOptions``.

    Raises:
        FileExistsError: ``out`` is not empty.
        ValueError: samples are no images, or their targets cannot be kept so; says which.
        ImportError: ``to="hf"`` needs pyarrow.

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
    folder, limit_bytes = Path(out).expanduser().absolute(), parse_bytes(shard_size, of=1 << 40)
    if quality is not None and (image_format == "png" or not 1 <= quality <= 100):
        raise ValueError(f"quality={quality} is for image_format='jpeg' or 'webp', from 1 to 100; PNG is lossless")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and not empty; give a folder that is to be made")
    lossless = image_format == "png" or (image_format == "webp" and quality is None)
    options: dict[str, Any] = {"quality": quality or 95} if not lossless else {}
    if image_format == "webp" and lossless:
        options = {"lossless": True}
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    with CachedDataset.from_cache(cache, as_tensors=True, storage_options=storage_options) as dataset:
        reader = _Reader(dataset, image_format, options)
        write = {"folder": _write_folder, "webdataset": _write_tars, "hf": _write_parquet}[to]
        try:
            part.mkdir(parents=True)
            with progress_bar(len(dataset), f"exporting {len(dataset):,} images", enabled=progress) as bar:
                for count in write(reader, part, limit_bytes):
                    bar.update(count)
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return Exported(folder, len(dataset), lossless)


class _Reader:
    """The samples of a cache as image files and plain targets; encoded by several threads, a few at a time."""

    def __init__(self, dataset: CachedDataset, image_format: ImageFormat, options: dict[str, Any]) -> None:
        kept = dataset.kept
        assert kept is not None
        if kept.is_tuple or kept.target_is_part or kept.mask_places:
            what = "several parts" if kept.is_tuple else "images as targets"
            raise ValueError(f"samples with {what}, such as masks, are not exported; read them by from_cache instead")
        self._dataset, self._kind, self._options = dataset, image_format, options
        self.ending = _ENDINGS[image_format]
        self.targets = [_plain(target) for target in dataset.targets]
        """Tensors and arrays in them are lists."""
        self.are_numbers = all(type(target) is int for target in self.targets)
        classes: list[str] = dataset.classes if hasattr(dataset, "classes") else []
        is_named = self.are_numbers and all(0 <= target < len(classes) for target in self.targets)
        self.classes = classes if is_named else []

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def names(self) -> tuple[str, str]:
        """What image and target are called."""
        keys = None if self._dataset.kept is None else self._dataset.kept.keys
        if keys is None or keys.kind != "dict":
            return "image", "label"
        others = [name for name in keys.names if name != keys.image]
        return keys.image, others[0] if len(others) == 1 else "label"

    def samples(self) -> Iterator[tuple[int, bytes, Any]]:
        """Of each sample its number, image file and target."""
        cores = usable_cores()
        with ThreadPoolExecutor(cores) as pool:
            for first in range(0, len(self), 16 * cores):
                numbers = range(first, min(first + 16 * cores, len(self)))
                for index, image in zip(numbers, pool.map(self._image, numbers), strict=True):
                    yield index, image, self.targets[index]

    def _image(self, index: int) -> bytes:
        kept = self._dataset.kept
        assert kept is not None
        try:
            pixels, is_array = np.asarray(kept.sample(index)), kept.images.spec.form == "array"
            if is_array and pixels.ndim == 3 and pixels.shape[-1] in (1, 3, 4):
                pixels = pixels.transpose(2, 0, 1)
            return encode_image(pixels[None] if pixels.ndim == 2 else pixels, self._kind, **self._options)
        except SampleError:
            raise
        except (TypeError, ValueError, OSError, LookupError) as cause:
            spec = kept.images.spec
            raise ValueError(
                f"sample {index}, {spec.dtype} of shape {kept.images.shape(index)}, is no image that "
                f"{self._kind.upper()} keeps: {cause}"
            ) from cause


def _plain(target: Any) -> Any:
    is_plain = isinstance(target, (int, float, str))
    return target if is_plain else pytree.tree_map(lambda it: it.tolist() if hasattr(it, "tolist") else it, target)


def _write_folder(reader: _Reader, folder: Path, limit_bytes: int) -> Iterator[int]:
    if not reader.are_numbers or min(reader.targets, default=0) < 0:
        raise ValueError(
            "class folders keep class names, or whole numbers from 0 on, and some targets are others; use "
            "to='webdataset' or to='hf'"
        )
    if wrong := [name for name in reader.classes if not _PLAIN.fullmatch(name)]:
        raise ValueError(f"the class {wrong[0]!r} cannot name a folder; use to='webdataset' or to='hf'")
    digits, width = len(str(max(reader.targets, default=0))), len(str(len(reader)))  # to sort as numbers do
    for name in reader.classes:
        (folder / name).mkdir()
    for index, image, target in reader.samples():
        home = folder / (reader.classes[target] if reader.classes else f"{target:0{digits}}")
        home.mkdir(exist_ok=True)
        (home / f"{index:0{width}}.{reader.ending}").write_bytes(image)
        yield 1


def _shards(reader: _Reader, limit_bytes: int) -> Iterator[tuple[int, Iterator[tuple[int, bytes, Any]]]]:
    """Samples in runs, with their numbers, whose images have at most so many bytes together, or are one."""
    number = filled_bytes = 0

    def shard_of(sample: tuple[int, bytes, Any]) -> int:
        nonlocal number, filled_bytes
        if filled_bytes and filled_bytes + len(sample[1]) > limit_bytes:
            number, filled_bytes = number + 1, 0
        filled_bytes += len(sample[1])
        return number

    return groupby(reader.samples(), shard_of)


def _write_tars(reader: _Reader, folder: Path, limit_bytes: int) -> Iterator[int]:
    if reader.classes:
        (folder / "classes.json").write_text(json.dumps(reader.classes, indent=1), "utf-8")
    for number, shard in _shards(reader, limit_bytes):
        with tarfile.open(folder / f"shard-{number:06}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for index, image, target in shard:
                if reader.are_numbers:
                    ending, text = "cls", str(target)
                else:
                    ending, text = "json", _json(index, target)
                for name, data in ((f"{index:08}.{reader.ending}", image), (f"{index:08}.{ending}", text.encode())):
                    info = tarfile.TarInfo(name)  # of no time and nobody: one cache gives one file
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                yield 1


def _json(index: int, target: Any) -> str:
    try:
        return json.dumps(target)
    except (TypeError, ValueError) as cause:
        raise ValueError(f"the target of sample {index} cannot be written as JSON: {cause}") from cause


def _write_parquet(reader: _Reader, folder: Path, limit_bytes: int) -> Iterator[int]:
    arrow = import_arrow()
    image_name, target_name = reader.names
    features: dict[str, Any] = {image_name: {"_type": "Image"}}
    if reader.are_numbers and reader.classes:
        features[target_name] = {"names": reader.classes, "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    image_type = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    target_type = arrow.array(reader.targets).type
    schema = arrow.schema([(image_name, image_type), (target_name, target_type)], metadata=metadata)
    (folder / "data").mkdir()
    rows = 100  # in a group, as Hugging Face has of images
    for number, shard in _shards(reader, limit_bytes):
        with arrow.parquet.ParquetWriter(folder / "data" / f"train-{number:05}.parquet", schema) as writer:
            while group := list(islice(shard, rows)):
                images = [{"bytes": image, "path": f"{index:08}.{reader.ending}"} for index, image, _ in group]
                columns = [arrow.array(images, image_type), arrow.array([t for _, _, t in group], target_type)]
                writer.write_table(arrow.table(columns, schema=schema), row_group_size=rows)
                yield len(group)
