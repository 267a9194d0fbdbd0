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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TextIO

import numpy as np
import torch

from fastdata.errors import is_url, kind_of
from fastdata.machine.shared import is_wide
from fastdata.pixels.images import decode_image, decoder_of, is_image, load_image
from fastdata.sources.remote import Coming, Place, fleeting_folder

if TYPE_CHECKING:
    from typing_extensions import Self

SCAN_THREADS = 16
"""Folders listed at once where listing waits, as on a network file system."""
SCAN_PATIENCE_S = 0.02
"""Wait beyond the work done that makes threads worth it. Without a wait they only pass the GIL
around: 50,000 files in 100 folders of a local disk take 37 ms in one thread, 61 ms in eight, and
torchvision 65 ms."""


@dataclass(frozen=True, slots=True)
class ItemKeys:
    """What items are that are no pairs, and how sample and target become one of them, or a batch.

    Of dicts the keys, in their order, and whose value is the sample; the rest is the target: the
    value of the one other key, else a dict. Of tuples the first value is the sample, and the
    others, a tuple, are the target. Where there is no other value, the target is 0.
    """

    names: tuple[str, ...]
    image: str
    kind: Literal["dict", "tuple", "alone"] = "dict"

    def __post_init__(self) -> None:
        if self.names.count(self.image) != 1:
            raise ValueError(f"{self.image!r} is not one of the different keys {self.names}")

    def split(self, item: Any) -> tuple[Any, Any]:
        if self.kind == "alone":
            return item, 0
        if self.kind == "tuple":
            return item[0], tuple(item[1:]) or 0
        others = {name: item[name] for name in self.names}
        sample = others.pop(self.image)
        if len(others) == 1:
            [others] = others.values()
        return sample, others

    def join(self, sample: Any, target: Any) -> Any:
        """The item again; or a batch of them, whose tuples are lists as in ``default_collate``."""
        if self.kind == "alone":
            return sample
        if self.kind == "dict":
            others = target
            if len(self.names) == 2:
                others = dict.fromkeys(self.names, target)
            return {name: sample if name == self.image else others[name] for name in self.names}
        if len(self.names) > 1:
            return type(target)((sample, *target))
        return [sample] if isinstance(target, torch.Tensor) else (sample,)


@dataclass(frozen=True, slots=True)
class IndexedKeys:
    """Items with the sample's index as their last value: of targets (target, index), or lists."""

    keys: ItemKeys | None

    def __post_init__(self) -> None:
        if self.keys is not None and self.keys.kind == "dict" and "index" in self.keys.names:
            raise ValueError(
                "return_index=True adds the key 'index', and the items have one already; rename it"
            )

    def join(self, sample: Any, target: Any) -> Any:
        inner, index = target
        if self.keys is None:
            return type(target)((sample, inner, index))
        item = self.keys.join(sample, inner)
        if self.keys.kind == "dict":
            return {**item, "index": index}
        values = (item,) if self.keys.kind == "alone" else item
        return type(target)((*values, index))


ItemForm = ItemKeys | IndexedKeys


@dataclass(frozen=True, slots=True)
class Columns:
    """The keys of dicts whose values are sample and target; of several targets a dict is made."""

    sample: str
    target: str | list[str]

    @classmethod
    def of(cls, names: Mapping[str, Any]) -> Columns:
        target = names.get("target")
        if isinstance(target, tuple | list) and all(isinstance(name, str) for name in target):
            target = list(target)
        sample = names.get("sample")
        if len(names) != 2 or not isinstance(sample, str) or not target:
            raise ValueError(
                f"columns={names!r} does not say which are sample and target. Give their names, "
                "or a list of several for the target: "
                "columns={'sample': 'image', 'target': 'label'}."
            )
        return cls(sample, target)

    @property
    def names(self) -> list[str]:
        targets = [self.target] if isinstance(self.target, str) else self.target
        return [self.sample, *targets]

    def split(self, item: Any, which: str) -> tuple[Any, Any]:
        if not isinstance(item, Mapping):
            raise TypeError(
                f"{which} is {kind_of(item)}, and columns= chooses of a dict; leave it out"
            )
        missing = [repr(name) for name in self.names if name not in item]
        if missing:
            there = ", ".join(map(repr, item))
            raise KeyError(f"{which} has no {', '.join(missing)} of columns=; there are {there}")
        if isinstance(self.target, str):
            return item[self.sample], item[self.target]
        return item[self.sample], {name: item[name] for name in self.target}


