"""The documented behaviour of torch's DataLoader, checked with torch's loader and with ours."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from children import (
    Draws,
    Failing,
    Numbers,
    Stream,
    Structures,
    Waiting,
    WhoReads,
    fail_in_worker,
    mark_worker,
)
from conftest import shown
from data import level_samples
from fastdata import CachedDataset, CudaPrefetcher, DataLoader, FastDataWarning
from fastdata.machine import limits
from fresh import Interpreters

INLINE = {"num_workers": 0}
THREADS = {"num_workers": 2, "workers": "thread"}
PROCESSES = {"num_workers": 2, "workers": "process"}
EVERY_ENGINE = pytest.mark.parametrize(
    "engine", [INLINE, THREADS, PROCESSES], ids=["inline", "threads", "processes"]
)


def _plain(value: Any) -> Any:
    """Return a batch as values that can be compared: tensors and containers with their types."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_plain(each) for each in value]
    return value


def _outcome(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return a call's value, or the type and text of its error, and its warnings, without addresses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = _plain(act())
        except Exception as error:  # noqa: BLE001  # to be compared
            value = type(error), re.sub(r"0x\w+", "0x", str(error))
    return value, [re.sub(r"0x\w+", "0x", str(each.message)) for each in caught]


def _torchs(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of torch's loader that correspond to one of our engines."""
    return {name: value for name, value in engine.items() if name != "workers"}


def _same(
    dataset: Any, engine: dict[str, Any], make: Callable[[], dict[str, Any]], epochs: int = 2
) -> Any:
    """Check that both loaders give equal epochs and leave torch's generator equal; return the epochs."""

    def run(loader_class: Any, arguments: dict[str, Any]) -> Any:
        torch.manual_seed(7)
        loader = loader_class(dataset, **make(), **arguments)
        return [list(loader) for _ in range(epochs)], torch.get_rng_state()

    ours, theirs = (
        _outcome(lambda: run(DataLoader, engine)),
        _outcome(lambda: run(TorchLoader, _torchs(engine))),
    )
    assert ours == theirs
    assert not isinstance(ours[0][0], type), ours
    return ours[0][1][0]


class Unsized:
    """A batch sampler that is not a ``Sampler`` and has no length."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[3, 1], [0], [4, 4, 2]])


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "in sequence": lambda: {"batch_size": 4},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "generator": lambda: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
    },
    "replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(11), replacement=True, num_samples=50),
    },
    "subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler([4, 9, 2])},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0] * 5, 13)},
    "distributed": lambda: {"batch_size": 2, "sampler": DistributedSampler(Numbers(), 2, 1)},
    "list of indices": lambda: {"batch_size": 3, "sampler": [5, 3, 0, 7]},
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(SequentialSampler(range(11)), 4, drop_last=True)
    },
    "list of batches": lambda: {"batch_sampler": [[1, 2], [0], [7, 5, 4]]},
    "unsized batches": lambda: {"batch_sampler": Unsized()},
}


@EVERY_ENGINE
def test_workers_may_be_counted_by_numpy(engine: dict[str, Any]) -> None:
    workers = numpy.int64(engine["num_workers"])
    cached = CachedDataset(level_samples(4, (3, 4, 4), torch.int64))
    loader = DataLoader(cached, batch_size=2, **engine | {"num_workers": workers})
    assert [targets.tolist() for _, targets in loader] == [[0, 1], [2, 3]]


@EVERY_ENGINE
def test_a_batch_of_no_samples_is_an_error(engine: dict[str, Any]) -> None:
    """An empty batch raises torch's error; the user's own ``collate_fn`` gets an empty list."""
    cached = CachedDataset(level_samples(4, (3, 4, 4), torch.int64))
    batches: Any = [[0, 1], [], [2]]
    left = iter(DataLoader(cached, batch_sampler=batches, **engine))
    next(left)
    with pytest.raises(IndexError, match="list index out of range"):
        next(left)
    assert list(DataLoader(cached, batch_sampler=batches, collate_fn=len, **engine)) == [2, 0, 1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", [INLINE, THREADS], ids=["inline", "threads"])
def test_every_order_is_torchs(engine: dict[str, Any], order: str) -> None:
    """For one seed, two epochs are torch's, batch by batch, and so is the state of torch's generator afterwards."""
    _same(Numbers(), engine, ORDERS[order])


@pytest.mark.parametrize("order", ["shuffled", "generator", "unsized batches"])
def test_orders_are_torchs_in_worker_processes(order: str) -> None:
    """With worker processes the batches are the same, in the same order."""
    _same(Numbers(), PROCESSES, ORDERS[order])


@pytest.mark.parametrize("order", ["shuffled", "generator", "weighted"])
@pytest.mark.parametrize("engine", [THREADS, PROCESSES], ids=["threads", "processes"])
def test_orders_of_persistent_workers_are_torchs(engine: dict[str, Any], order: str) -> None:
    """Persistent workers and threads are seeded once, and the order of every later epoch is torch's."""
    _same(Numbers(), engine, lambda: {**ORDERS[order](), "persistent_workers": True}, epochs=3)


@EVERY_ENGINE
def test_samples_of_every_kind_are_collated_alike(engine: dict[str, Any]) -> None:
    """Dicts, tuples, named tuples, lists, arrays, numbers, strings and bytes keep torch's types and dtypes."""
    _same(Structures(5), engine, lambda: {"batch_size": 2}, epochs=1)


@pytest.mark.parametrize("engine", [INLINE, PROCESSES], ids=["inline", "processes"])
def test_batch_size_none_gives_converted_samples(engine: dict[str, Any]) -> None:
    """With batch_size=None samples come one by one: arrays become tensors, everything else is unchanged."""
    (_, samples), *_ = [_same(Structures(3), engine, lambda: {"batch_size": None}, epochs=1)[1][0]]
    assert samples[2]["text"] == "xx"


@EVERY_ENGINE
def test_a_collate_function_gets_torchs_list(engine: dict[str, Any]) -> None:
    """The user's own collate_fn gets a list of samples, and its result is the batch."""
    _same(Numbers(), engine, lambda: {"batch_size": 4, "collate_fn": repr}, epochs=1)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}]
)
def test_a_stream_is_shared_by_its_workers(num_workers: int, options: dict[str, Any]) -> None:
    """An IterableDataset that uses get_worker_info() gives torch's batches, each sample once."""
    _same(Stream(), {"num_workers": num_workers}, lambda: options)


