"""Image files and labels that are listed in a CSV file, a frame or a list.

Each of them becomes a table of columns first, so that labels are read in one way and every error
names the line and the column.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastdata.errors import kind_of
from fastdata.faults import with_retries
from fastdata.paths import AnyPath, is_url, local_path, refuse_chain, refuse_secrets
from fastdata.sources.remote import Place
from fastdata.sources.storage_options import StorageChoice

if TYPE_CHECKING:
    from fastdata.sources.source import Indices


# float() also reads "nan", "inf", "1_000" and digits of other scripts, which may be class names.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)

_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)

_FLAGS = {"False": "0", "True": "1"}

_MISSING = ("None", "nan", "NaT", "<NA>")
"""Texts of the values that mark a missing value in a frame. A string with such a text is a name."""


class Listed(NamedTuple):
    """Samples that a user has listed. ``class_to_idx`` is None if the labels are not names."""

    paths: list[str]
    targets: Any
    class_to_idx: dict[str, int] | None


class _Table(NamedTuple):
    """Columns by name. Messages show ``title``, and ``row`` with a number, such as ``line 3``."""

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
                raise ValueError(
                    f"{self.where(index, column)}: the value is missing. Write it, or remove the "
                    f"{self.row}."
                )
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
    """Read paths and targets from a manifest; ``ImageManifest`` describes the arguments."""
    labels = [label] if isinstance(label, str) else list(() if label is None else label)
    # id= may name the column of paths, which is read once.
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
        raise ValueError(f"{table.title} lists no samples, but at least one is needed")
    # Relative paths start from the CSV file's own folder, unless root= names another.
    if root is not None:
        folder = Place(root).url if is_url(root) else local_path(root)
    paths = [_absolute_path(path, folder) for path in table.texts(file)]
    for index, path in enumerate(paths):
        try:
            _check_path(path)
        except ValueError as problem:
            raise ValueError(f"{table.where(index, file)}: {problem}") from None
    # Without labels and ids, the targets are the positions in the list.
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
    # Most of a million paths are relative, so the cheapest test comes first.
    if ":/" in path and is_url(path):
        return path
    return os.path.join(folder, local_path(path) if path.startswith("file:/") else path)


def _check_path(path: str) -> None:
    if "\0" in path:
        raise ValueError(f"{path!r} contains a NUL character, which a path cannot have. Remove it.")
    refuse_secrets(path)
    if "::" in path and is_url(path):
        refuse_chain(path)


def _read_csv(path: AnyPath, names: list[str], storage_options: StorageChoice) -> _Table:
    if is_url(path):
        place = Place(path, storage_options)
        title = place.url
        data = place.read("")
    else:
        title = os.path.abspath(local_path(path))  # relative paths start from its folder
        data = with_retries(Path(title).read_bytes)
    # Spreadsheet programs begin a UTF-8 file with a byte order mark.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{title} is not UTF-8 text ({problem}). Save it as UTF-8.") from problem
    # Masks as run lengths may have hundreds of thousands of characters; csv's limit is 131,072.
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
        row += [""] * (len(header) - len(row))  # values at the end of a row may be left out
    columns = {}
    for name in names:
        position = header.index(name)
        columns[name] = [row[position] for row in rows[1:]]
    return _Table(title, "line", numbers[1:], columns)


def _read_rows(title: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of its first line and the values of each row that is not empty."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for row in rows:
            if row:  # csv yields an empty list for a blank line
                yield line, row
            line = rows.line_num + 1
    except csv.Error as problem:
        raise ValueError(
            f"{title}, line {line}: the row that begins here is not valid CSV ({problem}). Close "
            "each quote that opens a value, and double each quote inside of such a value: "
            '"a ""b"".jpg".'
        ) from problem


_LIMIT_LOCK = threading.Lock()


@contextlib.contextmanager
def _long_values(most_characters: int) -> Iterator[None]:
    """Let the csv module read values of this length inside the block.

    The csv module has one limit for the whole process.
    """
    # Without the lock, two manifests that are read at once would restore each other's limit too
    # early.
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
                f"{title} has {problem} {name!r}; its columns are: {listed}. Name the columns with "
                "file= and label=, and use label=None if it has no labels."
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
            "a manifest must be the path of a CSV file, a frame or a list of samples, not "
            f"{kind_of(samples)}"
        )
    rows = [(row,) if isinstance(row, str | os.PathLike) else row for row in samples]
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != len(names):
            raise ValueError(
                f"the list, item {index}, is {row!r}, but every item must be "
                f"({', '.join(names)}). Pass label=None for items without a label, and "
                "id=None for items without an id; or give a frame or the path of a CSV file."
            )
    columns = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    return _Table("the list", "item", range(len(rows)), columns)


def _read_labels(table: _Table, label: str) -> tuple[Any, dict[str, int] | None]:
    """Return targets, and the numbers of classes if labels are names."""
    # The kind of a column depends on all its values, so that every batch has the same dtype.
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
    """Stack the vectors of a column, which must all have the same length."""
    vectors: list[torch.Tensor] = []
    for index, value in enumerate(table.columns[label]):
        try:
            vectors.append(torch.tensor(_plain(value), device="cpu"))
            torch.stack([vectors[0], vectors[-1]])  # raises if their lengths differ
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ValueError(
                f"{table.where(index, label)}: {value!r} is not a vector of numbers with the "
                f"length of those before it ({problem}). Give all samples vectors of one length."
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
                f"{table.where(index, name)}: {texts[index]!r} is not a number, but several label "
                "columns become a vector of numbers. Write numbers, or name one column of class "
                "names."
            )
        columns.append(_parse_numbers(table, name, texts))
    values = torch.from_numpy(np.stack(columns, axis=1))
    return values.float() if values.is_floating_point() else values


def _parse_numbers(table: _Table, column: str, texts: list[str]) -> np.ndarray:
    """Return the numbers as int64 if all are whole, else as float64."""
    is_whole = all(_WHOLE.fullmatch(text.strip()) for text in texts)
    # int() refuses to parse thousands of digits, and float() makes too large numbers infinite.
    # Decimal does neither.
    limit = 1 << 63 if is_whole else sys.float_info.max
    for index, text in enumerate(texts):
        if not -limit <= Decimal(text) < limit:
            raise ValueError(
                f"{table.where(index, column)}: {text[:50]!r} does not fit into 64 bits. Give "
                "this column as id=, or write names, such as 'class_7'."
            )
    if is_whole:
        return np.array(list(map(int, texts)), np.int64)
    return np.array(list(map(float, texts)))