class Source(Protocol):
    """Samples by index in [0, len), each read anew whenever it is asked for.

    ``read`` gives (sample, target), from several threads at once if the source's parts allow it.
    ``expect`` says which ones this process reads next: worth something where reading is waiting.
    ``path`` names the sample's file, for messages. ``keys`` are known once one item was read.
    """

    @property
    def keys(self) -> ItemKeys | None: ...
    def __len__(self) -> int: ...
    def read(self, index: int) -> tuple[Any, Any]: ...
    def expect(self, indices: Sequence[int]) -> None: ...
    def path(self, index: int) -> str | None: ...


@dataclass(eq=False, repr=False)
class FileSource:
    """One file per sample, opened by ``loader``; paths and targets are read by index only."""

    keys: ClassVar[ItemKeys | None] = None

    paths: Sequence[str]
    targets: Sequence[Any]
    loader: Callable[[str], Any]

    def __post_init__(self) -> None:
        count = len(self.targets)
        if len(self.paths) != count:
            raise ValueError(f"{len(self.paths)} paths but {count} targets; each sample needs both")

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

    def opened_by(self, loader: Callable[[str], Any]) -> Self:
        return self.over({"loader": loader})  # what one expects the other reads

    def columns_of(self, indices: Sequence[int]) -> dict[str, Any]:
        """What is known of these samples, for ``over`` in another process."""
        paths = {index: self.paths[index] for index in indices}
        targets = {index: self.targets[index] for index in indices}
        return {"paths": paths, "targets": targets}

    def over(self, columns: Mapping[str, Any]) -> Self:
        """The same over other samples; columns are read by index only."""
        other = copy.copy(self)
        vars(other).update(columns)
        return other

    def as_bytes(self) -> Self:
        """The files as they are, unopened: uint8 (bytes,)."""
        return self.opened_by(_read_bytes)

    def size_bytes(self, index: int) -> int:
        """Size of the file of sample ``index``; 0 where there is none."""
        try:
            return os.path.getsize(self.paths[index])
        except OSError:
            return 0

    def listing(self) -> np.ndarray | None:
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
        facts: of each file ``sizes`` and ``tags``, int64 (N,); -1 where they are not known. A file
            that comes in another size was changed since it was listed, which is an error.
        targets, loader: as of ``FileSource``. A loader of the user's own gets the path of a
            temporary copy.
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
        self._place = place
        self._facts = facts
        self._coming = Coming()

    def expect(self, indices: Sequence[int]) -> None:
        self._coming.expect(indices, self._submit)

    def read(self, index: int) -> tuple[Any, Any]:
        sample = self._open(self.read_bytes(index), self.paths[index])
        return sample, self.targets[index]

    def _open(self, data: bytes, path: str) -> Any:
        decode = decoder_of(self.loader)
        if self.loader is _read_bytes:
            return np.frombuffer(data, np.uint8)
        if decode is not None:
            return decode(memoryview(data))
        with fleeting_folder() as folder:
            copied = folder / f"sample{os.path.splitext(path)[1]}"
            copied.write_bytes(data)
            return self.loader(str(copied))

    def read_bytes(self, index: int) -> bytes:
        coming = self._coming.here().pop(index, None)
        if coming is None:
            coming = self._submit(index)
        return coming.result()

    def columns_of(self, indices: Sequence[int]) -> dict[str, Any]:
        facts = {}
        for name, column in self._facts.items():
            facts[name] = {index: int(column[index]) for index in indices}
        return {**super().columns_of(indices), "_facts": facts}

    def size_bytes(self, index: int) -> int:
        return max(int(self._facts["sizes"][index]), 0)

    def listing(self) -> np.ndarray:
        facts = np.stack([self._facts["sizes"], self._facts["tags"]])
        if len(self) and facts[0].max() < 0:  # nobody has listed them
            submitted = []
            for path in self.paths:
                place, name = place_of(self._place, path)
                submitted.append(place.submit_facts(name))
            facts = np.array([future.result() for future in submitted], np.int64).T
        return facts

    def _submit(self, index: int) -> Future[bytes]:
        place, name = place_of(self._place, self.paths[index])
        size = int(self._facts["sizes"][index])
        return place.submit(name, size_bytes=None if size < 0 else size)