@pytest.mark.parametrize(
    "options", [{}, {"persistent_workers": True}, {"worker_init_fn": mark_worker}], ids=shown
)
def test_worker_processes_are_torchs(options: dict[str, Any]) -> None:
    """Workers have their id and number, run worker_init_fn once, and persist only if the user chose that."""

    def readers(loader: Any) -> tuple[Any, bool]:
        epochs = [
            [sample.tolist() for sample in torch.stack(batch, 1)] for batch in [*loader, *loader]
        ]
        pids, *facts = zip(*(sample for batch in epochs for sample in batch), strict=True)
        return facts, set(pids[:11]) == set(pids[11:])

    arguments = {"batch_size": 2, "num_workers": 2, **options}
    ours = readers(DataLoader(WhoReads(), **arguments))
    assert ours == readers(TorchLoader(WhoReads(), **arguments))
    assert ours[1] == ("persistent_workers" in options)
    assert set(ours[0][2]) == ({100, 101} if "worker_init_fn" in options else {0})


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"generator": 5}], ids=shown)
def test_workers_are_seeded_as_torchs(options: dict[str, Any]) -> None:
    """In each worker, torch, random and NumPy draw the same numbers as in torch's loader, in two epochs."""

    def make() -> dict[str, Any]:
        generator = (
            {"generator": torch.Generator().manual_seed(5)} if "generator" in options else {}
        )
        return {"batch_size": 3, **options, **generator}

    _same(Draws(), PROCESSES, make)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_methods(method: str) -> None:
    """Every start method, by name or context, gives the batches of the training loop."""
    context = multiprocessing.get_context(method) if method == "fork" else method
    loader = DataLoader(Structures(4), batch_size=2, num_workers=1, multiprocessing_context=context)
    assert _plain(list(loader)) == _plain(list(TorchLoader(Structures(4), batch_size=2)))
    assert loader.multiprocessing_context.get_start_method() == method


