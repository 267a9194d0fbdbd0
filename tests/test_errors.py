"""Errors of the package: their types and texts, their causes, and which of them are tried again."""

from __future__ import annotations

import copy
import errno
import http.client
import io
import os
import pickle
import socket
import ssl
import struct
import time
import types
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchLoader

from children import PILToTensor
from data import level_samples
from fastdata import CachedDataset, DataLoader, ImageFolder, ImageManifest, errors
from fastdata.errors import RemoteError, SampleError, StoreGoneError
from fastdata.faults import fault_of, sample_error

ODD_PATH = "/data/a, b: 'c'\nsample 7, d.jpg"


def classes_of_errors() -> list[type[errors.FastDataError]]:
    found = [getattr(errors, name) for name in errors.__all__]
    return [
        each for each in found if issubclass(each, errors.FastDataError) and each is not SampleError
    ]


def raised_by_torch(error: Exception) -> Exception:
    """Return the error that torch's loader raises if a worker process has raised ``error``."""
    try:
        try:
            raise sample_error("/data/other.jpg", 8, ValueError("x"))
        except SampleError as cause:
            raise error from cause
    except Exception:  # noqa: BLE001  # whatever it is
        sent = pickle.dumps(ExceptionWrapper(where="in DataLoader worker process 0"))
    try:
        pickle.loads(sent).reraise()
    except Exception as came:  # noqa: BLE001
        return came
    raise AssertionError


@pytest.mark.parametrize("kind", classes_of_errors())
def test_every_error_keeps_its_type(kind: type[errors.FastDataError]) -> None:
    """An error of the package keeps class and text when it is pickled, and when torch's loader raises it."""
    error = kind("what was found")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is kind
        assert str(copied) == str(error)
    came = raised_by_torch(error)
    assert type(came) is kind
    assert "what was found" in str(came)


SAMPLE_ERRORS = {
    "file": sample_error("/data/a.jpg", 3, OSError("cut off")),
    "no file": sample_error(None, 3, KeyError("x")),
    "odd path": sample_error(ODD_PATH, 3, OSError("cut off")),
    "of another dataset": sample_error(
        "/data/a.jpg", 3, sample_error("/data/b.jpg", 5, OSError("cut off"))
    ),
    "other words": SampleError("it is\nno image", index=3, path="/data/a.jpg"),
    "other words, no file": SampleError("it is no image", index=3),
}


@pytest.mark.parametrize("error", SAMPLE_ERRORS.values(), ids=SAMPLE_ERRORS.keys())
def test_a_sample_error_keeps_index_and_path(error: SampleError) -> None:
    """Index and path are the same after pickling, and when torch's loader raises the error; its text has both."""
    came = raised_by_torch(error)
    for each in (
        error,
        pickle.loads(pickle.dumps(error)),
        copy.copy(error),
        came,
        pickle.loads(pickle.dumps(came)),
    ):
        assert isinstance(each, SampleError)
        assert (each.index, each.path) == (3, error.path)
        assert str(error) in str(each)
    assert str(error).startswith("sample 3 " if error.path is None else f"sample 3, {error.path}, ")


def test_a_sample_error_needs_an_index() -> None:
    """A text that names no sample is refused without ``index=``."""
    with pytest.raises(TypeError, match="needs index="):
        SampleError("it is no image")


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_a_file_that_is_no_image_is_named_once(image_folder: Any, storage: Any) -> None:
    """The error has the path of the file, and not the stream that it was read from."""
    root = image_folder()
    path = root / "cat" / "001.jpg"
    path.write_bytes(b"no image")
    with (
        ImageFolder(root, resize=(8, 8), storage=storage) as dataset,
        pytest.raises(SampleError) as caught,
    ):
        dataset[1]
    said = f"sample 1, {path}, cannot be read: UnidentifiedImageError: cannot identify image file. "
    assert str(caught.value).startswith(said)


MACHINE_ERRORS = [
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("can't allocate memory. Error code 12 (Cannot allocate memory)"),
    MemoryError("no room"),
]


@pytest.mark.parametrize("cause", MACHINE_ERRORS, ids=repr)
@pytest.mark.parametrize("prepare_workers", [1, 2])
def test_a_limit_of_the_machine_is_no_fault_of_a_sample(
    image_folder: Any, cause: Exception, prepare_workers: int
) -> None:
    """For a limit of the machine no sample is left out, and no file is called damaged."""

    def load(path: str) -> Image.Image:
        if path.endswith("001.jpg"):
            raise copy.copy(cause)
        return Image.new("RGB", (8, 8))

    kind = MemoryError if isinstance(cause, MemoryError) else errors.IngestError
    with pytest.raises(kind) as caught:
        ImageFolder(
            image_folder(per_class=6),
            loader=load,
            on_error="skip",
            prepare_workers=prepare_workers,
        )
    assert "Delete or replace" not in str(caught.value)


