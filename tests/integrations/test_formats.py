"""What other libraries write, read as datasets; what is exported, read by them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import tqdm
import webdataset
from litdata.streaming.writer import BinaryWriter
from PIL import Image

from fastdata import CachedDataset, ImageFolder
from fastdata.sources.formats import open_dataset
from fastdata.tools.caches import export_cache
from s3 import ThrottledS3

tqdm.tqdm.monitor_interval = 0  # the monitor of the bars of datasets is a thread that stays
COUNT = 7
NAMES = ["cat", "dog"]
LEFT_OPEN = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file"
)
"""webdataset leaves the files that it reads to the garbage collector."""


def pixels(index: int) -> np.ndarray:
    return (np.arange(90).reshape(5, 6, 3) + 11 * index).astype(np.uint8)


def image(index: int) -> Image.Image:
    return Image.fromarray(pixels(index))


def same(found: Any, index: int) -> bool:
    return np.array_equal(found, pixels(index))


@pytest.fixture
def hugging(tmp_path: Path) -> datasets.Dataset:
    """Items of image and label; nothing is kept outside of the test's folder."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    rows = {"image": [image(i) for i in range(COUNT)], "label": [i % 2 for i in range(COUNT)]}
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture
def cache(image_folder: Callable[..., Path], tmp_path: Path) -> Path:
    root = image_folder(suffix=".png")
    ImageFolder(root, cache_dir=tmp_path / "cache", prepare_workers=1).prepare().close()
    return tmp_path / "cache"


@LEFT_OPEN
def test_webdatasets_writer(tmp_path: Path) -> None:
    """Tars of its ShardWriter are pairs, and columns are what its own reader gives."""
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
    ours = open_dataset(tmp_path, columns=["png", "cls", "json", "npy", "__key__"])
    shards = sorted(map(str, tmp_path.glob("*.tar")))
    theirs = list(webdataset.WebDataset(shards, shardshuffle=False).decode("pil"))
    for item, wanted in zip((ours[i] for i in range(COUNT)), theirs, strict=True):
        assert item["__key__"] == wanted["__key__"]
        assert np.array_equal(item["png"], wanted["png"])
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
    """Items of its StreamingDataset, which is iterable too, come out by index; its folder names the call."""
    writer = BinaryWriter(str(tmp_path), chunk_size=3)
    for i in range(COUNT):
        writer[i] = {"image": image(i), "label": i}
    writer.done()
    writer.merge()
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{list(range(COUNT))} {pixels(COUNT - 1).sum()}"] * 2
    with pytest.raises(
        ValueError, match=r"holds chunks of litdata, .*CachedDataset\(litdata\.StreamingDataset\("
    ):
        CachedDataset(tmp_path)


def write_parquet(hugging: datasets.Dataset, folder: Path) -> None:
    hugging.to_parquet(folder / "a.parquet", batch_size=3)


def write_feather(hugging: datasets.Dataset, folder: Path) -> None:
    for name, compression in (("a", "lz4"), ("b", "uncompressed")):
        table = hugging.data.table.slice(*((0, 4) if name == "a" else (4, 3)))
        pyarrow.feather.write_feather(
            table, folder / f"{name}.feather", compression=compression, chunksize=2
        )


def write_stream(hugging: datasets.Dataset, folder: Path) -> None:
    hugging.save_to_disk(folder, num_shards=2)


@pytest.mark.parametrize("write", [write_parquet, write_feather, write_stream])
def test_arrow_and_parquet_are_dicts(
    tmp_path: Path, hugging: Any, write: Callable[..., None]
) -> None:
    """Rows of what Hugging Face and pyarrow write come out as dicts with images, prepared by two workers."""
    folder = tmp_path / "rows"
    folder.mkdir()
    write(hugging, folder)
    with CachedDataset(folder, prepare_workers=2) as dataset:
        assert [dataset[i]["label"] for i in range(COUNT)] == [i % 2 for i in range(COUNT)]
        assert all(same(dataset[i]["image"], i) for i in range(COUNT))


