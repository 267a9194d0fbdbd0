"""Files behind a URL, with the interface of a folder. The only module that imports fsspec.

Requests run on fsspec's own event loop, many at once. Each is tried twice, and its answer must have
the expected length. A client belongs to the process that made it; a forked process makes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from fastdata.errors import RemoteError
from fastdata.paths import AnyPath, is_url, local_path, open_file, refuse_chain, refuse_secrets
from fastdata.report import log
from fastdata.sources.local_files import LocalFiles
from fastdata.sources.remote_errors import FINAL, SizeError, final_error, shown_error, true_cause
from fastdata.sources.storage_options import StorageOptions

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from fastdata.sources.storage_options import StorageChoice


ATTEMPT_S = 60.0
"""Seconds after which an unanswered request is made again, once. The clients also repeat requests
that a server refuses for a moment."""

_SLOWEST_UPLOAD_BYTES = 1 << 20
"""Bytes that an upload sends in a second at least: a large file may take longer than ATTEMPT_S."""

_PAUSE_S = 0.5

_OTHER_SERVER = "Copy the file to a local disk, or use a server that can."

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
"""Options of botocore. Its default of 10 connections fetches only 200 small objects per second if
each takes 50 ms. Timeouts are seconds without a byte."""

_READ_AHEAD_BYTES = 8 << 20
"""Bytes read at once from a file that is read to its end; they come in two round trips."""


_CLIENTS: dict[tuple[int, str, str], AbstractFileSystem] = {}
"""Clients by process number, protocol and options. A forked process does not use those of its
parent, because their connections and threads belong to the parent."""

FileStat = tuple[int, int]
"""Size of a file in bytes, -1 if unknown, and a tag: a number that changes with its content."""


class Place:
    """A folder of this machine or behind a URL, with its files by relative names.

    Safe to use from several threads. A pickle has no ``storage_options``, which may be secret,
    except for a process that is being started. An unpickled place without them takes credentials
    from the environment.

    Attributes:
        listed: size and tag of files that were just listed, by URL.

    Raises:
        ValueError: the URL holds a password, a token or a query; see ``refuse_secrets``.
        ImportError: the file system of the URL is not installed. The message names the package.
        FileNotFoundError: the file does not exist.
        RemoteError: a file cannot be read or written, even the second time.
        OSError: an answer does not have the expected length.
    """

    def __init__(self, url: AnyPath, storage_options: StorageChoice = None) -> None:
        text = os.fsdecode(url)
        self.is_remote = is_url(text)
        self.listed: dict[str, FileStat] = {}
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
        """Return the path or URL of a file; with "" that of the folder itself."""
        return f"{self.url}/{name}" if name else self.url

    def below(self, name: str) -> Place:
        return Place(self.at(name), self._options)

    def locate(self, url: str) -> tuple[Place, str]:
        """Return the folder of a file, which is ``self`` for most files, and the file's name."""
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

        Any number of requests may run at once. It is an error if the file has another size than
        ``size_bytes``.
        """
        wanted_bytes = size_bytes if stop is None else stop - start
        # One byte more than expected is requested, to notice a file that has grown. Without an end,
        # s3fs would request the size of the file first. Without a start, s3fs takes twice the CPU
        # time.
        end = size_bytes + 1 if size_bytes else stop

        def check(data: bytes) -> bytes:
            if stop is not None and len(data) > stop - start:
                raise RemoteError(
                    f"{self.at(name)}: {stop - start:,} bytes were requested, but {len(data):,} "
                    "came: its server cannot send parts of files (it ignores Range). "
                    f"{_OTHER_SERVER}"
                )
            if wanted_bytes not in (None, len(data)):
                raise SizeError(
                    f"{self.at(name)}: {wanted_bytes:,} bytes were expected, but {len(data):,} "
                    "came: the file was changed after it was listed, or it is cut off"
                )
            return data

        return self._submit("cat_file", name, start=start, end=end, then=check)

    def open(self, name: str) -> IO[bytes]:
        """Open a file as a stream of bytes that can seek."""
        if not self.is_remote:
            return open(self.at(name), "rb", opener=open_file)
        client = self._client()
        url = self.at(name)
        failure: Exception
        try:
            stream: IO[bytes] = client.open(
                self._path(client, name), "rb", block_size=_READ_AHEAD_BYTES
            )
        except Exception as problem:  # noqa: BLE001  # clients raise anything
            failure = final_error(url, true_cause(problem), self._options)
        else:
            if getattr(stream, "size", 0) is not None:
                return stream
            stream.close()
            failure = RemoteError(
                f"{url} can only be read from its start to its end: its server cannot send the "
                "file's size (Content-Length) or parts of files (Accept-Ranges: none). "
                f"{_OTHER_SERVER}"
            )
        raise failure  # without the client's error, which may show credentials

    def find(self, below: str = "", **options: Any) -> Future[dict[str, FileStat]]:
        """Find the size and tag of all files below a folder, by name.

        If the folder does not exist, the result is empty. Behind a URL, ``maxdepth=`` limits how
        many levels are listed.
        """

        def stat_by_name(files: Mapping[str, Mapping[str, Any]]) -> dict[str, FileStat]:
            above = len(self._path(self._client(), "")) + 1
            return {path[above:]: _stat(files[path]) for path in sorted(files)}

        return self._submit("find", self._escaped(below), detail=True, then=stat_by_name, **options)

    def folders(self) -> list[str]:
        """Return the names of the folders in this one, sorted.

        Raises:
            FileNotFoundError: this folder does not exist.
        """
        if not self.is_remote:
            with os.scandir(self.url) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        listed = self._submit("ls", "", detail=True).result()
        paths = (each["name"].rstrip("/") for each in listed if each["type"] == "directory")
        return sorted(self.unescaped(posixpath.basename(path)) for path in paths)

    def unescaped(self, name: str) -> str:
        """Return a name without escapes. Over HTTP, files are listed by their escaped URLs."""
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
        """Copy a file of this machine to a file of this folder behind a URL."""
        self._submit("put_file", name, source=(str(path),)).result()

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._submit("rm_file", name).result()

    # The client

    def _client(self) -> AbstractFileSystem:
        if not self.is_remote:
            return LocalFiles
        import fsspec

        protocol = self.url.partition("://")[0]
        kind = fsspec.get_filesystem_class(protocol)
        # A URL holds more than a path, such as host, port and user for SFTP.
        options = {**kind._get_kwargs_from_urls(self.url), **self._options}
        # fsspec's own cache of clients is not used. The user's clients are in it, and in a forked
        # process it holds connections of the parent.
        key = os.getpid(), protocol, fsspec.utils.tokenize(options)
        if key not in _CLIENTS:
            if kind.__module__.partition(".")[0] == "s3fs":
                options["config_kwargs"] = {**_S3_DEFAULTS, **options.get("config_kwargs", {})}
            _CLIENTS[key] = self._make_client(kind, options)
        return _CLIENTS[key]

    def _make_client(
        self, kind: type[AbstractFileSystem], options: Mapping[str, object]
    ) -> AbstractFileSystem:
        failure: Exception
        try:
            return kind(skip_instance_cache=True, **options)
        except ImportError as problem:  # a package that the file system needs is not installed
            failure = problem
        except Exception as problem:  # noqa: BLE001  # gcsfs: a bad token is a FileNotFoundError
            failure = RemoteError(
                f"{self.url} cannot be opened: {shown_error(problem, self._options)}. Check "
                "storage_options= and the credentials in the environment."
            )
        raise failure  # without the client's error, which may show credentials

    def _path(self, client: AbstractFileSystem, name: str) -> str:
        root = client._strip_protocol(self.url).rstrip("/")
        return f"{root}/{name}" if name else root

    def _submit(
        self,
        method: str,
        name: str,
        *arguments: object,
        source: tuple[str, ...] = (),
        then: Callable[[Any], Any] = lambda result: result,
        **options: object,
    ) -> Future[Any]:
        """Call a method of the client with the path of a file, and ``then`` with its result.

        For a local file the call has ended when this returns. A remote request runs on fsspec's
        event loop.
        """
        client = self._client()
        arguments = (*source, self._path(client, name), *arguments)
        url = self.at(name)
        more_s = sum(map(os.path.getsize, source)) / _SLOWEST_UPLOAD_BYTES

        async def request() -> Any:
            failure: Exception = RemoteError(url)
            for again in ("", " (tried twice)"):
                if again:
                    log.info("requested again after: %s", failure)
                    await asyncio.sleep(_PAUSE_S)
                try:
                    if method in ("find", "ls", "info"):
                        client.invalidate_cache()  # the client's earlier listings may be outdated
                    # Clients without coroutines run in a thread, so that the loop never blocks.
                    if client.async_impl:
                        answer = getattr(client, f"_{method}")(*arguments, **options)
                    else:
                        answer = asyncio.to_thread(getattr(client, method), *arguments, **options)
                    return then(await asyncio.wait_for(answer, ATTEMPT_S + more_s))
                except Exception as problem:  # noqa: BLE001  # clients raise anything
                    cause = true_cause(problem)
                    failure = final_error(url, cause, self._options, again)
                    if isinstance(cause, FINAL):
                        break
            # Raised outside of the except block, so that it has neither cause nor context. The text
            # and the traceback of a client's error may show credentials.
            raise failure

        if self.is_remote:
            from fsspec.asyn import get_loop

            return asyncio.run_coroutine_threadsafe(request(), get_loop())
        future: Future[Any] = Future()
        try:
            future.set_result(then(getattr(client, method)(*arguments, **options)))
        except Exception as problem:  # noqa: BLE001  # raised when the result is read
            # The traceback would refer to this frame, and the frame to the future. This cycle would
            # keep the callers' memory until the garbage collector runs.
            future.set_exception(problem.with_traceback(None))
        return future


def stat_files(files: Iterable[tuple[Place, str]]) -> list[FileStat]:
    """Return the size and tag of files, all requested at once; ``MISSING`` for a missing file."""
    asked = [place._submit("info", name, then=_stat) for place, name in files]
    found = []
    for future in asked:
        is_missing = isinstance(future.exception(), FileNotFoundError | NotADirectoryError)
        found.append(MISSING if is_missing else future.result())
    return found


def _stat(info: Mapping[str, Any]) -> FileStat:
    tag = next((str(info[name]) for name in _TAGS if info.get(name) is not None), "")
    digest = hashlib.blake2b(tag.encode(), digest_size=8).digest()
    size = info.get("size")
    return -1 if size is None else int(size), int.from_bytes(digest, "little") >> 1
