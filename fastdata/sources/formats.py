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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import glob
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import RemoteError, hide_secrets, is_url, local_path, refuse_secrets
from fastdata.pixels.images import IMAGE_EXTENSIONS, decode_image
from fastdata.sources.remote import MISSING, Place, Requests, StorageChoice, facts_of

_KINDS = {".tar": "tar", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_SPLIT = re.compile(r"(?:^|[/_.-])(train|val|valid|validation|test)(?=[/_.-])")
_LISTING_THREADS = 16
_OTHERS = {
    "shards": (
        "MDS shards of mosaicml-streaming",
        "streaming.StreamingDataset({where}={url!r}, batch_size=1)",
    ),
    "chunks": ("chunks of litdata", "litdata.StreamingDataset({url!r})"),
}
"""By a key of ``index.json``: what lies there, and the call that reads it."""


Names = Sequence[str] | None
"""That items shall have; None for what a kind of files has of itself."""
Spans = list[tuple[int, int]]


class File(NamedTuple):
    place: Place
    name: str
    size_bytes: int
    tag: int

    def __str__(self) -> str:
        return self.place.at(self.name)


# What lies at a path


def open_dataset(paths: Any, storage_options: StorageChoice = None, columns: Names = None) -> Any:
    """The map-style dataset of files; None where they are of no known kind.

    Args:
        paths: a path or URL of a folder or file, or a list of these; ``{000..009}``, and ``*`` and
            ``?`` in the name of a file, stand for several.
        storage_options: for the file system of URLs.
        columns: that items shall have.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: files are damaged, of several kinds, or of a kind that is not read here; says
            what reads it.
        ImportError: pyarrow or the URL's file system is not installed.
    """
    there = []
    for path in paths if isinstance(paths, list) else [paths]:
        refuse_secrets(os.fsdecode(path))
        for text in _expand_braces(local_path(path)):
            there += _find_files(text, storage_options)
    files = [File(*place, *facts) for place, facts in zip(there, facts_of(there), strict=True)]
    for file in files:
        if (file.size_bytes, file.tag) == MISSING:
            raise FileNotFoundError(f"{file} is not there")
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
    """Yield all texts that a pattern with ``{000..009}`` or ``{a,b}`` stands for, as bash has them.

    Braces in the name of a file or folder that exists are part of the name.
    """
    for braces in re.finditer(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text):
        end = re.search(r"[/\\]|\Z", text[braces.end() :])
        if end is None or not os.path.exists(text[: braces.end() + end.start()]):
            break
    else:
        yield text
        return
    first, last, words = braces.groups()
    if words is None:
        choices = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    else:
        choices = words.split(",")
    for choice in choices:
        yield from _expand_braces(text[: braces.start()] + choice + text[braces.end() :])


def _find_files(text: str, storage_options: StorageChoice) -> list[tuple[Place, str]]:
    folder, name = os.path.split(text)
    is_pattern = re.search(r"[*?]", name) and not os.path.exists(text)
    if is_pattern or _kind_of(name):
        place = Place(folder or ".", storage_options)
        names = _match(place, name) if is_pattern else [name]
    elif is_url(text) or os.path.isdir(text):
        place = Place(text, storage_options)
        names = _list_folder(place)
    else:
        return []
    return [(place, name) for name in names]


def _match(place: Place, pattern: str) -> list[str]:
    there = (
        place.find(maxdepth=1).result()
        if place.is_remote
        else sorted(glob(pattern, root_dir=place.url))
    )
    names = [name for name in there if fnmatchcase(name, pattern) and _kind_of(name)]
    if not pattern.startswith((".", "cache-")):
        names = list(filter(_is_data, names))
    if not names:
        raise FileNotFoundError(
            f"no .tar, .parquet, .arrow or .feather file is like {place.at(pattern)}"
        )
    return names


def _is_data(name: str) -> bool:
    """Return False for files of other programs, in whatever folder they are.

    These are hidden files, such as the ._NAME of macOS, and what Hugging Face has computed and
    keeps in cache-*.arrow next to the rows of a dataset.
    """
    *folders, base = name.replace(os.sep, "/").split("/")
    is_hidden = any(part.startswith(".") for part in (*folders, base))
    return not is_hidden and not re.fullmatch(r"cache-.*\.arrow", base)


def _list_folder(place: Place) -> list[str]:
    names = list(place.find().result())
    if "index.json" in names:
        index = json.loads(place.read("index.json"))
        where = "remote" if place.is_remote else "local"
        for what, call in (_OTHERS[key] for key in _OTHERS if key in index):
            raise ValueError(
                f"{place} holds {what}, which its own package reads, as a map-style dataset. "
                f"Install it, and give CachedDataset({call.format(where=where, url=place.url)})"
            )
    names = list(filter(_is_data, names))
    chosen = [name for name in names if name.endswith(tuple(_KINDS))]
    chosen = chosen or list(filter(_kind_of, names))  # which says what is wrong with others
    splits = sorted({match[1] for name in chosen for match in _SPLIT.finditer(name)})
    if len(splits) > 1:
        raise ValueError(
            f"{place} holds the splits {', '.join(splits)}; give the files of one by a pattern, "
            f"such as {place}/{splits[0]}-*"
        )
    return chosen


# Samples that lie in files


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Raise errors as one that names the file, or the sample of it."""
    try:
        yield
    except (ImportError, RemoteError, FileNotFoundError):
        raise
    except Exception as problem:  # noqa: BLE001  # what decodes raises anything
        said = hide_secrets(f"{what}: {type(problem).__name__}: {problem}")
        # The text and the traceback of a client's error may show credentials.
        raise ValueError(said) from (None if "://" in what else problem)


class _Latest(threading.local):
    """The file and the rows that each thread has read last; pickles as nothing."""

    file: File | None = None
    read_group: Any = None
    group: int | None = None
    rows: Any = None

    def __reduce__(self) -> Any:
        return _Latest, ()


class FileSamples:
    """Samples of several files, in their order; pickles, and several threads may read at once."""

    def __init__(self, files: Sequence[File], columns: Names) -> None:
        self._files = files
        self._columns = columns
        self._requests = Requests()
        self._latest = _Latest()
        self.is_remote = files[0].place.is_remote
        facts = repr(sorted({(file.name, file.size_bytes, file.tag) for file in files}))
        digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
        self._fastdata_identity = f"{len(files)} files {digest}"
        """The same in every run, until a file is another: a cache is known by it."""
        with ThreadPoolExecutor(_LISTING_THREADS) as pool:
            listed = list(pool.map(self._list_named, files))
        self._starts = np.cumsum([0, *map(len, listed)])
        self._where = np.concatenate(listed)

    def _list_named(self, file: File) -> np.ndarray:
        with _naming(f"{file} cannot be read"):
            return np.array(self._list(file), np.int64).reshape(-1, 2)

    def _list(self, file: File) -> Spans:
        """Of each sample in a file two numbers, by which ``_read`` finds it."""
        raise NotImplementedError

    def _read(self, index: int, file: File) -> Any:
        raise NotImplementedError

    def expect(self, indices: Sequence[int]) -> None:
        """Fetch these samples in the background, where that can be done; asked if ``is_remote``."""

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number = self._file_of(index)
        with _naming(f"number {index - self._starts[number]} of {self._files[number]}"):
            return self._read(index, self._files[number])

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1


# WebDataset

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **{ending.removeprefix("."): decode_image for ending in IMAGE_EXTENSIONS},
    "cls": int,
    "txt": bytes.decode,
    "json": json.loads,
    "npy": lambda data: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False),
}
"""By the last ending of a file; others stay bytes."""
_TARGETS = ("cls", "json", "txt")


class TarSamples(FileSamples):
    """WebDataset's tars: files of one key, up to the first dot of the base name, are a sample.

    Items are dicts by ending with ``columns``, and else pairs: of the one image, and of the first
    of ``cls``, ``json`` and ``txt`` that there is.
    """

    def expect(self, indices: Sequence[int]) -> None:
        self._requests.expect(indices, self._submit)

    def _submit(self, index: int) -> Future[bytes]:
        file = self._files[self._file_of(index)]
        return file.place.submit(file.name, *self._where[index].tolist())

    def _list(self, file: File) -> Spans:
        """The first byte of a sample, of a header, and the one behind its last.

        What lies between is a tar of its own, but for its end.
        """
        spans = []
        with file.place.open(file.name) as stream:
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                for _, members in groupby(_members(tar), itemgetter(0)):
                    infos = {}
                    for _, suffix, info in members:
                        if info.issparse() or info.offset_data + info.size > file.size_bytes:
                            raise ValueError(f"its file {info.name} does not lie within it")
                        if suffix in infos:
                            raise ValueError(f"it holds {info.name} twice")
                        infos[suffix] = info
                        end = tar.offset
                    spans.append((next(iter(infos.values())).offset, end))
                stream.seek(tar.offset)
            if stream.read(512) != bytes(512):
                raise ValueError("it is cut off, or damaged: it does not end as a tar does")
        return spans

    def _read(self, index: int, file: File) -> Any:
        data = self._requests.take(index, self._submit).result()
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            contents = {}
            for key, suffix, info in _members(tar):  # noqa: B007  # all have one key
                contents[suffix] = data[info.offset_data : info.offset_data + info.size]
        names = _pair_of(list(contents)) if self._columns is None else self._columns
        item = {}
        for name in names:
            decode = _DECODERS.get(name.rpartition(".")[2], bytes)
            if name != "__key__" and name not in contents:
                raise ValueError(
                    f"sample {key!r} has no {name!r}, but columns= asks for it. It has "
                    f"{', '.join(map(repr, contents))}. The files of a sample must follow each "
                    "other in the tar (tar --sort=name)"
                )
            item[name] = key if name == "__key__" else decode(contents[name])
        return tuple(item.values()) if self._columns is None else item


def _pair_of(names: list[str]) -> list[str]:
    """The one image, and its target."""
    images = [name for name in names if f".{name}".endswith(IMAGE_EXTENSIONS)]
    targets = [name for name in _TARGETS if name in names]
    if len(images) != 1 or not targets:
        raise ValueError(
            f"it has the files {', '.join(names)}, and not one image with one of "
            f"{', '.join(_TARGETS)}. Say which are meant: columns={{'sample': 'jpg', 'target': "
            "'npy'}, or the like"
        )
    return [images[0], targets[0]]


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """The files of samples: key, ending, and what the tar says of each; none of ``__meta__``."""
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # which would grow
        name = re.fullmatch(r"(?!(?:.*/)?__[^/]*__[/.])((?:.*/)?[^./]+)\.([^/]+)", info.name)
        if info.isreg() and name is not None:
            yield name[1], name[2].lower(), info


# Parquet and Arrow

_IMAGE_START = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II\*\0|MM\0\*|.{8}WEBP", re.DOTALL)


class ArrowRows(FileSamples):
    """Rows of Parquet or Arrow files as dicts.

    Bytes of an image, as Hugging Face writes them too, are opened.
    """

    def _list(self, file: File) -> Spans:
        counts, _ = _open_table(file)
        return [(group, row) for group, count in enumerate(counts) for row in range(count)]

    def _read(self, index: int, file: File) -> Any:
        group, row = self._where[index].tolist()
        latest = self._latest
        if latest.file is not file:
            _, latest.read_group = _open_table(file)
            latest.file = file
            latest.group = None
        if latest.group != group:
            latest.group = latest.rows = None  # before there are others
            latest.rows = latest.read_group(group, columns=self._columns)
            latest.group = group
        (item,) = latest.rows.slice(row, 1).to_pylist()
        return {name: _decode_value(value) for name, value in item.items()}


def _open_table(file: File) -> tuple[list[int], Callable[..., Any]]:
    """How many rows each group of a file has, and what reads some columns of one.

    An Arrow file is mapped where it lies here.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise ImportError(
            "Parquet and Arrow files need pyarrow: pip install 'fastdata[arrow]'"
        ) from missing
    place = file.place
    data = place.open(file.name) if place.is_remote else pyarrow.memory_map(str(file))
    if _kind_of(file.name) == "parquet":
        parquet = pyarrow.parquet.ParquetFile(data)
        groups = range(parquet.num_row_groups)
        counts = [parquet.metadata.row_group(group).num_rows for group in groups]
        there = parquet.schema_arrow.names

        def read_rows(group: int, columns: Names) -> Any:
            columns = _columns_among(there, columns)
            return parquet.read_row_group(group, columns=columns, use_threads=False)

        return counts, read_rows
    is_file = data.read(6) == b"ARROW1"
    data.seek(0)
    reader = pyarrow.ipc.open_file(data) if is_file else pyarrow.ipc.open_stream(data)
    batches = reader.read_all().to_batches()

    def read_batch(group: int, columns: Names) -> Any:
        batches[group].validate(full=True)
        columns = _columns_among(reader.schema.names, columns)
        return batches[group] if columns is None else batches[group].select(columns)

    return list(map(len, batches)), read_batch


def _columns_among(there: Sequence[str], columns: Names) -> Names:
    """Return None, for all, if a column is not there: the error then names all that are."""
    return columns if columns is not None and set(columns) <= set(there) else None


def _decode_value(value: Any) -> Any:
    data = value
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        data = value["bytes"]
        if data is None:
            raise ValueError(f"it holds the path of an image, {value['path']!r}, and not its bytes")
    elif not (isinstance(value, bytes) and _IMAGE_START.match(value)):
        return value
    return decode_image(data, upright=data is not value)  # as `datasets` turns its images
