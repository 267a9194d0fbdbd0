"""The table of samples."""

from __future__ import annotations

import contextlib
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from fastdata.table import SampleTable


@pytest.mark.parametrize(
    "targets",
    [
        [3, 1, 2],
        [0.5, 1.0],
        [True, False],
        ["cat", "dog"],
        [(1, "a"), None, {"box": [1, 2]}],
        [1, 2.5],
        [2**40, -1],
        [],
    ],
    ids=repr,
)
def test_targets_come_back_as_they_were(targets: list[Any]) -> None:
    """Each target has the value and the type it was given with, here and in a copy sent elsewhere."""
    table = SampleTable(targets)
    for view in (table.targets, pickle.loads(pickle.dumps(table)).targets):
        assert view == targets
        assert [type(target) for target in view] == [type(target) for target in targets]


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_array_targets_come_back_as_copies(make: Any) -> None:
    """A tensor or array target can be changed by the user without changing the table."""
    table = SampleTable([make([1.0, 2.0]), make([3.0, 4.0])])
    first = table.target(0)
    first[0] = 99
    assert type(first) is type(make([1.0]))
    assert table.target(0).tolist() == [1.0, 2.0]
    assert table.target_array() is not None


def test_ragged_array_targets_are_kept_as_objects() -> None:
    """Arrays of different shapes are no column of numbers."""
    table = SampleTable([torch.zeros(2), torch.zeros(3)])
    assert table.target_array() is None
    assert [len(target) for target in table.targets] == [2, 3]


def test_paths_and_pairs_behave_like_lists() -> None:
    """Negative indices, slices, iteration, equality, sums, copies and errors are a list's."""
    paths = ["/a/é.jpg", "/a/b.jpg", "/c\udcff.jpg"]
    table = SampleTable([0, 0, 1], paths=paths, class_to_idx={"x": 0, "y": 1})
    assert table.paths == paths
    assert list(table.paths) == paths
    assert table.paths[-1] == paths[-1]
    assert table.paths[:2] == paths[:2]
    more = ["z"]
    assert table.paths + more == [*paths, "z"]
    assert more + table.paths == ["z", *paths]
    assert table.paths + table.paths == paths * 2
    copy = table.paths.copy()
    copy.append("z")
    assert copy == [*paths, "z"]
    assert json.loads(json.dumps({"targets": table.targets}, default=list)) == {"targets": [0, 0, 1]}
    assert table.pairs[1] == ("/a/b.jpg", 0)
    assert np.array(table.targets).tolist() == [0, 0, 1]
    assert table.class_to_idx == {"x": 0, "y": 1}
    with pytest.raises(IndexError):
        table.paths[3]
    with pytest.raises(TypeError, match="unhashable"):
        hash(table.paths)


def test_a_reduced_table_takes_the_place_of_the_whole() -> None:
    """Paths, targets and classes are those of the samples kept, and the whole table is closed."""
    whole = SampleTable([5, 6, 7], paths=["a", "b", "c"], class_to_idx={"x": 5})
    with contextlib.closing(whole.reduced_to([2, 0])) as reduced:
        assert list(reduced.pairs) == [("c", 7), ("a", 5)]
        assert reduced.class_to_idx == {"x": 5}
    with pytest.raises(KeyError):
        whole.target(0)


def test_a_pickled_table_or_view_is_a_handle() -> None:
    """Neither the table nor a view of it carries the samples along."""
    table = SampleTable(list(range(5000)), paths=[f"/some/folder/{i}.jpg" for i in range(5000)])
    assert len(pickle.dumps(table)) < 1000
    assert len(pickle.dumps(table.pairs)) < 1000
    assert pickle.loads(pickle.dumps(table.pairs))[4999] == ("/some/folder/4999.jpg", 4999)
