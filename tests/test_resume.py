"""States of a loader, and epochs that are resumed from them."""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1

from children import Draws
from conftest import shown
from data import Stream
from fastdata import CachedDataset, DataLoader, FastDataWarning

AUGMENT = v1.Compose(
    [v1.RandomCrop((4, 3)), v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32)]
)
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (23, 3, 6, 5), np.uint8))

INLINE = {"num_workers": 0}
THREADS = {"num_workers": 2, "workers": "thread"}
PROCESSES = {"num_workers": 2, "workers": "process"}
PERSISTENT = {"num_workers": 2, "workers": "process", "persistent_workers": True}
PERSISTENT_THREADS = THREADS | {"persistent_workers": True}
EVERY_ENGINE = pytest.mark.parametrize(
    "engine",
    [INLINE, THREADS, PROCESSES, PERSISTENT, PERSISTENT_THREADS],
    ids=["inline", "threads", "processes", "persistent", "persistent threads"],
)


class Shuffle(Sampler[int]):
    """A user's own sampler that draws its order from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())

    def __len__(self) -> int:
        return 23


class Backwards(Sampler[int]):
    """A sampler with the same order in each epoch, and without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(22, -1, -1))

    def __len__(self) -> int:
        return 23


class Counting(Sampler[int]):
    """A sampler that starts at a number which grows with each epoch, and has its own state."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        self.start += 3
        return iter([(self.start + i) % 23 for i in range(23)])

    def __len__(self) -> int:
        return 23

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


def _distributed() -> DistributedSampler[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(
        PIXELS, num_replicas=2, rank=1, shuffle=True
    )  # type: ignore[arg-type]
    sampler.set_epoch(5)
    return sampler


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in sequence": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "shuffled, drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "own generator": lambda: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
    },
    "with replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(23), replacement=True),
    },
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 23, 40)},
    "subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler(range(3, 20))},
    "distributed": lambda: {"batch_size": 2, "sampler": _distributed()},
    "sampler of one's own": lambda: {"batch_size": 4, "sampler": Backwards()},
    "sampler with a state": lambda: {"batch_size": 4, "sampler": Counting()},
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(23)), 5, drop_last=False)
    },
    "list of batches": lambda: {"batch_sampler": [[1, 2], [0], [7, 5, 4], [3], [20, 21]]},
}


def _images() -> CachedDataset:
    return CachedDataset([(PIXELS[i], i) for i in range(23)], transform=AUGMENT)


def _plain(batches: Any) -> list[Any]:
    return [(images.tolist(), labels.tolist()) for images, labels in batches]


def _through_json(state: dict[str, Any]) -> dict[str, Any]:
    restored: dict[str, Any] = json.loads(json.dumps(state))
    assert restored == state
    return restored


def _interrupted(
    options: dict[str, Any], seen: int, epochs: int = 1
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Return the state after ``seen`` batches of the last epoch, the rest of that epoch, and the epoch after it."""
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        for _ in range(epochs - 1):
            list(loader)
        iterator = iter(loader)
        for _ in range(seen):
            next(iterator)
        state = loader.state_dict()
        return state, _plain(iterator), _plain(loader)