def place_of(place: Place, url: str) -> tuple[Place, str]:
    """The place and the name there of a file that most likely lies below ``place``."""
    name = url.removeprefix(f"{place.url}/")
    if name != url:
        return place, name
    folder, _, name = url.rpartition("/")
    return place.beside(folder), name


class DatasetSource:
    """The items of any map-style dataset of pairs or dicts; its own transform runs in ``read``.

    With ``columns`` the items are dicts, of which those named are sample and target.
    """

    keys: ItemKeys | None = None
    _has_keys = False
    """Whether an item was read, so that ``keys`` are those of all."""

    def __init__(self, dataset: Any, columns: Columns | None = None) -> None:
        _check_dataset(dataset)
        self.dataset = dataset
        self.columns = columns

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Any, Any]:
        item = self.dataset[index]
        which = f"item {index} of {type(self.dataset).__name__}"
        if isinstance(item, Mapping):
            item = {name: _opened(value) for name, value in item.items()}
        if self.columns is not None:
            return self.columns.split(item, which)
        self._check_keys(item, which)
        if self.keys is not None:
            return self.keys.split(item)
        sample, target = item
        return sample, target

    def _check_keys(self, item: Any, which: str) -> None:
        """Hold an item against those before it; of a dict what its image is follows from one."""
        if not self._has_keys:
            self.keys = _keys_of(item, which)
            self._has_keys = True
        keys = self.keys
        is_dict = isinstance(item, dict)
        if is_dict and keys is not None and keys.kind == "dict":
            if set(item) != set(keys.names):
                others = ", ".join(keys.names)
                raise TypeError(f"{which} has the keys {', '.join(item)}, another one {others}")
        elif is_dict or _keys_of(item, which) != keys:
            size = f" of length {len(item)}" if isinstance(item, tuple | list) else ""
            raise TypeError(
                f"{which} is {kind_of(item)}{size}, others are not. Give all items one form."
            )

    @property
    def is_remote(self) -> bool:
        return getattr(self.dataset, "is_remote", False)

    def expect(self, indices: Sequence[int]) -> None:
        if self.is_remote:  # of formats/
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
        if not isinstance(samples, Sequence) or isinstance(samples, str) or index >= len(samples):
            return None
        sample = samples[index]
        if isinstance(sample, tuple | list) and sample:
            sample = sample[0]
        return os.fspath(sample) if isinstance(sample, str | os.PathLike) else None


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, str | bytes | os.PathLike):
        raise TypeError(
            f"{dataset!r} is a path, not a dataset. Give fastdata.ImageFolder the folder of class "
            "folders, fastdata.ImageManifest the CSV file, or CachedDataset.from_cache the cache."
        )
    if isinstance(dataset, np.ndarray | torch.Tensor):
        raise TypeError(
            f"{kind_of(dataset)} of shape {tuple(dataset.shape)} has no targets. Give both: "
            "TensorDataset(images, targets) of torch.utils.data for tensors, "
            "list(zip(images, targets)) for arrays."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"{type(dataset).__name__} has no __getitem__ and __len__, so its samples cannot be "
            "read by index. Give a map-style dataset; an iterable one can be collected first: "
            "list(dataset)."
        )


def _opened(value: Any) -> Any:
    """The image of what Hugging Face's ``Image(decode=False)`` gives; anything else unchanged."""
    if not isinstance(value, Mapping) or value.keys() != {"bytes", "path"}:
        return value
    if value["bytes"] is None:
        return load_image(value["path"])
    return decode_image(value["bytes"])


