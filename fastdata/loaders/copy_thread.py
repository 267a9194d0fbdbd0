"""One epoch of a prefetcher whose batches are read and copied by a thread.

The thread reads the loader, so the training loop does not wait for a copy on the host, for the
user's code, or for a loader that works only inside ``next()``. The thread competes with the
training loop for the GIL. If fastdata's own threads read whole batches, ``loop_copies.py`` needs no
such thread.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
import torch.cuda

from fastdata.loaders.iterators import sample_count
from fastdata.loaders.pinned import begin_thread
from fastdata.loaders.transfer import END, Arrival, Outcome, Place, Transfer

_PATIENCE_S = 10.0
"""Time that the end of an epoch waits for a thread that still runs the loader's code. A thread that
needs longer ends when this code returns, or with the process."""


@dataclass(eq=False, kw_only=True)
class ThreadTransfer(Transfer):
    """One epoch that a thread reads and copies to the device.

    The thread ends with the loader, or when something fails. If the user calls ``next()`` after an
    error, another thread starts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._places: SimpleQueue[Place | None] = SimpleQueue()
        for _ in range(self.depth):
            self._places.put(Place())
        self._arrivals: SimpleQueue[Outcome] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # In the user's thread

    def _next(self) -> Outcome:
        """Take the next batch, and make the calling thread's stream wait for it.

        The copy thread starts here and not before, so that a loader makes the random draws for its
        first batch while the user waits.
        """
        self._check_process()
        user_stream = torch.cuda.current_stream(self.device)
        if self._thread is None:
            # A loader or transform may read tensors that were made on the user's stream.
            self.stream.wait_stream(user_stream)
            self._start_thread()
        outcome = self._arrivals.get()
        if isinstance(outcome, Arrival):
            self._places.put(self._hand_over(outcome, user_stream))
        elif not self._is_stopped:  # an exception or the end: the thread ends now
            thread = self._thread
            self._thread = None
            if thread is not None:
                thread.join()
        return outcome

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="fastdata-prefetch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise RuntimeError(
                f"CudaPrefetcher cannot start its thread: {error}. This process has "
                f"{threading.active_count()} Python threads. Allow more (`ulimit -u`, or the "
                "container's limit of processes), or use fewer workers."
            ) from error
        self._thread = thread

    def _end(self) -> None:
        # Wake a thread that waits for a place. A thread that reads the loader checks
        # ``_is_stopped`` afterwards.
        self._places.put(None)
        thread = self._thread  # read once: the training loop's thread may drop it
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
        with suppress(Empty):
            while True:
                self._arrivals.get_nowait()  # the training loop's thread may take some, too
        self._arrivals.put(StopIteration())  # for a loop that waits in another thread

    # In the copy thread

    def _run(self) -> None:
        outcome: BaseException = StopIteration()
        try:
            begin_thread(self.device)
            try:
                with torch.cuda.stream(self.stream):
                    while self._copy_next():
                        pass
                self.iterator = iter(())
            finally:
                # If the device is lost, this raises and the sources are kept: freeing pinned
                # memory would call the device, which aborts the process.
                while self._in_flight:
                    self._release_oldest()
        except BaseException as error:  # noqa: BLE001  # raised where its batch would have come
            # Without this frame.
            outcome = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self._arrivals.put(outcome)
        del outcome  # otherwise exception and frame keep each other alive

    def _copy_next(self) -> bool:
        """Copy one batch; return False if there is none, or if the epoch was stopped."""
        if self._is_stopped:
            return False
        batch = next(self.iterator, END)
        if batch is END:
            return False
        mark = self.mark()
        samples = sample_count(batch)
        self._wait_for_makers(batch)
        batch, sources = self.sender.stage(batch)
        place = self._places.get()
        if place is None or self._is_stopped:
            return False
        try:
            # This limits the batches on the device: those in the queue, the loop's and this one.
            place.left.synchronize()
            if len(self._in_flight) == self.depth:
                self._release_oldest()
            batch, memory = self._queue_copy(batch, sources, place)
        except BaseException:
            # No batch is in the place, and the next thread needs it.
            del batch, sources
            self._places.put(place)
            raise
        self._arrivals.put(Arrival(batch, samples, mark, place, memory))
        return True
