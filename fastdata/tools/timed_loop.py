"""Training loops that are timed from the outside: over a loader, or inside a script."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastdata.loaders.iterators import sample_count
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.prefetch import CudaPrefetcher


@dataclass
class TimedLoop:
    """A loader whose loops are timed. The first batch is not timed: it waits for workers to start.

    Attributes:
        loader: any iterable of batches.
        most_batches: number of batches after which the loop is ended by ``EnoughError``; None for
            no limit.
        wait_s: seconds that the loops waited for batches.
        busy_s: seconds between a batch and the request for the next.
        batches: number of batches, including the first.
        samples: number of samples in them.

    Example:
        >>> loop = TimedLoop([1, 2, 3])
        >>> sum(loop), loop.batches, loop.wait_s < 1
        (6, 3, True)
    """

    loader: Any
    most_batches: int | None = None
    wait_s: float = 0.0
    busy_s: float = 0.0
    batches: int = 0
    samples: int = 0

    def __iter__(self) -> Iterator[Any]:
        return self.over(iter(self.loader))

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        asked_at = time.perf_counter()
        for batch in iterator:
            came_at = time.perf_counter()
            self.samples += sample_count(batch) or 1
            yield batch
            if torch.cuda.is_initialized():
                # The GPU works on after the step has returned. Without this, its time would count
                # as a wait for the next batch, or not at all.
                torch.cuda.current_stream().synchronize()
            done_at = time.perf_counter()
            # The first batch waits for workers to start, which happens once per epoch.
            if self.batches:
                self.wait_s += came_at - asked_at
                self.busy_s += done_at - came_at
            self.batches += 1
            if self.batches == self.most_batches:
                raise EnoughError
            asked_at = done_at


class EnoughError(BaseException):
    """Ends a script after enough batches. Not an ``Exception``, so that scripts do not catch it."""


def in_prefetcher(loader: Any) -> Any:
    return loader.loader if isinstance(loader, CudaPrefetcher) else loader


def run_script(script: Path, arguments: list[str], batches: int) -> list[TimedLoop]:
    """Run a script as ``__main__`` until a loop over a loader has run ``batches`` batches.

    All its loops are timed. If a prefetcher reads a loader, only the prefetcher's loop is timed.
    """
    # Not `runpy`, which removes the module when the script ends: its workers may still import from
    # it.
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    loops: dict[int, TimedLoop] = {}
    kinds: list[Any] = [TorchDataLoader, DataLoader, CudaPrefetcher]
    begins = {kind: kind.__iter__ for kind in kinds}

    def begin_timed(loader: Any, begin: Callable[[Any], Any]) -> Any:
        # A script may make a new prefetcher for each epoch: group loops by the loader inside it.
        loop = loops.setdefault(id(in_prefetcher(loader)), TimedLoop(loader, batches))
        is_in_prefetcher = type(loop.loader) is not type(loader)
        return begin(loader) if is_in_prefetcher else loop.over(begin(loader))

    # The classes are patched, so that loops are timed in whatever way the script makes its loaders.
    for kind, begin in begins.items():
        kind.__iter__ = lambda loader, begin=begin: begin_timed(loader, begin)
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
    except EnoughError:
        pass
    except SystemExit as end:
        if end.code:
            raise
    finally:
        for kind, begin in begins.items():
            kind.__iter__ = begin
    return list(loops.values())
