"""Errors of remote file systems, told without their secrets and with what to do."""

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

_REFUSED = (401, 403)
"""Answers of HTTP servers."""

_TEXT_BYTES = 4
"""Shortest secret that is looked for in messages; a shorter one could be part of any word."""


class SizeError(OSError):
    """A file has another size than it was listed with."""


def true_cause(problem: Exception) -> Exception:
    """Return the cause of a FileNotFoundError, which fsspec's HTTP raises for any answer."""
    # fsspec raises FileNotFoundError from the error of aiohttp, also for a server that is down.
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
    """Return the error to raise instead of a client's, with the URL and what to do."""
    if isinstance(problem, FileNotFoundError):
        return FileNotFoundError(f"{url} is not there")
    if isinstance(problem, ImportError | RemoteError | SizeError):
        return problem
    said = shown_error(problem, options)
    cure = "Look at the network, and run again"
    # Clients of clouds raise errors of their own when they find no credentials at all.
    is_refused = isinstance(problem, PermissionError) or "redential" in said
    if is_refused or getattr(problem, "status", None) in _REFUSED:
        cure = (
            "Give credentials that are valid and allow it, in the environment or as "
            "storage_options="
        )
    return RemoteError(f"{url}: {said}{again}. {cure}.")


def shown_error(problem: Exception, options: Mapping[str, object]) -> str:
    """Return the text of an error, without the secrets of URLs and of ``storage_options``."""
    said = hide_secrets(str(problem))
    if isinstance(problem, TimeoutError):
        said = said or "no answer in time"
    for text in pytree.tree_leaves(dict(options)):
        # An endpoint is not a secret, and the message is worth little without it.
        is_text = isinstance(text, str) and len(text) >= _TEXT_BYTES
        if is_text and not text.startswith(("http://", "https://")):
            said = said.replace(text, "***").replace(quote(text, safe=""), "***")
    return f"{type(problem).__name__}: {said.rstrip('.')}"
