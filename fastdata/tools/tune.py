"""``fastdata.tune``: find the settings of a loader that read a dataset fastest on this machine.

``ascend`` changes one parameter at a time as long as that is faster, until a round over all
parameters changes nothing. It measures nothing itself: ``Judge`` decides which settings win.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader as TorchDataLoader

from fastdata.datasets.batch import collate
from fastdata.datasets.folder import ImageFolder
from fastdata.loaders.loader import DataLoader
from fastdata.machine.limits import usable_cores
from fastdata.report import progress_bar
from fastdata.tools.arguments import check_folder, positive
from fastdata.tools.judge import Judge, prepare_some
from fastdata.tools.recipes import add_transform, find_transform, make_recipe
from fastdata.tools.tune_result import TuneResult, used_settings

if TYPE_CHECKING:
    from fastdata.tools.tune_result import LoaderSettings


_WORKERS_PER_GPU = 4  # the usual rule of thumb; the search begins there


def tune(
    dataset: Any,
    *,
    batch_size: int = 64,
    max_seconds: float = 60.0,
    parameters: Mapping[str, Sequence[Any]] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    progress: bool = True,
) -> TuneResult:
    """Find the settings of a ``DataLoader`` that read a dataset fastest, one parameter at a time.

    Each measurement (probe) is an empty loop, without a model, over shuffled samples in a forked
    process, after a warm-up. Settings that win by less than 25 % are measured again, in turns with
    the settings that they beat. Settings that need more processes or memory must be at least 3 %
    faster. The search begins with 4 workers, or with the number of cores if there are fewer.

    No process is left behind. Samples that are slow to read are measured in smaller batches.

    Args:
        dataset: any map-style dataset, of fastdata or not. If it is still being prepared, up to 512
            samples are prepared for the probes; they stay prepared.
        batch_size: number of samples in a batch, unless ``parameters`` has values for it.
        max_seconds: time limit in seconds. When it is over, the best settings so far are returned.
        parameters: names of the loader's arguments with the values to choose from, numbers in
            ascending order; by default ``num_workers``, ``workers`` (threads or processes) and
            ``prefetch_factor``.
        collate_fn: the loader's ``collate_fn``; by default ``fastdata.collate``.
        progress: False for no progress bar on standard error.

    Returns:
        A ``TuneResult``. Use it as ``DataLoader(dataset, shuffle=True, **result.best)``;
        ``print(result)`` shows all probes.

    Raises:
        TimeoutError: no probe has ended within ``max_seconds``.
        TypeError: a loader was given instead of a dataset.
        Exception: an error of the dataset with the first settings, for example because it is empty
            or cannot be read by index.

    Example:
        >>> squares = [(float(i), i * i) for i in range(50)]
        >>> options = {"parameters": {"num_workers": (0, 1)}, "max_seconds": 2, "progress": False}
        >>> result = tune(squares, batch_size=5, **options)
        >>> len(DataLoader(squares, **result.best))
        10
    """
    if isinstance(dataset, TorchDataLoader):
        raise TypeError(
            "tune needs the dataset, but got its loader: "
            f"tune(loader.dataset, batch_size={dataset.batch_size})"
        )
    space = parameters or _usual_space(dataset)
    usual = min(_WORKERS_PER_GPU, usable_cores())
    counts = space.get("num_workers", [usual])
    start = {name: values[0] for name, values in space.items()}
    start["num_workers"] = min(counts, key=lambda count: abs(count - usual))
    start.setdefault("batch_size", batch_size)
    began = time.perf_counter()
    with progress_bar(math.ceil(max_seconds), "tuning", unit="s", enabled=progress) as bar:
        judge = Judge(prepare_some(dataset), collate_fn or collate, began + max_seconds, bar)
        # When the time is over (TimeoutError), the best settings so far are the result.
        best = start
        judge.probe(used_settings(start))  # the first probe fills caches, and does not count
        is_complete = False
        with suppress(TimeoutError):
            judge.probe(used_settings(start))
            for better in ascend(space, start, judge.wins):
                best = better
            is_complete = True
    return TuneResult(
        best=used_settings(best),
        probes=judge.probes,
        seconds=time.perf_counter() - began,
        is_complete=is_complete,
    )


def ascend(
    space: Mapping[str, Sequence[Any]],
    start: LoaderSettings,
    wins: Callable[[LoaderSettings, LoaderSettings], bool],
) -> Iterator[LoaderSettings]:
    """Change one parameter at a time as long as that wins, and yield the winners.

    This is coordinate ascent. Zero workers are tried last, because they are another engine, without
    further parameters.

    Args:
        space: names of parameters with the values to choose from, in ascending order.
        start: settings to begin with.
        wins: function of (challenger, best) that returns True if the challenger is better.
    """
    best = start
    before = None
    while best != before:
        before = best
        for name, values in space.items():
            if name == "num_workers" and start[name]:
                values = [value for value in values if value]
            # Both directions are tried, because the start is in the middle of the values.
            for direction in (1, -1):
                ordered = values[::direction]
                for value in ordered[ordered.index(best[name]) + 1 :]:
                    challenger = best | {name: value}
                    if not wins(challenger, best):
                        break
                    best = challenger
                    yield best
    no_worker = best | {"num_workers": 0}
    if best["num_workers"] and 0 in space.get("num_workers", ()) and wins(no_worker, best):
        yield no_worker


def _usual_space(dataset: Any) -> dict[str, Sequence[Any]]:
    cores = usable_cores()
    # The engine that "auto" chooses is not measured a second time under its own name.
    engine = DataLoader(dataset, num_workers=1).report().engine
    return {
        "num_workers": sorted({0, 1, 2, 4, 8, 16, cores, 2 * cores, 4 * cores}),
        "workers": ("auto", "process" if engine == "thread" else "thread"),
        "prefetch_factor": (2, 4, 8),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fastdata tune``."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="folder with one folder of images for each class")
    add_transform(parser, "default: squares of 256 px, random crop to 224, flip, float32")
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="images in a batch; default: %(default)s",
    )
    add(
        "--storage",
        choices=("auto", "shared", "compressed", "none"),
        default="auto",
        help="storage= of ImageFolder: auto stores images where they fit, none decodes them in "
        "each epoch; default: %(default)s",
    )
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit of the search in seconds; default: %(default)g",
    )


def run(options: argparse.Namespace) -> int:
    """Search and print the result; return the exit status."""
    check_folder(options.folder)
    own = options.transform
    transform = find_transform(own) if own else make_recipe("crop", "float32")
    with ImageFolder(options.folder, transform, storage=options.storage) as dataset:
        print(dataset.storage_plan.reason)
        print(tune(dataset, batch_size=options.batch_size, max_seconds=options.seconds))
    return 0
