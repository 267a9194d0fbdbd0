"""`fastdata bench`: the images it draws, what it measures, its command line."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision import transforms as v1

from conftest import shown
from fastdata import plan_transform
from fastdata.memory import Available
from fastdata.tools.bench import (
    RECIPES,
    BenchSettings,
    PillowFolder,
    StandIns,
    best_workers,
    choose_images,
    first_batch_s,
    images_per_s,
    peak_memory,
    photo,
    training_transform,
    write_photos,
)
from fastdata.tools.cli import main

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


def test_rate_counts_whole_epochs() -> None:
    """Epochs repeat until the time asked for has passed, and an empty loader ends at once."""
    epochs = []

    class Loader:
        def __iter__(self) -> Any:
            epochs.append(0)
            for _ in range(3):
                epochs[-1] += 1
                yield torch.zeros(5), None

    images_per_s(Loader(), at_least_s=0.01)
    assert len(epochs) > 1
    assert set(epochs) == {3}
    assert images_per_s([], at_least_s=10.0) == 0.0
    images_per_s(Loader(), at_least_s=0.0, whole_epochs=False)
    assert epochs[-1] == 1


def test_first_batch_does_not_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loader takes to end after its first batch does not count."""
    now_s = [0.0]

    def batches() -> Any:
        now_s[0] += 1.0
        try:
            yield torch.zeros(5)
        finally:
            now_s[0] += 10.0

    monkeypatch.setattr("fastdata.tools.bench.time.perf_counter", lambda: now_s[0])
    assert first_batch_s(batches) == 1.0
    assert now_s == [11.0]


def test_more_workers_need_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller number of workers wins unless the larger one is at least two percent faster."""
    rates = {0: 100.0, 1: 101.0, 2: 150.0, 3: 151.0}
    monkeypatch.setattr("fastdata.tools.bench.images_per_s", lambda rate, **_: rate)
    assert best_workers(rates.__getitem__, [0, 1], budget_s=1.0) == 0
    assert best_workers(rates.__getitem__, [0, 1, 2, 3], budget_s=1.0) == 2


def test_one_disturbed_pass_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of workers whose first pass was slow still wins by its second."""
    passes = {0: iter([100.0, 100.0]), 1: iter([10.0, 200.0])}
    monkeypatch.setattr("fastdata.tools.bench.images_per_s", lambda rates, **_: next(rates))
    assert best_workers(passes.__getitem__, [0, 1], budget_s=1.0) == 1


def test_peak_memory_sees_what_was_freed_since() -> None:
    """The peak holds memory that is gone by the end."""
    with peak_memory(every_s=0.01) as peak:
        before = peak.size_bytes
        block = np.ones(2**26, np.uint8)
        while peak.size_bytes - before < 2**25:  # the test's time runs out if nobody looks
            block.sum()
        del block
    assert peak.size_bytes - before > 2**25


def test_images_are_chosen_over_all_classes(image_folder: Callable[..., Path]) -> None:
    """A limit takes images from every class."""
    root = image_folder(classes=("a", "b", "c"), per_class=4)
    assert [Path(path).parent.name for path in choose_images(root, 3)] == ["a", "b", "c"]
    assert choose_images(root, 12) == sorted(map(str, root.rglob("*.jpg")))


@pytest.mark.parametrize("options", [["--dtype", "uint8"], ["--dtype", "float32", "--num-workers", "1"]], ids=shown)
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
    assert figures["settings"]["batch_size"] == 4
    assert list(figures["recipes"]) == list(RECIPES)
    for name, recipe in figures["recipes"].items():
        rates = [statistics.median(recipe[side]["images_per_s"]["rounds"]) for side in ("vanilla", "fastdata")]
        assert recipe["ratio"] == pytest.approx(rates[1] / rates[0])
        assert re.search(rf"^{name} .* {recipe['ratio']:.1f} ", printed, re.MULTILINE)
    assert figures["images"] == 12
    assert set(document["versions"]) >= {"python", "torch", "torchvision", "numpy", "pillow", "fastdata"}
    assert document["machine"]["usable_cores"] >= 1
    kept = {path.name for path in tmp_path.iterdir()}
    assert {name for name in kept if not name.startswith("pymp-")} == {
        "figures.json"
    }  # of vanilla's workers, if killed


