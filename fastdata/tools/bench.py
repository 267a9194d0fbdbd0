"""``fastdata bench``: training transforms over one folder, by torchvision and torch (vanilla) and by fastdata."""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import os
import platform
import sys
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
from torch.utils.data import Dataset, Subset

from fastdata import images
from fastdata.errors import MemoryBudgetError, refuse_remote
from fastdata.folder import ImageFolder
from fastdata.images import IMAGE_EXTENSIONS
from fastdata.loader import DataLoader
from fastdata.memory import cpu_model, tree_pss_bytes, usable_cores
from fastdata.report import progress_bar

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RECIPES = ("crop", "rrc", "trivial", "randaug", "simclr")

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
    recipe: Sequence[str] | None = None  # by default all, or none beside a transform
    transform: str | None = None
    round_s: float = 0.5  # epochs are repeated for so long in each round: one can be too short to time


def run_bench(settings: BenchSettings) -> dict[str, Any]:
    """Measure both in turns and return what ``--json`` keeps; leaves no file, process or thread."""
    vanilla_name, v1, vanilla_folder = find_vanilla()
    transforms = chosen_transforms(settings, v1)
    with ExitStack() as stack:
        folder = settings.folder
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="fastdata-bench-")))
            write_photos(folder, count=settings.images or 400, progress=settings.progress)
        root, paths = os.path.abspath(folder), choose_images(folder, settings.images or 1000)
        chosen: dict[str, Any] = {"is_valid_file": frozenset(paths).__contains__, "allow_empty": True}
        figures: dict[str, Any] = {
            "settings": asdict(settings),
            "images": len(paths),
            "mean_file_bytes": sum(map(os.path.getsize, paths)) // len(paths),
            "start_pss_bytes": tree_pss_bytes(),
            "vanilla": {"name": vanilla_name},
            "fastdata": {"name": "fastdata"},
            "recipes": {},
        }
        steps = len(transforms) * (settings.rounds + 1)
        bar = stack.enter_context(progress_bar(steps, "measuring", unit="step", enabled=settings.progress))
        for name, transform in transforms.items():
            is_sized = name in ("crop", settings.transform)  # it begins with the size that images are prepared at
            size = None if is_sized else (settings.resize_px, settings.resize_px)
            originals = vanilla_folder(root, transform, **chosen)
            prepare = partial(ImageFolder, root, transform, resize=size, progress=settings.progress, **chosen)
            figures["recipes"][name] = _measure(settings, figures, originals, prepare, bar.update)
    return {"figures": figures, "versions": versions(), "machine": machine_facts()}


def _measure(
    settings: BenchSettings,
    figures: dict[str, Any],
    originals: Any,
    prepare: Callable[..., ImageFolder],
    step: Callable[[], object],
) -> dict[str, Any]:
    """Measure a recipe; what is the same for all of them is looked at with the first and added to ``figures``."""
    vanilla, ours = figures["vanilla"], figures["fastdata"]
    make_vanilla = partial(_loader, settings, TorchDataLoader, originals)
    if "num_workers" not in vanilla:
        vanilla |= _look(settings, make_vanilla)
    with ExitStack() as stack:
        with peak_memory() as preparing:
            start = time.perf_counter()
            try:
                prepared = stack.enter_context(prepare(storage="shared", fill="eager"))
            except MemoryBudgetError as error:
                problem = str(error).partition(". Use ")[0]
                raise MemoryBudgetError(f"{problem}. Use fewer --images or a smaller --resize.") from error
            prepare_s = time.perf_counter() - start
        make_ours = partial(_loader, settings, DataLoader, prepared, images=len(prepared))
        if "num_workers" not in ours:
            ours |= {"prepare_s": prepare_s, **_look(settings, make_ours)}
            ours["peak_pss_bytes"] = max(ours["peak_pss_bytes"], preparing.size_bytes)

        loaders = [make_vanilla(vanilla["num_workers"]), make_ours(ours["num_workers"])]
        images = int(images_per_s(loaders[0]) * settings.round_s)
        if images > 2 * settings.batch_size * max(1, vanilla["num_workers"]):
            loaders[0] = make_vanilla(vanilla["num_workers"], images=images)
            images_per_s(loaders[0])
        images_per_s(loaders[1])
        step()
        rounds = []
        for _ in range(settings.rounds):
            rounds.append([images_per_s(loader, at_least_s=settings.round_s) for loader in loaders])
            step()
    rates = [{"images_per_s": {"rounds": rate}} for rate in zip(*rounds, strict=True)]
    ratios = [our_rate / rate for rate, our_rate in rounds]
    return {
        "vanilla": rates[0],
        "fastdata": rates[1] | {"prepare_s": prepare_s},
        "ratio": median(our_rate for _, our_rate in rounds) / median(rate for rate, _ in rounds),
        "ratios": {"rounds": ratios},
    }


