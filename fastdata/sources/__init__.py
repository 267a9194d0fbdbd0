"""Which samples exist, and how one is read. Nothing here keeps a sample."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch

from fastdata.errors import (
    NO_FILE,
    READ_FLAGS,
    AnyPath,
    fault_of,
    hide_secrets,
    holds_secret,
    is_url,
    kind_of,
    local_path,
    refuse_chain,
    refuse_secrets,
    with_retries,
)
from fastdata.machine import user_cache
from fastdata.machine.shared import ListView
from fastdata.pixels.images import Loader, Opening, decode_image, is_image, load_image, opening_of
from fastdata.report import log
from fastdata.sources.formats import TarSamples
from fastdata.sources.remote import Place, Requests, StorageChoice, facts_of, fleeting_folder

Indices = Sequence[int]
Pair = tuple[Any, Any]
"""Sample and target."""


# What items are


@dataclass(frozen=True, slots=True)
class ItemKeys:
    """Items that are no pairs: how they split into sample and target, and are joined again.

    The sample of a dict is the value of ``image``; the target is the value of the other key, or a
    dict of several. The sample of a tuple is its first value; the target is a tuple of the others.
    Where there is no other value, the target is 0.

    A namedtuple is ``named`` by its module and class, so that a cache can tell: it is one again
    where that is imported, else a tuple.
    """

    names: tuple[str, ...]
    image: str
    kind: Literal["dict", "tuple", "alone"] = "dict"
    named: str = ""

    def split(self, item: Any) -> Pair:
        if self.kind == "alone":
            return item, 0
        if self.kind == "tuple":
            return item[0], item[1] if len(item) == 2 else tuple(item[1:]) or 0
        others = {name: item[name] for name in self.names if name != self.image}
        return item[self.image], others if len(others) != 1 else others.popitem()[1]

    def join(self, sample: Any, target: Any, kind: Any = tuple) -> Any:
        """The item again; or a batch of them, whose tuples are lists as in ``default_collate``."""
        if self.kind == "alone":
            return sample
        if self.kind == "dict":
            target = kind(target) if type(target) is tuple else target  # texts
            others = dict.fromkeys(self.names, target) if len(self.names) == 2 else target
            return {name: sample if name == self.image else others[name] for name in self.names}
        count = len(self.names)
        values = (sample, *target) if count > 2 else (sample, target)[:count]
        if self.named:
            with contextlib.suppress(KeyError, AttributeError):  # of what is not imported
                module, _, name = self.named.partition(":")
                named = attrgetter(name)(sys.modules[module])
                kind = named._make if named._fields == self.names else kind
        return kind(values)


def chosen_keys(columns: Mapping[str, Any]) -> ItemKeys:
    """The keys of a dict that are asked for as sample and target.

    Raises:
        ValueError: it is not said which is which.
    """
    target: Any = columns.get("target")
    names: list[Any] = [columns.get("sample")]
    names += [target] if isinstance(target, str) else target or ()
    if len(columns) != 2 or len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"columns={columns!r} does not say which are sample and target. Give their names, or a "
            "list of several for the target: columns={'sample': 'image', 'target': 'label'}."
        )
    return ItemKeys(tuple(names), names[0])


class Source(Protocol):
    """Samples by index in [0, len), each read again whenever it is asked for.

    ``read`` gives (sample, target), from several threads at once if the source's parts allow it.
    ``expect`` says which ones this process reads next: worth something where reading is waiting, as
    where the source ``is_remote``. ``path`` names the sample's file, for messages. ``keys`` are
    known once one item was read. ``opening`` is how files are opened, where fastdata can do that.
    """

    @property
    def keys(self) -> ItemKeys | None: ...
    @property
    def opening(self) -> Opening | None: ...
    @property
    def is_remote(self) -> bool: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> Pair: ...
    def expect(self, indices: Indices) -> None: ...
    def path(self, index: int) -> str | None: ...


@dataclass(eq=False, repr=False)
class FileSource:
    """One file per sample, here or behind a URL; paths and targets are read by index only.

    Args:
        paths, targets: of the samples.
        loader: opens a file by its path; without one, samples are the files' bytes. Of a remote
            file, one of the user's own gets the path of a temporary copy.
        place: that all or most remote files lie below. Those that are expected are fetched
            together, in the background.
        facts: of remote files size and tag, int64 (N, 2); -1 where they are not known. A file that
            comes in another size was changed since it was listed, which is an error.
    """

    paths: Sequence[str]
    targets: Sequence[Any]
    loader: Loader | None
    place: Place | None = None
    facts: Any = None
    requests: Requests = field(default_factory=Requests)
    keys: ClassVar[ItemKeys | None] = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def is_remote(self) -> bool:
        return self.place is not None

    @property
    def opening(self) -> Opening | None:
        return opening_of(self.loader)

    def read(self, index: int) -> Pair:
        path = self.paths[index]
        target = self.targets[index]
        if self.loader is not None and not self.is_remote:
            return with_retries(self.loader, path), target
        [data] = self.read_files([index])
        if self.loader is None:
            return np.frombuffer(data, np.uint8), target
        if self.opening is not None:
            return self.opening.decode(data), target
        with fleeting_folder() as folder:
            copied = folder / f"sample{os.path.splitext(path)[1]}"
            copied.write_bytes(data)
            return self.loader(str(copied)), target

    def expect(self, indices: Indices) -> None:
        if self.is_remote:
            self.requests.expect(indices, self._submit)

    def path(self, index: int) -> str:
        return self.paths[index]

    def read_files(self, indices: Indices) -> list[bytes]:
        """Return the bytes of these files."""
        if self.is_remote:
            return [self.requests.take(index, self._submit).result() for index in indices]
        return with_retries(_read_files, chosen(self.paths, indices))

    def _submit(self, index: int) -> Future[bytes]:
        assert self.place is not None
        place, name = self.place.locate(self.paths[index])
        size = int(self.facts[index][0])
        return place.submit(name, size_bytes=None if size < 0 else size)

    def columns_of(self, indices: Indices) -> dict[str, Any]:
        """The fields with what is known of these samples, by index, for another process."""
        columns = {"paths": self.paths, "targets": self.targets, "facts": self.facts}
        return {
            name: {index: column[index] for index in indices}
            for name, column in columns.items()
            if column is not None
        }

    def listing(self) -> np.ndarray | None:
        """Sizes and tags, (2, samples), of remote files."""
        if self.place is None:
            return None
        facts: np.ndarray = np.array(self.facts).T
        unlisted = np.flatnonzero(facts[0] < 0).tolist()
        if unlisted:
            files = map(self.place.locate, chosen(self.paths, unlisted))
            facts[:, unlisted] = np.array(facts_of(files)).T
        return facts


def _read_files(paths: Sequence[str]) -> list[bytes]:
    files = []
    for path in paths:
        fd = os.open(path, READ_FLAGS)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(*NO_FILE, path)
            files.append(io.FileIO(fd, closefd=False).readall())
        finally:
            os.close(fd)
    return files


def chosen(column: Any, indices: Indices) -> list[Any]:
    """Of a column of samples the values of these."""
    if isinstance(column, ListView):
        return column.chosen(indices)
    return [column[index] for index in indices]


class DatasetSource:
    """The items of any map-style dataset of pairs or dicts; its own transform runs in ``read``.

    With ``columns`` the items are dicts, of which those named are sample and target. ``is_format``
    is True for tars, which draw nothing at random.
    """

    opening: ClassVar[Opening | None] = None

    def __init__(self, dataset: Any, columns: ItemKeys | None = None) -> None:
        if isinstance(dataset, str | bytes | os.PathLike):
            raise TypeError(
                f"{hide_secrets(repr(dataset))} is a path, not a dataset. Give "
                "fastdata.ImageFolder the folder of class folders, fastdata.ImageManifest the CSV "
                "file, CachedDataset.from_cache the cache, or CachedDataset the dataset that reads "
                "these files, as datasets.load_dataset or litdata.StreamingDataset does."
            )
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(
                f"{type(dataset).__name__} has no __getitem__ and __len__, so its samples cannot "
                "be read by index. Give a map-style dataset; an iterable one can be collected "
                "first: list(dataset)."
            )
        self.dataset = dataset
        self.columns = columns
        self.keys: ItemKeys | None = None
        self.is_format = isinstance(dataset, TarSamples)
        self.is_remote = self.is_format and dataset.is_remote
        self._form = ""  # of the items read so far

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> Pair:
        item: Any = with_retries(getitem, self.dataset, index)
        if isinstance(item, Mapping):
            item = {name: _opened(value) for name, value in item.items()}
        which = f"item {index} of {type(self.dataset).__name__}"
        if self.columns is not None:
            return _split_by_columns(item, self.columns, which)
        form = _form_of(item)
        if not self._form:
            self.keys = _keys_of(item, form, which)
            self._form = form
        if form != self._form:
            raise TypeError(f"{which} is {form}, others are {self._form}. Give all items one form.")
        return tuple(item) if self.keys is None else self.keys.split(item)

    def expect(self, indices: Indices) -> None:
        if self.is_remote:
            self.dataset.expect(indices)

    def path(self, index: int) -> str | None:
        """The sample's file, where the dataset lists its files in ``samples``.

        As torchvision's do; also through subsets of subsets.
        """
        dataset = self.dataset
        while getattr(dataset, "indices", None) is not None and hasattr(dataset, "dataset"):
            index = int(dataset.indices[index])
            dataset = dataset.dataset
        samples = getattr(dataset, "samples", None)
        if not isinstance(samples, Sequence) or index >= len(samples):
            return None
        path = samples[index]
        if isinstance(path, tuple | list):
            path = next(iter(path), None)
        return os.fspath(path) if isinstance(path, str | os.PathLike) else None


def _split_by_columns(item: Any, columns: ItemKeys, which: str) -> Pair:
    """Split an item as ``columns=`` asks for.

    Raises:
        TypeError: it is not a dict.
        ValueError: it lacks a column; names those that it has.
    """
    if not isinstance(item, Mapping):
        raise TypeError(f"{which} is {_form_of(item)}, but columns= needs items that are dicts")
    missing = [name for name in columns.names if name not in item]
    if missing:
        raise ValueError(
            f"{which} has no {', '.join(map(repr, missing))}, but columns= asks for it. It has "
            f"{', '.join(map(repr, item)) or 'nothing'}."
        )
    return columns.split(item)


def _opened(value: Any) -> Any:
    """Open the image of Hugging Face's ``Image(decode=False)``, turned as its EXIF says.

    ``datasets`` turns the images that it decodes, too. Other values are returned unchanged.
    """
    if not isinstance(value, Mapping) or value.keys() != {"bytes", "path"}:
        return value
    if value["bytes"] is None:
        return with_retries(partial(load_image, upright=True), value["path"])
    return decode_image(value["bytes"], upright=True)


_ALONE = "an image alone"


def _form_of(item: Any) -> str:
    if isinstance(item, dict):
        return f"a dict of {', '.join(sorted(map(str, item)))}"
    if isinstance(item, tuple | list):
        return f"a tuple of length {len(item)}"
    is_alone = isinstance(item, torch.Tensor | np.ndarray) or is_image(item)
    return _ALONE if is_alone else kind_of(item)


def _keys_of(item: Any, form: str, which: str) -> ItemKeys | None:
    """None for a pair."""
    if isinstance(item, dict):
        images = [name for name, value in item.items() if is_image(value)]
        if len(images) == 1 and all(isinstance(name, str) for name in item):
            return ItemKeys(tuple(item), images[0])
        listed = ", ".join(map(str, images or item))
        raise TypeError(
            f"{which} is a dict with {'the images' if images else 'no image among'} {listed}; one "
            "under a name is needed: a PIL image, array or tensor. Wrap the dataset in one whose "
            "__getitem__ returns ((image, mask), target), or say which it is: "
            "columns={'sample': 'image', 'target': 'label'}, or the like."
        )
    if isinstance(item, tuple | list):
        names = getattr(item, "_fields", tuple(map(str, range(len(item)))))
        kind = type(item)
        named = f"{kind.__module__}:{kind.__qualname__}" if hasattr(kind, "_fields") else ""
        return None if names == ("0", "1") else ItemKeys(names, names[0], "tuple", named)
    if form == _ALONE:
        return ItemKeys(("0",), "0", "alone")
    raise TypeError(
        f"{which} is {form}, not a (sample, target) pair, a tuple, a dict with an image "
        "or an image. Wrap the dataset in one whose __getitem__ returns one of these."
    )


# Manifests: CSV files, frames, lists

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_LONGEST_WHOLE = 100
_FLAGS = {"False": "0", "True": "1"}
_MISSING = ("None", "nan", "NaT", "<NA>")
"""How a frame's values that stand for none show themselves; text that reads so is text."""


