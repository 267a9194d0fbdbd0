"""How fast are compressed samples, samples kept as the files' own bytes, and a store that is filled on the first read?

Every section runs its competitors in turns. The limit of a codec is its decoder alone, on the same bytes; the limit
for files that are kept is torchvision's first epoch over them.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lz4.block
import numpy as np
import torch
from PIL import Image, ImageDraw

from _helper import (
    Row,
    class_folders,
    datasets,
    epoch_rate,
    find_workers,
    images_per_s,
    in_turns,
    parser,
    peak_memory,
    print_rows,
    save_rows,
    transforms,
    vanilla_loader,
)
from fastdata import CachedDataset, DataLoader, ImageFolder
from fastdata.machine.limits import usable_cores
from fastdata.pixels.decode import open_libjpeg
from fastdata.stores.codecs import JpegCodec, ZstdCodec
from serve import loader_of

ROUND_S = 1.5
SIDE_PX, CROP_PX, BATCH = 256, 224, 64
MB = 1e6

Measure = Callable[[], float]


def photo_transform(*, dense: bool = True) -> Any:
    resize = [transforms.Resize((SIDE_PX, SIDE_PX))] if dense else [transforms.Resize(SIDE_PX)]
    rest = [
        transforms.RandomCrop(CROP_PX),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
    ]
    return transforms.Compose([*resize, *rest])


def decode_alone(decode: Callable[[Any], object], encoded: Sequence[Any]) -> Measure:
    """Return a function that measures how many of these samples a second a decoder decodes in this thread."""

    def run() -> float:
        decoded, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < ROUND_S:
            decode(encoded[decoded % len(encoded)])
            decoded += 1
        return decoded / seconds

    return run


def open_with_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def encoded_of(dataset: Any) -> list[bytes]:
    store = dataset.reader().kept.images
    return [bytes(store.stored(index)) for index in range(len(store))]


def jpeg(root: Path, rounds: int) -> list[Row]:
    """Compare samples re-encoded as JPEG, decoded by fastdata's core or by Pillow, with bare Pillow on one core."""
    rows: list[Row] = []
    for codec, name in (
        (JpegCodec(), "quality 92, 4:4:4"),
        (JpegCodec(quality=90, subsampling="4:2:0"), "90, 4:2:0"),
    ):
        section = f"codec='jpeg', {name}: {CROP_PX} crop + flip of {SIDE_PX}x{SIDE_PX}, uint8, batch {BATCH}"
        with ImageFolder(str(root), photo_transform(), storage="compressed", codec=codec) as kept:
            cores = usable_cores()
            ours = epoch_rate(loader_of(kept, BATCH, cores), ROUND_S)
            competitors = {
                "Pillow alone, one core": decode_alone(open_with_pillow, encoded_of(kept))
            }
            competitors[f"fastdata, by Pillow alone, {cores} workers"] = partial(
                without_libjpeg, ours
            )
            if open_libjpeg()[0] is not None:
                competitors[f"fastdata, {cores} workers"] = ours
            rates = in_turns(competitors, rounds)
            raw_bytes = len(kept) * 3 * SIDE_PX * SIDE_PX
            kept_bytes = kept.reader().kept.images.size_bytes
        row = partial(Row, section=section, unit="images/s")
        pillow, *fastdata = rates
        rows.append(row(name=pillow, rounds=rates[pillow]))
        rows += [
            row(name=name, rounds=rates[name], against=pillow, target="1.7, or 5,000 images/s")
            for name in fastdata
        ]
        times = (raw_bytes / kept_bytes,)
        rows.append(
            row(name="smaller than raw", unit="times", rounds=times, target="6 at quality 90")
        )
    return rows


def without_libjpeg(measure: Measure) -> float:
    with ExitStack() as left_out:
        for name in ("fastdata.pixels.decode.open_libjpeg", "fastdata.stores.store.open_libjpeg"):
            left_out.enter_context(patch(name, lambda: (None, "left out")))
        return measure()


