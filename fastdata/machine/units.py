"""Amounts of memory as text: read from users' arguments, and written to messages."""

from __future__ import annotations

import re

_UNITS = ("", "K", "M", "G", "T")


def parse_bytes(value: int | float | str, *, of: int) -> int:
    """Return a number of bytes, given as an int, as a float share of ``of``, or as text.

    Raises:
        ValueError: ``value`` is something else, or a share outside of (0, 1].
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I)?)?B\s*", value, re.I | re.A)
        if match is not None:
            number, unit, is_binary = match.groups(default="")
            base = 1024 if is_binary else 1000
            return int(float(number) * base ** _UNITS.index(unit.upper()))
    elif isinstance(value, float) and 0 < value <= 1:
        return int(value * of)
    elif type(value) is int and value >= 0:  # no bool
        return value
    raise ValueError(
        f"{value!r} is not an amount of memory. "
        "Give bytes as an int, a share of the free memory as a float in (0, 1], or text such as "
        "'8GiB' or '500MB'."
    )


def format_bytes(count: int) -> str:
    """Return bytes as text such as ``'1.2 GiB'``."""
    size: float = count
    unit = ""
    for larger in _UNITS[1:]:
        if round(size, 1) < 1024:
            break
        size /= 1024
        unit = f"{larger}i"
    return f"{size:.1f} {unit}B" if unit else f"{count} B"
