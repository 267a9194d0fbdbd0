"""Caches written as shards: the same bytes with every engine, and builds that continue after a stop."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem

from children import open_noted
from data import save_image
from fastdata import CachedDataset, FastDataError, ImageFolder
from fastdata.errors import IngestError, SampleError
from fastdata.sources.remote import Place
from fastdata.stores.cache import INDEX, Cache
from fastdata.stores.shards import samples_per_shard
from fastdata.tools.__main__ import main
from fresh import Interpreters

Folder = Callable[..., Path]
FOUR = 4 * 3 * 7 * 9
"""Bytes of four images as ``cached`` prepares them: so many are a shard of it."""


@contextlib.contextmanager
def engine_of(name: str, workers: int = 2) -> Iterator[str | Executor]:
    if name == "local":
        yield name
    elif name == "threads":
        with ThreadPoolExecutor(workers) as threads:
            yield threads
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context(name)) as processes:
            yield processes


def cached(root: Path, **options: Any) -> ImageFolder:
    usual = {
        "resize": (7, 9),
        "cache_dir": root.parent / "cache",
        "loader": open_noted,
    }
    return ImageFolder.build_cache(
        str(root), **{**usual, "shard_bytes": FOUR, "prepare_workers": 1, **options}
    )


def home_of(cache_dir: Path) -> Path:
    (path,) = cache_dir.glob(f"*/{INDEX}")
    return path.parent


def samples_of(dataset: Any) -> list[Any]:
    return [(np.asarray(sample).tolist(), target) for sample, target in dataset]


def shards_of(cache_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache_dir.glob("*/part*")}


def noted(root: Path) -> list[str]:
    """Return the images that other processes have read since the last call."""
    log = root.parent / "read.txt"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(name for process, name in lines if int(process) != os.getpid())


def stop_at(root: Path, name: str, how: str = "raise") -> None:
    (root.parent / "stop.txt").write_text(f"{name} {how} {os.getpid()}")


def let_go(root: Path) -> None:
    (root.parent / "stop.txt").unlink()


# Who writes


@pytest.mark.parametrize(
    ("engine", "codec"),
    [
        ("threads", "auto"),
        ("fork", "auto"),
        ("fork", "lz4"),
        ("fork", "zstd"),
        ("fork", "source"),
        ("forkserver", "source"),
    ],
)
def test_shards_do_not_depend_on_who_writes_them(
    image_folder: Folder, engine: str, codec: str
) -> None:
    """Every engine writes the files of ``"local"``, byte for byte, and no others; samples equal those of one shard."""
    root = image_folder(per_class=5, size=(12, 10))
    loader = None if codec == "source" else open_noted
    with cached(root, codec=codec, loader=loader, shard_bytes=None) as whole:
        wanted = samples_of(whole)
    options: dict[str, Any] = {"codec": codec, "loader": loader, "shard_bytes": 700}
    with cached(root, cache_dir=root.parent / "ours", **options) as ours:
        assert samples_of(ours) == wanted
        listed = list(ours.samples)
    with (
        engine_of(engine) as chosen,
        cached(root, cache_dir=root.parent / engine, engine=chosen, **options) as theirs,
    ):
        assert samples_of(theirs) == wanted
        assert list(theirs.samples) == listed
    assert shards_of(root.parent / engine) == shards_of(root.parent / "ours")
    assert len(shards_of(root.parent / engine)) > 2
    home = home_of(root.parent / engine)
    assert {path.name for path in home.iterdir()} == Cache.read(Place(home)).file_names()


@pytest.mark.parametrize(
    "target",
    [
        lambda k: k,
        lambda k: k % 2 == 0,
        lambda k: k / 4,
        lambda k: {"id": k, "words": ["a"] * k},
        lambda k: (k, f"name {k}"),
        lambda k: np.full(3, k, np.float32),
        lambda k: np.full((4, 5), k, np.uint8),
    ],
    ids=["int", "bool", "float", "dict", "tuple", "array", "mask"],
)
def test_targets_come_back(tmp_path: Path, target: Callable[[int], Any]) -> None:
    """Targets of each kind come back from several shard manifests as from a cache with one."""
    items = [(np.full((4, 5), k, np.uint8), target(k)) for k in range(10)]
    found = []
    for engine in ("threads", "local"):
        options: dict[str, Any] = {
            "cache_key": "x",
            "cache_dir": tmp_path / engine,
        }
        with engine_of(engine) as chosen:
            more = {"shard_bytes": 40} if engine == "threads" else {}
            with CachedDataset.build_cache(items, engine=chosen, **options, **more) as dataset:
                found.append([(type(target), np.asarray(target).tolist()) for _, target in dataset])
                assert all((sample == k).all() for k, (sample, _) in enumerate(dataset))
    assert len(shards_of(tmp_path / "threads")) >= 4
    assert found[0] == found[1]


def test_dicts_keep_their_keys(tmp_path: Path) -> None:
    """Items that are dicts come out of shards as dicts."""
    items = [{"image": np.full((4, 5), k, np.uint8), "label": k} for k in range(6)]
    with CachedDataset.build_cache(
        items, cache_key="x", cache_dir=tmp_path, shard_bytes=40
    ) as dataset:
        assert [(int(item["image"][0, 0]), item["label"]) for item in dataset] == [
            (k, k) for k in range(6)
        ]


@pytest.mark.parametrize("odd", [0, 4])
def test_samples_of_many_shapes_are_kept(tmp_path: Path, odd: int) -> None:
    """Samples of many shapes are stored even if no probed sample differs: the build then starts again."""
    items = [(np.full((4, 6 if k == odd else 5), k, np.uint8), k) for k in range(24)]
    with CachedDataset.build_cache(
        items, cache_key="x", cache_dir=tmp_path, shard_bytes=100
    ) as dataset:
        assert [sample.shape for sample, _ in dataset] == [sample.shape for sample, _ in items]
    home = home_of(tmp_path)
    assert {path.name for path in home.iterdir()} == Cache.read(Place(home)).file_names()


def test_a_sample_of_other_dimensions_is_an_error(tmp_path: Path) -> None:
    """It is an error as without shards, and no file is left."""
    items = [(np.zeros((4, 5, 1) if k == 4 else (4, 5), np.uint8), k) for k in range(24)]
    with pytest.raises(
        FastDataError,
        match=r"an array \(H, W, C\) of uint8, but other samples are an array \(H, W\)",
    ):
        CachedDataset.build_cache(items, cache_key="x", cache_dir=tmp_path, shard_bytes=100)
    assert not list(tmp_path.glob(f"*/{INDEX}"))


def test_damaged_files_are_left_out_if_asked_for(image_folder: Folder) -> None:
    """Even all files of a shard may be left out; ``skipped`` has them in this and the next run."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    bad = [1, 4, 5, 6, 7]
    for k in bad:
        (root / "a" / f"{k:03}.jpg").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="5 of 12"):
        whole = cached(root, on_error="skip", shard_bytes=None)
    wanted = samples_of(whole)
    whole.close()
    options = {"cache_dir": root.parent / "ours", "on_error": "skip"}
    with engine_of("fork") as processes, pytest.warns(UserWarning, match="5 of 12"):
        cached(root, engine=processes, **options).close()
    with cached(root, **options) as ours:
        assert samples_of(ours) == wanted
        assert [error.index for error in ours.skipped] == bad
        assert ours.skipped[1].path == str(root / "a" / "004.jpg")
    for path in root.rglob("*.jpg"):
        path.write_bytes(b"no image")
    with pytest.raises(SampleError, match=r"sample 0, .*a/000.jpg, cannot be read"):
        cached(root, on_error="skip", cache_dir=root.parent / "none")