def zstd(root: Path, rounds: int) -> list[Row]:
    """Measure Zstandard: its ratio, its decoder alone on one core, and loaders."""
    with ImageFolder(str(root), photo_transform(), storage="compressed", codec="zstd") as kept:
        encoded = [memoryview(data) for data in encoded_of(kept)]
        out, codec = np.empty((3, SIDE_PX, SIDE_PX), np.uint8), ZstdCodec()
        competitors = {
            "alone": decode_alone(lambda data: codec.decode(data, out), encoded),
            **{str(n): epoch_rate(loader_of(kept, BATCH, n), ROUND_S) for n in (1, 2)},
        }
        rates = in_turns(competitors, rounds)
        ratio = len(kept) * 3 * SIDE_PX * SIDE_PX / kept.reader().kept.images.size_bytes
    row = partial(Row, section=f"codec='zstd', photographs of {SIDE_PX}x{SIDE_PX}", unit="images/s")
    return [
        row(name="smaller than raw", unit="times", rounds=(ratio,), target="1.7"),
        row(name="decoder alone, one core", rounds=rates["alone"], target="2,500"),
        *(
            row(name=f"fastdata, {n} workers", rounds=rates[n], against="decoder alone, one core")
            for n in ("1", "2")
        ),
    ]


def lz4_drawings(root: Path, rounds: int) -> list[Row]:
    """Compare label masks and drawings in LZ4 with its bare rate on one core, times the number of cores."""
    del root
    rows: list[Row] = []
    cores = usable_cores()
    for kind, mode in (("label masks", "L"), ("drawings", "RGB")):
        items = [(torch.from_numpy(drawn(seed, mode)), 0) for seed in range(300)]
        with CachedDataset(items, storage="compressed", codec="lz4") as kept:
            size_bytes = items[0][0].nbytes
            alone = decode_alone(
                partial(lz4.block.decompress, uncompressed_size=size_bytes), encoded_of(kept)
            )
            competitors = {
                "alone": alone,
                "two threads": partial(in_two_threads, alone),
                **{str(n): epoch_rate(loader_of(kept, BATCH, n), ROUND_S) for n in (0, 1, 2)},
            }
            rates = in_turns(competitors, rounds)
            ratio = len(kept) * size_bytes / kept.reader().kept.images.size_bytes
        row = partial(Row, section=f"codec='lz4', {kind} of 512x512", unit="samples/s")
        against = f"lz4 alone, one core, times {cores}"
        rows += [
            row(name="smaller than raw", unit="times", rounds=(ratio,)),
            row(name=against, rounds=tuple(cores * rate for rate in rates["alone"])),
            row(name="lz4 alone, two threads", rounds=rates["two threads"], against=against),
            *(
                row(name=f"fastdata, {n} workers", rounds=rates[n], against=against, target="0.7")
                for n in "012"
            ),
        ]
    return rows


def drawn(seed: int, mode: str) -> np.ndarray:
    """Return random shapes: a mask (H, W) of labels, or a drawing (3, H, W) with antialiased edges."""
    rng = np.random.default_rng(seed)
    image = Image.new(mode, (1024, 1024), "white" if mode == "RGB" else 0)
    pen = ImageDraw.Draw(image)
    for label in range(1, 21):
        x, y, width, height = rng.integers(0, 1024, 4) // (1, 1, 3, 3)
        fill = tuple(rng.integers(0, 256, 3).tolist()) if mode == "RGB" else label
        (pen.ellipse if label % 2 else pen.rectangle)((x, y, x + width, y + height), fill=fill)
    smooth = Image.Resampling.BILINEAR if mode == "RGB" else Image.Resampling.NEAREST
    pixels = np.asarray(image.resize((512, 512), smooth))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if mode == "RGB" else pixels.copy()


def in_two_threads(measure: Measure) -> float:
    with ThreadPoolExecutor(2) as threads:
        return sum(threads.map(lambda _: measure(), range(2)))


