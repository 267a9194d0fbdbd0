"""`fastdata bench`: the images it draws, its rival, its command line."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastdata.bench import run, vanilla
from fastdata.bench.images import photo, write_photos
from fastdata.bench.measure import Spread, best_workers, images_per_s, peak_memory
from fastdata.cli import main

TINY = ["bench", "--images", "12", "--rounds", "1", "--batch-size", "4", "--resize", "32", "--crop", "24"]


def test_drawn_images_are_as_large_as_photographs(tmp_path: Path) -> None:
    """Files of 512x384 at quality 90 take 60 to 110 KB, in class folders."""
    write_photos(tmp_path, count=12, classes=3)
    files = sorted(tmp_path.glob("class*/*.jpg"))
    assert len(files) == 12
    assert {path.parent.name for path in files} == {"class0", "class1", "class2"}
    with Image.open(files[0]) as image:
        assert image.size == (512, 384)
    assert all(60_000 <= path.stat().st_size <= 110_000 for path in files)


def test_drawn_images_are_the_same_on_every_run() -> None:
    """A seed decides every pixel, and two seeds give two images."""
    assert np.array_equal(photo(3, (40, 30)), photo(3, (40, 30)))
    assert not np.array_equal(photo(3, (40, 30)), photo(4, (40, 30)))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("size", [(50, 40), (40, 50)], ids=["wide", "high"])
def test_stand_ins_equal_torchvision(dtype: str, size: tuple[int, int]) -> None:
    """Where torchvision does not import, the rival's pixels and draws are still torchvision's."""
    transforms = pytest.importorskip("torchvision").transforms
    image = Image.fromarray(photo(1, size))
    made = []
    for holder in (transforms, vanilla._Equal):
        torch.manual_seed(7)
        transform = vanilla.Rival(name="", folder=vanilla.ImageFolder, transforms=holder).training_transform(
            32, 24, dtype
        )
        made.append(torch.stack([transform(image) for _ in range(6)]))
    assert made[0].dtype == getattr(torch, dtype)
    assert torch.equal(made[0], made[1])


def test_stand_in_folder_equals_torchvisions(image_folder: Callable[..., Path]) -> None:
    """The stand-in for ImageFolder has the same samples in the same order."""
    datasets = pytest.importorskip("torchvision").datasets
    root = str(image_folder())
    assert vanilla.ImageFolder(root).samples == datasets.ImageFolder(root).samples
    image, label = vanilla.ImageFolder(root)[4]
    expected, expected_label = datasets.ImageFolder(root)[4]
    assert (label, image.tobytes()) == (expected_label, expected.tobytes())


def test_rate_counts_whole_epochs() -> None:
    """Epochs repeat until the time asked for has passed, and an empty loader ends at once."""
    epochs = []

    class Loader:
        def __iter__(self) -> Any:
            epochs.append(1)
            yield torch.zeros(5), None

    images_per_s(Loader(), at_least_s=0.01)
    assert len(epochs) > 1
    assert images_per_s([], at_least_s=10.0) == 0.0


def test_more_workers_need_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller number of workers wins unless the larger one is at least two percent faster."""
    rates = {0: 100.0, 1: 101.0, 2: 150.0, 3: 151.0}
    monkeypatch.setattr("fastdata.bench.measure._rate_of_a_pass", lambda rate, budget_s: rate)
    assert best_workers(rates.__getitem__, [0, 1], budget_s=1.0) == 0
    assert best_workers(rates.__getitem__, [0, 1, 2, 3], budget_s=1.0) == 2


