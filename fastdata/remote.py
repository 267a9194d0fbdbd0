"""Files behind a URL, in an object store or on a server, with the face of a folder here. The only door to fsspec.

Requests run on fsspec's own event loop, many at once, each repeated with backoff and held against the length that it
must have. A client belongs to the process that made it: a forked one makes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import random
import re
import shutil
import stat
import statistics
import tempfile
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import cache, partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fastdata.errors import RemoteError, is_url
from fastdata.report import log

TRIES = 6
ATTEMPT_S = 30.0
"""What has not ended by then is begun anew: six tries, and the pauses, are over in three and a half minutes."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, TypeError, ValueError)
"""What comes again however often one asks."""
_TAGS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems call that which tells an object from a newer one of its name."""
_S3_DEFAULTS: dict[str, Any] = {"max_pool_connections": 64, "connect_timeout": 5, "read_timeout": 5}
"""Of botocore, whose 10 connections fetch 200 small objects a second at 50 ms each; timeouts are seconds of silence."""
_KNOWN, _ENOUGH, _PATIENCE, _LEAST_PATIENCE_S, _FIRST_PATIENCE_S = 32, 4, 3.0, 0.25, 3.0
"""How many times the median of the latest requests, if these are enough, one takes before it is made a second time."""
_LOOK_S = 0.2
_SAY_S, _SAY_AGAIN_S = 5.0, 30.0
_SAID_S: dict[int, float] = {}
"""When a process last said that something takes long."""
_SMALL_BYTES = 1 << 20
_MOST_EXPECTED = 1024
_FLEETING, _FLEETING_S = "fastdata-remote-", 60.0
_TEXT_BYTES = 4
"""A secret that is shorter is not looked for in messages: every other word would be one."""

_Given = TypeVar("_Given")
_CLIENTS: dict[tuple[int, str, str], Any] = {}
"""By process, protocol and options. Those of a parent stay there: to end them is the parent's."""
_OPTIONS_TRAVEL: ContextVar[bool] = ContextVar("fastdata_options_travel", default=False)


class Entry(NamedTuple):
    """A file: name relative to its place, size, -1 where that is not told, and a number that stands for its content."""

    name: str
    size_bytes: int
    tag: int


@contextlib.contextmanager
def fleeting_folder() -> Iterator[Path]:
    """A folder for files on their way to a URL, or from one; those that killed processes left are removed first."""
    from filelock import FileLock  # 20 ms, which only they take

    _sweep(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=_FLEETING) as folder, FileLock(Path(folder, "lock")):
        yield Path(folder)


@cache  # to look through it takes longer than a sample does
def _sweep(parent: str) -> None:
    from filelock import FileLock

    for left in Path(parent).glob(f"{_FLEETING}*"):
        with contextlib.suppress(OSError):  # a Timeout, too, of one that is in use
            is_own = stat.S_ISDIR(left.lstat().st_mode) and made_by_this_user(left)
            if is_own and time.time() - left.lstat().st_mtime > _FLEETING_S:  # else it may not have its lock yet
                with FileLock(left / "lock").acquire(timeout=0):
                    shutil.rmtree(left)


