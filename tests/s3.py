"""S3 on the loopback: moto's server, which can be written to, and a server of a folder that is slow and faulty.

Both are child processes that end with their ``with`` block, or with the process that started them. The second one only
reads: GET with ranges, HEAD and listings of ``folder/bucket/key``, at little CPU, and does harm by a ``FaultPlan``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from email.utils import formatdate
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

SECRET = "the-secret-key-of-the-tests"
REFUSALS = {
    "error": (500, "InternalError"),
    "slow_down": (503, "SlowDown"),
    "expired": (403, "ExpiredToken"),
}
# Half of the answer, then a reset connection, silence, or its end.
BROKEN = (
    "reset",
    "stall",
    "cut",
)
SPOILED = ("short", "changed", "resized", "corrupted")
"""Half of the bytes, as the length says; other bytes and another ETag, of the same size or of another; a wrong bit."""
KINDS = (*REFUSALS, *BROKEN, *SPOILED)
PIECE = 1 << 17
BURST_S = 0.01  # how late a piece may go without its bandwidth being lost: timers are no more exact
MOTO = """
import logging, os, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel("ERROR")  # not a line for each request
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """The answers that fail, by (seed, key, range, attempt), independent of other reads at the time."""

    rate: float = (
        0.0  # part of the requests; listings and HEADs never go wrong as those in ``SPOILED`` do
    )
    kinds: tuple[str, ...] = ("error", "reset", "stall", "cut")  # of which one is drawn
    attempts: int | None = None  # only the first so many requests for a range may go wrong
    within: str = ""  # a text in the ``bucket/key`` of whatever may go wrong
    stall_s: float = 30.0  # of silence, before a stalled answer's connection is closed
    seed: int = 0

    def draw(self, key: str, span: str, attempt: int) -> str | None:
        if (
            not self.rate
            or self.within not in key
            or (self.attempts is not None and attempt >= self.attempts)
        ):
            return None
        draws = random.Random(f"{self.seed} {key} {span} {attempt}")
        return draws.choice(self.kinds) if draws.random() < self.rate else None


class Stats(NamedTuple):
    """The actions of a server since it began, or since ``reset``."""

    requests: dict[str, int]  # by method
    bytes_of: dict[str, int]  # of objects, sent in bodies, by bucket/key
    faults: dict[str, int]  # by kind
    most_at_once: int
    cpu_s: float


class S3:
    """The address of a server, and the options that clients need for it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client_options = {"endpoint_url": url, "region_name": "us-east-1"}
        # For s3fs.
        self.storage_options = {
            "key": "tests",
            "secret": SECRET,
            "client_kwargs": self.client_options,
        }
        urls = {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        keys = {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.environment = urls | keys  # for boto3 and obstore


class MotoS3(S3):
    """Moto's server."""

    def __init__(self, url: str) -> None:
        import boto3  # comes with moto

        super().__init__(url)
        keys = {"aws_access_key_id": "tests", "aws_secret_access_key": SECRET}
        self.client = boto3.client("s3", **self.client_options, **keys)

    def clear(self) -> None:
        """Delete all buckets."""
        urllib.request.urlopen(f"{self.url}/moto-api/reset", b"", timeout=60).close()

    def make_bucket(self, name: str) -> None:
        self.client.create_bucket(Bucket=name)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def upload_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.put(
                bucket,
                f"{prefix}/{path.relative_to(folder).as_posix()}".lstrip("/"),
                path.read_bytes(),
            )


class ThrottledS3(S3):
    """The server of a folder."""

    def stats(self) -> Stats:
        return Stats(**json.loads(self._ask("stats")))

    def reset(self) -> None:
        """Restart all counts, including attempts."""
        self._ask("reset")

    def set_faults(self, plan: FaultPlan) -> None:
        self._ask("faults", json.dumps(asdict(plan)).encode())

    def _ask(self, what: str, data: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"{self.url}/_{what}", data, timeout=60) as answer:
            return bytes(answer.read())


@contextmanager
def s3_server() -> Iterator[MotoS3]:
    """Yield Moto's server without objects."""
    with _served("-c", MOTO) as url:
        s3 = MotoS3(url)
        try:
            yield s3
        finally:
            s3.client.close()


