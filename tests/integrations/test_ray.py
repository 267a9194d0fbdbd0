"""Caches built by a Ray cluster whose nodes and driver are killed; ``ray_run.py`` runs the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("ray")
SCRIPT = Path(__file__).parent / "ray_run.py"


@pytest.mark.timeout(340)
@pytest.mark.parametrize("what", ["node", "driver"])
def test_whatever_is_killed_the_cache_is_right(
    image_folder: Callable[..., Path], what: str
) -> None:
    """The cache equals a local build byte for byte: the other node, or the next driver, runs the lost tasks."""
    home = image_folder(classes=("a",), per_class=12, size=(12, 10)).parent
    command = [sys.executable, str(SCRIPT), what, str(home)]
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=320, check=False
    )
    assert done.returncode == 0, done.stderr
