"""Files of other formats as datasets: WebDataset tars, LitData and MDS folders, written here byte by byte."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickle
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from PIL import Image

from conftest import test_image
from fastdata import CachedDataset, DataLoader
from fastdata.formats import open_dataset
from fastdata.images import load_image

Item = dict[str, bytes]
SIZE = (6, 5)


def image_file(index: int, kind: str = "png") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(test_image(index, SIZE)).save(stream, kind)
    return stream.getvalue()


def pixels(index: int) -> np.ndarray:
    return test_image(index, SIZE)


def write_tar(path: Path, files: Item) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Two tars, of two samples and one."""
    write_tar(tmp_path / "t-00.tar", {f"a/{i}.{k}": v for i in range(2) for k, v in sample_files(i).items()})
    write_tar(tmp_path / "t-01.tar", sample_files(2, "a/2."))
    return tmp_path


def sample_files(index: int, prefix: str = "") -> Item:
    return {f"{prefix}png": image_file(index), f"{prefix}cls": f"{index * 10}\n".encode()}


def uint32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def packed(records: list[bytes], between: bytes = b"") -> bytes:
    """A file of LitData's or MDS's: how many records, their offsets, what stands between, the records."""
    first = 4 * (len(records) + 2) + len(between)
    ends = np.cumsum([first, *map(len, records)]).tolist()
    return uint32(len(records), *ends) + between + b"".join(records)


