"""The work of one rank of ranks.py. It imports torch and fastdata, but not torchvision, which takes 85 MB."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from fastdata import DataLoader, ImageFolder
from fastdata.machine.limits import tree_pss_bytes

BATCH = 32
WORKERS = 2
SIDE_PX = 256
SAMPLE_BYTES = 3 * SIDE_PX * SIDE_PX
BARE, SHARED = "bare processes", "fastdata"
FORKED, SERVED = "a list of arrays, forked workers", "a list of arrays, forkserver"


def own_step(name: str, **attributes: Any) -> Any:
    """Return a step that fastdata treats as torchvision's step of that name; it cannot be called."""
    usual = {"interpolation": "bilinear", "antialias": True, "max_size": None}
    pads = {"padding": None, "pad_if_needed": False, "fill": 0, "padding_mode": "constant"}
    return type(name, (), {"__torchvision_equal__": name} | usual | pads | attributes)()


TRANSFORM = (
    own_step("Resize", size=SIDE_PX),
    own_step("CenterCrop", size=(SIDE_PX, SIDE_PX)),
    own_step("RandomCrop", size=(224, 224)),
    own_step("RandomHorizontalFlip", p=0.5),
    own_step("PILToTensor"),
)

Holding = Callable[[Path], AbstractContextManager[None]]


def open_folder(folder: Path) -> ImageFolder:
    return ImageFolder(
        str(folder),
        TRANSFORM,
        storage="shared",
    ).prepare()


# Ways to hold the samples of a folder. In the block, workers that have read all samples are alive.


@contextmanager
def hold_nothing(folder: Path) -> Iterator[None]:
    del folder
    context = multiprocessing.get_context("fork")
    is_over = context.Event()
    workers = [context.Process(target=is_over.wait) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    yield
    is_over.set()
    for worker in workers:
        worker.join()


@contextmanager
def hold_in_fastdata(folder: Path) -> Iterator[None]:
    with open_folder(folder) as data:
        loader = DataLoader(
            data,
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            workers="process",
            persistent_workers=True,
        )
        read(loader)
        yield


class Preloaded(Dataset[tuple[torch.Tensor, int]]):
    """A list of arrays, one for each file. Hard links to one file are decoded once: only the memory matters here."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*/*"))
        inodes = {path.stat().st_ino: path for path in files}
        images = [
            np.asarray(Image.open(path).convert("RGB").resize((SIDE_PX, SIDE_PX)))
            for path in inodes.values()
        ]
        self.images = [images[index % len(images)].copy() for index in range(len(files))]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.images[index][16:240, 16:240]).permute(2, 0, 1), index


@contextmanager
def hold_in_list(folder: Path, start_method: str) -> Iterator[None]:
    loader = TorchDataLoader(
        Preloaded(folder),
        BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    read(loader)
    yield


def read(loader: Any) -> None:
    for _ in loader:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A way to hold the samples, and the most copies in memory: ``copies`` and, in addition, some for each rank."""

    hold: Holding
    copies: int = 0
    copies_per_rank: int = 0


FORMS = {
    BARE: Form(hold=hold_nothing),
    SHARED: Form(hold=hold_in_fastdata, copies=1),
    FORKED: Form(hold=partial(hold_in_list, start_method="fork"), copies_per_rank=1),
    # Python 3.14's default: each worker has its own copy, and there is another one while a worker starts.
    SERVED: Form(
        hold=partial(hold_in_list, start_method="forkserver"), copies_per_rank=WORKERS + 2
    ),
}


# What is measured


def measure_memory(folder: Path, form: str) -> dict[str, int]:
    """Return the PSS of torchrun with its descendants, and of torchrun alone; in rank 0 only."""
    figures = {}
    with FORMS[form].hold(folder):
        dist.barrier()
        if dist.get_rank() == 0:
            launcher = psutil.Process(os.getppid())
            alone = launcher.memory_full_info()
            figures = {
                "tree_bytes": tree_pss_bytes(launcher.pid),
                "launcher_bytes": getattr(alone, "pss", alone.rss),
            }
        dist.barrier()
    return figures


def measure_preparing(folder: Path) -> float:
    """Return the seconds until the last rank has its dataset."""
    dist.barrier()
    start = time.perf_counter()
    with open_folder(folder):
        seconds = time.perf_counter() - start
        dist.barrier()
    return max(from_all(seconds))


def measure_attaching(folder: Path, rounds: int) -> list[float]:
    """Return the seconds that the last rank needs for a dataset that the others have prepared, in each round.

    One more round is run first, to warm up.
    """
    taken = []
    is_late = dist.get_rank() == dist.get_world_size() - 1
    for _ in range(rounds + 1):
        with ExitStack() as stack:
            if not is_late:
                stack.enter_context(open_folder(folder))
            dist.barrier()
            start = time.perf_counter()
            if is_late:
                stack.enter_context(open_folder(folder))
            taken.append(from_all(time.perf_counter() - start)[-1])
        dist.barrier()
    return taken[1:]


def from_all(value: float) -> list[float]:
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("task", choices=("memory", "preparing", "attaching"))
    options.add_argument("folder", type=Path)
    options.add_argument("--form", choices=FORMS, default=SHARED)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--into", type=Path, required=True)
    chosen = options.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    if chosen.task == "memory":
        figures: Any = measure_memory(chosen.folder, chosen.form)
    elif chosen.task == "preparing":
        figures = measure_preparing(chosen.folder)
    else:
        figures = measure_attaching(chosen.folder, chosen.rounds)
    if dist.get_rank() == 0:
        chosen.into.write_text(json.dumps(figures), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