class _Pace:
    """How long requests of a client take, by which one is told that hangs: another one like it is faster then."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KNOWN)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def patience_s(self) -> float:
        if len(self._seconds) < _ENOUGH:
            return _FIRST_PATIENCE_S
        return min(max(_PATIENCE * statistics.median(self._seconds), _LEAST_PATIENCE_S), ATTEMPT_S)


_PACES: defaultdict[tuple[str, bool], _Pace] = defaultdict(_Pace)
"""By protocol and whether little is asked for."""


class _OtherSizeError(OSError):
    pass


class StorageOptions(dict[str, Any]):
    """What a file system takes, such as credentials: shown nowhere, and pickled empty, unless they are to travel."""

    def __repr__(self) -> str:
        return "{...}" if self else "{}"

    def __reduce__(self) -> tuple[Any, ...]:
        travel = get_spawning_popen() is not None or _OPTIONS_TRAVEL.get()
        return StorageOptions, (dict(self) if travel else {},)


@contextlib.contextmanager
def options_travel() -> Iterator[None]:
    """Let what is pickled in this block carry storage_options: tasks on their way to a worker, never files."""
    token = _OPTIONS_TRAVEL.set(True)
    try:
        yield
    finally:
        _OPTIONS_TRAVEL.reset(token)


class Place:
    """A folder of this machine or behind a URL: its files by relative names, with ``/``.

    Safe from several threads. Pickles without ``storage_options``, which may be secret, unless to a process that is
    being started; without them whatever the environment has is asked for credentials.

    Raises:
        ValueError: the URL holds a password, or a query, which may be one.
        ImportError: the file system of the URL is not installed; says which.
        FileNotFoundError: there is no such file.
        RemoteError: a file cannot be read or written, after all tries.
        OSError: what comes of it is not as long as it must be.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        text = os.fsdecode(url)
        self.is_remote = is_url(text)
        self._options = StorageOptions(storage_options or {})
        self.listed: dict[str, Entry] = {}
        """What was found here, by name, for who asks for facts."""
        if not self.is_remote:
            self.url = os.path.abspath(os.path.expanduser(text.removeprefix("file://")))
            return
        scheme, rest = text.split(":/", 1)
        self.url = f"{scheme}://{rest.lstrip('/').rstrip('/')}"
        server = rest.lstrip("/").partition("/")[0]
        if (":" in server and "@" in server) or (scheme.startswith("http") and "?" in rest):
            raise ValueError(
                f"{scheme}://{server.rpartition('@')[2]}/... holds a password or a query, which messages and caches "
                "would show. Give the plain URL, and the rest as storage_options=."
            )

    def below(self, name: str) -> Place:
        return Place(self.at(name), self._options)

    def beside(self, url: str) -> Place:
        return Place(url, self._options)

    def apart(self) -> tuple[Place, str]:
        """The folder of a file that was given as a place, and its name."""
        folder, _, name = self.url.rpartition("/")
        return self.beside(folder), name

    def __fspath__(self) -> str:
        return self.url

    def at(self, name: str = "") -> str:
        """The path or URL of a file, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __str__(self) -> str:
        return self.url

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "listed": {}}

    # Reading

    def size(self, name: str) -> int:
        if not self.is_remote:
            return os.path.getsize(self.at(name))
        return int(self._submit("info", name).result()["size"])

    def read(self, name: str, start: int = 0, stop: int | None = None, *, size_bytes: int | None = None) -> bytes:
        """The bytes of a file, or those from ``start`` to ``stop``; a whole one of another size is an error."""
        return self.submit(name, start, stop, size_bytes=size_bytes).result()

    def submit(
        self, name: str, start: int = 0, stop: int | None = None, *, size_bytes: int | None = None
    ) -> Future[bytes]:
        """``read``, in the background; there may be any number at once, and each takes the memory of its bytes."""
        if not self.is_remote:
            return _done(partial(_read_local, self.at(name), start, stop))
        wanted_bytes = size_bytes if stop is None else stop - start

        def check(data: bytes) -> None:
            if wanted_bytes is not None and len(data) != wanted_bytes:
                raise _OtherSizeError(f"{len(data):,} bytes came where {wanted_bytes:,} are needed")

        if size_bytes:
            stop = size_bytes + 1  # for a file that has grown to show it; and s3fs asks for its size unless it is told
        span: dict[str, Any] = {"start": start, "end": stop}
        return self._submit("cat_file", name, check=check, pace=self._pace(wanted_bytes or 0), **span)

    def submit_facts(self, name: str) -> Future[tuple[int, int]]:
        """Size and tag of a file; -1 where it is not there."""
        if self.is_remote:
            return self._submit("info", name, then=_facts, missing=(-1, -1), pace=self._pace(0))
        return _done(partial(_local_facts, self.at(name)))

    def find(self, below: str = "") -> list[Entry]:
        """All files below a folder, sorted by name; none where it is not there."""
        return self.submit_find(below).result()

    def submit_find(self, below: str = "") -> Future[list[Entry]]:
        if not self.is_remote:
            return _done(partial(_find_local, self.url, below))
        return self._submit("find", below, then=self._entries, detail=True)

    def folders(self) -> list[str]:
        """The names of the folders right in this one, sorted; FileNotFoundError where nothing is there."""
        if not self.is_remote:
            with os.scandir(self.url) as found:
                return sorted(each.name for each in found if each.is_dir())
        found = self._submit("ls", "", detail=True).result()
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")

    def _entries(self, found: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
        root = len(self._path("")) + 1
        entries = [Entry(path[root:], *_facts(facts)) for path, facts in found.items()]
        self.listed.update((entry.name, entry) for entry in entries)
        return sorted(entries)

    # Writing

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Make these bytes the file, at once and for good: nobody sees half of it."""
        if self.is_remote:
            self._submit("pipe_file", name, bytes(data)).result()
        else:
            _write_local(self.at(name), lambda stream: stream.write(data))

    def upload(self, name: str, path: Path) -> None:
        """Make a copy of a file of this machine the file of that name."""
        if not self.is_remote:
            with path.open("rb") as source:
                _write_local(self.at(name), lambda stream: shutil.copyfileobj(source, stream, 1 << 20))
            return
        self._submit("put_file", str(path), name).result()
        if (there := self.size(name)) != path.stat().st_size:
            raise RemoteError(f"{self.at(name)} has {there:,} bytes after {path.stat().st_size:,} were sent to it")

    def remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if self.is_remote:
                    self._submit("rm_file", name).result()
                else:
                    os.unlink(self.at(name))

    # The client

    def _pace(self, size_bytes: int) -> _Pace:
        return _PACES[self.url.partition("://")[0], size_bytes <= _SMALL_BYTES]

    def _path(self, name: str) -> str:
        return f"{self._client()._strip_protocol(self.url).rstrip('/')}{'/' if name else ''}{name}"

    def _client(self) -> Any:
        import fsspec

        protocol = self.url.partition("://")[0]
        key = os.getpid(), protocol, fsspec.utils.tokenize(dict(self._options))
        if key not in _CLIENTS:
            options: dict[str, Any] = dict(self._options)
            try:
                kind = fsspec.get_filesystem_class(protocol)
                if kind.__module__.partition(".")[0] == "s3fs":
                    options["config_kwargs"] = {**_S3_DEFAULTS, **options.get("config_kwargs", {})}
                _CLIENTS[key] = kind(skip_instance_cache=True, **options)
            except ImportError as missing:
                raise ImportError(f"{self.url} needs a package that is not installed: {missing}") from None
            except ValueError as unknown:
                raise ValueError(f"{self.url} is a URL of a kind that fsspec does not know: {unknown}") from None
        return _CLIENTS[key]

    def _submit(
        self,
        method: str,
        *arguments: Any,
        then: Callable[[Any], Any] = lambda found: found,
        check: Callable[[Any], None] = lambda found: None,
        missing: Any = None,
        pace: _Pace | None = None,
        **options: Any,
    ) -> Future[Any]:
        """Call a method of the client on fsspec's loop; the argument that is a name is made a path."""
        from fsspec.asyn import get_loop

        client = self._client()
        if method in ("find", "ls", "info"):
            client.invalidate_cache()  # of another's listings
        place = len(arguments) - 1 if method == "put_file" else 0
        name = arguments[place]
        arguments = (*arguments[:place], self._path(name), *arguments[place + 1 :])

        async def call() -> Any:
            if client.async_impl:
                found = await getattr(client, f"_{method}")(*arguments, **options)
            else:
                job = partial(getattr(client, method), *arguments, **options)
                found = await asyncio.get_running_loop().run_in_executor(None, job)
            check(found)
            return then(found)

        return asyncio.run_coroutine_threadsafe(self._tried(call, self.at(name), missing, pace), get_loop())

    async def _tried(
        self, call: Callable[[], Coroutine[Any, Any, Any]], url: str, missing: Any, pace: _Pace | None
    ) -> Any:
        problem: Exception = RuntimeError()
        begun_s = time.monotonic()
        for k in range(TRIES):
            if k:
                self._say_that_it_takes_long(url, problem, begun_s)
                pause_s = min(_FIRST_PAUSE_S * 2**k, _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s * (0.5 + random.SystemRandom().random()))
            try:
                return await asyncio.wait_for(call() if pace is None else _hedged(call, pace), ATTEMPT_S)
            except FileNotFoundError:
                if missing is not None:
                    return missing
                raise FileNotFoundError(f"{url} is not there") from None
            except Exception as found:  # noqa: BLE001  # clients raise anything; the last one is told
                problem = found
                if isinstance(found, _FINAL):
                    break
        raise self._error(url, problem, k + 1) from None

    def _say_that_it_takes_long(self, url: str, problem: Exception, begun_s: float) -> None:
        """Once in a while for all requests, of which thousands may fail together; a wrong endpoint takes a minute."""
        now_s = time.monotonic()
        if now_s - begun_s > _SAY_S and now_s - _SAID_S.get(os.getpid(), -math.inf) > _SAY_AGAIN_S:
            _SAID_S[os.getpid()] = now_s
            what = f"{type(problem).__name__}: {self._said(problem)}"
            log.warning("%s has not come in %.0f s and is asked for again: %s", url, now_s - begun_s, what)

    def _said(self, problem: Exception) -> str:
        said = str(problem) or (f"no answer in {ATTEMPT_S:.0f} s" if isinstance(problem, TimeoutError) else "")
        for secret in _texts(self._options):
            said = said.replace(secret, "***")
        return said

    def _error(self, url: str, problem: Exception, tries: int) -> Exception:
        """Without its cause, whose text and traceback may show credentials."""
        if isinstance(problem, ImportError):
            return problem
        said = self._said(problem)
        if isinstance(problem, _OtherSizeError):
            return OSError(
                f"{url}: {problem} (tried {tries} times): it was changed since it was listed, or is cut short"
            )
        cure = "Look at the network, and run again"
        if isinstance(problem, PermissionError) or "redential" in said:
            cure = "Give credentials that are valid and allow it, in the environment or as storage_options="
        again = f" (tried {tries} times)" if tries > 1 else ""
        return RemoteError(f"{url}: {type(problem).__name__}: {said.rstrip('.')}{again}. {cure}.")


