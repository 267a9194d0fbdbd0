"""Hugging Face's Trainer over an image folder: ``python trainer_train.py FOLDER OUTPUT``."""

import sys

import torch
from torch import nn
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from transformers import Trainer, TrainingArguments

TRAIN = transforms.Compose(
    [transforms.Resize(72), transforms.RandomCrop(64), transforms.ToTensor()]
)


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 64 * 64, classes)

    def forward(self, pixel_values, labels):
        logits = self.layer(pixel_values.flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def as_dict(samples):
    images, labels = default_collate(samples)
    return {"pixel_values": images, "labels": labels}


def main() -> None:
    train = ImageFolder(sys.argv[1], TRAIN)
    args = TrainingArguments(
        sys.argv[2],
        num_train_epochs=2,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    done = Trainer(Classifier(len(train.classes)), args, as_dict, train).train()
    print(f"epoch {round(done.metrics['epoch']) - 1}: loss {done.training_loss:.3f}")


if __name__ == "__main__":
    main()
