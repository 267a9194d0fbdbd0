"""The scripts in examples/ run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
    assert [line.split(":")[0] for line in printed.splitlines()[-3:]] == [
        "epoch 0",
        "epoch 1",
        "epoch 2",
    ]


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


def test_why_idle_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop waits less for the tuned loader than for the slow one, whose limit is not the model; both are drawn."""
    script = runpy.run_path(str(EXAMPLES / "why_idle.py"))
    manifest, chart = script["make_manifest"](tmp_path, 24), tmp_path / "chart.svg"
    header, *rows = manifest.read_text("utf-8").splitlines()
    manifest.write_text("\n".join([header, *rows * 10]), "utf-8")
    found = script["main"](manifest, max_seconds=2.0, plot=chart)
    assert 2 * found["an epoch after"]["waiting"] < found["an epoch before"]["waiting"]
    before, tuned, after, *epochs = capsys.readouterr().out.splitlines()
    assert "the model is the limit" not in before
    assert re.match(r"tuned:  num_workers=\d+", tuned)
    assert after.startswith("after:  The loop waits")
    assert [line.split(":")[0] for line in epochs] == list(found)
    assert f"{sum(found['an epoch after'].values()):.2f} s</text>" in chart.read_text("utf-8")


def test_cifar_learns_drawn_images() -> None:
    """Two epochs over drawn images recognise far more than the tenth that chance does."""
    accuracy = runpy.run_path(str(EXAMPLES / "cifar.py"))["main"](
        ["--epochs", "2", "--per-class", "60"]
    )
    assert accuracy > 0.2


def test_train_dataparallel_trains_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A line says so where there are fewer than two GPUs, and either way there is a rate of DataParallel."""
    runpy.run_path(str(EXAMPLES / "train_dataparallel.py"))["main"](
        ["--steps", "2", "--batch-size", "4"]
    )
    printed, gpus = capsys.readouterr().out, torch.cuda.device_count()
    assert (f"torch sees {gpus} GPUs." in printed) == (gpus < 2)
    assert re.search(r"^DataParallel +[\d,]+ images/s$", printed, re.MULTILINE)


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo here"
)
def test_train_ddp_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks train an epoch, each its half, and one process alone goes on with the next one."""
    with_torchvision = tmp_path / "run.py"  # where its compiled operators do not load, too
    with_torchvision.write_text(
        "import runpy, sys\n"
        "from torchvision_ops import import_torchvision\n"
        "import_torchvision()\n"
        "sys.argv.pop(0)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n",
        "utf-8",
    )
    script = [
        str(with_torchvision),
        str(EXAMPLES / "train_ddp.py"),
        "--resume",
        str(tmp_path / "checkpoint.pt"),
    ]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=localhost",
        "--nproc-per-node=2",
    ]
    first = _run_python(tmp_path, *launcher, *script, "--epochs", "1")
    assert [line.split(":")[0] for line in first if "loss" in line] == ["epoch 1"]
    assert "7  100 samples" in "\n".join(first)
    then = _run_python(tmp_path, *script, "--epochs", "2")
    assert [line.split(":")[0] for line in then if "loss" in line] == ["epoch 2"]
    assert "13  200 samples" in "\n".join(then)


def _run_python(temporary: Path, *arguments: str) -> list[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    environment = os.environ | {
        "PYTHONPATH": path,
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
