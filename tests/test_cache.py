"""Datasets with cache_dir=: what the next run reuses, and how damaged or changed files are handled."""

from __future__ import annotations

import builtins
import contextlib
import errno
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.transforms import v2

from children import send_sample
from data import level_samples, save_image
from fastdata import CachedDataset, DataLoader, FastDataWarning, ImageFolder, ImageManifest
from fastdata.errors import (
    CacheError,
    IngestError,
    MemoryBudgetError,
    SampleError,
    StoreGoneError,
)
from fastdata.pixels.decode import load_image
from fastdata.pixels.resize import Resize
from fastdata.pixels.transform_keys import describe_transforms
from fastdata.sources.remote import Place
from fastdata.stores import disk_file as disk_file_module
from fastdata.stores.build import lock_of, locked
from fastdata.stores.cache import INDEX, Cache
from fastdata.stores.disk_file import DiskFile
from fastdata.tools.inspect import inspect_caches
from fastdata.tools.prune import prune_caches

Folder = Callable[..., Path]
TRANSFORM = v1.Compose([v1.Resize((7, 9)), v1.RandomHorizontalFlip(), v1.PILToTensor()])
CODECS = ["auto", "zstd", "source"]
FOUR = 4 * 3 * 7 * 9
"""Bytes of four images as ``cached`` prepares them."""


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Return the names of the files that any process has opened since the last call."""
    log = tmp_path / "opened.txt"

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def open_noting(file: Any, *rest: Any, **options: Any) -> Any:
            if str(file).endswith((".jpg", ".png")) and "opener" not in options:
                with log.open("a") as stream:
                    stream.write(f"{os.path.basename(file)}\n")
            return plain(file, *rest, **options)

        return open_noting

    monkeypatch.setattr(builtins, "open", noting(open))
    monkeypatch.setattr(os, "open", noting(os.open))

    def take() -> list[str]:
        names = sorted(log.read_text().split()) if log.exists() else []
        log.unlink(missing_ok=True)
        return names

    return take


def cached(root: Path, **options: Any) -> ImageFolder:
    options = {
        "transform": TRANSFORM,
        "cache_dir": root.parent / "cache",
        "prepare_workers": 1,
    } | options
    return ImageFolder.build_cache(str(root), **options)


def expected(root: Path, **options: Any) -> list[tuple[np.ndarray, int]]:
    """Return every sample as it is prepared without a store."""
    with ImageFolder(str(root), v1.Resize((7, 9)), storage="none", **options) as plain:
        return [(np.asarray(image), target) for image, target in plain]


def same(dataset: Any, wanted: list[tuple[np.ndarray, int]]) -> bool:
    """Return True if a dataset holds exactly these samples."""
    if dataset.transform is not None:
        dataset.transform = v1.Resize((7, 9))
    return len(dataset) == len(wanted) and all(
        np.array_equal(np.asarray(image), pixels) and target == number
        for (image, target), (pixels, number) in zip(dataset, wanted, strict=True)
    )


def home_of(cache_dir: Path) -> Path:
    (path,) = cache_dir.glob(f"*/{INDEX}")
    return path.parent


def sample_file(cache_dir: Path) -> Path:
    """Return the first file with samples."""
    return min(cache_dir.glob("*/part0-*"))


def files_of(cache_dir: Path) -> set[str]:
    """Return the names of all files in the folder except caches, listings and locks."""
    homes = {path.parent.name for path in cache_dir.glob(f"*/{INDEX}")}
    return {
        entry.name
        for entry in cache_dir.iterdir()
        if entry.name not in homes and entry.suffix not in (".lock", ".npz")
    }


# The second run


@pytest.mark.parametrize("codec", CODECS)
def test_the_second_run_opens_no_image(image_folder: Folder, prepared: Any, codec: str) -> None:
    """The second run opens only files of the cache, and its batches equal those of a store in memory."""
    root = image_folder(per_class=9, size=(13, 11))
    with ImageFolder(str(root), TRANSFORM, storage="shared", seed=0).prepare() as raw:
        raw.set_epoch(3)
        wanted = list(DataLoader(raw, batch_size=4, num_workers=1))
    for run in range(2):
        prepared()
        with cached(root, codec=codec, seed=0) as dataset:
            assert dataset.storage == "disk"
            assert dataset.storage_plan.codec == (None if codec == "auto" else codec)
            assert (prepared() == []) == (run == 1)
            dataset.set_epoch(3)
            ours = list(DataLoader(dataset, batch_size=4, num_workers=1))
            assert all(
                torch.equal(a, b) and torch.equal(c, d)
                for (a, c), (b, d) in zip(ours, wanted, strict=True)
            )
            assert dataset.samples == TorchvisionFolder(str(root)).samples


def test_images_of_many_shapes_are_kept(image_folder: Folder, prepared: Any) -> None:
    """Images of several shapes, raw or encoded, come back with their own shapes."""
    root = image_folder(classes=("a",), per_class=3, size=(12, 10))
    image_folder(classes=("b",), per_class=3, size=(9, 14))
    plain = TorchvisionFolder(str(root))
    for codec in CODECS:
        for _ in range(2):
            with cached(root, transform=None, codec=codec) as dataset:
                assert all(
                    np.array_equal(np.asarray(dataset[i][0]), np.asarray(plain[i][0]))
                    for i in range(6)
                )


@pytest.mark.parametrize("codec", ["auto", ("zstd", "lz4")])
def test_masks_are_kept_with_images(tmp_path: Path, codec: Any) -> None:
    """A sample of several parts, with a part in the target, comes back from the first and the second run."""
    pairs = [
        (torch.full((3, 4, 5), i, dtype=torch.uint8), np.full((4, 5), i, np.int16))
        for i in range(6)
    ]
    for _ in range(2):
        options: dict[str, Any] = {
            "cache_dir": tmp_path / "c",
            "cache_key": "pairs",
        }
        with CachedDataset(pairs, codec=codec, **options) as dataset:
            assert all(torch.equal(dataset[i][0], pairs[i][0]) for i in range(6))
            assert all(np.array_equal(dataset[i][1], pairs[i][1]) for i in range(6))


@pytest.mark.parametrize(
    "targets",
    [
        [5, 6, 7],
        [0.5, 1.5, 2.5],
        [np.int64(5), np.int64(6), np.int64(7)],
        [(np.float32(0.1), 1), (np.float32(0.2), 2), (np.float32(0.3), 3)],
        ["a", "ö", "c"],
        [{"x": [1, 2]}, {"x": []}, {}],
        [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])],
        [np.float32([1, 2]), np.float32([3, 4]), np.float32([5, 6])],
        [(1, "a"), (2, "ö"), (3, "c")],
        [((1, 2), ("a", "b")), ((3, 4), ("c", "d")), ((5, 6), ("e", "f"))],
    ],
)
def test_targets_are_kept_without_pickle(
    tmp_path: Path, targets: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, arrays, strings and plain structures come back with their type."""
    data = [(torch.zeros(2, 3, dtype=torch.uint8), target) for target in targets]
    for _ in range(2):
        with CachedDataset(data, cache_dir=tmp_path, cache_key="k") as dataset:
            assert [type(t) for t in dataset.targets] == [type(t) for t in targets]
            assert all(np.array_equal(a, b) for a, b in zip(dataset.targets, targets, strict=True))


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ([{1, 2}, {3}], r"\{1, 2\} \(set\) and \{3\} \(set\)\."),
        ([{"boxes": [1], 7: 2}], r"\{'boxes': \[1\], 7: 2\} \(dict\)\."),
        ([5, {"size": (5, 6)}], r"\{'size': \(5, 6\)\} \(dict\)\."),
        ([(1, 2), (3,)], r"\(1, 2\) \(tuple\) and \(3,\) \(tuple\)\."),
        ([np.zeros(3), np.zeros(4)], r"array\(\[0\., 0\., 0\.\]\) \(ndarray\) and array\("),
        ([1, np.int64(2)], r"2\)? \(int64\)\."),
    ],
)
def test_targets_that_files_cannot_keep_are_refused(
    tmp_path: Path, targets: list[Any], found: str
) -> None:
    """The error names the targets, comes before any sample is prepared, and leaves no file."""
    data = [(torch.zeros(2), target) for target in targets]
    with pytest.raises(
        ValueError, match=rf"cache_dir= can store targets that are .* It found .*{found}"
    ):
        CachedDataset(data, cache_dir=tmp_path, cache_key="k")
    assert files_of(tmp_path) == set()


