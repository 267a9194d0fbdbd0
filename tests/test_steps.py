"""Every step that runs on whole batches gives torchvision's or timm's pixels, with the same distribution of draws.

docs/served-steps.md states by how many levels pixels may differ. A step with one outcome for given draws is compared
with the user's step itself. A step with many outcomes is run along every path that its random draws can take. That
gives all outcomes and their probabilities: those of fastdata must be among them, and be as frequent.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms as v1
from torchvision.transforms import v2

from conftest import shown
from data import ArrayStore
from fastdata import AlternatingFlip, CachedDataset
from fastdata.pixels.core.library import load
from fastdata.pixels.program import Program
from fastdata.pixels.random_numbers import draw_integers, draw_uniform, sample_keys
from fastdata.pixels.readers import READERS
from fastdata.pixels.split import split_transform
from fastdata.pixels.steps import child
from test_transforms import EPOCH, SEED, images, reference, to_array, to_form

pytestmark = pytest.mark.usefixtures("levels_agree")  # pixels of all levels of instruction sets

APIS = {"v1": v1, "v2": v2}
BILINEAR, BICUBIC, NEAREST = (
    v1.InterpolationMode(name) for name in ("bilinear", "bicubic", "nearest")
)
NORM = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
both_apis = pytest.mark.parametrize("api", [v1, v2], ids=["v1", "v2"])
all_forms = pytest.mark.parametrize("form", ["pil", "tensor"])


def read_table() -> dict[tuple[str, str, str], int]:
    """Return the levels of each (step, API, form) in the table of docs/served-steps.md."""
    table: dict[tuple[str, str, str], int] = {}
    for line in (
        Path(__file__)
        .parents[1]
        .joinpath("docs", "served-steps.md")
        .read_text("utf-8")
        .splitlines()
    ):
        cells = [[part.strip() for part in cell.split(",")] for cell in line.strip("| ").split("|")]
        if len(cells) == 4 and (levels := re.match(r"\d+", cells[-1][0])):
            for step, api, form in itertools.product(*cells[:3]):
                name = re.sub(r"\[(.*)\]\(.*\)", r"\1", step)
                key = (name, api, form.lower())
                assert key not in table, f"{key} stands twice in the table"
                table[key] = int(levels[0])
    return table


LEVELS = read_table()

# A step, and after a comma what is special about it -> how to make it, so that it has one outcome for given draws.
CASES: dict[str, Callable[[Any], Any]] = {
    "CenterCrop": lambda api: api.CenterCrop((6, 40)),
    "Pad": lambda api: api.Pad((1, 2, 3, 4), fill=9),
    "Pad, mirrored": lambda api: api.Pad(3, padding_mode="reflect"),
    "RandomCrop": lambda api: api.RandomCrop((7, 5), padding=(1, 2), fill=3),
    "RandomHorizontalFlip": lambda api: api.RandomHorizontalFlip(),
    "RandomVerticalFlip": lambda api: api.RandomVerticalFlip(),
    "RandomResizedCrop": lambda api: api.RandomResizedCrop((11, 14), antialias=True),
    "RandomResizedCrop, bicubic": lambda api: api.RandomResizedCrop(
        24, interpolation=BICUBIC, antialias=True
    ),
    "Resize": lambda api: api.Resize(23),
    "Resize, longest": lambda api: api.Resize(23, max_size=25),
    "Resize, bicubic": lambda api: api.Resize((20, 31), interpolation=BICUBIC),
    "Resize, nearest": lambda api: api.Resize((50, 31), interpolation=NEAREST),
    "RandomResize": lambda api: api.RandomResize(23, 24),
    "RandomShortestSize": lambda api: api.RandomShortestSize([23], max_size=29),
    "RandomRotation": lambda api: api.RandomRotation((33, 33)),
    "RandomRotation, bilinear": lambda api: api.RandomRotation((-71, -71), interpolation=BILINEAR),
    "RandomRotation, filled": lambda api: api.RandomRotation((10, 10), fill=9, center=(3, 4)),
    "RandomAffine": lambda api: api.RandomAffine(
        (20, 20), scale=(1.25, 1.25), shear=(5, 5, -7, -7)
    ),
    "RandomAffine, bilinear": lambda api: api.RandomAffine((8, 8), interpolation=BILINEAR, fill=77),
    "RandomPerspective": lambda api: api.RandomPerspective(0.5, 1.0),
    "RandomPerspective, nearest": lambda api: api.RandomPerspective(
        0.7, 1.0, interpolation=NEAREST, fill=5
    ),
    "ColorJitter: brightness": lambda api: api.ColorJitter(brightness=(1.4, 1.4)),
    "ColorJitter: brightness, darker": lambda api: api.ColorJitter(brightness=(0.3, 0.3)),
    "ColorJitter: contrast": lambda api: api.ColorJitter(contrast=(1.7, 1.7)),
    "ColorJitter: contrast, flatter": lambda api: api.ColorJitter(contrast=(0.2, 0.2)),
    "ColorJitter: saturation": lambda api: api.ColorJitter(saturation=(1.9, 1.9)),
    "ColorJitter: saturation, grayer": lambda api: api.ColorJitter(saturation=(0.4, 0.4)),
    "ColorJitter: hue": lambda api: api.ColorJitter(hue=(0.3, 0.3)),
    "ColorJitter: hue, backwards": lambda api: api.ColorJitter(hue=(-0.1, -0.1)),
    "Grayscale": lambda api: api.Grayscale(3),
    "RandomGrayscale": lambda api: api.RandomGrayscale(1.0),
    "RandomInvert": lambda api: api.RandomInvert(1.0),
    "RandomPosterize": lambda api: api.RandomPosterize(3, 1.0),
    "RandomSolarize": lambda api: api.RandomSolarize(130, 1.0),
    "RandomAutocontrast": lambda api: api.RandomAutocontrast(1.0),
    "RandomEqualize": lambda api: api.RandomEqualize(1.0),
    "RandomAdjustSharpness": lambda api: api.RandomAdjustSharpness(1.8, 1.0),
    "RandomAdjustSharpness, softer": lambda api: api.RandomAdjustSharpness(0.2, 1.0),
    "GaussianBlur": lambda api: api.GaussianBlur((3, 7), (1.1, 1.1)),
    "GaussianBlur, hardly": lambda api: api.GaussianBlur(3, (0.2, 0.2)),
    "RandomApply": lambda api: api.RandomApply(
        [api.RandomInvert(1.0), api.RandomPosterize(3, 1.0)], 1.0
    ),
    "RandomApply, never": lambda api: api.RandomApply([api.RandomInvert(1.0)], 0.0),
    "ToTensor": lambda api: api.ToTensor(),
    "PILToTensor": lambda api: api.PILToTensor(),
    "ToImage": lambda api: api.ToImage(),
    "ToPureTensor": lambda api: api.ToPureTensor(),
    "Identity": lambda api: api.Identity(),
    "RGB": lambda api: api.RGB(),
    "ToDtype": lambda api: api.Compose([api.ToImage(), api.ToDtype(torch.float32, scale=True)]),
    "ToDtype, half": lambda api: api.Compose(
        [api.ToImage(), api.ToDtype(torch.float16, scale=True)]
    ),
    "ToDtype, unscaled": lambda api: api.Compose([api.ToImage(), api.ToDtype(torch.float32)]),
    "ConvertImageDtype": lambda api: api.ConvertImageDtype(torch.float32),
    "Normalize": lambda api: api.Compose(
        [api.ConvertImageDtype(torch.float32), api.Normalize((0.4,), (0.3,))]
    ),
}
ELSEWHERE = {
    *(
        "RandomChoice",
        "RandomOrder",
        "RandAugment",
        "TrivialAugmentWide",
        "AutoAugment",
        "AugMix",
        "RandomErasing",
    ),
    *("GaussianNoise", "RandomPhotometricDistort", "RandomChannelPermutation"),
    "AlternatingFlip",
    "ResizeToBucket",
    "ToPILImage",
}
"""Steps that have a test of their own, below, in test_buckets.py or in test_own_datasets.py."""

BUCKETS = {"CoverBucket", "CropToBucket", "RandomCropToBucket"}
"""The steps that a ``ResizeToBucket`` consists of."""


def step_of(case: str) -> str:
    return case.split(",")[0]


def test_the_docs_name_every_step_that_is_served() -> None:
    """Each step of torchvision and timm that is recognised has its rows, and each row a test."""
    named = {("timm." if api == "timm" else "") + step.split(":")[0] for step, api, _ in LEVELS}
    assert named == {*READERS, "ResizeToBucket"} - {"timm.ToNumpy"} - BUCKETS
    tested = {step_of(case) for case in CASES} | ELSEWHERE
    assert tested == {step for step, api, _ in LEVELS if api != "timm"}


def program_of(step: Any, store: ArrayStore) -> Program:
    """Return the program of one step, even of a step that would usually be prepared."""
    plan = split_transform(
        step, form=store.spec.form, channels=store.samples[0].shape[0], prepared=0
    )
    assert not plan.per_sample, plan.obstacle
    return Program(plan.batch_ops, store.spec)


def serve_many(step: Any, array: np.ndarray, form: str, count: int) -> np.ndarray:
    """Return one image as ``count`` samples of one batch, each with its own draws."""
    store = ArrayStore([array] * count, form)
    program = program_of(step, store)
    shape, dtype = program.output(array.shape) or ((), np.dtype(np.uint8))
    out = np.empty((count, *shape), dtype)
    program.run(store, np.arange(count), EPOCH, SEED, out)
    return out


def smooth_image(size: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(5)
    grid = torch.from_numpy(rng.integers(0, 256, (1, 3, 5, 6)).astype(np.float32))
    array: np.ndarray = (
        torch.nn.functional.interpolate(grid, size, mode="bicubic").clamp(0, 255)[0].byte().numpy()
    )
    return array


@pytest.mark.parametrize("case", CASES)
def test_steps_are_as_close_as_the_docs_say(case: str) -> None:
    """Noisy, smooth and plain images, in colour and grey, of several sizes, are as close to the step as docs state."""
    for (step_name, api, form), level in LEVELS.items():
        if step_name != step_of(case) or api not in APIS:
            continue
        step = CASES[case](APIS[api])
        for channels in (3, 1):
            arrays = images(6, (37, 50), (8, 7), (64, 33), channels=channels)
            arrays += [smooth_image((45, 61))[:channels], np.full((channels, 20, 30), 77, np.uint8)]
            store = ArrayStore(arrays, form)
            program = program_of(step, store)
            for index, array in enumerate(arrays):
                got, want = (
                    program.run_one(store, index, EPOCH, SEED),
                    wanted(step, to_form(array, form), index),
                )
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                worst = np.abs(got.astype(float) - want.astype(float)).max()
                assert worst <= level, (
                    f"{api}, {form}: sample {index} with {channels} channels is off by {worst}"
                )


def wanted(step: Any, sample: Any, index: int) -> np.ndarray:
    """Return the result of the step itself, with the parameters that fastdata draws for this sample."""
    if type(step).__name__ != "RandomPerspective":
        return reference([step], sample, index)
    api = (
        v2.functional
        if type(step).__module__.startswith("torchvision.transforms.v2")
        else v1.functional
    )
    width, height = (
        (sample.shape[-1], sample.shape[-2]) if isinstance(sample, torch.Tensor) else sample.size
    )
    reach = [int(step.distortion_scale * (length // 2)) + 1 for length in (width, height)]
    key = sample_keys(SEED, EPOCH, np.array([index]))
    moved = [int(draw_integers(key, child(0, 0), k, reach[k % 2])[0]) for k in range(8)]
    left, top, right, bottom = 0, 0, width - 1, height - 1
    corners = [[left, top], [right, top], [right, bottom], [left, bottom]]
    ends = [
        [
            moved[2 * k] if x == 0 else width - reach[0] + moved[2 * k],
            moved[2 * k + 1] + (y > 0) * (height - reach[1]),
        ]
        for k, (x, y) in enumerate(corners)
    ]
    return to_array(api.perspective(sample, corners, ends, step.interpolation, step.fill))


@all_forms
def test_an_alternating_flip_shows_both_sides_of_each_image_in_two_epochs(form: str) -> None:
    """Half of the images are mirrored in an epoch, and the others in the next, whatever the seed."""
    samples = images(400, (3, 4))
    store = ArrayStore(samples, form)
    program = program_of(AlternatingFlip(), store)
    index_B = np.arange(400)
    epochs = []
    for epoch, seed in ((0, 1), (1, 2), (2, 3)):
        out = np.empty((400, 3, 3, 4), np.uint8)
        program.run(store, index_B, epoch, seed, out)
        is_mirrored = [
            np.array_equal(image, sample[..., ::-1])
            for image, sample in zip(out, samples, strict=True)
        ]
        is_same = [
            np.array_equal(image, sample) for image, sample in zip(out, samples, strict=True)
        ]
        assert is_same == [not each for each in is_mirrored]
        epochs.append(is_mirrored)
    assert epochs[1] == [not each for each in epochs[0]]
    assert epochs[2] == epochs[0]
    assert 150 < sum(epochs[0]) < 250


@all_forms
def test_an_alternating_flip_without_an_epoch_is_random(form: str) -> None:
    """Without index and epoch, half of the images are mirrored."""
    [pixels] = images(1, (3, 4))
    torch.manual_seed(0)
    flips = [to_array(AlternatingFlip()(to_form(pixels, form))) for _ in range(60)]
    mirrored = sum(np.array_equal(each, pixels[..., ::-1]) for each in flips)
    assert 15 < mirrored < 45
    assert mirrored + sum(np.array_equal(each, pixels) for each in flips) == 60


SMALL = [(8, 8), (5, 9), (31, 104), (89, 44)]


@both_apis
@all_forms
@pytest.mark.parametrize("interpolation", [NEAREST, BILINEAR], ids=["nearest", "bilinear"])
def test_warps_at_any_angle(api: Any, form: str, interpolation: Any) -> None:
    """Pixels are close even at right angles, where places are between two pixels and a matrix's last bit decides."""
    how = {"interpolation": interpolation}
    for angle, fill, center in itertools.product(
        (45, 90, 270, 333.25), (7, None), (None, (27, 32))
    ):
        steps = [
            api.RandomRotation((angle, angle), center=center, fill=fill, **how),
            api.RandomRotation((angle, angle), expand=form == "pil", fill=fill, **how),
            api.RandomAffine((angle, angle), scale=(0.5, 0.5), center=center, fill=fill, **how),
            api.RandomAffine(
                (angle, angle), scale=(2, 2), shear=(45, 45, 10, 10), fill=fill, **how
            ),
        ]
        for step in steps:
            assert_close(step, images(len(SMALL), *SMALL, channels=1), form)


