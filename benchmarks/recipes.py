"""How fast are published recipes, compared with torchvision and torch, FFCV, DALI and TurboLoader?

Every recipe runs with fastdata from images prepared in memory at 256x256, with fastdata without any stored images,
and with torchvision and torch's DataLoader over the original files, in turns. Transforms take PIL images, as in
training scripts. The peers run the crop recipe if they are installed: ``pip install ffcv nvidia-dali-cuda120
turboloader``; FFCV is compiled by pip, which needs OpenCV and libjpeg-turbo with their headers, and pkg-config.
"""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from _helper import (
    Row,
    class_folders,
    datasets,
    epoch_rate,
    find_workers,
    first_batch_s,
    in_turns,
    parser,
    print_rows,
    save_rows,
    transforms,
    vanilla_loader,
)
from fastdata import DataLoader, ImageFolder
from fastdata.machine.limits import usable_cores
from fastdata.tools.recipes import IMAGENET_MEAN, IMAGENET_STD

BATCH = 64
PEERS = ("ffcv", "nvidia-dali", "turboloader")
ROUND_S = 2.0
SIDE_PX = 224

VANILLA, MEMORY, UNKEPT = (
    "torchvision + torch, from files",
    "fastdata, 256x256 in memory",
    "fastdata, storage='none'",
)

Measure = Callable[[], float]


def last_steps(*erasing: Any) -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD), *erasing]


def crop_and_flip() -> list[Any]:
    return [transforms.RandomResizedCrop(SIDE_PX), transforms.RandomHorizontalFlip()]


def simclr_view() -> list[Any]:
    """Return the view of the SimCLR paper, as its public reimplementations write it."""
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)
    return [
        *crop_and_flip(),
        transforms.RandomApply([jitter], 0.8),
        transforms.RandomGrayscale(0.2),
        transforms.RandomApply([transforms.GaussianBlur(23, (0.1, 2.0))], 0.5),
        *last_steps(),
    ]


def timm_default() -> list[Any] | None:
    """Return the steps of timm's create_transform(224, is_training=True); None if timm is not installed."""
    if importlib.util.find_spec("timm") is None:
        return None
    from timm.data import create_transform

    return list(create_transform(SIDE_PX, is_training=True).transforms)


CROP = "RandomResizedCrop, flip"
RECIPES: dict[str, Callable[[], list[Any] | None]] = {
    CROP: lambda: [*crop_and_flip(), *last_steps()],
    "+ TrivialAugmentWide, RandomErasing": lambda: [
        *crop_and_flip(),
        transforms.TrivialAugmentWide(),
        *last_steps(transforms.RandomErasing(0.1)),
    ],
    "+ RandAugment, RandomErasing": lambda: [
        *crop_and_flip(),
        transforms.RandAugment(),
        *last_steps(transforms.RandomErasing(0.25, value="random")),
    ],
    "SimCLR: jitter, grayscale, blur": simclr_view,
    "Resize, RandomCrop, flip, ColorJitter": lambda: [
        transforms.Resize((256, 256)),
        transforms.RandomCrop(SIDE_PX),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
        *last_steps(),
    ],
    "timm's default": timm_default,
}
TARGETS = (15_000, 6_000, 5_000, 2_500, 5_000, 4_000)


def ours(root: Path, steps: list[Any], **how: Any) -> tuple[Any, DataLoader[Any]]:
    """Return a prepared dataset, and a loader with its best number of workers."""
    dataset = ImageFolder(str(root), transforms.Compose(steps), **how)
    if how.get("storage") != "none":
        dataset.prepare()
    make = partial(DataLoader, dataset, batch_size=BATCH, shuffle=True)
    workers = find_workers(lambda count: make(num_workers=count), budget_s=1.0)
    return dataset, make(num_workers=workers, persistent_workers=workers > 0)


def vanilla(root: Path, steps: list[Any]) -> Any:
    originals = datasets.ImageFolder(str(root), transforms.Compose(steps))
    return vanilla_loader(originals, BATCH, find_workers(partial(vanilla_loader, originals, BATCH)))


