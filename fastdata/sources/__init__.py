"""Samples that exist, and how each is read. A source never keeps a sample."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import repeat
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch

from fastdata.errors import fault_of, kind_of, with_retries
from fastdata.machine.tables import ListView
from fastdata.paths import (
    AnyPath,
    hide_secrets,
    is_url,
    local_path,
    open_file,
    refuse_chain,
    refuse_secrets,
)
from fastdata.pixels.decode import Loader, decode_image, load_image
from fastdata.pixels.openings import Opening, opening_of
from fastdata.pixels.samples import is_image
from fastdata.sources.formats import TarSamples
from fastdata.sources.remote import Place, Requests, StorageChoice, facts_of, fleeting_folder

Indices = Sequence[int]
Pair = tuple[Any, Any]
"""Sample and target."""


@dataclass(frozen=True, slots=True)
class ItemKeys:
    """How items that are not pairs split into sample and target, and are joined again.

    The sample of a dict is the value of ``image``. The target is the value of the other key, or a
    dict of several. The sample of a tuple is its first value. The target is the other value, a
    tuple of several, or 0 if there is none.

    ``named`` is the module and class of a namedtuple, as text, so that a cache can store it. The
    joined item has this class if the module is imported, else it is a tuple.
    """

    names: tuple[str, ...]
    image: str
    kind: Literal["dict", "tuple", "alone"] = "dict"
    named: str = ""

    def split(self, item: Any) -> Pair:
        if self.kind == "alone":
            return item, 0
        if self.kind == "tuple":
            sample, *rest = item
            return sample, rest[0] if len(rest) == 1 else tuple(rest) or 0
        others = {name: item[name] for name in self.names if name != self.image}
        sample = item[self.image]
        return sample, others if len(others) != 1 else others.popitem()[1]

    def join(self, sample: Any, target: Any, kind: Any = tuple) -> Any:
        """Return the item; or a batch of items, whose tuples are lists as in ``default_collate``."""
        if self.kind == "alone":
            return sample
        if self.kind == "dict":
            # A batch of texts is a tuple, which is a list in the batches of default_collate.
            target = kind(target) if type(target) is tuple else target
            others = dict.fromkeys(self.names, target) if len(self.names) == 2 else target
            return {name: sample if name == self.image else others[name] for name in self.names}
        values = [sample]
        if len(self.names) == 2:
            values.append(target)
        elif len(self.names) > 2:
            values += target
        named = self._named_class()
        return kind(values) if named is None else named._make(values)

    def _named_class(self) -> Any:
        """Return the class of a namedtuple; None if it is not imported or has other fields now."""
        module, _, name = self.named.partition(":")
        # The text may come from a cache on disk, so that nothing is imported for it.
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return found if getattr(found, "_fields", None) == self.names else None


def chosen_keys(columns: Mapping[str, Any]) -> ItemKeys:
    """Return the keys that ``columns=`` names as sample and target.

    Raises:
        ValueError: ``columns`` has other keys than ``sample`` and ``target``, or no names.
    """
    target: Any = columns.get("target")
    names: list[Any] = [columns.get("sample")]
    if isinstance(target, str):
        names.append(target)
    else:
        names += target or ()
    are_texts = all(isinstance(name, str) for name in names)
    if len(columns) != 2 or len(names) < 2 or not are_texts:
        raise ValueError(
            f"columns={columns!r} does not say which are sample and target. Give their names, or a "
            "list of several for the target: columns={'sample': 'image', 'target': 'label'}."
        )
    return ItemKeys(tuple(names), names[0])


class Source(Protocol):
    """Samples by index in [0, len), each read again whenever it is needed.

    Attributes:
        keys: how items that are not pairs are split; known once one item was read.
        opening: how files are opened, if fastdata can open them itself.
        is_remote: True if reading waits for a network, so that ``expect`` makes it faster.

    ``read`` returns (sample, target), from several threads at once if the loader or the dataset
    allows it. ``expect`` announces the indices that this process reads next. ``path`` returns the
    sample's file, for messages.
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
    """One file per sample, on this machine or behind a URL.

    Args:
        paths: path or URL of each sample. Read by index only, as ``targets`` and ``facts`` are.
        targets: target of each sample.
        loader: opens a file by its path. If it is the user's own, it gets the path of a temporary
            copy of a remote file. None: samples are the bytes of the files.
        place: folder of all or most remote files; None for files of this machine. Expected files
            are fetched together, in the background.
        facts: size and tag of each remote file, int64 (N, 2); -1 if unknown. A file that comes in
            another size was changed since it was listed, which is an error.
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
        """Return the fields with these samples only, by index, for another process."""
        columns = {"paths": self.paths, "targets": self.targets, "facts": self.facts}
        return {
            name: {index: column[index] for index in indices}
            for name, column in columns.items()
            if column is not None
        }

    def listing(self) -> np.ndarray | None:
        """Return sizes and tags of remote files, int64 (2, N); None for files of this machine."""
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
        with io.FileIO(path, opener=open_file) as file:
            files.append(file.readall())
    return files


def chosen(column: Any, indices: Indices) -> list[Any]:
    """Return the values of these samples."""
    if isinstance(column, ListView):
        return column.chosen(indices)
    return [column[index] for index in indices]


class DatasetSource:
    """Items of any map-style dataset; its own transform runs in ``read``.

    Args:
        dataset: has ``__getitem__`` and ``__len__``.
        columns: keys of sample and target, if the items are dicts.

    ``is_format`` is True for tars, which draw nothing at random.
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
        self._form = ""  # form of the items read so far

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
        """Return the sample's file if the dataset lists its files in ``samples``, as torchvision's.

        Subsets of subsets are looked through.
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
    """Split an item by ``columns=``.

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
    """Return how an item of this form is split; None for a pair."""
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

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_FLAGS = {"False": "0", "True": "1"}
_MISSING = ("None", "nan", "NaT", "<NA>")
"""Texts of the values by which a frame marks that there is none. A text that reads so is a name."""


