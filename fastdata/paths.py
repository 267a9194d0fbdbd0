"""Paths of this machine, URLs, and the secrets that URLs may hold.

fastdata shows paths in messages and writes them to caches, so it refuses URLs with a password, a
token or a signature. Only ``hide_secrets`` decides what a secret is.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterable
from urllib.parse import unquote

AnyPath = str | os.PathLike[str]

_URL = re.compile(r"(?!file:)[A-Za-z][\w+.-]+:[:/]")
"""The beginning of a URL. One slash is enough, because ``Path`` turns two slashes into one. A
scheme has at least two letters, because a drive of Windows has one. Two colons begin a chain of
fsspec, such as ``simplecache::s3://bucket``."""
_CHAIN = re.compile(r"[A-Za-z][\w+.-]*::|.*::(?:[A-Za-z][\w+.-]+:)?/", re.DOTALL)


def is_url(path: AnyPath) -> bool:
    """Return True for the URL of another machine; a path that exists here is not a URL."""
    text = os.fsdecode(path)
    return _URL.match(text) is not None and not os.path.exists(text)


_NAMES_OF_USERS = {
    *("abfs", "abfss", "az", "ftp", "ftps", "hdfs", "hf", "oci", "scp", "sftp", "smb"),
    *("ssh", "wasb", "wasbs", "webhdfs"),
}
"""Schemes that have the name of a user, container or repository before the @, which is not secret.
Other schemes may have a token there, such as https://TOKEN@host for GitHub and Hugging Face."""
_WITHOUT_SECRETS = {"file", "local", "github"}
"""fsspec's github scheme is github://organisation:repository@branch/path."""
_CHAIN_LINK = re.compile(r"::(?=(?:[a-z][\w+.-]+:)?/)", re.IGNORECASE)
"""The link before the next URL or path of a chain, as in zip://a.png::https://host/a.zip."""
_SCHEME = re.compile(r"(?<![\w+.-])([\w+.-]{2,}):/{1,3}")
_SCHEME_OR_MARK = re.compile(rf"{_SCHEME.pattern}|[?#]")
_HOST = re.compile(r"[^/?#]*")
_PASSWORD = re.compile(r"(?:\[[\da-fA-F:.]+\]|(?!\[[\da-fA-F:.]+\]))[^/?#@:]*:(?!\d*(?:[/?#]|$))")
"""A user and a colon that is not followed by a port. Brackets enclose an IPv6 address."""
_SENDS_QUERIES = re.compile(r"(?:https?|(?:web)?davs?(?:\+https?)?)\Z", re.IGNORECASE)
"""Schemes whose queries are sent to the server, so that even a query without = may be a token."""
_PUBLIC_QUERY = re.compile(r"versionId=[\w.-]+", re.IGNORECASE)
"""The version of an object, which s3fs reads."""
_END_OF_NAME = re.compile(r"\.\w{1,8}$")
_PUNCTUATION = ".,:;'\")]"


def hide_secrets(text: str) -> str:
    """Replace everything in the URLs of a text that may be a secret by ``***``.

    Secrets are a password or a token before the host, and a query, which may be a signature. The
    time grows with the length of the text, not with its square, because texts may come from others.

    Example:
        >>> hide_secrets("https://me:password@host/a.png and https://host/a.png?sig=abc")
        'https://***@host/a.png and https://host/a.png?***'
        >>> hide_secrets("sftp://me@host:2222/a.png")
        'sftp://me@host:2222/a.png'
    """
    if not _may_hold_secret(text):
        return text
    return re.sub(r"\S+", lambda word: _hide_in_word(word[0]), text)


def _may_hold_secret(text: str) -> bool:
    """Return False for most texts, without a regular expression: a list may have a million."""
    return ":/" in text and ("@" in text or "?" in text or "#" in text)


def _hide_in_word(word: str) -> str:
    """Hide the secrets in a word without blanks: a URL, a chain, or a list of URLs."""
    if not _may_hold_secret(word):
        return word
    return "::".join(_hide_query(_hide_credentials(part)) for part in _CHAIN_LINK.split(word))


def _hide_credentials(text: str) -> str:
    """Hide the password or token between a scheme and the @ before its host."""
    shown = []
    done = 0
    last = text.rfind("@")
    for start in _SCHEME.finditer(text):
        begin = start.end()
        if begin < done:  # in a password
            continue
        if begin > last:
            break
        # A password may contain / and @, so it ends at the last @ of the text. A user or a token
        # cannot: it ends at the last @ before the first slash.
        host = _HOST.match(text, begin)
        assert host is not None
        end = last if _PASSWORD.match(text, begin) else text.rfind("@", *host.span())
        if end < 0:
            continue
        scheme = start[1].lower()
        is_name = not re.search(":|%3a", text[begin:end], re.IGNORECASE)
        if scheme in _WITHOUT_SECRETS or (is_name and scheme in _NAMES_OF_USERS):
            continue
        shown += [text[done:begin], "***"]
        done = end
    return "".join([*shown, text[done:]])


