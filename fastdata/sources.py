"""Which samples exist, and how one is read. Nothing here keeps a sample."""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = [
    "DatasetSource",
    "FileBytes",
    "FileSource",
    "Manifest",
    "Source",
    "find_classes",
    "read_manifest",
    "scan_folder",
]

SCAN_THREADS = 16
"""Folders listed at once where listing waits, as on a network file system."""
SCAN_PATIENCE_S = 0.02
"""Wait beyond the work done that makes threads worth it. Without a wait they only pass the GIL around: 50,000 files in
100 folders of a local disk take 37 ms in one thread, 61 ms in eight, and torchvision 65 ms."""


class Source(Protocol):
    """Samples by index, each read anew whenever it is asked for."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, index: int) -> tuple[Any, Any]:
        """Read sample ``index`` in [0, len) as ``(sample, target)``; safe from several threads if its parts are."""
        ...

    def path(self, index: int) -> str | None:
        """Name the file of sample ``index``, for messages; None where it has none."""
        ...


class FileSource:
    """One file per sample.

    Args:
        paths: file of each sample; any sequence, read by index only.
        targets: target of each sample, as many as paths.
        loader: opens one path.

    Example:
        >>> FileSource(["a.txt", "b.txt"], [0, 1], loader=str.upper).read(1)
        ('B.TXT', 1)
    """

    def __init__(self, paths: Sequence[str], targets: Sequence[int], loader: Callable[[str], Any]) -> None:
        if len(paths) != len(targets):
            raise ValueError(f"{len(paths)} paths but {len(targets)} targets; each sample needs both")
        self.paths = paths
        self.targets = targets
        self.loader = loader

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[Any, int]:
        """Open the file of sample ``index``."""
        return self.loader(self.paths[index]), self.targets[index]

    def path(self, index: int) -> str:
        """Name the file of sample ``index``."""
        return self.paths[index]


class FileBytes:
    """The files of a ``FileSource`` as they are, unopened: uint8 (bytes,)."""

    def __init__(self, files: FileSource) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> tuple[np.ndarray, int]:
        """All bytes of the file of sample ``index``, and its target."""
        with open(self._files.paths[index], "rb") as stream:
            return np.frombuffer(stream.read(), np.uint8), self._files.targets[index]

    def path(self, index: int) -> str:
        """Name the file of sample ``index``."""
        return self._files.paths[index]

    def size_bytes(self, index: int) -> int:
        """Size of the file of sample ``index``; 0 where there is none."""
        try:
            return os.path.getsize(self._files.paths[index])
        except OSError:
            return 0


class DatasetSource:
    """The items of any map-style dataset of ``(sample, target)``.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; its own transform runs inside ``read``.

    Example:
        >>> DatasetSource([("a", 0), ("b", 1)]).read(1)
        ('b', 1)
    """

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(
                f"{type(dataset).__name__} has no __getitem__ and __len__, so its samples cannot be read by index. "
                "Give a map-style dataset; an iterable one can be collected first: list(dataset)."
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Any, Any]:
        """Ask the dataset for item ``index``.

        Raises:
            TypeError: the item is no pair.
        """
        item = self.dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            size = f" of length {len(item)}" if isinstance(item, tuple | list) else ""
            raise TypeError(
                f"item {index} of {type(self.dataset).__name__} is a {type(item).__name__}{size}, "
                "not a (sample, target) pair. Wrap the dataset in one whose __getitem__ returns two values."
            )
        return item[0], item[1]

    def path(self, index: int) -> str | None:
        """Name the file of item ``index`` where the dataset lists it in ``samples``, through any ``Subset``."""
        return _path_in(self.dataset, index)


class Manifest(NamedTuple):
    """Samples listed in a CSV file; ``classes`` is None where its labels are numbers already."""

    paths: list[str]
    targets: list[int]
    classes: list[str] | None


def find_classes(directory: str | os.PathLike[str]) -> tuple[list[str], dict[str, int]]:
    """List the class folders in ``directory``, sorted, with their indices, as torchvision does.

    Raises:
        FileNotFoundError: there is no class folder.
    """
    with os.scandir(directory) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    if not classes:
        raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
    return classes, {name: index for index, name in enumerate(classes)}


def scan_folder(
    root: str | os.PathLike[str],
    class_to_idx: dict[str, int] | None = None,
    extensions: str | tuple[str, ...] | None = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
    *,
    visited: list[str] | None = None,
) -> list[tuple[str, int]]:
    """List the samples under a folder of class folders: torchvision's ``make_dataset``, order and errors, but faster.

    Links are followed. Folders that are slow to list, as over a network, are listed in parallel threads;
    ``is_valid_file`` runs in the calling thread, in order.

    Args:
        root: holds one folder per class.
        class_to_idx: classes to collect, by default every folder in ``root``.
        extensions: file name endings in lower case; exactly one of this and ``is_valid_file`` is given.
        is_valid_file: decides on a path.
        allow_empty: whether a class may have no file.
        visited: gets the path of every folder that was listed.

    Raises:
        ValueError: ``class_to_idx`` is empty, or both or none of ``extensions`` and ``is_valid_file`` are given.
        FileNotFoundError: a class has no valid file.
    """
    folder = os.path.expanduser(root)
    if class_to_idx is None:
        _, class_to_idx = find_classes(folder)
    elif not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError("Both extensions and is_valid_file cannot be None or not None at the same time")
    endings = extensions if extensions is None or isinstance(extensions, str) else tuple(extensions)

    names = sorted(class_to_idx)
    samples: list[tuple[str, int]] = []
    empty: list[str] = []
    listings = _list_folders([os.path.join(folder, name) for name in names], endings)
    for name, (folders, paths) in zip(names, listings, strict=True):
        if visited is not None:
            visited.extend(folders)
        valid: Iterable[str] = paths if is_valid_file is None else filter(is_valid_file, paths)
        before, index = len(samples), class_to_idx[name]
        samples.extend([(path, index) for path in valid])
        if len(samples) == before:
            empty.append(name)

    if empty and not allow_empty:
        message = f"Found no valid file for the classes {', '.join(empty)}. "
        if extensions is not None:
            listed = extensions if isinstance(extensions, str) else ", ".join(extensions)
            message += f"Supported extensions are: {listed}"
        raise FileNotFoundError(message)
    return samples


def read_manifest(
    csv_path: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    file: str = "file",
    label: str = "label",
) -> Manifest:
    """Read a CSV file of sample paths and labels.

    Comma-separated UTF-8 with a header line. Labels are whole numbers, kept as targets, or names, whose sorted order
    gives the targets.

    Args:
        csv_path: the CSV file.
        root: folder of relative paths, by default the CSV file's own.
        file: header of the column of paths.
        label: header of the column of labels.

    Raises:
        ValueError: what is wrong, with line and column.
    """
    csv_path = Path(csv_path).expanduser()
    folder = os.path.expanduser(root) if root is not None else os.fspath(csv_path.parent)
    rows = _read_rows(csv_path, file, label)
    if not rows:
        raise ValueError(f"{csv_path} lists no samples below its header line")
    targets, classes = _number_labels(rows, csv_path, label)
    return Manifest([os.path.join(folder, row.file) for row in rows], targets, classes)


class _Row(NamedTuple):
    line: int
    file: str
    label: str


def _list_folders(tops: list[str], endings: str | tuple[str, ...] | None) -> Iterator[tuple[list[str], list[str]]]:
    """List folders one after the other, and the rest in threads once listing has waited more than it worked."""
    idle_s = 0.0
    for position, top in enumerate(tops, start=1):
        start_s, start_work_s = time.perf_counter(), time.thread_time()
        listing = _list_files(top, endings)
        worked_s = time.thread_time() - start_work_s
        idle_s += time.perf_counter() - start_s - 2 * worked_s
        yield listing
        if idle_s > SCAN_PATIENCE_S and len(tops) > position + 1:
            with ThreadPoolExecutor(SCAN_THREADS) as threads:
                yield from threads.map(_list_files, tops[position:], repeat(endings))
            return


def _list_files(top: str, endings: str | tuple[str, ...] | None) -> tuple[list[str], list[str]]:
    """Folders below ``top`` and itself, and paths of the files there that end in one of ``endings``.

    In the order of ``sorted(os.walk(top, followlinks=True))``; folders that cannot be listed are passed over as there.
    """
    files_of: dict[str, list[str]] = {}
    pending = [top]
    while pending:
        folder = pending.pop()
        folders, files = _list_one(folder)
        pending.extend(os.path.join(folder, name) for name in folders)
        files_of[folder] = files if endings is None else [name for name in files if name.lower().endswith(endings)]
    paths: list[str] = []
    for folder in sorted(files_of):
        prefix = os.path.join(folder, "")
        paths.extend([prefix + name for name in sorted(files_of[folder])])
    return sorted(files_of), paths


def _list_one(folder: str) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                (folders if _is_dir(entry) else files).append(entry.name)
    except OSError:
        return [], []
    return folders, files


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _read_rows(csv_path: Path, file: str, label: str) -> list[_Row]:
    with open(csv_path, newline="", encoding="utf-8-sig") as stream:
        reader = csv.reader(stream)
        try:
            header = next(reader, [])
            columns = [_column(csv_path, header, name) for name in (file, label)]
            return [_row(csv_path, reader.line_num, cells, header, columns) for cells in reader if cells]
        except csv.Error as broken:
            raise ValueError(f"{csv_path}, line {reader.line_num}: {broken}") from broken
        except UnicodeDecodeError as broken:
            raise ValueError(f"{csv_path} is not UTF-8 text after line {reader.line_num}; save it as UTF-8") from broken


def _column(csv_path: Path, header: list[str], name: str) -> int:
    if header.count(name) == 1:
        return header.index(name)
    there = ", ".join(map(repr, header)) or "none, the file is empty"
    problem = "no column" if name not in header else "several columns"
    raise ValueError(f"{csv_path} has {problem} {name!r}; its columns are: {there}. Choose with file= and label=.")


def _row(csv_path: Path, line: int, cells: list[str], header: list[str], columns: list[int]) -> _Row:
    if len(cells) > len(header):
        raise ValueError(
            f"{csv_path}, line {line}: {len(cells)} values for {len(header)} columns. "
            'Put quotes around a value that holds a comma: "a,b.jpg".'
        )
    values = [cells[column].strip() if column < len(cells) else "" for column in columns]
    for column, value in zip(columns, values, strict=True):
        if not value:
            raise ValueError(f"{csv_path}, line {line}, column {header[column]!r}: the value is missing")
    return _Row(line, *values)


def _number_labels(rows: list[_Row], csv_path: Path, label: str) -> tuple[list[int], list[str] | None]:
    numbers = [row for row in rows if re.fullmatch(r"[+-]?\d+", row.label, re.ASCII)]
    if len(numbers) == len(rows):
        return [int(row.label) for row in rows], None
    if numbers:
        name = next(row for row in rows if not re.fullmatch(r"[+-]?\d+", row.label, re.ASCII))
        number = numbers[0]
        raise ValueError(
            f"{csv_path}, line {name.line}, column {label!r}: {name.label!r} is a name, but {number.label!r} "
            f"in line {number.line} is a number. Write all labels as whole numbers or all as names, such as 'class_7'."
        )
    classes = sorted({row.label for row in rows})
    index = {name: position for position, name in enumerate(classes)}
    return [index[row.label] for row in rows], classes


def _path_in(dataset: Any, index: int) -> str | None:
    indices = getattr(dataset, "indices", None)
    if indices is not None and hasattr(dataset, "dataset"):
        return _path_in(dataset.dataset, int(indices[index]))
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, Sequence) or isinstance(samples, str) or index >= len(samples):
        return None
    sample = samples[index]
    first = sample[0] if isinstance(sample, tuple | list) and sample else sample
    return os.fspath(first) if isinstance(first, str | os.PathLike) else None
