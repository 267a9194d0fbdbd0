"""Caches opened on their own, without the dataset that they were made from."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import shutil
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder as TorchvisionFolder

from children import send_sample
from data import level_samples, save_image
from fastdata import CachedDataset, CudaPrefetcher, DataLoader, ImageFolder, ImageManifest
from fastdata.errors import CacheError, SampleError, StoreGoneError
from fastdata.sources.remote import Place
from fastdata.stores.cache import INDEX, Cache
from fastdata.stores.find import find_cache
from fastdata.tools.__main__ import main
from simcuda import Sim

Folder = Callable[..., Path]
RESIZE = v1.Resize((7, 9))


def build(root: Path, transform: Any = RESIZE, **options: Any) -> Path:
    """Write the cache of a folder, and return its ``cache_dir``."""
    cache_dir = root.parent / "cache"
    options = {"cache_dir": cache_dir, "prepare_workers": 1} | options
    ImageFolder(str(root), transform, **options).close()
    return cache_dir


def build_of(data: Any, cache_dir: Path, **options: Any) -> Path:
    """Write the cache of any dataset, and return its ``cache_dir``."""
    options = {
        "cache_dir": cache_dir,
        "cache_key": "k",
        "prepare_workers": 1,
    } | options
    CachedDataset(data, **options).close()
    return cache_dir


def build_csv(folder: Path, rows: list[tuple[str, str]], **options: Any) -> Path:
    """Write the cache of a CSV file of paths and labels, and return its ``cache_dir``."""
    csv = folder / "train.csv"
    csv.write_text("file,label\n" + "".join(f"{file},{label}\n" for file, label in rows))
    options = {
        "transform": RESIZE,
        "cache_dir": folder / "cache",
        "prepare_workers": 1,
    } | options
    ImageManifest(csv, **options).close()
    return folder / "cache"


def images_of(root: Path) -> list[np.ndarray]:
    """Return every image of a folder as it is prepared."""
    return [np.asarray(RESIZE(image)) for image, _ in TorchvisionFolder(str(root))]


def columns_of(home: Path) -> Any:
    return Cache.read(Place(home)).columns


def rewrite(home: Path, columns: dict[str, Any] | None = None, **changed: Any) -> None:
    """Change columns of a cache, or fields of its manifest, and update its checksums."""
    index = Cache.read(Place(home))
    for name, value in changed.items():
        object.__setattr__(index.manifest, name, value)
    for name, column in (columns or {}).items():
        index.columns[name] = column
        if column is None:
            del index.columns[name]
    (home / INDEX).write_bytes(index.pack())


# What is served


@pytest.mark.parametrize("codec", ["auto", "lz4", "zstd"])
def test_a_copied_cache_serves_what_its_folder_held(
    image_folder: Folder, tmp_path: Path, codec: str
) -> None:
    """Images, labels, class names and paths are those of the folder, although folder and first cache are deleted."""
    root = image_folder(classes=("cat", "dog", "eel"), per_class=3, size=(13, 11))
    wanted, theirs = images_of(root), TorchvisionFolder(str(root))
    copy = Path(shutil.move(build(root, codec=codec), tmp_path / "elsewhere"))
    shutil.rmtree(root)
    with CachedDataset.from_cache(copy) as dataset:
        assert isinstance(dataset, CachedDataset)
        assert all(
            np.array_equal(image, pixels)
            for (image, _), pixels in zip(dataset, wanted, strict=True)
        )
        assert all(isinstance(image, Image.Image) for image, _ in dataset)
        assert dataset.targets == theirs.targets
        assert dataset.samples == dataset.imgs == theirs.samples
        assert (dataset.classes, dataset.class_to_idx) == (theirs.classes, theirs.class_to_idx)
        assert (dataset.root, dataset.storage, dataset.skipped) == (str(root), "disk", [])
        assert str(copy) in repr(dataset)


def test_a_dropped_dataset_frees_its_memory_at_once(tmp_path: Path) -> None:
    """A dataset that writes a cache, and one that opens it, free memory without the garbage collector."""
    data = level_samples(4, (2, 3))
    gc.disable()
    try:
        written = weakref.ref(CachedDataset(data, cache_dir=tmp_path, cache_key="k"))
        opened = weakref.ref(CachedDataset.from_cache(tmp_path))
        assert written() is opened() is None
    finally:
        gc.enable()


def test_a_lossy_cache_is_served_as_it_is(image_folder: Folder) -> None:
    """A cache that ``fastdata build`` wrote with codec jpeg gives the same pixels as the dataset over the folder."""
    root = image_folder(size=(40, 33))
    cache = root.parent / "cache"
    assert (
        main(
            [
                "build",
                str(root),
                str(cache),
                "--resize",
                "24",
                "--codec",
                "jpeg",
                "--prepare-workers",
                "1",
            ]
        )
        == 0
    )
    with (
        ImageFolder(str(root), resize=24, codec="jpeg", cache_dir=cache) as ours,
        CachedDataset.from_cache(cache) as dataset,
    ):
        assert all(a.tobytes() == b.tobytes() for (a, _), (b, _) in zip(ours, dataset, strict=True))


def test_every_step_runs_when_a_sample_is_read(image_folder: Folder) -> None:
    """Deterministic leading steps run on the stored image, because it was not prepared by them."""
    root = image_folder(size=(13, 11))
    small = v1.Compose([v1.Resize((4, 5)), v1.PILToTensor()])
    wanted = [small(Image.fromarray(pixels)) for pixels in images_of(root)]
    with CachedDataset.from_cache(build(root), transform=small) as dataset:
        assert dataset.plan.prepare == ()
        assert all(
            torch.equal(image, pixels) for (image, _), pixels in zip(dataset, wanted, strict=True)
        )
        dataset.transform = v1.Compose([v1.CenterCrop((3, 5)), v1.ToTensor()])
        assert dataset.plan.is_batched
        images, _ = dataset.__getitems__([0, 3]).stacked
        assert images.shape == (2, 3, 3, 5)
        assert torch.equal(images[1], dataset.transform(Image.fromarray(images_of(root)[3])))


def test_whole_batches_have_the_draws_of_the_whole_dataset(image_folder: Folder) -> None:
    """Equal seed and epoch give the same crops and flips as over the folder, in threads and processes."""
    root = image_folder(per_class=5, size=(13, 11))
    steps = v1.Compose([v1.RandomCrop((5, 6)), v1.RandomHorizontalFlip(), v1.ToTensor()])
    cache = build(root)
    with (
        ImageFolder(str(root), steps, resize=(7, 9), cache_dir=cache, seed=7) as ours,
        CachedDataset.from_cache(cache, transform=steps, seed=7) as dataset,
    ):
        for workers in ("thread", "process"):
            for served in (ours, dataset):
                served.set_epoch(2)
            pairs = [
                DataLoader(d, batch_size=4, num_workers=1, workers=workers) for d in (ours, dataset)
            ]
            for (a, b), (c, d) in zip(*pairs, strict=True):
                assert torch.equal(a, c)
                assert torch.equal(b, d)


def test_left_out_samples_stay_out(image_folder: Folder) -> None:
    """Only the kept samples are counted, with their labels and paths; the others are in ``skipped``."""
    root = image_folder(per_class=3, size=(13, 11))
    (root / "cat" / "001.jpg").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="1 of 6"):
        cache = build(root, on_error="skip")
    with CachedDataset.from_cache(cache) as dataset:
        assert len(dataset) == 5
        assert list(dataset.targets) == [0, 0, 1, 1, 1]
        assert [os.path.basename(path) for path, _ in dataset.samples] == [
            f"00{i}.jpg" for i in (0, 2, 0, 1, 2)
        ]
        assert [error.path for error in dataset.skipped] == [str(root / "cat" / "001.jpg")]


@pytest.mark.parametrize(
    "targets",
    [
        [3, 1, 2],
        [0.5, 1.0, 2.0],
        ["a", "b", "ü"],
        [{"boxes": [1, 2]}, {"boxes": []}, {"boxes": [3]}],
        [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])],
        [np.array([1.0]), np.array([2.0]), np.array([3.0])],
    ],
    ids=["whole", "real", "text", "dict", "tensor", "array"],
)
def test_targets_come_back_as_they_were(tmp_path: Path, targets: list[Any]) -> None:
    """Targets keep type and value; without a list of files there are no classes."""
    data = [
        (torch.full((1, 2, 3), i, dtype=torch.uint8), target) for i, target in enumerate(targets)
    ]
    with CachedDataset.from_cache(
        build_of(data, tmp_path), target_transform=lambda target: (target,)
    ) as dataset:
        for (sample, (target,)), (wanted, value) in zip(dataset, data, strict=True):
            assert torch.equal(sample, wanted)
            assert type(target) is type(value)
            assert np.array_equal(target, value) if hasattr(value, "shape") else target == value
        assert not any(
            hasattr(dataset, name) for name in ("samples", "imgs", "classes", "class_to_idx")
        )


def test_masks_are_parts_of_the_cache(tmp_path: Path) -> None:
    """An image and its mask come back together, and ``transforms`` is called with both."""
    data = [(Image.new("RGB", (6, 5), (i, 0, 0)), Image.new("L", (6, 5), i)) for i in range(3)]
    cache = build_of(data, tmp_path)
    with CachedDataset.from_cache(cache, transforms=lambda image, mask: (mask, image)) as dataset:
        assert [(m.getpixel((0, 0)), im.getpixel((0, 0))) for m, im in dataset] == [
            (i, (i, 0, 0)) for i in range(3)
        ]
    with CachedDataset.from_cache(cache, as_tensors=True) as dataset:
        images, masks = next(iter(DataLoader(dataset, batch_size=3)))
        assert (images.shape, masks.shape) == ((3, 3, 5, 6), (3, 1, 5, 6))
    with pytest.raises(ValueError, match="transforms= is called with sample and target together"):
        CachedDataset.from_cache(cache, transform=v1.ToTensor(), transforms=lambda *both: both)


def test_images_come_as_tensors_on_request(image_folder: Folder) -> None:
    """as_tensors= gives whole batches with the pixels of PILToTensor, without any transform."""
    root = image_folder(size=(13, 11))
    wanted = torch.stack([v1.PILToTensor()(Image.fromarray(pixels)) for pixels in images_of(root)])
    with CachedDataset.from_cache(build(root), as_tensors=True) as dataset:
        assert dataset.reader().obstacle is None
        images, labels = next(iter(DataLoader(dataset, batch_size=6)))
        assert torch.equal(images, wanted)
        assert torch.equal(dataset[5][0], wanted[5])
        assert labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_paths_outside_the_root_stay_as_they_are(image_folder: Folder, tmp_path: Path) -> None:
    """A CSV file may name files elsewhere; only paths below its folder are joined to it."""
    root = image_folder(classes=("cat",), per_class=2, size=(13, 11))
    here = tmp_path / "here"
    here.mkdir()
    save_image(here / "own.jpg", 9, (13, 11))
    rows = [("own.jpg", "5"), (str(root / "cat" / "000.jpg"), "7")]
    with CachedDataset.from_cache(build_csv(here, rows)) as dataset:
        assert dataset.samples == [(str(here / "own.jpg"), 5), (str(root / "cat" / "000.jpg"), 7)]
        assert dataset.classes == []


# Labels through updates


def test_labels_follow_files_that_come_and_go(image_folder: Folder) -> None:
    """New classes shift the numbers of others; changed, new and removed files have the right labels in the cache."""
    root = image_folder(per_class=4, size=(13, 11))
    cache = build(root)
    (root / "bat").mkdir()
    save_image(root / "bat" / "0.jpg", 50, (13, 11))
    save_image(root / "dog" / "001.jpg", 51, (13, 11))
    os.utime(root / "dog" / "001.jpg", ns=(1, 1))
    (root / "cat" / "002.jpg").unlink()
    build(root)
    theirs = TorchvisionFolder(str(root))
    with CachedDataset.from_cache(cache) as dataset:
        assert dataset.classes == ["bat", "cat", "dog"]
        assert dataset.samples == theirs.samples
        assert all(
            np.array_equal(image, pixels)
            for (image, _), pixels in zip(dataset, images_of(root), strict=True)
        )


def test_other_labels_of_the_same_files_are_the_datasets(
    image_folder: Folder, monkeypatch: Any
) -> None:
    """A corrected label in the CSV file counts at once; the cache alone has the labels of its last build."""
    root = image_folder(classes=("all",), per_class=3, size=(13, 11))
    files = [f"all/00{i}.jpg" for i in range(3)]
    cache = build_csv(root, [(file, "cat") for file in files])
    with monkeypatch.context() as patch:
        patch.setattr("fastdata.stores.shards.ingest", None)
        (root / "train.csv").write_text(
            "file,label\n" + "".join(f"{file},{k}\n" for k, file in enumerate(files))
        )
        with ImageManifest(root / "train.csv", transform=RESIZE, cache_dir=cache) as csv:
            assert list(csv.targets) == [0, 1, 2]
        with CachedDataset.from_cache(cache) as dataset:
            assert dataset.classes == ["cat"]
    save_image(root / "all" / "002.jpg", 9, (13, 12))
    build_csv(root, [(file, "dog") for file in files])
    with CachedDataset.from_cache(cache) as dataset:
        assert dataset.classes == ["dog"]


def test_a_damaged_index_is_an_error_that_the_next_run_mends(image_folder: Folder) -> None:
    """Opening the cache alone names the damaged file; the next run of the dataset writes it again."""
    root = image_folder(size=(13, 11))
    cache = build(root)
    (file,) = cache.glob(f"*/{INDEX}")
    data = file.read_bytes()
    file.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    with pytest.raises(CacheError, match=r"fastdata\.npz cannot be read: BadZipFile: Bad CRC-32"):
        CachedDataset.from_cache(cache)
    assert main(["inspect", str(cache)]) == 1
    build(root)
    with CachedDataset.from_cache(cache) as dataset:
        assert list(dataset.targets) == [0, 0, 0, 1, 1, 1]


# What cannot be opened


def test_one_cache_must_be_meant(image_folder: Folder, tmp_path: Path) -> None:
    """No cache is a FileNotFoundError; several caches are listed in the error."""
    with pytest.raises(FileNotFoundError, match="is not a cache and does not hold one"):
        CachedDataset.from_cache(tmp_path / "missing")
    root = image_folder(size=(13, 11))
    cache = build(root)
    home = Path(find_cache(cache))
    assert str(find_cache(str(cache))) == str(find_cache(home)) == str(home)
    build(root, transform=v1.Resize((4, 5)), codec="zstd")
    other = next(path.parent for path in cache.glob(f"*/{INDEX}") if path.parent != home)
    with pytest.raises(
        ValueError, match=r"holds 2 caches\. Give the folder of one of them"
    ) as several:
        CachedDataset.from_cache(cache)
    assert str(home) in str(several.value)
    assert str(other) in str(several.value)
    (home / INDEX).write_text("{}")
    with pytest.raises(CacheError, match="cannot be read: ValueError"):
        CachedDataset.from_cache(home)


def test_files_as_they_are_need_their_dataset(image_folder: Folder) -> None:
    """With codec source the cache needs its dataset, because only that can prepare the files."""
    cache = build(image_folder(size=(13, 11)), codec="source")
    with pytest.raises(
        CacheError, match=r"Unchanged image files.* Make that dataset again with cache_dir="
    ) as caught:
        CachedDataset.from_cache(cache)
    assert repr(str(cache)) in str(caught.value)


class Plain:
    """A user's own codec."""

    name = "plain"

    def encode(self, array: np.ndarray) -> bytes:
        return array.tobytes()

    def decode(self, data: memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)


