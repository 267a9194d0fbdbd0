"""Shared blocks, the table of samples in one, and locks on their bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from conftest import shown
from fastdata.errors import MemoryBudgetError, StoreGoneError
from fastdata.machine.blocks import ArrayBlock, Block
from fastdata.machine.tables import SampleTable
from fresh import Interpreters

KINDS = pytest.mark.parametrize("portable", [False, True], ids=["memfd", "file"])


def _add_one(block: Block, done: object) -> None:
    block.array("uint8", (4,))[:] += 1
    done.set()  # type: ignore[attr-defined]


@KINDS
def test_written_bytes_are_read_back(portable: bool) -> None:
    """Bytes that are written at an offset are read there, and the rest of the block is zero."""
    with closing(Block.create(100, portable=portable)) as block:
        block.write(10, np.arange(6, dtype=np.uint16).reshape(2, 3))
        assert block.array("uint16", (2, 3), 10).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert block.array("uint8", (10,)).tolist() == [0] * 10


@KINDS
def test_the_smallest_block_is_one_byte(portable: bool) -> None:
    """A block may have one byte, but not zero."""
    with closing(Block.create(1, portable=portable)) as block:
        block.write(0, np.array([7], np.uint8))
        assert block.array("uint8", (1,)).tolist() == [7]
    with pytest.raises(OSError, match="Invalid argument"):
        Block.create(0, portable=portable)


@KINDS
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_another_process_writes_to_the_same_memory(portable: bool, method: str) -> None:
    """A process, forked from this one or not, sees and changes the creator's memory, not a copy."""
    context = multiprocessing.get_context(method)
    with closing(Block.create(4, portable=portable)) as block:
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


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_refused_memfd_is_a_file_without_a_name(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under a strict seccomp profile other processes find the memory too, and no folder has a file of it."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    test_another_process_writes_to_the_same_memory(portable=False, method=method)
    with closing(Block.create(4)) as block:
        block.seal()
        assert list(tmp_path.iterdir()) == []
        with closing(pickle.loads(pickle.dumps(block))) as again:
            assert again.array("uint8", (4,)).tolist() == [0] * 4


def test_a_block_has_a_name_where_there_is_no_proc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others open it by the name, because they cannot open another process's descriptor."""
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/proc/self/fd" and exists(path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(Block.create(4)) as block:
        assert [block.path] == list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


@KINDS
def test_a_pickled_block_is_small_whatever_its_size(portable: bool) -> None:
    """The size of a handle does not depend on the size of the memory."""
    with closing(Block.create(1 << 20, portable=portable)) as block:
        assert len(pickle.dumps(block)) < 300


@KINDS
def test_a_sealed_block_cannot_be_written(portable: bool) -> None:
    """Sealing makes arrays read-only, in this process and in one that attaches later."""
    with closing(Block.create(8, portable=portable)) as block:
        block.write(0, np.arange(8, dtype=np.uint8))
        block.seal()
        with closing(pickle.loads(pickle.dumps(block))) as attached:
            for view in (block, attached):
                array = view.array("uint8", (8,))
                assert array.tolist() == list(range(8))
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 1


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd")
def test_the_kernel_refuses_writes_to_a_sealed_block() -> None:
    """Even a write by descriptor cannot change sealed memory."""
    with closing(Block.create(8)) as block:
        block.seal()
        with pytest.raises(PermissionError):
            block.write(0, np.ones(1, np.uint8))


@KINDS
def test_a_block_grows_and_is_trimmed(portable: bool) -> None:
    """Growing keeps the bytes; trimming releases the rest."""
    with closing(Block.create(4, portable=portable)) as block:
        block.write(0, np.full(4, 5, np.uint8))
        block.resize(100)
        block.write(96, np.full(4, 6, np.uint8))
        assert block.array("uint8", (100,))[[0, 3, 50, 99]].tolist() == [5, 5, 0, 6]
        block.resize(10)
        assert block.size_bytes == 10
        with pytest.raises(ValueError, match="buffer is smaller than requested size"):
            block.array("uint8", (11,))


def test_arrays_outlive_a_closed_block() -> None:
    """Closing releases the descriptor, but an array in use stays valid; a second close does nothing."""
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


def test_a_handle_of_an_ended_process_is_refused(fresh: Interpreters) -> None:
    """Opening a block of an ended process raises an error that says so."""
    script = "import pickle; from fastdata.machine.blocks import Block; k = Block.create(4); "
    script += "print(pickle.dumps(k).hex())"
    handle = bytes.fromhex(fresh.run(script).stdout)
    with pytest.raises(
        StoreGoneError, match=r"process \d+, which held .*, has ended\. .*cache_dir="
    ):
        pickle.loads(handle)


@pytest.mark.parametrize("reused", [False, True])
def test_a_handle_of_a_closed_block_says_that_it_was_closed(reused: bool) -> None:
    """The creator exists, but another file may have the descriptor's number."""
    block = Block.create(4)
    handle = pickle.dumps(block)
    block.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(40 * reused)]
    try:
        with pytest.raises(StoreGoneError, match=rf"^process {os.getpid()} has closed the dataset"):
            pickle.loads(handle)
    finally:
        for fd in others:
            os.close(fd)


