"""Subclasses of DataLoader and their own names; copies and pickles; forked processes; streams."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset
from torch.utils.data.datapipes.iter import IterableWrapper

from conftest import shown
from data import Numbers, level_samples
from fastdata import CachedDataset, DataLoader

INLINE = {"num_workers": 0}
THREADS = {"num_workers": 2, "workers": "thread"}
PROCESSES = {"num_workers": 2, "workers": "process"}
EVERY_ENGINE = pytest.mark.parametrize(
    "engine", [INLINE, THREADS, PROCESSES], ids=["inline", "threads", "processes"]
)


def _plain(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


# Subclasses, whose names are their own


def _own_names() -> list[str]:
    """Return the names that our loader has and torch's has not, without those of ``_fastdata``."""
    ours = DataLoader(Numbers())
    found = {*dir(ours), *dir(ours._fastdata), *dir(ours._fastdata.resume)}
    found -= {*dir(TorchLoader(Numbers())), "_fastdata"}
    return sorted(name for name in found if not name.startswith("__"))


def test_our_loader_adds_few_names_to_torchs() -> None:
    """Our loader adds only the documented names, and ``_fastdata`` for everything else."""
    documented = {"workers", "distributed", "memory_format"}
    documented |= {"report", "state_dict", "load_state_dict", "set_epoch", "show"}
    added = {*dir(DataLoader(Numbers()))} - {*dir(TorchLoader(Numbers()))}
    assert added - {"__setstate__", "_repr_html_"} == documented | {"_fastdata"}


OWN_VALUES: list[Any] = [
    2,
    0,
    None,
    "some",
    [],
    {},
    (),
    0.5,
    torch.zeros(2),
    lambda *_: None,
    set(),
]


def _subclass(base: Any, rng: random.Random, names: list[str]) -> Any:
    """Return a subclass with its own values under these names, set before or after ``__init__``, or in its body."""
    before, after, body = ({} for _ in range(3))
    for name in names:
        rng.choice([before, after, body])[name] = rng.choice(OWN_VALUES)

    class Own(base):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            vars(self).update(before)
            super().__init__(*arguments, **options)
            vars(self).update(after)

        def keeps_its_values(self) -> bool:
            return all(getattr(self, name) is value for name, value in (before | after).items())

    for name, value in body.items():
        setattr(Own, name, value)
    return Own


@pytest.mark.parametrize("trial", range(12))
@pytest.mark.parametrize("engine", [INLINE, THREADS], ids=["inline", "threads"])
def test_a_subclass_may_use_any_name(engine: dict[str, Any], trial: int) -> None:
    """Batches are those of torch's loader, whatever attributes and methods a subclass has; copies work too."""
    names = _own_names()
    for own in (names, random.Random(trial).sample(names, 5)):
        outcome = []
        for base, options in ((DataLoader, engine), (TorchLoader, {})):
            loader = _subclass(base, random.Random(trial), own)(
                Numbers(), batch_size=4, shuffle=True, **options
            )
            torch.manual_seed(trial)
            outcome.append([[b.tolist() for b in it] for it in (loader, copy.copy(loader), loader)])
            assert loader.keeps_its_values()
        assert outcome[0] == outcome[1]


