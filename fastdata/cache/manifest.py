"""The files of a cache. Read without trust: a cache comes from a disk, and maybe from somebody else.

A cache is a folder of

* samples: ``part0-00000.npy``, raw ones of one shape, an ordinary NumPy file (n, *shape); or ``part0-00000.bin``,
  encoded ones or raw ones of many shapes, end to end;
* ``index-00000.npz``, small columns about them, see ``Manifest``;
* ``fastdata.json``, written last, with the CRC-32 of the index and a CRC-32 of itself.

Nothing is ever unpickled. Files never change: a writer adds some, under the next number, and replaces
``fastdata.json`` by renaming. What is not named there is a leftover of a writer that died.
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
from fastdata.images import SampleSpec
from fastdata.memory import user_cache
from fastdata.remote import Place
from fastdata.shared import ArrayBlock, SampleTable
from fastdata.sources import ItemKeys
from fastdata.stores.files import DiskFile, naming_full_disk
from fastdata.stores.mirror import Mirror, MirroredStore
from fastdata.stores.readers import DAMAGE_PREFIX, Decoder, DiskStore

MANIFEST = "fastdata.json"
FORMAT = "fastdata cache"
VERSION = 3
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_DIMENSIONS = 8
_MOST_SAMPLE_BYTES = 1 << 36
"""Of an encoded sample, whose size nothing else tells."""
_DAMAGED = (OSError, EOFError, KeyError, MemoryError, TypeError, ValueError, RecursionError)
"""What reading bytes raises that nobody has written: of memory, too, for an array of the size that they claim."""

_Made = TypeVar("_Made")


class Columns(dict[str, np.ndarray]):
    """Those of an index, by name; ``texts`` are what those of JSON say, which takes long to parse.

    ``mirror`` is of a cache behind a URL, where its files are opened.
    """

    texts: Mapping[str, Any] = types.MappingProxyType({})
    mirror: Mirror | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFile:
    """One file of samples; ``rows`` are all in it, those that are not in use any more included."""

    name: str
    size_bytes: int
    rows: int

    def __post_init__(self) -> None:
        if not _PLAIN_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no plain file name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """All files of one part of the samples.

    Args:
        name: ``part0`` of images, ``part1`` of what comes with them; its files' names begin with it.
        spec: of the samples as they are served.
        codec: settings of what encoded them; None if they are raw.
        files: in the order of row numbers; one, and one more for each time that some samples were prepared anew.
    """

    name: str
    spec: SampleSpec
    codec: dict[str, Any] | None
    files: tuple[SampleFile, ...]

    def __post_init__(self) -> None:
        dtype = np.dtype(self.spec.dtype)
        if dtype.hasobject or dtype.name != self.spec.dtype or len(self.spec.shape or ()) > _MAX_DIMENSIONS:
            raise ValueError(f"samples of {self.spec} are not known")
        if self.codec is not None and not isinstance(self.codec.get("name"), str):
            raise ValueError(f"codec {self.codec!r} has no name")

    @property
    def is_table(self) -> bool:
        return self.codec is None and self.spec.is_dense

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    index: int
    path: str | None
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a cache holds, and what it was made from: ``fastdata.json``.

    An index has these columns:

    * ``rows``, int64 (parts, count), the row of each sample in each part, or -1 where it was left out;
    * of each part, by row, ``part0.sums``, uint64 (``stores.readers.checksum``), and unless it is a table also
      ``part0.offsets`` and ``part0.sizes``, int64, and ``part0.shapes``, int32 (rows, dimensions);
    * where samples are files ``paths``, ``ends``, ``file_sizes`` and ``mtimes_ns``, see ``list_paths``;
    * unless they are a part or belong to nothing, the targets of the samples that have rows, in their order:
      ``targets.number``, ``targets.tensor`` or ``targets.array``, or ``targets.json``, a list as text; of tuples
      ``targets.0.number`` and the like, one for each place, in order.

    Args:
        key: what the samples depend on besides their files.
        root: folder of the files when it was written.
        generation: how often the cache was written before; part of the names of its files.
        count: samples of the source, those that were left out included.
        index_crc32: of the whole file.
        classes: number of each class, where classes have names.
        parts: of the samples.
        is_tuple: whether samples are tuples of parts.
        target_is_part: whether the last part is the target.
        keys: of items that are dicts.
        mask_places: where targets that are tuples have images, which are the last parts.
        skipped: the samples that were left out.
    """

    key: dict[str, str]
    root: str
    generation: int
    count: int
    index_crc32: int = 0
    classes: dict[str, Any] | None = None
    parts: tuple[Part, ...]
    is_tuple: bool
    target_is_part: bool
    keys: ItemKeys | None = None
    mask_places: tuple[int, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parts) <= self.target_is_part + len(self.mask_places):
            raise ValueError(f"{len(self.parts)} parts are no samples, target_is_part={self.target_is_part}")
        if not all(type(number) is int for number in (self.classes or {}).values()):
            raise ValueError("classes have no numbers")

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def index_name(self) -> str:
        return f"index-{self.generation:05}.npz"

    def file_names(self) -> set[str]:
        return {MANIFEST, self.index_name, *(file.name for part in self.parts for file in part.files)}

    def write(self, place: Place, columns: Mapping[str, np.ndarray]) -> None:
        """Make this, with an index of these columns, what the cache in a folder holds, at once and for good."""
        stream = io.BytesIO()
        np.savez(stream, **columns)  # type: ignore[arg-type]  # of numbers, which are not pickled
        crc32 = zlib.crc32(stream.getbuffer())
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self), "index_crc32": crc32}
        document["crc32"] = _crc_of(document)
        with naming_full_disk(Path(place.url)):
            place.write(self.index_name, stream.getbuffer())
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
                raise CacheError(f"{path} has version {document.get('version')!r}; this fastdata reads {VERSION}")
            if document.pop("crc32", None) != _crc_of(document):
                raise CacheError(f"{path} was changed after it was written: its checksum does not fit")
            manifest: Manifest = _typed(cls, document)
            return manifest
        except (FileNotFoundError, CacheError, RemoteError):
            raise
        except _DAMAGED as problem:
            raise CacheError(f"{path} cannot be read: {type(problem).__name__}: {problem}") from problem


