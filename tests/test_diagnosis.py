"""What limits a training loop, and that looking for it disturbs nothing."""

from __future__ import annotations

import multiprocessing
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import fastdata
from data import Stream
from fastdata import CachedDataset, CudaPrefetcher
from fastdata.tools.diagnose import Diagnosis, Part, TimedLoop, diagnose, run_script
from simcuda import Sim

LONG_S = 0.01


@pytest.fixture(autouse=True)
def short_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdata.tools.diagnose._RATE_S", 0.1)
    monkeypatch.setattr("fastdata.tools.diagnose._SAMPLES_S", 0.1)
    # No case but one is about too few workers.
    monkeypatch.setattr("fastdata.tools.diagnose.usable_cores", lambda: 1)


def burn(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


class Samples(Dataset[Any]):
    def __init__(
        self,
        read: Callable[[], None] = lambda: None,
        transform: Callable[[Any], Any] | None = None,
        count: int = 24,
    ) -> None:
        self.read, self.transform, self.count = read, transform, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read()
        sample = torch.full((3, 4, 5), index, dtype=torch.uint8)
        return (sample if self.transform is None else self.transform(sample)), index


def slow_transform(sample: torch.Tensor) -> torch.Tensor:
    time.sleep(LONG_S)
    return sample


def slow_collate(samples: list[Any]) -> Any:
    time.sleep(4 * LONG_S)
    return default_collate(samples)


def case(name: str) -> tuple[Any, Callable[[Any], None]]:
    """A loader and a step, limited by what the name says; all but decoding sleep, which no load makes longer."""
    loader = partial(DataLoader, batch_size=2, num_workers=1)
    cases: dict[str, Callable[[], Any]] = {
        "model": lambda: loader(Samples()),
        "decode": lambda: loader(Samples(partial(burn, LONG_S))),
        "disk": lambda: loader(Samples(partial(time.sleep, LONG_S))),
        "transform": lambda: loader(Samples(transform=slow_transform)),
        "collate": lambda: loader(Samples(), collate_fn=slow_collate),
        "workers": lambda: loader(Samples(partial(burn, LONG_S)), num_workers=0),
        "host-to-device": lambda: CudaPrefetcher(loader(Samples()), "cuda:0"),
    }
    return cases[name](), lambda batch: time.sleep(20 * LONG_S * (name == "model"))


@pytest.mark.parametrize(
    "limit", ["model", "host-to-device", "decode", "disk", "transform", "collate", "workers"]
)
def test_the_limit_is_named(limit: str) -> None:
    """In loops that are slow for different reasons, the slow part is reported as the limit."""
    gpu = Sim()
    gpu.on_copy = partial(time.sleep, 4 * LONG_S)
    with gpu.installed() if limit == "host-to-device" else nullcontext():
        loader, step = case(limit)
        found = diagnose(loader, step)
        if isinstance(loader, CudaPrefetcher):
            loader.close()
    assert found.limit == limit, found


BASE = Diagnosis(
    batches=9,
    batch_size=10,
    wait_s=0.09,
    step_s=0.01,
    loader_per_s=100.0,
    usable_cores=4,
    workers=4,
)
WORDS = {
    "model": ("the model", "a faster loader would not help"),
    "host-to-device": ("copying to the device", "copy fewer bytes"),
    "disk": ("reading from disk or network", "keep the samples in memory"),
    "decode": ("decoding", "decode each image once and store it"),
    "transform": ("the transform", "run its steps on whole batches"),
    "collate": ("collate_fn", "let samples be tensors of one shape"),
    "workers": ("the number of workers", "use every core"),
    "loader": ("the loader", "it is not a torch DataLoader"),
}
READ = Part("read", "photos", 0.03, 0.029)
SLOW_DISK = Part("read", "photos", 0.03, 0.005)
CROP = Part("transform", "crop", 0.02, 0.02)
FLIP = Part("transform", "flip", 0.02, 0.02)
STACK = Part("collate", "default_collate", 0.03, 0.03)


@pytest.mark.parametrize(
    ("limit", "changes"),
    [
        ("model", {"wait_s": 0.001, "parts": (READ,)}),
        ("host-to-device", {"is_prefetched": True, "loader_per_s": 200.0, "parts": (READ,)}),
        ("decode", {"is_prefetched": True, "loader_per_s": 110.0, "parts": (READ,)}),
        ("decode", {"parts": (READ, CROP)}),
        ("disk", {"parts": (SLOW_DISK, CROP)}),
        ("disk", {"parts": (SLOW_DISK, CROP), "workers": 2}),
        ("transform", {"parts": (READ, CROP, FLIP)}),
        ("collate", {"parts": (CROP, STACK)}),
        ("workers", {"parts": (READ,), "workers": 2}),
        ("loader", {"loader_per_s": None}),
    ],
)
def test_names_follow_from_figures(limit: str, changes: dict[str, Any]) -> None:
    """The limit is a function of the figures alone."""
    found = replace(BASE, **changes)
    assert found.limit == limit
    name, cure = WORDS[limit]
    assert f"; {name} is the limit. " in found.line
    assert found.advice[0].startswith(cure)


def test_the_line_has_the_figures() -> None:
    """The line has the share of waiting, and the rates of loader and model."""
    shown = replace(BASE, parts=(SLOW_DISK, CROP))
    line = "The loop waits 90 % of each step for data; reading from disk or network is the limit. "
    line += "The loader alone gives 100 samples/s. The model could take 1,000 samples/s."
    assert shown.line == line
    assert repr(shown).startswith(f"{line}\n\none step of the loop, mean of 9\n")


def test_the_two_lines_to_change_stand_at_the_end() -> None:
    """The model limits the expected gain; fastdata's loader and a slow model get no advice to change imports."""
    torchs = replace(
        BASE, parts=(READ,), kept_per_s=8000.0, kept="all", imports="DataLoader, ImageFolder"
    )
    assert str(torchs).splitlines()[-2:] == [
        "    from fastdata import DataLoader, ImageFolder",
        "The loader would go from 100 to 8,000 samples/s, and the loop from 100 to about 1,000; then the model would "
        "be the limit.",
    ]
    for other in (
        replace(torchs, imports=""),
        replace(torchs, wait_s=0.0),
        replace(torchs, kept_per_s=None),
    ):
        assert "from fastdata import" not in str(other)


def test_samples_in_memory_are_measured() -> None:
    """A torch loader over slow files is measured with its samples in memory, and the report has the memory it needs."""
    found = diagnose(DataLoader(Samples(partial(time.sleep, LONG_S)), batch_size=2, num_workers=1))
    assert found.kept_per_s
    assert any("all 24 need" in line for line in found.advice)
    assert "    from fastdata import DataLoader, CachedDataset\n" in str(found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(torch.arange(12.0)), batch_size=3),
        lambda: DataLoader(Stream(torch.arange(12.0)), batch_size=3, num_workers=1),
        lambda: DataLoader(Samples(), batch_size=None),
        lambda: DataLoader([0.5] * 9, batch_size=None),  # type: ignore[arg-type]
        lambda: DataLoader(Samples(), batch_sampler=[[0, 1], [2], [3, 4]]),
        lambda: DataLoader(
            Samples(), batch_size=2, collate_fn=lambda samples: {"images": default_collate(samples)}
        ),
        lambda: fastdata.DataLoader(Samples(), batch_size=2, num_workers=1),
    ],
    ids=["stream", "in workers", "single samples", "numbers", "batch sampler", "dicts", "ours"],
)
def test_any_torch_loader_can_be_diagnosed(make: Callable[[], Any]) -> None:
    """Every form of torch's loader gives all figures."""
    found = diagnose(make())
    assert not found.note
    assert found.loader_per_s
    assert found.loop_per_s
    assert found.parts


