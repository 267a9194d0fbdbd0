"""``fastdata bench``: the images that it draws, its measurements, and its command line."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastdata import plan_transform
from fastdata.tools.__main__ import main
from fastdata.tools.bench import RECIPES, make_recipe, write_photos

TINY = ["bench", "--images", "12", "--batch-size", "4", "--num-workers", "1"]


@pytest.fixture(autouse=True)
def short_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdata.tools.bench._RATE_S", 0.01)
    monkeypatch.setattr("fastdata.tools.bench._ROUNDS", 1)
    monkeypatch.setattr("fastdata.tools.recipes.CROP_PX", 24)
    for module in ("recipes", "bench"):
        monkeypatch.setattr(f"fastdata.tools.{module}.PREPARED_PX", 32)


@pytest.fixture
def photos(image_folder: Callable[..., Path]) -> str:
    return str(image_folder(per_class=6, size=(40, 36)))


def test_drawn_images_are_as_large_as_photographs(tmp_path: Path) -> None:
    """Files of 512x384 at quality 90 take 60 to 110 KB, in class folders."""
    write_photos(tmp_path, count=12, classes=3)
    files = sorted(tmp_path.glob("class*/*.jpg"))
    assert len(files) == 12
    assert {path.parent.name for path in files} == {"class0", "class1", "class2"}
    with Image.open(files[0]) as image:
        assert image.size == (512, 384)
    assert all(60_000 <= path.stat().st_size <= 110_000 for path in files)


def test_drawn_images_are_the_same_on_every_run(tmp_path: Path) -> None:
    """A seed decides every pixel, and two seeds give two images."""
    for name in ("a", "b"):
        write_photos(tmp_path / name, count=2, classes=1, size=(40, 30))
    first, second = (path.read_bytes() for path in sorted((tmp_path / "a").rglob("*.jpg")))
    assert first != second
    assert [path.read_bytes() for path in sorted((tmp_path / "b").rglob("*.jpg"))] == [
        first,
        second,
    ]


@pytest.mark.parametrize("options", [["--dtype", "uint8"], ["--dtype", "float32"]], ids=str)
def test_bench_draws_and_measures(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a folder it draws images, prints a row for each recipe, keeps the figures and removes the images."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    figures_file = tmp_path / "figures.json"
    chosen = [] if "float32" in options else ["--recipe", "crop", "--recipe", "rrc"]
    assert main([*TINY, *chosen, *options, "--json", str(figures_file)]) == 0
    printed, said = capsys.readouterr()
    document = json.loads(figures_file.read_text())
    assert document["settings"]["batch_size"] == 4
    assert list(document["recipes"]) == (["crop", "rrc"] if chosen else list(RECIPES))
    for name, recipe in document["recipes"].items():
        rates = [statistics.median(recipe[side]) for side in ("vanilla", "fastdata")]
        assert recipe["ratio"] == pytest.approx(rates[1] / rates[0])
        assert re.search(rf"^{name} .* {recipe['ratio']:.1f} ", printed, re.MULTILINE)
        assert f"measuring {name} ...\n" in said  # nobody watches a bar here
    assert document["images"] == 12
    assert set(document["versions"]) >= {
        "python",
        "torch",
        "torchvision",
        "numpy",
        "pillow",
        "fastdata",
    }
    assert document["machine"]["usable_cores"] >= 1
    # Of killed workers.
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("pymp-")}
    assert left == {"figures.json"}


def test_the_last_line_is_one_to_quote(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line names the ratio, what is compared, the recipes and the machine."""
    assert main([*TINY, photos, "--recipe", "crop"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"fastdata reads [\d.]+ times as many .* as torchvision \+ torch \(crop; .*, \d+ usable cores\)\.",
        last,
    )


def test_bench_measures_a_folder(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A given folder is measured and left as it was, no more than the images asked for."""
    assert main([*TINY, photos, "--images", "5", "--recipe", "crop"]) == 0
    assert f"5 images ({photos})" in capsys.readouterr().out
    assert len(list(Path(photos).rglob("*.jpg"))) == 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "{folder} is not a folder"),
        (lambda path: path.mkdir(), "Couldn't find any class folder in {folder}"),
        (
            lambda path: (path / "cat").mkdir(parents=True),
            "Found no valid file for the classes cat",
        ),
    ],
    ids=["missing", "empty", "empty class"],
)
def test_bad_folder_is_one_line(
    make: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or empty folder exits with 2 and one line that says what it lacks."""
    folder = tmp_path / "photos"
    make(folder)
    assert main(["bench", str(folder)]) == 2
    said = capsys.readouterr().err
    assert message.format(folder=folder) in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--images", "0"], "must be at least 1"),
        (["bench", "--batch-size", "x"], "invalid positive value: 'x'"),
    ],
)
def test_bad_option_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option out of range is refused before anything is drawn."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_needs_torchvision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without torchvision the error has the command to install it, and nothing is measured."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert main(TINY) == 2
    said = capsys.readouterr().err
    assert "torchvision, which is not installed: pip install torchvision" in said


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_recipes_run_on_whole_batches(recipe: str, dtype: str) -> None:
    """Every step of each recipe runs on whole batches."""
    assert plan_transform(make_recipe(recipe, dtype)).is_batched


def test_bench_measures_a_transform_of_ones_own(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``module:name`` is imported from the working directory, and stands alone unless recipes are asked for, too."""
    monkeypatch.chdir(tmp_path)
    Path("own_steps.py").write_text(
        "from torchvision import transforms\n"
        "train = transforms.Compose([transforms.Resize((9, 8)), transforms.PILToTensor()])\n"
    )
    words = ["--transform", "own_steps:train", "--json", "figures.json"]
    assert main([*TINY, photos, *words]) == 0
    assert "\nown_steps:train " in capsys.readouterr().out
    assert list(json.loads(Path("figures.json").read_text())["recipes"]) == ["own_steps:train"]
    for words, message in (
        ("own_steps", "--transform own_steps does not have the form MODULE:NAME"),
        ("own_steps:", "--transform own_steps: does not have the form MODULE:NAME"),
        (
            "own_steps:test",
            "--transform own_steps:test: module 'own_steps' has no attribute 'test'",
        ),
        ("own_step:train", "No module named 'own_step'"),
    ):
        assert main([*TINY, photos, "--transform", words]) == 2
        assert message in capsys.readouterr().err


def test_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while measuring exits with 130 and removes the drawn images."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupted(*_: Any, **__: Any) -> None:
        assert list(tmp_path.iterdir()), "the images are there when the signal comes"
        raise KeyboardInterrupt

    monkeypatch.setattr("fastdata.tools.bench.in_subprocess", interrupted)
    assert main(TINY) == 130
    assert capsys.readouterr().err.endswith("fastdata: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_version_names_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints one line with the package's name."""
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("fastdata ")
