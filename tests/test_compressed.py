"""Datasets with encoded samples, and samples of several parts."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from children import send_class_of_target
from conftest import shown
from fastdata import CachedDataset, DataLoader, ImageFolder, collate
from fastdata.errors import MemoryBudgetError, SampleError
from fastdata.stores.codecs import JpegCodec

Folder = Callable[..., Path]
LOSSLESS = ["source", "lz4", "zstd"]
OWN_STEP = [v1.RandomCrop(5), v1.Lambda(lambda image: np.asarray(image).copy())]
"""Runs as written: in worker processes from generators of their own."""
TRANSFORMS = [
    [v1.PILToTensor()],
    [v1.RandomCrop(5), v1.PILToTensor()],
    [
        v1.RandomCrop(5),
        v1.RandomHorizontalFlip(),
        v1.ToTensor(),
        v1.Normalize([0.5] * 3, [0.2] * 3),
    ],
    [v1.RandomResizedCrop(4), v1.ToTensor()],
    OWN_STEP,
]


def _batches(dataset: Any, **options: Any) -> list[torch.Tensor]:
    return [images for images, _ in DataLoader(dataset, batch_size=4, **options)]


@pytest.mark.parametrize(
    ("steps", "num_workers"),
    [
        (steps, workers)
        for steps in TRANSFORMS
        for workers in (0, 2)
        if steps is not OWN_STEP or not workers
    ],
)
@pytest.mark.parametrize("codec", LOSSLESS)
def test_a_lossless_codec_changes_no_pixel(
    image_folder: Folder, codec: str, steps: Any, num_workers: int
) -> None:
    """Batches and single samples equal those of the raw store, whatever transform runs on them."""
    root = image_folder(per_class=5, size=(13, 11))
    transform = v1.Compose([v1.Resize((7, 9)), *steps])
    with (
        ImageFolder(
            root,
            transform,
            storage="shared",
        ).prepare() as raw,
        ImageFolder(root, transform, storage="compressed", codec=codec) as ours,
    ):
        assert (ours.storage, ours.storage_plan.codec) == ("compressed", codec)
        torch.manual_seed(0)
        expected = _batches(raw)
        torch.manual_seed(0)
        assert all(map(torch.equal, _batches(ours, num_workers=num_workers), expected))
        raw.set_epoch(5)
        ours.set_epoch(5)
        torch.manual_seed(0)
        one = torch.as_tensor(raw[3][0])
        torch.manual_seed(0)
        assert torch.equal(torch.as_tensor(ours[3][0]), one)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_samples_of_many_shapes_are_kept(image_folder: Folder, codec: str) -> None:
    """Images of several sizes come back complete one by one, and as batches of crops."""
    root = image_folder(classes=("a",), per_class=4, size=(12, 10))
    image_folder(classes=("b",), per_class=4, size=(9, 14))
    transform = v1.Compose([v1.RandomCrop(8), v1.PILToTensor()])
    with (
        ImageFolder(root, transform, seed=0) as raw,
        ImageFolder(root, transform, storage="compressed", codec=codec, seed=0) as ours,
    ):
        assert all(map(torch.equal, _batches(raw), _batches(ours)))
        ours.transform = raw.transform = None
        assert all(np.array_equal(np.asarray(ours[i][0]), np.asarray(raw[i][0])) for i in range(8))
        assert {ours[i][0].size for i in range(8)} == {(12, 10), (9, 14)}


@pytest.mark.parametrize("size", [(3, 3), (1, 1), (4, 7)])
def test_narrow_images_keep_their_axes(tmp_path: Path, size: tuple[int, int]) -> None:
    """Planes that are as narrow as an image has channels are not read as (H, W, C)."""
    (tmp_path / "a").mkdir()
    width, height = size
    image = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    Image.fromarray(image).save(tmp_path / "a" / "0.png")
    with ImageFolder(tmp_path, v1.PILToTensor(), storage="compressed", codec="source") as ours:
        assert np.array_equal(ours[0][0].permute(1, 2, 0), image)


@pytest.mark.parametrize("steps", TRANSFORMS[1:4])
@pytest.mark.parametrize("options", [{"codec": "jpeg", "resize": (40, 57)}, {"codec": "source"}])
def test_a_crop_of_stored_jpeg_is_that_of_the_whole(
    image_folder: Folder, options: dict[str, Any], steps: Any
) -> None:
    """Only the box is decoded, in memory and on disk, and the batch equals that of the decoded samples."""
    root = image_folder(per_class=5, size=(73, 51))
    Image.new("L", (60, 44), 9).save(root / "cat" / "gray.jpg")
    Image.new("CMYK", (60, 44), (9, 99, 3, 40)).save(root / "cat" / "inks.jpg")
    kept: dict[str, Any] = {"storage": "compressed", **options}
    on_disk = kept | {"storage": "disk", "cache_dir": root.parent / "cache"}
    with (
        ImageFolder(root, **kept) as whole,
        ImageFolder(root, v1.Compose(steps), **on_disk) as disk,
    ):
        decoded = [(image, 0) for image, _ in whole]
        raw = CachedDataset(decoded, transform=v1.Compose(steps))
        with raw, whole.with_transform(v1.Compose(steps)) as ours:
            for dataset in (ours, disk):
                torch.manual_seed(0)
                found = _batches(dataset)
                torch.manual_seed(0)
                expected = _batches(raw)
                assert all(map(torch.equal, found, expected))


def test_jpeg_is_close_and_called_lossy(image_folder: Folder) -> None:
    """The lossy codec changes smooth images by a few levels, and the storage plan calls it lossy."""
    root = image_folder(size=(64, 48))
    transform = v1.Compose([v1.Resize((48, 64)), v1.PILToTensor()])
    with (
        ImageFolder(root, transform) as raw,
        ImageFolder(root, transform, storage="compressed", codec=JpegCodec(quality=90)) as ours,
    ):
        assert "codec='jpeg', lossy" in ours.storage_plan.reason
        difference = (raw[1][0].int() - ours[1][0].int()).abs()
        assert 0 < difference.max() < 12


def test_workers_get_a_handle_of_the_encoded_samples(image_folder: Folder) -> None:
    """A pickled dataset is small, and its copy reads the same samples."""
    transform = v1.Compose([v1.Resize((48, 64)), v1.PILToTensor()])
    with ImageFolder(
        image_folder(per_class=9, size=(64, 48)),
        transform,
        storage="compressed",
        codec="zstd",
    ) as dataset:
        data = pickle.dumps(dataset)
        assert len(data) < 3000
        with pickle.loads(data) as copy:
            assert torch.equal(copy[5][0], dataset[5][0])


class Half:
    """A user's codec that stores the upper four bits of each byte."""

    name = "half"
    lossless = False

    def encode(self, sample: np.ndarray) -> bytes:
        if sample.dtype != np.uint8:
            raise ValueError("it halves bytes")
        return (sample >> 4).tobytes()

    def decode(self, data: memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(data, np.uint8).reshape(out.shape) << 4


def test_a_users_own_codec_is_used() -> None:
    """Any object with encode and decode works, with its own name and lossless flag."""
    samples = [(np.full((2, 3), i * 16 + 5, np.uint8), i) for i in range(5)]
    with CachedDataset(samples, storage="compressed", codec=Half()) as dataset:
        assert [int(dataset[i][0][0, 0]) for i in range(5)] == [i * 16 for i in range(5)]
        assert "codec='half', lossy" in dataset.storage_plan.reason


DTYPES = ["uint8", "bool", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("codec", ["auto", "lz4", "zstd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_and_shape_comes_back_bit_for_bit(dtype: str, codec: str) -> None:
    """Volumes, masks and tables of all types, also ragged ones, are equal after encoding."""
    random = np.random.default_rng(0)
    shapes = [(3, 5, 6), (2, 4, 6), (1, 5, 7)]
    arrays = [
        random.integers(0, 2, shapes[i % 3]).astype(dtype) * np.array(i + 1).astype(dtype)
        for i in range(12)
    ]
    with CachedDataset([(a, 0) for a in arrays], storage="compressed", codec=codec) as dataset:
        for index, array in enumerate(arrays):
            read, _ = dataset[index]
            assert read.dtype == array.dtype
            assert read.tobytes() == array.tobytes()
            assert read.flags.writeable


# Pairs


def _mask(index: int, size: tuple[int, int] = (6, 5)) -> Image.Image:
    return Image.fromarray(np.full(size[::-1], index % 7, np.uint8))


def _photo(index: int, size: tuple[int, int] = (6, 5)) -> Image.Image:
    return Image.fromarray(np.full((*size[::-1], 3), index, np.uint8))


@pytest.mark.parametrize(
    "options",
    [
        {"storage": "shared"},
        {"storage": "compressed"},
        {"storage": "compressed", "codec": ("jpeg", "lz4")},
        {"storage": "none"},
    ],
    ids=shown,
)
def test_an_image_and_its_mask_come_back(options: Any) -> None:
    """An image as target is stored like the sample and returned in its form; their sizes may differ."""
    pairs = [(_photo(i, (6 + i % 2, 5)), _mask(i, (6 + i % 2, 5))) for i in range(9)]
    with CachedDataset(pairs, **options) as dataset:
        for index, (photo, mask) in enumerate(pairs):
            got_photo, got_mask = dataset[index]
            assert np.array_equal(np.asarray(got_photo), np.asarray(photo))
            assert got_mask.mode == "L"
            assert np.array_equal(np.asarray(got_mask), np.asarray(mask))


def test_samples_may_be_tuples() -> None:
    """A sample ((image, mask), label) comes back with both parts and the label."""
    items = [((_photo(i), np.full((5, 6), i, np.int64)), i) for i in range(9)]
    with CachedDataset(items, storage="compressed") as dataset:
        (photo, mask), label = dataset[4]
        assert photo.getpixel((0, 0)) == (4, 4, 4)
        assert mask.dtype == np.int64
        assert int(mask[0, 0]) == label == 4


def test_masks_that_are_tensors_are_served_in_batches() -> None:
    """Images and masks of one shape are read in whole batches, stacked as default_collate does."""
    items = [(torch.full((3, 8, 8), i, dtype=torch.uint8), torch.full((8, 8), i)) for i in range(9)]
    with CachedDataset(items, storage="compressed") as dataset:
        loader = DataLoader(dataset, batch_size=4)
        images, masks = next(iter(loader))
        assert loader.report().path.startswith("whole batches")
        assert torch.equal(masks, torch.stack([mask for _, mask in items[:4]]))
        assert torch.equal(images, torch.stack([image for image, _ in items[:4]]))


def test_joint_transforms_get_image_and_mask() -> None:
    """transforms= is called with both, as in torchvision, and turns whole batches off."""
    items = [(_photo(i), _mask(i)) for i in range(9)]

    def flip(image: Image.Image, mask: Image.Image) -> tuple[Any, Any]:
        return np.asarray(image)[:, ::-1].copy(), np.asarray(mask)[:, ::-1].copy()

    with CachedDataset(items, transforms=flip) as dataset:
        image, mask = dataset[3]
        assert image.shape == (5, 6, 3)
        assert mask.shape == (5, 6)
        assert "several parts" in (dataset.reader().obstacle or "")
    with pytest.raises(ValueError, match="transforms= is called with sample and target together"):
        CachedDataset(items, transforms=flip, transform=flip)


class _Segmentation(list[Any]):
    """Random pixels: (image, mask), or ((image, mask), label) with a list of the labels; sizes may differ."""

    def __init__(self, kind: Any, *, labelled: bool = False, sizes: int = 1) -> None:
        draw = np.random.default_rng(0).integers
        for i in range(6):
            size = (9, 8 + i % sizes)
            image, mask = (
                draw(256, size=(*size, 3), dtype=np.uint8),
                tv_tensors.Mask(draw(5, size=size)),
            )
            photo = Image.fromarray(image)
            if kind is tv_tensors.Image:
                photo = v2.functional.to_image(photo)
            self.append(((photo, mask), i) if labelled else (photo, mask))
        self.targets = list(range(6))


KEPT = [
    {"storage": "shared"},
    {"storage": "compressed", "codec": "lz4"},
    {"storage": "compressed", "codec": ("zstd", "lz4")},
    {"storage": "disk", "cache_key": "masks"},
    {"storage": "none"},
]


@pytest.mark.parametrize("sizes", [1, 2], ids=["dense", "ragged"])
@pytest.mark.parametrize("kind", [Image.Image, tv_tensors.Image])
@pytest.mark.parametrize("options", KEPT, ids=shown)
def test_masks_stay_in_step_with_their_images(
    options: Any, kind: Any, sizes: int, tmp_path: Path
) -> None:
    """Joint transforms of torchvision have the same effect on stored images and masks as without fastdata."""
    items = _Segmentation(kind, sizes=sizes)
    options = options | ({"cache_dir": tmp_path} if options["storage"] == "disk" else {})
    to_float = v2.ToDtype(
        {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64}, scale=True
    )
    joint = v2.Compose(
        [v2.RandomHorizontalFlip(1.0), v2.RandomResizedCrop(4), v2.ToImage(), to_float]
    )
    for _ in range(2):  # the second finds the cache
        with CachedDataset(items, transforms=joint, **options) as dataset:
            for index, pair in enumerate(items):
                torch.manual_seed(index)
                wanted = joint(*pair)
                torch.manual_seed(index)
                found = dataset[index]
                assert [type(part) for part in found] == [tv_tensors.Image, tv_tensors.Mask]
                assert [part.dtype for part in found] == [torch.float32, torch.int64]
                assert all(map(torch.equal, found, wanted))


def test_parts_keep_their_class() -> None:
    """A transform per sample gets torchvision's classes for image and mask, on the first read and later."""
    items = _Segmentation(tv_tensors.Image, labelled=True)
    flip = v2.RandomHorizontalFlip(1.0)
    with CachedDataset(items, transform=flip) as dataset:
        for _ in range(2):
            for index, (pair, label) in enumerate(items):
                found, target = dataset[index]
                assert all(map(torch.equal, found, flip(pair)))
                assert [type(part) for part in found] == [tv_tensors.Image, tv_tensors.Mask]
                assert target == label


def test_an_image_tensor_is_torchvisions_behind_a_prepared_step_and_a_batch_op(
    tmp_path: Path,
) -> None:
    """After ToImage, a prepared resize and a batch flip, the user's step gets a tv_tensors.Image."""
    seen: list[type] = []

    def look(image: Any) -> Any:
        seen.append(type(image))
        return image

    (tmp_path / "images" / "one").mkdir(parents=True)
    Image.new("RGB", (9, 8)).save(tmp_path / "images" / "one" / "0.png")
    geometry = [v2.ToImage(), v2.Resize((4, 4))]
    for steps in (
        [*geometry, look],
        [*geometry, v2.RandomHorizontalFlip(), look],
        [v2.ToImage(), look],
    ):
        for options in (
            {"storage": "shared"},
            {"storage": "compressed", "codec": "source"},
            {"cache_dir": tmp_path},
        ):
            with ImageFolder(tmp_path / "images", v2.Compose(steps), **options) as dataset:
                dataset[0]
    assert set(seen) == {tv_tensors.Image}


@pytest.mark.filterwarnings("ignore:transform= gets the image only")
def test_a_collate_function_gets_torchvisions_tensors() -> None:
    """Samples in the list have the classes of single samples; default_collate stacks them to a plain tensor."""
    items = _Segmentation(tv_tensors.Image)
    with CachedDataset(items, transform=v2.RandomHorizontalFlip(1.0)) as dataset:
        loader = DataLoader(dataset, batch_size=2, collate_fn=list)
        kinds = {type(part) for batch in loader for pair in batch for part in pair}
        assert kinds == {tv_tensors.Image, tv_tensors.Mask}
        assert {type(part) for batch in DataLoader(dataset, batch_size=2) for part in batch} == {
            torch.Tensor
        }


def test_boxes_keep_format_and_canvas_as_targets(tmp_path: Path) -> None:
    """Boxes as targets flip with their image, alone or in a dict; an op that would lose their canvas is refused."""
    boxes = tv_tensors.BoundingBoxes([[0, 1, 2, 3]], format="XYWH", canvas_size=(5, 6))
    flip = v2.RandomHorizontalFlip(1.0)
    for target in (boxes, {"boxes": boxes, "label": 3}):
        pair = (_photo(1), target)
        with CachedDataset([pair], transforms=flip) as dataset:
            found, wanted = (
                each if target is boxes else each["boxes"]
                for each in (dataset[0][1], flip(*pair)[1])
            )
            assert repr(found) == repr(wanted)
        with pytest.raises(
            ValueError, match=r"cache_dir= can store targets that are .* It found .*BoundingBoxes"
        ):
            CachedDataset([pair], cache_dir=tmp_path, cache_key="boxes")
    with pytest.raises(
        SampleError, match=r"a BoundingBoxes cannot be stored .* Return it as the target"
    ):
        CachedDataset([((_photo(1), boxes), 3)])


def test_another_process_imports_the_classes_of_samples() -> None:
    """A mask keeps its class in a process that has only unpickled the dataset."""
    context = multiprocessing.get_context("forkserver")
    with CachedDataset(_Segmentation(tv_tensors.Image)) as dataset:
        connection, theirs = context.Pipe()
        process = context.Process(target=send_class_of_target, args=(pickle.dumps(dataset), theirs))
        process.start()
        theirs.close()
        assert connection.recv() == "Mask"
        process.join()
        process.close()
        connection.close()


def test_lz4_batches_name_the_damaged_sample() -> None:
    """The error names the damaged sample, wherever it is in the batch."""
    samples = [(np.full((4, 50), i, np.uint8), i) for i in range(9)]
    with CachedDataset(samples, storage="compressed", codec="lz4") as dataset:
        batch = collate(dataset.__getitems__([8, 0, 3]))[0]
        assert batch[:, 0, 0].tolist() == [8, 0, 3]
        _spoil(dataset, 5)
        with pytest.raises(SampleError, match=r"sample 5 cannot be read: .* bytes of codec"):
            dataset.__getitems__([1, 2, 5, 6])


# What is refused


@pytest.mark.parametrize(
    ("samples", "codec", "reason"),
    [
        ([(np.zeros((3, 5, 6), np.float32), 0)], "jpeg", r"jpeg: .*images of uint8"),
        ([(np.zeros((5, 6), np.uint8), 0)], "jpeg", r"jpeg: .*labels"),
        (
            [(np.zeros((3, 5, 6), np.uint8), np.zeros((5, 6), np.uint8))],
            "jpeg",
            r"jpeg: .*labels",
        ),
        ([(np.zeros((3, 5, 6), np.uint8), 0)], "source", r"source: samples are not files"),
        ([(np.zeros((3, 5, 6), np.float32), 0)], Half(), r"half: it halves bytes"),
    ],
)
def test_a_codec_that_would_harm_is_refused_with_the_reason(
    samples: Any, codec: Any, reason: str
) -> None:
    """Lossy codecs for masks and wide values, and unusable codecs, are errors before anything is stored."""
    with pytest.raises(ValueError, match=reason):
        CachedDataset(samples * 3, storage="compressed", codec=codec)


@pytest.mark.parametrize(
    ("codec", "problem"),
    [
        ("lzma", "codec='lzma' is neither one of 'auto', 'source', 'lz4'"),
        (7, "codec=7 is neither one of"),
        (("lz4", "lz4"), "2 codecs, but .* 1 parts"),
    ],
)
def test_a_wrong_codec_is_named(codec: Any, problem: str) -> None:
    """Misspelt names, objects without the methods, and tuples of the wrong length raise an error that shows them."""
    with pytest.raises((ValueError, TypeError), match=problem):
        CachedDataset([(np.zeros(3, np.uint8), 0)] * 3, storage="compressed", codec=codec)


def test_a_users_own_loader_cannot_store_files(image_folder: Folder) -> None:
    """codec='source' is refused with a user's loader, because it has to decode bytes itself."""
    with pytest.raises(ValueError, match="your own loader= opens them"):
        ImageFolder(
            image_folder(),
            loader=Image.open,
            storage="compressed",
            codec="source",
        ).prepare()


# Damage


def _spoil(dataset: Any, index: int) -> None:
    """Overwrite a sample's bytes in the sealed block, as a memory fault would."""
    store = dataset.reader().kept.images
    data = np.array(store._bytes[0])
    start, size = int(store._offsets[index]), int(store._sizes[index])
    data[start : start + size] = 255
    store._bytes = [data]


@pytest.mark.parametrize("codec", ["source", "lz4", "zstd", "jpeg"])
def test_a_damaged_sample_is_named_and_only_it_is_refused(image_folder: Folder, codec: str) -> None:
    """Batches without the damaged sample can be read; batches with it raise an error with its path and index."""
    transform = v1.Compose([v1.Resize((16, 16)), v1.PILToTensor()])
    with ImageFolder(
        image_folder(per_class=4, size=(20, 18)),
        transform,
        storage="compressed",
        codec=codec,
    ) as dataset:
        _spoil(dataset, 5)
        with pytest.raises(
            SampleError, match=r"sample 5, .*dog.001\.jpg, cannot be read"
        ) as caught:
            dataset.__getitems__([1, 5, 2])
        assert (caught.value.index, Path(caught.value.path or "").name) == (5, "001.jpg")
        with pytest.raises(SampleError, match="sample 5"):
            dataset[5]
        assert len(dataset.__getitems__([1, 2, 6])) == 3


def test_a_damaged_file_is_found_by_eager_filling_unless_files_are_kept(
    image_folder: Folder,
) -> None:
    """Encoding opens every file. Storing files does not, and the damaged one is named when it is read."""
    root = image_folder(per_class=30)
    (root / "cat" / "001.jpg").write_bytes(b"\xff\xd8\xff nonsense")
    with pytest.raises(SampleError, match=r"sample 1, .*001\.jpg"):
        ImageFolder(root, v1.Resize((5, 6)), storage="compressed", codec="zstd")
    with pytest.raises(SampleError, match=r"sample 1, .*001\.jpg"):
        ImageFolder(root, v1.Resize(5), storage="compressed", codec="source")
    with ImageFolder(root, v1.Resize((5, 6)), storage="compressed", codec="source") as dataset:
        with pytest.raises(
            SampleError, match=r"sample 1, .*001\.jpg, cannot be read: .*Delete or replace the file"
        ):
            dataset[1]
        assert dataset[2][0].size == (6, 5)


# Memory


def _noise(count: int, sizes: Callable[[int], int]) -> list[tuple[np.ndarray, int]]:
    random = np.random.default_rng(0)
    return [(random.integers(0, 256, sizes(i), dtype=np.uint8), 0) for i in range(count)]


def _late_large(index: int) -> int:
    """Return sizes of 101 samples. Two are large, and neither of these is probed."""
    return 1_000_000 + index if index in (2, 52) else 10 + index % 5


def test_running_out_during_a_fill_says_what_would_fit() -> None:
    """If samples are larger than the probed ones, the error has a cure, and nothing is left."""
    samples = _noise(101, _late_large)
    with pytest.raises(
        MemoryBudgetError, match=r"codec='lz4' need more than the .* free\. Use .*storage='none'"
    ):
        CachedDataset(samples, storage="compressed", codec="lz4", memory_limit="1MiB")
    with pytest.raises(
        MemoryBudgetError,
        match=r"many shapes need more than the 1\.0 MiB that are free\. Use .*codec=",
    ):
        CachedDataset(samples, storage="shared", memory_limit="1MiB")


def test_auto_goes_on_to_the_next_storage_when_it_runs_out() -> None:
    """Samples that turn out not to fit raw are compressed; if they do not fit compressed, they are not stored."""
    zeros = [(np.zeros(_late_large(i), np.uint8), 0) for i in range(101)]
    with CachedDataset(zeros, memory_limit="1MiB") as dataset:
        assert dataset.storage == "compressed"
        assert dataset[52][0].size == 1_000_052
    with pytest.warns(UserWarning, match="storage='none'"):
        dataset = CachedDataset(_noise(101, _late_large), memory_limit="1MiB")
    with dataset:
        assert dataset.storage == "none"
        assert dataset[52][0].size == 1_000_052


def test_a_report_has_the_results_of_each_codec(image_folder: Folder) -> None:
    """Names, ratios and reasons are those of the data, also if the dataset no longer has its source."""
    transform = v1.Compose([v1.Resize((48, 64)), v1.PILToTensor()])
    with ImageFolder(image_folder(size=(64, 48)), transform) as dataset:
        report = dataset.storage_report()
        assert [trial.codec for trial in report.trials] == ["source", "lz4", "zstd", "jpeg"]
        assert all(trial.obstacle is None and trial.ratio > 1 for trial in report.trials)
        assert report.raw_bytes == 6 * 3 * 48 * 64
    masks = [(np.zeros((50, 60), np.int32), 0)] * 9
    with CachedDataset(masks, codec=Half()) as cached:
        trials = {trial.codec: trial for trial in cached.storage_report().trials}
        assert trials["lz4"].ratio > 20
        assert "images of uint8" in str(trials["jpeg"].obstacle)
        assert trials["source"].obstacle == "samples are not files, or your own loader= opens them"
        assert trials["half"].obstacle == "it halves bytes"


def test_a_forecast_of_pairs_counts_both_parts() -> None:
    """The needed bytes are those of images and masks together."""
    pairs = [(np.zeros((3, 4), np.uint8), np.zeros((4, 4), np.int32))] * 5
    with CachedDataset(pairs, storage="none") as dataset:
        report = dataset.storage_report()
        assert report.raw_bytes == 5 * (12 + 64)


@pytest.mark.parametrize("storage", ["shared", "compressed"])
def test_samples_without_dimensions_are_read(storage: Any) -> None:
    """A sample that is a single number can be read, in batches and alone."""
    data = [(torch.tensor(i), i) for i in range(9)]
    with CachedDataset(data, storage=storage) as dataset:
        assert [sample.item() for sample, _ in dataset] == list(range(9))
        assert dataset.__getitems__([5, 7]).stacked[0].tolist() == [5, 7]
