"""``fastdata.json``: what a cache holds. Read without trust: a cache comes from a disk, and maybe from somebody else.

A cache is a folder of

* shards: ``part0-00000.npy``, raw samples of one shape, an ordinary NumPy file (n, *shape); or ``part0-00000.bin``,
  encoded samples or raw ones of many shapes, end to end;
* beside each shard ``-sums.npy``, the checksum of each row (see ``fastdata.stores.disk.checksum``), and beside a
  ``.bin`` also ``-offsets.npy``, ``-sizes.npy`` and ``-shapes.npy``;
* ``samples-00001-*.npy``: path, size and time of each file that was prepared, the row of its sample, the targets of
  those that were kept, and the names of their classes;
* ``fastdata.json``, written last, with the size and CRC-32 of every small file and a CRC-32 of itself.

Nothing is ever unpickled. Files never change: an update adds some and replaces ``fastdata.json`` by renaming.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fastdata.errors import CacheError
from fastdata.spec import Form, SampleSpec

__all__ = [
    "MANIFEST",
    "VERSION",
    "ArrayFile",
    "Manifest",
    "Part",
    "Shard",
    "is_written",
    "read_array",
    "sync_folder",
    "write_array",
    "write_columns",
]

MANIFEST = "fastdata.json"
FORMAT = "fastdata cache"
VERSION = 2
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TARGET_KIND = re.compile(r"number:([a-z]+[0-9]*):1|(?:tensor|array):([a-z]+[0-9]*):[1-8]")
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A small ``.npy`` file, read whole."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of samples, and the arrays that say where they lie in it.

    Args:
        name: of the file.
        size_bytes: of the file.
        rows: number of samples in it, those that are not in use any more included.
        arrays: ``sums``, and of a ``.bin`` file ``offsets``, ``sizes`` and ``shapes``.
    """

    name: str
    size_bytes: int
    rows: int
    arrays: dict[str, ArrayFile]

    @property
    def is_table(self) -> bool:
        """Whether it is a ``.npy`` file of rows of one shape."""
        return self.name.endswith(".npy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """All shards of one part of the samples.

    Args:
        name: ``part0`` of images, ``part1`` of what comes with them; its files' names begin with it.
        spec: of the samples as they are served.
        codec: settings of what encoded them; None if they are raw.
        shards: in the order of row numbers.
    """

    name: str
    spec: SampleSpec
    codec: dict[str, Any] | None
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        """Of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def next_shard(self) -> int:
        """A number that none of the shards has."""
        return max([int(Path(shard.name).stem.rpartition("-")[2]) + 1 for shard in self.shards], default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a cache holds, and what it was made from.

    Args:
        key: what the samples depend on besides their files; see ``fastdata.cache.keys``.
        root: folder of the files when it was written.
        generation: how often the cache was written; part of the names of ``arrays``.
        count: samples of the source, those that were left out included.
        arrays: ``rows``, int64 (parts, count), the row of each sample or -1; where samples are files ``paths``,
            ``ends``, ``file_sizes`` and ``mtimes_ns``; ``targets`` of the samples that have rows, in their order,
            unless the targets are a part; ``classes``, where classes have names, JSON of the number of each.
        target_kind: how ``targets`` are to be read: ``"json"``, a list; or ``"number:int64:1"`` and the like, what each
            is, dtype and dimensions; None if they are not kept here.
        parts: of the samples.
        is_tuple: whether samples are tuples of parts.
        target_is_part: whether the last part is the target.
        skipped: index, path and message of each sample that was left out.
    """

    key: dict[str, str]
    root: str
    generation: int
    count: int
    arrays: dict[str, ArrayFile]
    target_kind: str | None
    parts: tuple[Part, ...]
    is_tuple: bool
    target_is_part: bool
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.size_bytes for part in self.parts for shard in part.shards)

    def file_names(self) -> set[str]:
        """Names of all files that belong to the cache."""
        shards = [shard for part in self.parts for shard in part.shards]
        arrays = [*self.arrays.values(), *(array for shard in shards for array in shard.arrays.values())]
        return {MANIFEST, *(shard.name for shard in shards), *(array.name for array in arrays)}

    def write(self, folder: Path) -> None:
        """Put it in the place of the folder's manifest, all at once, when everything it names is on the disk."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        document["crc32"] = _crc_of(document)
        fresh = folder / f"{MANIFEST}.new"
        with fresh.open("w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, folder / MANIFEST)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a cache.

        Raises:
            FileNotFoundError: there is none.
            CacheError: it is damaged, or of a version that this one cannot read.
        """
        path = folder / MANIFEST
        try:
            document = json.loads(path.read_bytes())
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise CacheError(f"{path} is no manifest of a fastdata cache")
            if document.get("version") != VERSION:
                raise CacheError(f"{path} has version {document.get('version')!r}; this fastdata reads {VERSION}")
            crc = document.pop("crc32", None)
            if crc != _crc_of(document):
                raise CacheError(f"{path} was changed after it was written: its checksum does not fit")
            return _manifest_of(document)
        except (FileNotFoundError, CacheError):
            raise
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as problem:
            raise CacheError(f"{path} cannot be read: {type(problem).__name__}: {problem}") from problem


def _crc_of(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _manifest_of(document: dict[str, Any]) -> Manifest:
    parts = tuple(_part_of(_entries(part)) for part in document["parts"])
    key, target_kind, skipped = _entries(document["key"]), document["target_kind"], document["skipped"]
    is_tuple, target_is_part = document["is_tuple"], document["target_is_part"]
    if not parts or not all(isinstance(name, str) for item in key.items() for name in item):
        raise ValueError("it lacks parts or a key")
    if not isinstance(is_tuple, bool) or not isinstance(target_is_part, bool) or len(parts) <= target_is_part:
        raise ValueError(f"{len(parts)} parts are no samples, is_tuple={is_tuple!r}, target_is_part={target_is_part!r}")
    if target_kind not in (None, "json"):
        _check_target_kind(target_kind)
    if not isinstance(skipped, list) or not all(map(_is_skipped, skipped)):
        raise ValueError("its list of samples that were left out is none")
    return Manifest(
        key=dict(key),
        root=_text(document["root"]),
        generation=_whole(document["generation"]),
        count=_whole(document["count"]),
        arrays=_arrays_of(document),
        target_kind=target_kind,
        parts=parts,
        is_tuple=is_tuple,
        target_is_part=target_is_part,
        skipped=skipped,
    )


def _check_target_kind(kind: Any) -> None:
    found = _TARGET_KIND.fullmatch(kind) if isinstance(kind, str) else None
    if found is None or np.dtype(found[1] or found[2]).kind not in "iufb":
        raise ValueError(f"targets of kind {kind!r} are not known")


def _is_skipped(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("message"), str):
        return False
    index, path = entry.get("index"), entry.get("path", 0)
    return isinstance(index, int) and index >= 0 and (path is None or isinstance(path, str))


def _part_of(entry: dict[str, Any]) -> Part:
    shape, form = entry["spec"]["shape"], entry["spec"]["form"]
    dtype = np.dtype(_text(entry["spec"]["dtype"]))
    if form not in get_args(Form) or dtype.hasobject:
        raise ValueError(f"samples of {dtype} in form {form!r} are not known")
    if shape is not None and len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"samples of {len(shape)} dimensions are not known")
    spec = SampleSpec(shape=None if shape is None else tuple(map(_whole, shape)), dtype=dtype.name, form=form)
    codec = entry["codec"]
    if codec is not None and not isinstance(_entries(codec).get("name"), str):
        raise ValueError(f"codec {codec!r} has no name")
    shards = tuple(_shard_of(_entries(shard)) for shard in entry["shards"])
    return Part(name=_plain(entry["name"]), spec=spec, codec=codec, shards=shards)


def _shard_of(entry: dict[str, Any]) -> Shard:
    arrays = _arrays_of(entry)
    size_bytes, rows = _whole(entry["size_bytes"]), _whole(entry["rows"])
    return Shard(name=_plain(entry["name"]), size_bytes=size_bytes, rows=rows, arrays=arrays)


def _arrays_of(entry: dict[str, Any]) -> dict[str, ArrayFile]:
    return {name: _array_of(_entries(array)) for name, array in _entries(entry["arrays"]).items()}


def _array_of(entry: dict[str, Any]) -> ArrayFile:
    return ArrayFile(_plain(entry["name"]), _whole(entry["size_bytes"]), _whole(entry["crc32"]))


def _entries(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} is in the place of an object")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} is in the place of a text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return value


def _plain(name: Any) -> str:
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no plain file name")
    return name


def write_array(folder: Path, name: str, array: np.ndarray) -> ArrayFile:
    """Write a small ``.npy`` file through to the disk."""
    data = _encoded(array)
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return ArrayFile(name, data.nbytes, zlib.crc32(data))


def _encoded(array: np.ndarray) -> memoryview:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return stream.getbuffer()


def write_columns(folder: Path, generation: int, columns: Mapping[str, np.ndarray]) -> dict[str, ArrayFile]:
    """Write arrays of a manifest of this generation."""
    arrays = {
        name: write_array(folder, f"samples-{generation:05}-{name}.npy", column) for name, column in columns.items()
    }
    sync_folder(folder)
    return arrays


def is_written(folder: Path, file: ArrayFile | None, array: np.ndarray | None) -> bool:
    """Whether a file holds just this array; None is no file."""
    if file is None or array is None:
        return file is None and array is None
    try:
        return (folder / file.name).read_bytes() == _encoded(array).tobytes()
    except OSError:
        return False


def read_array(folder: Path, file: ArrayFile, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read a small ``.npy`` file whole, and hold it against what was written.

    Args:
        folder: of the cache.
        file: what was written.
        dtype: what it must hold.
        shape: what it must hold; -1 for a length that is not known.

    Raises:
        CacheError: it is missing, damaged, or holds something else.
    """
    path = folder / file.name
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise CacheError(f"{path} cannot be read ({problem.strerror})") from problem
    if len(data) != file.size_bytes or zlib.crc32(data) != file.crc32:
        raise CacheError(f"{path} is not what was written ({len(data):,} bytes, {file.size_bytes:,} written)")
    try:
        array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError) as problem:
        raise CacheError(f"{path} is no array: {problem}") from problem
    fits = len(array.shape) == len(shape) and all(
        want in (-1, is_) for want, is_ in zip(shape, array.shape, strict=True)
    )
    if array.dtype != np.dtype(dtype) or not fits:
        raise CacheError(f"{path} holds {array.dtype}{list(array.shape)} where {dtype}{list(shape)} is needed")
    return array


def sync_folder(folder: Path) -> None:
    """Write the folder's own entries through to the disk, where the platform can."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
