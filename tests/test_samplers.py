"""Samplers for any number of ranks, and the loader that divides an epoch among ranks."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DistributedSampler,
    Sampler,
    Subset,
)
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1

from conftest import shown
from data import Numbers, Stream
from fastdata import (
    CachedDataset,
    DataLoader,
    FastDataWarning,
)
from fastdata.loaders.orders import Order
from fastdata.loaders.samplers import RankSampler, balanced, mixed, repeated, weighted

AUGMENT = v1.Compose(
    [v1.RandomCrop((4, 3)), v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32)]
)
COUNT = 23
WORLDS = [1, 2, 3, 4, 8]
WEIGHTS = np.arange(COUNT) % 4
TARGETS = np.arange(COUNT) % 3

INLINE = {"num_workers": 0}
THREADS = {"num_workers": 2, "workers": "thread"}
PROCESSES = {"num_workers": 2, "workers": "process"}

RANKED: dict[str, Callable[..., RankSampler]] = {
    "shuffled": partial(RankSampler, COUNT),
    "in order": partial(RankSampler, COUNT, shuffle=False),
    "weighted": partial(RankSampler, order=weighted(WEIGHTS), num_samples=31),
    "balanced": partial(RankSampler, order=balanced(TARGETS, replacement=True)),
    "balanced, once": partial(RankSampler, order=balanced(TARGETS)),
    "repeated": partial(RankSampler, order=repeated(COUNT, 3), num_samples=50),
    "mixed": partial(RankSampler, order=mixed([7, COUNT - 7], [2, 1], stop="all")),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that makes this process a rank, as torchrun would."""

    def launch(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return launch


def _images(**options: Any) -> CachedDataset:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (COUNT, 3, 6, 5), np.uint8))
    samples = [(pixels[i], i) for i in range(COUNT)]
    return CachedDataset(samples, transform=AUGMENT, **{"seed": 0, **options})


def _through_json(state: dict[str, Any]) -> dict[str, Any]:
    restored: dict[str, Any] = json.loads(json.dumps(state))
    assert restored == state
    return restored


def _together(ranks: list[list[list[int]]]) -> list[int]:
    """Return the samples of the batches of all ranks: step by step, place by place."""
    steps = itertools.zip_longest(*ranks, fillvalue=[])
    places = (itertools.zip_longest(*step) for step in steps)
    return [index for step in places for place in step for index in place if index is not None]


# Sharing out