def test_a_users_own_codec_needs_its_dataset(tmp_path: Path) -> None:
    """A cache stores only the name of a user's codec, so it cannot be opened alone."""
    cache = build_of([(torch.zeros(1, 2, 2), 0)], tmp_path, codec=Plain())
    with pytest.raises(
        CacheError,
        match=r"codec 'plain', format None.* with cache_dir=.* and the same codec=",
    ):
        CachedDataset.from_cache(cache)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"targets.0": np.zeros(5, np.int64)}, r"int64\[5\], but numbers\[6\] are needed"),
        ({"targets.0": np.zeros(6, "U1")}, "<U1"),
        ({"targets.0": np.zeros(6, ">i8")}, r">i8\[6\], but"),
        ({"targets.0": np.zeros((5, 2))}, r"float64\[5, 2\], but numbers\[6\]"),
        ({"targets.json": {"pickle": "targets.0"}}, "cannot be read: KeyError: 'pickle'"),
        ({"targets.json": {"number": "targets.1"}}, "cannot be read: KeyError: 'targets.1'"),
        ({"targets.json": {"number": ["targets.0"]}}, "cannot be read: TypeError"),
        ({"targets.json": {"number": "targets.json"}}, "cannot be read: AttributeError"),
        ({"targets.json": []}, "its targets are empty tuples"),
        ({"targets.json": "number"}, "cannot be read: AttributeError"),
        ({"targets.json": [{"json": [0]}]}, "are not a list of 6"),
        ({"targets.json": {"json": [0, 1]}}, "are not a list of 6"),
        ({"targets.json": None}, "cannot be read: KeyError: 'targets.json'"),
        ({"targets.json": np.frombuffer(b"[0, 1", np.uint8)}, "cannot be read"),
        ({"targets.json": np.frombuffer(b"[" * 100_000, np.uint8)}, "cannot be read"),
        ({"part0.sums": None}, "cannot be read: KeyError: 'part0.sums'"),
        ({"part0.sums": np.zeros(5, np.uint32)}, r"uint32\[5\], but uint32\[6\] are needed"),
        ({"ends": np.arange(6)}, r"paths are uint8\[\d+\], but uint8\[5\] are needed"),
        ({"ends": np.array([11, 9, 33, 44, 55, 66])}, "file names overlap"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    image_folder: Folder, columns: dict[str, Any], words: str
) -> None:
    """Number, type and shape of columns are checked before a sample is read, even if checksums match."""
    home = Path(find_cache(build(image_folder(size=(13, 11)))))
    rewrite(home, columns)
    with pytest.raises(CacheError, match=words):
        CachedDataset.from_cache(home)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("offsets", -1, "has an impossible offset, size or shape"),
        ("sizes", 1 << 40, "has an impossible offset, size or shape"),
        ("shapes", 8, "has an impossible offset, size or shape"),
    ],
)
def test_samples_beyond_their_file_are_refused(
    image_folder: Folder, column: str, value: int, words: str
) -> None:
    """Offset and size of an encoded sample are checked against the file before it is mapped."""
    home = Path(find_cache(build(image_folder(size=(13, 11)), codec="zstd")))
    wrong = columns_of(home)[f"part0.{column}"].copy()
    wrong[3] = value
    rewrite(home, {f"part0.{column}": wrong})
    with pytest.raises(CacheError, match=words):
        CachedDataset.from_cache(home)


