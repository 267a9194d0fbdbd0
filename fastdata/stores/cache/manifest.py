"""The files of a cache. Read without trust: a cache comes from a disk, and maybe from somebody else.

A cache is a folder of

* shards: of each a file for each part of the samples, ``part0-<shard>.npy``, raw ones of one shape,
  an ordinary NumPy file (n, *shape); or ``part0-<shard>.bin``, encoded ones or raw ones of many
  shapes, end to end;
* ``index-<crc32>.npz``, small columns about them, see ``Manifest``;
* ``fastdata.json``, written last, with the CRC-32 of the index and a CRC-32 of itself.

Nothing is ever unpickled. A shard is named after what its samples are made from, so that its files
never change: a writer adds some and replaces ``fastdata.json`` by renaming. What is not named there
was left by a writer that died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import types
import typing
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from fastdata.errors import CacheError, RemoteError, counted
from fastdata.machine.memory import user_cache
from fastdata.machine.shared import ArrayBlock, SampleTable
from fastdata.pixels.images import SampleSpec
from fastdata.sources import ItemKeys
from fastdata.sources.remote import Place
from fastdata.stores.files import DiskFile, naming_full_disk
from fastdata.stores.mirror import Mirror, MirroredStore
from fastdata.stores.readers import DAMAGE_PREFIX, Decoder, DiskStore

MANIFEST = "fastdata.json"
FORMAT = "fastdata cache"
VERSION = 4
DAMAGED = (
    OSError,
    EOFError,
    KeyError,
    MemoryError,
    TypeError,
    ValueError,
    RecursionError,
    zipfile.BadZipFile,
)
"""What reading bytes raises that nobody has written: of memory, too, for an array of the size that
they claim."""
_SHARD_NAME = re.compile(r"[0-9a-f]{16}")
_MAX_DIMENSIONS = 8
_MOST_SAMPLE_BYTES = 1 << 36
"""Of an encoded sample, whose size nothing else tells."""
_MIRRORED_SHARE = 0.5
"""Of what is free on the disk, for mirrors where nobody says more."""

Columns = dict[str, Any]
"""Those of an index by name: arrays; of JSON what it says."""
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the samples, such as the image.

    Args:
        spec: of the samples as they are served.
        codec: settings of what encoded them; None if they are raw.
    """

    spec: SampleSpec
    codec: dict[str, Any] | None

    def __post_init__(self) -> None:
        dtype = np.dtype(self.spec.dtype)
        is_known = not dtype.hasobject and dtype.name == self.spec.dtype
        if not is_known or len(self.spec.shape or ()) > _MAX_DIMENSIONS:
            raise ValueError(f"samples of {self.spec} are not known")
        if self.codec is not None and not isinstance(self.codec.get("name"), str):
            raise ValueError(f"codec {self.codec!r} has no name")

    @property
    def is_table(self) -> bool:
        return self.codec is None and self.spec.is_dense


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A run of samples in files of their own.

    Args:
        name: a fingerprint of the samples, and of how they are prepared.
        rows: samples, those that were left out included.
        sizes: bytes of the file of each part; 0 where there is none, as all samples were left out.
    """

    name: str
    rows: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _SHARD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    row: int
    path: str | None
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a cache holds, and what it was made from: ``fastdata.json``.

    Rows are the samples of all shards, one after the other. An index has these columns:

    * ``rows``, int64 (count,), the row of each sample in the order of the source;
    * by row ``is_kept``, bool, False where the sample was left out, and of each part
      ``part0.sums``, uint64 (``stores.readers.checksum``); unless it is a table also
      ``part0.offsets`` and ``part0.sizes``, int64, in the file of its shard, and ``part0.shapes``,
      int32 (rows, dimensions);
    * where samples are files ``paths``, ``ends``, ``file_sizes`` and ``mtimes_ns``, see
      ``list_paths``;
    * unless they are a part, the targets of the rows that are kept, in their order:
      ``targets.number``, ``targets.tensor`` or ``targets.array``, or ``targets.json``, a list as
      text; of tuples ``targets.0.number`` and the like, one for each place, in order.

    Args:
        key: what the samples depend on besides their files.
        root: folder of the files when it was written.
        index_crc32: of the whole file.
        classes: number of each class, where classes have names.
        parts: of the samples.
        shards: of the samples.
        is_tuple: whether samples are tuples of parts.
        target_is_part: whether the last part is the target.
        keys: of items that are dicts.
        mask_places: where targets that are tuples have images, which are the last parts.
        skipped: the samples that were left out.
    """

    key: dict[str, str]
    root: str
    index_crc32: int = 0
    classes: dict[str, Any] | None = None
    parts: tuple[Part, ...]
    shards: tuple[Shard, ...]
    is_tuple: bool
    target_is_part: bool
    keys: ItemKeys | None = None
    mask_places: tuple[int, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parts) <= self.target_is_part + len(self.mask_places):
            raise ValueError(
                f"{len(self.parts)} parts are no samples, target_is_part={self.target_is_part}"
            )
        if not all(type(number) is int for number in (self.classes or {}).values()):
            raise ValueError("classes have no numbers")
        if any(len(shard.sizes) != len(self.parts) for shard in self.shards):
            raise ValueError(f"shards have no file for each of {counted(len(self.parts), 'part')}")

    @property
    def count(self) -> int:
        """Samples of the source, those that were left out included."""
        return sum(shard.rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        return sum(sum(shard.sizes) for shard in self.shards)

    @property
    def index_name(self) -> str:
        return _index_name(self.index_crc32)

    def first_rows(self) -> np.ndarray:
        """The first row of each shard, and the number of rows: int64 (shards + 1,)."""
        return np.cumsum([0, *(shard.rows for shard in self.shards)])

    def files(self, shard: Shard) -> dict[str, int]:
        """The names of a shard's files, and how many bytes they have."""
        parts = zip(self.parts, shard.sizes, strict=True)
        return {
            file_name(k, part, shard.name): size for k, (part, size) in enumerate(parts) if size
        }

    def file_sizes(self) -> dict[str, int]:
        return {name: size for shard in self.shards for name, size in self.files(shard).items()}

    def file_names(self) -> set[str]:
        return {MANIFEST, self.index_name, *self.file_sizes()}

    def write(self, place: Place, columns: Mapping[str, np.ndarray]) -> None:
        """Make this, with an index of these columns, what the cache in a folder holds, at once and for good."""
        index = pack_columns(columns)
        crc32 = zlib.crc32(index)
        document = {
            "format": FORMAT,
            "version": VERSION,
            **dataclasses.asdict(self),
            "index_crc32": crc32,
        }
        document["crc32"] = crc_of(document)
        with naming_full_disk(Path(place.url)):
            place.write(_index_name(crc32), index)
            _sync(place)
            place.write(MANIFEST, json.dumps(document, indent=1).encode())
            _sync(place)

    @classmethod
    def read(cls, home: Path | Place) -> Manifest:
        """Read and check the manifest of a cache; FileNotFoundError where there is none, CacheError where it is bad."""
        place = home if isinstance(home, Place) else Place(home)
        path = place.at(MANIFEST)
        try:
            document = json.loads(place.read(MANIFEST))
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise CacheError(f"{path} is no manifest of a fastdata cache")
            if document.get("version") != VERSION:
                raise CacheError(
                    f"{path} has version {document.get('version')!r}; this fastdata reads {VERSION}"
                )
            if document.pop("crc32", None) != crc_of(document):
                raise CacheError(
                    f"{path} was changed after it was written: its checksum does not fit"
                )
            manifest: Manifest = _typed(cls, document)
            return manifest
        except (FileNotFoundError, CacheError, RemoteError):
            raise
        except DAMAGED as problem:
            raise CacheError(
                f"{path} cannot be read: {type(problem).__name__}: {problem}"
            ) from problem


def _index_name(crc32: int) -> str:
    return f"index-{crc32:08x}.npz"


def file_name(number: int, part: Part, shard_name: str) -> str:
    return f"part{number}-{shard_name}{'.npy' if part.is_table else '.bin'}"


def crc_of(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as this type, dataclasses included; ValueError for another one, or a number that is no count."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(arguments[0], value)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind).items()
        return kind(**{name: _typed(hint, value[name]) for name, hint in hints if name in value})
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {name: _typed(arguments[1], item) for name, item in value.items()}
    if type(value) is not kind or (kind is int and not 0 <= value < 1 << 62):
        raise ValueError(f"{value!r} is in the place of {getattr(kind, '__name__', kind)}")
    return value


def _sync(place: Place) -> None:
    """See to it that the names of a folder's files are on the disk."""
    if os.name != "nt" and not place.is_remote:
        fd = os.open(place.url, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def orphans_in(folder: Path, belong: set[str]) -> list[Path]:
    """Files beside those that belong to a cache, and the marks of damaged ones of these; none behind a link."""
    if folder.is_symlink():
        return []
    belong = belong | {f"{DAMAGE_PREFIX}{name}" for name in belong}
    others = [path for path in folder.iterdir() if path.name not in belong]
    return [path for path in others if path.is_file() and not path.is_symlink()]


# Columns


def pack_columns(columns: Mapping[str, np.ndarray]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **columns)  # type: ignore[arg-type]  # of numbers, which are not pickled
    return stream.getvalue()


def json_column(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def unpack_columns(data: bytes) -> Columns:
    """The columns of an index or a receipt; one of ``DAMAGED`` for what is none."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in stored.zip.infolist()):
            raise ValueError("its columns are compressed, to whatever size")
        arrays = {name: np.asarray(column) for name, column in stored.items()}
    return {
        name: json.loads(it.tobytes()) if name.endswith(".json") else it
        for name, it in arrays.items()
    }


def _check(manifest: Manifest, columns: Columns) -> None:
    """Raise a ValueError for columns that do not fit each other or the sizes of the files."""
    count = manifest.count
    rows = _need(columns, "rows", "int64", count)
    if rows.max(initial=0) >= max(count, 1) or rows.min(initial=0) < 0:
        raise ValueError(f"it has {counted(count, 'row')}, but its samples reach to {rows.max()}")
    is_kept = _need(columns, "is_kept", "bool", count)
    for number in range(len(manifest.parts)):
        _check_part(manifest, number, columns, is_kept)
    if "paths" in columns:
        blob = _need(columns, "paths", "uint8", -1)
        ends, _, _ = (
            _need(columns, name, "int64", count) for name in ("ends", "file_sizes", "mtimes_ns")
        )
        if count and (ends[0] < 0 or ends[-1] != len(blob) or (np.diff(ends) < 0).any()):
            raise ValueError("file names overlap")
    targets = {name: column for name, column in columns.items() if name.startswith("targets.")}
    if not targets and not manifest.target_is_part:
        raise ValueError("it lacks the targets of its samples")
    for name, column in targets.items():
        _check_targets(name, column, int(is_kept.sum()))


def _need(columns: Columns, name: str, dtype: str, *shape: int) -> np.ndarray:
    """A column of this type and shape, of which -1 is any."""
    if name not in columns:
        raise ValueError(f"it lacks the {name} of its samples")
    column: np.ndarray = columns[name]
    wanted = tuple(
        size if want == -1 else want for want, size in zip(shape, column.shape, strict=False)
    )
    if column.dtype != np.dtype(dtype) or column.ndim != len(shape) or column.shape != wanted:
        raise ValueError(
            f"{name} are {column.dtype}{list(column.shape)} where {dtype}{list(shape)} are needed"
        )
    return column


def _check_part(manifest: Manifest, number: int, columns: Columns, is_kept: np.ndarray) -> None:
    part, count, name = manifest.parts[number], manifest.count, f"part{number}"
    _need(columns, f"{name}.sums", "uint64", count)
    rows = [shard.rows for shard in manifest.shards]
    file_bytes = np.repeat([shard.sizes[number] for shard in manifest.shards], rows)
    if part.is_table:
        is_wrong = file_bytes < np.repeat(rows, rows) * part.spec.sample_bytes
    else:
        offsets = _need(columns, f"{name}.offsets", "int64", count)
        sizes = _need(columns, f"{name}.sizes", "int64", count)
        shapes = _need(columns, f"{name}.shapes", "int32", count, -1)
        common = part.spec.shape
        if common is not None and (
            shapes.shape[1] != len(common) or (shapes[is_kept] != common).any()
        ):
            raise ValueError(f"{name} holds samples of other shapes than {list(common)}")
        is_wrong = (
            (offsets < 0) | (sizes < 0) | (offsets > file_bytes - sizes) | (shapes < 0).any(axis=1)
        )
        item_bytes = np.dtype(part.spec.dtype).itemsize
        sample_bytes = shapes.astype(np.float64).prod(axis=1) * item_bytes
        if part.codec is None:
            is_wrong |= (sample_bytes != sizes) | (offsets % item_bytes != 0)
        elif sample_bytes.max(initial=0) > _MOST_SAMPLE_BYTES:
            raise ValueError(f"{name} has a sample of {sample_bytes.max():,.0f} bytes, as none is")
    is_wrong = is_kept & (is_wrong | (file_bytes == 0))
    if is_wrong.any():
        raise ValueError(f"row {int(is_wrong.argmax())} of {name} does not lie within its file")


def _check_targets(name: str, column: Any, count: int) -> None:
    kind = name.rpartition(".")[2]
    if kind == "json":
        if not isinstance(column, list) or len(column) != count:
            raise ValueError(f"{name} holds no list of {count} targets")
        return
    if kind not in ("number", "tensor", "array"):
        raise ValueError(f"{name} are targets of no known kind")
    dtype = column.dtype
    is_number = dtype.kind in "iufb" and dtype.itemsize <= 8 and dtype.isnative
    if not is_number or column.shape[:1] != (count,):
        raise ValueError(
            f"targets are {dtype}{list(column.shape)} where numbers[{count}] are needed"
        )


def target_columns(table: SampleTable, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The targets of chosen samples as the column of an index.

    Raises:
        ValueError: they are neither numbers, arrays of one shape, plain values that JSON keeps, nor
            tuples of these.
    """
    if table.target_places:
        places = [target_columns(place, chosen) for place in table.target_places]
        return {
            name.replace(".", f".{i}.", 1): them
            for i, place in enumerate(places)
            for name, them in place.items()
        }
    array = table.target_array()
    if array is not None:
        return {f"targets.{table.target_kind}": array[chosen]}
    targets = [table.target(i) for i in chosen.tolist()]
    with contextlib.suppress(TypeError, ValueError):
        if repr(json.loads(json.dumps(targets))) == repr(targets):
            return {"targets.json": json_column(targets)}
    kinds = ", ".join(sorted({type(target).__name__ for target in targets}))
    raise ValueError(
        f"cache_dir= keeps targets that are numbers, arrays of one shape, texts, lists and dicts of these, or tuples "
        f"of one length, and not {kinds}. Give such targets from the dataset, and make what you need of them in "
        "target_transform=."
    )


def targets_of(columns: Mapping[str, Any], prefix: str = "targets.") -> Any:
    """Targets of the rows that are kept, in their order: numbers in one array, else a list."""
    mine = {
        name.removeprefix(prefix): value
        for name, value in columns.items()
        if name.startswith(prefix)
    }
    for kind in ("number", "json"):
        if kind in mine:
            return mine[kind]
    if "tensor" in mine:
        return list(torch.from_numpy(mine["tensor"]))
    if "array" in mine:
        return list(mine["array"])
    places = [
        targets_of(mine, f"{number}.")
        for number in dict.fromkeys(name.partition(".")[0] for name in mine)
    ]
    return list(zip(*map(_listed, places), strict=True))


def _listed(targets: Any) -> Any:
    return targets.tolist() if isinstance(targets, np.ndarray) else targets


# An open cache


class Mirroring(NamedTuple):
    """Where mirrors are, by default in the user's cache folder, and how many bytes all of them may take."""

    local_cache: str | os.PathLike[str] | None = None
    limit: int | float | str | None = None

    @property
    def folder(self) -> Path:
        return Path(self.local_cache or user_cache() / "remote").expanduser().absolute()

    def of(self, place: Place, manifest: Manifest) -> Mirror:
        """Raises CacheError where a file of the cache is missing or has another size."""
        there = {entry.name: entry for entry in place.find()}
        sizes = manifest.file_sizes()
        for name in (manifest.index_name, *sizes):
            found = there[name].size_bytes if name in there else 0
            if name not in there or found != sizes.get(name, found):
                raise CacheError(
                    f"{place.at(name)} has {found:,} bytes where {sizes.get(name, 1):,} were written"
                )
        files = [there[name] for name in (manifest.index_name, *sizes) if there[name].size_bytes]
        return Mirror(place, files, self.folder, self.limit or _MIRRORED_SHARE)


class Cache(NamedTuple):
    """What was read of a cache; ``mirror`` is of one behind a URL, where its files are opened."""

    place: Place
    manifest: Manifest
    columns: Columns
    mirror: Mirror | None = None

    def open_part(self, number: int, rows: np.ndarray, decoder: Decoder | None) -> DiskStore:
        """Map the files of a part as the store of the samples in these rows, int64 (N,).

        A file that is missing or has another size is a CacheError.
        """
        part, shards, columns = self.manifest.parts[number], self.manifest.shards, self.columns
        first_rows = self.manifest.first_rows()
        shards_N = np.searchsorted(first_rows, rows, side="right") - 1
        sizes = np.array([shard.sizes[number] for shard in shards])
        files_N = (np.cumsum(sizes > 0) - 1)[shards_N]
        index = {"files": files_N.astype(np.int32), "sums": columns[f"part{number}.sums"][rows]}
        if part.is_table:
            row_bytes = part.spec.sample_bytes
            heads = sizes - np.diff(first_rows) * row_bytes
            index["offsets"] = heads[shards_N] + (rows - first_rows[shards_N]) * row_bytes
        else:
            index |= {
                name: columns[f"part{number}.{name}"][rows]
                for name in ("offsets", "sizes", "shapes")
            }
        names = [file_name(number, part, shard.name) for shard in shards if shard.sizes[number]]
        if self.mirror is not None:
            return MirroredStore(names, part.spec, ArrayBlock(index), decoder, self.mirror)
        with contextlib.ExitStack() as cleanup:
            files = []
            for name, size in zip(names, sizes[sizes > 0].tolist(), strict=True):
                files.append(DiskFile.open(Path(self.place.url) / name, size))
                cleanup.callback(files[-1].close)
            store = DiskStore(files, part.spec, ArrayBlock(index), decoder)
            cleanup.pop_all()
        return store


def read_settled(
    home: Path | Place, use: Callable[[Cache], _Made], mirroring: Mirroring | None = None
) -> _Made:
    """Make something of a cache; once more where another process has meanwhile brought it up to date.

    Raises:
        FileNotFoundError: there is none.
        CacheError: it is damaged.
        RemoteError: it cannot be fetched.
    """
    place = home if isinstance(home, Place) else Place(home)
    while True:
        manifest = Manifest.read(place)
        try:
            mirror = (mirroring or Mirroring()).of(place, manifest) if place.is_remote else None
            return use(Cache(place, manifest, read_index(place, manifest, mirror), mirror))
        except CacheError:
            if Manifest.read(place) == manifest:
                raise


def read_index(place: Place, manifest: Manifest, mirror: Mirror | None = None) -> Columns:
    """Read all columns. Types, sizes and offsets are checked here, whatever they are used for later."""
    name = manifest.index_name
    path = place.at(name)
    try:
        data = place.read(name) if mirror is None else mirror.read(name)
        if mirror is not None and zlib.crc32(data) != manifest.index_crc32:
            data = mirror.read(name, again=True)
        if zlib.crc32(data) != manifest.index_crc32:
            raise CacheError(f"{path} is not what was written")
        columns = unpack_columns(data)
        _check(manifest, columns)
    except (CacheError, RemoteError):
        raise
    except (*DAMAGED, zlib.error) as problem:
        raise CacheError(f"{path} cannot be read: {problem}") from problem
    return columns