def _keys_of(item: Any, which: str) -> ItemKeys | None:
    """None for a pair."""
    if isinstance(item, dict):
        return _keys_of_dict(item, which)
    if isinstance(item, tuple | list):
        names = tuple(map(str, range(len(item))))
        return None if len(item) == 2 else ItemKeys(names, "0", "tuple")
    if isinstance(item, torch.Tensor | np.ndarray) or is_image(item):
        return ItemKeys(("0",), "0", "alone")
    raise TypeError(
        f"{which} is {kind_of(item)}, not a (sample, target) pair, a tuple, a dict with an image "
        "or an image. Wrap the dataset in one whose __getitem__ returns one of these."
    )


def _keys_of_dict(item: dict[Any, Any], which: str) -> ItemKeys:
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


# Folders of class folders

Endings = str | tuple[str, ...] | None
AnyPath = str | os.PathLike[str]


def find_classes(directory: AnyPath) -> tuple[list[str], dict[str, int]]:
    """List the class folders in ``directory``, sorted, with their indices, as torchvision does."""
    place = directory if isinstance(directory, Place) else Place(directory)
    classes = place.folders()
    if not classes:
        raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
    return classes, {name: index for index, name in enumerate(classes)}


def scan_folder(
    root: AnyPath,
    class_to_idx: dict[str, int] | None = None,
    extensions: Endings = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
) -> list[tuple[str, int]]:
    """List the samples below class folders: torchvision's ``make_dataset``, but faster.

    Order and errors are torchvision's. Links are followed. Folders that are slow to list, as over a
    network, are listed in parallel threads; ``is_valid_file`` runs in the calling thread, in order.
    """
    if not isinstance(root, Place):
        root = os.path.expanduser(root)
    if class_to_idx is None:
        _, class_to_idx = find_classes(root)
    elif not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError(
            "Both extensions and is_valid_file cannot be None or not None at the same time"
        )
    endings = extensions
    if not isinstance(extensions, str | None):
        endings = tuple(extensions)
    samples: list[tuple[str, int]] = []
    empty: list[str] = []
    names = sorted(class_to_idx)
    for name, paths in zip(names, _list_classes(root, names, endings), strict=True):
        valid = [path for path in paths if is_valid_file is None or is_valid_file(path)]
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
    if isinstance(root, Place) and root.is_remote:
        return _list_remote(root, names, endings)
    return _list_folders([os.path.join(root, name) for name in names], endings)


def _list_remote(place: Place, names: list[str], endings: Endings) -> Iterator[list[str]]:
    """In the order of ``_list_files``, all folders at once."""
    for future in [place.submit_find(name) for name in names]:
        files = [entry.name for entry in future.result()]
        files.sort(key=os.path.split)
        yield [place.at(name) for name in files if _ends(name, endings)]


def _list_folders(tops: list[str], endings: Endings) -> Iterator[list[str]]:
    """List folders in turn, the rest in threads once listing has waited more than it worked."""
    idle_s = 0.0
    for position, top in enumerate(tops, start=1):
        begun_s = time.perf_counter()
        begun_work_s = time.thread_time()
        listing = _list_files(top, endings)
        worked_s = time.thread_time() - begun_work_s
        idle_s += time.perf_counter() - begun_s - 2 * worked_s
        yield listing
        if idle_s > SCAN_PATIENCE_S and len(tops) > position + 1:
            with ThreadPoolExecutor(SCAN_THREADS) as threads:
                yield from threads.map(_list_files, tops[position:], repeat(endings))
            return


def _list_files(top: str, endings: Endings) -> list[str]:
    """Paths of the files below ``top`` that end in one of ``endings``, in torchvision's order."""
    paths: list[str] = []
    for folder, _, names in sorted(os.walk(top, followlinks=True)):
        prefix = os.path.join(folder, "")
        paths += [prefix + name for name in sorted(names) if _ends(name, endings)]
    return paths


def _ends(name: str, endings: Endings) -> bool:
    return endings is None or name.lower().endswith(endings)


# Manifests: CSV files, frames, lists

_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_FLAGS = {"False": "0", "True": "1"}
_MISSING = ("None", "nan", "NaT", "<NA>")
"""How a frame's values that stand for none show themselves; text that reads so is text."""