@pytest.mark.parametrize("batch_size", [1, 4, 5])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_cover_each_epoch(
    launched: Any, world_size: int, drop_last: bool, batch_size: int
) -> None:
    """In three epochs, ranks get equally many batches, and all samples: with a few repeated or dropped, as chosen."""
    loaders = []
    for rank in range(world_size):
        launched(rank, world_size)
        options = {"batch_size": batch_size, "shuffle": True, "drop_last": drop_last}
        loaders.append(DataLoader(Numbers(COUNT), distributed="auto", **options))
    orders = []
    for _ in range(3):
        ranks = [[batch.tolist() for batch in loader] for loader in loaders]
        sizes = [[len(batch) for batch in batches] for batches in ranks]
        assert sizes == sizes[:1] * world_size
        assert len(sizes[0]) == len(loaders[0])
        seen = Counter(_together(ranks))
        if drop_last:
            each = COUNT // world_size // batch_size * batch_size
            assert (seen.total(), max(seen.values(), default=1)) == (each * world_size, 1)
        else:
            assert set(seen) == set(range(COUNT))
            assert seen.total() == -(-COUNT // world_size) * world_size
        orders.append(_together(ranks))
    assert len({tuple(order) for order in orders}) == 3 or not orders[0]


@pytest.mark.parametrize("world_size", [*WORLDS, 30])
def test_an_exact_epoch_has_each_sample_once(launched: Any, world_size: int) -> None:
    """uneven='keep' repeats and drops no sample, with any number of ranks."""
    ranks = []
    for rank in range(world_size):
        launched(rank, world_size)
        loader = DataLoader(Numbers(COUNT), batch_size=2, distributed="exact")
        ranks.append([batch.tolist() for batch in loader])
        assert len(loader) == len(ranks[-1])
    assert _together(ranks) == list(range(COUNT))


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("world_size", [*WORLDS, 30, 70])
def test_unshuffled_shares_are_torchs(world_size: int, uneven: Any) -> None:
    """Without shuffling, samples and attributes are those of torch's DistributedSampler."""
    for rank in range(world_size):
        ours = RankSampler(COUNT, shuffle=False, uneven=uneven, rank=rank, world_size=world_size)
        options = {"shuffle": False, "drop_last": uneven == "drop"}
        theirs = DistributedSampler(Numbers(COUNT), world_size, rank, **options)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        for name in (
            "num_replicas",
            "rank",
            "epoch",
            "drop_last",
            "shuffle",
            "seed",
            "num_samples",
            "total_size",
        ):
            assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_ranks_together_follow_one_order(name: str, world_size: int) -> None:
    """The steps of all ranks follow one order from its start; it depends only on seed and epoch."""
    make = RANKED[name]
    order = make(rank=0, world_size=1).order(epoch=2).tolist()
    samplers = [make(rank=rank, world_size=world_size, uneven="keep") for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(2)
    assert _together([[list(sampler)] for sampler in samplers]) == order
    if name != "in order":
        assert order != make(rank=0, world_size=1).order(epoch=1).tolist()
        assert order != make(seed=1, rank=0, world_size=1).order(epoch=2).tolist()


def test_epochs_count_themselves_until_one_is_set() -> None:
    """Each pass is the next epoch; after ``set_epoch`` every pass is that epoch, until another one is set."""
    sampler = RankSampler(COUNT, rank=1, world_size=2)
    orders = [RankSampler(COUNT, rank=0, world_size=1).order(epoch).tolist() for epoch in range(4)]
    assert [(list(sampler)[:11], sampler.epoch) for _ in range(2)] == [
        (orders[k][1::2], k) for k in range(2)
    ]
    sampler.set_epoch(3)
    assert [list(sampler)[:11] for _ in range(2)] == [orders[3][1::2]] * 2


def test_a_given_sampler_is_not_changed(launched: Any) -> None:
    """``distributed`` does not change a sampler or batch sampler of the user."""
    launched(1, 2)
    own = RankSampler(COUNT, rank=0, world_size=1)
    loader = DataLoader(Numbers(COUNT), sampler=own, distributed="auto")
    # Lightning makes loaders of their attributes.
    assert (loader.sampler, loader.distributed) == (
        own,
        "auto",
    )
    assert [
        b.tolist() for b in DataLoader(Numbers(COUNT), batch_sampler=[[4, 2]], distributed="auto")
    ] == [[4, 2]]


def test_subsets_are_divided_among_ranks(launched: Any) -> None:
    """Two ranks cover a Subset exactly once, in whole batches."""
    with _images() as dataset:
        seen = []
        for rank in range(2):
            launched(rank, 2)
            loader = DataLoader(
                Subset(dataset, range(3, 13)), batch_size=2, shuffle=True, distributed="auto"
            )
            seen += [label for _, labels in loader for label in labels.tolist()]
    assert sorted(seen) == list(range(3, 13))


def test_the_datasets_seed_decides_the_order(launched: Any) -> None:
    """The order follows from the dataset's ``seed``, whatever the seed of torch's generator on each rank."""
    orders = []
    for torch_seed, seed in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(torch_seed)
        launched(0, 2)
        with _images(seed=seed) as dataset:
            loader = DataLoader(dataset, batch_size=4, shuffle=True, distributed="auto")
            orders.append([label for _, labels in loader for label in labels.tolist()])
    assert orders[0] == orders[1] != orders[2]


# Draws


@pytest.mark.parametrize(
    "make", [RANKED["repeated"], RANKED["weighted"]], ids=["repeated", "weighted"]
)
def test_repetitions_draw_alike_on_any_number_of_ranks(make: Callable[..., RankSampler]) -> None:
    """Each copy of a sample has its own draws, the same ones with any number of ranks."""
    drawn: list[Counter[Any]] = []
    for world_size in (1, 2, 3):
        found: Counter[Any] = Counter()
        for rank in range(world_size):
            with _images() as dataset:
                sampler = make(rank=rank, world_size=world_size, uneven="keep")
                for images, labels in DataLoader(dataset, batch_size=4, sampler=sampler):
                    found.update(zip(labels.tolist(), map(str, images.tolist()), strict=True))
        drawn.append(found)
    assert drawn[0] == drawn[1] == drawn[2]
    copies = Counter(label for label, _ in drawn[0])
    assert max(copies.values()) > 1  # several crops of one sample


@pytest.mark.parametrize("name", RANKED)
def test_all_occurrences_of_a_sample_are_numbered(name: str) -> None:
    """All occurrences of a sample have different numbers, also those that only make ranks equal."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(7):
        sampler = RANKED[name](rank=rank, world_size=7)
        found.update((int(index), getattr(index, "occurrence", 0)) for index in sampler)
    assert set(found.values()) == {1}
    assert found.total() % 7 == 0


@pytest.mark.parametrize(
    "engine", [INLINE, THREADS, PROCESSES], ids=["inline", "threads", "processes"]
)
def test_draws_follow_the_samplers_epoch(engine: dict[str, Any]) -> None:
    """Order and draws are of the same epoch: counted, or set on the loader or only on the sampler."""
    with _images() as dataset:
        sampler = RankSampler(dataset, rank=0, world_size=1)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, **engine)
        first, second, third = ([(x.clone(), y.clone()) for x, y in loader] for _ in range(3))
        for tell in (loader.set_epoch, sampler.set_epoch):
            for epoch, wanted in ((2, third), (0, first), (1, second)):
                tell(epoch)
                assert all(map(_is_equal, loader, wanted))


def _is_equal(ours: Any, theirs: Any) -> bool:
    return all(map(torch.equal, ours, theirs))


class Repeating(Sampler[int]):
    """Each sample three times in a row, divided among ranks, as timm's RepeatAugSampler does."""

    def __init__(self, length: int, rank: int, num_replicas: int) -> None:
        self.length, self.rank, self.num_replicas = length, rank, num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(np.repeat(np.arange(self.length), 3)[self.rank :: self.num_replicas].tolist())


def _replacing(length: int) -> Order:
    """Return an order of the user's own, in which samples come again."""

    def draw(seed: int, epoch: int, count: int) -> Any:
        return np.random.default_rng(epoch).integers(0, length, count)

    return Order(draw, length, length, length, {"order": "replacing"})


TWICE: dict[str, Any] = {
    "a subset's repeats": lambda ranks, whole: RankSampler(whole, **ranks),
    "an order of one's own": lambda ranks, whole: RankSampler(
        order=_replacing(len(whole)), **ranks
    ),
    "weights": lambda ranks, whole: RankSampler(order=weighted(np.ones(len(whole))), **ranks),
    "repeated": lambda ranks, whole: RankSampler(
        num_samples=3 * len(whole), order=repeated(whole), **ranks
    ),
    "another's repeats": lambda ranks, whole: Repeating(
        len(whole), ranks["rank"], ranks["world_size"]
    ),
}


def _large() -> CachedDataset:
    """Return images in which no two crops are equal."""
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 3, 99, 98), np.uint8))
    return CachedDataset([*zip(pixels, range(8), strict=True)], transform=v1.RandomCrop(6), seed=0)


