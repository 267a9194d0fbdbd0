"""``fastdata.diagnose``: where a training loop's time goes, and what would make it shorter.

Measured are the loop as it is, the model with one batch again and again, the loader without a
model, what one sample costs in its parts, and other settings of the loader; all but the first two
in processes of their own. ``verdict.py`` makes words of it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Subset, default_collate

from fastdata.datasets.batch import flatten
from fastdata.datasets.cached import CachedDataset
from fastdata.datasets.dataset import PreparedDataset, latest_reader, prepared_anew
from fastdata.errors import kind_of
from fastdata.loaders.epochs import LoopTimes, sample_count
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.order import undisturbed
from fastdata.loaders.prefetch import CudaPrefetcher
from fastdata.machine.memory import (
    available_bytes,
    budget_bytes,
    format_bytes,
    thread_clock,
    tree_pss_bytes,
    usable_cores,
)
from fastdata.pixels.compose import flatten as flatten_steps
from fastdata.report import EngineKind
from fastdata.tools import output
from fastdata.tools.measure import (
    EndlessOrder,
    Rate,
    apart,
    differs,
    measure,
    stored_bytes,
    undisturbed_generators,
)
from fastdata.tools.verdict import Diagnosis, Figures, Part, Trial, name_limit

Costs = npt.NDArray[np.float64]
"""Seconds of one core, waiting for others than a core included; and CPU seconds."""

_RATE_S = 1.0
_MODEL_S = 1.0
_SAMPLES_S = 1.5
_PATIENCE_S = 30.0
_SAMPLES = 32
_MOST_SAMPLES = 512
_LETTERS = 44


def diagnose(
    loader: Iterable[Any],
    step: Callable[[Any], Any] | None = None,
    *,
    device: str | torch.device | None = None,
    batches: int = 100,
) -> Diagnosis:
    """Run a training loop and say where its time goes.

    The loop is run over one epoch at most, then ``step`` again on its last batch for about a
    second: the model learns from that. All else runs in forked processes; random generators, the
        loader's too, are left as they were. A loader
    of fastdata's counts the epoch. What the loader or ``step`` raises in the loop is raised here.

    Args:
        loader: any torch ``DataLoader``, fastdata's among them, or a ``CudaPrefetcher``. Of other
            iterables of batches only the loop is measured.
        step: called with each batch; without it nothing is done with them.
        device: where batches are moved before ``step``; default: where they are.
        batches: to run at most, at least 2; the first one is not counted.

    Raises:
        ValueError: the loader gave fewer than two batches.

    Example:
        >>> print(diagnose([torch.zeros(4, 3)] * 20, lambda batch: [batch.exp() for _ in range(99)]).limit)
        model
    """
    if batches < 2:
        raise ValueError(f"batches={batches}: at least 2 are needed, the first one is not counted")
    target = _behind(loader)
    move = (
        None
        if device is None or target is not loader
        else partial(_moved, device=torch.device(device))
    )
    inner = getattr(getattr(target, "batch_sampler", None), "sampler", None)
    owners = (
        getattr(owner, "generator", None)
        for owner in (target, getattr(target, "sampler", None), inner)
    )
    prepared = target.report().prepared if isinstance(target, DataLoader) else 1.0
    had_workers = getattr(target, "_iterator", None) is not None
    with (
        undisturbed_generators(),
        undisturbed(*(own for own in owners if isinstance(own, torch.Generator))),
    ):
        figures, batch = run_loop(loader, step, move, batches)
        if not had_workers and getattr(target, "_iterator", None) is not None:
            target._iterator = (
                None  # of workers that persist: the user's first epoch starts its own
            )
        figures = replace(
            figures, prepared=prepared, model_per_s=_model_rate(step, batch) if step else None
        )
        del batch
        return Diagnosis(_examine(figures, loader))


def diagnose_script(
    path: str | PathLike[str], arguments: Sequence[str] = (), *, batches: int = 100
) -> Diagnosis:
    """Run a training script and say where the time of its loop goes.

    The script runs in this process as ``__main__``, until a loop over one of its loaders has had
    ``batches`` batches, or to its end. Wait and step are those of its loop; the loader is then
    measured alone.

    Args:
        path: of the script.
        arguments: that it finds in ``sys.argv``.
        batches: after which it is stopped; at least 2.

    Raises:
        ValueError: the script has no loop of two batches over a torch ``DataLoader``.

    What the script raises before that, ``SystemExit`` included, is raised here.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    code = compile(Path(path).read_bytes(), str(path), "exec")
    loops: dict[int, TimedLoop] = {}
    notes = []
    # Not runpy's: the script's workers may have to import from the module when it has ended.
    with _main_module(module, [str(path), *arguments]):
        try:
            with _timed_loaders(loops, batches):
                exec(code, module.__dict__)
        except _EnoughError:
            pass
        except (Exception, SystemExit) as end:
            if not any(loop.batches > 1 for loop in loops.values()):
                raise
            notes.append(f"the script has ended with {type(end).__name__}: {end}")
        loop = max(
            loops.values(), key=lambda one: one.times.wait_s + one.times.busy_s, default=None
        )
        if loop is None or loop.batches < 2:
            raise ValueError(
                f"{path} has no loop over a torch DataLoader of two batches or more: nothing to diagnose"
            )
        if torch.cuda.is_initialized():
            notes.append("the wait is the loop's own: the GPU may have had queued work meanwhile")
        figures = _figures(loop, step_s=loop.times.busy_s, notes=tuple(notes))
        return Diagnosis(_examine(figures, loop.loader))