class Drawn(Sampler[int]):
    """A sampler that counts how many indices were drawn."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(11):
            self.count += 1
            yield index


@EVERY_ENGINE
@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_prefetch_factor(
    engine: dict[str, Any], prefetch_factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many batches are read ahead as in torch: prefetch_factor for each worker, and one for each that is taken."""
    monkeypatch.setattr(limits, "usable_cores", lambda: 2)
    options = {"prefetch_factor": prefetch_factor} if engine["num_workers"] else {}

    def drawn(loader_class: Any, arguments: dict[str, Any]) -> list[int]:
        sampler = Drawn()
        iterator = iter(loader_class(Numbers(), sampler=sampler, **options, **arguments))
        at_start = sampler.count
        next(iterator)
        return [at_start, sampler.count]

    ours = drawn(DataLoader, engine)
    assert ours == drawn(TorchLoader, _torchs(engine))
    assert ours[0] == engine["num_workers"] * prefetch_factor


@pytest.mark.parametrize("engine", [THREADS, PROCESSES], ids=["threads", "processes"])
def test_a_timeout_raises_torchs_error_and_loses_no_batch(engine: dict[str, Any]) -> None:
    """A late batch raises torch's error, and the next call of ``next`` returns it."""

    def late(loader_class: Any, arguments: dict[str, Any]) -> Any:
        release = multiprocessing.get_context("fork").Event()
        iterator = iter(loader_class(Waiting(release), timeout=0.3, **arguments))
        late = _outcome(lambda: next(iterator))
        release.set()
        iterator._timeout = 30
        return late, _plain(list(iterator))

    ours = late(DataLoader, engine)
    assert ours == late(TorchLoader, _torchs(engine))
    assert ours[0][0] == (RuntimeError, "DataLoader timed out after 0.3 seconds")


@pytest.mark.skipif(
    "in_order" not in TorchLoader.__init__.__kwdefaults__, reason="this torch has no in_order"
)
@pytest.mark.parametrize("loader_class", [DataLoader, TorchLoader])
def test_out_of_order_batches_do_not_wait(loader_class: Any) -> None:
    """With in_order=False, finished batches arrive while an earlier one is still being read."""
    release = multiprocessing.get_context("fork").Event()
    iterator = iter(loader_class(Waiting(release), num_workers=2, in_order=False))
    first = next(iterator).item()
    release.set()
    assert first in (1, 3)
    assert sorted([first, *(batch.item() for batch in iterator)]) == [0, 1, 2, 3]


def test_a_state_out_of_order_only_counts() -> None:
    """With in_order=False a state warns that it is not exact, and counts the batches that arrived."""
    release = multiprocessing.get_context("fork").Event()
    loader = DataLoader(Waiting(release), num_workers=2, in_order=False)
    iterator = iter(loader)
    next(iterator)
    with pytest.warns(FastDataWarning, match="in_order=False .* a state only counts them"):
        state = loader.state_dict()
    release.set()
    del iterator
    loader.load_state_dict(state)
    assert len(list(loader)) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"num_workers": 1, "prefetch_factor": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"drop_last": 3},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "threads"},
        {"num_workers": 1, "multiprocessing_context": 3},
        {"dataset": Stream(), "shuffle": True},
        {"dataset": Stream(), "sampler": [1]},
        {"dataset": Stream(), "batch_sampler": [[1]]},
        {"dataset": [], "shuffle": True},
        {"bogus": 1},
    ],
    ids=shown,
)
def test_what_torch_refuses_is_refused(options: dict[str, Any]) -> None:
    """Errors of the constructor have torch's type and text."""
    arguments = {"dataset": Numbers(), **options}
    ours, theirs = (
        _outcome(lambda: DataLoader(**arguments)),
        _outcome(lambda: TorchLoader(**arguments)),
    )
    assert ours == theirs
    assert issubclass(ours[0][1][0] if ours[0][0] == "tuple" else ours[0][0], Exception)


@pytest.mark.parametrize(
    "options", [{"timeout": 3}, {"num_workers": 2, "prefetch_factor": 0}], ids=shown
)
def test_what_torch_refuses_to_iterate_is_no_empty_epoch(options: dict[str, Any]) -> None:
    """Arguments that only torch's iterators refuse do not matter to threads."""
    loader = DataLoader(Numbers(), workers="thread", **options)
    assert len(list(loader)) == len(loader)