class Listed(NamedTuple):
    """Samples that a user lists; ``class_to_idx`` is None where no labels are names."""

    paths: list[str]
    targets: Any
    class_to_idx: dict[str, int] | None


class _Table(NamedTuple):
    """Columns by name. Messages call it ``title``, its rows ``row`` and a number: ``line 3``."""

    title: str
    row: str
    numbers: Indices
    columns: Mapping[str, Sequence[Any]]

    def where(self, index: int, column: str) -> str:
        return f"{self.title}, {self.row} {self.numbers[index]}, column {column!r}"

    def texts(self, column: str) -> list[str]:
        texts = []
        for index, value in enumerate(self.columns[column]):
            text = str(_plain(value))  # with blanks at its ends: they may be of a file's name
            is_none = text in _MISSING and not isinstance(value, str)
            if is_none or not text.strip():
                raise ValueError(f"{self.where(index, column)}: the value is missing")
            texts.append(text)
        return texts


def read_manifest(
    manifest: Any,
    root: AnyPath | None = None,
    file: str = "file",
    label: str | Sequence[str] | None = "label",
    id: str | None = None,
    storage_options: StorageChoice = None,
) -> Listed:
    """Read paths and targets from what ``ImageManifest`` takes; see there."""
    labels = [label] if isinstance(label, str) else list(() if label is None else label)
    names = list(dict.fromkeys(name for name in (file, *labels, id) if name is not None))
    folder = ""
    if isinstance(manifest, str | os.PathLike):
        table = _read_csv(manifest, names, storage_options)
        folder = os.path.dirname(table.title)
    elif hasattr(manifest, "columns"):  # a frame of pandas or Polars
        title = f"the {type(manifest).__name__}"
        _check_columns(title, list(manifest.columns), names)
        columns = {name: list(manifest[name]) for name in names}
        table = _Table(title, "row", range(len(manifest)), columns)
    else:
        table = _read_list(manifest, names)
    if not table.numbers:
        raise ValueError(f"{table.title} lists no samples")
    if root is not None:
        folder = Place(root).url if is_url(root) else local_path(root)
    paths = [
        path
        if ":/" in path and is_url(path)
        else os.path.join(folder, local_path(path) if path.startswith("file:/") else path)
        for path in table.texts(file)
    ]
    for index, path in enumerate(paths):
        if "\0" in path:
            raise ValueError(f"{table.where(index, file)}: {path!r} has a NUL, as no path can")
        if holds_secret(path):
            refuse_secrets(path, table.where(index, file))
        if "::" in path and is_url(path):
            refuse_chain(path, table.where(index, file))
    targets: Any = range(len(paths))
    class_to_idx = None
    if isinstance(label, str):
        targets, class_to_idx = _read_labels(table, label)
    elif labels:
        targets = _read_vectors(table, labels)
    if id is not None:
        table.texts(id)  # none is missing
        ids = table.columns[id]
        targets = list(zip(targets, ids, strict=True)) if labels else ids
    return Listed(paths, targets, class_to_idx)