def test_raw_samples_are_a_plain_numpy_file(image_folder: Folder) -> None:
    """``np.load`` reads the file of raw samples: the prepared images in order."""
    root = image_folder(per_class=9, size=(13, 11))
    cached(root).close()
    pixels = np.load(sample_file(root.parent / "cache"), allow_pickle=False)
    assert all(
        np.array_equal(a.transpose(1, 2, 0), b)
        for a, (b, _) in zip(pixels, expected(root), strict=True)
    )


# Changed files


def test_a_changed_file_has_its_shard_written_again(
    image_folder: Folder, prepared: Any, caplog: Any
) -> None:
    """If a file is changed, added or removed, other shards stay, and this run and the next have the right samples."""
    root = image_folder(per_class=40, size=(13, 11))
    cached(root, shard_bytes=FOUR).close()
    before = set((root.parent / "cache").glob("*/part0-*"))
    save_image(root / "cat" / "003.jpg", 99, (15, 12))
    save_image(root / "dog" / "new.jpg", 77, (13, 11))
    (root / "dog" / "000.jpg").unlink()
    for run in range(2):
        prepared()
        with (
            caplog.at_level(logging.WARNING, "fastdata"),
            cached(root, shard_bytes=FOUR) as dataset,
        ):
            opened = prepared()
            assert {"003.jpg", "new.jpg"} < set(opened) if run == 0 else not opened
            assert same(dataset, expected(root))
    (line,) = caplog.messages
    assert re.match(r"preparing \d+ of 80 samples: those of new or changed files", line)
    assert before & set((root.parent / "cache").glob("*/part0-*"))


