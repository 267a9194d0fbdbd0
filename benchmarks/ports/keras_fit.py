"""The data of ``model.fit`` of Keras 3: CIFAR-10, with the PyTorch backend and channels first."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader": "from fastdata import CachedDataset, DataLoader",
    "DataLoader(dataset,": "DataLoader(CachedDataset(dataset),",
}

SMALL = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
)


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.CIFAR10(root, train=True, transform=SMALL)
    return DataLoader(dataset, batch_size=128, shuffle=True, num_workers=workers)


def train(loader: Any) -> Any:
    """Fit a small model for an epoch, if Keras is installed."""
    import keras

    keras.config.set_image_data_format("channels_first")
    layers = [
        keras.layers.Conv2D(4, 3, strides=4, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    return model.fit(loader, epochs=1, verbose=0).history
