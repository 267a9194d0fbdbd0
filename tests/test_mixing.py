"""MixUp and CutMix in a ``collate_fn``: fastdata makes the same batches as whole batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DistributedSampler, Subset, default_collate
from torch.utils.data import dataloader as torch_loader
from torchvision import transforms as v1
from torchvision.transforms import v2

from data import save_image
from fastdata import (
    CachedDataset,
    CudaPrefetcher,
    DataLoader,
    FastDataWarning,
    ImageFolder,
    collate,
)
from fastdata.pixels.random_numbers import sample_keys
from simcuda import Sim

CLASSES = 7
LENGTH = 22
CROP = [v1.RandomCrop((17, 15), padding=1), v1.RandomHorizontalFlip()]
NORMALIZE = v1.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
FLOATS = [v1.ConvertImageDtype(torch.float32), NORMALIZE]
MIXUP = v2.MixUp(num_classes=CLASSES, alpha=0.6)
CUTMIX = v2.CutMix(num_classes=CLASSES)
EITHER = v2.RandomChoice([MIXUP, CUTMIX, v2.Identity()], p=[2, 2, 1])
SOMETIMES = v2.RandomApply([v2.RandomChoice([MIXUP, CUTMIX])], p=0.6)
MIXES = {"MixUp": MIXUP, "CutMix": CUTMIX, "RandomChoice": EITHER, "RandomApply": SOMETIMES}


def cached(steps: Any = (*CROP, *FLOATS), **options: Any) -> CachedDataset:
    """Return a dataset whose image i is random and differs from all others; its target is i % 7."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (LENGTH, 3, 18, 16), dtype=torch.uint8, generator=generator)
    samples = [(images[i], i % CLASSES) for i in range(LENGTH)]
    return CachedDataset(samples, transform=v1.Compose(list(steps)), seed=0, **options)


@pytest.fixture(scope="module")
def images() -> Iterator[CachedDataset]:
    with cached() as made:
        yield made


@pytest.fixture(scope="module")
def halves() -> Iterator[CachedDataset]:
    with cached([*CROP, *DTYPES["float16"]]) as made:
        yield made


def mixing_of(mix: Any) -> Callable[[Any], Any]:
    return lambda batch: mix(*default_collate(batch))


