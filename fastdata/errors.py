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
    """Base of every error that fastdata defines. Its text shows no secret of a URL."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*(hide_secrets(it) if isinstance(it, str) else it for it in parts))


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
        self.path = None if path is None else hide_secrets(path)


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


_NAMES_OF_USERS = {
    *("abfs", "abfss", "ftp", "ftps", "hdfs", "oci", "scp", "sftp", "smb"),
    *("ssh", "wasb", "wasbs", "webhdfs"),
}
"""Schemes that have the name of a user or of a container before the @, which is not secret. Others
have a token there, such as GitHub's and Hugging Face's https://TOKEN@host."""
_FILES_HERE = {"file", "local"}
_NEXT = r"::(?:[a-z][\w+.-]+:)?/"
"""The next URL or path of a chain, as in zip://a.png::https://host/a.zip."""
_CREDENTIALS = re.compile(
    r"\b(?P<scheme>[a-z][\w+.-]+)(?P<begin>:/{1,3})"
    # A colon with no port behind it begins a password, which may hold a / or an @: it ends at the
    # last @ of this URL. Else the user ends at the @ of the host.
    rf"(?P<user>[^/?#@:\s]*(?!{_NEXT}):(?!\d*(?:[/?#\s]|$))(?:(?!{_NEXT})\S)*|[^/?#\s]*)@",
    re.IGNORECASE,
)
_QUERY = re.compile(
    r"\b(?P<scheme>[a-z][\w+.-]+)(?P<begin>:/[^\s?#]*[?#])(?P<query>\S*[^\s.,:;'\")\]])",
    re.IGNORECASE,
)
_SENDS_QUERIES = re.compile(r"https?|(web)?davs?(\+https?)?", re.IGNORECASE)
"""Schemes whose queries are sent to the server, so that one without a = may be a token, too."""
_PUBLIC_QUERY = re.compile(r"versionId=[\w.-]+", re.IGNORECASE)
"""The version of an object, which s3fs reads."""
_END_OF_NAME = re.compile(r"\.\w{1,8}$")


def hide_secrets(text: str) -> str:
    """Replace by ``***`` what may be a secret in the URLs of a text.

    Secrets are a password or a token before the host, and a query, which may be a signature. This
    function alone decides what is one: see also ``refuse_secrets``.

    Example:
        >>> hide_secrets("https://me:password@host/a.png and https://host/a.png?sig=abc")
        'https://***@host/a.png and https://host/a.png?***'
        >>> hide_secrets("sftp://me@host:2222/a.png")
        'sftp://me@host:2222/a.png'
    """
    if not _may_hold_secret(text):
        return text
    return _QUERY.sub(_hide_query, _CREDENTIALS.sub(_hide_credentials, text))


def _may_hold_secret(text: str) -> bool:
    """Return False for most texts, at once: a list may have a million."""
    return ":/" in text and ("@" in text or "?" in text or "#" in text)


def _hide_credentials(found: re.Match[str]) -> str:
    scheme = found["scheme"].lower()
    is_name = scheme in _NAMES_OF_USERS and not re.search(":|%3a", found["user"], re.IGNORECASE)
    if is_name or scheme in _FILES_HERE:
        return found[0]
    return f"{found['scheme']}{found['begin']}***@"


def _hide_query(found: re.Match[str]) -> str:
    query = found["query"]
    is_secret = not _PUBLIC_QUERY.fullmatch(query)
    if "=" not in query:  # may be part of a name, or of a pattern such as train-0?.tar
        is_sent = _SENDS_QUERIES.fullmatch(found["scheme"]) and found["begin"].endswith("?")
        is_secret = bool(is_sent) and not _END_OF_NAME.search(query)
    is_secret &= found["scheme"].lower() not in _FILES_HERE
    return f"{found['scheme']}{found['begin']}***" if is_secret else found[0]


def holds_secret(url: str) -> bool:
    """Return whether ``hide_secrets`` would change a URL, blanks in it included."""
    if not _may_hold_secret(url):
        return False
    spaceless = re.sub(r"\s", "%20", url)
    return hide_secrets(spaceless) != spaceless


def refuse_secrets(url: str, where: str = "") -> None:
    """Raise ``ValueError`` for a URL that may hold a secret; ``where`` names what lists it."""
    if holds_secret(url):
        place = f"{where}: " if where else ""
        hidden = hide_secrets(re.sub(r"\s", "%20", url))
        raise ValueError(
            f"{place}{hidden} holds a password, a token or a query (***), which messages and "
            "caches would show. Give the plain URL, and credentials as storage_options= or in the "
            "environment. Instead of a signed URL, give one that these credentials open, such as "
            "s3://bucket/name."
        )


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
            f"{hide_secrets(os.fsdecode(path))} is a URL, and this needs a folder of this machine. "
            "Copy the files to a local disk, or mount them, as with mountpoint-s3 or gcsfuse, and "
            "give that."
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
