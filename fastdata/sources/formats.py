"""Other people's files as map-style datasets: WebDataset's tars, Parquet, Arrow. The only door to pyarrow.

A tar is gone through once for its headers; from then on a sample's own bytes are read. Row groups
and record batches are read whole, and each thread keeps its last. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from glob import glob
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import RemoteError, is_url
from fastdata.machine.shared import PackedPaths
from fastdata.pixels.images import IMAGE_EXTENSIONS, decode_image
from fastdata.sources.remote import Coming, Entry, Place

_KINDS = {".tar": "tar", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_SPLIT = re.compile(r"(?:^|[/_.-])(train|val|valid|validation|test)(?=[/_.-])")
_LISTING_THREADS = 16
_READ_AHEAD_BYTES = 8 << 20
"""Read at once of a remote tar for its headers: as much as comes in two round trips."""

_OTHERS = {
    "shards": (
        "MDS shards of mosaicml-streaming",
        "from streaming import StreamingDataset; CachedDataset(StreamingDataset({options}, batch_size=1))",
        ("local={path!r}", "remote={path!r}"),
    ),
    "chunks": (
        "chunks of litdata",
        "from litdata import StreamingDataset; CachedDataset(StreamingDataset({options}))",
        ("{path!r}", "{path!r}"),
    ),
}
"""What an index.json lists -> what lies there, and how its own package opens it, here and behind a
URL."""


class File(NamedTuple):
    place: Place
    name: str
    size_bytes: int
    tag: int

    @classmethod
    def of(cls, place: Place, entry: Entry) -> File:
        file = cls(place, *entry)
        return file if file.size_bytes >= 0 else file._replace(size_bytes=place.size(file.name))

    def __str__(self) -> str:
        return self.place.at(self.name)

    def open(self) -> Any:
        """A stream that can seek."""
        if self.place.is_remote:
            return io.BufferedReader(_Stream(self), _READ_AHEAD_BYTES)
        return open(str(self), "rb")

    def read(self, start: int, stop: int) -> bytes:
        return self.place.read(self.name, start, stop)


class _Stream(io.RawIOBase):
    def __init__(self, file: File) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._file.size_bytes)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._file.size_bytes - self._position))
        if count:
            buffer[:count] = self._file.read(self._position, self._position + count)
        self._position += count
        return count


# What lies at a path


def open_dataset(
    paths: Any,
    storage_options: Mapping[str, Any] | None = None,
    columns: Collection[str] | None = None,
) -> Any:
    """The map-style dataset of a path, a URL, a pattern or a list of these; None where it is of no known kind.

    Args:
        paths: folders or files; ``{000..009}``, ``*`` and ``?`` stand for several.
        storage_options: for the file system of URLs.
        columns: that items shall have.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: files are damaged, of several kinds, or of a kind that is not read here; says
            what reads it.
        ImportError: pyarrow or the URL's file system is not installed.
    """
    given = paths if isinstance(paths, list) else [paths]
    files: list[File] = []
    for path in given:
        for text in _expand_braces(os.path.expanduser(os.fsdecode(path))):
            files += _find_files(text, storage_options)
    kinds = sorted({_kind_of(file.name) for file in files})
    if len(kinds) > 1:
        raise ValueError(
            f"{paths!r} holds files of several kinds, {', '.join(kinds)}; give those of one by a pattern"
        )
    if not files:
        return None
    return TarSamples(files, columns) if kinds == ["tar"] else ArrowRows(files, columns)


def _kind_of(name: str) -> str:
    if re.search(r"\.(tgz|tar\.(gz|bz2|xz|zst|lz4))$", name):
        raise ValueError(
            f"{name} is compressed as a whole, so that no sample in it can be read alone. Decompress it to a .tar; "
            "images and the like hardly grow."
        )
    return _KINDS.get(os.path.splitext(name)[1], "")


def _expand_braces(text: str) -> Iterator[str]:
    """All texts that a pattern with ``{000..009}`` or ``{a,b}`` stands for, as bash has them."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if found is None:
        yield text
        return
    first, last, words = found.groups()
    if words is None:
        choices = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    else:
        choices = words.split(",")
    for choice in choices:
        yield from _expand_braces(text[: found.start()] + choice + text[found.end() :])


