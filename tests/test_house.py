"""The house: its size in syntax nodes, how far data walks in it, which wing imports which, and one door a library.

Nodes are those of ``ast.walk``: what a reader has to take in, whatever line breaks do. A walk counts calls into the
package's own functions, the files that they lie in, and the moves from file to file.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

import fastdata
from conftest import FolderMaker

PACKAGE = Path(fastdata.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

WINGS = (
    "paths",
    "errors",
    "report",
    "machine",
    "pixels",
    "sources",
    "stores",
    "datasets",
    "loaders",
    "tools",
)
"""What lies at the top of the package; each imports only those before it."""

DOORS = {
    "PIL": {"pixels", "tools"},  # bench draws images and is its own rival
    "psutil": {"machine"},
    "torch.cuda": {"loaders"},
    "torchvision": {"tools"},
    "lz4": {"stores"},
    "zstandard": {"stores"},
    "filelock": {"stores", "sources"},
    "ray": {"stores"},
    "fsspec": {"sources"},
}
"""Library -> the only wings that import it."""

# No figure may grow. Files are split by subject next, so that there is no cap on their number.
MOST_NODES = 139_500
MOST_NODES_PER_LINE = 6.26
MOST_LINES = 26_600
MOST_LINES_OF_A_CLASS = 430
MOST_LINES_OF_A_FILE = 820
WALKS = {  # calls, files, moves
    "root until the first batch": (845, 29, 530),
    "one steady batch": (27, 7, 14),
    "dataset[3]": (33, 8, 28),
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def wing_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imports_of(path: Path, *, types_too: bool) -> frozenset[str]:
    """Absolute dotted names that the module imports anywhere, functions included."""
    tree = ast.parse(path.read_text("utf-8"))
    blocks = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
    ]
    for_types = {
        inner for block in blocks for statement in block.body for inner in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in for_types and not types_too:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: name the wing"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda.Stream"):
            found.add("torch.cuda")
    return frozenset(found)


def test_there_are_seven_wings() -> None:
    """Beside them lie the public names, the errors and the words for people, and nothing else."""
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert entries - {"__pycache__"} == {*WINGS, "__init__"}


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != PACKAGE], ids=name_of)
def test_a_wing_imports_those_before_it(path: Path) -> None:
    """For types or to run."""
    own = wing_of(path)
    names = [
        dotted.split(".")
        for dotted in imports_of(path, types_too=True)
        if dotted.startswith("fastdata.")
    ]
    used = {parts[1] for parts in names} - {own}
    wrong = {wing for wing in used if wing not in WINGS or WINGS.index(wing) > WINGS.index(own)}
    assert not wrong, f"fastdata.{name_of(path)} imports {sorted(wrong)}, which stand after {own}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_libraries_come_through_their_doors(path: Path) -> None:
    """PIL, psutil, CUDA streams and the optional libraries are imported by their door only; types may be named."""
    for library, doors in DOORS.items():
        uses = any(
            f"{dotted}.".startswith(f"{library}.") for dotted in imports_of(path, types_too=False)
        )
        assert not uses or wing_of(path) in doors, (
            f"fastdata.{name_of(path)} imports {library}, the job of {doors}"
        )


def test_the_house_does_not_grow() -> None:
    """Nodes, density, lines with those of C, the longest class and the longest file."""
    trees = {path: [*ast.walk(ast.parse(path.read_text("utf-8")))] for path in FILES}
    lines = {path: path.read_text("utf-8").count("\n") for path in FILES}
    nodes = sum(map(len, trees.values()))
    classes = [node for tree in trees.values() for node in tree if isinstance(node, ast.ClassDef)]
    c_lines = sum(path.read_text("utf-8").count("\n") for path in PACKAGE.rglob("*.[ch]"))
    assert nodes <= MOST_NODES
    assert nodes / sum(lines.values()) <= MOST_NODES_PER_LINE
    assert sum(lines.values()) + c_lines <= MOST_LINES
    assert (
        max((each.end_lineno or 0) - each.lineno + 1 for each in classes) <= MOST_LINES_OF_A_CLASS
    )
    assert max(lines.values()) <= MOST_LINES_OF_A_FILE


class Walk:
    """Counts calls into the package, their files, and the moves between files, in the thread that enters it."""

    def __init__(self) -> None:
        self._inside = f"{PACKAGE}{os.sep}"
        self._here = ""
        self.calls = 0
        self.moves = 0
        self.files: set[str] = set()

    def __enter__(self) -> Walk:
        gc.collect()
        gc.disable()  # what finalisers of other tests' garbage call is none of its
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    @property
    def figures(self) -> tuple[int, int, int]:
        return self.calls, len(self.files), self.moves

    def _note(self, frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(self._inside) or event not in ("call", "return"):
            return
        if event == "call":
            self.calls += 1
            self.files.add(name)
            self._go(name)
            return
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(self._inside):
            back = back.f_back
        if back is not None:
            self._go(back.f_code.co_filename)

    def _go(self, name: str) -> None:
        self.moves += self._here not in ("", name)
        self._here = name


def walk(name: str, steps: Callable[[], Any]) -> None:
    with Walk() as walked:
        steps()
    most = WALKS[name]
    assert all(count <= limit for count, limit in zip(walked.figures, most, strict=True)), (
        walked.figures,
        most,
    )


def test_data_does_not_walk_far(image_folder: FolderMaker) -> None:
    """From a folder to its first batch, for one more batch, and for a sample."""
    root = str(image_folder(classes=("a", "b"), per_class=8, size=(64, 48)))
    steps = [v2.Resize(40), v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    transform = v2.Compose(
        [*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    )
    made: list[Any] = []

    def begin() -> None:
        dataset = fastdata.ImageFolder(root, transform=transform)
        loader = fastdata.DataLoader(dataset, batch_size=4, shuffle=True)
        made.extend([dataset, loader])
        next(iter(loader))

    walk("root until the first batch", begin)
    dataset, loader = made
    list(loader)
    batches = iter(loader)
    next(batches)
    walk("one steady batch", lambda: next(batches))
    dataset[0]
    walk("dataset[3]", lambda: dataset[3])
    dataset.close()
