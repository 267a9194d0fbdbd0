"""Lightning's Trainer over fastdata's Dataset and DataLoader."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from fastdata import DataLoader, collate
from lightning_run import Recorder, SaveAt, fit, make_trainer, pl
from recorded import COUNT, CountingImages, draws_of, labels_of, load, repeated, see

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


@pytest.fixture
def images() -> Iterator[CountingImages]:
    with CountingImages() as dataset:
        yield dataset


def _loader_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("fastdata-loader")
    ]


def test_every_epoch_serves_every_sample_once(images: CountingImages) -> None:
    """Two epochs hold every sample once, in another order and with other draws; the road is whole batches."""
    model = fit(images)
    first, second = model.epochs.values()
    assert sorted(labels_of(first)) == sorted(labels_of(second)) == list(range(COUNT))
    assert labels_of(first) != labels_of(second)
    assert len(set(draws_of(first).items()) - set(draws_of(second).items())) > COUNT // 2
    assert [path.startswith("whole batches, read by") for path in model.paths] == [True, True]
    assert images.reads.tolist() == [0, 0]


def test_the_sanity_check_does_not_shorten_validation(images: CountingImages) -> None:
    """After a sanity check of two batches, each validation still holds every sample once, in order."""
    model = Recorder()
    loaders = (DataLoader(images, batch_size=size, num_workers=2) for size in (4, 5))
    make_trainer(num_sanity_val_steps=2).fit(model, *loaders)
    checked = labels_of(batch for sanity, batch in model.validated if sanity)
    validated = labels_of(batch for sanity, batch in model.validated if not sanity)
    assert checked == list(range(10))
    assert validated == [*range(COUNT), *range(COUNT)]


def test_a_limited_epoch_leaves_no_thread(images: CountingImages) -> None:
    """limit_train_batches ends each epoch early; reading ahead ends with the fit."""
    model = fit(images, limit_train_batches=2)
    assert [len(epoch) for epoch in model.epochs.values()] == [2, 2]
    assert _loader_threads() == []


def test_seeding_the_workers_keeps_the_threads(images: CountingImages) -> None:
    """seed_everything(workers=True) sets worker_init_fn on the loader, and batches still come whole from threads."""
    loader = DataLoader(images, batch_size=4, num_workers=1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PL_GLOBAL_SEED", "")  # restored afterwards, as the next one is
        environment.setenv("PL_SEED_WORKERS", "")
        with torch.random.fork_rng():
            pl.seed_everything(3, workers=True, verbose=False)
            model = fit(images, loader=loader)
    assert loader.worker_init_fn is not None
    path = "whole batches, read by 1 thread"
    assert model.paths == [path] * 2


@pytest.mark.parametrize("where", ["argument", "hook"])
def test_a_loader_made_again_keeps_its_arguments(images: CountingImages, where: str) -> None:
    """overfit_batches makes the loader again with another sampler; every other argument is as it was."""
    options: dict[str, Any] = {
        "batch_size": 4,
        "drop_last": True,
        "num_workers": 1,
        "prefetch_factor": 3,
        "timeout": 60,
        "in_order": False,
        "workers": "thread",
        "generator": torch.Generator(),
    }

    class Hooked(Recorder):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(images, shuffle=True, **options)

    model = Hooked()
    trainer = make_trainer(overfit_batches=2)
    with pytest.warns(UserWarning, match="overfit"):
        trainer.fit(
            model, *([] if where == "hook" else [DataLoader(images, shuffle=True, **options)])
        )
    made = trainer.train_dataloader
    assert type(made) is DataLoader
    assert type(made.sampler) is SequentialSampler
    assert made.collate_fn is collate
    assert {name: getattr(made, name) for name in options} == options
    assert [labels_of(epoch) for epoch in model.epochs.values()] == [list(range(8))] * 2


def test_predictions_know_their_samples(images: CountingImages) -> None:
    """For predict the loader is made again to note indices; although threads read ahead, they are the batch's own."""
    noted: list[tuple[list[int], list[int]]] = []

    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(
            self,
            trainer: Any,
            module: Any,
            prediction: list[int],
            batch_indices: list[int],
            *_: Any,
        ) -> None:
            noted.append((prediction, list(batch_indices)))

    trainer = make_trainer(callbacks=[Writer("batch")])
    trainer.predict(
        Recorder(), DataLoader(images, batch_size=4, num_workers=2), return_predictions=False
    )
    assert [label for prediction, _ in noted for label in prediction] == list(range(COUNT))
    assert all(prediction == indices for prediction, indices in noted)


def _ordered_by_generator(dataset: CountingImages) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(5),
    )


