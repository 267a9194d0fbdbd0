"""Which samples exist, and how one is read. Nothing here keeps a sample."""

from __future__ import annotations

import copy
import csv
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TextIO

import numpy as np
import numpy.typing as npt
import torch

from fastdata.errors import is_url, kind_of
from fastdata.images import decode_image, decoder_of, is_image, load_image
from fastdata.remote import Coming, Place, fleeting_folder
from fastdata.shared import is_wide

if TYPE_CHECKING:
    from typing_extensions import Self

SCAN_THREADS = 16
"""Folders listed at once where listing waits, as on a network file system."""
SCAN_PATIENCE_S = 0.02
"""Wait beyond the work done that makes threads worth it. Without a wait they only pass the GIL around: 50,000 files in
100 folders of a local disk take 37 ms in one thread, 61 ms in eight, and torchvision 65 ms."""


@dataclass(frozen=True, slots=True)
class ItemKeys:
    """What items are that are no pairs, and how sample and target become one of them, or a batch.

    Of dicts the keys, in their order, and whose value is the sample; the rest is the target: the value of the one
    other key, else a dict. Of tuples the first value is the sample, and the others, a tuple, are the target. Where
    there is no other value, the target is 0.
    """

    names: tuple[str, ...]
    image: str
    kind: Literal["dict", "tuple", "alone"] = "dict"

    @classmethod
    def of(cls, item: Any) -> ItemKeys | None:
        """Those of an item that is no dict; None of a pair."""
        if not isinstance(item, tuple | list):
            return cls(("0",), "0", "alone")
        names = tuple(map(str, range(len(item))))
        return None if len(item) == 2 else cls(names, "0", "tuple")

    def __post_init__(self) -> None:
        if self.image not in self.names or len(set(self.names)) < len(self.names):
            raise ValueError(f"{self.image!r} is not one of the different keys {self.names}")

    def split(self, item: Any) -> tuple[Any, Any]:
        if self.kind == "alone":
            return item, 0
        if self.kind == "tuple":
            return item[0], tuple(item[1:]) or 0
        others = {name: item[name] for name in self.names if name != self.image}
        return item[self.image], others.popitem()[1] if len(others) == 1 else others

    def join(self, sample: Any, target: Any) -> Any:
        """The item again; or a batch, of samples and targets, whose tuples are lists as ``default_collate`` has it."""
        if self.kind == "alone":
            return sample
        if self.kind == "tuple" and len(self.names) == 1:
            return [sample] if isinstance(target, torch.Tensor) else (sample,)
        if self.kind == "tuple":
            return type(target)((sample, *target))
        others = dict.fromkeys(self.names, target) if len(self.names) == 2 else target
        return {name: sample if name == self.image else others[name] for name in self.names}


@dataclass(frozen=True, slots=True)
class IndexedKeys:
    """Items with the sample's index as their last value: of targets that are (target, index), or lists of both."""

    keys: ItemKeys | None

    def __post_init__(self) -> None:
        if self.keys is not None and self.keys.kind == "dict" and "index" in self.keys.names:
            raise ValueError("return_index=True adds the key 'index', and the items have one already; rename it")

    def join(self, sample: Any, target: Any) -> Any:
        inner, index = target
        if self.keys is None:
            return type(target)((sample, inner, index))
        item = self.keys.join(sample, inner)
        if self.keys.kind == "dict":
            return {**item, "index": index}
        return type(target)((item, index) if self.keys.kind == "alone" else (*item, index))


ItemForm = ItemKeys | IndexedKeys


@dataclass(frozen=True, slots=True)
class Columns:
    """The keys of items that are dicts whose values are sample and target; of several targets a dict is made."""

    sample: str
    target: str | list[str]

    @classmethod
    def of(cls, names: Mapping[str, Any]) -> Columns:
        target = names.get("target")
        if isinstance(target, tuple | list) and all(isinstance(name, str) for name in target):
            target = list(target)
        if set(names) != {"sample", "target"} or not isinstance(names["sample"], str) or not target:
            raise ValueError(
                f"columns={names!r} does not say which are sample and target. Give their names, or a list of several "
                "for the target: columns={'sample': 'image', 'target': 'label'}."
            )
        return cls(names["sample"], target)

    @property
    def names(self) -> list[str]:
        return [self.sample, *([self.target] if isinstance(self.target, str) else self.target)]

    def split(self, item: Any, which: str) -> tuple[Any, Any]:
        if not isinstance(item, Mapping):
            raise TypeError(f"{which} is {kind_of(item)}, and columns= chooses of a dict; leave it out")
        if missing := [name for name in self.names if name not in item]:
            there = ", ".join(map(repr, item))
            raise KeyError(f"{which} has no {', '.join(map(repr, missing))} of columns=; there are {there}")
        if isinstance(self.target, str):
            return item[self.sample], item[self.target]
        return item[self.sample], {name: item[name] for name in self.target}


