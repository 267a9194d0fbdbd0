"""Functions that child processes of tests run; this module imports only what a fresh interpreter can."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from data import Numbers
from torchvision_ops import import_torchvision


class Done(NamedTuple):
    """The result of a process: its status and its output."""

    returncode: int | None
    stdout: str
    stderr: str


def run_elsewhere(folder: Path, call: Callable[..., Any], *arguments: Any) -> Done:
    """Call a function in a process that shares nothing with this one, in a folder."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_write_down, args=(folder, call, *arguments)
    )
    process.start()
    process.join(55)
    if process.exitcode is None:
        process.kill()
        process.join()
    written = [folder.joinpath(name).read_text() for name in ("stdout.txt", "stderr.txt")]
    done = Done(process.exitcode, *written)
    process.close()
    return done


def _write_down(folder: Path, call: Callable[..., Any], *arguments: Any) -> None:
    os.chdir(folder)
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.exit(call(*arguments))


def run_script(variables: dict[str, str], script: str, *arguments: str) -> None:
    """Run a script as ``python script`` does, with environment variables such as a launcher's for a rank."""
    os.environ.update(variables)
    tempfile.tempdir = None
    multiprocessing.set_start_method(None, force=True)  # Python's default, not this process's own
    torch.set_num_threads(1)
    import_torchvision()
    destroy = dist.destroy_process_group

    def keep_and_destroy() -> None:
        GROUPS.append(dist.group.WORLD)
        destroy()

    dist.destroy_process_group = keep_and_destroy
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


GROUPS: list[Any] = []
"""Kept until the process ends: torch's destructor of a group waits, with the GIL, for a thread that may want it."""


def launch_script(ranks: int, variables: dict[str, str], script: str, *arguments: str) -> None:
    """Run a script in ranks as ``torchrun --standalone`` does, but in forks of this process, which has torch."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    os.environ.update(variables)
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    words += ["--start-method=fork", f"--nproc-per-node={ranks}", script]
    config, _, _ = run.config_from_args(run.parse_args(words))
    elastic_launch(config, run_script)({}, script, *arguments)


def send_sample(dataset: Any, index: int, connection: Any) -> None:
    """Send sample ``index`` as plain values."""
    image, target = dataset[index]
    connection.send((image.tolist(), target))
    connection.close()


def open_noted(path: str) -> Image.Image:
    """Open an image, and note process and name two folders above its class folder.

    Where ``stop.txt`` stands there, the image that it names is an error in all processes but one, kills them, or has
    them wait until somebody has opened and closed the pipe ``gate``.
    """
    home, name = Path(path).parents[2], Path(path).name
    with (home / "read.txt").open("a") as stream:
        stream.write(f"{os.getpid()} {name}\n")
    if (home / "stop.txt").exists():
        wanted, how, parent = (home / "stop.txt").read_text().split()
        if wanted == name and os.getpid() != int(parent):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise ValueError("told to stop")
            (home / "gate").read_bytes()
    with Image.open(path) as image:
        return image.convert("RGB")


def send_class_of_target(pickled_dataset: bytes, connection: Any) -> None:
    """Send the name of the class of the first target, from a process that has not imported torchvision's tensors."""
    import_torchvision()
    for name in [name for name in sys.modules if name.startswith("torchvision.tv_tensors")]:
        del sys.modules[name]
    dataset = pickle.loads(pickled_dataset)
    connection.send(type(dataset[0][1]).__name__)
    connection.close()


class Compose:
    """A copy of torchvision's, for children that cannot import it."""

    __torchvision_equal__ = "Compose"

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class PILToTensor:
    """A copy of torchvision's, for children that cannot import it."""

    __torchvision_equal__ = "PILToTensor"

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Structures(Numbers):
    """Samples of every kind that collate functions support."""

    def __getitem__(self, index: int) -> Any:
        return {
            "tensor": torch.full((2, 3), float(index)),
            "array": np.full(2, index, np.int16),
            "pair": (index, index + 0.5),
            "point": Point(index, -index),
            "list": [index, index * index],
            "text": "x" * index,
            "bytes": b"y",
        }


class Point(NamedTuple):
    """A named tuple."""

    x: int
    y: int


class Failing(Numbers):
    """Numbers, of which the fifth raises an error."""

    def __init__(self, error: type[Exception], words: str) -> None:
        super().__init__()
        self.error, self.words = error, words

    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise self.error(self.words)
        return index


class WhoReads(Numbers):
    """Each sample describes the worker that read it: process, id, number of workers, and ``mark_worker``'s mark."""

    marks: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> tuple[int, int, int, int]:
        info = get_worker_info()
        assert info is not None
        return os.getpid(), info.id, info.num_workers, sum(self.marks)


def mark_worker(worker_id: int) -> None:
    """Leave a mark with the id of the worker; a ``worker_init_fn``."""
    WhoReads.marks.append(100 + worker_id)


def fail_in_worker(worker_id: int) -> None:
    """Raise an error; a ``worker_init_fn``."""
    raise RuntimeError(f"worker {worker_id} has no data")


class Draws(Numbers):
    """Each sample is a draw from each global generator, and the seed of its worker."""

    def __getitem__(self, index: int) -> tuple[float, float, float, int]:
        info = get_worker_info()
        assert info is not None
        return torch.rand(()).item(), random.random(), float(np.random.rand()), info.seed


class Waiting(Numbers):
    """Numbers, of which the first is read once ``release`` is set."""

    def __init__(self, release: Any) -> None:
        super().__init__(4)
        self.release = release

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.release.wait(30)
        return index


class Stream(IterableDataset[int]):
    """Numbers, split over the workers as in torch's documentation; the stated length may be wrong."""

    def __init__(self, length: int = 13) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, 13, step))
