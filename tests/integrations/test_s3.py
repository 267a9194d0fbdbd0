"""The S3 servers that other tests rely on."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import s3fs

from s3 import FaultPlan, MotoS3, ThrottledS3


def test_moto_keeps_objects(s3: MotoS3) -> None:
    """s3fs finds an object under its key after it was put."""
    s3.make_bucket("bucket")
    s3.put("bucket", "folder/key", b"bytes")
    files = s3fs.S3FileSystem(**s3.storage_options)
    assert files.cat_file("bucket/folder/key", start=1) == b"ytes"
    assert files.find("bucket") == ["bucket/folder/key"]


def test_moto_is_empty_at_first(s3: MotoS3) -> None:
    """Objects of another test are gone."""
    assert s3fs.S3FileSystem(**s3.storage_options).ls("") == []


def test_a_folder_is_listed_in_pages(throttled: ThrottledS3, tmp_path: Path) -> None:
    """More keys than a page holds are all found, in order; a missing key is not found."""
    keys = [f"bucket/folder/{index:04} &.bin" for index in range(1001)]
    (tmp_path / "s3/bucket/folder").mkdir(parents=True)
    for key in keys:
        (tmp_path / "s3" / key).write_bytes(key.encode())
    files = s3fs.S3FileSystem(**throttled.storage_options)
    assert files.find("bucket") == keys
    assert files.ls("bucket") == ["bucket/folder"]
    assert files.cat_file(keys[7], start=-9, end=None) == b"0007 &.bin"[-9:]
    assert not files.exists("bucket/none")
    assert throttled.stats().bytes_of == {keys[7]: 9}


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("error", b"InternalError"),
        ("slow_down", b"SlowDown"),
        ("expired", b"ExpiredToken"),
        ("reset", ConnectionResetError),
        ("stall", TimeoutError),
        ("cut", IncompleteRead),
        ("short", b"0123"),
        ("corrupted", b"01235567"),
        ("changed", bytes(255 - byte for byte in b"01234567")),
        ("resized", bytes(255 - byte for byte in b"0123456")),
    ],
)
def test_a_fault_reaches_the_client(
    throttled: ThrottledS3, tmp_path: Path, kind: str, outcome: bytes | type[Exception]
) -> None:
    """Each planned fault is an error or wrong bytes; after it the right bytes come again."""
    (tmp_path / "s3/bucket").mkdir()
    (tmp_path / "s3/bucket/key").write_bytes(b"01234567")
    throttled.set_faults(FaultPlan(rate=1, kinds=(kind,), within="bucket/key", attempts=1))
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            get(throttled, "bucket/key", timeout_s=0.5 if outcome is TimeoutError else 60)
    else:
        assert outcome in get(throttled, "bucket/key")
    assert throttled.stats().faults == {kind: 1}
    assert get(throttled, "bucket/key") == b"01234567"


def get(server: ThrottledS3, name: str, timeout_s: float = 60) -> bytes:
    with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=timeout_s)) as connection:
        connection.request("GET", f"/{name}")
        with connection.getresponse() as answer:
            return answer.read()
