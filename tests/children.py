"""What child processes of tests run; imports nothing that a fresh interpreter could not."""

from __future__ import annotations

from typing import Any


def send_sample(dataset: Any, index: int, connection: Any) -> None:
    """Send sample ``index`` as plain values."""
    image, target = dataset[index]
    connection.send((image.tolist(), target))
    connection.close()