def recipe_rows(root: Path, name: str, target: int, rounds: int) -> list[Row]:
    """Compare a recipe from memory and from files with vanilla; the crop recipe also with other loaders."""
    steps = RECIPES[name]()
    if steps is None:
        return []
    prepared, loader = ours(root, steps, storage="shared", resize=(256, 256))
    unkept, unkept_loader = ours(root, steps, storage="none")
    with prepared, unkept, TemporaryDirectory(prefix="fastdata-peers-") as work:
        print(f"{name}: {loader.report().path}; {unkept_loader.report().path}")
        loaders = {VANILLA: vanilla(root, steps), MEMORY: loader, UNKEPT: unkept_loader}
        if name == CROP:
            originals = datasets.ImageFolder(str(root), transforms.Resize((256, 256)))
            loaders |= peer_loaders(originals, Path(work))
        measures = {which: epoch_rate(loader, ROUND_S) for which, loader in loaders.items()}
        rates = in_turns(measures, rounds)
    times = 4.0 if "SimCLR" in name else 1.8
    targets = {MEMORY: f"{target:,}, 10 x", UNKEPT: f"{times} x"}
    against = {which: VANILLA for which in rates if which != VANILLA}
    return [
        Row(
            section=name,
            name=which,
            unit="images/s",
            rounds=rounds_of,
            against=against.get(which, ""),
            target=targets.get(which, ""),
        )
        for which, rounds_of in rates.items()
    ]


def form_rows(root: Path, rounds: int) -> list[Row]:
    """Measure RandomResizedCrop and flip for PIL images and tensors, from 256x256 and from images of full size."""
    section = "RandomResizedCrop, flip: forms"
    forms = {
        "PIL steps, float32": ([*crop_and_flip(), *last_steps()], "15,000"),
        "PIL steps, uint8": ([*crop_and_flip(), transforms.PILToTensor()], "18,000"),
        "tensor steps, float32": (
            [transforms.PILToTensor(), *crop_and_flip(), *_float_steps()],
            "15,000",
        ),
    }
    rates: dict[str, Measure] = {}
    opened = []
    for name, (steps, _) in forms.items():
        dataset, loader = ours(root, steps, storage="shared", resize=(256, 256))
        opened.append(dataset)
        rates[name] = epoch_rate(loader, ROUND_S)
    dataset, loader = ours(root, forms["PIL steps, float32"][0], storage="shared")
    opened.append(dataset)
    rates["PIL steps, from images as decoded"] = epoch_rate(loader, ROUND_S)
    figures = in_turns(rates, rounds)
    for dataset in opened:
        dataset.close()
    targets = {name: target for name, (_, target) in forms.items()} | {
        "PIL steps, from images as decoded": "9,000"
    }
    return [
        Row(section=section, name=name, unit="images/s", rounds=row, target=targets.get(name, ""))
        for name, row in figures.items()
    ]


def _float_steps() -> list[Any]:
    return [
        transforms.ConvertImageDtype(torch.float32),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]


def first_epoch_rows(root: Path, rounds: int) -> list[Row]:
    """Compare filling the store (decode, resize and crop every file) with vanilla's epoch and with bare decoding."""
    section = "first epoch: decode, Resize(256), CenterCrop(224)"
    steps = [transforms.Resize(256), transforms.CenterCrop(SIDE_PX), transforms.PILToTensor()]
    count = len(datasets.ImageFolder(str(root)))

    def fill() -> float:
        with ImageFolder(
            str(root),
            transforms.Compose(steps),
            storage="shared",
        ).prepare():
            pass
        return count

    def rate_of(action: Measure) -> float:
        import time

        start = time.perf_counter()
        done = action()
        return done / (time.perf_counter() - start)

    figures = in_turns(
        {
            "torchvision + torch": epoch_rate(vanilla(root, steps), ROUND_S),
            "bare simplejpeg, all cores": partial(rate_of, partial(decode_all, root)),
            "fastdata": partial(rate_of, fill),
        },
        rounds,
    )
    base, bare, filled = figures
    return [
        Row(section=section, name=base, unit="images/s", rounds=figures[base]),
        Row(section=section, name=bare, unit="images/s", rounds=figures[bare], against=base),
        Row(
            section=section,
            name=filled,
            unit="images/s",
            rounds=figures[filled],
            against=base,
            target="1.8 x",
        ),
        Row(
            section=section,
            name=filled + ".",
            unit="images/s",
            rounds=figures[filled],
            against=bare,
            target="0.7 x",
        ),
    ]


def decode_all(root: Path) -> float:
    """Decode every file with simplejpeg in as many threads as there are cores."""
    from concurrent.futures import ThreadPoolExecutor

    import simplejpeg

    paths = [path for path, _ in datasets.ImageFolder(str(root)).samples]

    def decode(path: str) -> None:
        simplejpeg.decode_jpeg(Path(path).read_bytes())

    with ThreadPoolExecutor(usable_cores()) as pool:
        return len(list(pool.map(decode, paths)))


