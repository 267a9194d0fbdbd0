"""Subclasses of fastdata's datasets with their own attributes and methods, and wrappers around datasets."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset
from torch.utils.data import DataLoader as TorchLoader
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.transforms import v2

from data import level_samples
from fastdata import CachedDataset, DataLoader, ImageFolder, SampleBatch
from fastdata.machine import limits

Folder = Callable[..., Path]
STEPS = [v2.Resize((6, 5)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
TRANSFORM = v2.Compose(STEPS)
OTHER = v2.Compose([*STEPS, v2.Normalize([0.5] * 3, [0.25] * 3)])
LOADERS = {"torch": TorchLoader, "fastdata": DataLoader}


def refuse(*_: Any, **__: Any) -> Any:
    """A subclass's own method, which fastdata must not call."""
    raise AssertionError("fastdata called a method of the subclass")


def own_names() -> list[str]:
    """Return the names that fastdata uses in its datasets, and those that it would use without its private state."""
    with CachedDataset([(torch.zeros(3, 2, 2, dtype=torch.uint8), 0)]) as dataset:
        names = {*dir(dataset), *vars(dataset), *dir(dataset._fastdata)}
    # Names that fastdata's own state had before it was in one object.
    names |= {"transform", "epoch", "reader", "seen", "stored", "handle", "prepare", "build"}
    names |= {"compile", "serve", "refresh", "place", "loader", "list_name", "writing", "origin"}
    names |= {f"_{name}" for name in names if not name.startswith("_")}
    torchvisions = {*dir(TorchvisionFolder), "loader", "root", "samples", "imgs", "targets"}
    torchvisions |= {"transform", "target_transform", "transforms", "classes", "class_to_idx"}
    kept = names - torchvisions - {"build_cache", "from_cache"}
    return sorted(name for name in kept if not name.startswith(("__", "_fastdata")))


def make_class(base: type, name: str, body: dict[str, Any]) -> Any:
    """Make a subclass that pickle finds by its name."""
    kind = type(name, (base,), {**body, "__module__": __name__, "__qualname__": name})
    globals()[name] = kind
    return kind


