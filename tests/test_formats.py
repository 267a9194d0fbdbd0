"""Files of other formats as datasets: WebDataset tars, written here byte by byte, and advice for others."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image, ImageOps
from torch.utils.data import IterableDataset

from children import run_elsewhere
from conftest import shown
from data import test_image
from fastdata import CachedDataset, DataLoader
from fastdata.errors import RemoteError
from fastdata.pixels.decode import load_image
from fastdata.sources.remote import Place

Item = dict[str, bytes]
SIZE = (6, 5)


def image_file(index: int, kind: str = "png") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(test_image(index, SIZE)).save(stream, kind)
    return stream.getvalue()


def pixels(index: int) -> np.ndarray:
    return test_image(index, SIZE)


def open_tars(given: Any) -> CachedDataset:
    """Open tars whose samples are read on demand."""
    return CachedDataset(given, storage="none")


def write_tar(path: Path, files: Item) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Write two tars, with two samples and one."""
    write_tar(
        tmp_path / "t-00.tar",
        {f"a/{i}.{k}": v for i in range(2) for k, v in sample_files(i).items()},
    )
    write_tar(tmp_path / "t-01.tar", sample_files(2, "a/2."))
    return tmp_path


def sample_files(index: int, prefix: str = "") -> Item:
    return {f"{prefix}png": image_file(index), f"{prefix}cls": f"{index * 10}\n".encode()}


# WebDataset


@pytest.mark.parametrize(
    "given", ["t-{00..01}.tar", "t-*.tar", "t-0{0,1}.tar", ".", ["t-00.tar", "t-01.tar"]], ids=shown
)
def test_tars_are_pairs_of_image_and_class(tars: Path, given: Any) -> None:
    """A pattern, a folder and a list of tars give the same pairs, with the pixels of fastdata's loader."""
    paths = [tars / each for each in given] if isinstance(given, list) else f"{tars}/{given}"
    with CachedDataset(paths, prepare_workers=1) as dataset:
        assert list(dataset.targets) == [0, 10, 20]
        assert [np.array_equal(dataset[i][0], pixels(i)) for i in range(3)] == [True] * 3


def test_a_pattern_reads_only_the_files_that_match(tars: Path) -> None:
    """Other files next to the tars, or below, are not looked at, whatever they are."""
    (tars / "loop").symlink_to("loop")
    (tars / ".t-hidden.tar").write_bytes(b"")
    (tars / "t-00.tar.idx").write_bytes(b"")
    with CachedDataset(str(tars / "t-*")) as dataset:
        assert list(dataset.targets) == [0, 10, 20]


def test_tars_are_served_in_batches(tars: Path) -> None:
    """Two workers prepare them, and a loader returns the batches of a list with the same pairs."""
    with CachedDataset(str(tars / "t-*.tar"), prepare_workers=2) as dataset:
        dataset.transform = lambda image: torch.from_numpy(np.array(image))
        (batch,) = DataLoader(dataset, batch_size=3)
        assert torch.equal(batch[0], torch.from_numpy(np.stack([pixels(i) for i in range(3)])))
        assert batch[1].tolist() == [0, 10, 20]


