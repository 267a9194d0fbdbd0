"""Errors of remote file systems, with the secrets removed and a cure added."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from torch.utils import _pytree as pytree

from fastdata.errors import RemoteError
from fastdata.paths import hide_secrets

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
"""HTTP statuses of a file that does not exist."""

_REFUSED = (401, 403)
"""HTTP statuses of a request that needs other credentials."""

_TEXT_BYTES = 4
"""Length of the shortest secret that is removed from messages: less could be part of any word."""


class SizeError(OSError):
    """A file has another size than it was listed with."""


def true_cause(problem: Exception) -> Exception:
    """Return the cause of a FileNotFoundError that does not mean a missing file, else the error."""
    # Over HTTP, fsspec raises FileNotFoundError from any error of aiohttp, even if the server is
    # down.
    cause = problem.__cause__
    is_from_http = type(cause).__module__.partition(".")[0] == "aiohttp"
    if isinstance(problem, FileNotFoundError) and is_from_http:
        assert isinstance(cause, Exception)
        status = getattr(cause, "status", None)
        return problem if status in _GONE else cause
    return problem


def final_error(
    url: str, problem: Exception, options: Mapping[str, object], again: str = ""
) -> Exception:
    """Return the error to raise instead of a client's error, with the URL and what to do."""
    if isinstance(problem, FileNotFoundError):
        return FileNotFoundError(f"{url} does not exist")
    if isinstance(problem, ImportError | RemoteError | SizeError):
        return problem
    said = shown_error(problem, options)
    cure = "Check the network, and run again"
    # Without any credentials, cloud clients raise their own errors, and all name "credentials".
    is_refused = isinstance(problem, PermissionError) or "redential" in said
    if is_refused or getattr(problem, "status", None) in _REFUSED:
        cure = "Give valid credentials that allow this, in the environment or as storage_options="
    return RemoteError(f"{url}: {said}{again}. {cure}.")


def shown_error(problem: Exception, options: Mapping[str, object]) -> str:
    """Return the text of an error, without the secrets of URLs and of ``storage_options``."""
    said = hide_secrets(str(problem))
    if isinstance(problem, TimeoutError):
        said = said or "no answer in time"
    for text in pytree.tree_leaves(dict(options)):
        # An endpoint is not a secret, and the message needs it.
        is_text = isinstance(text, str) and len(text) >= _TEXT_BYTES
        if is_text and not text.startswith(("http://", "https://")):
            said = said.replace(text, "***").replace(quote(text, safe=""), "***")
    return f"{type(problem).__name__}: {said.rstrip('.')}"
