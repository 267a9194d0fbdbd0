"""Files behind URLs: read, listed and written by one module, and datasets of them. Servers: integrations/."""

from __future__ import annotations

import asyncio
import copy
import functools
import http.server
import os
import pickle
import random
import re
import string
import threading
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from torchvision.transforms import v2

from conftest import shown
from fastdata import (
    CachedDataset,
    ChunkedLoader,
    DataLoader,
    FastDataWarning,
    ImageFolder,
    ImageManifest,
)
from fastdata.errors import RemoteError, SampleError
from fastdata.paths import hide_secrets, refuse_secrets
from fastdata.sources.remote import Place, stat_files
from fastdata.stores.cache import mirror_folder

FILES = {"a/1.txt": b"one", "a/b/2.txt": b"twice", "c.txt": b""}


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fastdata.sources.remote._PAUSE_S", 0.001)
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def bucket(image_folder: Callable[..., Path]) -> tuple[str, Path]:
    """Return a URL and a local folder with the same images."""
    folder = image_folder()
    put(folder, "memory://bucket/train")
    return "memory://bucket/train", folder


def put(folder: Path, url: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            Place(url).upload(path.relative_to(folder).as_posix(), path)


@pytest.mark.parametrize(
    "url", ["memory://place/below", "{tmp_path}/place/below", "file://{tmp_path}/place"]
)
def test_places_have_one_interface(url: str, tmp_path: Path) -> None:
    """Written files are found, read in part and as a whole, and gone after removal: local and behind a URL."""
    place = Place(url.format(tmp_path=tmp_path))
    for name, data in FILES.items():
        place.write(name, data)
    assert {name: size for name, (size, _) in place.find().result().items()} == {
        name: len(data) for name, data in FILES.items()
    }
    assert list(place.find("a").result()) == ["a/1.txt", "a/b/2.txt"]
    if place.is_remote:
        assert list(place.find("a", maxdepth=1).result()) == ["a/1.txt"]
    assert place.folders() == ["a"]
    assert [place.read(name) for name in FILES] == list(FILES.values())
    assert place.submit("a/b/2.txt", 1, 3).result() == b"wi"
    [(size, _)] = stat_files([(place, "a/1.txt")])
    assert size == 3
    assert place.submit("a/1.txt", 2).result() == b"e"
    assert place.below("a").read("1.txt") == b"one"
    place.remove("a/1.txt")
    place.remove("a/none")
    with pytest.raises(FileNotFoundError, match=r"a/1\.txt"):
        place.read("a/1.txt")
    assert stat_files([(place, "a/1.txt"), (place, "c.txt/none")]) == [(-1, -1)] * 2


def test_a_tag_changes_with_the_content() -> None:
    """A file that was replaced has another tag."""
    place = Place("memory://place")
    place.write("name", b"old")
    before = place.find().result()["name"]
    place.write("name", b"new")
    assert before != place.find().result()["name"]


def test_what_was_listed_is_in_no_pickle(bucket: tuple[str, Path]) -> None:
    """A dataset goes to worker processes without the names of listed files."""
    with ImageFolder(bucket[0]) as dataset:
        path, _ = dataset.samples[0]
        assert os.path.basename(path).encode() not in pickle.dumps(dataset)


@pytest.mark.parametrize("first", [ConnectionResetError("reset"), b"twi"], ids=["error", "length"])
def test_reads_are_tried_again(monkeypatch: pytest.MonkeyPatch, first: Any) -> None:
    """After an error, or an answer of a wrong length, a second request returns the right bytes."""
    plain, outcomes = MemoryFileSystem.cat_file, [first, None]

    def cat_file(self: Any, path: str, **span: Any) -> bytes:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return plain(self, path, **span) if outcome is None else outcome

    Place("memory://place").write("name", b"twice")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert Place("memory://place").submit("name", size_bytes=5).result() == b"twice"
    assert not outcomes


def test_a_request_that_hangs_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes too long is cancelled and made a second time."""
    calls: list[str] = []
    gone_on: list[str] = []

    async def cat_file(self: Any, path: str, **span: Any) -> bytes:
        calls.append(path)
        if len(calls) == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                gone_on.append("cancelled")
                monkeypatch.setattr(
                    "fastdata.sources.remote.ATTEMPT_S", 60
                )  # the second one may take long
                raise
        return b"twice"

    monkeypatch.setattr(MemoryFileSystem, "async_impl", True)
    monkeypatch.setattr(MemoryFileSystem, "_cat_file", cat_file, raising=False)
    monkeypatch.setattr("fastdata.sources.remote.ATTEMPT_S", 0.05)
    assert Place("memory://place").read("name") == b"twice"
    assert (len(calls), gone_on) == (2, ["cancelled"])


def test_a_large_upload_may_take_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The time limit of an upload grows with the file, so that a slow network can send a shard."""
    sent = []

    async def put_file(self: Any, source: str, path: str) -> None:
        await asyncio.sleep(0.2)
        sent.append(Path(source).stat().st_size)

    monkeypatch.setattr(MemoryFileSystem, "async_impl", True)
    monkeypatch.setattr(MemoryFileSystem, "_put_file", put_file, raising=False)
    monkeypatch.setattr("fastdata.sources.remote.ATTEMPT_S", 0.05)
    shard = tmp_path / "shard"
    with shard.open("wb") as file:
        file.truncate(64 << 20)
    Place("memory://place").upload("name", shard)
    assert sent == [64 << 20]


def test_what_stays_wrong_is_an_error() -> None:
    """A file that does not have its listed size is an error with both sizes."""
    Place("memory://place").write("name", b"twice")
    problem = r"^memory://place/name: 4 bytes were expected, but 5 came: the file was changed after it was l"
    with pytest.raises(OSError, match=problem):
        Place("memory://place").submit("name", size_bytes=4).result()


def test_refusals_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing permission is an error at once, and its cure names credentials."""
    tries = []

    def cat_file(self: Any, path: str, **span: Any) -> bytes:
        tries.append(path)
        raise PermissionError("the token is expired")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(RemoteError, match=r"expired\. Give valid credentials that allow this"):
        Place("memory://place").read("name")
    assert len(tries) == 1


def test_secrets_stay_here(monkeypatch: pytest.MonkeyPatch, bucket: tuple[str, Path]) -> None:
    """Storage options are in no error, text or pickle; test_shards.py has the tasks of workers, which need them."""
    secret = "AKIA/very+secret"

    def cat_file(self: Any, path: str, **span: Any) -> bytes:
        raise OSError(f"the signature of {secret} does not match")

    options = {"client_kwargs": {"tokens": [secret]}}
    with ImageFolder(bucket[0], storage="none", storage_options=options) as dataset:
        chosen = dataset.reader().stored.options
        assert secret not in repr(dataset) + repr(chosen) + str(vars(dataset))
        assert secret.encode() not in pickle.dumps(dataset)
        monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
        with pytest.raises(RemoteError, match=r"signature of \*\*\* does not match") as raised:
            dataset[0]
    cause = raised.value.__context__
    assert raised.value.__cause__ is None
    assert cause is None or secret not in str(cause)
    place = Place("memory://place", options)
    assert secret.encode() not in pickle.dumps(place)
    assert pickle.loads(pickle.dumps(place)).url == place.url


@pytest.mark.parametrize("storage", ["auto", "none"])
def test_copies_in_this_process_keep_storage_options(
    monkeypatch: pytest.MonkeyPatch, bucket: tuple[str, Path], storage: Any
) -> None:
    """Shallow and deep copies of datasets and loaders read like the first, also after preparing again."""
    plain = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, **span: Any) -> Any:
        if self.storage_options.get("key") != "sesame":
            raise PermissionError("no credentials")
        return plain(self, path, **span)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    options: Any = {"storage": storage, "storage_options": {"key": "sesame"}}
    transform = v2.Compose([v2.Resize((6, 6)), v2.PILToTensor()])
    urls = [f"{bucket[0]}/cat/{i:03}.jpg" for i in range(3)]
    for first in (
        ImageFolder(bucket[0], transform, **options),
        ImageManifest(urls, label=None, transform=transform, **options),
        CachedDataset(ImageFolder(bucket[0], **options), transform=transform, storage=storage),
    ):
        with first:
            loader = copy.deepcopy(DataLoader(first, batch_size=2))
            wanted = first[1][0]
            assert torch.equal(next(iter(loader))[0][1], wanted)
            for copied in (copy.copy(first), copy.deepcopy(first)):
                assert torch.equal(copied[1][0], wanted)
                copied.transform = v2.Compose([v2.Resize((4, 4)), v2.PILToTensor()])
                assert copied[2][0].shape == (3, 4, 4)
                copied.close()
            loader.dataset.close()


SECRET_URLS = (
    "ftp://user:SECRET@server/x",
    "ftp://user:SEC/RET@server/x",
    "ftp://user:SEC?RET@server/x",
    "ftp://user:a SECRET@server/x",
    "ftp://user%3aSECRET@server/x",
    "HTTPS://user:SECRET@[::1]:8080/x",
    "https:/user:SECRET@server/x",
    "https://SECRET@server/x",
    "s3://KEY:SECRET@bucket/x",
    "https://server/x?token=SECRET",
    "https://server/x?SECRET",
    "https://server/x?SECRET.of.aWebToken",
    "https://server/x#access_token=SECRET",
    "webdav://server/x?token=SECRET",
    "abfs://box@account.dfs.core.windows.net/x?sig=SECRET",
    "s3://bucket/x?versionId=1&X-Amz-Signature=SECRET",
    "s3://bucket/c#/x?X-Amz-Signature=SECRET",
    "zip://a.zip::https://user:SECRET@server/x",
    "simplecache::https://server/x?token=SECRET",
    "https://archive/https://user:SECRET@server/x",
)
PLAIN_URLS = (
    "s3://bucket/x",
    "s3://bucket/what?.png",
    "s3://bucket/c#/x.png",
    "gs://bucket/c#/a=1/x.png",
    "hf://squad@main/x",
    "az://box@account.dfs.core.windows.net/x",
    "github://me:faces@main/x",
    "s3://bucket/x?versionId=3.a_b-c",
    "sftp://me@server/x",
    "sftp://me@server:2222/x",
    "abfs://box@account.dfs.core.windows.net/x",
    "https://server:8080/@me/x:1",
    "https://[::1]:8080/x@2.png",
    "https://server/train-0?.tar",
    "hf://datasets/me/faces@main/x",
    "memory://a:b/x",
    "/data/a:b@c/x?y=1",
)


@pytest.mark.parametrize(
    "give",
    [
        Place,
        ImageFolder,
        lambda url: ImageManifest([(f"{url}/a.png", 0)]),
        lambda url: ImageManifest([(f"{url}?x=SECRET", 0)], root="memory://bucket"),
        CachedDataset.from_cache,
        CachedDataset,
        lambda url: ImageFolder("memory://bucket/train", cache_dir=url, resize=(4, 4)),
    ],
    ids=["place", "folder", "list", "relative", "cache", "files", "cache_dir"],
)
def test_secrets_in_urls_are_refused(bucket: tuple[str, Path], give: Callable[[str], Any]) -> None:
    """They would get into messages and caches; the error does not repeat them."""
    for url in SECRET_URLS:
        with pytest.raises(ValueError, match="storage_options=") as raised:
            give(url)
        assert not re.search("SEC|RET", str(raised.value))


def test_secrets_in_urls_are_refused_later_too(
    bucket: tuple[str, Path], image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Assigned samples, CSV rows next to a URL, and local_cache= are checked too."""
    url, _ = bucket
    said = []
    with ImageFolder(url) as dataset:
        with pytest.raises(ValueError, match=r"sample 1: memory://bucket/x\.png\?\*\*\*") as raised:
            dataset.samples = [dataset.samples[0], ("memory://bucket/x.png?sig=SECRET", 0)]
        said.append(str(raised.value))
    Place(url).write("list.csv", b"file,label\na.png,0\nb.png?sig=SECRET,1\n")
    with pytest.raises(ValueError, match=r"line 3, column 'file': memory://.*\?\*\*\*") as raised:
        ImageManifest(f"{url}/list.csv")
    said.append(str(raised.value))
    with pytest.raises(
        ValueError, match="is a URL, but a folder of this machine is needed"
    ) as raised:
        mirror_folder("https://me:SECRET@server/x")
    said.append(str(raised.value))
    assert "SECRET" not in "".join(said)


@pytest.mark.parametrize("url", PLAIN_URLS)
def test_urls_without_secrets_are_taken(url: str) -> None:
    """A user's name, a port, a container, a version of an object and odd names are not secrets."""
    assert hide_secrets(url) == url
    assert Place(url).is_remote == url.startswith(
        ("http", "s3", "sftp", "abfs", "hf", "mem", "gs", "az", "git")
    )


def test_what_is_around_a_secret_is_shown() -> None:
    """The colons and the @ of a local path, and the text before a query, are not secrets."""
    url = "zip://a.zip::file://C:/a@b"
    assert hide_secrets(url) == url
    assert (
        hide_secrets("zip://a.zip::https://server/x?SECRET") == "zip://a.zip::https://server/x?***"
    )


@pytest.mark.parametrize(
    "url", ["zip://set::/data/set.zip", "simplecache::file:///data", "zip://s::s3://b/s.zip"]
)
@pytest.mark.parametrize(
    "give",
    [
        ImageFolder,
        CachedDataset,
        CachedDataset.from_cache,
        lambda url: ImageManifest(f"{url}/a.csv"),
        lambda url: ImageManifest([(f"{url}/a.png", 0)]),
        lambda url: ImageManifest([("a.png", 0)], root=url),
    ],
    ids=["folder", "files", "cache", "csv", "list", "root"],
)
def test_chained_urls_are_refused(url: str, give: Callable[[str], Any]) -> None:
    """The error says what to use; colons in the name of an object are not a chain."""
    with pytest.raises(ValueError, match=r"is a chained URL \(::\), which fastdata cannot read"):
        give(url)
    assert Place("s3://bucket/a::b.png").is_remote


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Return the URL of a folder that an HTTP server lists, and the folder."""
    pytest.importorskip("aiohttp", reason="fsspec reads HTTP by aiohttp")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()
        thread.join()


def test_a_folder_over_http_has_the_names_of_the_same_folder_here(
    served: tuple[str, Path],
) -> None:
    """Names in URLs are escaped; classes, numbers and order of samples equal the local folder's."""
    url, folder = served
    level = 0
    for name in ("zebra", "éléphant", "new york", "new-york", "a&b", "50%", "a%20b"):
        (folder / name).mkdir()
        for file in ("one two.png", "one!.png", "one%20two.png"):
            level += 1
            Image.new("RGB", (4, 4), (level, 0, 0)).save(folder / name / file)
    shown = []
    for root in (url, folder):
        with ImageFolder(root) as dataset:
            items = [(np.asarray(image)[0, 0, 0], target) for image, target in dataset]
            shown.append((dataset.classes, dataset.class_to_idx, items))
    assert shown[0] == shown[1]


def test_secrets_of_any_shape_are_hidden() -> None:
    """In random URLs within a text every secret is hidden and nothing else; hiding twice changes nothing."""
    numbers = random.Random(3)
    letters = string.ascii_letters + string.digits + "-_.~!$&*+,;=:/?#@%"

    def some(characters: str) -> str:
        return "".join(numbers.choices(characters, k=numbers.randint(3, 12)))

    for _ in range(2000):
        scheme = numbers.choice(["http", "https", "s3", "gs", "ftp", "sftp", "webdav", "abfs"])
        server = f"{some(string.ascii_lowercase)}:{numbers.randint(1, 9999)}"
        secret = f"Q{some(letters)}Q".replace("::/", "")  # which ends a URL of a chain
        before, _, after = numbers.choice(
            [
                f"{scheme}://me:|@{server}/x.png",
                f"{scheme}://{server}/x.png?sig=|",
                f"zip://a.zip::{scheme}://me:|@{server}/x.png",
                f"https://{server}/x.png?a=1&token=|",
            ]
        ).partition("|")
        text = f"sample 3, {before}{secret}{after}, cannot be read"
        hidden = hide_secrets(text)
        assert secret not in hidden
        assert not set(re.findall(r"[\w-]{4,}", secret)) & set(re.findall(r"[\w-]+", hidden)), text
        assert hidden.startswith("sample 3, ")
        assert hidden.endswith(", cannot be read")
        assert hide_secrets(hidden) == hidden
        with pytest.raises(ValueError, match="storage_options="):
            refuse_secrets(f"{before}{secret}{after}")


@pytest.mark.parametrize(
    "text", ["aa:/", "::aa:/", "a.", "https://user", "x://u:p", "x://?", "https://u:@h/?", "%3a"]
)
def test_long_texts_of_others_are_searched_at_once(text: str) -> None:
    """Texts of up to 1.2 MB take linear time; with backtracking, it would grow with the square."""
    for before, after in (("", "?"), ("https://me:", "@"), ("", ":/?#@")):
        hidden = hide_secrets(f"{before}{text * 100_000}{after} https://SECRET@server/x")
        assert hidden.endswith(" https://***@server/x")


class Signed:
    """A dataset of signed URLs, one of which cannot be read."""

    samples = tuple((f"https://server/{k}.png?sig=SECRET", k) for k in range(3))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == 1:
            raise ValueError(f"403 for {self.samples[index][0]}, sent by https://TOKEN@proxy/")
        return np.full((3, 4, 4), index, np.uint8), index


def test_secrets_of_a_users_dataset_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Signed URLs in its samples and errors are in no error, warning or cache file."""
    with pytest.raises(
        SampleError, match=r"sample 1, https://server/1\.png\?\*\*\*, can"
    ) as raised:
        CachedDataset(Signed(), storage="shared").prepare()
    copied = pickle.loads(pickle.dumps(raised.value))
    shown_texts = [str(raised.value), str(copied), repr(vars(copied)), repr(raised.value.args)]
    with pytest.warns(FastDataWarning, match="1 of 3 samples") as warned:
        dataset = CachedDataset(Signed(), cache_dir=tmp_path, cache_key="x", on_error="skip")
    with dataset:
        shown_texts += map(str, dataset.skipped)
        shown_texts += [dataset.skipped[0].path or "", repr(dataset), caplog.text]
    shown_texts += [str(each.message) for each in warned]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for data in [*map(str.encode, shown_texts), *files]:
        assert b"SECRET" not in data
        assert b"TOKEN" not in data


def test_a_client_that_cannot_be_made_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients report a bad token as a missing file, or repeat their options."""
    for problem in (FileNotFoundError("ya29.SECRET"), ValueError("{'key': 'ya29.SECRET'}")):

        class Refusing(MemoryFileSystem):
            def __init__(self, *, error: Exception = problem, **_: Any) -> None:
                raise error

        monkeypatch.setattr("fastdata.sources.remote._CLIENTS", {})
        monkeypatch.setattr("fsspec.get_filesystem_class", lambda _, kind=Refusing: kind)
        place = Place("memory://bucket", {"token": "ya29.SECRET"})
        with pytest.raises(RemoteError, match=r"\*\*\*.*Check storage_options=") as raised:
            place.read("name")
        assert "SECRET" not in str(raised.value)
        assert raised.value.__context__ is None


def test_a_file_system_gets_what_its_urls_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host, port and user of a URL such as SFTP's reach the file system; storage_options override them."""
    made = []

    class Server(MemoryFileSystem):
        protocol = "sftp"

        def __init__(self, host: str, **options: Any) -> None:
            made.append((host, options))
            super().__init__()

        @staticmethod
        def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
            return {"host": url.split("@")[1].split(":")[0], "port": 2222, "username": "me"}

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return re.sub("sftp://[^/]*", "", path)

    monkeypatch.setattr("fsspec.get_filesystem_class", lambda protocol: Server)
    Place("sftp://me@server:2222/place").write("name", b"twice")
    assert Place("sftp://me@other:2222/place", {"port": 22}).read("name") == b"twice"
    assert [(host, options["port"]) for host, options in made] == [("server", 2222), ("other", 22)]


def test_a_missing_package_is_named() -> None:
    """A URL whose file system is not installed is an error that names the package; so is an unknown scheme."""
    with pytest.raises(ImportError, match=r"dlfs"):
        ImageFolder("adl://store/x")
    with pytest.raises(ValueError, match=r"Protocol not known: nonsense"):
        ImageFolder("nonsense://store/x")


def read_elsewhere(place: Place, results: Any) -> None:
    results.put((os.getpid(), place.read("name")))


def test_a_forked_process_has_its_own_client() -> None:
    """A forked process reads from a place that was used before, without waiting for its parent's threads."""
    place, context = Place("memory://place"), get_context("fork")
    place.write("name", b"twice")
    assert place.read("name") == b"twice"
    results = context.SimpleQueue()
    child = context.Process(target=read_elsewhere, args=(place, results))
    child.start()
    assert results.get() == (child.pid, b"twice")
    child.join()
    child.close()
    results.close()


# Datasets of remote files


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"storage": "shared"},
        {"storage": "shared", "prepare_workers": 1},
        {"storage": "none"},
        {"storage": "compressed", "codec": "source"},
        {"storage": "none", "resize": (4, 4)},
    ],
    ids=shown,
)
def test_a_folder_behind_a_url_is_a_folder(
    bucket: tuple[str, Path], options: dict[str, Any]
) -> None:
    """Samples, classes and pixels equal those of the local folder; paths are URLs."""
    url, folder = bucket
    with (
        ImageFolder(url, **options) as there,
        ImageFolder(folder, **options) as here,
    ):
        assert (there.classes, there.class_to_idx, list(there.targets)) == (
            here.classes,
            here.class_to_idx,
            list(here.targets),
        )
        assert [path.removeprefix(url) for path, _ in there.samples] == [
            path.removeprefix(str(folder)) for path, _ in here.samples
        ]
        assert there.root == url
        for _ in range(2):
            for theirs, ours in zip(
                DataLoader(there, 3, collate_fn=list),
                DataLoader(here, 3, collate_fn=list),
                strict=True,
            ):
                assert all(
                    np.array_equal(np.asarray(a), np.asarray(b))
                    for (a, _), (b, _) in zip(theirs, ours, strict=True)
                )


