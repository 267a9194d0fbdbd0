"""Is training faster on several devices with DataParallel or DistributedDataParallel, and how long does it wait?

CIFAR-10 at 112x112, MobileNetV2 and ResNet-50 with random weights, SGD with cosine annealing, and one batch size for
all devices together. It runs in one process with one device, in one process with DataParallel over all devices, and
in one process per device under torchrun; each with fastdata, and with torchvision's ImageFolder and torch's loader.
Without GPUs a device is a rank on the CPU with one thread, batches and images are few, and DataParallel only calls
the module.

Every step ends when its loss is computed, so the device has no work while the loop waits for data. Preparing is not
part of an epoch; its time is a separate row.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler

from _helper import (
    Row,
    class_folders,
    datasets,
    models,
    on_ranks,
    parser,
    print_rows,
    save_rows,
    transforms,
)
from fastdata import CudaPrefetcher, DataLoader, ImageFolder
from fastdata.machine.limits import usable_cores

SIDE_PX = 112
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TRANSFORM = transforms.Compose(
    [
        transforms.Resize((SIDE_PX, SIDE_PX)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)
MODELS = {"MobileNetV2": models.mobilenet_v2, "ResNet-50": models.resnet50}
MODES = {"single": "one device", "dataparallel": "DataParallel", "ddp": "DDP"}
OURS, VANILLA = "fastdata", "torchvision + torch"

Batch = list[torch.Tensor]


@dataclass(kw_only=True, slots=True)
class Sizes:
    """The part of the latest step that each device had: shapes of inputs, outputs and gradients."""

    forward: dict[str, str] = field(default_factory=dict)
    backward: dict[str, str] = field(default_factory=dict)

    def watch(self, network: nn.Module) -> None:
        """Record the shapes of every forward pass of the network, and of its replicas, which copy its hooks."""

        def look(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            device = str(inputs[0].device)
            self.forward[device] = f"{tuple(inputs[0].shape)} to {tuple(output.shape)}"
            if output.requires_grad:
                output.register_hook(
                    lambda gradient: self.backward.update({device: f"{tuple(gradient.shape)}"})
                )

        network.register_forward_hook(look)


@dataclass(kw_only=True, slots=True)
class Pass:
    """One pass over the data: all of its time, and how much of it was spent waiting for batches."""

    elapsed_s: float = 0.0
    wait_s: float = 0.0
    images: int = 0

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        start = asked = time.perf_counter()
        for batch in batches:
            self.wait_s += time.perf_counter() - asked
            self.images += len(batch[1])
            yield batch
            asked = time.perf_counter()
        now = time.perf_counter()
        self.wait_s, self.elapsed_s = self.wait_s + now - asked, now - start


class Rank:
    """A process that trains: alone, with one device or several, or one of a group."""

    def __init__(self, mode: str, batch_size: int, num_workers: int | None) -> None:
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        ranks = dist.get_world_size() if mode == "ddp" else 1
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.mode, self.has_gpus = mode, len(gpus) >= ranks
        if not self.has_gpus:
            self.devices = [torch.device("cpu")]
            torch.set_num_threads(1)
        else:
            self.devices = gpus if mode == "dataparallel" else [gpus[local_rank]]
            torch.cuda.set_device(self.devices[0])
        self.batch_size = batch_size // ranks
        self.num_workers: int | Literal["auto"] = "auto" if num_workers is None else num_workers
        self.cores = max(1, usable_cores() // ranks)

    def model_of(self, network: nn.Module) -> nn.Module:
        if self.mode == "ddp":
            return DistributedDataParallel(network)
        if self.mode == "dataparallel":
            return DataParallel(network, self.devices if self.has_gpus else None)
        return network

    def ours(self, folder: Path, stack: ExitStack) -> CudaPrefetcher:
        data = stack.enter_context(
            ImageFolder(
                str(folder),
                TRANSFORM,
            ).prepare()
        )
        loader = DataLoader(
            data,
            self.batch_size,
            shuffle=True,
            num_workers=self.num_workers,
            drop_last=True,
            distributed="auto" if self.mode == "ddp" else "off",
        )
        return stack.enter_context(CudaPrefetcher(loader, self.devices[0]))

    def vanilla(self, folder: Path, stack: ExitStack) -> MovedBatches:
        del stack
        data = datasets.ImageFolder(str(folder), TRANSFORM)
        sampler = DistributedSampler(data, drop_last=True) if self.mode == "ddp" else None
        workers = self.cores if self.num_workers == "auto" else self.num_workers
        loader = TorchDataLoader(
            data,
            self.batch_size,
            shuffle=sampler is None,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.has_gpus,
            drop_last=True,
        )
        return MovedBatches(loader, sampler, self.devices[0])

    def gathered(self, value: Any) -> list[Any]:
        if self.mode != "ddp":
            return [value]
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


class MovedBatches:
    """torch's loader as scripts use it: a new order in each epoch, and batches moved to the device in the loop."""

    def __init__(
        self,
        loader: TorchDataLoader[Any],
        sampler: DistributedSampler[Any] | None,
        device: torch.device,
    ) -> None:
        self.loader, self.sampler, self.device, self.epoch = loader, sampler, device, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        for batch in self.loader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]