def _read(whole: Any, sampler: Any) -> list[tuple[int, bytes]]:
    loader = DataLoader(whole, batch_size=2, sampler=sampler)
    pairs = (pair for batch in loader for pair in zip(*batch, strict=True))
    return [(int(label), image.numpy().tobytes()) for image, label in pairs]


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("kind", ["subset", "concat", "nested"])
def test_no_two_ranks_draw_the_same_for_one_sample(name: str, kind: str) -> None:
    """A sample that comes several times in an epoch gets a new crop each time, on one rank or three."""
    with _large() as dataset:
        part = Subset(dataset, [3, 0, 3, 3, 7, 0, -1])
        nested = Subset(part, [0, 2, 2, 6, -1])
        whole: Any = {"subset": part, "concat": ConcatDataset([part, dataset]), "nested": nested}[
            kind
        ]
        read = [
            pair
            for rank in range(3)
            for pair in _read(whole, TWICE[name]({"rank": rank, "world_size": 3}, whole))
        ]
        assert len(set(read)) == len(read) >= len(whole)
        if name != "another's repeats" and len(read) % len(whole) == 0:
            assert set(_read(whole, TWICE[name]({"rank": 0, "world_size": 1}, whole))) == set(read)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_subset_with_repeats_is_resumed(num_workers: int) -> None:
    """The rest of an epoch with repeated samples has the draws of an uninterrupted one."""
    with _large() as dataset:
        part = Subset(dataset, [3, 0, 3, 3, 7, 0, 1, 1])

        def make() -> Any:
            return DataLoader(
                part, 2, sampler=RankSampler(part, rank=0, world_size=1), num_workers=num_workers
            )

        loader = make()
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        again = make()
        again.load_state_dict(loader.state_dict())
        assert [images.tolist() for images, _ in again] == [
            images.tolist() for images, _ in batches
        ]


# Resuming


def _ranks(
    make: Callable[..., Any], batch_size: int, world_size: int, state: Any, steps: int, engine: Any
) -> Any:
    """Return the samples of all ranks in ``steps`` steps after a state, and the state afterwards."""
    batches, states = [], []
    for rank in range(world_size):
        loader = DataLoader(Numbers(COUNT), **make(batch_size, rank, world_size), **engine)
        loader.load_state_dict(state)
        iterator = iter(loader)
        batches.append([batch.tolist() for batch in itertools.islice(iterator, steps)])
        states.append(_through_json(loader.state_dict()))
        del iterator
    assert all(each["start"] == states[0]["start"] for each in states)
    return _together(batches), states[0]


def _ranked(
    make: Callable[..., RankSampler], batch_size: int, rank: int, world_size: int
) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "sampler": make(rank=rank, world_size=world_size, uneven="keep"),
    }


