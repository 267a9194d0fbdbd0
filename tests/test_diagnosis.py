"""What limits a training loop, and that looking for it disturbs nothing."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

import fastdata
from fastdata import CachedDataset, CudaPrefetcher
from fastdata.tools import diagnose as diagnosing
from fastdata.tools.diagnose import TimedLoop, diagnose, diagnose_script, lightning_callback
from fastdata.tools.verdict import LIMITS, Diagnosis, Figures, Part, Trial
from simcuda import Sim

LONG_S = 0.01


@pytest.fixture(autouse=True)
def short_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosing, "_RATE_S", 0.1)
    monkeypatch.setattr(diagnosing, "_SAMPLES_S", 0.1)
    monkeypatch.setattr(diagnosing, "_MODEL_S", 0.1)
    # Nothing to try beyond what a case is about.
    monkeypatch.setattr(diagnosing, "usable_cores", lambda: 1)


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12.0))


def slow_transform(sample: torch.Tensor) -> torch.Tensor:
    time.sleep(LONG_S)
    return sample


def slow_collate(samples: list[Any]) -> Any:
    time.sleep(4 * LONG_S)
    return default_collate(samples)


class Letter:
    """A batch that takes its time to be unpacked by who gets it."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __reduce__(self) -> Any:
        return unpack, (self.batch,)


def unpack(batch: Any) -> Any:
    time.sleep(4 * LONG_S)
    return batch


def case(name: str) -> tuple[Any, Callable[[Any], None]]:
    """A loader and a step, limited by what the name says; all but decoding sleep, which no load makes longer."""
    loader = partial(DataLoader, batch_size=2, num_workers=1)
    cases: dict[str, Callable[[], Any]] = {
        "model": lambda: loader(Samples()),
        "decode": lambda: loader(Samples(partial(burn, LONG_S)), num_workers=0),
        "disk": lambda: loader(Samples(partial(time.sleep, LONG_S))),
        "transform": lambda: loader(Samples(transform=slow_transform)),
        "collate": lambda: loader(Samples(), collate_fn=slow_collate),
        "transport": lambda: loader(
            Samples(), collate_fn=lambda samples: Letter(default_collate(samples))
        ),
        "host-to-device": lambda: CudaPrefetcher(loader(Samples()), "cuda:0"),
    }
    return cases[name](), lambda batch: time.sleep(20 * LONG_S * (name == "model"))


@pytest.mark.parametrize(
    "limit", ["model", "host-to-device", "decode", "disk", "transform", "collate", "transport"]
)
def test_the_culprit_is_named(limit: str) -> None:
    """Of loops that differ in what is slow, the slow thing is what is said to be the limit."""
    gpu = Sim()
    gpu.on_copy = partial(time.sleep, 4 * LONG_S)
    with gpu.installed() if limit == "host-to-device" else nullcontext():
        loader, step = case(limit)
        found = diagnose(loader, step)
        if isinstance(loader, CudaPrefetcher):
            loader.close()
    assert found.limit == limit, found
    assert LIMITS[limit] in found.line


BASE = Figures(
    batches=9,
    batch_size=10,
    wait_s=0.09,
    step_s=0.01,
    loader_per_s=100.0,
    usable_cores=4,
    workers=4,
)
READ = Part(name="photos", kind="read", seconds=0.03, cpu_s=0.029)
SLOW_DISK = Part(name="photos", kind="read", seconds=0.03, cpu_s=0.005)
CROP = Part(name="crop", kind="transform", seconds=0.02, cpu_s=0.02)
FLIP = Part(name="flip", kind="transform", seconds=0.02, cpu_s=0.02)
MORE = Trial(name="num_workers=8", kind="more", samples_per_s=150.0, is_sure=True)
FEWER = Trial(name="num_workers=2", kind="fewer", samples_per_s=110.0, is_sure=True)


