"""The errors fastdata raises on its own account.

Each also derives from the built-in class that a caller would catch anyway, so that a swapped import
keeps existing handlers working, and can be made of its text alone: of an error in a worker process
torch's loader sends no more than the class and the traceback as text.
"""

from __future__ import annotations

import errno
import os
import re
import stat

__all__ = [
    "CacheError",
    "CodecError",
    "DeviceError",
    "FastDataError",
    "FastDataWarning",
    "IngestError",
    "MemoryBudgetError",
    "RemoteError",
    "SampleError",
    "StoreGoneError",
]


AnyPath = str | os.PathLike[str]

_NAMED = re.compile(
    r"^(?:[\w.]+: )?sample (\d+)(?:, (.+?),)? cannot be read", re.DOTALL | re.MULTILINE
)
"""How the text of a ``SampleError`` begins: index and path. A traceback has it last."""


def kind_of(value: object) -> str:
    """Its class, with the article: ``"an ImageFolder"``, ``"a Tensor"``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def counted(count: int, noun: str) -> str:
    """``"1 row"``, ``"2,000 rows"``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


class FastDataError(Exception):
    """Base of every error that fastdata defines."""


class FastDataWarning(UserWarning):
    """Training goes on, but slower or with less data than was asked for."""


class MemoryBudgetError(FastDataError, MemoryError):
    """Prepared samples need more memory than there is; raised before anything is allocated."""


class ChannelsError(FastDataError, ValueError):
    """A step is for another number of channels than a sample has."""

    def __init__(self, reason: str, index: int = 0) -> None:
        super().__init__(reason, index)
        self.reason = reason
        self.index = index

    def __str__(self) -> str:
        return f"sample {self.index} cannot be served: {self.reason}"


class DeviceError(FastDataError, RuntimeError):
    """A device was asked for that torch does not see on this machine."""


class SampleError(FastDataError, OSError):
    """One sample cannot be read, decoded or prepared.

    Attributes:
        index: position of the sample in its dataset.
        path: file of the sample, or None where the sample has none.
    """

    def __init__(self, message: str, *, index: int | None = None, path: str | None = None) -> None:
        if index is None:  # copied, unpickled or sent by torch: the text says it
            named = _NAMED.findall(message)
            if not named:
                raise TypeError(
                    "SampleError needs index=, the position of the sample in its dataset"
                )
            index = int(named[-1][0])
            path = named[-1][1] or None
        elif not _NAMED.match(message):
            message = f"sample {index}{f', {path},' if path else ''} cannot be read: {message}"
        super().__init__(message)
        self.index = index
        self.path = path


class IngestError(FastDataError, RuntimeError):
    """Preparation stopped, and no single sample is at fault, as when a worker process is killed."""


class CacheError(FastDataError, OSError):
    """A cache on disk cannot be written, or what it holds cannot be used."""


class RemoteError(FastDataError, OSError):
    """A file behind a URL cannot be read or written, however often it was tried."""


class CodecError(FastDataError, ValueError):
    """Encoded bytes are not those of a sample of this shape and dtype: damaged or cut off."""


class StoreGoneError(FastDataError, RuntimeError):
    """A pickled dataset was opened after the process that holds its samples had ended."""


_URL = re.compile(r"(?!file:)[A-Za-z][\w+.-]+:/")
"""With one slash, which is what ``Path`` leaves of two; a drive of Windows has one letter."""


def is_url(path: AnyPath) -> bool:
    text = os.fsdecode(path)
    return _URL.match(text) is not None and not os.path.exists(text)


def local_path(path: AnyPath) -> str:
    """A path of this machine in full, of a ``file://`` URL too."""
    return os.path.expanduser(os.fsdecode(path).removeprefix("file://"))


