"""``fastdata bench``: one training transform over one folder, by torchvision and torch (vanilla) and by fastdata."""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from fastdata import images
from fastdata.errors import refuse_remote
from fastdata.folder import ImageFolder
from fastdata.images import IMAGE_EXTENSIONS
from fastdata.loader import DataLoader
from fastdata.memory import tree_pss_bytes, usable_cores
from fastdata.report import progress_bar

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Loader = Iterable[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """What to measure, as the options of ``fastdata bench`` say it."""

    folder: Path | None
    images: int | None
    resize_px: int
    crop_px: int
    batch_size: int
    rounds: int
    dtype: Literal["uint8", "float32"]
    num_workers: int | None
    progress: bool
    round_s: float = 0.5  # fastdata's epochs are repeated for so long in each round: one can be too short to time


def run_bench(settings: BenchSettings) -> dict[str, Any]:
    """Measure both in turns and return what ``--json`` keeps; leaves no file, process or thread."""
    vanilla_name, transforms, vanilla_folder = find_vanilla()
    transform = training_transform(transforms, settings)
    with ExitStack() as stack:
        folder = settings.folder
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="fastdata-bench-")))
            write_photos(folder, count=settings.images or 400, progress=settings.progress)
        root, paths = os.path.abspath(folder), choose_images(folder, settings.images or 4000)
        chosen: dict[str, Any] = {"is_valid_file": frozenset(paths).__contains__, "allow_empty": True}
        mean_file_bytes = sum(map(os.path.getsize, paths)) // len(paths)
        start_pss_bytes = tree_pss_bytes()
        bar = progress_bar(settings.rounds + 3, "measuring", unit="step", enabled=settings.progress)
        step = stack.enter_context(bar).update

        originals = vanilla_folder(root, transform, **chosen)
        vanilla, make_vanilla = _enter(settings, TorchDataLoader, originals, budget_s=2 * settings.round_s)
        step()
        with peak_memory() as preparing:
            start = time.perf_counter()
            chosen |= {"storage": "shared", "fill": "eager", "progress": settings.progress}
            prepared = stack.enter_context(ImageFolder(root, transform, **chosen))
            prepare_s = time.perf_counter() - start
        ours, make_ours = _enter(settings, DataLoader, prepared, budget_s=settings.round_s)
        ours["peak_pss_bytes"] = max(ours["peak_pss_bytes"], preparing.size_bytes)
        step()

        loaders = [(make_vanilla(), 0.0), (make_ours(), settings.round_s)]
        for loader, _ in loaders:
            images_per_s(loader)
        step()
        rounds = []
        for _ in range(settings.rounds):
            rounds.append([images_per_s(loader, at_least_s=seconds) for loader, seconds in loaders])
            step()

    vanilla_rates, our_rates = zip(*rounds, strict=True)
    vanilla |= {"name": vanilla_name, "prepare_s": 0.0, "images_per_s": {"rounds": vanilla_rates}}
    ours |= {"name": "fastdata", "prepare_s": prepare_s, "images_per_s": {"rounds": our_rates}}
    figures = {
        "settings": asdict(settings),
        "images": len(paths),
        "mean_file_bytes": mean_file_bytes,
        "start_pss_bytes": start_pss_bytes,
        "vanilla": vanilla,
        "fastdata": ours,
        "ratio": median(our_rates) / median(vanilla_rates),
    }
    return {"figures": figures, "versions": versions(), "machine": machine_facts()}


