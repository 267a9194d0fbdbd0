"""Servers that the tests of this folder share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdata.sources.remote import _CLIENTS
from s3 import MotoS3, ThrottledS3, s3_server, throttled_s3

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = (
    "false"  # as gcsfs is imported: its test server has no gRPC
)


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoS3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(moto: MotoS3) -> Iterator[MotoS3]:
    """Yield a writable S3 server without a bucket."""
    yield moto
    moto.clear()
    forget_clients()


@pytest.fixture
def throttled(tmp_path: Path) -> Iterator[ThrottledS3]:
    """Yield an S3 server of the folders in ``tmp_path / "s3"``; answers are fast and right until faults are planned."""
    folder = tmp_path / "s3"
    folder.mkdir()
    with throttled_s3(folder, latency_s=0.0, bandwidth=1e9) as server:
        yield server
    forget_clients()


def forget_clients() -> None:
    """Close the connections of the clients that fsspec and fastdata keep for later requests."""
    import s3fs  # which those who use no S3 may do without

    s3fs.S3FileSystem.clear_instance_cache()
    _CLIENTS.clear()
    gc.collect()
