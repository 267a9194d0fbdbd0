"""Folders of caches: who writes them, and what a writer leaves that fails, is killed or has no permission."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms as v1

from data import save_image
from fastdata import CachedDataset, ImageFolder, ImageManifest
from fastdata.errors import CacheError, SampleError
from fastdata.stores.disk_file import DiskFile
from fastdata.tools.inspect import inspect_caches
from fastdata.tools.prune import prune_caches

Folder = Callable[..., Path]


def cached(root: Path) -> ImageFolder:
    return ImageFolder(root, cache_dir=root.parent / "cache", resize=(7, 9), prepare_workers=2)


def all_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def refuse(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_what_workers_of_a_killed_writer_still_write_reaches_no_later_file(tmp_path: Path) -> None:
    """Orphaned workers write to a file without a name, and no process opens another's file for writing."""
    path = tmp_path / "part0-00000.bin"
    orphan = DiskFile.reserve(path, 100)
    with pytest.raises(FileExistsError):
        DiskFile.reserve(path, 100)
    path.unlink()
    file = DiskFile.reserve(path, 100)
    orphan.write(0, np.ones(100, np.uint8))
    assert not file.array("uint8", (100,)).any()
    orphan.close()
    file.close()


def test_an_update_that_fails_leaves_the_cache_as_it_was(image_folder: Folder) -> None:
    """Shards written before a bad file was found are removed at once, not only by a later run."""
    root = image_folder(per_class=6, size=(13, 11))
    cached(root).close()
    before = all_files(root.parent / "cache")
    for number in range(3):
        save_image(root / "cat" / f"00{number}.jpg", 100 + number, (13, 11))
    (root / "cat" / "001.jpg").write_bytes(b"no image")
    with pytest.raises(SampleError, match=r"001\.jpg"):
        cached(root)
    assert all_files(root.parent / "cache") == before