async def _hedged(call: Callable[[], Coroutine[Any, Any, Any]], pace: _Pace) -> Any:
    """Make a request, and a second one beside it if it takes too long; the first answer counts.

    After Dean and Barroso, "The Tail at Scale", CACM 2013.
    """
    begun_s = time.monotonic()
    requests = [asyncio.ensure_future(call())]
    try:
        while not requests[0].done() and (left_s := begun_s + pace.patience_s() - time.monotonic()) > 0:
            await asyncio.wait(requests, timeout=min(left_s, _LOOK_S))  # others that end meanwhile tell the pace
        if not requests[0].done():
            requests.append(asyncio.ensure_future(call()))
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        answered = [request for request in requests if request.done()]
        if len(answered) == 1 and answered[0].exception() is not None:
            await asyncio.wait(requests)
        answer = next((request for request in requests if request.done() and request.exception() is None), requests[0])
        found = answer.result()
        pace.add(time.monotonic() - begun_s)
        return found
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


class Coming:
    """Files, or pieces of them, that were asked for and not read yet: by index, of the process that asked."""

    def __init__(self) -> None:
        self._pid, self._futures = 0, dict[int, "Future[bytes]"]()

    def here(self) -> dict[int, Future[bytes]]:
        if self._pid != os.getpid():  # what a parent waits for never comes here
            self._pid, self._futures = os.getpid(), {}
        return self._futures

    def expect(self, indices: Sequence[int], submit: Callable[[int], Future[bytes] | None]) -> None:
        """Ask for these, unless they are asked for, or ``submit`` finds that they cannot come by themselves."""
        coming = self.here()
        for index in indices:
            if index not in coming and (future := submit(index)) is not None:
                coming[index] = future
        while len(coming) > max(_MOST_EXPECTED, len(indices)):  # of readers that gave up
            with contextlib.suppress(KeyError, StopIteration):
                coming.pop(next(iter(coming))).cancel()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Coming, ()