class Listed(NamedTuple):
    """Samples that a user lists; ``class_to_idx`` is None if labels are not names."""

    paths: list[str]
    targets: Any
    class_to_idx: dict[str, int] | None


class _Table(NamedTuple):
    """Columns by name. Messages call it ``title``, and a row ``row`` and its number: ``line 3``."""

    title: str
    row: str
    numbers: Indices
    columns: Mapping[str, Sequence[Any]]

    def where(self, index: int, column: str) -> str:
        return f"{self.title}, {self.row} {self.numbers[index]}, column {column!r}"

    def texts(self, column: str) -> list[str]:
        """Return the values of a column as text, blanks included: they may be part of a path."""
        texts = []
        for index, value in enumerate(self.columns[column]):
            text = str(_plain(value))
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
    elif hasattr(manifest, "columns"):
        table = _read_frame(manifest, names)
    else:
        table = _read_list(manifest, names)
    if not table.numbers:
        raise ValueError(f"{table.title} lists no samples")
    if root is not None:
        folder = Place(root).url if is_url(root) else local_path(root)
    paths = [_absolute_path(path, folder) for path in table.texts(file)]
    for index, path in enumerate(paths):
        try:
            _check_path(path)
        except ValueError as problem:
            raise ValueError(f"{table.where(index, file)}: {problem}") from None
    targets: Any = range(len(paths))
    class_to_idx = None
    if isinstance(label, str):
        targets, class_to_idx = _read_labels(table, label)
    elif labels:
        targets = _read_vectors(table, labels)
    if id is not None:
        table.texts(id)  # raises if one is missing
        ids = table.columns[id]
        targets = list(zip(targets, ids, strict=True)) if labels else ids
    return Listed(paths, targets, class_to_idx)


def _absolute_path(path: str, folder: str) -> str:
    if ":/" in path and is_url(path):
        return path
    return os.path.join(folder, local_path(path) if path.startswith("file:/") else path)


def _check_path(path: str) -> None:
    if "\0" in path:
        raise ValueError(f"{path!r} has a NUL, as no path can")
    refuse_secrets(path)
    if "::" in path and is_url(path):
        refuse_chain(path)