@pytest.mark.parametrize(
    ("limit", "changes"),
    [
        ("model", {"wait_s": 0.001}),
        ("model", {"wait_s": 0.001, "parts": (READ,), "trials": (MORE,)}),
        ("model", {"model_per_s": 105.0}),
        ("model", {"gpu_busy": 0.95}),
        ("decode", {"gpu_busy": 0.4, "wait_s": 0.001, "parts": (READ,)}),
        ("host-to-device", {"wait_s": 0.01, "move_s": 0.02, "parts": (READ,)}),
        ("decode", {"parts": (READ, CROP)}),
        ("disk", {"parts": (SLOW_DISK, CROP)}),
        ("transform", {"parts": (READ, CROP, FLIP)}),
        ("collate", {"parts": (CROP, replace(READ, kind="collate"))}),
        ("decode", {"parts": (READ,), "trials": (MORE,)}),
        ("workers: too few", {"parts": (READ,), "trials": (MORE,), "workers": 2}),
        ("decode", {"parts": (READ,), "trials": (replace(MORE, is_sure=False),), "workers": 2}),
        (
            "decode",
            {"parts": (READ,), "trials": (replace(MORE, samples_per_s=110.0),), "workers": 2},
        ),
        ("disk", {"parts": (SLOW_DISK,), "trials": (MORE,), "workers": 2}),
        ("workers: too many", {"parts": (SLOW_DISK,), "trials": (FEWER,)}),
        ("decode", {"parts": (READ,), "trials": (replace(FEWER, samples_per_s=105.0),)}),
        ("transport", {"parts": (replace(READ, seconds=0.01),), "engine": "process"}),
        ("transport", {"parts": (replace(SLOW_DISK, seconds=0.01),), "engine": "process"}),
        ("disk", {"parts": (SLOW_DISK,), "engine": "process", "workers": 8}),
        ("decode", {"parts": (replace(READ, seconds=0.01),), "engine": "thread"}),
        ("decode", {"prepared": 0.2, "parts": (CROP,)}),
        ("loader", {"loader_per_s": None}),
    ],
)
def test_names_follow_from_figures(limit: str, changes: dict[str, Any]) -> None:
    """The limit is a function of the figures alone."""
    assert Diagnosis(replace(BASE, **changes)).limit == limit


def test_advice_has_its_figures() -> None:
    """Each line of advice has a number, and what a trial gained is in the one line too."""
    facts = {"first_s": 9.0, "engine": "process", "epoch_batches": 20}
    shown = Diagnosis(replace(BASE, parts=(SLOW_DISK, CROP), trials=(MORE,), **facts))
    assert shown.advice == (
        "num_workers=8: 150 samples/s, tried, 1.5 times the 100 now",
        "photos takes 30 ms, 60 % of what a sample costs, and waits 83 % of that for disk or network",
        "the first batch came after 9.0 s, 82 % of an epoch: persistent_workers=True starts workers once",
    )
    line = "The loop waits 90 % of each step for data; reading from disk or network is the limit; "
    assert (
        shown.line
        == f"{line}the loader could feed 100 samples/s; num_workers=8 would lift it to 150"
    )


def test_advice_needs_no_model_alone() -> None:
    """Of a script, whose model is not run alone, a slow step is told without what it takes alone."""
    slow = Diagnosis(replace(BASE, step_s=0.4, wait_s=0.0, model_per_s=None, epoch_batches=20))
    assert slow.advice == ("no faster loader would help: a step is 400 ms of the model's own work",)


def test_the_two_lines_to_change_stand_at_the_end() -> None:
    """What they would bring is bounded by the model; a loader of fastdata's, or a slow model, has none."""
    kept = Trial(name="storage='shared'", kind="kept", samples_per_s=8000.0, is_sure=True)
    torchs = replace(BASE, parts=(READ,), trials=(kept,), imports="DataLoader, ImageFolder")
    assert str(Diagnosis(torchs)).splitlines()[-2:] == [
        "    from fastdata import DataLoader, ImageFolder",
        "which would bring 8,000 samples/s where the loader has 100, and the loop from 100 to about 1,000: the model is"
        " the limit then",
    ]
    for other in (
        replace(torchs, imports=""),
        replace(torchs, wait_s=0.0),
        replace(torchs, trials=()),
    ):
        assert "from fastdata import" not in str(Diagnosis(other))


