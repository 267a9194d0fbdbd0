"""The examples in the docstrings of the installed package run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import fastdata

MODULES = [
    "fastdata",
    *(
        module.name
        for module in pkgutil.walk_packages(fastdata.__path__, "fastdata.")
        if not module.name.endswith("__main__")
        and "core-level" not in module.name  # a library, not Python's
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example prints what its docstring says, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
