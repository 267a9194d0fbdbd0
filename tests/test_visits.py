"""Which visit to a sample this is."""

from __future__ import annotations

import pickle

import numpy as np

from fastdata.datasets.batch import SharedVisits


def test_shared_visits_count_epochs_across_processes() -> None:
    """Reading every sample once, half of them through another handle, makes the next visit the next epoch."""
    visits = SharedVisits(4)
    other = pickle.loads(pickle.dumps(visits))
    assert visits.take(np.array([0, 1]), 5).tolist() == [0, 0]
    assert other.take(np.array([2, 3]), 5).tolist() == [0, 0]
    assert other.take(np.array([0, 3]), 5).tolist() == [1, 1]
    visits.restart(7)
    assert other.take(np.array([3, 1, 3]), 5).tolist() == [7, 7, 8]


def test_readers_count_their_own_visits() -> None:
    """A new reader counts from 0, one that took turns with others goes on, and each batch may repeat samples."""
    visits = SharedVisits(4)
    for turn in range(3):
        assert visits.take(np.array([0, 2, 2]), -1).tolist() == [turn, 2 * turn, 2 * turn + 1]
        assert visits.take(np.array([2, 0, 1]), 100 + turn).tolist() == [0, 0, 0]
    assert visits.take(np.array([1, 3]), -1).tolist() == [0, 0]