class Manifest(NamedTuple):
    """Samples that a user lists, targets as ``SampleTable`` takes them.

    ``classes`` is None where no labels are names.
    """

    paths: list[str]
    targets: Any
    classes: list[str] | None


class _Table(NamedTuple):
    """Columns by name. Messages call it ``title``, its rows ``row`` and a number: ``line 3``."""

    title: str
    row: str
    numbers: Sequence[int]
    columns: Mapping[str, Sequence[Any]]

    def where(self, index: int, column: str) -> str:
        return f"{self.title}, {self.row} {self.numbers[index]}, column {column!r}"

    def texts(self, column: str) -> list[str]:
        texts = [_text(value) for value in self.columns[column]]
        if "" in texts:
            raise ValueError(f"{self.where(texts.index(''), column)}: the value is missing")
        return texts


def _text(value: Any) -> str:
    text = str(value).strip()
    return "" if text in _MISSING and not isinstance(value, str) else text


def read_manifest(
    manifest: Any,
    root: AnyPath | None = None,
    file: str = "file",
    label: str | Sequence[str] | None = "label",
    id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Read paths and targets from what ``ImageManifest`` takes; see there."""
    labels = [label] if isinstance(label, str) else label or ()
    names = [file, *labels]
    if id is not None:
        names.append(id)
    names = list(dict.fromkeys(names))
    table, folder = _read_table(manifest, names, storage_options)
    if not table.numbers:
        below = " below its header line" if table.row == "line" else ""
        raise ValueError(f"{table.title} lists no samples{below}")
    if root is not None:
        folder = Place(root).url if is_url(root) else os.path.expanduser(root)
    paths = []
    for path in table.texts(file):
        is_whole = "://" in path and is_url(path)
        paths.append(path if is_whole else os.path.join(folder, path))
    targets: Any = range(len(paths))
    classes = None
    if isinstance(label, str):
        targets, classes = _read_labels(table, label)
    elif labels:
        targets = _read_vectors(table, labels)
    if id is not None:
        table.texts(id)  # none is missing
        ids = table.columns[id]
        targets = list(zip(targets, ids, strict=True)) if labels else ids
    return Manifest(paths, targets, classes)


def _read_table(
    manifest: Any, names: list[str], storage_options: Mapping[str, Any] | None
) -> tuple[_Table, str]:
    """The columns, and the folder that paths in them start from."""
    if not isinstance(manifest, str | os.PathLike):
        read = _read_frame if hasattr(manifest, "columns") else _read_list
        return read(manifest, names), ""
    if is_url(manifest):
        place, name = Place(manifest, storage_options).apart()
        text = io.TextIOWrapper(io.BytesIO(place.read(name)), encoding="utf-8-sig", newline="")
        return _read_csv(place.at(name), text, names), place.url
    path = os.path.expanduser(manifest)
    with open(path, newline="", encoding="utf-8-sig") as stream:
        return _read_csv(path, stream, names), os.path.dirname(path)


def _read_csv(title: str, stream: TextIO, names: list[str]) -> _Table:
    reader = csv.reader(stream)
    rows = []
    numbers = []
    try:
        header = next(reader, [])
        places = [_place_of_column(title, header, name) for name in names]
        for cells in filter(None, reader):
            if len(cells) > len(header):
                raise ValueError(
                    f"{title}, line {reader.line_num}: {len(cells)} values for {len(header)} "
                    'columns. Put quotes around a value that holds a comma: "a,b.jpg".'
                )
            cells += [""] * (len(header) - len(cells))
            rows.append([cells[place].strip() for place in places])
            numbers.append(reader.line_num)
    except csv.Error as broken:
        raise ValueError(f"{title}, line {reader.line_num}: {broken}") from broken
    except UnicodeDecodeError as broken:
        raise ValueError(
            f"{title} is not UTF-8 text after line {reader.line_num}; save it as UTF-8"
        ) from broken
    return _Table(title, "line", numbers, _by_name(names, rows))


def _by_name(names: list[str], rows: list[Any]) -> dict[str, Sequence[Any]]:
    return dict(zip(names, zip(*rows, strict=True), strict=False))


def _place_of_column(title: str, header: list[str], name: str) -> int:
    if header.count(name) == 1:
        return header.index(name)
    there = ", ".join(map(repr, header)) or "none, the file is empty"
    problem = "no column" if name not in header else "several columns"
    raise ValueError(
        f"{title} has {problem} {name!r}; its columns are: {there}. Choose with file= and label=, "
        "or label=None where there are no labels."
    )


def _read_frame(frame: Any, names: list[str]) -> _Table:
    """Of pandas, or any library whose frames have ``columns``, each by its name, as Polars."""
    title = f"the {type(frame).__name__}"
    for name in names:
        _place_of_column(title, list(frame.columns), name)
    columns = {name: list(frame[name]) for name in names}
    return _Table(title, "row", range(len(frame)), columns)


def _read_list(samples: Iterable[Any], names: list[str]) -> _Table:
    if isinstance(samples, Mapping) or not isinstance(samples, Iterable):
        raise TypeError(
            f"a manifest is the path of a CSV file, a frame, or a list of samples, not {kind_of(samples)}"
        )
    rows = [(row,) if isinstance(row, str | os.PathLike) else row for row in samples]
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != len(names):
            raise ValueError(
                f"the list, item {index}: {row!r} has not the values {', '.join(names)}, in this "
                "order. Leave out what there is not by label=None and id=None, or give a frame or "
                "the path of a CSV file."
            )
    return _Table("the list", "item", range(len(rows)), _by_name(names, rows))


def _read_labels(table: _Table, label: str) -> tuple[Any, list[str] | None]:
    """Targets, and the class names where labels are names."""
    arrays = table.columns[label]
    values = [value.tolist() if hasattr(value, "tolist") else value for value in arrays]
    table = table._replace(columns={label: values})
    if isinstance(values[0], tuple | list):
        return _read_lists(table, label), None
    texts = table.texts(label)
    is_number = [_NUMBER.fullmatch(text) is not None for text in texts]
    if all(is_number):
        column = _numbers(table, label, texts)
        return column.tolist(), None
    if any(is_number):
        name = is_number.index(False)
        number = is_number.index(True)
        raise ValueError(
            f"{table.where(name, label)}: {texts[name]!r} is a name, but {texts[number]!r} in "
            f"{table.row} {table.numbers[number]} is a number. Write all labels as numbers or all "
            "as names, such as 'class_7'."
        )
    classes, targets = np.unique(np.array(texts, object), return_inverse=True)
    return targets.tolist(), classes.tolist()


def _read_lists(table: _Table, label: str) -> torch.Tensor:
    rows = table.columns[label]
    count = len(rows[0])
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != count:
            raise ValueError(
                f"{table.where(index, label)}: {row!r} are not {count} numbers as in the first"
            )
    names = [f"{label}[{position}]" for position in range(count)]
    return _read_vectors(table._replace(columns=_by_name(names, list(rows))), names)


def _read_vectors(table: _Table, names: Sequence[str]) -> torch.Tensor:
    """int64 (samples, columns) where all are whole numbers, else float32."""
    columns = []
    for name in names:
        texts = [_FLAGS.get(text, text) for text in table.texts(name)]
        for index, text in enumerate(texts):
            if not _NUMBER.fullmatch(text):
                raise ValueError(
                    f"{table.where(index, name)}: {text!r} is no number, and several labels are a "
                    "vector of numbers. Write numbers, or name one column of class names."
                )
        columns.append(_numbers(table, name, texts))
    values = torch.from_numpy(np.stack(columns, axis=1))
    return values.float() if values.is_floating_point() else values


def _numbers(table: _Table, column: str, texts: list[str]) -> np.ndarray:
    """int64 where all are whole numbers, else float64."""
    if not all(map(_WHOLE.fullmatch, texts)):
        return np.array(texts).astype(np.float64)
    for index, text in enumerate(texts):
        if is_wide(int(text)):
            raise ValueError(
                f"{table.where(index, column)}: {text} is beyond int64, the widest whole numbers "
                "that torch has. Pass such numbers through as id=, or write names, such as "
                f"'class_{text}'."
            )
    return np.array(list(map(int, texts)), np.int64)
