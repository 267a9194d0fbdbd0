"""Which visit to a sample this is."""

from __future__ import annotations

import pickle

import numpy as np

from fastdata.visits import EpochVisits, SharedVisits

REPEAT = 1 << 32


def test_visits_of_an_epoch_are_the_epoch() -> None:
    """Samples drawn once have the epoch's number."""
    visits = EpochVisits(5, epoch=3)
    assert visits.take(np.array([4, 0])).tolist() == [3, 3]
    assert visits.take(np.array([1])).tolist() == [3]


def test_repeated_samples_get_a_number_of_their_own() -> None:
    """A sample drawn again in the same epoch, in the same batch or a later one, is another visit."""
    visits = EpochVisits(5, epoch=3)
    assert visits.take(np.array([2, 0, 2, 2])).tolist() == [3, 3, 3 + REPEAT, 3 + 2 * REPEAT]
    assert visits.take(np.array([2, 1])).tolist() == [3 + 3 * REPEAT, 3]


def test_shared_visits_count_epochs_across_processes() -> None:
    """Reading every sample once, half of them through another handle, makes the next visit the next epoch."""
    visits = SharedVisits(4)
    other = pickle.loads(pickle.dumps(visits))
    assert visits.take(np.array([0, 1])).tolist() == [0, 0]
    assert other.take(np.array([2, 3])).tolist() == [0, 0]
    assert other.take(np.array([0, 3])).tolist() == [1, 1]
    visits.restart(7)
    assert other.take(np.array([3, 1, 3])).tolist() == [7, 7, 8]
