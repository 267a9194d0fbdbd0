"""ImageFolder and ImageManifest, compared with torchvision's ImageFolder."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import re
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset, get_worker_info
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from conftest import shown
from fastdata import (
    CachedDataset,
    CudaPrefetcher,
    DataLoader,
    FastDataWarning,
    ImageFolder,
    ImageManifest,
)
from fastdata.errors import MemoryBudgetError, SampleError, StoreGoneError
from fastdata.pixels.decode import load_image
from leftovers import open_descriptors

Folder = Callable[..., Path]
PREPARED = [v1.Resize(9), v1.CenterCrop(8)]


def _pixels(image: Any) -> np.ndarray:
    return np.asarray(image)


@pytest.mark.parametrize("storage", ["shared", "none", "auto"])
def test_it_has_torchvisions_face(image_folder: Folder, storage: Any) -> None:
    """Class names, numbers, order, length and paths are torchvision's."""
    root = image_folder(classes=("b", "a", "c"), per_class=4)
    (root / "a" / "deep" / "er").mkdir(parents=True)
    os.rename(root / "a" / "001.jpg", root / "a" / "deep" / "er" / "0.JPG")
    (root / "a" / "notes.txt").write_text("no image")
    theirs = TorchvisionFolder(str(root))
    with ImageFolder(str(root), storage=storage) as ours:
        for name in ("classes", "class_to_idx", "samples", "imgs", "targets", "root", "extensions"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert len(ours) == len(theirs)
        assert ours.extensions == IMG_EXTENSIONS
        assert ours.find_classes(str(root)) == theirs.find_classes(str(root))


@pytest.mark.parametrize(
    "given", [{}, {"transform": v1.ToTensor()}, {"target_transform": str}], ids=shown
)
def test_torchvisions_idioms_work(image_folder: Folder, given: dict[str, Any]) -> None:
    """``list(targets)`` is a list; ``transforms``, None without a transform, is called with image and target."""
    root = str(image_folder())
    theirs = TorchvisionFolder(root, **given)
    with ImageFolder(root, **given) as ours:
        assert list(ours.targets) * 2 == theirs.targets * 2
        assert (ours.transforms is None) == (theirs.transforms is None)
        if theirs.transforms is not None:
            image = Image.new("RGB", (3, 2), (1, 2, 3))
            mine, wanted = (dataset.transforms(image, 7) for dataset in (ours, theirs))
            np.testing.assert_array_equal(_pixels(mine[0]), _pixels(wanted[0]))
            assert mine[1] == wanted[1]


def test_before_images_are_prepared_a_transform_that_is_assigned_decides_what_is_stored(
    image_folder: Folder,
) -> None:
    """The dataset is then as if it had been made with this transform."""
    root = image_folder(size=(15, 11))
    with (
        ImageFolder(str(root), v1.Resize((9, 9))) as late,
        ImageFolder(str(root), v1.Compose([v1.Resize((9, 9)), v1.CenterCrop(7)])) as at_once,
    ):
        late.transform = at_once.transform
        assert late.plan.prepare == at_once.plan.prepare
        assert (late.samples, late.classes) == (at_once.samples, at_once.classes)
        assert np.array_equal(_pixels(late[1][0]), _pixels(at_once[1][0]))


@pytest.mark.parametrize("storage", ["auto", "shared"])
def test_without_a_transform_nothing_is_prepared_before_the_first_read(
    image_folder: Folder, storage: Any
) -> None:
    """Without a transform no file is read; the first read, or a transform, prepares all samples."""
    root, read = image_folder(), []

    def opened(path: str) -> Image.Image:
        read.append(path)
        return Image.open(path).convert("RGB")

    options: dict[str, Any] = {
        "loader": opened,
        "storage": storage,
        "prepare_workers": 0,
    }
    with ImageFolder(root, **options) as dataset, ImageFolder(root, **options) as other:
        assert "Storage: chosen at the first read" in repr(dataset)
        assert (len(dataset), dataset.targets, dataset.transform) == (6, [0, 0, 0, 1, 1, 1], None)
        dataset.transform = dataset.target_transform = None
        Subset(dataset, [1, 2])
        assert not read
        assert dataset[5][0].size == (12, 10)
        assert set(read) == {path for path, _ in dataset.samples}
        assert dataset.filled_share() == 1
        read.clear()
        other.transform = v1.Compose([v1.Resize((4, 4)), v1.ToTensor()])
        assert next(iter(TorchLoader(other, batch_size=6)))[0].shape == (6, 3, 4, 4)
        assert other.plan.prepare
    with ImageFolder(root, **options) as unread:
        with copy.copy(unread) as copied:
            pass
        with pytest.raises(StoreGoneError, match="was closed"):
            copied[0]
        assert unread[5][0].size == (12, 10)
    with pytest.raises(StoreGoneError, match="was closed"):
        unread[0]
    read.clear()
    with ImageFolder(root, **options).prepare() as eager:
        assert set(read) == {path for path, _ in eager.samples}


def test_samples_first_read_in_a_worker_are_not_stored(image_folder: Folder) -> None:
    """If a worker of torch's loader reads first, samples are right, not stored, and a warning says so."""
    with ImageFolder(image_folder()) as dataset:
        loader = TorchLoader(dataset, batch_size=6, num_workers=1, collate_fn=list)
        with pytest.raises(FastDataWarning, match="the first read came in a worker process"):
            list(loader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            [unkept] = list(loader)
        [kept] = list(DataLoader(dataset, batch_size=6, num_workers=1, collate_fn=list))
        assert dataset.filled_share() == 1
        for (image, label), (other, wanted) in zip(unkept, kept, strict=True):
            assert (image.tobytes(), label) == (other.tobytes(), wanted)


def _shrink(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.transform = v1.Compose([v1.Resize((2, 2)), v1.PILToTensor()])  # type: ignore[attr-defined]


def _storage(_: Any) -> str:
    info = get_worker_info()
    assert info is not None
    return info.dataset.storage  # type: ignore[attr-defined,no-any-return]


def test_a_worker_process_prepares_no_samples_for_itself(image_folder: Folder) -> None:
    """Samples that did not fit stay unstored in a worker, for any transform: each worker would hold all."""
    with pytest.warns(FastDataWarning, match="Every epoch decodes again"):
        dataset = ImageFolder(image_folder(), v1.PILToTensor(), memory_limit=100)
    options: Any = {"collate_fn": _storage, "worker_init_fn": _shrink}
    with dataset:
        assert set(TorchLoader(dataset, num_workers=1, **options)) == {"none"}
        dataset.transform = v1.Compose([v1.Resize((2, 2)), v1.PILToTensor()])
        assert dataset.storage == "shared"


def test_a_first_transform_that_is_assigned_decides_what_is_stored(
    image_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """Samples of a dataset without transform are prepared again for the first one, unless one was read."""
    root = image_folder(size=(15, 11))
    with (
        ImageFolder(str(root)) as unread,
        ImageFolder(str(root)) as read,
    ):
        assert read[0][0].size == (15, 11)
        unread.transform = read.transform = v1.Compose([*PREPARED, v1.ToTensor()])
        assert not caplog.records
        assert (unread.plan.prepare, read.plan.prepare) == (tuple(PREPARED), ())
        for mine, theirs in zip(unread, read, strict=True):
            assert torch.equal(mine[0], theirs[0])


def test_preparing_without_the_core_is_logged(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with the reason, and the pixels are the same."""
    root = image_folder(size=(15, 11))
    with ImageFolder(
        root,
        v1.Compose(PREPARED),
    ).prepare() as dataset:
        wanted = [_pixels(image) for image, _ in dataset]
    monkeypatch.setattr("fastdata.pixels.core.library.obstacle", lambda: "no core was built here.")
    caplog.set_level("INFO", "fastdata")
    with ImageFolder(
        root,
        v1.Compose(PREPARED),
    ).prepare() as dataset:
        assert all(
            np.array_equal(_pixels(image), it)
            for (image, _), it in zip(dataset, wanted, strict=True)
        )
    said = [message for message in caplog.messages if "Pillow" in message]
    assert said == ["Pillow prepares the images, which takes longer: no core was built here."]


@pytest.mark.parametrize("storage", ["shared", "none"])
@pytest.mark.parametrize(
    "transform",
    [
        None,
        v1.Compose(PREPARED),
        v1.Compose([*PREPARED, v1.ToTensor()]),
        v1.Compose([*PREPARED, v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]),
        v1.Compose([v1.Grayscale(), v1.Resize((7, 5)), v1.ToTensor()]),
        v1.Compose([v1.Lambda(lambda image: image.rotate(90)), v1.ToTensor()]),
        v2.Compose(
            [v2.ToImage(), v2.Resize((6, 7), antialias=True), v2.ToDtype(torch.float32, scale=True)]
        ),
        v2.Compose([v2.PILToTensor(), v2.Resize(8, antialias=True), v2.CenterCrop(6)]),
    ],
    ids=repr,
)
def test_deterministic_transforms_give_torchvisions_pixels(
    image_folder: Folder, storage: Any, transform: Any
) -> None:
    """Without randomness every sample equals torchvision's in type, mode, dtype and every pixel."""
    root = image_folder(size=(15, 11))
    theirs = TorchvisionFolder(str(root), transform)
    with ImageFolder(str(root), transform, storage=storage) as ours:
        for (mine, label), (wanted, wanted_label) in zip(ours, theirs, strict=True):
            assert label == wanted_label
            if isinstance(wanted, Image.Image):
                assert mine.mode == wanted.mode
            else:
                assert (type(mine), mine.dtype) == (type(wanted), wanted.dtype)
            np.testing.assert_array_equal(_pixels(mine), _pixels(wanted))


@pytest.mark.parametrize("storage", ["shared", "none", "disk"])
def test_a_path_as_root_stays_one(image_folder: Folder, tmp_path: Path, storage: Any) -> None:
    """``root`` stays the given Path, as in torchvision, and in a str ~ is expanded."""
    root, kept = image_folder(), {"cache_dir": tmp_path} if storage == "disk" else {}
    with ImageFolder(root, storage=storage, **kept) as ours:
        assert (ours.root, ours.samples) == (root, TorchvisionFolder(root).samples)
        assert f"Root location: {root}" in repr(ours)


@pytest.mark.parametrize("is_cached", [False, True])
def test_samples_are_those_of_make_dataset(
    image_folder: Folder, tmp_path: Path, is_cached: bool
) -> None:
    """A subclass's make_dataset lists the samples, and gets the arguments that torchvision's gets."""

    class Half(ImageFolder):
        @staticmethod
        def make_dataset(directory: Any, class_to_idx: Any, *others: Any, **more: Any) -> Any:
            return ImageFolder.make_dataset(directory, class_to_idx, *others, **more)[::2]

    root = image_folder()
    options = {"cache_dir": tmp_path / "cache"} if is_cached else {}
    for kind in (Half, ImageFolder, Half):
        with kind(root, **options) as ours:
            assert ours.samples == TorchvisionFolder(root).samples[:: 2 if kind is Half else 1]
    for arguments in (
        (None, (".jpg",)),
        ({}, (".jpg",)),
        ({"cat": 0}, None),
        ({"cat": 0}, (".png",)),
    ):
        errors = []
        for kind in (TorchvisionFolder, ImageFolder):
            with pytest.raises((ValueError, FileNotFoundError)) as raised:
                kind.make_dataset(root, *arguments)
            errors.append((raised.type, str(raised.value)))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("given", ["a/path.jpg", None, {"image": 1}], ids=repr)
def test_a_loader_that_returns_no_image_is_an_error(image_folder: Folder, given: Any) -> None:
    """The error shows the returned value, and its cure is not to delete the file, which is intact."""
    with pytest.raises(SampleError) as raised:
        ImageFolder(
            image_folder(),
            loader=lambda path: given,
        ).prepare()
    message = str(raised.value)
    assert f"a sample of type {type(given).__name__} cannot be stored" in message
    assert "Correct the code that opens or prepares it (loader=" in message
    assert "Delete" not in message


@pytest.mark.parametrize(
    ("cause", "cure"),
    [
        (Image.DecompressionBombError, "may be intact: .* set PIL.Image.MAX_IMAGE_PIXELS"),
        (PermissionError, "Give the user who runs this process permission to read the file"),
        (FileNotFoundError, "Restore the file, or correct its path"),
    ],
)
def test_an_intact_file_is_not_called_damaged(
    image_folder: Folder, cause: type[Exception], cure: str
) -> None:
    """A file beyond Pillow's size limit, or without permission, is not called damaged or one to delete."""

    def failing(path: str) -> Any:
        raise cause("no")

    with pytest.raises(
        SampleError, match=rf"sample 0, .*{cure}.*, or leave it out with on_error='skip'"
    ) as raised:
        ImageFolder(
            image_folder(suffix=".png"),
            loader=failing,
        ).prepare()
    assert "damaged" not in str(raised.value)
    assert "Delete" not in str(raised.value)


def test_without_storage_the_random_draws_are_torchvisions_too(image_folder: Folder) -> None:
    """Without storage, with batch_ops=False and an equal global seed, random transforms give torchvision's pixels."""
    root = image_folder(size=(15, 11))
    transform = v1.Compose(
        [v1.RandomResizedCrop(8), v1.RandomHorizontalFlip(), v1.ColorJitter(0.5), v1.ToTensor()]
    )
    theirs = TorchvisionFolder(str(root), transform)
    with ImageFolder(str(root), transform, storage="none", batch_ops=False) as ours:
        torch.manual_seed(3)
        wanted = [theirs[i][0] for i in range(6)]
        torch.manual_seed(3)
        for image, expected in zip([ours[i][0] for i in range(6)], wanted, strict=True):
            assert torch.equal(image, expected)


@pytest.mark.parametrize("resize", [None, 9])
def test_without_storage_batches_are_those_of_a_store(image_folder: Folder, resize: Any) -> None:
    """Decoded for each batch or stored, whole batches and single samples have the same pixels and draws."""
    root = image_folder(size=(15, 11))
    transform = v1.Compose(
        [v1.RandomResizedCrop(8), v1.RandomHorizontalFlip(), v1.ColorJitter(0.5), v1.ToTensor()]
    )
    with (
        ImageFolder(root, transform, storage="none", seed=4, resize=resize) as none,
        ImageFolder(root, transform, storage="shared", seed=4, resize=resize) as shared,
    ):
        for workers in (0, 2):
            batches = [
                list(DataLoader(each, batch_size=4, num_workers=workers)) for each in (none, shared)
            ]
            for (images, labels), (wanted, numbers) in zip(*batches, strict=True):
                assert torch.equal(images, wanted)
                assert torch.equal(labels, numbers)
        assert DataLoader(none, batch_size=4).report().path.startswith("whole batches")
        for each in (none, shared):
            each.set_epoch(2)
        assert torch.equal(none[3][0], shared[3][0])
    with ImageFolder(root, transform, storage="none") as broken:
        path = Path(broken.samples[1][0])
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(SampleError, match=r"001\.jpg") as caught:
            next(iter(DataLoader(broken, batch_size=4, num_workers=1)))
    assert caught.value.index == 1


def _save_zoo(folder: Path) -> None:
    """Save CMYK, palette, alpha, 16-bit, 1-bit, EXIF-rotated, animated, gray and progressive images."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (9, 14, 3), np.uint8))
    rgb.convert("CMYK").save(folder / "cmyk.jpg")
    rgb.convert("L").save(folder / "gray.jpg")
    rgb.save(folder / "progressive.jpg", progressive=True)
    rgb.convert("P").save(folder / "palette.png")
    rgb.convert("RGBA").save(folder / "alpha.png")
    rgb.convert("LA").save(folder / "gray_alpha.png")
    rgb.convert("1").save(folder / "one_bit.png")
    Image.fromarray(rng.integers(0, 65536, (9, 14), np.uint16)).save(folder / "sixteen_bit.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb.save(folder / "rotated.jpg", exif=exif)
    rgb.save(folder / "animated.webp", save_all=True, append_images=[rgb.rotate(180)])
    rgb.save(folder / "plain.bmp")


def test_unusual_images_are_torchvisions(tmp_path: Path) -> None:
    """CMYK, palette, alpha, 16-bit, EXIF-rotated and animated images have the pixels of torchvision's loader."""
    _save_zoo(tmp_path / "zoo")
    theirs = TorchvisionFolder(str(tmp_path))
    with ImageFolder(tmp_path) as ours:
        for (mine, _), (wanted, _), path in zip(ours, theirs, ours.samples, strict=True):
            assert mine.mode == wanted.mode == "RGB"
            np.testing.assert_array_equal(_pixels(mine), _pixels(wanted), err_msg=str(path))


def _save_turned(root: Path) -> None:
    """Save images of all eight orientations, the first one without EXIF."""
    (root / "all").mkdir(parents=True)
    for orientation in range(9):
        exif = Image.Exif()
        if orientation:
            exif[0x0112] = orientation
        pixels = np.random.default_rng(orientation).integers(0, 256, (10, 20, 3), np.uint8)
        Image.fromarray(pixels).save(root / "all" / f"{orientation}.jpg", exif=exif)


@pytest.mark.parametrize(
    "rest", [[], [v1.RandomCrop(8)], [v1.Resize((7, 9))]], ids=["ragged", "cropped", "resized"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"storage": "none"},
        {"storage": "shared"},
        {"storage": "compressed", "codec": "source"},
        {"storage": "compressed", "codec": "lz4"},
        {"storage": "disk"},
        {"storage": "disk", "codec": "source"},
    ],
    ids=shown,
)
def test_images_are_turned_upright(
    tmp_path: Path, options: dict[str, Any], rest: list[Any]
) -> None:
    """PIL's exif_transpose at the start of a transform gives torchvision's pixels in every storage."""
    _save_turned(tmp_path / "images")
    if options["storage"] == "disk":
        options = options | {"cache_dir": tmp_path / "cache"}
    options = options | {"batch_ops": False}
    transform = v1.Compose([ImageOps.exif_transpose, *rest, v1.PILToTensor()])
    theirs = TorchvisionFolder(str(tmp_path / "images"), transform)
    for _ in range(2):  # the second opens the cache
        with ImageFolder(tmp_path / "images", transform, **options) as ours:
            for index in range(9):
                torch.manual_seed(index)
                wanted = theirs[index][0]
                torch.manual_seed(index)
                assert torch.equal(ours[index][0], wanted)


def test_a_turn_before_a_resize_is_no_reason_to_prepare_beforehand(tmp_path: Path) -> None:
    """If a later resize gives all images one size, they are prepared when they are first read."""
    _save_turned(tmp_path)
    for steps, share in (
        ([ImageOps.exif_transpose, v1.Resize((7, 9))], 0),
        ([v1.Resize((9, 9)), ImageOps.exif_transpose], 1),
        ([v1.Resize((7, 9)), ImageOps.exif_transpose], 1),
    ):
        with ImageFolder(tmp_path, v1.Compose(steps)) as dataset:
            assert dataset.filled_share() == share


def test_a_step_that_cannot_see_the_orientation_is_an_error(tmp_path: Path) -> None:
    """A user's step gets torchvision's image without storage; from a store, looking for EXIF is an error."""
    _save_turned(tmp_path)

    def turn(image: Image.Image) -> Image.Image:
        return ImageOps.exif_transpose(image).copy()

    transform = v1.Compose([v1.CenterCrop((4, 6)), turn, v1.PILToTensor()])
    theirs = TorchvisionFolder(str(tmp_path), transform)
    with ImageFolder(tmp_path, transform, storage="none") as ours:
        assert all(torch.equal(ours[index][0], theirs[index][0]) for index in range(9))
    with ImageFolder(tmp_path, storage="none") as ours:
        assert dict(ours[6][0].getexif()) == {0x0112: 6}
    for options in (
        {"storage": "shared"},
        {},
        {"storage": "compressed", "codec": "source"},
    ):
        with (
            ImageFolder(tmp_path, transform, **options) as ours,
            pytest.raises(LookupError, match="comes from a store, which does not keep EXIF data"),
        ):
            ours[6]


def test_an_image_that_was_turned_may_be_asked_for_its_exif(tmp_path: Path) -> None:
    """After images are stored upright, by the transform or prepare=, rotating them again changes nothing."""
    _save_turned(tmp_path / "images")
    cache = tmp_path / "cache"
    again = v1.Compose(
        [ImageOps.exif_transpose, v1.RandomCrop(10), v1.Lambda(ImageOps.exif_transpose)]
    )
    theirs = TorchvisionFolder(str(tmp_path / "images"))
    with ImageFolder(tmp_path / "images", again, cache_dir=cache) as dataset:
        assert dataset[6][0].size == (10, 10)
    with CachedDataset.from_cache(cache, transform=ImageOps.exif_transpose) as dataset:
        assert dataset[6][0].size == (10, 20)
    with CachedDataset(theirs, prepare=ImageOps.exif_transpose) as dataset:
        assert ImageOps.exif_transpose(dataset[6][0]).size == (10, 20)
    with (
        CachedDataset(theirs) as dataset,
        pytest.raises(LookupError, match="comes from a store, which does not keep EXIF data"),
    ):
        ImageOps.exif_transpose(dataset[6][0])


def test_a_loader_and_validity_of_the_users_own_are_used(image_folder: Folder) -> None:
    """loader= and is_valid_file= work as in torchvision."""
    root = image_folder()

    def valid(path: str) -> bool:
        return path.endswith("1.jpg")

    def load(path: str) -> Image.Image:
        return Image.new("L", (4, 3), len(path) % 256)

    theirs = TorchvisionFolder(str(root), loader=load, is_valid_file=valid)
    with ImageFolder(str(root), loader=load, is_valid_file=valid) as ours:
        assert ours.samples == theirs.samples
        assert [image.mode for image, _ in ours] == ["L", "L"]
        np.testing.assert_array_equal(_pixels(ours[0][0]), _pixels(theirs[0][0]))


@pytest.mark.parametrize(
    "kwargs", [{}, {"allow_empty": True}, {"is_valid_file": lambda path: False}]
)
def test_folder_errors_are_torchvisions(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    """A missing folder, no class and an empty class raise torchvision's errors with its texts."""
    (tmp_path / "one" / "empty").mkdir(parents=True)
    (tmp_path / "none").mkdir()
    for root in ("one", "none", "missing"):
        outcome = []
        for make in (TorchvisionFolder, ImageFolder):
            try:
                outcome.append(len(make(str(tmp_path / root), **kwargs)))
            except Exception as error:  # noqa: BLE001  # whatever it is, both must raise it
                outcome.append((type(error), str(error)))
        assert outcome[0] == outcome[1]


def _spoil(root: Path) -> dict[int, Path]:
    """Make four files of eight unreadable: empty, cut off, text, and only a JPEG header."""
    paths = sorted(root.glob("*/*.jpg"))
    paths[1].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    paths[5].write_text("<html>404</html>")
    paths[7].write_bytes(paths[7].read_bytes()[:20])
    return {index: paths[index] for index in (1, 2, 5, 7)}


def test_a_bad_file_is_named_with_the_cure(image_folder: Folder) -> None:
    """The first unreadable file raises an error with path, index and cure."""
    root = image_folder(per_class=4)
    spoilt = _spoil(root)
    with pytest.raises(
        SampleError, match=r"sample 1, .*001\.jpg.*empty file.*on_error='skip'"
    ) as caught:
        ImageFolder(
            root,
            transform=v1.Resize((5, 5)),
        ).prepare()
    assert (caught.value.index, caught.value.path) == (1, str(spoilt[1]))


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize(
    "options",
    [{"storage": "shared"}, {"storage": "none"}, {"loader": functools.partial(load_image)}],
    ids=shown,
)
@pytest.mark.parametrize("transform", [v1.Compose(PREPARED), lambda image: image], ids=["core", ""])
def test_what_is_no_file_is_an_error_at_once(
    image_folder: Folder,
    kind: str,
    options: dict[str, Any],
    transform: Any,
    monkeypatch: pytest.MonkeyPatch,
    in_time: None,
) -> None:
    """A pipe without a writer, a link to a device or a socket is named; a link to a file is read."""
    root = image_folder()
    first, second, *_ = sorted((root / "cat").iterdir())
    second.unlink()
    second.symlink_to(first)
    with ImageFolder(root, transform, **options) as dataset:
        assert np.array_equal(*(_pixels(dataset[k][0]) for k in (0, 1)))
    second.unlink()
    if kind == "pipe":
        os.mkfifo(second)
    elif kind == "device":
        second.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(second.parent)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(second.name)
    with (
        pytest.raises(SampleError, match=rf"sample 1, {second}, cannot be read"),
        ImageFolder(root, transform, **options) as dataset,
    ):
        dataset[1]
    with pytest.raises(OSError, match=re.escape(str(second))):
        dataset.loader(str(second))


@pytest.mark.parametrize("codec", ["auto", "source"])
def test_bad_files_are_skipped_when_asked(image_folder: Folder, codec: str) -> None:
    """on_error="skip" leaves them out before training, warns once with their number, and lists them."""
    root = image_folder(per_class=4)
    spoilt = _spoil(root)
    good = [
        path for path in sorted(map(str, root.glob("*/*.jpg"))) if Path(path) not in spoilt.values()
    ]
    with pytest.warns(FastDataWarning, match="4 of 8 samples cannot be prepared") as caught:
        dataset = ImageFolder(
            root,
            transform=v1.Compose([v1.Resize((5, 5)), v1.ToTensor()]),
            on_error="skip",
            storage="auto" if codec == "auto" else "compressed",
            codec=codec,
        )
    assert len(caught) == 1
    assert [path for path, _ in dataset.samples] == good
    assert dataset.targets == [0, 0, 1, 1]
    assert [error.path for error in dataset.skipped] == [str(path) for path in spoilt.values()]
    for (image, label), (path, wanted) in zip(dataset, dataset.samples, strict=True):
        expected = v1.functional.to_tensor(v1.Resize((5, 5))(Image.open(path).convert("RGB")))
        assert label == wanted
        assert torch.equal(image, expected)
    dataset.transform = v1.CenterCrop(3)  # prepared again, of those that are left
    assert [error.path for error in dataset.skipped] == [str(path) for path in spoilt.values()]
    dataset.close()


@pytest.mark.parametrize("codec", ["lz4", "source"])
def test_errors_of_what_was_left_out_keep_nothing_open(image_folder: Folder, codec: str) -> None:
    """Code that keeps these errors after the dataset is closed keeps texts, but no memory of samples."""
    root = image_folder(per_class=4)
    _spoil(root)
    gc.collect()
    before = set(open_descriptors())
    gc.disable()
    try:
        with pytest.warns(FastDataWarning, match="4 of 8 samples cannot be prepared"):
            dataset = ImageFolder(
                root, v1.Resize((5, 5)), on_error="skip", storage="compressed", codec=codec
            )
        skipped = dataset.skipped
        dataset.close()
        left = {target for _, target in set(open_descriptors()) - before}
    finally:
        gc.enable()
    assert not any("memfd" in target for target in left)
    assert "empty file" in str(skipped[0])


def test_a_store_beyond_the_budget_is_refused_or_avoided(image_folder: Folder) -> None:
    """storage="shared" raises an error with need, free memory and cure; "auto" stores nothing, and warns once."""
    root = image_folder()
    with pytest.raises(
        MemoryBudgetError, match=r"needs 2\.1 KiB but memory_limit= allows 1000 B\. Use cache_dir= "
    ):
        ImageFolder(root, storage="shared", memory_limit=1000).prepare()
    with pytest.warns(
        FastDataWarning, match="Every epoch decodes again; cache_dir= or a smaller"
    ) as caught:
        dataset = ImageFolder(root, memory_limit=1000).prepare()
    assert len(caught) == 1
    assert (dataset.storage, len(dataset), dataset[0][0].size) == ("none", 6, (12, 10))
    dataset.close()


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_a_pickled_dataset_is_small(image_folder: Folder, storage: Any) -> None:
    """However many samples and classes there are, the pickle has less than 4 KB and reads the same memory."""
    root = image_folder(
        classes=tuple(f"class_{i:04}" for i in range(300)), per_class=1, size=(4, 3)
    )
    transform = v1.Compose([v1.RandomCrop(2), v1.ToTensor(), v1.Normalize((0.5,) * 3, (0.5,) * 3)])
    with ImageFolder(root, transform, storage=storage) as dataset:
        data = pickle.dumps(dataset)
        assert len(data) < 4096
        with pickle.loads(data) as copy:
            assert copy.samples == dataset.samples
            assert copy.classes == dataset.classes
            assert copy[299][0].shape == (3, 2, 2)


@pytest.mark.parametrize("labels", [("cat", "dog", "cat"), (7, 3, 7)], ids=["names", "numbers"])
def test_a_manifest_lists_its_rows(image_folder: Folder, labels: tuple[Any, ...]) -> None:
    """Paths come in the order of the CSV, names are numbered in sorted order, and numbers are unchanged."""
    root = image_folder()
    files = ["dog/001.jpg", "cat/000.jpg", "dog/002.jpg"]
    rows = [f'x,"{file}",{label}' for file, label in zip(files, labels, strict=True)]
    (root / "train.csv").write_text("\n".join(["id,image,kind", *rows]))
    with ImageManifest(root / "train.csv", file="image", label="kind") as dataset:
        assert [path for path, _ in dataset.samples] == [str(root / file) for file in files]
        assert dataset.targets == ([0, 1, 0] if labels[0] == "cat" else [7, 3, 7])
        assert dataset.classes == (["cat", "dog"] if labels[0] == "cat" else [])
        for (image, _), (path, _) in zip(dataset, dataset.samples, strict=True):
            np.testing.assert_array_equal(_pixels(image), _pixels(Image.open(path).convert("RGB")))


LABELS: list[dict[str, Any]] = [
    {"label": "x"},
    {"label": ["x", "y"]},
    {"label": ["n", "m"]},
    {"label": None},
    {"label": None, "id": "key"},
    {"label": "kind", "id": "key"},
    {"label": ["x", "y"], "id": "key"},
]


@pytest.fixture
def labelled(image_folder: Folder) -> Path:
    """Write a CSV of six images with columns of all kinds."""
    root = image_folder()
    rows = [
        f"{path.relative_to(root)},{path.parent.name},00{i},{i}.5,{i},{i % 2},{1 - i % 2}"
        for i, path in enumerate(sorted(root.rglob("*.jpg")))
    ]
    (root / "train.csv").write_text("\n".join(["file,kind,key,x,y,n,m", *rows]))
    return root / "train.csv"


@pytest.mark.parametrize("options", LABELS, ids=shown)
@pytest.mark.parametrize("workers", ["none", "thread", "process"])
def test_batches_of_labels_are_those_of_a_plain_dataset(
    labelled: Path, options: dict[str, Any], workers: str
) -> None:
    """Floats, vectors, ids and missing labels give the values and dtypes of torch's loader."""
    count, kind = (0, "auto") if workers == "none" else (1, workers)
    storage = "none" if workers == "none" else "shared"
    with ImageManifest(labelled, transform=v1.ToTensor(), storage=storage, **options) as dataset:
        plain = [(torch.zeros(1), dataset[index][1]) for index in range(6)]
        loader = DataLoader(dataset, batch_size=4, num_workers=count, workers=kind)
        found = [targets for _, targets in CudaPrefetcher(loader)]
        wanted = [targets for _, targets in TorchLoader(plain, batch_size=4)]
    assert repr(found) == repr(wanted)
    assert [dtypes_of(targets) for targets in found] == [dtypes_of(targets) for targets in wanted]


@pytest.mark.parametrize("options", LABELS, ids=shown)
def test_labels_of_any_kind_are_kept_in_a_cache(labelled: Path, options: dict[str, Any]) -> None:
    """The cache alone, and the next run with it, have the targets of the first run, with type and dtype."""
    cache = labelled.parent / "cache"
    with ImageManifest(labelled, storage="none", **options) as dataset:
        wanted = [repr((path, target, dtypes_of(target))) for path, target in dataset.samples]
    for _ in range(2):
        with ImageManifest(labelled, cache_dir=cache, **options) as dataset:
            assert [
                repr((path, target, dtypes_of(target))) for path, target in dataset.samples
            ] == wanted
    with CachedDataset.from_cache(cache) as dataset:
        assert [
            repr((path, target, dtypes_of(target))) for path, target in dataset.samples
        ] == wanted


def dtypes_of(targets: Any) -> Any:
    parts = targets if isinstance(targets, (tuple, list)) else [targets]
    return [getattr(part, "dtype", type(part)) for part in parts]


def test_a_skipped_image_takes_its_label_and_id_along(labelled: Path) -> None:
    """With on_error="skip" the other images keep their labels, ids and positions in the manifest."""
    (labelled.parent / "cat" / "001.jpg").write_bytes(b"no image")
    options: dict[str, Any] = {"on_error": "skip"}
    for chosen, targets in (
        ({"label": None}, [0, 2, 3, 4, 5]),
        ({"label": "n", "id": "key"}, [(0, "000"), (0, "002"), (1, "003"), (0, "004"), (1, "005")]),
    ):
        with pytest.warns(FastDataWarning), ImageManifest(labelled, **chosen, **options) as dataset:
            assert dataset.targets == targets


def test_a_list_is_a_manifest(image_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples come in the listed order; relative paths start from the current folder or root=."""
    root = image_folder()
    pairs = [("dog/000.jpg", [0.5, 1.5]), ("cat/001.jpg", [2.5, 3.5])]
    monkeypatch.chdir(root)
    for start in (None, root):
        with ImageManifest(pairs, root=start) as dataset:
            assert dataset.root == (os.getcwd() if start is None else str(root))
            for (image, target), (name, label) in zip(dataset, pairs, strict=True):
                np.testing.assert_array_equal(
                    _pixels(image), _pixels(Image.open(root / name).convert("RGB"))
                )
                assert torch.equal(target, torch.tensor(label))


def test_labels_beyond_int64_are_refused() -> None:
    """No batch can hold them; the error names the item."""
    with pytest.raises(ValueError, match=r"item 1, column 'label': '9223372036854775808' does not"):
        ImageManifest([("a", 1), ("b", 1 << 63)])
    with pytest.raises(ValueError, match=r"item 1, column 'label': .*Overflow"):
        ImageManifest([("a", [1, 2]), ("b", [5, 1 << 63])])


@pytest.mark.parametrize("given", [5, {"file": ["a.jpg"], "label": [1]}], ids=["int", "dict"])
def test_what_is_no_manifest_is_named(given: Any) -> None:
    """The error has the given type, and the types that a manifest may have."""
    with pytest.raises(
        TypeError,
        match=r"the path of a CSV file, a frame or a list of samples, not (an int|a dict)",
    ):
        ImageManifest(given)


@pytest.mark.parametrize("bound", ["short:20", "long:30", "short:500"])
def test_a_bound_only_makes_images_smaller(image_folder: Callable[..., Path], bound: str) -> None:
    """``resize="short:20"`` gives the pixels of Resize(20) for larger images, and does not change others."""
    kind, limit = bound.split(":")
    with ImageFolder(image_folder(size=(60, 25)), resize=bound, storage="shared") as dataset:
        for index, (path, _) in enumerate(dataset.samples):
            whole = Image.open(path).convert("RGB")
            short, long = sorted(whole.size)
            side = short if kind == "short" else long
            sizes = {"short:20": (48, 20), "long:30": (30, 12), "short:500": (60, 25)}
            assert dataset[index][0].size == sizes[bound]
            if side > int(limit):
                whole = whole.resize(sizes[bound], Image.Resampling.BILINEAR)
            assert dataset[index][0].tobytes() == whole.tobytes()


def test_a_malformed_bound_is_refused(image_folder: Callable[..., Path]) -> None:
    """Other strings are refused with examples of valid ones."""
    with pytest.raises(ValueError, match=r"resize='320' is not a size.*\"short:320\""):
        ImageFolder(image_folder(), resize="320")


@pytest.mark.parametrize("storage", ["auto", "shared", "none"])
@pytest.mark.parametrize("transform", [None, v2.Compose(PREPARED)])
def test_before_the_first_read_samples_and_targets_may_be_assigned(
    image_folder: Folder, storage: Any, transform: Any
) -> None:
    """They may be assigned, as in torchvision; after a read it is an error."""
    root = image_folder(classes=("a", "b"), per_class=4)
    theirs = TorchvisionFolder(str(root), transform)
    theirs.samples = theirs.samples[5:1:-1]
    with ImageFolder(root, transform, storage=storage) as ours:
        ours.targets = [9] * 8
        assert list(ours.targets) == [9] * 8
        ours.samples = ours.samples[5:1:-1]
        with pytest.raises(ValueError, match=r"^3 targets were assigned for 4 samples"):
            ours.targets = [7, 7, 7]
        ours.targets = [7, 6, 5, 4]
        assert ours.imgs == [(path, 7 - n) for n, (path, _) in enumerate(theirs.samples)]
        assert len(ours) == 4
        for n, (image, target) in enumerate(DataLoader(ours, batch_size=None)):
            assert np.array_equal(image, theirs[n][0])
            assert target == 7 - n
        for name in ("samples", "imgs", "targets"):
            with pytest.raises(
                AttributeError, match=r"(samples|targets) of this Image.*already read.*Subset"
            ):
                setattr(ours, name, [])
    with pytest.raises(StoreGoneError):
        ours.targets = [1, 2, 3, 4]


def test_targets_may_be_an_array_of_names(image_folder: Folder) -> None:
    """The values of a pandas column of names, an array of objects, are targets like a list of them."""
    with ImageFolder(image_folder(classes=("a", "b"), per_class=1)) as dataset:
        dataset.targets = np.array(["x", "y"], dtype=object)
        assert [target for _, target in dataset] == ["x", "y"]


def test_items_of_lists_are_not_assigned(image_folder: Folder) -> None:
    """Changing these lists in place is refused, with the cure."""
    with ImageFolder(image_folder()) as dataset:
        for name in ("samples", "imgs", "targets"):
            view = getattr(dataset, name)
            with pytest.raises(TypeError, match=r"item cannot be assigned.*dataset\.samples = "):
                view[0] = view[1]
            with pytest.raises(TypeError, match=r"item cannot be deleted.*dataset\.samples = "):
                del view[0]
            with pytest.raises(
                AttributeError, match=r"append\(\) is not available.*dataset\.samples = "
            ):
                view.append(view[0])
            assert not hasattr(view, "anything")
        samples = list(dataset.samples)
        samples[0] = samples[1]
        dataset.samples = samples
        assert dataset[0][0].tobytes() == dataset[1][0].tobytes()


def _red(path: str) -> Image.Image:
    return Image.new("RGB", (6, 5), (len(Path(path).name), 0, 0))


@pytest.mark.parametrize("storage", ["auto", "shared", "none"])
@pytest.mark.parametrize("steps", [[], [v2.CenterCrop(4)]])
def test_before_the_first_read_a_loader_may_be_assigned(
    image_folder: Folder, storage: Any, steps: list[Any]
) -> None:
    """It may be assigned, as in torchvision; after a read it is an error that names the cure."""
    root = str(image_folder())
    transform = v2.Compose([*steps, v2.PILToTensor()])
    theirs = TorchvisionFolder(root, transform)
    with ImageFolder(root, transform if steps else None, storage=storage) as ours:
        theirs.loader = ours.loader = _red
        assert ours.loader is _red
        ours.transform = transform
        (images, labels), *_ = DataLoader(ours, batch_size=6)
        assert torch.equal(images, torch.stack([image for image, _ in theirs]))
        assert labels.tolist() == theirs.targets
        with pytest.raises(AttributeError, match=r"loader of this ImageFolder .* already read"):
            ours.loader = load_image


def test_lists_of_a_dataset_that_was_prepared_are_not_assigned(image_folder: Folder) -> None:
    """If images differ in size, all are prepared at once, and assigning lists is an error with a cure."""
    root = image_folder()
    with ImageFolder(root, v2.Resize(6)) as dataset:
        for name in ("samples", "targets", "loader"):
            words = rf"^{name} of this ImageFolder .* prepared after Resize\(size=\[6.*without transform="
            with pytest.raises(AttributeError, match=words):
                setattr(
                    dataset, name, list(getattr(dataset, name, ())) if name != "loader" else _red
                )
    with ImageFolder(root) as dataset:
        dataset.samples = dataset.samples[:2]
        dataset.transform = v2.Resize(6)
        assert len(dataset) == 2
        assert dataset[1][0].height == 6


class KeepsTargets(torch.utils.data.Dataset[Any]):
    """A wrapper that holds the targets, such as one that draws pairs of one class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.targets = inner.targets

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        image, _ = self.inner[index]
        return image, self.targets[index]


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_a_wrapper_that_keeps_targets_goes_to_other_processes(
    image_folder: Folder, storage: Any
) -> None:
    """It can be pickled, and copies of it are complete."""
    transform = v2.Compose([v2.CenterCrop(4), v2.PILToTensor()])
    with ImageFolder(image_folder(), transform, storage=storage) as inner:
        wrapper = KeepsTargets(inner)
        for copied in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper)):
            assert [label for _, label in copied] == list(inner.targets) == list(copied.targets)
            assert torch.equal(copied[4][0], inner[4][0])
        del copied


def test_a_loader_reads_samples_that_are_assigned_later(image_folder: Folder) -> None:
    """An existing loader reads them in whole batches, with the draws of a loader that is made afterwards."""
    root = image_folder()
    with ImageFolder(root) as early, ImageFolder(root) as late:
        loaders = [DataLoader(early, batch_size=4)]
        for dataset in (early, late):
            dataset.samples = list(dataset.samples) * 2
            dataset.transform = v2.Compose([v2.Resize((9, 9)), v2.RandomCrop(4), v2.ToTensor()])
        loaders.append(DataLoader(late, batch_size=4))
        served = []
        for loader in loaders:
            torch.manual_seed(1)
            served.append([(images.tolist(), labels.tolist()) for images, labels in loader])
        assert served[0] == served[1]


class Kinds:
    """Folders of breeds that belong to fewer classes, as a mixin of an ImageFolder."""

    def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
        return ["animal"], {"cat": 0, "dog": 0}


def test_classes_are_those_that_find_classes_gives(image_folder: Folder) -> None:
    """``classes`` are those of find_classes, as in torchvision; assigned ones are pickled with the dataset."""
    root = str(image_folder())
    theirs = type("Theirs", (Kinds, TorchvisionFolder), {})(root)
    with type("Ours", (Kinds, ImageFolder), {})(root) as ours:
        assert ours.classes == theirs.classes == ["animal"]
        assert ours.class_to_idx == theirs.class_to_idx
        assert ours.targets == theirs.targets
    with ImageFolder(root) as dataset:
        dataset.classes = ["Felis catus", "Canis familiaris"]
        dataset.class_to_idx = {"Felis catus": 0}
        for copied in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
            assert copied.classes == ["Felis catus", "Canis familiaris"]
            assert copied.class_to_idx == {"Felis catus": 0}
            copied.close()
        assert dataset.targets == [0, 0, 0, 1, 1, 1]
