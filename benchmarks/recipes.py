"""How fast are the recipes that people publish, beside torchvision and torch, FFCV, DALI and TurboLoader?

Every recipe runs from images prepared at 256x256 in memory, and with nothing kept: fastdata, and torchvision with
torch's DataLoader over the original files, in turns. Peers serve the crop recipe where they are installed. PIL steps,
as training scripts have them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _helper import (
    Row,
    class_folders,
    datasets,
    epoch_rate,
    find_workers,
    in_turns,
    parser,
    print_rows,
    save_rows,
    transforms,
    vanilla_loader,
)
from fastdata import DataLoader, ImageFolder
from fastdata.bench import IMAGENET_MEAN, IMAGENET_STD, images_per_s

BATCH = 64
ROUND_S = 2.0
SIDE_PX = 224

Measure = Callable[[], float]


def last_steps(*erasing: Any) -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD), *erasing]


def crop_and_flip() -> list[Any]:
    return [transforms.RandomResizedCrop(SIDE_PX), transforms.RandomHorizontalFlip()]


def simclr_view() -> list[Any]:
    """The view of the SimCLR paper, as its public reimplementations write it."""
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)
    return [
        *crop_and_flip(),
        transforms.RandomApply([jitter], 0.8),
        transforms.RandomGrayscale(0.2),
        transforms.RandomApply([transforms.GaussianBlur(23, (0.1, 2.0))], 0.5),
        *last_steps(),
    ]


def timm_default() -> list[Any] | None:
    """Timm's create_transform(224, is_training=True); None where timm is not installed."""
    if importlib.util.find_spec("timm") is None:
        return None
    from timm.data import create_transform

    return list(create_transform(SIDE_PX, is_training=True).transforms)


RECIPES: dict[str, Callable[[], list[Any] | None]] = {
    "RandomResizedCrop, flip": lambda: [*crop_and_flip(), *last_steps()],
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
    """A prepared dataset, and a loader with its best number of workers."""
    dataset = ImageFolder(str(root), transforms.Compose(steps), progress=False, **how)
    make = partial(DataLoader, dataset, batch_size=BATCH, shuffle=True)
    workers = find_workers(lambda count: make(num_workers=count), budget_s=1.0)
    return dataset, make(num_workers=workers, persistent_workers=workers > 0)


def vanilla(root: Path, steps: list[Any]) -> Any:
    originals = datasets.ImageFolder(str(root), transforms.Compose(steps))
    return vanilla_loader(originals, BATCH, find_workers(partial(vanilla_loader, originals, BATCH)))


def recipe_rows(root: Path, name: str, target: int, rounds: int) -> list[Row]:
    """A recipe from memory and from files, against vanilla."""
    steps = RECIPES[name]()
    if steps is None:
        return []
    prepared, loader = ours(root, steps, storage="shared", resize=(256, 256), fill="eager")
    unkept, unkept_loader = ours(root, steps, storage="none")
    with prepared, unkept:
        print(f"{name}: {loader.report().path}; {unkept_loader.report().path}")
        rates = in_turns(
            {
                "torchvision + torch, from files": epoch_rate(vanilla(root, steps), ROUND_S),
                "fastdata, 256x256 in memory": epoch_rate(loader, ROUND_S),
                "fastdata, storage='none'": epoch_rate(unkept_loader, ROUND_S),
            },
            rounds,
        )
    base, memory, none = rates
    times = 4.0 if "SimCLR" in name else 1.8
    return [
        Row(section=name, name=base, unit="images/s", rounds=rates[base]),
        Row(section=name, name=memory, unit="images/s", rounds=rates[memory], against=base, target=f"{target:,}, 10 x"),
        Row(section=name, name=none, unit="images/s", rounds=rates[none], against=base, target=f"{times} x"),
    ]


def form_rows(root: Path, rounds: int) -> list[Row]:
    """RandomResizedCrop and flip in all forms, from 256x256 and from images as decoded."""
    section = "RandomResizedCrop, flip: forms"
    forms = {
        "PIL steps, float32": ([*crop_and_flip(), *last_steps()], "15,000"),
        "PIL steps, uint8": ([*crop_and_flip(), transforms.PILToTensor()], "18,000"),
        "tensor steps, float32": ([transforms.PILToTensor(), *crop_and_flip(), *_float_steps()], "15,000"),
    }
    rates: dict[str, Measure] = {}
    opened = []
    for name, (steps, _) in forms.items():
        dataset, loader = ours(root, steps, storage="shared", resize=(256, 256), fill="eager")
        opened.append(dataset)
        rates[name] = epoch_rate(loader, ROUND_S)
    dataset, loader = ours(root, forms["PIL steps, float32"][0], storage="shared", fill="eager")
    opened.append(dataset)
    rates["PIL steps, from images as decoded"] = epoch_rate(loader, ROUND_S)
    rates |= peers(root)
    figures = in_turns(rates, rounds)
    for dataset in opened:
        dataset.close()
    targets = {name: target for name, (_, target) in forms.items()} | {"PIL steps, from images as decoded": "9,000"}
    return [
        Row(section=section, name=name, unit="images/s", rounds=row, target=targets.get(name, ""))
        for name, row in figures.items()
    ]


def _float_steps() -> list[Any]:
    return [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


def first_epoch_rows(root: Path, rounds: int) -> list[Row]:
    """Decode, resize and crop every file once: filling the store, against vanilla's epoch and bare decoding."""
    section = "first epoch: decode, Resize(256), CenterCrop(224)"
    steps = [transforms.Resize(256), transforms.CenterCrop(SIDE_PX), transforms.PILToTensor()]
    count = len(datasets.ImageFolder(str(root)))

    def fill() -> float:
        with ImageFolder(str(root), transforms.Compose(steps), storage="shared", fill="eager", progress=False):
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
        Row(section=section, name=filled, unit="images/s", rounds=figures[filled], against=base, target="1.8 x"),
        Row(section=section, name=filled + ".", unit="images/s", rounds=figures[filled], against=bare, target="0.7 x"),
    ]


def decode_all(root: Path) -> float:
    """Decode every file with simplejpeg in as many threads as there are cores."""
    from concurrent.futures import ThreadPoolExecutor

    import simplejpeg

    from fastdata.memory import usable_cores

    paths = [path for path, _ in datasets.ImageFolder(str(root)).samples]

    def decode(path: str) -> None:
        simplejpeg.decode_jpeg(Path(path).read_bytes())

    with ThreadPoolExecutor(usable_cores()) as pool:
        return len(list(pool.map(decode, paths)))


def memory_rows(rounds: int) -> list[Row]:
    """Crops and flips of raw pixels against a bare copy and a bare conversion on one thread."""
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
        "224 crop, flip, float32": ((2000, 256), BATCH, 224, [transforms.RandomCrop(224), flip, *normalize], "30,000"),
        "CIFAR at 112, flip, uint8": ((4000, 112), 256, 112, [flip, transforms.PILToTensor()], "0.8 of the copy"),
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
        with CachedDataset(samples, transform=transforms.Compose(steps), storage="shared", progress=False) as dataset:
            make = partial(DataLoader, dataset, batch_size=batch, shuffle=True)
            limit = copy_crops(count, batch, side, crop) if "uint8" in name else convert(batch, crop)
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
            Row(section=name, name=two, unit="images/s", rounds=figures[two], against=one, target=f"{target}; 1.6 x"),
        ]
    return rows


