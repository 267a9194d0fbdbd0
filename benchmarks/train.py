"""How fast does a real training run, fed in several ways?

python benchmarks/train.py [--images FOLDER] [--models resnet18 resnet50 vit_small_patch16_224] [--json FILE]

Training steps (bf16, channels last, ``torch.compile``, batches of 256 at 224 px) with RandomResizedCrop, flip and
Normalize of the same JPEG files. Each model runs on one batch that stays on the GPU, which is the limit; with
fastdata; and with torchvision and torch in the usual ways: on the CPU, with conversion to floats on the GPU, and with
JPEGs decoded on the GPU. Each row has the images per second, the share of a step in which the GPU's stream waits for
its batch, and the GPU utilisation reported by the driver. The first section has the loaders alone: batches on the
GPU, without a model.

Without a GPU it runs at a small size on the CPU, only to check that it works; ignore the figures.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

from _helper import (
    Row,
    class_folders,
    datasets,
    link_files,
    models,
    parser,
    print_rows,
    save_rows,
    transforms,
)
from fastdata import CudaPrefetcher, DataLoader, ImageFolder
from fastdata.machine.limits import usable_cores
from fastdata.tools.recipes import IMAGENET_MEAN, IMAGENET_STD

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
BATCH, CROP_PX, WARM_STEPS = (256, 224, 48) if IS_GPU else (4, 64, 1)
CLASSES = 1000
FLOAT = torch.bfloat16
ALONE = "the model alone, on one batch"
FASTDATA = "fastdata"
CPU = "torchvision and torch"
FLOATS_THERE = "the same, floats made on the GPU"
DECODED_THERE = "the same, decoded on the GPU"

Step = Callable[[torch.Tensor, torch.Tensor], None]
Batches = Iterable[Any]
Feed = Callable[[], Batches]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--models",
        nargs="*",
        default=["resnet18", "resnet50", "vit_small_patch16_224"],
        help="models of torchvision, or of timm if the name begins with vit",
    )
    options.add_argument(
        "--count", type=int, default=16_384 if IS_GPU else 32, help="number of image files"
    )
    options.add_argument("--seconds", type=float, default=4.0, help="length of a round in seconds")
    options.set_defaults(rounds=2)
    chosen = options.parse_args()
    if not IS_GPU:
        print("No CUDA device: a tiny run on the CPU, only to check that the script works.")
    with ExitStack() as stack:
        given, words = stack.enter_context(
            class_folders(chosen.images, count=None if chosen.images else 64)
        )
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=Path(given).parent, prefix="fastdata-train-")
        )
        link_files(given, Path(folder), chosen.count)
        feeds, settings = make_feeds(folder, stack)
        rows = [
            Row(
                section="loaders alone, batches on the GPU",
                name=name,
                unit="images/s",
                rounds=tuple(
                    measure(feed, None, chosen.seconds).images_per_s for _ in range(chosen.rounds)
                ),
                against=CPU,
            )
            for name, feed in sorted(feeds.items(), key=lambda item: item[0] != CPU)
        ]
        print_rows(rows)
        settings |= {"files": words, "count": chosen.count, "batch_size": BATCH, "crop_px": CROP_PX}
        if IS_GPU:
            settings |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        for model in chosen.models:
            found = train_rows(model, feeds, chosen.rounds, chosen.seconds)
            print_rows(found)
            rows += found
            save_rows(rows, chosen.json, **settings)


# What feeds a model


def make_feeds(folder: str, stack: ExitStack) -> tuple[dict[str, Feed], dict[str, Any]]:
    """Return functions that start endless batches on the GPU, by the way of loading, and the settings that were chosen.

    A function is called for each round, and its workers end with the round. Otherwise they would fill their queues
    while another way is measured.
    """
    crop = [transforms.RandomResizedCrop(CROP_PX), transforms.RandomHorizontalFlip()]
    floats = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]

    start = time.perf_counter()
    train = stack.enter_context(ImageFolder(folder, transforms.Compose([*crop, *floats])))
    train.prepare()
    settings: dict[str, Any] = {"prepared_s": time.perf_counter() - start, "storage": train.storage}
    loader = DataLoader(train, BATCH, shuffle=True, num_workers="auto", drop_last=True)
    prefetcher = stack.enter_context(CudaPrefetcher(loader, dtype=FLOAT, channels_last=True))
    list(prefetcher)
    settings["report"] = str(prefetcher.report())
    print(f"{len(train)} files prepared in {settings['prepared_s']:.1f} s\n{settings['report']}")

    vanilla = datasets.ImageFolder(folder, transforms.Compose([*crop, *floats]))
    rates = {}
    for workers in {usable_cores() * 3 // 4, usable_cores()}:
        feed = partial(moved, vanilla, workers)
        rates[workers] = measure(feed, None, 2.0).images_per_s
    workers = max(rates, key=lambda count: rates[count])
    settings["torch_workers"] = rates

    uint8 = datasets.ImageFolder(folder, transforms.Compose([*crop, transforms.PILToTensor()]))
    feeds: dict[str, Feed] = {
        FASTDATA: partial(forever, prefetcher),
        CPU: partial(moved, vanilla, workers),
        FLOATS_THERE: partial(moved, uint8, workers),
    }
    if IS_GPU:
        from torchvision.io import read_file

        files = datasets.ImageFolder(folder, loader=read_file)
        feeds[DECODED_THERE] = partial(decoded_there, files, transforms.Compose(crop))
    return feeds, settings


def torch_loader(data: Any, workers: int, **options: Any) -> TorchLoader[Any]:
    options = {"pin_memory": IS_GPU, **options}
    return TorchLoader(
        data,
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        **options,
    )


def end_to_end(samples: list[Any]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Join files to one tensor, because each tensor from a worker needs a file descriptor."""
    files, labels = zip(*samples, strict=True)
    return torch.cat(files), [len(data) for data in files], torch.tensor(labels)