def source(root: Path, rounds: int) -> list[Row]:
    """Compare the files' own bytes in memory, prepared on each read, with torchvision's epoch over the files."""
    rows = []
    for dense in (True, False):
        transform = photo_transform(dense=dense)
        originals = datasets.ImageFolder(str(root), transform)
        vanilla_workers = find_workers(partial(vanilla_loader, originals, BATCH), budget_s=4)
        vanilla = vanilla_loader(originals, BATCH, vanilla_workers)
        with ImageFolder(str(root), transform, storage="compressed", codec="source") as kept:
            competitors = {
                "vanilla": epoch_rate(vanilla),
                "threads": epoch_rate(loader_of(kept, BATCH, 2)),
                "processes": epoch_rate(
                    DataLoader(
                        kept,
                        BATCH,
                        shuffle=True,
                        num_workers=2,
                        workers="process",
                        persistent_workers=True,
                    )
                ),
            }
            rates = in_turns(competitors, rounds)
        name = "Resize((256, 256))" if dense else "Resize(256)"
        row = partial(
            Row, section=f"codec='source', {name}, crop, flip, batch {BATCH}", unit="images/s"
        )
        against = f"vanilla, {vanilla_workers} workers"
        rows += [
            row(name=against, rounds=rates["vanilla"]),
            row(name="fastdata, 2 threads", rounds=rates["threads"], against=against, target="1.1"),
            row(name="fastdata, 2 processes", rounds=rates["processes"], against=against),
        ]
    return rows


def lazy(root: Path, rounds: int) -> list[Row]:
    """Compare a lazily filled store: its first epoch with storage='none', its second one with a prepared store."""

    def first_epoch(**options: Any) -> float:
        with ImageFolder(str(root), photo_transform(), **options) as dataset:
            return images_per_s(loader_of(dataset, BATCH, usable_cores()))

    def second_epoch(**options: Any) -> float:
        with ImageFolder(str(root), photo_transform(), **options) as dataset:
            loader = loader_of(dataset, BATCH, usable_cores())
            images_per_s(loader)
            return images_per_s(loader, at_least_s=ROUND_S)

    def filled_epoch() -> float:
        with ImageFolder(str(root), photo_transform()).prepare() as dataset:
            loader = loader_of(dataset, BATCH, usable_cores())
            return images_per_s(loader, at_least_s=ROUND_S)

    rates = in_turns(
        {
            "none": partial(first_epoch, storage="none"),
            "lazy": first_epoch,
            "lazy again": second_epoch,
            "prepared": filled_epoch,
        },
        rounds,
    )
    row = partial(
        Row, section=f"lazy filling, {usable_cores()} workers, batch {BATCH}", unit="images/s"
    )
    return [
        row(name="storage='none'", rounds=rates["none"]),
        row(
            name="lazy, first epoch", rounds=rates["lazy"], against="storage='none'", target="0.95"
        ),
        row(name="prepared, an epoch", rounds=rates["prepared"]),
        row(
            name="lazy, second epoch",
            rounds=rates["lazy again"],
            against="prepared, an epoch",
            target="1",
        ),
    ]


def memory(root: Path, rounds: int) -> list[Row]:
    """Compare the peak PSS of the process tree with 4 workers with the size of the encoded data."""
    del rounds
    options = {"storage": "compressed", "codec": "zstd"}
    with peak_memory() as peak, ImageFolder(str(root), photo_transform(), **options) as kept:
        for _ in range(3):
            images_per_s(loader_of(kept, BATCH, 4))
        kept_bytes = kept.reader().kept.images.size_bytes
    row = partial(
        Row, section="memory with 4 workers over 3 epochs (PSS of the process tree)", unit="MB"
    )
    return [
        row(name="encoded data", rounds=(kept_bytes / MB,)),
        row(
            name="peak",
            rounds=(peak.size_bytes / MB,),
            target=f"{1.15 * kept_bytes / MB + 400:,.0f} MB at most",
        ),
    ]


SECTIONS = {
    "memory": memory,
    "jpeg": jpeg,
    "zstd": zstd,
    "lz4": lz4_drawings,
    "source": source,
    "lazy": lazy,
}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--count",
        type=int,
        default=4000,
        help="number of files; photographs are copied as often as needed",
    )
    options.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run"
    )
    chosen = options.parse_args()
    rows: list[Row] = []
    with class_folders(chosen.images, count=chosen.count) as (root, what):
        for name in chosen.sections:
            rows += SECTIONS[name](root, chosen.rounds)
    print(what)
    print_rows(rows)
    save_rows(rows, chosen.json, images=what, rounds=chosen.rounds)


if __name__ == "__main__":
    main()
