"""Texts that identify transforms, for the keys of caches and of stored samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastdata.pixels.arguments import interpolation_name, pair, several
from fastdata.pixels.fingerprint import fingerprint, name_of
from fastdata.pixels.known import known_name


def describe_transforms(
    transforms: Iterable[Any], cache_key: str | None = None, *, is_pil: bool = False
) -> str:
    """Return a text that is equal, in any process, for transforms with equal results.

    Args:
        transforms: transforms in their order; the text is empty if there are none.
        cache_key: as in ``fingerprint``.
        is_pil: True if samples are PIL images. Then Resize and CenterCrop have the same text for
            torchvision v1, v2 and ``resize=``, because the pixels are the same.
    """
    texts = []
    for transform in transforms:
        text = _geometry_text(transform) if is_pil else None
        is_pil = text is not None
        texts.append(text or _text_of_known(transform) or _text_of_any(transform, cache_key))
    return " | ".join(texts)


def _text_of_known(transform: Any) -> str | None:
    """Return the class and attributes of a known transform; None if its text has an address.

    This takes a tenth of the time of a hash of everything inside it.
    """
    if not known_name(transform):
        return None
    held = getattr(transform, "__dict__", {}).items()
    shown = {name: it for name, it in held if name[0] != "_" and name != "training"}
    text = f"{type(transform)} {shown or repr(transform)}"
    return None if " at 0x" in text else text


def _text_of_any(transform: Any, cache_key: str | None) -> str:
    name = getattr(transform, "__qualname__", type(transform).__qualname__)
    return name_of(transform) or f"{name} {fingerprint(transform, cache_key)}"


def _geometry_text(transform: Any) -> str | None:
    name = known_name(transform)
    if name == "CenterCrop":
        return f"centre crop {pair(transform.size)}"
    if name != "Resize" or transform.max_size is not None:
        return None
    smooth = interpolation_name(transform.interpolation)
    if smooth not in ("bilinear", "bicubic"):
        return None
    sides = several(transform.size)
    size = sides[0] if len(sides) == 1 else pair(sides)
    return f"resize {size} {smooth}"
