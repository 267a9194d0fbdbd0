"""WebDataset's tars as a map-style dataset.

Each tar is read once from start to end to find where its samples are. After that, reading a sample
reads only the bytes of that sample. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import RemoteError
from fastdata.paths import AnyPath, hide_secrets, is_url, local_path, refuse_secrets
from fastdata.pixels.decode import IMAGE_EXTENSIONS, decode_image
from fastdata.sources.remote import MISSING, Place, stat_files
from fastdata.sources.requests import Requests
from fastdata.sources.storage_options import StorageChoice

_SPLIT = re.compile(r"(?:^|[/_.-])(train|val|valid|validation|test)(?=[/_.-])")

_LISTING_THREADS = 16

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **{ending.removeprefix("."): decode_image for ending in IMAGE_EXTENSIONS},
    "cls": int,
    "txt": bytes.decode,
    "json": json.loads,
    "npy": lambda data: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False),
}
"""Decoders by the last ending of a file name. Files with other endings are returned as bytes."""

_TARGETS = ("cls", "json", "txt")


class Tar(NamedTuple):
    """A tar file, its size, and a tag: a number that changes with its content."""

    place: Place
    name: str
    size_bytes: int
    tag: int

    def __str__(self) -> str:
        return self.place.at(self.name)


def open_tars(
    paths: AnyPath | list[AnyPath],
    storage_options: StorageChoice = None,
    columns: Sequence[str] | None = None,
) -> TarSamples | None:
    """Open the tars at paths as one dataset; return None if no path leads to a tar.

    Args:
        paths: a path or URL of a folder or a tar, or a list of these. ``{000..009}`` stands for
            several names, as do ``*`` and ``?`` in the name of a file.
        storage_options: options for the file system of URLs.
        columns: endings of the files that an item consists of; None for an image and its target.

    Raises:
        FileNotFoundError: a tar does not exist, or nothing matches a pattern.
        ValueError: a tar is damaged or compressed, or a folder holds several splits.
        ImportError: the URL's file system is not installed.
    """
    there = []
    for path in paths if isinstance(paths, list) else [paths]:
        refuse_secrets(os.fsdecode(path))
        for text in _expand_braces(local_path(path)):
            there += _find_tars(text, storage_options)
    tars = [Tar(*place, *stat) for place, stat in zip(there, stat_files(there), strict=True)]
    for tar in tars:
        if (tar.size_bytes, tar.tag) == MISSING:
            raise FileNotFoundError(f"{tar} does not exist")
    return TarSamples(tars, columns) if tars else None


class TarSamples:
    """Samples of tars, in order. A sample has the files of one key: their path up to the first dot.

    With ``columns`` an item is a dict from endings to contents. Without, it is a pair: the only
    image, and the first of ``cls``, ``json`` and ``txt`` that exists. Several threads may read at
    once. Can be pickled.
    """

    def __init__(self, tars: Sequence[Tar], columns: Sequence[str] | None) -> None:
        self._tars = tars
        self._columns = columns
        self._requests = Requests()
        self.is_remote = tars[0].place.is_remote
        digest = hashlib.blake2b(
            repr([tar[1:] for tar in tars]).encode(), digest_size=8
        ).hexdigest()
        # The same in every run until a file changes: the cache of the samples is found by it.
        self._fastdata_identity = f"{len(tars)} files {digest}"
        # The headers are between the samples, so a tar behind a URL is read completely.
        with ThreadPoolExecutor(_LISTING_THREADS) as pool:
            listed = list(pool.map(_list_samples, tars))
        self._starts = np.cumsum([0, *map(len, listed)])
        self._spans = np.concatenate(listed)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number = self._number_of(index)
        position = index - self._starts[number]
        with _naming(f"number {position} of {self._tars[number]}"):
            return self._decode(self._requests.take(index, self._submit).result())

    def expect(self, indices: Sequence[int]) -> None:
        """Fetch these samples in the background."""
        self._requests.expect(indices, self._submit)

    def _number_of(self, index: int) -> int:
        """Return the number of the tar that holds a sample."""
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _submit(self, index: int) -> Future[bytes]:
        tar = self._tars[self._number_of(index)]
        return tar.place.submit(tar.name, *self._spans[index].tolist())

    def _decode(self, data: bytes) -> Any:
        """Make an item from the bytes of a sample, which are a part of its tar."""
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            members = list(_members(tar))
        # A header may state any size, but a slice is never larger than ``data``.
        contents = {
            ending: data[info.offset_data : info.offset_data + info.size]
            for _, ending, info in members
        }
        names = _image_and_target(contents) if self._columns is None else self._columns
        key = members[0][0]
        item: dict[str, Any] = {}
        for name in names:
            if name == "__key__":
                item[name] = key
                continue
            if name not in contents:
                raise ValueError(
                    f"sample {key!r} has no {name!r}, but columns= names it. It has "
                    f"{', '.join(map(repr, contents))}. The files of a sample must follow each "
                    "other in the tar (tar --sort=name)"
                )
            decode = _DECODERS.get(name.rpartition(".")[2], bytes)
            item[name] = decode(contents[name])
        return tuple(item.values()) if self._columns is None else item


def _list_samples(tar: Tar) -> np.ndarray:
    """Return the first and last byte of each sample in a tar: int64 (N, 2)."""
    with _naming(f"{tar} cannot be read"):
        return np.array(_find_samples(tar), np.int64).reshape(-1, 2)


def _find_samples(tar: Tar) -> list[tuple[int, int]]:
    spans = []
    with tar.place.open(tar.name) as stream:
        with tarfile.open(fileobj=stream, mode="r:") as headers:
            for _, members in groupby(_members(headers), itemgetter(0)):
                starts: dict[str, int] = {}
                for _, ending, info in members:
                    # A damaged header may state any size, for which memory would be reserved later.
                    if info.issparse() or info.offset_data + info.size > tar.size_bytes:
                        raise ValueError(f"its file {info.name} extends beyond the end of the tar")
                    if ending in starts:
                        raise ValueError(f"it holds {info.name} twice")
                    starts[ending] = info.offset
                    end = headers.offset  # read here, as groupby reads the next header afterwards
                # The bytes from its first header to its last byte are a tar without an end mark.
                spans.append((min(starts.values()), end))
            stream.seek(headers.offset)
        # tarfile treats a damaged header as the end, but a complete tar ends with zeros.
        if stream.read(512) != bytes(512):
            raise ValueError(
                "it is cut off or damaged: a tar ends with 512 zeros, but this does not"
            )
    return spans


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield the key, ending and header of each file of a sample, but not of files like __meta__."""
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # else tarfile would keep all headers
        name = re.fullmatch(r"(?!(?:.*/)?__[^/]*__[/.])((?:.*/)?[^./]+)\.([^/]+)", info.name)
        if info.isreg() and name is not None:
            yield name[1], name[2].lower(), info


