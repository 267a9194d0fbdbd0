"""Reports of epochs."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from conftest import shown
from fastdata import CachedDataset, DataLoader
from fastdata.report import EpochReport, progress_bar
from fresh import Interpreters


def test_the_fields_are_stable() -> None:
    """A report has these fields, which scripts log."""
    names = [field.name for field in dataclasses.fields(EpochReport)]
    assert names == [
        *(
            "path",
            "engine",
            "workers",
            "batches",
            "samples",
            "wait_s",
            "busy_s",
            "fresh_batches",
            "bytes_held",
        ),
        *("pinning", "prepared", "epochs"),
    ]


def test_a_report_reads_well() -> None:
    """Printing shows path, counts, times and memory, each in a line."""
    report = EpochReport(
        path="whole batches, read by 2 threads",
        engine="thread",
        workers=2,
        batches=6,
        samples=2300,
        wait_s=0.5,
        busy_s=1.5,
        fresh_batches=3,
        bytes_held=3 << 19,
    )
    assert str(report).splitlines() == [
        "whole batches, read by 2 threads",
        "batches                     6  2,300 samples, 1,150 samples/s",
        "waited for data        0.50 s  25 %",
        "in the training loop   1.50 s",
        "held for batches      1.5 MiB  3 batches got new memory, because all buffers were in use",
    ]
    assert repr(report) == str(report)
    html = report._repr_html_()
    assert html.startswith("<table><tr><td colspan=9>whole batches, read by 2 threads</td></tr>")
    assert "<tr><td>batches</td><td>6</td><td>2,300 samples" in html
    figures = report.as_dict()
    assert (figures["batches"], figures["samples_per_s"], figures["wait_share"]) == (6, 1150, 0.25)
    assert "path" not in figures


def test_an_epoch_not_begun_has_no_rate() -> None:
    """A report without batches does not divide by zero."""
    report = DataLoader(TensorDataset(torch.arange(3))).report()
    assert (report.batches, report.samples_per_s) == (0, 0.0)
    assert "0  0 samples, 0 samples/s" in str(report)


def test_a_loader_reads_well() -> None:
    """Its text has the number of batches, the dataset, and the way they are read."""
    loader = DataLoader(TensorDataset(torch.arange(3)), batch_size=2)
    first, second = repr(loader).splitlines()
    assert first == "DataLoader of TensorDataset: 2 batches of batch_size=2, num_workers=0"
    assert second == loader.report().path


@pytest.mark.parametrize(
    ("options", "engine", "workers"),
    [
        ({}, "inline", 0),
        ({"num_workers": 1}, "thread", 1),
        ({"workers": "process"}, "inline", 0),
        ({"num_workers": 2, "workers": "process"}, "process", 2),
    ],
    ids=shown,
)
def test_the_engine_is_reported(options: dict[str, Any], engine: str, workers: int) -> None:
    """Engine and workers are reported before and after an epoch; counts start at 0 in each epoch."""
    with CachedDataset([(torch.zeros(3, 4, 4), i) for i in range(5)]) as dataset:
        loader = DataLoader(dataset, batch_size=2, **options)
        assert (loader.report().engine, loader.report().workers) == (engine, workers)
        for _ in range(2):
            list(loader)
            report = loader.report()
            assert (report.engine, report.workers, report.batches, report.samples) == (
                engine,
                workers,
                3,
                5,
            )


def test_threads_report_the_memory_they_hold() -> None:
    """bytes_held counts every buffer kept for reuse: a loop that holds one batch needs few of them."""
    with CachedDataset([(torch.zeros(3, 4, 4), i) for i in range(40)]) as dataset:
        loader = DataLoader(dataset, batch_size=2)
        for _ in loader:
            pass
        batch_bytes = 2 * 3 * 4 * 4 * 4
        assert loader.report().bytes_held in (batch_bytes, 2 * batch_bytes, 3 * batch_bytes)


@pytest.mark.parametrize(
    ("collate_fn", "samples"),
    [
        (None, 5),
        (lambda samples: {"x": [torch.stack([x for (x,) in samples])]}, 5),
        (lambda samples: "no tensor", 0),
        (lambda samples: torch.tensor(1.0), 0),
    ],
    ids=["default", "nested", "no tensor", "a scalar"],
)
def test_samples_are_counted_by_the_first_tensor(collate_fn: Any, samples: int) -> None:
    """However a batch is nested, the length of its first tensor counts, if there is one."""
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, collate_fn=collate_fn)
    list(loader)
    assert (loader.report().batches, loader.report().samples) == (3, samples)


def test_single_samples_count_as_one() -> None:
    """With batch_size=None an image of three planes is one sample."""
    loader = DataLoader(TensorDataset(torch.zeros(4, 3, 2, 2)), batch_size=None)
    list(loader)
    assert loader.report().samples == 4


def prepare_and_tell(count: int) -> None:
    CachedDataset(
        [(torch.zeros(3, 4, 4), i) for i in range(count)], prepare_workers=1
    ).prepare().close()


def test_a_file_gets_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """If standard error is not a terminal, nothing is written to it."""
    prepare_and_tell(20)
    assert capsys.readouterr().err == ""


def test_a_user_can_hide_bars(fresh: Interpreters) -> None:
    """``TQDM_DISABLE=1`` works in a terminal too."""
    code = """
        import sys
        sys.stderr.isatty = lambda: True
        for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
            del sys.modules[name]  # torch has imported it, before the variable was set
        from fastdata.report import progress_bar
        progress_bar(3, "three").close()
    """
    for variables in ({}, {"TQDM_DISABLE": "1"}):
        done = fresh.run(code, env=os.environ | variables)
        assert done.returncode == 0, done.stderr
        assert bool(done.stderr) == (not variables)


def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    prepare_and_tell(20)
    assert re.search(
        r"\rprepared 20 images: 100%.* 3.9 KiB in shared memory, kept at 4x4\]\n$",
        capsys.readouterr().err,
    )


@pytest.mark.timeout(30)
def test_a_process_killed_while_it_draws_a_bar_holds_up_no_other() -> None:
    """Bars of this process do not wait for the lock of a forked process that was killed."""
    context = multiprocessing.get_context("fork")
    is_held = context.Event()

    def hold() -> None:
        with progress_bar(1, "theirs", enabled=False) as bar, bar.get_lock():
            is_held.set()
            signal.pause()

    progress_bar(1, "before", enabled=False).close()
    process = context.Process(target=hold)
    process.start()
    assert is_held.wait(20)
    process.kill()
    process.join()
    process.close()
    progress_bar(1, "ours", enabled=False).close()


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=len, flush=int)])
def test_a_stream_without_isatty_shows_no_bar(
    monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    """``sys.stderr`` is None without a console, and scripts replace it by objects with ``write``."""
    monkeypatch.setattr("sys.stderr", stream)
    prepare_and_tell(20)
