"""The cause of an error that reading a sample raised, and the error that users get for it.

A sample may be at fault, or the machine, its disks or its network. Only a sample that is at fault
may be left out.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from fastdata.errors import FastDataError, IngestError, RemoteError, SampleError
from fastdata.paths import NO_FILE, is_url, open_file

_Result = TypeVar("_Result")

Fault = Literal["damage", "missing", "permission", "limit", "machine"]
"""Cause of an error that reading a sample raised:

* ``damage``: the bytes of the sample, or the code that decodes them.
* ``missing``: there is no such file.
* ``permission``: the file may not be read.
* ``limit``: this machine lacks memory, room on a disk, or open files.
* ``machine``: everything else, such as a disk, a mount, a server or a network that fails.
"""
_CURES_OF_LIMITS = {
    errno.ENOMEM: "Free some memory, use fewer workers, or raise its limit (ulimit -v)",
    errno.ENOSPC: "Free some space on the disk that is written to",
    errno.EDQUOT: "Free some space of the quota on the disk that is written to",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "Raise the limit of the system's open files (sysctl fs.file-max)",
}
_FAULTS_BY_CODE: dict[int, Fault] = {
    **dict.fromkeys(_CURES_OF_LIMITS, "limit"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG), "missing"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "permission"),
    **dict.fromkeys((errno.EISDIR, errno.EOVERFLOW, errno.ENXIO), "damage"),  # ENXIO: a socket
}
"""Faults by error number. Every other number is the machine's fault."""
_FAULTS_BY_CLASS: dict[type[Exception], Fault] = {
    MemoryError: "limit",
    FileNotFoundError: "missing",
    NotADirectoryError: "missing",
    PermissionError: "permission",
    TimeoutError: "machine",
    ConnectionError: "machine",
    BlockingIOError: "machine",
    InterruptedError: "machine",
}
"""Faults of errors that have no error number."""
_NETWORK_MODULES = re.compile(
    r"(aiohttp|azure|botocore|google(?!\.protobuf)|http|httpcore|httpx|requests|socket|ssl|urllib3?)"
    r"(\.|\Z)"
)
"""Modules whose errors mean that a server or a network failed, and have no error number. An error
of google.protobuf means damaged bytes."""
_FAULTS_BY_STATUS: dict[Any, Fault] = {
    **dict.fromkeys((404, 410), "missing"),
    **dict.fromkeys((401, 403), "permission"),
}
"""Faults by the status of an HTTP server's answer."""
_WINDOWS_INVALID_NAME = 123
RETRY_PAUSES_S = (0.05, 0.25, 1.0)


def fault_of(problem: BaseException) -> Fault:
    """Return the cause of an error that reading a sample raised.

    The error number decides, of the error itself or of one that it was raised from. Decoders raise
    errors without a number: their cause is the bytes.
    """
    return _diagnose(problem)[0]


def _diagnose(problem: BaseException) -> tuple[Fault, int | None]:
    """Return the fault and the operating system's error number, if there is one."""
    cause: BaseException | None = problem
    met: set[int] = set()  # an error may be raised from itself
    while cause is not None and id(cause) not in met:
        met.add(id(cause))
        code = _code_of(cause)
        if code is not None:
            return _FAULTS_BY_CODE.get(code, "machine"), code
        for kind, fault in _FAULTS_BY_CLASS.items():
            if isinstance(cause, kind):
                return fault, None
        # Base classes count, because libraries derive their errors from those of others.
        if any(_NETWORK_MODULES.match(kind.__module__) for kind in type(cause).__mro__):
            return _FAULTS_BY_STATUS.get(_status_of(cause), "machine"), None
        # The order in which Python shows errors in a traceback.
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "damage", None


