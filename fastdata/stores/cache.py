"""The files of a cache, read without trust: they come from a disk, maybe from somebody else.

A cache is a folder of

* shards: of each a file for each part of the samples, ``part0-<shard>.npy`` (raw samples of one
  shape, an ordinary NumPy file (n, *shape)) or ``part0-<shard>.bin`` (all others, end to end), and
  its receipt ``shard-<shard>.npz``, which says what is in them;
* ``index-<crc32>.npz``, columns about all samples, see ``Manifest``;
* ``fastdata.json``, written last, with the CRC-32 of the index and a CRC-32 of itself.

Nothing is ever unpickled. A shard is named after what its samples are made from, so that its files
never change: a writer adds some and replaces ``fastdata.json`` by renaming. A shard without a
receipt is not complete, or was found damaged: the next build writes it again.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from fastdata.errors import CacheError, RemoteError, SampleError
from fastdata.machine.memory import StoragePlan, format_bytes, user_cache
from fastdata.machine.shared import ArrayBlock, SampleTable
from fastdata.pixels.images import SampleSpec
from fastdata.report import log
from fastdata.sources import ItemKeys
from fastdata.sources.remote import Place
from fastdata.stores.codecs import codec_of
from fastdata.stores.mirror import Mirror, MirroredStore, in_segments
from fastdata.stores.prepare import Prepared
from fastdata.stores.readers import Decoder, DiskFile, DiskStore, naming_full_disk, receipt_name
from fastdata.stores.samples import SOURCE, KeptSamples
from fastdata.stores.writers import open_all

MANIFEST = "fastdata.json"
FORMAT = "fastdata cache"
VERSION = 7
DAMAGED = (
    OSError,
    EOFError,
    LookupError,
    MemoryError,
    OverflowError,
    AttributeError,
    TypeError,
    ValueError,
    RecursionError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading foreign bytes raises; MemoryError for an array of the size that they claim."""
_MOST_SAMPLE_BYTES = 1 << 36
_MOST = 1 << 62
_MIRRORED_SHARE = 0.5
"""Of what is free on the disk, for mirrors."""