def test_an_attribute_workers_of_a_subclass_changes_no_engine() -> None:
    """``self.workers = n`` of a subclass, before or after torch's ``__init__``, or a method, changes no engine."""

    class After(DataLoader[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.workers = self.num_workers  # type: ignore[assignment]

    class Before(DataLoader[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.workers = 2  # type: ignore[assignment]
            super().__init__(*arguments, **options)

    class Method(DataLoader[Any]):
        def workers(self) -> int:  # type: ignore[override]
            return 2

    for kind in (After, Before, Method):
        loader = kind(Numbers(), num_workers=1)
        assert "1 worker process, with batches in shared memory" in repr(loader)
        loader = kind(Numbers(), num_workers=1, workers="thread")
        assert "1 thread" in repr(loader)
        assert loader.workers == (2 if kind is Before else 1 if kind is After else loader.workers)
    loader = DataLoader(Numbers(), num_workers=1)
    assert loader.workers == "auto"
    loader.workers = "thread"
    assert len(list(loader)) == len(Numbers())
    assert loader.report().engine == "thread"


class Proxy:
    """An object that pretends to be the dataset inside it, but makes its own items."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def __class__(self) -> Any:
        return type(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index][1] + 100


@EVERY_ENGINE
def test_a_proxy_of_a_dataset_makes_its_own_items(engine: dict[str, Any]) -> None:
    """A proxy's own items are used, whatever its ``__class__`` says, alone and in a Subset."""
    with CachedDataset([(torch.zeros(1, 2, 2), n) for n in range(5)]) as cached:
        proxy: Any = Proxy(cached)
        assert isinstance(proxy, CachedDataset)
        for dataset in (proxy, Subset(proxy, range(4))):
            assert _plain(DataLoader(dataset, batch_size=4, **engine))[0] == [100, 101, 102, 103]


# Copies and pickles


@EVERY_ENGINE
def test_a_copy_of_a_loader_counts_its_own_epochs(engine: dict[str, Any]) -> None:
    """A loader and its copy have separate states, loaded states and epochs."""
    samples = level_samples(12, (3, 4, 4), torch.int64)
    with CachedDataset(samples, seed=0) as cached:
        loader = DataLoader(cached, batch_size=3, **engine)
        other = copy.copy(loader)
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        next(iter(other))
        assert loader.state_dict()["num_yielded"] == 2
        assert len(list(iterator)) == 2

        loader = DataLoader(cached, batch_size=3, **engine)
        other = copy.copy(loader)
        next(iter(loader))
        other.load_state_dict(loader.state_dict())
        assert len(list(loader)) == 4
        assert len(list(other)) == 3

        loader = DataLoader(cached, batch_size=3, **engine)
        other = copy.copy(loader)
        for each in (other, loader):
            list(each)
            assert each.state_dict()["epoch"] == 1


def test_a_copy_has_its_own_distributed_sampler() -> None:
    """A copy gets its own sampler if ``distributed=`` made it; a sampler of the user is shared, as in torch."""
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True, distributed="auto")
    for other in (copy.copy(loader), copy.deepcopy(loader)):
        assert other.batch_sampler.sampler is other.sampler is not loader.sampler
        assert _plain(other) == _plain(copy.copy(loader))
    order = [3, 1, 2]
    loader = DataLoader(Numbers(), sampler=order)
    assert copy.copy(loader).sampler is order


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_loader_is_pickled_by_every_protocol(
    memory_format: torch.memory_format, protocol: int
) -> None:
    """A loader can be pickled like torch's, and keeps its memory format."""
    loader = DataLoader(Numbers(), batch_size=4, memory_format=memory_format)
    again = pickle.loads(pickle.dumps(loader, protocol))
    assert again.memory_format is loader.memory_format is memory_format
    assert _plain(again) == _plain(loader)


def test_a_loader_is_saved_by_torch() -> None:
    """``torch.save`` saves a loader whose workers are alive, and they stay with the original."""
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True)
    whole = _plain(loader)
    file = io.BytesIO()
    torch.save(loader, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert _plain(again) == whole == _plain(loader)


# Other processes, streams


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_cannot_read_by_threads_of_its_parent() -> None:
    """``next`` in the child raises at once; the parent's epoch continues, and the child can begin its own."""
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, workers="thread")
    whole = _plain(loader)
    iterator = iter(loader)
    next(iterator)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            next(iterator)
        except RuntimeError as error:
            is_whole = _plain(loader) == whole
            os.write(write, f"{is_whole} {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    assert said.startswith(f"True this iterator of a DataLoader belongs to process {os.getpid()}")
    assert f"Process {pid} was forked from it, and a fork does not copy threads." in said
    assert len(list(iterator)) == 2


@pytest.mark.parametrize("options", [{"persistent_workers": True, "num_workers": 1}, {}], ids=shown)
def test_a_datapipe_shuffles_each_epoch_as_in_torchs_loader(options: dict[str, Any]) -> None:
    """A pipe that shuffles gives torch's orders, a new one in each epoch, for each seed and with a generator."""
    for is_global in (True, False):
        outcome = []
        for make in (DataLoader, TorchLoader):
            torch.manual_seed(3)
            pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
            generator = None if is_global else torch.Generator().manual_seed(5)
            loader = make(pipe, shuffle=True, generator=generator, **options)
            outcome.append([[int(number) for number in loader] for _ in range(3)])
        assert outcome[0] == outcome[1]
        assert len(set(map(tuple, outcome[0]))) == 3