def test_changed_files_are_added_as_shards(image_folder: Folder) -> None:
    """An update adds shards; those whose files are unchanged are not read again."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    cached(root).close()
    before = shards_of(root.parent / "cache")
    for k in range(2, 7):
        save_image(root / "a" / f"{k:03}.jpg", 40 + k, (14, 10))
    noted(root)
    with engine_of("fork") as processes, cached(root, engine=processes) as ours:
        assert noted(root) == [f"{k:03}.jpg" for k in range(8)]
        with cached(root, cache_dir=root.parent / "whole", shard_bytes=None) as whole:
            assert samples_of(ours) == samples_of(whole)
    after = shards_of(root.parent / "cache")
    assert len(before.items() & after.items()) == 1


# Builds that are stopped


def stopped(
    root: Path, engine: str = "fork", how: str = "raise", error: Any = SampleError, **options: Any
) -> str:
    """Return the error of a build that stops at the tenth of twelve images, and forget the noted reads."""
    stop_at(root, "009.jpg", how)
    with engine_of(engine, 1) as chosen, pytest.raises(error) as raised:
        cached(root, engine=chosen, **options)
    let_go(root)
    noted(root)
    return str(raised.value)


@pytest.mark.parametrize(
    ("engine", "how"), [("local", "raise"), ("local", "kill"), ("fork", "raise"), ("fork", "kill")]
)
def test_a_build_that_was_stopped_continues(image_folder: Folder, engine: str, how: str) -> None:
    """After a bad image or a killed worker there is no cache, and the next build reads only the missing samples."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    lost = IngestError if engine == "local" else BrokenExecutor
    said = stopped(root, engine, how, SampleError if how == "raise" else lost, prepare_workers=2)
    assert how == "kill" or "sample 9, " in said
    assert not [path for path in root.parent.glob("cache/*/*") if "-" not in path.name]
    done = {path.stem.partition("-")[2] for path in root.parent.glob("cache/*/shard-*")}
    parts = root.parent.glob("cache/*/part*")
    # A worker that is killed may leave parts of a shard whose manifest was not written yet.
    whole_parts = [path for path in parts if path.stem.partition("-")[2] in done]
    inodes = {path.name: path.stat().st_ino for path in whole_parts}
    with engine_of(engine) as chosen, cached(root, engine=chosen, prepare_workers=2) as ours:
        if engine != "local":  # which reads what one shard has in this process
            assert len(noted(root)) == 12 - 4 * len(done)
        with cached(root, cache_dir=root.parent / "whole", shard_bytes=None) as whole:
            assert samples_of(ours) == samples_of(whole)
    home = home_of(root.parent / "cache")
    assert {path.name for path in home.iterdir()} == Cache.read(Place(home)).file_names()
    assert len(done) == 2 or engine == "local"
    assert done <= set(Cache.read(Place(home)).shard_names)
    assert inodes.items() <= {path.name: path.stat().st_ino for path in home.iterdir()}.items()