def _read_csv(path: AnyPath, names: list[str], storage_options: StorageChoice) -> _Table:
    if is_url(path):
        place = Place(path, storage_options)
        title = place.url
        data = place.read("")
    else:
        title = os.path.abspath(local_path(path))  # the folder of relative paths
        data = with_retries(Path(title).read_bytes)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{title} is no text in UTF-8 ({problem}). Save it as such.") from problem
    with _long_values(len(text)):
        rows = _read_rows(title, text)
        _, header = next(rows, (1, []))
        _check_columns(title, header, names)
        positions = list(map(header.index, names))
        numbers = []
        picked = []
        for line, row in rows:
            if len(row) > len(header):
                raise ValueError(
                    f"{title}, line {line}: {len(row)} values for {len(header)} columns. "
                    'Put quotes around a value that holds a comma: "a,b.jpg".'
                )
            row += [""] * (len(header) - len(row))
            numbers.append(line)
            picked.append([row[position] for position in positions])
    return _Table(title, "line", numbers, dict(zip(names, zip(*picked, strict=True), strict=False)))


def _read_rows(title: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty, with the line that it begins in."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    while True:
        try:
            row = next(rows, None)
        except csv.Error as problem:
            raise ValueError(
                f"{title}, line {line}: the row that begins here is not CSV ({problem}). Close "
                "the quote that opens a value, and write a quote inside of such a value twice: "
                '"a ""b"".jpg".'
            ) from problem
        if row is None:
            return
        if row:
            yield line, row
        line = rows.line_num + 1


_LIMIT_LOCK = threading.Lock()


@contextlib.contextmanager
def _long_values(most_characters: int) -> Iterator[None]:
    """Let the csv module read values of this length in this block; its limit is the process's."""
    with _LIMIT_LOCK:
        limit = csv.field_size_limit()
        csv.field_size_limit(max(limit, most_characters))
        try:
            yield
        finally:
            csv.field_size_limit(limit)


def _check_columns(title: str, there: list[str], names: list[str]) -> None:
    for name in names:
        if there.count(name) != 1:
            listed = ", ".join(map(repr, there)) or "none, the file is empty"
            problem = "several columns" if name in there else "no column"
            raise ValueError(
                f"{title} has {problem} {name!r}; its columns are: {listed}. Choose with file= and "
                "label=, or label=None where there are no labels."
            )


def _read_list(samples: Iterable[Any], names: list[str]) -> _Table:
    if isinstance(samples, Mapping) or not isinstance(samples, Iterable):
        raise TypeError(
            "a manifest is the path of a CSV file, a frame, or a list of samples, not "
            f"{kind_of(samples)}"
        )
    rows = [(row,) if isinstance(row, str | os.PathLike) else row for row in samples]
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != len(names):
            raise ValueError(
                f"the list, item {index}: {row!r} has not the values {', '.join(names)}, in this "
                "order. Leave out what there is not by label=None and id=None, or give a frame or "
                "the path of a CSV file."
            )
    return _Table(
        "the list",
        "item",
        range(len(rows)),
        dict(zip(names, zip(*rows, strict=True), strict=False)),
    )


def _read_labels(table: _Table, label: str) -> tuple[Any, dict[str, int] | None]:
    """Targets, and the numbers of classes where labels are names."""
    if any(map(_is_vector, table.columns[label])):
        return _stack_vectors(table, label), None
    texts = table.texts(label)
    is_number = [_NUMBER.fullmatch(text.strip()) is not None for text in texts]
    if all(is_number):
        return _parse_numbers(table, label, texts).tolist(), None
    if any(is_number):
        name = is_number.index(False)
        number = is_number.index(True)
        raise ValueError(
            f"{table.where(name, label)}: {texts[name]!r} is a name, but {texts[number]!r} in "
            f"{table.row} {table.numbers[number]} is a number. Write all labels as numbers or all "
            "as names, such as 'class_7'."
        )
    class_to_idx = {name: number for number, name in enumerate(sorted(set(texts)))}
    return [class_to_idx[name] for name in texts], class_to_idx


def _is_vector(value: Any) -> bool:
    is_scalar = isinstance(value, str | int | float)
    return not is_scalar and (isinstance(value, list | tuple) or np.ndim(value) > 0)


def _stack_vectors(table: _Table, label: str) -> torch.Tensor:
    """Stack the vectors of a column, which must have one length."""
    vectors = []
    for index, value in enumerate(table.columns[label]):
        try:
            vectors.append(torch.tensor(_plain(value), device="cpu"))
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ValueError(
                f"{table.where(index, label)}: {value!r} is not a vector of numbers that torch "
                f"can hold: {problem}"
            ) from problem
        if vectors[-1].shape != vectors[0].shape:
            raise ValueError(
                f"{table.where(index, label)}: {value!r} has the shape {list(vectors[-1].shape)}, "
                f"those before it have {list(vectors[0].shape)}. Give all labels one length."
            )
    stacked = torch.stack(vectors)
    return stacked.long() if stacked.dtype == torch.bool else stacked


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _read_vectors(table: _Table, names: Sequence[str]) -> torch.Tensor:
    """int64 (samples, columns) where all are whole numbers, else float32."""
    columns = []
    for name in names:
        texts = [_FLAGS.get(text.strip(), text) for text in table.texts(name)]
        for index, text in enumerate(texts):
            if not _NUMBER.fullmatch(text.strip()):
                raise ValueError(
                    f"{table.where(index, name)}: {text!r} is no number, and several labels are a "
                    "vector of numbers. Write numbers, or name one column of class names."
                )
        columns.append(_parse_numbers(table, name, texts))
    values = torch.from_numpy(np.stack(columns, axis=1))
    return values.float() if values.is_floating_point() else values


def _parse_numbers(table: _Table, column: str, texts: list[str]) -> np.ndarray:
    """Return int64 where all are whole, else float64."""
    if all(_WHOLE.fullmatch(text.strip()) for text in texts):
        for index, text in enumerate(texts):
            # Python refuses to parse thousands of digits.
            if len(text.strip()) > _LONGEST_WHOLE or not -(1 << 63) <= int(text) < 1 << 63:
                raise ValueError(
                    f"{table.where(index, column)}: {text[:50]!r} does not fit into 64 bits. Give "
                    "such a column as id=, or write names, such as 'class_7'."
                )
        return np.array(list(map(int, texts)), np.int64)
    values = np.array(list(map(float, texts)))
    if not np.isfinite(values).all():
        index = int(np.argmin(np.isfinite(values)))
        raise ValueError(
            f"{table.where(index, column)}: {texts[index][:50]!r} is larger than a float of 64 "
            "bits can be"
        )
    return values


# Folders of class folders, listed as torchvision does

SCAN_THREADS = 16
"""Folders listed at once where listing waits, as on a network file system."""
SCAN_PATIENCE_S = 0.02
"""Wait beyond the work done that makes threads worth it. Without a wait they only pass the GIL
around: 50,000 files in 100 folders of a local disk take 37 ms in one thread, 61 ms in eight, and
torchvision 65 ms."""
KEEP_PATIENCE_S = 1.0
"""Wait that makes a listing worth keeping."""
SETTLED_S = 600.0
"""How long a folder must not have changed; clocks of file servers are wrong by less."""

Endings = str | tuple[str, ...]


def find_classes(directory: AnyPath) -> tuple[list[str], dict[str, int]]:
    """List the class folders in ``directory``, sorted, with their indices, as torchvision does."""
    place = directory if isinstance(directory, Place) else Place(directory)
    classes = place.folders()
    if not classes:
        raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
    return classes, {name: index for index, name in enumerate(classes)}


def scan_folder(
    root: AnyPath,
    class_to_idx: dict[str, int],
    extensions: Endings | None = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
) -> list[tuple[str, int]]:
    """List the samples below class folders: torchvision's ``make_dataset``, but faster.

    Order and errors are torchvision's. Links are followed. Folders that are slow to list, as over a
    network, are listed in parallel threads; ``is_valid_file`` runs in the calling thread, in order.
    """
    if not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError(
            "Both extensions and is_valid_file cannot be None or not None at the same time"
        )
    endings = extensions or ""  # which every name ends in
    if not isinstance(endings, str):
        endings = tuple(endings)
    samples: list[tuple[str, int]] = []
    empty = []
    names = sorted(class_to_idx)
    for name, paths in zip(names, _list_classes(root, names, endings), strict=True):
        valid = list(filter(is_valid_file, paths))
        samples += zip(valid, repeat(class_to_idx[name]), strict=False)
        if not valid:
            empty.append(name)
    if empty and not allow_empty:
        message = f"Found no valid file for the classes {', '.join(empty)}. "
        if extensions is not None:
            listed = extensions if isinstance(extensions, str) else ", ".join(extensions)
            message += f"Supported extensions are: {listed}"
        raise FileNotFoundError(message)
    return samples


def _list_classes(root: AnyPath, names: list[str], endings: Endings) -> Iterator[list[str]]:
    """List folders in turn, the rest in threads once listing has waited more than it worked."""
    if isinstance(root, Place):
        for coming in [root.find(name) for name in names]:  # all folders at once
            found = {root.at(name): facts for name, facts in coming.result().items()}
            root.listed |= found
            urls = [url for url in found if url.lower().endswith(endings)]
            # In the order of _list_files.
            yield sorted(urls, key=lambda url: os.path.split(root.unescaped(url)))
        return
    tops = [os.path.join(os.path.expanduser(root), name) for name in names]
    # With what relative paths are relative to.
    named = json.dumps([os.path.abspath(tops[0]), tops, endings])
    kept = user_cache() / "folders" / hashlib.sha256(named.encode()).hexdigest()[:32]
    is_kept = os.environ.get("FASTDATA_LISTINGS") != "off"
    paths = _read_listing(kept) if is_kept else None
    if paths is None:
        began_s = time.time()
        waited_s = _clock_of_waits()
        folders: list[str] = []
        list_files = partial(with_retries, partial(_list_files, endings=endings, folders=folders))
        paths = []
        for top in tops:
            paths.append(list_files(top))
            if _clock_of_waits() - waited_s > SCAN_PATIENCE_S:
                with ThreadPoolExecutor(SCAN_THREADS) as threads:
                    paths += threads.map(list_files, tops[len(paths) :])
                break
        if is_kept and _clock_of_waits() - waited_s > KEEP_PATIENCE_S:
            _write_listing(kept, folders, paths, began_s - SETTLED_S)
    yield from paths


def _clock_of_waits() -> float:
    """Goes on while this thread waits, and back while it works."""
    return time.perf_counter() - 2 * time.thread_time()


def _list_files(top: str, endings: Endings, folders: list[str]) -> list[str]:
    """The files below ``top`` that end in one of ``endings``, in torchvision's order.

    Adds the folders that they are in to ``folders``.
    """
    paths = []

    def leave_out(problem: OSError) -> None:
        """Leave out a folder that may not be read, as torchvision does; not one that fails."""
        if fault_of(problem) == "machine":
            raise problem
        folders.append("")  # is no folder, so that no such listing is kept

    for folder, _, names in sorted(os.walk(top, followlinks=True, onerror=leave_out)):
        folders.append(folder)
        prefix = os.path.join(folder, "")
        paths += [prefix + name for name in sorted(names) if name.lower().endswith(endings)]
    return paths


# A listing that had to wait, as on a network file system, is kept in the user's cache folder: when
# its folders changed, and the paths. It is used again as long as no folder in it has changed since;
# FASTDATA_LISTINGS=off lists anew each time.


def _read_listing(kept: Path) -> list[list[str]] | None:
    """The paths of each top; None where none are kept, or a folder has changed since."""
    try:
        changed, listed = json.loads(kept.read_bytes())
        if _times_of_change(changed) != changed:
            return None
        log.info("%d files as they were listed before (%s)", sum(map(len, listed)), kept)
        return list(listed)
    except (OSError, ValueError, TypeError, AttributeError):  # none of this version
        return None


def _write_listing(
    kept: Path, folders: list[str], paths: Sequence[Sequence[str]], settled_s: float
) -> None:
    """Keep it, unless a folder has changed lately, and so might have behind the listing.

    Nor where all have one time, as that of the mount: file systems over objects know no other.
    """
    with contextlib.suppress(OSError):  # of a folder that is gone, or a cache that takes no files
        changed = _times_of_change(folders)
        if min(changed.values()) < max(changed.values()) < settled_s * 1e9:
            Place(kept.parent).write(kept.name, json.dumps([changed, paths]).encode())


def _times_of_change(folders: Iterable[str]) -> dict[str, int]:
    """By folder when a name in it came or went, in ns; OSError where one is not there.

    Programs that unpack or copy set the first of the two back, none the other.
    """
    with ThreadPoolExecutor(SCAN_THREADS) as threads:
        found = zip(folders, threads.map(os.stat, folders), strict=True)
        return {folder: max(facts.st_mtime_ns, facts.st_ctime_ns) for folder, facts in found}
