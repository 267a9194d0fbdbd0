"""Folders of class folders, listed as torchvision does.

A listing that had to wait, as on a network file system, is kept in the user's cache folder. It is
used again as long as no folder in it has changed; ``FASTDATA_LISTINGS=off`` lists anew each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from pathlib import Path

from fastdata.errors import AnyPath
from fastdata.machine.memory import user_cache
from fastdata.report import log
from fastdata.sources.remote import Place

SCAN_THREADS = 16
"""Folders listed at once where listing waits, as on a network file system."""
SCAN_PATIENCE_S = 0.02
"""Wait beyond the work done that makes threads worth it. Without a wait they only pass the GIL
around: 50,000 files in 100 folders of a local disk take 37 ms in one thread, 61 ms in eight, and
torchvision 65 ms."""
KEEP_PATIENCE_S = 1.0
"""Wait that makes a listing worth keeping."""
SETTLED_S = 600.0
"""How long a folder must not have changed; clocks of file servers are wrong by less."""

Endings = str | tuple[str, ...]


def find_classes(directory: AnyPath) -> tuple[list[str], dict[str, int]]:
    """List the class folders in ``directory``, sorted, with their indices, as torchvision does."""
    place = directory if isinstance(directory, Place) else Place(directory)
    classes = place.folders()
    if not classes:
        raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
    return classes, {name: index for index, name in enumerate(classes)}


def scan_folder(
    root: AnyPath,
    class_to_idx: dict[str, int],
    extensions: Endings | None = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
) -> list[tuple[str, int]]:
    """List the samples below class folders: torchvision's ``make_dataset``, but faster.

    Order and errors are torchvision's. Links are followed. Folders that are slow to list, as over a
    network, are listed in parallel threads; ``is_valid_file`` runs in the calling thread, in order.
    """
    if not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError(
            "Both extensions and is_valid_file cannot be None or not None at the same time"
        )
    endings = extensions or ""  # which every name ends in
    if not isinstance(endings, str):
        endings = tuple(endings)
    samples: list[tuple[str, int]] = []
    empty: list[str] = []
    names = sorted(class_to_idx)
    for name, paths in zip(names, _list_classes(root, names, endings), strict=True):
        valid = list(filter(is_valid_file, paths))
        samples += zip(valid, repeat(class_to_idx[name]), strict=False)
        if not valid:
            empty.append(name)
    if empty and not allow_empty:
        message = f"Found no valid file for the classes {', '.join(empty)}. "
        if extensions is not None:
            listed = extensions if isinstance(extensions, str) else ", ".join(extensions)
            message += f"Supported extensions are: {listed}"
        raise FileNotFoundError(message)
    return samples


def _list_classes(root: AnyPath, names: list[str], endings: Endings) -> Iterator[list[str]]:
    """List folders in turn, the rest in threads once listing has waited more than it worked."""
    if isinstance(root, Place):
        # In the order of _list_files, all folders at once.
        for found in [root.find(name) for name in names]:
            files = sorted(found.result(), key=os.path.split)
            yield [root.at(name) for name in files if name.lower().endswith(endings)]
        return
    tops = [os.path.join(os.path.expanduser(root), name) for name in names]
    kept = _path_of_listing(tops, endings)
    paths = _read_listing(kept)
    if paths is None:
        began_s = time.time()
        waited_s = _clock_of_waits()
        listed = []
        for top in tops:
            listed.append(_list_files(top, endings))
            if _clock_of_waits() - waited_s > SCAN_PATIENCE_S:
                with ThreadPoolExecutor(SCAN_THREADS) as threads:
                    listed += threads.map(_list_files, tops[len(listed) :], repeat(endings))
                break
        paths = [files for _, files in listed]
        if kept is not None and _clock_of_waits() - waited_s > KEEP_PATIENCE_S:
            folders = itertools.chain.from_iterable(found for found, _ in listed)
            _write_listing(kept, folders, paths, began_s - SETTLED_S)
    yield from paths


def _clock_of_waits() -> float:
    """Goes on while this thread waits, and back while it works."""
    return time.perf_counter() - 2 * time.thread_time()


def _list_files(top: str, endings: Endings) -> tuple[list[str], list[str]]:
    """The folders below ``top``, and the files in them that end in one of ``endings``.

    In torchvision's order.
    """
    folders: list[str] = []
    paths: list[str] = []
    # What cannot be listed is left out; "" is no folder, so that no such listing is kept.
    walked = os.walk(top, followlinks=True, onerror=lambda _: folders.append(""))
    for folder, _, names in sorted(walked):
        folders.append(folder)
        prefix = os.path.join(folder, "")
        paths += [prefix + name for name in sorted(names) if name.lower().endswith(endings)]
    return folders, paths


# A listing that is kept: a header in JSON, and the paths


def _path_of_listing(tops: Sequence[str], endings: Endings) -> Path | None:
    """None where the user wants none."""
    if os.environ.get("FASTDATA_LISTINGS") == "off":
        return None
    # With what relative paths are relative to.
    named = json.dumps([os.path.abspath(tops[0]), tops, endings])
    return user_cache() / "folders" / hashlib.sha256(named.encode()).hexdigest()[:32]


def _read_listing(kept: Path | None) -> list[list[str]] | None:
    """The paths of each top; None where none are kept, or a folder has changed since."""
    if kept is None:
        return None
    try:
        header, *names, end = kept.read_bytes().split(b"\0")
        facts = json.loads(header)
        is_whole = end == b"" and len(names) == sum(facts["counts"])
        if not is_whole or _times_of_change(facts["changed"]) != facts["changed"]:
            return None
        paths = map(os.fsdecode, names)
        listed = [list(islice(paths, count)) for count in facts["counts"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none of this version
        return None
    log.info("%d files as they were listed before (%s)", len(names), kept)
    return listed


def _write_listing(
    kept: Path, folders: Iterable[str], paths: Sequence[Sequence[str]], settled_s: float
) -> None:
    """Keep it, unless a folder has changed lately, and so might have behind the listing.

    Nor where all have one time, as that of the mount: file systems over objects know no other.
    """
    with contextlib.suppress(OSError):  # of a folder that is gone, or a cache that takes no files
        changed = _times_of_change(folders)
        if not min(changed.values()) < max(changed.values()) < settled_s * 1e9:
            return
        header = json.dumps({"changed": changed, "counts": list(map(len, paths))})
        names = [os.fsencode(path) for path in itertools.chain.from_iterable(paths)]
        Place(kept.parent).write(kept.name, b"\0".join([header.encode(), *names, b""]))


def _times_of_change(folders: Iterable[str]) -> dict[str, int]:
    """By folder when a name in it came or went, in ns; OSError where one is not there.

    Programs that unpack or copy set the first of the two back, none the other.
    """

    def time_of(folder: str) -> tuple[str, int]:
        found = os.stat(folder)
        return folder, max(found.st_mtime_ns, found.st_ctime_ns)

    with ThreadPoolExecutor(SCAN_THREADS) as threads:
        return dict(threads.map(time_of, folders))