@pytest.mark.parametrize("trial", range(12))
@pytest.mark.parametrize("name", RANKED)
def test_an_epoch_goes_on_with_other_ranks_and_batches(name: str, trial: int) -> None:
    """The second epoch, stopped at random places, loses nothing if it is resumed with other ranks and batches."""
    choose = np.random.default_rng(trial)
    make = partial(_ranked, RANKED[name])
    total = RANKED[name](rank=0, world_size=1).order_length
    loader = DataLoader(Numbers(COUNT), **make(4, 0, 1))
    list(loader)
    state, seen = _through_json(loader.state_dict()), []
    while len(seen) < total:
        batch_size, world_size = int(choose.integers(1, 6)), int(choose.choice(WORLDS))
        left = (total - len(seen)) // (batch_size * world_size)
        steps = int(choose.integers(0, left + 1)) if left and choose.random() < 0.8 else 99
        engine = [INLINE, {"num_workers": 1, "workers": "thread"}][trial % 2]
        read, state = _ranks(make, batch_size, world_size, state, steps, engine)
        seen += read
    assert seen == RANKED[name](rank=0, world_size=1).order(epoch=1).tolist()
    assert state["start"]["samplers"][-1]["state"] == {
        "epoch": 2,
        "position": 0,
        "order": state["loader"]["order"],
    }


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(WORLDS, 2)), ids=shown)
def test_ranks_that_share_evenly_go_on_as_others(
    launched: Any, before: int, after: int, drop_last: bool
) -> None:
    """A state of ``distributed='auto'`` is resumed on other ranks: only samples that do not divide repeat or drop."""
    seen, state, sizes = [], {}, {before: 1, after: 3}
    for world_size, steps in ((before, 1), (after, None)):
        ranks = []
        for rank in range(world_size):
            launched(rank, world_size)
            options = {"batch_size": sizes[world_size], "shuffle": True, "drop_last": drop_last}
            loader = DataLoader(Numbers(COUNT), distributed="auto", **options)
            loader.load_state_dict(state)
            ranks.append([batch.tolist() for batch in itertools.islice(iter(loader), steps)])
            saved = loader.state_dict()
        assert len({len(batches) for batches in ranks}) == 1
        state, seen = saved, seen + _together(ranks)
    counts, step = Counter(seen), after * sizes[after]
    if drop_last:
        assert max(counts.values()) == 1
        assert 0 <= COUNT - counts.total() < step
    else:
        assert set(counts) == set(range(COUNT))
        assert counts.total() - COUNT < after
    assert state["is_begun"] is False


@pytest.mark.parametrize(
    "engine", [INLINE, THREADS, PROCESSES], ids=["inline", "threads", "processes"]
)
@pytest.mark.parametrize("name", ["shuffled", "repeated"])
def test_a_resumed_epoch_is_the_uninterrupted_one(name: str, engine: dict[str, Any]) -> None:
    """With the same ranks, the rest of an epoch and the next one have the same batches, pixels and draws."""
    make = partial(_ranked, RANKED[name])
    torch.manual_seed(1)
    with _images() as dataset:
        loader = DataLoader(dataset, **make(4, 1, 2), **engine)
        list(loader)
        iterator = iter(loader)
        next(iterator)
        state = _through_json(loader.state_dict())
        rest, following = list(iterator), list(loader)
        torch.manual_seed(2)
        again = DataLoader(dataset, **make(4, 1, 2), **engine)
        again.load_state_dict(state)
        assert again.state_dict() == state
        iter(again)  # as Lightning makes one, and drops it
        assert [*map(_is_equal, again, rest)] == [True] * len(rest)
        assert [*map(_is_equal, again, following)] == [True] * len(following)
        assert (len(rest), len(following)) == (len(again) - 1, len(again))


def test_draws_of_a_collate_fn_are_resumed(launched: Any) -> None:
    """A ``collate_fn`` that draws gets the numbers of the uninterrupted epoch, not those of its first batches."""
    launched(0, 2)
    with _images() as dataset:

        def make() -> Any:
            return DataLoader(
                dataset, 2, collate_fn=_noisy, distributed="auto", workers="thread", num_workers=1
            )

        loader = make()
        iterator = iter(loader)
        next(iterator), next(iterator)
        again = make()
        again.load_state_dict(loader.state_dict())
        assert list(again) == list(iterator)


def _noisy(_: Any) -> float:
    return torch.rand(1).item()


@pytest.mark.parametrize("name", ["ours", "torch's", "one's own"])
def test_draws_of_a_collate_fn_differ_between_ranks(launched: Any, name: str) -> None:
    """MixUp draws different numbers on two ranks, also if the dataset's seed is the same."""
    with _images() as dataset:
        drawn: list[float] = []
        for rank in range(2):
            launched(rank, 2)
            samplers = {
                "ours": None,
                "torch's": DistributedSampler(dataset, 2, rank),
                "one's own": Repeating(4, rank, 2),
            }
            drawn += DataLoader(
                dataset, 2, sampler=samplers[name], collate_fn=_noisy, distributed="auto"
            )
    assert len(set(drawn)) == len(drawn) == (6 if name == "one's own" else 12)