def test_keeping_samples_is_tried() -> None:
    """A torch loader over slow files is tried with its samples kept in memory, and the memory is said."""
    found = diagnose(DataLoader(Samples(partial(time.sleep, LONG_S)), batch_size=2, num_workers=1))
    assert "storage='shared' would lift it to" in found.line
    assert any("all 24 samples need about" in line for line in found.advice)
    assert "    from fastdata import CachedDataset, DataLoader\n" in str(found)
    assert repr(found) == str(found)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=3),
        DataLoader(Stream(), batch_size=3, num_workers=1),
        DataLoader(Samples(), batch_size=None),
        DataLoader(Samples(), batch_sampler=[[0, 1], [2], [3, 4]]),
        DataLoader(
            Samples(), batch_size=2, collate_fn=lambda samples: {"images": default_collate(samples)}
        ),
        fastdata.DataLoader(Samples(), batch_size=2, num_workers=1),
    ],
    ids=["stream", "stream in workers", "single samples", "batch sampler", "dicts", "ours"],
)
def test_any_torch_loader_can_be_diagnosed(loader: Any) -> None:
    """Every form of torch's loader gives all figures."""
    found = diagnose(loader)
    assert not [note for note in found.figures.notes if "not measured" in note]
    assert found.figures.loader_per_s
    assert found.figures.parts
    assert json.loads(json.dumps(found.as_dict()))["limit"] == found.limit


def test_own_datasets_are_told_in_steps() -> None:
    """A fastdata dataset that serves whole batches is told apart in what they cost."""
    transforms = pytest.importorskip("torchvision.transforms.v2")
    crop = transforms.Compose([transforms.RandomCrop(3), transforms.RandomHorizontalFlip()])
    with CachedDataset(Samples(), transform=crop, progress=False) as dataset:
        found = diagnose(fastdata.DataLoader(dataset, batch_size=4, num_workers=1))
    assert not [note for note in found.figures.notes if "not measured" in note]
    assert [(part.kind, part.is_batched) for part in found.figures.parts] == [
        ("read", True),
        *[("transform", True)] * 2,
    ]


def test_less_is_said_of_other_iterables() -> None:
    """Of an iterable that is no DataLoader the loop alone is measured, which is said."""
    found = diagnose([torch.zeros(4)] * 5, lambda batch: None)
    assert "a list is no torch DataLoader" in str(found)
    assert found.figures.loader_per_s is None


@pytest.mark.parametrize("batches", [[], [torch.zeros(3)]])
def test_two_batches_are_needed(batches: list[Any]) -> None:
    """A loader that ends too early to be measured is an error."""
    with pytest.raises(
        ValueError, match=f"the loader gave {len(batches)} batches, and a diagnosis needs 2"
    ):
        diagnose(batches)
    with pytest.raises(ValueError, match="batches=1: at least 2 are needed"):
        diagnose(batches, batches=1)


def fail(*_: Any) -> None:
    raise KeyError("of the user's own")


def test_errors_of_the_loop_are_the_users() -> None:
    """What dataset or step raise in the loop is raised as it is."""
    with pytest.raises(KeyError, match="of the user's own"):
        diagnose(DataLoader(Samples(fail)))
    with pytest.raises(KeyError, match="of the user's own"):
        diagnose(DataLoader(Samples()), fail)


def fail_in_trials() -> None:
    info = get_worker_info()
    time.sleep(LONG_S)  # which twice as many workers may help against
    if info is not None and info.num_workers > 1:
        raise KeyError("of two workers")


def test_errors_of_a_trial_are_noted() -> None:
    """A setting that nobody asked for may fail; the diagnosis is given without it."""
    found = diagnose(DataLoader(Samples(fail_in_trials), batch_size=2, num_workers=1))
    assert found.limit == "disk"
    assert any("not measured: num_workers=2: KeyError" in note for note in found.figures.notes)


