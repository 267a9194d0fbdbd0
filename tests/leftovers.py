"""Resources of a process that must not outlive a test: threads, children, descriptors, shared-memory files."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker

import psutil

WAIT_S = 30.0  # which only what is left behind takes; under load a process takes seconds to end
KEPT_OPEN = (".ttf", ".otf")
"""matplotlib keeps the font files that it has drawn with."""
DRIVERS = ("/dev/nvidia", "anon_inode:[eventfd]")
"""CUDA opens its devices and event descriptors when it first needs them, and keeps them; nobody else opens either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """The resources that this process holds now."""

    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]
    descriptors: frozenset[tuple[int, str]]
    shared_files: frozenset[str]

    @staticmethod
    def now() -> Holdings:
        return Holdings(
            threads=frozenset(threading.enumerate()),
            children=frozenset(_children()),
            descriptors=frozenset(open_descriptors()),
            shared_files=frozenset(_shared_files()),
        )

    def left_since(self, before: Holdings) -> list[str]:
        """Return a text with the resources that are held beyond ``before``."""
        kept = _kept_by_multiprocessing()
        rows = [f"thread {thread.name}" for thread in self.threads - before.threads]
        rows += [
            _describe(child)
            for child in self.children - before.children
            if child.pid not in kept.pids
        ]
        rows += [
            f"descriptor {number} -> {target}"
            for number, target in sorted(self.descriptors - before.descriptors)
            if number not in kept.descriptors
            and not target.endswith(KEPT_OPEN)
            and not target.startswith(DRIVERS)
        ]
        rows += [f"/dev/shm/{name}" for name in sorted(self.shared_files - before.shared_files)]
        return rows


def wait_for_none(before: Holdings) -> list[str]:
    """Return the resources beyond ``before`` after garbage collection and a short wait; empty if all are gone."""
    left = Holdings.now().left_since(before)
    deadline = time.monotonic() + WAIT_S
    while left and time.monotonic() < deadline:
        gc.collect()
        now = Holdings.now()
        for thread in now.threads - before.threads:
            thread.join(timeout=0.1)
        theirs = _join_children()
        others = (each for each in now.children - before.children if each.pid not in theirs)
        psutil.wait_procs(others, timeout=0.1)
        left = Holdings.now().left_since(before)
    return left


def _join_children() -> set[int | None]:
    """Join multiprocessing's children, and give those that go on.

    It keeps the pipes of one that torch has terminated and not joined, as it does where one takes long to end, until
    it is asked; for good, where somebody else has learnt of the end before.
    """
    children = multiprocessing.active_children()
    for child in children:
        child.join(timeout=0.1)
    return {child.pid for child in children}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    pids: frozenset[int | None]
    descriptors: frozenset[int | None]


def _kept_by_multiprocessing() -> _Kept:
    """Return the helpers that multiprocessing starts at the first spawn or forkserver and keeps until the exit."""
    tracker = resource_tracker._resource_tracker
    server = forkserver._forkserver
    return _Kept(
        pids=frozenset({tracker._pid, server._forkserver_pid}),
        descriptors=frozenset({tracker._fd, server._forkserver_alive_fd}),
    )


def _children() -> list[psutil.Process]:
    """Return all descendants from the kernel's list. psutil would read every process of the machine, in each test."""
    if not os.path.exists("/proc/thread-self/children"):  # a system without such lists
        return psutil.Process().children(recursive=True)
    found = []
    waiting = ["self"]
    while waiting:
        pids: list[str] = []
        with contextlib.suppress(OSError):  # a process or a thread has ended since
            tasks = f"/proc/{waiting.pop()}/task"
            for thread in os.listdir(tasks):
                with contextlib.suppress(OSError), open(f"{tasks}/{thread}/children") as stream:
                    pids += stream.read().split()
        waiting += pids
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
    return found


def open_descriptors() -> list[tuple[int, str]]:
    """Return number and target of every open descriptor; a memory mapping holds its own."""
    rows = []
    folder = "/proc/self/fd"
    for number in os.listdir(folder) if os.path.exists(folder) else ():
        with contextlib.suppress(
            OSError
        ):  # closed since, as the descriptor of this very listing is
            rows.append((int(number), os.readlink(f"{folder}/{number}")))
    return rows


def _shared_files() -> list[str]:
    """Return entries of /dev/shm that this process may make; other processes of the machine make their own."""
    folder = "/dev/shm"
    if not os.path.exists(folder):
        return []
    ours = ("fastdata", "psm_", f"torch_{os.getpid()}_", "pymp-")
    return [name for name in os.listdir(folder) if name.startswith(ours)]


def _describe(child: psutil.Process) -> str:
    try:
        return f"process {child.pid} ({' '.join(child.cmdline())[:80]})"
    except psutil.Error:
        return f"process {child.pid}"