class Source(Protocol):
    """Samples by index in [0, len), each read anew whenever it is asked for.

    ``read`` gives (sample, target), from several threads at once if the source's parts allow it. ``expect`` says which
    ones are read next, by this process: worth something where reading is waiting. ``path`` names the sample's file, for
    messages; None where it has none. ``keys`` are those of items that are dicts, once one was read.
    """

    @property
    def keys(self) -> ItemKeys | None: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> tuple[Any, Any]: ...
    def expect(self, indices: Sequence[int]) -> None: ...
    def path(self, index: int) -> str | None: ...


class FileSource:
    """One file per sample, opened by ``loader``; paths and targets are any sequences, read by index only."""

    keys = None

    def __init__(self, paths: Sequence[str], targets: Sequence[Any], loader: Callable[[str], Any]) -> None:
        if len(paths) != len(targets):
            raise ValueError(f"{len(paths)} paths but {len(targets)} targets; each sample needs both")
        self.paths, self.targets, self.loader = paths, targets, loader

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[Any, Any]:
        return self.loader(self.paths[index]), self.targets[index]

    def expect(self, indices: Sequence[int]) -> None: ...

    def path(self, index: int) -> str:
        return self.paths[index]

    def read_bytes(self, index: int) -> bytes:
        with open(self.paths[index], "rb") as stream:
            return stream.read()

    def opened_by(self, loader: Callable[[str], Any]) -> FileSource:
        return FileSource(self.paths, self.targets, loader)

    def columns_of(self, indices: Sequence[int]) -> dict[str, Any]:
        """What is known of these samples, for ``over`` in another process."""
        columns: dict[str, Any] = {"paths": self.paths, "targets": self.targets}
        return {name: {index: column[index] for index in indices} for name, column in columns.items()}

    def over(self, columns: Mapping[str, Any]) -> Self:
        """The same over other samples; columns are read by index only."""
        other = copy.copy(self)
        vars(other).update(columns)
        return other

    def as_bytes(self) -> FileSource:
        """The files as they are, unopened: uint8 (bytes,)."""
        return self.opened_by(_read_bytes)

    def size_bytes(self, index: int) -> int:
        """Size of the file of sample ``index``; 0 where there is none."""
        try:
            return os.path.getsize(self.paths[index])
        except OSError:
            return 0

    def listing(self) -> npt.NDArray[np.int64] | None:
        """Sizes and times, (2, samples), where they are known without looking at each file."""
        return None


def _read_bytes(path: str) -> np.ndarray:
    with open(path, "rb") as stream:
        return np.frombuffer(stream.read(), np.uint8)


