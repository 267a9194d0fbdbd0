"""Hugging Face's Trainer over fastdata's Dataset, by the loader that it makes and by ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from fastdata import CachedDataset, DataLoader, collate
from recorded import COUNT, PIXELS, Batch, CountingImages, draws_of, labels_of, see

BATCHES = 6


@pytest.fixture
def images() -> Iterator[CountingImages]:
    with CountingImages() as dataset:
        yield dataset


class Recorder(torch.nn.Module):
    """One linear layer that remembers its batches, with the signature of an image classifier of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(PIXELS, 1)
        self.trained: list[Batch] = []
        self.evaluated: list[Batch] = []

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        (self.trained if self.training else self.evaluated).append(see((pixel_values, labels)))
        return {"loss": self.layer(pixel_values.flatten(1)).pow(2).mean(), "logits": labels}


class OurLoader(Trainer):
    """Trains by fastdata's DataLoader."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(
            self.train_dataset,
            self._train_batch_size,
            shuffle=True,
            num_workers=2,
            collate_fn=as_dict,
        )


def as_dict(samples: list[Any]) -> dict[str, Any]:
    """Collate pairs into what a model of Hugging Face's takes; a ``data_collator``."""
    return dict(zip(("pixel_values", "labels"), collate(samples), strict=True))


def _train(
    folder: Path,
    images: Any,
    trainer_class: type[Trainer] = Trainer,
    collator: Any = None,
    **options: Any,
) -> Recorder:
    """Train and evaluate for two epochs."""
    silent = {
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 4)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        eval_strategy="epoch",
        use_cpu=True,
        **silent,
        **sizes,
        **options,
    )
    model = Recorder()
    trainer_class(
        model, arguments, data_collator=collator, train_dataset=images, eval_dataset=images
    ).train()
    return model


@pytest.mark.parametrize(
    ("trainer_class", "num_workers"), [(Trainer, 0), (Trainer, 2), (OurLoader, 0)]
)
def test_every_epoch_is_read_in_whole_batches(
    tmp_path: Path, images: CountingImages, trainer_class: type[Trainer], num_workers: int
) -> None:
    """Training and evaluation see every sample once an epoch, training in new orders and draws, by whole batches."""
    model = _train(tmp_path, images, trainer_class, as_dict, dataloader_num_workers=num_workers)
    first, second = model.trained[:BATCHES], model.trained[BATCHES:]
    assert sorted(labels_of(first)) == sorted(labels_of(second)) == list(range(COUNT))
    assert labels_of(first) != labels_of(second)
    assert len(set(draws_of(first).items()) - set(draws_of(second).items())) > COUNT // 2
    assert labels_of(model.evaluated) == [*range(COUNT), *range(COUNT)]
    assert images.reads.tolist() == [0, 4 * BATCHES]


def test_items_that_are_dicts_need_no_collator(tmp_path: Path) -> None:
    """Items with the names that the model takes go through the Trainer's own collator, which asks for a label."""
    items = [
        {"pixel_values": torch.full((4, 3, 3), i, dtype=torch.uint8), "label": i}
        for i in range(COUNT)
    ]
    with CachedDataset(items, transform=lambda image: image.float()) as dataset:
        model = _train(tmp_path, dataset)
    assert sorted(labels_of(model.trained)) == sorted([*range(COUNT), *range(COUNT)])
    assert {draw / max(label, 1) for label, draw in draws_of(model.evaluated).items()} == {
        0,
        sum(range(1, PIXELS + 1)),
    }