def _resumed(options: dict[str, Any], state: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        loader.load_state_dict(state)
        return _plain(loader), _plain(loader)


@EVERY_ENGINE
@pytest.mark.parametrize("order", ["shuffled", "own generator", "sampler with a state"])
def test_the_rest_of_an_epoch_is_resumed(engine: dict[str, Any], order: str) -> None:
    """A new loader gives exactly the remaining batches, pixels and draws, with every engine."""
    torch.manual_seed(1)
    state, rest, _ = _interrupted({**ORDERS[order](), **engine}, seen=2)
    torch.manual_seed(99)
    assert _resumed({**ORDERS[order](), **engine}, _through_json(state))[0] == rest
    assert len(rest) == 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", [INLINE, THREADS], ids=["inline", "threads"])
def test_every_order_is_resumed(engine: dict[str, Any], order: str) -> None:
    """Wherever an order is drawn from, a process with another seed gives the rest of the second epoch."""
    torch.manual_seed(1)
    state, rest, _ = _interrupted({**ORDERS[order](), **engine}, seen=3, epochs=2)
    torch.manual_seed(99)
    assert _resumed({**ORDERS[order](), **engine}, _through_json(state))[0] == rest
    assert rest


@pytest.mark.parametrize(
    "engine", [INLINE, THREADS, PERSISTENT_THREADS], ids=["inline", "threads", "persistent"]
)
@pytest.mark.parametrize("order", ["own generator", "distributed", "sampler with a state"])
def test_the_epoch_after_a_resumed_one_is_the_same_too(engine: dict[str, Any], order: str) -> None:
    """After a resumed epoch, generator, samplers and draws continue as without an interruption."""
    generator = torch.Generator().manual_seed(3)
    state, _, following = _interrupted(
        {**ORDERS[order](), **engine, "generator": generator}, seen=2
    )
    assert (
        _resumed({**ORDERS[order](), **engine, "generator": torch.Generator()}, state)[1]
        == following
    )


@EVERY_ENGINE
def test_a_whole_epoch_leaves_the_next_one(engine: dict[str, Any]) -> None:
    """A state saved between epochs gives the next epoch, whatever the seed of the new process."""
    options = {"batch_size": 4, "shuffle": True, **engine}
    torch.manual_seed(1)
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        list(loader)
        state = loader.state_dict()
        following = _plain(loader)
    torch.manual_seed(99)
    assert _resumed(options, _through_json(state))[0] == following


@pytest.mark.parametrize(
    "engine", [INLINE, THREADS, PERSISTENT_THREADS], ids=["inline", "threads", "persistent"]
)
def test_resuming_between_epochs_moves_the_global_generator(engine: dict[str, Any]) -> None:
    """If the user restores torch's generator, all epochs after a resume equal those without interruption."""
    options = {"batch_size": 4, "shuffle": True, **engine}
    torch.manual_seed(1)
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        list(loader)
        state, generator_state = loader.state_dict(), torch.get_rng_state()
        following = [_plain(loader), _plain(loader)]
    torch.set_rng_state(generator_state)
    assert list(_resumed(options, state)) == following


@EVERY_ENGINE
def test_an_epoch_set_after_loading_is_kept(engine: dict[str, Any]) -> None:
    """set_epoch on the sampler after loading decides the next order, as without an interruption."""
    epochs, sampler = [], _distributed()
    with _images() as dataset:
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, **engine)
        for epoch in range(2):
            state = loader.state_dict()
            sampler.set_epoch(epoch)
            epochs.append(_plain(loader))
    resumed = _distributed()
    resumed.set_epoch(1)
    assert _resumed({"batch_size": 2, "sampler": resumed, **engine}, state)[0] == epochs[1]


def test_workers_are_seeded_as_in_the_epoch_that_follows() -> None:
    """After a resume between epochs, worker processes have the seeds that they would have had."""
    options = {"batch_size": 4, "num_workers": 2, "shuffle": True}
    torch.manual_seed(1)
    loader = DataLoader(Draws(), **options)
    list(loader)
    state, following = loader.state_dict(), [torch.stack(batch).tolist() for batch in loader]
    torch.manual_seed(99)
    again = DataLoader(Draws(), **options)
    again.load_state_dict(state)
    assert [torch.stack(batch).tolist() for batch in again] == following


def test_batches_of_an_unknown_sampler_are_counted() -> None:
    """With an unknown sampler, batches are counted and skipped; its own generator is not restored."""
    torch.manual_seed(1)
    loader = DataLoader(range(23), batch_size=4, sampler=Shuffle())  # type: ignore[arg-type]
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    torch.manual_seed(2)
    rest = torch.cat(list(loader)).tolist()
    torch.manual_seed(2)
    assert rest == list(Shuffle())[4:]


def test_a_sampler_that_counts_its_epochs_begins_once() -> None:
    """A resume between epochs calls iter on the user's sampler once, as an epoch does."""

    class Begun(Shuffle):
        count = 0

        def __iter__(self) -> Iterator[int]:
            self.count += 1
            return super().__iter__()

    sampler = Begun()
    loader = DataLoader(range(23), batch_sampler=BatchSampler(sampler, 4, drop_last=False))  # type: ignore[arg-type]
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    assert sampler.count == 1


def test_a_state_of_a_new_loader_is_its_first_epoch() -> None:
    """A state before the first batch fixes the order of the first epoch."""
    options = {"batch_size": 4, "shuffle": True}
    torch.manual_seed(1)
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        state = loader.state_dict()
        whole = _plain(loader)
    torch.manual_seed(99)
    assert _resumed(options, state)[0] == whole
    assert len(whole) == 6


@EVERY_ENGINE
def test_a_state_saved_at_the_last_batch_is_the_next_epoch(engine: dict[str, Any]) -> None:
    """In the loop's body of the last batch, the state is the beginning of the next epoch."""
    options = {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
        **engine,
    }
    state, rest, following = _interrupted(options, seen=6)
    assert (rest, len(following)) == ([], 6)
    assert _resumed(options | {"generator": torch.Generator()}, state)[0] == following