@EVERY_ENGINE
@pytest.mark.parametrize(
    ("error", "words"), [(KeyError, "no\nkey"), (FileNotFoundError, "gone")], ids=shown
)
def test_an_exception_of_the_dataset(
    engine: dict[str, Any], error: type[Exception], words: str
) -> None:
    """An exception has torch's type; from processes it has torch's text with the traceback, from threads its own."""

    def failed(loader_class: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
        iterator = iter(loader_class(Failing(error, words), batch_size=2, **arguments))
        before = [next(iterator).tolist(), next(iterator).tolist()]
        outcome = _outcome(lambda: next(iterator))
        _end(iterator)
        return before, outcome

    ours, theirs = failed(DataLoader, engine), failed(TorchLoader, _torchs(engine))
    if engine is THREADS:
        assert ours == (theirs[0], ((error, str(error(words))), []))
        return
    assert ours == theirs
    if engine is PROCESSES:
        assert ours[1][0][1].startswith(
            f"Caught {error.__name__} in DataLoader worker process 0.\nOriginal Traceback"
        )


def _end(iterator: Any) -> None:
    """End torch's workers here: each would take 5 s in the garbage collector."""
    if type(iterator) is _MultiProcessingDataLoaderIter:
        iterator._shutdown_workers()


@EVERY_ENGINE
def test_a_caught_exception_keeps_nothing_alive(engine: dict[str, Any]) -> None:
    """Threads and processes end with a dropped iterator, also after an exception: there is no reference cycle."""
    iterator = iter(DataLoader(Failing(ValueError, "bad"), batch_size=5, **engine))
    gc.disable()
    try:
        with pytest.raises(ValueError, match="bad"):
            next(iterator)
        gone = weakref.ref(iterator)
        del iterator
        assert gone() is None
    finally:
        gc.enable()


def test_an_exception_of_worker_init_fn() -> None:
    """The error of a worker that cannot start has the worker's number."""
    arguments = {"num_workers": 1, "worker_init_fn": fail_in_worker}

    def failed(loader_class: Any) -> Any:
        iterator = iter(loader_class(Numbers(), **arguments))
        outcome = _outcome(lambda: next(iterator))
        _end(iterator)
        return outcome

    ours = failed(DataLoader)
    assert ours == failed(TorchLoader)
    assert "Caught RuntimeError in DataLoader worker process 0" in ours[0][1]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": [[1], [2]]},
        {"batch_sampler": Unsized()},
        {"dataset": Stream(), "batch_size": 3},
        {"dataset": Stream(), "batch_size": 3, "drop_last": True},
    ],
    ids=shown,
)
def test_lengths_are_torchs(options: dict[str, Any]) -> None:
    """len(loader) and len(iter(loader)) are torch's, their errors included."""

    def lengths(loader_class: Any) -> list[Any]:
        loader = loader_class(**{"dataset": Numbers(), **options})
        return [_outcome(lambda: len(loader)), _outcome(lambda: len(iter(loader)))]

    assert lengths(DataLoader) == lengths(TorchLoader)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 40},
        {"pin_memory": True},
        {"pin_memory": True, "pin_memory_device": "cuda"},
        {"dataset": Stream(5), "batch_size": 2},
        {"dataset": Stream(2), "num_workers": 2},
    ],
    ids=shown,
)
def test_warnings_are_torchs(options: dict[str, Any]) -> None:
    """Too many workers, pinning without a device, and a stream longer than its length warn as in torch."""

    def epoch(loader_class: Any) -> Any:
        loader = loader_class(**{"dataset": Numbers(3), **options})
        len(loader)
        return list(loader) if loader.num_workers < 10 else loader.check_worker_number_rationality()

    ours = _outcome(lambda: epoch(DataLoader))
    assert ours == _outcome(lambda: epoch(TorchLoader))
    assert ours[1] or torch.accelerator.is_available()


@pytest.mark.parametrize("name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset"])
def test_what_makes_batches_cannot_be_changed(name: str) -> None:
    """Assigning attributes that decided the batches raises torch's error."""
    outcomes = [
        _outcome(lambda each=each: setattr(each(Numbers()), name, 3))
        for each in (DataLoader, TorchLoader)
    ]
    assert outcomes[0] == outcomes[1]
    assert "attribute should not be set after DataLoader is initialized" in str(outcomes[0])


