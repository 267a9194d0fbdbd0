"""The datasets of torchvision's for detection and segmentation, in the forms that they have on disk."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from data import test_image
from fastdata import CachedDataset, DataLoader

pytestmark = [  # torchvision leaves the masks that nobody has read open
    pytest.mark.filterwarnings("ignore:unclosed file"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
COUNT = 3
SIZES = [(6, 5), (6, 5), (7, 4)]


def mask_of(index: int) -> Image.Image:
    """Labels with a palette, as VOC has them."""
    width, height = SIZES[index]
    mask = Image.fromarray(
        (np.arange(width * height).reshape(height, width) % 3 + index).astype(np.uint8), "P"
    )
    mask.putpalette([value for label in range(256) for value in (label, 255 - label, 7)])
    return mask


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    base = tmp_path / "VOCdevkit" / "VOC2012"
    for folder in (
        "JPEGImages",
        "Annotations",
        "SegmentationClass",
        "ImageSets/Main",
        "ImageSets/Segmentation",
    ):
        (base / folder).mkdir(parents=True)
    for i, size in enumerate(SIZES):
        Image.fromarray(test_image(i, size)).save(base / "JPEGImages" / f"{i}.jpg")
        mask_of(i).save(base / "SegmentationClass" / f"{i}.png")
        boxes = f"<object><name>cat</name><bndbox><xmin>{i}</xmin></bndbox></object>" * (i + 1)
        (base / "Annotations" / f"{i}.xml").write_text(
            f"<annotation><folder>VOC</folder>{boxes}</annotation>"
        )
    for task in ("Main", "Segmentation"):
        (base / "ImageSets" / task / "train.txt").write_text("0\n1\n2\n")
    return tmp_path


class StandIn:
    """The part of pycocotools that CocoDetection uses; the tests do not install it."""

    def __init__(self, path: str) -> None:
        document = json.loads(Path(path).read_text())
        self.imgs = {image["id"]: image for image in document["images"]}
        self._annotations = document["annotations"]

    def loadImgs(self, number: int) -> list[Any]:
        return [self.imgs[number]]

    def getAnnIds(self, number: int) -> list[int]:
        return [k for k, each in enumerate(self._annotations) if each["image_id"] == number]

    def loadAnns(self, numbers: list[int]) -> list[Any]:
        return [self._annotations[k] for k in numbers]


@pytest.fixture
def coco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("pycocotools.coco")
    module.COCO = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycocotools", types.ModuleType("pycocotools"))
    monkeypatch.setitem(sys.modules, "pycocotools.coco", module)
    images, annotations = [], []
    for i, size in enumerate(SIZES):
        Image.fromarray(test_image(i, size)).save(tmp_path / f"{i}.jpg")
        images.append({"id": i, "file_name": f"{i}.jpg"})
        for k in range(i):  # the first image has none
            box = {
                "bbox": [k, 1.5, 2, 2],
                "segmentation": [[0, 1, 2.5]],
                "category_id": 7,
                "iscrowd": 0,
            }
            annotations.append({"id": len(annotations), "image_id": i, **box})
    (tmp_path / "instances.json").write_text(
        json.dumps({"images": images, "annotations": annotations})
    )
    return datasets.CocoDetection(str(tmp_path), str(tmp_path / "instances.json"))


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    base = tmp_path / "oxford-iiit-pet"
    for folder in ("images", "annotations/trimaps"):
        (base / folder).mkdir(parents=True)
    names = ["Abyssinian_1", "beagle_1", "beagle_2"]
    for i, (name, size) in enumerate(zip(names, SIZES, strict=True)):
        Image.fromarray(test_image(i, size)).save(base / "images" / f"{name}.jpg")
        Image.fromarray(np.asarray(mask_of(i))).save(
            base / "annotations" / "trimaps" / f"{name}.png"
        )
    lines = [f"{name} {label} {label} 1" for name, label in zip(names, (1, 2, 2), strict=True)]
    (base / "annotations" / "trainval.txt").write_text("\n".join(lines))
    return tmp_path


def both_ways(dataset: Any, folder: Path) -> Iterator[CachedDataset]:
    """In memory, from a cache that is being written, and from that cache alone."""
    with CachedDataset(dataset, prepare_workers=1) as cached:
        yield cached
    with CachedDataset(dataset, cache_dir=folder, cache_key="x", prepare_workers=1) as cached:
        yield cached
    with CachedDataset.from_cache(folder) as cached:
        yield cached


def test_voc_detection(voc: Path, tmp_path: Path) -> None:
    """Images and nested dicts are what the dataset gives."""
    dataset = datasets.VOCDetection(str(voc), "2012", "train")
    for cached in both_ways(dataset, tmp_path / "cache"):
        for (image, target), (wanted, facts) in zip(
            (cached[i] for i in range(COUNT)), dataset, strict=False
        ):
            assert np.array_equal(image, wanted)
            assert target == facts
            assert len(target["annotation"]["object"]) > 0


def test_coco_detection(coco: Any, tmp_path: Path) -> None:
    """Images and lists of dicts are what the dataset gives, also where the list is empty; a collate_fn gets them."""
    for cached in both_ways(coco, tmp_path / "cache"):
        for i in range(COUNT):
            assert np.array_equal(cached[i][0], coco[i][0])
            assert cached[i][1] == coco[i][1]
            assert len(cached[i][1]) == i
        (batch,) = DataLoader(
            cached, batch_size=COUNT, collate_fn=lambda samples: [len(each) for _, each in samples]
        )
        assert batch == [0, 1, 2]


def test_voc_segmentation(voc: Path, tmp_path: Path) -> None:
    """Masks of labels with a palette come out as the labels."""
    dataset = datasets.VOCSegmentation(str(voc), "2012", "train")
    for cached in both_ways(dataset, tmp_path / "cache"):
        for i in range(COUNT):
            assert np.array_equal(cached[i][0], dataset[i][0])
            assert np.array_equal(cached[i][1], mask_of(i))
            assert cached[i][1].mode == "L"


@pytest.mark.parametrize(
    "kinds", ["category", "segmentation", ["category", "segmentation"], ["binary-category"]]
)
def test_oxford_pets(pets: Path, tmp_path: Path, kinds: Any) -> None:
    """Each kind of target, and both together, are what the dataset gives."""
    dataset = datasets.OxfordIIITPet(str(pets), target_types=kinds)
    for cached in both_ways(dataset, tmp_path / "cache"):
        for i in range(COUNT):
            assert np.array_equal(cached[i][0], dataset[i][0])
            found, wanted = cached[i][1], dataset[i][1]
            assert type(found) is tuple if isinstance(wanted, tuple) else True
            parts = zip(
                *([it if isinstance(it, tuple) else (it,) for it in (found, wanted)]), strict=True
            )
            assert all(np.array_equal(part, other) for part, other in parts)
