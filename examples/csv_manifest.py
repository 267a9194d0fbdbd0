"""Train from a CSV of paths and labels.

python examples/csv_manifest.py [TRAIN_CSV]   columns file,label; without one, images and a CSV are made
"""

import csv
import sys
import tempfile
from pathlib import Path

from torchvision import transforms

from fastdata import DataLoader, ImageManifest
from fastdata.tools.photos import write_photos


def main(manifest: Path) -> None:
    transform = transforms.Compose(
        [
            transforms.Resize((96, 128)),
            transforms.CenterCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    with ImageManifest(
        manifest, root=manifest.parent, file="file", label="label", transform=transform
    ) as train:
        loader = DataLoader(train, batch_size=100, shuffle=True, num_workers=1)
        for images, labels in loader:
            print(tuple(images.shape), images.dtype, "labels", sorted(set(labels.tolist())))
        print(loader.report())


def make_manifest(folder: Path) -> Path:
    """Draw images in ``folder``, and write a CSV that lists them; return its path."""
    write_photos(folder, count=300, classes=3)
    manifest = folder / "train.csv"
    with open(manifest, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["file", "label"])
        table.writerows(
            [path.relative_to(folder), path.parent.name] for path in sorted(folder.glob("*/*.jpg"))
        )
    return manifest


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else make_manifest(Path(folder)))
