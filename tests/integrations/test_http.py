"""Folders, tars and caches behind an ordinary HTTP server, read by fsspec's own client."""

from __future__ import annotations

import functools
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdata import CachedDataset
from fastdata.errors import RemoteError
from fastdata.sources.remote import _CLIENTS

pytest.importorskip("aiohttp")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files with ranges and sizes, unless the server ``lacks`` these; any request may be refused."""

    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.server.refusal:
            return self.send_error(self.server.refusal)
        if path.is_dir():
            return super().do_GET() if self.command == "GET" else super().do_HEAD()
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        size = len(data)
        lacks = self.server.lacks
        asked = self.headers.get("Range") if "ranges" not in lacks else None
        self.send_response(206 if asked else 200)
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last or size - 1) + 1]
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{size}")
        if "sizes" not in lacks:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
        return None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a server of the folder ``www``, which holds a cache and a tar."""
    monkeypatch.setattr("fastdata.sources.remote._PAUSE_S", 0.001)
    root = tmp_path / "www"
    samples = [(np.full((3, 4, 5), k, np.uint8), k) for k in range(4)]
    CachedDataset(samples, cache_dir=root / "caches", cache_key="x").close()
    with tarfile.open(root / "x.tar", "w") as tar:
        for k in range(4):
            info = tarfile.TarInfo(f"{k}.npy")
            stream = io.BytesIO()
            np.save(stream, samples[k][0])
            info.size = stream.tell()
            stream.seek(0)
            tar.addfile(info, stream)
    made: Any = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(root))
    )
    made.lacks = set()
    made.refusal = 0
    made.url = f"http://127.0.0.1:{made.server_address[1]}"
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()
    _CLIENTS.clear()


def read(dataset: Any) -> list[int]:
    with dataset:
        return [int(np.asarray(dataset[k][0]).max()) for k in range(len(dataset))]


@pytest.mark.parametrize("lacking", [set(), {"sizes"}])
def test_a_cache_is_read(server: Any, tmp_path: Path, lacking: set[str]) -> None:
    """A cache can be opened by its own URL, and by that of the folder that holds it."""
    server.lacks = lacking
    (folder,) = (tmp_path / "www/caches").glob("[!.]*")
    for number, url in enumerate((f"{server.url}/caches", f"{server.url}/caches/{folder.name}")):
        local = tmp_path / f"local{number}"
        assert read(CachedDataset.from_cache(url, local_cache=local)) == [0, 1, 2, 3]


def test_a_missing_feature_of_a_server_is_named(server: Any) -> None:
    """Without ranges or sizes the error names the feature, and calls the tar neither changed nor missing."""
    columns = {"sample": "npy", "target": "__key__"}
    tar = f"{server.url}/x.tar"
    assert read(CachedDataset(tar, columns=columns)) == [0, 1, 2, 3]
    server.lacks = {"ranges"}
    with (
        CachedDataset(tar, columns=columns, storage="none") as dataset,
        pytest.raises(RemoteError, match="it ignores Range"),
    ):
        dataset[1]
    server.lacks = {"sizes"}
    with pytest.raises(RemoteError, match="cannot send the file's size"):
        CachedDataset(tar, columns=columns)


@pytest.mark.parametrize(
    ("status", "cure"), [(403, "Give valid credentials"), (503, "tried twice")]
)
def test_a_refusal_is_not_called_a_missing_file(server: Any, status: int, cure: str) -> None:
    """A refusal is not a missing file, although fsspec raises FileNotFoundError for any status but 200."""
    server.refusal = status
    with pytest.raises(RemoteError, match=rf"{status}.*{cure}"):
        CachedDataset(f"{server.url}/x.tar")
    server.refusal = 0
    with pytest.raises(FileNotFoundError, match=r"y\.tar does not exist"):
        CachedDataset(f"{server.url}/y.tar")
