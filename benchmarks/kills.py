"""Does anything hang or stay behind when ranks are killed at random moments?

A launcher starts ranks that prepare a dataset together and read it with worker processes. At a random moment SIGKILL
kills the rank that prepares, another rank, all ranks, the launcher, or a worker. The other processes must end within
ten seconds, with success or with an error, and no process or shared memory may be left.

python benchmarks/kills.py [--trials 300] [--ranks 3] [--seed 0]
"""

import argparse
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

from fastdata import CachedDataset, DataLoader

FORK = multiprocessing.get_context("fork")
LONGEST_S = 10.0
SPAN_S = 1.6
VICTIMS = ("first rank", "another rank", "all ranks", "launcher", "worker")


class Slow(Dataset[Any]):
    """Samples of 64 KiB that take a millisecond each."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.001)
        return torch.full((64, 32, 32), range(600)[index] % 251, dtype=torch.uint8), index


def rank(number: int, count: int, fill: str, marker: str) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": marker,
    }
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    storage = "compressed" if fill == "compressed" else "shared"
    with CachedDataset(Slow(), prepare_workers=4, storage=storage, codec="lz4") as dataset:
        loader = DataLoader(
            dataset,
            batch_size=20,
            shuffle=True,
            num_workers=2,
            workers="process",
            distributed="auto",
        )
        for _ in range(4):
            for images, targets in loader:
                if not (images[:, 0, 0, 0] == targets % 251).all():
                    os._exit(77)


def launch(count: int, fill: str, marker: str) -> None:
    ranks = [FORK.Process(target=rank, args=(k, count, fill, marker)) for k in range(count)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()


def family(marker: str) -> list[psutil.Process]:
    """Return all living processes of a trial, also those whose parent has ended."""
    group = int(marker)
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


def shared_memory_bytes() -> int:
    return 1024 * int(
        re.findall(r"^Shmem:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)[0]
    )


def choose_victims(
    drawn: random.Random, launcher: psutil.Process, kind: str
) -> list[psutil.Process]:
    ranks = launcher.children()
    if kind == "launcher" or not ranks:
        return [launcher]
    if kind == "worker":
        workers = [worker for each in ranks for worker in each.children()]
        return [drawn.choice(workers)] if workers else [ranks[-1]]
    return ranks if kind == "all ranks" else ranks[:1] if kind == "first rank" else ranks[1:2]


def trial(drawn: random.Random, number: int, count: int) -> str:
    """Run one trial; return the victim, and ``"clean"`` or what was left behind."""
    kind, fill, before = (
        VICTIMS[number % len(VICTIMS)],
        drawn.choice(("raw", "compressed")),
        shared_memory_bytes(),
    )
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        launch(count, fill, str(os.getpid()))
        os._exit(0)
    time.sleep(drawn.uniform(0.02, SPAN_S))
    try:
        for victim in choose_victims(drawn, psutil.Process(pid), kind):
            victim.send_signal(signal.SIGKILL)
    except psutil.Error:
        kind = "no process"  # all had ended already
    begun, problems = time.monotonic(), []
    while family(str(pid)) and time.monotonic() - begun < LONGEST_S:
        time.sleep(0.02)
    if left := family(str(pid)):
        problems.append(
            f"{len(left)} processes after {LONGEST_S:.0f} s: {[' '.join(it.cmdline())[:60] for it in left]}"
        )
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    deadline = time.monotonic() + 2
    while shared_memory_bytes() > before + (8 << 20) and time.monotonic() < deadline:
        time.sleep(0.02)
    if shared_memory_bytes() > before + (8 << 20):
        problems.append(f"{(shared_memory_bytes() - before) >> 20} MiB of shared memory")
    return f"{kind}: {'; '.join(problems) or 'clean'}, {'ended' if status == 0 else 'killed'}"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--trials", type=int, default=300, help="number of trials")
    options.add_argument("--ranks", type=int, default=3, help="number of ranks of each trial")
    options.add_argument("--seed", type=int, default=0, help="seed of moments and victims")
    chosen = options.parse_args()
    drawn, begun = random.Random(chosen.seed), time.monotonic()
    outcomes: Counter[str] = Counter()
    for number in range(chosen.trials):
        outcomes[outcome := trial(drawn, number, chosen.ranks)] += 1
        print(
            f"{number + 1} of {chosen.trials}, {time.monotonic() - begun:.0f} s: {outcome}",
            file=sys.stderr,
        )
    for outcome, times in sorted(outcomes.items()):
        print(f"{times:5d}  {outcome}")
    print(f"{chosen.trials} trials in {time.monotonic() - begun:.0f} s")
    if any("clean" not in outcome for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
