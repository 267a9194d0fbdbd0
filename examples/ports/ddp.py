"""DistributedDataParallel: ``torchrun --nproc-per-node 2 ddp.py FOLDER``."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

TRAIN = transforms.Compose(
    [transforms.Resize(72), transforms.RandomCrop(64), transforms.ToTensor()]
)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train = ImageFolder(sys.argv[1], TRAIN)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 4, sampler=sampler, num_workers=2)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, len(train.classes)))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: rank {dist.get_rank()} of {dist.get_world_size()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