@pytest.mark.parametrize(
    ("step", "hook"),
    [
        (2, "on_train_batch_end"),
        (6, "on_train_batch_end"),
        (6, "on_validation_end"),
        (8, "on_train_batch_end"),
    ],
)
def test_a_resumed_fit_serves_what_remains(
    images: CountingImages, tmp_path: Path, step: int, hook: str
) -> None:
    """Stopped after a step and resumed with all objects made anew, a fit sees the batches and draws it had not seen."""
    checkpoint = str(tmp_path / "stopped.ckpt")
    whole = fit(images, loader=_ordered_by_generator(images)).epochs
    with CountingImages() as checked:
        validation = DataLoader(checked, batch_size=12, num_workers=1)
        with CountingImages() as dataset:
            stop = SaveAt(step, checkpoint, hook)
            fit(
                dataset,
                loader=_ordered_by_generator(dataset),
                validation=validation,
                callbacks=[stop],
            )
        with CountingImages() as dataset:
            loader = _ordered_by_generator(dataset)
            resumed = fit(dataset, resume=checkpoint, loader=loader, validation=validation).epochs
    assert [batch for epoch in resumed.values() for batch in epoch] == [*whole[0], *whole[1]][step:]


def test_a_fit_resumed_between_epochs_serves_the_next_one_whole(
    images: CountingImages, tmp_path: Path
) -> None:
    """From an end-of-epoch checkpoint, whose loader state Lightning leaves aside, every sample still comes once."""
    checkpoint = str(tmp_path / "stopped.ckpt")
    fit(images, callbacks=[SaveAt(6, checkpoint, "on_train_epoch_end")])
    resumed = fit(images, resume=checkpoint).epochs
    assert list(resumed) == [1]
    assert sorted(labels_of(resumed[1])) == list(range(COUNT))


def test_fabric_serves_whole_batches(images: CountingImages) -> None:
    """A loader set up by Fabric serves every sample once per epoch, from threads."""
    from lightning.fabric import Fabric

    loader = DataLoader(images, batch_size=4, shuffle=True, num_workers=2)
    prepared = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    epochs = [[see(batch) for batch in prepared] for _ in range(2)]
    assert [sorted(labels_of(epoch)) for epoch in epochs] == [list(range(COUNT))] * 2
    assert type(prepared.sampler) is RandomSampler
    assert loader.report().path.startswith("whole batches, read by")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw, launched by strategy="ddp"."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("lightning_run.py")
    path = [str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=environment,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return load(folder)


def test_ranks_share_every_epoch(ranks: list[dict[str, Any]]) -> None:
    """Each epoch of two ranks holds every sample once, but for the one that DistributedSampler repeats."""
    for epoch in range(2):
        assert repeated([seen["epochs"][epoch] for seen in ranks]) == 1
        assert (
            len(
                set(labels_of(ranks[0]["epochs"][epoch]))
                & set(labels_of(ranks[1]["epochs"][epoch]))
            )
            <= 1
        )


def test_ranks_shuffle_anew(ranks: list[dict[str, Any]]) -> None:
    """Lightning's set_epoch reaches the sampler that it injected, and one of the user's."""
    for seen in ranks:
        for epochs in (seen["epochs"], seen["own_sampler"]):
            assert labels_of(epochs[0]) != labels_of(epochs[1])


def test_ranks_take_the_fast_road(ranks: list[dict[str, Any]]) -> None:
    """The loader that Lightning made again for each rank is fastdata's, and serves whole batches from threads."""
    for seen in ranks:
        assert (seen["loader"], seen["sampler"]) == (
            "fastdata.loaders.loader",
            DistributedSampler.__name__,
        )
        assert all(path.startswith("whole batches, read by") for path in seen["paths"])


def test_ranks_validate_in_order(ranks: list[dict[str, Any]]) -> None:
    """After the sanity check's one batch, each rank validates every second sample in both epochs."""
    for rank, seen in enumerate(ranks):
        validated = labels_of(batch for sanity, batch in seen["validated"] if not sanity)
        assert validated == 2 * [*range(COUNT), 0][rank::2]


def test_a_sampler_of_the_users_is_kept(ranks: list[dict[str, Any]]) -> None:
    """With use_distributed_sampler=False ranks read what the user's sampler says: here 22 samples, none twice."""
    for epoch in range(2):
        read = [label for seen in ranks for label in labels_of(seen["own_sampler"][epoch])]
        assert len(read) == len(set(read)) == COUNT - 1


def test_resumed_ranks_serve_what_remains(ranks: list[dict[str, Any]]) -> None:
    """Stopped in the second epoch and resumed, each rank sees the batches and draws that it had not seen."""
    for seen in ranks:
        assert seen["resumed"] == [*seen["epochs"][0], *seen["epochs"][1]]


def test_ranks_resumed_between_epochs_serve_the_next_one(ranks: list[dict[str, Any]]) -> None:
    """Stopped at the last batch of the first epoch and resumed, each rank sees the second, not the first again."""
    for seen in ranks:
        assert seen["next"] == seen["epochs"][1]