class RemoteFiles(FileSource):
    """Files behind a URL; those that are expected are fetched together, in the background.

    Args:
        place: that all or most of them lie below.
        paths: URLs.
        facts: of each file ``sizes`` and ``tags``, int64 (N,); -1 where they are not known. A file that comes in
            another size was changed since it was listed, which is an error.
        targets, loader: as of ``FileSource``. A loader of the user's own gets the path of a temporary copy.
    """

    def __init__(
        self,
        place: Place,
        paths: Sequence[str],
        targets: Sequence[Any],
        loader: Callable[[str], Any],
        facts: Mapping[str, np.ndarray],
    ) -> None:
        super().__init__(paths, targets, loader)
        self._place, self._facts = place, facts
        self._coming = Coming()

    def expect(self, indices: Sequence[int]) -> None:
        self._coming.expect(indices, self._submit)

    def read(self, index: int) -> tuple[Any, Any]:
        data, decode = self._fetch(index), decoder_of(self.loader)
        if self.loader is _read_bytes:
            return np.frombuffer(data, np.uint8), self.targets[index]
        if decode is not None:
            return decode(memoryview(data)), self.targets[index]
        with fleeting_folder() as folder:
            copy = folder / f"sample{os.path.splitext(self.paths[index])[1]}"
            copy.write_bytes(data)
            return self.loader(str(copy)), self.targets[index]

    def read_bytes(self, index: int) -> bytes:
        return self._fetch(index)

    def opened_by(self, loader: Callable[[str], Any]) -> RemoteFiles:
        return self.over({"loader": loader})  # what one expects the other reads

    def columns_of(self, indices: Sequence[int]) -> dict[str, Any]:
        facts = {}
        for name, column in self._facts.items():
            facts[name] = dict(zip(indices, column[list(indices)].tolist(), strict=True))
        return {**super().columns_of(indices), "_facts": facts}

    def size_bytes(self, index: int) -> int:
        return max(int(self._facts["sizes"][index]), 0)

    def listing(self) -> npt.NDArray[np.int64]:
        known: npt.NDArray[np.int64] = np.stack([self._facts["sizes"], self._facts["tags"]])
        if len(self) and known[0].max() < 0:  # nobody has listed them
            asked = [place.submit_facts(name) for place, name in (place_of(self._place, path) for path in self.paths)]
            known = np.array([future.result() for future in asked], np.int64).T
        return known

    def _fetch(self, index: int) -> bytes:
        return (self._coming.here().pop(index, None) or self._submit(index)).result()

    def _submit(self, index: int) -> Future[bytes]:
        place, name = place_of(self._place, self.paths[index])
        size = int(self._facts["sizes"][index])
        return place.submit(name, size_bytes=None if size < 0 else size)


def place_of(place: Place, url: str) -> tuple[Place, str]:
    """The place and the name there of a file that most likely lies below ``place``."""
    if url.startswith(f"{place.url}/"):
        return place, url[len(place.url) + 1 :]
    folder, _, name = url.rpartition("/")
    return place.beside(folder), name


class DatasetSource:
    """The items of any map-style dataset of pairs or dicts; its own transform runs inside ``read``.

    With ``columns`` the items are dicts, of which those named are sample and target.
    """

    keys: ItemKeys | None = None
    _is_known = False
    """Whether an item was read, so that ``keys`` are those of all."""

    def __init__(self, dataset: Any, columns: Columns | None = None) -> None:
        if isinstance(dataset, (str, bytes, os.PathLike)):
            raise TypeError(
                f"{dataset!r} is a path, not a dataset. Give fastdata.ImageFolder the folder of class folders, "
                "fastdata.ImageManifest the CSV file, or CachedDataset.from_cache the cache."
            )
        if isinstance(dataset, (np.ndarray, torch.Tensor)):
            raise TypeError(
                f"{kind_of(dataset)} of shape {tuple(dataset.shape)} has no targets. Give both: "
                "TensorDataset(images, targets) of torch.utils.data for tensors, list(zip(images, targets)) for arrays."
            )
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(
                f"{type(dataset).__name__} has no __getitem__ and __len__, so its samples cannot be read by index. "
                "Give a map-style dataset; an iterable one can be collected first: list(dataset)."
            )
        self.dataset, self.columns = dataset, columns

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Any, Any]:
        item, which = self.dataset[index], f"item {index} of {type(self.dataset).__name__}"
        if isinstance(item, Mapping):
            item = {name: _opened(value) for name, value in item.items()}
        if self.columns is not None:
            return self.columns.split(item, which)
        if isinstance(item, Mapping):
            self.keys = keys = self.keys if self._is_known else _keys_of(item, which)
            self._is_known = True
            if keys is None or keys.kind != "dict":
                raise TypeError(f"{which} is a dict, others are not. Give all items one form.")
            if set(item) != set(keys.names):
                raise TypeError(f"{which} has the keys {', '.join(item)}, another one {', '.join(keys.names)}")
            return keys.split(item)
        size = f" of length {len(item)}" if isinstance(item, tuple | list) else ""
        if not size and not isinstance(item, torch.Tensor | np.ndarray) and not is_image(item):
            raise TypeError(
                f"{which} is {kind_of(item)}, not a (sample, target) pair, a tuple, a dict with an image or an image. "
                "Wrap the dataset in one whose __getitem__ returns one of these."
            )
        keys = ItemKeys.of(item)
        if self._is_known and keys != self.keys:
            raise TypeError(f"{which} is {kind_of(item)}{size}, others are not. Give all items one form.")
        self.keys, self._is_known = keys, True
        return (item[0], item[1]) if keys is None else keys.split(item)

    @property
    def is_remote(self) -> bool:
        return getattr(self.dataset, "is_remote", False)

    def expect(self, indices: Sequence[int]) -> None:
        if self.is_remote:  # of formats/
            self.dataset.expect(indices)

    def path(self, index: int) -> str | None:
        """Found where the dataset lists its files in ``samples``, as torchvision's do, through subsets of subsets."""
        dataset = self.dataset
        while getattr(dataset, "indices", None) is not None and hasattr(dataset, "dataset"):
            dataset, index = dataset.dataset, int(dataset.indices[index])
        samples = getattr(dataset, "samples", None)
        if not isinstance(samples, Sequence) or isinstance(samples, str) or index >= len(samples):
            return None
        sample = samples[index]
        first = sample[0] if isinstance(sample, tuple | list) and sample else sample
        return os.fspath(first) if isinstance(first, str | os.PathLike) else None