def memory_rows(rounds: int) -> list[Row]:
    """Compare crops and flips of raw pixels with a bare copy or a bare conversion in one thread."""
    from serve import convert, copy_crops

    rng = np.random.default_rng(0)
    normalize = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    flip = transforms.RandomHorizontalFlip()
    cases: dict[str, tuple[tuple[int, int], int, int, list[Any], str]] = {
        "224 crop, flip, uint8": (
            (2000, 256),
            BATCH,
            224,
            [transforms.RandomCrop(224), flip, transforms.PILToTensor()],
            "80,000",
        ),
        "224 crop, flip, float32": (
            (2000, 256),
            BATCH,
            224,
            [transforms.RandomCrop(224), flip, *normalize],
            "30,000",
        ),
        "CIFAR at 112, flip, uint8": (
            (4000, 112),
            256,
            112,
            [flip, transforms.PILToTensor()],
            "0.8 of the copy",
        ),
        "CIFAR at 32, padded crop, flip, float32": (
            (50_000, 32),
            512,
            32,
            [transforms.RandomCrop(32, padding=4), flip, *normalize],
            "800,000",
        ),
    }
    rows = []
    for name, ((count, side), batch, crop, steps, target) in cases.items():
        from fastdata import CachedDataset

        pixels = torch.from_numpy(rng.integers(0, 256, (count, 3, side, side), np.uint8))
        samples = [(transforms.functional.to_pil_image(image), 0) for image in pixels]
        with CachedDataset(
            samples, transform=transforms.Compose(steps), storage="shared"
        ) as dataset:
            make = partial(DataLoader, dataset, batch_size=batch, shuffle=True)
            limit = (
                copy_crops(count, batch, side, crop) if "uint8" in name else convert(batch, crop)
            )
            figures = in_turns(
                {
                    "the bare copy or conversion, 1 thread": limit,
                    "fastdata, 1 thread": epoch_rate(make(num_workers=1), ROUND_S),
                    "fastdata, 2 threads": epoch_rate(make(num_workers=2), ROUND_S),
                },
                rounds,
            )
        bare, one, two = figures
        rows += [
            Row(section=name, name=bare, unit="images/s", rounds=figures[bare]),
            Row(section=name, name=one, unit="images/s", rounds=figures[one], against=bare),
            Row(
                section=name,
                name=two,
                unit="images/s",
                rounds=figures[two],
                against=one,
                target=f"{target}; 1.6 x",
            ),
        ]
    return rows


def start_rows(root: Path, rounds: int) -> list[Row]:
    """Measure how long ``import fastdata`` takes after torch's import, and the first batch of a new loader."""
    steps, workers = transforms.Compose([*crop_and_flip(), *last_steps()]), usable_cores()
    originals = datasets.ImageFolder(str(root), steps)

    def first_ms(make_loader: Callable[[], Any]) -> float:
        return 1000 * first_batch_s(make_loader)

    with (
        TemporaryDirectory(prefix="fastdata-compiled-") as compiled,
        ImageFolder(
            str(root),
            steps,
            storage="shared",
            resize=(256, 256),
        ).prepare() as prepared,
    ):
        make = partial(DataLoader, prepared, batch_size=BATCH, shuffle=True, num_workers=workers)
        figures = in_turns(
            {
                "import fastdata, after torch": partial(import_ms, compiled),
                "torchvision + torch": partial(
                    first_ms, partial(vanilla_loader, originals, BATCH, workers)
                ),
                "fastdata": partial(first_ms, make),
            },
            rounds,
        )
    added, theirs, mine = figures
    row = partial(Row, section="first batch from a new loader, batch 64", unit="ms")
    return [
        Row(section="start", name=added, unit="ms", rounds=figures[added], target="30 at most"),
        row(name=theirs, rounds=figures[theirs]),
        row(name=mine, rounds=figures[mine], target="under 50"),
    ]


def import_ms(compiled: str) -> float:
    """Return the milliseconds of ``import fastdata`` after torch, in a new process, with compiled modules."""
    code = f"""
import sys, time, torch
sys.dont_write_bytecode, sys.pycache_prefix = False, {compiled!r}
start = time.perf_counter()
import fastdata
print(1000 * (time.perf_counter() - start))
"""
    return float(subprocess.check_output([sys.executable, "-c", code], cwd=Path(__file__).parent))


def peer_loaders(originals: Any, work: Path) -> dict[str, Any]:
    """Return the loaders of other projects that are installed, by name.

    The name tells if the pixels differ from those of torchvision's antialiased filter.
    """
    found: dict[str, Any] = {}
    # DALI is last: after its turn it prepares two batches of its next epoch, which delays the next competitor. That is
    # the vanilla loader, whose turn is long.
    for module, loaders in {"ffcv": ffcv, "turboloader": turboloader, "nvidia.dali": dali}.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"no rows of {module}: {error}")
        else:
            found |= loaders(originals, work)
    return found


