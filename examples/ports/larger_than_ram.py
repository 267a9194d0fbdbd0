"""Images that do not fit into memory: ``python larger_than_ram.py FOLDER CACHE``."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

TRAIN = transforms.Compose(
    [transforms.Resize(72), transforms.RandomCrop(64), transforms.ToTensor()]
)


def main() -> None:
    train = ImageFolder(sys.argv[1], TRAIN)
    loader = DataLoader(train, 4, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, len(train.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