def test_a_handle_of_a_recycled_process_number_is_refused() -> None:
    """A descriptor that now leads to another file is not opened as the block."""
    with closing(Block.create(4)) as block:
        function, (path, pid, fd, inode, *rest) = block.__reduce__()
        with pytest.raises(StoreGoneError, match="number now belongs to another process"):
            function(path, pid, fd, inode + 1, *rest)


def test_a_handle_of_a_file_that_was_cut_is_refused() -> None:
    """A file that has become too short is not mapped."""
    with closing(Block.create(4, portable=True)) as block:
        handle = pickle.dumps(block)
        os.truncate(block.fd, 3)
        with pytest.raises(StoreGoneError):
            pickle.loads(handle)


def test_too_large_a_block_is_an_error_and_leaves_nothing() -> None:
    """Too much memory is refused when it is reserved, not when it is written."""
    with pytest.raises(MemoryBudgetError, match="cannot be reserved"):
        Block.create(1 << 62)


@KINDS
def test_a_block_that_may_not_grow_says_so_and_stays(portable: bool) -> None:
    """A limit of file sizes (``ulimit -f``) is a memory error, and not the fault of the written sample."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(Block.create(4, portable=portable)) as block:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(MemoryBudgetError, match=r"196 B .* cannot be reserved \(File too"):
                block.resize(200)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert block.size_bytes == 4


def test_a_block_that_cannot_be_mapped_says_so() -> None:
    """A limit of address space (``ulimit -v``) is a memory error with need and cure."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with closing(Block.create(1 << 26)) as block:
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + (1 << 25), limits[1]))
        try:
            with pytest.raises(MemoryBudgetError, match=r"64\.0 MiB .*reserved \(Cannot allocate"):
                block.array("uint8", (1 << 26,))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert not block.array("uint8", (1 << 26,)).any()


def test_a_file_left_by_a_killed_process_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Interpreters
) -> None:
    """The next portable block removes the file of a creator that was killed, but none of a running one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = (
        "import os, sys, fastdata.machine.blocks as b; k = b.Block.create(4, portable=True); print('made', flush=True);"
        "sys.stdin.read()"
    )
    reader, writer = os.pipe()
    with open(reader) as empty, fresh.piped(script, stdin=empty.fileno()) as (process, output):
        assert output.readline() == b"made\n"
        with closing(Block.create(4, portable=True)):
            assert len(list(tmp_path.iterdir())) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    os.close(writer)
    assert len(list(tmp_path.iterdir())) == 1
    Block.create(4, portable=True).close()
    assert list(tmp_path.iterdir()) == []


def test_an_array_block_gives_back_its_arrays() -> None:
    """Arrays of any dtype and shape, also empty ones, come back equal and through a handle of limited size."""
    arrays = {
        "a": np.arange(7, dtype=np.int64),
        "b": np.zeros((0, 3), np.float32),
        "c": np.ones((2, 2), np.uint8),
    }
    with (
        closing(ArrayBlock.of(arrays)) as block,
        closing(pickle.loads(pickle.dumps(block))) as attached,
    ):
        assert list(attached) == ["a", "b", "c"]
        for name, array in arrays.items():
            np.testing.assert_array_equal(attached[name], array)
            assert attached[name].dtype == array.dtype


@pytest.mark.parametrize(
    "targets",
    [
        [3, 1, 2],
        [0.5, 1.0],
        [True, False],
        ["cat", "dog"],
        [(1, "a"), None, {"box": [1, 2]}],
        [1, 2.5],
        [(1, "a"), (2, "b")],
        [(0.5, (1, [2])), (1.5, (3, []))],
        [(), ()],
        [2**40, -1],
        [np.int64(3), np.int64(-1)],
        [np.float32(0.1), np.float32(2)],
        [np.bool_(True), np.bool_(False)],
        [np.int64(3), np.int32(4)],
        [np.str_("a"), np.str_("b")],
        [],
    ],
    ids=repr,
)
def test_targets_come_back_as_they_were(targets: list[Any]) -> None:
    """Each target keeps value and type, here and in a copy in another process."""
    table = SampleTable(targets)
    for view in (table.targets, pickle.loads(pickle.dumps(table)).targets):
        assert view == targets
        assert [type(target) for target in view] == [type(target) for target in targets]


@pytest.mark.parametrize("dtype", ["U", object])
def test_an_array_of_strings_is_a_list_of_them(dtype: Any) -> None:
    """A column of names from NumPy or pandas has the targets and batches of a list of strings."""
    with contextlib.closing(SampleTable(np.array(["cat", "dog"], dtype))) as table:
        assert table.targets == ["cat", "dog"]
        assert table.collated_targets(np.array([1, 0])) == ("dog", "cat")


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_array_targets_come_back_as_copies(make: Any) -> None:
    """A tensor or array target can be changed by the user without changing the table."""
    table = SampleTable([make([1.0, 2.0]), make([3.0, 4.0])])
    first = table.target(0)
    first[0] = 99
    assert type(first) is type(make([1.0]))
    assert table.target(0).tolist() == [1.0, 2.0]
    assert table.columns.get("targets") is not None


@pytest.mark.parametrize(
    "targets",
    [
        [1, 2, 3],
        [0.5, 1.5, 2.5],
        [np.int32(1), np.int32(2), np.int32(3)],
        [np.float32(0.1), np.float32(0.2), np.float32(0.3)],
        ["a", "b", "c"],
        [torch.tensor([i, 1.5]) for i in range(3)],
        [np.array([i, 1]) for i in range(3)],
        [(i, f"id {i}") for i in range(3)],
        [(torch.tensor([i, 1]), (i / 2, {"x": i})) for i in range(3)],
    ],
    ids=shown,
)
def test_targets_are_collated_as_torch_does(targets: list[Any]) -> None:
    """A batch of them equals ``default_collate`` of a plain dataset's targets, in value, type and dtype."""
    with contextlib.closing(SampleTable(targets)) as table:
        found = table.collated_targets(np.array([2, 0, 2]))
    wanted = default_collate([(torch.zeros(1), targets[index]) for index in (2, 0, 2)])[1]
    assert type(found) is type(wanted)
    assert repr(found) == repr(wanted)
    assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)


