"""What ``fastdata.tune`` found, kept for loaders with ``num_workers="auto"``: a small file each.

Nothing is looked for unless an outcome was kept on this machine before.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdata.describe import describe
from fastdata.memory import cpu_model, usable_cores, user_cache
from fastdata.ranks import local_ranks
from fastdata.report import warn_user

_MOST = {"num_workers": 1024, "prefetch_factor": 1024}
_ENGINES = ("auto", "thread", "process")


def tuned_folder() -> Path:
    return user_cache() / "tuned"


def describe_tuned(dataset: Any) -> str:
    """Text that is equal where an outcome holds: CPU, cores, ranks, the dataset's samples, storage and transforms."""
    words = [cpu_model(), f"{usable_cores()} cores", f"{local_ranks()} ranks"]
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        words.append(f"{type(dataset).__qualname__} of {len(dataset.indices)}")
        dataset = dataset.dataset
    words += [f"{type(dataset).__module__}.{type(dataset).__qualname__}", f"{len(dataset)} samples"]
    root = getattr(dataset, "root", None)
    words += [os.path.abspath(root) if isinstance(root, (str, os.PathLike)) else "", getattr(dataset, "storage", "")]
    calls = (getattr(dataset, name, None) for name in ("transform", "target_transform", "transforms"))
    return " | ".join([*words, *(describe(call, cache_key="") for call in calls if call is not None)])


def _file_of(key: str) -> Path:
    return tuned_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def keep_tuned(key: str, best: Mapping[str, Any], **facts: Any) -> Path:
    """Write an outcome, in place of an earlier one."""
    path = _file_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        json.dump({"for": key, "best": dict(best), **facts}, file, indent=2)
    os.replace(file.name, path)
    return path


def find_tuned(dataset: Any) -> dict[str, Any]:
    """The loader's options of the outcome kept for this dataset on this machine; empty where there is none."""
    try:
        path = _file_of(describe_tuned(dataset)) if tuned_folder().is_dir() else None
    except (RuntimeError, TypeError):  # there is no home; a dataset has no length
        return {}
    if path is None or not path.exists():
        return {}
    try:
        best = json.loads(path.read_text("utf-8"))["best"]
        found = {name: best[name] for name in (*_MOST, "workers") if name in best}
        numbers = [(found[name], most) for name, most in _MOST.items() if name in found]
        is_sound = all(type(number) is int and 0 <= number <= most for number, most in numbers)
        if not is_sound or "num_workers" not in found or found.get("workers", "auto") not in _ENGINES:
            raise ValueError(f"options {best!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn_user(f"{path}, an outcome of fastdata.tune, cannot be used ({error}); tune again, or delete it")
        return {}
    return found