def train(model: nn.Module, batches: Any, epochs: int) -> list[Pass]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = CosineAnnealingLR(optimizer, T_max=epochs * len(batches))
    model.train()
    passes = []
    for _ in range(epochs):
        passes.append(Pass())
        for images, labels in passes[-1].over(batches):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss.item()
    return passes


@torch.inference_mode()
def infer(model: nn.Module, batches: Any) -> Pass:
    model.eval()
    one = Pass()
    for images, _ in one.over(batches):
        model(images).argmax(1).sum().item()
    return one


def read_only(batches: Any) -> Pass:
    one = Pass()
    for images, _ in one.over(batches):
        images.flatten()[0].item()
    return one


def measure(rank: Rank, folder: Path, names: list[str], epochs: int) -> dict[str, Any]:
    """Measure reading, training and inference: the seconds of the slowest rank, and the mean share of waiting."""
    figures: dict[str, Any] = {"passes": [], "sizes": {}}
    with ExitStack() as stack:
        start = time.perf_counter()
        sources = {OURS: rank.ours(folder, stack)}
        figures["prepare_s"] = max(rank.gathered(time.perf_counter() - start))
        sources[VANILLA] = rank.vanilla(folder, stack)

        def keep(what: str, model: str, source: str, one: Pass) -> None:
            parts = rank.gathered((one.elapsed_s, one.wait_s, one.images))
            seconds, waits, images = zip(*parts, strict=True)
            shares = [wait_s / elapsed_s for wait_s, elapsed_s in zip(waits, seconds, strict=True)]
            figures["passes"].append(
                {
                    "what": what,
                    "model": model,
                    "source": source,
                    "elapsed_s": max(seconds),
                    "wait_share": sum(shares) / len(shares),
                    "images": sum(images),
                }
            )

        for source, batches in sources.items():
            read_only(batches)  # warm-up: starts workers, reads every file once
            keep("reading", "", source, read_only(batches))
        for name in names:
            network, sizes = MODELS[name](num_classes=10).to(rank.devices[0]), Sizes()
            sizes.watch(network)
            model = rank.model_of(network)
            # Warms up: algorithms are chosen, memory is taken.
            train(model, [next(iter(sources[OURS]))] * 2, 1)
            figures["sizes"][name] = rank.gathered(describe(sizes, network))
            for source, batches in sources.items():
                for one in train(model, batches, epochs):
                    keep("training", name, source, one)
            for source, batches in sources.items():
                keep(
                    "inference",
                    name,
                    source,
                    infer(network if rank.mode == "ddp" else model, batches),
                )
    return figures


def describe(sizes: Sizes, network: nn.Module) -> dict[str, Any]:
    gradient_bytes: dict[str, int] = {}
    for parameter in network.parameters():
        if parameter.grad is not None:
            device = str(parameter.grad.device)
            gradient_bytes[device] = gradient_bytes.get(device, 0) + parameter.grad.nbytes
    return {"forward": sizes.forward, "backward": sizes.backward, "gradient_bytes": gradient_bytes}


def print_sizes(mode: str, model: str, ranks: list[dict[str, Any]]) -> None:
    print(f"\n{model}, {MODES[mode]}")
    for number, sizes in enumerate(ranks):
        for device, shapes in sizes["forward"].items():
            held = sizes["gradient_bytes"].get(device, 0)
            kept = (
                f"{held / 1e6:.1f} MB of parameter gradients"
                if held
                else "its gradients are added up elsewhere"
            )
            where = f"rank {number}, {device}" if len(ranks) > 1 else device
            print(
                f"  {where:<16} forward {shapes}; backward {sizes['backward'].get(device, 'none')}, {kept}"
            )


