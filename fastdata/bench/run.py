"""The main job on real input: one training transform, the vanilla road and fastdata's, in interleaved rounds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from fastdata.bench.images import write_photos
from fastdata.bench.measure import Loader, Spread, best_workers, first_batch_s, images_per_s, peak_memory
from fastdata.bench.vanilla import find_rival
from fastdata.decode import IMAGE_EXTENSIONS
from fastdata.folder import ImageFolder
from fastdata.loader import DataLoader
from fastdata.machine import tree_pss_bytes, usable_cores
from fastdata.report import progress_bar

__all__ = ["BenchResult", "BenchSettings", "Road", "run_bench"]

DRAWN_IMAGES = 400
MOST_IMAGES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """What to measure.

    Args:
        folder: class folders of images, or None to draw some.
        images: at most so many, spread evenly over the folder; or how many to draw. None: 4000, or 400 drawn ones.
        resize_px: side of the prepared square.
        crop_px: side of the random crop that is served.
        batch_size: images in a batch.
        rounds: measured epochs of each road, taken in turns.
        dtype: ``"uint8"``, or ``"float32"`` for normalised images.
        num_workers: of both loaders; None measures 0 to the number of cores for each and takes the best.
        round_s: fastdata's epochs are repeated for so long in each round, because one can be too short to time.
        progress: whether to draw progress bars on standard error.
    """

    folder: Path | None = None
    images: int | None = None
    resize_px: int = 256
    crop_px: int = 224
    batch_size: int = 64
    rounds: int = 5
    dtype: Literal["uint8", "float32"] = "uint8"
    num_workers: int | None = None
    round_s: float = 0.5
    progress: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Road:
    """What one of the two roads took.

    Args:
        name: as the table calls it.
        num_workers: of its loader.
        prepare_s: seconds before its first epoch could start; 0 for the vanilla road.
        first_batch_s: seconds from the loader's construction to its first batch.
        images_per_s: of whole epochs.
        peak_pss_bytes: of the process tree while preparing and serving.
    """

    name: str
    num_workers: int
    prepare_s: float
    first_batch_s: float
    images_per_s: Spread
    peak_pss_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """The two roads over the same images."""

    settings: BenchSettings
    images: int
    mean_file_bytes: int
    start_pss_bytes: int
    vanilla: Road
    fastdata: Road

    @property
    def ratio(self) -> float:
        """How many times fastdata's median is the vanilla one."""
        return self.fastdata.images_per_s.median / self.vanilla.images_per_s.median


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entrant:
    """A road that is ready to serve epochs."""

    name: str
    make_loader: Callable[[int], Loader]
    num_workers: int
    prepare_s: float
    peak_pss_bytes: int
    shortest_round_s: float