def _enter(
    settings: BenchSettings, kind: Callable[..., Loader], dataset: Any, *, budget_s: float
) -> tuple[dict[str, Any], Callable[[], Loader]]:
    """Choose the number of workers, then look at memory and at the first batch."""

    def make_loader(workers: int) -> Loader:  # whose workers persist, so that rounds do not pay for starting them
        persistent = workers > 0
        return kind(dataset, settings.batch_size, shuffle=True, num_workers=workers, persistent_workers=persistent)

    workers = settings.num_workers
    if workers is None:
        workers = best_workers(make_loader, range(usable_cores() + 1), budget_s=budget_s)
    make = partial(make_loader, workers)
    with peak_memory() as peak:
        images_per_s(make())
    return {"num_workers": workers, "peak_pss_bytes": peak.size_bytes, "first_batch_s": first_batch_s(make)}, make


def training_transform(v1: Any, settings: BenchSettings) -> Any:
    """Resize and centre crop to a square, then random crop and flip, as uint8 or as normalised float32."""
    square = [v1.Resize(settings.resize_px), v1.CenterCrop(settings.resize_px)]
    random = [v1.RandomCrop(settings.crop_px), v1.RandomHorizontalFlip()]
    as_float = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return v1.Compose([*square, *random, *(as_float if settings.dtype == "float32" else [v1.PILToTensor()])])


def find_vanilla() -> tuple[str, Any, Callable[..., Any]]:
    """Name, transforms and ImageFolder of torchvision; where it cannot be imported, of what stands in for it."""
    try:
        torchvision = importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # RuntimeError: it was built for another torch
        return "torchvision's equal + torch", StandIns, PillowFolder
    return "torchvision + torch", torchvision.transforms, torchvision.datasets.ImageFolder