@EVERY_ENGINE
def test_a_state_is_kept_until_a_batch_is_returned(engine: dict[str, Any]) -> None:
    """An iterator that gave no batch, such as Lightning's first one, does not use up the state."""
    options = {"batch_size": 4, "shuffle": True, **engine}
    state, rest, _ = _interrupted(options, seen=2)
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        loader.load_state_dict(state)
        iter(loader)
        assert loader.state_dict() == state
        assert _plain(loader) == rest


@EVERY_ENGINE
def test_an_epoch_can_be_resumed_twice(engine: dict[str, Any]) -> None:
    """A state saved in a resumed epoch gives the rest of the original epoch."""
    options = {"batch_size": 4, "shuffle": True, **engine}
    torch.manual_seed(1)
    state, rest, _ = _interrupted(options, seen=1)
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        iterator = iter(loader)
        assert loader.state_dict() == state
        assert _plain(itertools.islice(iterator, 2)) == rest[:2]
        state = loader.state_dict()
        del iterator
    assert _resumed(options, state)[0] == rest[2:]


def test_resuming_leaves_the_global_generators_alone() -> None:
    """Resuming within an epoch draws nothing from torch's global generator."""
    options = ORDERS["shuffled"]() | THREADS
    state, *_ = _interrupted(options, seen=2)
    with _images() as dataset:
        loader = DataLoader(dataset, **options)
        loader.load_state_dict(state)
        before = torch.get_rng_state()
        list(loader)
        assert torch.equal(torch.get_rng_state(), before)


def test_saving_leaves_the_generators_alone() -> None:
    """state_dict() draws nothing, not even from the loader's generator."""
    generator = torch.Generator().manual_seed(3)
    with _images() as dataset:
        loader = DataLoader(dataset, shuffle=True, generator=generator)
        before = torch.get_rng_state().tolist(), generator.get_state().tolist()
        loader.state_dict()
        assert (torch.get_rng_state().tolist(), generator.get_state().tolist()) == before