READ_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Of ``os.open``, which would wait for the writer of a pipe."""
NO_FILE = errno.EINVAL, "no file, but a folder, a pipe or a device"


def open_file(path: AnyPath, flags: int = 0) -> int:
    """``os.open`` of a file to be read; an OSError of what may never end."""
    fd = os.open(path, flags | READ_FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(*NO_FILE, os.fspath(path))


def refuse_remote(path: AnyPath) -> None:
    """Raise ``ValueError`` for a URL where a folder or a file of this machine is needed."""
    if is_url(path):
        raise ValueError(
            f"{os.fsdecode(path)} is a URL, and this needs a folder of this machine. Copy the "
            "files to a local disk, or mount them, as with mountpoint-s3 or gcsfuse, and give that."
        )


def sample_error(
    path: str | None, index: int, cause: BaseException, *, is_read: bool = False
) -> SampleError | IngestError:
    """Say why one sample cannot be read, or prepared once it ``is_read``, and the cure.

    A sample's file is looked at again for its size and first bytes; ``path`` is None where it has
    none. Where the machine is at fault, it is an IngestError: to leave the sample out is no cure.
    """
    where = f"sample {index}" if path is None else f"sample {index}, {path},"
    name = type(cause).__name__
    # Pillow names the stream that it was given, which is nothing of the user's.
    said = re.sub(r" <_io\..*>", "", str(cause), flags=re.DOTALL).rstrip(".")
    code = getattr(cause, "errno", None)
    if isinstance(cause, RuntimeError) and "Cannot allocate memory" in str(cause):  # torch's
        code = errno.ENOMEM
    if code in _CURES_OF_MACHINES:
        return IngestError(
            f"{where} cannot be read now: {name}: {said}. The sample is not at "
            f"fault, but this machine or a limit on it. {_CURES_OF_MACHINES[code]}."
        )
    found = ""
    # What no content of a sample raises, but the code that reads it: leaving samples out would
    # leave out all of them.
    is_code = isinstance(cause, (TypeError, AttributeError, NameError, ImportError))
    # An OSError is raised by pixels that are read only now.
    if is_code or (is_read and not isinstance(cause, OSError)):
        opener = "what opens or prepares it (loader=, prepare=, the transform's first steps)"
        cure = f"Correct {'the dataset' if path is None else opener}"
    elif name in _CURES_OF_SOUND_FILES:
        cure = _CURES_OF_SOUND_FILES[name]
    elif path is None:
        cure = "Correct the dataset"
    else:
        cure = "Delete or replace the file"
        found = "" if is_url(path) else f"It is {_describe_file(path)}. "
    if not is_code:
        cure += ", or leave it out with on_error='skip'"
    message = f"{where} cannot be read: {name}: {said}. {found}{cure}."
    return SampleError(message, index=index, path=path)


_CURES_OF_MACHINES = {
    errno.ENOMEM: "Free some memory, use fewer workers, or raise a limit of it (ulimit -v)",
    errno.ENOSPC: "Free some space on the disk that is written to",
    errno.EDQUOT: "Free some space of the quota on the disk that is written to",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "Raise the limit of the system's open files (sysctl fs.file-max)",
}
_CURES_OF_SOUND_FILES = {
    "DecompressionBombError": (
        "The file may well be sound: if you trust it, set PIL.Image.MAX_IMAGE_PIXELS higher, or to "
        "None, in every process that reads"
    ),
    "PermissionError": "Give the user that runs this permission to read the file",
    "FileNotFoundError": "Bring the file back, or correct its path",
}
_KINDS = {
    rb"\xff\xd8\xff.*\xff\xd9\Z": "a JPEG",
    rb"\xff\xd8\xff": "a JPEG without its end, probably cut off",
    rb"RIFF.{4}WEBP": "a damaged WebP",
    rb"\x89PNG": "a damaged PNG",
    rb"GIF8": "a damaged GIF",
    rb"BM": "a damaged BMP",
    rb"II\*\0|MM\0\*": "a damaged TIFF",
    rb"\s*<(!doctype )?html": "an HTML page, probably a failed download",
    rb"version https://git-lfs": "a Git LFS pointer; fetch the file with `git lfs pull`",
    rb"%PDF": "a PDF",
    rb"PK\x03\x04": "a ZIP archive",
    rb"\x1f\x8b": "a gzip archive",
    rb"\0{64}|\0+\Z": "only zeros at its start",
}
"""By what a file's first 64 bytes, and its last two behind them, are like; the first that fits."""


def _describe_file(path: str) -> str:
    try:
        with open(path, "rb", opener=open_file) as stream:
            start = stream.read(64)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 2))
            ends = start + stream.read()
    except OSError as problem:
        return f"a file that cannot be opened ({problem.strerror or problem})"
    if size == 0:
        return "an empty file (0 bytes)"
    found = (kind for sign, kind in _KINDS.items() if re.match(sign, ends, re.DOTALL | re.I))
    kind = next(found, f"no image: it starts with {start[:16]!r}")
    return f"a file of {size:,} bytes, {kind}"
