"""Ranks: how they are found, how those of a machine meet, prepare once and share one copy, and what they leave."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastdata import CachedDataset, FastDataWarning, ImageFolder
from fastdata.errors import SampleError
from fastdata.machine import ranks
from fastdata.machine.ranks import Rank, find_rank, find_run, local_ranks
from fresh import Interpreters

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="ranks meet on Linux only"
)

FORK = multiprocessing.get_context("fork")
WAIT_S = 60
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name
        for name in os.environ
        if name in LAUNCHERS or name.startswith(("TORCHELASTIC_", "OMPI_"))
    ]:
        monkeypatch.delenv(name)


class Numbered(Dataset[Any]):
    """Images of 6 x 5 pixels whose values tell their index; notes in a file who read which.

    Workers that prepare wait at their first sample for as long as there is a file of the log's name and ".hold".
    """

    def __init__(
        self, length: int, log: Path, *, ragged: bool = False, broken: tuple[int, ...] = ()
    ) -> None:
        self.length, self.log, self.ragged, self.broken = length, log, ragged, broken
        self.hold = Path(f"{log}.hold")
        log.touch()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        is_worker = multiprocessing.current_process().name == "fastdata-ingest"
        with self.log.open("a") as file:
            file.write(f"{os.environ.get('RANK')} {index} {is_worker:d}\n")
        while is_worker and self.hold.exists():
            time.sleep(0.01)
        if index in self.broken:
            raise OSError("no such luck")
        return torch.full(
            (3, 6 + (index % 3 if self.ragged else 0), 5), index % 251, dtype=torch.uint8
        ), index

    def reads(self) -> list[tuple[str, int]]:
        """Return rank and index of each sample that was read to be stored."""
        lines = map(str.split, self.log.read_text().splitlines())
        return [(who, int(index)) for who, index, is_worker in lines if is_worker == "1"]

    def wait_for_workers_of(self, *ranks: str) -> None:
        while {who for who, _ in self.reads()} < set(ranks):
            time.sleep(0.01)


class Ranks:
    """Forked processes that are the ranks of one run. Each runs a function and sends its result."""

    def __init__(self, count: int, work: Callable[[int, Any], Any], *, run: str = "1") -> None:
        self.pipes, self.processes = [], []
        for rank in range(count):
            mine, theirs = FORK.Pipe()
            self.processes.append(
                FORK.Process(target=_be_rank, args=(rank, count, run, work, theirs))
            )
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(mine)

    def receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(WAIT_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def receive_all(self) -> list[Any]:
        return [self.receive(rank) for rank in range(len(self.pipes))]

    def send_all(self, value: Any) -> None:
        for pipe in self.pipes:
            pipe.send(value)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.join(WAIT_S if kind is None else 0)
            process.kill()
            process.join()
            process.close()


def _be_rank(rank: int, count: int, run: str, work: Callable[[int, Any], Any], pipe: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": run,
    }
    torch.set_num_threads(1)
    try:
        pipe.send(work(rank, pipe))
    except Exception as error:  # noqa: BLE001  # for the test to look at
        pipe.send(error)


def made(dataset: CachedDataset) -> dict[str, Any]:
    """Return the samples of a dataset, and the address of their memory."""
    assert dataset.reader().kept is not None
    store = dataset.reader().kept.stores[0]
    return {
        "samples": [int(image.reshape(-1)[0]) for image, _ in dataset],
        "shapes": {tuple(image.shape) for image, _ in dataset},
        "targets": [int(target) for _, target in dataset],
        "inodes": [os.fstat(file.fd).st_ino for file in store.files],
        "reason": dataset.storage_plan.reason,
        "skipped": [error.index for error in dataset.skipped],
    }


def showing(source: Any, **options: Any) -> Callable[[int, Any], Any]:
    """Return a function that makes a dataset, reports this, and shows it once all have attached."""

    def work(rank: int, pipe: Any) -> Any:
        with CachedDataset(source, **options) as dataset:
            pipe.send("made")
            pipe.recv()
            return made(dataset)

    return work


def expected(length: int) -> dict[str, Any]:
    return {"samples": [index % 251 for index in range(length)], "targets": list(range(length))}


@pytest.mark.parametrize(
    "options", [{}, {"storage": "compressed", "codec": "zstd"}], ids=["shared", "zstd"]
)
@pytest.mark.parametrize("ragged", [False, True])
def test_one_rank_prepares_and_all_hold_one_copy(
    tmp_path: Path, options: dict[str, Any], ragged: bool
) -> None:
    """One of three ranks reads every sample once, and all read it from the same memory."""
    source = Numbered(400, tmp_path / "log", ragged=ragged)

    work = showing(source, prepare_workers=3, **options)

    with Ranks(3, work) as run:
        assert run.receive_all() == ["made"] * 3
        run.send_all("go")
        found = run.receive_all()
    assert all({**each, **expected(400)} == each for each in found)
    assert len({tuple(each["inodes"]) for each in found}) == 1
    assert sum("one copy for the ranks of this machine" in each["reason"] for each in found) == 2
    read = [index for _, index in source.reads()]
    assert set(read) == set(range(400))
    # Begun anew when their shapes are found to differ.
    assert len(read) == 400 or (ragged and len(read) < 800)


def test_the_first_rank_prepares_on_the_cores_of_all(tmp_path: Path) -> None:
    """Ranks that are bound to their own cores wait for one that uses all cores of the job, and stay bound."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")

    class Cores(Numbered):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            sample, _ = super().__getitem__(index)
            return sample, len(os.sched_getaffinity(0))

    source = Cores(100, tmp_path / "log")

    def work(rank: int, pipe: Any) -> Any:
        os.sched_setaffinity(0, {sorted(cores)[rank]})
        with CachedDataset(source) as dataset:
            pipe.send("made")
            pipe.recv()
            return made(dataset)["targets"], len(os.sched_getaffinity(0))

    with Ranks(2, work) as run:
        assert run.receive_all() == ["made"] * 2
        run.send_all("go")
        assert run.receive_all() == [([len(cores)] * 100, 1)] * 2


