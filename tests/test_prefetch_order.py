"""The prefetcher on a device that does everything in as odd an order as CUDA permits, and without what keeps it right.

A failing schedule again: ``python tests/scenarios.py NAME SEED``. The mutants: ``python tests/mutants.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import mutants
import scenarios

SCHEDULES = int(os.environ.get("FASTDATA_SCHEDULES", "8"))  # CI has 100


@pytest.fixture(autouse=True, scope="module")
def prepared() -> Iterator[None]:
    """What schedules share is made once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    scenarios.prepare()
    yield
    torch.set_num_threads(threads)
    scenarios.forget()


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_every_schedule_gives_right_batches(name: str) -> None:
    """No schedule gives a batch wrong data, breaks a bound, makes the loop wait, or hangs."""
    wrong = {seed: seen for seed in range(SCHEDULES) if (seen := scenarios.run(name, seed))}
    assert not wrong, (
        f"{len(wrong)} of {SCHEDULES} schedules, the first: {next(iter(wrong.items()))}"
    )


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_accesses_have_an_order_in_every_schedule(name: str) -> None:
    """Of two accesses of the same bytes, one a write, each has an event or a wait between them, whatever the times."""
    assert scenarios.run(name, 5, ordered=True) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each is tried in a process of its own")
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_deleting_a_line_that_keeps_batches_right_fails_a_schedule(mutant: mutants.Mutant) -> None:
    """Each mutant lacks a line that waits, records, holds or bounds, and some schedule fails without it."""
    assert mutants.is_caught(mutant)
