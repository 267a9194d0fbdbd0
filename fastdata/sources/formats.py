"""Other people's files as map-style datasets: WebDataset's tars, Parquet, Arrow.

The only door to pyarrow. A tar is gone through once for its headers; from then on a sample's own
bytes are read. Row groups and record batches are read whole, and each thread keeps its last.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from glob import glob
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import RemoteError, is_url
from fastdata.pixels.images import IMAGE_EXTENSIONS, decode_image
from fastdata.sources.remote import Coming, Entry, Place

_KINDS = {".tar": "tar", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_SPLIT = re.compile(r"(?:^|[/_.-])(train|val|valid|validation|test)(?=[/_.-])")
_LISTING_THREADS = 16


class File(NamedTuple):
    place: Place
    name: str
    size_bytes: int
    tag: int

    def __str__(self) -> str:
        return self.place.at(self.name)


# What lies at a path


def open_dataset(
    paths: Any,
    storage_options: Mapping[str, Any] | None = None,
    columns: Collection[str] | None = None,
) -> Any:
    """The map-style dataset of files; None where they are of no known kind.

    Args:
        paths: a path or URL of a folder or file, or a list of these; ``{000..009}``, ``*`` and
            ``?`` stand for several.
        storage_options: for the file system of URLs.
        columns: that items shall have.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: files are damaged, of several kinds, or of a kind that is not read here; says
            what reads it.
        ImportError: pyarrow or the URL's file system is not installed.
    """
    files: list[File] = []
    given = paths if isinstance(paths, list) else [paths]
    for path in given:
        for text in _expand_braces(os.path.expanduser(os.fsdecode(path))):
            files += _find_files(text, storage_options)
    kinds = sorted({_kind_of(file.name) for file in files})
    if len(kinds) > 1:
        raise ValueError(
            f"{paths!r} holds files of several kinds, {', '.join(kinds)}; give those of one by a "
            "pattern"
        )
    if not files:
        return None
    return TarSamples(files, columns) if kinds == ["tar"] else ArrowRows(files, columns)


def _kind_of(name: str) -> str:
    if re.search(r"\.(tgz|tar\.(gz|bz2|xz|zst|lz4))$", name):
        raise ValueError(
            f"{name} is compressed as a whole, so that no sample in it can be read alone. "
            "Decompress it to a .tar; images and the like hardly grow."
        )
    return _KINDS.get(os.path.splitext(name)[1], "")


def _expand_braces(text: str) -> Iterator[str]:
    """All texts that a pattern with ``{000..009}`` or ``{a,b}`` stands for, as bash has them."""
    braces = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if braces is None:
        yield text
        return
    first, last, words = braces.groups()
    if words is None:
        choices = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    else:
        choices = words.split(",")
    for choice in choices:
        yield from _expand_braces(text[: braces.start()] + choice + text[braces.end() :])


def _find_files(text: str, storage_options: Mapping[str, Any] | None) -> list[File]:
    if re.search(r"[*?]", text) and (is_url(text) or not os.path.exists(text)):
        folder, slash, _ = re.split(r"[*?]", text)[0].rpartition("/")
        place = Place(folder or slash or ".", storage_options)
        entries = _match(place, text[len(folder + slash) :])
        entries = [entry for entry in entries if _kind_of(entry.name)]
        if not entries:
            raise FileNotFoundError(f"no .tar, .parquet, .arrow or .feather file is like {text}")
    elif _kind_of(text):
        place, name = Place(text, storage_options).apart()
        entries = [Entry(name, *place.submit_facts(name).result())]
        if entries[0].size_bytes < 0:
            raise FileNotFoundError(f"{text} is not there")
    elif is_url(text) or os.path.isdir(text):
        place = Place(text, storage_options)
        entries = _list_folder(place)
    else:
        return []
    return [_sized(File(place, *entry)) for entry in entries]


def _sized(file: File) -> File:
    """With its size, which not all file systems list."""
    return file if file.size_bytes >= 0 else file._replace(size_bytes=file.place.size(file.name))


def _match(place: Place, pattern: str) -> list[Entry]:
    if place.is_remote:
        depth = pattern.count("/")
        return [
            entry
            for entry in place.find()
            if entry.name.count("/") == depth and fnmatchcase(entry.name, pattern)
        ]
    names = sorted(glob(pattern, root_dir=place.url))
    return [Entry(name, *place.submit_facts(name).result()) for name in names]


def _list_folder(place: Place) -> list[Entry]:
    # Hugging Face keeps what it has computed in cache-*.arrow, beside the rows of a dataset.
    entries = [entry for entry in place.find() if not entry.name.startswith((".", "cache-"))]
    if any(entry.name == "index.json" for entry in entries):
        _refuse_index(place)
    chosen = [entry for entry in entries if entry.name.endswith(tuple(_KINDS))]
    chosen = chosen or [entry for entry in entries if _kind_of(entry.name)]
    splits = sorted({match[1] for entry in chosen for match in _SPLIT.finditer(entry.name)})
    if len(splits) > 1:
        raise ValueError(
            f"{place} holds the splits {', '.join(splits)}; give the files of one by a pattern, "
            f"such as {place}/{splits[0]}-*"
        )
    return chosen


def _refuse_index(place: Place) -> None:
    index = json.loads(place.read("index.json"))
    if "shards" in index:
        what = "MDS shards of mosaicml-streaming"
        package = "streaming"
        options = f"{'remote' if place.is_remote else 'local'}={place.url!r}, batch_size=1"
    elif "chunks" in index:
        what = "chunks of litdata"
        package = "litdata"
        options = repr(place.url)
    else:
        return
    raise ValueError(
        f"{place} holds {what}, which its own package reads, as a map-style dataset. Install it, "
        f"and give that: from {package} import StreamingDataset; "
        f"CachedDataset(StreamingDataset({options}))"
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
        self._files = files
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._columns = columns
        self.is_remote = files[0].place.is_remote
        facts = repr(sorted({(file.name, file.size_bytes, file.tag) for file in files}))
        digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
        self._identity = f"{len(files)} files {digest}"
        """The same in every run, until a file is another: a cache is known by it."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def expect(self, indices: Sequence[int]) -> None:
        """Fetch these samples in the background, where that can be done."""

    def _locate(self, index: int) -> tuple[int, int]:
        """The number of a sample's file, and the sample's row there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    def _choose(self, names: list[str]) -> list[str]:
        """The columns to read, of those that there are."""
        if self._columns is None:
            return names
        missing = [repr(name) for name in self._columns if name not in names]
        if missing:
            there = ", ".join(map(repr, names))
            raise ValueError(f"there is no column {', '.join(missing)}; columns are {there}")
        return [name for name in names if name in self._columns]


# WebDataset

_PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript")
_TARGETS = ("cls", "json", "txt")
_KEY = "__key__"
_Spans = dict[str, tuple[int, int]]
"""Of the files of a sample, by ending: first byte, and the one behind the last."""


class TarSamples(_Samples):
    """WebDataset's tars: files of one key, up to the first dot of the base name, are a sample.

    Items are dicts by ending with ``columns``, and else pairs: of the one image, and of the first
    of ``cls``, ``json`` and ``txt`` that there is.
    """

    def __init__(self, files: Sequence[File], columns: Collection[str] | None) -> None:
        with ThreadPoolExecutor(_LISTING_THREADS if files[0].place.is_remote else 1) as pool:
            listings = list(pool.map(_list_tar, files))
        super().__init__(files, [len(listing) for listing in listings], columns)
        # Arrays, which worker processes do not copy as they do Python objects.
        numbers: dict[str, int] = {}
        rows = []
        firsts = [0]
        keys = []
        for key, spans in chain.from_iterable(listings):
            for suffix, (start, stop) in spans.items():
                number = numbers.setdefault(suffix, len(numbers))
                rows.append((number, start, stop))
            firsts.append(len(rows))
            keys.append(os.fsencode(key))
        self._suffixes = list(numbers)
        self._spans = np.array(rows, np.int64).reshape(-1, 3)
        self._firsts = np.array(firsts)
        self._keys = np.array(keys, np.bytes_)
        self._coming = Coming()

    def expect(self, indices: Sequence[int]) -> None:
        if self.is_remote:
            with suppress(ValueError):  # who reads the sample is told
                self._coming.expect(indices, self._submit)

    def _submit(self, index: int) -> Future[bytes]:
        file = self._files[self._locate(index)[0]]
        return file.place.submit(file.name, *_around(self._spans_of(index)))

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number, row = self._locate(index)
        with _naming(f"number {row} of {self._files[number]}"):
            spans = self._spans_of(index)
            begin, _ = _around(spans)
            data = self._coming.take(index, self._submit).result()
            values = {}
            for suffix, (start, stop) in spans.items():
                values[suffix] = _decode_member(suffix, data[start - begin : stop - begin])
        if self._columns is None:
            return tuple(values.values())
        if _KEY in self._columns:
            values[_KEY] = os.fsdecode(bytes(self._keys[index]))
        return values

    def _spans_of(self, index: int) -> _Spans:
        """Those that are asked for."""
        rows = self._spans[self._firsts[index] : self._firsts[index + 1]].tolist()
        there = {self._suffixes[number]: (start, stop) for number, start, stop in rows}
        if self._columns is not None:
            return {name: there[name] for name in self._choose([*there, _KEY]) if name != _KEY}
        images = [suffix for suffix in there if _is_image(suffix)]
        targets = [suffix for suffix in _TARGETS if suffix in there]
        if len(images) != 1 or not targets:
            raise ValueError(
                f"it has the files {', '.join(there)}, and not one image with one of "
                f"{', '.join(_TARGETS)}. Say which are meant: columns={{'sample': 'jpg', 'target': "
                "'npy'}, or the like"
            )
        return {suffix: there[suffix] for suffix in (images[0], targets[0])}


def _around(spans: _Spans) -> tuple[int, int]:
    """From the first byte of all to the one behind the last."""
    first = min((start for start, _ in spans.values()), default=0)
    last = max((stop for _, stop in spans.values()), default=0)
    return first, last


def _list_tar(file: File) -> list[tuple[str, _Spans]]:
    """The key of each sample, and its files."""
    samples: list[tuple[str, _Spans]] = []
    with _naming(f"{file} cannot be read"), file.place.open(file.name) as stream:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for info in tar:
                tar.members = []  # type: ignore[attr-defined]  # which would grow
                name = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", info.name)
                is_meta = re.search(r"(?:^|/)__[^/]*__(?:$|/|\.)", info.name)
                if not info.isreg() or name is None or is_meta:
                    continue
                if not samples or samples[-1][0] != name[1]:
                    samples.append((name[1], {}))
                _add_member(samples[-1][1], info, name[2].lower(), file.size_bytes)
            stream.seek(tar.offset)
        if stream.read(512) != bytes(512):
            raise ValueError("it is cut off, or damaged: it does not end as a tar does")
    return samples


def _add_member(spans: _Spans, info: tarfile.TarInfo, suffix: str, size_bytes: int) -> None:
    stop = info.offset_data + info.size
    if info.issparse() or stop > size_bytes:
        raise ValueError(f"its file {info.name} does not lie within it")
    if suffix.rpartition(".")[2] in _PICKLED:
        raise ValueError(
            f"its file {info.name} is pickled, and what is not trusted is not unpickled"
        )
    if suffix in spans:
        raise ValueError(f"it holds {info.name} twice")
    spans[suffix] = (info.offset_data, stop)


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


class _Latest(threading.local):
    """The file and the rows that each thread has read last; pickles as nothing."""

    file: str = ""
    opened: Any = None
    number: int = -1
    rows: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Latest, ()


class ArrowRows(_Samples):
    """Rows of Parquet or Arrow files as dicts.

    Bytes of an image, as Hugging Face writes them too, are opened.
    """

    def __init__(self, files: Sequence[File], columns: Collection[str] | None) -> None:
        owners = []
        counts = []
        self._groups = []
        for file in files:
            for group, count in enumerate(_row_counts(file)):
                owners.append(file)
                counts.append(count)
                self._groups.append(group)
        super().__init__(owners or files, counts, columns)
        self._latest = _Latest()

    def __getitem__(self, index: int) -> Any:
        number, row = self._locate(range(len(self))[index])
        with _naming(f"number {row} of {self._files[number]}"):
            if self._latest.number != number:
                self._latest.rows = None  # before there are others
                self._latest.rows = self._read(number)
                self._latest.number = number
            (item,) = self._latest.rows.slice(row, 1).to_pylist()
            return {name: _decode_value(value) for name, value in item.items()}

    def _read(self, number: int) -> Any:
        self._latest.number = -1
        file = self._files[number]
        if self._latest.file != str(file):
            self._latest.opened = _open_arrow(file)
            self._latest.file = str(file)
        opened = self._latest.opened
        if isinstance(opened, list):
            batch = opened[self._groups[number]]
            batch.validate(full=True)
            return batch.select(self._choose(batch.schema.names))
        columns = self._choose(opened.schema_arrow.names)
        return opened.read_row_group(self._groups[number], columns=columns, use_threads=False)


def _open_arrow(file: File) -> Any:
    """A Parquet file, or a list of an Arrow file's record batches, mapped where it lies here."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise ImportError(
            "Parquet and Arrow files need pyarrow: pip install 'fastdata[arrow]'"
        ) from missing
    is_remote = file.place.is_remote
    data = file.place.open(file.name) if is_remote else pyarrow.memory_map(str(file))
    if _kind_of(file.name) == "parquet":
        return pyarrow.parquet.ParquetFile(data)
    is_stream = data.read(6) != b"ARROW1"
    data.seek(0)
    if is_stream:
        return list(pyarrow.ipc.open_stream(data))
    reader = pyarrow.ipc.open_file(data)
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
    if not isinstance(value, bytes):
        return value
    is_image = value.startswith(_IMAGE_STARTS) or value[8:12] == b"WEBP"
    return decode_image(value) if is_image else value
