"""Tasks of a build that run elsewhere: in any executor, or in a Ray cluster."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any, TypeVar

from fastdata.errors import IngestError
from fastdata.machine.workers import attempt
from fastdata.sources.remote import options_travel

_Done = TypeVar("_Done")
_MOST_AHEAD = 128
"""Tasks that an executor has at once; they hold the paths of their samples."""
_RAY_RETRIES = 10
"""Of a task whose node was lost."""


def run_on(
    engine: Any, job: Callable[[Any], _Done], tasks: Sequence[Any], full: Callable[[Any], Any]
) -> Generator[_Done, None, None]:
    """Yield what the job returns for each task, in any order; what it raises is raised here.

    Args:
        engine: ``"ray"``, or an executor.
        job: is pickled once for all tasks.
        tasks: say as text what they are.
        full: makes a task that is sent to another machine of one.

    Raises:
        IngestError: a worker, or what the engine needs, was lost.
        ValueError: the job cannot be pickled; says what of it.
    """
    if not tasks:
        return
    if engine == "ray":
        with _Ray() as ray:
            yield from _run_in(ray, ray.put(job), tasks, full)
    else:
        yield from _run_in(engine, _pickled(job), tasks, full)


def _run_in(
    executor: Executor, packed: Any, tasks: Sequence[Any], full: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    waiting = iter(tasks)
    running: dict[Future[bytes], Any] = {}

    def give() -> None:
        for task in waiting:
            with _naming_loss(executor, task):
                running[executor.submit(_attempt, packed, full(task))] = task
            if len(running) >= _MOST_AHEAD:
                return

    try:
        give()
        while running:
            done = wait(running, return_when=FIRST_COMPLETED).done
            # those that were lost last: what is done counts
            for future in sorted(done, key=lambda it: it.cancelled() or it.exception() is not None):
                task = running.pop(future)
                with _naming_loss(executor, task):
                    answer = future.result()
                result, error, text = pickle.loads(answer)
                if error is not None:
                    raise error from IngestError(f"in {task}:\n{text}")
                yield result
            give()
    except Exception:
        # What is being written now stays, too.
        wait([future for future in running if not future.cancel()])
        raise
    finally:
        for future in running:
            future.cancel()


def _attempt(packed: bytes, task: Any) -> bytes:
    """What an executor runs: the job, whose error comes back as an answer, so that all others are the executor's."""
    return attempt(lambda task: pickle.loads(packed)(task), task)


@contextlib.contextmanager
def _naming_loss(executor: Executor, task: Any) -> Iterator[None]:
    try:
        yield
    except Exception as lost:  # an executor raises anything
        what = f"{type(lost).__name__}: {lost}".rstrip(". :")
        raise IngestError(
            f"{type(executor).__name__.strip('_')} has lost {task} ({what})"
        ) from lost


def _pickled(job: Callable[[Any], Any]) -> bytes:
    try:
        with options_travel():
            return pickle.dumps(job)
    except Exception as problem:  # pickling runs code of the user's
        raise ValueError(
            f"engine= sends what reads and prepares samples to other processes, which cannot be pickled: {problem}. "
            "Use functions of a module in place of lambdas and of functions within others; or engine='local', which "
            "forks, or engine='ray', which sends their code."
        ) from problem


class _Ray(Executor):
    """The Ray cluster that this process is connected to, or that RAY_ADDRESS or this machine has; else one of its own.

    A task whose node was lost is run again on another one.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as missing:
            text = "engine='ray' needs Ray, which is not installed: pip install 'fastdata[ray]'"
            raise ImportError(text) from missing
        self._ray = ray
        self._refs: list[Any] = []
        self._is_connected = ray.is_initialized()
        if not self._is_connected:
            ray.init(log_to_driver=False, logging_level="error")
        self._task = ray.remote(num_cpus=1, max_retries=_RAY_RETRIES)(_attempt)

    def put(self, job: Callable[[Any], Any]) -> Any:
        """A reference to the pickled job, which each node fetches once."""
        with options_travel():
            return self._ray.put(self._ray.cloudpickle.dumps(job))

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        self._refs.append(self._task.remote(*arguments))
        future: Future[Any] = self._refs[-1].future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what is not done, and let go of the cluster; one that was started here ends."""
        for ref in self._refs:
            self._ray.cancel(ref)
        if not self._is_connected:
            self._ray.shutdown()