def test_an_error_names_its_sample(image_folder: Folder) -> None:
    """It has the index in the whole dataset and the path; its cause has the traceback of the other process."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    stop_at(root, "009.jpg")
    with (
        engine_of("fork") as processes,
        pytest.raises(SampleError, match=r"sample 9, .*a/009.jpg") as raised,
    ):
        cached(root, engine=processes)
    assert raised.value.index == 9
    assert "told to stop" in str(raised.value.__cause__)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY")] ^= 1  # of a column: a zip file has bytes that mean nothing
    path.write_bytes(data)


def read_again(root: Path) -> list[str]:
    """Return the images that the next build reads; its samples equal those of a build without a stop."""
    with engine_of("fork") as processes, cached(root, engine=processes) as ours:
        read = noted(root)
        with cached(root, cache_dir=root.parent / "whole", shard_bytes=None) as whole:
            assert samples_of(ours) == samples_of(whole)
    home = home_of(root.parent / "cache")
    assert {path.name for path in home.iterdir()} == Cache.read(Place(home)).file_names()
    return read


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("shard-*.npz", cut),
        ("shard-*.npz", flip),
        ("shard-*.npz", Path.unlink),
        ("part0-*.npy", cut),
        ("part0-*.npy", Path.unlink),
    ],
)
def test_a_damaged_shard_is_written_again(
    image_folder: Folder, pattern: str, damage: Callable[[Path], None]
) -> None:
    """A missing, cut or changed manifest or file costs only its shard."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    stopped(root)
    damage(min(root.parent.glob(f"cache/*/{pattern}")))
    read = read_again(root)
    assert len(read) == 8
    assert read[-4:] == ["008.jpg", "009.jpg", "010.jpg", "011.jpg"]


