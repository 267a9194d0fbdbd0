"""Paths of this machine, URLs, and the secrets that URLs may hold."""

from __future__ import annotations

import errno
import os
import re
import stat
from urllib.parse import unquote

AnyPath = str | os.PathLike[str]


_URL = re.compile(r"(?!file:)[A-Za-z][\w+.-]+:[:/]")
"""With one slash, which is what ``Path`` leaves of two; a drive of Windows has one letter. With two
colons it begins a chain of fsspec's, as in ``simplecache::s3://bucket``."""

_CHAIN = re.compile(r"[A-Za-z][\w+.-]*::|.*::(?:[A-Za-z][\w+.-]+:)?/", re.DOTALL)


def is_url(path: AnyPath) -> bool:
    text = os.fsdecode(path)
    return _URL.match(text) is not None and not os.path.exists(text)


_NAMES_OF_USERS = {
    *("abfs", "abfss", "az", "ftp", "ftps", "hdfs", "hf", "oci", "scp", "sftp", "smb"),
    *("ssh", "wasb", "wasbs", "webhdfs"),
}
"""Schemes that have the name of a user, container or repository before the @, which is not secret.
Others have a token there, such as GitHub's and Hugging Face's https://TOKEN@host."""

_WITHOUT_SECRETS = {"file", "local", "github"}
"""The last is fsspec's, with github://organisation:repository@branch/path."""

_CHAIN_LINK = re.compile(r"::(?=(?:[a-z][\w+.-]+:)?/)", re.IGNORECASE)
"""Comes before the next URL or path of a chain, as in zip://a.png::https://host/a.zip."""

_SCHEME = re.compile(r"(?<![\w+.-])([\w+.-]{2,}):/{1,3}")

_SCHEME_OR_MARK = re.compile(rf"{_SCHEME.pattern}|[?#]")

_HOST = re.compile(r"[^/?#]*")

_PASSWORD = re.compile(r"(?:\[[\da-fA-F:.]+\]|(?!\[[\da-fA-F:.]+\]))[^/?#@:]*:(?!\d*(?:[/?#]|$))")
"""A user and a colon with no port behind it. In brackets is an address of IPv6."""

_SENDS_QUERIES = re.compile(r"(?:https?|(?:web)?davs?(?:\+https?)?)\Z", re.IGNORECASE)
"""Schemes whose queries are sent to the server, so that one without a = may be a token, too."""

_PUBLIC_QUERY = re.compile(r"versionId=[\w.-]+", re.IGNORECASE)
"""The version of an object, which s3fs reads."""

_END_OF_NAME = re.compile(r"\.\w{1,8}$")

_PUNCTUATION = ".,:;'\")]"


def hide_secrets(text: str) -> str:
    """Replace by ``***`` what may be a secret in the URLs of a text.

    Secrets are a password or a token before the host, and a query, which may be a signature. This
    function alone decides what is one: see also ``refuse_secrets``. Texts may come from others, so
    its time grows with the length of the text, not with its square.

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
    """Return False for most texts, at once: a list may have a million."""
    return ":/" in text and ("@" in text or "?" in text or "#" in text)


def _hide_in_word(word: str) -> str:
    """Hide the secrets of a word without blanks, which may be a URL, a chain or a list of some."""
    if not _may_hold_secret(word):
        return word
    return "::".join(_hide_query(_hide_credentials(part)) for part in _CHAIN_LINK.split(word))


def _hide_credentials(text: str) -> str:
    shown = []
    done = 0
    last = text.rfind("@")
    for start in _SCHEME.finditer(text):
        begin = start.end()
        if begin < done:  # in a password
            continue
        if begin > last:
            break
        # A password may hold a / or an @, so that it ends at the last @. Else a user or a token
        # ends at the @ of the host.
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
    scheme = ""
    is_sent = False
    for found in _SCHEME_OR_MARK.finditer(text):
        if found[1]:
            scheme = found[1].lower()
            is_sent = _SENDS_QUERIES.search(scheme) is not None
        elif is_sent or (scheme and found[0] == "?"):  # else # is part of a name
            break
    else:
        return text
    query = text[found.end() :].rstrip(_PUNCTUATION)
    if "=" in query:
        is_secret = not _PUBLIC_QUERY.fullmatch(query)
    else:  # may be part of a name, or of a pattern such as train-0?.tar
        is_secret = bool(query) and is_sent and found[0] == "?" and not _END_OF_NAME.search(query)
    if scheme in _WITHOUT_SECRETS or not is_secret:
        return text
    return f"{text[: found.end()]}***{text[found.end() + len(query) :]}"


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


def refuse_chain(url: str, where: str = "") -> None:
    """Raise ``ValueError`` for a chained URL of fsspec's; ``where`` names what lists it."""
    if _CHAIN.match(url):
        place = f"{where}: " if where else ""
        raise ValueError(
            f"{place}{hide_secrets(url)} is a chained URL (::), which fastdata cannot read. Give "
            "one URL. For files in an archive: 'zip://folder' with "
            "storage_options={'fo': 'archive.zip'}. For copies on this machine: the plain URL, "
            "and cache_dir= or local_cache=."
        )


def local_path(path: AnyPath) -> str:
    """Return a path of this machine with ``~`` expanded, also of a ``file://`` URL.

    Such a URL has escapes, as ``Path.as_uri`` writes them; names that exist are taken as they are.
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
