"""Does ``fastdata.diagnose`` find the limit of a loop, and how much does it slow the loop down?

Six loops over synthetic photographs are slow for different reasons: decoding, a source with 4 MB/s, the model, a
collate_fn, the copy to a device (a simulated one in CPU memory, tests/simcuda.py, whose copies take 40 ms), and too
few workers. For the cost, a bare loop and the same loop run by ``diagnose`` take turns.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from _helper import (
    Row,
    class_folders,
    datasets,
    in_turns,
    parser,
    print_rows,
    save_rows,
    transforms,
)
from fastdata import CudaPrefetcher
from fastdata.machine.limits import usable_cores
from fastdata.tools.diagnose import diagnose
from fastdata.tools.timed_loop import TimedLoop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from simcuda import Sim

BATCH = 16
BYTES_PER_S = 4e6
COPY_S = 0.04


def read_slowly(path: str) -> Image.Image:
    """Load an image as slowly as from a source that gives each reader ``BYTES_PER_S``."""
    octets = Path(path).read_bytes()
    time.sleep(len(octets) / BYTES_PER_S)
    return Image.open(io.BytesIO(octets)).convert("RGB")


def collate_slowly(samples: list[Any]) -> Any:
    """Collate as slowly as code that pads in Python: compare each value of some rows."""
    for image, _ in samples:
        for row in image[0, :40]:
            max(row.tolist(), key=lambda value: value - 0.5)
    return default_collate(samples)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, 2),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def loops(root: Path) -> dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]]:
    """Return for each limit a function that makes a loader and a step."""
    crop = transforms.Compose([transforms.CenterCrop(64), transforms.ToTensor()])
    photos, model = partial(datasets.ImageFolder, root, crop), conv_net()
    loader = partial(DataLoader, batch_size=BATCH, shuffle=True, num_workers=usable_cores())
    images = TensorDataset(torch.rand(2000, 3, 64, 64), torch.arange(2000))

    def quick(batch: Any) -> None:
        batch[0].mean()

    def train(batch: Any) -> None:
        model(batch[0]).sum().backward()

    return {
        "decode": lambda: (loader(photos()), quick),
        "disk": lambda: (loader(photos(loader=read_slowly)), quick),
        "model": lambda: (loader(images), train),
        "collate": lambda: (loader(images, collate_fn=collate_slowly), quick),
        "host-to-device": lambda: (CudaPrefetcher(loader(images), "cuda:0"), quick),
        "workers": lambda: (loader(photos(), num_workers=0), quick),
    }


def step_ms(
    loader: Any,
    step: Callable[[Any], Any],
    batches: int,
    clock: Callable[[], float],
    *,
    is_diagnosed: bool,
) -> float:
    """Return the mean milliseconds from the end of one step to the end of the next."""
    stamps: list[float] = []

    def stamped(batch: Any) -> None:
        step(batch)
        stamps.append(clock())

    if is_diagnosed:
        for batch in islice(TimedLoop(loader), batches):
            stamped(batch)
    else:
        for batch in islice(loader, batches):
            stamped(batch)
    return 1000 * (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def cost(root: Path, rounds: int) -> list[Row]:
    """Measure what diagnosing adds to a step of a slow loop and of a fast one, and its own CPU time for each step."""
    crop = transforms.Compose([transforms.CenterCrop(64), transforms.ToTensor()])
    photos = DataLoader(datasets.ImageFolder(root, crop), batch_size=BATCH, num_workers=1)
    images = DataLoader(TensorDataset(torch.rand(24000, 3, 32, 32)), batch_size=BATCH)
    rows = []
    for name, loader, batches, clock in (
        ("photographs, 1 worker: time", photos, 25, time.perf_counter),
        ("CIFAR's size in memory, inline: CPU time of its thread", images, 1500, time.thread_time),
    ):
        step: Callable[[Any], Any] = lambda batch: batch[0].mean()  # noqa: E731
        competitors = {
            form: partial(step_ms, loader, step, batches, clock, is_diagnosed=form == "diagnosed")
            for form in ("bare", "diagnosed")
        }
        for form, figures in in_turns(competitors, rounds).items():
            against, target = ("bare", "1.02") if form == "diagnosed" else ("", "")
            section = f"a step of a loop over {name}"
            rows.append(
                Row(
                    section=section,
                    name=form,
                    unit="ms",
                    rounds=figures,
                    against=against,
                    target=target,
                )
            )
    own = partial(_own_us, [[torch.zeros(BATCH, 3)]] * 20000)
    section = "what diagnose does for each step: CPU time"
    return [
        *rows,
        Row(
            section=section,
            name="over batches in a list",
            unit="us",
            rounds=in_turns({"": own}, rounds)[""],
        ),
    ]


def _own_us(batches: list[Any]) -> float:
    nothing: Callable[[Any], None] = lambda batch: None  # noqa: E731
    ways = [
        step_ms(batches, nothing, len(batches), time.thread_time, is_diagnosed=each)
        for each in (True, False)
    ]
    return 1000 * (ways[0] - ways[1])


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    chosen = options.parse_args()
    rows: list[Row] = []
    with class_folders(chosen.images, count=400) as (root, _):
        for limit, make in loops(root).items():
            gpu = Sim()
            gpu.on_copy = partial(time.sleep, COPY_S)
            with gpu.installed() if limit == "host-to-device" else nullcontext():
                loader, step = make()
                begun = time.perf_counter()
                found = diagnose(loader, step, batches=50)
                seconds = time.perf_counter() - begun
                if isinstance(loader, CudaPrefetcher):
                    loader.close()
            print(f"{limit}: {found.limit}\n  {found.line}", file=sys.stderr)
            is_named = float(found.limit == limit)
            rows.append(
                Row(
                    section="is the culprit named? 1 if so", name=limit, unit="", rounds=(is_named,)
                )
            )
            rows.append(Row(section="a diagnosis", name=limit, unit="s", rounds=(seconds,)))
        rows += cost(root, chosen.rounds)
    print_rows(rows)
    save_rows(rows, chosen.json, batch=BATCH, rounds=chosen.rounds)


if __name__ == "__main__":
    main()