def _hide_query(text: str) -> str:
    """Hide the query of a URL, unless it is part of a file's name or the version of an object."""
    scheme = ""
    is_sent = False
    # The last scheme before the mark decides: a path may contain another URL.
    for found in _SCHEME_OR_MARK.finditer(text):
        if found[1]:
            scheme = found[1].lower()
            is_sent = _SENDS_QUERIES.search(scheme) is not None
        elif is_sent or (scheme and found[0] == "?"):  # else # is part of a name
            break
    else:
        return text
    # Punctuation at the end belongs to the sentence around the URL.
    query = text[found.end() :].rstrip(_PUNCTUATION)
    if "=" in query:
        is_secret = not _PUBLIC_QUERY.fullmatch(query)
    else:  # may be part of a name, or of a pattern such as train-0?.tar
        is_secret = bool(query) and is_sent and found[0] == "?" and not _END_OF_NAME.search(query)
    if scheme in _WITHOUT_SECRETS or not is_secret:
        return text
    return f"{text[: found.end()]}***{text[found.end() + len(query) :]}"


def refuse_secrets(url: str, before: str = "") -> None:
    """Raise ``ValueError`` for a URL that may hold a secret; its text begins with ``before``."""
    if not _may_hold_secret(url):
        return
    # ``hide_secrets`` searches word by word, but a URL may contain blanks.
    spaceless = re.sub(r"\s", "%20", url)
    hidden = hide_secrets(spaceless)
    if hidden != spaceless:
        raise ValueError(
            f"{before}{hidden} holds a password, a token or a query (***), which messages and "
            "caches would show. Give the plain URL, and credentials as storage_options= or in the "
            "environment. Instead of a signed URL, give one that these credentials open, such as "
            "s3://bucket/name."
        )


def refuse_chain(url: str) -> None:
    """Raise ``ValueError`` for a chained URL of fsspec."""
    if _CHAIN.match(url):
        raise ValueError(
            f"{hide_secrets(url)} is a chained URL (::), which fastdata cannot read. Give one URL. "
            "For files in an archive: 'zip://folder' with "
            "storage_options={'fo': 'archive.zip'}. For copies on this machine: the plain URL, "
            "and cache_dir= or local_cache=."
        )


def local_path(path: AnyPath) -> str:
    """Return the path of a file on this machine, given as a path or a ``file://`` URL.

    ``~`` is expanded. Escapes in a URL, which ``Path.as_uri`` writes, are decoded, unless a file
    of the undecoded name exists.
    """
    text = os.fsdecode(path)
    if text.startswith("file:/"):
        text = re.sub(r"^file:(//(localhost(?=/))?)?", "", text)
        if not os.path.exists(text):
            text = unquote(text, errors="surrogateescape")
        if os.name == "nt":
            text = re.sub(r"^/(?=[A-Za-z]:)", "", text)
    return os.path.expanduser(text)


READ_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags for ``os.open``. Without O_NONBLOCK, opening a pipe would wait for its writer."""
NO_FILE = errno.EINVAL, "not a file, but a folder, a pipe or a device"


def open_file(path: AnyPath, flags: int = 0) -> int:
    """Open a file to read it, as ``os.open`` does.

    Raises:
        OSError: the path leads to a folder, or to a pipe or device, which may never end.
    """
    # Checked after opening: between a check and the opening, the name could go to another file.
    fd = os.open(path, flags | READ_FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(*NO_FILE, os.fspath(path))


def read_whole(paths: Iterable[AnyPath]) -> list[bytes]:
    """Return the whole contents of files of this machine."""
    contents = []
    for path in paths:
        # open_file refuses pipes and devices: reading one to its end could take forever.
        with io.FileIO(path, opener=open_file) as file:
            contents.append(file.readall())
    return contents


def refuse_remote(path: AnyPath) -> None:
    """Raise ``ValueError`` for a URL where a folder or a file of this machine is needed."""
    if is_url(path):
        raise ValueError(
            f"{hide_secrets(os.fsdecode(path))} is a URL, but a folder of this machine is needed. "
            "Copy the files to a local disk, or mount them with mountpoint-s3 or gcsfuse, and give "
            "the path of the folder."
        )
