"""The fixture that looks for leftovers finds each kind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

import leftovers
from leftovers import Holdings, wait_for_none


@contextmanager
def open_descriptor() -> Iterator[None]:
    number = os.open(os.devnull, os.O_RDONLY)
    yield
    os.close(number)


@contextmanager
def running_thread() -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="forgotten")
    thread.start()
    yield
    ended.set()
    thread.join()


@contextmanager
def running_child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.communicate(b"\n")


@contextmanager
def shared_file() -> Iterator[None]:
    path = f"/dev/shm/fastdata-test-{os.getpid()}"
    with open(path, "w", encoding="utf-8"):
        pass
    yield
    os.unlink(path)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="descriptors and /dev/shm are read as Linux has them",
)
@pytest.mark.parametrize(
    ("leak", "word"),
    [
        (open_descriptor, "-> /dev/null"),
        (running_thread, "thread forgotten"),
        (running_child, "process"),
        (shared_file, "/dev/shm/fastdata-test-"),
    ],
)
def test_leftover_is_named(
    leak: Callable[[], AbstractContextManager[None]], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resource that is still held is named, and one that was released is not."""
    monkeypatch.setattr(leftovers, "WAIT_S", 0.05)
    before = Holdings.now()
    with leak():
        assert any(word in row for row in wait_for_none(before))
    monkeypatch.undo()
    assert wait_for_none(before) == []


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_child_that_was_not_joined_is_joined() -> None:
    """Its pipes stay open until then: torch's loader only terminates a worker that takes long to end."""
    before = Holdings.now()
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        child = context.Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
    del child
    assert wait_for_none(before) == []