_LARGEST = (1 << 63) - 1


@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_no_sample_reaches_past_the_end_of_its_file(image_folder: Folder, codec: str) -> None:
    """One byte too many is refused, and so is an offset plus size that overflows."""
    home = Path(find_cache(build(image_folder(size=(13, 11)), codec=codec)))
    columns = columns_of(home)
    offsets = columns["part0.offsets"]
    room = int(columns["shards.bytes"][0, 0])
    last = int(offsets.argmax())
    sizes = columns["part0.sizes"]
    assert offsets[last] + sizes[last] == room  # which is served
    right = (home / INDEX).read_bytes()
    wrong = [(int(offsets[last]) + 1, None), (room, None), (_LARGEST, None), (1 << 62, None)]
    if codec == "zstd":
        wrong += [(None, int(sizes[last]) + 1), (None, _LARGEST)]
        wrong += [(1 << 62, 1 << 62), (_LARGEST, _LARGEST), (8, _LARGEST)]
    for offset, size in wrong:
        changed = {}
        for name, value in (("part0.offsets", offset), ("part0.sizes", size)):
            if value is not None:
                changed[name] = columns[name].copy()
                changed[name][last] = value
        rewrite(home, changed)
        with pytest.raises(CacheError, match=rf"sample {last} of part0 has an impossible offset"):
            CachedDataset.from_cache(home)
        (home / INDEX).write_bytes(right)
    CachedDataset.from_cache(home).close()