@pytest.mark.parametrize(
    "broken",
    ["fastdata.stores.cache.np.savez", "fastdata.sources.local_files.LocalFiles.pipe_file"],
)
def test_no_room_for_the_last_small_files_is_an_error(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """If samples fit but the small files do not, the error has the free space, and no file is left."""
    root = image_folder(size=(13, 11))
    monkeypatch.setattr(broken, refuse(errno.ENOSPC))
    with pytest.raises(
        CacheError,
        match=r"too full for the cache: it ran out of room .* are free\. Free some space",
    ):
        cached(root)
    assert {
        name for name in all_files(root.parent / "cache") if not name.endswith(".lock")
    } == set()


def test_a_file_in_the_place_of_the_folder_is_named(image_folder: Folder) -> None:
    """If ``cache_dir=`` is a file, the error says so."""
    root = image_folder(size=(13, 11))
    (root.parent / "cache").write_text("")
    with pytest.raises(
        CacheError,
        match=r"cache_dir='.*cache' cannot be written \(File exists\), and .* Name a folder",
    ):
        cached(root)


def test_damage_that_cannot_be_recorded_is_reported(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``verify`` of a read-only cache reports that the damage cannot be recorded for the next run."""
    root = image_folder(size=(13, 11))
    cached(root).close()
    shard = next((root.parent / "cache").glob("*/part0-*.npy"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    cache_dir = root.parent / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse(errno.EROFS))
        (found,) = inspect_caches(cache_dir, verify=True)
        assert "the damage cannot be recorded (Read-only file system)" in str(found)
    (found,) = inspect_caches(cache_dir, verify=True)
    assert "the next run over its source prepares it again" in str(found)
    assert "a shard is damaged; the next run writes it again" in str(
        inspect_caches(root.parent / "cache")[0]
    )


@pytest.mark.parametrize("codec", ["auto", "zstd", "source"])
def test_the_only_new_file_may_be_no_image(image_folder: Folder, codec: str) -> None:
    """Under ``on_error="skip"`` it is left out, others can be read, and the next run does not read it again."""
    root = image_folder(per_class=4, size=(13, 11))
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "resize": (7, 9),
        "codec": codec,
    }
    with ImageFolder(root, **options) as dataset:
        count = len(dataset)
    bad = root / "cat" / "999.jpg"
    bad.write_bytes(b"no image")
    with pytest.warns(UserWarning, match=r"1 of 9 samples cannot be prepared .*cat/999\.jpg"):
        dataset = ImageFolder(root, on_error="skip", **options)
    with dataset:
        assert [(error.index, error.path) for error in dataset.skipped] == [(4, str(bad))]
        assert len(list(dataset)) == count
    before = all_files(root.parent / "cache")
    with ImageFolder(root, on_error="skip", **options) as dataset:
        assert len(dataset) == count
    assert all_files(root.parent / "cache") == before


def test_lists_in_one_folder_have_their_own_caches(image_folder: Folder) -> None:
    """A run with the training list does not change the cache of the validation list."""
    root = image_folder()
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))
    lists = {"train.csv": names[:4], "val.csv": names[3:]}
    for name, files in lists.items():
        (root / name).write_text("file,label\n" + "".join(f"{file},1\n" for file in files), "utf-8")
    cache = root.parent / "cache"
    kept = []
    for name in (*lists, *lists):
        with ImageManifest(root / name, cache_dir=cache) as dataset:
            assert len(dataset) == len(lists[name])
        kept.append(all_files(cache))
    assert kept[1] == kept[2] == kept[3]


class Middle(ImageFolder):
    @staticmethod
    def make_dataset(*given: Any, **options: Any) -> list[tuple[str, int]]:
        return ImageFolder.make_dataset(*given, **options)[1:5]


def test_lists_made_by_code_have_their_own_caches(image_folder: Folder, tmp_path: Path) -> None:
    """Frames, lists, files with one name, ``is_valid_file`` and subclasses over one root keep separate caches."""
    root = image_folder()
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))
    folds = [tmp_path / name / "train.csv" for name in ("fold0", "fold1")]
    for fold, files in zip(folds, (names[:3], names[3:]), strict=True):
        fold.parent.mkdir()
        fold.write_text("file,label\n" + "".join(f"{file},1\n" for file in files), "utf-8")
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "prepare_workers": 1}
    makers: list[tuple[int, Callable[[], Any]]] = [
        (3, lambda: ImageManifest([(name, 0) for name in names[:3]], root=root, **options)),
        (3, lambda: ImageManifest([(name, 1) for name in names[3:]], root=root, **options)),
        (3, lambda: ImageManifest(folds[0], root=root, **options)),
        (3, lambda: ImageManifest(folds[1], root=root, **options)),
        (6, lambda: ImageFolder(root, **options)),
        (
            2,
            lambda: ImageFolder(
                root, is_valid_file=lambda path: path.endswith("000.jpg"), **options
            ),
        ),
        (4, lambda: ImageFolder(root, is_valid_file=lambda path: path[-7:] > "000.jpg", **options)),
        (4, lambda: Middle(root, **options)),
    ]
    kept = []
    for count, make in makers * 2:
        with make() as dataset:
            assert len(dataset) == count
        kept.append(all_files(tmp_path / "cache"))
    assert set().union(*(files ^ kept[len(makers) - 1] for files in kept[len(makers) :])) == set()


def test_labels_in_samples_are_part_of_a_caches_key(tmp_path: Path) -> None:
    """A dataset that lists (path, label) and no targets is cached again when a label changes."""

    class Listed:
        def __init__(self, samples: list[tuple[str, int]]) -> None:
            self.samples = samples

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            path, label = self.samples[index]
            return Image.open(path).convert("RGB"), label

    save_image(tmp_path / "a.png", 0, (6, 5))
    for label in (1, 2):
        listed = Listed([(str(tmp_path / "a.png"), label)])
        with CachedDataset(listed, cache_dir=tmp_path / "cache") as dataset:
            assert list(dataset.targets) == [label]


def test_others_may_read_a_cache_as_the_umask_says(image_folder: Folder) -> None:
    """All files have the umask's permissions, including the index, which replaces another by renaming."""
    root = image_folder(size=(13, 11))
    before = os.umask(0o027)
    try:
        cached(root).close()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in root.parent.glob("cache/*/*")}
    assert set(modes.values()) == {0o640}, modes


# Hostile folders


@pytest.mark.parametrize("victim", ["fastdata.npz", "part0-*"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_damage(
    image_folder: Folder, victim: str, kind: str, in_time: None
) -> None:
    """A pipe, or a link to a device, instead of a cache file is an error at once, and is mended."""
    root = image_folder(size=(13, 11))
    cached(root).close()
    (path,) = (root.parent / "cache").glob(f"*/{victim}")
    path.unlink()
    make = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
    }[kind]
    make(path)
    with pytest.raises(CacheError):
        CachedDataset.from_cache(path.parent)
    with cached(root) as dataset:
        assert dataset[0][0].size == (9, 7)


@pytest.mark.parametrize("codec", ["auto", "zstd", "source"])
def test_damage_that_opening_finds_is_raised_on_reading(image_folder: Folder, codec: str) -> None:
    """A damaged sample does not stop the dataset from being made; reading it raises an error that names it."""
    root, steps = image_folder(size=(40, 30), suffix=".png"), v1.RandomResizedCrop(8)
    save_image(root / "cat" / "001.png", 9, (41, 30))
    options: dict[str, Any] = {
        "cache_dir": root.parent / "cache",
        "codec": codec,
        "prepare_workers": 1,
    }
    ImageFolder(root, v1.Compose([steps, v1.PILToTensor()]), **options).close()
    (path,) = (root.parent / "cache").glob("*/part0-*")
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    dataset = ImageFolder(root, v1.Compose([steps, v1.PILToTensor()]), **options)
    with (
        dataset,
        pytest.raises(
            SampleError, match=r"sample 0, .* its bytes in .* are not those that were written"
        ),
    ):
        dataset.__getitems__([0])
    with ImageFolder(root, v1.Compose([steps, v1.PILToTensor()]), **options) as dataset:
        assert dataset.__getitems__([0]).stacked[0].shape == (1, 3, 8, 8)


def test_a_cache_behind_a_link_is_written_and_nothing_of_the_folder_removed(
    image_folder: Folder,
) -> None:
    """A link in cache_dir cannot be used to remove files of another folder."""
    root = image_folder(size=(13, 11))
    cached(root).close()
    (home,) = (path for path in (root.parent / "cache").iterdir() if path.is_dir())
    shutil.rmtree(home)
    other = root.parent / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("all of it")
    home.symlink_to(other)
    for _ in range(2):
        with cached(root) as dataset:
            assert dataset[0][0].size == (9, 7)
    prune_caches(root.parent / "cache", gone=True)
    assert (other / "thesis.txt").read_text() == "all of it"


def test_what_another_user_left_stays(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers are removed only if they belong to the current user."""
    root = image_folder(size=(13, 11))
    cached(root).close()
    (path,) = (root.parent / "cache").glob("*/fastdata.npz")
    stray = path.with_name("part0-00007.npy")
    stray.touch()
    uid = os.getuid()
    for found, is_there in ((uid + 1, True), (uid, False)):
        monkeypatch.setattr(os, "getuid", lambda found=found: found)
        save_image(root / "cat" / "000.jpg", found, (14, 11))
        cached(root).close()
        assert stray.exists() == is_there
