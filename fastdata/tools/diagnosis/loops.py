"""Training loops, timed: one that ``diagnose`` runs, those of a script, of one's own, and Lightning's."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastdata.batch import flatten
from fastdata.loader import DataLoader
from fastdata.loader.epochs import LoopTimes, sample_count
from fastdata.memory import cpu_seconds, tree_pss_bytes, usable_cores
from fastdata.prefetch import CudaPrefetcher
from fastdata.tools.diagnosis.figures import Figures

_LOOK_S = 0.25
_MODEL_S = 1.0


class TimedLoop:
    """A loader whose loops are timed, but for the first batch, which workers start for.

    ``times.wait_s`` is how long the loop waited for ``batches``, ``times.busy_s`` how long it was busy between them.

    Example:
        >>> loop = TimedLoop([1, 2, 3])
        >>> sum(loop), loop.batches, loop.times.wait_s < 1
        (6, 3, True)
    """

    def __init__(self, loader: Any, end: Callable[[TimedLoop], None] = lambda loop: None) -> None:
        self.loader, self._end = loader, end
        self.times, self.batches, self.samples, self.first_s = LoopTimes(), 0, 0, 0.0

    def __iter__(self) -> Iterator[Any]:
        return self.over(iter(self.loader))

    def over(self, iterator: Any) -> Iterator[Any]:
        self.times = LoopTimes(self.times.wait_s, self.times.busy_s)  # what lies between two epochs is no step
        return _TimedIterator(self, iterator)

    def next_of(self, iterator: Iterator[Any]) -> Any:
        self._end(self)
        asked_at = self.times.ask()
        try:
            batch = next(iterator)
        finally:
            self.times.answer(asked_at)
        self.batches, self.samples = self.batches + 1, self.samples + sample_count(batch)
        if self.batches == 1:
            self.first_s, self.times.wait_s = self.times.wait_s, 0.0
        return batch


class _TimedIterator:
    def __init__(self, loop: TimedLoop, iterator: Any) -> None:
        self._loop, self._iterator = loop, iterator

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        return self._loop.next_of(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def lightning_callback() -> Any:
    """A callback whose ``times`` say how long Lightning's training loop waited for data (``wait_s``), and its steps.

    Of whichever of ``lightning`` and ``pytorch_lightning`` the script has imported.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    base: Any = next((sys.modules[name].Callback for name in names if name in sys.modules), None)
    if base is None:
        raise ImportError("neither lightning nor pytorch_lightning is imported yet: import the one that you train with")

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


