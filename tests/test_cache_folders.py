"""Folders of caches: who writes them, and what becomes of a writer that fails, is killed or may not write."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import save_image
from fastdata import ImageFolder, SampleError
from fastdata.cache.folders import locked

Folder = Callable[..., Path]


def cached(root: Path) -> ImageFolder:
    return ImageFolder(root, cache_dir=root.parent / "cache", resize=(7, 9), progress=False, num_workers=2)


def all_files(folder: Path) -> set[str]:
    """Every file and folder but listings, which are written anew whenever directories change."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith("scan-")}


def refuse(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_workers_of_a_killed_writer_are_waited_for(tmp_path: Path) -> None:
    """The lock of a writer that was killed is free only when the processes that it forked have ended as well."""
    home = tmp_path / "home"
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe(duplex=False)
    ready = context.Event()

    def write() -> None:
        with locked(home):
            if os.fork() == 0:
                ours.close()
                ready.set()
                theirs.poll(60)  # until the test lets go of its end
                os._exit(0)
            signal.pause()

    writer = context.Process(target=write)
    writer.start()
    assert ready.wait(timeout=30)
    writer.kill()
    writer.join()
    writer.close()
    with pytest.raises(TimeoutError), locked(home, wait=False):
        pass
    ours.close()
    theirs.close()
    with locked(home):
        pass
    assert all_files(tmp_path) == {".home.lock"}


def test_an_update_that_fails_leaves_the_cache_as_it_was(image_folder: Folder) -> None:
    """What it wrote before a file that is no image goes at once, not only with a later run that succeeds."""
    root = image_folder(per_class=6, size=(13, 11))
    cached(root).close()
    before = all_files(root.parent / "cache")
    for number in range(3):
        save_image(root / "cat" / f"00{number}.jpg", 100 + number, (13, 11))
    (root / "cat" / "001.jpg").write_bytes(b"no image")
    with pytest.raises(SampleError, match=r"001\.jpg"):
        cached(root)
    assert all_files(root.parent / "cache") == before
