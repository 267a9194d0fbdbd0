"""``memory_format=torch.channels_last``: batches have the values of planar ones, and the core writes them directly."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate
from torchvision.transforms import v2

from data import ArrayStore, Stream
from fastdata import CachedDataset, CudaPrefetcher, DataLoader, ImageFolder, RingCollate
from fastdata.pixels.program import Program
from fastdata.pixels.split import split_transform
from test_transforms import images

pytestmark = pytest.mark.usefixtures("levels_agree")  # pixels of all levels of instruction sets

LAST = torch.channels_last
DTYPES = [torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64]
ENGINES: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "workers": "process"},
]
WINDOW = (v2.RandomCrop((15, 17), (1, 3)), v2.RandomHorizontalFlip(), v2.RandomVerticalFlip())


class Images(Dataset[Any]):
    """19 of 16 x 18 pixels."""

    def __init__(self, channels: int = 3) -> None:
        rng = np.random.default_rng(channels)
        self.pixels = torch.from_numpy(rng.integers(0, 256, (19, channels, 16, 18), np.uint8))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Any:
        return self.pixels[index], index


def prepared(*steps: Any, channels: int = 3) -> CachedDataset:
    return CachedDataset(Images(channels), transform=v2.Compose(steps), seed=5, storage="shared")


def floats(dtype: torch.dtype, channels: int) -> list[Any]:
    if dtype is torch.uint8:
        return []
    return [v2.ToDtype(dtype, scale=True), v2.Normalize([0.45] * channels, [0.2] * channels)]


def check(make: Callable[..., Any]) -> None:
    """Assert that the batches of ``make(memory_format=LAST)`` are those of ``make()``, in that format."""
    planar, last = list(make()), list(make(memory_format=LAST))
    assert len(planar) == len(last) > 0
    for wanted, found in zip(planar, last, strict=True):
        assert torch.equal(found[0], wanted[0])
        assert found[0].dtype == wanted[0].dtype
        assert torch.equal(found[1], wanted[1])
        assert found[0].is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_loaders(channels: int, engine: dict[str, Any]) -> None:
    """Batches of all dtypes have the format, read in the training loop, by threads and by worker processes."""
    for dtype in DTYPES:
        dataset = prepared(*WINDOW, *floats(dtype, channels), channels=channels)
        check(lambda dataset=dataset, **given: DataLoader(dataset, 8, **given, **engine))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_core_writes_channels_last(dtype: torch.dtype, channels: int) -> None:
    """The values are those of planar memory, also in wide rows, which are converted in parts, and after erasing."""
    ends = floats(dtype, channels)
    if ends:
        ends += [v2.RandomErasing(1.0, value=0.5), v2.RandomErasing(0.5, value="random")]
    for width in (1, 5, 40, 5000):
        store = ArrayStore(images(3, (12, width), channels=channels), "tensor")
        steps = (v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), *ends)
        plan = split_transform(steps, form="tensor", channels=channels, prepared=0)
        program = Program(plan.batch_ops, store.spec)
        output = program.output(store.spec.shape)
        assert output is not None
        planar = np.empty((3, *output[0]), output[1])
        last = np.empty((3, 12, width, channels), output[1]).transpose(0, 3, 1, 2)
        for out in (planar, last):
            program.run(store, np.arange(3), 0, 0, out)
        assert np.array_equal(planar.view(np.uint8), np.ascontiguousarray(last).view(np.uint8))


def test_one_channel_becomes_three() -> None:
    """Normalize with three means widens a grey image, channels last too."""
    dataset = prepared(v2.ToDtype(torch.float32), v2.Normalize([1, 2, 3], [1, 2, 4]), channels=1)
    check(lambda **given: DataLoader(dataset, 8, **given))


@pytest.mark.filterwarnings("ignore:samples are read one by one")
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_what_is_not_served_whole_is_converted(engine: dict[str, Any]) -> None:
    """Batches that torch or the user makes are converted: own steps, a collate_fn, other datasets, streams."""
    own = prepared(*WINDOW, v2.Lambda(lambda image: image.flip(-1)))
    datasets = [own, prepared(*WINDOW), CachedDataset(Images()), Images(), Stream(Images())]
    for dataset in datasets:
        check(lambda dataset=dataset, **given: DataLoader(dataset, 8, **given, **engine))
    for collate_fn in (default_collate, RingCollate(default_collate)):
        check(
            lambda it=collate_fn, **given: DataLoader(
                datasets[1], 8, collate_fn=it, **given, **engine
            )
        )


def test_subsets_and_joined_datasets() -> None:
    """Subsets and joined datasets give the format, also for samples that come from the store unchanged."""
    crop = v2.RandomCrop((16, 18))
    as_stored = CachedDataset(Images())
    parts = [prepared(crop), prepared(v2.RandomHorizontalFlip()), as_stored]
    for dataset in (Subset(parts[0], [3, 1, 2]), ConcatDataset(parts[:2]), ConcatDataset(parts)):
        check(lambda dataset=dataset, **given: DataLoader(dataset, 8, **given))


def test_prefetchers_keep_the_format_of_their_loader() -> None:
    """A prefetcher on the CPU keeps the format, and so does a loader that was pickled."""
    dataset = prepared(*WINDOW, *floats(torch.float32, 3))
    loader = DataLoader(dataset, 8, memory_format=LAST)
    assert loader.memory_format is LAST
    check(lambda **given: CudaPrefetcher(DataLoader(dataset, 8, **given), device="cpu"))
    shown = next(iter(pickle.loads(pickle.dumps(DataLoader(Images(), 2, memory_format=LAST)))))
    assert shown[0].is_contiguous(memory_format=LAST)


def test_another_format_is_refused() -> None:
    """A memory format other than the two of image batches is an error that names those."""
    with pytest.raises(
        ValueError, match=r"memory_format=torch\.channels_last_3d is not one of torch\.contiguous"
    ):
        DataLoader(Images(), memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("step", [v2.RandomGrayscale(0.5), v2.RandomHorizontalFlip(0.5)])
def test_files_that_are_served_whole(step: Any, tmp_path: Path) -> None:
    """A stored JPEG that no step changes is decoded directly to its place in a channels_last batch."""
    rng = np.random.default_rng(0)
    (tmp_path / "images" / "class").mkdir(parents=True)
    for number in range(16):
        image = Image.fromarray(rng.integers(0, 256, (20, 24, 3)).astype(np.uint8))
        image.save(tmp_path / "images" / "class" / f"{number:02}.png")
    transform = v2.Compose([step, v2.PILToTensor()])
    kept = {"cache_dir": tmp_path / "cache", "codec": "jpeg"}
    with ImageFolder(tmp_path / "images", transform, seed=5, **kept) as dataset:
        planar = DataLoader(dataset, 8)
        for (served, _), (wanted, _) in zip(
            DataLoader(dataset, 8, memory_format=LAST), planar, strict=True
        ):
            assert served.is_contiguous(memory_format=LAST)
            assert torch.equal(served, wanted)
