"""Fixtures of every test."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest
import torch

import fastdata
from data import save_image
from fresh import Interpreters
from leftovers import Holdings, wait_for_none
from levels import Levels, lower_levels
from simcuda import Sim
from torchvision_ops import import_torchvision

# For the processes that this one starts, xdist's among them: threads of an operation that wait for
# each other at work take up to 20 times as long on cores that others use, as these processes do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

STDERR = pytest.StashKey[int]()

FolderMaker = Callable[..., Path]


def shown(value: object) -> str:
    """A parameter's name: without an address, so that processes that share the tests name them alike."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


HANGS_S = 400
"""Longer than any test's timeout."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that pytest does not capture, and stop where there is no core to test.

    ``python -m pytest`` in a clone imports its sources, where hundreds of tests would fail.
    """
    config.stash[STDERR] = os.dup(2)
    if not config.getoption(
        "numprocesses", None
    ):  # else other processes import it and run the tests
        import_torchvision()
    clone = Path(__file__).parents[1]
    core = clone / "fastdata" / "pixels" / "core"
    if Path(fastdata.__file__).parents[1] == clone and not any(core.glob("core-level*")):
        raise pytest.UsageError(
            f"fastdata is imported from {clone}, which has no compiled core: run pytest instead of "
            "python -m pytest to test the installed one, or build it here: pip install -e '.[test]'"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process of a test that hangs where no timeout reaches it, and say where.

    In C, with the GIL, or at its end, as in a ``with`` that waits for a thread: its timeout is spent then.
    """
    faulthandler.dump_traceback_later(HANGS_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure(config: pytest.Config) -> None:
    """A thread that is left must not hold up the interpreter's end."""
    faulthandler.dump_traceback_later(60, exit=True, file=config.stash[STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if os.environ.get("FASTDATA_REQUIRE_CUDA") == "1":
        pytest.fail("FASTDATA_REQUIRE_CUDA=1 but torch sees no CUDA device")
    pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def children_import_what_is_tested(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``python -c`` in a child process finds this process's fastdata, not the sources in the folder of the clone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        patch.setenv("PYTHONPATH", str(Path(fastdata.__file__).parents[1]), prepend=os.pathsep)
        yield


@pytest.fixture(autouse=True, scope="session")
def collections_leave_imports_alone() -> None:
    """Let the garbage collector look only at what tests make: over all of torch it takes 0.2 s, for many tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def few_loggers_get_handlers() -> None:
    """Let torch's fifty loggers hand records on: pytest adds handlers to each that does not, six times in a test."""
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="session")
def forks_copy_little(collections_leave_imports_alone: None) -> None:
    """Let Linux hold what is imported in large pages: with small ones a fork takes 20 ms of a core, for tables."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else ():
        place, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in place.split("-"))
            first, last = -(-first // LARGE_PAGE) * LARGE_PAGE, last // LARGE_PAGE * LARGE_PAGE
            if first < last:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


LARGE_PAGE = 1 << 21
MADV_COLLAPSE = 25
"""Of Linux 6.1; others refuse it, which changes nothing."""


@pytest.fixture(autouse=True, scope="session")
def others_have_torch() -> None:
    """Let the server that forks processes import torch once: each spawned one would take 3 s of a core for it."""
    multiprocessing.set_forkserver_preload(["children", "fastdata.tools.__main__"])


@pytest.fixture(scope="session")
def fresh() -> Iterator[Interpreters]:
    """Run scripts in interpreters of their own, which have imported torch and nothing of fastdata."""
    interpreters = Interpreters()
    yield interpreters
    interpreters.close()


@pytest.fixture(autouse=True, scope="session")
def cuda_is_up() -> None:
    """Let CUDA open the pipes that it keeps open before a test counts descriptors."""
    if torch.cuda.is_available():
        with fastdata.CudaPrefetcher([torch.ones(1 << 20)]) as batches:
            next(iter(batches)).sum().item()
        torch.cuda.synchronize()


@pytest.fixture(autouse=True, scope="session")
def fsspec_is_up() -> None:
    """Let fsspec start the threads that it keeps, of its event loop, before a test counts threads."""
    loop = fsspec.asyn.get_loop()
    loop.call_soon_threadsafe(loop.set_default_executor, ThreadPoolExecutor(1))
    asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), loop).result()


@pytest.fixture(autouse=True, scope="session")
def torch_waits_less() -> Iterator[None]:
    """An iterator that an exception holds ends its workers from the collector: after 0.2 s each, in place of 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
        # The default of an argument: a loop that waits for a batch looks for dead workers as often.
        waits: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
        patch.setattr(waits, "__defaults__", (0.2,))
        yield


@pytest.fixture(autouse=True, scope="session")
def probes_may_end() -> Iterator[None]:
    """However long the first one of a short tune takes on a loaded machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastdata.tools.judge._GRACE_S", 60.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def users_cache_is_left_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """No thread, child process, descriptor or shared-memory file made by a test survives it."""
    before = Holdings.now()
    yield
    left = wait_for_none(before)
    if left:
        pytest.fail("left behind by the test:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def lower_cores(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The libraries of the levels of instruction set below the one that is used."""
    return lower_levels(tmp_path_factory.mktemp("levels"))


@pytest.fixture
def levels_agree(lower_cores: list[Any]) -> Iterator[Levels]:
    """Each call of the core in this process is repeated by all lower levels, which must give the same bytes."""
    levels = Levels(lower_cores)
    levels.install()
    yield levels
    levels.uninstall()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts this process and those it starts, also where tests run under nohup or in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def gpu() -> Iterator[Sim]:
    """A GPU that does everything as late as it may; nothing may have gone wrong at the end."""
    simulated = Sim()
    with simulated.installed():
        yield simulated
        gc.collect()
    assert simulated.violations == []


@pytest.fixture
def image_folder(tmp_path: Path) -> FolderMaker:
    """Makes class folders of small JPEGs and returns their root.

    ``image_folder(classes=("cat", "dog"), per_class=3, size=(12, 10), suffix=".jpg")``: the size is width, height; each
    image has a level of its own and gradients in x and y, so that no two images and no two mirrored images are equal.
    """

    def make(
        classes: tuple[str, ...] = ("cat", "dog"),
        per_class: int = 3,
        size: tuple[int, int] = (12, 10),
        suffix: str = ".jpg",
        root: str = "images",
    ) -> Path:
        folder = tmp_path / root
        index = 0
        for name in classes:
            (folder / name).mkdir(parents=True)
            for position in range(per_class):
                save_image(folder / name / f"{position:03}{suffix}", index, size)
                index += 1
        return folder

    return make


@pytest.fixture
def in_time() -> Iterator[None]:
    """What hangs is an error."""

    def stop(*_: object) -> None:
        raise AssertionError("it hangs")  # no OSError, as which it would pass for damage

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 20, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
