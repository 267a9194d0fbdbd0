"""Datasets that draw at random in ``__getitem__``: a store would freeze their draws."""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from fastdata import CachedDataset, FastDataWarning

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 6, 3), np.uint8)
SHARED = np.random.default_rng(1)


class Items:
    """Items that ``read(index)`` returns; ``held`` is an object that it uses."""

    def __init__(self, read: Callable[[int], Any], held: Any = None) -> None:
        self.read, self.held = read, held

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class Pair(NamedTuple):
    image: np.ndarray
    other: np.ndarray


class Node:
    """An object with a part that refers back to it, as in graphs and trees."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.part = types.SimpleNamespace(owner=make(self))

    def __reduce__(self) -> Any:
        return str, ()


class Opaque:
    """Two of these are never equal, and do not show their content."""

    __slots__ = ()


def states() -> tuple[Any, ...]:
    """Return the states of all generators that datasets here draw from."""
    legacy = np.random.get_state(legacy=False)
    return (
        random.getstate(),
        repr(legacy),
        torch.get_rng_state().tolist(),
        repr(SHARED.__getstate__()),
    )


def flipped(index: int, is_flipped: Any) -> tuple[np.ndarray, int]:
    return (PIXELS[index, :, ::-1] if is_flipped else PIXELS[index]), index


def holding(generator: Any) -> Items:
    """Return a dataset that draws from its own generator, although its items do not show it."""

    def read(index: int) -> Any:
        generator.random()
        return PIXELS[index], index

    return Items(read)


def anonymous(index: int) -> Any:
    return flipped(index, np.random.default_rng().random() < 0.5)


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (Items(lambda i: flipped(i, random.random() < 0.5)), "item|Python's random generator"),
        (Items(lambda i: flipped(i, np.random.rand() < 0.5)), "item|NumPy's global generator"),
        (Items(lambda i: flipped(i, torch.rand(()) < 0.5)), "item|torch's generator"),
        (
            Items(lambda i: flipped(i, SHARED.random() < 2)),
            "takes numbers from a Generator that it holds",
        ),
        (holding(random.Random(0)), "takes numbers from a Random that it holds"),
        (holding(np.random.RandomState(0)), "takes numbers from a RandomState that it holds"),
        (holding(np.random.default_rng(0)), "takes numbers from a Generator that it holds"),
        (Items(anonymous), "item . has another sample each time"),
        (
            Items(lambda i: (PIXELS[i], random.SystemRandom().random())),
            "item 0 has another target each time",
        ),
        (
            Items(lambda i: Pair(PIXELS[i], random.sample([*PIXELS], 1)[0])),
            "item|Python's random generator",
        ),
        (
            Items(lambda i: {"image": PIXELS[i], "noise": np.random.default_rng().random()}),
            "item 0 has another target each time",
        ),
        (
            Items(lambda i: (torch.rand(3, generator=torch.default_generator), i)),
            "item 0 has another sample each time",
        ),
    ],
)
def test_a_dataset_that_draws_is_refused(dataset: Items, found: str) -> None:
    """It is refused if items differ or numbers are taken from a generator; all generators are restored."""
    before = states()
    with pytest.raises(ValueError, match=rf"^Items draws .*({found}).* transform= .* frozen=True"):
        CachedDataset(dataset)
    assert states() == before
    for options in ({"frozen": True}, {"storage": "none"}):
        with CachedDataset(dataset, prepare_workers=1, **options) as kept:  # type: ignore[arg-type]
            assert len(kept) == len(PIXELS)


class Applied:
    """Like a transform of albumentations, which draws to decide if it is applied, whatever ``p`` is."""

    def __init__(self, p: float, transforms: Any = (), draw: Any = None) -> None:
        self.p, self.transforms, self.draw = p, transforms, draw or random.Random(0)

    def __call__(self, image: np.ndarray) -> np.ndarray:
        self.draw.random()
        return image


Applied.__module__ = "albumentations.core"


def shared(p: float, outer: float = 1.0) -> Applied:
    """Return a transform in another, which share a generator."""
    inner = Applied(p)
    return Applied(outer, [inner], inner.draw)


@pytest.mark.parametrize("is_old", [False, True])
def test_transforms_that_are_always_applied_are_no_draws(is_old: bool) -> None:
    """A resize of albumentations is accepted wherever a dataset holds it; a flip next to it is refused."""

    def give(transform: Applied) -> None:
        if is_old:  # with Python's generator
            transform.draw = random
            for inner in transform.transforms:
                inner.draw = random
        steps = {"val": transform}
        CachedDataset(Items(lambda i: (steps["val"](PIXELS[i]), i)), prepare_workers=1).close()

    give(Applied(1.0))
    give(shared(1.0))
    for drawing in (Applied(0.01), shared(0.01), shared(1.0, outer=0.01)):
        with pytest.raises(ValueError, match="reading its items takes numbers from"):
            give(drawing)


@pytest.mark.parametrize("make", [weakref.ref, lambda node: node], ids=["weak", "strong"])
def test_targets_may_refer_to_themselves(make: Callable[[Any], Any]) -> None:
    """Such targets are no draws. A dataset that takes numbers is found although its targets cannot be compared."""
    CachedDataset(Items(lambda index: (PIXELS[index], Node(make))), prepare_workers=1).close()
    with pytest.raises(ValueError, match="Python's random generator"):
        CachedDataset(Items(lambda index: (PIXELS[index], (Node(make), random.random())[0])))


def test_a_dataset_may_have_any_attribute() -> None:
    """Attributes with the names of fastdata's own readers are allowed."""
    dataset = Items(lambda index: (PIXELS[index], index))
    dataset.is_remote = True  # type: ignore[attr-defined]
    with CachedDataset(dataset, prepare_workers=1) as kept:
        assert kept.targets == [*range(len(PIXELS))]