def test_columns_of_others_in_a_shard_manifest_are_not_used(image_folder: Folder) -> None:
    """A shard with additional columns in its manifest is complete, and the columns are ignored."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    stopped(root)
    paths = sorted(root.parent.glob("cache/*/shard-*.npz"))
    for k, path in enumerate(paths):
        with np.load(path) as stored:
            note = np.zeros([k] * k)
            np.savez(path, **stored, **dict.fromkeys(("note", "part0.note", "shards.note"), note))
    assert len(read_again(root)) == 4


def test_shards_of_files_that_have_changed_are_not_used(image_folder: Folder) -> None:
    """After a file was changed its shard is written, the old one is removed, and the others stay."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    stopped(root)
    save_image(root / "a" / "000.jpg", 50, (12, 10))
    assert read_again(root) == [f"{k:03}.jpg" for k in (0, 1, 2, 3, 8, 9, 10, 11)]


def test_shards_of_another_size_are_not_used(image_folder: Folder) -> None:
    """Shards of another size are removed."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    stopped(root)
    cached(root, shard_bytes=None).close()
    home = home_of(root.parent / "cache")
    assert {path.name for path in home.iterdir()} == Cache.read(Place(home)).file_names()
    assert len(shards_of(root.parent / "cache")) == 1


# What is asked for


def test_what_cannot_be_pickled_is_named(image_folder: Folder) -> None:
    """An executor gets pickled tasks: a lambda is an error with a cure, but works with the local engine."""
    root = image_folder(per_class=2, size=(12, 10))
    options: dict[str, Any] = {"loader": lambda path: open_noted(path), "cache_key": "x"}
    with (
        engine_of("threads") as threads,
        pytest.raises(ValueError, match=r"lambda.*Use module-level functions"),
    ):
        cached(root, engine=threads, **options)
    cached(root, **options).close()


def test_a_dataset_pickles_without_its_executor(image_folder: Folder) -> None:
    """The dataset goes to a loader's workers; the executor stays in this process."""
    root = image_folder(per_class=2, size=(12, 10))
    with engine_of("threads") as threads, cached(root, engine=threads) as ours:
        assert ours.reader().stored.options.engine is threads
        assert pickle.loads(pickle.dumps(ours)).reader().stored.options.engine == "local"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"engine": "dask"},
            "engine='dask' must be 'local', 'ray' or a concurrent.futures.Executor",
        ),
        (
            {"engine": "ray", "cache_dir": None},
            "needs a folder for the cache: name it as cache_dir=",
        ),
        (
            {"shard_bytes": "1 GiB", "cache_dir": None},
            "needs a folder for the cache: name it as cache_dir=",
        ),
        ({"shard_bytes": "many"}, "'many' is not an amount of memory"),
    ],
)
def test_what_makes_no_sense_is_refused(
    image_folder: Folder, options: dict[str, Any], said: str
) -> None:
    """Contradictory arguments are refused before anything is read."""
    with pytest.raises(ValueError, match=said):
        cached(image_folder(), **options)


def test_ray_is_named_where_it_is_missing(
    image_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray, the error says what to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"engine='ray' needs Ray.*pip install ray"):
        cached(image_folder(), engine="ray")


def test_the_size_of_shards_does_not_depend_on_who_writes_them() -> None:
    """Shards have 16 MiB, then there are 64, then they have 32 MiB, and there are at most 200."""
    mib, count = 1 << 20, 1 << 20
    need_mib = [1, 160, 1024, 2048, 6400, 128_000]
    shards = [math.ceil(count / samples_per_shard(count, need * mib, None)) for need in need_mib]
    assert shards == [1, 8, 64, 64, 128, 128]
    assert samples_per_shard(10, 1000, 300) == 4
    assert samples_per_shard(10, 1000, 1) == samples_per_shard(10, 1000, 0) == 1
    assert samples_per_shard(10, 0, None) == 16
    assert samples_per_shard(401, 1000, 1) == 4  # every process opens all: 200 at most
    assert {samples_per_shard(count, count * 1000, 7000) for count in range(900, 1000)} == {8}


