"""The iterator over one epoch whose batches come from worker processes, through shared memory."""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait as wait_for
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import worker as torch_worker

from fastdata.datasets.transport import RingCollate
from fastdata.errors import StoreGoneError
from fastdata.loaders.iterators import CountedIterator

if TYPE_CHECKING:
    from fastdata.loaders.internals import EpochLoader
    from fastdata.loaders.progress import Progress

_END_S = 5.0  # most seconds to wait for the end of a killed worker


def _watched(parent_pid: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run torch's worker loop, and end it if the process that started the worker dies.

    torch's watchdog reads the parent's process id when the loop begins. If the parent was killed
    before that, during a slow ``worker_init_fn``, that is already the id of the process that adopts
    orphans, and the worker would never end. Here the id comes from the parent itself. Written for
    torch 2.4 to 2.13; a torch without this class keeps its own watchdog.
    """
    watch = getattr(torch_worker, "ManagerWatchdog", None)
    if watch is not None:
        watchdog = watch()
        watchdog.manager_pid = parent_pid
        torch_worker.ManagerWatchdog = lambda: watchdog  # type: ignore[assignment, misc]
    work(*arguments)


class ProcessIter(CountedIterator, torch_loader._MultiProcessingDataLoaderIter):
    """torch's worker processes, with counts, and with batches in a shared ring of slots."""

    _put_later = 0  # number of batches to request from workers at the first ``next``

    def __init__(self, view: EpochLoader, progress: Progress, *, held: int) -> None:
        ring = view.collate_fn
        if not isinstance(ring, RingCollate):
            slots = view.prefetch_factor + 1 + held
            ring = RingCollate(view.collate_fn, slots=slots)
            view.collate_fn = ring
        self.ring = ring.receiver
        context = (view.multiprocessing_context or multiprocessing).get_context()
        # Under "forkserver" the worker's parent is the fork server, so torch's watchdog is kept.
        if context.get_start_method() != "forkserver":
            view.multiprocessing_context = copy.copy(context)
            view.multiprocessing_context.Process = lambda *, target, **options: context.Process(
                target=partial(_watched, os.getpid(), target), **options
            )
        self._workers: list[Any] = []  # processes; torch's own name
        try:
            super().__init__(view, progress)
        except BaseException:
            # Ctrl-C, or the system allows no more processes. torch ends only workers with a status,
            # and sets it after the last one was started: set it now, so that none is left behind.
            self._workers_status = [True] * len(self._workers)
            self._shutdown = not self._workers
            raise

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # torch requests ``prefetch_factor`` batches from each worker here. If a sampler's epoch may
        # still be set before the first ``next``, none are requested until then.
        ahead = self._prefetch_factor
        if self.progress.waits_for_next:
            self._prefetch_factor = 0
        try:
            super()._reset(loader, first_iter)
            self._put_later = (ahead - self._prefetch_factor) * self._num_workers
        finally:  # also after Ctrl-C: persistent workers are used again by the next epoch
            self._prefetch_factor = ahead

    def _next_data(self) -> Any:
        while self._put_later:
            self._put_later -= 1
            self._try_put_index()
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _try_get_data(self, *timeout: float) -> Any:
        try:
            return super()._try_get_data(*timeout)  # type: ignore[no-untyped-call]
        except StoreGoneError:
            # The memory of a killed worker is gone before the process has ended. Wait for its end:
            # torch's SIGCHLD handler then raises its error ("worker is killed by signal") in this
            # thread now. Later it would be raised in ``__del__``, which can only print it.
            ending = wait_for([worker.sentinel for worker in self._workers], timeout=_END_S)
            for worker in self._workers:
                if worker.sentinel in ending:
                    worker.join()
            raise

    def _process_data(self, data: Any, *worker: int) -> Any:
        try:  # torch 2.4 does not pass the worker's number
            return super()._process_data(data, *worker)  # type: ignore[no-untyped-call]
        except Exception as error:
            # The traceback holds torch's frames, which hold this iterator and the exception: a
            # cycle. The garbage collector would take it apart in an order in which each worker
            # takes 5 s to end. The worker's own traceback is in the message.
            error.__traceback__ = None
            raise error
