"""The code in README.md and docs/ runs, what they quote is said, and what is drawn is what was measured."""

from __future__ import annotations

import ast
import builtins
import errno
import gc
import importlib
import os
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fastdata
from children import run_elsewhere, run_script
from fastdata import errors
from fastdata.tools.__main__ import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>.+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

# Names that blocks use without making them, in the order that each may need those above it.
GIVEN = {
    "train_transform": """
from torchvision.transforms import CenterCrop, Compose, RandomCrop, RandomHorizontalFlip, Resize, ToTensor
train_transform = Compose([Resize(32), CenterCrop(28), RandomCrop(24), RandomHorizontalFlip(), ToTensor()])
""",
    "train": """
import fastdata
train = fastdata.ImageFolder("imagenet/train", transform=train_transform).prepare()
""",
    "loader": """
import fastdata
loader = fastdata.DataLoader(train, batch_size=4, shuffle=True)
""",
    "step": """
def step(batch):
    batch[0].mean()
""",
}
CHECKED: set[tuple[str, ...]] = set()
"""Commands that several pages have are run once."""
SMALL = {
    "bench": ["--images", "8", "--batch-size", "4", "--num-workers", "1", "--recipe", "crop"],
    "tune": ["--seconds", "2"],
}
TRAIN = f"""{GIVEN["train_transform"]}
if __name__ == "__main__":
    from fastdata import DataLoader, ImageFolder
    for images, labels in DataLoader(ImageFolder("imagenet/train", train_transform), batch_size=4):
        images.mean()
"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            block = Block(page, line, match["language"], match["code"], match["mark"] or "")
            marks = [pytest.mark.cuda] if block.mark == "needs a GPU" else []
            if block.language in languages:
                found.append(pytest.param(block, id=str(block), marks=marks))
    return found


@pytest.fixture
def place(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with what the blocks name: class folders, a CSV, a script; ``/data`` stands for a folder in it."""
    monkeypatch.chdir(tmp_path)
    image_folder(root="imagenet/train", per_class=6, size=(40, 36))
    image_folder(root="images", per_class=6, size=(40, 36))
    rows = [
        f"{path.relative_to('images')},{path.parent.name}"
        for path in sorted(Path("images").rglob("*.jpg"))
    ]
    for name in ("train.csv", "test.csv"):
        Path(name).write_text("\n".join(["file,label", *rows]) + "\n")
    Path("train.py").write_text(TRAIN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path


def unmade_names(code: str) -> set[str]:
    """Names that the code reads and nowhere makes."""
    tree = ast.walk(ast.parse(code))
    names = [
        (node.id, isinstance(node.ctx, ast.Load)) for node in tree if isinstance(node, ast.Name)
    ]
    made = {name for name, is_read in names if not is_read} | set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            made |= {node.name, *(argument.arg for argument in node.args.args)}
        elif isinstance(node, ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Lambda):
            made |= {argument.arg for argument in node.args.args}
    return {name for name, is_read in names if is_read} - made


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: Block, place: Path) -> None:
    """Each block runs by itself, given the dataset and the loader that it does not make."""
    if block.mark == "needs albumentations":
        pytest.importorskip("albumentations")
    if block.mark == "with a cache":
        assert (
            main(
                [
                    "build",
                    "imagenet/train",
                    f"{place}/data/fastdata",
                    "--resize",
                    "32",
                    "--crop",
                    "24",
                ]
            )
            == 0
        )
    code = given(block.code) + block.code.replace('"/data/', f'"{place}/data/')
    code = re.sub(r"max_seconds=\d+", "max_seconds=2", code)  # as SMALL has it for the command
    if block.mark == "as a rank":
        run_as_rank(code, place)
        return
    namespace: dict[str, Any] = {"__name__": "docs"}
    with warnings.catch_warnings():
        # 8 workers, on a machine with fewer cores.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        exec(compile(code, str(block), "exec"), namespace)
        namespace.clear()
        gc.collect()


def given(code: str) -> str:
    """What makes the names that the code reads and does not make."""
    wanted = unmade_names(code)
    for name in reversed(GIVEN):
        if name in wanted:
            wanted |= unmade_names(GIVEN[name])
    assert wanted <= set(GIVEN)
    return "".join(GIVEN[name] for name in GIVEN if name in wanted)


def run_as_rank(code: str, place: Path) -> None:
    """Run the code in the environment that torchrun gives the only rank of a run."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    (place / "rank.py").write_text(code)
    done = run_elsewhere(place, run_script, rank, "rank.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_exist(block: Block, place: Path) -> None:
    """Commands of fastdata run, on a small scale; of others the files, extras and options that they name exist."""
    for line in block.code.replace("\\\n", "").splitlines():
        for command in line.split("&&"):
            words = shlex.split(command.replace("/data/", f"{place}/data/"), comments=True)
            if tuple(words) not in CHECKED:
                check_command(words)
                CHECKED.add(tuple(words))


def check_command(words: list[str]) -> None:
    match words:
        case []:
            pass
        case ["fastdata", "doctor", *rest]:
            assert main(["doctor", *rest]) in (0, 1)  # 1 is for a problem of the machine
        case ["fastdata", name, *rest]:
            with pytest.MonkeyPatch.context() as patch:  # what diagnose gives to its script
                patch.setattr(sys, "argv", sys.argv)
                patch.setattr(sys, "path", sys.path[:])
                patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
                assert main([name, *rest, *SMALL.get(name, [])]) == 0
        case ["pip", "install", *rest]:
            extras = re.findall(
                r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
            )
            asked = [
                extra
                for word in rest
                for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", word)))
            ]
            assert set(asked) <= set(extras)
            assert all((ROOT / word).exists() for word in rest if word.endswith(".txt"))
        case ["python", script, *rest] if script.endswith(".py"):
            known = (ROOT / script).read_text("utf-8") + (
                ROOT / "benchmarks" / "_helper.py"
            ).read_text("utf-8")
            assert all(f'"{word}"' in known for word in rest if word.startswith("--"))
        case ["python", "-m", "venv", _] | [".", ".venv/bin/activate"] | ["pytest", *_]:
            pass
        case ["git", "clone", _] | ["cd", _]:
            pass
        case ["torchrun", *_]:
            importlib.import_module("torch.distributed.run")
        case _:
            pytest.fail(f"{words} is not known: check it, or have this test know it")


def said_texts() -> list[str]:
    """The texts in the package's sources, with ``…`` for what is filled in."""
    texts = []
    for path in Path(fastdata.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts
                    )
                )
    return texts