def _read_csv(path: AnyPath, names: list[str], storage_options: StorageChoice) -> _Table:
    if is_url(path):
        place = Place(path, storage_options)
        title = place.url
        data = place.read("")
    else:
        title = os.path.abspath(local_path(path))  # its folder is that of relative paths
        data = with_retries(Path(title).read_bytes)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{title} is no text in UTF-8 ({problem}). Save it as such.") from problem
    with _long_values(len(text)):
        numbered = list(_read_rows(title, text))
    numbers, rows = zip(*numbered, strict=True) if numbered else ((0,), ([],))
    header = rows[0]
    _check_columns(title, header, names)
    for line, row in numbered[1:]:
        if len(row) > len(header):
            raise ValueError(
                f"{title}, line {line}: {len(row)} values for {len(header)} columns. "
                'Put quotes around a value that holds a comma: "a,b.jpg".'
            )
        row += [""] * (len(header) - len(row))
    columns = {name: [row[header.index(name)] for row in rows[1:]] for name in names}
    return _Table(title, "line", numbers[1:], columns)


def _read_rows(title: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty, with the line that it begins in."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for row in rows:
            if row:
                yield line, row
            line = rows.line_num + 1
    except csv.Error as problem:
        raise ValueError(
            f"{title}, line {line}: the row that begins here is not CSV ({problem}). Close "
            "the quote that opens a value, and write a quote inside of such a value twice: "
            '"a ""b"".jpg".'
        ) from problem


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


def _read_frame(frame: Any, names: list[str]) -> _Table:
    """Read a frame of pandas or Polars."""
    title = f"the {type(frame).__name__}"
    _check_columns(title, list(frame.columns), names)
    columns = {name: list(frame[name]) for name in names}
    return _Table(title, "row", range(len(frame)), columns)


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
                f"the list, item {index}, is {row!r}, but every item must be "
                f"({', '.join(names)}). Pass label=None if there are no labels, and id=None if "
                "there are no ids; or give a frame or the path of a CSV file."
            )
    columns = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    return _Table("the list", "item", range(len(rows)), columns)


def _read_labels(table: _Table, label: str) -> tuple[Any, dict[str, int] | None]:
    """Return targets, and the numbers of classes if labels are names."""
    if any(map(_is_vector, table.columns[label])):
        return _stack_vectors(table, label), None
    texts = table.texts(label)
    name = _find_name(texts)
    if name is None:
        return _parse_numbers(table, label, texts).tolist(), None
    for number, text in enumerate(texts):
        if _NUMBER.fullmatch(text.strip()):
            raise ValueError(
                f"{table.where(name, label)}: {texts[name]!r} is a name, but {text!r} in "
                f"{table.row} {table.numbers[number]} is a number. Write all labels as numbers or "
                "all as names, such as 'class_7'."
            )
    class_to_idx = {name: number for number, name in enumerate(sorted(set(texts)))}
    return [class_to_idx[name] for name in texts], class_to_idx


def _find_name(texts: Sequence[str]) -> int | None:
    """Return the index of the first text that is not a number; None if all are numbers."""
    for index, text in enumerate(texts):
        if not _NUMBER.fullmatch(text.strip()):
            return index
    return None


def _is_vector(value: Any) -> bool:
    if isinstance(value, str):
        return False
    dimensions: int = getattr(value, "ndim", hasattr(value, "__len__"))
    return dimensions > 0


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _stack_vectors(table: _Table, label: str) -> torch.Tensor:
    """Stack the vectors of a column, which must have one length."""
    vectors: list[torch.Tensor] = []
    for index, value in enumerate(table.columns[label]):
        try:
            vectors.append(torch.tensor(_plain(value), device="cpu"))
            torch.stack([vectors[0], vectors[-1]])
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ValueError(
                f"{table.where(index, label)}: {value!r} is not a vector of numbers as long as "
                f"those before it: {problem}"
            ) from problem
    stacked = torch.stack(vectors)
    return stacked.long() if stacked.dtype == torch.bool else stacked