def _find_files(text: str, storage_options: Mapping[str, Any] | None) -> list[File]:
    if re.search(r"[*?]", text) and (is_url(text) or not os.path.exists(text)):
        return _match_files(text, storage_options)
    if _kind_of(text):
        place, name = Place(text, storage_options).apart()
        size_bytes, tag = place.submit_facts(name).result()
        if size_bytes < 0:
            raise FileNotFoundError(f"{text} is not there")
        return [File(place, name, size_bytes, tag)]
    if is_url(text) or os.path.isdir(text):
        return _list_files(Place(text, storage_options))
    return []


def _match_files(pattern: str, storage_options: Mapping[str, Any] | None) -> list[File]:
    folder, _, _ = re.split(r"[*?]", pattern)[0].rpartition("/")
    place = Place(folder or ("/" if pattern.startswith("/") else "."), storage_options)
    if place.is_remote:
        name = pattern[len(folder) + 1 :]
        entries = [
            entry
            for entry in place.find()
            if entry.name.count("/") == name.count("/") and fnmatchcase(entry.name, name)
        ]
    else:
        names = [os.path.relpath(path, place.url) for path in sorted(glob(pattern))]
        entries = [Entry(name, *place.submit_facts(name).result()) for name in names]
    files = [File.of(place, entry) for entry in entries if _kind_of(entry.name)]
    if not files:
        raise FileNotFoundError(f"no .tar, .parquet, .arrow or .feather file is like {pattern}")
    return files


def _list_files(place: Place) -> list[File]:
    # Hugging Face keeps what it has computed in cache-*.arrow, beside the rows of a dataset.
    entries = [entry for entry in place.find() if not entry.name.startswith((".", "cache-"))]
    if any(entry.name == "index.json" for entry in entries):
        _refuse_index(place)
    chosen = [entry for entry in entries if entry.name.endswith(tuple(_KINDS))]
    chosen = chosen or [entry for entry in entries if _kind_of(entry.name)]
    splits = sorted({match[1] for entry in chosen for match in _SPLIT.finditer(entry.name)})
    if len(splits) > 1:
        raise ValueError(
            f"{place} holds the splits {', '.join(splits)}; give the files of one by a pattern, such as "
            f"{place}/{splits[0]}-*"
        )
    return [File.of(place, entry) for entry in chosen]


def _refuse_index(place: Place) -> None:
    index = json.loads(place.read("index.json"))
    for key, (what, code, options) in _OTHERS.items():
        if key in index:
            call = code.format(options=options[place.is_remote].format(path=place.url))
            raise ValueError(
                f"{place} holds {what}, which its own package reads, as a map-style dataset. Install it, and give "
                f"that: {call}"
            )


# Samples that lie in files


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say which file, or sample of it, is wrong: what decodes raises anything."""
    try:
        yield
    except (ImportError, RemoteError, FileNotFoundError):
        raise
    except Exception as problem:
        raise ValueError(f"{what}: {type(problem).__name__}: {problem}") from problem


class _Samples:
    """Samples that lie in files, one after the other; pickles, and is safe from several threads."""

    def __init__(
        self, files: Sequence[File], counts: Sequence[int], columns: Collection[str] | None
    ) -> None:
        self._files = list(files)
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._columns = None if columns is None else set(columns)
        self.is_remote = any(file.place.is_remote for file in files)
        facts = repr(sorted({(file.name, file.size_bytes, file.tag) for file in files}))
        digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
        self._identity = f"{len(files)} files {digest}"
        """The same in every run, until a file is another: a cache is known by it."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        with _naming(f"number {row} of {self._files[number]}"):
            return self._item(number, row, index)

    def _item(self, number: int, row: int, index: int) -> Any:
        raise NotImplementedError

    def expect(self, indices: Sequence[int]) -> None:
        """Fetch these samples in the background, where they lie behind a URL and by themselves."""

    def _choose(self, names: Collection[str]) -> list[str]:
        """The columns to read, of those that there are."""
        if self._columns is None:
            return list(names)
        missing = sorted(self._columns - set(names))
        if missing:
            there = ", ".join(map(repr, names))
            raise ValueError(
                f"there is no column {', '.join(map(repr, missing))}; columns are {there}"
            )
        return [name for name in names if name in self._columns]


