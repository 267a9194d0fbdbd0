"""What one rank does with Accelerate; started by spawn, it gets the dataset pickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration

from fastdata import DataLoader
from recorded import PIXELS, Batch, CountingImages, save, see


def make_accelerator(**options: Any) -> Accelerator:
    """An Accelerator on the CPU whose shuffles are the same on all ranks and after a resume."""
    settings = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7, **options)
    return Accelerator(cpu=True, dataloader_config=settings)


def train(accelerator: Accelerator, loader: Any, epochs: int) -> list[list[Batch]]:
    """Train one linear layer; returns what every batch was."""
    model = torch.nn.Linear(PIXELS, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    seen = []
    for _ in range(epochs):
        epoch = []
        for images, labels in loader:
            loss = model(images.flatten(1)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            epoch.append(see((images, labels)))
        seen.append(epoch)
    return seen


def run_rank(rank: int, port: int, dataset: CountingImages, folder: Path) -> None:
    """One of two ranks: train, gather, skip; with and without Accelerate's padding."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    seen: dict[str, Any] = {"epochs": train(accelerator, loader, 2)}
    ordered = accelerator.prepare(DataLoader(dataset, batch_size=4))
    seen["gathered"] = [
        label for _, labels in ordered for label in accelerator.gather_for_metrics(labels).tolist()
    ]
    again = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    again.set_epoch(1)
    seen["skipped"] = [see(batch) for batch in skip_first_batches(again, 1)]
    accelerator.dataloader_config.even_batches = False
    uneven = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    seen["uneven"] = [see(batch) for batch in uneven]
    save(folder, rank, seen)
    accelerator.wait_for_everyone()
    accelerator.end_training()
