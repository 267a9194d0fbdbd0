"""Folder scans compared with torchvision's, CSV manifests, and items of datasets."""

from __future__ import annotations

import csv
import io
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import shown
from fastdata import CachedDataset, ImageFolder, ImageManifest
from fastdata.errors import SampleError

folder = pytest.importorskip(
    "torchvision.datasets.folder", reason="the reference is torchvision's own scan"
)

ENDINGS = (".jpg", ".png")


class Lists(NamedTuple):
    """The lists of an ``ImageManifest``."""

    paths: list[str]
    targets: Any
    class_to_idx: dict[str, int] | None


def read_manifest(manifest: Any, root: Any = None, **options: Any) -> Lists:
    with ImageManifest(manifest, root=root, storage="none", **options) as dataset:
        paths = [path for path, _ in dataset.samples]
        targets: Any = list(dataset.targets)
        if isinstance(targets[0], torch.Tensor):
            targets = torch.stack(targets)
        return Lists(paths, targets, dataset.class_to_idx or None)


def find_classes(root: Any) -> tuple[list[str], dict[str, int]]:
    return ImageFolder.find_classes(ImageFolder.__new__(ImageFolder), root)


Outcome = tuple[str, Any]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make class folders with nested, linked, odd and unsuitable entries."""
    root = tmp_path / "root"
    for name in (
        "b/2.jpg",
        "b/10.jpg",
        "b/1.JPG",
        "b/deep/er/x.png",
        "b/deep/a.jpg",
        "b/deep.d/a.jpg",
        "a/z.jpg",
        "a/.jpg",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "a" / "folder.jpg").mkdir()
    (root / "a" / "folder.jpg" / "in.png").touch()
    (root / "a" / "note.txt").touch()
    (root / "stray.jpg").touch()
    (root / "ü é").mkdir()
    (root / "ü é" / "ö.jpg").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far.jpg").touch()
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "b" / "also").symlink_to(tmp_path / "elsewhere")
    (root / "b" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    return root


def listed_in(root: Any, class_to_idx: Any = None, **options: Any) -> list[tuple[str, int]]:
    """List samples like torchvision's ``make_dataset``, which finds the classes if none are given."""
    classes = find_classes(root)[1] if class_to_idx is None else class_to_idx
    return ImageFolder.make_dataset(root, classes, **options)


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Return the result or the error of a call, for comparison."""
    try:
        return "returned", call(*args, **kwargs)
    except (ValueError, OSError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("patience_s", [0.02, float("-inf")], ids=["serial", "threads"])
@pytest.mark.parametrize(
    "options",
    [
        {"extensions": ENDINGS},
        {"extensions": ".png", "allow_empty": True},
        {"extensions": ".png"},
        {"extensions": [".jpg"]},
        {"extensions": (".gif", ".bmp")},
        {"is_valid_file": lambda path: path.endswith("t") or "deep" in path, "allow_empty": True},
        {"is_valid_file": lambda path: False},
        {"extensions": ENDINGS, "class_to_idx": {"b": 7, "a": 7}},
        {"extensions": ENDINGS, "class_to_idx": {"b": 0, "missing": 1, "stray.jpg": 2}},
        {"extensions": ENDINGS, "class_to_idx": {"b": 0, "missing": 1}, "allow_empty": True},
        {"extensions": ENDINGS, "class_to_idx": {}},
        {"extensions": ENDINGS, "is_valid_file": bool},
        {},
    ],
    ids=shown,
)
def test_scan_gives_what_torchvision_gives(
    tree: Path, options: dict[str, Any], patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples, their order, and errors with type and text equal torchvision's, in one thread and in several."""
    monkeypatch.setattr("fastdata.sources.folders.SCAN_PATIENCE_S", patience_s)
    assert outcome(listed_in, tree, **options) == outcome(folder.make_dataset, tree, **options)


@pytest.mark.parametrize("suffix", ["", "/", "/.", "/../root"])
def test_scan_spells_paths_as_torchvision_does(tree: Path, suffix: str) -> None:
    """Paths begin with the root exactly as given."""
    root = str(tree) + suffix
    assert listed_in(root, extensions=ENDINGS) == folder.make_dataset(root, extensions=ENDINGS)


def test_scan_expands_the_home_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is the user's home, as with torchvision."""
    monkeypatch.setenv("HOME", str(tree.parent))
    found = listed_in("~/root", extensions=ENDINGS)
    assert found == folder.make_dataset("~/root", extensions=ENDINGS)
    assert found


def test_scan_survives_a_link_to_its_own_parent(tmp_path: Path) -> None:
    """A cycle of links ends where the system ends it, with torchvision's list."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.jpg").touch()
    (tmp_path / "c" / "loop").symlink_to(tmp_path / "c")
    assert listed_in(tmp_path, extensions=ENDINGS) == folder.make_dataset(
        tmp_path, extensions=ENDINGS
    )


def test_a_cache_that_is_opened_alone_lists_nothing(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from_cache`` reads no folder of images: it works after they were moved away."""
    root = image_folder()
    with ImageFolder(root, cache_dir=tmp_path / "caches", prepare_workers=1) as dataset:
        wanted = [(np.asarray(image).tobytes(), target) for image, target in dataset]
    listed: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path)) or scan(path))
    root.rename(tmp_path / "elsewhere")
    with CachedDataset.from_cache(tmp_path / "caches") as dataset:
        assert [(np.asarray(image).tobytes(), target) for image, target in dataset] == wanted
    assert [path for path in listed if "images" in path or "elsewhere" in path] == []


def test_is_valid_file_runs_in_the_calling_thread_in_order(tree: Path) -> None:
    """The user's function sees the same paths in the same order as with torchvision."""
    seen: dict[str, list[str]] = {"ours": [], "theirs": []}
    listed_in(tree, is_valid_file=lambda path: seen["ours"].append(path) is None)
    folder.make_dataset(tree, is_valid_file=lambda path: seen["theirs"].append(path) is None)
    assert seen["ours"] == seen["theirs"]
    assert seen["ours"]


@pytest.mark.parametrize("place", [".", "b/deep/er", "nowhere", "stray.jpg"])
def test_find_classes_gives_what_torchvision_gives(tree: Path, place: str) -> None:
    """Class names, indices, and the errors for a root without folders, a missing root and a file are equal."""
    assert outcome(find_classes, tree / place) == outcome(folder.find_classes, tree / place)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_manifest_with_numbers_keeps_them(tmp_path: Path) -> None:
    """Whole numbers are unchanged targets, relative paths start at the CSV's folder, absolute ones stay."""
    path = write(tmp_path / "m.csv", "label,file\n7,a.jpg\n-1,/data/b.jpg\n")
    assert read_manifest(path) == ([str(tmp_path / "a.jpg"), "/data/b.jpg"], [7, -1], None)


def test_manifest_with_names_numbers_the_sorted_classes(tmp_path: Path) -> None:
    """Names become positions in their sorted order; root= and other column names are used."""
    path = write(tmp_path / "m.csv", "path,x,kind\n1.jpg,,dog\n2.jpg,,cat\n3.jpg,,dog\n")
    manifest = read_manifest(path, root="/r", file="path", label="kind")
    assert manifest == (["/r/1.jpg", "/r/2.jpg", "/r/3.jpg"], [1, 0, 1], {"cat": 0, "dog": 1})


def test_manifest_with_a_decimal_point_has_floats(tmp_path: Path) -> None:
    """One number with a point or an exponent makes all targets floats."""
    path = write(tmp_path / "m.csv", "file,label\na,1\nb,-.5\nc,2.5e1\n")
    targets = read_manifest(path).targets
    assert targets == [1.0, -0.5, 25.0]
    assert {type(target) for target in targets} == {float}


@pytest.mark.parametrize(
    ("rows", "targets"),
    [
        ("0,1", torch.tensor([[0, 1], [1, 0]])),
        ("False,True", torch.tensor([[0, 1], [1, 0]])),
        ("2.5,1", torch.tensor([[2.5, 1.0], [1.0, 2.5]])),
    ],
)
def test_manifest_with_several_labels_has_vectors(
    tmp_path: Path, rows: str, targets: torch.Tensor
) -> None:
    """Whole numbers and flags are int64, otherwise float32, in the order of label=."""
    path = write(
        tmp_path / "m.csv", f"file,x,y\na,{rows}\nb,{','.join(reversed(rows.split(',')))}\n"
    )
    found = read_manifest(path, label=["x", "y"]).targets
    assert found.dtype == targets.dtype
    assert torch.equal(found, targets)
    assert torch.equal(read_manifest(path, label=["y", "x"]).targets, targets.flip(1))
    assert torch.equal(read_manifest(path, label=["y"]).targets, targets[:, 1:])


def test_manifest_passes_ids_through(tmp_path: Path) -> None:
    """An id stays a string, alone, with the label, or as the path; without one, rows are counted."""
    path = write(tmp_path / "m.csv", "id,label,file\n007,cat,a.jpg\nx,ant,b.jpg\n")
    assert list(read_manifest(path, label=None).targets) == [0, 1]
    assert list(read_manifest(path, label=None, id="id").targets) == ["007", "x"]
    assert list(read_manifest(path, label=None, id="file").targets) == ["a.jpg", "b.jpg"]
    assert read_manifest(path, id="id")[1:] == ([(1, "007"), (0, "x")], {"ant": 0, "cat": 1})


def test_manifest_from_a_frame_is_that_of_its_csv(tmp_path: Path) -> None:
    """Rows of a pandas frame give the result of its CSV, but ids keep their type."""
    pandas = pytest.importorskip("pandas")
    columns = {
        "file": ["a.jpg", "b.jpg"],
        "kind": ["dog", "cat"],
        "n": [3, 7],
        "x": [0.1, 2.0],
        "on": [True, False],
    }
    frame = pandas.DataFrame(columns, index=[5, 5])
    frame.to_csv(tmp_path / "m.csv")
    for label in ("kind", "n", "x", "on", ["n", "x"], ["on", "n"], frame.columns[2:4], None):
        found, wanted = (read_manifest(it, "/r", label=label) for it in (frame, tmp_path / "m.csv"))
        assert found.paths == wanted.paths == ["/r/a.jpg", "/r/b.jpg"]
        assert repr(found[1:]) == repr(wanted[1:])
    assert list(read_manifest(frame, label=None, id="n").targets) == [3, 7]
    frame["points"] = [np.array([0.5, 1]), [2, 3]]
    assert torch.equal(
        read_manifest(frame, label="points").targets, torch.tensor([[0.5, 1], [2, 3]])
    )
    for missing in (None, float("nan"), pandas.NA, pandas.NaT, " "):
        frame["kind"] = pandas.Series(["dog", missing], index=frame.index, dtype=object)
        with pytest.raises(
            ValueError,
            match=r"the DataFrame, row 1, column 'kind': the value is missing\. Write it, or remove the row",
        ):
            read_manifest(frame, label="kind")
    with pytest.raises(
        ValueError, match="the DataFrame has no column 'label'; its columns are: 'file', 'kind'"
    ):
        read_manifest(frame)
    with pytest.raises(ValueError, match="the DataFrame lists no samples"):
        read_manifest(frame[:0], label="n")


@pytest.mark.parametrize(
    ("samples", "options", "targets"),
    [
        ([("a", 3), ("b", 4)], {}, [3, 4]),
        ([["a", "dog"], (Path("b"), "cat")], {}, [1, 0]),
        ([("a", np.float32(0.5)), ("b", torch.tensor(2))], {}, [0.5, 2.0]),
        ([("a", [0, 1]), ("b", np.array([1, 0]))], {}, torch.tensor([[0, 1], [1, 0]])),
        ([("a", 1, 2.5), ("b", 3, 4)], {"label": ["x", "y"]}, torch.tensor([[1, 2.5], [3, 4]])),
        ([("a", 3, "k"), ("b", 4, "l")], {"id": "id"}, [(3, "k"), (4, "l")]),
        (["a", Path("b")], {"label": None}, [0, 1]),
        (["a", "b"], {"label": None, "id": "file"}, ["a", "b"]),
        (zip("ab", [5, 6], strict=True), {}, [5, 6]),
    ],
    ids=shown,
)
def test_manifest_from_a_list(samples: Any, options: Any, targets: Any) -> None:
    """Pairs, labels of any kind, ids in the third place and bare paths work; root= applies to paths."""
    found = read_manifest(samples, "/r", **options)
    assert found.paths == ["/r/a", "/r/b"]
    assert repr(
        found.targets if isinstance(targets, torch.Tensor) else list(found.targets)
    ) == repr(targets)


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (
            ["a"],
            {},
            r"the list, item 0, is \('a',\), but every item must be \(file, label\). Pass label=None",
        ),
        ([("a", 1), ("b", 2, 3)], {}, r"item 1, is \('b', 2, 3\), but every"),
        ([("a", 1)], {"label": None}, r"but every item must be \(file\)\."),
        (
            [("a", 1), ("b", "cat")],
            {},
            r"item 1, column 'label': 'cat' is a name, but '1' in item 0 is a number",
        ),
        ([("a", 1, None)], {"id": "key"}, "item 0, column 'key': the value is missing"),
        ([], {}, "the list lists no samples"),
    ],
)
def test_errors_of_lists_say_where_and_what(samples: Any, options: Any, message: str) -> None:
    """Each error has the number of the item, and the name of the column."""
    with pytest.raises(ValueError, match=message):
        read_manifest(samples, **options)


def test_manifest_understands_bom_quotes_crlf_and_blank_lines(tmp_path: Path) -> None:
    """CSV files of spreadsheet programs can be read."""
    text = '\ufefffile,label\r\n"a, ""b"".jpg",1\r\n\r\n"c.jpg", 2\r\n'
    assert read_manifest(write(tmp_path / "m.csv", text), root="r") == (
        ['r/a, "b".jpg', "r/c.jpg"],
        [1, 2],
        None,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "file,kind\na,1\n",
            r"has no column 'label'; its columns are: 'file', 'kind'. Name the columns with file= and label=.",
        ),
        ("file,label,label\na,1,2\n", "has several columns 'label'"),
        ("", "its columns are: none, the file is empty"),
        ("file,label\n", "lists no samples"),
        ("file,label\na.jpg,1\nb.jpg,\n", r"line 3, column 'label': the value is missing"),
        ("file,label\na.jpg\n", r"line 2, column 'label': the value is missing"),
        ("file,label\n,1\n", r"line 2, column 'file': the value is missing"),
        ("file,label\na,b.jpg,1\n", r"line 2: 3 values for 2 columns. Put quotes around"),
        (
            "file,label\na.jpg,1\nb.jpg,cat\n",
            r"line 3, column 'label': 'cat' is a name, but '1' in line 2 is a number. Write all labels",
        ),
        ("file,label\nä.jpg,1\n".encode("latin-1"), r"is not UTF-8 text \(.*\). Save it as UTF-8"),
        ("file,label\na.jpg,1\n".encode("utf-16"), "is not UTF-8 text"),
    ],
)
def test_manifest_errors_say_where_and_what(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    """Each error has the file, the line and the column."""
    path = write(tmp_path / "m.csv", text)
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "file,x,y\na,1,2\nb,1,cat\n",
            {"label": ["x", "y"]},
            r"line 3, column 'y': 'cat' is not a number, .* name one",
        ),
        (
            "file,x,y\na,1,2\nb,,1\n",
            {"label": ["x", "y"]},
            r"line 3, column 'x': the value is missing",
        ),
        ("file,label,id\na,1,\n", {"id": "id"}, r"line 2, column 'id': the value is missing"),
        (
            "file,label\na,1\n",
            {"id": "id"},
            r"has no column 'id'; its columns are: 'file', 'label'",
        ),
        ("file\na\n", {}, r"has no column 'label'; .* use label=None if it has no labels"),
        (
            "file,label\na,1.5\nb,nan\n",
            {},
            r"line 3, column 'label': 'nan' is a name, but '1.5' in line 2 is a number",
        ),
    ],
)
def test_errors_of_vectors_and_ids_say_where_and_what(
    tmp_path: Path, text: str, options: Any, message: str
) -> None:
    """Each error has the file, the line and the column."""
    path = write(tmp_path / "m.csv", text)
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(path, **options)
    assert str(path) in str(caught.value)