def test_files_are_not_read_again_to_find_draws(
    tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a tar draws nothing at random, so no sample is read twice to find out."""
    opened = []
    plain = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda **options: opened.append(1) or plain(**options))
    with CachedDataset(str(tars / "*.tar"), prepare_workers=1) as dataset:
        dataset.prepare()
        # Each tar is listed; each sample is looked at, and then prepared.
        assert 2 + len(dataset) <= len(opened) <= 2 + 2 * len(dataset)


def test_a_tar_gives_the_files_that_columns_name(tmp_path: Path) -> None:
    """Columns are endings in lower case, decoded by kind; the key is a column too; files without ending are not."""
    array = np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3))
    stream = io.BytesIO()
    np.save(stream, array)
    files = {
        "x/1.JPG": image_file(1, "jpeg"),
        "x/1.seg.png": image_file(2),
        "x/1.json": b'{"a": [1]}',
        "x/1.txt": "ü".encode(),
        "x/1.npy": stream.getvalue(),
        "x/1.bin": b"\0",
        "x/README": b"",
        "__meta__/x.txt": b"",
    }
    path = write_tar(tmp_path / "x.tar", files)
    names = ["seg.png", "json", "txt", "npy", "bin", "__key__"]
    dataset = CachedDataset(path, columns={"sample": "jpg", "target": names}, storage="none")
    sample, item = dataset[0]
    assert set(item) == set(names)
    (tmp_path / "1.jpg").write_bytes(files["x/1.JPG"])
    assert np.array_equal(sample, load_image(tmp_path / "1.jpg"))
    assert np.array_equal(item.pop("seg.png"), pixels(2))
    assert np.array_equal(item.pop("npy"), array)
    assert item == {"json": {"a": [1]}, "txt": "ü", "bin": b"\0", "__key__": "x/1"}


def test_columns_choose_sample_and_target_of_a_tar(tmp_path: Path) -> None:
    """Several targets are a dict; without columns, the error of such a sample asks for them."""
    path = write_tar(
        tmp_path / "x.tar", {"1.jpg": image_file(1, "jpeg"), "1.png": image_file(2), "1.cls": b"7"}
    )
    with CachedDataset(path, columns={"sample": "png", "target": ["cls", "__key__"]}) as dataset:
        assert np.array_equal(dataset[0][0], pixels(2))
        assert dataset[0][1] == {"cls": 7, "__key__": "1"}
    with pytest.raises(
        OSError, match=r"has the files jpg, png, cls, but exactly one image .* columns=\{'sample'"
    ):
        CachedDataset(path)
    with pytest.raises(
        OSError,
        match=r"number 0 of .*x.tar: .*sample '1' has no 'mask', .* It has 'jpg', 'png', 'cls'",
    ):
        CachedDataset(path, columns={"sample": "jpg", "target": "mask"})


def test_files_that_others_write_next_to_data_are_not_read(tars: Path) -> None:
    """Hidden files are left out in every folder and by patterns."""
    for place in (tars, tars / "a", tars / ".git"):
        place.mkdir(exist_ok=True)
        (place / "._t-00.tar").write_bytes(b"\0\5\x16\7" + bytes(90))
        write_tar(place / "cache-t.tar", sample_files(3, "3."))
    (tars / ".git" / "t-00.tar").write_bytes(b"none")
    for given, count in ((tars, 5), (f"{tars}/*.tar", 4), (f"{tars}/t-*", 3)):
        with CachedDataset(given, prepare_workers=1) as dataset:
            assert len(dataset) == count


@pytest.mark.parametrize("name", ["run{1,2}/0.tar", "runs/shard{a,b}.tar", "a/{0..3}.tar"])
def test_braces_in_a_name_that_exists_are_of_the_name(tmp_path: Path, name: str) -> None:
    """Existing files and folders with braces are found; braces after them are still a pattern."""
    path = tmp_path / name
    path.parent.mkdir()
    write_tar(path, sample_files(1, "1."))
    assert len(open_tars(path)) == 1
    assert len(open_tars(path.parent)) == 1
    write_tar(path.parent / "x-1.tar", sample_files(2, "2."))
    write_tar(path.parent / "x-2.tar", sample_files(3, "3."))
    assert len(open_tars(f"{path.parent}/x-{{1..2}}.tar")) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:700], "x.tar cannot be read: ReadError: unexpected end of data"),
        (lambda data: data[:1024], "it is cut off or damaged"),
        (lambda data: data[:1300], "it is cut off or damaged"),
        (lambda data: data[:1024] + b"\1" * 512 + data[1536:], "it is cut off or damaged"),
        (lambda data: gzip.compress(data), "x.tar cannot be read"),
        (lambda data: b"", "x.tar cannot be read"),
    ],
    ids=["data", "end", "header", "garbage", "gzip", "empty"],
)
def test_damaged_tars_are_errors(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    """Tars that are cut off, overwritten or something else raise an error with the name before anything is prepared."""
    path = write_tar(tmp_path / "x.tar", {"1.txt": b"text", "2.txt": b"text"})
    path.write_bytes(change(path.read_bytes()[:2048] + bytes(1024)))
    with pytest.raises(ValueError, match=message):
        open_tars(path)


def test_a_tar_whose_file_is_larger_than_its_place_is_refused(tmp_path: Path) -> None:
    """A size in a pax header that exceeds the tar is refused, and nothing of that size is read."""
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("1.txt")
        info.pax_headers = {"GNU.sparse.realsize": str(1 << 50)}
        tar.addfile(info)
    with pytest.raises(ValueError, match=r"x.tar cannot be read: .*1.txt extends beyond the end"):
        open_tars(tmp_path / "x.tar")


def test_tars_are_refused_that_cannot_be_sought(tmp_path: Path) -> None:
    """Tars with a file twice in a sample, and compressed tars, are refused with the reason."""
    with pytest.raises(ValueError, match=r"it holds 1.PNG twice"):
        open_tars(write_tar(tmp_path / "x.tar", {"1.png": b"", "1.PNG": b""}))
    for name in ("x.tar.gz", "x.tgz"):
        (tmp_path / name).touch()
        (tmp_path / f"of {len(name)}").mkdir()
        (tmp_path / f"of {len(name)}" / name).touch()
        for given in (name, f"of {len(name)}"):
            with pytest.raises(
                ValueError, match=rf"{name} is compressed as a whole.* Decompress it to a .tar"
            ):
                open_tars(tmp_path / given)
    write_tar(tmp_path / "x.tar", sample_files(0, "0."))
    assert len(open_tars(tmp_path)) == 1  # which others beside it do not keep from being read


def test_a_tar_without_samples_is_an_empty_dataset(tmp_path: Path) -> None:
    """It is an empty dataset, and not taken for a path of another kind."""
    with CachedDataset(write_tar(tmp_path / "x.tar", {})) as dataset:
        assert len(dataset) == 0


def test_damaged_images_name_their_file(tars: Path) -> None:
    """The error names the sample and its tar, and on_error="skip" leaves it out."""
    write_tar(tars / "t-01.tar", {"2.png": b"no image", "2.cls": b"1"})
    with pytest.raises(
        OSError, match=r"sample 2 cannot be read: ValueError: number 0 of .*t-01.tar: Unidentified"
    ):
        CachedDataset(tars, prepare_workers=1)
    with (
        pytest.warns(UserWarning, match="1 of 3 samples cannot be prepared"),
        CachedDataset(tars, on_error="skip", prepare_workers=1) as dataset,
    ):
        assert list(dataset.targets) == [0, 10]


@pytest.mark.parametrize(
    "bad", [b"\x93NUMPY\1\0\xff\xff", b"", b"PK"], ids=["header", "empty", "zip"]
)
def test_damaged_arrays_are_errors(tmp_path: Path, bad: bytes) -> None:
    """An array takes no more memory than its file has bytes."""

    def read(data: bytes) -> Any:
        path = write_tar(tmp_path / "x.tar", {"1.npy": data})
        columns = {"sample": "npy", "target": "__key__"}
        return CachedDataset(path, columns=columns, storage="none")[0]

    with pytest.raises(ValueError, match="number 0 of"):
        read(bad)
    stream = io.BytesIO()
    np.save(stream, np.zeros(4))
    with pytest.raises(
        ValueError, match=r"number 0 of .*x.tar: ValueError: .*EOF: reading array data"
    ):
        read(stream.getvalue()[:-1])
    objects = io.BytesIO()
    np.save(objects, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        read(objects.getvalue())


def test_a_cache_of_tars_is_found_again_until_a_file_changes(
    tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cache_dir= needs no cache_key=; another tar, or another order of them, has another cache."""
    cache = tars / "cache"
    CachedDataset(str(tars / "t-*.tar"), cache_dir=cache).close()
    with monkeypatch.context() as patch:
        patch.setattr("fastdata.stores.shards.ingest", None)
        with CachedDataset(str(tars / "t-*.tar"), cache_dir=cache) as again:
            assert list(again.targets) == [0, 10, 20]
    write_tar(tars / "t-01.tar", sample_files(3, "2."))
    with CachedDataset(str(tars / "t-*.tar"), cache_dir=cache) as changed:
        assert list(changed.targets) == [0, 10, 30]
    turned = [tars / "t-01.tar", tars / "t-00.tar"]
    with CachedDataset(turned, cache_dir=cache) as other:
        assert list(other.targets) == [30, 0, 10]


def test_readers_pickle(tars: Path) -> None:
    """A copy reads the same samples, as in a spawned worker process."""
    dataset = open_tars(str(tars / "t-*.tar"))
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy[i][1] for i in range(-3, 3)] == [0, 10, 20] * 2
    with pytest.raises(IndexError):
        copy[3]


REMOTE = """
import fsspec
from fastdata import CachedDataset
memory = fsspec.filesystem("memory")
for path in folder.glob("*.tar"):
    memory.pipe_file(f"/tars/{path.name}", path.read_bytes())
for given in ("memory://tars/t-*.tar", "memory://tars", "memory://tars/t-{00..01}.tar"):
    with CachedDataset(given, storage_options={}, prepare_workers=1) as dataset:
        print(list(dataset.targets), sum(dataset[2][0].tobytes()))
"""


def test_tars_behind_a_url_are_read_by_ranges(tars: Path) -> None:
    """A pattern and a folder of a remote file system give the samples of local ones."""
    done = run_elsewhere(tars, exec, REMOTE, {"folder": tars})
    assert done.stdout.splitlines() == [f"[0, 10, 20] {pixels(2).sum()}"] * 3


def test_a_changed_byte_is_a_value_or_an_error(tmp_path: Path) -> None:
    """A changed byte anywhere in a tar causes nothing worse than a ValueError."""
    path = write_tar(tmp_path / "x.tar", sample_files(0, "0.") | sample_files(1, "1."))
    data, outcomes = path.read_bytes(), set()
    for at in range(0, len(data), len(data) // 50):
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        try:
            dataset = open_tars(path)
            outcomes.add(len([dataset[i] for i in range(len(dataset))]))
        except ValueError:
            outcomes.add(-1)
    assert -1 in outcomes


# What lies at a path


def test_other_paths_are_refused_with_advice(tmp_path: Path) -> None:
    """Class folders, a CSV, a cache, an empty folder and a missing path raise an error with what to use instead."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.png").write_bytes(image_file(0))
    (tmp_path / "t.csv").touch()
    for path in (tmp_path, str(tmp_path / "t.csv"), tmp_path / "nowhere", ""):
        with pytest.raises(
            TypeError,
            match=r"is a path, but a dataset is needed. Open a folder of class folders with fastdata.ImageFolder",
        ):
            CachedDataset(path)
    with pytest.raises(FileNotFoundError):
        CachedDataset(tmp_path / "nowhere.tar")
    with pytest.raises(FileNotFoundError, match=r"no .tar file matches .*/x-\*"):
        CachedDataset(f"{tmp_path}/x-*")


def test_folders_of_several_splits_are_refused(tars: Path) -> None:
    """Tars of training and validation are not read as one dataset."""
    for split in ("train", "val"):
        write_tar(tars / f"{split}-0.tar", sample_files(0, "0."))
    with pytest.raises(
        ValueError,
        match=r"holds the splits train, val, but a dataset is one split. Give its files .*/train-\*",
    ):
        open_tars(tars)
    assert len(open_tars(f"{tars}/train-*")) == 1


class Streamed(IterableDataset[Any]):
    """Iterable, and readable by index too, like litdata's and Mosaic's StreamingDataset."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it is read by index")

    def __getitem__(self, index: int) -> Item:
        return {"image": Image.fromarray(pixels(index)), "label": index}  # type: ignore[dict-item]