def test_steps_of_fastdatas_batches_are_not_timed_apart() -> None:
    """If a fastdata dataset stores its samples, the time to read one counts as the transform's."""
    transforms = pytest.importorskip("torchvision.transforms.v2")
    crop = transforms.Compose([transforms.RandomCrop(3), transforms.RandomHorizontalFlip()])
    with CachedDataset(Samples(), transform=crop) as dataset:
        found = diagnose(fastdata.DataLoader(dataset, batch_size=4, num_workers=1))
    assert not found.note
    assert [part.kind for part in found.parts] == ["transform", "collate"]


def test_only_the_loop_of_other_iterables_is_measured() -> None:
    """For an iterable that is not a DataLoader only the loop is measured, and the report has a note."""
    found = diagnose([torch.zeros(4)] * 5, lambda batch: None)
    assert found.loader_per_s is None
    assert replace(found, wait_s=1.0).limit == "loader"


@pytest.mark.parametrize("batches", [[], [torch.zeros(3)]])
def test_two_batches_are_needed(batches: list[Any]) -> None:
    """A loader that ends too early to be measured is an error."""
    with pytest.raises(
        ValueError, match=f"too few batches for a diagnosis: {len(batches)}, but at least 2"
    ):
        diagnose(batches)


def fail(*_: Any) -> None:
    raise KeyError("of the user's own")


