"""The public names of the package."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

import fastdata
from fresh import Interpreters

NAMES = {
    "AlternatingFlip",
    "CachedDataset",
    "ChunkedLoader",
    "CudaPrefetcher",
    "DataLoader",
    "FastDataError",
    "FastDataWarning",
    "ImageFolder",
    "ImageManifest",
    "RingCollate",
    "Views",
    "collate",
    "diagnose",
    "plan_transform",
    "tune",
}


def output_of(fresh: Interpreters, code: str) -> str:
    """Return the output of ``code`` in a new interpreter."""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_exactly_these() -> None:
    """``fastdata.__all__`` is this list, and each name exists; other errors are in ``fastdata.errors``."""
    assert set(fastdata.__all__) == NAMES
    assert len(fastdata.__all__) == len(NAMES) <= 15
    assert all(hasattr(fastdata, name) for name in fastdata.__all__)


def test_datasets_show_what_torchvisions_do_and_little_more() -> None:
    """Datasets have torchvision's attributes and those that docs/api.md lists, and no others."""
    torchvisions = {
        "classes",
        "class_to_idx",
        "extra_repr",
        "imgs",
        "samples",
        "targets",
        "target_transform",
        "transform",
        "transforms",
    }
    own = {
        "close",
        "filled_share",
        "plan",
        "reader",
        "set_epoch",
        "skipped",
        "storage",
        "storage_plan",
    }
    own |= {"prepare", "show", "storage_report", "with_transform"}
    with fastdata.CachedDataset([(torch.zeros(1, 2, 2), 0)]) as dataset:
        shown = {name for name in dir(dataset) if not name.startswith("_")}
    assert shown - torchvisions - {"build_cache", "from_cache"} == own
    assert len(own) <= 13


def test_public_names_are_documented() -> None:
    """Every public class and function has its own docstring."""
    for name in fastdata.__all__:
        value = getattr(fastdata, name)
        own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        assert own, f"fastdata.{name} has no docstring"


def test_the_version_is_the_installed_one() -> None:
    """``fastdata.__version__`` is the version that pip installed; unknown names are an AttributeError."""
    assert fastdata.__version__ == importlib.metadata.version("fastdata")
    changes = Path(__file__).parents[1].joinpath("CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## \[?(\d[\d.]*)", changes, re.MULTILINE)[:1] == [fastdata.__version__]
    with pytest.raises(AttributeError, match="module 'fastdata' has no attribute 'ImageFolders'"):
        fastdata.ImageFolders  # noqa: B018


def test_child_processes_import_the_same_package(fresh: Interpreters) -> None:
    """A child of the tests imports the installed package that they test, wherever pytest was started."""
    assert output_of(fresh, "import fastdata; print(fastdata.__file__)") == f"{fastdata.__file__}\n"


def test_importing_does_no_work(fresh: Interpreters) -> None:
    """The import starts no thread or process and loads neither torchvision nor matplotlib."""
    code = """
import sys, threading, multiprocessing
import fastdata
print(threading.active_count(), len(multiprocessing.active_children()))
print([name for name in ("torchvision", "matplotlib") if name in sys.modules])
"""
    assert output_of(fresh, code) == "1 0\n[]\n"


def test_importing_loads_what_all_scripts_need(fresh: Interpreters) -> None:
    """The modules of caches, codecs and ChunkedLoader, and optional libraries, are loaded only when used."""
    code = """
import sys, torch
before = set(sys.modules)
from fastdata import CudaPrefetcher, DataLoader, ImageFolder
names = "PIL filelock lz4 psutil zstandard fastdata.stores.cache fastdata.loaders.chunked fastdata.stores.codecs"
names += " fastdata.tools.tune"
print([name for name in names.split() if name in sys.modules.keys() - before])
"""
    assert output_of(fresh, code) == "[]\n"


def test_names_that_wait_are_found(fresh: Interpreters) -> None:
    """``dir`` and ``import *`` find public names before they are loaded; other names are an AttributeError."""
    code = """
import fastdata
print(set(fastdata.__all__) <= set(dir(fastdata)), hasattr(fastdata, "ChunkedLoaders"))
from fastdata import *
print(ChunkedLoader is fastdata.ChunkedLoader)
"""
    assert output_of(fresh, code) == "True False\nTrue\n"


def test_importing_leaves_torch_as_it_was(fresh: Interpreters) -> None:
    """The import does not change thread counts, random state and CUDA."""
    code = """
import torch
before = torch.get_num_threads(), torch.get_num_interop_threads(), torch.initial_seed(), torch.cuda.is_initialized()
state = torch.get_rng_state()
import fastdata
after = torch.get_num_threads(), torch.get_num_interop_threads(), torch.initial_seed(), torch.cuda.is_initialized()
print(before == after, torch.equal(state, torch.get_rng_state()))
"""
    assert output_of(fresh, code) == "True True\n"
