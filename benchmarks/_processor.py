"""Facts about the processor of a measurement, which every JSON of a benchmark records.

It imports only the standard library, so that a script can import it before it chooses a tree of fastdata.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

__all__ = ["processor_facts"]

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
FIELDS = {
    "vendor_id": "vendor",
    "cpu family": "family",
    "model": "model",
    "model name": "model_name",
    "stepping": "stepping",
}
"""Fields of ``/proc/cpuinfo`` on x86, and their names in the JSON."""


def processor_facts(cpuinfo: Path = CPUINFO, caches: Path = CACHES) -> dict[str, Any]:
    """Return the processor's architecture, cores, family, model and caches.

    Facts that this system does not have, such as the files of Linux, are left out.
    """
    facts: dict[str, Any] = {"architecture": platform.machine(), "cores": os.cpu_count()}
    found = dict(re.findall(r"^([\w ]+?)\s*:\s*(.+)$", _first_processor(_text(cpuinfo)), re.M))
    facts |= {name: found[field] for field, name in FIELDS.items() if field in found}
    sizes = {}
    for cache in sorted(caches.glob("index*")):
        level, kind, size = (_text(cache / name).strip() for name in ("level", "type", "size"))
        if level and size:
            sizes[f"L{level} {kind.lower()}".strip()] = size
    if sizes:
        facts["caches"] = sizes
    return facts


def _first_processor(text: str) -> str:
    return text.partition("\n\n")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
