"""The layout of the package: imports point one way, rooms stand on few floors, heavy libraries have one door each."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import fastdata

PACKAGE = Path(fastdata.__file__).parent

ROOMS = (
    "errors",
    "describe",
    "report",
    "memory",
    "remote",
    "shared",
    "draws",
    "core",
    "images",
    "transforms",
    "codecs",
    "sources",
    "stores",
    "ranks",
    "workers",
    "prepare",
    "cache",
    "batch",
    "ring",
    "reader",
    "serving",
    "formats",
    "dataset",
    "cached",
    "folder",
    "export",
    "samplers",
    "loader",
    "chunked",
    "prefetch",
    "tools",
    "__main__",
    "__init__",
)
"""A room is a module or a package of the top level; it imports only rooms that stand before it."""

ENTRANCES = ("tools", "__main__", "__init__")
"""Stand on top of all others: no room of the flow uses them."""
MOST_FLOORS = 12
"""A floor is one import of another room: on floor 1 are the rooms that import none."""

DOORS = {
    "PIL": {"images", "tools"},  # bench stands outside the flow: it draws images and is its own rival
    "psutil": {"memory"},
    "torch.cuda": {"prefetch"},
    "torchvision": {"tools"},
    "matplotlib": {"tools"},
    "lz4": {"codecs"},
    "zstandard": {"codecs"},
    "filelock": {"cache", "remote", "stores"},
    "ray": {"cache"},
    "fsspec": {"remote"},
    "pyarrow": {"formats"},
}
"""Library -> the only rooms that import it."""

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imports_of(path: Path, *, types_too: bool) -> frozenset[str]:
    """Absolute dotted names that the module imports anywhere, functions included."""
    tree = ast.parse(path.read_text("utf-8"))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    for_types = {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in for_types and not types_too:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: name the room"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda.Stream"):
            found.add("torch.cuda")
    return frozenset(found)


def rooms_that_it_uses(path: Path) -> set[str]:
    """Other rooms that a module imports, for types or to run."""
    own = (dotted.split(".")[1:] for dotted in imports_of(path, types_too=True) if dotted.startswith("fastdata."))
    return {parts[0] if parts[0] in ROOMS else "__init__" for parts in own if parts} - {room_of(path)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_up_the_layout(path: Path) -> None:
    """A module imports only rooms that stand before its own."""
    room = room_of(path)
    wrong = {other for other in rooms_that_it_uses(path) if ROOMS.index(other) >= ROOMS.index(room)}
    assert not wrong, f"fastdata.{name_of(path)} imports {sorted(wrong)}, which stand after {room}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_libraries_come_through_their_doors(path: Path) -> None:
    """PIL, psutil, CUDA streams and the optional libraries are imported by their door only; types may be named."""
    for library, doors in DOORS.items():
        uses = any(f"{dotted}.".startswith(f"{library}.") for dotted in imports_of(path, types_too=False))
        assert not uses or room_of(path) in doors, f"fastdata.{name_of(path)} imports {library}, the job of {doors}"


def test_there_are_few_floors() -> None:
    """No chain of imports from room to room has more floors than a newcomer climbs."""
    uses: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in FILES:
        uses[room_of(path)] |= rooms_that_it_uses(path)
    floors: dict[str, int] = {}
    for room in ROOMS:
        floors[room] = 1 + max((floors[other] for other in uses[room]), default=0)
    inside = {room: floor for room, floor in floors.items() if room not in ENTRANCES}
    assert max(inside.values()) <= MOST_FLOORS, inside