@contextlib.contextmanager
def _main_module(module: types.ModuleType, arguments: list[str]) -> Iterator[None]:
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


# Loops


class TimedLoop:
    """A loader whose loops are timed, but for the first batch, which workers start for.

    ``times.wait_s`` is how long the loop waited for ``batches``, ``times.busy_s`` how long it was
    busy between them.

    Example:
        >>> loop = TimedLoop([1, 2, 3])
        >>> sum(loop), loop.batches, loop.times.wait_s < 1
        (6, 3, True)
    """

    def __init__(self, loader: Any, most_batches: int | None = None) -> None:
        self.loader = loader
        self.times = LoopTimes()
        self.batches = 0
        self.samples = 0
        self.first_s = 0.0
        self._most_batches = most_batches

    def __iter__(self) -> Iterator[Any]:
        return self.over(iter(self.loader))

    def over(self, iterator: Any) -> Iterator[Any]:
        # What lies between two epochs is no step.
        self.times = LoopTimes(self.times.wait_s, self.times.busy_s)
        while True:
            asked_at = self.times.ask()
            if self.batches == self._most_batches:
                raise _EnoughError
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.times.answer(asked_at)
            self.batches += 1
            self.samples += sample_count(batch)
            if self.batches == 1:
                self.first_s = self.times.wait_s
                self.times.wait_s = 0.0
            yield batch


class _EnoughError(BaseException):
    """Ends a script whose loop has been seen for long enough; no ``except Exception`` keeps it."""