def test_errors_of_the_loop_are_the_users() -> None:
    """An error of the dataset or the step in the loop is raised unchanged."""
    with pytest.raises(KeyError, match="of the user's own"):
        diagnose(DataLoader(Samples(fail)))
    with pytest.raises(KeyError, match="of the user's own"):
        diagnose(DataLoader(Samples()), fail)


def fail_in_processes() -> None:
    if multiprocessing.parent_process() is not None:
        raise KeyError("elsewhere")


def test_errors_of_separate_measurements_become_notes() -> None:
    """A measurement that fails next to the loop becomes a note; the rest of the diagnosis is returned."""
    found = diagnose(DataLoader(Samples(fail_in_processes), batch_size=2))
    assert found.loader_per_s is None
    assert found.note == "not measured: the loader alone: KeyError: 'elsewhere'"


def test_workers_that_persist_are_left_alone() -> None:
    """Persistent workers of the user's loader serve its next epoch."""
    loader = DataLoader(Samples(), batch_size=2, num_workers=1, persistent_workers=True)
    diagnose(loader, batches=3)
    assert len(list(loader)) == 12


# Loops and scripts


def test_a_loop_of_ones_own_is_timed() -> None:
    """Waiting and working are timed separately, over several epochs, without the first batch."""
    batches = TimedLoop(DataLoader(Samples(partial(time.sleep, LONG_S), count=4)))
    for _ in range(2):
        for _ in batches:
            time.sleep(2 * LONG_S)
    assert batches.batches == 8
    assert batches.wait_s > 7 * LONG_S
    assert batches.busy_s > 7 * 2 * LONG_S * 0.9


SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.zeros(3)

if __name__ == "__main__":
    for epoch in range(int(sys.argv[1])):
        for batch in DataLoader(Samples(), batch_size=2, num_workers=1):
            pass
    {end}
"""


class ByAlbumentations(Samples):
    """Calls its transform as albumentations' are called, without asking whether there is one."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.read()
        assert self.transform is not None
        return self.transform(image=np.full((20, 20, 3), index, np.uint8))["image"], index