def _opened(value: Any) -> Any:
    """The image of a file that Hugging Face's ``Image(decode=False)`` leaves as it is; anything else unchanged."""
    if not isinstance(value, Mapping) or value.keys() != {"bytes", "path"}:
        return value
    return load_image(value["path"]) if value["bytes"] is None else decode_image(value["bytes"])


def _keys_of(item: Mapping[Any, Any], which: str) -> ItemKeys:
    names = tuple(item)
    images = [name for name, value in item.items() if is_image(value)]
    if len(images) != 1 or not all(isinstance(name, str) for name in names):
        found = f"the images {', '.join(map(str, images))}"
        found = found if images else f"no image among {', '.join(map(str, names))}"
        raise TypeError(
            f"{which} is a dict with {found}; one under a name is needed: a PIL image, array or tensor. Wrap the "
            "dataset in one whose __getitem__ returns ((image, mask), target), or say which it is: "
            "columns={'sample': 'image', 'target': 'label'}, or the like."
        )
    return ItemKeys(names, images[0])


# Folders of class folders


def find_classes(directory: str | os.PathLike[str]) -> tuple[list[str], dict[str, int]]:
    """List the class folders in ``directory``, sorted, with their indices, as torchvision does."""
    classes = (directory if isinstance(directory, Place) else Place(directory)).folders()
    if not classes:
        raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
    return classes, {name: index for index, name in enumerate(classes)}


def scan_folder(
    root: str | os.PathLike[str],
    class_to_idx: dict[str, int] | None = None,
    extensions: str | tuple[str, ...] | None = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
) -> list[tuple[str, int]]:
    """List the samples under a folder of class folders: torchvision's ``make_dataset``, order and errors, but faster.

    Links are followed. Folders that are slow to list, as over a network, are listed in parallel threads;
    ``is_valid_file`` runs in the calling thread, in order.
    """
    place = root if isinstance(root, Place) else None
    folder = os.path.expanduser(root)
    if class_to_idx is None:
        _, class_to_idx = find_classes(root if place else folder)
    elif not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError("Both extensions and is_valid_file cannot be None or not None at the same time")
    endings = extensions if extensions is None or isinstance(extensions, str) else tuple(extensions)

    names = sorted(class_to_idx)
    samples: list[tuple[str, int]] = []
    empty: list[str] = []
    if place is not None and place.is_remote:
        listings = _list_remote(place, names, endings)
    else:
        listings = _list_folders([os.path.join(folder, name) for name in names], endings)
    for name, paths in zip(names, listings, strict=True):
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


def _list_remote(place: Place, names: list[str], endings: str | tuple[str, ...] | None) -> Iterator[list[str]]:
    """In the order of ``_list_files``, all folders at once."""
    for future in [place.submit_find(name) for name in names]:
        parts = sorted(entry.name.rpartition("/")[::2] for entry in future.result())
        named = ["/".join(each) for each in parts]
        yield [place.at(name) for name in named if endings is None or name.lower().endswith(endings)]


def _list_folders(tops: list[str], endings: str | tuple[str, ...] | None) -> Iterator[list[str]]:
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


def _list_files(top: str, endings: str | tuple[str, ...] | None) -> list[str]:
    """Paths of the files below ``top`` that end in one of ``endings``.

    In the order of ``sorted(os.walk(top, followlinks=True))``; folders that cannot be listed are passed over as there.
    """
    files_of: dict[str, list[str]] = {}
    pending = [top]
    while pending:
        folder = pending.pop()
        folders: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    (folders if _is_dir(entry) else files).append(entry.name)
        except OSError:
            folders, files = [], []
        pending.extend(os.path.join(folder, name) for name in folders)
        files_of[folder] = files if endings is None else [name for name in files if name.lower().endswith(endings)]
    paths: list[str] = []
    for folder in sorted(files_of):
        prefix = os.path.join(folder, "")
        paths.extend([prefix + name for name in sorted(files_of[folder])])
    return paths


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


