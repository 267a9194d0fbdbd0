"""How fast is decoding: files that are not stored, a first epoch, stored JPEGs, and a bare decoder?

Each measurement runs in its own process; they take turns. ``--before`` adds another tree of fastdata, with its own
``benchmarks/decode.py``. The bare decoder is simplejpeg, in as many threads as there are cores; it decodes whole
images and drops them. ``--cpu`` measures CPU time instead of time, for a machine that is busy with other work; rates
are then multiplied by the number of cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _helper import (
    Row,
    class_folders,
    datasets,
    parser,
    print_rows,
    save_rows,
    transforms,
    vanilla_loader,
)
from fastdata import DataLoader, ImageFolder
from fastdata.machine.limits import usable_cores
from recipes import BATCH, RECIPES, SIDE_PX, crop_and_flip, last_steps

BARE = "bare simplejpeg, whole images"


def resize_and_crop() -> list[Any]:
    return [transforms.Resize(256), transforms.CenterCrop(SIDE_PX), *last_steps()]


def random_crop() -> list[Any]:
    return [*crop_and_flip(), *last_steps()]


VANILLA: dict[str, Callable[[], list[Any]]] = {"vanilla, RandomResizedCrop": random_crop}
VANILLA |= {"vanilla, Resize, CenterCrop": resize_and_crop}
UNKEPT: dict[str, Any] = {"storage='none', RandomResizedCrop": random_crop}
UNKEPT |= {"storage='none', Resize, CenterCrop": resize_and_crop}
UNKEPT |= {f"storage='none', {name}": RECIPES[name] for name in list(RECIPES)[1:4]}
FIRST: dict[str, Any] = {"first epoch, Resize, CenterCrop": resize_and_crop}
FIRST |= {"first epoch, RandomResizedCrop": random_crop}
KEPT = "codec='jpeg', 256 px in memory, RandomCrop"
CROPPED, RESIZED = VANILLA
AGAINST = {
    "storage='none', RandomResizedCrop": {CROPPED: "3.8 x", BARE: "1.25 x"},
    "first epoch, Resize, CenterCrop": {RESIZED: "2.6 x", BARE: "0.95 x"},
    "first epoch, RandomResizedCrop": {CROPPED: "2.5 x", BARE: ""},
}
"""Row -> the rows that it is compared with, and the ratios that it should reach."""


def read_all(loader: Any) -> int:
    return sum(len(labels) for _, labels in loader)


def fastdata_loader(root: Path, steps: list[Any], **options: Any) -> Any:
    dataset = ImageFolder(str(root), transforms.Compose(steps), **options)
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=usable_cores())


def decode_all(paths: list[str]) -> int:
    import simplejpeg

    def decode(path: str) -> None:
        simplejpeg.decode_jpeg(Path(path).read_bytes())

    with ThreadPoolExecutor(usable_cores()) as pool:
        return len(list(pool.map(decode, paths)))


def measure(name: str, root: Path, *, by_cpu: bool) -> float:
    """Return images per second of one round, after a warm-up that imports modules and reads some files."""
    if name == BARE:
        paths = [path for path, _ in datasets.ImageFolder(str(root)).samples]
        decode_all(paths[:100])
        action = partial(decode_all, paths)
    elif name in VANILLA:
        originals = datasets.ImageFolder(str(root), transforms.Compose(VANILLA[name]()))
        loader = vanilla_loader(originals, BATCH, 0 if by_cpu else usable_cores())
        originals[0]
        if by_cpu:
            torch.set_num_threads(1)  # torch's waiting threads would add CPU time
        else:  # start the workers, which persist
            next(iter(loader))
        action = partial(read_all, loader)
    elif name in FIRST:
        with ImageFolder(str(root), transforms.Compose(FIRST[name]()), storage="none") as warm:
            warm.__getitems__([0, 1])

        def action() -> int:
            return read_all(fastdata_loader(root, FIRST[name]()))

    elif name == KEPT:
        steps = [transforms.RandomCrop(SIDE_PX), transforms.RandomHorizontalFlip(), *last_steps()]
        loader = fastdata_loader(root, steps, storage="compressed", codec="jpeg", resize=(256, 256))
        read_all(loader)
        action = partial(read_all, loader)
    else:
        loader = fastdata_loader(root, UNKEPT[name](), storage="none")
        next(iter(loader))
        action = partial(read_all, loader)
    wall_s, cpu_s = time.perf_counter(), sum(os.times()[:4])
    done = action()
    wall_s, cpu_s = time.perf_counter() - wall_s, sum(os.times()[:4]) - cpu_s
    return done / (cpu_s / usable_cores() if by_cpu else wall_s)


def in_process(name: str, root: Path, by_cpu: bool, tree: str = "") -> float:
    environment = os.environ | ({"PYTHONPATH": tree} if tree else {})
    script = Path(tree, "benchmarks", "decode.py") if tree else Path(__file__)
    command = [
        sys.executable,
        str(script),
        "--measure",
        name,
        "--images",
        str(root),
        *["--cpu"] * by_cpu,
    ]
    return float(subprocess.check_output(command, env=environment).split()[-1])


def rows_of(
    root: Path, before: str, rounds: int, chosen: list[str], *, by_cpu: bool
) -> Iterator[Row]:
    names = [name for name in (*UNKEPT, *FIRST, KEPT) if any(word in name for word in chosen)]
    competitors = {
        name: partial(in_process, name, root, by_cpu) for name in (BARE, *VANILLA, *names)
    }
    if before:
        competitors |= {
            f"{name}: before": partial(in_process, name, root, by_cpu, before) for name in names
        }
    figures: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(rounds):
        for name, take in competitors.items():
            figures[name].append(take())
    for name in (BARE, *VANILLA):
        yield Row(section="rivals", name=name, unit="images/s", rounds=tuple(figures[name]))
    for name in names:
        row = partial(Row, section=name, unit="images/s", rounds=tuple(figures[name]))
        if before:
            yield Row(
                section=name,
                name="before",
                unit="images/s",
                rounds=tuple(figures[f"{name}: before"]),
            )
            yield row(name="now", against="before")
        else:
            yield row(name="now")
        for rival, target in AGAINST.get(name, {}).items():
            yield Row(section=name, name=rival, unit="images/s", rounds=tuple(figures[rival]))
            yield row(name=f"now, beside {rival}", against=rival, target=target)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--count",
        type=int,
        default=2000,
        help="number of files; images are copied as often as needed",
    )
    options.add_argument("--before", default="", help="source tree of fastdata to compare with")
    options.add_argument(
        "--rows",
        nargs="+",
        default=["storage", "first", "codec"],
        help="measure only rows with one of these words in their name",
    )
    options.add_argument("--cpu", action="store_true", help="measure CPU time instead of time")
    options.add_argument(
        "--measure",
        help="measure one round of one row in this process (the script calls itself with it)",
    )
    args = options.parse_args()
    if args.measure:
        print(measure(args.measure, args.images, by_cpu=args.cpu))
        return
    with class_folders(args.images, count=args.count) as (root, words):
        rows = list(rows_of(root, args.before, args.rounds, args.rows, by_cpu=args.cpu))
    print_rows(rows)
    measured = "CPU time, times the cores" if args.cpu else "time"
    save_rows(rows, args.json, images=words, batch_size=BATCH, count=args.count, measured=measured)


if __name__ == "__main__":
    main()