@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_shapes_that_no_sample_has_are_refused(tmp_path: Path, codec: str) -> None:
    """Negative sides are refused, for raw and encoded samples."""
    samples = [(np.zeros((2, 3 + index), np.uint8), 0) for index in range(4)]
    home = Path(find_cache(build_of(samples, tmp_path, codec=codec)))
    shapes = columns_of(home)["part0.shapes"].copy()
    rewrite(home, {"part0.shapes": shapes * -1})
    with pytest.raises(
        CacheError, match="sample 0 of part0 has an impossible offset, size or shape"
    ):
        CachedDataset.from_cache(home)


def test_a_compressed_index_is_refused(image_folder: Folder, monkeypatch: Any) -> None:
    """Columns must not take more memory than the file has bytes."""
    home = Path(find_cache(build(image_folder(size=(13, 11)))))
    monkeypatch.setattr(np, "savez", np.savez_compressed)
    rewrite(home)
    with pytest.raises(CacheError, match="its columns are compressed"):
        CachedDataset.from_cache(home)


def test_an_index_of_overlapping_columns_is_refused(image_folder: Folder) -> None:
    """Columns that share bytes, of which a small file may have thousands, are not read."""
    home = Path(find_cache(build(image_folder(size=(13, 11)))))
    with zipfile.ZipFile(home / INDEX, "a") as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        for number in range(1000):
            again = copy.copy(largest)
            again.filename = f"more.{number}.npy"
            archive.filelist.append(again)
        archive.writestr("last.npy", b"")
    with pytest.raises(CacheError, match="its columns overlap"):
        CachedDataset.from_cache(home)