@contextmanager
def throttled_s3(
    folder: Path,
    *,
    latency_s: float = 0.05,
    bandwidth: float = 100e6,
    faults: FaultPlan | None = None,
) -> Iterator[ThrottledS3]:
    """Serve the folders in ``folder`` as buckets; all answers share ``bandwidth``, in bytes per second."""
    with _served(__file__, str(folder), str(latency_s), str(bandwidth)) as url:
        s3 = ThrottledS3(url)
        s3.set_faults(faults or FaultPlan())
        yield s3


@contextmanager
def _served(*arguments: str) -> Iterator[str]:
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


# What the child process runs


class _Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes | memoryview


def _xml(root: str, inside: str, status: int = 200) -> _Answer:
    return _Answer(
        status, {"Content-Type": "application/xml"}, f"<{root}>{inside}</{root}>".encode()
    )


def _refusal(status: int, code: str) -> _Answer:
    return _xml(
        "Error",
        f"<Code>{code}</Code><Message>{code}, says the server of the tests</Message>",
        status,
    )


def _spoiled(answer: _Answer, kind: str | None) -> _Answer:
    status, headers, body = answer
    if kind in REFUSALS:
        return _refusal(*REFUSALS[kind])
    if kind == "short":
        return answer._replace(body=body[: len(body) // 2])
    if kind == "corrupted":
        middle = len(body) // 2
        return answer._replace(
            body=b"".join([body[:middle], bytes([body[middle] ^ 1]), body[middle + 1 :]])
        )
    if kind in ("changed", "resized"):
        headers = headers | {"ETag": f'"{hashlib.md5(headers["ETag"].encode()).hexdigest()}"'}
        body = bytes(body).translate(bytes(range(255, -1, -1)))
    if kind == "resized" and status == 206:
        span, _, size = headers["Content-Range"].rpartition("/")
        headers["Content-Range"] = f"{span}/{int(size) + 1}"
    return _Answer(status, headers, body[:-1] if kind == "resized" and status == 200 else body)


class _Server:
    def __init__(self, folder: str, latency_s: float, bandwidth: float) -> None:
        self.folder, self.latency_s, self.bandwidth = folder, latency_s, bandwidth
        self.plan, self.free_at_s, self.at_once = FaultPlan(), 0.0, 0
        self.fields: dict[tuple[str, int, int], dict[str, str]] = {}
        self.reset()
        for _, path in self.objects(folder):
            self.object(path, "")  # its ETag takes time

    def reset(self) -> None:
        self.stats = Stats(Counter(), Counter(), Counter(), self.at_once, time.process_time())
        self.attempts: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        # Ends with who started it.
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), os._exit, 0)
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1024)
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        await server.serve_forever()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                first, *lines = (
                    (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                )
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines)
                }
                method, target = first.split(" ")[:2]
                if "expect" in headers:  # a client that would write; it is told when all has come
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                data = await reader.readexactly(int(headers.get("content-length", "0")))
                self.at_once += 1
                try:
                    await self.answer(writer, method, target, headers.get("range", ""), data)
                finally:
                    self.at_once -= 1

    async def answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, span: str, data: bytes
    ) -> None:
        """Send what was asked for, or what the plan makes of it."""
        path, _, query = target.partition("?")
        if path.startswith("/_"):
            answer = self.control(path, data)
            return writer.write(_head(answer) + answer.body)
        self.stats.requests[method] += 1
        self.stats = self.stats._replace(most_at_once=max(self.stats.most_at_once, self.at_once))
        await asyncio.sleep(self.latency_s)
        bucket, _, key = (name := unquote(path[1:])).partition("/")
        if method not in ("GET", "HEAD"):
            answer = _refusal(405, "MethodNotAllowed")
            return writer.write(_head(answer) + answer.body)
        answer = (
            self.object(f"{self.folder}/{name}", span)
            if key
            else self.page(bucket, dict(parse_qsl(query)))
        )
        kind = self.plan.draw(
            name if key else f"{bucket}/?{query}", span, self.attempts[target, span]
        )
        self.attempts[target, span] += 1
        if kind in SPOILED and (
            not key or method == "HEAD" or answer.status >= 300 or len(answer.body) < 2
        ):
            kind = None
        if kind is not None:
            self.stats.faults[kind] += 1
        answer = _spoiled(answer, kind)
        head, body = _head(answer), answer.body if method == "GET" else b""
        if kind in BROKEN:
            head, body = head if body else b"", body[: len(body) // 2]
        for first in range(0, max(1, len(body)), PIECE):
            piece = body[first : first + PIECE]
            now_s = time.monotonic()
            self.free_at_s = max(self.free_at_s, now_s - BURST_S) + len(piece) / self.bandwidth
            if self.free_at_s > now_s:
                await asyncio.sleep(self.free_at_s - now_s)
            writer.write(piece if first else b"".join((head, piece)))
            await writer.drain()
            if key:
                self.stats.bytes_of[name] += len(piece)
        if kind in BROKEN:
            await asyncio.sleep(self.plan.stall_s if kind == "stall" else 0)
            if kind == "reset":
                at_once = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, at_once
                )
            raise ConnectionAbortedError
        return None

    def control(self, path: str, data: bytes) -> _Answer:
        if path == "/_faults":
            self.plan = FaultPlan(**json.loads(data))
        elif path == "/_reset":
            self.reset()
        stats = self.stats._replace(cpu_s=time.process_time() - self.stats.cpu_s)
        return _Answer(200, {}, json.dumps(stats._asdict()).encode())

    def object(self, path: str, span: str) -> _Answer:
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                size = status.st_size
                body = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    if size > PIECE
                    else file.read()
                )
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return _refusal(404, "NoSuchKey")
        if (fields := self.fields.get((path, size, status.st_mtime_ns))) is None:
            changed = formatdate(status.st_mtime, usegmt=True)
            fields = {
                "ETag": f'"{hashlib.md5(body).hexdigest()}"',
                "Last-Modified": changed,
                "Accept-Ranges": "bytes",
            }
            self.fields[path, size, status.st_mtime_ns] = fields
        if (found := re.fullmatch(r"bytes=(\d*)-(\d*)", span)) is None:
            return _Answer(200, fields, memoryview(body))
        start = int(found[1]) if found[1] else max(0, size - int(found[2]))
        stop = min(size, int(found[2]) + 1) if found[1] and found[2] else size
        if start >= size:
            return _refusal(416, "InvalidRange")
        content = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        return _Answer(206, fields | content, memoryview(body)[start:stop])

    def objects(self, root: str) -> list[tuple[str, str]]:
        paths = [f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names]
        return sorted((path[len(root) + 1 :], path) for path in paths)

    def page(self, bucket: str, query: dict[str, str]) -> _Answer:
        """Return a page of a listing: names in order, with those after the delimiter as one."""
        if not bucket or not os.path.isdir(f"{self.folder}/{bucket}"):
            return _refusal(404, "NoSuchBucket")
        prefix, delimiter, most = (
            query.get("prefix", ""),
            query.get("delimiter"),
            int(query.get("max-keys", 1000)),
        )
        rows: dict[str, str] = {}
        after = query.get("continuation-token", query.get("start-after", ""))
        for key, path in self.objects(f"{self.folder}/{bucket}"):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + 1]
            if not key.startswith(prefix) or name <= after or name in rows:
                continue
            if len(rows) == most:
                rows[""] = f"<NextContinuationToken>{escape([*rows][-1])}</NextContinuationToken>"
                break
            rows[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if end < 0:
                _, headers, body = self.object(path, "")
                changed = time.strftime(
                    "%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(os.stat(path).st_mtime)
                )
                row = f"<Key>{escape(name)}</Key><LastModified>{changed}</LastModified><Size>{len(body)}</Size>"
                rows[name] = f"<Contents>{row}<ETag>{headers['ETag']}</ETag></Contents>"
        is_cut = f"<IsTruncated>{str('' in rows).lower()}</IsTruncated><KeyCount>{len(rows) - ('' in rows)}</KeyCount>"
        return _xml(
            "ListBucketResult",
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            + is_cut
            + "".join(rows.values()),
        )


def _head(answer: _Answer) -> bytes:
    fields = {**answer.headers, "Content-Length": str(len(answer.body))}
    lines = [f"HTTP/1.1 {answer.status} -", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


if __name__ == "__main__":
    asyncio.run(_Server(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])).run())