class PillowFolder(Dataset[tuple[Any, int]]):
    """Class folders of images, decoded by Pillow at every access."""

    def __init__(self, root: str, transform: Any, *, is_valid_file: Callable[[str], bool], allow_empty: bool) -> None:
        assert allow_empty
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        files = [sorted(map(str, Path(root, name).rglob("*"))) for name in classes]
        self.samples = [(path, label) for label, paths in enumerate(files) for path in paths if is_valid_file(path)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            return self.transform(Image.open(file).convert("RGB")), label


class Equal:
    """A class of torchvision's name, by which ``plan_transform`` knows it."""

    __torchvision_equal__: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.__torchvision_equal__ = cls.__name__


class StandIns:
    """Transforms of torchvision's names, attributes, pixels and draws, as far as ``training_transform`` needs them."""

    @dataclass
    class Compose(Equal):
        transforms: list[Any]

        def __call__(self, image: Any) -> Any:
            for transform in self.transforms:
                image = transform(image)
            return image

    @dataclass
    class RandomCrop(Equal):
        size: int | tuple[int, int]
        padding, pad_if_needed, fill, padding_mode = None, False, 0, "constant"

        def __post_init__(self) -> None:
            self.size = (self.size, self.size) if isinstance(self.size, int) else self.size

        def __call__(self, image: Image.Image) -> Image.Image:
            height, width = self.size  # type: ignore[misc]
            if image.size == (width, height):
                return image
            top = int(torch.randint(0, image.height - height + 1, (1,)))
            left = int(torch.randint(0, image.width - width + 1, (1,)))
            return image.crop((left, top, left + width, top + height))

    class RandomHorizontalFlip(Equal):
        p = 0.5

        def __call__(self, image: Image.Image) -> Image.Image:
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < self.p else image

    class PILToTensor(Equal):
        def __call__(self, image: Image.Image) -> torch.Tensor:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    class ToTensor(PILToTensor):
        def __call__(self, image: Image.Image) -> torch.Tensor:
            return super().__call__(image).contiguous().to(torch.float32).div(255)

    @dataclass
    class Normalize(Equal):
        mean: Sequence[float]
        std: Sequence[float]
        inplace = False

        def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
            return tensor.clone().sub_(mean).div_(std)

    Resize = images.Resize

    @staticmethod
    def CenterCrop(size: int) -> images.CenterCrop:
        return images.CenterCrop((size, size))


def import_extra(name: str, extra: str, *, feature: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{feature} needs {name}, which is not installed: pip install 'fastdata[{extra}]'") from error


def choose_images(root: Path, most: int) -> list[str]:
    """Absolute paths of at most so many images, spread evenly over the class folders."""
    refuse_remote(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder: give the root of class folders of images")
    files = glob.glob(os.path.join(glob.escape(os.path.abspath(root)), "*", "**", "*"), recursive=True)
    found = sorted(path for path in files if path.lower().endswith(IMAGE_EXTENSIONS))
    if not found:
        raise FileNotFoundError(
            f"{root} has no image in any class folder: images are expected as {root}/<class>/<name>.jpg "
            f"(also {', '.join(IMAGE_EXTENSIONS[1:])})"
        )
    return found if len(found) <= most else [found[index * len(found) // most] for index in range(most)]


def write_photos(
    root: Path, *, count: int, classes: int = 8, size: tuple[int, int] = (512, 384), progress: bool = False
) -> None:
    """Write ``count`` JPEGs of ``size`` (width, height) into class folders; the same arguments give the same pixels."""
    paths = [root / f"class{index % classes}" / f"{index:05}.jpg" for index in range(count)]

    def write(index: int) -> None:  # in a thread per core: Pillow releases the GIL
        paths[index].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo(index, size)).save(paths[index], quality=90)

    with ThreadPoolExecutor(os.cpu_count()) as pool, progress_bar(count, "drawing images", enabled=progress) as bar:
        try:
            for _ in pool.map(write, range(count)):
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)


def photo(seed: int, size: tuple[int, int] = (512, 384)) -> npt.NDArray[np.uint8]:
    """One image of ``size`` (width, height), uint8 (height, width, 3): smooth shapes, weaker colour, a grain."""
    rng = np.random.default_rng(seed)
    width, height = size

    def smooth(cells: int) -> npt.NDArray[np.float32]:  # of about unit variance, in shapes of 1/cells of the width
        grid = rng.standard_normal((max(2, cells * height // width), cells), dtype=np.float32)
        return np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)

    # Amplitudes fall as the shapes get finer, as the spectrum of photographs does; the fine end and the grain are set
    # so that 512x384 takes 60 to 110 KB at quality 90, as photographs of that size do.
    amplitudes = {3: 50.0, 8: 38.0, 20: 28.0, 50: 17.0, 120: 17.0}
    luma = np.sum([amplitude * smooth(cells) for cells, amplitude in amplitudes.items()], axis=0)
    colour = [30.0 * smooth(6) + 8.0 * smooth(40) for _ in range(3)]
    grain = 9.5 * rng.standard_normal((height, width), dtype=np.float32)
    planes = [120.0 + luma + tint + grain for tint in colour]
    return np.asarray(np.clip(np.stack(planes, axis=-1), 0, 255), dtype=np.uint8)


def images_per_s(loader: Loader, *, at_least_s: float = 0.0, whole_epochs: bool = True) -> float:
    """Images a second of epochs, one at least, until ``at_least_s`` has passed; else of batches until then."""
    images, start = 0, time.perf_counter()
    while True:
        for batch in loader:
            images += len(batch[0])
            if not whole_epochs and time.perf_counter() - start > at_least_s:
                break
        seconds = time.perf_counter() - start
        if seconds >= at_least_s or not images:
            return images / seconds


def first_batch_s(make_loader: Callable[[], Loader]) -> float:
    start = time.perf_counter()
    next(iter(make_loader()))
    return time.perf_counter() - start


def best_workers(make_loader: Callable[[int], Loader], candidates: Iterable[int], *, budget_s: float) -> int:
    """The smallest number of workers whose rate is within two percent of the highest.

    A rate is the better of two passes, taken in turns, of ``budget_s`` each: on a shared machine one that is disturbed
    would choose badly for the whole run.
    """
    rates = dict.fromkeys(candidates, 0.0)
    for _ in range(2):
        for count in rates:
            rate = images_per_s(make_loader(count), at_least_s=budget_s, whole_epochs=False)
            rates[count] = max(rates[count], rate)
    return min(count for count, rate in rates.items() if rate * 1.02 >= max(rates.values()))


@dataclass(slots=True)
class PeakMemory:
    """The highest PSS of this process and all below it so far: pages that several of them share count once."""

    size_bytes: int = 0

    def sample(self) -> None:
        self.size_bytes = max(self.size_bytes, tree_pss_bytes())


@contextmanager
def peak_memory(every_s: float = 0.1) -> Iterator[PeakMemory]:
    """Watch memory from a thread until the block ends; each look takes milliseconds, so time no epochs meanwhile."""
    peak = PeakMemory()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            peak.sample()

    thread = threading.Thread(target=watch, name="fastdata-peak-memory", daemon=True)
    peak.sample()
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak.sample()


def table(document: dict[str, Any]) -> str:
    figures, machine = document["figures"], document["machine"]
    settings, both = figures["settings"], [figures["vanilla"], figures["fastdata"]]
    rates = [side["images_per_s"]["rounds"] for side in both]
    first_s = [side["prepare_s"] + figures["images"] / median(rate) for side, rate in zip(both, rates, strict=True)]
    rows = [
        ("", *(side["name"] for side in both)),
        ("num_workers, the best", *(str(side["num_workers"]) for side in both)),
        ("prepare, once", "-", f"{both[1]['prepare_s']:.2f} s"),
        ("first batch", *(f"{side['first_batch_s'] * 1000:,.0f} ms" for side in both)),
        ("images/s, median", *(f"{median(rate):,.0f}" for rate in rates)),
        ("  lowest to highest", *(f"{min(rate):,.0f} to {max(rate):,.0f}" for rate in rates)),
        ("ratio", "1.0", f"{figures['ratio']:.1f}"),
        ("peak memory, PSS", *(f"{side['peak_pss_bytes'] / 2**20:,.0f} MiB" for side in both)),
        ("first epoch, all told", *(f"{seconds:.2f} s" for seconds in first_s)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{figures['images']:,} images ({settings['folder'] or 'drawn for this run'}), "
        f"{figures['mean_file_bytes'] / 1000:.0f} kB a file",
        f"Resize + CenterCrop {settings['resize_px']}, RandomCrop {settings['crop_px']} + flip, {settings['dtype']}, "
        f"batch {settings['batch_size']}; {settings['rounds']} rounds in turns",
        f"{machine['cpu_model']}, {machine['usable_cores']} cores",
        "",
        *(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows),
        "",
        "First epoch: preparation and one epoch, files in the page cache. "
        f"Memory before either: {figures['start_pss_bytes'] / 2**20:,.0f} MiB.",
    ]
    return "\n".join(lines)


def save_chart(document: dict[str, Any], path: Path) -> None:
    """Draw images/s, median with its range, as bars from zero."""
    import_extra("matplotlib", "plot", feature="--plot").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figures = document["figures"]
    rates = {side["name"]: side["images_per_s"]["rounds"] for side in (figures["vanilla"], figures["fastdata"])}
    medians = [median(rate) for rate in rates.values()]
    below_above = [[median(rate) - min(rate), max(rate) - median(rate)] for rate in rates.values()]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    bars = axes.bar(list(rates), medians, yerr=np.transpose(below_above), capsize=6, color=["#9aa5b1", "#2f7ed8"])
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in medians], padding=6)
    axes.margins(y=0.15)
    axes.set_ylabel("images/s")
    batch_size = figures["settings"]["batch_size"]
    axes.set_title(f"{figures['images']:,} images, batch {batch_size}: {figures['ratio']:.0f} times")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter, None for those not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("fastdata", "torch", "torchvision", "numpy", "pillow", "simplejpeg", "lz4", "zstandard"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine_facts() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu_model": models[0] if models else platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
    }