def test_row_groups_are_read_once_in_a_row(
    tmp_path: Path, hugging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that goes through all rows reads each group once, and only the columns that it needs."""
    write_parquet(hugging, tmp_path)
    dataset = open_dataset(tmp_path, columns=["label"])
    read, asked = pyarrow.parquet.ParquetFile.read_row_group, []

    def counting(self: Any, number: int, **options: Any) -> Any:
        asked.append((number, options["columns"]))
        return read(self, number, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", counting)
    assert [dataset[i] for i in range(COUNT)] == [{"label": i % 2} for i in range(COUNT)]
    assert asked == [(k, ["label"]) for k in range(len(asked))]
    assert len(asked) == pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups > 1


def test_binary_columns_are_images_and_others_are_not(tmp_path: Path) -> None:
    """Bytes that begin as an image's do are opened, others stay; a path without its bytes is an error."""
    (tmp_path / "x.png").touch()
    image(3).save(tmp_path / "x.png")
    table = pa.table({"jpg": [(tmp_path / "x.png").read_bytes()], "raw": [b"\0\1"], "label": [3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    item = open_dataset(tmp_path / "a.parquet")[0]
    assert same(item.pop("jpg"), 3)
    assert item == {"raw": b"\0\1", "label": 3}
    with pytest.raises(OSError, match=r"has no 'mask', .* It has 'jpg', 'raw', 'label'"):
        CachedDataset(tmp_path / "a.parquet", columns={"sample": "mask", "target": "label"})
    pyarrow.parquet.write_table(
        pa.table({"image": [{"bytes": None, "path": "x.png"}]}), tmp_path / "b.parquet"
    )
    with pytest.raises(
        ValueError, match=r"it holds the path of an image, 'x.png', and not its bytes"
    ):
        open_dataset(tmp_path / "b.parquet")[0]


@pytest.mark.parametrize("write", [write_parquet, write_feather, write_stream])
def test_damaged_tables_are_errors(
    tmp_path: Path, hugging: Any, write: Callable[..., None]
) -> None:
    """A file that is cut, or no such file, is named; whatever byte is another, nothing worse than an error comes."""
    write(hugging, tmp_path)
    path = next(
        path
        for path in sorted(tmp_path.iterdir())
        if path.suffix in (".parquet", ".feather", ".arrow")
    )
    data = path.read_bytes()
    for bad in (data[: len(data) // 2], b"", b"x" * 100):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=path.name):
            [open_dataset(path)[i] for i in range(COUNT)]
    for at in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        try:
            dataset = open_dataset(path)
            for i in range(len(dataset)):
                dataset[i]
        except (ValueError, MemoryError):
            pass


def test_files_behind_a_url(throttled: ThrottledS3, hugging: Any, tmp_path: Path) -> None:
    """Tars, Parquet and Arrow in an object store give what local ones give, by two workers."""
    bucket = tmp_path / "s3" / "bucket"
    for name in ("tar", "parquet", "arrow"):
        (bucket / name).mkdir(parents=True)
    with webdataset.ShardWriter(f"{bucket}/tar/t-%02d.tar", maxcount=3, verbose=0) as writer:
        for i in range(COUNT):
            writer.write({"__key__": f"{i}", "png": image(i), "cls": i % 2})
    write_parquet(hugging, bucket / "parquet")
    write_stream(hugging, bucket / "arrow")
    options: dict[str, Any] = {
        "storage_options": throttled.storage_options,
        "prepare_workers": 2,
    }
    for name in ("tar/t-{00..02}.tar", "tar", "tar/t-*.tar"):
        with CachedDataset(f"s3://bucket/{name}", **options) as dataset:
            assert list(dataset.targets) == [i % 2 for i in range(COUNT)]
            assert all(same(dataset[i][0], i) for i in range(COUNT))
    for name in ("parquet", "arrow"):
        with CachedDataset(f"s3://bucket/{name}", **options) as dataset:
            assert all(same(dataset[i]["image"], i) for i in range(COUNT))


def test_hugging_faces_datasets(hugging: Any) -> None:
    """Its objects are served as dicts, decoded by it or left as bytes, and as pairs by columns."""
    for dataset in (hugging, hugging.cast_column("image", datasets.Image(decode=False))):
        with CachedDataset(dataset, prepare_workers=1) as ours:
            assert ours[3]["label"] == 1
            assert all(same(ours[i]["image"], i) for i in range(COUNT))
        columns = {"sample": "image", "target": "label"}
        with CachedDataset(dataset, columns=columns, prepare_workers=1) as ours:
            assert list(ours.targets) == [i % 2 for i in range(COUNT)]


def test_an_export_is_a_dataset_of_hugging_face(cache: Path, tmp_path: Path) -> None:
    """Its imagefolder opens class folders with images and class names."""
    export_cache(cache, tmp_path / "out", to="folder")
    home = str(tmp_path / "home")
    theirs = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "out"), split="train", cache_dir=home
    )
    assert theirs.features == {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    with CachedDataset.from_cache(cache) as ours:
        assert theirs["label"] == list(ours.targets)
        assert all(theirs[i]["image"].tobytes() == ours[i][0].tobytes() for i in range(len(ours)))


def test_a_cache_behind_a_url_is_exported(
    cache: Path, tmp_path: Path, throttled: ThrottledS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are those of the cache that was copied there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    shutil.copytree(cache, tmp_path / "s3" / "bucket" / "cache")
    options = {"storage_options": throttled.storage_options}
    count = export_cache("s3://bucket/cache", tmp_path / "out", to="folder", **options)
    with CachedDataset.from_cache(cache) as ours:
        assert count == len(ours)
        for path, (wanted, _) in zip(
            sorted((tmp_path / "out").rglob("*.png")), (ours[i] for i in range(6)), strict=True
        ):
            with Image.open(path) as found:
                assert found.tobytes() == wanted.tobytes()


@LEFT_OPEN
def test_webdataset_reads_an_export(cache: Path, tmp_path: Path) -> None:
    """Its own reader gives the pixels and classes of the cache, in order."""
    export_cache(cache, tmp_path / "out", to="webdataset", shard_size=600)
    shards = sorted(map(str, (tmp_path / "out").glob("*.tar")))
    theirs = list(
        webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("png", "cls")
    )
    with CachedDataset.from_cache(cache) as ours:
        assert [target for _, target in theirs] == list(ours.targets)
        assert all(theirs[i][0].tobytes() == ours[i][0].tobytes() for i in range(len(ours)))
