"""A cache opened on its own, without the dataset that it was made from: nobody prepares or writes anything."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastdata.cache.coding import SOURCE
from fastdata.cache.folders import PARTIAL, REPLACED
from fastdata.cache.look import cache_folders
from fastdata.cache.manifest import Manifest, Part
from fastdata.cache.mapped import map_found
from fastdata.cache.recall import Recalled, read_listing, recall_all
from fastdata.cache.targets import read_classes
from fastdata.codecs import Codec, codec_of
from fastdata.errors import CacheError
from fastdata.preparation import Prepared
from fastdata.table import PackedPaths, SampleTable

__all__ = ["find_cache", "open_cache"]


def find_cache(path: str | os.PathLike[str]) -> Path:
    """The cache that a path means: its own folder, or a ``cache_dir`` that holds only this one.

    Raises:
        FileNotFoundError: there is no cache.
        CacheError: none of the caches there can be read.
        ValueError: there are several; says which.
    """
    home = Path(path).expanduser().absolute()
    folders = [folder for folder in cache_folders(home) if folder == home or folder.suffix not in (PARTIAL, REPLACED)]
    if folders == [home]:
        return home
    readable: list[Path] = []
    lines: list[str] = []
    for folder in folders:
        try:
            lines.append(f"{folder}: {_summary(Manifest.read(folder))}")
            readable.append(folder)
        except CacheError as damaged:
            lines.append(f"{folder}: cannot be read: {damaged}")
    if len(readable) == 1:
        return readable[0]
    listed = "".join(f"\n  {line}" for line in lines)
    if readable:
        raise ValueError(f"{home} holds {len(readable)} caches; give the folder of the one that you mean:{listed}")
    raise CacheError(f"{home} holds no cache that can be read; build it again:{listed}")


def _summary(manifest: Manifest) -> str:
    made_from, prepared = manifest.root or "a dataset", manifest.key.get("prepare") or "as they are"
    return f"{manifest.count:,} samples of {made_from}, prepared: {prepared}, codec: {manifest.key.get('codec')}"


def open_cache(folder: Path, *, as_tensors: bool = False) -> tuple[Prepared, Manifest]:
    """Map a cache and all that it knows of its samples; also gives its manifest.

    Args:
        folder: of the cache.
        as_tensors: give images as tensors of their stored pixels, not as PIL images.

    Raises:
        CacheError: it is damaged, or cannot be served without its dataset.
    """
    while True:
        manifest = Manifest.read(folder)
        try:
            return _mapped(folder, manifest, as_tensors), manifest
        except CacheError:
            if Manifest.read(folder) == manifest:
                raise
            # another process has brought it up to date meanwhile, and removed files that it replaced


def _mapped(folder: Path, manifest: Manifest, as_tensors: bool) -> Prepared:
    parts = tuple(map(_as_tensors, manifest.parts)) if as_tensors else manifest.parts
    found = recall_all(folder, replace(manifest, parts=parts))
    coders = tuple(_coder_of(folder, part) for part in parts)
    return map_found(found, coders, lambda kept: _table_of(found, kept))


def _as_tensors(part: Part) -> Part:
    return replace(part, spec=replace(part.spec, form="tensor")) if part.spec.form == "pil" else part


def _coder_of(folder: Path, part: Part) -> Codec | None:
    """What decodes a part, which only its settings are known of.

    Raises:
        CacheError: that is not enough.
    """
    if part.codec is None:
        return None
    if part.codec["name"] == SOURCE:
        raise CacheError(
            f"{folder} holds image files as they are, and what prepares them on every read is known to their dataset "
            f"alone; open that, with cache_dir={str(folder.parent)!r}, or build a cache with another codec"
        )
    try:
        return codec_of(part.codec)
    except ValueError as unknown:
        raise CacheError(
            f"{folder} cannot be opened on its own: {unknown}. A codec object of your own is known to the dataset that "
            f"the cache was made from: open that, with cache_dir={str(folder.parent)!r} and codec="
        ) from unknown


def _table_of(found: Recalled, kept: np.ndarray) -> SampleTable:
    folder, manifest = found.folder, found.manifest
    are_labelled_files = "paths" in manifest.arrays and not manifest.target_is_part
    paths = _paths_of(found, kept) if are_labelled_files else None
    return SampleTable(found.stored_targets(kept), paths=paths, class_to_idx=read_classes(folder, manifest))


def _paths_of(found: Recalled, kept: np.ndarray) -> PackedPaths:
    """The files' paths: below the folder that they were in then, those apart that were not in it."""
    packed = read_listing(found.folder, found.manifest).paths
    root = os.path.join(os.fsencode(found.manifest.root), b"")
    if len(kept) == len(packed) and not _any_absolute(packed):
        return replace(packed, prefix=root)
    names = packed.names()
    return PackedPaths.of([os.fsdecode(os.path.join(root, names[i])) for i in kept.tolist()])


def _any_absolute(packed: PackedPaths) -> bool:
    starts = np.concatenate([[0], packed.ends[:-1]]).astype(np.int64)
    return bool((packed.blob[starts[starts < len(packed.blob)]] == ord(os.sep)).any())