def peers(root: Path) -> dict[str, Measure]:
    """RandomResizedCrop and flip by other loaders, as far as they are installed; no kept figures are of these yet."""
    found = {}
    if importlib.util.find_spec("nvidia.dali") if importlib.util.find_spec("nvidia") else None:
        found["DALI, CPU, from files"] = dali(root)
    if importlib.util.find_spec("ffcv"):
        found["FFCV, raw 256x256"] = ffcv(root)
    return found


def dali(root: Path) -> Measure:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=BATCH, num_threads=torch.get_num_threads(), device_id=None)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(root), random_shuffle=True, name="files")
        images = fn.decoders.image(files, output_type=types.RGB)
        images = fn.random_resized_crop(images, size=SIDE_PX)
        scale = {"mean": [255 * m for m in IMAGENET_MEAN], "std": [255 * s for s in IMAGENET_STD]}
        return fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **scale), labels

    built = pipeline()
    built.build()
    loader = DALIGenericIterator([built], ["images", "labels"], reader_name="files", auto_reset=True)
    return lambda: images_per_s([batch[0]["images"], batch[0]["labels"]] for batch in loader)


def ffcv(root: Path) -> Measure:
    import tempfile

    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    file = tempfile.NamedTemporaryFile(suffix=".beton", delete=False).name  # noqa: SIM115 - kept for the whole run
    originals = datasets.ImageFolder(str(root), transforms.Resize((256, 256)))
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(file, fields).from_indexed_dataset(originals)
    image = [RandomResizedCropRGBImageDecoder((SIDE_PX, SIDE_PX)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    loader = Loader(
        file,
        batch_size=BATCH,
        num_workers=torch.get_num_threads(),
        order=OrderOption.RANDOM,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor()]},
    )
    return epoch_rate(loader, ROUND_S)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=2000, help="files, copied as often as needed")
    options.add_argument("--sections", nargs="+", default=["memory", "forms", "first", "recipes"])
    args = options.parse_args()
    rows: list[Row] = []
    if "memory" in args.sections:
        rows += memory_rows(args.rounds)
    with class_folders(args.images, count=args.count) as (root, words):
        if "forms" in args.sections:
            rows += form_rows(root, args.rounds)
        if "first" in args.sections:
            rows += first_epoch_rows(root, args.rounds)
        if "recipes" in args.sections:
            for name, target in zip(RECIPES, TARGETS, strict=True):
                rows += recipe_rows(root, name, target, args.rounds)
    print_rows(rows)
    save_rows(rows, args.json, images=words, batch_size=BATCH, count=args.count)


if __name__ == "__main__":
    main()