def called(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the same function in a form in which no mix is recognised, so that it is called."""
    return lambda samples: collate_fn(samples)


def layouts_of(tensor: torch.Tensor) -> list[bool]:
    """Return whether a tensor is contiguous, and whether it is channels last; with one channel it is both."""
    formats = [torch.contiguous_format, *[torch.channels_last] * (tensor.ndim == 4)]
    return [tensor.is_contiguous(memory_format=it) for it in formats]


def assert_equal(found: Any, expected: Any) -> None:
    """Check that two epochs have equally many batches, with equal types, dtypes, memory formats and bits."""
    for batch, right in zip(found, expected, strict=True):
        assert type(batch) is type(right)
        for part, other in zip(batch, right, strict=True):
            assert (part.dtype, layouts_of(part)) == (other.dtype, layouts_of(other))
            assert torch.equal(part, other)


def batches_of(dataset: Any, collate_fn: Any, **options: Any) -> list[Any]:
    """Return the batches of two epochs."""
    loader = DataLoader(dataset, batch_size=5, collate_fn=collate_fn, **options)
    made = [batch for _ in range(2) for batch in loader]
    is_found = "mixed by" in loader.report().path
    assert is_found != ("is your own" in loader.report().path)
    return made


DTYPES = {
    "float32": FLOATS,
    "float64": [v2.ToDtype(torch.float64, scale=True)],
    "float16": [v2.ToDtype(torch.float16, scale=True), NORMALIZE],
    "bfloat16": [v2.ToDtype(torch.bfloat16, scale=True)],
    "erased": [*FLOATS, v1.RandomErasing(p=0.7)],
    "gray": [v1.Grayscale(1), *FLOATS[:1]],
    "widened": [v1.Grayscale(1), FLOATS[0], v2.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))],
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("steps", DTYPES.values(), ids=DTYPES)
def test_batches_are_those_of_the_collate_fn(steps: Any, layout: torch.memory_format) -> None:
    """Pixels and labels are bit-equal for every dtype and layout, also in the shorter last batch."""
    with cached([*CROP, *steps]) as dataset:
        for mix in (MIXUP, CUTMIX):
            function = mixing_of(mix)
            expected = batches_of(dataset, called(function), memory_format=layout)
            assert_equal(batches_of(dataset, function, memory_format=layout), expected)
    assert len({tuple(labels.shape) for _, labels in expected}) > 1


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_every_engine_mixes_alike(images: CachedDataset, mix: Any) -> None:
    """Threads, worker processes and the training loop make the same draws, also for a subset."""
    function = mixing_of(mix)
    for dataset in (images, Subset(images, [3, 3, 21, 0, 8, 8, 2])):
        expected = batches_of(dataset, called(function), num_workers=2)
        assert_equal(batches_of(dataset, function), expected)
        assert_equal(batches_of(dataset, function, num_workers=2), expected)
    loader = DataLoader(images, batch_size=5, collate_fn=function, num_workers=1, workers="process")
    assert_equal(list(loader), list(DataLoader(images, batch_size=5, collate_fn=function)))


@pytest.mark.parametrize("batch_size", [1, 2, 3, LENGTH])
def test_any_number_of_samples_is_mixed(images: CachedDataset, batch_size: int) -> None:
    """A batch of one is mixed with itself; in larger ones row 0 is mixed with the last row."""
    for mix in (MIXUP, CUTMIX):
        made = [
            list(DataLoader(images, batch_size=batch_size, collate_fn=function))
            for function in (mixing_of(mix), called(mixing_of(mix)))
        ]
        assert_equal(*made)


@pytest.mark.parametrize(
    "options",
    [
        {"storage": "compressed", "codec": "lz4"},
        {"storage": "compressed", "codec": "jpeg"},
    ],
    ids=str,
)
def test_samples_of_any_store_are_mixed(options: dict[str, Any]) -> None:
    """Encoded samples, which are decoded a few at a time, give the same mixed batches."""
    with cached(**options) as dataset:
        expected = batches_of(dataset, called(mixing_of(EITHER)))
        assert_equal(batches_of(dataset, mixing_of(EITHER)), expected)


@pytest.mark.parametrize("steps", [[], [v1.CenterCrop(12)]], ids=["as stored", "cropped before"])
def test_samples_that_are_only_converted_are_mixed(steps: list[Any]) -> None:
    """If only the conversion to floats runs on batches, they are mixed too."""
    with cached([*steps, *FLOATS]) as dataset:
        expected = batches_of(dataset, called(mixing_of(MIXUP)))
        assert_equal(batches_of(dataset, mixing_of(MIXUP)), expected)


def test_cutmix_takes_uint8_and_mixup_refuses_it(images: CachedDataset) -> None:
    """CutMix takes uint8; MixUp refuses it with torch's error, and the report says why it was called."""
    with cached(CROP) as dataset:
        expected = batches_of(dataset, called(mixing_of(CUTMIX)))
        assert expected[0][0].dtype is torch.uint8
        assert_equal(batches_of(dataset, mixing_of(CUTMIX)), expected)
        loader = DataLoader(dataset, batch_size=5, collate_fn=mixing_of(MIXUP))
        with pytest.raises(RuntimeError, match="can't be cast"):
            next(iter(loader))
        assert "each batch: MixUp does not take Tensor(3, 17, 15) of uint8" in loader.report().path


def test_float_samples_are_mixed_as_they_are() -> None:
    """Stored floats are mixed without a conversion or another step."""
    samples = [(torch.rand(3, 4, 6), i % CLASSES) for i in range(9)]
    with CachedDataset(samples, seed=0) as dataset:
        for mix in (MIXUP, CUTMIX):
            expected = batches_of(dataset, called(mixing_of(mix)))
            assert_equal(batches_of(dataset, mixing_of(mix)), expected)


def test_joined_datasets_are_mixed_with_each_other(images: CachedDataset) -> None:
    """A batch may mix samples of several stores, each with its own conversion."""
    with cached([*CROP, v1.ConvertImageDtype(torch.float32)]) as other:
        joined = ConcatDataset([images, other])
        options = {"sampler": [3, 25, 40, 7, 22, 1, 21]}
        for mix in (MIXUP, CUTMIX):
            expected = batches_of(joined, called(mixing_of(mix)), **options)
            assert_equal(batches_of(joined, mixing_of(mix), **options), expected)


def test_files_are_mixed_as_they_are_read(tmp_path: Path) -> None:
    """With storage='none', samples are decoded and mixed in one call for a batch."""
    for index in range(6):
        path = tmp_path / f"class{index % 2}" / f"{index}.jpg"
        path.parent.mkdir(exist_ok=True)
        save_image(path, index, (20 + index, 18))
    steps = [v1.RandomResizedCrop(12), v1.ToTensor()]
    with ImageFolder(tmp_path, transform=v1.Compose(steps), seed=0, storage="none") as dataset:
        options = {"batch_size": 4}
        for mix in (MIXUP, CUTMIX):
            made = [
                list(DataLoader(dataset, collate_fn=function, **options))
                for function in (mixing_of(mix), called(mixing_of(mix)))
            ]
            assert_equal(*made)


def test_a_resume_mixes_as_without_one(images: CachedDataset) -> None:
    """Draws follow from the number of the batch, also after a resume."""
    arguments: dict[str, Any] = {"batch_size": 5, "collate_fn": mixing_of(EITHER), "num_workers": 2}
    loader = DataLoader(images, **arguments)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = list(batches)
    again = DataLoader(images, **arguments)
    again.load_state_dict(state)
    assert_equal(list(again), expected)


# Forms of a collate_fn


def references(batch: Any) -> Any:
    return MIXUP(*default_collate(batch))


def unpacked(batch: Any) -> Any:
    images, labels = torch.utils.data.default_collate(batch)
    images, labels = MIXUP(images, labels)
    return images, labels


def as_dict(batch: Any) -> Any:
    mixed = MIXUP(*torch_loader.default_collate(batch))
    return {"pixel_values": mixed[0], "labels": mixed[1]}


def given(batch: Any, mix: Any, stack: Any = default_collate) -> Any:
    return mix(*stack(batch))


class Mixing:
    def __init__(self, mix: Any) -> None:
        self.mix = mix

    def __call__(self, batch: Any) -> Any:
        return self.mix(*collate(batch))

    def method(self, batch: Any) -> Any:
        return self.mix(default_collate(batch))


class MixingModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = MIXUP

    def forward(self, batch: Any) -> Any:
        return self.mix(*default_collate(batch))


FORMS: dict[str, Any] = {
    "a lambda": mixing_of(MIXUP),
    "torchvision's references": references,
    "unpacked": unpacked,
    "a dict": as_dict,
    "partial": functools.partial(given, mix=MIXUP),
    "partial, by place": functools.partial(lambda mix, batch: mix(*collate(batch)), MIXUP),
    "a default": lambda batch, mix=MIXUP: mix(*default_collate(batch)),
    "an object": Mixing(MIXUP),
    "a method": Mixing(MIXUP).method,
    "a module": MixingModule(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_published_forms_are_found(images: CachedDataset, form: Any) -> None:
    """For every published form, a batch has the types that the function returns."""
    loader = DataLoader(images, batch_size=5, collate_fn=form)
    [first, *_] = list(loader)
    assert "; mixed by MixUp of collate_fn=" in loader.report().path
    [right, *_] = list(DataLoader(images, batch_size=5, collate_fn=called(form)))
    assert type(first) is type(right)
    values = list(first.values()) if isinstance(first, dict) else first
    expected = list(right.values()) if isinstance(right, dict) else right
    assert_equal([values], [expected])


def _twice(batch: Any) -> Any:
    return CUTMIX(*MIXUP(*default_collate(batch)))


def _chooses(batch: Any) -> Any:
    return MIXUP(*default_collate(batch)) if len(batch) > 2 else default_collate(batch)


def _scaled(batch: Any) -> Any:
    images, labels = MIXUP(*default_collate(batch))
    return images * 2, labels


def _changed() -> Any:
    mix = v2.MixUp(num_classes=CLASSES)
    mix.register_forward_pre_hook(lambda *_: None)
    return mixing_of(mix)


OTHERS: dict[str, tuple[Any, str]] = {
    "mixed twice": (_twice, "collate_fn= is your own"),
    "a condition": (_chooses, "collate_fn= is your own"),
    "more work": (_scaled, "collate_fn= is your own"),
    "no mix": (lambda batch: default_collate(batch), "collate_fn= is your own"),
    "other samples": (
        lambda batch: MIXUP(*default_collate(batch[::-1])),
        "collate_fn= is your own",
    ),
    "a hook": (_changed(), "collate_fn= is your own"),
    "labels_getter": (
        mixing_of(v2.MixUp(num_classes=CLASSES, labels_getter=lambda it: it[1])),
        "collate_fn= is your own: a mix has a labels_getter=",
    ),
    "two numbers": (
        mixing_of(v2.RandomChoice([v2.MixUp(num_classes=7), v2.CutMix(num_classes=8)])),
        "collate_fn= is your own: mixes need one num_classes=",
    ),
    "another step": (
        mixing_of(v2.RandomChoice([MIXUP, v2.RandomHorizontalFlip()])),
        "collate_fn= is your own: RandomChoice has other transforms than mixes",
    ),
}


@pytest.mark.parametrize(("collate_fn", "reason"), OTHERS.values(), ids=OTHERS)
def test_any_other_function_is_called(images: CachedDataset, collate_fn: Any, reason: str) -> None:
    """A function that does more than mixing gets samples, and the report says why."""
    loader = DataLoader(images, batch_size=5, collate_fn=collate_fn)
    made = list(loader)
    assert loader.report().path.endswith(reason)
    again = list(DataLoader(images, batch_size=5, collate_fn=called(collate_fn)))
    for batch, right in zip(made, again, strict=True):
        if isinstance(batch, torch.Tensor):
            assert torch.equal(batch, right)
        else:
            assert_equal([batch], [right])


def test_other_targets_are_mixed_by_the_function() -> None:
    """If targets are not class numbers, the function itself mixes the batch."""
    samples = [
        (torch.zeros(3, 4, 4), torch.nn.functional.one_hot(torch.tensor(i), 7).float())
        for i in range(6)
    ]
    with CachedDataset(samples, seed=0) as dataset:
        loader = DataLoader(dataset, batch_size=3, collate_fn=mixing_of(v2.MixUp()))
        assert "mixes need one num_classes=" in loader.report().path
        loader = DataLoader(dataset, batch_size=3, collate_fn=mixing_of(MIXUP))
        assert "called on each batch: the targets are not class numbers" in loader.report().path
        assert next(iter(loader))[1].shape == (3, 7)


def test_a_label_that_is_no_class_is_torchs_error(images: CachedDataset) -> None:
    """A label that is not a class raises the same error as without fastdata."""
    loader = DataLoader(images, batch_size=5, collate_fn=mixing_of(v2.MixUp(num_classes=3)))
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        list(loader)


def test_a_mix_needs_no_worker_init_fn(images: CachedDataset) -> None:
    """A recognised mix runs in threads, also if a worker_init_fn is given."""
    options: dict[str, Any] = {"batch_size": 5, "num_workers": 1, "worker_init_fn": print}
    assert "read by 1 thread" in DataLoader(images, collate_fn=references, **options).report().path


def test_ranks_mix_their_own_batches(images: CachedDataset) -> None:
    """Two ranks draw different numbers, as they do if the function is called."""
    for rank in range(2):
        sampler = DistributedSampler(images, 2, rank, shuffle=False)  # type: ignore[var-annotated]
        made = [
            list(DataLoader(images, batch_size=3, sampler=sampler, collate_fn=function))
            for function in (references, called(references))
        ]
        assert_equal(*made)


# timm

TIMM: list[dict[str, Any]] = [
    {},
    {"cutmix_alpha": 1.0, "label_smoothing": 0.0},
    {"mixup_alpha": 0.0, "cutmix_alpha": 0.5, "correct_lam": False},
    {"cutmix_minmax": (0.2, 0.8)},
    {"cutmix_alpha": 1.0, "prob": 0.5, "switch_prob": 0.3},
]


def timms(kind: str, **options: Any) -> Any:
    mixup = pytest.importorskip("timm.data.mixup")
    return getattr(mixup, kind)(num_classes=CLASSES, **options)


def seeded(number: int) -> None:
    """Seed NumPy's generator for the draws of a batch."""
    np.random.seed(sample_keys(0, 0, np.array([number])).view(np.uint32))


@pytest.fixture
def _own_numpy() -> Iterator[None]:
    state = np.random.get_state()
    yield
    np.random.set_state(state)


@pytest.mark.usefixtures("_own_numpy")
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_timms_mixup_is_served(images: CachedDataset, halves: CachedDataset, mode: str) -> None:
    """Pixels and labels equal timm's for the same state of NumPy's generator, which does not change."""
    arguments: dict[str, Any] = {"batch_size": 4, "drop_last": True}
    for dataset, recipes in ((images, TIMM), (halves, TIMM[-1:])):
        plain = list(DataLoader(dataset, **arguments))
        for options in recipes:
            mixup = timms("Mixup", mode=mode, **options)
            before = np.random.get_state()[1].tolist()  # type: ignore[index]
            loader = DataLoader(dataset, collate_fn=mixing_of(mixup), num_workers=1, **arguments)
            made = list(loader)
            assert before == np.random.get_state()[1].tolist()  # type: ignore[index]
            assert loader.report().path.endswith("read by 1 thread; mixed by Mixup of collate_fn=")
            expected = []
            for number, (pixels, labels) in enumerate(plain):
                seeded(number)
                expected.append(mixup(pixels.clone(), labels))
            assert_equal(made, expected)


@pytest.mark.usefixtures("_own_numpy")
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_timms_fast_collate_is_served(mode: str) -> None:
    """uint8 is mixed and rounded as by timm, from tensors and from arrays."""
    arguments: dict[str, Any] = {"batch_size": 4, "drop_last": True}
    with cached(CROP) as dataset:
        plain = list(DataLoader(dataset, **arguments))
        for number, options in enumerate(TIMM):
            mixup = timms("FastCollateMixup", mode=mode, **options)
            made = list(DataLoader(dataset, collate_fn=mixup, **arguments))
            for b, (batch, (pixels, labels)) in enumerate(zip(made, plain, strict=True)):
                seeded(b)
                each = pixels.clone()
                pairs = zip(each.numpy() if number % 2 else each, labels, strict=True)
                assert_equal([batch], [mixup([(image, int(label)) for image, label in pairs])])


def test_timms_settings_may_change_between_epochs(images: CachedDataset) -> None:
    """``mixup_enabled = False`` (mixup_off_epoch) ends the mixing of images, but still smooths labels."""
    mixup = timms("Mixup", cutmix_alpha=1.0)
    loader = DataLoader(images, batch_size=2, collate_fn=mixing_of(mixup), num_workers=1)
    plain = DataLoader(images, batch_size=2)
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(loader, plain, strict=True))
    mixup.mixup_enabled = False
    for (pixels, labels), (right, numbers) in zip(loader, plain, strict=True):
        assert torch.equal(pixels, right)
        assert labels.argmax(1).tolist() == numbers.tolist()
        assert labels.max() < 1


def test_timm_refuses_a_batch_of_odd_length(images: CachedDataset) -> None:
    """A batch of odd length raises timm's own error."""
    loader = DataLoader(images, batch_size=5, collate_fn=mixing_of(timms("Mixup")))
    with pytest.raises(AssertionError, match="Batch size should be even when using this"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("FastCollateMixup", {"mode": "half"}, "FastCollateMixup has mode='half'"),
        ("Mixup", {"multi_label": True}, "Mixup has multi_label=True"),
    ],
)
def test_unsupported_mixers_of_timm_are_called(kind: str, options: Any, reason: str) -> None:
    """Mixers of timm that are not supported are called, and the report gives the reason."""
    try:
        mixup = timms(kind, **options)
    except TypeError:
        pytest.skip("this timm has no such setting")
    collate_fn = mixup if kind == "FastCollateMixup" else mixing_of(mixup)
    with cached(CROP) as dataset:
        path = DataLoader(dataset, batch_size=4, collate_fn=collate_fn).report().path
    assert path.endswith(f"collate_fn= is your own: {reason}")


def test_mixup_in_the_training_loop_is_the_users(images: CachedDataset) -> None:
    """Calling timm's Mixup in the training loop does not change how the loader reads."""
    mixup = timms("Mixup")
    loader = DataLoader(images, batch_size=4, drop_last=True)
    for pixels, labels in loader:
        assert mixup(pixels, labels)[1].shape == (4, CLASSES)
    assert loader.report().path == "whole batches, read in the training loop: num_workers=0"


# On the device


def on_device(dataset: Any, collate_fn: Any, **options: Any) -> CudaPrefetcher:
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate_fn, num_workers=1)
    return CudaPrefetcher(loader, torch.device("cuda", 0), **options)