@both_apis
@all_forms
@pytest.mark.parametrize("interpolation", [NEAREST, BILINEAR], ids=["nearest", "bilinear"])
def test_perspectives_of_small_images(api: Any, form: str, interpolation: Any) -> None:
    """Equations of tiny images are nearly singular; they have torchvision's solution, or are an error as there."""
    sizes = list(itertools.product((2, 3, 5, 8), (2, 4, 7)))
    for distortion, fill in itertools.product((0.5, 1.0), (7, None)):
        step = api.RandomPerspective(distortion, 1.0, interpolation=interpolation, fill=fill)
        assert_close(step, images(4 * len(sizes), *sizes, channels=1), form)


def assert_close(step: Any, arrays: list[np.ndarray], form: str) -> None:
    """Assert that the warp of each image is as close to the step itself as the docs state."""
    api = "v2" if type(step).__module__.startswith("torchvision.transforms.v2") else "v1"
    store = ArrayStore(arrays, form)
    program = program_of(step, store)
    for index, array in enumerate(arrays):
        try:
            want = wanted(step, to_form(array, form), index)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match="corners that are on one line"):
                program.run_one(store, index, EPOCH, SEED)
            continue
        got = program.run_one(store, index, EPOCH, SEED)
        assert got.shape == want.shape
        worst = np.abs(got.astype(int) - want).max()
        assert worst <= LEVELS[type(step).__name__, api, form], (
            f"{step} of {array.shape} is off by {worst}"
        )


