"""Other people's files as map-style datasets: WebDataset's tars, Parquet, Arrow.

The only door to pyarrow. A tar is gone through once for where its samples lie; from then on a
sample's own bytes are read. Row groups and record batches are read whole, and each thread keeps its
last. Nothing is ever unpickled.
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
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import glob
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import RemoteError, is_url
from fastdata.pixels.images import IMAGE_EXTENSIONS, decode_image
from fastdata.sources.remote import Entry, Place, Requests

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
        if not entries:
            raise FileNotFoundError(f"no .tar, .parquet, .arrow or .feather file is like {text}")
    elif _kind_of(text):
        place, name = Place(text, storage_options).apart()
        entries = [Entry(name, -1, 0)]
    elif is_url(text) or os.path.isdir(text):
        place = Place(text, storage_options)
        entries = _list_folder(place)
    else:
        return []
    return [_sized(File(place, *entry)) for entry in entries]


def _sized(file: File) -> File:
    """With its size, which not all file systems list."""
    if file.size_bytes >= 0:
        return file
    size_bytes, tag = file.place.submit_facts(file.name).result()
    if size_bytes < 0:
        raise FileNotFoundError(f"{file} is not there")
    return File(file.place, file.name, size_bytes, tag)


def _match(place: Place, pattern: str) -> list[Entry]:
    if place.is_remote:
        depth = pattern.count("/")
        found = place.submit_find(depth=depth + 1).result()
        alike = [each for each in found if fnmatchcase(each.name, pattern)]
        entries = [entry for entry in alike if entry.name.count("/") == depth]
    else:
        entries = [Entry(name, -1, 0) for name in sorted(glob(pattern, root_dir=place.url))]
    return [entry for entry in entries if _kind_of(entry.name)]


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
        self._file_of = np.repeat(np.arange(len(counts)), np.array(counts, np.int64))
        self._firsts = np.cumsum([0, *counts])
        self._columns = columns
        self.is_remote = files[0].place.is_remote
        facts = repr(sorted({(file.name, file.size_bytes, file.tag) for file in files}))
        digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
        self._identity = f"{len(files)} files {digest}"
        """The same in every run, until a file is another: a cache is known by it."""

    def __len__(self) -> int:
        return len(self._file_of)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number = int(self._file_of[index])
        row = index - int(self._firsts[number])
        with _naming(f"number {row} of {self._files[number]}"):
            return self._read(index, number, row)

    def _read(self, index: int, number: int, row: int) -> Any:
        """A sample; which it is in the file of that number."""
        raise NotImplementedError

    def expect(self, indices: Sequence[int]) -> None:
        """Fetch these samples in the background, where that can be done."""

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
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **{ending.removeprefix("."): decode_image for ending in IMAGE_EXTENSIONS},
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": lambda data: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False),
}
"""By the last ending of a file; others stay bytes."""
_TARGETS = ("cls", "json", "txt")
_KEY = "__key__"


class _Member(NamedTuple):
    """A file of a sample."""

    key: str
    suffix: str
    info: tarfile.TarInfo


class TarSamples(_Samples):
    """WebDataset's tars: files of one key, up to the first dot of the base name, are a sample.

    Items are dicts by ending with ``columns``, and else pairs: of the one image, and of the first
    of ``cls``, ``json`` and ``txt`` that there is.
    """

    def __init__(self, files: Sequence[File], columns: Collection[str] | None) -> None:
        with ThreadPoolExecutor(_LISTING_THREADS if files[0].place.is_remote else 1) as pool:
            spans = list(pool.map(_list_tar, files))
        super().__init__(files, list(map(len, spans)), columns)
        self._spans = np.concatenate(spans)
        self._requests = Requests()

    def expect(self, indices: Sequence[int]) -> None:
        if self.is_remote:
            self._requests.expect(indices, self._submit)

    def _submit(self, index: int) -> Future[bytes]:
        file: File = self._files[self._file_of[index]]
        return file.place.submit(file.name, *self._spans[index].tolist())

    def _read(self, index: int, number: int, row: int) -> Any:
        data = self._requests.take(index, self._submit).result()
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            members = {member.suffix: member for member in _members(tar)}
        values: dict[str, Any] = {}
        for suffix in self._chosen(list(members)):
            if suffix == _KEY:
                values[_KEY] = next(iter(members.values())).key
                continue
            info = members[suffix].info
            content = data[info.offset_data : info.offset_data + info.size]
            values[suffix] = _decoder_of(suffix)(content)
        return tuple(values.values()) if self._columns is None else values

    def _chosen(self, suffixes: list[str]) -> list[str]:
        """The files that are asked for, of those that a sample has."""
        if self._columns is not None:
            return self._choose([*suffixes, _KEY])
        images = [suffix for suffix in suffixes if _decoder_of(suffix) is decode_image]
        targets = [suffix for suffix in _TARGETS if suffix in suffixes]
        if len(images) != 1 or not targets:
            raise ValueError(
                f"it has the files {', '.join(suffixes)}, and not one image with one of "
                f"{', '.join(_TARGETS)}. Say which are meant: columns={{'sample': 'jpg', 'target': "
                "'npy'}, or the like"
            )
        return [images[0], targets[0]]


def _list_tar(file: File) -> np.ndarray:
    """Of each sample the first byte, of a header, and the one behind the last: int64 (N, 2).

    What lies between is a tar of its own, but for its end.
    """
    spans = []
    with _naming(f"{file} cannot be read"), file.place.open(file.name) as stream:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for _, members in groupby(_members(tar), attrgetter("key")):
                suffixes: set[str] = set()
                infos = []
                for member in members:
                    _check_member(member, suffixes, file.size_bytes)
                    suffixes.add(member.suffix)
                    infos.append(member.info)
                blocks = -(-infos[-1].size // tarfile.BLOCKSIZE)
                spans.append((infos[0].offset, infos[-1].offset_data + blocks * tarfile.BLOCKSIZE))
            stream.seek(tar.offset)
        if stream.read(512) != bytes(512):
            raise ValueError("it is cut off, or damaged: it does not end as a tar does")
    return np.array(spans, np.int64).reshape(-1, 2)


def _members(tar: tarfile.TarFile) -> Iterator[_Member]:
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # which would grow
        name = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", info.name)
        is_meta = re.search(r"(?:^|/)__[^/]*__(?:$|/|\.)", info.name)
        if info.isreg() and name is not None and not is_meta:
            yield _Member(name[1], name[2].lower(), info)


def _check_member(member: _Member, suffixes: Collection[str], size_bytes: int) -> None:
    name = member.info.name
    if member.info.issparse() or member.info.offset_data + member.info.size > size_bytes:
        raise ValueError(f"its file {name} does not lie within it")
    if member.suffix.rpartition(".")[2] in _PICKLED:
        raise ValueError(f"its file {name} is pickled, and what is not trusted is not unpickled")
    if member.suffix in suffixes:
        raise ValueError(f"it holds {name} twice")


def _decoder_of(suffix: str) -> Callable[[bytes], Any]:
    return _DECODERS.get(suffix.rpartition(".")[2], bytes)


# Parquet and Arrow

_IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")


class _Table(NamedTuple):
    """An open file of rows: its columns, how many rows each group has, and what reads a group."""

    columns: list[str]
    counts: list[int]
    read: Callable[[int, list[str]], Any]


class _Latest(threading.local):
    """The file and the rows that each thread has read last; pickles as nothing."""

    file: File | None = None
    table: Any = None
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
        self._groups: list[int] = []
        for file in files:
            with _naming(f"{file} cannot be read"):
                found = _open_table(file).counts
            counts += found
            owners += [file] * len(found)
            self._groups += range(len(found))
        super().__init__(owners or files, counts, columns)
        self._latest = _Latest()

    def _read(self, index: int, number: int, row: int) -> Any:
        latest = self._latest
        if latest.number != number:
            file = self._files[number]
            latest.number = -1
            latest.rows = None  # before there are others
            if latest.file is not file:
                latest.table = _open_table(file)
                latest.file = file
            table = latest.table
            latest.rows = table.read(self._groups[number], self._choose(table.columns))
            latest.number = number
        (item,) = latest.rows.slice(row, 1).to_pylist()
        return {name: _decode_value(value) for name, value in item.items()}


def _open_table(file: File) -> _Table:
    """A Parquet file, or an Arrow file, which is mapped where it lies here."""
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
        parquet = pyarrow.parquet.ParquetFile(data)
        facts = parquet.metadata
        counts = [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]

        def read_group(group: int, columns: list[str]) -> Any:
            return parquet.read_row_group(group, columns=columns, use_threads=False)

        return _Table(parquet.schema_arrow.names, counts, read_group)
    is_stream = data.read(6) != b"ARROW1"
    data.seek(0)
    if is_stream:
        reader = pyarrow.ipc.open_stream(data)
        batches = list(reader)
    else:
        reader = pyarrow.ipc.open_file(data)
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]

    def read_batch(group: int, columns: list[str]) -> Any:
        batches[group].validate(full=True)
        return batches[group].select(columns)

    return _Table(reader.schema.names, [batch.num_rows for batch in batches], read_batch)


def _decode_value(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        if value["bytes"] is None:
            raise ValueError(f"it holds the path of an image, {value['path']!r}, and not its bytes")
        return decode_image(value["bytes"])
    if not isinstance(value, bytes):
        return value
    is_image = value.startswith(_IMAGE_STARTS) or value[8:12] == b"WEBP"
    return decode_image(value) if is_image else value