OF_A_SAMPLE = {
    "ENOENT",
    "ENOTDIR",
    "ELOOP",
    "ENAMETOOLONG",
    "EACCES",
    "EPERM",
    "EISDIR",
    "EOVERFLOW",
    "ENXIO",
}
OF_A_LIMIT = {"ENOMEM", "ENOSPC", "EDQUOT", "EMFILE", "ENFILE"}
OF_A_MACHINE = sorted({*errno.errorcode.values()} - OF_A_SAMPLE - OF_A_LIMIT)


class FailingFile:
    """A file that ``os.open`` refuses to open while ``code`` is set; ``time.sleep`` only records its calls."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = str(path)
        self.code = 0
        self.passes_after = -1
        """Failures until it can be opened; never where it is negative."""
        self.pauses_s: list[float] = []
        self._open = os.open
        monkeypatch.setattr(os, "open", self._refuse)
        monkeypatch.setattr(time, "sleep", self.pauses_s.append)

    def _refuse(self, path: Any, *arguments: Any, **named: Any) -> int:
        if self.code and path == self.path and self.passes_after:
            self.passes_after -= 1
            raise OSError(self.code, os.strerror(self.code), path)
        return self._open(path, *arguments, **named)


@pytest.fixture
def failing(image_folder: Any, monkeypatch: pytest.MonkeyPatch) -> FailingFile:
    return FailingFile(image_folder(per_class=3) / "cat" / "001.jpg", monkeypatch)


def root_of(failing: FailingFile) -> Path:
    return Path(failing.path).parent.parent


@pytest.mark.parametrize("name", OF_A_MACHINE)
def test_errors_of_the_machine_are_no_damage(name: str) -> None:
    """Every error number that is not about the file itself is a RemoteError with number, path and index."""
    code = getattr(errno, name)
    error = sample_error("/data/a.jpg", 3, OSError(code, os.strerror(code), "/data/a.jpg"))
    assert isinstance(error, RemoteError)
    assert error.errno == code
    assert str(error).startswith("sample 3, /data/a.jpg, cannot be read now: ")
    assert f"[Errno {code}] {os.strerror(code)}" in str(error)
    assert not any(word in str(error) for word in ("Delete", "on_error", "damaged"))


OTHERS_OF_A_MACHINE = [
    TimeoutError("no answer"),
    ConnectionResetError("gone"),
    RuntimeError("[Errno 5] Input/output error: '/data/a.jpg'"),  # torchvision's read_file
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ssl.SSLError(1, "wrong version number"),  # a number of OpenSSL's own, not EPERM
    http.client.IncompleteRead(b"", 10),
    urllib.error.HTTPError("https://host/a.jpg", 503, "busy", http.client.HTTPMessage(), None),
]


@pytest.mark.parametrize("cause", OTHERS_OF_A_MACHINE, ids=repr)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_errors_without_a_number_are_told_by_class_text_and_cause(
    cause: Exception, is_wrapped: bool
) -> None:
    """A network error that another library has wrapped still counts as one of the machine."""
    if is_wrapped:
        wrapped = ValueError("cannot load")
        wrapped.__cause__ = cause
        cause = wrapped
    assert isinstance(sample_error("/data/a.jpg", 3, cause), RemoteError)


@pytest.mark.parametrize(("status", "fault"), [(404, "missing"), (403, "permission")])
def test_answers_of_servers_have_the_faults_of_files(status: int, fault: str) -> None:
    """The status is found in the error (urllib), in its answer (requests), or in a dict (botocore)."""
    answer = types.SimpleNamespace(status_code=status)
    metadata = {"ResponseMetadata": {"HTTPStatusCode": status}}
    given = [({"status": status}), ({"response": answer}), ({"response": metadata})]
    for attributes in given:
        problem = http.client.HTTPException()
        vars(problem).update(attributes)
        assert fault_of(problem) == fault


def test_odd_errors_of_others_are_of_the_sample() -> None:
    """They are damage: an error raised from itself, unknown error numbers, and a protobuf that is cut off."""
    circular = ValueError("x")
    circular.__cause__ = circular
    decoding = type("DecodeError", (Exception,), {"__module__": "google.protobuf.message"})
    for problem in (circular, OSError([5], "x"), OSError("5", "x"), decoding("cut off")):
        assert fault_of(problem) == "damage"


@pytest.mark.parametrize("transform", [None, PILToTensor()], ids=["item", "batch"])
def test_a_failing_mount_is_tried_again_and_named(failing: FailingFile, transform: Any) -> None:
    """It is tried four times, then the error is raised with index and path; the next read succeeds."""
    failing.code = errno.ESTALE
    with ImageFolder(root_of(failing), transform, storage="none") as dataset:
        with pytest.raises(RemoteError, match=r"sample 1, .*001.jpg, cannot be read now") as caught:
            dataset[1]
        assert caught.value.errno == failing.code
        assert len(failing.pauses_s) in (3, 6)  # a batch reads its files together, then each alone
        failing.passes_after = 2
        assert dataset[1][1] == 0
        assert len(failing.pauses_s) in (5, 8)


def test_a_failing_mount_leaves_no_sample_out(failing: FailingFile, tmp_path: Path) -> None:
    """``on_error="skip"`` stops at it, and the cache that the next run writes has all samples."""
    options: Any = {"on_error": "skip", "cache_dir": tmp_path / "cache", "prepare_workers": 1}
    failing.code = errno.ESTALE
    with pytest.raises(RemoteError, match=r"sample 1, .*Stale file handle"):
        ImageFolder(root_of(failing), **options)
    failing.code = 0
    with ImageFolder(root_of(failing), **options) as dataset:
        assert (len(dataset), dataset.skipped) == (6, [])


@pytest.mark.parametrize(("name", "shard_bytes"), [("EACCES", 1), ("ENOENT", None)])
def test_what_may_pass_is_tried_again_by_the_next_run(
    failing: FailingFile, tmp_path: Path, name: str, shard_bytes: int | None
) -> None:
    """A file without permission, or missing for a moment, is left out only until it can be read."""

    def opened() -> ImageFolder:
        return ImageFolder.build_cache(
            root_of(failing),
            on_error="skip",
            cache_dir=tmp_path / "cache",
            shard_bytes=shard_bytes,
            prepare_workers=1,
        )

    failing.code = getattr(errno, name)
    with pytest.warns(UserWarning, match="1 of 6 samples cannot be prepared"):
        opened().close()
    for _ in range(2):
        with opened() as dataset:
            assert [(error.index, error.may_pass) for error in dataset.skipped] == [(1, True)]
    failing.code = errno.ESTALE  # says nothing new
    with opened() as dataset:
        assert [error.index for error in dataset.skipped] == [1]
    failing.code = 0
    for _ in range(2):
        with opened() as dataset:
            assert (len(dataset), dataset.skipped) == (6, [])


def test_a_mount_that_fails_while_files_are_listed_is_a_short_error(
    image_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback of a worker process has the failing path, and not all paths of its task."""
    root = image_folder(per_class=6)
    monkeypatch.setattr("fastdata.stores.listing._FILES_PER_TASK", 2)
    monkeypatch.setattr("fastdata.stores.listing.usable_cores", lambda: 2)
    look_up = os.stat

    def fail(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith("003.jpg"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return look_up(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(OSError, match=r"003\.jpg") as caught:
        ImageFolder(root, cache_dir=tmp_path)
    assert "002.jpg" not in f"{caught.value} {caught.value.__cause__}"


def test_a_disk_that_fails_below_a_decoder_is_no_damage(failing: FailingFile) -> None:
    """A decoder in C calls it damage, but reading the file again for its description finds the disk's error."""

    def load(path: str) -> Image.Image:
        failing.code = errno.EIO if path == failing.path else 0
        if failing.code:
            raise OSError("decoder error -2")
        return Image.new("RGB", (8, 8))

    with (
        ImageFolder(root_of(failing), loader=load, storage="none") as dataset,
        pytest.raises(RemoteError, match=r"sample 1, .*Input/output error"),
    ):
        dataset[1]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_folder_that_a_mount_fails_to_list_is_an_error(
    image_folder: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No sample is lost silently; only a folder without permission is left out, as by torchvision."""
    root = image_folder(per_class=3)
    scan = os.scandir
    failures = 0

    def fail(path: Any) -> Any:
        nonlocal failures
        if str(path).endswith("cat"):
            failures += 1
            raise OSError(code, os.strerror(code), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", fail)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    if code == errno.EIO:
        with pytest.raises(OSError, match=r"Input/output error: '.*cat'"):
            ImageFolder(root)
        assert failures == 4
        with pytest.raises(OSError, match=r"Input/output error: '.*cat'"):
            CachedDataset(root)  # looks for tars
    else:
        assert len(ImageFolder(root, allow_empty=True)) == 3
        assert failures == 1


def no_end_of_run_lengths() -> bytes:
    """Return a BMP whose run lengths end early, for which Pillow raises a ValueError."""
    stream = io.BytesIO()
    Image.new("P", (40, 30)).save(stream, "BMP")
    data = stream.getvalue()
    return data[:30] + struct.pack("<L", 1) + data[34:1078] + b"\x08\x01"


def too_many_pixels() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (400, 300)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("make", [no_end_of_run_lengths, too_many_pixels])
@pytest.mark.parametrize("transform", [None, ImageOps.mirror])
def test_damage_of_every_class_has_path_and_index(
    image_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], bytes],
    transform: Any,
) -> None:
    """Whatever a decoder raises, such as a ValueError, becomes a SampleError, alone and in batches."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    root = image_folder(per_class=3)
    path = root / "cat" / "001.jpg"
    path.write_bytes(make())
    with ImageFolder(root, transform, storage="none") as dataset:
        loader = DataLoader(dataset, batch_size=2, collate_fn=list)
        for read in (lambda: dataset[1], lambda: list(loader)):
            with pytest.raises(SampleError, match=r"^sample 1, .*001\.jpg, cannot be") as caught:
                read()
            assert (caught.value.index, caught.value.path) == (1, str(path))


def test_a_users_own_error_keeps_its_class() -> None:
    """With ``storage="none"`` an error of the user's dataset is raised unchanged, as torch does."""

    class Odd:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise KeyError(index)

    with CachedDataset(Odd(), storage="none") as dataset, pytest.raises(KeyError):
        dataset[1]


@pytest.mark.parametrize("storage", ["shared", "none"])
@pytest.mark.parametrize("make_loader", [TorchLoader, DataLoader])
def test_a_damaged_file_is_named_by_worker_processes(
    image_folder: Any, make_loader: Any, storage: Any
) -> None:
    """A file that a worker process cannot read is a SampleError and an OSError with its index and path."""
    root = image_folder()
    path = root / "cat" / "001.jpg"
    path.write_bytes(path.read_bytes()[:100])
    with ImageFolder(root, lambda image: image.size, resize=(8, 8), storage=storage) as dataset:
        loader = make_loader(dataset, batch_size=2, num_workers=1, collate_fn=list)
        with pytest.raises(OSError, match="in DataLoader worker process 0") as caught:
            list(loader)
        assert isinstance(caught.value, SampleError)
        assert (caught.value.index, caught.value.path) == (1, str(path))


@pytest.mark.parametrize("make_loader", [TorchLoader, DataLoader])
def test_a_store_that_is_gone_is_told_by_a_worker(tmp_path: Path, make_loader: Any) -> None:
    """If a worker finds the cache cut off, the loop raises StoreGoneError, as a pickled dataset does."""
    data = level_samples(4, (2, 3))
    with CachedDataset(data, cache_dir=tmp_path / "cache", cache_key="k") as dataset:
        (file,) = (tmp_path / "cache").glob("*/part0-*")
        os.truncate(file, 1)
        with pytest.raises(StoreGoneError, match="was deleted or changed while it was in use"):
            pickle.loads(pickle.dumps(dataset))
        options: Any = {} if make_loader is TorchLoader else {"workers": "process"}
        loader = make_loader(
            dataset, batch_size=2, num_workers=1, multiprocessing_context="forkserver", **options
        )
        with pytest.raises(StoreGoneError, match="was deleted or changed while it was in use"):
            list(loader)


@pytest.mark.parametrize(
    "make",
    [
        ImageFolder,
        ImageManifest,
        CachedDataset.from_cache,
        lambda root: ImageManifest([("1.jpg", 0)], root=root, storage="shared").prepare(),
        lambda root: CachedDataset([(torch.zeros(1, 2, 2), 0)], cache_dir=root, cache_key="x"),
    ],
    ids=["folder", "manifest", "from_cache", "manifest root", "cache_dir"],
)
@pytest.mark.parametrize(
    "root", ["adl://bucket/train", Path("adl://bucket/train")], ids=["text", "path"]
)
def test_a_remote_root_needs_its_package(
    make: Callable[[object], object], root: str | Path
) -> None:
    """A URL, even one in which ``Path`` removed a slash, is an error about a missing package, not a missing folder."""
    with pytest.raises(ImportError, match=r"adlfs"):
        make(root)


def test_a_folder_that_looks_like_a_url_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing folder is opened, whatever its name."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("s3:/bucket/cat")
    assert ImageFolder("s3://bucket", allow_empty=True).classes == ["cat"]
