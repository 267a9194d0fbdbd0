"""The files of a cache behind a URL: those blocks of them that were needed lately, in sparse files on a local disk.

A mirror is a folder of one cache below ``local_cache``, which all caches, ranks and runs of a machine share:

* the files of the cache, as large as they are there, but with holes where nothing was fetched;
* ``mirror.json``, their names and sizes;
* ``blocks``, for each block of 64 KiB of all of them, one after the other, an int64, when it was last needed, in ns;
  behind these, a byte each: 0 a hole, 1 room was made for it, 2 it is there.

Whoever needs blocks holds a read lock on their numbers in ``blocks``; who fetches some, a write lock on those behind
``_FETCHING``; who makes holes, a write lock on their numbers. Such locks (open file descriptions') end with their
holder, so that a killed process leaves blocks that are there, or that the next one fetches.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdata.errors import CacheError, RemoteError
from fastdata.images import SampleSpec
from fastdata.memory import format_bytes, parse_bytes
from fastdata.remote import Entry, Place
from fastdata.report import log
from fastdata.shared import ArrayBlock, lock_range, unlock
from fastdata.stores.files import DiskFile, free_bytes
from fastdata.stores.readers import Decoder, DiskStore, UndecodableError, checksum

if sys.platform == "linux":
    import fcntl

BLOCK_BYTES = 64 << 10
_REQUEST_BLOCKS, _GAP_BLOCKS = 64, 4
_AT_ONCE = 16
FETCH_BYTES = _REQUEST_BLOCKS * _AT_ONCE * BLOCK_BYTES
"""On their way at once: 64 MiB, where 50 ms at 1 GB/s are 48."""
_HOLE, _ROOM, _THERE = 0, 1, 2
_FETCHING, _OPEN = 1 << 40, 1 << 41
_SLACK = 64
"""Room is made for a 64th of the limit at once: to find the blocks needed least lately is a sort of all of them."""
_SPARE = 1024
_POLL_S, _LOOK_S = 0.005, 0.1
_PATIENCE_S = 60.0
"""So long is room waited for, which others of this machine may give back."""
_NAMES = "mirror.json"

Spans = Sequence[tuple[int, int]]
"""First block and the one behind the last."""


class Mirror:
    """Some of the blocks of some files of a place, in a local folder of at most so many bytes.

    Args:
        place: the cache.
        files: of it; they never change under their names, sizes and tags.
        local_cache: folder that all mirrors of a machine share.
        limit: for all of them: bytes, ``"200GiB"``, or a share of what is free and what they have.

    Raises:
        CacheError: the folder cannot hold them; says why and the cure.
        RemoteError: a file cannot be fetched.
    """

    def __init__(
        self, place: Place, files: Sequence[Entry], local_cache: str | os.PathLike[str], limit: int | float | str
    ) -> None:
        if sys.platform != "linux":
            raise CacheError(f"{place} is mirrored by means that only Linux has; copy it to a local disk and open that")
        self.place, self.files = place, tuple(files)
        self._all = Path(local_cache).expanduser().absolute()
        text = json.dumps([place.url, *self.files])
        stem = re.sub(r"[^A-Za-z0-9._]+", "-", place.url.rpartition("/")[2]).strip(".-") or "cache"
        self.folder = self._all / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        try:
            with _locked(self._all):
                self._blocks = _Blocks.create(self.folder, [(file.name, file.size_bytes) for file in self.files])
                used_bytes = _used_bytes(self._all)
        except OSError as problem:
            raise CacheError(f"local_cache={str(self._all)!r} cannot be written ({problem.strerror})") from problem
        self.limit_bytes = parse_bytes(limit, of=free_bytes(self._all) + used_bytes)
        if used_bytes > self.limit_bytes:
            with _locked(self._all):
                _free(self._all, used_bytes - self.limit_bytes)
        self.size_bytes = sum(file.size_bytes for file in self.files)
        self._pins: dict[int, _Pins] = {}
        self._guard = threading.Lock()
        self._close = weakref.finalize(self, _end, self._pins, self._blocks)

    def first_block(self, name: str) -> int:
        first: int = self._blocks.firsts[name]
        return first

    def at(self, name: str) -> str:
        return self.place.at(name)

    def pin(self, spans: Spans) -> None:
        """Have none of these blocks made a hole until they are unpinned, or this process ends."""
        self._own_pins().change(spans, +1)

    def unpin(self, spans: Spans) -> None:
        now = time.time_ns()
        for first, stop in spans:
            self._blocks.needed_ns[first:stop] = now
        self._own_pins().change(spans, -1)

    def pin_all(self) -> bool:
        """Pin all blocks for as long as this process lives, once; unless they are more than may be there."""
        if self.size_bytes > self.limit_bytes:
            return False
        self._own_pins().hold_all()
        return True

    def _own_pins(self) -> _Pins:
        with self._guard:
            pid = os.getpid()
            if pid not in self._pins:  # a parent's locks are shared with its forked children: they must not end them
                self._pins[pid] = _Pins(self._blocks)
            return self._pins[pid]

    def read(self, name: str, *, again: bool = False) -> bytes:
        """A whole file; fetched ``again`` where what is here is of no use."""
        first, path = self.first_block(name), self.folder / name
        spans = [(first, first + _count(path.stat().st_size))]
        self.pin(spans)
        try:
            if again:
                self._blocks.state[slice(*spans[0])] = _ROOM
            self.ensure(spans)
            return path.read_bytes()
        finally:
            self.unpin(spans)

    def mend(self, name: str, start: int, stop: int) -> None:
        """Fetch these bytes of a file anew, and no others: the rest of their blocks was found right already."""
        self._blocks.put(name, start, self.place.read(name, start, stop))

    def ensure(self, spans: Spans, ahead: Ahead | None = None) -> None:
        """Fetch those of pinned blocks that are not there, many requests at once, begun in order.

        Two processes never fetch the same block: the second waits for the first. What is fetched ``ahead`` is left
        where there is no room for it.
        """
        missing = deque(self._requests(spans))
        elsewhere: list[tuple[int, int]] = []
        pending: dict[Future[bytes], tuple[int, tuple[int, int]]] = {}
        for first, last in spans:
            self._blocks.needed_ns[first:last] = time.time_ns()
        give_up_s = 0.0
        try:
            while (missing or pending or elsewhere) and not (ahead and ahead.is_dropped.is_set()):
                if ahead and ahead.asks_no_more.is_set():
                    missing.clear()
                    elsewhere.clear()
                while missing and len(pending) < _AT_ONCE:
                    span = missing.popleft()
                    if (lock := self._blocks.lock(fcntl.F_WRLCK, span, _FETCHING)) is None:
                        elsewhere.append(span)
                        continue
                    self.pin([span])  # which of what is fetched ahead nobody else does
                    try:
                        asked, lack_bytes = self._ask(span)
                    except BaseException:
                        self._let_go(lock, span)
                        raise
                    if asked is not None:
                        pending[asked] = lock, span
                        give_up_s = 0.0
                        continue
                    self._let_go(lock, span)
                    if not lack_bytes:  # others have fetched some of it
                        missing.extendleft(reversed(self._requests([span])))
                        continue
                    if ahead is not None:
                        ahead.asks_no_more.set()
                        break
                    give_up_s = give_up_s or time.monotonic() + _PATIENCE_S
                    if time.monotonic() > give_up_s:
                        raise self._too_small(lack_bytes)
                    missing.appendleft(span)
                    break
                if pending:
                    for future in wait(pending, _LOOK_S, FIRST_COMPLETED).done:
                        self._blocks.write(pending[future][1], future.result())
                        self._let_go(*pending.pop(future))
                elif missing or elsewhere:
                    time.sleep(_POLL_S)
                    missing.extend(self._requests(elsewhere))
                    elsewhere = []
        finally:
            for future, held in pending.items():
                future.cancel()
                self._let_go(*held)

    def _let_go(self, lock: int, span: tuple[int, int]) -> None:
        unlock(lock)
        self.unpin([span])

    def _ask(self, span: tuple[int, int]) -> tuple[Future[bytes] | None, int]:
        """Ask for blocks that nobody else fetches; or the bytes that there is no room for."""
        if (self._blocks.state[slice(*span)] == _THERE).any():
            return None, 0
        lack_bytes = self._make_room(span)
        return (None, lack_bytes) if lack_bytes else (self.place.submit(*self._blocks.place(span)), 0)

    def _requests(self, spans: Spans) -> list[tuple[int, int]]:
        requests = []
        for first, stop in spans:
            for start, end in _runs(self._blocks.state[first:stop] != _THERE):
                cuts = range(first + start, first + end, _REQUEST_BLOCKS)
                requests += [(cut, min(cut + _REQUEST_BLOCKS, first + end)) for cut in cuts]
        return requests

    def _make_room(self, span: tuple[int, int]) -> int:
        """Make room for blocks, of others if need be; the bytes that are lacking."""
        with _locked(self._all):
            need_bytes = int((self._blocks.state[slice(*span)] == _HOLE).sum()) * BLOCK_BYTES
            spare_bytes = self.limit_bytes // _SPARE  # for what ext4 notes of where the pieces of a file lie
            lack_bytes = _used_bytes(self._all) + need_bytes + spare_bytes - self.limit_bytes if need_bytes else 0
            if lack_bytes > 0:
                lack_bytes -= _free(self._all, lack_bytes + self.limit_bytes // _SLACK)
            if lack_bytes <= 0:
                try:
                    self._blocks.make_room(span)
                except OSError as problem:
                    if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    raise CacheError(
                        f"the disk of local_cache={str(self._all)!r} is full. Free some space, or give a smaller "
                        f"local_limit= than {format_bytes(self.limit_bytes)}."
                    ) from problem
        return max(lack_bytes, 0)

    def _too_small(self, lack_bytes: int) -> CacheError:
        return CacheError(
            f"local_limit={format_bytes(self.limit_bytes)} of {self._all} is too small: all of it has been in use by "
            f"running loaders for {_PATIENCE_S:.0f} s, and {format_bytes(lack_bytes)} more are needed. Raise it; or "
            "use ChunkedLoader with a smaller memory_limit= or chunk_samples=, which needs two chunks at a time."
        )

    def close(self) -> None:
        """Let go of all blocks, which stay there. Idempotent."""
        self._close()

    def __reduce__(self) -> tuple[object, ...]:
        return Mirror, (self.place, self.files, self._all, self.limit_bytes)


def _end(pins: dict[int, _Pins], blocks: _Blocks) -> None:
    for each in pins.values():
        each.close()
    pins.clear()
    blocks.close()


class MirroredStore(DiskStore):
    """Samples in the files of a mirror, which are fetched before they are read.

    Those that are brought are there until they are dropped; what is read without is fetched, and stays. Checksums are
    looked at after each fetch; a sample that fails is fetched once more.
    """

    def __init__(
        self,
        files: Sequence[DiskFile],
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None = None,
        *,
        mirror: Mirror,
    ) -> None:
        super().__init__(files, spec, index, decoder)
        self._marks.close()
        self.mirror, self._checked = mirror, np.zeros(max(len(self), 1), np.uint8)  # of this process alone
        self._readers = np.zeros(len(self._checked), np.uint16)  # that need each sample here
        self._first_blocks = {file.path: mirror.first_block(file.path.name) for file in files}

    def _spans(self, index_B: np.ndarray) -> Spans:
        """The blocks of samples, and the few that lie between them: a request costs more than these do."""
        spans: list[tuple[int, int]] = []
        path = Path()
        for file, start, size in self._runs(index_B):
            first = self._first_blocks[file.path] + start // BLOCK_BYTES
            stop = self._first_blocks[file.path] + _count(start + size)
            if path == file.path and first <= spans[-1][1] + _GAP_BLOCKS:
                spans[-1] = spans[-1][0], max(stop, spans[-1][1])
            else:
                spans.append((first, stop))
            path = file.path
        return spans

    def expect(self, indices: Sequence[int]) -> None:
        self._have(np.array(indices, np.int64))

    def read(self, index: int) -> np.ndarray:
        self.check(np.array([index]))
        return super().read(index)

    def read_into(self, index: int, out: np.ndarray) -> None:
        self.check(np.array([index]))
        super().read_into(index, out)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        self.check(index_B)
        super().gather_into(index_B, out_B)

    def check(self, index_B: np.ndarray) -> None:
        unchecked = index_B[self._checked[index_B] == 0]
        self._have(unchecked)
        super().check(unchecked)

    def _have(self, index_B: np.ndarray) -> None:
        """Fetch samples that nobody has brought; they stay."""
        away = index_B[self._readers[index_B] == 0]
        if len(away):
            spans = self._spans(away)
            if not self.mirror.pin_all():
                self.mirror.pin(spans)
            self.mirror.ensure(spans)
            self._readers[away] += 1

    def _enter(self, index: int, found: int) -> None:
        wanted = int(self._sums[index])
        if found != wanted:
            file, start = self._disk_files[self._of[index]].path.name, int(self._offsets[index])
            log.info("sample %d of %s is not as it was written; it is fetched again", index, self.mirror.place)
            self.mirror.mend(file, start, start + int(self._sizes[index]))
            found = checksum(self.stored(index))
        if found != wanted:
            what = f"its bytes in {self.mirror.place.at(file)} are not those that were written, and came twice"
            what += "; the file was changed or is damaged there: build the cache anew"
            raise UndecodableError(what, index=index, codec=self.codec, is_on_disk=True)
        self._checked[index] = 1

    # What of the files is here, and in memory

    def fetch_ahead(self, *chunks: np.ndarray) -> Ahead:
        """Fetch the samples of one chunk after the other in a thread; whoever asks for that ends it."""
        return Ahead(self.mirror, [span for index_B in chunks for span in self._spans(index_B)])

    def bring(self, index_B: np.ndarray) -> None:
        spans = self._spans(index_B)
        self.mirror.pin(spans)
        try:
            self.mirror.ensure(spans)
        except BaseException:
            self.mirror.unpin(spans)
            raise
        self._readers[index_B] += 1
        super().bring(index_B)

    def drop(self, index_B: np.ndarray, *, from_cache: bool = False) -> None:
        brought = index_B[self._readers[index_B] > 0]
        self._readers[brought] -= 1
        self._checked[brought[self._readers[brought] == 0]] = 0
        super().drop(brought, from_cache=from_cache)
        self.mirror.unpin(self._spans(brought))

    def close(self) -> None:
        super().close()
        self.mirror.close()

    def __reduce__(self) -> tuple[object, ...]:
        return _open_mirrored, (self.files, self.spec, self.index, self._decoder, self.mirror)


class Ahead(threading.Thread):
    """Fetches blocks that are needed soon; whoever needs one that does not come asks for it again, and is told why."""

    def __init__(self, mirror: Mirror, spans: Spans) -> None:
        super().__init__(name="fastdata-fetch", daemon=True)
        self._mirror, self._spans = mirror, spans
        self.asks_no_more, self.is_dropped = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(RemoteError, OSError):
            self._mirror.ensure(self._spans, self)

    def drop(self) -> None:
        """End it now, and what it has asked for."""
        self.asks_no_more.set()
        self.is_dropped.set()
        self.join()


def _open_mirrored(
    files: Sequence[DiskFile], spec: SampleSpec, index: ArrayBlock, decoder: Decoder | None, mirror: Mirror
) -> MirroredStore:
    return MirroredStore(files, spec, index, decoder, mirror=mirror)


class _Blocks:
    """The blocks of a mirror: where they are in its files, and what is known of each."""

    def __init__(self, folder: Path, files: Sequence[tuple[str, int]]) -> None:
        counts = [_count(size) for _, size in files]
        self.folder, self._files, self._starts = folder, list(files), np.cumsum([0, *counts]).tolist()
        self.firsts = {name: first for (name, _), first in zip(files, self._starts, strict=False)}
        self.count, self._pid = self._starts[-1], os.getpid()
        self.fd = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(self.fd).st_size != 9 * self.count:
                os.ftruncate(self.fd, 9 * self.count)
                os.posix_fallocate(self.fd, 0, 9 * self.count)  # so that it counts from now on
            lock_range(self.fd, fcntl.F_RDLCK, _OPEN, 1)
            mapped = mmap.mmap(self.fd, 9 * self.count)
        except BaseException:
            os.close(self.fd)
            raise
        self.needed_ns = np.frombuffer(mapped, np.int64, self.count)
        self.state = np.frombuffer(mapped, np.uint8, self.count, 8 * self.count)

    @classmethod
    def create(cls, folder: Path, files: Sequence[tuple[str, int]]) -> _Blocks:
        folder.mkdir(parents=True, exist_ok=True)
        for name, size_bytes in files:
            with open(folder / name, "ab") as file:
                file.truncate(size_bytes)
        (folder / _NAMES).write_text(json.dumps(files))
        return cls(folder, files)

    @classmethod
    def open(cls, folder: Path) -> _Blocks | None:
        """Those of a folder that is a mirror."""
        try:
            files = json.loads((folder / _NAMES).read_text())
            is_known = all(re.fullmatch(r"[\w.-]+", name) and size > 0 for name, size in files)
            return cls(folder, files) if is_known and (folder / "blocks").exists() else None
        except (OSError, ValueError, TypeError):
            return None

    def place(self, span: tuple[int, int]) -> tuple[str, int, int]:
        """File, first byte and the one behind the last."""
        number = int(np.searchsorted(self._starts, span[0], side="right")) - 1
        (name, size_bytes), first = self._files[number], self._starts[number]
        return name, (span[0] - first) * BLOCK_BYTES, min((span[1] - first) * BLOCK_BYTES, size_bytes)

    def make_room(self, span: tuple[int, int]) -> None:
        name, start, stop = self.place(span)
        with open(self.folder / name, "r+b") as file:
            os.posix_fallocate(file.fileno(), start, stop - start)
        self.state[slice(*span)] = _ROOM

    def write(self, span: tuple[int, int], data: bytes) -> None:
        name, start, _ = self.place(span)
        self.put(name, start, data)
        self.state[slice(*span)] = _THERE

    def put(self, name: str, start: int, data: bytes) -> None:
        with open(self.folder / name, "r+b", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                written = os.pwrite(file.fileno(), rest, start)
                rest, start = rest[written:], start + written

    def make_holes(self, span: tuple[int, int]) -> int:
        """Make holes of those blocks that nobody needs now; the bytes that they took."""
        lock = self.lock(fcntl.F_WRLCK, span)
        if lock is None:
            middle = (span[0] + span[1]) // 2
            return 0 if middle == span[0] else self.make_holes((span[0], middle)) + self.make_holes((middle, span[1]))
        try:
            freed_bytes = 0
            for first, stop in _runs(self.state[slice(*span)] != _HOLE):
                run = span[0] + first, span[0] + stop
                self.state[slice(*run)] = _HOLE
                name, start, end = self.place(run)
                with open(self.folder / name, "r+b") as file:
                    _punch(file.fileno(), start, end - start)
                freed_bytes += end - start
            return freed_bytes
        finally:
            unlock(lock)

    def lock(self, kind: int, span: tuple[int, int], base: int = 0) -> int | None:
        """Lock blocks until ``unlock`` of the descriptor that is returned; None where others have."""
        fd = os.open(self.folder / "blocks", os.O_RDWR | os.O_CLOEXEC)
        if lock_range(fd, kind, base + span[0], span[1] - span[0]):
            return fd
        os.close(fd)
        return None

    def remove_unused(self) -> None:
        """Remove a mirror that has nothing and that nobody has open."""
        self.close()
        lock = self.lock(fcntl.F_WRLCK, (0, 1), _OPEN)
        if lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            unlock(lock)

    def close(self) -> None:
        if self.fd >= 0:
            if self._pid == os.getpid():  # a forked process has the lock in common with its parent
                lock_range(self.fd, fcntl.F_UNLCK, _OPEN, 1)
            os.close(self.fd)
            self.fd, self.needed_ns, self.state = -1, self.needed_ns[:0].copy(), self.state[:0].copy()


class _Pins:
    """The blocks that a process needs now, and how many of its readers need each."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks, self._guard = blocks, threading.Lock()
        self._counts = np.zeros(blocks.count, np.uint16)
        self._fd = os.open(blocks.folder / "blocks", os.O_RDWR | os.O_CLOEXEC)
        self._holds_all = False

    def change(self, spans: Spans, by: int) -> None:
        with self._guard:
            for first, stop in spans:
                counts = self._counts[first:stop]
                if by > 0:
                    changed = _runs(counts == 0)
                    counts += 1
                else:
                    counts -= 1
                    changed = _runs(counts == 0)
                for start, end in changed if not self._holds_all else ():
                    kind = fcntl.F_RDLCK if by > 0 else fcntl.F_UNLCK
                    lock_range(self._fd, kind, first + start, end - start, wait=True)

    def hold_all(self) -> None:
        with self._guard:
            if not self._holds_all:
                lock_range(self._fd, fcntl.F_RDLCK, 0, self._blocks.count, wait=True)
                self._holds_all = True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _count(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


def _runs(wanted: np.ndarray) -> list[tuple[int, int]]:
    """Where a bool array is true: first of each run, and the one behind its last."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


@contextlib.contextmanager
def _locked(local_cache: Path) -> Iterator[None]:
    local_cache.mkdir(parents=True, exist_ok=True)
    with open(local_cache / ".lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _used_bytes(local_cache: Path) -> int:
    """Of the disk, by all mirrors."""
    used = 0
    for folder in _mirrors(local_cache):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
            used += sum(file.stat().st_blocks * 512 for file in files)
    return used


def _mirrors(local_cache: Path) -> list[Path]:
    with os.scandir(local_cache) as found:
        return [Path(each.path) for each in found if os.path.exists(os.path.join(each.path, _NAMES))]


class _Old(NamedTuple):
    blocks: _Blocks
    numbers: np.ndarray
    needed_ns: np.ndarray


def _free(local_cache: Path, wanted_bytes: int) -> int:
    """Make holes of the blocks that were needed least lately, of any mirror; the bytes that they took."""
    found = []
    for folder in _mirrors(local_cache):
        if (blocks := _Blocks.open(folder)) is not None:
            numbers = np.flatnonzero(blocks.state != _HOLE)
            found.append(_Old(blocks, numbers, blocks.needed_ns[numbers]))
    freed_bytes = 0
    try:
        of = np.concatenate([np.full(len(old.numbers), k) for k, old in enumerate(found)])
        numbers = np.concatenate([old.numbers for old in found])
        order = np.argsort(np.concatenate([old.needed_ns for old in found]), kind="stable")
        at_once = max(_count(wanted_bytes), 1)
        for start in range(0, len(order), at_once):
            if freed_bytes >= wanted_bytes:
                break
            oldest = order[start : start + at_once]
            for k, old in enumerate(found):
                mine = np.sort(numbers[oldest[of[oldest] == k]])
                for run in np.split(mine, np.flatnonzero(np.diff(mine) != 1) + 1) if len(mine) else ():
                    freed_bytes += old.blocks.make_holes((int(run[0]), int(run[-1]) + 1))
    finally:
        for old in found:
            if (old.blocks.state == _HOLE).all():
                old.blocks.remove_unused()
            else:
                old.blocks.close()
    return freed_bytes


def _punch(fd: int, start: int, size: int) -> None:
    """Give the disk back what these bytes take; they read as zeros then."""
    keep_size, punch_hole = 1, 2  # FALLOC_FL_*
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, keep_size | punch_hole, ctypes.c_long(start), ctypes.c_long(size)) != 0:
        number = ctypes.get_errno()
        raise CacheError(f"local_cache= needs a file system that can make holes in files: {os.strerror(number)}")
