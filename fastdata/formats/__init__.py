"""Other people's datasets, map-style: WebDataset tars, LitData and MDS folders, Parquet and Arrow files.

A sample's own bytes are read when it is asked for; what is compressed as a whole, row groups and record batches are
read whole, and each thread keeps the last. Nothing is ever unpickled, and sizes and offsets are held against the files
before they are used. The only door to pyarrow.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from glob import glob
from typing import Any

import numpy as np

from fastdata.errors import RemoteError, is_url
from fastdata.formats.chunks import LitDataChunks, MosaicShards
from fastdata.formats.files import File, Shards, array_of
from fastdata.images import IMAGE_EXTENSIONS, decode_image
from fastdata.remote import Entry, Place
from fastdata.shared import PackedPaths

_ENDINGS = {".tar": "tar", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_INDEX = "index.json"
_SPLIT = re.compile(r"(?:^|[/_.-])(train|val|valid|validation|test)(?=[/_.-])")
_INDEX_THREADS = 16


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
    files: list[File] = []
    for text in expanded:
        if _is_pattern(text) or _kind(text):
            files += _matching(text, storage_options)
        elif len(expanded) == 1 and (is_url(text) or os.path.isdir(text)):
            place = Place(text, storage_options)
            found = [File(place, *entry) for entry in place.find() if not entry.name.startswith((".", "cache-"))]
            files = [f if f.size_bytes >= 0 else f._replace(size_bytes=place.size(f.name)) for f in found]
            indexed = _open_indexed(place, files, only)
            if indexed is not None:
                return indexed
            ours = [file for file in files if file.name.endswith(tuple(_ENDINGS))]
            files = ours or [file for file in files if _kind(file.name)]
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
    if re.search(r"\.(tgz|tar\.(gz|bz2|xz|zst|lz4))$", name):
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


def _matching(text: str, storage_options: Mapping[str, Any] | None) -> list[File]:
    """The file of a path, or the files of a pattern, sorted."""
    parts = text.split("/")
    fixed = next((k for k, part in enumerate(parts) if _is_pattern(part)), len(parts) - 1)
    place, name = Place("/".join(parts[:fixed]) or ("/" if text[0] == "/" else "."), storage_options), parts[fixed:]
    if not _is_pattern(text):
        tag = 0 if place.is_remote else os.stat(text).st_mtime_ns
        return [File(place, name[0], place.size(name[0]), tag)]
    if place.is_remote:
        depth, found = len(name) - 1, place.find()
        entries = [each for each in found if each.name.count("/") == depth and fnmatchcase(each.name, "/".join(name))]
    else:
        paths = [
            (os.path.relpath(path, place.url), os.stat(path)) for path in sorted(glob(text)) if os.path.isfile(path)
        ]
        entries = [Entry(path, facts.st_size, facts.st_mtime_ns) for path, facts in paths]
    files = [File(place, *entry) for entry in entries if _kind(entry.name)]
    if not files:
        raise FileNotFoundError(f"no .tar, .parquet, .arrow or .feather file is like {text}")
    return files


def _open_indexed(place: Place, files: list[File], only: Collection[str] | None) -> Any:
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


# WebDataset

_REFUSED = ("pyd", "pickle", "pkl", "pth", "pt")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript")
_TARGETS = ("cls", "json", "txt")


class TarShards(Shards):
    """WebDataset's tars: files of one key, up to the first dot of the base name, are a sample.

    Items are dicts by ending with ``only``, and else pairs: of the one image, and of the first of ``cls``, ``json`` and
    ``txt`` that there is.
    """

    def __init__(self, files: Sequence[File], only: Collection[str] | None) -> None:
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
        found = self._chosen(index)
        start, stop = self._span(number, row, index)
        data, values = self.fetch(number, index, (start, stop)), {}
        for suffix, (first, last) in found.items():
            values[suffix] = _member(suffix, data[first - start : last - start])
        if self._only is None:
            return tuple(values.values())
        if "__key__" in self._only:
            first, last = (int(self._keys.ends[k]) if k >= 0 else 0 for k in (index - 1, index))
            values["__key__"] = os.fsdecode(self._keys.blob[first:last].tobytes())
        return values

    def _span(self, number: int, row: int, index: int) -> tuple[int, int]:
        spans = self._chosen(index).values()
        return min((start for start, _ in spans), default=0), max((stop for _, stop in spans), default=0)

    def _chosen(self, index: int) -> dict[str, tuple[int, int]]:
        """First and last byte of the files of a sample that are asked for, by ending."""
        spans = self._spans[self._first[index] : self._first[index + 1]].tolist()
        found = {self._suffixes[suffix]: (start, start + size) for suffix, start, size in spans}
        if self._only is not None:
            return {suffix: found[suffix] for suffix in self.wanted([*found, "__key__"]) if suffix != "__key__"}
        images = [suffix for suffix in found if _is_image(suffix)]
        targets = [suffix for suffix in _TARGETS if suffix in found]
        if len(images) != 1 or not targets:
            raise ValueError(
                f"it has the files {', '.join(found)}, and not one image with one of {', '.join(_TARGETS)}. Say "
                "which are meant: columns={'sample': 'jpg', 'target': 'npy'}, or the like"
            )
        return {suffix: found[suffix] for suffix in (images[0], targets[0])}


def _list_tar(file: File) -> list[tuple[str, list[tuple[str, int, int]]]]:
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
    values = array_of(data[stream.tell() :], dtype, shape[::-1] if is_fortran else shape)
    return values.transpose() if is_fortran else values


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


class ArrowTables(Shards):
    """Rows of Parquet or Arrow files as dicts; bytes of an image, as Hugging Face writes them too, are opened."""

    def __init__(self, files: Sequence[File], only: Collection[str] | None) -> None:
        import_arrow()
        groups = [(file, number, count) for file in files for number, count in enumerate(_row_counts(file))]
        super().__init__([file for file, _, _ in groups], [count for _, _, count in groups], only)
        self._numbers = [number for _, number, _ in groups]
        if groups:
            self.wanted(_schema_names(groups[0][0]))

    def _item(self, number: int, row: int, index: int) -> Any:
        table = self.keep("rows", number, partial(self._read, number))
        (item,) = table.slice(row, 1).to_pylist()
        return {name: _opened(value) for name, value in item.items()}

    def _read(self, number: int) -> Any:
        file = self._files[number]
        opened = self.keep("file", str(file), partial(_open_arrow, file))
        if _kind(file.name) == "parquet":
            columns = None if self._only is None else self.wanted(opened.schema_arrow.names)
            return opened.read_row_group(self._numbers[number], columns=columns, use_threads=False)
        batch = opened[self._numbers[number]]
        batch.validate(full=True)
        return batch.select(self.wanted(batch.schema.names))


def _open_arrow(file: File) -> Any:
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


def _row_counts(file: File) -> list[int]:
    try:
        opened = _open_arrow(file)
        if _kind(file.name) == "parquet":
            facts = opened.metadata
            return [facts.row_group(k).num_rows for k in range(facts.num_row_groups)]
        return [batch.num_rows for batch in opened]
    except (RemoteError, FileNotFoundError):
        raise
    except (ValueError, OSError, import_arrow().ArrowException) as problem:
        raise ValueError(f"{file} cannot be read: {problem}") from problem


def _schema_names(file: File) -> list[str]:
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
