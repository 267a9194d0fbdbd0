"""Tasks of a build that run elsewhere: in any executor, or in a Ray cluster."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from typing import Any, TypeVar

from fastdata.errors import IngestError
from fastdata.machine.workers import attempt
from fastdata.sources.remote import options_travel

_Done = TypeVar("_Done")
_RAY_RETRIES = 10
"""Of a task whose node was lost."""


def run_on(engine: Any, job: Callable[[Any], _Done], tasks: Sequence[Any]) -> Iterator[_Done]:
    """Yield what the job returns for each task, in any order; what it raises is raised here.

    Args:
        engine: ``"ray"``, or an executor.
        job: is pickled once for all tasks.
        tasks: say as text what they are.

    Raises:
        IngestError: a worker, or what the engine needs, was lost.
        ValueError: the job cannot be pickled; says what of it.
    """
    if engine != "ray":
        yield from _run_in(engine, _pickled(job), tasks)
    elif tasks:
        with _Ray() as ray:
            yield from _run_in(ray, ray.put(job), tasks)


def _run_in(executor: Executor, packed: Any, tasks: Sequence[Any]) -> Iterator[Any]:
    running: dict[Future[bytes], Any] = {}
    try:
        for task in tasks:
            with _naming_loss(executor, task):
                running[executor.submit(_attempt, packed, task)] = task
        for future in as_completed(running):
            with _naming_loss(executor, running[future]):
                answer = future.result()
            result, error, text = pickle.loads(answer)
            if error is not None:
                raise error from IngestError(f"in {running[future]}:\n{text}")
            yield result
    finally:
        # What is being written now stays, too.
        wait([future for future in running if not future.cancel()])


@contextlib.contextmanager
def _naming_loss(executor: Executor, task: Any) -> Iterator[None]:
    try:
        yield
    except Exception as lost:  # an executor raises anything
        what = f"{type(lost).__name__}: {lost}".rstrip(". :")
        name = type(executor).__name__.strip("_")
        raise IngestError(f"{name} has lost {task} ({what})") from lost


def _attempt(packed: bytes, task: Any) -> bytes:
    """What an executor runs: its errors are answers, so that all others are the executor's."""
    return attempt(lambda task: pickle.loads(packed)(task), task)


def _pickled(job: Callable[[Any], Any]) -> bytes:
    try:
        with options_travel():
            return pickle.dumps(job)
    except Exception as problem:  # pickling runs code of the user's
        raise ValueError(
            "engine= sends what reads and prepares samples to other processes, which cannot be "
            f"pickled: {problem}. Use functions of a module in place of lambdas and of functions "
            "within others; or engine='local', which forks, or engine='ray', which sends their "
            "code."
        ) from problem


class _Ray(Executor):
    """The Ray cluster that this process is connected to, or RAY_ADDRESS or this machine has.

    Where there is none it starts one. A task whose node was lost is run again on another one.
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
