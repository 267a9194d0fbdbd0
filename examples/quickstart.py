"""Replace two imports: ImageFolder and DataLoader come from fastdata instead of torchvision and torch.

python examples/quickstart.py [FOLDER]        class folders of images; without one, some are drawn
"""

import sys
import tempfile
import time
from pathlib import Path

from torchvision import transforms

from fastdata import DataLoader, ImageFolder
from fastdata.tools.photos import write_photos


def main(folder: str) -> None:
    transform = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(256),
            transforms.RandomCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    with ImageFolder(folder, transform) as train:  # decoded and resized here, once
        print(train.plan)
        loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=2)
        for epoch in range(3):
            start = time.perf_counter()
            images = sum(len(batch) for batch, labels in loader)
            print(f"epoch {epoch}: {images / (time.perf_counter() - start):,.0f} images/s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as drawn:
        if len(sys.argv) == 1:
            write_photos(Path(drawn), count=200)
        main(sys.argv[1] if len(sys.argv) > 1 else drawn)
