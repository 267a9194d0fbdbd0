"""``fastdata build``, ``inspect``, ``export`` and ``prune``: caches that outlive a run."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils import _pytree as pytree

from fastdata.datasets.public import CachedDataset, ImageFolder
from fastdata.errors import (
    AnyPath,
    CacheError,
    SampleError,
    counted,
    is_url,
    local_path,
    refuse_remote,
)
from fastdata.machine import format_bytes, parse_bytes, usable_cores
from fastdata.pixels.images import CenterCrop, encode_image
from fastdata.report import progress_bar
from fastdata.sources.remote import Place, StorageChoice
from fastdata.stores.build import lock_of
from fastdata.stores.cache import INDEX, Cache, cache_places
from fastdata.stores.codecs import KNOWN_CODECS
from fastdata.tools import add_json, check_folder, keep, positive

# Export

ImageFormat = Literal["png", "jpeg"]
_ENDINGS = {"png": "png", "jpeg": "jpg"}
_Images = Iterator[tuple[int, bytes]]
_FOLDER_NAME = re.compile(r"(?!\.)[^/\\\0]+")


def export_cache(
    cache: AnyPath,
    out: AnyPath,
    *,
    to: Literal["webdataset", "folder"],
    image_format: ImageFormat = "png",
    quality: int = 95,
    shard_size: int | str = "256MiB",
    storage_options: StorageChoice = None,
) -> int:
    """Write the samples of a cache as files that others read, images at their prepared size.

    Args:
        cache: a cache, or the ``cache_dir`` that holds only this one.
        out: the folder to make; it may be there if it is empty.
        to: ``"folder"``: class folders of image files, as ``ImageFolder`` and Hugging Face's
            ``imagefolder`` read them. ``"webdataset"``: tars of images beside ``.cls``, or
            ``.json`` for targets that are no whole numbers; class names lie in ``classes.json``.
        image_format: ``"png"`` is lossless, ``"jpeg"`` is not.
        quality: of JPEG, 1 to 100.
        shard_size: most bytes of image files in one tar.
        storage_options: for a cache behind a URL; see ``fastdata.stores.prepare.DatasetOptions``.

    Returns:
        how many samples were written.

    Raises:
        FileExistsError: ``out`` is not empty.
        ValueError: samples are no images, or their targets cannot be kept so; says which.

    Example:
        >>> import tempfile, torch
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(3)]
        >>> with tempfile.TemporaryDirectory() as root:
        ...     cache, tars = f"{root}/cache", f"{root}/tars"
        ...     options = {"cache_dir": cache, "cache_key": "squares"}
        ...     CachedDataset(squares, **options).close()
        ...     print(export_cache(cache, tars, to="webdataset"), os.listdir(tars))
        3 ['shard-000000.tar']
    """
    refuse_remote(out)
    folder = Path(local_path(out)).absolute()
    limit_bytes = parse_bytes(shard_size, of=1 << 40)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is there and not empty; give a folder that is to be made")
    folder.parent.mkdir(parents=True, exist_ok=True)
    opened = CachedDataset.from_cache(cache, as_tensors=True, storage_options=storage_options)
    with opened as dataset, TemporaryDirectory(dir=folder.parent, prefix=".export-") as temporary:
        part = Path(temporary, folder.name)
        part.mkdir()
        targets = pytree.tree_map(
            lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, list(dataset.targets)
        )
        classes = getattr(dataset, "classes", [])
        if not all(type(target) is int and 0 <= target < len(classes) for target in targets):
            classes = []
        images = _encoded(dataset, image_format, quality)
        ending = _ENDINGS[image_format]
        if to == "folder":
            _write_folder(images, part, ending, targets, classes)
        else:
            _write_tars(images, part, ending, targets, limit_bytes)
            if classes:
                (part / "classes.json").write_text(json.dumps(classes, indent=1), "utf-8")
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
        return len(targets)


def _encoded(dataset: CachedDataset, kind: str, quality: int) -> _Images:
    """All images in their order, encoded by several threads, a few at a time."""

    def encode(index: int) -> tuple[int, bytes]:
        sample = pytree.tree_leaves(dataset[index])
        images = [leaf for leaf in sample if getattr(leaf, "ndim", 0) > 1]
        if len(images) != 1:
            raise ValueError(
                f"sample {index} has {len(images)} images, and one can be exported: samples with "
                "masks or several views are read by from_cache instead"
            )
        image = images[0]
        pixels = np.asarray(image)
        if pixels.ndim == 2:
            pixels = pixels[None]
        elif pixels is image and pixels.shape[-1] in (1, 3, 4):
            pixels = pixels.transpose(2, 0, 1)  # of arrays channels may be last
        try:
            return index, encode_image(pixels, kind, quality=quality)
        except (TypeError, ValueError, OSError, LookupError) as cause:
            found = f"{pixels.dtype} of shape {tuple(image.shape)}"
            raise ValueError(
                f"sample {index}, {found}, is no image that {kind.upper()} keeps: {cause}"
            ) from cause

    length = len(dataset)
    at_once = 16 * usable_cores()
    bar = progress_bar(length, f"exporting {length:,} images")
    with bar, ThreadPoolExecutor(usable_cores()) as pool:
        for first in range(0, length, at_once):
            for each in pool.map(encode, range(length)[first : first + at_once]):
                yield each
                bar.update()


def _write_folder(
    images: _Images, folder: Path, ending: str, targets: list[Any], classes: list[str]
) -> None:
    if not all(type(target) is int and target >= 0 for target in targets):
        raise ValueError(
            "class folders keep class names, or whole numbers from 0 on, and some targets are "
            "others; use to='webdataset'"
        )
    # Of so many digits, numbers sort as their names do.
    digits = len(str(max(targets, default=0)))
    for name in classes:
        if not _FOLDER_NAME.fullmatch(name):
            raise ValueError(f"the class {name!r} cannot name a folder; use to='webdataset'")
        (folder / name).mkdir()
    for index, image in images:
        target = targets[index]
        home = folder / (classes[target] if classes else f"{target:0{digits}}")
        home.mkdir(exist_ok=True)
        (home / f"{index:08}.{ending}").write_bytes(image)


def _write_tars(
    images: _Images, folder: Path, ending: str, targets: list[Any], limit_bytes: int
) -> None:
    target_ending = "cls" if all(type(target) is int for target in targets) else "json"
    names = (folder / f"shard-{number:06}.tar" for number in count())
    filled_bytes = limit_bytes
    with contextlib.ExitStack() as opened:
        for index, image in images:
            filled_bytes += len(image)
            if filled_bytes > limit_bytes:
                opened.close()
                tar = opened.enter_context(
                    tarfile.open(next(names), "w", format=tarfile.USTAR_FORMAT)
                )
                filled_bytes = len(image)
            target = json.dumps(targets[index]).encode()
            for kind, data in ((ending, image), (target_ending, target)):
                info = tarfile.TarInfo(f"{index:08}.{kind}")  # of no time and nobody: one cache
                info.size = len(data)  # gives one file
                tar.addfile(info, io.BytesIO(data))


# Inspect


class Inspected(NamedTuple):
    """A cache, or what is left of one.

    Attributes:
        folder: where it is.
        facts: what it holds and is made from; none of one that cannot be read.
        problems: samples whose bytes are not those that were written, or why it cannot be used.
    """

    folder: str
    facts: dict[str, Any]
    problems: list[str]

    def __str__(self) -> str:
        facts = (f"{name:10} {fact}" for name, fact in self.facts.items())
        lines = [self.folder, *facts, *self.problems]
        # A cache may be somebody else's, and a terminal obeys what it is shown.
        return "\n  ".join(map(_printable, lines))


def _printable(text: str) -> str:
    """Escape what moves a terminal's cursor, names its window and the like."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def inspect_caches(
    path: AnyPath, storage_options: StorageChoice = None, *, verify: bool = False
) -> list[Inspected]:
    """Read all but the samples of a cache, or of all caches in a ``cache_dir``.

    Args:
        path: a cache, or what holds caches.
        storage_options: for a URL.
        verify: read all samples, too. A shard that is damaged is written anew by the next run.

    Raises:
        FileNotFoundError: there is none.
    """
    return [_inspect(place, verify=verify) for place in cache_places(Place(path, storage_options))]


