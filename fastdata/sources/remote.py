"""Files behind a URL, with the interface of a folder. The only module that imports fsspec.

Requests run on fsspec's own event loop, many at once. Each is tried twice, and its answer must have
the length that is needed. A client belongs to the process that made it: a forked one makes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import posixpath
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import cache
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from torch.utils import _pytree as pytree

from fastdata.errors import RemoteError
from fastdata.paths import (
    AnyPath,
    hide_secrets,
    is_url,
    local_path,
    open_file,
    refuse_chain,
    refuse_secrets,
)
from fastdata.report import log

ATTEMPT_S = 60.0
"""A request that has not ended by then is made again, once. Clients themselves repeat requests
that servers refuse for a moment."""
_PAUSE_S = 0.5
FINAL = (
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileNotFoundError,
    ImportError,
    RemoteError,
    TypeError,
    ValueError,
)
"""Errors that a second request would raise again."""
_GONE = (404, 410)
_REFUSED = (401, 403)
"""Answers of HTTP servers."""
_OTHER_SERVER = "Copy the file to a local disk, or give it by a server that does."
MISSING = (-1, -1)
"""Size and tag of a file that does not exist. A file that exists always has a tag."""
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
"""Metadata keys that identify the version of a remote object."""
_S3_DEFAULTS = {"max_pool_connections": 64, "connect_timeout": 5, "read_timeout": 5}
"""Options of botocore. Its usual 10 connections fetch 200 small objects a second at 50 ms each.
Timeouts are seconds of silence."""
_READ_AHEAD_BYTES = 8 << 20
"""Bytes read at once of a file that is read from start to end, as much as comes in two round trips."""
_MOST_EXPECTED = 1024
_FLEETING = "fastdata-remote-"
_FLEETING_S = 60.0
_TEXT_BYTES = 4
"""Shortest secret that is looked for in messages; a shorter one could be part of any word."""

_CLIENTS: dict[tuple[int, str, str], Any] = {}
"""Clients by process, protocol and options. A forked process leaves those of its parent alone:
their connections and threads are the parent's."""
_OPTIONS_TRAVEL = ContextVar("fastdata_options_travel", default=False)


StorageChoice = Mapping[str, Any] | None
Facts = tuple[int, int]
"""Size of a file, -1 if unknown, and a number that changes with its content."""


@contextlib.contextmanager
def fleeting_folder() -> Iterator[Path]:
    """Make a folder for files on their way to or from a URL, and remove those of killed processes."""
    from filelock import FileLock  # takes 20 ms, which other uses of this module need not wait

    _sweep(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=_FLEETING) as folder, FileLock(Path(folder, "lock")):
        yield Path(folder)


@cache  # looking through a folder of temporary files takes longer than reading a sample
def _sweep(parent: str) -> None:
    from filelock import FileLock

    for left in Path(parent).glob(f"{_FLEETING}*"):
        with contextlib.suppress(OSError):  # also Timeout, for a folder that is in use
            found = left.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and made_by_this_user(left)
            # A folder that was just made may have no lock yet.
            if is_own and time.time() - found.st_mtime > _FLEETING_S:
                with FileLock(left / "lock").acquire(timeout=0):
                    shutil.rmtree(left)


