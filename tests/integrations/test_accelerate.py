"""Accelerate over fastdata's Dataset and DataLoader; it makes plain torch loaders of ours."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader as TorchLoader

from accelerate_run import make_accelerator, run_rank, train
from fastdata import DataLoader, collate
from recorded import COUNT, CountingImages, draws_of, labels_of, load, repeated, see

BATCHES = 6


@pytest.fixture
def images() -> Iterator[CountingImages]:
    with CountingImages() as dataset:
        yield dataset


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """One process; Accelerate keeps its state in globals, which are emptied afterwards."""
    yield make_accelerator()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_is_read_in_whole_batches(
    images: CountingImages, accelerator: Accelerator, num_workers: int
) -> None:
    """The plain torch loader that Accelerate makes serves every sample once per epoch, by one read for each batch."""
    loader = accelerator.prepare(
        DataLoader(images, batch_size=4, shuffle=True, num_workers=num_workers)
    )
    assert type(loader.base_dataloader) is TorchLoader
    first, second = train(accelerator, loader, 2)
    assert sorted(labels_of(first)) == sorted(labels_of(second)) == list(range(COUNT))
    assert labels_of(first) != labels_of(second)
    assert images.reads.tolist() == [0, 2 * BATCHES]


def test_a_batch_is_taken_as_it_was_read(images: CountingImages, accelerator: Accelerator) -> None:
    """Accelerate keeps our collate, which hands over the tensor that the whole batch was read into."""
    loader = accelerator.prepare(DataLoader(images, batch_size=4))
    assert loader.collate_fn is collate
    batch, _ = next(iter(loader))
    assert batch.is_contiguous()
    assert batch.untyped_storage().nbytes() == batch.numel() * batch.element_size()


def test_epochs_draw_anew(images: CountingImages, accelerator: Accelerator) -> None:
    """Accelerate's set_epoch reaches the dataset: two epochs in one order crop and flip otherwise."""
    loader = accelerator.prepare(DataLoader(images, batch_size=4))
    first, second = train(accelerator, loader, 2)
    assert labels_of(first) == labels_of(second)
    assert len(set(draws_of(first).items()) - set(draws_of(second).items())) > COUNT // 2


@pytest.mark.parametrize("epoch", [0, 1])
def test_skipped_batches_leave_the_rest(
    images: CountingImages, accelerator: Accelerator, epoch: int
) -> None:
    """skip_first_batches in a new run, its epoch set, gives exactly the batches and draws that were not seen."""
    whole = train(
        accelerator, accelerator.prepare(DataLoader(images, batch_size=4, shuffle=True)), 2
    )[epoch]
    with CountingImages() as dataset:
        loader = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=True))
        loader.set_epoch(epoch)
        rest = [see(batch) for batch in skip_first_batches(loader, 2)]
        assert dataset.reads.tolist() == [0, BATCHES - 2]
    assert rest == whole[2:]


def test_gradients_accumulate_to_the_end(images: CountingImages, accelerator: Accelerator) -> None:
    """With 4 batches accumulated, gradients are applied after the 4th batch and after the last."""
    accelerator.gradient_accumulation_steps = 4
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(images, batch_size=4))
    applied = []
    for _ in loader:
        with accelerator.accumulate(model):
            applied.append(accelerator.sync_gradients)
    assert applied == [False, False, False, True, False, True]


def test_our_loader_can_be_put_back(images: CountingImages, accelerator: Accelerator) -> None:
    """With our DataLoader as base_dataloader, Accelerate's loader reads with threads, the same samples as before."""
    whole = train(
        accelerator, accelerator.prepare(DataLoader(images, batch_size=4, shuffle=True)), 2
    )
    with CountingImages() as dataset:
        loader = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=True))
        ours = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=2)
        loader.base_dataloader = ours
        assert isinstance(loader, DataLoaderShard)
        assert train(accelerator, loader, 2) == whole
        assert ours.report().path.startswith("whole batches, read by")
        assert dataset.reads.tolist() == [0, 0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two spawned ranks saw of one dataset, which they share."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as held, CountingImages() as dataset:
        # Bound to the end, so that nobody else is given the port; torch binds to it all the same.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        torch.multiprocessing.start_processes(
            run_rank, args=(port, dataset, folder), nprocs=2, start_method="spawn"
        )
        single, batches = dataset.reads.tolist()
    assert single == 0
    assert batches > 0
    return load(folder)


def test_ranks_share_every_epoch(ranks: list[dict[str, Any]]) -> None:
    """Each epoch of two ranks holds every sample once, but for the one that pads the last batch."""
    for epoch in range(2):
        assert repeated([seen["epochs"][epoch] for seen in ranks]) == 1
        assert [len(seen["epochs"][epoch]) for seen in ranks] == [BATCHES // 2] * 2


def test_ranks_without_padding_repeat_nothing(ranks: list[dict[str, Any]]) -> None:
    """With even_batches=False two ranks hold every sample once."""
    assert repeated([seen["uneven"] for seen in ranks]) == 0


def test_ranks_shuffle_anew(ranks: list[dict[str, Any]]) -> None:
    """The second epoch has another order on every rank."""
    for seen in ranks:
        assert labels_of(seen["epochs"][0]) != labels_of(seen["epochs"][1])


def test_metrics_are_of_every_sample_once(ranks: list[dict[str, Any]]) -> None:
    """gather_for_metrics knows from our loader what was padded, and drops it."""
    for seen in ranks:
        assert sorted(seen["gathered"]) == list(range(COUNT))


def test_ranks_skip_what_was_seen(ranks: list[dict[str, Any]]) -> None:
    """skip_first_batches gives each rank the rest of its second epoch."""
    for seen in ranks:
        assert labels_of(seen["skipped"]) == labels_of(seen["epochs"][1][1:])
