"""Write the files that the ported scripts read, in the layouts that they expect, for ``benchmarks/ports.py``."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from _helper import IMAGE_SUFFIXES, datasets
from fastdata.tools.photos import photo

WORDS = ("a", "photo", "of", "the", "red", "small", "large", "dog", "cat", "car", "on", "near")
CLASSES = 10


def write_files(photos: Path, root: Path, *, cifar_count: int) -> None:
    """Write a data set in each layout.

    Args:
        photos: a folder of class folders of images.
        root: folder to write to: ``train`` (class folders), ``train.csv`` (file, label, caption), ``captions.json``
            (file, numbers of words), ``imgs`` and ``masks`` (with the same names), and the files of CIFAR-10 and
            CIFAR-100.
        cifar_count: number of images of each CIFAR.
    """
    files = []
    for path in sorted(photos.rglob("*")):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            # Some scripts read only *.jpg.
            copy = root / "train" / path.parent.name / f"{path.stem}.jpg"
            copy.parent.mkdir(parents=True, exist_ok=True)
            files.append(Path(shutil.copyfile(path, copy)))
    classes = sorted({path.parent.name for path in files})
    rng = np.random.default_rng(0)
    rows, captions = [], []
    for path in files:
        numbers = rng.integers(0, len(WORDS), rng.integers(4, 12)).tolist()
        name = path.relative_to(root).as_posix()
        text = " ".join(WORDS[number] for number in numbers)
        rows.append((name, classes.index(path.parent.name), text))
        captions.append({"file": name, "caption": numbers})
    with (root / "train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "label", "caption"), *rows])
    (root / "captions.json").write_text(json.dumps(captions), "utf-8")
    _write_masks(files[::4], root)
    _write_cifar(root, cifar_count)


def _write_masks(files: list[Path], root: Path) -> None:
    """Write images of one size, with masks that are 255 where they are bright."""
    for folder in ("imgs", "masks"):
        (root / folder).mkdir()
    for number, path in enumerate(files):
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((480, 320))
        resized.save(root / "imgs" / f"{number:04}.jpg", quality=90)
        mask = (np.asarray(resized.convert("L")) > 128).astype(np.uint8) * 255
        Image.fromarray(mask).save(root / "masks" / f"{number:04}.png")


def _write_cifar(root: Path, count: int) -> None:
    """Write the files of CIFAR-10 and CIFAR-100 as torchvision reads them."""
    rng = np.random.default_rng(0)
    large = photo(0, (1024, 1024))
    corners = rng.integers(0, 1024 - 32, (count, 2))
    pixels = np.stack([large[y : y + 32, x : x + 32] for y, x in corners])
    rows = pixels.transpose(0, 3, 1, 2).reshape(count, -1)
    for kind, classes in ((datasets.CIFAR10, CLASSES), (datasets.CIFAR100, 100)):
        folder = root / kind.base_folder
        folder.mkdir()
        key = "labels" if classes == CLASSES else "fine_labels"
        labels = rng.integers(0, classes, count)
        parts = np.array_split(np.arange(count), len(kind.train_list))
        for (file, _), part in zip(kind.train_list, parts, strict=True):
            content = {"data": rows[part], key: labels[part].tolist()}
            # Python 2 wrote these files: torchvision reads their keys as text, other code as bytes.
            content |= {name.encode(): values for name, values in content.items()}
            (folder / file).write_bytes(pickle.dumps(content))
        names = {kind.meta["key"]: [f"class {number}" for number in range(classes)]}
        (folder / kind.meta["filename"]).write_bytes(pickle.dumps(names))