# Manifests: CSV files, frames, lists

_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_FLAGS = {"False": "0", "True": "1"}
_MISSING = ("None", "nan", "NaT", "<NA>")
"""How a frame's values that stand for none show themselves; text that reads so is text."""


class Manifest(NamedTuple):
    """Samples that a user lists, targets as ``SampleTable`` takes them; ``classes`` is None where none are names."""

    paths: list[str]
    targets: Any
    classes: list[str] | None


class _Table(NamedTuple):
    """Columns by name. Messages call it ``title``, and its rows ``row`` and a number, such as ``line 3``."""

    title: str
    row: str
    numbers: Sequence[int]
    columns: dict[str, Sequence[Any]]

    def place(self, index: int, column: str) -> str:
        return f"{self.title}, {self.row} {self.numbers[index]}, column {column!r}"

    def texts(self, column: str) -> list[str]:
        values = self.columns[column]
        texts = [value if isinstance(value, str) else "" if str(value) in _MISSING else str(value) for value in values]
        texts = [text.strip() for text in texts]
        if "" in texts:
            raise ValueError(f"{self.place(texts.index(''), column)}: the value is missing")
        return texts


def read_manifest(
    manifest: Any,
    root: str | os.PathLike[str] | None = None,
    file: str = "file",
    label: str | Sequence[str] | None = "label",
    id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Read paths and targets from what ``ImageManifest`` takes; see there."""
    labels = [label] if isinstance(label, str) else [] if label is None else list(label)
    names = list(dict.fromkeys([file, *labels, *([] if id is None else [id])]))
    folder = ""
    if isinstance(manifest, str | os.PathLike) and is_url(manifest):
        place, name = Place(manifest, storage_options).apart()
        text = io.TextIOWrapper(io.BytesIO(place.read(name)), encoding="utf-8-sig", newline="")
        table, folder = _read_csv(place.at(name), text, names), place.url
    elif isinstance(manifest, str | os.PathLike):
        csv_path = Path(manifest).expanduser()
        stream = open(csv_path, newline="", encoding="utf-8-sig")  # noqa: SIM115  # closed by who reads it
        table, folder = _read_csv(csv_path, stream, names), os.fspath(csv_path.parent)
    else:
        table = _read_frame(manifest, names) if hasattr(manifest, "columns") else _read_list(manifest, names)
    if root is not None:
        folder = Place(root).url if is_url(root) else os.path.expanduser(root)
    if not table.numbers:
        raise ValueError(f"{table.title} lists no samples{' below its header line' if table.row == 'line' else ''}")
    names = table.texts(file)
    paths = [name if "://" in name and is_url(name) else os.path.join(folder, name) for name in names]
    targets: Any = range(len(paths))
    classes = None
    if isinstance(label, str):
        targets, classes = _read_labels(table, label)
    elif labels:
        targets = _read_vectors(table, labels)
    if id is not None:
        table.texts(id)  # none is missing
        targets = list(zip(targets, table.columns[id], strict=True)) if labels else table.columns[id]
    return Manifest(paths, targets, classes)


def _read_csv(csv_path: Path | str, stream: TextIO, names: list[str]) -> _Table:
    with stream:
        reader = csv.reader(stream)
        try:
            header = next(reader, [])
            columns = [_column(str(csv_path), header, name) for name in names]
            rows = [_row(csv_path, reader.line_num, cells, header, columns) for cells in reader if cells]
        except csv.Error as broken:
            raise ValueError(f"{csv_path}, line {reader.line_num}: {broken}") from broken
        except UnicodeDecodeError as broken:
            raise ValueError(f"{csv_path} is not UTF-8 text after line {reader.line_num}; save it as UTF-8") from broken
    numbers, *values = zip(*rows, strict=True) if rows else [()] * (len(names) + 1)
    return _Table(str(csv_path), "line", numbers, dict(zip(names, values, strict=True)))


def _column(title: str, header: list[str], name: str) -> int:
    if header.count(name) == 1:
        return header.index(name)
    there = ", ".join(map(repr, header)) or "none, the file is empty"
    problem = "no column" if name not in header else "several columns"
    raise ValueError(
        f"{title} has {problem} {name!r}; its columns are: {there}. Choose with file= and label=, or label=None where "
        "there are no labels."
    )


def _row(csv_path: Path | str, line: int, cells: list[str], header: list[str], columns: list[int]) -> tuple[Any, ...]:
    if len(cells) > len(header):
        raise ValueError(
            f"{csv_path}, line {line}: {len(cells)} values for {len(header)} columns. "
            'Put quotes around a value that holds a comma: "a,b.jpg".'
        )
    return line, *[cells[column].strip() if column < len(cells) else "" for column in columns]


def _read_frame(frame: Any, names: list[str]) -> _Table:
    """Of pandas, or any library whose frames have ``columns``, each of them by its name, such as Polars."""
    title = f"the {type(frame).__name__}"
    for name in names:
        _column(title, list(frame.columns), name)
    return _Table(title, "row", range(len(frame)), {name: list(frame[name]) for name in names})


def _read_list(samples: Iterable[Any], names: list[str]) -> _Table:
    if isinstance(samples, Mapping) or not isinstance(samples, Iterable):
        raise TypeError(f"a manifest is the path of a CSV file, a frame, or a list of samples, not {kind_of(samples)}")
    rows = [(row,) if isinstance(row, str | os.PathLike) else row for row in samples]
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != len(names):
            raise ValueError(
                f"the list, item {index}: {row!r} has not the values {', '.join(names)}, in this order. Leave out what "
                "there is not by label=None and id=None, or give a frame or the path of a CSV file."
            )
    columns = zip(*rows, strict=True)
    return _Table("the list", "item", range(len(rows)), dict(zip(names, columns, strict=False)))


def _read_labels(table: _Table, label: str) -> tuple[Any, list[str] | None]:
    """Targets, and the class names where labels are names."""
    values = [value.tolist() if hasattr(value, "tolist") else value for value in table.columns[label]]
    if isinstance(values[0], tuple | list):
        columns = [f"{label}[{k}]" for k in range(len(values[0]))]
        for index, value in enumerate(values):
            if not isinstance(value, tuple | list) or len(value) != len(columns):
                raise ValueError(
                    f"{table.place(index, label)}: {value!r} are not {len(columns)} numbers as in the first"
                )
        vectors = table._replace(columns=dict(zip(columns, zip(*values, strict=True), strict=True)))
        return _read_vectors(vectors, columns), None
    labels = table._replace(columns={label: values}).texts(label)
    is_number = [_NUMBER.fullmatch(found) is not None for found in labels]
    if all(is_number):
        if not all(map(_WHOLE.fullmatch, labels)):
            return list(map(float, labels)), None
        _refuse_wide(table, label, labels)
        return list(map(int, labels)), None
    if any(is_number):
        name, number = is_number.index(False), is_number.index(True)
        raise ValueError(
            f"{table.place(name, label)}: {labels[name]!r} is a name, but {labels[number]!r} in {table.row} "
            f"{table.numbers[number]} is a number. Write all labels as numbers or all as names, such as 'class_7'."
        )
    classes = sorted(set(labels))
    numbers = {name: position for position, name in enumerate(classes)}
    return [numbers[found] for found in labels], classes


def _refuse_wide(table: _Table, column: str, texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        if is_wide(int(text)):
            raise ValueError(
                f"{table.place(index, column)}: {text} is beyond int64, the widest whole numbers that torch has. Pass "
                f"such numbers through as id=, or write names, such as 'class_{text}'."
            )


def _read_vectors(table: _Table, columns: Sequence[str]) -> torch.Tensor:
    """int64 (samples, columns) where all are whole numbers, else float32."""
    texts = [[_FLAGS.get(text, text) for text in table.texts(column)] for column in columns]
    for column, found in zip(columns, texts, strict=True):
        for index, text in enumerate(found):
            if not _NUMBER.fullmatch(text):
                raise ValueError(
                    f"{table.place(index, column)}: {text!r} is no number, and several labels are a vector of numbers. "
                    "Write numbers, or name one column of class names."
                )
    is_whole = all(_WHOLE.fullmatch(text) for found in texts for text in found)
    for column, found in zip(columns if is_whole else (), texts, strict=False):
        _refuse_wide(table, column, found)
    return torch.from_numpy(np.array(texts).T.astype(np.int64 if is_whole else np.float32, order="C"))
