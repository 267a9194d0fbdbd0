"""A Lightning module: ``python lightning_train.py FOLDER``."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

TRAIN = transforms.Compose(
    [transforms.Resize(72), transforms.RandomCrop(64), transforms.ToTensor()]
)


class Classifier(lightning.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.train_set = ImageFolder(folder, TRAIN)
        classes = len(self.train_set.classes)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, classes))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=4, shuffle=True, num_workers=2)

    def training_step(self, batch, _):
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch}: done")


def main() -> None:
    trainer = lightning.Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(Classifier(sys.argv[1]))


if __name__ == "__main__":
    main()