def test_nothing_is_disturbed() -> None:
    """Random generators, the order of a loader with one of its own, and its persistent workers are as before."""
    generator = torch.Generator().manual_seed(3)
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "shuffle": True,
        "num_workers": 1,
        "persistent_workers": True,
    }
    loader = DataLoader(Samples(), generator=generator, **arguments)
    before = torch.get_rng_state(), generator.get_state()
    diagnose(loader, lambda batch: torch.rand(2), batches=3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    fresh = DataLoader(Samples(), generator=torch.Generator().manual_seed(3), **arguments)
    assert [labels.tolist() for _, labels in loader] == [labels.tolist() for _, labels in fresh]
    assert len(list(loader)) == 12


# Loops of others


def test_a_loop_of_ones_own_is_timed() -> None:
    """Waiting and being busy are told apart, over several epochs, without the first batch."""
    batches = TimedLoop(DataLoader(Samples(partial(time.sleep, LONG_S), count=4)))
    for _ in range(2):
        for _ in batches:
            time.sleep(2 * LONG_S)
    assert batches.batches == 8
    assert 7 * LONG_S < batches.times.wait_s < batches.first_s + 9 * LONG_S + 1
    assert batches.times.busy_s > 8 * 2 * LONG_S * 0.9


def test_lightning_is_timed_by_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback is of the Lightning that is imported; without one, that is an error."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ImportError, match="neither lightning nor pytorch_lightning is imported yet"
    ):
        lightning_callback()
    theirs: Any = types.ModuleType("pytorch_lightning")
    theirs.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "pytorch_lightning", theirs)
    callback = lightning_callback()
    assert isinstance(callback, theirs.Callback)
    callback.on_train_epoch_start()
    for _ in range(3):
        callback.on_train_batch_start(None, None, None, 0)
        time.sleep(LONG_S)
        callback.on_train_batch_end(None, None, None, None, 0)
        time.sleep(3 * LONG_S)
    assert callback.times.busy_s >= 3 * LONG_S
    assert callback.times.wait_s >= 2 * 3 * LONG_S


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


def script(folder: Path, end: str = "pass") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{end}", end), "utf-8")
    return path


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise KeyError('late')"])
def test_a_script_is_diagnosed(tmp_path: Path, end: str) -> None:
    """A script's own loop is timed, whether it is stopped, ends, or fails after it; all is then as before."""
    before = (
        sys.argv,
        sys.path[:],
        sys.modules["__main__"],
        DataLoader.__iter__,
        fastdata.DataLoader.__iter__,
    )
    found = diagnose_script(script(tmp_path, end), ["1"], batches=10 if end == "pass" else 100)
    assert found.limit == "disk"
    assert found.figures.batches == 9
    assert any("the script has ended with" in note for note in found.figures.notes) == (
        end != "pass"
    )
    after = (
        sys.argv,
        sys.path[:],
        sys.modules["__main__"],
        DataLoader.__iter__,
        fastdata.DataLoader.__iter__,
    )
    assert after == before


def test_a_script_is_stopped(tmp_path: Path) -> None:
    """After the batches asked for a script does not go on."""
    assert (
        diagnose_script(script(tmp_path, "raise KeyError"), ["1"], batches=4).figures.batches == 3
    )


def test_a_script_without_a_loop_is_an_error(tmp_path: Path) -> None:
    """What cannot be diagnosed is said; what such a script raises is raised."""
    with pytest.raises(ValueError, match=r"train.py has no loop over a torch DataLoader"):
        diagnose_script(script(tmp_path), ["0"])
    with pytest.raises(SystemExit, match="3"):
        diagnose_script(script(tmp_path, "sys.exit(3)"), ["0"])


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    """A chart of the parts of a step is written to the file."""
    pytest.importorskip("matplotlib")
    Diagnosis(replace(BASE, parts=(READ, CROP))).plot(tmp_path / "parts.png")
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


# Names for torch.profiler


def test_a_profiler_sees_reading_and_copying() -> None:
    """In the loop's thread reading and waiting have names; without a profiler nothing is recorded."""
    dataset = CachedDataset(Samples(), progress=False)
    with (
        dataset,
        torch.profiler.profile() as profiled,
        CudaPrefetcher(fastdata.DataLoader(dataset, batch_size=4), torch.device("cpu")) as batches,
    ):
        list(batches)
    names = {event.key for event in profiled.key_averages()}
    assert {"fastdata: read", "fastdata: wait"} <= names


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events around each step say how long it was busy, which is what the line is about then."""
    event = types.SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = diagnose([torch.ones(1)] * 3, lambda batch: None)
    assert found.figures.gpu_busy == pytest.approx(2.0)
    assert found.line.startswith("The GPU waits")