def test_a_sample_that_one_rank_reads_is_there_for_all(images: Path) -> None:
    """Its file is read only once."""

    def work(rank: int, pipe: Any) -> Any:
        with ImageFolder(images, np.asarray, resize=(8, 8)) as dataset:
            pipe.send("made")
            pipe.recv()
            found = [np.asarray(dataset[index][0]).tolist() for index in range(len(dataset))]
            for path, _ in dataset.samples:
                Path(path).unlink(missing_ok=True)
            pipe.send(dataset.filled_share())
            pipe.recv()
            return found

    with Ranks(2, work) as run:
        assert run.receive_all() == ["made"] * 2
        run.pipes[0].send("go")
        assert run.receive(0) == 1.0
        run.pipes[1].send("go")
        assert run.receive(1) == 1.0
        run.send_all("go")
        first, second = run.receive_all()
    assert first == second


def test_ranks_read_with_their_own_storage_options(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of the leader come without storage_options, which may be secret."""
    from fsspec.implementations.memory import MemoryFileSystem

    read = MemoryFileSystem.cat_file

    def cat_file(self: Any, *arguments: Any, **options: Any) -> bytes:
        if self.storage_options != {"token": "secret"}:
            raise PermissionError("no token")
        return read(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    MemoryFileSystem().put(str(images), "/ranks", recursive=True)

    def work(rank: int, pipe: Any) -> Any:
        url, options = "memory://ranks", {"token": "secret"}
        with ImageFolder(url, np.asarray, resize=(8, 8), storage_options=options) as dataset:
            pipe.send("made")
            pipe.recv()
            return [int(dataset[index][0].max()) for index in range(rank, len(dataset), 2)]

    with Ranks(2, work) as run:
        assert run.receive_all() == ["made"] * 2
        run.send_all("go")
        first, second = run.receive_all()
    assert sorted(first + second) == list(range(12))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    from PIL import Image

    for index in range(12):
        folder = tmp_path / "images" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5), (index, 0, 0)).save(folder / f"{index}.png")
    return tmp_path / "images"


def test_a_rank_outlives_the_one_that_prepared(tmp_path: Path) -> None:
    """A follower continues after its leader was killed, and a rank that comes later prepares again."""
    source = Numbered(100, tmp_path / "log")

    def work(rank: int, pipe: Any) -> Any:
        pipe.recv()
        with CachedDataset(source) as dataset:
            pipe.send("made")
            pipe.recv()
            return made(dataset)

    with Ranks(3, work) as run:
        for rank in (0, 1):
            run.pipes[rank].send("make")
            assert run.receive(rank) == "made"
        run.processes[0].kill()
        run.processes[0].join()
        before = len(source.reads())
        run.pipes[2].send("make")
        assert run.receive(2) == "made"
        assert len(source.reads()) - before >= 100
        for rank in (1, 2):
            run.pipes[rank].send("go")
        one, two = run.receive(1), run.receive(2)
    assert {**one, **expected(100)} == one
    assert {**two, **expected(100)} == two
    assert one["inodes"] != two["inodes"]


def test_another_rank_prepares_when_the_first_is_killed(tmp_path: Path) -> None:
    """One of the waiting ranks takes its place, and the others get that rank's samples."""
    source = Numbered(300, tmp_path / "log")
    source.hold.touch()

    def work(rank: int, pipe: Any) -> Any:
        if rank:
            pipe.recv()
            pipe.send("comes")
        with CachedDataset(source, prepare_workers=4) as dataset:
            pipe.send("made")
            pipe.recv()
            return made(dataset)

    with Ranks(3, work) as run:
        source.wait_for_workers_of("0")
        for rank in (1, 2):
            run.pipes[rank].send("come")
            run.receive(rank)
        while not all(waits_for_a_lock(process.pid) for process in run.processes[1:]):
            time.sleep(0.01)
        os.kill(run.processes[0].pid, signal.SIGKILL)
        source.hold.unlink()
        for rank in (1, 2):
            assert run.receive(rank) == "made"
        for rank in (1, 2):
            run.pipes[rank].send("go")
        one, two = run.receive(1), run.receive(2)
    assert {**one, **expected(300)} == one
    assert one["inodes"] == two["inodes"]


def waits_for_a_lock(pid: int | None) -> bool:
    lines = map(str.split, Path("/proc/locks").read_text().splitlines())
    return any(words[1] == "->" and words[5] == str(pid) for words in lines)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_damaged_sample_is_an_error_on_every_rank(tmp_path: Path, on_error: Any) -> None:
    """All ranks raise the same error, or leave out the same samples."""
    source = Numbered(300, tmp_path / "log", broken=(77, 177))
    source.hold.touch()

    def work(rank: int, pipe: Any) -> Any:
        warnings.simplefilter("ignore")  # of samples left out
        with CachedDataset(source, prepare_workers=4, on_error=on_error) as dataset:
            pipe.send("made")
            pipe.recv()
            return made(dataset)

    with Ranks(3, work) as run:
        while not source.reads():
            time.sleep(0.01)
        source.hold.unlink()
        found = run.receive_all()
        if on_error == "skip":
            run.send_all("go")
            found = run.receive_all()
    if on_error == "skip":
        assert [each["skipped"] for each in found] == [[77, 177]] * 3
        assert [len(each["targets"]) for each in found] == [298] * 3
    else:
        assert {type(error) for error in found} == {SampleError}
        assert {error.index for error in found} <= {77, 177}


def test_datasets_that_differ_are_not_shared(tmp_path: Path) -> None:
    """Ranks that cache different parts of the data keep their own parts, also parts of equal length."""

    class Part(Dataset[Any]):
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full(
                (3, 6, 5), self.first + range(40)[index], dtype=torch.uint8
            ), self.first

    def work(rank: int, pipe: Any) -> Any:
        with CachedDataset(Part(100 * rank)) as dataset:
            pipe.send("made")
            pipe.recv()
            return made(dataset)

    with Ranks(2, work) as run:
        run.receive_all()
        run.send_all("go")
        found = run.receive_all()
    assert [each["samples"][0] for each in found] == [0, 100]
    assert found[0]["inodes"] != found[1]["inodes"]


def test_ranks_of_two_runs_do_not_meet(tmp_path: Path) -> None:
    """In two runs that differ only in their port, each process has its own memory."""
    source = Numbered(40, tmp_path / "log")

    def work(rank: int, pipe: Any) -> Any:
        os.environ |= {"MASTER_PORT": "12"[rank]}
        with CachedDataset(source) as dataset:
            pipe.send("made")
            pipe.recv()
            return made(dataset)

    with Ranks(2, work) as run:
        run.receive_all()
        run.send_all("go")
        found = run.receive_all()
    assert found[0]["inodes"] != found[1]["inodes"]
    assert not any("one copy" in each["reason"] for each in found)


@pytest.fixture(autouse=True)
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which ranks meet."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("told", [b"12", b"12 0\n", b"12 0\n\x80\x05\x95"])
def test_a_leader_killed_while_publishing_is_replaced(told: bytes, meeting: Path) -> None:
    """A leader that is killed while it publishes causes no error in the next rank, which prepares again."""
    leader = ranks.lead_or_follow("run", "key", ())
    assert isinstance(leader, ranks.Leader)
    [path] = files_in(meeting)
    leader.close()
    path.write_bytes(told)
    with contextlib.closing(ranks.lead_or_follow("run", "key", ())) as again:  # type: ignore[type-var]
        assert isinstance(again, ranks.Leader)


def test_a_rank_that_came_as_the_leader_left_meets_the_next_one(
    meeting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that gets the lock of a removed file does not lead, but meets the others at a new file."""
    plain = ranks.fcntl.flock
    leaders: Any = [ranks.lead_or_follow("run", "key", ())]

    def flock(file: Any, how: int) -> None:
        if how == ranks.fcntl.LOCK_EX:
            if len(leaders) == 1:  # this rank has opened the file of the leader, who leaves now
                leaders[0].close()
                leaders.append(lead_with(plain))
            else:  # this rank waits for the next one
                leaders[1].publish("prepared", ())
        plain(file, how)

    def lead_with(flock: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(ranks.fcntl, "flock", flock)
            return ranks.lead_or_follow("run", "key", ())

    found = lead_with(flock)
    assert isinstance(leaders[1], ranks.Leader)
    leaders[1].close()
    assert isinstance(found, ranks.Follower)
    assert found.value == "prepared"


def test_no_meeting_outlives_its_dataset(tmp_path: Path, meeting: Path) -> None:
    """The file is removed when the dataset is closed, even if forked workers exist; otherwise by the next rank."""
    source = Numbered(40, tmp_path / "log")

    def work(rank: int, pipe: Any) -> Any:
        if rank:
            return None
        one, other = (CachedDataset(source) for _ in range(2))
        during = len(files_in(meeting))
        is_up = FORK.Event()
        child = FORK.Process(target=lambda: (is_up.set(), time.sleep(60)))
        child.start()
        is_up.wait()
        one.close()
        after = len(files_in(meeting))
        child.kill()
        child.join()
        pipe.send((during, after))
        assert len(other) == 40  # and open
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):
        with Ranks(2, work) as run:
            assert run.receive(0) == (2, 1)
            run.processes[0].join()
    assert len(files_in(meeting)) == 1
    (folder,) = {path.parent for path in files_in(meeting)}
    assert folder.stat().st_mode & 0o777 == 0o700


PARENT = """
import os, subprocess, sys
sys.modules["lightning_fabric"] = sys
from fastdata import ImageFolder
dataset = ImageFolder(sys.argv[1]).prepare()
inode = os.fstat(dataset.reader().kept.stores[0].files[0].fd).st_ino
ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
command = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
found = subprocess.run(command, env=os.environ | ranks, capture_output=True, text=True)
print(found.stderr, found.stdout.split() == [str(inode), "parent"], found.stdout)
"""
CHILD = """
import os, sys
from fastdata import ImageFolder
dataset = ImageFolder(sys.argv[1]).prepare()
inode = os.fstat(dataset.reader().kept.stores[0].files[0].fd).st_ino
print(inode, "parent" if f"prepared with rank 0 (process {os.getppid()})" in dataset.storage_plan.reason else "own")
"""


def test_ranks_that_a_rank_starts_share_what_it_has_prepared(
    images: Path, fresh: Interpreters
) -> None:
    """As with Lightning, the first rank makes the dataset before it starts the others, which attach to it."""
    found = fresh.run(PARENT, str(images), CHILD)
    assert found.stdout.split()[0] == "True", found.stdout + found.stderr


@pytest.mark.parametrize("kind", ["open", "link", "no locks"])
def test_ranks_that_cannot_meet_warn(tmp_path: Path, meeting: Path, kind: str) -> None:
    """In a folder that others may write to, or without locks, each rank has its own samples, with a warning."""
    folder = meeting / f"fastdata-{os.getuid()}"
    if kind == "open":
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
    elif kind == "link":
        folder.symlink_to(tmp_path)

    def work(rank: int, pipe: Any) -> Any:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        if kind == "no locks":
            ranks.fcntl.flock = refuse  # of this forked process
        with pytest.warns(
            FastDataWarning, match="cannot share samples .* each prepares and holds its own copy"
        ):
            dataset = CachedDataset(Numbered(40, tmp_path / f"log{rank}"))
        with dataset:
            return made(dataset)

    with Ranks(2, work) as run:
        found = run.receive_all()
    assert all({**each, **expected(40)} == each for each in found), found


ENVIRONMENTS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MPICH": {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
    "srun": {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
}


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=list(ENVIRONMENTS))
def test_rank_comes_from_the_launcher(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of torchrun, mpirun and srun give the rank, their number, and that on this machine."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_rank() == Rank(1, 4)
    assert local_ranks() == 2


def test_an_empty_number_of_ranks_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set to an empty string, as compose files do, is ignored."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert local_ranks() == 1


RUNS = {
    "torchrun, restarted": ("TORCHELASTIC_RESTART_COUNT", "0", "1"),
    "Open MPI": ("PMIX_NAMESPACE", "prterun-host-12@1", "prterun-host-34@1"),
    "srun": ("SLURM_STEP_ID", "0", "1"),
    "by hand": ("MASTER_PORT", "29500", "29501"),
}


@pytest.mark.parametrize(("name", "value", "other"), RUNS.values(), ids=list(RUNS))
def test_ranks_of_one_run_know_it_and_no_other(
    name: str, value: str, other: str, monkeypatch: Any
) -> None:
    """The launcher's variables distinguish a run from a second one and from a restarted one."""
    runs = []
    for rank, text in ((0, value), (1, value), (1, other)):
        settings = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "1", "SLURM_JOB_ID": "7"}
        for each, setting in {**settings, name: text}.items():
            monkeypatch.setenv(each, setting)
        runs.append(find_run())
    first, second, third = runs
    assert first is not None
    assert first == second != third


def test_batch_script_of_slurm_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of sbatch for a job of many tasks is alone, because srun has not started it."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert find_rank() == Rank(0, 1)
    assert find_run() is None


def test_given_rank_is_checked() -> None:
    """A rank that is not below the world size is refused with both numbers."""
    assert find_rank(1, 3) == Rank(1, 3)
    with pytest.raises(ValueError, match="rank=3 is not one of the world_size=3 ranks"):
        find_rank(3, 3)


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("cache_key", [None, "data"])
def test_datasets_that_differ_in_one_sample_are_not_shared(
    is_seen: bool, cache_key: str | None
) -> None:
    """They share only with an equal ``cache_key``, and so do datasets that only C code can tell apart."""

    class Held(Dataset[Any]):
        def __init__(self, last: int, handle: Any) -> None:
            self.levels, self.handle = [*range(199), last], handle

        def __len__(self) -> int:
            return 150

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            level = self.levels[199 if range(150)[index] == 101 else range(150)[index]]
            return torch.full((3, 6, 5), level, dtype=torch.uint8), 0

    def work(rank: int, pipe: Any) -> Any:
        with contextlib.ExitStack() as cleanup:
            handle = None if is_seen else cleanup.enter_context(socket.socket())
            data = Held(254 + rank if is_seen and cache_key is None else 255, handle)
            warned = cleanup.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            dataset = CachedDataset(data, cache_key=cache_key, prepare_workers=1)
            pipe.send("made")
            pipe.recv()
            found = (
                int(dataset[101][0].max()),
                made(dataset)["inodes"],
                [str(each.message) for each in warned],
            )
            dataset.close()
            return found

    with Ranks(2, work) as run:
        run.receive_all()
        run.send_all("go")
        (level, inodes, warned), (other_level, other_inodes, _) = run.receive_all()
    assert (inodes == other_inodes) == (cache_key is not None)
    assert (level, other_level) == ((254, 255) if is_seen and cache_key is None else (255, 255))
    assert len(warned) == (not is_seen and cache_key is None)
    assert all("socket.socket" in each and "cache_key=" in each for each in warned)


def test_datasets_that_only_their_steps_tell_apart_are_not_shared(images: Path) -> None:
    """Each rank gets the samples of its own steps, even if the probed samples are equal."""
    from PIL import Image

    # The only one that the bound changes, never looked at.
    Image.new("RGB", (40, 30)).save(images / "class0" / "2.png")

    def work(rank: int, pipe: Any) -> Any:
        with ImageFolder(
            images,
            resize="long:10" if rank else None,
        ).prepare() as dataset:
            pipe.send("made")
            pipe.recv()
            return [dataset[index][0].size for index in range(len(dataset))]

    with Ranks(2, work) as run:
        run.receive_all()
        run.send_all("go")
        whole, bounded = run.receive_all()
    assert (40, 30) in whole
    assert (40, 30) not in bounded


def test_two_datasets_of_one_rank_have_their_own_memory(images: Path) -> None:
    """The second dataset of a rank meets the second of another; POSIX locks would not separate two in one process."""

    def work(rank: int, pipe: Any) -> Any:
        one, two = (ImageFolder(images, np.asarray, resize=(8, 8)) for _ in range(2))
        with one, two:
            pipe.send("made")
            pipe.recv()
            return [os.fstat(it.reader().kept.stores[0].files[0].fd).st_ino for it in (one, two)]

    with Ranks(2, work) as run:
        run.receive_all()
        run.send_all("go")
        first, second = run.receive_all()
    assert first == second
    assert len(set(first)) == 2


def test_a_view_whose_transform_is_replaced_keeps_the_others_table(images: Path) -> None:
    """Preparing one view again, also on a follower, does not change paths and targets of the dataset."""

    def work(rank: int, pipe: Any) -> Any:
        with ImageFolder(images, transform=Crop((4, 4))) as dataset:
            view = dataset.with_transform(None)
            view.transform = Crop((2, 2))
            pipe.send("made")
            pipe.recv()
            found = dataset.samples[3][1], dataset[3][1], view[3][1], view[3][0].size
            view.close()
            return *found, dataset[3][1]

    with Ranks(2, work) as run:
        run.receive_all()
        run.send_all("go")
        assert run.receive_all() == [(0, 0, 0, (2, 2), 0)] * 2


class Crop:
    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        return image.crop((0, 0, *self.size))


def test_targets_that_numpy_does_not_know_are_no_obstacle(tmp_path: Path) -> None:
    """bfloat16 targets are shared and stored, as without a launcher."""
    pairs = [
        (torch.full((3, 6, 5), k, dtype=torch.uint8), torch.tensor(k, dtype=torch.bfloat16))
        for k in range(40)
    ]

    with Ranks(2, showing(pairs)) as run:
        run.receive_all()
        run.send_all("go")
        host, guest = run.receive_all()
    assert host["inodes"] == guest["inodes"]
    assert guest["targets"] == list(range(40))