@pytest.mark.parametrize("workers", [1, 2])
def test_iterable_datasets_that_have_indices_are_read_by_them(workers: int) -> None:
    """Items of such a dataset are prepared once, and can be read in any order."""
    with CachedDataset(Streamed(), prepare_workers=workers) as dataset:
        assert [dataset[i]["label"] for i in (2, 0, 1)] == [2, 0, 1]
        assert np.array_equal(dataset[2]["image"], pixels(2))


# Columns, and values of Hugging Face


def test_columns_take_sample_and_target_of_any_dicts() -> None:
    """Items are pairs, also if several values are images; a list of targets makes a dict."""
    images = [torch.full((3, 2, 2), i, dtype=torch.uint8) for i in range(4)]
    items = [
        {"image": image, "mask": image[0], "label": i, "id": str(i)}
        for i, image in enumerate(images)
    ]
    with CachedDataset(items, columns={"sample": "image", "target": "label"}) as dataset:
        assert dataset[3][1] == 3
        assert dataset.__getitems__([1, 2]).stacked[1].tolist() == [1, 2]
    with CachedDataset(items, columns={"sample": "image", "target": "mask"}) as dataset:
        assert torch.equal(dataset[3][1], images[3][0])
    with CachedDataset(items, columns={"sample": "image", "target": ["label", "id"]}) as dataset:
        assert dataset[2][1] == {"label": 2, "id": "2"}