@pytest.mark.parametrize(
    ("saved", "loaded"), list(itertools.permutations([INLINE, THREADS, PROCESSES], 2)), ids=shown
)
def test_the_engine_may_change(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """A state saved with one number and kind of workers is resumed with another."""
    order = {"batch_size": 4, "shuffle": True}
    state, rest, _ = _interrupted(order | saved, seen=2)
    assert _resumed(order | loaded, state)[0] == rest


def test_after_a_break_the_state_is_of_the_batches_seen() -> None:
    """After three batches and a break, the fourth batch comes next, although more were read ahead."""
    with _images() as dataset:
        loader = DataLoader(dataset, batch_size=2, num_workers=2)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert next(labels.tolist() for _, labels in loader) == [6, 7]
        assert len(loader) == 12


class Noting(Dataset[int]):
    """Numbers that record which of them are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        if index == 4:
            raise ValueError("sample 4 is bad")
        return index


@pytest.mark.parametrize("engine", [INLINE, THREADS], ids=["inline", "threads"])
def test_batches_that_were_seen_are_not_read_again(engine: dict[str, Any]) -> None:
    """Resuming skips indices, and does not read their samples."""
    loader = DataLoader(Noting(), batch_size=1, sampler=[0, 1, 2, 3, 5, 6], **engine)
    iterator = iter(loader)
    next(iterator), next(iterator)
    again = DataLoader(Noting(), batch_size=1, sampler=[0, 1, 2, 3, 5, 6], **engine)
    again.load_state_dict(loader.state_dict())
    assert [batch.item() for batch in again] == [2, 3, 5, 6]
    assert sorted(again.dataset.read) == [2, 3, 5, 6]


@EVERY_ENGINE
def test_a_batch_that_failed_counts_as_seen(engine: dict[str, Any]) -> None:
    """Resuming after an exception continues with the batch after it."""
    loader = DataLoader(Noting(), batch_size=2, **engine)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(ValueError, match="sample 4 is bad"):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    del iterator
    assert [batch.tolist() for batch in loader] == [[6, 7], [8, 9]]


def test_single_samples_are_resumed() -> None:
    """With batch_size=None a state counts samples."""
    loader = DataLoader(Noting(), batch_size=None, sampler=[3, 1, 7])
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == [1, 7]


def test_a_stream_has_an_empty_state() -> None:
    """For an IterableDataset the state is empty, with a warning, and can be loaded again."""
    loader = DataLoader(Stream(range(3)))
    next(iter(loader))
    with pytest.warns(
        FastDataWarning, match="cannot resume an IterableDataset.*Save the dataset's own state"
    ):
        state = loader.state_dict()
    assert state == {}
    loader.load_state_dict(state)
    assert [batch.item() for batch in loader] == [0, 1, 2]
    with pytest.raises(ValueError, match="cannot resume an IterableDataset"):
        loader.load_state_dict(DataLoader(range(3)).state_dict())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dataset": range(9)}, "dataset_length is 9, in the state 10"),
        ({"batch_size": 3}, "batch_size is 3, in the state 2"),
        ({"drop_last": True}, "drop_last is True, in the state False"),
        (
            {"shuffle": True},
            "'BatchSampler > RandomSampler', in the state 'BatchSampler > SequentialSampler'",
        ),
        ({"sampler": SequentialSampler(range(5))}, "sampler_length is 5, in the state 10"),
        ({"generator": torch.Generator()}, "generators is 1, in the state 0"),
    ],
    ids=shown,
)
def test_a_state_of_another_loader_is_refused(other: dict[str, Any], message: str) -> None:
    """The error names the values that differ, in the state and in the loader."""
    state = DataLoader(range(10), batch_size=2).state_dict()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the state comes from another loader") as caught:
        DataLoader(**{"dataset": range(10), "batch_size": 2, **other}).load_state_dict(state)
    assert message in str(caught.value)


def test_a_dict_that_is_not_a_state_is_refused() -> None:
    """A dict of another library is an error; an empty one forgets a loaded state."""
    loader = DataLoader(range(4))  # type: ignore[arg-type]
    next(iter(loader))
    with pytest.raises(ValueError, match=r"it has version None and the keys \['_num_yielded'\]"):
        loader.load_state_dict({"_num_yielded": 3})
    loader.load_state_dict(loader.state_dict())
    loader.load_state_dict({})
    assert len(list(loader)) == 4


def test_a_state_does_not_follow_the_default_device() -> None:
    """The base seed is drawn from the CPU's generator, even under ``torch.set_default_device``."""
    loader = DataLoader(PIXELS, batch_size=2)
    with torch.device("meta"):
        state = loader.state_dict()
    assert isinstance(state["base_seed"], int)


def test_a_state_is_small() -> None:
    """A state is JSON: below 1 kB for an unshuffled epoch, below 8 kB for a shuffled one of any length."""
    for options, limit_bytes in (({}, 1000), ({"shuffle": True}, 8000)):
        loader = DataLoader(range(100_000), batch_size=10, **options)  # type: ignore[arg-type]
        next(iter(loader))
        assert len(json.dumps(loader.state_dict())) < limit_bytes


def test_a_state_does_not_change_afterwards() -> None:
    """A state shares nothing with the loader that returned or loaded it."""
    loader = DataLoader(range(6), shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    loader.load_state_dict(state)
    list(iterator), list(loader)
    assert state == before


class Slow(Dataset[int]):
    """Numbers, one of which can be read only when the test allows it."""

    def __init__(self, slow: int) -> None:
        self.slow, self.may_come = slow, multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == self.slow:
            self.may_come.wait(30)
        return index


@pytest.mark.skipif(
    "in_order" not in TorchLoader.__init__.__kwdefaults__, reason="this torch has no in_order"
)
def test_a_state_of_batches_out_of_order_says_that_it_is_not_exact() -> None:
    """Without in_order, batches of workers overtake each other, so a state warns that it only counts them."""
    dataset = Slow(1)
    loader = DataLoader(dataset, num_workers=2, in_order=False)
    iterator = iter(loader)
    assert 1 not in [next(iterator).item() for _ in range(3)]
    dataset.may_come.set()
    with pytest.warns(
        FastDataWarning, match="in_order=False .* may repeat some samples and leave out"
    ):
        assert loader.state_dict()["num_yielded"] == 3


@EVERY_ENGINE
def test_a_state_of_the_last_batch_is_where_the_next_epoch_begins(engine: dict[str, Any]) -> None:
    """A state in the last batch's body is the next epoch: RandomSampler has already made its last draw."""

    def make() -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(
            list(range(12)), batch_size=3, shuffle=True, generator=generator, **engine
        )

    uninterrupted, stopped, resumed = make(), make(), make()
    epochs = [[batch.tolist() for batch in uninterrupted] for _ in range(2)]
    for number, _ in enumerate(stopped):
        if number == len(stopped) - 1:
            resumed.load_state_dict(_through_json(stopped.state_dict()))
    assert [batch.tolist() for batch in resumed] == epochs[1]