def test_an_index_larger_than_memory_is_refused(image_folder: Folder, monkeypatch: Any) -> None:
    """A column that states a huge size is a CacheError, never a MemoryError."""
    home = Path(find_cache(build(image_folder(size=(13, 11)))))
    plain = np.savez

    def save(stream: Any, **columns: Any) -> None:
        plain(stream, **columns)
        with zipfile.ZipFile(stream, "a") as archive, archive.open("more.npy", "w") as entry:
            np.lib.format.write_array_header_1_0(
                entry, {"descr": "<i8", "fortran_order": False, "shape": (1 << 43,)}
            )

    monkeypatch.setattr(np, "savez", save)
    rewrite(home)
    with pytest.raises(CacheError, match="cannot be read"):
        CachedDataset.from_cache(home)


def test_a_sample_larger_than_memory_is_refused(tmp_path: Path) -> None:
    """An encoded sample of 8 TiB is damage, which is found when the cache is opened."""
    samples = [(np.zeros((2, 3 + index), np.uint8), 0) for index in range(4)]
    home = Path(find_cache(build_of(samples, tmp_path, codec="zstd")))
    shapes = columns_of(home)["part0.shapes"].copy()
    shapes[1] = 1, 1 << 21, 1 << 22
    rewrite(home, {"part0.shapes": shapes})
    with pytest.raises(
        CacheError, match="sample 1 of part0 has an impossible offset, size or shape"
    ):
        CachedDataset.from_cache(home)