def test_every_argument_is_an_attribute() -> None:
    """A loader can be made from another one's attributes, as Lightning does."""
    with CachedDataset([(torch.zeros(1, 2, 2), i) for i in range(5)]) as dataset:
        loader = DataLoader(
            dataset, batch_size=2, num_workers="auto", workers="thread", prefetch_factor=3
        )
        names = [
            *DataLoader.__init__.__kwdefaults__,
            "dataset",
            "num_workers",
            "collate_fn",
            "timeout",
        ]
        again = DataLoader(batch_size=2, **{name: getattr(loader, name) for name in names})
        assert _plain(list(again)) == _plain(list(loader))
        assert again.report().path == loader.report().path


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
@EVERY_ENGINE
def test_a_used_loader_can_be_copied(
    engine: dict[str, Any], duplicate: Callable[[Any], Any]
) -> None:
    """A deep or pickled copy of a loader after an epoch gives the next one."""
    loader = DataLoader(Numbers(), batch_size=4, **engine)
    whole = _plain(list(loader))
    assert _plain(list(duplicate(loader))) == whole


@pytest.mark.parametrize("loader_class", [DataLoader, TorchLoader])
def test_there_is_no_worker_in_the_training_loop(loader_class: Any) -> None:
    """get_worker_info() is None in the training loop."""
    for _ in loader_class(Numbers(2), num_workers=1):
        assert get_worker_info() is None


def test_a_generator_made_from_torchs_draws_alike_in_any_thread() -> None:
    """A NumPy generator seeded as docs/differences.md advises draws the same with any number of threads."""

    class Drawing(Numbers):
        def __getitem__(self, index: int) -> int:
            rng = numpy.random.default_rng(int(torch.randint(2**62, ())))
            return int(rng.integers(1 << 30))

    drawn = []
    for workers in (1, 3):
        torch.manual_seed(3)
        loader = DataLoader(Drawing(12), 2, shuffle=True, num_workers=workers, workers="thread")
        drawn.append(torch.cat(list(loader)).tolist())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 12


def test_threads_are_no_workers_to_the_dataset() -> None:
    """In threads get_worker_info() is None, and worker_init_fn is not called."""
    seen: list[Any] = []

    class Asking(Numbers):
        def __getitem__(self, index: int) -> int:
            seen.append((get_worker_info(), threading.current_thread() is threading.main_thread()))
            return index

    loader = DataLoader(Asking(3), num_workers=1, workers="thread", worker_init_fn=fail_in_worker)
    assert len(list(loader)) == 3
    assert seen == [(None, False)] * 3


@EVERY_ENGINE
def test_a_subclasses_own_iterators_are_iterated(engine: dict[str, Any]) -> None:
    """``iter`` calls ``_get_iterator``, as torch's does, also that of a subclass."""
    taken: list[Any] = []

    class Noting(DataLoader[int]):
        def _get_iterator(self) -> Any:
            taken.append(super()._get_iterator())
            return taken[-1]

    loader = Noting(Numbers(6), batch_size=4, **engine)
    iterator = iter(loader)
    assert taken == [iterator]
    assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3], [4, 5]]
    assert loader.report().batches == 2
    with CudaPrefetcher(loader, device="cpu") as batches:
        assert len(list(batches)) == len(taken) == 2


def test_a_torch_whose_loader_has_two_type_variables_is_imported(fresh: Interpreters) -> None:
    """After PyTorch 2.13 a DataLoader takes two type arguments, and so does ours."""
    script = """
        from typing import Any, Generic, TypeVar
        import torch
        from torch.utils.data import dataloader as module
        Sample, Collated = TypeVar("Sample", covariant=True), TypeVar("Collated")

        class Later(module.DataLoader, Generic[Sample, Collated]):
            pass

        module.DataLoader = torch.utils.data.DataLoader = Later
        from fastdata import DataLoader
        assert issubclass(DataLoader[int, Any].__origin__, Later)
        assert [batch.tolist() for batch in DataLoader(range(3), batch_size=2)] == [[0, 1], [2]]
    """
    done = fresh.run(script)
    assert (done.returncode, done.stderr) == (0, "")
