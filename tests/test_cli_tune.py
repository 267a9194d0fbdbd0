"""``fastdata tune`` and ``diagnose``, the help of all commands, and the files that options name."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from children import Done, run_elsewhere
from fastdata import DataLoader, ImageFolder
from fastdata.tools.__main__ import main
from fresh import RUN_COMMAND, Interpreters

Folder = Callable[..., Path]
COMMANDS = ("bench", "tune", "doctor", "diagnose", "build", "inspect", "prune")
SMALL = ["--seconds", "2"]
SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

assert sys.argv[1:] == ["--json", "own.json"], sys.argv
loader = DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=2)
for epoch in range(1000):
    for (batch,) in loader:
        batch.exp().sum()
raise SystemExit("the script went on to its end")
"""


def test_tune_ends_with_a_line_for_the_script(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line makes a loader of the batch size that was asked for."""
    root = image_folder(size=(20, 18))
    assert main(["tune", str(root), *SMALL, "--batch-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("storage='shared': ")
    line = printed.splitlines()[-1]
    assert line.startswith("loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=")
    with ImageFolder(root) as dataset, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are more workers than cores
        loader = eval(line.partition("= ")[2], {"DataLoader": DataLoader, "dataset": dataset})
    assert loader.batch_size == 2


def test_a_transform_of_ones_own_is_tuned(
    image_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without storage, decoding is part of the measurement."""
    monkeypatch.chdir(tmp_path)
    Path("tune_steps.py").write_text(
        "from torchvision import transforms\n"
        "train = transforms.Compose([transforms.RandomResizedCrop(8), transforms.ToTensor()])\n"
    )
    root = image_folder(size=(20, 18), per_class=40)
    words = ["--storage", "none", "--transform", "tune_steps:train"]
    assert main(["tune", str(root), *SMALL, *words]) == 0
    printed = capsys.readouterr().out
    assert "storage='none'" in printed
    assert "loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", "nowhere"], "nowhere is not a folder on this machine"),
        (["build", "nowhere", "caches"], "nowhere is not a folder on this machine"),
        (["tune", "s3://b/x"], "is a URL, but a folder of this machine is needed"),
        (["tune", "."], "Couldn't find any class folder in ."),
        (
            ["tune", ".", "--transform", "steps"],
            "--transform steps does not have the form MODULE:NAME",
        ),
        (["diagnose", "nowhere.py"], "nowhere.py is not a file. Give a training script"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_of_the_user_are_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The status is 2, and the line says what to do, before anything is measured."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", ".", "--seconds", "some"], "invalid float value: 'some'"),
        (["tune", ".", "--batch-size", "some"], "invalid positive value: 'some'"),
        (["diagnose", "--batches", "0", "x.py"], "must be at least 1"),
        (["diagnose"], "SCRIPT"),
        (["bench", "--json", "nowhere/x.json"], "is not a file in a folder that exists"),
        (["inspect", ".", "--json", "."], "is not a file in a folder that exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_option_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option out of range, or a script that is missing, is refused by the parser."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def diagnose(folder: Path, script: str) -> Done:
    """Run the command in a process of its own, as scripts do not expect another's ``__main__``."""
    (folder / "train.py").write_text(script)
    return run_elsewhere(folder, main, ["diagnose", "train.py"])


def test_diagnose_stops_a_script_and_says_its_limit(tmp_path: Path, fresh: Interpreters) -> None:
    """Words after the script's name are its own, options before it are the command's."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["diagnose", "--batches", "20", "train.py", "--json", "own.json"]
    done = fresh.run(RUN_COMMAND, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The loop waits ")
    assert "one step of the loop, mean of 19\n" in done.stdout


def test_an_error_of_a_script_is_its_own(tmp_path: Path) -> None:
    """Errors and warnings of the script are shown as Python shows them."""
    script = "import warnings\nwarnings.warn('mine')\ndef f():\n    raise ValueError('mine')\nf()\n"
    done = diagnose(tmp_path, script)
    assert done.returncode == 1
    assert "train.py:2: UserWarning: mine\n" in done.stderr
    assert 'train.py", line 5' in done.stderr
    assert done.stderr.endswith("\nValueError: mine\n")


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("x = (\n", 1, "SyntaxError: "),
        ("print(1)\n", 2, "train.py has ended without a loop over two or more batches"),
        ("raise SystemExit(0)\n", 2, "train.py has ended without a loop over two or more batches"),
        ("raise SystemExit(3)\n", 3, ""),
    ],
    ids=["syntax", "no loader", "ends", "status"],
)
def test_a_script_without_a_loop_gets_an_error(
    script: str, status: int, said: str, tmp_path: Path
) -> None:
    """One line says what it lacks; a status of its own is the command's."""
    done = diagnose(tmp_path, script)
    assert done.returncode == status
    assert said in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help ends with examples, whose options are options of it."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    options, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert "None" not in options
    lines = examples.splitlines()
    assert 1 <= len(lines) <= 2
    assert all(f"fastdata {command}" in line for line in lines)
    before_script = re.sub(r"train\.py.*", "", examples)
    assert set(re.findall(r"(?<= )--[\w-]+", re.sub(r"docker .*IMAGE", "", before_script))) <= set(
        re.findall(r"--[\w-]+", options)
    )


def test_inspect_keeps_what_it_found(
    image_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``inspect --json`` has each cache with facts, problems and, if verified, damaged samples."""
    root, figures = image_folder(size=(13, 11)), tmp_path / "found.json"
    main(["build", str(root), str(tmp_path / "cache"), "--resize", "7"])
    assert main(["inspect", str(tmp_path / "cache"), "--json", str(figures)]) == 0
    (found,) = json.loads(figures.read_text())["caches"]
    assert (found["facts"]["samples"], found["problems"]) == (6, [])
    (shard,) = (tmp_path / "cache").glob("*/part0-*.npy")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["inspect", str(tmp_path / "cache"), "--verify", "--json", str(figures)]) == 1
    (found,) = json.loads(figures.read_text())["caches"]
    assert [line.partition(",")[0] for line in found["problems"]] == ["sample 5"]
    capsys.readouterr()
