"""How fast are batches of arrays that are not images, compared with TensorDataset in torch's loader?

The arrays are latents of a diffusion model, embeddings, and latents with a text embedding and a number: float32, in
files of NumPy. fastdata reads them once into shared memory; torch's TensorDataset holds them as tensors. Whole
shuffled epochs are measured, each loader with its best number of workers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import StackDataset, TensorDataset

from _helper import (
    Row,
    find_workers,
    images_per_s,
    in_turns,
    parser,
    print_rows,
    save_rows,
    vanilla_loader,
)
from fastdata import CachedDataset, DataLoader

BATCH = 256
ROUND_S = 2.0

TORCH = "TensorDataset, torch's loader"
TORCH_0 = "TensorDataset, in the training loop"
OURS = "CachedDataset, fastdata's loader"

SHAPES = {"latent": (4, 32, 32), "embedding": (768,), "state": (32,)}
SECTIONS = {
    "latents 4x32x32": ("latent",),
    "embeddings 768": ("embedding",),
    "state vectors 32, next ones": ("state", "state"),
    "latents, embeddings, numbers": ("latent", "embedding", "number"),
}


def write(folder: Path, name: str, count: int) -> np.ndarray:
    """Write an array to a file, and return it mapped."""
    path = folder / f"{name}.npy"
    if name == "number":
        np.save(path, np.arange(count))
    else:
        rng = np.random.default_rng(0)
        np.save(path, rng.standard_normal((count, *SHAPES[name]), dtype=np.float32))
    return np.load(path, mmap_mode="r")


def rows_of(section: str, folder: Path, count: int, rounds: int) -> list[Row]:
    arrays = [write(folder, name, count) for name in SECTIONS[section]]
    tensors = TensorDataset(*(torch.from_numpy(np.array(array)) for array in arrays))
    vanilla = partial(vanilla_loader, tensors, BATCH)
    with CachedDataset(arrays[0] if len(arrays) == 1 else StackDataset(*arrays)) as dataset:
        make: Any = partial(DataLoader, dataset, batch_size=BATCH, shuffle=True)
        workers = find_workers(lambda number: Counted(make(num_workers=number)), budget_s=1.0)
        loader = make(num_workers=workers, persistent_workers=workers > 0)
        theirs = vanilla(find_workers(vanilla, budget_s=1.0))
        rates = in_turns(
            {
                TORCH: lambda: images_per_s(theirs, at_least_s=ROUND_S),
                TORCH_0: lambda: images_per_s(vanilla(0), at_least_s=ROUND_S),
                OURS: lambda: images_per_s(Counted(loader), at_least_s=ROUND_S),
            },
            rounds,
        )
        print(f"{section}: torch with {theirs.num_workers} workers; {loader.report().path}")
    row = partial(Row, section=section, unit="samples/s")
    return [
        row(name=TORCH, rounds=rates[TORCH]),
        row(name=TORCH_0, rounds=rates[TORCH_0]),
        row(name=OURS, rounds=rates[OURS], against=TORCH),
    ]


class Counted:
    """A loader whose batches are lists, as the count of samples needs: arrays without targets come as one tensor."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return (
            [batch] if isinstance(batch, torch.Tensor) else batch for batch in iter(self.loader)
        )


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=20_000, help="number of samples")
    arguments = options.parse_args()
    rows = []
    with TemporaryDirectory(prefix="fastdata-benchmark-") as folder:
        for section in SECTIONS:
            rows += rows_of(section, Path(folder), arguments.count, arguments.rounds)
    print_rows(rows)
    save_rows(rows, arguments.json, count=arguments.count, batch_size=BATCH)


if __name__ == "__main__":
    main()
