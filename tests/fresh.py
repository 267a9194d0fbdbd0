"""Interpreters for scripts that import fastdata, without the 2 s of a core in which each imports torch.

One process imports torch, and nothing of fastdata, and forks for each script. The fork runs the script as ``python -c``
does: as ``__main__``, with its own arguments, environment and descriptors, to the end of its interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RUN_COMMAND", "Interpreters"]

LENGTH = 8
RUN_COMMAND = """
import runpy, sys
sys.argv[0] = "fastdata"
runpy.run_module("fastdata.tools", run_name="__main__", alter_sys=True)
"""
"""A script that does what ``python -m fastdata.tools`` does with its arguments."""


class Script:
    """A script that runs, with what ``subprocess.Popen`` has: its process's number, and its status after the end."""

    def __init__(self, reports: int) -> None:
        self._reports = os.fdopen(reports, "rb", buffering=0)
        self.pid = int(self._reports.read(LENGTH))
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            with self._reports:
                self.returncode = int(self._reports.read(LENGTH))
                self._reports.read(1)  # until the process that reports has ended, too
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Piped(NamedTuple):
    """A script whose output is read while it runs."""

    script: Script | subprocess.Popen[bytes]
    output: Any


class Interpreters:
    """The process that has torch. Where there is no fork, each script has a new interpreter."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        self._channel, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno())]
            self._server = subprocess.Popen(words, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        if self._server is not None:
            self._channel.shutdown(socket.SHUT_RDWR)  # of forks of this process, too
            self._channel.close()
            self._server.wait()

    def run(
        self, code: str, *arguments: str, timeout: float = 60, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Return status and output of a script, which is killed after ``timeout`` seconds."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            files = {"stdout": out.fileno(), "stderr": err.fileno()}
            script = self.start(code, *arguments, **files, **options)
            try:
                status = script.wait(timeout)
            finally:
                script.kill()
                script.wait(timeout)
            texts = [os.pread(fd, os.fstat(fd).st_size, 0).decode() for fd in files.values()]
        return subprocess.CompletedProcess(arguments, status, *texts)

    @contextlib.contextmanager
    def piped(self, code: str, *arguments: str, **options: Any) -> Iterator[Piped]:
        """Start a script, whose output can be read; it is killed at the end of the block."""
        reader, writer = os.pipe()
        with open(reader, "rb") as output:
            script = self.start(code, *arguments, stdout=writer, **options)
            os.close(writer)
            try:
                yield Piped(script, output)
            finally:
                script.kill()
                script.wait(60)

    def start(
        self,
        code: str,
        *arguments: str,
        stdin: int | None = None,
        stdout: int = 1,
        stderr: int = 2,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Script | subprocess.Popen[bytes]:
        """Start a script in a session of its own. Options are those of ``subprocess.Popen``."""
        code = textwrap.dedent(code)
        if self._server is None:
            return subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        with open(os.devnull, "rb") as nothing:
            given = {0: nothing.fileno() if stdin is None else stdin, 1: stdout, 2: stderr}
            given |= {number: number for number in pass_fds}
            request = {
                "code": code,
                "arguments": arguments,
                "descriptors": list(given),
                "environment": dict(os.environ if env is None else env),
                "folder": str(cwd or Path.cwd()),
            }
            data = json.dumps(request).encode()
            reports, theirs = os.pipe()
            try:
                head = len(data).to_bytes(LENGTH, "little")
                socket.send_fds(self._channel, [head], [theirs, *given.values()])
                self._channel.sendall(data)
            finally:
                os.close(theirs)
        return Script(reports)


# The process that has torch


def next_script(channel: socket.socket) -> dict[str, Any]:
    """Fork for each request, and return it in the fork, which has become the script's process."""
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()  # a fork that looks at all of torch's objects copies their memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork of this process is waited for
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, LENGTH, 32)
        if not head:
            os._exit(0)  # the tests are over
        data = b""
        while len(data) < int.from_bytes(head, "little"):
            data += channel.recv(1 << 16)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if pid := os.fork():
                report(pid, *descriptors)
            request: dict[str, Any] = json.loads(data)
            become(request, channel, *descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def report(pid: int, reports: int, *descriptors: int) -> None:
    """Write number and status of the script's process, and end."""
    for descriptor in (*range(3), *descriptors):  # whose other ends shall see the script's end
        os.close(descriptor)
    os.write(reports, f"{pid:{LENGTH}}".encode())
    _, status = os.waitpid(pid, 0)
    os.write(reports, f"{os.waitstatus_to_exitcode(status):{LENGTH}}".encode())
    os._exit(0)


def become(request: dict[str, Any], channel: socket.socket, reports: int, *given: int) -> None:
    """Take the script's descriptors, under its numbers for them, its environment and its arguments."""
    channel.close()
    os.close(reports)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sources = [os.dup2(descriptor, 200 + descriptor, False) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for source, number in zip(sources, request["descriptors"], strict=True):
        os.dup2(source, number)
        os.close(source)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in sys.path[1:]
    ]
    sys.path[:1] = ["", *added]
    sys.argv = ["-c", *request["arguments"]]


if __name__ == "__main__":
    script = next_script(socket.socket(fileno=int(sys.argv[1])))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(script["code"], "<string>", "exec"), main.__dict__)