class StorageOptions(dict[str, Any]):
    """Options of a file system, such as credentials: never shown, and pickled empty by default."""

    def __repr__(self) -> str:
        return "{...}" if self else "{}"

    def __reduce__(self) -> Any:
        travel = get_spawning_popen() is not None or _OPTIONS_TRAVEL.get()
        return StorageOptions, (dict(self) if travel else {},)

    def __copy__(self) -> StorageOptions:
        return StorageOptions(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StorageOptions:
        """Keep all: a copy stays in this process. Options such as sessions cannot be copied."""
        return StorageOptions(self)


@contextlib.contextmanager
def options_travel() -> Iterator[None]:
    """Let pickles made in this block carry storage_options: tasks for workers, never files.

    A context variable, because pickle passes no arguments to ``__reduce__``.
    """
    token = _OPTIONS_TRAVEL.set(True)
    try:
        yield
    finally:
        _OPTIONS_TRAVEL.reset(token)


class Place:
    """A folder of this machine or behind a URL, with its files by relative names.

    Safe to use from several threads. Pickles without ``storage_options``, which may be secret,
    unless for a process that is being started. A copy without them takes credentials from the
    environment.

    Attributes:
        listed: size and tag of files that were just listed, by URL.

    Raises:
        ValueError: the URL holds a password, a token or a query; see ``refuse_secrets``.
        ImportError: the file system of the URL is not installed; says which.
        FileNotFoundError: there is no such file.
        RemoteError: a file cannot be read or written, tried twice.
        OSError: what comes of it is not as long as it must be.
    """

    def __init__(self, url: AnyPath, storage_options: StorageChoice = None) -> None:
        text = os.fsdecode(url)
        self.is_remote = is_url(text)
        self.listed: dict[str, Facts] = {}
        self._options = StorageOptions(storage_options or {})
        if not os.path.exists(text):
            refuse_secrets(text)
        if not self.is_remote:
            self.url = os.path.abspath(local_path(text))
            return
        refuse_chain(text)
        scheme, rest = text.split(":/", 1)
        rest = rest.strip("/")
        self.url = f"{scheme}://{rest}"

    def at(self, name: str = "") -> str:
        """The path or URL of a file; "" is the place itself."""
        return f"{self.url}/{name}" if name else self.url

    def below(self, name: str) -> Place:
        return Place(self.at(name), self._options)

    def locate(self, url: str) -> tuple[Place, str]:
        """Return the folder of a file, which is this one for most files, and the file's name."""
        name = url.removeprefix(f"{self.url}/")
        if name != url:
            return self, name
        folder, _, name = url.rpartition("/")
        return Place(folder, self._options), name

    def __fspath__(self) -> str:
        return self.url

    __str__ = __repr__ = __fspath__

    # Reading

    def read(self, name: str) -> bytes:
        return self.submit(name).result()

    def submit(
        self, name: str, start: int = 0, stop: int | None = None, *, size_bytes: int | None = None
    ) -> Future[bytes]:
        """Read a file, or its bytes from ``start`` to ``stop``, in the background.

        Any number of requests may run at once. A file of another size than ``size_bytes`` is an
        error.
        """
        wanted_bytes = size_bytes if stop is None else stop - start
        # One byte more shows that a file has grown. s3fs asks for the size of a whole file unless
        # it is given an end, and takes twice as much CPU if it is given no start.
        end = size_bytes + 1 if size_bytes else stop

        def check(data: bytes) -> bytes:
            if stop is not None and len(data) > stop - start:
                raise RemoteError(
                    f"{self.at(name)}: {len(data):,} bytes came where {stop - start:,} were asked "
                    f"for: its server gives no parts of files (it ignores Range). {_OTHER_SERVER}"
                )
            if wanted_bytes not in (None, len(data)):
                raise SizeError(
                    f"{self.at(name)}: {len(data):,} bytes came where {wanted_bytes:,} are needed: "
                    "it was changed since it was listed, or is cut short"
                )
            return data

        return self._submit("cat_file", name, start=start, end=end, then=check)

    def open(self, name: str) -> Any:
        """Open a stream of a file's bytes that can seek."""
        if not self.is_remote:
            return open(self.at(name), "rb", opener=open_file)
        client = self._client()
        url = self.at(name)
        failure: Exception
        try:
            stream = client.open(self._path(client, name), "rb", block_size=_READ_AHEAD_BYTES)
        except Exception as problem:  # noqa: BLE001  # clients raise anything
            failure = final_error(url, true_cause(problem), self._options)
        else:
            if getattr(stream, "size", 0) is not None:
                return stream
            stream.close()
            failure = RemoteError(
                f"{url} can only be read from its start to its end: its server does not tell how "
                "large it is (Content-Length), or gives no parts of files (Accept-Ranges: none). "
                f"{_OTHER_SERVER}"
            )
        raise failure  # without the client's error, which may show credentials

    def find(self, below: str = "", **options: Any) -> Future[dict[str, Facts]]:
        """Find all files below a folder, by name; none if there is no such folder.

        Behind a URL, ``maxdepth=`` limits how many levels are listed.
        """

        def facts_by_name(files: Mapping[str, Any]) -> dict[str, Facts]:
            above = len(self._path(self._client(), "")) + 1
            return {path[above:]: _facts(files[path]) for path in sorted(files)}

        return self._submit(
            "find", self._escaped(below), detail=True, then=facts_by_name, **options
        )

    def folders(self) -> list[str]:
        """Return the names of the folders in this one, sorted.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        if not self.is_remote:
            with os.scandir(self.url) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        listed = self._submit("ls", "", detail=True).result()
        paths = (each["name"].rstrip("/") for each in listed if each["type"] == "directory")
        return sorted(self.unescaped(posixpath.basename(path)) for path in paths)

    def unescaped(self, name: str) -> str:
        """Return a name without escapes: over HTTP, files are listed by their escaped URLs."""
        return unquote(name) if self._is_http else name

    def _escaped(self, name: str) -> str:
        return quote(name) if self._is_http else name

    @property
    def _is_http(self) -> bool:
        return self.is_remote and self.url.startswith(("http://", "https://"))

    # Writing

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: a reader finds the old file or all of the new one."""
        self._submit("pipe_file", name, data).result()

    def upload(self, name: str, path: Path) -> None:
        """Copy a file of this machine to a file behind a URL."""
        self._submit("put_file", name, source=(str(path),)).result()

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._submit("rm_file", name).result()

    # The client

    def _client(self) -> Any:
        if not self.is_remote:
            return LocalFiles
        import fsspec

        protocol = self.url.partition("://")[0]
        kind = fsspec.get_filesystem_class(protocol)
        # URLs hold more than a path: host, port and user of SFTP, organisation of GitHub.
        options = {**kind._get_kwargs_from_urls(self.url), **self._options}
        key = os.getpid(), protocol, fsspec.utils.tokenize(options)
        if key not in _CLIENTS:
            if kind.__module__.partition(".")[0] == "s3fs":
                options["config_kwargs"] = {**_S3_DEFAULTS, **options.get("config_kwargs", {})}
            _CLIENTS[key] = self._make_client(kind, options)
        return _CLIENTS[key]

    def _make_client(self, kind: Any, options: Mapping[str, Any]) -> Any:
        failure: Exception
        try:
            return kind(skip_instance_cache=True, **options)
        except ImportError as problem:  # a package that the file system needs is not installed
            failure = problem
        except Exception as problem:  # noqa: BLE001  # gcsfs calls a token a missing file
            failure = RemoteError(
                f"{self.url} cannot be opened: {shown_error(problem, self._options)}. Look at "
                "storage_options=, and at the credentials in the environment."
            )
        raise failure  # without the client's error, which may show credentials

    def _path(self, client: Any, name: str) -> str:
        root = client._strip_protocol(self.url).rstrip("/")
        return f"{root}/{name}" if name else root

    def _submit(
        self,
        method: str,
        name: str,
        *arguments: Any,
        source: tuple[str, ...] = (),
        then: Callable[[Any], Any] = lambda result: result,
        **options: Any,
    ) -> Future[Any]:
        """Call a method of the client with the path of a file, and ``then`` with the result.

        A local call ends before this returns. A remote one runs on fsspec's event loop.
        """
        client = self._client()
        arguments = (*source, self._path(client, name), *arguments)
        url = self.at(name)

        async def request() -> Any:
            failure: Exception = RemoteError(url)
            for again in ("", " (tried twice)"):
                if again:
                    log.info("asked for again after: %s", failure)
                    await asyncio.sleep(_PAUSE_S)
                try:
                    if method in ("find", "ls", "info"):
                        client.invalidate_cache()  # listings of another request may be old
                    if client.async_impl:
                        answer = getattr(client, f"_{method}")(*arguments, **options)
                    else:
                        answer = asyncio.to_thread(getattr(client, method), *arguments, **options)
                    return then(await asyncio.wait_for(answer, ATTEMPT_S))
                except Exception as problem:  # noqa: BLE001  # clients raise anything
                    cause = true_cause(problem)
                    failure = final_error(url, cause, self._options, again)
                    if isinstance(cause, FINAL):
                        break
            # Raised outside of the except block, so that it has neither cause nor context: the text
            # and the traceback of a client's error may show credentials.
            raise failure

        if self.is_remote:
            from fsspec.asyn import get_loop

            return asyncio.run_coroutine_threadsafe(request(), get_loop())
        future: Future[Any] = Future()
        try:
            future.set_result(then(getattr(client, method)(*arguments, **options)))
        except Exception as problem:  # noqa: BLE001  # raised when the result is read
            # A traceback would hold this frame, which holds the future: a circle that keeps the
            # callers' memory until the garbage collector runs.
            future.set_exception(problem.with_traceback(None))
        return future


class SizeError(OSError):
    """A file has another size than it was listed with."""


def true_cause(problem: Exception) -> Exception:
    """Return the error behind a FileNotFoundError of fsspec's HTTP, which it raises for any answer."""
    cause = problem.__cause__
    is_from_http = type(cause).__module__.partition(".")[0] == "aiohttp"
    if isinstance(problem, FileNotFoundError) and is_from_http:
        assert isinstance(cause, Exception)
        status = getattr(cause, "status", None)
        return problem if status in _GONE else cause
    return problem


def final_error(
    url: str, problem: Exception, options: Mapping[str, Any], again: str = ""
) -> Exception:
    """Return the error to raise instead of a client's, with the URL and what to do."""
    if isinstance(problem, FileNotFoundError):
        return FileNotFoundError(f"{url} is not there")
    if isinstance(problem, ImportError | RemoteError | SizeError):
        return problem
    said = shown_error(problem, options)
    cure = "Look at the network, and run again"
    is_refused = isinstance(problem, PermissionError) or "redential" in said
    if is_refused or getattr(problem, "status", None) in _REFUSED:
        cure = (
            "Give credentials that are valid and allow it, in the environment or as "
            "storage_options="
        )
    return RemoteError(f"{url}: {said}{again}. {cure}.")


def shown_error(problem: Exception, options: Mapping[str, Any]) -> str:
    """Return the text of an error, without the secrets of URLs and of ``storage_options``."""
    said = hide_secrets(str(problem))
    if isinstance(problem, TimeoutError):
        said = said or "no answer in time"
    for text in pytree.tree_leaves(dict(options)):
        is_text = isinstance(text, str) and len(text) >= _TEXT_BYTES
        if is_text and not text.startswith(("http://", "https://")):
            said = said.replace(text, "***").replace(quote(text, safe=""), "***")
    return f"{type(problem).__name__}: {said.rstrip('.')}"


def facts_of(files: Iterable[tuple[Place, str]]) -> list[Facts]:
    """Return size and tag of files, all requested at once; ``MISSING`` for one that is not there."""
    asked = [place._submit("info", name, then=_facts) for place, name in files]
    found = []
    for future in asked:
        is_missing = isinstance(future.exception(), FileNotFoundError | NotADirectoryError)
        found.append(MISSING if is_missing else future.result())
    return found


def _facts(info: Mapping[str, Any]) -> Facts:
    tag = next((str(info[name]) for name in _TAGS if info.get(name) is not None), "")
    digest = hashlib.blake2b(tag.encode(), digest_size=8).digest()
    size = info.get("size")
    return -1 if size is None else int(size), int.from_bytes(digest, "little") >> 1


Submit = Callable[[int], Future[bytes]]
"""Requests the file of a sample, or the sample's part of a file."""


class Requests(dict[tuple[int, int], Future[bytes]]):
    """Samples that were requested and not read yet, by process and index.

    A forked process makes its own requests: the answers to those of its parent never reach it.
    """

    def take(self, index: int, submit: Submit) -> Future[bytes]:
        """Return the request for a sample, made earlier or now."""
        return self.pop((os.getpid(), index), None) or submit(index)

    def expect(self, indices: Sequence[int], submit: Submit) -> None:
        pid = os.getpid()
        for index in indices:
            if (pid, index) not in self:
                self[pid, index] = submit(index)
        # Readers that stopped early left requests that nothing will take.
        own = [key for key in list(self) if key[0] == pid]
        for key in own[: -max(_MOST_EXPECTED, len(indices))]:
            self.pop(key, Future()).cancel()

    def __reduce__(self) -> Any:
        return Requests, ()


class LocalFiles:
    """Files of this machine, with the methods of fsspec's file systems that ``Place`` calls."""

    @staticmethod
    def _strip_protocol(url: str) -> str:
        return url

    @staticmethod
    def info(path: str) -> dict[str, int]:
        found = os.stat(path)
        return {"size": found.st_size, "mtime": found.st_mtime_ns}

    @classmethod
    def find(cls, top: str, *, detail: bool) -> dict[str, dict[str, int]]:
        files = {}
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    files[path] = cls.info(path)
        return files

    @staticmethod
    def cat_file(path: str, start: int, end: int | None) -> bytes:
        with open(path, "rb", opener=open_file) as stream:
            stream.seek(start)
            return stream.read(-1 if end is None else end - start)

    @staticmethod
    def pipe_file(path: str, data: bytes) -> None:
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        fresh = os.path.join(folder, f".{uuid.uuid4().hex}.new")
        try:
            with open(fresh, "xb") as stream:  # with the user's umask, as any file
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(fresh, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)

    rm_file = staticmethod(os.unlink)


def made_by_this_user(path: Path) -> bool:
    """Return True if a file, or a link itself, belongs to this user. Always True on Windows."""
    return not hasattr(os, "getuid") or path.lstat().st_uid == os.getuid()


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can write to; return it.

    Raises:
        PermissionError: a link, or a folder that others can write to, has this name.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    is_open = hasattr(os, "getuid") and found.st_mode & 0o022
    if is_open or not stat.S_ISDIR(found.st_mode) or not made_by_this_user(path):
        raise PermissionError(
            errno.EPERM,
            "a link, or a folder of another user or that others can write to, is in the place of "
            "a folder of this user: remove it, or give another local_cache=",
            str(path),
        )
    return path
