"""pytorch/examples' imagenet/main.py, in short: ``python imagenet.py FOLDER``, which has train/ and val/."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        NORMALIZE,
    ]
)
VALIDATE = transforms.Compose(
    [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), NORMALIZE]
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = ImageFolder(f"{args.folder}/train", TRAIN)
    validate = ImageFolder(f"{args.folder}/val", VALIDATE)
    train_loader = DataLoader(train, args.batch_size, shuffle=True, num_workers=args.workers)
    val_loader = DataLoader(validate, args.batch_size, num_workers=args.workers)
    model = models.get_model(args.arch, num_classes=len(train.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(device), labels.to(device)
                right += (model(images).argmax(1) == labels).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, right {right} of {len(validate)}")


if __name__ == "__main__":
    main()
