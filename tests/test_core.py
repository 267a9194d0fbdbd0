"""Opening the compiled core: which library is chosen, and the error if there is none for this machine."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import level_samples
from fastdata import CachedDataset, DataLoader, FastDataWarning
from fastdata.pixels.core import library
from fresh import Interpreters

CORE = Path(library.__file__).parent
LIBRARIES = sorted(CORE.glob(f"core-level*{library.ENDING}"))
MACHINES = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")}

needs_library = pytest.mark.skipif(
    (sys.platform, platform.machine()) not in MACHINES, reason="no core is built here"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the folder with the libraries and their sources."""
    return Path(shutil.copytree(CORE, tmp_path / "core"))


@needs_library
def test_the_core_is_there_wherever_it_is_built() -> None:
    """The tests import a tree whose library fits this machine, and it is opened once."""
    assert library.obstacle() is None
    assert library.load() is library.load()


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/cpuinfo is Linux's")
def test_the_level_is_what_the_system_says_of_the_cpu() -> None:
    """The level of x86-64 follows from the flags in /proc/cpuinfo; other machines have none of these, and level 1."""
    flags = set(
        Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    )
    expected = 1
    for level, needed in enumerate(
        (
            "ssse3 sse4_1 sse4_2 popcnt",
            "avx2 bmi1 bmi2 fma f16c movbe abm",
            "avx512bw avx512vl avx512vbmi",
        )
    ):
        expected += expected == level + 1 and flags >= set(needed.split())
    assert library.load().functions.fastdata_cpu_level() == expected


@needs_library
def test_the_highest_level_that_the_cpu_has_is_opened(copy: Path) -> None:
    """Without the libraries of higher levels the next lower one is opened; a level above the CPU's is an error."""
    level = library.load().functions.fastdata_cpu_level()
    for each in reversed(LIBRARIES):
        if int(each.stem[-1]) <= level:
            assert library.open_library(copy).functions._name == str(copy / each.name)
        (copy / each.name).unlink()
    shutil.copy(LIBRARIES[0], copy / f"core-level9{library.ENDING}")
    with pytest.raises(OSError, match=f"needs a CPU with x86-64-v9; this one has x86-64-v{level}"):
        library.open_library(copy)


@needs_library
def test_a_library_of_other_sources_is_refused(copy: Path) -> None:
    """After a C file of an editable install has changed, the error asks to install fastdata again."""
    with (copy / "core.h").open("a") as file:
        file.write("\n")
    with pytest.raises(
        OSError,
        match=r"core-level\d\.\w+ was built from other sources than the C files next to it. Install",
    ):
        library.open_library(copy)


@pytest.fixture
def without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let this process look for the library in an empty folder."""
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_a_missing_library_is_an_error(without_library: Path) -> None:
    """If nothing was built, the obstacle names folder, system and machine, and load raises the same text."""
    assert f"{without_library} has no core-level" in (library.obstacle() or "")
    with pytest.raises(OSError, match=f"without its compiled core.*this is {sys.platform}"):
        library.load()


@pytest.mark.usefixtures("without_library")
def test_a_loader_without_the_library_does_not_advise_on_steps() -> None:
    """The warning ends with the text of the obstacle, and does not advise to change the transform."""
    flip = pytest.importorskip("torchvision").transforms.RandomHorizontalFlip()
    samples = level_samples(2, (3, 5, 6))
    with (
        CachedDataset(samples, transform=flip) as dataset,
        pytest.warns(FastDataWarning, match=r"runs as written, because fastdata was .*\w$") as said,
    ):
        iter(DataLoader(dataset))
    assert "prepare=" not in str(said[0].message)


def test_a_damaged_library_is_an_obstacle(tmp_path: Path) -> None:
    """A file that is not a library raises an OSError that names it."""
    (tmp_path / f"core-level1{library.ENDING}").write_bytes(b"not a library")
    with pytest.raises(OSError, match=r"core-level1|not a valid"):
        library.open_library(tmp_path)


def test_importing_opens_no_library(fresh: Interpreters) -> None:
    """``import fastdata`` does not open a library of the core."""
    code = "import fastdata; from fastdata.pixels.core import library; print(library.load.cache_info().currsize)"
    done = fresh.run(code)
    assert done.stdout == "0\n", done.stderr