def test_a_state_after_a_set_epoch_is_the_next_one() -> None:
    """After an epoch that was set, the state is the next epoch; the loader itself repeats the epoch that was set."""
    make = partial(_ranked, RANKED["shuffled"])
    loader, again = (
        DataLoader(Numbers(COUNT), **make(COUNT, 0, 1)),
        DataLoader(Numbers(COUNT), **make(COUNT, 0, 1)),
    )
    loader.set_epoch(3)
    assert loader.state_dict()["start"]["samplers"][-1]["state"]["epoch"] == 3
    list(loader)
    again.load_state_dict(loader.state_dict())
    orders = [next(iter(each)).tolist() for each in (loader, again)]
    assert orders == [
        RankSampler(COUNT, rank=0, world_size=1).order(epoch).tolist() for epoch in (3, 4)
    ]


def test_an_epoch_set_after_a_break_leaves_the_state() -> None:
    """After a break, set_epoch does not change the state: it is the position in the epoch that was left."""
    make = partial(_ranked, RANKED["shuffled"])
    loader, again = (DataLoader(Numbers(COUNT), **make(4, 0, 1)) for _ in range(2))
    list(itertools.islice(loader, 2))
    loader.set_epoch(3)
    again.load_state_dict(loader.state_dict())
    order = RankSampler(COUNT, rank=0, world_size=1).order(0).tolist()
    assert [index for batch in again for index in batch.tolist()] == order[8:]


class OfOneRank(Sampler[int]):
    """A sampler that has the attributes of a rank, but no rank."""

    rank = num_replicas = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))

    def __len__(self) -> int:
        return COUNT


def test_a_sampler_that_does_not_know_its_rank_is_one_of_one_rank() -> None:
    """The samples of a sampler without a rank come in its order."""
    with _images() as dataset:
        batches = DataLoader(dataset, 4, sampler=OfOneRank())
        assert [label for _, labels in batches for label in labels.tolist()] == [*range(COUNT)]


def test_states_of_numpys_numbers_are_plain() -> None:
    """States can be written as JSON if sampler and loader were given NumPy's integers."""
    batch_size, count, seed, rank, world_size, epoch = np.arange(2, 8)
    order = repeated(COUNT)
    sampler = RankSampler(
        order=order, num_samples=count * 9, seed=seed, rank=rank - 4, world_size=world_size
    )
    sampler.set_epoch(epoch)
    _through_json(sampler.state_dict(np.int64(1), batch_size))  # type: ignore[arg-type]
    loader = DataLoader(Numbers(COUNT), batch_size=2, sampler=sampler)
    loader.set_epoch(epoch)
    next(iter(loader))
    _through_json(loader.state_dict())
    list(loader)
    _through_json(loader.state_dict())


def test_dropped_batches_do_not_count_in_torchs_loader() -> None:
    """With ``drop_last``, the state after the last whole batch is the beginning of the next epoch."""
    sampler = RankSampler(COUNT, rank=0, world_size=1)
    states = [sampler.state_dict(5, 4, drop_last=drop_last) for drop_last in (False, True)]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 20), (1, 0)]


def test_a_set_epoch_after_loading_begins_that_epoch() -> None:
    """After a state was loaded, setting its epoch resumes it; another epoch begins from its start."""
    make = partial(_ranked, RANKED["shuffled"])
    loader = DataLoader(Numbers(COUNT), **make(4, 0, 1))
    next(iter(loader))
    state = loader.state_dict()
    for epoch in (0, 4):
        again = DataLoader(Numbers(COUNT), **make(4, 0, 1))
        again.load_state_dict(state)
        again.set_epoch(epoch)
        read = [index for batch in again for index in batch.tolist()]
        assert (
            read
            == RankSampler(COUNT, rank=0, world_size=1)
            .order(epoch)
            .tolist()[4 if epoch == 0 else 0 :]
        )


def test_epochs_are_counted_again_from_a_loaded_state() -> None:
    """An epoch that was set before a state was loaded does not decide the epochs after it."""
    sampler = RankSampler(11, rank=0, world_size=1)
    state = sampler.state_dict(batches=2, batch_size=3)
    sampler.set_epoch(7)
    list(sampler)
    sampler.load_state_dict(state)
    assert not sampler.is_set
    found = [list(sampler) for _ in range(3)]
    assert found == [sampler.order(0)[6:].tolist(), *(sampler.order(n).tolist() for n in (1, 2))]


def test_a_state_is_forgotten() -> None:
    """Loading an empty dict restores the epoch that would have come next, from its start."""
    make = partial(_ranked, RANKED["shuffled"])
    loader, again = (
        DataLoader(Numbers(COUNT), **make(4, 0, 1)),
        DataLoader(Numbers(COUNT), **make(4, 0, 1)),
    )
    list(loader)
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    again.load_state_dict({})
    read = [index for batch in again for index in batch.tolist()]
    assert read == RankSampler(COUNT, rank=0, world_size=1).order(0).tolist()


