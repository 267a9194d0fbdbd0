"""Other people's datasets, map-style: WebDataset tars, LitData and MDS folders, Parquet and Arrow files.

A sample's own bytes are read when it is asked for; what is compressed as a whole, row groups and record batches are
read whole, and each thread keeps the last. Nothing is ever unpickled, and sizes and offsets are held against the files
before they are used. The only door to pyarrow.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from fastdata.codecs import decompress
from fastdata.errors import RemoteError, is_url
from fastdata.images import IMAGE_EXTENSIONS, decode_image, from_raw
from fastdata.remote import Place
from fastdata.shared import PackedPaths

_ENDINGS = {".tar": "tar", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_INDEX = "index.json"
_SPLIT = re.compile(r"(?:^|[/_.-])(train|val|valid|validation|test)(?=[/_.-])")
_INDEX_THREADS = 16
_HEADERS_BYTES = 8 << 20
"""Read at once of a remote tar for its headers: as much as comes in two round trips."""


class _File(NamedTuple):
    place: Place
    name: str
    size_bytes: int
    tag: int

    def __str__(self) -> str:
        return self.place.at(self.name)

    def open(self) -> Any:
        """A stream that can seek."""
        if self.place.is_remote:
            return io.BufferedReader(_Stream(self), _HEADERS_BYTES)
        return open(self.place.at(self.name), "rb")

    def read(self, start: int, stop: int) -> bytes:
        return self.place.read(self.name, start, stop)


class _Stream(io.RawIOBase):
    def __init__(self, file: _File) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.size_bytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._file.size_bytes - self._at))
        buffer[:count] = self._file.read(self._at, self._at + count) if count else b""
        self._at += count
        return count


# What lies at a path


def open_dataset(
    given: Any, storage_options: Mapping[str, Any] | None = None, only: Collection[str] | None = None
) -> Any:
    """The map-style dataset that a path, a URL, a pattern or a list of these means; None where it is none of ours.

    Args:
        given: a folder or a file; ``{000..009}``, ``*`` and ``?`` stand for several.
        storage_options: for the file system of URLs.
        only: the columns that items shall have.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: files are damaged, of several kinds, or of a kind that cannot be read sample by sample.
        ImportError: pyarrow or the URL's file system is not installed.
    """
    texts = [os.path.expanduser(os.fsdecode(path)) for path in (given if isinstance(given, list) else [given])]
    expanded = [text for pattern in texts for text in _expand(pattern)]
    files: list[_File] = []
    for text in expanded:
        if _is_pattern(text) or _kind(text):
            files += _matching(text, storage_options)
        elif len(expanded) == 1 and (is_url(text) or os.path.isdir(text)):
            place = Place(text, storage_options)
            files = [_File(place, *entry) for entry in place.find() if not entry.name.startswith((".", "cache-"))]
            indexed = _open_indexed(place, files, only)
            if indexed is not None:
                return indexed
            files = [file for file in files if _kind(file.name)]
            splits = sorted({match[1] for file in files for match in _SPLIT.finditer(file.name)})
            if len(splits) > 1:
                said = f"{text} holds the splits {', '.join(splits)}"
                raise ValueError(f"{said}; give the files of one by a pattern, such as {text}/{splits[0]}-*")
    kinds = sorted({_kind(file.name) for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{given!r} holds files of several kinds, {', '.join(kinds)}; give those of one by a pattern")
    if not files:
        return None
    return TarShards(files, only) if kinds == ["tar"] else ArrowTables(files, only)


def _kind(name: str) -> str:
    if re.search(r"\.(tgz|tar\.\w+)$", name):
        raise ValueError(
            f"{name} is compressed as a whole, so that no sample in it can be read alone. Decompress it to a .tar; "
            "images and the like hardly grow."
        )
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), "")


def _expand(text: str) -> Iterator[str]:
    """All texts that a pattern with ``{000..009}`` or ``{a,b}`` stands for, as bash has them."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if found is None:
        yield text
        return
    first, last, words = found.groups()
    width = len(first or "")
    each = words.split(",") if words else [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    for word in each:
        yield from _expand(text[: found.start()] + word + text[found.end() :])


def _is_pattern(text: str) -> bool:
    return re.search(r"[*?]", text) is not None and (is_url(text) or not os.path.exists(text))


def _matching(text: str, storage_options: Mapping[str, Any] | None) -> list[_File]:
    """The file of a path, or the files of a pattern, sorted."""
    parts = text.split("/")
    fixed = next((k for k, part in enumerate(parts) if _is_pattern(part)), len(parts) - 1)
    place, name = Place("/".join(parts[:fixed]) or ("/" if text[0] == "/" else "."), storage_options), parts[fixed:]
    if not _is_pattern(text):
        tag = 0 if place.is_remote else os.stat(text).st_mtime_ns
        return [_File(place, name[0], place.size(name[0]), tag)]
    found = [entry for entry in place.find() if entry.name.count("/") == len(name) - 1]
    files = [_File(place, *entry) for entry in found if fnmatchcase(entry.name, "/".join(name)) and _kind(entry.name)]
    if not files:
        raise FileNotFoundError(f"no .tar, .parquet, .arrow or .feather file is like {text}")
    return files


def _open_indexed(place: Place, files: list[_File], only: Collection[str] | None) -> Any:
    by_name = {file.name: file for file in files}
    if _INDEX not in by_name:
        return None
    try:
        document = json.loads(place.read(_INDEX))
        if "shards" in document:
            return MosaicShards(document, by_name, only)
        if "chunks" in document:
            return LitDataChunks(document, by_name, only)
    except (AttributeError, LookupError, RecursionError, StopIteration, TypeError, ValueError) as problem:
        said = f"{place.at(_INDEX)} cannot be used: {type(problem).__name__}: {problem}"
        raise ValueError(said) from problem
    return None


# Samples in files


class _Shards:
    """Samples that lie in files, one after the other; pickles, and is safe from several threads."""

    def __init__(self, files: Sequence[_File], counts: Sequence[int], only: Collection[str] | None) -> None:
        self._files, self._only = list(files), None if only is None else set(only)
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._kept = threading.local()
        facts = repr(sorted({(file.name, file.size_bytes, file.tag) for file in files})).encode()
        self.identity = f"{len(files)} files {hashlib.blake2b(facts, digest_size=8).hexdigest()}"
        """The same in every run, until a file is another."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        try:
            return self._item(number, row, index)
        except (ImportError, MemoryError, RemoteError):
            raise
        except Exception as problem:  # decoders raise anything
            said = f"number {row} of {self._files[number]}: {type(problem).__name__}: {problem}"
            raise ValueError(said) from problem

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_kept"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kept = threading.local()

    def _item(self, number: int, row: int, index: int) -> Any:
        raise NotImplementedError

    def _keep(self, what: str, key: object, make: Callable[[], Any]) -> Any:
        """What ``make`` gives; made anew where this thread's last was of another key."""
        kept = vars(self._kept)
        if kept.get(what, (None,))[0] != key:
            kept.pop(what, None)  # before there is another
            kept[what] = key, make()
        return kept[what][1]

    def _wanted(self, names: Collection[str]) -> list[str]:
        """The columns to read, of those that there are."""
        if self._only is None:
            return list(names)
        if missing := self._only - set(names):
            there = ", ".join(map(repr, names))
            raise ValueError(f"there is no column {', '.join(map(repr, sorted(missing)))}; columns are {there}")
        return [name for name in names if name in self._only]


# WebDataset

_REFUSED = ("pyd", "pickle", "pkl", "pth", "pt")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript")
_TARGETS = ("cls", "json", "txt")


class TarShards(_Shards):
    """WebDataset's tars: files of one key, up to the first dot of the base name, are a sample.

    Items are dicts by ending with ``only``, and else pairs: of the one image, and of the first of ``cls``, ``json`` and
    ``txt`` that there is.
    """

    def __init__(self, files: Sequence[_File], only: Collection[str] | None) -> None:
        threads = _INDEX_THREADS if files[0].place.is_remote else 1
        with ThreadPoolExecutor(threads) as pool:
            listings = list(pool.map(_list_tar, files))
        super().__init__(files, [len(listing) for listing in listings], only)
        samples = [sample for listing in listings for sample in listing]
        members = [member for _, members in samples for member in members]
        self._suffixes = sorted({suffix for suffix, _, _ in members})
        number_of = {suffix: number for number, suffix in enumerate(self._suffixes)}
        spans = [(number_of[suffix], start, size) for suffix, start, size in members]
        self._spans = np.array(spans, np.int64).reshape(-1, 3)
        self._first = np.cumsum([0, *(len(members) for _, members in samples)])
        self._keys = PackedPaths.of([key for key, _ in samples])

    def _item(self, number: int, row: int, index: int) -> Any:
        spans = self._spans[self._first[index] : self._first[index + 1]].tolist()
        found = {self._suffixes[suffix]: (start, start + size) for suffix, start, size in spans}
        if self._only is None:
            images = [suffix for suffix in found if _is_image(suffix)]
            targets = [suffix for suffix in _TARGETS if suffix in found]
            if len(images) != 1 or not targets:
                raise ValueError(
                    f"it has the files {', '.join(found)}, and not one image with one of {', '.join(_TARGETS)}. Say "
                    "which are meant: columns={'sample': 'jpg', 'target': 'npy'}, or the like"
                )
            wanted = [images[0], targets[0]]
        else:
            wanted = self._wanted([*found, "__key__"])
        file, values = self._files[number], {}
        for suffix in wanted:
            if suffix == "__key__":
                start, stop = (int(self._keys.ends[k]) if k >= 0 else 0 for k in (index - 1, index))
                values[suffix] = os.fsdecode(self._keys.blob[start:stop].tobytes())
            else:
                values[suffix] = _member(suffix, file.read(*found[suffix]))
        return values if self._only is not None else tuple(values.values())


def _list_tar(file: _File) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """Of each sample its key, and of each of its files ending, first byte and size."""
    import tarfile

    samples: list[tuple[str, list[tuple[str, int, int]]]] = []
    with file.open() as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # which would grow
                    key = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)
                    if not member.isreg() or key is None or re.search(r"(?:^|/)__[^/]*__(?:$|/|\.)", member.name):
                        continue
                    suffix = key[2].lower()
                    if member.issparse() or member.offset_data + member.size > file.size_bytes:
                        raise ValueError(f"its file {member.name} does not lie within it")
                    if suffix.rpartition(".")[2] in _REFUSED:
                        raise ValueError(f"its file {member.name} is pickled, and what is not trusted is not unpickled")
                    if not samples or samples[-1][0] != key[1]:
                        samples.append((key[1], []))
                    if any(suffix == other for other, _, _ in samples[-1][1]):
                        raise ValueError(f"it holds {member.name} twice")
                    samples[-1][1].append((suffix, member.offset_data, member.size))
                stream.seek(tar.offset)
            if stream.read(512) != bytes(512):
                raise ValueError("it is cut off, or damaged: it does not end as a tar does")
        except (tarfile.TarError, ValueError, OverflowError, MemoryError) as problem:
            raise ValueError(f"{file} cannot be read: {problem}") from problem
    return samples