def _facts(found: Mapping[str, Any]) -> tuple[int, int]:
    """Size and tag of a file, as its file system tells them."""
    tag = next((str(found[name]) for name in _TAGS if found.get(name) is not None), "")
    size, digest = found.get("size"), hashlib.blake2b(tag.encode(), digest_size=8).digest()
    return -1 if size is None else int(size), int.from_bytes(digest, "little") >> 1


def _local_facts(path: str) -> tuple[int, int]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    return -1, -1


def _texts(options: Any) -> Iterator[str]:
    """What may be secret in options: their texts, inside of what is nested, too."""
    if isinstance(options, Mapping):
        for value in options.values():
            yield from _texts(value)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _texts(value)
    elif isinstance(options, str) and len(options) >= _TEXT_BYTES and not re.match(r"https?://", options):
        yield options


def _done(job: Callable[[], _Given]) -> Future[_Given]:
    future: Future[_Given] = Future()
    try:
        future.set_result(job())
    except Exception as problem:  # noqa: BLE001  # raised by whoever asks for the result
        future.set_exception(problem)
    return future


def made_by_this_user(path: Path) -> bool:
    """Whether a file, or the link itself where it is one, is this user's; always so on Windows."""
    return not hasattr(os, "getuid") or path.lstat().st_uid == os.getuid()


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a pipe, a socket or a device, to open or read which may take for ever."""
    if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
        raise OSError(f"{os.fspath(path)} is no file, but a pipe, a socket or a device")


def _read_local(path: str, start: int, stop: int | None) -> bytes:
    refuse_special(path)
    with open(path, "rb") as stream:
        stream.seek(start)
        data = stream.read() if stop is None else stream.read(stop - start)
    if stop is not None and len(data) != stop - start:
        raise OSError(f"{path}: {len(data):,} bytes from {start:,} on, where {stop - start:,} are needed")
    return data


def _find_local(root: str, below: str) -> list[Entry]:
    entries = []
    for folder, _, names in os.walk(os.path.join(root, below)):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(path)
                entries.append(Entry(os.path.relpath(path, root), found.st_size, found.st_mtime_ns))
    return sorted(entries)


def _write_local(path: str, write: Callable[[Any], object]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fresh = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.new")  # with the user's umask, as any file
    try:
        with open(fresh, "xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise
