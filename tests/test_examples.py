"""The scripts in examples/ run."""

from __future__ import annotations

import json
import re
import runpy
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from children import Done, launch_script, run_elsewhere, run_script

pytest.importorskip("torchvision")

EXAMPLES = Path(__file__).parents[1] / "examples"
PORTS = EXAMPLES / "ports"
NEEDS = {
    "timm_train": "timm",
    "lightning_train": "lightning",
    "accelerate_train": "accelerate",
    "trainer_train": "transformers",
}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example draws goes to the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of an operation wait for each other: on cores that others use, training takes 20 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_the_notebook_runs() -> None:
    """Its last cells show a diagnosis of the loop before them."""
    pytest.importorskip("matplotlib")
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text("utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert repr(names["diagnosis"]).startswith("The loop waits")
    names.clear()  # its dataset, and with it the memory


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
    script = (str(EXAMPLES / "train_ddp.py"), "--resume", str(tmp_path / "checkpoint.pt"))
    variables = {"TMPDIR": str(tmp_path)}
    first = run_elsewhere(tmp_path, launch_script, 2, variables, *script, "--epochs", "1")
    assert first.returncode == 0, first.stderr
    assert epochs_with_a_loss(first.stdout) == ["epoch 1"]
    assert "7  100 samples" in first.stdout
    then = run_elsewhere(tmp_path, run_script, variables, *script, "--epochs", "2")
    assert then.returncode == 0, then.stderr
    assert epochs_with_a_loss(then.stdout) == ["epoch 2"]
    assert "13  200 samples" in then.stdout


def epochs_with_a_loss(printed: str) -> list[str]:
    return [line.split(":")[0] for line in printed.splitlines() if "loss" in line]


@pytest.mark.parametrize("name", sorted(path.stem for path in PORTS.glob("*.py")))
def test_a_script_runs_before_and_after_its_diff(
    name: str,
    image_folder: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scripts of examples/ports print the same epochs, and nothing of torchvision's datasets is left in them."""
    pytest.importorskip(NEEDS.get(name, "torchvision"))
    if name in NEEDS:
        warnings.simplefilter("default")  # theirs
    for split in ("train", "val"):
        image_folder(classes=("a", "b"), per_class=5, size=(80, 76), root=f"data/{split}")
    root = tmp_path / "data"
    arguments = [str(root if name in ("imagenet", "timm_train") else root / "train")]
    if name == "imagenet":
        arguments += ["--arch", "shufflenet_v2_x0_5", "--batch-size", "4"]
    elif name in ("larger_than_ram", "trainer_train"):
        arguments += [str(tmp_path / "output")]
    script = PORTS / f"{name}.py"
    ported = tmp_path / script.name
    diff = script.with_suffix(".diff").read_text("utf-8")
    ported.write_text(applied(script.read_text("utf-8"), diff), "utf-8")
    epochs = []
    for path in (script, ported):
        if name == "ddp":
            printed = _run_two_ranks(tmp_path / f"ranks of {len(epochs)}", path, *arguments)
        else:
            monkeypatch.setattr(sys, "argv", [str(path), *arguments])
            runpy.run_path(str(path), run_name="__main__")
            printed = capsys.readouterr().out.splitlines()
        epochs.append(sorted(re.findall(r"epoch \d+", " ".join(printed))))  # ranks share lines
    assert epochs[0] == epochs[1] != []
    assert "torchvision.datasets" not in ported.read_text("utf-8")


def applied(script: str, diff: str) -> str:
    """The script after a unified diff."""
    before = script.splitlines(keepends=True)
    after: list[str] = []
    done = 0
    for hunk in re.split(r"^(?=@@ )", diff, flags=re.MULTILINE)[1:]:
        head, *lines = hunk.splitlines(keepends=True)
        found = re.match(r"@@ -(\d+)", head)
        assert found is not None
        first = int(found[1]) - 1
        after += before[done:first]
        old = [line[1:] for line in lines if line[0] in " -"]
        assert before[first : first + len(old)] == old, f"{head} does not fit"
        after += [line[1:] for line in lines if line[0] in " +"]
        done = first + len(old)
    return "".join([*after, *before[done:]])


def _run_two_ranks(folder: Path, script: Path, *arguments: str) -> list[str]:
    """Run a script in two processes that have torch, with the environment that torchrun gives them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["TMPDIR"] = str(folder.parent)

    def run_rank(rank: str) -> Done:
        own = folder / rank
        own.mkdir(parents=True)
        variables = shared | {"RANK": rank, "LOCAL_RANK": rank}
        return run_elsewhere(own, run_script, variables, str(script), *arguments)

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(run_rank, ("0", "1")))
    for done in ranks:
        assert done.returncode == 0, done.stderr
    return [line for done in ranks for line in done.stdout.splitlines()]
