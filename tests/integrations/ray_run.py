"""Caches built by a Ray cluster of two nodes with a core each, one of which is killed, or the driver; run as a script.

``ray_run.py node FOLDER`` and ``ray_run.py driver FOLDER`` need twelve images in FOLDER/images/a, four of which are a
shard; ``ray_run.py build FOLDER`` is a driver.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from children import open_noted
from fastdata import ImageFolder
from fastdata.stores.cache import INDEX

AT = "009.jpg"
"""Where a build is when something is killed."""
TIMEOUT_S = 300
SHARD = 4 * 3 * 7 * 9
"""Bytes of four images."""


def build(home: Path, engine: str) -> dict[str, bytes]:
    """Return the files of the cache's samples."""
    options = {"resize": (7, 9), "loader": open_noted, "prepare_workers": 1}
    cache = home / engine
    ImageFolder.build_cache(
        str(home / "images"), cache_dir=cache, engine=engine, shard_bytes=SHARD, **options
    ).close()
    return {path.name: path.read_bytes() for path in cache.glob("*/part*")}


def stop(home: Path, driver: int) -> None:
    (home / "stop.txt").write_text(f"{AT} wait {driver}")
    os.mkfifo(home / "gate")


def wait_for_task(home: Path, driver: int) -> int:
    """Wait until a task has reached the image, and return its process."""
    with (home / "gate").open("wb"):  # which waits for its reader
        (home / "stop.txt").unlink()
        lines = [line.split() for line in (home / "read.txt").read_text().splitlines()]
        return next(
            int(process) for process, name in lines if name == AT and int(process) != driver
        )


def give_up(*_: object) -> None:
    raise TimeoutError(f"not done in {TIMEOUT_S} s")


def kill_node(home: Path, cluster: Cluster) -> None:
    """Kill one node while it prepares: the other one runs its task again."""
    wanted = build(home, "local")
    (home / "read.txt").unlink()
    ray.init(address=cluster.address, log_to_driver=False)
    stop(home, os.getpid())
    with ThreadPoolExecutor(1) as thread:
        built = thread.submit(build, home, "ray")
        raylet = psutil.Process(wait_for_task(home, os.getpid())).ppid()
        (node,) = [
            it for it in cluster.worker_nodes if it.all_processes["raylet"][0].process.pid == raylet
        ]
        cluster.remove_node(node, allow_graceful=False)
        assert built.result() == wanted
    assert len(wanted) > 1
    tried = [
        line.split()[0]
        for line in (home / "read.txt").read_text().splitlines()
        if line.endswith(AT)
    ]
    assert len(set(tried)) >= 2


def kill_driver(home: Path, cluster: Cluster) -> None:
    """Kill the driver: there is no cache, and the next driver prepares the missing samples."""
    wanted = build(home, "local")
    (home / "read.txt").unlink()
    command, env = (
        [sys.executable, __file__, "build", str(home)],
        {**os.environ, "RAY_ADDRESS": cluster.address},
    )
    with subprocess.Popen(command, env=env) as driver:
        stop(home, driver.pid)
        task = psutil.Process(wait_for_task(home, driver.pid))
        driver.send_signal(signal.SIGKILL)
    psutil.wait_procs([task])
    assert not list(home.glob(f"ray/*/{INDEX}"))
    done = len(list(home.glob("ray/*/shard-*.npz")))
    (home / "read.txt").unlink()
    with subprocess.Popen(command, env=env) as driver:
        pass
    assert driver.returncode == 0
    lines = [line.split() for line in (home / "read.txt").read_text().splitlines()]
    read = [name for process, name in lines if int(process) != driver.pid]
    assert bool(read) == (done < len(wanted))
    built = {path.name: path.read_bytes() for path in home.glob("ray/*/part*")}
    assert built == wanted
    assert len(list(home.glob("ray/*/shard-*"))) == len(list(home.glob("ray/*/part0-*")))


def main() -> None:
    what, folder = sys.argv[1:]
    home = Path(folder)
    if what == "build":
        build(home, "ray")
        assert not ray.is_initialized()  # it has let go of the cluster
        return
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_S)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        {"node": kill_node, "driver": kill_driver}[what](home, cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