# All outcomes of a step


class Paths:
    """Runs a function along every path that its random draws can take, and computes the probability of each."""

    def __init__(self) -> None:
        self._path: list[list[int]] = []  # of each choice: what is taken, and of how many
        self._at = 0
        self.chance = 1.0

    def choose(self, shares: Sequence[float]) -> int:
        """Take one of several ways; ways with a share of 0 are left out."""
        open_ways = [way for way, share in enumerate(shares) if share > 0]
        if self._at == len(self._path):
            self._path.append([0, len(open_ways)])
        way = open_ways[self._path[self._at][0]]
        self._at += 1
        self.chance *= shares[way] / sum(shares)
        return way

    def run_all(self, run: Callable[[], Any]) -> Iterator[tuple[Any, float]]:
        """Return the result of each path, and its probability."""
        while True:
            self._at, self.chance = 0, 1.0
            yield run(), self.chance
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            self._path[-1][0] += 1

    # These replace functions of torch, Python and NumPy.

    def randint(
        self, *bounds: Any, low: int = 0, high: int = 0, size: Any = None, dtype: Any = None
    ) -> torch.Tensor:
        if bounds:
            high, size = bounds
        numbers = [low + self.choose([1] * (high - low)) for _ in range(int(np.prod(size)))]
        return torch.tensor(numbers).reshape(size)

    def rand(self, size: Any) -> Any:
        return Uniform(self) if size in ((), 1) else [Uniform(self) for _ in range(*size)]

    def randperm(self, count: int) -> torch.Tensor:
        orders = list(itertools.permutations(range(count)))
        return torch.tensor(orders[self.choose([1] * len(orders))])

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self.choose([1] * len(values))]

    def pick_several(
        self, values: Sequence[Any], count: int, replace: bool = True, p: Any = None
    ) -> list[Any]:
        assert replace or count == 1
        return [values[self.choose([1] * len(values) if p is None else p)] for _ in range(count)]