def test_a_new_size_or_a_new_time_marks_a_changed_file(image_folder: Folder, prepared: Any) -> None:
    """A file with another size and its old time, or its old size and another time, is prepared again."""
    root = image_folder(per_class=20, size=(13, 11))
    cached(root, shard_bytes=FOUR).close()
    longer, later = root / "cat" / "002.jpg", root / "dog" / "005.jpg"
    time_ns = longer.stat().st_mtime_ns
    longer.write_bytes(longer.read_bytes() + b" ")
    os.utime(longer, ns=(time_ns, time_ns))
    os.utime(later, ns=(1, 1))
    prepared()
    cached(root, shard_bytes=FOUR).close()
    opened = prepared()
    assert {"002.jpg", "005.jpg"} <= set(opened)
    assert len(opened) < 40


def test_a_file_that_is_listed_twice_stays_two_samples(image_folder: Folder) -> None:
    """A file that is listed twice is two samples, even if only one of its two shards is written again."""
    root = image_folder(classes=("a",), per_class=8, size=(13, 11))
    names = [f"a/{k:03}.jpg" for k in (0, 1, 1, 2, 3, 4, 5, 6, 7)]
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "resize": (7, 9),
    }
    table = root.parent / "t.csv"
    for run in range(3):
        table.write_text("file,label\n" + "".join(f"{name},{k}\n" for k, name in enumerate(names)))
        with ImageManifest.build_cache(
            table, root=root, prepare_workers=1, shard_bytes=FOUR, **options
        ) as dataset:
            wanted = [
                np.asarray(Image.open(root / name).resize((9, 7), Image.Resampling.BILINEAR))
                for name in names
            ]
            assert all(
                np.array_equal(np.asarray(dataset[k][0]), image) for k, image in enumerate(wanted)
            )
            assert list(dataset.targets) == list(range(len(names)))
        save_image(root / "a" / "007.jpg", 60 + run, (14, 11))
        names = names[::-1]


def test_an_empty_file_that_was_left_out_is_not_read_again(
    image_folder: Folder, prepared: Any, caplog: Any
) -> None:
    """An unchanged empty file that was left out is left out again without being read."""
    root = image_folder(per_class=4, size=(13, 11))
    (root / "cat" / "001.jpg").write_bytes(b"")
    with pytest.warns(FastDataWarning, match="1 of 8"):
        cached(root, on_error="skip").close()
    caplog.clear()
    with cached(root, on_error="skip") as dataset:
        assert [error.index for error in dataset.skipped] == [1]
    assert not [message for message in caplog.messages if "are prepared" in message]


@pytest.mark.parametrize("codec", CODECS)
def test_changes_come_in_every_codec(image_folder: Folder, prepared: Any, codec: str) -> None:
    """Encoded samples are replaced one by one, also several times."""
    root = image_folder(per_class=8, size=(13, 11))
    for change in range(3):
        with cached(root, codec=codec) as dataset:
            assert same(dataset, expected(root))
        save_image(root / "cat" / f"00{change}.jpg", 50 + change, (15, 12))


