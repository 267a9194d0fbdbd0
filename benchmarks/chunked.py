"""How much slower is a memory limit? Data four times as large as the limit, compared with the same data without one.

Every measurement runs in its own process, whose memory (PSS of the process tree) is sampled all the time. The
photographs are prepared once and repeated up to the wanted size, in caches on disk, raw and encoded. One process
reads a part of them from memory, one reads all from the cache without a limit, and one reads all through
``ChunkedLoader``. Then the last two run again with an empty page cache at the beginning of each epoch.
``benchmarks/disk.py`` compares reading a cache in sequence with ``cat``.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from _helper import (
    Row,
    class_folders,
    datasets,
    images_per_s,
    in_turns,
    parser,
    peak_memory,
    print_rows,
    save_rows,
    transforms,
    vanilla_loader,
)
from fastdata import CachedDataset, ChunkedLoader, DataLoader, ImageFolder
from fastdata.loaders import chunked as chunked_loader
from fastdata.machine.limits import tree_pss_bytes
from fastdata.pixels.samples import SampleSpec

GIB = 1 << 30
SPEC = SampleSpec(shape=(3, 256, 256), dtype="uint8", form="tensor")
BATCH = 64
RAW = "auto"  # the codec that stores raw pixels if the disk has room for them


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one process: images/s, peak memory of its tree, and the memory before it made the loader."""

    images_per_s: float
    peak_bytes: int
    start_bytes: int
    plan: str = ""


class RawImages(Dataset[Any]):
    """The images of a raw file as tensors."""

    def __init__(self, path: Path, count: int | None = None) -> None:
        self._images = np.memmap(path, np.uint8, "r").reshape(-1, *SPEC.shape)[:count]
        self.targets = [0] * len(self._images)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self._images[index].copy()), 0


def crop_and_flip() -> Any:
    return transforms.Compose([transforms.RandomCrop(224), transforms.RandomHorizontalFlip()])


def cached(path: Path, codec: str) -> CachedDataset:
    """Return all images from the cache next to their file; the first call writes the cache."""
    return CachedDataset(
        RawImages(path),
        transform=crop_and_flip(),
        codec=codec,
        cache_dir=path.with_name("cache"),
        cache_key="photographs",
    )


def serve_from_memory(path: Path, count: int, codec: str) -> Any:
    options: dict[str, Any] = (
        {"storage": "shared"} if codec == RAW else {"storage": "compressed", "codec": codec}
    )
    dataset = CachedDataset(RawImages(path, count), transform=crop_and_flip(), **options).prepare()
    return DataLoader(dataset, BATCH, shuffle=True, num_workers="auto")


def serve_from_disk(path: Path, codec: str) -> Any:
    return DataLoader(cached(path, codec), BATCH, shuffle=True, num_workers="auto")


def serve_chunked(path: Path, limit_bytes: int, codec: str, *, empties_cache: bool = False) -> Any:
    if empties_cache:  # as ChunkedLoader decides if memory is short
        chunked_loader.empties_cache = lambda *_: True  # type: ignore[assignment]
    return ChunkedLoader(cached(path, codec), BATCH, memory_limit=limit_bytes)


def serve_folder(root: Path, limit_bytes: int) -> Any:
    dataset = ImageFolder(str(root), photo_transform(), storage="none")
    return ChunkedLoader(dataset, BATCH, memory_limit=limit_bytes)


def decode_folder(root: Path) -> Any:
    return vanilla_loader(datasets.ImageFolder(str(root), photo_transform()), BATCH, 2)


def photo_transform() -> Any:
    return transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(256),
            transforms.RandomCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )


def measure(make_loader: Callable[[], Any], seconds: float, is_cold: bool, connection: Any) -> None:
    """Read one epoch while memory is measured, which slows it down, then some more for the rate; send the outcome."""
    start_bytes = tree_pss_bytes()
    with peak_memory(every_s=0.05) as peak:
        loader = make_loader()
        images_per_s(loader)
    rate = (
        cold_images_per_s(loader, seconds) if is_cold else images_per_s(loader, at_least_s=seconds)
    )
    peak.size_bytes = max(peak.size_bytes, tree_pss_bytes())
    plan = str(getattr(loader, "plan", ""))
    connection.send(Outcome(rate, peak.size_bytes, start_bytes, plan))
    connection.close()


def cold_images_per_s(loader: Any, seconds: float) -> float:
    """Return images per second of epochs that read from the disk: the page cache is emptied before each, untimed."""
    images, spent_s = 0.0, 0.0
    while spent_s < seconds:
        forget_files(loader.dataset)
        start = time.perf_counter()
        images += sum(len(batch) for batch, _ in loader)
        spent_s += time.perf_counter() - start
    return images / spent_s


