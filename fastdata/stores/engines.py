"""Executors that run the tasks of a build in other processes or on other machines."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from fastdata.machine.workers import attempt, settle
from fastdata.sources.files import FileSource
from fastdata.sources.storage_options import options_travel

if TYPE_CHECKING:
    from fastdata.stores.shards import ShardTask, ShardWriter

_RAY_RETRIES = 10
"""Number of times that a task is repeated if its node is lost."""


def run_elsewhere(
    writer: ShardWriter, tasks: Sequence[ShardTask], engine: str | Executor
) -> Iterator[bytes]:
    """Write shards with an executor or Ray, and yield the manifest of each written shard."""
    source = writer.preparer.source
    if isinstance(source, FileSource):
        # The writer is sent with each task, so the paths of all samples are taken out of it.
        tasks = [task._replace(columns=source.columns_of(task.positions)) for task in tasks]
        no_files = replace(source, **source.columns_of(()))
        writer = replace(writer, preparer=writer.preparer._replace(source=no_files))
    opened: AbstractContextManager[Callable[[ShardTask], Future[bytes]]]
    if isinstance(engine, Executor):
        packed = _pickled(writer)
        opened = nullcontext(lambda task: engine.submit(_attempt, packed, task))
    else:
        opened = _ray(writer)
    with opened as submit:
        running: list[Future[bytes]] = []
        try:
            running.extend(map(submit, tasks))
            for future in as_completed(running):
                yield settle(future.result())
        finally:
            # After an error or Ctrl-C, waiting tasks are cancelled. Running tasks are waited for,
            # so that the next build can use their shards, and no task writes after this returns.
            wait([future for future in running if not future.cancel()])


def _attempt(packed: bytes, task: ShardTask) -> bytes:
    """Write a shard in an executor; return its manifest, or its error and traceback.

    So any error that the future raises comes from the executor itself, such as a lost worker.
    """
    return attempt(lambda task: pickle.loads(packed)(task), task)


def _pickled(writer: ShardWriter) -> bytes:
    """Pickle a writer, including its ``storage_options``.

    Raises:
        ValueError: the loader or the transform cannot be pickled.
    """
    try:
        with options_travel():
            return pickle.dumps(writer)
    except Exception as problem:  # pickling runs the user's code
        raise ValueError(
            "engine= runs your loader and transform in other processes, but they cannot be "
            f"pickled: {problem}. Use module-level functions instead of lambdas and nested "
            "functions; or use engine='local', which forks, or engine='ray', which sends their "
            "code."
        ) from problem


@contextmanager
def _ray(writer: ShardWriter) -> Iterator[Callable[[ShardTask], Future[bytes]]]:
    """Submit tasks to the Ray cluster that this process is connected to, or that RAY_ADDRESS names.

    Without one, a cluster is started on this machine and ended afterwards. If a node is lost, its
    tasks run again on another one. Tasks that are not done when the block ends are cancelled.
    """
    try:
        import ray
    except ImportError as missing:
        raise ImportError(
            "engine='ray' needs Ray, which is not installed: pip install ray"
        ) from missing
    is_connected = ray.is_initialized()
    if not is_connected:
        ray.init(log_to_driver=False, logging_level="error")
    refs: list[object] = []  # needed to cancel tasks: cancelling a future of Ray does not do it
    try:
        with options_travel():
            packed = ray.put(ray.cloudpickle.dumps(writer))  # each node fetches it once
        write = ray.remote(num_cpus=1, max_retries=_RAY_RETRIES)(_attempt)

        def submit(task: ShardTask) -> Future[bytes]:
            ref = write.remote(packed, task)
            refs.append(ref)
            future: Future[bytes] = ref.future()
            return future

        yield submit
    finally:
        for ref in refs:
            ray.cancel(ref)
        if not is_connected:
            ray.shutdown()