def test_progress_counts_what_is_there(
    image_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """A build that continues reports the samples that it prepares."""
    root = image_folder(classes=("a",), per_class=12, size=(12, 10))
    stopped(root)
    with caplog.at_level(logging.INFO, "fastdata"):
        cached(root).close()
    assert "preparing 4 of 12 samples: those of new or changed files" in caplog.text


def test_the_command_writes_shards(
    image_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """``build --shard-size`` sets their size; a malformed size is an error in the words of the command."""
    root = image_folder(per_class=6, size=(12, 10))
    assert (
        main(
            ["build", str(root), str(root.parent / "cache"), "--resize", "7", "--shard-size", "1KB"]
        )
        == 0
    )
    assert len(shards_of(root.parent / "cache")) == 3
    assert main(["build", str(root), str(root.parent / "cache"), "--shard-size", "none"]) == 2
    assert "'none' is not an amount of memory" in capsys.readouterr().err


REMOTE = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from children import open_noted
from fastdata import ImageFolder

storage_options = {"secret": "no such word", "auto_mkdir": True}
options = {"loader": open_noted, "resize": (7, 9), "storage_options": storage_options}
for url in ("local://far", "near"):
    with ProcessPoolExecutor(2, get_context("fork")) as engine:
        dataset = ImageFolder.build_cache("images", cache_dir=url, engine=engine, shard_bytes=4 * 189, **options)
    assert list(dataset.targets) == [0] * 12
    dataset.close()
"""


def test_shards_go_to_a_url(image_folder: Folder, fresh: Interpreters) -> None:
    """The files equal those in a folder; no file contains storage_options."""
    home = image_folder(classes=("a",), per_class=12, size=(12, 10)).parent
    for name in ("far", "near"):
        (home / name).mkdir()
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{REMOTE}"
    done = fresh.run(code, cwd=home)
    assert done.returncode == 0, done.stderr
    far, near = (
        {path.name: path.read_bytes() for path in (home / it).glob("*/*") if path.is_file()}
        for it in ("far", "near")
    )
    assert len([name for name in near if name.startswith("part")]) > 1
    assert set(far) == set(near)
    assert all(far[name] == data for name, data in near.items() if name.startswith("part"))
    assert not any(b"no such word" in data for data in far.values())


def test_what_killed_uploads_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files of an upload are removed afterwards; old ones of killed processes are removed too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "staged"))
    for name in ("killed", "held", "young"):
        (tmp_path / "staged" / f"fastdata-remote-{name}").mkdir(parents=True)
        (tmp_path / "staged" / f"fastdata-remote-{name}" / "part0.npy").write_bytes(b"half")
    lock = FileLock(tmp_path / "staged/fastdata-remote-held/lock")
    samples = [(np.full((4, 6), level, np.uint8), level) for level in range(6)]
    options: dict[str, Any] = {
        "cache_key": "levels",
        "shard_bytes": 48,
        "local_cache": tmp_path / "l",
    }
    with lock, ThreadPoolExecutor(2) as threads:
        for name in ("killed", "held"):
            os.utime(tmp_path / "staged" / f"fastdata-remote-{name}", (0, 0))
        with CachedDataset.build_cache(
            samples, cache_dir="memory://shards", engine=threads, **options
        ) as dataset:
            assert [
                int(np.asarray(sample)[0, 0]) for sample, _ in (dataset[k] for k in range(6))
            ] == list(range(6))
    assert sorted(os.listdir(tmp_path / "staged")) == [
        "fastdata-remote-held",
        "fastdata-remote-young",
    ]
    MemoryFileSystem.store.clear()