def _is_image(suffix: str) -> bool:
    return f".{suffix.rpartition('.')[2]}" in IMAGE_EXTENSIONS


def _member(suffix: str, data: bytes) -> Any:
    kind = suffix.rpartition(".")[2]
    if _is_image(suffix):
        return decode_image(data)
    if kind in _NUMBERS:
        return int(data)
    if kind in ("json", "jsn"):
        return json.loads(data)
    if kind == "npy":
        return _read_npy(data)
    return data.decode() if kind in _TEXTS else data


def _read_npy(data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, is_fortran, dtype = read(stream)
    values = _array(data[stream.tell() :], dtype, shape[::-1] if is_fortran else shape)
    return values.transpose() if is_fortran else values


def _array(data: bytes, dtype: Any, shape: Sequence[int] | None = None) -> np.ndarray:
    """Values of this shape and dtype, in fresh memory, if they fill the data; without a shape as many as there are."""
    dtype = np.dtype(dtype)
    sides = (len(data) // max(dtype.itemsize, 1),) if shape is None else tuple(shape)
    if dtype.kind not in "biufc":
        raise ValueError(f"values of {dtype} are not read")
    if min(sides, default=0) < 0 or math.prod(sides) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data):,} bytes are no {dtype} values of shape {sides}")
    return np.array(np.frombuffer(data, dtype)).reshape(sides)


