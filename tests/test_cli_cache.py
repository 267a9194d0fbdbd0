"""The commands ``fastdata build``, ``inspect`` and ``prune``."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torchvision import transforms as v1

from children import run_elsewhere
from fastdata import ImageFolder
from fastdata.sources.remote import Place
from fastdata.tools.__main__ import main

Folder = Callable[..., Path]


def test_a_dataset_starts_from_what_was_built(
    image_folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``build`` prepares exactly the samples that a transform with these first steps needs."""
    root = image_folder(size=(23, 21))
    cache = root.parent / "cache"
    assert (
        main(
            [
                "build",
                str(root),
                str(cache),
                "--resize",
                "12",
                "--crop",
                "8",
                "--prepare-workers",
                "1",
            ]
        )
        == 0
    )
    assert "6 samples; storage='disk': " in capsys.readouterr().out
    monkeypatch.setattr("fastdata.stores.shards.ingest", None)
    transform = v1.Compose(
        [v1.Resize(12), v1.CenterCrop(8), v1.RandomHorizontalFlip(), v1.ToTensor()]
    )
    with (
        ImageFolder(str(root), transform, cache_dir=cache) as ours,
        ImageFolder(
            str(root), v1.Compose([v1.Resize(12), v1.CenterCrop(8)]), storage="none"
        ) as plain,
    ):
        ours.transform = v1.Compose([v1.Resize(12), v1.CenterCrop(8)])
        assert all(ours[i][0].tobytes() == plain[i][0].tobytes() for i in range(6))