FAULTS_OF_ROWS = {
    "a quote that never closes": ('file,label\na.png,cat\nb.png,"dog\nc.png,cat\n', {}, "line 3: "),
    "a quote that closes late": ('file,label\n"a.png,1\nb.png,"2"\n', {}, "line 2: "),
    "after a value of two lines": ('file,label\n"a\nb",1\nc,"2\n', {}, "line 4: "),
    "a label beyond 64 bits": (
        "file,label\na,1\nb,98765432109876543210\n",
        {},
        "line 3, column 'label': '98765432109876543210' does not fit into 64 bits",
    ),
    "thousands of digits": (f"file,label\na,{'9' * 5000}\n", {}, "line 2, column 'label': '999"),
    "in a vector": (
        "file,x,y\na,1,-9223372036854775809\n",
        {"label": ["x", "y"]},
        "line 2, column 'y': '-9223372036854775809' does not fit",
    ),
    "a float beyond 64 bits": (
        "file,label\na,1.5\nb,1e400\n",
        {},
        "line 3, column 'label': '1e400'",
    ),
    "NUL in a path": ("file,label\na\0.png,1\n", {}, "line 2"),
}


@pytest.mark.parametrize(
    ("text", "options", "message"), FAULTS_OF_ROWS.values(), ids=FAULTS_OF_ROWS.keys()
)
def test_malformed_rows_are_named(tmp_path: Path, text: str, options: Any, message: str) -> None:
    """A malformed row is a ValueError with the file, the line where it begins, and the column."""
    path = write(tmp_path / "m.csv", text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_manifest(path, **options)
    assert str(path) in str(caught.value)


def test_int64_labels_are_read_to_their_ends(tmp_path: Path) -> None:
    """The smallest and the largest whole number of 64 bits are valid labels."""
    ends = [-(2**63), 2**63 - 1]
    path = write(tmp_path / "m.csv", f"file,label\na,{ends[0]}\nb, +{ends[1]} \n")
    assert read_manifest(path).targets == ends


def test_vectors_of_one_column_have_one_length() -> None:
    """A ragged or odd label is a ValueError that names its item; whole and other numbers may mix."""
    for label in ([1], 1, "cat", [[1, 0]], ["cat", "dog"], [1, [2]]):
        with pytest.raises(ValueError, match=r"the list, item 1, column 'label': "):
            read_manifest([("a.png", [1, 0]), ("b.png", label)])
    mixed = read_manifest([("a.png", [1, 0]), ("b.png", [0.5, 1])]).targets
    assert torch.equal(mixed, torch.tensor([[1, 0], [0.5, 1]]))


def test_long_values_are_read_and_the_limit_stays(tmp_path: Path) -> None:
    """Values of hundreds of thousands of characters can be read; csv's own limit is restored."""
    limit = csv.field_size_limit()
    path = write(tmp_path / "m.csv", f"file,mask,label\na,{'1 2 ' * 50_000},1\nb,,0\n")
    assert read_manifest(path).targets == [1, 0]
    assert csv.field_size_limit() == limit


def test_blanks_at_the_ends_of_values_stay() -> None:
    """They are part of a path, an id and a name; numbers are read without them."""
    rows = [("a.png", "cat", " 1"), (" a.png ", " cat", "\t2 ")]
    assert read_manifest(rows, id="id") == (
        ["a.png", " a.png "],
        [(1, " 1"), (0, "\t2 ")],
        {" cat": 0, "cat": 1},
    )
    assert read_manifest([("a", " 1"), ("b", "2 ")]).targets == [1, 2]
    assert read_manifest([("a", " 1.5"), ("b", "2\n")]).targets == [1.5, 2.0]


def test_random_rows_are_those_of_pythons_csv(tmp_path: Path) -> None:
    """Any text gives the values of csv in strict mode, or is refused if csv refuses it."""
    draw = random.Random(0)
    pieces = [
        "a",
        " b ",
        "é\u2028",
        'a"b',
        '""""',
        '"a""b"',
        '"a\nb"',
        '" ,a"',
        '"a" ',
        '"',
        "\t,",
        "\r",
    ]
    ends = ["\n", "\r\n", "\n\n", "\r"]
    seen = {"read": 0, "refused": 0}
    for _ in range(600):
        rows = [draw.choices(pieces, k=2) for _ in range(draw.randrange(1, 5))]
        text = "file,id\n" + "".join(f"{a},{b}{draw.choice(ends)}" for a, b in rows)
        path = write(tmp_path / "m.csv", text)
        try:
            wanted = list(filter(None, csv.reader(io.StringIO(text, newline=""), strict=True)))[1:]
        except csv.Error:
            wanted = []
        is_full = all(len(row) == 2 and all(map(str.strip, row)) for row in wanted)
        if not wanted or not is_full:
            with pytest.raises(ValueError, match=r"m\.csv"):
                read_manifest(path, label=None, id="id")
            seen["refused"] += 1
            continue
        found = read_manifest(path, label=None, id="id", root="")
        assert list(zip(found.paths, found.targets, strict=True)) == list(map(tuple, wanted))
        seen["read"] += 1
    assert min(seen.values()) > 20, seen


def test_random_values_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Values that csv writes, with any kind of quoting, come back unchanged."""
    draw = random.Random(1)
    for _ in range(200):
        rows = [
            ["x" + "".join(draw.choices('ab ,"\n\r\té', k=draw.randrange(9))) for _ in range(3)]
            for _ in range(draw.randrange(1, 5))
        ]
        stream = io.StringIO(newline="")
        quoting = draw.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
        csv.writer(stream, quoting=quoting).writerows([["file", "note", "id"], *rows])
        path = write(tmp_path / "m.csv", stream.getvalue())
        found = read_manifest(path, label=None, id="id", root="")
        assert list(zip(found.paths, found.targets, strict=True)) == [(a, b) for a, _, b in rows]


@pytest.mark.parametrize("name", ["größe m", "100%", "a%20b"])
def test_file_urls_have_escapes(tmp_path: Path, name: str) -> None:
    """Folders, CSV files and paths are found by ``Path.as_uri``, and by unescaped names."""
    path = tmp_path / name / "cat" / "x y.png"
    path.parent.mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(path)
    root = tmp_path / name
    csv_file = write(root / "m.csv", f"file,label\n{path.as_uri()},7\n")
    for given in (root, root.as_uri(), f"file://{root}"):
        assert ImageFolder(given).samples == [(str(path), 0)]
    for given in (csv_file, csv_file.as_uri(), f"file://{csv_file}"):
        assert ImageManifest(given).samples == [(str(path), 7)]


def test_a_cache_of_a_relative_list_names_its_files(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the CSV file is given, there is one cache, and it names existing files."""
    root = image_folder(per_class=2)
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.jpg"))]
    write(root / "m.csv", "file,label\n" + "".join(f"{name},0\n" for name in names))
    monkeypatch.chdir(tmp_path)
    indices = []
    for given in (f"{root.name}/m.csv", root / "m.csv", f"./{root.name}/m.csv"):
        ImageManifest(given, cache_dir="cache", prepare_workers=1).close()
        [index] = Path("cache").rglob("fastdata.npz")
        indices.append((index, index.stat().st_ino))
    assert len({*indices}) == 1
    monkeypatch.chdir("/")
    with CachedDataset.from_cache(tmp_path / "cache") as dataset:
        assert [path for path, _ in dataset.samples] == [str(root / name) for name in names]


class Listed:
    """A dataset of two samples that lists its files."""

    samples: Any = (("x.jpg", 0), (Path("y.jpg"), 1))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return [f"sample {index}", index]


class Part:
    """A subset with the attributes of torch's Subset."""

    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


def test_samples_of_subsets_are_named_by_their_files() -> None:
    """Errors of subsets of subsets have the paths that the inner dataset lists."""
    for dataset, name in (
        (Listed(), "x.jpg"),
        (Part(Part(Listed(), [1, 0]), [0]), "y.jpg"),
    ):
        with pytest.raises(SampleError, match=rf"sample 0, {name}, cannot be read: "):
            CachedDataset(dataset)


def test_what_has_no_index_or_no_image_is_refused() -> None:
    """An iterable dataset, and items that are not images, raise an error with the cure."""
    with pytest.raises(
        TypeError, match=r"generator has no __getitem__ or no __len__.* Give a map-style dataset"
    ):
        CachedDataset(item for item in ())
    with pytest.raises(
        SampleError,
        match=r"item 0 of list is an int, but a \(sample, target\) pair, a tuple, a dict",
    ):
        CachedDataset([1])


def test_dicts_of_no_image_or_several_are_refused() -> None:
    """A dict needs exactly one image under a name."""
    image = np.zeros((2, 2))
    items: list[tuple[dict[Any, Any], str]] = [
        (
            {"label": 3},
            "is a dict of label, without an image, but one image under a name is needed",
        ),
        (
            {"left": image, "right": image},
            "is a dict of left, right, with the images left, right, but one image",
        ),
        ({0: image}, "is a dict of 0, with the images 0, but one image under a name is needed"),
    ]
    for item, found in items:
        with pytest.raises(SampleError, match=f"item 0 of list {found}"):
            CachedDataset([item])


def test_the_first_item_decides_which_value_is_the_sample() -> None:
    """Later items may have an image in place of another value."""
    image = Image.new("RGB", (2, 2))
    items = [{"image": image, "mask": mask} for mask in (None, image, 3)]
    with CachedDataset(items, storage="none") as dataset:
        assert [dataset[index]["mask"] for index in range(3)] == [None, image, 3]


def test_items_of_another_form_are_refused() -> None:
    """Dicts must have the keys, and tuples the length, of the first item."""
    image = np.zeros((2, 2))
    items: list[Any] = [{"image": image}, {"image": image, "label": 3}, (image, 3)]
    with CachedDataset(items, storage="none") as dataset:
        assert dataset[0].keys() == {"image"}
        for index, found in ((1, "a dict of image, label"), (2, "a tuple of length 2")):
            with pytest.raises(
                TypeError,
                match=f"item {index} of list is {found}, but items before it are a dict of image",
            ):
                dataset[index]


def test_a_path_is_no_dataset(tmp_path: Path) -> None:
    """A path, which has an index and a length too, is refused with what to use instead."""
    for path in (str(tmp_path), tmp_path):
        with pytest.raises(
            TypeError, match=r"is a path, but a dataset is needed. Open a folder of class folders"
        ):
            CachedDataset(path)
