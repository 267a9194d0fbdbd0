"""Text that tells transforms apart, for the keys of caches and of stored samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastdata.pixels.arguments import interpolation_name, pair, several
from fastdata.pixels.fingerprint import fingerprint, name_of
from fastdata.pixels.known import known_name


def describe_transforms(
    steps: Iterable[Any], cache_key: str | None = None, *, is_pil: bool = False
) -> str:
    """Return a text that is equal, in any process, for transforms that do the same.

    Args:
        steps: transforms in their order; the text of none is empty.
        cache_key: as in ``fingerprint``.
        is_pil: True if samples are PIL images. Their resize and centre crop have the same text
            for torchvision v1, v2 and ``resize=``, because the pixels are the same.
    """
    texts = []
    for step in steps:
        text = _geometry_text(step) if is_pil else None
        is_pil = text is not None
        texts.append(text or _text_of_known(step) or _text_of_any(step, cache_key))
    return " | ".join(texts)


def _text_of_known(step: Any) -> str | None:
    """Return the class and attributes of a known transform, or None if they show an address.

    A hash of everything in it would take ten times as long.
    """
    if not known_name(step):
        return None
    held = getattr(step, "__dict__", {}).items()
    shown = {name: it for name, it in held if name[0] != "_" and name != "training"}
    text = f"{type(step)} {shown or repr(step)}"
    return None if " at 0x" in text else text


def _text_of_any(step: Any, cache_key: str | None) -> str:
    name = getattr(step, "__qualname__", type(step).__qualname__)
    return name_of(step) or f"{name} {fingerprint(step, cache_key)}"


def _geometry_text(step: Any) -> str | None:
    name = known_name(step)
    if name == "CenterCrop":
        return f"centre crop {pair(step.size)}"
    if name != "Resize" or step.max_size is not None:
        return None
    smooth = interpolation_name(step.interpolation)
    if smooth not in ("bilinear", "bicubic"):
        return None
    sides = several(step.size)
    size = sides[0] if len(sides) == 1 else pair(sides)
    return f"resize {size} {smooth}"