def _image_and_target(names: Iterable[str]) -> list[str]:
    images = [name for name in names if f".{name}".endswith(IMAGE_EXTENSIONS)]
    for target in _TARGETS:
        if target in names and len(images) == 1:
            return [*images, target]
    raise ValueError(
        f"it has the files {', '.join(names)}, but exactly one image and one of "
        f"{', '.join(_TARGETS)} are needed. Name the files to read, such as "
        "columns={'sample': 'jpg', 'target': 'npy'}"
    )


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Raise each error as a ValueError that names the file, or the sample in it."""
    try:
        yield
    except (RemoteError, FileNotFoundError):
        raise
    except Exception as problem:  # noqa: BLE001  # decoders raise anything
        said = hide_secrets(f"{what}: {type(problem).__name__}: {problem}")
        # The text and the traceback of a client's error may show credentials.
        raise ValueError(said) from (None if "://" in what else problem)


def _expand_braces(text: str) -> Iterator[str]:
    """Yield all texts that a pattern with ``{000..009}`` or ``{a,b}`` stands for, as in bash.

    Braces in the name of a file or folder that exists are part of the name.
    """
    for braces in re.finditer(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text):
        name = re.match(r"[^/\\]*", text[braces.end() :])
        assert name is not None
        if os.path.exists(text[: braces.end()] + name[0]):
            continue
        first, last, words = braces.groups()
        if words is None:
            choices = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        else:
            choices = words.split(",")
        for choice in choices:
            yield from _expand_braces(text[: braces.start()] + choice + text[braces.end() :])
        return
    yield text


def _find_tars(text: str, storage_options: StorageChoice) -> list[tuple[Place, str]]:
    folder, name = os.path.split(text)
    place = Place(folder or ".", storage_options)
    if re.search(r"[*?]", name) and not os.path.exists(text):
        names = _match(place, name)
    elif _is_tar(name):
        names = [name]
    elif is_url(text) or os.path.isdir(text):
        place = Place(text, storage_options)
        names = _list_folder(place)
    else:
        names = []
    return [(place, name) for name in names]


def _is_tar(name: str) -> bool:
    if re.search(r"\.(tgz|tar\.(gz|bz2|xz|zst|lz4))$", name):
        raise ValueError(
            f"{name} is compressed as a whole, so no sample in it can be read on its own. "
            "Decompress it to a .tar file, which is hardly larger if it holds JPEGs."
        )
    return name.endswith(".tar")


def _match(place: Place, pattern: str) -> list[str]:
    """Return the tars in a folder that match; hidden ones only if the pattern begins with a dot."""
    there = place.find(maxdepth=1).result() if place.is_remote else os.listdir(place.url)
    names = []
    for name in sorted(there):
        # macOS writes a hidden ._NAME next to each file on other file systems.
        is_hidden = name.startswith(".") and not pattern.startswith(".")
        if fnmatchcase(name, pattern) and not is_hidden and _is_tar(name):
            names.append(name)
    if not names:
        raise FileNotFoundError(f"no .tar file matches {place.at(pattern)}")
    return names


def _list_folder(place: Place) -> list[str]:
    """Return the tars in a folder and below it, without hidden files and folders."""
    there = place.find().result()
    names = [name for name in there if not re.search(r"(?:^|[/\\])\.", name)]
    tars = [name for name in names if name.endswith(".tar")]
    if not tars:
        for name in names:
            _is_tar(name)  # raises for a compressed one
    splits = sorted({match[1] for name in tars for match in _SPLIT.finditer(name)})
    if len(splits) > 1:
        raise ValueError(
            f"{place} holds the splits {', '.join(splits)}, but a dataset is one split. Give its "
            f"files by a pattern, such as {place}/{splits[0]}-*"
        )
    return tars
