"""Does a Ray cluster of two nodes with a core each write a cache as fast as this machine with two cores?

Both write the same shards of the same files, in turns. Ray's rate is measured twice: after the cluster's workers have
started and imported fastdata, as in a build that takes hours; and including that, as in a build that takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from _helper import (
    Row,
    class_folders,
    in_turns,
    parser,
    print_rows,
    save_rows,
    seconds_of,
    transforms,
)
from fastdata import ImageFolder

CORES = 2


@contextmanager
def cluster() -> Iterator[None]:
    """Start a Ray cluster of two nodes with one core each, and a head that runs no tasks."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(CORES):
            made.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = made.address
        ray.init(log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        made.shutdown()


def warm_up() -> None:
    """Start workers that import fastdata on each node. Needed before each build, because Ray ends idle workers."""
    import ray

    task = ray.remote(num_cpus=1)(importlib.import_module)
    ray.wait(
        [task.remote("fastdata.stores.build") for _ in range(4 * CORES)],
        num_returns=4 * CORES,
    )


def build(root: Path, work: Path, shard_size: str, engine: str) -> float:
    """Return the seconds in which a cache is written; then delete it."""
    transform = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(256)])
    cache_dir = work / engine
    options = {"prepare_workers": CORES, "shard_bytes": shard_size}
    try:
        return seconds_of(
            lambda: ImageFolder.build_cache(
                str(root), transform, cache_dir=cache_dir, engine=engine, **options
            ).close()
        )
    finally:
        shutil.rmtree(cache_dir, ignore_errors=True)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--count",
        type=int,
        default=3000,
        help="number of files; images are copied as often as needed",
    )
    options.add_argument("--shard-size", default="32MiB", help="size of the shards")
    options.add_argument("--work", type=Path, help="folder in which a temporary folder is made")
    options.add_argument(
        "--as-driver",
        action="store_true",
        help="only build --images into --work by Ray (the script calls itself with it)",
    )
    chosen = options.parse_args()
    if chosen.as_driver:
        build(chosen.images, chosen.work, chosen.shard_size, "ray")
        return
    logging.getLogger("fastdata").setLevel(logging.WARNING)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with (
        class_folders(chosen.images, count=chosen.count) as (root, words),
        tempfile.TemporaryDirectory(dir=chosen.work) as folder,
    ):
        work = Path(folder)
        alone = [sys.executable, __file__, "--as-driver", "--images", root, "--work", work]

        def by_ray() -> float:
            warm_up()
            return float(chosen.count / build(root, work, chosen.shard_size, "ray"))

        with cluster():
            rates = in_turns(
                {
                    "local": lambda: chosen.count / build(root, work, chosen.shard_size, "local"),
                    "ray": by_ray,
                    # a new driver starts new workers
                    "started": lambda: (
                        chosen.count
                        / seconds_of(partial(subprocess.run, [*map(str, alone)], check=True))
                    ),
                },
                chosen.rounds,
            )
    row = partial(
        Row, section=f"writing shards of {chosen.shard_size}, {words}, to 256x256", unit="images/s"
    )
    against = "local engine, two cores"
    rows = [
        row(name=against, rounds=rates["local"]),
        row(name="Ray, two nodes of one core", rounds=rates["ray"], against=against, target="0.9"),
        row(
            name="the same, with the start of the driver and of workers",
            rounds=rates["started"],
            against=against,
        ),
    ]
    print_rows(rows)
    save_rows(rows, chosen.json, ray=importlib.metadata.version("ray"), load=os.getloadavg())


if __name__ == "__main__":
    main()
