"""Train with DistributedDataParallel: one process for each GPU (nccl), or processes on the CPU (gloo).

    torchrun --nproc-per-node 2 examples/train_ddp.py [FOLDER] [--resume FILE]
    python examples/train_ddp.py [FOLDER] [--resume FILE]                         one process alone

FOLDER has one folder of images for each class; without FOLDER, images are drawn. The ranks of a machine prepare the
images together and share one copy; each rank reads its part of every epoch. FILE is a checkpoint, written at the end
of each epoch and, with --save-every, inside epochs. If FILE exists, training continues from it, with any number of
ranks.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import transforms

from fastdata import CudaPrefetcher, DataLoader, ImageFolder
from fastdata.tools.photos import write_photos


def train(folder: str, device: torch.device, chosen: argparse.Namespace) -> None:
    """Train, print a line for each epoch, and at the end a report on how batches were read."""
    is_first, file = dist.get_rank() == 0, chosen.resume
    steps = [transforms.Resize(72), transforms.CenterCrop(72), transforms.RandomCrop(64)]
    transform = transforms.Compose(
        [*steps, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    with ImageFolder(folder, transform, seed=0) as data:  # prepared once, by all ranks together
        loader = DataLoader(
            data, chosen.batch_size, shuffle=True, num_workers="auto", distributed="auto"
        )
        network = make_network(len(data.classes)).to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        states = {"network": network, "optimizer": optimizer, "loader": loader}
        first_epoch = load(file, states) if file and file.exists() else 0
        model = DistributedDataParallel(network)
        with CudaPrefetcher(loader, device) as batches:
            for epoch in range(first_epoch, chosen.epochs):
                start, totals = time.perf_counter(), torch.zeros(2, device=device)
                for step, (images, labels) in enumerate(batches, start=1):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    totals += torch.stack([loss.detach(), torch.ones_like(loss)]) * len(labels)
                    if is_first and file and chosen.save_every and step % chosen.save_every == 0:
                        save(file, states, epoch)
                if is_first and file:
                    save(file, states, epoch + 1)
                dist.all_reduce(totals)
                loss_sum, count = totals.tolist()
                if is_first:
                    rate = count / (time.perf_counter() - start)
                    print(
                        f"epoch {epoch + 1}: loss {loss_sum / count:.3f}, {rate:,.0f} images/s",
                        flush=True,
                    )
            if is_first:
                print(batches.report())


def make_network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def save(file: Path, states: dict[str, Any], epoch: int) -> None:
    """Write a new checkpoint and rename it, so that there is a complete one at any time."""
    torch.save(
        {"epoch": epoch} | {name: each.state_dict() for name, each in states.items()}, f"{file}.new"
    )
    os.replace(f"{file}.new", file)


def load(file: Path, states: dict[str, Any]) -> int:
    """Load a checkpoint, and return the epoch to continue with.

    Every rank loads the same one, because the loader's state is that of the whole run.
    """
    saved = torch.load(file, map_location="cpu")
    for name, each in states.items():
        each.load_state_dict(saved[name])
    return saved["epoch"]


def start_process_group() -> torch.device:
    """Join the ranks that torchrun has started, or make a group of this process alone.

    Return the device of this rank.
    """
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    return device


def draw_for_all(folder: str) -> str:
    """Draw images in the folder of rank 0, and return the name of this folder on every rank."""
    if dist.get_rank() == 0:
        write_photos(Path(folder), count=200, classes=4, size=(96, 72))
    names = [folder]
    dist.broadcast_object_list(names)
    return names[0]


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", nargs="?")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--batch-size", type=int, default=16, help="of each rank")
    options.add_argument(
        "--resume", type=Path, metavar="FILE", help="checkpoint, where all ranks can read it"
    )
    options.add_argument(
        "--save-every", type=int, default=0, metavar="STEPS", help="save inside an epoch, too"
    )
    chosen = options.parse_args(arguments)
    torch.manual_seed(0)
    device = start_process_group()
    with tempfile.TemporaryDirectory() as own:
        train(chosen.folder or draw_for_all(own), device, chosen)
        dist.barrier()  # others may still read what rank 0 has drawn
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