def rows_of(rounds: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return rows with a section for each model and task, and a row for each mode and loader."""
    found: dict[tuple[str, str, str, str], list[float]] = {}

    def add(section: str, name: str, unit: str, value: float, against: str = "") -> None:
        found.setdefault((section, name, unit, against), []).append(value)

    for mode, all_figures in rounds.items():
        for figures in all_figures:
            add("preparing, once", MODES[mode], "s", figures["prepare_s"])
            for one in figures["passes"]:
                name = f"{MODES[mode]}, {one['source']}"
                if one["what"] == "reading":
                    add("reading alone", name, "images/s", one["images"] / one["elapsed_s"])
                    continue
                section = f"{one['model']}, {one['what']}"
                against = f"{MODES['single']}, {one['source']}" if "single" in rounds else ""
                add(f"{section}: an epoch", name, "s", one["elapsed_s"], against)
                add(f"{section}: share of it spent waiting", name, "%", 100 * one["wait_share"])
    rows = [
        Row(section=section, name=name, unit=unit, rounds=tuple(values), against=against)
        for (section, name, unit, against), values in found.items()
    ]
    return sorted(rows, key=lambda row: (row.section.startswith(tuple(MODELS)), row.section))


def in_this_process(mode: str, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return measure(
        Rank(mode, chosen.batch_size, chosen.num_workers), folder, chosen.models, chosen.epochs
    )


def settings_of(chosen: argparse.Namespace) -> list[object]:
    given = [
        "--batch-size",
        chosen.batch_size,
        "--epochs",
        chosen.epochs,
        "--models",
        *chosen.models,
    ]
    return given if chosen.num_workers is None else [*given, "--num-workers", chosen.num_workers]


def be_rank(chosen: argparse.Namespace) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    if chosen.mode == "ddp":
        dist.init_process_group("nccl" if torch.cuda.device_count() >= ranks else "gloo")
    figures = in_this_process(chosen.mode, chosen, chosen.images)
    if int(os.environ["RANK"]) == 0:
        chosen.into.write_text(json.dumps(figures), "utf-8")
    if chosen.mode == "ddp":
        dist.destroy_process_group()


def main() -> None:
    gpus = torch.cuda.device_count()
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=3 if gpus else 1)
    options.add_argument(
        "--count", type=int, default=50_000 if gpus else 128, help="number of image files"
    )
    options.add_argument(
        "--batch-size",
        type=int,
        default=256 if gpus else 16,
        help="batch size of all devices together",
    )
    options.add_argument(
        "--epochs", type=int, default=2 if gpus else 1, help="measured epochs in a round"
    )
    options.add_argument(
        "--ranks", type=int, default=gpus or 2, help="number of ranks of DistributedDataParallel"
    )
    options.add_argument(
        "--num-workers",
        type=int,
        help="workers of each process; default: auto, the cores of the process",
    )
    options.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to train"
    )
    options.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="ways to use the devices"
    )
    # The script passes these to the processes that it starts.
    options.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    options.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.mode:
        be_rank(chosen)
        return
    rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in chosen.modes}
    with class_folders(
        chosen.images, count=chosen.count, size=(32, 32), variable="FASTDATA_CIFAR"
    ) as (root, what):
        measures: dict[str, Callable[[], Any]] = {
            mode: partial(
                on_ranks,
                chosen.ranks if mode == "ddp" else 1,
                __file__,
                *("--mode", mode, "--images", root),
                *settings_of(chosen),
            )
            for mode in chosen.modes
        }
        for _ in range(chosen.rounds):
            for mode, run in measures.items():
                rounds[mode].append(run())
    print(f"{what}; batch {chosen.batch_size}; {gpus} GPUs, {chosen.ranks} ranks")
    sizes = {mode: figures[-1]["sizes"] for mode, figures in rounds.items()}
    for model in chosen.models:
        for mode in chosen.modes:
            print_sizes(mode, model, sizes[mode][model])
    rows = rows_of(rounds)
    print()
    print_rows(rows)
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    words = {"images": what, "devices": names or ["CPU, a thread for each rank"], "sizes": sizes}
    save_rows(
        rows,
        chosen.json,
        **words,
        ranks=chosen.ranks,
        batch=chosen.batch_size,
        epochs=chosen.epochs,
    )


if __name__ == "__main__":
    main()