class Files:
    """Items that are the bytes of the files that it lists. One of them kills the process that reads it."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(path), 0) for path in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        data = Path(self.samples[index][0]).read_bytes()
        if data == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return np.frombuffer(data, np.uint8), 0


def test_a_worker_killed_over_changed_files_is_named(tmp_path: Path) -> None:
    """The error has the indices of the samples in the dataset, not their positions among the changed ones."""
    folder = tmp_path / "files"
    folder.mkdir()
    for index in range(160):
        (folder / f"{index:03}").write_bytes(b"%04d" % index)
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "prepare_workers": 2}
    options["shard_bytes"] = 160  # of 64 samples
    CachedDataset.build_cache(Files(folder), **options).close()
    for index in range(80, 160):
        (folder / f"{index:03}").write_bytes(b"kill" if index == 81 else b"%04d" % -index)
    with pytest.raises(
        IngestError,
        match=r"killed by SIGKILL during one of these tasks: .*samples 64 to 127",
    ):
        CachedDataset.build_cache(Files(folder), **options)


def test_a_removed_file_costs_the_shards_from_it_on(image_folder: Folder, prepared: Any) -> None:
    """The shards before a removed file stay."""
    root = image_folder(per_class=8, size=(13, 11))
    cached(root, shard_bytes=FOUR).close()
    before = set((root.parent / "cache").glob("*/part0-*"))
    (root / "dog" / "001.jpg").unlink()
    with cached(root, shard_bytes=FOUR) as dataset:
        assert same(dataset, expected(root))
    assert len(before - set((root.parent / "cache").glob("*/part0-*"))) == 2


def test_many_changes_write_the_cache_again(image_folder: Folder, prepared: Any) -> None:
    """If more than half of the files have changed, no old row stays."""
    root = image_folder(per_class=3, size=(13, 11))
    cached(root).close()
    for index, path in enumerate(sorted(root.rglob("*.jpg"))[:4]):
        save_image(path, 40 + index, (13, 11))
    with cached(root) as dataset:
        assert same(dataset, expected(root))
    home = home_of(root.parent / "cache")
    assert {path.name for path in home.iterdir()} == Cache.read(Place(home)).file_names()


def test_a_changed_image_of_another_shape_is_no_obstacle(
    image_folder: Folder, prepared: Any
) -> None:
    """If a changed file has another shape, all samples are written again with their own shapes."""
    root = image_folder(per_class=4, size=(12, 10))
    cached(root, transform=None).close()
    save_image(root / "cat" / "001.jpg", 9, (6, 5))
    with cached(root, transform=None) as dataset:
        assert [dataset[i][0].size for i in range(3)] == [(12, 10), (6, 5), (12, 10)]


def test_a_new_class_moves_the_targets(image_folder: Folder, prepared: Any) -> None:
    """A new class folder changes the targets, and no image is opened twice."""
    root = image_folder(per_class=3, size=(13, 11))
    cached(root).close()
    image_folder(classes=("ant",), per_class=2, size=(13, 11))
    with cached(root) as dataset:
        assert dataset.targets == TorchvisionFolder(str(root)).targets
        assert same(dataset, expected(root))


def test_left_out_files_stay_left_out(image_folder: Folder, prepared: Any) -> None:
    """The second run lists them without reading; ``on_error="raise"`` reads them, and a mended file comes back."""
    root = image_folder(per_class=4, size=(13, 11))
    broken = root / "cat" / "002.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    with (
        pytest.warns(UserWarning, match="1 of 8 samples cannot be prepared"),
        cached(root, on_error="skip") as dataset,
    ):
        assert len(dataset) == 7
    prepared()
    with cached(root, on_error="skip") as dataset:
        assert [error.path for error in dataset.skipped] == [str(broken)]
        assert len(dataset) == 7
        assert prepared() == []
    with pytest.raises(SampleError, match=r"sample 2, .*002.jpg, cannot be read"):
        cached(root)
    broken.write_bytes(whole)
    with cached(root) as dataset:
        assert same(dataset, expected(root))


def test_changes_of_any_dataset_are_seen(image_folder: Folder, prepared: Any) -> None:
    """A dataset that lists its files needs no ``cache_key``; new targets are merged with the old ones."""
    root = image_folder(per_class=4, size=(13, 11))
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "resize": (7, 9),
        "prepare_workers": 1,
        "shard_bytes": FOUR,
    }
    CachedDataset.build_cache(TorchvisionFolder(str(root)), **options).close()
    before = set((root.parent / "cache").glob("*/part0-*"))
    save_image(root / "cat" / "001.jpg", 9, (6, 5))
    for run in range(2):
        prepared()
        with CachedDataset.build_cache(TorchvisionFolder(str(root)), **options) as dataset:
            assert (prepared() == []) == (run == 1)
            assert same(dataset, expected(root))
    assert len(before - set((root.parent / "cache").glob("*/part0-*"))) == 1


def test_folders_of_one_kind_do_not_share_a_cache(image_folder: Folder, prepared: Any) -> None:
    """Two datasets that differ only in their folder, such as train and val, have separate caches."""
    roots = [image_folder(root="train", size=(13, 11)), image_folder(root="val", size=(14, 11))]
    for run in range(2):
        for root in roots:
            prepared()
            options: dict[str, Any] = {
                "cache_dir": root.parent / "cache",
                "resize": (7, 9),
            }
            with CachedDataset.build_cache(TorchvisionFolder(str(root)), **options) as dataset:
                assert (prepared() == []) == (run == 1)
                assert same(dataset, expected(root))


def test_a_manifest_starts_from_its_cache(image_folder: Folder, prepared: Any) -> None:
    """Files of a CSV are recognised by path, size and time; the labels are the new ones."""
    root = image_folder(classes=("a",), per_class=4, size=(13, 11))
    table = root.parent / "t.csv"
    for label in ("5", "6"):
        table.write_text("file,label\n" + "".join(f"a/{i:03}.jpg,{label}\n" for i in range(4)))
        prepared()
        options: dict[str, Any] = {
            "cache_dir": root.parent / "cache",
            "prepare_workers": 1,
        }
        with ImageManifest(table, root=root, resize=(7, 9), **options) as dataset:
            assert list(dataset.targets) == [int(label)] * 4
            assert (prepared() == []) == (label == "6")


# The key


def test_another_transform_or_codec_has_its_own_cache(image_folder: Folder, prepared: Any) -> None:
    """Caches of two transforms or two codecs are separate, and both stay."""
    root = image_folder(size=(13, 11))
    runs: list[dict[str, Any]] = [
        {},
        {"transform": v1.Resize((9, 7))},
        {"transform": v1.Compose([v1.Resize((7, 9)), v1.Grayscale()])},
        {"codec": "zstd"},
    ]
    for options in runs:
        prepared()
        cached(root, **options).close()
        assert prepared()
    for options in runs:
        cached(root, **options).close()
    assert prepared() == []
    assert len(inspect_caches(root.parent / "cache")) == len(runs)


def test_equal_steps_of_several_libraries_share_a_cache() -> None:
    """Resize and centre crop of torchvision v1, v2 and fastdata share one cache of images, but not of other samples."""
    steps = [
        [v1.Resize(8), v1.CenterCrop(6)],
        [v2.Resize(8), v2.CenterCrop([6, 6])],
        [Resize(8), v1.CenterCrop((6, 6))],
        [v2.Resize(8, antialias=False), v2.CenterCrop([6, 6])],
    ]
    assert len({describe_transforms(each, is_pil=True) for each in steps}) == 1
    assert len({describe_transforms(each) for each in steps}) == len(steps)
    reformed = (
        [v2.ToImage(), v2.Resize(8)],
        [v2.ToImage(), v2.Resize(8, antialias=False)],
        [v2.Resize(8), v2.ToImage()],
    )
    assert len({describe_transforms(each, is_pil=True) for each in reformed}) == len(reformed)
    assert describe_transforms([v1.Resize(8)], is_pil=True) != describe_transforms(
        [v1.Resize((8, 8))], is_pil=True
    )


def test_a_cache_key_tells_data_apart(tmp_path: Path) -> None:
    """Another ``cache_key`` has another cache; the same key with another number of samples is written again."""

    def data(value: int, count: int) -> list[Any]:
        return [(torch.full((2,), value), i) for i in range(count)]

    for key, value, count in [("a", 1, 3), ("b", 2, 3), ("a", 1, 3), ("a", 3, 4)]:
        with CachedDataset(data(value, count), cache_dir=tmp_path, cache_key=key) as dataset:
            assert [int(dataset[i][0][0]) for i in range(len(dataset))] == [value] * count


def test_a_cache_of_a_subclass_needs_a_cache_key(tmp_path: Path) -> None:
    """A subclass's code may make other items: the error says so, and following its advice works."""

    class Own(CachedDataset):
        pass

    with Own([(torch.full((2,), 1), i) for i in range(3)]) as own:
        with pytest.raises(ValueError, match=r"samples of Own .*Give cache_key='a name'"):
            CachedDataset(own, cache_dir=tmp_path)
        with CachedDataset(own, cache_dir=tmp_path, cache_key="own") as dataset:
            assert list(dataset.targets) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"storage": "shared", "cache_dir": "c"},
            "cache_dir= stores samples on disk.*storage='shared'",
        ),
        ({"storage": "disk"}, "needs a folder for the samples: name it as cache_dir="),
    ],
)
def test_contradictions_are_refused(options: Any, words: str) -> None:
    """Options that exclude each other raise an error before anything is done."""
    with pytest.raises(ValueError, match=words):
        CachedDataset([(torch.zeros(2), 0)], **options)


