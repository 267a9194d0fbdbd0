"""timm's create_dataset and create_loader over fastdata's ImageFolder; they make plain torch loaders of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.data import AugMixDataset, create_dataset, create_loader, dataset_factory

import fastdata

PER_CLASS = 7
BATCHES = 2 * PER_CLASS // 4
SIZE = (3, 8, 8)

ROADS = [
    pytest.param({"use_prefetcher": prefetched, "num_workers": workers}, id=f"{name}-{workers}")
    for name, prefetched in (("tensors", False), ("prefetcher", True))
    for workers in (0, 2)
]


@pytest.fixture
def root(image_folder: Callable[..., Path]) -> Path:
    """A root with train and val folders of images that are wider than high."""
    image_folder(per_class=PER_CLASS, size=(20, 14), root="data/train")
    return image_folder(per_class=PER_CLASS, size=(20, 14), root="data/val").parent


def _loader(root: Path, split: str, **options: Any) -> Any:
    """What timm's train.py makes for ``--dataset torch/folder``, on the CPU."""
    dataset = create_dataset("torch/folder", root=str(root), split=split)
    device = torch.device("cpu")
    return create_loader(
        dataset,
        SIZE,
        4,
        is_training=split == "train",
        device=device,
        persistent_workers=False,
        **options,
    )


def _our_loader(*arguments: Any, **options: Any) -> Any:
    """The same with one line more: the ImageFolder that timm's factory makes is fastdata's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_factory, "ImageFolder", fastdata.ImageFolder)
        return _loader(*arguments, **options)


@pytest.mark.parametrize("options", ROADS)
def test_training_is_served_in_whole_batches(root: Path, options: dict[str, Any]) -> None:
    """No step of timm's train transform runs per sample; two epochs have all their batches, drawn anew."""
    loader = _our_loader(root, "train", auto_augment="rand-m9-mstd0.5", re_prob=0.25, **options)
    with loader.dataset as dataset:
        assert dataset.reader().obstacle is None
        assert not dataset.plan.per_sample
        first, second = list(loader), list(loader)
    assert [images.shape for images, _ in first] == [(4, *SIZE)] * BATCHES
    assert {images.dtype for images, _ in first + second} == {torch.float32}
    assert all(
        not torch.equal(one, other) for (one, _), (other, _) in zip(first, second, strict=True)
    )
    assert {*torch.cat([labels for _, labels in first + second]).tolist()} == {0, 1}


@pytest.mark.parametrize("options", ROADS)
def test_evaluation_is_timms(root: Path, options: dict[str, Any]) -> None:
    """Evaluation has the bits of timm over torchvision's ImageFolder in both epochs; Resize and CenterCrop run once."""
    theirs = list(_loader(root, "val", **options))
    loader = _our_loader(root, "val", **options)
    with loader.dataset as dataset:
        assert dataset.reader().obstacle is None
        assert [type(step).__name__ for step in dataset.plan.prepare] == ["Resize", "CenterCrop"]
        for _ in range(2):
            ours = list(loader)
            assert [labels.tolist() for _, labels in ours] == [
                labels.tolist() for _, labels in theirs
            ]
            assert all(
                torch.equal(image, other)
                for (image, _), (other, _) in zip(ours, theirs, strict=True)
            )


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"num_aug_splits": 3, "auto_augment": "augmix-m5-w2"}, {(12, *SIZE)}),
        ({"input_size_choices": [8, 16], "num_batches": 8}, {(4, 3, 8, 8), (4, 3, 16, 16)}),
    ],
    ids=["AugMixDataset", "ScheduledTransformDataset"],
)
def test_what_timm_wraps_a_dataset_in_reads_ours(
    root: Path, options: dict[str, Any], shapes: set[tuple[int, ...]]
) -> None:
    """A wrapper that takes the transform for itself, in parts or whole, trains over ours: batches of its own shapes."""
    with fastdata.ImageFolder(root / "train") as dataset:
        wrapped = AugMixDataset(dataset, 3) if "num_aug_splits" in options else dataset
        loader = create_loader(
            wrapped,
            SIZE,
            4,
            is_training=True,
            use_prefetcher=True,
            device=torch.device("cpu"),
            num_workers=0,
            **options,
        )
        assert {tuple(images.shape) for images, _ in loader} == shapes