class Uniform:
    """Stands for a number in [0, 1) that code only compares with others."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def __lt__(self, bound: float) -> bool:
        return self._paths.choose([bound, 1 - bound]) == 0

    def __gt__(self, bound: float) -> bool:
        return not self < bound

    __le__, __ge__ = __lt__, __gt__

    def item(self) -> Uniform:
        return self


def outcomes_of(step: Any, sample: Any) -> dict[bytes, float]:
    """Return all different outcomes of a step, and the probability of each."""
    paths = Paths()
    chances: dict[bytes, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("randint", "rand", "randperm"):
            patch.setattr(torch, name, getattr(paths, name))
        patch.setattr(random, "random", lambda: Uniform(paths))
        patch.setattr(random, "choice", paths.pick)
        patch.setattr(np.random, "choice", paths.pick_several)
        for array, chance in paths.run_all(lambda: to_array(step(sample))):
            chances[array.tobytes()] = chances.get(array.tobytes(), 0.0) + chance
    assert sum(chances.values()) == pytest.approx(1)
    return chances


def assert_served(step: Any, array: np.ndarray, form: str, level: int, count: int) -> None:
    """Assert that each served image is an outcome of the step, within ``level``, and that outcomes are as frequent.

    If draws are right, a count is off by more than 5 standard deviations once in two million times.
    """
    outcomes = outcomes_of(step, to_form(array, form))
    every = np.stack([np.frombuffer(outcome, np.uint8) for outcome in outcomes]).astype(np.int16)
    chances, found = np.array([*outcomes.values()]), np.zeros(len(outcomes))
    for served, times in Counter(
        got.tobytes() for got in serve_many(step, array, form, count)
    ).items():
        distances = np.abs(every - np.frombuffer(served, np.uint8))
        nearest = int(distances.sum(axis=1).argmin())
        assert distances[nearest].max() <= level, f"off by {distances[nearest].max()}"
        found[nearest] += times
    deviations = np.abs(found - count * chances) / np.sqrt(count * chances * (1 - chances) + 1)
    worst = int(deviations.argmax())
    assert deviations[worst] < 5, (
        f"an outcome of chance {chances[worst]:.4f} came {found[worst]} times of {count}"
    )


def kolmogorov(a: Any, b: Any) -> float:
    """Return the largest distance of two empirical distributions."""
    a, b = np.sort(a), np.sort(b)
    every = np.concatenate([a, b])
    return float(
        np.abs(
            np.searchsorted(a, every, "right") / len(a)
            - np.searchsorted(b, every, "right") / len(b)
        ).max()
    )


@pytest.mark.parametrize(
    ("api", "form"),
    [(api, form) for step, api, form in LEVELS if step == "AutoAugment" and api in APIS],
)
@pytest.mark.parametrize(
    "policy", ["RandAugment", "TrivialAugmentWide", "AutoAugment", "AutoAugment, CIFAR10"]
)
def test_automatic_augmentation(policy: str, api: str, form: str) -> None:
    """Every outcome of a policy is as frequent as in torchvision's code, and has its pixels."""
    name, _, which = policy.partition(", ")
    options: dict[str, Any] = {
        "RandAugment": {"num_ops": 1},
        "TrivialAugmentWide": {"num_magnitude_bins": 3},
    }.get(name, {})
    if which:
        options = {"policy": v1.AutoAugmentPolicy[which], "interpolation": BILINEAR, "fill": 100}
    step = getattr(APIS[api], name)(**options)
    assert_served(step, smooth_image((13, 16)), form, LEVELS[name, api, form], 3000)


@both_apis
def test_steps_can_be_nested_to_any_depth(api: Any) -> None:
    """Four nested RandomApply draw independently of each other, and so do two such nests."""

    def nest(step: Any) -> Any:
        for p in (0.8, 0.8, 0.8, 0.8):
            step = api.RandomApply([step], p)
        return step

    nests = api.Compose([nest(api.RandomVerticalFlip(0.8)), nest(api.RandomInvert(0.8))])
    assert_served(nests, smooth_image((9, 8)), "pil", 0, 4000)


@both_apis
def test_several_ops_in_turn(api: Any) -> None:
    """The ops of RandAugment follow one another, drawn independently."""
    step = api.RandAugment(num_ops=2, magnitude=5)
    assert_served(step, smooth_image((9, 8)), "pil", 0, 4000)


@both_apis
@all_forms
def test_jitter_in_random_order(api: Any, form: str) -> None:
    """ColorJitter applies its four factors in any of 24 orders, each about equally often."""
    step = api.ColorJitter(
        **dict.fromkeys(("brightness", "contrast", "saturation"), (1.25, 1.25)), hue=(0.125, 0.125)
    )
    assert_served(step, smooth_image((13, 16)), form, 0 if form == "pil" else 4, 2000)


@all_forms
def test_photometric_distortion(form: str) -> None:
    """RandomPhotometricDistort applies each of its steps, and each order of channels, as often as torchvision."""
    fixed = dict.fromkeys(("brightness", "contrast", "saturation"), (1.25, 1.25))
    step = v2.RandomPhotometricDistort(**fixed, hue=(0.125, 0.125), p=0.75)
    assert_served(
        step, smooth_image((13, 16)), form, LEVELS["RandomPhotometricDistort", "v2", form], 3000
    )


@all_forms
def test_permuted_channels(form: str) -> None:
    """Each order of channels is equally likely."""
    assert_served(v2.RandomChannelPermutation(), smooth_image((4, 5)), form, 0, 1000)


@both_apis
@all_forms
def test_choice_and_order(api: Any, form: str) -> None:
    """RandomChoice takes each step as often as its weight asks; RandomOrder takes both orders."""
    gray = np.full((3, 4, 4), 100, np.uint8)
    invert, brighter = api.RandomInvert(1.0), api.ColorJitter(brightness=(1.5, 1.5))
    chosen = serve_many(api.RandomChoice([invert, brighter], p=[0.2, 0.8]), gray, form, 2000)[
        :, 0, 0, 0
    ].tolist()
    assert set(chosen) == {155, 150}
    assert 0.16 < chosen.count(155) / 2000 < 0.24
    ordered = serve_many(api.RandomOrder([invert, brighter]), gray, form, 2000)[:, 0, 0, 0].tolist()
    assert set(ordered) == {232, 105}
    assert 0.45 < ordered.count(232) / 2000 < 0.55
    assert_served(api.RandomApply([invert, brighter], 0.25), gray, form, 0, 2000)


# AugMix


class Script:
    """Replaces torch's functions, so that AugMix draws fastdata's numbers for one sample."""

    def __init__(self, step: Any, ops: np.ndarray, index: int) -> None:
        self._key, self._severity = sample_keys(SEED, EPOCH, np.array([index])), step.severity
        self._chain, self._depth = -1, 0
        kept, weights = mixing_shares(ops)
        self._shares = [np.array([[kept, 1 - kept]]), weights[None] / (1 - kept)]

    def dirichlet(self, params: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._shares.pop(0)).float()

    def randint(
        self, *bounds: Any, low: int = 0, high: int = 0, size: Any = None, dtype: Any = None
    ) -> torch.Tensor:
        if low:
            self._chain, self._depth = self._chain + 1, 0
            return torch.tensor([1 + self._integer(0, 3)])
        if bounds[0] == 2:
            return torch.tensor([self._is_negative()])
        if bounds[0] == self._severity:
            return torch.tensor(self._integer(4 * self._depth + 1, self._severity)).reshape(
                bounds[1]
            )
        self._depth += 1
        return torch.tensor(self._integer(4 * self._depth, bounds[0])).reshape(bounds[1])

    def rand(self, size: Any) -> torch.Tensor:
        return torch.tensor(0.0 if self._is_negative() else 1.0)

    def _is_negative(self) -> bool:
        return bool(draw_uniform(self._key, self._at(), 4 * self._depth + 2)[0] < 0.5)

    def _integer(self, draw: int, count: int) -> int:
        return int(draw_integers(self._key, self._at(), draw, count)[0])

    def _at(self) -> int:
        return child(0, self._chain)


def mixing_shares(ops: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the weight of the image itself, and those of the chains."""
    numbers = load().numbers
    weights = [
        float(op["mix"]["weight"])
        for op in ops
        if op["code"] == numbers["OP_MIX"] and op["mix"]["part"] != numbers["MIX_END"]
    ]
    return weights[0], np.array(weights[1:])


@pytest.mark.parametrize("api", APIS)
@all_forms
def test_aug_mix(api: str, form: str) -> None:
    """For the same draws AugMix gives torchvision's pixels, whatever the lengths of its chains."""
    step, array = APIS[api].AugMix(severity=4), smooth_image((15, 18))
    served = serve_many(step, array, form, 20).astype(int)
    program = program_of(step, ArrayStore([array], form))
    ops = program.draw(np.arange(20), EPOCH, SEED, np.full((20, 3), array.shape, np.int32))
    for index in range(20):
        script = Script(step, ops[index], index)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randint", script.randint)
            patch.setattr(torch, "rand", script.rand)
            step._sample_dirichlet = script.dirichlet
            want = to_array(step(to_form(array, form))).astype(int)
        assert np.abs(served[index] - want).max() <= LEVELS["AugMix", api, form]


@pytest.mark.parametrize("alpha", [0.4, 1.0, 3.0])
def test_shares_of_aug_mix(alpha: float) -> None:
    """The weights of AugMix have a Dirichlet distribution: their sum is 1, and each has the right beta distribution."""
    mixed = [mixing_shares(ops) for ops in drawn_records(v1.AugMix(alpha=alpha), (8, 8), 4000)]
    shares = np.array([weights / (1 - kept) for kept, weights in mixed])
    assert np.allclose(shares.sum(axis=1), 1)
    wanted = np.random.default_rng(0).dirichlet([alpha] * 3, 40000)
    for place in range(3):
        assert kolmogorov(shares[:, place], wanted[:, place]) < 0.03


# Draws from ranges


def sides_of(records: np.ndarray) -> np.ndarray:
    """Return top, left, height and width of boxes that are resized."""
    boxes = records["resize"]["box"]
    return np.stack([boxes[side] for side in ("top", "left", "height", "width")], 1)


def is_value(records: np.ndarray, kind: str) -> np.ndarray:
    """Return True if an op changes values in this way."""
    numbers = load().numbers
    kinds = records["value"]["kind"]
    return (records["code"] == numbers["OP_VALUE"]) & (kinds == numbers[kind])


def drawn_records(step: Any, size: tuple[int, int], count: int, form: str = "pil") -> np.ndarray:
    """Return the drawn records ``OP`` of ``count`` samples."""
    program = program_of(step, ArrayStore([np.zeros((3, *size), np.uint8)] * 2, form))
    shapes = np.broadcast_to(np.array([3, *size], np.int32), (count, 3))
    return program.draw(np.arange(count), 0, 0, shapes)


@both_apis
def test_crop_boxes_are_distributed_as_torchvisions(api: Any) -> None:
    """Boxes of RandomResizedCrop have torchvision's distribution of top, left, height and width."""
    step = api.RandomResizedCrop(8, scale=(0.1, 0.9))
    boxes = sides_of(drawn_records(step, (90, 120), 3000)[:, 0])
    torch.manual_seed(0)
    sample = torch.zeros(3, 90, 120)
    theirs = np.array(
        [v1.RandomResizedCrop.get_params(sample, step.scale, step.ratio) for _ in range(3000)]
    )
    for ours, wanted in zip(boxes.T, theirs.T, strict=True):
        assert kolmogorov(ours, wanted) < 0.045


@both_apis
def test_matrices_are_torchvisions(api: Any) -> None:
    """The matrix of an affine map equals torchvision's in every bit, for any angle, shear, scale and translation."""
    step = api.RandomAffine(
        (-180, 180), translate=(0.3, 0.4), scale=(0.5, 2.0), shear=(-30, 30, -30, 30)
    )
    size = (61, 83)
    records = drawn_records(step, size, 500)[:, 0]
    keys = sample_keys(0, 0, np.arange(500))
    limits = [
        (-180, 180),
        (-0.3 * size[1], 0.3 * size[1]),
        (-0.4 * size[0], 0.4 * size[0]),
        (0.5, 2),
        (-30, 30),
        (-30, 30),
    ]
    drawn = np.stack(
        [
            low + draw_uniform(keys, 0, number) * (high - low)
            for number, (low, high) in enumerate(limits)
        ],
        axis=1,
    )
    for record, (angle, x, y, scale, *shear) in zip(records, drawn.tolist(), strict=True):
        middle = [size[1] * 0.5, size[0] * 0.5]
        functional = v1.functional if api is v1 else v2.functional._geometry  # a rounding apart
        matrix = functional._get_inverse_affine_matrix(
            middle, angle, [round(x), round(y)], scale, shear
        )
        assert record["warp"]["map"][:6].tolist() == matrix


@both_apis
@pytest.mark.parametrize("value", [0, (0.5, 1.5, 2.5), "random"])
def test_erasing(api: Any, value: Any) -> None:
    """RandomErasing replaces only a rectangle of normalised floats, with torchvision's sizes and values."""
    step = api.RandomErasing(1.0, scale=(0.05, 0.3), value=value)
    torch.manual_seed(0)
    sample = torch.zeros(3, 40, 30)
    theirs = [
        np.prod(v1.RandomErasing.get_params(sample, step.scale, step.ratio, [0.0])[2:4])
        for _ in range(1500)
    ]
    boxes = erased_boxes(step)
    assert kolmogorov([box[0].size for box in boxes], theirs) < 0.12
    joined = np.concatenate([box.reshape(3, -1) for box in boxes], axis=1)
    if value == "random":
        assert (
            kolmogorov(joined.ravel()[:20000], np.random.default_rng(0).standard_normal(20000))
            < 0.02
        )
    else:
        assert (joined == np.broadcast_to(np.array(value, np.float32), 3)[:, None]).all()


def erased_boxes(step: Any) -> list[np.ndarray]:
    """Return the values in the erased box of each of 300 normalised images that have one."""
    (array,) = images(1, (40, 30))
    before = [v1.ToTensor(), v1.Normalize((0.5,), (0.25,))]
    (plain,) = serve_many(v1.Compose(before), array, "pil", 1)
    boxes = []
    for got in serve_many(v1.Compose([*before, step]), array, "pil", 300):
        changed = (got != plain).any(axis=0)
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        if len(rows):
            boxes.append(got[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return boxes


@pytest.mark.parametrize(
    "step",
    [
        v2.RandomErasing(1.0, value=0.25),
        v2.RandomErasing(1.0, value="random"),
        v2.GaussianNoise(0.1, 0.3),
        v2.GaussianNoise(0.1, 0.3, clip=False),
    ],
    ids=str,
)
def test_normalize_behind_erasing_and_noise(step: Any) -> None:
    """Erased and noisy values before Normalize are normalised like all others."""
    store = ArrayStore(images(20, (12, 9)), "tensor")
    first = [v2.ToDtype(torch.float32, scale=True), step]
    norm = v2.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    changed, both = (program_of(v2.Compose(steps), store) for steps in (first, [*first, norm]))
    for index in range(20):
        want = norm(torch.from_numpy(changed.run_one(store, index, 0, 0))).numpy()
        np.testing.assert_allclose(both.run_one(store, index, 0, 0), want, atol=1e-5)


def test_noise() -> None:
    """GaussianNoise has its mean and deviation and is clipped, among uint8 and among floats."""
    gray = np.full((3, 50, 40), 128, np.uint8)
    (noisy,) = serve_many(v2.GaussianNoise(0.05, 0.1), gray, "tensor", 1)
    assert abs(noisy.mean() - 128 - 0.05 * 255) < 1
    assert abs(noisy.std() - 0.1 * 255) < 1
    floats = [
        v2.ToDtype(torch.float32, scale=True),
        v2.GaussianNoise(0.0, 0.3),
        v2.Normalize((0.5,), (0.5,)),
    ]
    (normal,) = serve_many(v2.Compose(floats), gray, "tensor", 1)
    assert -1 == normal.min() < normal.max() == 1
    assert abs(np.median(normal) - (128 / 255 - 0.5) / 0.5) < 0.05


@both_apis
def test_expanding_rotations(api: Any) -> None:
    """An expanding rotation has the size that Pillow gives it."""
    step = api.RandomRotation((25, 25), expand=True)
    (array,) = images(1, (30, 41))
    store = ArrayStore([array])
    assert np.array_equal(
        program_of(step, store).run_one(store, 0, 0, 0), to_array(step(to_form(array, "pil")))
    )


def test_sizes_are_drawn_from_the_whole_range() -> None:
    """RandomResize and RandomShortestSize draw every size that torchvision draws, and no other."""
    store = ArrayStore(images(1, (20, 30)))
    for step in (v2.RandomResize(5, 9), v2.RandomShortestSize([6, 11], max_size=14)):
        program = program_of(step, store)
        shapes = {program.run_one(store, 0, epoch, 3).shape for epoch in range(60)}
        wanted = {to_array(step(to_form(store.samples[0], "pil"))).shape for _ in range(60)}
        assert shapes == wanted


# timm


@pytest.fixture
def timm_data() -> Any:
    return pytest.importorskip("timm.data")


TIMM_OPS = {
    *(
        "AutoContrast",
        "Equalize",
        "Invert",
        "Rotate",
        "Posterize",
        "PosterizeIncreasing",
        "PosterizeOriginal",
    ),
    *(
        "Solarize",
        "SolarizeIncreasing",
        "SolarizeAdd",
        "Color",
        "ColorIncreasing",
        "Contrast",
        "ContrastIncreasing",
    ),
    *(
        "Brightness",
        "BrightnessIncreasing",
        "Sharpness",
        "SharpnessIncreasing",
        "ShearX",
        "ShearY",
        "TranslateX",
    ),
    *(
        "TranslateY",
        "TranslateXRel",
        "TranslateYRel",
        "Desaturate",
        "GaussianBlur",
        "GaussianBlurRand",
    ),
}


def test_timm_has_no_other_ops(timm_data: Any) -> None:
    """All ops that timm's RandAugment and AutoAugment choose from are known."""
    assert {*timm_data.auto_augment.NAME_TO_OP} == TIMM_OPS


@pytest.mark.parametrize("name", sorted(TIMM_OPS - {"GaussianBlurRand"}))
def test_timm_ops(timm_data: Any, name: str) -> None:
    """A timm op is applied, with each sign and filter, as often as in timm, and has its pixels."""
    hparams = {"translate_const": 7, "img_mean": (124, 116, 104)}
    for magnitude in (3, 6, 9):
        op = timm_data.auto_augment.AugmentOp(name, 0.75, magnitude, hparams)
        step = timm_data.auto_augment.RandAugment([op], num_layers=1)
        assert_served(
            step, smooth_image((13, 16)), "pil", LEVELS["RandAugment", "timm", "pil"], 2000
        )


def test_timm_op_that_blurs_at_random(timm_data: Any) -> None:
    """The radius is uniform from 0.1 to twice the magnitude's share of 10, and the pixels are Pillow's."""
    op = timm_data.auto_augment.AugmentOp("GaussianBlurRand", 1.0, 6)
    step, array = timm_data.auto_augment.RandAugment([op], num_layers=1), smooth_image((13, 16))
    store = ArrayStore([array] * 300)
    program = program_of(step, store)
    shapes = np.full((300, 3), array.shape, np.int32)
    radius = program.draw(np.arange(300), EPOCH, SEED, shapes)[:, 0]["value"]["amount"]
    assert kolmogorov(radius, np.linspace(0.1, 1.2, 300)) < 0.1
    for got, each in zip(serve_many(step, array, "pil", 300)[:20], radius.tolist(), strict=False):
        assert np.array_equal(
            got, to_array(to_form(array, "pil").filter(ImageFilter.GaussianBlur(each)))
        )


@pytest.mark.parametrize("name", ["original", "originalr", "v0r"])
def test_timm_auto_augment(timm_data: Any, name: str) -> None:
    """Each policy is as frequent as in timm, and has its pixels."""
    step = timm_data.auto_augment_transform(
        name, {"translate_const": 7, "img_mean": (124, 116, 104)}
    )
    assert_served(step, smooth_image((9, 8)), "pil", LEVELS["AutoAugment", "timm", "pil"], 4000)


@pytest.mark.parametrize(
    "config", ["rand-m9-n1-inc1", "rand-m5-n1-tweights", "rand-m7-n1-p0.8-t3a"]
)
def test_timm_rand_augment(timm_data: Any, config: str) -> None:
    """Each op is as frequent as in timm, with and without weights."""
    step = timm_data.rand_augment_transform(
        config, {"translate_const": 7, "img_mean": (124, 116, 104)}
    )
    assert_served(step, smooth_image((13, 16)), "pil", LEVELS["RandAugment", "timm", "pil"], 3000)


@pytest.mark.parametrize(
    "config", ["rand-m9-mstd0.5-inc1", "rand-m9-mstd101-inc1", "rand-m4-mstd3-mmax12"]
)
def test_timm_magnitudes(timm_data: Any, config: str) -> None:
    """Magnitudes with mstd have timm's distribution around their mean."""
    step = timm_data.rand_augment_transform(config, {"translate_const": 7})
    (op,) = step.ops = [op for op in step.ops if op.name.startswith("Brightness")]
    records = drawn_records(step, (20, 20), 20000)
    factors: list[float] = []
    op.prob, op.aug_fn = 1.0, lambda image, factor, **rest: factors.append(factor)
    random.seed(0)
    for _ in range(20000):
        op(None)
    assert kolmogorov(records["value"]["amount"][is_value(records, "BRIGHTNESS")], factors) < 0.02


def test_timm_layers(timm_data: Any) -> None:
    """Each of two layers chooses each of 15 ops equally often, and leaves half of the images unchanged."""
    records = drawn_records(
        timm_data.rand_augment_transform("rand-m9-mstd0.5-inc1"), (20, 20), 5000
    )
    applied = (records["code"] > 0).sum(axis=1)
    for count, share in enumerate((0.25, 0.5, 0.25)):
        assert abs((applied == count).mean() - share) < 0.03
    for kind in ("BRIGHTNESS", "EQUALIZE", "SOLARIZE_ADD"):
        assert abs(is_value(records, kind).sum() / 5000 - 1 / 15) < 0.015


def test_timm_auto_augment_with_spread_magnitudes(timm_data: Any) -> None:
    """With mstd, images change about as much as with timm's own code, on average and in deviation."""
    step, array = (
        timm_data.auto_augment_transform("original-mstd0.5", {"translate_const": 7}),
        smooth_image((9, 8)),
    )
    random.seed(0)
    theirs = [
        np.abs(to_array(step(to_form(array, "pil"))).astype(int) - array).mean()
        for _ in range(1000)
    ]
    ours = np.abs(serve_many(step, array, "pil", 3000).astype(int) - array).mean(axis=(1, 2, 3))
    assert kolmogorov(theirs, ours) < 0.06


@pytest.mark.parametrize("interpolation", ["random", "bilinear", "bicubic", "nearest", "lanczos"])
def test_timm_crop(timm_data: Any, interpolation: str) -> None:
    """Boxes are distributed as timm's, filters alternate, and pixels are those of the same box and filter."""
    step = timm_data.transforms.RandomResizedCropAndInterpolation(
        11, scale=(0.1, 0.9), interpolation=interpolation
    )
    records = drawn_records(step, (90, 120), 3000)
    boxes = sides_of(records[records["code"] > 0])
    random.seed(0)
    theirs = np.array(
        [step.get_params(torch.zeros(3, 90, 120), step.scale, step.ratio) for _ in range(3000)]
    )
    for ours, wanted in zip(boxes.T, theirs.T, strict=True):
        assert kolmogorov(ours, wanted) < 0.045
    (array,) = images(1, (31, 40))
    store = ArrayStore([array] * 40)
    shapes = np.full((40, 3), array.shape, np.int32)
    records = program_of(step, store).draw(np.arange(40), EPOCH, SEED, shapes)
    seen = set()
    drawn = records[records["code"] > 0]
    filters = {load().numbers.get(mode.name): mode for mode in v1.InterpolationMode}
    served = serve_many(step, array, "pil", 40)
    for got, record, box in zip(served, drawn, sides_of(drawn).tolist(), strict=True):
        mode = filters[int(record["resize"]["interpolation"])]
        seen.add(mode.value)
        want = v1.functional.resized_crop(to_form(array, "pil"), *box, step.size, mode)
        assert np.array_equal(got, to_array(want))
    assert seen == ({"bilinear", "bicubic"} if interpolation == "random" else {interpolation})


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_timm_erasing(timm_data: Any, mode: str) -> None:
    """Rectangles are distributed as timm's; their values are 0, or normal numbers per channel or per pixel."""
    erasing = timm_data.random_erasing.RandomErasing
    boxes = erased_boxes(erasing(1.0, min_area=0.05, mode=mode, device="cpu"))
    theirs = erasing(1.0, min_area=0.05, device="cpu")
    random.seed(0)
    areas = np.array([int((theirs(torch.ones(3, 40, 30))[0] == 0).sum()) for _ in range(1000)])
    assert kolmogorov([box[0].size for box in boxes], areas[areas > 0]) < 0.12
    pixels = [box.reshape(3, -1) for box in boxes]
    if mode == "pixel":
        joined = np.concatenate(pixels, axis=1).ravel()[:20000]
        assert kolmogorov(joined, np.random.default_rng(0).standard_normal(20000)) < 0.02
        return
    assert all((box == box[:, :1]).all() for box in pixels)
    colours = np.concatenate([box[:, 0] for box in pixels])
    if mode == "const":
        assert not colours.any()
    else:
        assert kolmogorov(colours, np.random.default_rng(0).standard_normal(20000)) < 0.06


def test_timm_erases_several_rectangles(timm_data: Any) -> None:
    """The number of erased rectangles, and the share of the image that they cover, have timm's distribution."""
    erasing = timm_data.random_erasing.RandomErasing(0.8, max_count=3, device="cpu")
    random.seed(0)
    theirs = [float((erasing(torch.ones(3, 40, 30))[0] == 0).sum()) for _ in range(2000)]
    white = np.full((3, 40, 30), 255, np.uint8)
    served = serve_many(v1.Compose([v1.ToTensor(), erasing]), white, "pil", 2000)
    assert kolmogorov((served[:, 0] == 0).sum(axis=(1, 2)), theirs) < 0.05


@all_forms
def test_timm_conversions(timm_data: Any, form: str) -> None:
    """MaybeToTensor and MaybePILToTensor give timm's values exactly; ToNumpy runs per sample, and is named."""
    (array,) = images(1, (7, 6))
    for step in (timm_data.transforms.MaybeToTensor(), timm_data.transforms.MaybePILToTensor()):
        (got,) = serve_many(step, array, form, 1)
        want = to_array(step(to_form(array, form)))
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)
    assert "MaybePILToTensor" in split_transform(timm_data.transforms.ToNumpy()).reason


def test_timm_training_transform(timm_data: Any) -> None:
    """The transform of timm's create_transform for training runs on whole batches."""
    options = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"}
    plan = split_transform(timm_data.create_transform(224, is_training=True, **options))
    assert (plan.prepare, plan.per_sample, plan.is_batched) == ((), (), True)
    assert split_transform(timm_data.create_transform(224, is_training=True)).is_batched


# Published callables of PIL images


class MoCoBlur:
    def __init__(self, sigma: Any) -> None:
        self.sigma = sigma

    def __call__(self, x: Any) -> Any:
        sigma = random.uniform(self.sigma[0], self.sigma[1])
        x = x.filter(ImageFilter.GaussianBlur(radius=sigma))
        return x  # noqa: RET504


class DocumentedBlur(MoCoBlur):
    def __call__(self, image: Any) -> Any:
        """Blur an image."""
        sigma = random.uniform(self.sigma[0], self.sigma[1])
        image = image.filter(ImageFilter.GaussianBlur(radius=sigma))
        return image  # noqa: RET504


class VICRegBlur:
    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, img: Any) -> Any:
        if np.random.rand() < self.p:
            sigma = np.random.rand() * 1.9 + 0.1
            return img.filter(ImageFilter.GaussianBlur(sigma))
        else:  # noqa: RET505
            return img


class Solarization:
    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, img: Any) -> Any:
        if random.random() < self.p:
            return ImageOps.solarize(img)
        else:  # noqa: RET505
            return img