Columns = dict[str, Any]
"""Those of an index by name: arrays; of JSON what it says."""
LocalCache = str | os.PathLike[str] | None
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the samples, such as the image.

    Args:
        spec: of the samples as they are served.
        dimensions: of their shapes.
        codec: settings of what encoded them; None if they are raw.
    """

    spec: SampleSpec
    dimensions: int
    codec: dict[str, Any] | None

    def __post_init__(self) -> None:
        dtype = np.dtype(self.spec.dtype)
        if dtype.hasobject or dtype.name != self.spec.dtype:
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
        if not re.fullmatch(r"[0-9a-f]{16}", self.name):
            raise ValueError(f"{self.name!r} is no name of a shard")
        if min(self.rows, *self.sizes) < 0:
            raise ValueError(f"{self} has less than nothing")

    def files(self, parts: Sequence[Part]) -> list[str]:
        """The name of the file of each part."""
        endings = [".npy" if part.is_table else ".bin" for part in parts]
        return [f"part{number}-{self.name}{ending}" for number, ending in enumerate(endings)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A sample that was left out; ``row`` is its index in the source."""

    row: int
    path: str | None
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a cache holds, and what it was made from: ``fastdata.json``.

    Rows are the samples of all shards in the order of the source. An index has these columns:

    * of each part, by sample that was kept, ``part0.sums``, uint64 (``stores.readers.checksum``),
      and ``part0.offsets``, int64, in the file of its shard; unless it is a table also
      ``part0.sizes``, int64, and ``part0.shapes``, int32 (kept, dimensions);
    * where samples are files, by row ``paths`` and ``ends``, see ``PackedPaths``;
    * unless they are a part, the targets of the samples that were kept, see ``pack_targets``.

    Args:
        key: what the samples depend on besides their files.
        root: folder of the files when it was written.
        content: a fingerprint of the files, or the number of samples where these are none.
        index_crc32: of the whole file.
        classes: number of each class, where classes have names.
        parts: of the samples.
        shard_rows: about how many samples a shard has.
        shards: of the samples.
        is_tuple: whether samples are tuples of parts.
        target_is_part: whether the last part is the target.
        keys: of items that are dicts.
        mask_places: where targets that are tuples have images, which are the last parts.
        skipped: the samples that were left out, by row.
    """

    key: dict[str, str]
    root: str
    content: str = ""
    index_crc32: int = 0
    classes: dict[str, int] | None = None
    parts: tuple[Part, ...]
    shard_rows: int
    shards: tuple[Shard, ...] = ()
    is_tuple: bool
    target_is_part: bool
    keys: ItemKeys | None = None
    mask_places: tuple[int, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def __post_init__(self) -> None:
        keys = self.keys
        rows = [entry.row for entry in self.skipped]
        names = {shard.name for shard in self.shards}
        wrong = {
            "parts": len(self.parts) <= self.target_is_part + len(self.mask_places),
            "shards": len(names) < len(self.shards)
            or any(len(shard.sizes) != len(self.parts) for shard in self.shards),
            "keys": keys and (keys.image not in keys.names or len({*keys.names}) < len(keys.names)),
            "skipped": rows != sorted({*rows}) or not all(0 <= row < self.count for row in rows),
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"its {name} do not fit: {getattr(self, name)}")

    @property
    def count(self) -> int:
        """Samples of the source, those that were left out included."""
        return sum(shard.rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        return sum(sum(shard.sizes) for shard in self.shards)

    @property
    def index_name(self) -> str:
        return f"index-{self.index_crc32:08x}.npz"

    def files_of(self, number: int) -> dict[str, int]:
        """The names of the files of a part, and how many bytes they have."""
        return {
            shard.files(self.parts)[number]: shard.sizes[number]
            for shard in self.shards
            if shard.sizes[number]
        }

    def receipts(self) -> set[str]:
        return {receipt_name(shard.name) for shard in self.shards}

    def file_names(self) -> set[str]:
        parts = map(self.files_of, range(len(self.parts)))
        return {MANIFEST, self.index_name}.union(self.receipts(), *parts)

    def write(self, place: Place, columns: Columns) -> None:
        """Make this, with an index of these columns, what a cache holds, at once and for good."""
        index = pack_columns(columns)
        manifest = replace(self, index_crc32=zlib.crc32(index))
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
        document["crc32"] = _crc_of(document)
        with naming_full_disk(Path(place.url)):
            place.write(manifest.index_name, index)
            place.write(MANIFEST, json.dumps(document, indent=1).encode())

    @classmethod
    def read(cls, place: Place) -> Manifest:
        """Read and check a manifest.

        Raises:
            FileNotFoundError: there is none.
            CacheError: it is damaged, or of another version.
        """
        path = place.at(MANIFEST)
        with _naming_damage(path):
            document = json.loads(place.read(MANIFEST))
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise CacheError(f"{path} is no manifest of a fastdata cache")
            version = document.get("version")
            if version != VERSION:
                raise CacheError(f"{path} has version {version!r}; this fastdata reads {VERSION}")
            if document.pop("crc32", None) != _crc_of(document):
                raise CacheError(
                    f"{path} was changed after it was written: its checksum does not fit"
                )
            del document["format"], document["version"]
            manifest: Manifest = _typed(cls, document)
            return manifest


def _crc_of(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


@contextlib.contextmanager
def _naming_damage(path: str, *, if_missing: bool = False) -> Iterator[None]:
    """Make a CacheError of whatever is wrong with a file."""
    try:
        yield
    except (CacheError, RemoteError):
        raise
    except DAMAGED as problem:
        if isinstance(problem, FileNotFoundError) and not if_missing:
            raise
        what = f"{type(problem).__name__}: {problem}"
        raise CacheError(f"{path} cannot be read: {what}") from problem


def _typed(kind: Any, value: Any) -> Any:
    """A value of JSON as this type, dataclasses included; one of ``DAMAGED`` for any other."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any or (origin is Literal and value in arguments):
        return value
    if types.NoneType in arguments:
        return None if value is None else _typed(arguments[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {name: _typed(arguments[1], item) for name, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        fields = {name: _typed(hints[name], item) for name, item in value.items()}
        return typing.cast(Any, kind)(**fields)
    if type(value) is not kind or (kind is int and abs(value) >= _MOST):
        raise ValueError(f"{value!r} is in the place of {getattr(kind, '__name__', kind)}")
    return value


# Columns


def pack_columns(columns: Mapping[str, Any]) -> bytes:
    """Arrays as they are, without pickle; what is none as JSON, under a name that ends so."""
    stream = io.BytesIO()
    arrays = {
        name: column
        if isinstance(column, np.ndarray)
        else np.frombuffer(json.dumps(column).encode(), np.uint8)
        for name, column in columns.items()
    }
    np.savez(stream, **arrays)  # type: ignore[arg-type]  # of numbers, which are not pickled
    return stream.getvalue()


def unpack_columns(data: bytes) -> Columns:
    """The columns of an index or a receipt; one of ``DAMAGED`` for what is none."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in stored.zip.infolist()):
            raise ValueError("its columns are compressed, to whatever size")
        columns: Columns = dict(stored.items())
    for name, column in columns.items():
        if name.endswith(".json"):
            columns[name] = json.loads(column.tobytes())
    return columns


def column_of(columns: Columns, name: str, dtype: str, *shape: int) -> np.ndarray:
    """A column of this type and shape; ValueError for another one."""
    if name not in columns:
        raise ValueError(f"it lacks the {name} of its samples")
    column: np.ndarray = columns[name]
    if column.dtype != np.dtype(dtype) or column.shape != shape:
        found = f"{column.dtype}{list(column.shape)}"
        raise ValueError(f"{name} are {found} where {dtype}{list(shape)} are needed")
    return column


_KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "number": lambda column: column,
    "tensor": lambda column: list(torch.from_numpy(column)),
    "array": list,
}
"""Of targets that are a column of numbers: what it stands for."""


def pack_targets(targets: Sequence[Any] | np.ndarray) -> Columns:
    """Targets as columns: ``targets.json`` says of which kind they are, and in which column.

    Raises:
        ValueError: they are neither numbers, arrays of one shape, plain values that JSON keeps, nor
            tuples of these.
    """
    columns: Columns = {}
    columns["targets.json"] = _pack_targets(targets, columns)
    return columns


def _pack_targets(targets: Sequence[Any] | np.ndarray, columns: Columns) -> Any:
    with contextlib.closing(SampleTable(targets)) as table:
        kind = table.target_kind
        if kind in _KINDS:
            name = f"targets.{len(columns)}"
            columns[name] = np.array(table.target_array())
            return {kind: name}
    if kind == "tuple":
        return [_pack_targets(place, columns) for place in zip(*targets, strict=True)]
    targets = list(targets)
    with contextlib.suppress(TypeError, ValueError):
        if repr(json.loads(json.dumps(targets))) == repr(targets):
            return {"json": targets}
    kinds = ", ".join(sorted({type(target).__name__ for target in targets}))
    raise ValueError(
        "cache_dir= keeps targets that are numbers, arrays of one shape, texts, lists and dicts "
        f"of these, or tuples of one length, and not {kinds}. Give such targets from the dataset, "
        "and make what you need of them in target_transform=."
    )


def unpack_targets(columns: Columns, count: int) -> Any:
    """The targets of so many samples: numbers in one array, else a list.

    One of ``DAMAGED`` where there are none, or they are of other samples.
    """
    if "targets.json" not in columns:
        raise ValueError("it lacks the targets of its samples")
    return _unpack_targets(columns["targets.json"], columns, count)


def _unpack_targets(packed: Any, columns: Columns, count: int) -> Any:
    if isinstance(packed, list):
        places = [as_list(_unpack_targets(place, columns, count)) for place in packed]
        if not places:
            raise ValueError("targets are tuples of nothing")
        return list(zip(*places, strict=True))
    [(kind, found)] = packed.items()
    if kind == "json":
        if not isinstance(found, list) or len(found) != count:
            raise ValueError(f"its targets are no list of {count}")
        return found
    column = columns[found]
    is_number = column.dtype.kind in "iufb" and column.dtype.isnative
    if not is_number or column.shape[:1] != (count,):
        given = f"{column.dtype}{list(column.shape)}"
        raise ValueError(f"{found} are {given} where numbers[{count}] are needed")
    return _KINDS[kind](column)


def as_list(targets: Any) -> list[Any]:
    return list(targets.tolist() if isinstance(targets, np.ndarray) else targets)


# An open cache


class Cache(NamedTuple):
    """What was read of a cache, and found to fit.

    Args:
        place: where it is.
        manifest: what it holds.
        columns: its index.
        kept: int64 (K,), the rows that were not left out.
        indexes: of each part where these samples lie, as ``Store`` takes it.
        targets: of these samples; zeros where a part has them.
        mirror: of a cache behind a URL, where its files are opened.
    """

    place: Place
    manifest: Manifest
    columns: Columns
    kept: np.ndarray
    indexes: list[Columns]
    targets: Any
    mirror: Mirror | None

    def open_part(self, number: int, decoder: Decoder | None) -> DiskStore:
        """Map the files of a part; CacheError where one is missing or has another size."""
        spec = self.manifest.parts[number].spec
        sizes = self.manifest.files_of(number)
        if self.mirror is not None:
            index = ArrayBlock(in_segments(self.indexes[number], spec, self.mirror))
            return MirroredStore(list(sizes), spec, index, decoder, self.mirror)
        index = ArrayBlock(self.indexes[number])
        home = Path(self.place.url)
        files = open_all(DiskFile.open(home / name, size) for name, size in sizes.items())
        return DiskStore(files, spec, index, decoder)

    def serve(self, known: Sequence[Decoder], table: SampleTable | None) -> Prepared:
        """Map all samples.

        Args:
            known: what may decode a part, beside fastdata's own codecs.
            table: of the samples of the source; None makes one of the targets that the cache has.
        """
        manifest = self.manifest
        if not len(self.kept):
            raise CacheError(f"{self.place} holds no sample")
        stores = open_all(
            self.open_part(number, coder_of(self.place, part, known))
            for number, part in enumerate(manifest.parts)
        )
        if table is None:
            table = SampleTable(self.targets)
        elif len(self.kept) < len(table):
            table = table.reduced_to(self.kept.tolist())
        codecs = "+".join(dict.fromkeys(store.codec for store in stores))
        size = format_bytes(manifest.size_bytes)
        reason = f"storage='disk': {size} {codecs} in {self.place}"
        log.info("%s", reason)
        kept = KeptSamples(
            tuple(stores),
            table,
            manifest.is_tuple,
            manifest.target_is_part,
            manifest.keys,
            mask_places=manifest.mask_places,
        )
        return Prepared(
            storage_plan=StoragePlan("disk", reason, None if codecs == "raw" else codecs),
            kept=kept,
            skipped=[
                SampleError(each.message, index=each.row, path=each.path)
                for each in manifest.skipped
            ],
        )


def coder_of(place: Place, part: Part, known: Sequence[Decoder]) -> Decoder | None:
    """What encodes and decodes a part; None where it is raw."""
    if part.codec is None:
        return None
    for coder in known:
        if coder.settings() == part.codec:
            return coder
    its_dataset = f"open that, with cache_dir={place.url.rpartition('/')[0]!r}"
    if part.codec["name"] == SOURCE:
        raise CacheError(
            f"{place} holds image files as they are, and what prepares them on every read is known "
            f"to their dataset alone; {its_dataset}, or build a cache with another codec"
        )
    try:
        return codec_of(part.codec)
    except ValueError as unknown:
        raise CacheError(
            f"{place} cannot be opened on its own: {unknown}. A codec object of your own is known "
            f"to the dataset that the cache was made from: {its_dataset} and codec="
        ) from unknown


def read_cache(
    place: Place, use: Callable[[Cache], _Made], local_cache: LocalCache = None
) -> _Made:
    """Make something of a cache; once more where another process has meanwhile replaced it.

    Raises:
        FileNotFoundError: there is none.
        CacheError: it is damaged.
        RemoteError: it cannot be fetched.
    """
    while True:
        manifest = Manifest.read(place)
        try:
            mirror = _open_mirror(place, manifest, local_cache) if place.is_remote else None
            return use(_read_index(place, manifest, mirror))
        except CacheError:
            if Manifest.read(place) == manifest:
                raise


def mirror_folder(local_cache: LocalCache) -> Path:
    """Where mirrors are: by default in the user's cache folder."""
    return Path(local_cache or user_cache() / "remote").expanduser().absolute()


def _open_mirror(place: Place, manifest: Manifest, local_cache: LocalCache) -> Mirror:
    """Raises CacheError where a file of the cache is missing or has another size."""
    there = {entry.name: entry for entry in place.find()}
    files = []
    for number in range(len(manifest.parts)):
        for name, size_bytes in manifest.files_of(number).items():
            found = there[name].size_bytes if name in there else 0
            if found != size_bytes:
                raise CacheError(
                    f"{place.at(name)} has {found:,} bytes where {size_bytes:,} were written"
                )
            files.append(there[name])
    if manifest.index_name not in there:
        raise CacheError(f"{place.at(manifest.index_name)} is missing")
    files.append(there[manifest.index_name])
    return Mirror(place, files, mirror_folder(local_cache), _MIRRORED_SHARE)


def _read_index(place: Place, manifest: Manifest, mirror: Mirror | None) -> Cache:
    """Read all columns. Types, sizes and offsets are checked here, whatever they are used for."""
    name = manifest.index_name
    path = place.at(name)
    with _naming_damage(path, if_missing=True):
        data = place.read(name) if mirror is None else mirror.read(name)
        if mirror is not None and zlib.crc32(data) != manifest.index_crc32:
            mirror.forget(mirror.whole(name))
            data = mirror.read(name)
        if zlib.crc32(data) != manifest.index_crc32:
            raise CacheError(f"{path} is not what was written")
        columns = unpack_columns(data)
        count = manifest.count - len(manifest.skipped)
        column_of(columns, "part0.sums", "uint64", count)  # so that the count can be believed
        kept = np.delete(np.arange(manifest.count), [entry.row for entry in manifest.skipped])
        indexes = [_locate(manifest, k, columns, kept) for k in range(len(manifest.parts))]
        if "paths" in columns:
            ends = column_of(columns, "ends", "int64", manifest.count)
            column_of(columns, "paths", "uint8", int(ends[-1]))
            if (np.diff(ends, prepend=0) < 0).any():
                raise ValueError("file names overlap")
        is_part = manifest.target_is_part
        targets = np.zeros(count, int) if is_part else unpack_targets(columns, count)
        return Cache(place, manifest, columns, kept, indexes, targets, mirror)


def _locate(manifest: Manifest, number: int, columns: Columns, kept: np.ndarray) -> Columns:
    """Where the samples of a part lie, for ``Store``; ValueError where that is not possible."""
    part = manifest.parts[number]
    name = f"part{number}"
    count = len(kept)
    index: Columns = {
        "sums": column_of(columns, f"{name}.sums", "uint64", count),
        "offsets": column_of(columns, f"{name}.offsets", "int64", count),
    }
    if part.is_table:
        shapes = np.broadcast_to(np.array(part.spec.shape), (count, len(part.spec.shape or ())))
        sizes = np.full(count, part.spec.sample_bytes)
    else:
        shapes = column_of(columns, f"{name}.shapes", "int32", count, part.dimensions)
        sizes = column_of(columns, f"{name}.sizes", "int64", count)
        index |= {"sizes": sizes, "shapes": shapes}
    if part.spec.shape is not None and (shapes != part.spec.shape).any():
        raise ValueError(f"samples have other shapes than {list(part.spec.shape)}")
    item_bytes = np.dtype(part.spec.dtype).itemsize
    sample_bytes = shapes.astype(np.float64).prod(axis=1) * item_bytes
    if sample_bytes.max(initial=0) > _MOST_SAMPLE_BYTES:
        raise ValueError(f"a sample has {sample_bytes.max():,.0f} bytes, as none has")
    shards = np.searchsorted(np.cumsum([shard.rows for shard in manifest.shards]), kept, "right")
    file_bytes = np.array([shard.sizes[number] for shard in manifest.shards])
    index["files"] = (np.cumsum(file_bytes > 0) - 1)[shards].astype(np.int32)
    offsets = index["offsets"]
    room = file_bytes[shards]
    is_wrong = (room == 0) | (offsets < 0) | (sizes < 0) | (offsets > room - sizes)
    is_wrong |= (shapes < 0).any(axis=1)
    if part.codec is None:
        is_wrong |= (sample_bytes != sizes) | (offsets % item_bytes != 0)
    if is_wrong.any():
        raise ValueError(f"sample {int(is_wrong.argmax())} of {name} does not lie within its file")
    return index
