"""A tiny LightningModule that remembers what it was fed; run as a script, two ranks of it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from recorded import PIXELS, Batch, CountingImages, save, see

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl

from torch.utils.data import DistributedSampler

from fastdata import DataLoader


class Recorder(pl.LightningModule):
    """Trains one linear layer.

    Attributes:
        epochs: the training batches, by epoch.
        validated: the validation batches, and whether they were of the sanity check.
        paths: ``report().path`` of the training loader, after each epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(PIXELS, 1)
        self.epochs: dict[int, list[Batch]] = {}
        self.validated: list[tuple[bool, Batch]] = []
        self.paths: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.epochs.setdefault(self.current_epoch, []).append(see(batch))
        return self.layer(batch[0].flatten(1)).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((self.trainer.sanity_checking, see(batch)))

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return see(batch)[0]

    def on_train_epoch_end(self) -> None:
        self.paths.append(self.trainer.train_dataloader.report().path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def make_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on the CPU that writes nothing."""
    silent = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return pl.Trainer(accelerator="cpu", **{"devices": 1, "max_epochs": 2, **silent, **options})


def fit(
    dataset: CountingImages,
    *,
    resume: str | None = None,
    loader: Any = None,
    validation: Any = None,
    **options: Any,
) -> Recorder:
    """Fit anew, or on from the checkpoint ``resume``; with threads and shuffled unless there is a ``loader``."""
    model = Recorder()
    chosen = (
        DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2) if loader is None else loader
    )
    plain_values_only = None if resume is None else True
    make_trainer(**options).fit(
        model, chosen, validation, ckpt_path=resume, weights_only=plain_values_only
    )
    return model


class SaveAt(pl.Callback):
    """Saves a checkpoint after ``step`` optimizer steps, in the hook that is named, and stops there."""

    def __init__(self, step: int, path: str, hook: str = "on_train_batch_end") -> None:
        self.step, self.path = step, path
        setattr(self, hook, self._save)

    def _save(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.should_stop:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def main(folder: Path) -> None:
    """Two ranks: fit; fit with a sampler of the user's; stop in the middle and resume with all objects made anew."""
    two = {"devices": 2, "strategy": "ddp"}
    with CountingImages() as dataset, CountingImages() as validation:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
        model = Recorder()
        trainer = make_trainer(**two, num_sanity_val_steps=1)
        trainer.fit(model, loader, DataLoader(validation, batch_size=4, num_workers=1))
        seen = {
            "loader": type(trainer.train_dataloader).__module__,
            "sampler": type(trainer.train_dataloader.sampler).__name__,
            "epochs": list(model.epochs.values()),
            "validated": model.validated,
            "paths": model.paths,
        }
        rank = trainer.global_rank
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, drop_last=True)
        own = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
        seen["own_sampler"] = list(
            fit(dataset, loader=own, use_distributed_sampler=False, **two).epochs.values()
        )
    checkpoint = str(folder / "middle.ckpt")
    with CountingImages() as dataset:
        before = fit(dataset, callbacks=[SaveAt(4, checkpoint)], **two)
    with CountingImages() as dataset:
        after = fit(dataset, resume=checkpoint, **two)
    seen["resumed"] = [*before.epochs[0], *before.epochs[1], *after.epochs.get(1, [])]
    with CountingImages() as dataset:
        fit(dataset, callbacks=[SaveAt(3, checkpoint)], **two)
    with CountingImages() as dataset:
        seen["next"] = fit(dataset, resume=checkpoint, **two).epochs.get(1, [])
    save(folder, rank, seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
