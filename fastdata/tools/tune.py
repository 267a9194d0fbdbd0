"""``fastdata.tune``: the loader's settings that read a dataset fastest on this machine.

``ascend`` moves one parameter at a time while that wins, until a round over all of them changes
nothing. It measures nothing itself: ``Judge`` decides who wins.
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
from fastdata.tools.judge import Judge, _prepared
from fastdata.tools.recipes import add_transform, find_transform, make_recipe
from fastdata.tools.tune_result import TuneResult, used_settings

if TYPE_CHECKING:
    from fastdata.tools.tune_result import LoaderSettings


_WORKERS_PER_GPU = 4  # the usual rule; where the search begins


def tune(
    dataset: Any,
    *,
    batch_size: int = 64,
    max_seconds: float = 60.0,
    parameters: Mapping[str, Sequence[Any]] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    progress: bool = True,
) -> TuneResult:
    """Measure which settings of a ``DataLoader`` read a dataset fastest, one parameter at a time.

    Each probe is an empty loop (no model) over shuffled samples in a forked process, after a
    warm-up. Settings that win by less than 25 % are measured again, in turns with those that they
    beat. Settings that need more processes or memory must gain 3 %. The search begins with 4
    workers, as the usual rule per GPU has it, or with as many as there are cores.

    No process is left behind. A dataset that is slow to read is probed with smaller batches.

    Args:
        dataset: any map-style dataset, fastdata's or not. If it is still being prepared, up to 512
            samples are prepared for the probes, and stay prepared.
        batch_size: samples in a batch.
        max_seconds: time limit; the best settings so far are the result when it is over.
        parameters: names of the loader's arguments and the values to choose from, numbers in
            ascending order; default: ``num_workers``, ``workers`` (threads or processes) and
            ``prefetch_factor``.
        collate_fn: the loader's argument; default: ``fastdata.collate``.
        progress: show a progress bar on standard error.

    Returns:
        A ``TuneResult``: ``DataLoader(dataset, shuffle=True, **result.best)``; ``print(result)``
        shows all probes.

    Raises:
        TimeoutError: no probe ended within ``max_seconds``.
        TypeError: a loader was given.
        Exception: an error of the dataset with the first settings, such as one that is empty or
            cannot be read by index.

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
    start["batch_size"] = batch_size
    began = time.perf_counter()
    with progress_bar(math.ceil(max_seconds), "tuning", unit="s", enabled=progress) as bar:
        judge = Judge(_prepared(dataset), collate_fn or collate, began + max_seconds, bar)
        # When the time is over, the best settings so far are the result.
        best = start
        judge.probe(used_settings(start))  # finds files and caches cold
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


# The search


def ascend(
    space: Mapping[str, Sequence[Any]],
    start: LoaderSettings,
    wins: Callable[[LoaderSettings, LoaderSettings], bool],
) -> Iterator[LoaderSettings]:
    """Move one parameter at a time while the challenger wins, and yield the winners.

    This is coordinate ascent. No worker at all is another engine without further parameters, and is
    tried last.
    """
    best = start
    before = None
    while best != before:
        before = best
        for name, values in space.items():
            if name == "num_workers" and start[name]:
                values = [value for value in values if value]
            # The start is in the middle, so that more and fewer workers are both tried.
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
    # The engine that "auto" takes is not tried a second time under its own name.
    engine = DataLoader(dataset, num_workers=1).report().engine
    return {
        "num_workers": sorted({0, 1, 2, 4, 8, 16, cores, 2 * cores, 4 * cores}),
        "workers": ("auto", "process" if engine == "thread" else "thread"),
        "prefetch_factor": (2, 4, 8),
    }


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="class folders of images")
    add_transform(parser, "default: 256 px squares, random crop to 224, flip, float32")
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
        help="as ImageFolder's: auto is what fits, none tunes decoding; default: %(default)s",
    )
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="time for all of it; default: %(default)g",
    )


def run(options: argparse.Namespace) -> int:
    check_folder(options.folder)
    own = options.transform
    transform = find_transform(own) if own else make_recipe("crop", "float32")
    with ImageFolder(options.folder, transform, storage=options.storage) as dataset:
        print(dataset.storage_plan.reason)
        print(tune(dataset, batch_size=options.batch_size, max_seconds=options.seconds))
    return 0