def test_a_tensor_gives_a_target_for_each_of_its_rows() -> None:
    """A table of a whole tensor equals a table of its rows."""
    with contextlib.closing(SampleTable(torch.tensor([[1, 2], [3, 4]]))) as table:
        assert len(table) == 2
        assert torch.equal(table.target(1), torch.tensor([3, 4]))


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_targets_without_dimensions_stay_tensors_and_arrays(make: Any) -> None:
    """A tensor or array of one number comes back as one, alone and in a tuple."""
    for targets in ([make(3), make(4)], [(make(3), 1), (make(4), 2)]):
        with contextlib.closing(SampleTable(targets)) as table:
            assert repr(list(table.targets)) == repr(targets)


def test_scalars_of_numpy_are_kept_as_numbers() -> None:
    """NumPy scalars, which many datasets return as labels, take only their bytes, without pickle."""
    with contextlib.closing(SampleTable([np.int64(3), np.int64(4)])) as table:
        array = table.columns.get("targets")
        assert array is not None
        assert array.tolist() == [3, 4]


def test_ragged_array_targets_are_kept_as_objects() -> None:
    """Arrays of different shapes do not become a column of numbers."""
    table = SampleTable([torch.zeros(2), torch.zeros(3)])
    assert table.columns.get("targets") is None
    assert [len(target) for target in table.targets] == [2, 3]


def test_paths_and_pairs_behave_like_lists() -> None:
    """Negative indices, slices, iteration, equality, sums, copies and errors are a list's."""
    paths = ["/a/é.jpg", "/a/b.jpg", "/c\udcff.jpg"]
    table = SampleTable([0, 0, 1], paths=paths, class_to_idx={"x": 0, "y": 1})
    assert table.paths == paths
    assert list(table.paths) == paths
    assert table.paths[-1] == paths[-1]
    assert table.paths[:2] == paths[:2]
    more = ["z"]
    assert table.paths + more == [*paths, "z"]
    assert more + table.paths == ["z", *paths]
    assert table.paths + table.paths == paths * 2
    copy = table.paths.copy()
    copy.append("z")
    assert copy == [*paths, "z"]
    assert json.loads(json.dumps({"targets": table.targets}, default=list)) == {
        "targets": [0, 0, 1]
    }
    assert table.pairs[1] == ("/a/b.jpg", 0)
    assert np.array(table.targets).tolist() == [0, 0, 1]
    assert table.class_to_idx == {"x": 0, "y": 1}
    with pytest.raises(IndexError):
        table.paths[3]
    with pytest.raises(TypeError, match="unhashable"):
        hash(table.paths)