def _crc_of(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as this type, dataclasses included; ValueError for another one, or a number that is no count."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(arguments[0], value)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind).items()  # what has come since is not in caches that were written before
        return kind(**{name: _typed(hint, value[name]) for name, hint in hints if name in value})
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {name: _typed(arguments[1], item) for name, item in value.items()}
    if type(value) is not kind or (kind is int and not 0 <= value < 1 << 62):
        raise ValueError(f"{value!r} is in the place of {getattr(kind, '__name__', kind)}")
    return value


def strays_in(folder: Path, belong: set[str]) -> list[Path]:
    """Files of a cache beside those that belong to it, and the marks of damaged rows of these; none behind a link."""
    if folder.is_symlink():
        return []
    marks = {path for path, name, _ in marks_in(folder) if name in belong}
    others = [path for path in folder.iterdir() if path.name not in belong and path not in marks]
    return [path for path in others if path.is_file() and not path.is_symlink()]


def marks_in(folder: Path) -> list[tuple[Path, str, int]]:
    """The marks of damaged rows: each with the file of samples and the row in it that it names."""
    paths = sorted(folder.glob(f"{DAMAGE_PREFIX}*"))
    names = [path.name.removeprefix(DAMAGE_PREFIX).rpartition("-") for path in paths]
    return [
        (path, name, int(row) if row.isdecimal() else -1) for path, (name, _, row) in zip(paths, names, strict=True)
    ]


def _sync(place: Place) -> None:
    """See to it that the names of a folder's files are on the disk."""
    if os.name != "nt" and not place.is_remote:
        fd = os.open(place.url, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


_USUAL_SHARE = 0.5
"""Of what is free on the disk, for mirrors where nobody says more."""


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
        needed = {file.name: file.size_bytes for part in manifest.parts for file in part.files}
        for name in (manifest.index_name, *needed):
            if name not in there or there[name].size_bytes != needed.get(name, there[name].size_bytes):
                size = there[name].size_bytes if name in there else 0
                raise CacheError(f"{place.at(name)} has {size:,} bytes where {needed.get(name, 1):,} were written")
        files = [there[name] for name in (manifest.index_name, *needed) if there[name].size_bytes]
        return Mirror(place, files, self.folder, self.limit or _USUAL_SHARE)


def read_settled(
    home: Path | Place, use: Callable[[Manifest, Columns], _Made], mirroring: Mirroring | None = None
) -> _Made:
    """Make something of a cache; once more where another process has meanwhile brought it up to date.

    Raises:
        FileNotFoundError: there is none.
        CacheError: it is damaged.
        RemoteError: it cannot be fetched.
    """
    while True:
        manifest = Manifest.read(home)
        try:
            if isinstance(home, Place) and home.is_remote:
                return use(manifest, read_index((mirroring or Mirroring()).of(home, manifest), manifest))
            return use(manifest, read_index(home, manifest))
        except CacheError:
            if Manifest.read(home) == manifest:
                raise


def read_index(home: Path | Place | Mirror, manifest: Manifest) -> Columns:
    """Read all columns. Types, sizes and offsets are checked here, whatever they are used for later."""
    mirror, name = (home if isinstance(home, Mirror) else None), manifest.index_name
    place = Place(home) if isinstance(home, Path) else home
    path = place.at(name)
    try:
        data = place.read(name)
        if mirror is not None and zlib.crc32(data) != manifest.index_crc32:
            data = mirror.read(name, again=True)
        if zlib.crc32(data) != manifest.index_crc32:
            raise CacheError(f"{path} is not what was written")
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in stored.zip.infolist()):
                raise ValueError("its columns are compressed, to whatever size")
            columns = Columns((name, np.asarray(column)) for name, column in stored.items())
        texts = {name: json.loads(column.tobytes()) for name, column in columns.items() if name.endswith(".json")}
        columns.texts, columns.mirror = texts, mirror
        _check(manifest, columns)
    except (CacheError, RemoteError):
        raise
    except (*_DAMAGED, zipfile.BadZipFile, zlib.error) as problem:
        raise CacheError(f"{path} cannot be read: {problem}") from problem
    return columns


def _check(manifest: Manifest, columns: Columns) -> None:
    """Raise a ValueError for columns that do not fit each other or the sizes of the files."""

    def need(name: str, dtype: str, *shape: int) -> np.ndarray:
        if name not in columns:
            raise ValueError(f"it lacks the {name} of its samples")
        column = columns[name]
        wanted = tuple(size if want == -1 else want for want, size in zip(shape, column.shape, strict=False))
        if column.dtype != np.dtype(dtype) or column.ndim != len(shape) or column.shape != wanted:
            raise ValueError(f"{name} are {column.dtype}{list(column.shape)} where {dtype}{list(shape)} are needed")
        return column

    rows = need("rows", "int64", len(manifest.parts), manifest.count)
    if ((rows < 0) != (rows[0] < 0)).any():
        raise ValueError("samples have rows in some parts only")
    for part, part_rows in zip(manifest.parts, rows, strict=True):
        if part_rows.max(initial=-1) >= part.rows:
            raise ValueError(f"{part.name} has {counted(part.rows, 'row')}, but its samples reach to {part_rows.max()}")
        need(f"{part.name}.sums", "uint64", part.rows)
        if part.is_table:
            misfits = [file for file in part.files if file.size_bytes < file.rows * part.spec.sample_bytes]
            if misfits:
                raise ValueError(f"{misfits[0].size_bytes:,} bytes do not hold the {misfits[0].rows} rows of a table")
            continue
        offsets, sizes = (need(f"{part.name}.{name}", "int64", part.rows) for name in ("offsets", "sizes"))
        shapes, common = need(f"{part.name}.shapes", "int32", part.rows, -1), part.spec.shape
        if common is not None and (shapes.shape[1] != len(common) or (shapes != np.array(common, np.int64)).any()):
            raise ValueError(f"{part.name} holds samples of other shapes than {list(common)}")
        file_bytes = np.repeat([file.size_bytes for file in part.files], [file.rows for file in part.files])
        is_wrong = (offsets < 0) | (sizes < 0) | (offsets > file_bytes - sizes) | (shapes < 0).any(axis=1)
        item_bytes = np.dtype(part.spec.dtype).itemsize
        sample_bytes = shapes.astype(np.float64).prod(axis=1) * item_bytes
        if part.codec is None:
            is_wrong |= sample_bytes != sizes
            is_wrong |= offsets % item_bytes != 0
        elif sample_bytes.max(initial=0) > _MOST_SAMPLE_BYTES:
            raise ValueError(f"{part.name} has a sample of {sample_bytes.max():,.0f} bytes, as none is")
        if is_wrong.any():
            raise ValueError(f"row {int(is_wrong.argmax())} of {part.name} does not lie within its file")
    if "paths" in columns:
        blob = need("paths", "uint8", -1)
        ends, _, _ = (need(name, "int64", manifest.count) for name in ("ends", "file_sizes", "mtimes_ns"))
        if len(ends) and (ends[0] < 0 or ends[-1] != len(blob) or (np.diff(ends) < 0).any()):
            raise ValueError("file names overlap")
    kept = int((rows[0] >= 0).sum())
    targets = {name: column for name, column in columns.items() if name.startswith("targets.")}
    if not targets and not manifest.target_is_part:
        raise ValueError("it lacks the targets of its samples")
    for name, column in targets.items():
        kind, dtype = name.rpartition(".")[2], column.dtype
        if kind == "json":
            texts = columns.texts[name]
            if not isinstance(texts, list) or len(texts) != kept:
                raise ValueError(f"{name} holds no list of {kept} targets")
        elif kind not in ("number", "tensor", "array"):
            raise ValueError(f"{name} are targets of no known kind")
        elif dtype.kind not in "iufb" or dtype.itemsize > 8 or not dtype.isnative or column.shape[:1] != (kept,):
            raise ValueError(f"targets are {dtype}{list(column.shape)} where numbers[{kept}] are needed")


def target_columns(table: SampleTable, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The targets of chosen samples as the column of an index.

    Raises:
        ValueError: they are neither numbers, arrays of one shape, plain values that JSON keeps, nor tuples of these.
    """
    if table.target_places:
        places = [target_columns(place, chosen) for place in table.target_places]
        return {name.replace(".", f".{i}.", 1): them for i, place in enumerate(places) for name, them in place.items()}
    array = table.target_array()
    if array is not None:
        return {f"targets.{table.target_kind}": array[chosen]}
    targets = [table.target(i) for i in chosen.tolist()]
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(targets)
        if repr(json.loads(text)) == repr(targets):
            return {"targets.json": np.frombuffer(text.encode(), np.uint8)}
    kinds = ", ".join(sorted({type(target).__name__ for target in targets}))
    raise ValueError(
        f"cache_dir= keeps targets that are numbers, arrays of one shape, texts, lists and dicts of these, or tuples "
        f"of one length, and not {kinds}. Give such targets from the dataset, and make what you need of them in "
        "target_transform=."
    )


def targets_of(columns: Columns) -> Any:
    """Targets of the samples that were kept, in their order: numbers in one array, else a list."""
    return _targets_of({**columns, **columns.texts}, "targets.")


def _targets_of(values: Mapping[str, Any], prefix: str) -> Any:
    mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    for kind in ("number", "json"):
        if kind in mine:
            return mine[kind]
    if "tensor" in mine:
        return list(torch.from_numpy(mine["tensor"]))
    if "array" in mine:
        return list(mine["array"])
    places = [_targets_of(mine, f"{number}.") for number in dict.fromkeys(name.partition(".")[0] for name in mine)]
    return list(zip(*(them.tolist() if isinstance(them, np.ndarray) else them for them in places), strict=True))


def open_part(folder: Path, part: Part, columns: Columns, rows: np.ndarray, decoder: Decoder | None) -> DiskStore:
    """Map the files of a part as the store of the samples in these rows, int64 (N,), counted over all files.

    They are in a folder, or in the mirror of the columns. Columns are checked; a file that is missing or has another
    size is a CacheError.
    """
    firsts = np.cumsum([0, *(file.rows for file in part.files)])
    numbers = np.searchsorted(firsts, rows, side="right") - 1
    index = {
        "files": numbers.astype(np.int32),
        "rows": rows - firsts[numbers],
        "sums": columns[f"{part.name}.sums"][rows],
    }
    if part.is_table:
        row_bytes = part.spec.sample_bytes
        heads = np.array([file.size_bytes - file.rows * row_bytes for file in part.files])
        index["offsets"] = heads[numbers] + index["rows"] * row_bytes
    else:
        index |= {name: columns[f"{part.name}.{name}"][rows] for name in ("offsets", "sizes", "shapes")}
    if columns.mirror is not None:
        names = [file.name for file in part.files]
        return MirroredStore(names, part.spec, ArrayBlock(index), decoder, columns.mirror)
    with contextlib.ExitStack() as cleanup:
        files = []
        for file in part.files:
            files.append(DiskFile.open(folder / file.name, file.size_bytes))
            cleanup.callback(files[-1].close)
        store = DiskStore(files, part.spec, ArrayBlock(index), decoder)
        cleanup.pop_all()
    return store
