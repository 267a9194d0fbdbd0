"""Files that other libraries write, read as datasets, and the recipes of docs/other-datasets.md."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tqdm
from PIL import Image

from fastdata import CachedDataset, ImageFolder
from s3 import ThrottledS3

datasets = pytest.importorskip("datasets", reason="Parquet is read by Hugging Face's datasets")
webdataset = pytest.importorskip("webdataset", reason="tars are written by it")
tqdm.tqdm.monitor_interval = 0  # the monitor of the bars of datasets is a thread that stays
COUNT = 7
NAMES = ["cat", "dog"]
LEFT_OPEN = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file"
)
"""webdataset leaves the files that it reads to the garbage collector."""
PAGE = Path(__file__).parents[2] / "docs" / "other-datasets.md"


def recipe(mark: str, folder: Path) -> str:
    """Return the code with this mark on the page, with its files in ``folder``."""
    found = re.search(rf"<!-- {mark} -->\n```py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1].replace('"/data/', f'"{folder}/')


def pixels(index: int) -> np.ndarray:
    return (np.arange(90).reshape(5, 6, 3) + 11 * index).astype(np.uint8)


def image(index: int) -> Image.Image:
    return Image.fromarray(pixels(index))


def same(found: Any, index: int) -> bool:
    return np.array_equal(found, pixels(index))


@pytest.fixture
def hugging() -> Any:
    """Return a dataset of images and labels that stores nothing outside of the test's folder."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    rows = {"image": [image(i) for i in range(COUNT)], "label": [i % 2 for i in range(COUNT)]}
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture
def cache(image_folder: Callable[..., Path], tmp_path: Path) -> Path:
    root = image_folder(suffix=".png")
    ImageFolder(root, cache_dir=tmp_path / "fastdata", prepare_workers=1).prepare().close()
    return tmp_path / "fastdata"


@LEFT_OPEN
def test_webdatasets_writer(tmp_path: Path) -> None:
    """Tars of its ShardWriter are pairs, and columns equal those of its own reader."""
    with webdataset.ShardWriter(str(tmp_path / "t-%02d.tar"), maxcount=3, verbose=0) as writer:
        for i in range(COUNT):
            item = {
                "__key__": f"a/{i:03}",
                "png": image(i),
                "cls": i,
                "json": {"a": i},
                "npy": np.arange(i + 1),
            }
            writer.write(item)
    with CachedDataset(f"{tmp_path}/t-{{00..02}}.tar", prepare_workers=2) as dataset:
        assert list(dataset.targets) == list(range(COUNT))
        assert all(same(dataset[i][0], i) for i in range(COUNT))
    columns = {"sample": "png", "target": ["cls", "json", "npy", "__key__"]}
    ours = CachedDataset(tmp_path, columns=columns, storage="none")
    shards = sorted(map(str, tmp_path.glob("*.tar")))
    theirs = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil"))
    for (sample, item), wanted in zip((ours[i] for i in range(COUNT)), theirs, strict=True):
        assert item["__key__"] == wanted["__key__"]
        assert np.array_equal(sample, wanted["png"])
        assert np.array_equal(item["npy"], wanted["npy"])
        assert (item["cls"], item["json"]) == (wanted["cls"], wanted["json"])


STREAM = """
import sys
import numpy as np
from litdata import StreamingDataset
from fastdata import CachedDataset
for workers in (1, 2):
    with CachedDataset(StreamingDataset(sys.argv[1]), prepare_workers=workers) as dataset:
        print([item["label"] for item in dataset], np.array(dataset[len(dataset) - 1]["image"], np.int64).sum())
"""
"""In a process of its own: litdata leaves its files open."""


def test_litdatas_dataset_is_prepared(tmp_path: Path) -> None:
    """Items of its StreamingDataset, which is iterable too, are read by index; the error for its folder names it."""
    writing = pytest.importorskip(
        "litdata.streaming.writer", reason="its folders are written by it"
    )
    writer = writing.BinaryWriter(str(tmp_path), chunk_size=3)
    for i in range(COUNT):
        writer[i] = {"image": image(i), "label": i}
    writer.done()
    writer.merge()
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{list(range(COUNT))} {pixels(COUNT - 1).sum()}"] * 2
    with pytest.raises(
        TypeError,
        match=r"is a path, but a dataset is needed.* such as .* litdata\.StreamingDataset",
    ):
        CachedDataset(tmp_path)


def test_parquet_by_hugging_face(
    tmp_path: Path, hugging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe gives images and labels of Parquet files, with Hugging Face's types or plain structures of bytes."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "home"))
    (tmp_path / "parquet").mkdir()
    plain = hugging.cast_column("image", datasets.Image(decode=False))
    for rows in (hugging, datasets.Dataset.from_list(list(plain))):
        rows.to_parquet(tmp_path / "parquet" / "a.parquet", batch_size=3)
        namespace: dict[str, Any] = {}
        exec(recipe("needs datasets", tmp_path), namespace)
        with namespace["train"] as train:
            assert list(train.targets) == [i % 2 for i in range(COUNT)]
            assert all(same(train[i][0], i) for i in range(COUNT))


def test_tars_behind_a_url(throttled: ThrottledS3, tmp_path: Path) -> None:
    """Tars in an object store give the samples of local ones, with two workers."""
    bucket = tmp_path / "s3" / "bucket"
    (bucket / "tar").mkdir(parents=True)
    with webdataset.ShardWriter(f"{bucket}/tar/t-%02d.tar", maxcount=3, verbose=0) as writer:
        for i in range(COUNT):
            writer.write({"__key__": f"{i}", "png": image(i), "cls": i % 2})
    options: dict[str, Any] = {
        "storage_options": throttled.storage_options,
        "prepare_workers": 2,
    }
    for name in ("tar/t-{00..02}.tar", "tar", "tar/t-*.tar"):
        with CachedDataset(f"s3://bucket/{name}", **options) as dataset:
            assert list(dataset.targets) == [i % 2 for i in range(COUNT)]
            assert all(same(dataset[i][0], i) for i in range(COUNT))


def test_hugging_faces_datasets(hugging: Any) -> None:
    """Its objects are read as dicts, decoded or left as bytes, and as pairs with columns=."""
    for dataset in (hugging, hugging.cast_column("image", datasets.Image(decode=False))):
        with CachedDataset(dataset, prepare_workers=1) as ours:
            assert ours[3]["label"] == 1
            assert all(same(ours[i]["image"], i) for i in range(COUNT))
        columns = {"sample": "image", "target": "label"}
        with CachedDataset(dataset, columns=columns, prepare_workers=1) as ours:
            assert list(ours.targets) == [i % 2 for i in range(COUNT)]


@LEFT_OPEN
def test_a_cache_becomes_tars(cache: Path, tmp_path: Path) -> None:
    """WebDataset's reader and ours read the cache's pixels and classes from the tars that the recipe writes."""
    (tmp_path / "tars").mkdir()
    exec(recipe("needs webdataset", tmp_path), {})
    shards = sorted(map(str, (tmp_path / "tars").glob("*.tar")))
    theirs = list(
        webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("png", "cls")
    )
    with CachedDataset.from_cache(cache) as ours, CachedDataset(tmp_path / "tars") as again:
        assert [target for _, target in theirs] == list(again.targets) == list(ours.targets)
        for i, (wanted, _) in enumerate(ours):
            assert theirs[i][0].tobytes() == again[i][0].tobytes() == wanted.tobytes()