def test_classes_without_numbers_are_refused(image_folder: Folder) -> None:
    """Values of a manifest are checked even if its checksum matches."""
    home = Path(find_cache(build(image_folder(size=(13, 11)))))
    rewrite(home, classes={"cat": "x"})
    with pytest.raises(CacheError, match="'x' is not of type int"):
        CachedDataset.from_cache(home)


@pytest.mark.parametrize(
    "skipped",
    [[["x", "y", True]], [[1, "m", True]], [["x", None, True]], [["x", "m"]], 5, {}, ["m"]],
)
def test_skipped_samples_are_checked_too(image_folder: Folder, skipped: Any) -> None:
    """A malformed entry of a skipped sample is an error when the cache is opened, not a crash later."""
    home = Path(find_cache(build(image_folder(size=(13, 11)))))
    kept = np.array([False, *[True] * 5])
    rewrite(
        home, {"skipped.json": skipped, **({} if skipped == [["x", "y", True]] else {"kept": kept})}
    )
    with pytest.raises(CacheError, match="cannot be read"):
        CachedDataset.from_cache(home)


def test_a_damaged_sample_is_an_error_that_names_it(image_folder: Folder) -> None:
    """The other samples can be read, now and later; the next run of the dataset writes the damaged one again."""
    root = image_folder(size=(13, 11))
    cache = build(root)
    (shard,) = cache.glob("*/part0-*.npy")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for _ in range(2):
        with CachedDataset.from_cache(cache, as_tensors=True) as dataset:
            assert len(dataset) == 6
            with pytest.raises(
                SampleError, match="the next run over its source prepares it again"
            ) as caught:
                dataset.__getitems__(range(6))
            assert (caught.value.index, caught.value.path) == (5, str(root / "dog" / "002.jpg"))
            assert len(dataset.__getitems__(range(5))) == 5
    build(root)
    with CachedDataset.from_cache(cache) as dataset:
        assert np.array_equal(dataset[5][0], images_of(root)[5])