def test_one_disturbed_pass_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of workers whose first pass was slow still wins by its second."""
    passes = {0: iter([100.0, 100.0]), 1: iter([10.0, 200.0])}
    monkeypatch.setattr("fastdata.bench.measure._rate_of_a_pass", lambda rates, budget_s: next(rates))
    assert best_workers(passes.__getitem__, [0, 1], budget_s=1.0) == 1


def test_peak_memory_sees_what_was_freed_since() -> None:
    """The peak holds memory that is gone by the end."""
    with peak_memory(every_s=0.01) as peak:
        before = peak.size_bytes
        block = np.ones(2**26, np.uint8)
        seen = peak.samples
        while peak.samples < seen + 2:
            block.sum()
        del block
    assert peak.size_bytes - before > 2**25


def test_spread_is_over_the_rounds() -> None:
    """Median, lowest and highest are those of the rounds."""
    spread = Spread(rounds=(3.0, 1.0, 2.0, 10.0))
    assert (spread.median, spread.lowest, spread.highest) == (2.5, 1.0, 10.0)


def test_images_are_chosen_over_all_classes(image_folder: Callable[..., Path]) -> None:
    """A limit takes images from every class, and only those are valid."""
    root = image_folder(classes=("a", "b", "c"), per_class=4)
    chosen = run._choose_images(root, 3)
    assert [Path(path).parent.name for path in chosen.paths] == ["a", "b", "c"]
    assert chosen(chosen.paths[1])
    assert not chosen(str(root / "a" / "003.jpg"))


@pytest.mark.parametrize("options", [["--dtype", "uint8"], ["--dtype", "float32", "--num-workers", "1"]], ids=str)
def test_bench_draws_and_measures(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a folder it draws images, prints the table, keeps the figures and removes the images."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    figures_file = tmp_path / "figures.json"
    assert main([*TINY, *options, "--json", str(figures_file)]) == 0
    printed = capsys.readouterr().out
    for row in ("prepare, once", "first batch", "images/s, median", "ratio", "peak memory, PSS"):
        assert row in printed
    document = json.loads(figures_file.read_text())
    figures = document["figures"]
    rates = [statistics.median(figures[road]["images_per_s"]["rounds"]) for road in ("vanilla", "fastdata")]
    assert figures["ratio"] == pytest.approx(rates[1] / rates[0])
    assert figures["images"] == 12
    assert set(document["versions"]) >= {"python", "torch", "torchvision", "numpy", "pillow", "fastdata"}
    assert document["machine"]["usable_cores"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_bench_measures_a_folder(
    image_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A given folder is measured and left as it was, and a chart is drawn."""
    pytest.importorskip("matplotlib")
    root = image_folder(per_class=6, size=(40, 36))
    chart = tmp_path / "chart.png"
    assert main([*TINY, str(root), "--num-workers", "0", "--plot", str(chart)]) == 0
    assert f"12 images ({root})" in capsys.readouterr().out.replace("\n", " ")
    with Image.open(chart) as image:
        assert image.width > 300
    assert len(list(root.rglob("*.jpg"))) == 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is no folder"),
        (lambda path: path.mkdir(), "has no image in any class folder"),
        (lambda path: (path / "cat").mkdir(parents=True), "has no image in any class folder"),
    ],
    ids=["missing", "empty", "empty class"],
)
def test_bad_folder_is_one_line(
    make: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or empty folder exits with 2 and one line that names it."""
    folder = tmp_path / "photos"
    make(folder)
    assert main(["bench", str(folder)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(folder) in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--rounds", "0"], "must be at least 1"),
        (["bench", "--batch-size", "x"], "'x' is no whole number"),
        (["bench", "--crop", "300"], "--crop 300 is larger than the prepared square, --resize 256"),
    ],
)
def test_bad_option_exits_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option out of range is refused before anything is drawn."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_plot_without_matplotlib_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--plot fails before measuring, with the command that installs matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*TINY, "--plot", "chart.png"]) == 2
    assert "pip install 'fastdata[plot]'" in capsys.readouterr().err


def test_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while measuring exits with 130 and removes the drawn images."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupted(*_: Any) -> None:
        assert list(tmp_path.iterdir()), "the images are there when the signal comes"
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_race", interrupted)
    assert main(TINY) == 130
    assert capsys.readouterr().err.endswith("fastdata: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_version_names_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints one line with the package's name."""
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("fastdata ")
