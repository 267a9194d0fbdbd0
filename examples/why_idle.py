"""Find out why training waits: a slow loader, its diagnosis, and a tuned loader, with the seconds of an epoch of both.

python examples/why_idle.py [TRAIN_CSV] [--plot FILE]    columns file,label; without one, images and a CSV are made
"""

import argparse
import csv
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from torch.utils import data
from torchvision import transforms

from fastdata import DataLoader, ImageManifest, diagnose, tune
from fastdata.tools.photos import write_photos

LAYER = torch.nn.Conv2d(3, 16, 3)


class Photographs(data.Dataset):
    """A dataset as most scripts have: every epoch reads, decodes and resizes every file again."""

    def __init__(self, manifest: Path, transform: transforms.Compose) -> None:
        with open(manifest, newline="", encoding="utf-8") as file:
            self.rows = list(csv.DictReader(file))
        self.classes = sorted({row["label"] for row in self.rows})
        self.root, self.transform = manifest.parent, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self.rows[index]
        with Image.open(self.root / row["file"]) as image:
            return self.transform(image.convert("RGB")), self.classes.index(row["label"])


@torch.inference_mode()
def step(batch: list[torch.Tensor]) -> None:
    LAYER(batch[0])


def epoch(loader: data.DataLoader) -> dict[str, float]:
    """Return the seconds of an epoch in which the loop waits, and those in which it trains."""
    begun, trained_s = time.perf_counter(), 0.0
    for batch in loader:
        got = time.perf_counter()
        step(batch)
        trained_s += time.perf_counter() - got
    return {"waiting": time.perf_counter() - begun - trained_s, "training": trained_s}


def main(
    manifest: Path, *, max_seconds: float = 20.0, plot: Path | None = None
) -> dict[str, dict[str, float]]:
    steps = [
        transforms.Resize((96, 128)),
        transforms.CenterCrop(64),
        transforms.RandomHorizontalFlip(),
    ]
    transform = transforms.Compose([*steps, transforms.ToTensor()])
    slow = data.DataLoader(
        Photographs(manifest, transform), batch_size=100, shuffle=True, num_workers=1
    )
    found = {"an epoch before": epoch(slow)}
    print("before:", diagnose(slow, step).line)

    columns, start = {"file": "file", "label": "label"}, time.perf_counter()
    with ImageManifest(
        manifest, root=manifest.parent, **columns, transform=transform
    ).prepare() as train:
        found["preparing, once"] = {"waiting": time.perf_counter() - start, "training": 0.0}
        tuned = tune(train, batch_size=100, max_seconds=max_seconds, progress=False)
        print("tuned: ", ", ".join(f"{name}={value}" for name, value in tuned.best.items()))
        fast = DataLoader(train, shuffle=True, **tuned.best)
        found["an epoch after"] = epoch(fast)
        print("after: ", diagnose(fast, step).line)
    for name, seconds in found.items():
        print(f"{name}: {sum(seconds.values()):.2f} s, {seconds['waiting']:.2f} s of it waiting")
    if plot is not None:
        draw(found, plot)
    return found


def draw(found: dict[str, dict[str, float]], file: Path) -> None:
    import matplotlib.figure

    grey = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808890"
    )
    look = {
        "svg.fonttype": "none",
        "svg.hashsalt": "fastdata",
        "savefig.transparent": True,
        "font.size": 9,
    }
    with matplotlib.rc_context(look | grey):
        figure = matplotlib.figure.Figure(figsize=(7.0, 2.0), layout="constrained")
        axes = figure.subplots()
        waiting, training = zip(*(seconds.values() for seconds in found.values()), strict=True)
        axes.barh(list(found), waiting, 0.6, color="#9aa5b1", label="waiting for batches")
        bars = axes.barh(
            list(found), training, 0.6, left=waiting, color="#2f7ed8", label="training"
        )
        axes.bar_label(
            bars, [f"{sum(seconds.values()):.2f} s" for seconds in found.values()], padding=4
        )
        axes.set_xlabel("seconds")
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(file, dpi=150)


def make_manifest(folder: Path, count: int = 1000) -> Path:
    """Draw photographs of 512x384 in ``folder``, and write a CSV that lists them; return its path."""
    write_photos(folder, count=count)
    rows = [
        f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(folder.glob("*/*.jpg"))
    ]
    (folder / "train.csv").write_text("\n".join(["file,label", *rows]) + "\n", "utf-8")
    return folder / "train.csv"


if __name__ == "__main__":
    options = argparse.ArgumentParser(usage=__doc__)
    options.add_argument("manifest", nargs="?", type=Path)
    options.add_argument("--plot", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as drawn:
        main(chosen.manifest or make_manifest(Path(drawn)), plot=chosen.plot)