def test_the_unknown_transform_of_a_dataset_that_draws_is_named() -> None:
    """The error shows its text, cut off if it would fill a page."""

    class Flip:
        def __call__(self, image: np.ndarray) -> np.ndarray:
            return image[:, ::-1] if random.random() < 0.5 else image

        def __repr__(self) -> str:
            return "Flip(\n" + "p=0.5, " * 20 + ")"

    flip = Flip()
    dataset = Items(lambda index: (flip(PIXELS[index]), index))
    dataset.transform = flip  # type: ignore[attr-defined]
    named = r", perhaps through Flip\( p=0\.5, .{40,50}\.\.\. in Items\.transform\. "
    with pytest.raises(ValueError, match=named):
        CachedDataset(dataset)


def test_a_cache_key_makes_a_warning_of_it(tmp_path: Path) -> None:
    """The warning comes once, when the cache is written; ``frozen=True`` accepts the draws."""
    dataset = Items(lambda index: flipped(index, random.random() < 0.5))
    options: Any = {"cache_dir": tmp_path, "prepare_workers": 1}
    with pytest.warns(FastDataWarning, match=r"Items draws at random .* frozen=True keeps"):
        CachedDataset(dataset, cache_key="a", **options).close()
    CachedDataset(dataset, cache_key="a", **options).close()
    CachedDataset(dataset, cache_key="b", frozen=True, **options).close()


@pytest.mark.parametrize(
    "read",
    [
        lambda index: (PIXELS[index], float("nan")),
        lambda index: (torch.full((3, 2), torch.nan), np.float32("nan")),
        lambda index: (Image.fromarray(PIXELS[index]), {"boxes": torch.ones(index, 4), "id": "a"}),
        lambda index: (PIXELS[index], [torch.ones(2, 3, dtype=torch.bfloat16).T, (None, b"x")]),
        lambda index: (PIXELS[index], np.array(["a", None], object)),
        lambda index: (PIXELS[index], Opaque()),
        lambda index: Pair(PIXELS[index], np.ones(())),
        lambda index: flipped(index, np.random.default_rng(index).random() < 0.5),
    ],
)
def test_a_dataset_that_gives_the_same_items_again_is_kept(read: Any) -> None:
    """New objects with equal content, also NaN, and draws that depend only on the index are accepted."""
    CachedDataset(Items(read, held=(SHARED, random.Random(0))), prepare_workers=1).close()


class Counted:
    """A target whose class has code that refers to a value which every read changes."""

    reads = 0

    def __init__(self, index: int) -> None:
        Counted.reads += 1
        self.index = index

    def __reduce__(self) -> Any:
        return Counted, (self.index,)


def test_what_a_class_counts_is_not_drawn() -> None:
    """Targets are compared by their content, and not by the code of their class."""
    CachedDataset(Items(lambda index: (PIXELS[index], Counted(index))), prepare_workers=1).close()


def seeded(seed: Callable[[int], Any], draw: Callable[[], Any]) -> Items:
    def read(index: int) -> Any:
        seed(index)
        return PIXELS[index], draw()

    return Items(read)


@pytest.mark.parametrize(
    "dataset",
    [
        seeded(random.seed, random.random),
        seeded(np.random.seed, np.random.rand),
        seeded(torch.manual_seed, lambda: torch.rand(()).item()),
    ],
)
def test_a_dataset_that_seeds_by_the_index_is_kept(dataset: Items) -> None:
    """It seeds a global generator and takes numbers, but only the index decides which, so nothing is random."""
    with CachedDataset(dataset, prepare_workers=2) as kept:
        assert list(kept.targets) == [dataset[index][1] for index in range(len(dataset))]


def test_a_sample_that_cannot_be_read_is_named_as_usual() -> None:
    """An error in a second read is neither hidden nor reported twice."""

    def fail(index: int) -> Any:
        raise ValueError(f"no item {index}")

    with pytest.raises(OSError, match="sample 0 cannot be read: ValueError: no item 0"):
        CachedDataset(Items(fail))


def test_few_items_are_read_again() -> None:
    """Three items are read at most 8 times each, however large the dataset is."""
    reads: list[int] = []

    class Counted(Items):
        def __len__(self) -> int:
            return 1000

    def read(index: int) -> Any:
        reads.append(index)
        return PIXELS[index % 6], index

    CachedDataset(Counted(read), prepare_workers=1).close()
    counts = [reads.count(index) - 1 for index in range(1000)]
    looked_at = {index for index, count in enumerate(counts) if count > 1}
    assert looked_at == {0, 499, 999}
    assert max(counts) <= 9  # with one of those that tell the shape


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, lambda: torch.rand((), dtype=torch.float64).item()],
)
def test_forked_workers_draw_apart(draw: Any) -> None:
    """Two workers do not make the same frozen draws, and draws depend on torch's seed."""

    class Many:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            return PIXELS[0], draw()

    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with CachedDataset(Many(), prepare_workers=2, frozen=True) as dataset:
            drawn.append(list(dataset.targets))
    assert all(len(set(targets)) == len(targets) for targets in drawn)
    assert drawn[0] == drawn[1] != drawn[2]