VALUE = re.compile(r"""'[^']*'|\d+ \w+|\S*[\d/_=]\S*|\w*\.\w+|[A-Z]\S*|\(\w+(?:, \w+)+\)""")
"""A quoted text, a number (with its noun), a path or a name, which a message is filled in with."""


def said_pieces() -> list[str]:
    """What the package's texts and the system's errors consist of, without what is filled in; longest first."""
    found = {os.strerror(number) for number in errno.errorcode}
    for text in said_texts():
        pieces = [piece.strip(" .,;:()") for piece in re.split(r"…|[.;:,] ", text)]
        # A constant of one word is a name, such as that of an option.
        found |= {piece for piece in pieces if piece and ("…" in text or " " in piece)}
    return sorted(found, key=len, reverse=True)


def words_nowhere_said(quote: str, pieces: list[str]) -> list[str]:
    """The words of a quoted message that are neither in a text of the package nor a value."""
    for piece in (piece for piece in pieces if piece in quote):
        quote = re.sub(rf"(?<![\w/])(?<!\w[.:]){re.escape(piece)}(?![\w/])(?![.:]\d)", " ", quote)
    return re.findall(r"[^\W\d_]+", VALUE.sub(" ", quote))


def test_quoted_errors_are_said() -> None:
    """Each message that the page on troubleshooting quotes consists of texts of the package, and of values."""
    pieces = said_pieces()
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    quoted = [
        match["code"].strip() for match in FENCE.finditer(text) if match["language"] == "text"
    ]
    assert len(quoted) > 30
    assert {quote: wrong for quote in quoted if (wrong := words_nowhere_said(quote, pieces))} == {}
    assert words_nowhere_said("sample 3 could not be read: it is empty", pieces)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt"])
def test_first_pages_are_short_and_lead_somewhere(name: str) -> None:
    """A page that people read first has at most 160 lines, and each file that it links to is there."""
    text = (ROOT / name).read_text("utf-8")
    assert text.count("\n") <= 160
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_api_names_exist() -> None:
    """Every name and member that the API page documents is there, and it documents every public name."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    entries = re.findall(r"^::: (\S+)\n(?:    options:\n      members: (.*))?", page, re.MULTILINE)
    documented = {name.rpartition(".")[2] for name, _ in entries}
    assert set(fastdata.__all__) - set(errors.__all__) <= documented >= {"errors"}
    for name, members in entries:
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        assert [
            member
            for member in re.findall(r"\w+", members.replace("false", ""))
            if not hasattr(value, member)
        ] == []


def test_files_that_contributors_are_shown_are_there() -> None:
    """CONTRIBUTING.md, its tree too, names files of the package that exist."""
    package = Path(fastdata.__file__).parent
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = re.findall(r"`((?:\w+/)?\w+(?:\.py|/))`", page)
    tree = re.findall(r"^  ([\w.]+/?)  +", page, re.MULTILINE)
    assert len(named) > 15
    assert len(tree) == 13
    assert [
        name
        for name in {*named, *tree}
        if not (package / name).exists() and not (ROOT / name).exists()
    ] == []


def test_figures_are_those_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts and tables of README and docs/ are those that the script makes of the results."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    for name, draw in made["CHARTS_BY_NAME"].items():
        assert (made["CHARTS"] / name).read_text("utf-8") == draw()
    texts = [page.read_text("utf-8") for page in PAGES]
    assert sum(text.count("<!-- figures: ") for text in texts) > 3
    assert texts == [made["with_tables"](text) for text in texts]


def test_a_benchmark_names_the_processor_that_its_figures_are_from(tmp_path: Path) -> None:
    """Family, model and caches come from Linux's files; a system without them gives what it has."""
    processor_facts = runpy.run_path(str(ROOT / "benchmarks" / "_processor.py"))["processor_facts"]
    cpuinfo, caches = tmp_path / "cpuinfo", tmp_path / "cache"
    one = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9R14\n"
    cpuinfo.write_text(f"{one}\n{one.replace('17', '99')}")
    for number, (level, kind, size) in enumerate(
        (("1", "Data", "32K"), ("3", "Unified", "32768K"))
    ):
        (caches / f"index{number}").mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (caches / f"index{number}" / name).write_text(f"{value}\n")
    elsewhere = processor_facts(tmp_path / "none", tmp_path / "none")
    assert elsewhere.keys() == {"architecture", "cores"}
    assert processor_facts(cpuinfo, caches) == elsewhere | {
        "family": "25",
        "model": "17",
        "model_name": "AMD EPYC 9R14",
        "caches": {"L1 data": "32K", "L3 unified": "32768K"},
    }
