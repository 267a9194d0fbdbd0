"""The figures of the house: its size, its rooms, the imports between its wings, and how far data walks in it.

Size is in syntax nodes without type annotations, imports and docstrings, which cost a reader nothing.
A room is a file. A walk counts calls of the package's own functions, the files that they are in, and
the moves from file to file.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import statistics
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
    "faults",
    "pictures",
    "report",
    "machine",
    "pixels",
    "sources",
    "stores",
    "datasets",
    "loaders",
    "tools",
)
"""All that is at the top of the package; each imports only those before it."""

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

# No figure may grow.
MOST_NODES = 147_400
MOST_NODES_PER_CODE_LINE = 7.5
MOST_NODES_PER_CODE_LINE_OF_A_ROOM = 10.5  # arithmetic on arrays; most are below 8.8
MOST_LINES_OF_A_CLASS = 303
MOST_LINES_OF_A_ROOM = 400
MOST_LINES_OF_THE_MEDIAN_ROOM = 160
FRAGMENT = re.compile(r"(What|Of|Which|Whether|That|Those|Who|By|How|Where|As|It|This|These|Not)\b")
"""How docstrings begin that are no sentence."""
WALKS = {  # calls, files, moves
    "root until the first batch": (1050, 71, 690),
    "one steady batch": (29, 9, 20),
    "dataset[3]": (36, 10, 26),
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
    """Next to them are the public names, errors, faults, paths, pictures and reports, and nothing else."""
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


def bare_nodes(tree: ast.AST) -> int:
    """Count syntax nodes, without annotations, imports and docstrings."""
    if isinstance(tree, ast.Import | ast.ImportFrom):
        return 0
    count = 1
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (field == "body" and is_text(child)):
                count += bare_nodes(child)
    return count


def is_text(node: ast.AST) -> bool:
    """Return True for a string that stands alone: a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def code_lines(path: Path) -> int:
    """Count lines with code: without blank ones, comments and docstrings."""
    source = path.read_text("utf-8")
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and is_text(node):
            texts.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in texts
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_the_house_does_not_grow() -> None:
    """Its nodes, their density, its longest class and its rooms are at most as large as written here."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
    nodes = {path: bare_nodes(tree) for path, tree in trees.items()}
    code = {path: code_lines(path) for path in FILES}
    assert sum(nodes.values()) <= MOST_NODES
    assert sum(nodes.values()) / sum(code.values()) <= MOST_NODES_PER_CODE_LINE
    dense = {name_of(path): nodes[path] / code[path] for path in FILES if code[path] > 30}
    assert max(dense.values()) <= MOST_NODES_PER_CODE_LINE_OF_A_ROOM, max(
        dense, key=dense.__getitem__
    )
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MOST_LINES_OF_A_CLASS, node.name
    lengths = {path: path.read_text("utf-8").count("\n") for path in FILES}
    assert max(lengths.values()) <= MOST_LINES_OF_A_ROOM
    rooms = [length for length in lengths.values() if length > 15]
    assert statistics.median(rooms) <= MOST_LINES_OF_THE_MEDIAN_ROOM


@pytest.mark.parametrize("wing", [w for w in WINGS if (PACKAGE / w).is_dir()])
def test_the_map_of_a_wing_has_no_code(wing: str) -> None:
    """Its ``__init__.py`` is a docstring that names every room of the wing."""
    path = PACKAGE / wing / "__init__.py"
    [text] = ast.parse(path.read_text("utf-8")).body
    assert is_text(text)
    rooms = {room.stem for room in path.parent.glob("*.py")} - {"__init__", "__main__"}
    missing = {room for room in rooms if not re.search(rf"\b{room}\b", path.read_text("utf-8"))}
    assert not missing


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_docstrings_begin_as_sentences_do(path: Path) -> None:
    """None is a fragment such as "What a reader needs"."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, kinds)
    ]
    assert not [text for text in texts if FRAGMENT.match(text)]


class Walk:
    """Count calls into the package, their files, and the moves between files, in the thread that enters this."""

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
