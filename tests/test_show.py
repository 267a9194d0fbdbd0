"""What datasets, loaders and reports show in a notebook: images, tables and bars."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastdata import CachedDataset, DataLoader, Views
from fastdata.loaders.buckets import BucketSampler
from fastdata.loaders.samplers import RankSampler
from fastdata.report import EpochReport
from fastdata.tools.__main__ import main
from fastdata.tools.diagnose import Diagnosis

pytest.importorskip("matplotlib")
torchvision = pytest.importorskip("torchvision")
T = torchvision.transforms
v2 = pytest.importorskip("torchvision.transforms.v2")

NORMALIZE = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
LAST = [T.ToTensor(), T.Normalize(*NORMALIZE)]
LAST_OF_V2 = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*NORMALIZE)]


class Colours:
    """Images of one colour each, with a class."""

    classes = ("red", "green", "blue")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        colour = [0, 0, 0]
        colour[index % 3] = 200
        return Image.new("RGB", (8, 8), tuple(colour)), index % 3


def shown(figure: Any) -> tuple[list[np.ndarray], list[str]]:
    """Return the images and titles of a figure, after it was drawn."""
    assert figure._repr_png_().startswith(b"\x89PNG")
    images = [axis.images[0].get_array() for axis in figure.axes if axis.images]
    return images, [axis.get_title() for axis in figure.axes if axis.get_title()]


@pytest.mark.parametrize("last", [LAST, LAST_OF_V2], ids=["v1", "v2"])
def test_images_are_shown_before_normalize_with_their_classes(last: list[Any]) -> None:
    with CachedDataset(Colours(), transform=T.Compose([T.RandomCrop(6), *last])) as dataset:
        before = torch.get_rng_state()
        images, titles = shown(dataset.show(4))
        assert torch.equal(torch.get_rng_state(), before)
        assert titles == ["red", "green", "green", "blue"]  # of samples 0, 4, 7 and 11
        np.testing.assert_allclose(images[0][2, 2], [200 / 255, 0, 0], atol=1e-6)
        assert images[0].shape == (6, 6, 3)


def test_views_and_masks_are_shown_side_by_side() -> None:
    transform = T.Compose([T.RandomHorizontalFlip(), *LAST])
    with CachedDataset(Colours(), transform=Views(transform, transform)) as dataset:
        images, titles = shown(dataset.show(3))
        assert (len(images), len(titles)) == (6, 3)
        np.testing.assert_allclose(images[1][0, 0], [200 / 255, 0, 0], atol=1e-6)
    items = [{"image": torch.zeros(3, 4, 4), "mask": torch.ones(4, 4), "name": "x"}] * 3
    with CachedDataset(items) as dataset:
        images, titles = shown(dataset.show(2))
        assert [image.shape for image in images] == [(4, 4, 3), (4, 4)] * 2
        assert titles == ["x", "x"]


def test_a_loader_shows_a_batch_and_is_left_alone() -> None:
    order = torch.Generator().manual_seed(4)
    with CachedDataset(Colours(), transform=T.Compose(LAST)) as dataset:
        loader = DataLoader(dataset, batch_size=5, shuffle=True, generator=order, num_workers=1)
        state = order.get_state()
        images, titles = shown(loader.show(3))
        assert torch.equal(order.get_state(), state)
        assert loader.report().batches == 0
        _, labels = next(iter(loader))
        assert titles == [dataset.classes[label] for label in labels[:3]]
        assert len(images) == 3


@pytest.mark.parametrize("is_batched", [False, True])
def test_showing_a_batch_leaves_the_order_of_ranks_alone(is_batched: bool) -> None:
    """The first epoch after ``show`` is the one that would have come without it."""

    def loader_of(dataset: CachedDataset) -> DataLoader[Any]:
        if is_batched:
            return DataLoader(dataset, batch_sampler=BucketSampler(dataset, 5))
        return DataLoader(dataset, 5, sampler=RankSampler(dataset, rank=0, world_size=1))

    def epoch_of(loader: DataLoader[Any]) -> list[list[int]]:
        return [labels.tolist() for _, labels in loader]

    with CachedDataset(Colours(), transform=T.Compose(LAST)) as dataset:
        expected = epoch_of(loader_of(dataset))
        loader = loader_of(dataset)
        loader.show(3)
        assert epoch_of(loader) == expected


def test_a_loader_with_a_timeout_shows_a_batch() -> None:
    """A timeout is for workers, and the batch is read without them."""
    loader = DataLoader([(torch.zeros(3, 4, 4), 0)], num_workers=1, timeout=9, workers="process")
    images, _ = shown(loader.show(1))
    assert len(images) == 1


def test_what_has_no_image_cannot_be_shown() -> None:
    with pytest.raises(ValueError, match="no image can be shown"):
        DataLoader([1, 2, 3], batch_size=2).show()


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with CachedDataset(Colours()) as dataset, pytest.raises(ImportError, match="pip install matp"):
        dataset.show()


def test_notebooks_show_the_plan_as_a_table() -> None:
    steps = T.Compose([T.Resize(6), T.RandomCrop(4), T.Lambda(lambda image: image), *LAST])
    with CachedDataset(Colours(), transform=steps) as dataset:
        html = dataset._repr_html_()
        assert '>once per image</th><th style="text-align:left">on whole batches</th>' in html
        assert ">Resize(size=6" in html
        assert "&lt;lambda&gt; (test_show.py, line " in html
        assert "DataLoader of CachedDataset: 4 batches" in DataLoader(dataset, 3)._repr_html_()


def test_times_are_shown_as_bars(tmp_path: Path) -> None:
    with CachedDataset(Colours(), transform=T.Compose(LAST)) as dataset:
        loader = DataLoader(dataset, batch_size=4)
        for _ in range(3):
            list(loader)
        report = loader.report()
        assert len(report.epochs) == 3
        assert report.epochs[-1] == pytest.approx((report.wait_s, report.busy_s))
        [axis] = report.plot().axes
        assert len(axis.patches) == 6
    [axis] = EpochReport(path="").plot().axes  # before the first epoch
    assert not axis.patches
    diagnosis = Diagnosis(batches=9, batch_size=4, wait_s=0.03, step_s=0.01)
    [axis] = diagnosis.plot().axes
    assert [bar.get_width() for bar in axis.patches] == [30, 10]
    assert "width: 75.0%" in diagnosis.as_page()


def test_diagnose_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "for batch in torch.utils.data.DataLoader([torch.zeros(1)] * 40, batch_size=2): pass\n"
    )
    page = tmp_path / "page.html"
    assert main(["diagnose", "--batches", "5", "--html", str(page), str(script)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    assert "What a training step spends its time on" in page.read_text("utf-8")