def assert_close(found: Any, expected: Any) -> None:
    for batch, right in zip(found, expected, strict=True):
        for part, other in zip(batch, right, strict=True):
            torch.testing.assert_close(part.cpu(), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_uint8_is_sent_and_mixed_on_the_device(gpu: Sim, images: CachedDataset, mix: Any) -> None:
    """Pixels are sent as bytes and labels as numbers, and the device mixes them as the CPU does."""
    expected = list(DataLoader(images, batch_size=4, collate_fn=mixing_of(mix)))
    with on_device(images, mixing_of(mix)) as batches:
        assert_close(batches, expected)
        assert batches.report().batch_ops == "on cuda:0, the conversion and the mix only"
        assert batches.report().in_place_bytes == LENGTH * 3 * 17 * 15
        assert batches.report().staged_bytes < LENGTH * 8 + 6 * 64


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_timms_mixup_is_mixed_on_the_device(gpu: Sim, mode: str) -> None:
    """The device mixes each row with its own shares and box."""
    mixup = timms("Mixup", cutmix_alpha=1.0, mode=mode)
    with cached() as dataset:
        subset = Subset(dataset, range(20))
        expected = list(DataLoader(subset, batch_size=4, collate_fn=mixing_of(mixup)))
        with on_device(subset, mixing_of(mixup), channels_last=True) as batches:
            found = list(batches)
        assert_close(found, expected)


def test_the_report_says_where_a_mix_runs(gpu: Sim, images: CachedDataset) -> None:
    """With batch_ops='cpu', with uint8, and with another function, mixed batches are sent, and no store is cut."""
    for dataset, collate_fn, options, where in (
        (images, references, {"batch_ops": "cpu"}, "on the CPU: batch_ops='cpu'"),
        (images, _scaled, {}, "on the CPU: collate_fn= is your own"),
        (images, _scaled, {"batch_ops": "cpu"}, "on the CPU: batch_ops='cpu'"),
    ):
        expected = list(DataLoader(dataset, batch_size=4, collate_fn=collate_fn))
        with on_device(dataset, collate_fn, **options) as batches:
            assert_close(batches, expected)
            assert batches.report().batch_ops == where
    with cached(CROP) as dataset, on_device(dataset, mixing_of(CUTMIX)) as batches:
        assert_close(batches, list(DataLoader(dataset, batch_size=4, collate_fn=mixing_of(CUTMIX))))
        assert "uint8, and sent unchanged" in batches.report().batch_ops
    why = "no effect: MixUp of collate_fn= mixes batches"
    with (
        cached(storage="device") as dataset,
        on_device(dataset, references) as batches,
        pytest.warns(FastDataWarning, match=why),
    ):
        assert_close(batches, list(DataLoader(dataset, batch_size=4, collate_fn=references)))