def _read_vectors(table: _Table, names: Sequence[str]) -> torch.Tensor:
    """Return several columns as int64 (samples, columns) if all are whole, else as float32."""
    columns = []
    for name in names:
        texts = [_FLAGS.get(text.strip(), text) for text in table.texts(name)]
        index = _find_name(texts)
        if index is not None:
            raise ValueError(
                f"{table.where(index, name)}: {texts[index]!r} is no number, and several labels "
                "are a vector of numbers. Write numbers, or name one column of class names."
            )
        columns.append(_parse_numbers(table, name, texts))
    values = torch.from_numpy(np.stack(columns, axis=1))
    return values.float() if values.is_floating_point() else values


def _parse_numbers(table: _Table, column: str, texts: list[str]) -> np.ndarray:
    """Return int64 if all are whole, else float64."""
    is_whole = all(_WHOLE.fullmatch(text.strip()) for text in texts)
    limit = 1 << 63 if is_whole else sys.float_info.max
    for index, text in enumerate(texts):
        # Decimal reads thousands of digits, which int refuses.
        if not -limit <= Decimal(text) < limit:
            raise ValueError(
                f"{table.where(index, column)}: {text[:50]!r} does not fit into 64 bits. Give "
                "such a column as id=, or write names, such as 'class_7'."
            )
    if is_whole:
        return np.array(list(map(int, texts)), np.int64)
    return np.array(list(map(float, texts)))


# Folders of class folders, listed as torchvision does

SCAN_THREADS = 16
"""Folders that are listed at once if listing waits, as on a network file system."""
SCAN_PATIENCE_S = 0.02
"""Waiting time, beyond the time of work, from which threads are faster. Without waiting they only
pass the GIL around: 50,000 files in 100 folders of a local disk take 37 ms in one thread, 61 ms in
eight, and 65 ms in torchvision."""

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
    """List the samples below class folders, as torchvision's ``make_dataset`` does, but faster.

    Order and errors are torchvision's. Links are followed. Folders that are slow to list, as over a
    network, are listed in parallel threads; ``is_valid_file`` runs in the calling thread, in order.
    """
    if not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError(
            "Both extensions and is_valid_file cannot be None or not None at the same time"
        )
    endings = extensions or ""  # every name ends in ""
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
    """List folders in turn, and the rest in threads once listing has waited more than worked."""
    if isinstance(root, Place):
        for coming in [root.find(name) for name in names]:  # all folders at once
            found = {root.at(name): facts for name, facts in coming.result().items()}
            root.listed |= found
            urls = [url for url in found if url.lower().endswith(endings)]
            # A sorted walk lists files by folder and then by name.
            yield sorted(urls, key=lambda url: os.path.split(root.unescaped(url)))
        return
    tops = [os.path.join(os.path.expanduser(root), name) for name in names]
    list_files = partial(with_retries, partial(_list_files, endings=endings))
    paths: list[list[str]] = []
    began_s = _clock_of_waits()
    for top in tops:
        if _clock_of_waits() - began_s > SCAN_PATIENCE_S:
            break
        paths.append(list_files(top))
    with ThreadPoolExecutor(SCAN_THREADS) as threads:
        paths += threads.map(list_files, tops[len(paths) :])
    yield from paths


def _clock_of_waits() -> float:
    """Return seconds that this thread has waited, less those that it has worked."""
    return time.perf_counter() - 2 * time.thread_time()


def _list_files(top: str, endings: Endings) -> list[str]:
    """List the files below ``top`` that end in one of ``endings``, in torchvision's order."""

    def leave_out(problem: OSError) -> None:
        """Leave out a folder that may not be read, as torchvision does, but not one that fails."""
        if fault_of(problem) == "machine":
            raise problem

    paths = []
    for folder, _, names in sorted(os.walk(top, followlinks=True, onerror=leave_out)):
        prefix = os.path.join(folder, "")
        paths += [prefix + name for name in sorted(names) if name.lower().endswith(endings)]
    return paths
