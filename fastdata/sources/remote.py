"""Files behind a URL, in an object store or on a server, with the face of a folder here. The only door to fsspec.

Requests run on fsspec's own event loop, many at once, each tried twice and held against the length
that it must have. A client belongs to the process that made it: a forked one makes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import cache, partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from fastdata.errors import RemoteError, is_url
from fastdata.report import log

ATTEMPT_S = 60.0
"""What has not ended by then is begun anew, once. Clients repeat what servers refuse for a moment
themselves."""
_PAUSE_S = 0.5
_WARN_EVERY_S = 30.0
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    TypeError,
    ValueError,
)
"""What comes again however often one asks."""
_TAGS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""What file systems call that which tells an object from a newer one of its name."""
_S3_DEFAULTS: dict[str, Any] = {"max_pool_connections": 64, "connect_timeout": 5, "read_timeout": 5}
"""Of botocore, whose 10 connections fetch 200 small objects a second at 50 ms each; timeouts are
seconds of silence."""
_READ_AHEAD_BYTES = 8 << 20
"""Read at once of a file that is gone through: as much as comes in two round trips."""
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
            if (
                is_own and time.time() - left.lstat().st_mtime > _FLEETING_S
            ):  # else it may not have its lock yet
                with FileLock(left / "lock").acquire(timeout=0):
                    shutil.rmtree(left)


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

    Safe from several threads. Pickles without ``storage_options``, which may be secret, unless to a
    process that is being started; without them whatever the environment has is asked for
    credentials.

    Raises:
        ValueError: the URL holds a password, or a query, which may be one.
        ImportError: the file system of the URL is not installed; says which.
        FileNotFoundError: there is no such file.
        RemoteError: a file cannot be read or written, tried twice.
        OSError: what comes of it is not as long as it must be.
    """

    _warned_s: ClassVar[float] = -math.inf

    def __init__(
        self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
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
        return int(
            self._submit(name, lambda client, path: _call(client, "info", path)).result()["size"]
        )

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, size_bytes: int | None = None
    ) -> bytes:
        """The bytes of a file, or those from ``start`` to ``stop``; a whole one of another size is an error."""
        return self.submit(name, start, stop, size_bytes=size_bytes).result()

    def submit(
        self, name: str, start: int = 0, stop: int | None = None, *, size_bytes: int | None = None
    ) -> Future[bytes]:
        """``read``, in the background; there may be any number at once, and each takes the memory of its bytes."""
        if not self.is_remote:
            return _done(partial(_read_local, self.at(name), start, stop))
        wanted_bytes = size_bytes if stop is None else stop - start
        # One byte more lets a file that has grown show it; and s3fs asks for the size unless it is
        # told one.
        end = size_bytes + 1 if size_bytes else stop

        async def fetch(client: Any, path: str) -> bytes:
            data: bytes = await _call(client, "cat_file", path, start=start, end=end)
            if wanted_bytes is not None and len(data) != wanted_bytes:
                raise _OtherSizeError(f"{len(data):,} bytes came where {wanted_bytes:,} are needed")
            return data

        return self._submit(name, fetch)

    def open(self, name: str) -> Any:
        """A stream of a file's bytes that can seek."""
        if not self.is_remote:
            return open(self.at(name), "rb")
        client = self._client()
        return client.open(self._path(client, name), "rb", block_size=_READ_AHEAD_BYTES)

    def submit_facts(self, name: str) -> Future[tuple[int, int]]:
        """Size and tag of a file; -1 where it is not there."""
        if not self.is_remote:
            return _done(partial(_local_facts, self.at(name)))

        async def look(client: Any, path: str) -> tuple[int, int]:
            try:
                return _facts(await _call(client, "info", path))
            except FileNotFoundError:
                return -1, -1

        return self._submit(name, look)

    def find(self, below: str = "") -> list[Entry]:
        """All files below a folder, sorted by name; none where it is not there."""
        return self.submit_find(below).result()

    def submit_find(self, below: str = "") -> Future[list[Entry]]:
        if not self.is_remote:
            return _done(partial(_find_local, self.url, below))

        async def find(client: Any, path: str) -> list[Entry]:
            found = await _call(client, "find", path, detail=True)
            root_length = len(client._strip_protocol(self.url).rstrip("/")) + 1
            entries = [Entry(path[root_length:], *_facts(facts)) for path, facts in found.items()]
            self.listed.update((entry.name, entry) for entry in entries)
            return sorted(entries)

        return self._submit(below, find)

    def folders(self) -> list[str]:
        """The names of the folders right in this one, sorted; FileNotFoundError where nothing is there."""
        if not self.is_remote:
            with os.scandir(self.url) as found:
                return sorted(each.name for each in found if each.is_dir())
        found = self._submit(
            "", lambda client, path: _call(client, "ls", path, detail=True)
        ).result()
        return sorted(
            each["name"].rstrip("/").rpartition("/")[2]
            for each in found
            if each["type"] == "directory"
        )

    # Writing

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Make these bytes the file, at once and for good: nobody sees half of it."""
        if self.is_remote:
            self._submit(
                name, lambda client, path: _call(client, "pipe_file", path, bytes(data))
            ).result()
        else:
            _write_local(self.at(name), lambda stream: stream.write(data))

    def upload(self, name: str, path: Path) -> None:
        """Make a copy of a file of this machine the file of that name."""
        if not self.is_remote:
            with path.open("rb") as source:
                _write_local(
                    self.at(name), lambda stream: shutil.copyfileobj(source, stream, 1 << 20)
                )
            return
        self._submit(
            name, lambda client, target: _call(client, "put_file", str(path), target)
        ).result()
        if (there := self.size(name)) != path.stat().st_size:
            raise RemoteError(
                f"{self.at(name)} has {there:,} bytes after {path.stat().st_size:,} were sent to it"
            )

    def remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if self.is_remote:
                    self._submit(name, lambda client, path: _call(client, "rm_file", path)).result()
                else:
                    os.unlink(self.at(name))

    # The client

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
                raise ImportError(
                    f"{self.url} needs a package that is not installed: {missing}"
                ) from None
            except ValueError as unknown:
                raise ValueError(
                    f"{self.url} is a URL of a kind that fsspec does not know: {unknown}"
                ) from None
        return _CLIENTS[key]

    def _path(self, client: Any, name: str) -> str:
        root = client._strip_protocol(self.url).rstrip("/")
        return "/".join(part for part in (root, name) if part)

    def _submit(
        self, name: str, request: Callable[[Any, str], Awaitable[_Given]]
    ) -> Future[_Given]:
        """Make a request, of the client and the path of a file, on fsspec's loop."""
        from fsspec.asyn import get_loop

        client = self._client()
        path = self._path(client, name)
        return asyncio.run_coroutine_threadsafe(
            self._request(partial(request, client, path), self.at(name)), get_loop()
        )

    async def _request(self, call: Callable[[], Awaitable[_Given]], url: str) -> _Given:
        for tries in (1, 2):
            try:
                return await asyncio.wait_for(call(), ATTEMPT_S)
            except FileNotFoundError:
                raise FileNotFoundError(f"{url} is not there") from None
            except Exception as problem:  # noqa: BLE001  # clients raise anything
                if tries == 2 or isinstance(problem, _FINAL):
                    raise self._error(url, problem, tries) from None
                self._warn(url, problem)
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError

    def _warn(self, url: str, problem: Exception) -> None:
        """Once in a while for all requests, of which thousands may fail together."""
        now_s = time.monotonic()
        if now_s - Place._warned_s > _WARN_EVERY_S:
            Place._warned_s = now_s
            log.warning(
                "%s has not come and is asked for again: %s",
                url,
                f"{type(problem).__name__}: {self._said(problem)}",
            )

    def _said(self, problem: Exception) -> str:
        said = str(problem) or (
            f"no answer in {ATTEMPT_S:.0f} s" if isinstance(problem, TimeoutError) else ""
        )
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
                f"{url}: {problem} (tried twice): it was changed since it was listed, or is cut short"
            )
        cure = "Look at the network, and run again"
        if isinstance(problem, PermissionError) or "redential" in said:
            cure = "Give credentials that are valid and allow it, in the environment or as storage_options="
        again = " (tried twice)" if tries == 2 else ""
        return RemoteError(f"{url}: {type(problem).__name__}: {said.rstrip('.')}{again}. {cure}.")


async def _call(client: Any, method: str, *arguments: Any, **options: Any) -> Any:
    if method in ("find", "ls", "info"):
        client.invalidate_cache()  # of another's listings
    if client.async_impl:
        return await getattr(client, f"_{method}")(*arguments, **options)
    job = partial(getattr(client, method), *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(None, job)


class Coming:
    """Files, or pieces of them, that were asked for and not read yet: by index, of the process that asked."""

    def __init__(self) -> None:
        self._pid, self._futures = 0, dict[int, "Future[bytes]"]()

    def here(self) -> dict[int, Future[bytes]]:
        if self._pid != os.getpid():  # what a parent waits for never comes here
            self._pid, self._futures = os.getpid(), {}
        return self._futures

    def take(self, index: int, submit: Callable[[int], Future[bytes]]) -> Future[bytes]:
        """What was asked for, or is now."""
        future = self.here().pop(index, None)
        return submit(index) if future is None else future

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
    elif (
        isinstance(options, str)
        and len(options) >= _TEXT_BYTES
        and not re.match(r"https?://", options)
    ):
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
        raise OSError(
            f"{path}: {len(data):,} bytes from {start:,} on, where {stop - start:,} are needed"
        )
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
    # With the user's umask, as any file.
    fresh = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.new")
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