@contextlib.contextmanager
def _timed_loaders(loops: dict[int, TimedLoop], batches: int) -> Iterator[None]:
    """Time all loops over loaders; of a prefetcher and the loader that it reads in a thread, the prefetcher's."""
    kinds: dict[Any, Any] = {
        kind: kind.__iter__ for kind in (TorchDataLoader, DataLoader, CudaPrefetcher)
    }
    inside: list[Any] = []

    def timed(begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed_iter(loader: Any) -> Any:
            if inside:
                return begin(loader)
            inside.append(loader)
            try:
                iterator = begin(loader)
            finally:
                inside.clear()
            # Prefetchers may be made anew.
            loop = loops.setdefault(id(_behind(loader)), TimedLoop(loader, batches))
            return loop.over(iterator)

        return timed_iter

    for kind, begin in kinds.items():
        kind.__iter__ = timed(begin)
    try:
        yield
    finally:
        for kind, begin in kinds.items():
            kind.__iter__ = begin


def lightning_callback() -> Any:
    """A callback whose ``times`` say how long Lightning's training loop waited for data (``wait_s``), and its steps.

    Of whichever of ``lightning`` and ``pytorch_lightning`` the script has imported.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    base: Any = next((sys.modules[name].Callback for name in names if name in sys.modules), None)
    if base is None:
        raise ImportError(
            "neither lightning nor pytorch_lightning is imported yet: import the one that you train with"
        )

    class LoopTimer(base):  # type: ignore[misc]  # whose base is known when it runs
        def __init__(self) -> None:
            self.times = LoopTimes()
            self._asked_at: float | None = None

        def on_train_epoch_start(self, *_: Any) -> None:
            self._asked_at = None  # the first wait is for workers to start

        def on_train_batch_start(self, *_: Any) -> None:
            self.times.answer(time.perf_counter() if self._asked_at is None else self._asked_at)

        def on_train_batch_end(self, *_: Any) -> None:
            self._asked_at = self.times.ask()

        on_validation_end = on_train_epoch_start

    return LoopTimer()


def _behind(loader: Any) -> Any:
    return loader.loader if isinstance(loader, CudaPrefetcher) else loader


def run_loop(loader: Any, step: Any, move: Any, batches: int) -> tuple[Figures, Any]:
    """Run the user's loop over at most so many batches; what was measured, and the last batch."""
    loop = TimedLoop(loader)
    events: list[tuple[Any, Any]] = []
    move_s = 0.0
    batch = None
    for batch in islice(loop, batches):
        if move is not None:
            began = time.perf_counter()
            batch = move(batch)
            move_s += (time.perf_counter() - began) * (loop.batches > 1)
        if step is not None and torch.cuda.is_initialized():
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            step(batch)
            end.record()
            events.append((begin, end))
        elif step is not None:
            step(batch)
    if loop.batches < 2:
        raise ValueError(
            f"the loader gave {loop.batches} batches, and a diagnosis needs 2: the first one is left out"
        )
    loop.times.ask()
    copied_s = 0.0
    if isinstance(loader, CudaPrefetcher):
        report = loader.report()
        copied_s = loop.times.wait_s * report.copy_s / max(report.copy_s + report.read_s, 1e-9)
    step_s = loop.times.busy_s - move_s
    figures = _figures(loop, step_s=step_s, move_s=move_s, copied_s=copied_s)
    return replace(figures, gpu_busy=_busy_share(events)), batch


def _busy_share(events: list[tuple[Any, Any]]) -> float | None:
    """Share of the time from the first step's end to the last one's in which the GPU had work of a step."""
    if len(events) < 3:
        return None
    first, last = events[0][1], events[-1][1]
    last.synchronize()
    busy_ms = sum(begin.elapsed_time(end) for begin, end in events[1:])
    return float(busy_ms / first.elapsed_time(last))


def _figures(
    loop: TimedLoop, *, step_s: float, move_s: float = 0.0, copied_s: float = 0.0, **more: Any
) -> Figures:
    count = loop.batches - 1
    return Figures(
        batches=count,
        batch_size=loop.samples / loop.batches,
        first_s=loop.first_s,
        wait_s=(loop.times.wait_s - copied_s) / count,
        move_s=(move_s + copied_s) / count,
        step_s=step_s / count,
        usable_cores=usable_cores(),
        memory_bytes=tree_pss_bytes(),
        **more,
    )


def _moved(batch: Any, device: torch.device) -> Any:
    tensors, build = flatten(batch)
    return build([each.to(device) if isinstance(each, torch.Tensor) else each for each in tensors])


def _model_rate(step: Callable[[Any], Any], batch: Any) -> float:
    count = 0
    began = time.perf_counter()
    while count < 3 or time.perf_counter() - began < _MODEL_S:
        step(batch)
        count += 1
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return count * sample_count(batch) / (time.perf_counter() - began)


# The loader alone


def _examine(figures: Figures, loader: Any) -> Figures:
    """The figures with those of the loader alone; trials where the loop waits for it."""
    target = _behind(loader)
    figures = replace(figures, is_prefetched=target is not loader)
    notes = list(figures.notes)
    if not isinstance(target, TorchDataLoader):
        notes.append(
            f"{kind_of(target)} is no torch DataLoader: what it costs to make a batch is not measured"
        )
        return replace(figures, notes=tuple(notes))
    engine: EngineKind = "process" if target.num_workers else "inline"
    if isinstance(target, DataLoader):
        engine = target.report().engine
    figures = replace(figures, workers=target.num_workers, engine=engine, imports=_imports(target))
    with contextlib.suppress(TypeError):  # an IterableDataset has no length
        figures = replace(figures, epoch_batches=0 if target.persistent_workers else len(target))
    bases: list[Rate] = []
    with _noting(notes, "the loader alone"):
        bases.append(_rate(target))
        figures = replace(figures, loader_per_s=bases[0].samples_per_s)
    with _noting(notes, "what a sample costs"):
        figures = replace(figures, parts=tuple(apart(partial(_parts, target), limit_s=_PATIENCE_S)))
    if bases and name_limit(figures) not in ("model", "host-to-device"):
        trials = list(_trials(target, bases[0], figures, notes))
        figures = replace(figures, trials=tuple(trials))
    return replace(figures, notes=tuple(notes))


@contextlib.contextmanager
def _noting(notes: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # of the user's code, under settings that they did not ask for
        first = f"{error}".partition("\n")[0]
        notes.append(
            f"not measured: {what}: {type(error).__name__}: {shorten(first, 160, placeholder=' ...')}"
        )


def _imports(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        return ""
    is_folder = type(loader.dataset).__module__.startswith("torchvision.datasets.folder")
    return "DataLoader, ImageFolder" if is_folder else "CachedDataset, DataLoader"


def _rate(loader: Any, to_beat: Rate | None = None, **changes: Any) -> Rate:
    def work() -> Rate:
        return measure(
            _variant(loader, **changes), seconds=_RATE_S, limit_s=6 * _RATE_S, to_beat=to_beat
        )

    return apart(work, limit_s=_PATIENCE_S)


def _variant(loader: Any, **changes: Any) -> Any:
    """A loader like the user's, which leaves its workers alone and pins nothing; over an endless order if it can be."""
    other = copy.copy(loader)
    workers = changes.get("num_workers", loader.num_workers)
    usual = {
        "_iterator": None,
        "pin_memory": False,
        "persistent_workers": False,
        "prefetch_factor": (loader.prefetch_factor or 2) if workers else None,
        "timeout": loader.timeout if workers else 0,
    }
    other.__dict__.update(usual | changes)
    return other


def _trials(loader: Any, base: Rate, figures: Figures, notes: list[str]) -> Iterator[Trial]:
    """Other numbers of workers, and samples kept in memory."""
    cores = usable_cores()
    workers = loader.num_workers
    counts = [(count, "fewer") for count in {workers // 2, cores} if 0 < count < workers]
    if workers < cores or any(part.is_waiting for part in figures.parts):
        counts.append((2 * workers or cores, "more"))
    for count, kind in counts:
        with _noting(notes, f"num_workers={count}"):
            rate = _rate(loader, base, num_workers=count)
            if rate.samples_per_s > base.samples_per_s and _is_sure(
                rate, base
            ):  # and not for what others did
                rate += _rate(loader, num_workers=count)
            yield _trial(f"num_workers={count}", kind, rate, base)
    is_kept = isinstance(loader.dataset, PreparedDataset) and loader.dataset.storage != "none"
    if not (is_kept or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None):
        with _noting(notes, "keeping samples in memory"):
            yield from _kept_trial(loader, base, figures)


def _trial(name: str, kind: Any, rate: Rate, base: Rate, needs: str = "") -> Trial:
    return Trial(
        name=name,
        kind=kind,
        samples_per_s=rate.samples_per_s,
        is_sure=_is_sure(rate, base),
        needs=needs,
    )


def _is_sure(rate: Rate, base: Rate) -> bool:
    """Whether a rate differs; slow loaders have no time for slices that could tell of less than twice."""
    low, high = sorted((rate.samples_per_s, base.samples_per_s))
    return differs(rate, base) or high >= 2 * low


def _kept_trial(loader: Any, base: Rate, figures: Figures) -> Iterator[Trial]:
    """Whether it pays to decode once, with the first storage that all samples fit into."""
    length = len(loader.dataset)
    in_time = int(_SAMPLES_S * usable_cores() / max(1e-6, figures.sample_s))
    count = min(length, max(_SAMPLES, min(_MOST_SAMPLES, in_time)))
    index = range(0, length, max(1, length // count))[:count]
    budget = budget_bytes(available_bytes())
    for storage in ("shared", "compressed"):
        rate, bytes_each = apart(
            partial(_rate_when_kept, loader, storage, index), limit_s=_PATIENCE_S
        )
        need = int(bytes_each * length)
        if need <= budget.bytes:
            needs = f"all {length:,} samples need about {format_bytes(need)}, and {budget}"
            yield _trial(f"storage={storage!r}", "kept", rate, base, needs)
            return


def _rate_when_kept(loader: Any, storage: Any, index: Sequence[int]) -> tuple[Rate, float]:
    """The loader over some of its samples, prepared and kept by fastdata, and the bytes of one."""
    dataset = loader.dataset
    if isinstance(dataset, PreparedDataset):
        kept = prepared_anew(dataset, index, storage=storage, codec="auto")
    else:
        some = Subset(_under(dataset, None), list(index))
        kept = CachedDataset(
            some, transform=_transform_of(dataset), storage=storage, progress=False
        )
    other: Any = DataLoader(
        kept,
        loader.batch_size,
        sampler=EndlessOrder(len(index), 0),
        num_workers=min(loader.num_workers, usable_cores()),
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
    )
    return measure(other, seconds=_RATE_S, limit_s=6 * _RATE_S), stored_bytes(kept) / len(index)


# What a sample costs


def _parts(loader: Any) -> list[Part]:
    """What the parts of a sample cost, in the calling thread."""
    if loader.num_workers:
        torch.set_num_threads(1)  # as workers do
    dataset = loader.dataset
    if isinstance(dataset, PreparedDataset) and latest_reader(dataset).obstacle is None:
        return list(_parts_of_batches(dataset))
    spent: dict[Any, Costs] = {}
    with contextlib.suppress(Exception):  # one that cannot be copied is read as a whole
        transform = _transform_of(dataset)
        if transform is not None:
            dataset = _under(dataset, _Watched(transform, spent))
    is_stream = isinstance(dataset, IterableDataset)
    samples = iter(dataset) if is_stream else (dataset[index] for index in loader.sampler)
    next(samples)  # which pays for imports and tables
    spent.clear()
    read: list[Any] = []
    before = _clock()
    while len(read) < _SAMPLES and (_clock() - before)[0] < _SAMPLES_S:
        sample = next(samples, None)
        if sample is None:
            break
        read.append(sample)
    costs = _clock() - before - sum(spent.values(), np.zeros(2))
    parts = [_part(type(loader.dataset).__name__, "read", costs / len(read))]
    parts += [_part(name, "transform", total / len(read)) for (_, name), total in spent.items()]
    collate = loader.collate_fn
    joined = read[0] if loader.batch_sampler is None else read[: loader.batch_size]
    collate(joined)
    before = _clock()
    collate(joined)
    costs = (_clock() - before) / (1 if loader.batch_sampler is None else len(joined))
    return [*parts, _part(getattr(collate, "__name__", type(collate).__name__), "collate", costs)]


def _part(name: str, kind: Any, costs: Costs) -> Part:
    seconds, cpu_s = np.maximum(costs, 0).tolist()
    return Part(name=name, kind=kind, seconds=seconds, cpu_s=cpu_s)


def _clock() -> Costs:
    return np.array(thread_clock())


class _Watched:
    """A transform that adds up what its steps cost."""

    def __init__(self, transform: Any, spent: dict[Any, Costs]) -> None:
        self._steps = [
            ((number, _text(step)), step) for number, step in enumerate(flatten_steps(transform))
        ]
        self._spent = spent

    def __call__(self, sample: Any) -> Any:
        for key, step in self._steps:
            before = _clock()
            sample = step(sample)
            self._spent[key] = self._spent.get(key, 0.0) + _clock() - before
        return sample


def _text(step: Any) -> str:
    return shorten(" ".join(repr(step).split()), _LETTERS, placeholder=" ...")


def _transform_of(dataset: Any) -> Any:
    """What a dataset of torchvision's manners does to its images.

    Raises:
        ValueError: it does it to the targets, too.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(getattr(dataset, "transforms", None)).__name__ not in ("NoneType", "StandardTransform"):
        raise ValueError("its transform takes the target too")
    return getattr(dataset, "transform", None)


def _under(dataset: Any, transform: Any) -> Any:
    """A copy of a dataset, or of one within, under another transform."""
    other = copy.copy(dataset)
    if type(dataset) is Subset:
        other.dataset = _under(dataset.dataset, transform)
    elif hasattr(dataset, "transform"):
        other.transform = transform
    if (
        getattr(dataset, "transforms", None) is not None
    ):  # torchvision's StandardTransform, which holds the same one
        other.transforms = copy.copy(dataset.transforms)
        other.transforms.transform = transform
    return other


def _parts_of_batches(dataset: PreparedDataset) -> Iterator[Part]:
    """What reading, and each step that runs on whole batches, costs: that of the first steps less that of fewer."""
    steps = flatten_steps(dataset.transform)
    index = list(range(0, len(dataset), max(1, len(dataset) // _SAMPLES)))[:_SAMPLES]
    names = [f"from storage={dataset.storage!r}"]
    before_s = 0.0
    first = len(dataset.plan.prepare)
    for count in range(first, len(steps) + 1):
        names += [_text(step) for step in steps[max(first, count - 1) : count]]
        batched = _batched(dataset, steps, count)
        if batched is None:  # of several sizes, or images of Pillow: it counts with the next step
            continue
        seconds = min(_seconds(partial(batched.__getitems__, index)) for _ in range(3)) / len(index)
        cost_s = max(0.0, seconds - before_s)
        kind: Any = "transform" if before_s else "read"
        yield Part(name=", ".join(names), kind=kind, seconds=cost_s, cpu_s=cost_s, is_batched=True)
        before_s = seconds
        names = []


def _batched(
    dataset: PreparedDataset, steps: tuple[Any, ...], count: int
) -> PreparedDataset | None:
    """The dataset under its first steps, and under one of the others that makes tensors where they do not."""
    for last in ((), *((step,) for step in steps[count:])):
        other = dataset.with_transform((*steps[:count], *last))  # type: ignore[arg-type]
        if latest_reader(other).obstacle is None:
            return other
    return None


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output.add_files(parser, plots=True)
    parser.add_argument(
        "--batches", type=output.positive, default=100, metavar="N", help="to measure; default: 100"
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the script that trains")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments"
    )


def run(options: argparse.Namespace) -> int:
    script = options.script
    if not script.is_file():
        raise FileNotFoundError(
            f"{script} is no file: give the script that trains, then its own arguments"
        )
    try:
        diagnosis = diagnose_script(script, options.arguments, batches=options.batches)
    except SystemExit as end:
        if end.code:
            raise
        raise ValueError(
            f"{script} has ended before it read two batches of a torch DataLoader"
        ) from end
    except Exception as error:
        frame = error.__traceback__
        while frame and frame.tb_frame.f_code.co_filename != str(script):
            frame = frame.tb_next
        if frame is None and not isinstance(error, SyntaxError):
            raise
        # The user's own code, from its first line on.
        traceback.print_exception(type(error), error, frame)
        return 1
    print(diagnosis)
    output.keep(diagnosis.as_dict(), options, diagnosis.plot)
    return 0