# WebDataset

_PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript")
_TARGETS = ("cls", "json", "txt")
_KEY = "__key__"


class TarSamples(_Samples):
    """WebDataset's tars: files of one key, up to the first dot of the base name, are a sample.

    Items are dicts by ending with ``columns``, and else pairs: of the one image, and of the first
    of ``cls``, ``json`` and ``txt`` that there is.
    """

    def __init__(self, files: Sequence[File], columns: Collection[str] | None) -> None:
        with ThreadPoolExecutor(_LISTING_THREADS if files[0].place.is_remote else 1) as pool:
            listings = list(pool.map(_list_tar, files))
        super().__init__(files, [len(listing) for listing in listings], columns)
        samples = list(chain.from_iterable(listings))
        members = [member for _, members in samples for member in members]
        self._suffixes = sorted({suffix for suffix, _, _ in members})
        numbers = {suffix: number for number, suffix in enumerate(self._suffixes)}
        spans = [(numbers[suffix], start, stop) for suffix, start, stop in members]
        self._spans = np.array(spans, np.int64).reshape(-1, 3)
        self._firsts = np.cumsum([0, *(len(members) for _, members in samples)])
        self._keys = PackedPaths.of([key for key, _ in samples])
        self._coming = Coming()

    def expect(self, indices: Sequence[int]) -> None:
        self._coming.expect(indices, self._submit)

    def _submit(self, index: int) -> Future[bytes] | None:
        file = self._files[int(np.searchsorted(self._ends, index, side="right"))]
        if file.place.is_remote:
            with suppress(ValueError):  # who reads the sample is told
                return file.place.submit(file.name, *_around(self._members(index)))
        return None

    def _item(self, number: int, row: int, index: int) -> Any:
        members = self._members(index)
        start, stop = _around(members)
        coming = self._coming.here().pop(index, None)
        data = self._files[number].read(start, stop) if coming is None else coming.result()
        values = {
            suffix: _decode_member(suffix, data[first - start : last - start])
            for suffix, (first, last) in members.items()
        }
        if self._columns is None:
            return tuple(values.values())
        if _KEY in self._columns:
            values[_KEY] = self._key(index)
        return values

    def _key(self, index: int) -> str:
        start = int(self._keys.ends[index - 1]) if index else 0
        return os.fsdecode(self._keys.blob[start : self._keys.ends[index]].tobytes())

    def _members(self, index: int) -> dict[str, tuple[int, int]]:
        """First and last byte of the files of a sample that are asked for, by ending."""
        rows = self._spans[self._firsts[index] : self._firsts[index + 1]].tolist()
        found = {self._suffixes[number]: (start, stop) for number, start, stop in rows}
        if self._columns is not None:
            return {name: found[name] for name in self._choose([*found, _KEY]) if name != _KEY}
        images = [suffix for suffix in found if _is_image(suffix)]
        targets = [suffix for suffix in _TARGETS if suffix in found]
        if len(images) != 1 or not targets:
            raise ValueError(
                f"it has the files {', '.join(found)}, and not one image with one of {', '.join(_TARGETS)}. Say "
                "which are meant: columns={'sample': 'jpg', 'target': 'npy'}, or the like"
            )
        return {suffix: found[suffix] for suffix in (images[0], targets[0])}


