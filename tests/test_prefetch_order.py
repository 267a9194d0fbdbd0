"""The prefetcher on a device that runs work in any order that CUDA permits, also with lines deleted.

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
    """Make once what all schedules share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    scenarios.prepare()
    yield
    torch.set_num_threads(threads)
    scenarios.forget()


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_every_schedule_gives_right_batches(name: str) -> None:
    """In no schedule is a batch wrong, a bound exceeded, or does the loop wait or hang."""
    wrong = {seed: seen for seed in range(SCHEDULES) if (seen := scenarios.run(name, seed))}
    assert not wrong, (
        f"{len(wrong)} of {SCHEDULES} schedules, the first: {next(iter(wrong.items()))}"
    )


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_accesses_have_an_order_in_every_schedule(name: str) -> None:
    """An event or a wait separates any two accesses of the same bytes of which one is a write."""
    assert scenarios.run(name, 5, ordered=True) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each is tried in a process of its own")
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_deleting_a_line_that_keeps_batches_right_fails_a_schedule(mutant: mutants.Mutant) -> None:
    """Each mutant lacks a line that waits, records, holds or limits, and some schedule fails."""
    assert mutants.is_caught(mutant)
