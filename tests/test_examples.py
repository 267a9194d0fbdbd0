"""The scripts in examples/ run."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example draws goes to the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_quickstart_prints_plan_and_rates(
    image_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The quickstart serves three epochs of a folder."""
    runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"](str(image_folder()))
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()[-3:]] == ["epoch 0", "epoch 1", "epoch 2"]


def test_csv_manifest_reads_what_it_writes(
    image_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches of the manifest hold the images of every row with their labels."""
    manifest = tmp_path / "train.csv"
    files = sorted(image_folder(classes=("a", "b")).rglob("*.jpg"))
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in files]
    manifest.write_text("\n".join(["file,label", *rows]) + "\n")
    runpy.run_path(str(EXAMPLES / "csv_manifest.py"))["main"](manifest)
    assert capsys.readouterr().out.startswith("(6, 3, 64, 64) torch.float32 labels [0, 1]\n")


def test_cifar_learns_drawn_images() -> None:
    """Two epochs over drawn images recognise far more than the tenth that chance does."""
    accuracy = runpy.run_path(str(EXAMPLES / "cifar.py"))["main"](["--epochs", "2", "--per-class", "60"])
    assert accuracy > 0.2


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="this machine has two GPUs")
def test_two_gpus_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Without two GPUs the example ends with a clear word."""
    runpy.run_path(str(EXAMPLES / "two_gpus.py"))["main"]([])
    assert capsys.readouterr().out.startswith(f"This example needs two GPUs; torch sees {torch.cuda.device_count()}.")