def _loader(
    settings: BenchSettings, kind: Callable[..., Loader], dataset: Any, workers: int, *, images: int = 0
) -> Loader:
    """A loader of so many images, or else of a batch for each worker: of a slow recipe all would take minutes.

    Its workers persist, so that rounds do not pay for starting them, and all have equally many batches.
    """
    lot = settings.batch_size * max(1, workers)
    images = max(images // lot, 1) * lot
    if images < len(dataset):
        dataset = Subset(dataset, range(0, len(dataset) // images * images, len(dataset) // images))
    return kind(dataset, settings.batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def _look(settings: BenchSettings, make_loader: Callable[[int], Loader]) -> dict[str, Any]:
    """Choose the number of workers, then look at memory and at the first batch."""
    workers = settings.num_workers
    if workers is None:
        cores = usable_cores()
        candidates = sorted({0, cores, *(1 << power for power in range(cores.bit_length()))})
        workers = best_workers(make_loader, candidates, budget_s=settings.round_s, whole_epochs=True)
    with peak_memory() as peak:
        images_per_s(make_loader(workers))
    first_s = first_batch_s(partial(make_loader, workers))
    return {"num_workers": workers, "peak_pss_bytes": peak.size_bytes, "first_batch_s": first_s}


def chosen_transforms(settings: BenchSettings, v1: Any) -> dict[str, Any]:
    """The transform of each recipe, under its name: those asked for, by default all that can be made."""
    names = settings.recipe or (() if settings.transform else RECIPES)
    missing = [name for name in names if v1 is StandIns and name != "crop"]
    if missing and settings.recipe:
        raise ImportError(f"--recipe {missing[0]} {_needs_torchvision()}")
    found = {name: training_transform(v1, settings, name) for name in names if name not in missing}
    if settings.transform:
        found[settings.transform] = _import_transform(settings.transform)
    return found


def _needs_torchvision() -> str:
    cure = "pip install 'fastdata[bench]'"
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError as error:
        cure = f"it is for another torch than this {torch.__version__} ({error}); install the two that belong together"
    return f"needs torchvision, which cannot be imported here: {cure}"


def _import_transform(words: str) -> Any:
    module, _, name = words.partition(":")
    if not (module and name):
        raise ValueError(f"--transform {words} is not module:name, as in --transform train:train_transform")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as missing:
        raise ImportError(f"--transform {words}: {missing}") from missing
    finally:
        sys.path.remove(os.getcwd())


def training_transform(v1: Any, settings: BenchSettings, recipe: str = "crop") -> Any:
    """One of ``RECIPES``, as uint8 or as normalised float32."""
    side_px, flip = settings.crop_px, v1.RandomHorizontalFlip()
    as_float = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    last = as_float if settings.dtype == "float32" else [v1.PILToTensor()]
    if recipe == "crop":
        square = [v1.Resize(settings.resize_px), v1.CenterCrop(settings.resize_px)]
        return v1.Compose([*square, v1.RandomCrop(side_px), flip, *last])
    steps: dict[str, Callable[[], list[Any]]] = {
        "rrc": list,
        "trivial": lambda: [v1.TrivialAugmentWide()],
        "randaug": lambda: [v1.RandAugment()],
        "simclr": lambda: [  # the view of its paper, as public reimplementations write it
            v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
            v1.RandomGrayscale(0.2),
            v1.RandomApply([v1.GaussianBlur(side_px // 20 * 2 + 1, (0.1, 2.0))], 0.5),
        ],
    }
    return v1.Compose([v1.RandomResizedCrop(side_px), flip, *steps[recipe](), *last])


STAND_INS = "torchvision's equal + torch"


def find_vanilla() -> tuple[str, Any, Callable[..., Any]]:
    """Name, transforms and ImageFolder of torchvision; where it cannot be imported, of what stands in for it."""
    try:
        torchvision = importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # RuntimeError: it was built for another torch
        return STAND_INS, StandIns, PillowFolder
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
    batches = iter(make_loader())
    next(batches)
    return time.perf_counter() - start  # before the loader ends, which waits for its workers


def best_workers(
    make_loader: Callable[[int], Loader], candidates: Iterable[int], *, budget_s: float, whole_epochs: bool = False
) -> int:
    """The smallest number of workers whose rate is within two percent of the highest.

    A rate is the better of two passes, taken in turns, of ``budget_s`` each: on a shared machine one that is disturbed
    would choose badly for the whole run. Of ``whole_epochs`` the second one is by workers that have started.
    """
    rates = dict.fromkeys(candidates, 0.0)
    loaders = {count: make_loader(count) for count in rates if whole_epochs}
    for _ in range(2):
        for count in rates:
            loader = loaders[count] if whole_epochs else make_loader(count)  # an epoch that was left would linger
            rate = images_per_s(loader, at_least_s=budget_s, whole_epochs=whole_epochs)
            rates[count] = max(rates[count], rate)
    return min(count for count, rate in rates.items() if rate * 1.02 >= max(rates.values()))


@dataclass(slots=True)
class PeakMemory:
    """The highest PSS of this process and all below it so far: pages that several of them share count once."""

    size_bytes: int


@contextmanager
def peak_memory(every_s: float = 0.1) -> Iterator[PeakMemory]:
    """Watch memory from a thread until the block ends; each look takes milliseconds, so time no epochs meanwhile."""
    peak, ended = PeakMemory(tree_pss_bytes()), threading.Event()

    def watch() -> None:
        is_over = False
        while not is_over:
            is_over = ended.wait(every_s)
            peak.size_bytes = max(peak.size_bytes, tree_pss_bytes())

    thread = threading.Thread(target=watch, name="fastdata-peak-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def table(document: dict[str, Any]) -> str:
    """The figures as text: a row for each recipe, then what was looked at with the first one only."""
    figures, machine = document["figures"], document["machine"]
    settings, both = figures["settings"], [figures["vanilla"], figures["fastdata"]]
    names = [side["name"] for side in both]
    rates = {
        name: [median(recipe[side]["images_per_s"]["rounds"]) for side in ("vanilla", "fastdata")]
        for name, recipe in figures["recipes"].items()
    }
    rows = [("images/s, median", *names, "ratio", "lowest to highest")]
    for name, recipe in figures["recipes"].items():
        ratios = recipe["ratios"]["rounds"]
        figure = [f"{rate:,.0f}" for rate in rates[name]]
        rows.append((name, *figure, f"{recipe['ratio']:.1f}", f"{min(ratios):.1f} to {max(ratios):.1f}"))
    first = next(iter(rates))
    prepare_s = both[1]["prepare_s"]
    first_s = [wait_s + figures["images"] / rate for wait_s, rate in zip((0, prepare_s), rates[first], strict=True)]
    rows += [
        ("", "", "", "", ""),
        (f"with {first}", *names, "", ""),
        ("num_workers, the best", *(str(side["num_workers"]) for side in both), "", ""),
        ("prepare, once", "-", f"{prepare_s:.2f} s", "", ""),
        ("first batch", *(f"{side['first_batch_s'] * 1000:,.0f} ms" for side in both), "", ""),
        ("peak memory, PSS", *(f"{side['peak_pss_bytes'] / 2**20:,.0f} MiB" for side in both), "", ""),
        ("first epoch, all told", *(f"{seconds:.2f} s" for seconds in first_s), "", ""),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    head = [
        f"{figures['images']:,} images ({settings['folder'] or 'drawn for this run'}), "
        f"{figures['mean_file_bytes'] / 1000:.0f} kB a file; {settings['dtype']}, batch {settings['batch_size']}; "
        f"{settings['rounds']} rounds in turns",
        f"{machine['cpu_model']}, {machine['usable_cores']} cores",
    ]
    notes = [
        "First epoch: preparation and one epoch, files in the page cache. "
        f"Memory before either: {figures['start_pss_bytes'] / 2**20:,.0f} MiB."
    ]
    if not {*RECIPES}.isdisjoint(rates):
        square, side_px = settings["resize_px"], settings["crop_px"]
        notes += [
            f"crop: Resize and CenterCrop {square}, RandomCrop {side_px}, flip. The others: RandomResizedCrop, flip,",
            f"and what their name says; {names[0]} reads the files, fastdata squares of {square}, prepared once.",
        ]
    left_out = [name for name in RECIPES if name not in rates]
    if left_out and names[0] == STAND_INS:
        notes.append(f"Each of {', '.join(left_out)} {_needs_torchvision()}.")
    return "\n".join([*head, "", *lines, "", *notes])


def save_chart(document: dict[str, Any], path: Path) -> None:
    """Draw images/s of each recipe, median with its range, as bars on a logarithmic axis."""
    figures, machine = document["figures"], document["machine"]
    recipes = figures["recipes"]
    with chart(path, width=4.0 + 1.2 * len(recipes), height=4.0, feature="--plot") as axes:
        for offset, side, colour in ((-0.2, "vanilla", "#9aa5b1"), (0.2, "fastdata", "#2f7ed8")):
            rates = [recipe[side]["images_per_s"]["rounds"] for recipe in recipes.values()]
            medians = [median(rate) for rate in rates]
            below_above = [[median(rate) - min(rate), max(rate) - median(rate)] for rate in rates]
            places = [place + offset for place in range(len(recipes))]
            errors, name = np.transpose(below_above), figures[side]["name"]
            bars = axes.bar(places, medians, 0.38, yerr=errors, capsize=4, color=colour, label=name)
            axes.bar_label(bars, [f"{rate:,.0f}" for rate in medians], padding=4)
        labels = [f"{name}\n{recipe['ratio']:.0f} times" for name, recipe in recipes.items()]
        axes.set_xticks(range(len(recipes)), labels)
        axes.set_yscale("log")
        axes.margins(y=0.2)
        axes.set_ylabel("images/s, logarithmic")
        batch_size = figures["settings"]["batch_size"]
        axes.set_title(
            f"{machine['cpu_model']}, {machine['usable_cores']} cores\n{figures['images']:,} images, batch {batch_size}"
        )
        axes.legend()


@contextmanager
def chart(file: str | os.PathLike[str], *, width: float, height: float, feature: str) -> Iterator[Any]:
    """Axes of a chart, in inches, that is written at the end; without pyplot, whose backend is the user's choice."""
    import_extra("matplotlib", "plot", feature=feature)
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    yield figure.subplots()
    figure.savefig(file, dpi=150)


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter, None for those not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("fastdata", "torch", "torchvision", "numpy", "pillow", "lz4", "zstandard"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine_facts() -> dict[str, Any]:
    return {
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
    }