def _around(members: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    starts = [start for start, _ in members.values()]
    stops = [stop for _, stop in members.values()]
    return min(starts, default=0), max(stops, default=0)


_Member = tuple[str, int, int]
"""Ending, first byte and the one behind the last."""


def _list_tar(file: File) -> list[tuple[str, list[_Member]]]:
    """The key of each sample, and its files."""
    samples: list[tuple[str, list[_Member]]] = []
    with _naming(f"{file} cannot be read"), file.open() as stream:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for info in tar:
                tar.members = []  # type: ignore[attr-defined]  # which would grow
                key = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", info.name)
                is_meta = re.search(r"(?:^|/)__[^/]*__(?:$|/|\.)", info.name)
                if not info.isreg() or key is None or is_meta:
                    continue
                if not samples or samples[-1][0] != key[1]:
                    samples.append((key[1], []))
                members = samples[-1][1]
                members.append(_checked_member(info, key[2].lower(), file.size_bytes))
                if any(members[-1][0] == suffix for suffix, _, _ in members[:-1]):
                    raise ValueError(f"it holds {info.name} twice")
            stream.seek(tar.offset)
        if stream.read(512) != bytes(512):
            raise ValueError("it is cut off, or damaged: it does not end as a tar does")
    return samples


def _checked_member(info: tarfile.TarInfo, suffix: str, size_bytes: int) -> _Member:
    stop = info.offset_data + info.size
    if info.issparse() or stop > size_bytes:
        raise ValueError(f"its file {info.name} does not lie within it")
    if suffix.rpartition(".")[2] in _PICKLED:
        raise ValueError(
            f"its file {info.name} is pickled, and what is not trusted is not unpickled"
        )
    return suffix, info.offset_data, stop


def _is_image(suffix: str) -> bool:
    return f".{suffix.rpartition('.')[2]}" in IMAGE_EXTENSIONS


def _decode_member(suffix: str, data: bytes) -> Any:
    kind = suffix.rpartition(".")[2]
    if _is_image(suffix):
        return decode_image(data)
    if kind in _NUMBERS:
        return int(data)
    if kind in ("json", "jsn"):
        return json.loads(data)
    if kind == "npy":
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return data.decode() if kind in _TEXTS else data


# Parquet and Arrow

_IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")


class ArrowRows(_Samples):
    """Rows of Parquet or Arrow files as dicts; bytes of an image, as Hugging Face writes them too, are opened."""

    def __init__(self, files: Sequence[File], columns: Collection[str] | None) -> None:
        groups = [
            (file, group, count) for file in files for group, count in enumerate(_row_counts(file))
        ]
        super().__init__(
            [file for file, _, _ in groups], [count for _, _, count in groups], columns
        )
        self._groups = [group for _, group, _ in groups]
        self._latest = _Latest()

    def _item(self, number: int, row: int, index: int) -> Any:
        rows = self._latest.get("rows", number, partial(self._read, number))
        (item,) = rows.slice(row, 1).to_pylist()
        return {name: _decode_value(value) for name, value in item.items()}

    def _read(self, number: int) -> Any:
        file, group = self._files[number], self._groups[number]
        opened = self._latest.get("file", str(file), partial(_open_arrow, file))
        if isinstance(opened, list):
            batch = opened[group]
            batch.validate(full=True)
            return batch.select(self._choose(batch.schema.names))
        columns = self._choose(opened.schema_arrow.names)
        return opened.read_row_group(group, columns=columns, use_threads=False)


class _Latest(threading.local):
    """What each thread has read last of some kind; pickles as nothing."""

    def get(self, kind: str, key: object, read: Callable[[], Any]) -> Any:
        latest = vars(self)
        if latest.get(kind, (None,))[0] != key:
            latest.pop(kind, None)  # before there is another
            latest[kind] = key, read()
        return latest[kind][1]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Latest, ()


def _import_arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise ImportError(
            "Parquet and Arrow files need pyarrow: pip install 'fastdata[arrow]'"
        ) from missing
    return pyarrow


def _open_arrow(file: File) -> Any:
    """A Parquet file, or a list of an Arrow file's record batches: those of this machine are mapped, not read."""
    arrow = _import_arrow()
    if _kind_of(file.name) == "parquet":
        return arrow.parquet.ParquetFile(
            file.open() if file.place.is_remote else str(file), pre_buffer=False
        )
    data = file.open() if file.place.is_remote else arrow.memory_map(str(file))
    is_stream = data.read(6) != b"ARROW1"
    data.seek(0)
    if is_stream:
        return list(arrow.ipc.open_stream(data))
    reader = arrow.ipc.open_file(data)
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _row_counts(file: File) -> list[int]:
    with _naming(f"{file} cannot be read"):
        opened = _open_arrow(file)
        if isinstance(opened, list):
            return [batch.num_rows for batch in opened]
        facts = opened.metadata
        return [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]


def _decode_value(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        if value["bytes"] is None:
            raise ValueError(f"it holds the path of an image, {value['path']!r}, and not its bytes")
        return decode_image(value["bytes"])
    is_image = isinstance(value, bytes) and (
        value.startswith(_IMAGE_STARTS) or value[8:12] == b"WEBP"
    )
    return decode_image(value) if is_image else value