def test_a_state_that_an_iterator_began_with_is_forgotten() -> None:
    """After ``load_state_dict({})`` the epoch is complete, although ``iter`` has begun with the loaded state."""
    make = partial(_ranked, RANKED["shuffled"])
    loader, again = (
        DataLoader(Numbers(COUNT), **make(4, 0, 1)),
        DataLoader(Numbers(COUNT), **make(4, 0, 1)),
    )
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    iter(again)
    again.load_state_dict({})
    read = [index for batch in again for index in batch.tolist()]
    assert read == RankSampler(COUNT, rank=0, world_size=1).order(0).tolist()


def test_an_epoch_set_after_iter_is_kept(launched: Any) -> None:
    """Lightning sets the resumed epoch between ``iter`` and ``next``; the rest of the epoch comes."""
    launched(0, 1)
    loader = DataLoader(Numbers(COUNT), batch_size=4, distributed="auto", shuffle=True)
    list(loader)
    next(iter(loader))
    again = DataLoader(Numbers(COUNT), batch_size=4, distributed="auto", shuffle=True)
    again.load_state_dict(loader.state_dict())
    iterator = iter(again)
    again.sampler.set_epoch(1)
    order = RankSampler(COUNT, rank=0, world_size=1).order(1).tolist()
    assert [index for batch in iterator for index in batch.tolist()] == order[4:]


def test_a_batch_sampler_of_ones_own_resumes_over_a_rank_sampler() -> None:
    """With an unknown batch sampler batches are counted, and a state of other ranks is refused."""

    class Pairs(Sampler[list[int]]):
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[list[int]]:
            indices = list(self.sampler)
            return iter([indices[:20], indices[20:]])

        def __len__(self) -> int:
            return 2

    def make(rank: int, world_size: int) -> Any:
        return DataLoader(
            Numbers(COUNT),
            batch_sampler=Pairs(RankSampler(COUNT, rank=rank, world_size=world_size)),
        )

    loader = make(0, 1)
    list(loader)
    next(iter(loader))
    state = _through_json(loader.state_dict())
    again = make(0, 1)
    again.load_state_dict(state)
    order = RankSampler(COUNT, rank=0, world_size=1).order(1).tolist()
    assert [batch.tolist() for batch in again] == [order[20:]]
    with pytest.raises(ValueError, match="world_size is 2, in the state 1"):
        make(0, 2).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_goes_on_too(num_workers: int) -> None:
    """In torch's loader, a sampler is resumed on other ranks from the number of batches that the loop got."""
    make = partial(_ranked, RANKED["shuffled"])
    seen: list[int] = []
    state: dict[str, Any] = {}
    for (batch_size, world_size), steps in {(2, 3): 2, (3, 2): 1, (4, 1): None}.items():
        ranks, states = [], []
        for rank in range(world_size):
            loader = TorchLoader(
                Numbers(COUNT), num_workers=num_workers, **make(batch_size, rank, world_size)
            )
            sampler: Any = loader.sampler
            if state:
                sampler.load_state_dict(state)
            ranks.append([batch.tolist() for batch in itertools.islice(iter(loader), steps)])
            states.append(
                _through_json(sampler.state_dict(batches=len(ranks[-1]), batch_size=batch_size))
            )
        assert states == states[:1] * world_size
        state, seen = states[0], seen + _together(ranks)
    assert sorted(seen) == list(range(COUNT))
    assert (state["epoch"], state["position"]) == (1, 0)


def test_a_state_of_another_order_is_refused() -> None:
    """The error for a sampler with another seed or other weights names the difference, also in a loader."""
    state = RankSampler(COUNT, rank=0, world_size=1).state_dict()
    with pytest.raises(
        ValueError, match=r"another order: seed is 1, in the state 0\. Make the sampler as it was"
    ):
        RankSampler(COUNT, seed=1, rank=0, world_size=1).load_state_dict(state)
    saved = DataLoader(Numbers(COUNT), **_ranked(RANKED["weighted"], 2, 0, 1)).state_dict()
    other = RankSampler(order=weighted(WEIGHTS + 1), num_samples=31, rank=0, world_size=1)
    with pytest.raises(
        ValueError, match=r"the state comes from another loader: order is .*'weights'"
    ):
        DataLoader(Numbers(COUNT), sampler=other).load_state_dict(saved)


# Weights, classes, repetitions


def test_weighted_samples_come_by_their_weights() -> None:
    """Over many draws each sample comes as often as its weight says; one of weight zero never comes."""
    weights = np.array([0, 1, 2, 5, 0])
    counts = np.bincount(
        RankSampler(order=weighted(weights), num_samples=8000, rank=0, world_size=1).order(0),
        minlength=5,
    )
    assert np.abs(counts - 1000 * weights).max() < 150
    assert counts[[0, 4]].tolist() == [0, 0]