def forget_files(dataset: Any) -> None:
    """Remove the files of a dataset's cache from the memory of this process and from the system's page cache."""
    dataset.reader().kept.images.evict_all()
    for path in Path(dataset.reader().stored.options.cache_dir).rglob("part*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_own_process(
    make_loader: Callable[[], Any], seconds: float, is_cold: bool, outcomes: list[Outcome]
) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(make_loader, seconds, is_cold, theirs))
    process.start()
    theirs.close()
    outcomes.append(ours.recv())
    process.join()
    return outcomes[-1].images_per_s


def write_raw(root: Path, path: Path, size_bytes: int) -> int:
    """Write prepared photographs to a file, repeated up to its size; return their number."""
    steps = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(256)])
    with ImageFolder(
        str(root),
        steps,
        storage="shared",
    ).prepare() as photos:
        assert photos.reader().kept is not None
        block = np.stack([photos.reader().kept.images.read(index) for index in range(len(photos))])
    count = size_bytes // SPEC.sample_bytes
    with path.open("wb") as file:
        for start in range(0, count, len(block)):
            file.write(block[: count - start].tobytes())
        file.flush()
        os.fsync(file.fileno())
    return count


def compare(
    title: str,
    competitors: dict[str, Callable[[], Any]],
    seconds: float,
    rounds: int,
    limit: int,
    *,
    is_cold: bool = False,
) -> list[Row]:
    """Return rows of the rates, measured in turns, and of the peaks of memory of all rounds."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in competitors}
    turns = {
        name: partial(in_own_process, make, seconds, is_cold, outcomes[name])
        for name, make in competitors.items()
    }
    rates = in_turns(turns, rounds)
    for name in competitors:
        if outcomes[name][0].plan:
            print(f"{name}: {outcomes[name][0].plan}")
    rate = partial(Row, section=title, unit="images/s")
    peak = partial(Row, section=f"{title}: peak PSS of the process tree", unit="MiB")
    first, *others = competitors
    return [
        rate(name=first, rounds=rates[first]),
        *(rate(name=name, rounds=rates[name], against=first) for name in others),
        *(
            peak(
                name=name,
                rounds=tuple(outcome.peak_bytes / (1 << 20) for outcome in outcomes[name]),
                target=f"under {limit / (1 << 20):,.0f}" if outcomes[name][0].plan else "",
            )
            for name in competitors
        ),
    ]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--gib", type=float, default=4.0, help="size of the raw images, in GiB")
    options.add_argument(
        "--limit-gib", type=float, default=1.0, help="memory_limit of the chunked loader, in GiB"
    )
    options.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        help="least length of each measurement; epochs are read to their end",
    )
    options.add_argument("--codecs", nargs="*", default=[RAW, "zstd"], help="codecs of the caches")
    chosen = options.parse_args()
    limit = int(chosen.limit_gib * GIB)
    with (
        class_folders(chosen.images, count=None if chosen.images else 500) as (root, what),
        tempfile.TemporaryDirectory(prefix="fastdata-benchmark-") as folder,
    ):
        path = Path(folder) / "images.raw"
        start = time.perf_counter()
        count = write_raw(root, path, int(chosen.gib * GIB))
        print(
            f"{what}: {count} raw images, {path.stat().st_size / GIB:.1f} GiB, {time.perf_counter() - start:.0f} s"
        )
        rows: list[Row] = []
        for codec in chosen.codecs:
            start = time.perf_counter()
            with cached(path, codec) as dataset:
                print(
                    f"{dataset.storage_plan.reason}, written in {time.perf_counter() - start:.0f} s"
                )
            title = f"{codec if codec != RAW else 'raw'} images, {chosen.gib:g} GiB against {chosen.limit_gib:g} GiB"
            rows += compare(
                title,
                {
                    "in memory, a quarter of them": partial(
                        serve_from_memory, path, count // 4, codec
                    ),
                    "from disk, no limit": partial(serve_from_disk, path, codec),
                    "chunked": partial(serve_chunked, path, limit, codec),
                },
                chosen.seconds,
                chosen.rounds,
                limit,
            )
            rows += compare(
                f"{title}, read from the disk each epoch",
                {
                    "from disk, no limit": partial(serve_from_disk, path, codec),
                    "chunked, page cache emptied": partial(
                        serve_chunked, path, limit, codec, empties_cache=True
                    ),
                },
                chosen.seconds,
                chosen.rounds,
                limit,
                is_cold=True,
            )
        rows += compare(
            f"JPEGs of a folder, decoded each epoch, against {chosen.limit_gib:g} GiB, batch {BATCH}",
            {
                "torch and torchvision, 2 workers": partial(decode_folder, root),
                "chunked, decoded by 2 threads": partial(serve_folder, root, limit),
            },
            chosen.seconds,
            chosen.rounds,
            limit,
        )
    print_rows(rows)
    save_rows(
        rows, chosen.json, images=what, raw_images=count, limit_bytes=limit, rounds=chosen.rounds
    )


if __name__ == "__main__":
    main()