# LitData and MDS: files that begin with the number of their samples and the offsets of all


class _Binary(_Shards):
    """``raw_bytes`` are the sizes of the files before compression."""

    def __init__(
        self,
        files: Sequence[_File],
        counts: Sequence[int],
        raw_bytes: Sequence[int],
        compression: str,
        only: Collection[str] | None,
    ) -> None:
        for file, count, size_bytes in zip(files, counts, raw_bytes, strict=True):
            if type(count) is not int or type(size_bytes) is not int or not 0 < 4 * (count + 2) <= size_bytes:
                raise ValueError(f"{file.name} cannot have {count} samples in {size_bytes} bytes")
            if not compression and file.size_bytes not in (size_bytes, -1):
                raise ValueError(f"{file.name} has {file.size_bytes:,} bytes where {size_bytes:,} were written")
        super().__init__(files, counts, only)
        self._counts, self._raw_bytes, self._compression = list(counts), list(raw_bytes), compression
        self._offsets: dict[int, np.ndarray] = {}

    def _record(self, number: int, row: int) -> bytes:
        file, count, size_bytes = self._files[number], self._counts[number], self._raw_bytes[number]
        read: Callable[[int, int], bytes] = file.read
        if self._compression:
            unpack = partial(_unpacked, file, self._compression, size_bytes)
            whole = self._keep("shard", number, unpack)
            read = lambda start, stop: whole[start:stop]  # noqa: E731
        if number not in self._offsets:
            head = np.frombuffer(read(0, 4 * (count + 2)), "<u4").astype(np.int64)
            found, offsets = int(head[0]), head[1:]
            is_within = offsets[0] >= 4 * (count + 2) and offsets[-1] <= size_bytes and (np.diff(offsets) >= 0).all()
            if found != count or not is_within:
                raise ValueError(f"the offsets at its start are not those of {count} samples in {size_bytes:,} bytes")
            self._offsets[number] = offsets
        return read(*self._offsets[number][row : row + 2].tolist())