def test_weights_may_differ_by_any_factor() -> None:
    """Very small and very large numbers work as weights."""
    order = weighted([5e-324, 1.7e308, 1.7e308])
    sampler = RankSampler(order=order, num_samples=2, rank=0, world_size=1)
    assert {index for epoch in range(9) for index in sampler.order(epoch).tolist()} == {1, 2}


@pytest.mark.parametrize("replacement", [False, True])
def test_classes_come_equally_often(replacement: bool) -> None:
    """With classes of 9, 4 and 2 samples, each batch of three has all classes; without replacement none repeats."""
    targets = ["a"] * 9 + ["b"] * 4 + ["c"] * 2
    sampler = RankSampler(order=balanced(targets, replacement), rank=0, world_size=1)
    orders = [sampler.order(epoch) for epoch in range(30)]
    assert {len(order) for order in orders} == {15 if replacement else 6}
    for order in orders:
        for start in range(0, len(order), 3):
            assert sorted(targets[k] for k in order[start : start + 3]) == ["a", "b", "c"]
        assert replacement or len(set(order.tolist())) == len(order)
    assert len({int(k) for order in orders for k in order}) == 15


def test_the_classes_of_a_dataset_are_found() -> None:
    """Classes come from a dataset's ``targets``, also inside a Subset or a ConcatDataset."""
    with _images() as dataset:
        assert len(RankSampler(order=balanced(dataset), rank=0, world_size=1)) == COUNT
        subset = Subset(Subset(dataset, range(5, 15)), [2, 4, 4])
        sampler = RankSampler(order=balanced(subset), num_samples=2, rank=0, world_size=1)
        assert sorted(sampler) in ([0, 1], [0, 2])
        joined: ConcatDataset[Any] = ConcatDataset([Subset(dataset, [2, 4]), dataset])
        known = RankSampler(order=balanced([2, 4, *range(COUNT)]), rank=0, world_size=1)
        assert list(RankSampler(order=balanced(joined), rank=0, world_size=1)) == list(known)


def test_copies_go_to_different_ranks() -> None:
    """In repeated augmentation, three ranks get the three copies of a sample; an epoch has a third of the samples."""
    samplers = [RankSampler(order=repeated(24), rank=rank, world_size=3) for rank in range(3)]
    shares = [list(sampler) for sampler in samplers]
    assert shares[0] == shares[1] == shares[2]
    assert len(set(shares[0])) == len(shares[0]) == 8
    assert [getattr(share[0], "occurrence", 0) for share in shares] == [0, 1, 2]


@pytest.mark.parametrize(("stop", "length"), [("first", 40), ("all", 120)])
def test_datasets_are_mixed_in_their_shares(stop: Any, length: int) -> None:
    """A quarter of each epoch is from the first dataset; a dataset repeats no sample before it has given all."""
    sampler = RankSampler(order=mixed([10, 90], [1, 3], stop), rank=0, world_size=1)
    epochs = [sampler.order(epoch) for epoch in range(5)]
    for order in epochs:
        assert len(order) == length
        times = np.bincount(order, minlength=100)
        assert times[:10].sum() == length // 4
        assert times[:10].max() - times[:10].min() <= 1
        assert times[10:].max() <= 1
    assert len({tuple(order) for order in epochs}) == 5
    assert max((order < 10).argmax() for order in epochs) < 30


