"""Shared-memory blocks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastdata.blocks import ArrayBlock, Block
from fastdata.errors import MemoryBudgetError, StoreGoneError

KINDS = pytest.mark.parametrize("portable", [False, True], ids=["memfd", "file"])


def _add_one(block: Block, done: object) -> None:
    block.array("uint8", (4,))[:] += 1
    done.set()  # type: ignore[attr-defined]


@KINDS
def test_written_bytes_are_read_back(portable: bool) -> None:
    """What is written at an offset is read there, and the rest of the block is zero."""
    with Block.create(100, portable=portable) as block:
        block.write(10, np.arange(6, dtype=np.uint16).reshape(2, 3))
        assert block.array("uint16", (2, 3), 10).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert block.array("uint8", (10,)).tolist() == [0] * 10


@KINDS
def test_the_smallest_block_is_one_byte(portable: bool) -> None:
    """A block of one byte holds it; one of none is refused."""
    with Block.create(1, portable=portable) as block:
        block.write(0, np.array([7], np.uint8))
        assert block.array("uint8", (1,)).tolist() == [7]
    with pytest.raises(ValueError, match="a block needs at least 1 byte, got 0"):
        Block.create(0, portable=portable)


@KINDS
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_another_process_writes_to_the_same_memory(portable: bool, method: str) -> None:
    """A process reached by any start method sees and changes the creator's memory, not a copy."""
    context = multiprocessing.get_context(method)
    with Block.create(4, portable=portable) as block:
        mine = block.array("uint8", (4,))
        mine[:] = 7
        done = context.Event()
        process = context.Process(target=_add_one, args=(block, done))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        process.close()
        assert mine.tolist() == [8] * 4
        del mine


@KINDS
def test_a_pickled_block_is_small_whatever_its_size(portable: bool) -> None:
    """A handle does not grow with the memory behind it."""
    with Block.create(1 << 20, portable=portable) as block:
        assert len(pickle.dumps(block)) < 300


@KINDS
def test_a_sealed_block_cannot_be_written(portable: bool) -> None:
    """Sealing makes arrays read-only, in this process and in one that attaches later."""
    with Block.create(8, portable=portable) as block:
        block.write(0, np.arange(8, dtype=np.uint8))
        block.seal()
        with pickle.loads(pickle.dumps(block)) as attached:
            for view in (block, attached):
                array = view.array("uint8", (8,))
                assert array.tolist() == list(range(8))
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 1


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd")
def test_the_kernel_refuses_writes_to_a_sealed_block() -> None:
    """Not even a write by descriptor changes sealed memory."""
    with Block.create(8) as block:
        block.seal()
        with pytest.raises(PermissionError):
            block.write(0, np.ones(1, np.uint8))


@KINDS
def test_a_block_grows_and_is_trimmed(portable: bool) -> None:
    """Growing keeps what was written; trimming gives back the rest."""
    with Block.create(4, portable=portable) as block:
        block.write(0, np.full(4, 5, np.uint8))
        block.grow(100)
        block.write(96, np.full(4, 6, np.uint8))
        assert block.array("uint8", (100,))[[0, 3, 50, 99]].tolist() == [5, 5, 0, 6]
        block.trim(10)
        assert block.size_bytes == 10
        with pytest.raises(ValueError, match=r"uint8\[11\] at byte 0 exceeds the block of 10 bytes"):
            block.array("uint8", (11,))


def test_arrays_outlive_a_closed_block() -> None:
    """Closing gives back the descriptor, but an array in use stays valid; a second close does nothing."""
    block = Block.create(4)
    block.write(0, np.full(4, 9, np.uint8))
    array = block.array("uint8", (4,))
    block.close()
    block.close()
    assert array.tolist() == [9] * 4
    with pytest.raises(StoreGoneError, match="was closed"):
        block.array("uint8", (4,))
    with pytest.raises(StoreGoneError, match="was closed"):
        pickle.dumps(block)


def test_a_handle_of_an_ended_process_is_refused() -> None:
    """Opening a block whose creator is gone says so."""
    script = "import pickle, sys, fastdata.blocks as b; k = b.Block.create(4); sys.stdout.buffer.write(pickle.dumps(k))"
    handle = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    with pytest.raises(StoreGoneError, match="cannot be reached"):
        pickle.loads(handle)


def test_a_handle_of_a_recycled_process_number_is_refused() -> None:
    """A descriptor that now leads to another file is not taken for the block."""
    with Block.create(4) as block:
        function, (handle,) = block.__reduce__()
        forged = type(handle)(handle.pid, handle.fd, handle.inode + 1, 4, False, None)
        with pytest.raises(StoreGoneError, match="number was given to another"):
            function(forged)


def test_too_large_a_block_is_an_error_and_leaves_nothing() -> None:
    """Memory that cannot be had is refused when it is reserved, not when it is written."""
    with pytest.raises(MemoryBudgetError, match="cannot be reserved"):
        Block.create(1 << 62)


def test_a_file_left_by_a_killed_process_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next portable block removes the file of a creator that died without closing it, and no living one's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = (
        "import os, sys, fastdata.blocks as b; k = b.Block.create(4, portable=True); print('made', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        with Block.create(4, portable=True):
            assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 1
    Block.create(4, portable=True).close()
    assert list(tmp_path.iterdir()) == []


def test_an_array_block_gives_back_its_arrays() -> None:
    """Arrays of any dtype and shape, empty ones too, come back equal and through a handle of bounded size."""
    arrays = {"a": np.arange(7, dtype=np.int64), "b": np.zeros((0, 3), np.float32), "c": np.ones((2, 2), np.uint8)}
    with ArrayBlock(arrays) as block, pickle.loads(pickle.dumps(block)) as attached:
        assert list(attached) == ["a", "b", "c"]
        for name, array in arrays.items():
            np.testing.assert_array_equal(attached[name], array)
            assert attached[name].dtype == array.dtype