class Epochs:
    """A loader that calls a function for the iterator of each epoch."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return self.start()


def ffcv(originals: Any, work: Path) -> dict[str, Any]:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        Squeeze,
        ToTensor,
        ToTorchImage,
    )
    from ffcv.writer import DatasetWriter

    file = str(work / "images.beton")
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(file, fields, num_workers=usable_cores()).from_indexed_dataset(originals)
    crop = [RandomResizedCropRGBImageDecoder((SIDE_PX, SIDE_PX)), RandomHorizontalFlip()]
    normalize = NormalizeImage(
        255 * np.array(IMAGENET_MEAN), 255 * np.array(IMAGENET_STD), np.float32
    )
    loader = Loader(
        file,
        batch_size=BATCH,
        num_workers=usable_cores(),
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=False,
        pipelines={
            "image": [*crop, normalize, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return {"FFCV, 256x256 mapped, area filter": loader}


def turboloader(originals: Any, work: Path) -> dict[str, Any]:
    from turboloader import DataLoader, ImageNetNormalize, preprocess_to_tbl

    files, prepared = str(work / "files.tar"), str(work / "images.tbl")
    with tarfile.open(files, "w") as tar:
        for index, (path, _) in enumerate(originals.samples):
            tar.add(path, f"{index:08}.jpg")
    preprocess_to_tbl(files, prepared, image_size=256, num_workers=usable_cores())
    labels = torch.tensor(originals.targets)

    def epochs(file: str, **how: Any) -> Epochs:
        how |= {
            "output_format": "pytorch",
            "image_size": SIDE_PX,
            "train_aug": True,
            "transform": ImageNetNormalize(),
        }
        loader, numbers = (
            DataLoader(file, BATCH, usable_cores(), shuffle=True, **how),
            itertools.count(),
        )

        def start() -> Iterator[Any]:
            loader.set_epoch(next(numbers))
            for images, about in loader:
                yield torch.from_numpy(images), labels[about["indices"]]

        return Epochs(start)

    return {
        "TurboLoader, 256x256, no antialias": epochs(prepared),
        "TurboLoader, from a tar of files": epochs(files, antialias=True),
    }


def dali(originals: Any, work: Path) -> dict[str, Any]:
    from nvidia.dali import Pipeline, fn
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    pixels = [np.asarray(image) for image, _ in originals]
    targets = np.array(originals.targets)[:, None]

    def batches() -> Iterator[Any]:
        for chosen in torch.randperm(len(pixels)).split(BATCH):
            yield [pixels[index] for index in chosen], list(targets[chosen])

    def from_memory() -> Any:
        images, labels = fn.external_source(
            Epochs(batches), 2, cycle="raise", no_copy=True, layout=["HWC", ""]
        )
        return fn.random_resized_crop(images, size=SIDE_PX), labels

    def from_files() -> Any:
        files, labels = fn.readers.file(file_root=originals.root, random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(
            files, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        return fn.resize(images, size=[SIDE_PX, SIDE_PX]), labels

    def epochs(read: Callable[[], Any], **how: Any) -> Epochs:
        with Pipeline(BATCH, usable_cores(), None) as pipeline:
            images, labels = read()
            scale = {
                "mean": [255 * mean for mean in IMAGENET_MEAN],
                "std": [255 * std for std in IMAGENET_STD],
            }
            pipeline.set_outputs(
                fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **scale), labels
            )
        loader = DALIGenericIterator([pipeline], ["images", "labels"], auto_reset=True, **how)
        return Epochs(lambda: ((batch["images"], batch["labels"]) for [batch] in loader))

    return {
        "DALI, 256x256 in memory": epochs(from_memory),
        "DALI, from files": epochs(
            from_files, reader_name="files", last_batch_policy=LastBatchPolicy.PARTIAL
        ),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--count",
        type=int,
        default=2000,
        help="number of files; images are copied as often as needed",
    )
    sections = ("start", "memory", "forms", "first", "recipes")
    options.add_argument(
        "--sections", nargs="+", choices=sections, default=sections, help="sections to run"
    )
    args = options.parse_args()
    rows: list[Row] = []
    if "memory" in args.sections:
        rows += memory_rows(args.rounds)
    with class_folders(args.images, count=args.count) as (root, words):
        if "start" in args.sections:
            rows += start_rows(root, args.rounds)
        if "forms" in args.sections:
            rows += form_rows(root, args.rounds)
        if "first" in args.sections:
            rows += first_epoch_rows(root, args.rounds)
        if "recipes" in args.sections:
            for name, target in zip(RECIPES, TARGETS, strict=True):
                rows += recipe_rows(root, name, target, args.rounds)
    print_rows(rows)
    peers = {
        found.name: found.version
        for found in metadata.distributions()
        if found.name.startswith(PEERS)
    }
    save_rows(rows, args.json, images=words, batch_size=BATCH, count=args.count, peers=peers)


if __name__ == "__main__":
    main()