def test_mixed_datasets_are_read_whole_and_once() -> None:
    """For any weights: stop='first' reads one dataset whole and repeats nothing; stop='all' gives all samples."""
    rng = np.random.default_rng(0)
    for case in range(60):
        count = int(rng.integers(1, 6))
        lengths = rng.integers(3, 20, count).tolist()
        weights = rng.integers(1, 5, count) / rng.choice([1, 3, 4, 10])
        if case % 3 == 0:
            weights = rng.random(count) + 0.2
        if case % 3 == 1:  # all end at once
            weights = np.array(lengths) * 0.1
        for stop in ("first", "all"):
            order = mixed(lengths, weights.tolist(), stop)
            for n in (order.num_samples, order.num_samples // 2, order.num_samples + 3):
                times = np.bincount(order.draw(case, 1, n), minlength=sum(lengths))
                parts = np.split(times, np.cumsum(lengths)[:-1])
                takes = np.array([part.sum() for part in parts])
                assert takes.sum() == n
                assert (np.abs(takes - n * weights / weights.sum()) < 1 + 1e-9).all()
                assert all(part.max() - part.min() <= 1 for part in parts)
                if n == order.num_samples and stop == "first":
                    assert times.max() <= 1
                    assert (takes == lengths).any()
                if n == order.num_samples and stop == "all":
                    assert times.min() >= 1


def test_mixed_orders_are_uniform() -> None:
    """In each epoch, about one sample keeps its place, as in a random order; two rounds have different orders."""
    order = mixed([40])
    for epoch in (0, 1):
        fixed = [(order.draw(seed, epoch, 40) == np.arange(40)).sum() for seed in range(600)]
        assert abs(np.mean(fixed) - 1) < 0.3
    two = mixed([40, 40], stop="all")
    drawn = two.draw(3, 0, 160)
    rounds = [tuple(drawn[drawn // 40 == part][:40] % 40) for part in (0, 1)]
    assert rounds[0] != rounds[1]


def test_ranks_that_all_read_all_samples_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffled loader warns once if each of two ranks reads all samples; one that divides them does not."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(Numbers(COUNT), batch_size=4, shuffle=True)
    with pytest.warns(FastDataWarning, match="one of 2 ranks, and each of them reads all"):
        list(loader)
    list(loader)
    list(DataLoader(Numbers(COUNT), batch_size=4, shuffle=True, distributed="auto"))


# Errors


def test_a_sampler_of_nothing_says_what_it_needs() -> None:
    """The error without dataset and order names both."""
    with pytest.raises(TypeError, match="needs a dataset, its length, or an order="):
        RankSampler()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RankSampler(5, 6), "num_samples=6, but .* at most 5 samples"),
        (
            lambda: RankSampler(5, rank=2, world_size=2),
            "rank=2 is not one of the world_size=2 ranks",
        ),
        (
            lambda: weighted([1, -2]),
            r"weight 1 is -2\.0, but each must be a number, finite and not negative",
        ),
        (lambda: weighted([[1, 1], [1, 1]]), r"weight 0 is \[1\. 1\.\], but each must be a number"),
        (lambda: balanced([[0, 1], [1, 1]]), r"shape \(2, 2\), but each sample needs one class"),
        (lambda: mixed([5, 6], stop="both"), "stop='both' is not one of 'first', 'all'"),
        (lambda: RankSampler(5, uneven="cut"), "uneven='cut' is not one of 'pad', 'drop', 'keep'"),
        (lambda: RankSampler(order=repeated(5, 0)), "num_samples=5, but .* at most 0 samples"),
        (lambda: weighted([1, float("nan")]), "weight 1 is nan"),
        (lambda: weighted([0, 0]), r"weight 0 is 0\.0, .* at least one of them above zero"),
        (
            lambda: RankSampler(num_samples=3, order=balanced([0, 0, 7])),
            "num_samples=3, but .* at most 2 samples",
        ),
        (
            lambda: balanced(Numbers(COUNT)),
            "Numbers has no attribute targets. Pass the class of each sample",
        ),
        (
            lambda: mixed([5, 6], [1]),
            r"weights=\[1.0\] for datasets of \[5, 6\] samples: each dataset needs one",
        ),
        (lambda: mixed([5, 6], [1, 0]), r"weights=\[1.0, 0.0\] for datasets of \[5, 6\] samples"),
        (lambda: mixed([5, 0]), "no dataset may be empty"),
        (
            lambda: RankSampler(num_samples=11, order=repeated(5, 2)),
            "num_samples=11, but .* at most 10 samples",
        ),
        (
            lambda: DataLoader(Numbers(COUNT), distributed="on"),
            "distributed='on' is not one of 'off', 'auto', 'exact'",
        ),
        (
            lambda: DataLoader(Stream(), distributed="auto"),
            "distributed='auto' divides the indices .* but a Stream has no indices or no length",
        ),
        (
            lambda: DataLoader(Numbers(COUNT), 2, distributed="exact", drop_last=True),
            "distributed='exact' gives every sample once, but drop_last=True",
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    """Each wrong argument is a ValueError that gives the value and what is needed."""
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sampler_made_alone_knows_its_rank_when_it_is_iterated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning makes a process a rank after the loader; the state has the ranks of its epoch."""
    sampler = RankSampler(10, shuffle=False)
    assert len(sampler) == 10
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(sampler) == 5
    assert list(sampler) == [1, 3, 5, 7, 9]
    monkeypatch.delenv("WORLD_SIZE")
    assert sampler.state_dict(batches=2, batch_size=1)["position"] == 4


def test_copies_on_different_ranks_draw_anew_in_torchs_loader_too() -> None:
    """A sample that two ranks get in one epoch has different random crops, also with torch's loader."""
    source = [
        (torch.arange(48 * 48, dtype=torch.uint8).reshape(1, 48, 48).repeat(3, 1, 1), k)
        for k in range(4)
    ]
    crops = []
    for rank in (0, 1):
        with CachedDataset(source, transform=v1.RandomCrop(16), seed=0) as dataset:
            sampler = RankSampler(
                order=repeated(4, 2, shuffle=False), num_samples=8, rank=rank, world_size=2
            )
            loader = TorchLoader(dataset, batch_size=4, sampler=sampler)
            crops += [images for images, _ in loader]
    assert all(not torch.equal(one, other) for one, other in zip(*crops, strict=True))