class _Looks:
    """What a loop's readers and GPU have used, looked at now and then, which takes less than a millisecond."""

    def __init__(self, iterator: Any) -> None:
        feed = getattr(iterator, "_feed", None)
        self._reader = iterator if feed is None else feed.iterator
        self._seen: list[tuple[float, dict[int, float]]] = []
        self._marks: list[tuple[Any, Any]] = []
        self._utilisation: list[float] = []

    def look(self) -> None:
        workers = [worker.pid for worker in getattr(self._reader, "_workers", ())]
        threads = getattr(getattr(self._reader, "_threads", None), "_threads", ())
        found = cpu_seconds(workers, [thread.native_id for thread in threads])
        if self._seen and found.keys() != self._seen[0][1].keys():
            self._seen.clear()
        self._seen.append((time.perf_counter(), found))
        if torch.cuda.is_initialized():
            with contextlib.suppress(Exception):  # of any kind, where there is no nvidia-ml-py or no driver
                self._utilisation.append(torch.cuda.utilization() / 100)  # knows CUDA_VISIBLE_DEVICES, as NVML does not

    def timed_by_gpu(self, step: Callable[[Any], Any], batch: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(batch)
        end.record()
        self._marks.append((begin, end))

    def figures(self) -> dict[str, Any]:
        (since, before), (until, after) = self._seen[0], self._seen[-1]
        found: dict[str, Any] = {}
        if until - since > _LOOK_S / 2:
            found["worker_cpu"] = tuple((after[one] - before[one]) / (until - since) for one in after)
        if self._utilisation:
            found["gpu_utilisation"] = sum(self._utilisation) / len(self._utilisation)
        if len(self._marks) > 2:
            self._marks[-1][1].synchronize()
            busy_ms = sum(begin.elapsed_time(end) for begin, end in self._marks[1:])
            found["gpu_busy"] = busy_ms / self._marks[0][1].elapsed_time(self._marks[-1][1])
        return found


def run_loop(
    loader: Any, step: Callable[[Any], Any] | None, device: torch.device | None, batches: int
) -> tuple[Figures, Any]:
    """Run the user's loop over at most so many batches; what was measured, and the last batch."""
    move = None if device is None or isinstance(loader, CudaPrefetcher) else partial(_moved, device=device)
    begun, samples, count, first_s, look_at = time.perf_counter(), 0, 0, 0.0, 0.0
    wait_s = move_s = step_s = 0.0
    iterator: Any = iter(loader)
    looks, batch = _Looks(iterator), None
    run = partial(looks.timed_by_gpu, step) if step is not None and torch.cuda.is_initialized() else step
    asked = begun
    while count < batches:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        came = moved = time.perf_counter()
        if move is not None:
            batch = move(batch)
            moved = time.perf_counter()
        if run is not None:
            run(batch)
        done = time.perf_counter()
        samples, count = samples + sample_count(batch), count + 1
        if count == 1:
            first_s = came - begun
        else:
            wait_s, move_s, step_s = wait_s + came - asked, move_s + moved - came, step_s + done - moved
        if done >= look_at:
            looks.look()
            look_at = done + _LOOK_S
        asked = time.perf_counter()
    if count < 2:
        raise ValueError(f"the loader gave {count} batches, and a diagnosis needs 2: the first one is left out")
    if count == batches:
        looks.look()
    copied = 0.0
    if isinstance(loader, CudaPrefetcher):
        report = loader.report()
        copied = wait_s * report.copy_s / max(report.copy_s + report.read_s, 1e-9)
    each = 1 / (count - 1)
    figures = Figures(
        batches=count - 1,
        batch_size=samples / count,
        first_s=first_s,
        wait_s=(wait_s - copied) * each,
        move_s=(move_s + copied) * each,
        step_s=step_s * each,
        usable_cores=usable_cores(),
        memory_bytes=tree_pss_bytes(),
        **looks.figures(),
    )
    return figures, batch


def _moved(batch: Any, device: torch.device) -> Any:
    tensors, build = flatten(batch)
    return build([each.to(device) if isinstance(each, torch.Tensor) else each for each in tensors])


def model_rate(step: Callable[[Any], Any], batch: Any) -> float:
    count, begun = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - begun < _MODEL_S:
        step(batch)
        count += 1
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return count * sample_count(batch) / (time.perf_counter() - begun)


class EnoughError(BaseException):
    """Ends a script whose loop has been seen for long enough; no ``except Exception`` keeps it."""


class Script:
    """The loops of a script over loaders, timed while this is entered."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self.loops: dict[int, TimedLoop] = {}
        self._is_inside = False

    def _end(self, loop: TimedLoop) -> None:
        if loop.batches >= self._batches:
            raise EnoughError

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        kinds: dict[Any, Any] = {kind: kind.__iter__ for kind in (TorchDataLoader, DataLoader, CudaPrefetcher)}

        def watch(begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def timed_iter(loader: Any) -> Any:
                if self._is_inside:  # the loader of a prefetcher, which reads it in a thread
                    return begin(loader)
                self._is_inside = True
                try:
                    iterator = begin(loader)
                finally:
                    self._is_inside = False
                inner = loader.loader if isinstance(loader, CudaPrefetcher) else loader  # prefetchers may be made anew
                return self.loops.setdefault(id(inner), TimedLoop(loader, self._end)).over(iterator)

            return timed_iter

        for kind, begin in kinds.items():
            kind.__iter__ = watch(begin)
        try:
            yield
        finally:
            for kind, begin in kinds.items():
                kind.__iter__ = begin