def test_a_dataset_of_albumentations_is_measured() -> None:
    """Its transform is timed as one part, and its samples are stored for the figure of samples in memory."""
    A = pytest.importorskip("albumentations")
    to_tensor = pytest.importorskip("albumentations.pytorch").ToTensorV2()
    steps = A.Compose([A.RandomCrop(16, 16), to_tensor])
    loader = DataLoader(ByAlbumentations(partial(burn, LONG_S), steps), batch_size=2)
    found = diagnose(loader, lambda batch: None)
    assert [part.kind for part in found.parts] == ["read", "transform", "collate"]
    assert found.parts[1].name.startswith("Compose([")
    assert found.kept_per_s is not None
    assert "not measured" not in str(found)
    items = [(np.full((20, 20, 3), number, np.uint8), number) for number in range(24)]
    with CachedDataset(items, transform=steps) as stored:
        parts = diagnose(DataLoader(stored, batch_size=2), lambda batch: None).parts
    assert [part.kind for part in parts] == ["transform", "collate"]


@pytest.fixture
def own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what belongs to a script: its arguments, its path and its module."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def loops_of(folder: Path, end: str, epochs: str, batches: int) -> list[TimedLoop]:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{end}", end), "utf-8")
    return run_script(path, [epochs], batches)


@pytest.mark.usefixtures("own_main")
@pytest.mark.parametrize("end", ["pass", "sys.exit()"])
def test_a_scripts_loop_is_timed(tmp_path: Path, end: str) -> None:
    """A script's loop is timed if it is stopped and if it ends; torch's loaders are restored afterwards."""
    before = DataLoader.__iter__, fastdata.DataLoader.__iter__
    (loop,) = loops_of(tmp_path, end, "1", 10 if end == "pass" else 100)
    assert loop.batches == 10
    assert (DataLoader.__iter__, fastdata.DataLoader.__iter__) == before


@pytest.mark.usefixtures("own_main")
def test_a_script_is_stopped(tmp_path: Path) -> None:
    """A script does not continue after the requested number of batches."""
    (loop,) = loops_of(tmp_path, "raise KeyError", "1", 4)
    assert loop.batches == 4


@pytest.mark.usefixtures("own_main")
def test_a_script_without_a_loop_has_none(tmp_path: Path) -> None:
    """The exit status of such a script is raised."""
    assert loops_of(tmp_path, "pass", "0", 4) == []
    with pytest.raises(SystemExit, match="3"):
        loops_of(tmp_path, "sys.exit(3)", "0", 4)


@pytest.mark.usefixtures("own_main")
def test_the_loops_of_prefetchers_are_one(tmp_path: Path) -> None:
    """A prefetcher that is made for each epoch is timed as one loop, and the loader inside it is not timed."""
    path = tmp_path / "train.py"
    prefetched = "from fastdata import CudaPrefetcher\n" + SCRIPT.replace("{end}", "pass")
    loader = "DataLoader(Samples(), batch_size=2, num_workers=1)"
    prefetched = prefetched.replace(f"in {loader}", "in CudaPrefetcher(loader, 'cpu')")
    prefetched = prefetched.replace("    for epoch", f"    loader = {loader}\n    for epoch")
    path.write_text(prefetched, "utf-8")
    (loop,) = run_script(path, ["3"], 25)
    assert isinstance(loop.loader, CudaPrefetcher)
    assert loop.batches == 25


# Names for torch.profiler


def test_a_profiler_sees_reading_and_copying() -> None:
    """In the loop's thread reading and waiting have names; without a profiler nothing is recorded."""
    dataset = CachedDataset(Samples())
    with (
        dataset,
        torch.profiler.profile() as profiled,
        CudaPrefetcher(fastdata.DataLoader(dataset, batch_size=4), torch.device("cpu")) as batches,
    ):
        list(batches)
    names = {event.key for event in profiled.key_averages()}
    assert {"fastdata: read", "fastdata: wait"} <= names


def test_a_step_lasts_until_the_gpu_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is asked for its next batch when the step's stream is done."""
    stream = types.SimpleNamespace(synchronize=partial(time.sleep, LONG_S))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    found = diagnose([torch.ones(1)] * 5, lambda batch: None)
    assert found.step_s > LONG_S
    assert found.limit == "model"
