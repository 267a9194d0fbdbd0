"""The layout of the package: imports point one way, and the heavy libraries have one door each."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import fastdata

PACKAGE = Path(fastdata.__file__).parent

# A module imports only modules above it. A name stands for a module, or for a package with all its modules.
ORDER = (
    "errors",
    "spec",
    "scratch",
    "report",
    "machine",
    "memory",
    "blocks",
    "table",
    "visits",
    "draws",
    "core",
    "decode",
    "transforms",
    "codecs",
    "sources",
    "storage",
    "locks",
    "stores.base",
    "stores.heap",
    "stores.raw",
    "stores.encoded",
    "stores.shards",
    "stores.disk",
    "stores",
    "crew",
    "ingest",
    "lazy",
    "contents",
    "trial",
    "options",
    "preparation",
    "cache",
    "ring",
    "batch",
    "transport",
    "serving",
    "dataset",
    "stored",
    "cached",
    "folder",
    "served",
    "engine",
    "randomness",
    "resume",
    "iterators",
    "loader",
    "prefetch",
    "chunked",
    "bench",
    "cli",
    "__main__",
    "__init__",
)

# Library -> the only modules that import it. `bench` stands outside the flow: it draws images and is its own rival.
DOORS = {
    "PIL": {"decode", "bench"},
    "psutil": {"machine"},
    "torch.cuda": {"prefetch"},
    "torchvision": {"bench"},
    "matplotlib": {"bench"},
    "simplejpeg": {"decode"},
    "lz4": {"codecs"},
    "zstandard": {"codecs"},
    "filelock": {"cache"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """``stores.raw`` for stores/raw.py, ``stores`` for stores/__init__.py, ``__init__`` for the package's own."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def layer(name: str) -> int:
    """Position of the longest entry of ORDER that is ``name`` or holds it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (entry := ".".join(parts[:length])) in ORDER:
            return ORDER.index(entry)
    raise AssertionError(f"fastdata.{name} has no place in ORDER: give it one")


def type_checking_nodes(tree: ast.Module) -> set[ast.AST]:
    """Everything under ``if TYPE_CHECKING:``."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports_of(path: Path, *, types_too: bool) -> set[str]:
    """Absolute dotted names that the module imports anywhere, functions included."""
    tree = ast.parse(path.read_text("utf-8"))
    left_out = set() if types_too else type_checking_nodes(tree)
    package = ["fastdata", *path.relative_to(PACKAGE).parent.parts]
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            found |= {f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda.Stream"):
            found.add("torch.cuda")
    return found


def own_module(dotted: str) -> str | None:
    """The module of this package that an import reaches, or None for other packages."""
    parts = dotted.split(".")
    if parts[0] != "fastdata":
        return None
    for length in range(len(parts), 1, -1):
        path = PACKAGE.joinpath(*parts[1:length])
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return ".".join(parts[1:length])
    return "__init__"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_up_the_layout(path: Path) -> None:
    """A module imports only modules that stand above it; modules of one package may import each other."""
    name = module_name(path)
    targets = {own_module(dotted) for dotted in imports_of(path, types_too=True)} - {None, name}
    siblings = {target for target in targets if target and "." in f"{name}{target}" and layer(target) == layer(name)}
    wrong = {target for target in targets - siblings if target and layer(target) >= layer(name)}
    assert not wrong, f"fastdata.{name} imports {sorted(wrong)}, which stand below it in the layout"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_heavy_libraries_come_through_their_doors(path: Path) -> None:
    """PIL, psutil, CUDA streams and the optional libraries are imported by their door only; types may be named."""
    name = module_name(path)
    imported = imports_of(path, types_too=False)
    for library, doors in DOORS.items():
        used = any(dotted == library or dotted.startswith(f"{library}.") for dotted in imported)
        assert not used or name.split(".")[0] in doors, f"fastdata.{name} imports {library}: only {sorted(doors)} may"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_import_what_others_offer(path: Path) -> None:
    """What a module takes from another one stands in the other's ``__all__`` or is public, or is a module itself."""
    for dotted in imports_of(path, types_too=True):
        origin, _, name = dotted.rpartition(".")
        if origin.startswith("fastdata.") and own_module(dotted) == own_module(origin):
            module = importlib.import_module(origin)
            offered = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
            assert name in offered, f"fastdata.{module_name(path)} imports {name}, which {origin} does not list"


def test_every_entry_of_the_order_is_unique() -> None:
    """No module has two places in the layout."""
    assert len(set(ORDER)) == len(ORDER)