# In use


def test_it_travels_to_other_processes(image_folder: Folder) -> None:
    """Another process reads the pickled dataset, which is small; a copy runs its transform at the same time."""
    root = image_folder(size=(13, 11))
    with CachedDataset.from_cache(build(root, codec="zstd"), as_tensors=True) as dataset:
        assert len(pickle.dumps(dataset)) < 4000
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        child = context.Process(target=send_sample, args=(dataset, 4, theirs))
        child.start()
        theirs.close()
        image, label = ours.recv()
        child.join()
        ours.close()
        child.close()
        assert image == dataset[4][0].tolist()
        assert label == 1
        dataset.transform = v1.Compose([v1.Resize((4, 5)), v1.ConvertImageDtype(torch.float32)])
        assert torch.equal(pickle.loads(pickle.dumps(dataset))[4][0], dataset[4][0])
        assert dataset[4][0].shape == (3, 4, 5)


def test_loaders_prefetchers_and_subsets_take_it(gpu: Sim, image_folder: Folder) -> None:
    """Subsets in worker processes, device batches and reports work; a closed dataset raises an error."""
    root = image_folder(per_class=5, size=(13, 11))
    with CachedDataset.from_cache(build(root), transform=v1.PILToTensor()) as dataset:
        chosen = Subset(dataset, [1, 8, 3])
        for workers in ("thread", "process"):
            loader = DataLoader(chosen, batch_size=3, num_workers=1, workers=workers)
            ((images, labels),) = loader
            assert labels.tolist() == [0, 1, 0]
            assert torch.equal(images, torch.stack([dataset[i][0] for i in (1, 8, 3)]))
        ((on_device, _),) = CudaPrefetcher(loader, "cuda:0")
        assert torch.equal(on_device.cpu(), images)
        assert "zstd" in str(dataset.storage_report())
    with pytest.raises(StoreGoneError):
        dataset[0]
    with pytest.raises(StoreGoneError):
        dataset.samples  # noqa: B018  # asking is the act
    dataset.close()