def test_a_name_that_no_file_can_have_moves_no_other() -> None:
    """A name with a NUL, and a ``Path``, are stored at their own positions."""
    paths: list[Any] = ["/a/b\0c.jpg", Path("/a/d.jpg"), "/a/é.jpg"]
    with contextlib.closing(SampleTable([0, 1, 2], paths=paths)) as table:
        assert list(table.paths) == list(map(str, paths))


def test_a_reduced_table_outlives_the_whole() -> None:
    """Paths, targets and classes are those of the remaining samples, after the whole table is closed."""
    with contextlib.closing(
        SampleTable([5, 6, 7], paths=["a", "b", "c"], class_to_idx={"x": 5})
    ) as whole:
        reduced = whole.reduced_to([2, 0])
    with contextlib.closing(reduced):
        assert list(reduced.pairs) == [("c", 7), ("a", 5)]
        assert reduced.class_to_idx == {"x": 5}


def test_a_pickled_table_or_view_is_a_handle() -> None:
    """A pickle of the table or of a view does not contain the samples."""
    table = SampleTable(list(range(5000)), paths=[f"/some/folder/{i}.jpg" for i in range(5000)])
    assert len(pickle.dumps(table)) < 1000
    assert len(pickle.dumps(table.pairs)) < 1000
    assert pickle.loads(pickle.dumps(table.pairs))[4999] == ("/some/folder/4999.jpg", 4999)


FORK = multiprocessing.get_context("fork")


@pytest.fixture
def block() -> Any:
    with closing(Block.create(8)) as block:
        yield block


def _hold(block: Block, byte: int, is_held: Any, may_end: Any) -> None:
    with block.hold(byte):
        is_held.set()
        may_end.wait()


def test_a_byte_is_held_by_one_thread_at_a_time(block: Block) -> None:
    """No addition is lost, as it would be without the lock."""
    total = [0]

    def add() -> None:
        for _ in range(300):
            with block.hold(3):
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
    """Another process waits for the same byte but not for others, also if it got the block as a pickle."""
    theirs = pickle.loads(pickle.dumps(block)) if pickled else block
    is_held, may_end = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(theirs, 3, is_held, may_end))
    process.start()
    assert is_held.wait(60)
    with block.hold(4):
        pass
    got_it = threading.Event()
    waiting = threading.Thread(target=_hold, args=(block, 3, got_it, may_end))
    waiting.start()
    assert not got_it.wait(0.2)
    may_end.set()
    assert got_it.wait(60)
    waiting.join()
    process.join()


def test_a_killed_holder_releases_its_lock(block: Block) -> None:
    """Kill -9 of the process that holds a byte frees it."""
    is_held, never = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(block, 0, is_held, never))
    process.start()
    assert is_held.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with block.hold(0):
        pass
    process.join()


def test_a_forked_process_does_not_hold_what_its_parent_holds(block: Block) -> None:
    """Threads of a child can hold a byte that the parent held at the fork, once the parent releases it."""
    is_held, may_end = FORK.Event(), FORK.Event()
    may_end.set()
    with block.hold(0):
        process = FORK.Process(target=_hold, args=(block, 0, is_held, may_end))
        process.start()
        assert not is_held.wait(0.2)
    assert is_held.wait(60)
    process.join()
    assert process.exitcode == 0


@KINDS
@pytest.mark.parametrize("kind", ["of bytes", "of the block"])
def test_closing_a_copy_releases_no_lock(
    portable: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte stays held when a pickled copy of its block is closed in the process that holds it."""
    if kind == "of the block":  # as on macOS
        monkeypatch.delattr(fcntl, "F_OFD_SETLKW")
        monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    is_held, may_end = FORK.Event(), FORK.Event()
    may_end.set()
    with closing(Block.create(8, portable=portable)) as block:
        with block.hold(0):
            pickle.loads(pickle.dumps(block)).close()
            process = FORK.Process(target=_hold, args=(block, 0, is_held, may_end))
            process.start()
            assert not is_held.wait(0.2)
        assert is_held.wait(60)
        process.join()


def test_an_error_releases_the_lock(block: Block) -> None:
    """An exception while a byte is held frees it."""
    with pytest.raises(ZeroDivisionError), block.hold(0):
        raise ZeroDivisionError
    with block.hold(0):
        pass


def test_two_blocks_are_held_at_once_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples can be prepared from those of another dataset, each on its first read."""
    held = threading.Event()

    def hold_both() -> None:
        with one.hold(0), other.hold(0):
            held.set()

    with closing(Block.create(1)) as one, closing(Block.create(1)) as other:
        monkeypatch.setattr(sys, "platform", "win32")
        threading.Thread(target=hold_both, daemon=True).start()
        assert held.wait(60)