class DINOBlur:
    def __init__(self, p: float, radius_min: float, radius_max: float) -> None:
        self.prob, self.radius_min, self.radius_max = p, radius_min, radius_max

    def __call__(self, img: Any) -> Any:
        do_it = random.random() <= self.prob
        if not do_it:
            return img
        return img.filter(
            ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max))
        )


@pytest.mark.parametrize(
    "step",
    [
        MoCoBlur((0.1, 2.0)),
        DocumentedBlur((0.1, 2.0)),
        VICRegBlur(0.5),
        DINOBlur(0.5, 0.3, 1.7),
        Solarization(0.5),
    ],
)
def test_published_callables(step: Any) -> None:
    """The transforms of MoCo, VICReg and DINO give Pillow's pixels, with draws of the same distributions."""
    (array,) = images(1, (9, 8))
    served = serve_many(step, array, "pil", 400)
    key = sample_keys(SEED, EPOCH, np.arange(400))
    p = getattr(step, "p", getattr(step, "prob", 1.0))
    low, high = getattr(
        step, "sigma", (getattr(step, "radius_min", 0.1), getattr(step, "radius_max", 2.0))
    )
    sigma = low + draw_uniform(key, child(0, 0), 0) * (high - low)
    for index, is_applied in enumerate(draw_uniform(key, 0, 0) < p):
        image = to_form(array, "pil")
        if is_applied and isinstance(step, Solarization):
            image = ImageOps.solarize(image)
        elif is_applied:
            image = image.filter(ImageFilter.GaussianBlur(float(sigma[index])))
        assert np.array_equal(served[index], to_array(image))


