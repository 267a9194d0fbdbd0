"""Locks on the bytes of a block."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from typing import Any

import pytest

from fastdata.blocks import Block
from fastdata.locks import ByteLocks

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def block() -> Any:
    with Block.create(8) as block:
        yield block


def _hold(locks: ByteLocks, byte: int, is_held: Any, may_end: Any) -> None:
    with locks.hold(byte):
        is_held.set()
        may_end.wait()


def test_a_byte_is_held_by_one_thread_at_a_time(block: Block) -> None:
    """Additions that would be lost without the lock are all there."""
    locks, total = ByteLocks(block), [0]

    def add() -> None:
        for _ in range(300):
            with locks.hold(3):
                seen = total[0]
                os.stat(".")  # lets go of the GIL
                total[0] = seen + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == [1200]


@pytest.mark.parametrize("pickled", [False, True])
def test_a_byte_is_held_by_one_process_at_a_time(block: Block, pickled: bool) -> None:
    """Another process waits for the same byte and not for another one, also where it got the locks as a pickle."""
    locks = ByteLocks(block)
    theirs = pickle.loads(pickle.dumps(locks)) if pickled else locks
    is_held, may_end = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(theirs, 3, is_held, may_end))
    process.start()
    assert is_held.wait(10)
    with locks.hold(4):
        pass
    got_it = threading.Event()
    waiting = threading.Thread(target=_hold, args=(locks, 3, got_it, may_end))
    waiting.start()
    assert not got_it.wait(0.2)
    may_end.set()
    assert got_it.wait(10)
    waiting.join()
    process.join()


def test_a_killed_holder_lets_go(block: Block) -> None:
    """Kill -9 of the process that holds a byte frees it."""
    locks = ByteLocks(block)
    is_held, never = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(locks, 0, is_held, never))
    process.start()
    assert is_held.wait(10)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with locks.hold(0):
        pass
    process.join()


def test_a_forked_process_does_not_hold_what_its_parent_holds(block: Block) -> None:
    """Its own threads get a byte that a thread of the parent held when it forked, once that lets go."""
    locks = ByteLocks(block)
    is_held, may_end = FORK.Event(), FORK.Event()
    may_end.set()
    with locks.hold(0):
        process = FORK.Process(target=_hold, args=(locks, 0, is_held, may_end))
        process.start()
        assert not is_held.wait(0.2)
    assert is_held.wait(10)
    process.join()
    assert process.exitcode == 0


def test_an_error_lets_go(block: Block) -> None:
    """An exception while a byte is held frees it."""
    locks = ByteLocks(block)
    with pytest.raises(ZeroDivisionError), locks.hold(0):
        raise ZeroDivisionError
    with locks.hold(0):
        pass