def _unpacked(file: _File, compression: str, size_bytes: int) -> bytes:
    return decompress(file.place.read(file.name), compression, size_bytes)


def _cut(data: bytes, sizes: Sequence[int], start: int) -> Iterator[bytes]:
    """The pieces of these sizes, which fill the data from ``start`` on."""
    ends = np.cumsum([start, *sizes]).tolist()
    if ends[-1] != len(data):
        raise ValueError(f"it has {len(data):,} bytes where its values take {ends[-1]:,}")
    return (data[first:last] for first, last in pairwise(ends))


def _number(data: bytes, dtype: str) -> Any:
    return _array(data, dtype, ())[()].item()


def _with_header(data: bytes, dtypes: Sequence[str]) -> np.ndarray:
    """LitData's array: dtype, dimensions and shape as uint32, then the values."""
    dtype, dimensions = np.frombuffer(data[:8], "<u4").tolist()
    shape = np.frombuffer(data[8 : 8 + 4 * dimensions], "<u4").tolist()
    if dtype >= len(dtypes) or len(shape) != dimensions:
        raise ValueError(f"an array of dtype number {dtype} and {dimensions} dimensions is not known")
    return _array(data[8 + 4 * dimensions :], dtypes[dtype], shape)


def _pil(data: bytes) -> Any:
    """A raw PIL image of LitData and MDS: width, height, length of the mode's name, then that and the pixels."""
    width, height, length = np.frombuffer(data[:12], "<u4").tolist()
    return from_raw(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


# Numbers of dtypes as litdata's constants.py lists them; what lies behind is bfloat16, objects, texts.
_TORCH_DTYPES = [*("f4", "f4", "f8", "f8", "c8", "c8", "c16", "c16", "f2", "f2", "O"), *("u1", "i1", "i2", "i2")]
_TORCH_DTYPES += ["i4", "i4", "i8", "i8", "?"]
_NUMPY_DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
_LITDATA: dict[str, Callable[[bytes, str], Any]] = {
    "jpeg": lambda data, _: decode_image(data),
    "image": lambda data, _: decode_image(data),
    "pil": lambda data, _: _pil(data),
    "tensor": lambda data, _: _torch(_with_header(data, _TORCH_DTYPES)),
    "no_header_tensor": lambda data, number: _torch(_array(data, _TORCH_DTYPES[int(number)])),
    "numpy": lambda data, _: _with_header(data, _NUMPY_DTYPES),
    "no_header_numpy": lambda data, number: _array(data, _NUMPY_DTYPES[int(number)]),
    "int": lambda data, _: _number(data, "<i8"),
    "float": lambda data, _: _number(data, "<f8"),
    "boolean": lambda data, _: _number(data, "?"),
    "bool": lambda data, _: _number(data, "?"),
    "str": lambda data, _: data.decode(),
    "bytes": lambda data, _: data,
    "file": lambda data, _: data,
}
_NDARRAY_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4"}
_NDARRAY_DTYPES |= {64: "u8", 65: "i8", 66: "f8"}
_MOSAIC: dict[str, Callable[[bytes, str], Any]] = {
    **{name: _LITDATA[name] for name in ("jpeg", "pil", "int", "str", "bytes")},
    **{
        np.dtype(dtype).name: lambda data, _, dtype=dtype: _number(data, dtype)  # type: ignore[misc]
        for dtype in _NDARRAY_DTYPES.values()
    },
    "png": lambda data, _: decode_image(data),
    "json": lambda data, _: json.loads(data),
    "str_int": lambda data, _: int(data),
    "str_float": lambda data, _: float(data),
    "ndarray": lambda data, detail: _ndarray(data, *filter(None, detail.split(":"))),
}


def _ndarray(data: bytes, dtype: str | None = None, shape: str | None = None) -> np.ndarray:
    """MDS's array; what its column does not say stands at its start."""
    at = 0
    if dtype is None:
        dtype, at = _NDARRAY_DTYPES[data[0]], 1
    sides: Sequence[int] = list(map(int, shape.split(","))) if shape else ()
    if shape is None:
        dimensions, side_bytes = data[at] >> 2, 1 << (data[at] & 3)
        stop = at + 1 + dimensions * side_bytes
        sides, at = np.frombuffer(data[at + 1 : stop], f"<u{side_bytes}").tolist(), stop
    return _array(data[at:], dtype, sides)


def _decoder(known: Mapping[str, Callable[[bytes, str], Any]], text: str) -> Callable[[bytes], Any]:
    name, _, detail = text.partition(":")
    if name in ("pickle", "pkl"):
        raise ValueError("it holds pickled values, and what is not trusted is not unpickled; write them in another way")
    if name not in known:
        raise ValueError(f"values written as {text!r} are not known; {', '.join(known)} are")
    return lambda data: known[name](data, detail)


class LitDataChunks(_Binary):
    """What ``litdata.optimize`` writes; items are as the function gave them, images PIL images."""

    def __init__(self, index: Mapping[str, Any], files: Mapping[str, _File], only: Collection[str] | None) -> None:
        config, chunks = index["config"], index["chunks"]
        formats, counts = list(config["data_format"]), [chunk["chunk_size"] for chunk in chunks]
        if len(formats) == 1 and formats[0].startswith("no_header_tensor"):
            raise ValueError("it holds one stream of tokens, and no samples")
        if config.get("encryption"):
            raise ValueError("it is encrypted")
        raw_bytes = [chunk["chunk_bytes"] + 4 * (chunk["chunk_size"] + 2) for chunk in chunks]
        named = [files[chunk["filename"]] for chunk in chunks]
        super().__init__(named, counts, raw_bytes, config.get("compression") or "", only)
        for text in formats:
            _decoder(_LITDATA, text)
        self._formats = formats
        self._spec = json.loads(config["data_spec"])[1]
        leaves = iter(range(len(formats)))
        if isinstance(shown := _unflatten(self._spec, leaves), dict):
            self._wanted(shown)
        if next(leaves, None) is not None:
            raise ValueError("its data_spec has fewer values than its data_format")

    def _item(self, number: int, row: int, index: int) -> Any:
        data, count = self._record(number, row), len(self._formats)
        pieces = _cut(data, np.frombuffer(data[: 4 * count], "<u4").tolist(), 4 * count)
        values = [_decoder(_LITDATA, text)(piece) for text, piece in zip(self._formats, pieces, strict=True)]
        item = _unflatten(self._spec, iter(values))
        return {name: item[name] for name in self._wanted(item)} if isinstance(item, dict) else item


def _unflatten(spec: Mapping[str, Any], leaves: Iterator[Any]) -> Any:
    """What ``torch.utils._pytree`` makes of its own text; of types only Python's own, which run no code."""
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        return next(leaves)
    values = [_unflatten(child, leaves) for child in children]
    if kind in ("builtins.dict", "collections.OrderedDict"):
        return dict(zip(json.loads(spec["context"]), values, strict=True))
    if kind not in ("builtins.list", "builtins.tuple"):
        raise ValueError(f"items that are a {kind} are not known")
    return tuple(values) if kind == "builtins.tuple" else values


class MosaicShards(_Binary):
    """Mosaic's MDS shards; items are dicts."""

    def __init__(self, index: Mapping[str, Any], files: Mapping[str, _File], only: Collection[str] | None) -> None:
        shards, first = index["shards"], index["shards"][0]
        same = ("column_names", "column_encodings", "column_sizes", "compression")
        for shard in shards:
            if (shard["version"], shard["format"]) != (2, "mds"):
                raise ValueError(f"shards are {shard['format']} of version {shard['version']}, not mds of version 2")
            if any(shard[name] != first[name] for name in same):
                raise ValueError("its shards have different columns or compression")
        named = [files[(shard["zip_data"] or shard["raw_data"])["basename"]] for shard in shards]
        counts, raw_bytes = [s["samples"] for s in shards], [s["raw_data"]["bytes"] for s in shards]
        compression = (first["compression"] or "").partition(":")[0] if first["zip_data"] else ""
        super().__init__(named, counts, raw_bytes, compression, only)
        columns = zip(first["column_names"], first["column_encodings"], first["column_sizes"], strict=True)
        self._columns = cast("list[tuple[str, str, int | None]]", list(columns))
        for _, encoding, size in self._columns:
            _decoder(_MOSAIC, encoding)
            if size is not None and (type(size) is not int or size < 0):
                raise ValueError(f"a column cannot have values of {size!r} bytes")
        self._wanted(first["column_names"])

    def _item(self, number: int, row: int, index: int) -> Any:
        data = self._record(number, row)
        count = sum(not size for _, _, size in self._columns)
        sizes = iter(np.frombuffer(data[: 4 * count], "<u4").tolist())
        pieces = _cut(data, [size or next(sizes) for _, _, size in self._columns], 4 * count)
        found = {name: (encoding, piece) for (name, encoding, _), piece in zip(self._columns, pieces, strict=True)}
        wanted = self._wanted(found)
        return {name: _decoder(_MOSAIC, found[name][0])(found[name][1]) for name in wanted}


# Parquet and Arrow


def import_arrow() -> Any:
    """Import pyarrow with what is used of it; ImportError says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise ImportError("Parquet and Arrow files need pyarrow: pip install 'fastdata[arrow]'") from missing
    return pyarrow


_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")


class ArrowTables(_Shards):
    """Rows of Parquet or Arrow files as dicts; bytes of an image, as Hugging Face writes them too, are opened."""

    def __init__(self, files: Sequence[_File], only: Collection[str] | None) -> None:
        import_arrow()
        groups = [(file, number, count) for file in files for number, count in enumerate(_row_counts(file))]
        super().__init__([file for file, _, _ in groups], [count for _, _, count in groups], only)
        self._numbers = [number for _, number, _ in groups]
        if groups:
            self._wanted(_schema_names(groups[0][0]))

    def _item(self, number: int, row: int, index: int) -> Any:
        table = self._keep("rows", number, partial(self._read, number))
        (item,) = table.slice(row, 1).to_pylist()
        return {name: _opened(value) for name, value in item.items()}

    def _read(self, number: int) -> Any:
        file = self._files[number]
        opened = self._keep("file", str(file), partial(_open_arrow, file))
        if _kind(file.name) == "parquet":
            columns = None if self._only is None else self._wanted(opened.schema_arrow.names)
            return opened.read_row_group(self._numbers[number], columns=columns, use_threads=False)
        batch = opened[self._numbers[number]]
        batch.validate(full=True)
        return batch.select(self._wanted(batch.schema.names))


def _open_arrow(file: _File) -> Any:
    """A Parquet file, or the record batches of an Arrow file: those of this machine are mapped, not read."""
    arrow = import_arrow()
    if _kind(file.name) == "parquet":
        return arrow.parquet.ParquetFile(file.open() if file.place.is_remote else str(file), pre_buffer=False)
    data = arrow.BufferReader(file.place.read(file.name)) if file.place.is_remote else arrow.memory_map(str(file))
    is_file = data.read(6) == b"ARROW1"
    data.seek(0)
    if is_file:
        reader = arrow.ipc.open_file(data)
        return [reader.get_batch(k) for k in range(reader.num_record_batches)]
    return list(arrow.ipc.open_stream(data))


def _row_counts(file: _File) -> list[int]:
    try:
        opened = _open_arrow(file)
        if _kind(file.name) == "parquet":
            facts = opened.metadata
            return [facts.row_group(k).num_rows for k in range(facts.num_row_groups)]
        return [batch.num_rows for batch in opened]
    except (ValueError, OSError) as problem:  # pyarrow's own errors are these
        if isinstance(problem, (RemoteError, FileNotFoundError)):
            raise
        raise ValueError(f"{file} cannot be read: {problem}") from problem


def _schema_names(file: _File) -> list[str]:
    opened = _open_arrow(file)
    schema = opened.schema_arrow if _kind(file.name) == "parquet" else opened[0].schema
    return list(schema.names)


def _opened(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        if value["bytes"] is None:
            raise ValueError(f"it holds the path of an image, {value['path']!r}, and not its bytes")
        return decode_image(value["bytes"])
    is_image = isinstance(value, bytes) and (value.startswith(_SIGNATURES) or value[8:12] == b"WEBP")
    return decode_image(value) if is_image else value