class _Chosen:
    """The images of the folder that take part; both ImageFolders take it as ``is_valid_file``."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._known = frozenset(paths)

    def __call__(self, path: str) -> bool:
        return os.path.abspath(path) in self._known


def run_bench(settings: BenchSettings) -> BenchResult:
    """Measure both roads; blocks until done and leaves no file, process or thread.

    Raises:
        FileNotFoundError: the folder does not exist or holds no image in a class folder.
    """
    rival = find_rival()
    transform = rival.training_transform(settings.resize_px, settings.crop_px, settings.dtype)
    with ExitStack() as stack:
        root = stack.enter_context(_image_root(settings))
        chosen = _choose_images(root, settings.images or MOST_IMAGES)
        start_pss_bytes = tree_pss_bytes(os.getpid())
        steps = stack.enter_context(
            progress_bar(settings.rounds + 3, "measuring", unit="step", enabled=settings.progress)
        )
        originals = rival.folder(str(root), transform, is_valid_file=chosen, allow_empty=True)
        vanilla = _enter_vanilla(settings, f"{rival.name} + torch", originals)
        steps.update()
        ours = _enter_fastdata(settings, stack, str(root), transform, chosen)
        steps.update()
        vanilla_road, our_road = _race(settings, (vanilla, ours), steps)
        return BenchResult(
            settings=settings,
            images=len(chosen.paths),
            mean_file_bytes=sum(map(os.path.getsize, chosen.paths)) // len(chosen.paths),
            start_pss_bytes=start_pss_bytes,
            vanilla=vanilla_road,
            fastdata=our_road,
        )


def _enter_vanilla(settings: BenchSettings, name: str, originals: Dataset[Any]) -> _Entrant:
    """The usual road, helped: its workers persist, so that rounds do not pay for starting them."""

    def make_loader(workers: int) -> Loader:
        return TorchDataLoader(
            originals,
            batch_size=settings.batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    workers = _choose_workers(settings, make_loader, budget_s=2 * settings.round_s)
    with peak_memory() as peak:
        images_per_s(make_loader(workers))
    return _Entrant(
        name=name,
        make_loader=make_loader,
        num_workers=workers,
        prepare_s=0.0,
        peak_pss_bytes=peak.size_bytes,
        shortest_round_s=0.0,
    )


def _enter_fastdata(settings: BenchSettings, stack: ExitStack, root: str, transform: Any, chosen: _Chosen) -> _Entrant:
    """Prepare in shared memory; ``stack`` gives it back."""
    with peak_memory() as peak:
        start = time.perf_counter()
        prepared = ImageFolder(
            root,
            transform,
            is_valid_file=chosen,
            allow_empty=True,
            storage="shared",
            fill="eager",
            progress=settings.progress,
        )
        prepare_s = time.perf_counter() - start
        stack.callback(prepared.close)

        def make_loader(workers: int) -> Loader:
            return DataLoader(prepared, batch_size=settings.batch_size, shuffle=True, num_workers=workers)

        workers = _choose_workers(settings, make_loader, budget_s=settings.round_s)
        images_per_s(make_loader(workers), at_least_s=settings.round_s)
    return _Entrant(
        name="fastdata",
        make_loader=make_loader,
        num_workers=workers,
        prepare_s=prepare_s,
        peak_pss_bytes=peak.size_bytes,
        shortest_round_s=settings.round_s,
    )


def _race(settings: BenchSettings, entrants: tuple[_Entrant, _Entrant], steps: Any) -> tuple[Road, Road]:
    """One warm-up epoch each, then the rounds in turns."""
    first_s = [first_batch_s(partial(entrant.make_loader, entrant.num_workers)) for entrant in entrants]
    loaders = [entrant.make_loader(entrant.num_workers) for entrant in entrants]
    for loader in loaders:
        images_per_s(loader)
    steps.update()
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(settings.rounds):
        for entrant, loader, row in zip(entrants, loaders, rates, strict=True):
            row.append(images_per_s(loader, at_least_s=entrant.shortest_round_s))
        steps.update()
    vanilla, ours = (
        Road(
            name=entrant.name,
            num_workers=entrant.num_workers,
            prepare_s=entrant.prepare_s,
            first_batch_s=seconds,
            images_per_s=Spread(rounds=tuple(row)),
            peak_pss_bytes=entrant.peak_pss_bytes,
        )
        for entrant, seconds, row in zip(entrants, first_s, rates, strict=True)
    )
    return vanilla, ours


def _choose_workers(settings: BenchSettings, make_loader: Callable[[int], Loader], *, budget_s: float) -> int:
    if settings.num_workers is not None:
        return settings.num_workers
    return best_workers(make_loader, range(usable_cores() + 1), budget_s=budget_s)


@contextmanager
def _image_root(settings: BenchSettings) -> Iterator[Path]:
    """The user's folder, or a temporary one with drawn images that goes when the block ends."""
    if settings.folder is not None:
        yield settings.folder
        return
    with TemporaryDirectory(prefix="fastdata-bench-") as folder:
        write_photos(Path(folder), count=settings.images or DRAWN_IMAGES, progress=settings.progress)
        yield Path(folder)


def _choose_images(root: Path, most: int) -> _Chosen:
    """At most ``most`` images, spread evenly over the class folders of ``root``."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder: give the root of class folders of images")
    found = [
        os.path.abspath(os.path.join(folder, name))
        for entry in sorted(root.iterdir())
        if entry.is_dir()
        for folder, _, names in os.walk(entry, followlinks=True)
        for name in sorted(names)
        if name.lower().endswith(IMAGE_EXTENSIONS)
    ]
    if not found:
        raise FileNotFoundError(
            f"{root} has no image in any class folder: images are expected as {root}/<class>/<name>.jpg "
            f"(also {', '.join(IMAGE_EXTENSIONS[1:])})"
        )
    if len(found) > most:
        found = [found[index * len(found) // most] for index in range(most)]
    return _Chosen(found)
