"""A loop over timm's own loader, as its train.py makes it: ``python timm_train.py FOLDER``, which has train/."""

import sys

import timm
import torch
from timm.data import create_dataset, create_loader
from torch import nn


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = create_dataset("torch/folder", root=sys.argv[1], split="train")
    loader = create_loader(
        dataset,
        input_size=(3, 64, 64),
        batch_size=4,
        is_training=True,
        auto_augment="rand-m9-mstd0.5",
        re_prob=0.25,
        num_workers=2,
        persistent_workers=False,
        device=device,
    )
    model = timm.create_model("resnet10t", num_classes=len(dataset.classes)).to(device)
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