# Bad input


def damage(path: Path, at: int, value: bytes = b"") -> None:
    """Invert one byte, or cut the file there."""
    data = bytearray(path.read_bytes())
    if value == b"cut":
        del data[at:]
    else:
        data[at] ^= 0x10
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_small_file_or_a_cut_shard_is_a_rebuild(
    image_folder: Folder, prepared: Any, codec: str, cut: bool, caplog: Any
) -> None:
    """Whichever file of the cache is damaged, the samples are right and one line gives the reason of the rebuild."""
    root = image_folder(per_class=3, size=(13, 11))
    wanted = expected(root)
    cached(root, codec=codec).close()
    home = home_of(root.parent / "cache")
    for kind in sorted(re.sub(r"-\w+", "-*", path.name) for path in home.iterdir()):
        if kind == "shard-*.npz" or (kind.startswith("part0") and not cut):
            continue
        (path,) = home.glob(kind)
        name = path.name
        if cut:
            damage(path, path.stat().st_size // 2, b"cut")
        else:  # of a column: a zip file has bytes that mean nothing
            damage(path, path.read_bytes().index(b"NUMPY"))
        caplog.clear()
        prepared()
        with cached(root, codec=codec) as dataset:
            assert same(dataset, wanted)
        assert (
            len([line for line in caplog.messages if "the cache is written again: " in line]) == 1
        ), name


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("whole_batches", [True, False])
def test_a_flipped_byte_is_found_on_the_first_read(
    image_folder: Folder, prepared: Any, codec: str, whole_batches: bool, caplog: Any
) -> None:
    """Reading a damaged sample is an error that names it, and the next run writes its shard again."""
    root = image_folder(per_class=9, size=(13, 11))
    wanted = expected(root)
    cached(root, codec=codec, shard_bytes=FOUR).close()
    damaged = sample_file(root.parent / "cache")
    damage(damaged, damaged.stat().st_size - 70)
    with cached(root, codec=codec, shard_bytes=FOUR) as dataset:
        samples = DataLoader(dataset, batch_size=4, num_workers=1) if whole_batches else dataset
        with pytest.raises(
            SampleError,
            match=r"sample \d+, .*jpg, cannot be read: its bytes in .* not",
        ):
            list(samples)
    inode = damaged.stat().st_ino
    with cached(root, codec=codec, shard_bytes=FOUR) as dataset:
        assert re.search(r"preparing \d of 18 samples: .* of damaged shards", caplog.text)
        assert damaged.stat().st_ino != inode
        assert same(dataset, wanted)


def test_a_flipped_byte_is_found_in_a_batch_of_whole_words(tmp_path: Path) -> None:
    """Each sample of a batch is checked, and only the damaged one is refused."""
    data = level_samples(6, (4, 8))
    options: dict[str, Any] = {"cache_dir": tmp_path, "cache_key": "k"}
    CachedDataset(data, **options).close()
    damage(sample_file(tmp_path), 128 + 3 * 32 + 5)
    with CachedDataset(data, **options) as dataset:
        store = dataset.reader().kept.images
        out = np.empty((2, 4, 8), np.uint8)
        store.gather_into(np.array([1, 5]), out)
        assert out[:, 0, 0].tolist() == [1, 5]
        with pytest.raises(SampleError, match="are not those that were written"):
            store.gather_into(np.array([2, 3]), out)


PAGE = 4096
MOVED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "swapped pages": lambda data: data.reshape(-1, PAGE)[[1, 0, *range(2, len(data) // PAGE)]],
    "reversed rows": lambda data: data.reshape(3, 64, 64)[:, ::-1],
    "swapped planes": lambda data: data.reshape(3, 64, 64)[[1, 0, 2]],
    "swapped words": lambda data: data.reshape(-1, 8)[::-1],
    "shifted by a word": lambda data: np.roll(data, 8),
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_in_another_order_are_damage(name: str, tmp_path: Path) -> None:
    """A sample with its bytes in another order is damage: no run returns it, and inspect names it."""
    rng = np.random.default_rng(0)
    data = [(torch.from_numpy(rng.integers(0, 256, (3, 64, 64), np.uint8)), i) for i in range(3)]
    options: dict[str, Any] = {"cache_dir": tmp_path, "cache_key": "k"}
    CachedDataset(data, **options).close()
    path = sample_file(tmp_path)
    written = np.fromfile(path, np.uint8)
    last = written[-data[0][0].numel() :]
    last[...] = MOVED[name](last.copy()).reshape(-1)
    path.write_bytes(written.tobytes())
    with CachedDataset(data, **options) as dataset:
        assert torch.equal(dataset[1][0], data[1][0])
        with pytest.raises(SampleError, match=r"sample 2.* are not those that were written"):
            dataset[2]
    CachedDataset(data, **options).close()  # writes the shard again
    with CachedDataset(data, **options) as dataset:
        assert torch.equal(dataset[2][0], data[2][0])
    path = sample_file(tmp_path)
    path.write_bytes(written.tobytes())
    (found,) = inspect_caches(tmp_path, verify=True)
    assert "sample 2, part0, is damaged" in str(found)


def test_another_format_is_a_rebuild(image_folder: Folder, prepared: Any, caplog: Any) -> None:
    """An index with another format version is rebuilt."""
    root = image_folder(size=(13, 11))
    cached(root).close()
    path = home_of(root.parent / "cache") / INDEX
    cache = Cache.read(Place(path.parent))
    version = cache.manifest.version
    object.__setattr__(cache.manifest, "version", version - 1)
    path.write_bytes(cache.pack())
    with cached(root) as dataset:
        assert same(dataset, expected(root))
    words = f"its format is {version - 1}, but this fastdata reads {version}"
    assert len([line for line in caplog.messages if words in line]) == 1


def test_an_index_cannot_lead_out_of_its_folder(image_folder: Folder) -> None:
    """File names that contain a path are refused even if all checksums match."""
    root = image_folder(size=(13, 11))
    cached(root).close()
    home = home_of(root.parent / "cache")
    index = Cache.read(Place(home))
    index.columns["shards.names"] = np.array(["../../secret1234"], "S16")
    (home / INDEX).write_bytes(index.pack())
    with pytest.raises(CacheError, match="are not names of shards"):
        Cache.read(Place(home))


def test_a_full_disk_is_an_error_before_any_image_is_prepared(
    image_folder: Folder, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the needed and the free space and a cure, and no file is left."""
    root = image_folder(per_class=6, size=(13, 11))

    reserve = os.posix_fallocate

    def full(fd: int, *rest: int) -> None:
        if "/cache/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, *rest)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        CacheError,
        match=r"too full for the cache: it ran out of room \(No space .* are free. Free some space, or",
    ):
        cached(root)
    assert files_of(root.parent / "cache") == set()
    assert len(prepared()) < 2 * 12  # to choose a codec, some twice


def test_a_disk_that_cannot_hold_the_cache_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the needed and the free space."""
    monkeypatch.setattr(disk_file_module, "free_bytes", lambda folder: 1 << 20)
    data = [(np.random.default_rng(0).integers(0, 256, (1000, 1000), np.uint8), 0)] * 12
    with pytest.raises(
        CacheError, match=r"too full for the cache: it needs 1\.\d MiB more, 1\.0 MiB are free"
    ):
        CachedDataset(data, cache_dir=tmp_path, cache_key="k", codec="zstd")


def test_a_disk_with_little_room_takes_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If samples are larger than the probed ones, only the needed space is reserved."""
    monkeypatch.setattr(disk_file_module, "free_bytes", lambda folder: 1 << 20)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    looked_at = {round(k * 99 / 24) for k in range(25)}
    data = [(noise * (k not in looked_at), k) for k in range(100)]
    options: Any = {"cache_dir": tmp_path, "cache_key": "k", "codec": "zstd"}
    with CachedDataset(data, **options) as dataset:
        assert np.array_equal(dataset[1][0], noise)


def refuse_to_write(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Make every write to a file on disk fail."""
    plain = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if "memfd" in os.readlink(f"/proc/self/fd/{fd}"):
            return plain(fd, data, offset)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_disk_that_fills_up_is_an_error(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    """If the disk fills up, no sample is left out and no file stays."""
    root = image_folder(per_class=6, size=(13, 11))
    refuse_to_write(monkeypatch, errno.ENOSPC)
    with pytest.raises(CacheError, match="too full for the cache"):
        cached(root, on_error=on_error, codec="zstd")
    assert files_of(root.parent / "cache") == set()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_cache_that_cannot_be_written_is_no_fault_of_a_sample(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch, on_error: Any, code: int
) -> None:
    """If writing fails, no sample is left out."""
    refuse_to_write(monkeypatch, code)
    with pytest.raises(CacheError, match=rf"cannot be written \({os.strerror(code)}\)"):
        cached(image_folder(per_class=6, size=(13, 11)), on_error=on_error, codec="zstd")


def test_a_cache_that_cannot_be_mapped_says_so(tmp_path: Path) -> None:
    """A limit of address space (``ulimit -v``) is a memory error with the need and a cure."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 26))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with contextlib.closing(DiskFile.open(path, 1 << 26)) as file:
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + (1 << 25), limits[1]))
        try:
            with pytest.raises(
                MemoryBudgetError,
                match=r"64\.0 MiB of .*file cannot be mapped \(Cannot.*\(ulimit -v\)",
            ):
                file.array("uint8", (1 << 26,))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_disk_without_room_for_raw_samples_gets_encoded_ones(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``codec="auto"`` chooses a lossless codec if raw samples do not fit."""
    root = image_folder(per_class=20, size=(130, 110))
    raw_bytes = 40 * 3 * 60 * 60
    room = int(raw_bytes * 0.9) + (256 << 20)
    monkeypatch.setattr("fastdata.stores.build.free_bytes", lambda folder: room)
    with cached(root, transform=v1.Resize((60, 60))) as dataset:
        assert dataset.storage_plan.codec in ("zstd", "lz4", "source")


def forbid_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system refuse new files, as a read-only file system does."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("fastdata.stores.build.FileLock.acquire", refuse)


def test_a_read_only_cache_is_served(
    image_folder: Folder, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An up-to-date read-only cache is read without writing even a lock; an outdated one is an error."""
    root = image_folder(size=(13, 11))
    wanted = expected(root)
    cached(root).close()
    save = (root / "cat" / "000.jpg").read_bytes()
    forbid_writing(monkeypatch)
    with cached(root) as dataset:
        assert same(dataset, wanted)
    (root / "cat" / "000.jpg").write_bytes(save)
    with pytest.raises(
        CacheError,
        match=r"cannot be written \(Read-only file system\), and it holds no cache of these",
    ):
        cached(root)


def test_a_cache_deleted_while_in_use_can_still_be_read(
    image_folder: Folder, prepared: Any
) -> None:
    """The process that opened the files, and processes that it sends them to, can read them until it closes them."""
    root = image_folder(size=(13, 11))
    wanted = expected(root)
    with cached(root) as dataset:
        sent = pickle.dumps(dataset)
        shutil.rmtree(root.parent / "cache")
        assert same(dataset, wanted)
        with opened_elsewhere(sent) as copy:
            assert same(copy, wanted)
        with cached(root) as again:  # builds it, under the same names
            assert same(again, wanted)
        with opened_elsewhere(sent) as copy:
            assert same(copy, wanted)
    with pytest.raises(StoreGoneError, match="deleted or changed while it was in use"):
        pickle.loads(sent)


def test_an_update_leaves_the_old_files_to_their_readers(image_folder: Folder) -> None:
    """Workers that start after another process has updated the cache read the old samples."""
    root = image_folder(size=(13, 11))
    wanted = expected(root)
    with cached(root) as dataset:
        Image.new("RGB", (13, 11), (1, 2, 3)).save(root / "cat" / "000.jpg")
        with cached(root) as updated:
            assert not same(updated, wanted)
        for _ in range(2):  # as at the beginning of each epoch
            with opened_elsewhere(pickle.dumps(dataset)) as copy:
                assert same(copy, wanted)
                with pickle.loads(pickle.dumps(copy)) as copy_of_copy:
                    assert same(copy_of_copy, wanted)


@contextlib.contextmanager
def opened_elsewhere(sent: bytes) -> Iterator[Any]:
    """Return the dataset of a pickle; None if the system cannot open a file without a name."""
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("no /proc")
    with pickle.loads(sent) as copy:
        yield copy


def test_a_cache_that_is_cut_while_in_use_is_not_opened(image_folder: Folder) -> None:
    """A process that opens a cut file gets an error before it reads beyond the end."""
    root = image_folder(size=(13, 11))
    with cached(root) as dataset:
        sent = pickle.dumps(dataset)
        os.truncate(sample_file(root.parent / "cache"), 200)
        with pytest.raises(StoreGoneError, match="deleted or changed while it was in use"):
            pickle.loads(sent)


def test_it_opens_in_another_process(tmp_path: Path) -> None:
    """A process that was not forked from this one maps the same files."""
    data = level_samples(4, (2, 3))
    with CachedDataset(data, cache_dir=tmp_path, cache_key="k") as dataset:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        child = context.Process(target=send_sample, args=(dataset, 2, theirs))
        child.start()
        theirs.close()
        assert ours.recv() == (data[2][0].tolist(), 2)
        child.join()
        child.close()
        ours.close()


# Several processes, and dead ones


class Noting:
    """Function that opens images and records each in a file."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __repr__(self) -> str:
        return "Noting()"

    def __call__(self, path: str) -> Image.Image:
        with self.log.open("a") as stream:
            stream.write("x")
        return load_image(path)


def build(root: Path, codec: str, begin: Any = None) -> None:
    """Build a cache, in a child process."""
    if begin is not None:
        begin.wait()
    options: dict[str, Any] = {"loader": Noting(root.parent / "log"), "prepare_workers": 2}
    if codec == "source":
        del options["loader"]
    with cached(root, codec=codec, **options) as dataset:
        assert same(dataset, expected(root))


@contextlib.contextmanager
def child(*arguments: Any) -> Iterator[Any]:
    """Yield a forked process that builds, and kill it at the end if it still runs."""
    process = multiprocessing.get_context("fork").Process(target=build, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def test_two_processes_that_start_together_build_once(image_folder: Folder) -> None:
    """Each sample is opened by only one of the processes, except for the few probed ones."""
    root = image_folder(per_class=40, size=(13, 11))
    begin = multiprocessing.get_context("fork").Event()
    with child(root, "auto", begin) as one, child(root, "auto", begin) as two:
        begin.set()
        for process in (one, two):
            process.join(timeout=60)
            assert process.exitcode == 0
    assert len((root.parent / "log").read_text()) <= 80 + 9


@pytest.mark.parametrize("codec", CODECS)
def test_a_killed_build_leaves_nothing_wrong(
    image_folder: Folder, prepared: Any, codec: str
) -> None:
    """If builds are killed at any moment, the next run has the right samples, and a build leaves no other file.

    Every other time a cache with some changed files exists already, so that an update is killed.
    """
    root = image_folder(per_class=30, size=(13, 11))
    draw = random.Random(7)
    for attempt in range(8):
        if attempt == 4:
            shutil.rmtree(root.parent / "cache")
        with child(root, codec) as process:
            process.join(timeout=draw.uniform(0.0, 0.25))
        if attempt % 2:
            build(root, codec)
            home = home_of(root.parent / "cache")
            assert files_of(root.parent / "cache") == set()
            assert {path.name for path in home.iterdir()} >= Cache.read(Place(home)).file_names()
            for index in range(attempt):
                save_image(root / "cat" / f"00{index}.jpg", 100 + attempt, (13, 11))
    build(root, codec)
    assert {path.name for path in home.iterdir()} == Cache.read(Place(home)).file_names()


def test_the_lock_of_a_dead_process_is_free(image_folder: Folder) -> None:
    """If a process is killed while it holds the lock, no other process waits for it."""
    root = image_folder(per_class=2, size=(13, 11))
    cached(root).close()
    home = home_of(root.parent / "cache")
    shutil.rmtree(home)

    def hold(ready: Any) -> None:
        with locked(home, ""):
            ready.set()
            signal.pause()

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold, args=(ready,))
    holder.start()
    ready.wait(timeout=30)
    with pytest.raises(TimeoutError), lock_of(home).acquire(timeout=0):
        pass
    holder.kill()
    holder.join()
    holder.close()
    cached(root).close()


class OneBuffer:
    """Returns every sample in the same memory, and leaves some out."""

    def __init__(self, count: int, damaged: tuple[int, ...]) -> None:
        self._buffer, self._damaged = np.empty((2, 3), np.uint8), damaged
        self.targets = list(range(count))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self._damaged:
            raise ValueError("damaged")
        self._buffer[:] = index
        return self._buffer, index


@pytest.mark.filterwarnings("ignore:2 of 40 samples cannot be prepared")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_neighbours_that_are_written_at_once_stay_apart(tmp_path: Path, num_workers: int) -> None:
    """Across shards and gaps, each row has its own pixels."""
    data = OneBuffer(40, (7, 21))
    options: dict[str, Any] = {"on_error": "skip", "prepare_workers": num_workers}
    with CachedDataset(data, cache_dir=tmp_path, cache_key="k", **options) as dataset:
        kept = [index for index in range(40) if index not in (7, 21)]
        assert list(dataset.targets) == kept
        assert [sample.tolist() for sample, _ in dataset] == [[[i] * 3] * 2 for i in kept]


# Pruning


def test_prune_removes_what_no_run_can_use(image_folder: Folder) -> None:
    """It removes files of dead writers, unreadable caches, and on request caches of missing folders; nothing else."""
    root, gone = image_folder(size=(13, 11)), image_folder(root="gone", size=(13, 11))
    cache_dir = root.parent / "cache"
    for folder, resize in ((root, 5), (root, 6), (gone, 5)):
        cached(folder, transform=v1.Resize((resize, 9))).close()
    homes = [Path(found.folder) for found in inspect_caches(cache_dir)]
    sound, unreadable = (home for home in homes if home.name.startswith("images"))
    (unreadable / INDEX).write_text("{")
    (cache_dir / "killed").mkdir()
    (cache_dir / ".killed.lock").touch()
    (cache_dir / "not ours").mkdir()
    shutil.rmtree(gone)
    assert len(prune_caches(cache_dir, dry_run=True)) == 2
    assert len(prune_caches(cache_dir, gone=True, dry_run=True)) == 3
    assert (cache_dir / "killed").exists()
    assert len(prune_caches(cache_dir)) == 2
    assert len(inspect_caches(cache_dir)) == 2
    assert len(prune_caches(cache_dir, gone=True)) == 1
    assert [found.folder for found in inspect_caches(cache_dir)] == [str(sound)]
    assert prune_caches(cache_dir) == []
    assert (cache_dir / "not ours").exists()