class WiderBlur(MoCoBlur):
    def __call__(self, x: Any) -> Any:
        sigma = random.uniform(self.sigma[0], self.sigma[1])
        x = x.filter(ImageFilter.GaussianBlur(radius=2 * sigma))
        return x  # noqa: RET504


def test_variants_of_published_callables_run_as_written() -> None:
    """Other code, tensors and invalid ranges are not taken for the published callables."""
    assert split_transform(MoCoBlur((1, 1))).per_sample == ()
    assert split_transform(v1.Compose([v1.ToTensor(), MoCoBlur((1, 1))])).per_sample
    for step in (WiderBlur((1, 1)), MoCoBlur((2, 1)), MoCoBlur(None)):
        assert split_transform(step).per_sample == (step,)


# Steps that run per sample


@pytest.mark.parametrize(
    "step",
    [
        v2.ElasticTransform(),
        v1.RandomApply([v1.Lambda(lambda image: +image)]),
        v1.RandomApply([v1.ToTensor()]),
        v2.RandomZoomOut(),
    ],
    ids=lambda step: type(step).__name__,
)
def test_what_is_not_served_is_named(step: Any) -> None:
    """An unknown step and all after it run as written, and the plan names that step."""
    plan = split_transform(v1.Compose([v1.RandomHorizontalFlip(), step, v1.ToTensor()]))
    assert plan.per_sample[0] is step
    assert type(step).__name__ in str(plan.obstacle)