def forever(batches: Batches) -> Iterator[Any]:
    return chain.from_iterable(repeat(batches))


def moved(data: Any, workers: int) -> Iterator[Any]:
    """Yield batches of torch's loader, moved to the GPU as most scripts do it."""
    for images, labels in forever(torch_loader(data, workers)):
        images = images.to(DEVICE, memory_format=torch.channels_last, non_blocking=True)
        yield _as_fed(images), labels.to(DEVICE, non_blocking=True)


def decoded_there(data: Any, crop: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Any]:
    from torchvision.io import ImageReadMode, decode_jpeg

    reading = torch_loader(data, usable_cores() // 2, collate_fn=end_to_end)
    for files, sizes, labels in forever(reading):
        images = decode_jpeg(list(files.split(sizes)), mode=ImageReadMode.RGB, device="cuda")
        batch = torch.stack([crop(image) for image in images])
        batch = batch.contiguous(memory_format=torch.channels_last)
        yield _as_fed(batch), labels.to(DEVICE, non_blocking=True)


def _as_fed(images: torch.Tensor) -> torch.Tensor:
    """Return images in the model's dtype; uint8 is normalised first."""
    if images.is_floating_point():
        return images.to(FLOAT)
    mean_C11, std_C11 = (
        torch.tensor(x, device=DEVICE)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return images.to(torch.float32).div_(255).sub_(mean_C11).div_(std_C11).to(FLOAT)


# What is fed


def make_step(name: str) -> Step:
    torch.manual_seed(0)
    if name.startswith("vit"):
        import timm

        net = timm.create_model(name, num_classes=CLASSES)
    else:
        net = getattr(models, name)(num_classes=CLASSES)
    net = net.to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, fused=IS_GPU)
    compiled = torch.compile(net) if IS_GPU else net

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, FLOAT):
            loss = torch.nn.functional.cross_entropy(compiled(images), labels)
        loss.backward()
        optimizer.step()

    return step


def train_rows(model: str, feeds: dict[str, Feed], rounds: int, seconds: float) -> list[Row]:
    images = torch.randn(BATCH, 3, CROP_PX, CROP_PX, device=DEVICE, dtype=FLOAT)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (BATCH,), device=DEVICE)
    step = make_step(model)
    start = time.perf_counter()
    step(images, labels)
    synchronize()
    print(f"{model}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
    ways: dict[str, Feed] = {ALONE: lambda: repeat((images, labels)), **feeds}
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, feed in ways.items():
            found[name].append(measure(feed, step, seconds))
    del step
    gc.collect()
    return [
        Row(
            section=f"{model}: {title}",
            name=name,
            unit=unit,
            rounds=tuple(getattr(one, field) for one in measured),
            against=against if name != against else "",
        )
        for title, unit, field, against in (
            ("images trained on", "images/s", "images_per_s", ALONE),
            (
                "a step's time in which the GPU's stream waits for its batch",
                "%",
                "waiting_percent",
                "",
            ),
            ("utilisation by the driver", "%", "utilisation_percent", ""),
        )
        for name, measured in found.items()
    ]


# Measuring


class Measured:
    """Figures of one round."""

    def __init__(
        self, images_per_s: float, waiting_percent: float, utilisation_percent: float
    ) -> None:
        self.images_per_s = images_per_s
        self.waiting_percent = waiting_percent
        self.utilisation_percent = utilisation_percent


def measure(feed: Feed, step: Step | None, seconds: float) -> Measured:
    """Take batches for some seconds, and run the step on each if there is one.

    The first WARM_STEPS batches do not count: workers start, and batches that were read ahead are used up.
    """
    iterator = iter(feed())
    for batch in islice(iterator, WARM_STEPS):
        if step is not None:
            step(*batch)
        del batch
    synchronize()
    count, stamps = 0, []
    with utilisation() as looks:
        start = time.perf_counter()
        while time.perf_counter() < start + seconds:
            asked, answered = (event() for _ in range(2))
            images, labels = next(iterator)
            answered.record()
            if step is not None:
                step(images, labels)
            count += len(labels)
            del images, labels
            stamps.append((asked, answered))
            if len(stamps) % 8 == 0:  # so that this loop is at most some steps ahead of the GPU
                stamps[-4][1].synchronize()
        synchronize()
        length_s = time.perf_counter() - start
    waited_ms = sum(asked.elapsed_time(answered) for asked, answered in stamps)
    return Measured(
        images_per_s=count / length_s,
        waiting_percent=100 * waited_ms / 1000 / length_s,
        utilisation_percent=mean(looks or [0]),
    )


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


class Clock:
    """Stands for a CUDA event if there is no GPU."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Clock) -> float:
        return 1000 * (other.at - self.at)


def event() -> Any:
    stamp = torch.cuda.Event(enable_timing=True) if IS_GPU else Clock()
    stamp.record()
    return stamp


@contextmanager
def utilisation(every_s: float = 0.1) -> Iterator[list[float]]:
    """Yield a list that a thread fills with the GPU's utilisation in percent; it stays empty without NVML."""
    looks: list[float] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(every_s):
            try:
                looks.append(torch.cuda.utilization())
            except Exception as error:  # noqa: BLE001  # NVML's Python package is not installed
                print(f"no utilisation: {error}", file=sys.stderr)
                return

    thread = threading.Thread(target=look, daemon=True)
    if IS_GPU:
        thread.start()
    try:
        yield looks
    finally:
        ended.set()
        if IS_GPU:
            thread.join()


if __name__ == "__main__":
    main()