def _status_of(problem: BaseException) -> int | None:
    """Return the status of the HTTP answer that an error carries, if any."""
    # In the error (urllib, aiohttp), in its answer (requests, httpx), or in a dict (botocore).
    answer = getattr(problem, "response", None)
    names = ("status", "status_code", "code")
    found = [getattr(holder, name, None) for holder in (problem, answer) for name in names]
    if isinstance(answer, dict):  # botocore
        found = [answer.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    return next((status for status in found if isinstance(status, int)), None)


def _code_of(problem: BaseException) -> int | None:
    """Return the operating system's error number, if an error has one."""
    code = None
    # Errors of ssl are OSErrors too, but their numbers are OpenSSL's.
    if isinstance(problem, OSError) and type(problem).__module__ != "ssl":
        code = problem.errno
        if getattr(problem, "winerror", None) == _WINDOWS_INVALID_NAME:
            return errno.ENOENT
        # Damaged bytes make a decoder seek to a position that does not exist: EINVAL without a
        # file name. With a file name EINVAL comes from `open`, on Windows also if a network fails.
        has_no_file = problem.filename is None or problem.strerror == NO_FILE[1]
        if code == errno.EINVAL and has_no_file:
            return errno.EISDIR  # one of the numbers that mean damage
    elif isinstance(problem, RuntimeError):  # torch and torchvision
        if "Cannot allocate memory" in str(problem):
            return errno.ENOMEM
        found = re.match(r"\[Errno (\d+)\]", str(problem))
        code = int(found[1]) if found else None
    return code if isinstance(code, int) and code in errno.errorcode else None


def with_retries(call: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function, and repeat the call up to three times if the machine caused its error.

    The last error is raised unchanged.
    """
    # 1.3 s in all: enough for a short interruption, and soon enough to report a lasting one.
    for pause_s in RETRY_PAUSES_S:
        try:
            return call(*arguments)
        except FastDataError:  # the call has tried several times itself
            raise
        except Exception as problem:
            if fault_of(problem) != "machine":
                raise
        time.sleep(pause_s)
    return call(*arguments)


def sample_error(
    path: str | None, index: int, cause: BaseException, *, is_read: bool = False
) -> FastDataError:
    """Return the error that explains why a sample cannot be read or prepared.

    A SampleError means that the sample is at fault. The others mean that it is not, so that leaving
    it out would be wrong: an IngestError for a limit of this machine, and a RemoteError for a disk,
    mount or network that fails.

    Args:
        path: the sample's file, which is read again to describe it; None if it has none.
        index: position of the sample in its dataset.
        cause: what was raised.
        is_read: True if the sample was read, and preparing it raised the error.
    """
    where = f"sample {index}" if path is None else f"sample {index}, {path},"
    # Pillow's messages show the stream object that it reads, which means nothing to the user.
    text = re.sub(r" <_io\..*>", "", str(cause), flags=re.DOTALL).rstrip(".")
    said = f"{type(cause).__name__}: {text}"
    fault, code = _diagnose(cause)
    if fault == "limit":
        return IngestError(
            f"{where} cannot be read now: {said}. The sample is not at fault: this machine has "
            f"reached a limit. {_CURES_OF_LIMITS[code or errno.ENOMEM]}."
        )
    if fault == "machine":
        error = RemoteError(
            f"{where} cannot be read now: {said}. This does not mean that the sample is bad: the "
            "disk, mount, server or network that it is read from failed. Check that, and run again."
        )
        error.errno = code
        return error
    cure = _cure_of(cause, fault, path, is_read=is_read)
    found = ""
    if cure == _REPLACE_FILE and path is not None and not is_url(path):
        try:
            found = f"It is {_describe_file(path)}. "
        except (OSError, ValueError) as problem:
            if fault_of(problem) in ("machine", "limit"):
                return sample_error(path, index, problem)
            reason = getattr(problem, "strerror", None) or problem
            found = f"It is a file that cannot be opened ({reason}). "
    sample = SampleError(f"{where} cannot be read: {said}. {found}{cure}.", index=index, path=path)
    sample.may_pass = fault != "damage" or type(cause).__name__ == "DecompressionBombError"
    return sample


OR_SKIP = ", or leave it out with on_error='skip'"
"""A cure in errors of samples. Messages about samples that were left out do not repeat it."""
_REPLACE_FILE = f"Delete or replace the file{OR_SKIP}"


def _cure_of(cause: BaseException, fault: Fault, path: str | None, *, is_read: bool) -> str:
    """Return what the user can do about a sample that cannot be read."""
    code = "the dataset"
    if path is not None:
        code = (
            "the code that opens or prepares it (loader=, prepare= of CachedDataset, the first "
            "steps of the transform)"
        )
    # Only code raises these, whatever the sample contains: on_error='skip' would skip all samples.
    if isinstance(cause, (TypeError, AttributeError, NameError, ImportError)):
        return f"Correct {code}"
    # Pixels may be decoded only when they are prepared, and then raise an OSError.
    if is_read and not isinstance(cause, OSError):
        cure = f"Correct {code}"
    elif fault == "missing":
        cure = "Restore the file, or correct its path"
    elif fault == "permission":
        cure = "Give the user who runs this process permission to read the file"
    elif type(cause).__name__ == "DecompressionBombError":
        cure = (
            "The file may be intact: if you trust it, set PIL.Image.MAX_IMAGE_PIXELS higher, "
            "or to None, in every process that reads images"
        )
    elif path is None:
        cure = f"Correct {code}"
    else:
        return _REPLACE_FILE
    return f"{cure}{OR_SKIP}"


_KINDS = {
    rb"\xff\xd8\xff.*\xff\xd9\Z": "a JPEG",
    rb"\xff\xd8\xff": "a JPEG without its end, probably cut off",
    rb"RIFF.{4}WEBP": "a damaged WebP",
    rb"\x89PNG": "a damaged PNG",
    rb"GIF8": "a damaged GIF",
    rb"BM": "a damaged BMP",
    rb"II\*\0|MM\0\*": "a damaged TIFF",
    rb".{4}ftyp(avif|hei|mif1)": "a HEIC or AVIF image, which Pillow may open only with a plugin",
    rb"\s*<(!doctype )?html": "an HTML page, probably a failed download",
    rb"version https://git-lfs": "a Git LFS pointer; fetch the file with `git lfs pull`",
    rb"%PDF": "a PDF",
    rb"PK\x03\x04": "a ZIP archive",
    rb"\x1f\x8b": "a gzip archive",
    rb"\0{64}|\0+\Z": "only zeros at its start",
}
"""Kinds of files by a pattern of their first 64 bytes and last two; the first match counts."""
_FLAGS = re.DOTALL | re.IGNORECASE
_PART_BYTES = 1 << 20


def _describe_file(path: str) -> str:
    """Describe a file by its size and its first and last bytes.

    The whole file is read. If the disk fails in the middle of it, this raises the disk's error;
    decoders in C report the same failure as damage.
    """
    with open(path, "rb", opener=open_file) as stream:
        start = stream.read(64)
        size = len(start)
        end = start
        while part := stream.read(_PART_BYTES):
            size += len(part)
            end = (end + part)[-2:]
    if not size:
        return "an empty file (0 bytes)"
    found = (kind for sign, kind in _KINDS.items() if re.match(sign, start + end[-2:], _FLAGS))
    kind = next(found, f"of no known image format: it starts with {start[:16]!r}")
    return f"a file of {size:,} bytes, {kind}"