@pytest.mark.parametrize("api", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("form", ["pil", "tensor"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("RandomRotation", {"degrees": (0, 0), "fill": (1, 2)}),
        ("RandomPosterize", {"bits": 4.0, "p": 1}),
        ("RandomAdjustSharpness", {"sharpness_factor": -1, "p": 1}),
        ("GaussianBlur", {"kernel_size": (3, 3.0)}),
        ("RandomPerspective", {"p": 0, "fill": (1, 2)}),
    ],
    ids=shown,
)
def test_errors_of_torchvision_are_raised_unchanged(
    api: Any, form: str, name: str, arguments: dict[str, Any]
) -> None:
    """Odd arguments raise torchvision's error; if torchvision accepts them, the step runs as it is written."""
    step = getattr(api, name)(**arguments)
    image: Any = Image.fromarray(np.arange(9 * 8 * 3, dtype=np.uint8).reshape(9, 8, 3))
    if form == "tensor":
        image = v1.functional.pil_to_tensor(image)
    try:
        wanted = str(np.asarray(step(image)))
    except (TypeError, ValueError) as refused:
        wanted = str(refused)
    try:
        with CachedDataset([(image, 0)] * 2, transform=step) as dataset:
            found = str(np.asarray(dataset[1][0]))
    except (TypeError, ValueError) as refused:
        found = str(refused)
    assert found == wanted


def test_subclasses_of_known_steps_run_as_written() -> None:
    """A subclass of a known step is not taken for that step."""

    class Mine(v1.RandomInvert):
        pass

    transform = Mine()
    assert split_transform(transform).per_sample == (transform,)