def test_bench_measures_a_folder(
    image_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A given folder is measured and left as it was, and a chart is drawn."""
    pytest.importorskip("matplotlib")
    root = image_folder(per_class=6, size=(40, 36))
    chart = tmp_path / "chart.png"
    assert main([*TINY, str(root), "--recipe", "crop", "--num-workers", "0", "--plot", str(chart)]) == 0
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
    assert "needs matplotlib, which is not installed: pip install 'fastdata[plot]'" in capsys.readouterr().err


def test_bench_runs_without_torchvision(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where torchvision cannot be imported, the baseline is its equal, and the table says so."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert main(TINY) == 0
    printed = capsys.readouterr().out
    assert "torchvision's equal + torch" in printed
    assert "Each of rrc, trivial, randaug, simclr needs torchvision, which cannot be imported here: pip in" in printed
    assert main([*TINY, "--recipe", "simclr"]) == 2
    assert "fastdata: --recipe simclr needs torchvision, which cannot be" in capsys.readouterr().err


def test_a_torchvision_for_another_torch_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its import raises, and which torch is there: to install the extra would not help."""
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision.py").write_text(broken, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision")
    assert main([*TINY, "--recipe", "rrc"]) == 2
    words = (
        rf"is for another torch than this {re.escape(torch.__version__)} \(operator torchvision::nms does not exist\)"
    )
    assert re.search(words, capsys.readouterr().err)


def test_bench_measures_a_transform_of_ones_own(
    image_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``module:name`` is imported from the working directory, and stands alone unless recipes are asked for, too."""
    monkeypatch.chdir(tmp_path)
    Path("own_steps.py").write_text(
        "from torchvision import transforms\n"
        "train = transforms.Compose([transforms.Resize((9, 8)), transforms.PILToTensor()])\n"
    )
    root, options = str(image_folder(size=(40, 36))), ["--num-workers", "0", "--json", "figures.json"]
    assert main([*TINY, root, "--transform", "own_steps:train", *options]) == 0
    assert "\nown_steps:train " in capsys.readouterr().out
    assert list(json.loads(Path("figures.json").read_text())["figures"]["recipes"]) == ["own_steps:train"]
    for words, message in (
        ("own_steps", "--transform own_steps is not module:name"),
        ("own_steps:test", "--transform own_steps:test: module 'own_steps' has no attribute 'test'"),
        ("own_step:train", "No module named 'own_step'"),
    ):
        assert main([*TINY, root, "--transform", words]) == 2
        assert message in capsys.readouterr().err


def test_recipes_are_served_in_whole_batches() -> None:
    """No recipe is measured as steps per sample, as uint8 or float32."""
    for dtype in ("uint8", "float32"):
        for recipe in RECIPES:
            assert plan_transform(training_transform(v1, settings_of(dtype), recipe)).is_batched, recipe


def test_what_does_not_fit_names_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The cure for a lack of memory is one of this command's flags."""
    monkeypatch.setattr("fastdata.memory.available_bytes", lambda: Available(bytes=1, limited_by="cgroup limit"))
    assert main([*TINY, "--recipe", "crop", "--num-workers", "0"]) == 2
    said = capsys.readouterr().err
    assert "is free (cgroup limit). Use fewer --images or a smaller --resize.\n" in said


def settings_of(dtype: Any) -> BenchSettings:
    return BenchSettings(
        folder=None,
        images=None,
        resize_px=32,
        crop_px=24,
        batch_size=1,
        rounds=1,
        dtype=dtype,
        num_workers=0,
        progress=False,
    )


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("size", [(50, 40), (40, 50)], ids=["wide", "high"])
def test_stand_ins_equal_torchvision(image_folder: Callable[..., Path], dtype: Any, size: tuple[int, int]) -> None:
    """What stands in for torchvision's classes has their samples, pixels and draws, and is served in whole batches."""
    settings = settings_of(dtype)
    root, made = str(image_folder(size=size)), []
    for transforms, folder in ((v1, datasets.ImageFolder), (StandIns, PillowFolder)):
        torch.manual_seed(7)
        transform = training_transform(transforms, settings)
        made.append(list(folder(root, transform, is_valid_file=lambda path: path.endswith(".jpg"), allow_empty=True)))
        assert plan_transform(transform).is_batched
    assert [label for _, label in made[0]] == [label for _, label in made[1]]
    assert all(torch.equal(image, other) for (image, _), (other, _) in zip(*made, strict=True))


def test_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while measuring exits with 130 and removes the drawn images."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupted(*_: Any, **__: Any) -> None:
        assert list(tmp_path.iterdir()), "the images are there when the signal comes"
        raise KeyboardInterrupt

    monkeypatch.setattr("fastdata.tools.bench.images_per_s", interrupted)
    assert main(TINY) == 130
    assert capsys.readouterr().err.endswith("fastdata: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_version_names_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints one line with the package's name."""
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("fastdata ")