def test_nested_folders_come_in_torchvisions_order(tmp_path: Path) -> None:
    """Files of a class come in the order of a sorted walk, at any depth; other files are left out."""
    for name in (
        "cat/b/1.png",
        "cat/a.png",
        "cat/b.png",
        "cat/b-c/0.PNG",
        "dog/0.png",
        "dog/notes.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(path, "PNG") if path.suffix != ".txt" else path.write_text(
            "no image"
        )
    put(tmp_path, "memory://bucket/train")
    names = [
        path.removeprefix("memory://bucket/train/")
        for path, _ in ImageFolder("memory://bucket/train").samples
    ]
    assert names == [
        str(Path(path).relative_to(tmp_path)) for path, _ in ImageFolder(tmp_path).samples
    ]
    with pytest.raises(
        FileNotFoundError, match=r"Couldn't find any class folder in memory://bucket/train/dog\."
    ):
        ImageFolder("memory://bucket/train/dog")
    with pytest.raises(FileNotFoundError):
        ImageFolder("memory://bucket/none")


def test_the_users_own_loader_gets_a_file(bucket: tuple[str, Path]) -> None:
    """A loader that opens paths gets a local copy with the file's ending, which is removed afterwards."""
    seen = []

    def load(path: str) -> Image.Image:
        seen.append(path)
        return Image.open(path).convert("L")

    dataset = ImageFolder(bucket[0], loader=load, storage="none")
    assert np.array_equal(
        np.asarray(dataset[0][0]), np.asarray(load(ImageFolder(bucket[1]).samples[0][0]))
    )
    assert Path(seen[0]).suffix == Path(dataset.samples[0][0]).suffix
    assert not os.path.exists(seen[0])