def served(dataset: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches by each loader, and items."""
    for loader in LOADERS.values():
        yield from loader(dataset, batch_size=4)
    yield torch.stack([dataset[i][0] for i in range(6)]), torch.tensor(list(dataset.targets))


def assert_same(found: Any, wanted: Any) -> None:
    for (images, targets), (wanted_images, wanted_targets) in zip(
        served(found), served(wanted), strict=True
    ):
        assert torch.equal(images, wanted_images)
        assert torch.equal(targets, wanted_targets)


@pytest.mark.parametrize("storage", ["shared", "none"])
@pytest.mark.parametrize("base", [ImageFolder, CachedDataset])
@pytest.mark.parametrize("how", ["attributes", "methods"])
def test_a_subclass_may_use_any_name(
    image_folder: Folder, base: Any, how: str, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, copies, pickles and other transforms work as without the subclass's attributes and methods."""
    available = limits.Available(bytes=1 << 34, limited_by="the test")  # in texts of both datasets
    monkeypatch.setattr(limits, "available_bytes", lambda: available)
    root = str(image_folder())
    data = root if base is ImageFolder else TorchvisionFolder(root)
    values = random.Random(5)
    attributes: dict[str, Any] = {}
    body: dict[str, Any] = {}
    if how == "attributes":
        attributes = {name: values.choice([None, 0, 7, (), "text"]) for name in own_names()}
    else:
        body = dict.fromkeys(own_names(), refuse)

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, *arguments, **options)
        for name, value in attributes.items():
            setattr(self, name, value)

    kind = make_class(base, f"Own{base.__name__}", {**body, "__init__": init})
    options = {"transform": TRANSFORM, "storage": storage}
    own, plain = kind(data, **options), base(data, **options)
    try:
        assert all(getattr(own, name) == value for name, value in attributes.items())
        assert_same(own, plain)
        for copied in (copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            assert all(getattr(copied, name) == value for name, value in attributes.items())
            assert_same(copied, plain)
            base.close(copied)
        own.transform = plain.transform = OTHER
        assert_same(own, plain)
        assert repr(own) == repr(plain).replace(base.__name__, kind.__name__)
        assert base.with_transform(own, TRANSFORM).transform is TRANSFORM
    finally:
        base.close(own)
        plain.close()


def test_an_own_transform_runs_once(image_folder: Folder) -> None:
    """A subclass that keeps its transform as ``_transform`` gives the same items as over torchvision's dataset."""
    root = str(image_folder())

    def items(base: Any) -> torch.Tensor:
        class Own(base):
            def __init__(self, root: str) -> None:
                super().__init__(root)
                self._transform = OTHER

            def __getitem__(self, index: int) -> Any:
                image, label = super().__getitem__(index)
                return self._transform(image), label

        dataset = Own(root)
        return torch.cat([images for images, _ in TorchLoader(dataset, batch_size=4)])

    assert torch.equal(items(ImageFolder), items(TorchvisionFolder))


def test_attributes_may_be_set_before_the_constructor(image_folder: Folder) -> None:
    """They may be set, as with torchvision's datasets; the constructor replaces them."""
    root = str(image_folder())

    def shown(base: Any) -> Any:
        class Own(base):
            def __init__(self, root: str) -> None:
                self.transform = self.target_transform = self.transforms = 1
                self.loader = self.samples = self.targets = 2
                super().__init__(root)

        dataset = Own(root)
        return dataset.transform, dataset.target_transform, dataset.samples, dataset.targets

    assert shown(ImageFolder) == shown(TorchvisionFolder)


def test_what_fastdata_shows_is_not_assigned() -> None:
    """Assigning it to fastdata's datasets is an error, as it has no effect; a subclass may have such an attribute."""
    data = [(torch.zeros(3, 2, 2, dtype=torch.uint8), 0)]
    with CachedDataset(data) as dataset:
        for name in ("plan", "storage", "storage_plan", "skipped"):
            with pytest.raises(AttributeError, match=f"{name} of a CachedDataset .*transform"):
                setattr(dataset, name, None)


def test_a_dataset_inside_the_item_of_another_is_prepared_and_follows_changes(
    image_folder: Folder,
) -> None:
    """A second dataset that a subclass's ``__getitem__`` reads works as if it was read alone."""
    root = str(image_folder())
    to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    class Pairs(ImageFolder):
        def __init__(self) -> None:
            super().__init__(root, transform=to_tensor)
            self.masks = ImageFolder(root)

        def __getitem__(self, index: int) -> Any:
            _, label = super().__getitem__(index)
            mask = self.masks[index][0]
            return (mask if isinstance(mask, torch.Tensor) else to_tensor(mask)).mean(), label

    with Pairs() as dataset, dataset.masks:
        loader = DataLoader(dataset, batch_size=len(dataset))
        [[means, _]] = loader
        assert dataset.masks.filled_share() == 1
        dataset.masks.transform = v2.Compose([to_tensor, lambda image: image + 1])
        torch.testing.assert_close(next(iter(loader))[0], means + 1)
        dataset.masks.transform.transforms[1] = lambda image: image + 2
        torch.testing.assert_close(next(iter(loader))[0], means + 2)


# Wrappers that forward attributes


class Wrapper(Dataset[Any]):
    """Returns two views of each sample, as in contrastive learning, and has the attributes of the inner dataset."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or (name.startswith("__") and name != "__getitems__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, index: int) -> Any:
        image, *_, label = self.inner[index]
        return image, image + 1, label


class ByHelper(Wrapper):
    def __getattr__(self, name: str) -> Any:
        return Wrapper.__getattr__(self, name)


def forward(wrapper: Any, name: str) -> Any:
    return Wrapper.__getattr__(wrapper, name)


class ByFunction(Wrapper):
    """Forwards attributes by a function with another name."""

    __getattr__ = forward


class ByMethod(Wrapper):
    """Forwards attributes by a method that its ``__getattr__`` calls."""

    def forwarded(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return self.forwarded(name)


class Reading(Wrapper):
    def __getattribute__(self, name: str) -> Any:
        try:
            return super().__getattribute__(name)
        except AttributeError:
            if name in ("__class__", "__dict__", "inner"):
                raise
            return getattr(self.inner, name)


class OfC(Wrapper):
    """Forwards attributes without a line of Python, like compiled proxies."""


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("kind", [Wrapper, ByHelper, ByFunction, ByMethod, Reading, OfC])
def test_a_wrapper_that_forwards_attributes_makes_the_items(kind: Any, loader: Any) -> None:
    """Its own ``__getitem__`` is called, also in a Subset, a ConcatDataset, a StackDataset and another wrapper."""
    data = [(torch.full((3, 2, 2), float(i)), i) for i in range(6)]
    with CachedDataset(data) as inner:
        if kind is OfC:
            kind = type("OfC", (Wrapper,), {"__getattr__": inner.__getattribute__})
        wrapper = kind(inner)
        assert wrapper.targets == [0, 1, 2, 3, 4, 5]
        for dataset in (wrapper, Subset(wrapper, range(6)), ConcatDataset([wrapper])):
            (first, second, labels), *_ = loader(dataset, batch_size=4)
            assert torch.equal(second, first + 1)
            assert labels.tolist() == [0, 1, 2, 3]
        pairs = next(iter(loader(StackDataset(wrapper, inner), batch_size=2)))
        assert torch.equal(pairs[0][1], pairs[1][0] + 1)
        assert len(next(iter(loader(kind(wrapper), batch_size=2)))) == 3
        assert len(inner.__getitems__([0, 1])) == 2


def test_whole_batches_are_found_where_they_are_asked_for() -> None:
    """Torch's loader reads whole batches of a dataset, of a subset, and of a subclass that passes them on."""
    data = level_samples(6, (3, 2, 2))
    asked: list[int] = []

    class Own(CachedDataset):
        def __getitems__(self, indices: Any) -> Any:
            asked.append(len(indices))
            return super().__getitems__(indices)

    with CachedDataset(data) as dataset, Own(data) as own:
        for each in (dataset, Subset(dataset, range(6))):
            assert {*map(type, TorchLoader(each, 3, collate_fn=lambda batch: batch))} == {
                SampleBatch
            }
        assert [labels.tolist() for _, labels in TorchLoader(own, 3)] == [[0, 1, 2], [3, 4, 5]]
    assert asked == [3, 3]