def _inspect(place: Place, *, verify: bool = False) -> Inspected:
    problems = []
    try:
        cache = Cache.read(place)
        if cache.lacks_receipts():
            problems.append("a shard is damaged, which the next run writes anew")
        for number in range(len(cache.manifest.parts)):
            with contextlib.closing(cache.open_part(number, None)) as store:
                for k, row in enumerate(cache.kept.tolist() if verify else ()):
                    try:
                        store.ensure(np.array([k]))
                    except SampleError as wrong:
                        problems.append(f"sample {row}, part{number}, is damaged: {wrong}")
        size = format_bytes(cache.size_bytes)
    except (CacheError, FileNotFoundError) as unreadable:
        return Inspected(str(place), {}, [str(unreadable)])
    facts = {
        "samples": len(cache.kept),
        "left out": len(cache.skipped),
        "classes": len(cache.manifest.classes or ()),
        "size": size,
        "shards": len(cache.shard_names),
        "root": cache.manifest.root,
        **cache.manifest.key,
    }
    if verify and not problems:
        facts["verified"] = "every sample is as it was written"
    return Inspected(str(place), facts, problems)


# Prune


class Removal(NamedTuple):
    """Something that was removed, or would be."""

    path: Path
    reason: str
    size_bytes: int


def prune_caches(cache_dir: Path, *, gone: bool = False, dry_run: bool = False) -> list[Removal]:
    """Remove what no run can use: what writers left that died, and caches that cannot be read.

    A cache that cannot be locked is left alone: another process is writing it, or it is another
    user's.

    Args:
        cache_dir: holds caches.
        gone: also caches of folders that are not there now, which can only be opened on their own.
        dry_run: only say what would go.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    check_folder(cache_dir, "one that keeps caches")
    removals = []
    for folder in sorted(cache_dir.iterdir()):
        lock = lock_of(folder)
        is_ours = (folder / INDEX).exists() or os.path.exists(lock.lock_file)
        if not is_ours or not folder.is_dir() or folder.is_symlink():
            continue
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock.acquire(timeout=0))
            except OSError:  # a Timeout, too
                continue
            reason = _fault(folder, gone=gone)
            if reason:
                files = filter(Path.is_file, folder.rglob("*"))
                size_bytes = sum(path.stat().st_size for path in files)
                removals.append(Removal(folder, reason, size_bytes))
                if not dry_run:
                    shutil.rmtree(folder)
    return removals


def _fault(folder: Path, *, gone: bool) -> str:
    """Why no run can use a cache; empty of one that is sound."""
    if not (folder / INDEX).exists():
        return "left by a writer that died"
    inspected = _inspect(Place(folder))
    if not inspected.facts:
        return f"cannot be read: {inspected.problems[0]}"
    root = inspected.facts["root"]
    if gone and root and not is_url(root) and not os.path.isdir(root):
        return f"{root} is not there"
    return ""


# The commands


def _add_storage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage-options",
        type=_json,
        metavar="FILE",
        help="JSON of fsspec's options for URLs, such as credentials, which must not stand in a "
        "command",
    )


def _json(text: str) -> dict[str, Any]:
    try:
        return {**json.loads(Path(text).read_text("utf-8"))}
    except (OSError, ValueError, TypeError) as problem:
        raise argparse.ArgumentTypeError(
            f'{text} holds no JSON object, such as {{"anon": true}}: {problem}'
        ) from None


def add_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("root", metavar="FOLDER", help="class folders of images")
    add("cache_dir", metavar="CACHE", help="folder that keeps caches")
    add(
        "--resize",
        type=positive,
        metavar="PX",
        help="length of the shorter side; default: as it is",
    )
    add(
        "--crop",
        dest="transform",
        type=side,
        metavar="PX",
        help="side of the square cut out of the centre; default: all",
    )
    add(
        "--codec",
        choices=("auto", "source", *KNOWN_CODECS),
        default="auto",
        help="default: auto, which is raw where the disk has room",
    )
    add(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do with a file that is no image; default: %(default)s",
    )
    add(
        "--prepare-workers",
        type=positive,
        metavar="N",
        help="processes; by default all usable cores",
    )
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="what prepares: this machine, or a Ray cluster (extra: ray); default: %(default)s",
    )
    add(
        "--shard-size",
        dest="shard_bytes",
        metavar="SIZE",
        help="write shards of this size to twice as much, such as 256MiB; a stopped build goes on "
        "after them",
    )
    _add_storage_options(parser)


def side(text: str) -> CenterCrop:
    """A square of so many pixels at the centre."""
    return CenterCrop((positive(text), positive(text)))


def build(options: argparse.Namespace) -> int:
    if not is_url(options.root):
        check_folder(options.root)
    with ImageFolder.build_cache(**vars(options)) as dataset:
        print(f"{counted(len(dataset), 'sample')}; {dataset.storage_plan.reason}")
    return 0


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", metavar="CACHE", help="a cache, or a folder that keeps caches")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every sample and mark damaged ones, which the next run prepares anew",
    )
    _add_storage_options(parser)
    add_json(parser)


def inspect(options: argparse.Namespace) -> int:
    """Show caches; the status is 1 if one is damaged."""
    caches = inspect_caches(options.cache, options.storage_options, verify=options.verify)
    for cache in caches:
        print(cache)
    keep({"caches": [cache._asdict() for cache in caches]}, options)
    return int(any(cache.problems for cache in caches))


def add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cache", metavar="CACHE", help="a cache, or a folder that keeps one")
    add("out", metavar="OUT", help="the folder to make")
    add("--to", choices=("webdataset", "folder"), required=True, help="what to write")
    add(
        "--image-format",
        choices=("png", "jpeg"),
        default="png",
        help="default: %(default)s, which is lossless",
    )
    add(
        "--quality",
        type=positive,
        default=95,
        metavar="N",
        help="1 to 100, of JPEG; default: %(default)s",
    )
    add(
        "--shard-size",
        default="256MiB",
        metavar="SIZE",
        help="most bytes of images in a tar; default: %(default)s",
    )
    _add_storage_options(parser)


def export(options: argparse.Namespace) -> int:
    count = export_cache(**vars(options))
    kind = options.image_format
    pixels = "the pixels of the cache" if kind == "png" else "pixels changed by lossy compression"
    print(f"{options.out}: {count:,} samples as {kind} files, {pixels}")
    return 0


def add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    parser.add_argument(
        "--gone", action="store_true", help="also caches of folders that are not there now"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")


def prune(options: argparse.Namespace) -> int:
    removals = prune_caches(options.cache, gone=options.gone, dry_run=options.dry_run)
    for removal in removals:
        print(f"{removal.path}: {removal.reason} ({format_bytes(removal.size_bytes)})")
    if not removals:
        print("nothing to remove: no leftovers, and each cache can be read")
        return 0
    size = format_bytes(sum(removal.size_bytes for removal in removals))
    print(f"{size} {'would be removed' if options.dry_run else 'removed'}")
    return 0