def write_mds(
    folder: Path, columns: dict[str, tuple[str, int | None]], shards: list[list[Item]], compression: str | None = None
) -> Path:
    """Values are encoded already; ``columns`` gives encoding and size of each."""
    folder.mkdir()
    listed = []
    for number, items in enumerate(shards):
        records = []
        for item in items:
            sizes = [len(item[name]) for name, (_, size) in columns.items() if size is None]
            records.append(uint32(*sizes) + b"".join(item[name] for name in columns))
        data, raw, packed_name = packed(records, b"{}"), f"shard.{number:05}.mds", None
        stored = {None: bytes, "zstd": zstandard.compress, "gz": gzip.compress, "bz2": bz2.compress}[compression](data)
        packed_name = raw if compression is None else f"{raw}.{compression}"
        (folder / packed_name).write_bytes(stored)
        listed.append(
            {
                "version": 2,
                "format": "mds",
                "column_names": [*columns],
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_sizes": [size for _, size in columns.values()],
                "compression": compression and f"{compression}:3",
                "samples": len(items),
                "raw_data": {"basename": raw, "bytes": len(data)},
                "zip_data": compression and {"basename": packed_name, "bytes": len(stored)},
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder


LEAF = {"type": None, "context": None, "children_spec": []}


def spec_of(**children: Any) -> Any:
    context = json.dumps(list(children))
    return {"type": "builtins.dict", "context": context, "children_spec": [each or LEAF for each in children.values()]}


def write_litdata(
    folder: Path, formats: list[str], spec: Any, chunks: list[list[list[bytes]]], compression: str | None = None
) -> Path:
    folder.mkdir()
    listed = []
    for number, items in enumerate(chunks):
        records = [uint32(*map(len, values)) + b"".join(values) for values in items]
        data, name = packed(records), f"chunk-0-{number}{f'.{compression}' if compression else ''}.bin"
        (folder / name).write_bytes(zstandard.compress(data) if compression else data)
        size = sum(map(len, records))
        listed.append({"chunk_bytes": size, "chunk_size": len(items), "dim": None, "filename": name})
    config = {"compression": compression, "data_format": formats, "data_spec": json.dumps([1, spec])}
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": config}))
    return folder


def change_index(folder: Path, change: Callable[[Any], object]) -> None:
    document = json.loads((folder / "index.json").read_text())
    change(document)
    (folder / "index.json").write_text(json.dumps(document))


def raw_pil(image: Image.Image) -> bytes:
    return uint32(*image.size, len(image.mode)) + image.mode.encode() + image.tobytes()


# WebDataset


@pytest.mark.parametrize("given", ["t-{00..01}.tar", "t-*.tar", "t-0{0,1}.tar", ".", ["t-00.tar", "t-01.tar"]], ids=str)
def test_tars_are_pairs_of_image_and_class(tars: Path, given: Any) -> None:
    """A pattern, a folder and a list of tars give the same pairs, with the pixels of fastdata's own loader."""
    paths = [tars / each for each in given] if isinstance(given, list) else f"{tars}/{given}"
    with CachedDataset(paths, progress=False, num_workers=1) as dataset:
        assert list(dataset.targets) == [0, 10, 20]
        assert [np.array_equal(dataset[i][0], pixels(i)) for i in range(3)] == [True] * 3


def test_tars_are_served_in_batches(tars: Path) -> None:
    """Two workers prepare them, and a loader gives what a list of the same pairs gives."""
    with CachedDataset(str(tars / "t-*.tar"), progress=False, num_workers=2) as dataset:
        dataset.transform = lambda image: torch.from_numpy(np.array(image))
        (batch,) = DataLoader(dataset, batch_size=3)
        assert torch.equal(batch[0], torch.from_numpy(np.stack([pixels(i) for i in range(3)])))
        assert batch[1].tolist() == [0, 10, 20]


def test_a_tar_gives_the_files_that_columns_name(tmp_path: Path) -> None:
    """Endings are columns, in lower case, decoded by kind; the key is one too, what has no ending is not."""
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
    names = ["jpg", "seg.png", "json", "txt", "npy", "bin", "__key__"]
    item = open_dataset(path, only=names)[0]
    assert set(item) == set(names)
    (tmp_path / "1.jpg").write_bytes(files["x/1.JPG"])
    assert np.array_equal(item.pop("jpg"), load_image(tmp_path / "1.jpg"))
    assert np.array_equal(item.pop("seg.png"), pixels(2))
    assert np.array_equal(item.pop("npy"), array)
    assert item == {"json": {"a": [1]}, "txt": "ü", "bin": b"\0", "__key__": "x/1"}


def test_columns_choose_sample_and_target_of_a_tar(tmp_path: Path) -> None:
    """Several targets are a dict; without columns such a sample says that it needs them."""
    path = write_tar(tmp_path / "x.tar", {"1.jpg": image_file(1, "jpeg"), "1.png": image_file(2), "1.cls": b"7"})
    with CachedDataset(path, columns={"sample": "png", "target": ["cls", "__key__"]}, progress=False) as dataset:
        assert np.array_equal(dataset[0][0], pixels(2))
        assert dataset[0][1] == {"cls": 7, "__key__": "1"}
    with pytest.raises(OSError, match=r"has the files jpg, png, cls, and not one image .* columns=\{'sample'"):
        CachedDataset(path, progress=False)
    with pytest.raises(OSError, match=r"number 0 of .*x.tar: ValueError: there is no column 'mask'; columns are 'jpg'"):
        CachedDataset(path, columns={"sample": "jpg", "target": "mask"}, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:700], "x.tar cannot be read: unexpected end of data"),
        (lambda data: data[:1024], "it is cut off, or damaged"),
        (lambda data: data[:1300], "it is cut off, or damaged"),
        (lambda data: data[:1024] + b"\1" * 512 + data[1536:], "it is cut off, or damaged"),
        (lambda data: gzip.compress(data), "x.tar cannot be read"),
        (lambda data: b"", "x.tar cannot be read"),
    ],
    ids=["data", "end", "header", "garbage", "gzip", "empty"],
)
def test_damaged_tars_are_errors(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    """What is cut short, overwritten or no tar is said before anything is prepared, with the file's name."""
    path = write_tar(tmp_path / "x.tar", {"1.txt": b"text", "2.txt": b"text"})
    path.write_bytes(change(path.read_bytes()[:2048] + bytes(1024)))
    with pytest.raises(ValueError, match=message):
        open_dataset(path)


def test_tars_are_refused_that_run_code_or_cannot_be_sought(tmp_path: Path) -> None:
    """Pickles, files twice in a sample and compressed tars are named with the reason."""
    for ending in ("pyd", "pickle", "pth", "seg.pyd"):
        path = write_tar(tmp_path / "x.tar", {f"1.{ending}": pickle.dumps(1)})
        with pytest.raises(ValueError, match=rf"x.tar cannot be read: its file 1.{ending} is pickled"):
            open_dataset(path)
    with pytest.raises(ValueError, match=r"it holds 1.PNG twice"):
        open_dataset(write_tar(tmp_path / "x.tar", {"1.png": b"", "1.PNG": b""}))
    for name in ("x.tar.gz", "x.tgz"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"{name} is compressed as a whole.* Decompress it to a .tar"):
            open_dataset(tmp_path / name)
    write_tar(tmp_path / "x.tar", sample_files(0, "0."))
    assert len(open_dataset(tmp_path)) == 1  # which others beside it do not keep from being read


def test_a_tar_without_samples_is_an_empty_dataset(tmp_path: Path) -> None:
    """It is read, and found to hold none, not taken for a path of another kind."""
    with CachedDataset(write_tar(tmp_path / "x.tar", {}), progress=False) as dataset:
        assert len(dataset) == 0


def test_damaged_images_name_their_file(tars: Path) -> None:
    """The error says which sample of which tar, and on_error="skip" leaves it out."""
    write_tar(tars / "t-01.tar", {"2.png": b"no image", "2.cls": b"1"})
    with pytest.raises(OSError, match=r"sample 2 cannot be read: ValueError: number 0 of .*t-01.tar: Unidentified"):
        CachedDataset(tars, progress=False, num_workers=1)
    with (
        pytest.warns(UserWarning, match="1 of 3 samples cannot be prepared"),
        CachedDataset(tars, on_error="skip", progress=False, num_workers=1) as dataset,
    ):
        assert list(dataset.targets) == [0, 10]


@pytest.mark.parametrize("bad", [b"\x93NUMPY\1\0\xff\xff", b"", b"PK"], ids=["header", "empty", "zip"])
def test_damaged_arrays_are_errors(tmp_path: Path, bad: bytes) -> None:
    """An array takes no memory that its file does not hold."""
    with pytest.raises(ValueError, match="number 0 of"):
        open_dataset(write_tar(tmp_path / "x.tar", {"1.npy": bad}), only=["npy"])[0]
    stream = io.BytesIO()
    np.save(stream, np.zeros(4))
    with pytest.raises(ValueError, match="31 bytes are no float64 values of shape"):
        open_dataset(write_tar(tmp_path / "x.tar", {"1.npy": stream.getvalue()[:-1]}), only=["npy"])[0]
    objects = io.BytesIO()
    np.save(objects, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="values of object are not read"):
        open_dataset(write_tar(tmp_path / "x.tar", {"1.npy": objects.getvalue()}), only=["npy"])[0]


def test_a_cache_of_tars_is_found_again_until_a_file_changes(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cache_dir= needs no cache_key=, and another tar is another cache."""
    cache = tars / "cache"
    CachedDataset(str(tars / "t-*.tar"), cache_dir=cache, progress=False).close()
    with monkeypatch.context() as patch:
        patch.setattr("fastdata.cache.build.ingest", None)
        with CachedDataset(str(tars / "t-*.tar"), cache_dir=cache, progress=False) as again:
            assert list(again.targets) == [0, 10, 20]
    write_tar(tars / "t-01.tar", sample_files(3, "2."))
    with CachedDataset(str(tars / "t-*.tar"), cache_dir=cache, progress=False) as changed:
        assert list(changed.targets) == [0, 10, 30]


def test_readers_pickle(tars: Path) -> None:
    """A copy reads the same, as in a worker process that is spawned."""
    dataset = open_dataset(str(tars / "t-*.tar"))
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy[i][1] for i in range(-3, 3)] == [0, 10, 20] * 2
    with pytest.raises(IndexError):
        copy[3]


REMOTE = """
import pathlib, sys
import fsspec
from fastdata import CachedDataset
folder, memory = pathlib.Path(sys.argv[1]), fsspec.filesystem("memory")
for path in folder.glob("*.tar"):
    memory.pipe_file(f"/tars/{path.name}", path.read_bytes())
for given in ("memory://tars/t-*.tar", "memory://tars", "memory://tars/t-{00..01}.tar"):
    with CachedDataset(given, storage_options={}, progress=False, num_workers=1) as dataset:
        print(list(dataset.targets), sum(dataset[2][0].tobytes()))
"""


def test_tars_behind_a_url_are_read_by_ranges(tars: Path) -> None:
    """A pattern and a folder of a remote file system give what local ones give."""
    done = subprocess.run([sys.executable, "-c", REMOTE, str(tars)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"[0, 10, 20] {pixels(2).sum()}"] * 3


# MDS


@pytest.mark.parametrize("compression", [None, "zstd", "gz", "bz2"])
def test_mds_shards_are_dicts(tmp_path: Path, compression: str | None) -> None:
    """Items of several shards, compressed or not, come out as dicts, and batches of them."""
    columns = {"image": ("png", None), "label": ("int", 8)}
    items = [{"image": image_file(i), "label": np.int64(i * 10).tobytes()} for i in range(3)]
    folder = write_mds(tmp_path / "mds", columns, [items[:2], items[2:]], compression)
    with CachedDataset(folder, progress=False, num_workers=1) as dataset:
        assert [dataset[i]["label"] for i in range(3)] == [0, 10, 20]
        assert all(np.array_equal(dataset[i]["image"], pixels(i)) for i in range(3))
    with CachedDataset(folder, columns={"sample": "image", "target": "label"}, progress=False) as dataset:
        assert dataset[2][1] == 20


def test_mds_encodings(tmp_path: Path) -> None:
    """Each encoding gives its value, as plain Python or in fresh memory."""
    image = Image.fromarray(pixels(3)[:, :, 0])
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    columns: dict[str, tuple[str, int | None]] = {
        "a": ("str", None),
        "b": ("bytes", None),
        "c": ("json", None),
        "d": ("float32", 4),
        "e": ("uint16", 2),
        "f": ("pil", None),
        "g": ("ndarray", None),
        "h": ("ndarray:int16", None),
        "i": ("ndarray:int16:2,3", 12),
        "j": ("str_int", None),
    }
    values = [b"\xc3\xbc", b"\0", b"[1]", np.float32(0.5).tobytes(), np.uint16(7).tobytes(), raw_pil(image)]
    values += [b"\x11\x08\2\3" + array.tobytes(), b"\x08\2\3" + array.tobytes(), array.tobytes(), b"12"]
    item = open_dataset(write_mds(tmp_path / "mds", columns, [[dict(zip(columns, values, strict=True))]]))[0]
    assert all(np.array_equal(item.pop(name), array) for name in "ghi")
    assert (found := item.pop("f")).mode == "L"
    assert found.tobytes() == image.tobytes()
    assert item == {"a": "ü", "b": b"\0", "c": [1], "d": 0.5, "e": 7, "j": 12}


@pytest.mark.parametrize("compression", ["None", "zstd", "gz", "bz2"])
def test_mds_as_mosaics_own_writer_makes_it(tmp_path: Path, compression: str) -> None:
    """What mosaicml-streaming 0.13.0 wrote is read back; integrations/record_mds.py has recorded it."""
    with zipfile.ZipFile(Path(__file__).parent / "recorded_mds.zip") as archive:
        archive.extractall(tmp_path)
    dataset = open_dataset(tmp_path / compression)
    assert len(dataset) == 5
    for i in range(5):
        item, wanted = dataset[i], np.arange(90, dtype=np.uint8).reshape(5, 6, 3) + i
        assert np.array_equal(item.pop("image"), wanted)
        assert np.array_equal(item.pop("grey"), wanted[:, :, 0])
        assert np.array_equal(item.pop("vector"), np.full(3, i, np.float32))
        assert np.array_equal(item.pop("table"), np.full((2, 3), i, np.int16))
        assert item == {"label": i * 10, "text": f"ü{i}", "score": i / 2, "facts": {"a": [i]}}


def set_shard(**facts: Any) -> Callable[[Any], object]:
    return lambda document: document["shards"][0].update(facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_shard(column_encodings=["pkl"]), "it holds pickled values, and what is not trusted is not unpickled"),
        (set_shard(column_encodings=["video"]), "values written as 'video' are not known; jpeg, pil"),
        (set_shard(version=3), "shards are mds of version 3, not mds of version 2"),
        (set_shard(format="json"), "shards are json of version 2"),
        (set_shard(samples=3), "the offsets at its start are not those of 3 samples"),
        (set_shard(samples=1 << 40), "cannot have 1099511627776 samples in"),
        (set_shard(samples="2"), "cannot have 2 samples in 27 bytes"),
        (set_shard(raw_data={"basename": "../x", "bytes": 1}), "KeyError: '../x'"),
        (set_shard(raw_data={"basename": "shard.00000.mds", "bytes": 99}), "has 27 bytes where 99 were written"),
        (set_shard(column_sizes=[-1]), "cannot have values of -1 bytes"),
        (lambda document: document["shards"].clear(), "IndexError"),
        (lambda document: document["shards"][0].pop("samples"), "KeyError: 'samples'"),
    ],
)
def test_mds_indices_are_not_trusted(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    """What the index says wrongly is an error that names it, before anything is read by it."""
    folder = write_mds(tmp_path / "mds", {"a": ("str", None)}, [[{"a": b"x"}, {"a": b""}]])
    change_index(folder, change)
    with pytest.raises(ValueError, match=message):
        open_dataset(folder)[0]


@pytest.mark.parametrize(
    ("at", "number", "message"),
    [
        (0, 3, "the offsets at its start are not those"),
        (1, 4, "the offsets at its start are not those"),
        (2, 1 << 31, "the offsets at its start are not those"),
        (3, 31, "the offsets at its start are not those"),
        (2, 29, "it has 11 bytes where its values take 5"),
    ],
    ids=["count", "first", "middle", "end", "sizes"],
)
def test_offsets_of_a_shard_are_not_trusted(tmp_path: Path, at: int, number: int, message: str) -> None:
    """Offsets that fall, lie in the head or beyond the end are errors that name the shard."""
    folder = write_mds(tmp_path / "mds", {"a": ("str", None)}, [[{"a": b"x"}, {"a": b"yz"}]])
    data = np.frombuffer((folder / "shard.00000.mds").read_bytes()[:16], "<u4").copy()
    data[at] = number
    rest = (folder / "shard.00000.mds").read_bytes()[16:]
    (folder / "shard.00000.mds").write_bytes(data.tobytes() + rest)
    with pytest.raises(ValueError, match=rf"number 0 of .*shard.00000.mds: ValueError: {message}"):
        open_dataset(folder)[0]


@pytest.mark.parametrize("compression", ["zstd", "gz", "bz2"])
@pytest.mark.parametrize("change", [lambda data: data[:-9], lambda data: b"x" + data, lambda data: b""])
def test_damaged_compressed_shards_are_errors(
    tmp_path: Path, compression: str, change: Callable[[bytes], bytes]
) -> None:
    """A shard that is cut short or no such file is said; one that claims to be larger takes no memory."""
    folder = write_mds(tmp_path / "mds", {"a": ("str", None)}, [[{"a": b"x" * 100}]], compression)
    path = folder / f"shard.00000.mds.{compression}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"it is no {compression} file of at most \d+ bytes"):
        open_dataset(folder)[0]
    path.write_bytes({"zstd": zstandard, "gz": gzip, "bz2": bz2}[compression].compress(bytes(1 << 20)))
    with pytest.raises(ValueError, match=rf"it is no {compression} file of at most \d+ bytes"):
        open_dataset(folder)[0]


def test_unknown_compression_is_an_error(tmp_path: Path) -> None:
    """Of what fastdata cannot decompress the name is said."""
    folder = write_mds(tmp_path / "mds", {"a": ("str", None)}, [[{"a": b"x"}]], "gz")
    change_index(folder, set_shard(compression="br:11"))
    with pytest.raises(ValueError, match="compression 'br' is not known; zstd, gz and bz2 are"):
        open_dataset(folder)[0]


@pytest.mark.parametrize("kind", ["None", "zstd", "tar"])
def test_whatever_byte_is_another_is_a_value_or_an_error(tmp_path: Path, kind: str) -> None:
    """Bytes that were changed anywhere in an index or a shard cause nothing worse than a ValueError."""
    with zipfile.ZipFile(Path(__file__).parent / "recorded_mds.zip") as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / kind
    if kind == "tar":
        folder.mkdir()
        write_tar(folder / "x.tar", sample_files(0, "0.") | sample_files(1, "1."))
    outcomes = set()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for at in range(0, len(data), len(data) // 50):
            path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
            try:
                dataset = open_dataset(folder)
                outcomes.add(len([dataset[i] for i in range(len(dataset))]))
            except ValueError:
                outcomes.add(-1)
        path.write_bytes(data)
    assert -1 in outcomes


# LitData


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_litdata_chunks_are_as_they_were_given(tmp_path: Path, compression: str | None) -> None:
    """Dicts, lists and tuples come out again, of chunks that are compressed or not."""
    pair = {"type": "builtins.tuple", "context": "null", "children_spec": [LEAF, LEAF]}
    spec = spec_of(image=None, label=pair)
    values = [[image_file(i, "jpeg"), np.int64(i).tobytes(), b"\1"] for i in range(3)]
    folder = write_litdata(tmp_path / "lit", ["jpeg", "int", "boolean"], spec, [values[:2], values[2:]], compression)
    dataset = open_dataset(folder)
    assert [dataset[i]["label"] for i in range(3)] == [(0, True), (1, True), (2, True)]
    with CachedDataset(folder, progress=False, num_workers=1) as cached:
        (tmp_path / "2.jpg").write_bytes(values[2][0])
        assert np.array_equal(cached[2]["image"], load_image(tmp_path / "2.jpg"))


def test_litdata_formats(tmp_path: Path) -> None:
    """Each format gives its value; tensors and arrays with the shape that stands before them."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    image = Image.fromarray(pixels(1))
    formats = ["pil", "tensor", "numpy", "no_header_tensor:17", "no_header_numpy:1", "float", "str", "bytes"]
    values = [raw_pil(image), uint32(13, 2, 2, 3) + array.tobytes(), uint32(1, 2, 2, 3) + array.tobytes()]
    values += [np.arange(3).tobytes(), array.tobytes(), np.float64(0.5).tobytes(), b"\xc3\xbc", b"\0"]
    spec = spec_of(**dict.fromkeys("abcdefgh"))
    item = open_dataset(write_litdata(tmp_path / "lit", formats, spec, [[values]]))[0]
    assert np.array_equal(item["a"], pixels(1))
    assert torch.equal(item["b"], torch.from_numpy(array))
    assert np.array_equal(item["c"], array)
    assert item["d"].tolist() == [0, 1, 2]
    assert np.array_equal(item["e"], array.ravel())
    assert [item[name] for name in "fgh"] == [0.5, "ü", b"\0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_format": ["str", "pickle"]}, "it holds pickled values"),
        ({"data_format": ["str", "video"]}, "values written as 'video' are not known"),
        ({"data_format": ["no_header_tensor:17"]}, "it holds one stream of tokens"),
        ({"data_format": ["str"]}, "StopIteration"),
        ({"data_format": ["str"] * 3}, "its data_spec has fewer values than its data_format"),
        ({"encryption": {"algorithm": "fernet"}}, "it is encrypted"),
        ({"data_spec": json.dumps([1, {**spec_of(a=None), "type": "os.system"}])}, "items that are a os.system are"),
        ({"data_spec": "[" * 100_000}, "RecursionError"),
        ({"data_spec": None}, "TypeError"),
    ],
    ids=str,
)
def test_litdata_indices_are_not_trusted(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """What the index says wrongly is an error, and types that it names are never looked for."""
    folder = write_litdata(tmp_path / "lit", ["str", "str"], spec_of(a=None, b=None), [[[b"x", b"y"]]])
    change_index(folder, lambda document: document["config"].update(change))
    with pytest.raises(ValueError, match=message):
        open_dataset(folder)[0]


@pytest.mark.parametrize(
    "value",
    [b"", uint32(13), uint32(13, 1, 9) + b"\0\0", uint32(99, 1, 1) + b"\0\0", uint32(13, 1 << 30) + b"\0\0"],
    ids=["empty", "head", "values", "dtype", "dimensions"],
)
def test_damaged_tensors_are_errors(tmp_path: Path, value: bytes) -> None:
    """A tensor's header is held against its bytes."""
    dataset = open_dataset(write_litdata(tmp_path / "lit", ["tensor"], spec_of(a=None), [[[value]]]))
    with pytest.raises(ValueError, match="number 0 of"):
        dataset[0]


def test_damaged_pil_images_are_errors(tmp_path: Path) -> None:
    """Raw images that claim more pixels than there are, or a mode that is none, take no memory."""
    for head in (uint32(1 << 30, 1 << 30, 3) + b"RGB", uint32(1, 1, 1) + b"X", uint32(1, 1, 99)):
        folder = write_litdata(tmp_path / f"lit{len(head)}{head[0]}", ["pil"], spec_of(a=None), [[[head + b"\0"]]])
        with pytest.raises(ValueError, match="bytes are no image of mode"):
            open_dataset(folder)[0]


# What lies at a path


def test_what_is_none_of_ours_says_what_to_give(tmp_path: Path) -> None:
    """Class folders, a CSV, a cache, an empty folder and what is not there get the error that names the way."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.png").write_bytes(image_file(0))
    (tmp_path / "t.csv").touch()
    for path in (tmp_path, str(tmp_path / "t.csv"), tmp_path / "nowhere", ""):
        with pytest.raises(TypeError, match=r"is a path, not a dataset. Give fastdata.ImageFolder the folder of class"):
            CachedDataset(path)
    with pytest.raises(FileNotFoundError):
        CachedDataset(tmp_path / "nowhere.tar")
    with pytest.raises(FileNotFoundError, match=r"no .tar, .parquet, .arrow or .feather file is like .*/x-\*"):
        CachedDataset(f"{tmp_path}/x-*")


def test_folders_of_several_kinds_or_splits_are_refused(tars: Path) -> None:
    """Files of two kinds, or of training and validation, are not served as one dataset."""
    (tars / "x.parquet").touch()
    with pytest.raises(ValueError, match="holds files of several kinds, parquet, tar; give those of one by a pattern"):
        open_dataset(tars)
    (tars / "x.parquet").unlink()
    for split in ("train", "val"):
        write_tar(tars / f"{split}-0.tar", sample_files(0, "0."))
    with pytest.raises(ValueError, match=r"holds the splits train, val; give the files of one .*/train-\*"):
        open_dataset(tars)
    assert len(open_dataset(f"{tars}/train-*")) == 1


def test_arrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow the error names the extra."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"pip install 'fastdata\[arrow\]'"):
        open_dataset(tmp_path / "x.parquet")


# Columns, and values of Hugging Face


def test_columns_take_sample_and_target_of_any_dicts() -> None:
    """Items are pairs then, also where several values are images; a list of targets makes a dict."""
    images = [torch.full((3, 2, 2), i, dtype=torch.uint8) for i in range(4)]
    items = [{"image": image, "mask": image[0], "label": i, "id": str(i)} for i, image in enumerate(images)]
    with CachedDataset(items, columns={"sample": "image", "target": "label"}, progress=False) as dataset:
        assert dataset[3][1] == 3
        assert dataset.__getitems__([1, 2]).stacked[1].tolist() == [1, 2]
    with CachedDataset(items, columns={"sample": "image", "target": "mask"}, progress=False) as dataset:
        assert torch.equal(dataset[3][1], images[3][0])
    with CachedDataset(items, columns={"sample": "image", "target": ["label", "id"]}, progress=False) as dataset:
        assert dataset[2][1] == {"label": 2, "id": "2"}


def test_columns_that_are_not_there_are_errors() -> None:
    """Wrong names are said with those that there are, and pairs have none."""
    items: list[Any] = [{"image": torch.zeros(3, 2, 2), "label": 0}]
    with pytest.raises(OSError, match="item 0 of list has no 'target' of columns=; there are 'image', 'label'"):
        CachedDataset(items, columns={"sample": "image", "target": "target"}, progress=False)
    with pytest.raises(OSError, match=r"item 0 of list is a tuple, and columns= chooses of a dict; leave it out"):
        CachedDataset([(1, 2)], columns={"sample": "image", "target": "label"}, progress=False)
    for columns in ({"image": "label"}, {"sample": "image"}, {"sample": 1, "target": "label"}):
        with pytest.raises(ValueError, match=r"does not say which are sample and target. Give their names"):
            CachedDataset(items, columns=columns, progress=False)  # type: ignore[arg-type]


def test_images_that_are_left_as_bytes_are_opened(tmp_path: Path) -> None:
    """Hugging Face's Image(decode=False) gives bytes, or the path of a file; both come out as images."""
    (tmp_path / "1.png").write_bytes(image_file(1))
    values = [{"bytes": image_file(0), "path": None}, {"bytes": None, "path": str(tmp_path / "1.png")}]
    items = [{"image": value, "label": i} for i, value in enumerate(values)]
    with CachedDataset(items, progress=False) as dataset:
        assert all(np.array_equal(dataset[i]["image"], pixels(i)) for i in range(2))