def test_inspect_reports_damaged_files(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 and a table for an intact cache, 1 for a flipped byte or a cut file, 2 if there is no cache."""
    root = image_folder(size=(13, 11))
    cache = root.parent / "cache"
    assert main(["inspect", str(cache)]) == 2
    assert "is not a cache and does not hold one" in capsys.readouterr().err
    main(["build", str(root), str(cache), "--resize", "7"])
    capsys.readouterr()
    assert main(["inspect", str(cache), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "samples   6" in out
    assert "classes   2" in out
    assert "resize 7 bilinear" in out
    assert "all samples are unchanged since they were written" in out
    (shard,) = cache.glob("*/part0-*.npy")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["inspect", str(cache)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(cache), "--verify"]) == 1
    assert "sample 5, part0, is damaged" in capsys.readouterr().out
    assert main(["inspect", str(cache)]) == 1
    main(["build", str(root), str(cache), "--resize", "7"])
    assert main(["inspect", str(cache), "--verify"]) == 0
    shard.write_bytes(data[:-5])
    capsys.readouterr()
    assert main(["inspect", str(cache)]) == 1
    assert "bytes, but 1,136 were written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["bench", "s3://b/x"], ["tune", "s3://b/x"], ["prune", "s3://b/c"]],
    ids=lambda words: " ".join(words),
)
def test_urls_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A URL instead of a local folder exits with 2 and one line that gives the cure."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "is a URL, but a folder of this machine is needed. Copy the files" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["build", "adl://b/x", "c"], ["build", "x", "adl://b/c"], ["inspect", "adl://b/c"]],
    ids=" ".join,
)
def test_urls_need_a_package(
    words: list[str],
    image_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A URL whose file system is not installed exits with 2 and one line that names the package."""
    root = image_folder()
    monkeypatch.chdir(root.parent)
    (root.parent / "x").symlink_to(root)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert re.match(r"fastdata: .*adlfs", said)
    assert said.count("\n") == 1


def test_a_cache_behind_a_url_is_inspected(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown and verified like a local one; options come from a file, whose errors are reported."""
    root = image_folder(size=(13, 11))
    with ImageFolder(root, cache_dir=root.parent / "cache"):
        pass
    for path in root.parent.glob("cache/*/*"):
        Place("memory://caches").upload(f"train/{path.name}", path)
    (root.parent / "options.json").write_text("{}")
    words = [
        "inspect",
        "memory://caches",
        "--verify",
        "--storage-options",
        str(root.parent / "options.json"),
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("memory://caches/train\n")
    assert "all samples are unchanged since they were written" in said
    (root.parent / "options.json").write_text("[]")
    with pytest.raises(SystemExit):
        main(words)
    assert "options.json is not a file with a JSON object" in capsys.readouterr().err
    MemoryFileSystem.store.clear()


def test_commands_show_the_librarys_errors(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors are one line with a cure; they name arguments as in Python, and flags have the same names."""
    root = image_folder(size=(13, 11))
    (root / "cat" / "000.jpg").write_bytes(b"no image")
    assert main(["build", str(root), str(root.parent / "cache"), "--prepare-workers", "1"]) == 2
    assert "or leave it out with on_error='skip'.\n" in capsys.readouterr().err
    (root.parent / "file").touch()
    assert (
        main(
            [
                "build",
                str(root),
                str(root.parent / "file"),
                "--on-error",
                "skip",
                "--prepare-workers",
                "1",
            ]
        )
        == 2
    )
    assert f"cache_dir='{root.parent / 'file'}'" in capsys.readouterr().err


def test_an_impossible_folder_is_named(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of a folder that cannot be made or listed has more than an error number."""
    assert main(["prune", "/nosuch"]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == "fastdata: /nosuch is not a folder on this machine. Give a folder of caches, as given to cache_dir=.\n"
    )
    assert main(["build", str(image_folder()), "/proc/x", "--prepare-workers", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "fastdata: cache_dir='/proc/x' cannot be written (No such file or directory), and it holds no"
    )
    assert "Name a folder that can be written" in said


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Each default in the help is the one that is used, and none is shown as None."""
    for command in ("bench", "build"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "None" not in shown
        assert {
            "bench": "images in a batch; default: 64",
            "build": "leave it out (skip); default: raise",
        }[command] in shown


def test_prune_says_what_it_removes(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--dry-run`` removes nothing; without it, the cache of a missing folder is removed on request."""
    root = image_folder(size=(13, 11))
    cache = root.parent / "cache"
    main(["build", str(root), str(cache), "--resize", "7"])
    assert main(["prune", str(cache)]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    shutil.rmtree(root)
    assert main(["prune", str(cache)]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    for words, left in (("would be removed", 1), ("removed", 0)):
        assert main(["prune", str(cache), "--gone", *(["--dry-run"] if left else [])]) == 0
        out = capsys.readouterr().out
        assert "images does not exist" in out
        assert words in out
        assert len(list(cache.glob("*/fastdata.npz"))) == left


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed here")
def test_prune_leaves_alone_what_it_cannot_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link instead of a lock file is not followed: that cache stays, and the others are removed."""
    target = tmp_path / "thesis"
    target.write_text("words")
    for name in ("first", "second"):
        (tmp_path / "caches" / name).mkdir(parents=True)
        (tmp_path / "caches" / name / "fastdata.npz").write_bytes(b"no cache")
    (tmp_path / "caches" / ".first.lock").symlink_to(target)
    assert main(["prune", str(tmp_path / "caches")]) == 0
    assert "second: cannot be read" in capsys.readouterr().out
    assert sorted(each.name for each in (tmp_path / "caches").glob("[!.]*")) == ["first"]
    assert target.read_text() == "words"


def test_names_that_the_output_cannot_write_are_escaped(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder name that is not UTF-8, or not in the terminal's encoding, stops no command."""
    made = image_folder()
    root = made.rename(made.parent / os.fsdecode(b"caf\xe9-\xe6\x97\xa5"))
    cache = root.parent / "cache"
    ImageFolder(root, cache_dir=cache).close()
    for encoding in ("ascii", "utf-8"):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["inspect", str(cache)]) == 0
        out.seek(0)
        assert "caf\\udce9-" in out.read()


def test_text_in_a_cache_cannot_control_the_terminal(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters in a foreign cache's texts are not shown."""
    root = image_folder(size=(13, 11))
    evil = root.rename(root.parent / "e\x1b]0;owned\x07\rvil")
    cache = root.parent / "cache"
    ImageFolder(evil, cache_dir=cache).close()
    assert main(["inspect", str(cache)]) == 0
    shown = capsys.readouterr().out
    assert "e\\x1b]0;owned\\x07\\rvil" in shown
    assert all(each.isprintable() for each in shown.splitlines())


def test_warnings_of_a_command_are_one_plain_line(image_folder: Folder) -> None:
    """A warning about left-out samples is shown without a line of source code."""
    root = image_folder(size=(13, 11))
    (root / "cat" / "000.jpg").write_bytes(b"no image")
    words = ["build", str(root), str(root.parent / "cache"), "--resize", "7", "--on-error", "skip"]
    done = run_elsewhere(root.parent, main, words)
    assert done.returncode == 0
    assert done.stderr.startswith("fastdata: 1 of 6 samples cannot be prepared and were left out")
    assert len(done.stderr.splitlines()) == 1