def test_columns_that_are_not_there_are_errors() -> None:
    """columns= without a sample and a target is an error that shows the right form."""
    items: list[Any] = [{"image": torch.zeros(3, 2, 2), "label": 0}]
    with pytest.raises(
        OSError, match=r"item 0 of list has no 'target', but .* It has 'image', 'label'"
    ):
        CachedDataset(items, columns={"sample": "image", "target": "target"})
    with pytest.raises(OSError, match=r"item 0 of list is a tuple of length 2, but columns= needs"):
        CachedDataset([(torch.zeros(3, 2, 2), 0)], columns={"sample": "image", "target": "label"})
    wrong: list[Any] = [{"image": "label"}, {"sample": "image"}, {"sample": 1, "target": "label"}]
    wrong += ["image", ["image", "label"], {"sample": "image", "target": 1}]
    for columns in wrong:
        with pytest.raises(
            ValueError, match=r"does not name sample and target. Give a name for each"
        ):
            CachedDataset(items, columns=columns)


def test_images_that_are_left_as_bytes_are_opened(tmp_path: Path) -> None:
    """Bytes or a path of Hugging Face's Image(decode=False) become images."""
    (tmp_path / "1.png").write_bytes(image_file(1))
    values = [
        {"bytes": image_file(0), "path": None},
        {"bytes": None, "path": str(tmp_path / "1.png")},
    ]
    items = [{"image": value, "label": i} for i, value in enumerate(values)]
    with CachedDataset(items) as dataset:
        assert all(np.array_equal(dataset[i]["image"], pixels(i)) for i in range(2))


class Stream(io.BytesIO):
    size = None


class Unsized(MemoryFileSystem):
    """Like fsspec's HTTP with a server without sizes: files exist, and are read to their end only."""

    def info(self, path: str, **options: Any) -> Any:
        return {**super().info(path, **options), "size": None}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return Stream(self.store[path].getvalue())


def test_a_tar_of_no_known_size_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the server's missing feature; a tar that does not exist is a FileNotFoundError."""
    write_tar(tmp_path / "x.tar", {"1.txt": b"one"})
    Place("memory://bucket").upload("x.tar", tmp_path / "x.tar")
    monkeypatch.setattr("fastdata.sources.remote._CLIENTS", {})
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda _: Unsized)
    with pytest.raises(
        RemoteError, match=r"bucket/x\.tar can only be read from its start to its e"
    ):
        CachedDataset("memory://bucket/x.tar")
    with pytest.raises(FileNotFoundError, match=r"^memory://bucket/y\.tar does not exist$"):
        CachedDataset("memory://bucket/y.tar")
    MemoryFileSystem.store.clear()


def test_an_error_of_a_server_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's error while a tar is opened or read is shown without the secrets of URLs."""

    class Redirected(MemoryFileSystem):
        place = "open"

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            if self.place == "open":
                raise OSError("403 for https://mirror/x?X-Signature=SECRET")
            stream = io.BytesIO()
            stream.read = lambda *_: 1 / 0  # type: ignore[method-assign]
            return stream

    Place("memory://bucket").write("x.tar", b"")
    monkeypatch.setattr("fastdata.sources.remote._CLIENTS", {})
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda _: Redirected)
    with pytest.raises(RemoteError, match=r"403 for https://mirror/x\?\*\*\*") as raised:
        CachedDataset("memory://bucket/x.tar")
    assert raised.value.__context__ is None
    Redirected.place = "read"
    with pytest.raises(ValueError, match=r"x\.tar cannot be read: ZeroDivisionError") as broken:
        CachedDataset("memory://bucket/x.tar")
    assert broken.value.__cause__ is None
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_images_that_are_left_as_bytes_are_turned(tmp_path: Path, orientation: int) -> None:
    """Hugging Face's images are rotated as EXIF requires, whether decoded, as bytes or as paths."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "1.jpg"
    Image.fromarray(pixels(1)).save(path, exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    values = [{"bytes": path.read_bytes(), "path": None}, {"bytes": None, "path": str(path)}]
    with CachedDataset([{"image": value, "label": 0} for value in values]) as dataset:
        assert all(np.array_equal(dataset[i]["image"], wanted) for i in range(2))
