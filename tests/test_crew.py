"""A crew of forked workers or threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from fastdata import crew
from fastdata.crew import run_tasks
from fastdata.errors import IngestError

TASKS = [range(i, i + 2) for i in range(0, 40, 2)]


@pytest.fixture(params=["processes", "threads"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of worker."""
    monkeypatch.setattr(crew, "_can_fork", lambda: request.param == "processes")
    return str(request.param)


def _where(task: range) -> tuple[int, int, int]:
    return task.start, os.getpid(), threading.get_ident()


def test_every_task_is_done_once_by_several_workers(kind: str) -> None:
    """Each task comes back once; no worker is this process, or this thread."""
    barrier = threading.Barrier(2, timeout=30)

    def job(task: range) -> tuple[int, int, int]:
        if kind == "threads" and task.start < 4:
            barrier.wait()  # the first two tasks meet: they are in two threads
        return _where(task)

    done = list(run_tasks(job, TASKS, 2))
    assert sorted(start for start, _, _ in done) == [task.start for task in TASKS]
    here = os.getpid() if kind == "processes" else threading.get_ident()
    places = {pid if kind == "processes" else thread for _, pid, thread in done}
    assert len(places) == 2
    assert here not in places


def test_a_jobs_exception_is_raised_with_its_type(kind: str) -> None:
    """The exception keeps its type and text; from a process, its traceback is told as the cause."""

    def job(task: range) -> int:
        if task.start == 20:
            raise LookupError("no such thing")
        return task.start

    with pytest.raises(LookupError, match="no such thing") as caught:
        list(run_tasks(job, TASKS, 2))
    if kind == "processes":
        assert isinstance(caught.value.__cause__, IngestError)
        assert "in a worker process, samples 20 to 21" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_pickled_is_told_as_text() -> None:
    """A worker's odd exception still arrives, with its traceback."""

    class OddError(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not me")

    def job(task: range) -> int:
        raise OddError("odd")

    with pytest.raises(IngestError, match="OddError: odd"):
        list(run_tasks(job, TASKS, 2))


def test_closing_early_ends_the_workers(kind: str) -> None:
    """Workers end when the generator is closed before all tasks are done."""
    finished = run_tasks(_where, TASKS, 2)
    next(finished)
    finished.close()  # the fixture no_leftovers looks for processes and threads


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_a_fork_is_not_lost() -> None:
    """An interrupt that arrives while a worker is forked is raised once all are, and none survives."""
    script = """
        import os, signal
        from fastdata.crew import run_tasks
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
        list(run_tasks(len, [range(8)] * 100, 2))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGINT
    assert "ignored" not in done.stderr
    assert done.stderr.strip().endswith("KeyboardInterrupt")
