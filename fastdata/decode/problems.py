"""What is said of a sample that cannot be read."""

from __future__ import annotations

import os

from fastdata.decode.images import JPEG_START
from fastdata.errors import SampleError

__all__ = ["sample_error"]


_WRONG_CODE = (TypeError, AttributeError, NameError, ImportError)
"""What no content of a file raises, but the code that reads it."""


def sample_error(path: str | None, index: int, cause: BaseException) -> SampleError:
    """Say why one sample cannot be read: which, what was found, and the cure.

    Args:
        path: the sample's file, looked at again for its size and first bytes; None where the sample has none.
        index: the sample's position in its dataset.
        cause: what reading it raised.
    """
    where = f"sample {index}" if path is None else f"sample {index}, {path},"
    found = "" if path is None else f"It is {_describe_file(path)}. "
    cure = "Correct the dataset" if path is None else "Delete or replace the file"
    if path is not None and isinstance(cause, _WRONG_CODE):
        cure, found = "Correct what opens or prepares it (loader=, prepare=, the transform's first steps)", ""
    problem = f"{type(cause).__name__}: {str(cause).rstrip('.')}"
    return SampleError(
        f"{where} cannot be read: {problem}. {found}{cure}, or leave it out with on_error='skip'.",
        index=index,
        path=path,
    )


def _describe_file(path: str) -> str:
    """Size and kind of a file that could not be read."""
    try:
        with open(path, "rb") as stream:
            start = stream.read(64)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 2))
            end = stream.read()
    except OSError as problem:
        return f"a file that cannot be opened ({problem.strerror or problem})"
    if size == 0:
        return "an empty file (0 bytes)"
    return f"a file of {size:,} bytes, {_kind(start, end)}"


def _kind(start: bytes, end: bytes) -> str:
    if start.startswith(JPEG_START):
        return "a JPEG" if end == b"\xff\xd9" else "a JPEG without its end, probably cut off"
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "a damaged WebP"
    for signature, kind in _SIGNATURES.items():
        if start.lstrip().lower().startswith(signature.lower()):
            return kind
    if not start.strip(b"\0"):
        return "only zeros at its start"
    return f"no image: it starts with {start[:16]!r}"


_SIGNATURES = {
    b"\x89PNG": "a damaged PNG",
    b"GIF8": "a damaged GIF",
    b"BM": "a damaged BMP",
    b"II*\0": "a damaged TIFF",
    b"MM\0*": "a damaged TIFF",
    b"<!doctype html": "an HTML page, probably a failed download",
    b"<html": "an HTML page, probably a failed download",
    b"version https://git-lfs": "a Git LFS pointer; fetch the file with `git lfs pull`",
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
}