def test_files_are_listed_once_and_read_together(
    bucket: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class is listed once; a batch requests all of its files before it waits for the first."""
    calls: list[str] = []
    for name in ("find", "ls", "info", "cat_file"):
        plain = getattr(MemoryFileSystem, name)

        def counted(
            self: Any, path: str, *, _plain: Any = plain, _name: str = name, **options: Any
        ) -> Any:
            calls.append(_name)
            return _plain(self, path, **options)

        monkeypatch.setattr(MemoryFileSystem, name, counted)
    dataset = ImageFolder(bucket[0], storage="none")
    assert calls.count("find") == len(dataset.classes)
    before = len(calls)
    dataset.__getitems__(list(range(len(dataset))))
    assert calls[before:] == ["cat_file"] * len(dataset)
    source: Any = dataset._fastdata.source()
    source.expect(range(len(dataset)))
    assert len(source.requests) == len(dataset)
    assert pickle.loads(pickle.dumps(source)).requests == {}
    for index in range(len(dataset)):
        source.read(index)
    assert not source.requests


def test_a_changed_file_is_an_error(bucket: tuple[str, Path]) -> None:
    """A file of another size than listed is named, with both sizes."""
    dataset = ImageFolder(bucket[0], storage="none")
    place, name = Place(bucket[0]), dataset.samples[1][0].removeprefix(bucket[0] + "/")
    place.write(name, b"another")
    with pytest.raises(
        SampleError,
        match=r"^sample 1, memory://bucket/train/.* \d+ bytes were expected, but 7 came",
    ):
        dataset[1]
    place.remove(name)
    with pytest.raises(SampleError, match=r"does not exist"):
        dataset[1]


def test_a_file_url_is_a_folder_here(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A root, a manifest, its root, its rows and local_cache= may be ``file://`` URLs."""
    folder = image_folder()
    samples = list(ImageFolder(folder).samples)
    rows = [(path.removeprefix(f"{folder}/"), label) for path, label in samples]
    (folder / "list.csv").write_text("file,label\n" + "".join(f"{a},{b}\n" for a, b in rows))
    url = f"file://{folder}"
    for dataset in (
        ImageFolder(url),
        ImageManifest(rows, root=url),
        ImageManifest(f"{url}/list.csv"),
        ImageManifest([(f"file://{path}", label) for path, label in samples]),
    ):
        assert dataset.samples == samples
    assert mirror_folder(f"file://{tmp_path}") == tmp_path


def test_a_path_object_may_be_a_url(bucket: tuple[str, Path]) -> None:
    """``Path`` turns the two slashes of a URL into one; a list of such paths is read all the same."""
    url, _ = bucket
    [(path, _), *_] = ImageFolder(url).samples
    assert ImageManifest([(Path(path), 7)])[0][1] == 7


@pytest.mark.parametrize("is_beside", [True, False])
def test_manifests_behind_urls(bucket: tuple[str, Path], tmp_path: Path, is_beside: bool) -> None:
    """A CSV file at a URL lists files relative to itself; a local one may list URLs. Both can be cached."""
    url, folder = bucket
    names = [path.removeprefix(f"{url}/") for path, _ in ImageFolder(url).samples]
    rows = [f"{name if is_beside else f'{url}/{name}'},{k}\n" for k, name in enumerate(names)]
    text = "file,label\n" + "".join(rows)
    Place(url).write("list.csv", text.encode())
    (tmp_path / "list.csv").write_text(text)
    csv_file = f"{url}/list.csv" if is_beside else tmp_path / "list.csv"
    for _ in range(2):
        with ImageManifest(csv_file, cache_dir=tmp_path / "cache") as dataset:
            assert list(dataset.targets) == list(range(len(names)))
            for k, (path, _) in enumerate(dataset.samples):
                assert path == f"{url}/{names[k]}"
                assert np.array_equal(
                    np.asarray(dataset[k][0]), np.asarray(Image.open(folder / names[k]))
                )


def test_a_cache_of_remote_files_is_kept_up_to_date(
    bucket: tuple[str, Path], tmp_path: Path
) -> None:
    """The next run finds the cache, and has the new pixels of files that were replaced."""

    def first() -> np.ndarray:
        with ImageFolder(bucket[0], cache_dir=tmp_path / "caches") as dataset:
            return np.asarray(dataset[0][0])

    assert np.array_equal(first(), first())
    assert len(list((tmp_path / "caches").glob("*/part0*"))) == 1
    with ImageFolder(bucket[0]) as dataset:
        name = dataset.samples[0][0].removeprefix(f"{bucket[0]}/")
    Image.fromarray(255 - first()).save(tmp_path / "new.png")
    before = first()
    Place(bucket[0]).upload(name, tmp_path / "new.png")
    assert np.array_equal(first(), 255 - before)


def test_urls_that_a_dataset_adds_to_a_listing_are_kept_up_to_date_too(
    bucket: tuple[str, Path], tmp_path: Path
) -> None:
    """A replaced file is noticed even if only the user's make_dataset lists it."""
    added = "memory://elsewhere/more.png"

    class More(ImageFolder):
        @staticmethod
        def make_dataset(*arguments: Any, **options: Any) -> list[tuple[str, int]]:
            return [*ImageFolder.make_dataset(*arguments, **options), (added, 1)]

    for level in (10, 200):
        Image.new("RGB", (6, 5), (level,) * 3).save(tmp_path / "more.png")
        Place("memory://elsewhere").upload("more.png", tmp_path / "more.png")
        with More(bucket[0], cache_dir=tmp_path / "caches") as dataset:
            assert np.asarray(dataset[-1][0]).max() == level


def test_chunks_of_remote_files(bucket: tuple[str, Path]) -> None:
    """ChunkedLoader prepares files behind a URL again in each epoch."""
    dataset = ImageFolder(
        bucket[0], lambda image: torch.from_numpy(np.asarray(image).copy()), storage="none"
    )
    with ChunkedLoader(dataset, 4, memory_limit="3GiB", num_workers=2, collate_fn=list) as loader:
        for _ in range(2):
            assert sorted(target for batch in loader for _, target in batch) == sorted(
                dataset.targets
            )


def test_a_url_is_no_dataset() -> None:
    """A URL instead of a dataset, or without files, is an error that says what to do."""
    with pytest.raises(
        FileNotFoundError, match=r"memory://none is not a cache and does not hold one"
    ):
        CachedDataset.from_cache("memory://none")


def test_a_link_among_temporary_folders_leads_nowhere(
    bucket: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of killed processes are removed, but not the target of a link with such a name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, other = tmp_path / "fastdata-remote-left", tmp_path / "other"
    for folder in (left, other):
        folder.mkdir()
        os.utime(folder, (0, 0))
    (tmp_path / "fastdata-remote-link").symlink_to(other)
    dataset = ImageFolder(bucket[0], loader=Image.open, storage="none")
    dataset[0][0].close()
    assert not left.exists()
    assert not list(other.iterdir())


def test_some_of_a_remote_folder_stay_remote(bucket: tuple[str, Path]) -> None:
    """The files of assigned samples are fetched and checked."""
    url, folder = bucket
    with ImageFolder(url) as there, ImageFolder(folder) as here:
        there.samples = there.samples[3:1:-1]
        assert np.array_equal(there[0][0], here[3][0])
    with ImageFolder(url) as there:
        there.samples = there.samples[3:1:-1]
        path = there.samples[1][0]
        Place(path).write("", b"another")
        with pytest.raises(SampleError, match="but 7 came"):
            there[1]


def test_what_was_left_out_shifts_no_sizes(bucket: tuple[str, Path]) -> None:
    """If a sample is skipped, later ones are checked with their own sizes."""
    url, _ = bucket
    Place(url).write("cat/0.jpg", b"damaged")
    with pytest.warns(FastDataWarning, match="1 of 7 samples"):
        dataset = ImageFolder(url, resize=(8, 8), on_error="skip")
    with dataset:
        assert dataset.storage_report().probed == len(dataset) == 6
