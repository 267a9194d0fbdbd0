"""Batch ops give torchvision's pixels for the same draws, in every way that a batch can be made."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F  # noqa: N812

from conftest import shown
from data import ArrayStore
from fastdata import CachedDataset, DataLoader
from fastdata.errors import SampleError
from fastdata.pixels.program import Program
from fastdata.pixels.random_numbers import draw_uniform, sample_keys
from fastdata.pixels.split import split_transform

SEED, EPOCH = 11, 3
NORM = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ODD, EIGHTS, LARGE = (6, 5), (8, 16), (101, 99)


def images(count: int, *sizes: tuple[int, int], channels: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 256, (channels, *sizes[i % len(sizes)]), dtype=np.uint8)
        for i in range(count)
    ]


def to_form(array_CHW: np.ndarray, form: str) -> Any:
    if form == "tensor":
        return torch.from_numpy(array_CHW.copy())
    return Image.fromarray(
        array_CHW[0] if len(array_CHW) == 1 else array_CHW.transpose(1, 2, 0).copy()
    )


def to_array(sample: Any) -> np.ndarray:
    return (
        sample.numpy()
        if isinstance(sample, torch.Tensor)
        else v2.functional.pil_to_tensor(sample).numpy()
    )


def reference(steps: Sequence[Any], sample: Any, index: int) -> np.ndarray:
    """Run the steps one by one in torchvision, with the parameters that fastdata draws for this sample."""
    for op, step in enumerate(steps):

        def draw(number: int, op: int = op) -> float:
            return float(draw_uniform(sample_keys(SEED, EPOCH, np.array([index])), op, number)[0])

        name = type(step).__name__
        api = v2.functional if "v2" in type(step).__module__ else v1.functional
        if name in ("RandomHorizontalFlip", "RandomVerticalFlip"):
            if draw(0) < step.p:
                sample = api.hflip(sample) if name == "RandomHorizontalFlip" else api.vflip(sample)
        elif name == "RandomCrop":
            sample = random_crop(step, sample, draw)
        elif name == "RandomResizedCrop":
            box = resized_crop_box(step, sample, draw)
            sample = api.resized_crop(
                sample, *box, list(step.size), step.interpolation, antialias=step.antialias
            )
        else:
            sample = step(sample)
    return to_array(sample)


def random_crop(step: Any, sample: Any, draw: Any) -> Any:
    """Run torchvision's RandomCrop with given draws: its own code on a patched torch.randint."""
    numbers = iter((draw(0), draw(1)))
    height, _ = F.get_size(sample)
    is_v2 = "v2" in type(step).__module__

    def randint(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(int(next(numbers) * high)).reshape(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", randint)
        if is_v2:  # draws only along an axis that has room
            pads = step.padding or [0, 0, 0, 0]
            if height + pads[2] + pads[3] == step.size[0]:
                next(numbers)
        return step(sample)


def resized_crop_box(step: Any, sample: Any, draw: Any) -> tuple[int, int, int, int]:
    """Follow torchvision's ``RandomResizedCrop.get_params`` with given draws."""
    height, width = F.get_size(sample)
    low, high = (math.log(r) for r in step.ratio)
    for attempt in range(10):
        area = (
            height * width * (step.scale[0] + draw(4 * attempt) * (step.scale[1] - step.scale[0]))
        )
        ratio = math.exp(low + draw(4 * attempt + 1) * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = (
                int(draw(4 * attempt + 2) * (height - h + 1)),
                int(draw(4 * attempt + 3) * (width - w + 1)),
            )
            return top, left, h, w
    h, w = height, width
    if width / height < min(step.ratio):
        h = round(width / min(step.ratio))
    elif width / height > max(step.ratio):
        w = round(height * max(step.ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def compiled(steps: Sequence[Any], store: ArrayStore) -> Program:
    channels = store.samples[0].shape[0]
    plan = split_transform(v1.Compose(list(steps)), form=store.spec.form, channels=channels)
    assert not plan.prepare, "give the test a random step first, or nothing is left for the batch"
    assert not plan.per_sample, plan.obstacle
    return Program(plan.batch_ops, store.spec)


def served(steps: Sequence[Any], store: ArrayStore, index: Sequence[int]) -> np.ndarray:
    prog = compiled(steps, store)
    output = prog.output(store.samples[0].shape)
    assert output is not None
    out = np.full((len(index), *output[0]), 99, output[1])
    prog.run(store, np.array(index), EPOCH, SEED, out)
    return out


def check(steps: Sequence[Any], store: ArrayStore, *, atol: float = 0) -> None:
    """Assert that batches, and samples alone, equal torchvision's."""
    index = [*reversed(range(len(store.samples))), 0, 0]
    expected = [reference(steps, to_form(store.samples[i], store.spec.form), i) for i in index]
    prog = compiled(steps, store)
    alone = [prog.run_one(store, i, EPOCH, SEED) for i in index]
    for got, want in zip(alone, expected, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    if prog.output(store.samples[0].shape) is not None:
        assert np.array_equal(served(steps, store, index), np.stack(alone))


both_apis = pytest.mark.parametrize("api", [v1, v2], ids=["v1", "v2"])
all_forms = pytest.mark.parametrize("form", ["pil", "tensor"])
all_modes = pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
all_conversions = pytest.mark.parametrize(
    "steps",
    [
        [v1.ToTensor()],
        [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)],
        [v1.PILToTensor(), v1.ConvertImageDtype(torch.float64)],
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
        [v2.ToImage(), v2.ToDtype(torch.float64, scale=True), v2.ToPureTensor()],
        [v2.ToImage(), v2.ToDtype(torch.float32)],
        [v2.PILToTensor(), v2.ConvertImageDtype()],
    ],
    ids=lambda steps: "+".join(type(s).__name__ for s in steps),
)
TELLING_COLOURS = ((20, 152, 7), (40, 244, 244), (110, 111, 26), (250, 9, 228))
"""Of all 2**24 colours these have another luma with than without a fused multiply and add."""


# Geometry


@both_apis
@all_forms
@pytest.mark.parametrize("size", [ODD, EIGHTS, LARGE], ids=shown)
def test_flips(api: Any, form: str, size: tuple[int, int]) -> None:
    """Mirrored samples equal torchvision's, for widths that are multiples of 8 and for others."""
    store = ArrayStore(images(70, size), form)
    check([api.RandomHorizontalFlip()], store)
    check(
        [api.RandomVerticalFlip(0.3), api.RandomHorizontalFlip(0.7), api.RandomVerticalFlip()],
        store,
    )


@both_apis
@all_forms
@all_modes
@pytest.mark.parametrize("size", [ODD, EIGHTS, LARGE], ids=shown)
def test_padded_crops(api: Any, form: str, mode: str, size: tuple[int, int]) -> None:
    """RandomCrop with uneven borders, then flips, in all modes."""
    store = ArrayStore(images(9, size), form)
    crop = api.RandomCrop((size[0] - 1, size[1]), padding=(1, 2, 3, 4), padding_mode=mode, fill=7)
    check([crop, api.RandomHorizontalFlip(), api.RandomVerticalFlip()], store)


@both_apis
@all_forms
@all_modes
def test_padding_between_flips(api: Any, form: str, mode: str) -> None:
    """Borders that a flip exchanges, and crops after and before flips, come out as in torchvision."""
    store = ArrayStore(images(12, EIGHTS), form)
    flip = api.RandomHorizontalFlip
    check(
        [flip(), api.Pad((1, 0, 3, 2), padding_mode=mode), flip(), api.RandomCrop(7), flip()], store
    )
    check([flip(), api.RandomCrop(8, padding=2, padding_mode=mode), api.RandomCrop(5)], store)
    check(
        [api.RandomCrop(6), api.Pad(2, padding_mode=mode, fill=3), flip(), api.CenterCrop((7, 9))],
        store,
    )


@both_apis
@all_forms
def test_centre_crops(api: Any, form: str) -> None:
    """CenterCrop, smaller and larger along each axis, leaves and adds the odd pixel where torchvision does."""
    store = ArrayStore(images(6, ODD, channels=1), form)
    for size in ((3, 2), (4, 3), (9, 8), (9, 2), (2, 10)):
        check([api.RandomHorizontalFlip(), api.CenterCrop(size)], store)


@both_apis
@all_forms
@all_modes
@pytest.mark.parametrize("padding", [None, (1, 0, 2, 1)])
def test_pad_if_needed(api: Any, form: str, mode: str, padding: Any) -> None:
    """Images of several sizes, some too small, are padded to the crop as v1 and as v2 do it."""
    store = ArrayStore(images(8, (6, 9), (8, 7), (12, 10)), form)
    crop = api.RandomCrop((9, 8), padding=padding, pad_if_needed=True, padding_mode=mode)
    check([crop, api.RandomHorizontalFlip()], store)


@both_apis
def test_colour_fill(api: Any) -> None:
    """A fill per channel lands in its channel, also where samples are mirrored."""
    check(
        [api.RandomCrop(6, padding=3, fill=(1, 128, 255)), api.RandomHorizontalFlip()],
        ArrayStore(images(20, ODD)),
    )


def test_reflection_beyond_the_image() -> None:
    """PIL images are reflected again and again; tensors are refused, as torch does."""
    steps = [v1.RandomCrop(5, padding=9, padding_mode="reflect")]
    check(steps, ArrayStore(images(3, ODD)))
    tensors = ArrayStore(images(3, ODD), "tensor")
    with pytest.raises(
        ValueError,
        match=r"padding \(left 9, .*\).*'reflect' is too large for the image size \(6, 5\) of sample 0",
    ):
        served(steps, tensors, [0, 1])


@both_apis
def test_crop_offsets_cover_the_whole_range(api: Any) -> None:
    """Over 600 epochs of one image each of the 3 x 4 windows occurs, about equally often."""
    codes = np.arange(30, dtype=np.uint8).reshape(1, 6, 5)
    store = ArrayStore([codes])
    prog = compiled([api.RandomCrop((4, 2))], store)
    out = np.empty((600, 1, 4, 2), np.uint8)
    prog.run(store, np.zeros(600, np.int64), np.arange(600), SEED, out)
    counts = np.bincount(out[:, 0, 0, 0], minlength=30)
    assert sorted(np.flatnonzero(counts)) == [5 * y + x for y in range(3) for x in range(4)]
    assert counts[counts > 0].min() > 25


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_flip_rate(p: float) -> None:
    """A share p of 2000 samples is mirrored."""
    store = ArrayStore([np.array([[[1, 2]]], np.uint8)] * 2000)
    out = served([v1.RandomHorizontalFlip(p)], store, range(2000))
    assert abs((out[:, 0, 0, 0] == 2).mean() - p) <= 0.03 * (0 < p < 1)


# Values


@both_apis
@pytest.mark.parametrize("channels", [1, 3])
def test_grayscale_of_pil_images(api: Any, channels: int) -> None:
    """Luma equals Pillow's, in one and in three channels, alone and after a crop."""
    store = ArrayStore(images(4, (64, 65), channels=channels))
    for outputs in (1, 3):
        check([api.RandomVerticalFlip(), api.Grayscale(outputs), api.RandomCrop(20)], store)


@both_apis
@pytest.mark.parametrize("channels", [1, 3])
def test_grayscale_of_tensors(api: Any, channels: int) -> None:
    """Luma equals that of torchvision's tensor functional, which differs between v1 and v2."""
    store = ArrayStore(images(6, (128, 129), channels=channels), "tensor")
    for row, colour in enumerate(TELLING_COLOURS):
        store.samples[0][:, row] = np.array(colour)[:channels, None]
    for outputs in (1, 3):
        check([api.RandomVerticalFlip(), api.Grayscale(outputs)], store)


@pytest.mark.parametrize("size", [ODD, EIGHTS, LARGE], ids=shown)
@all_conversions
def test_conversions_are_bit_equal(steps: list[Any], size: tuple[int, int]) -> None:
    """Each way to floats gives exactly torchvision's, which divides in v1 and multiplies in v2, for all 256 values."""
    store = ArrayStore(images(5, size))
    store.samples[0].flat[: min(256, store.samples[0].size)] = np.arange(256)[
        : store.samples[0].size
    ]
    check([v1.RandomHorizontalFlip(), *steps], store)


@pytest.mark.parametrize("size", [ODD, EIGHTS, LARGE], ids=shown)
def test_normalize(size: tuple[int, int]) -> None:
    """Normalised floats are within 1e-6 of torchvision's, and without a conversion to 0..1."""
    store = ArrayStore(images(70 if size != LARGE else 3, size))
    check([v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*NORM)], store, atol=1e-6)
    check(
        [v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize((127.0,), (64.0,))], store, atol=1e-6
    )
    check(
        [v2.ToImage(), v2.ToDtype(torch.float64, scale=True), v2.Normalize(*NORM)],
        store,
        atol=1e-12,
    )


def test_geometry_after_normalize() -> None:
    """Flips, crops and mirrored borders written after Normalize give the same as in torchvision."""
    store = ArrayStore(images(20, EIGHTS))
    steps = [v1.ToTensor(), v1.Normalize(*NORM), v1.RandomHorizontalFlip(), v1.RandomCrop(7)]
    check(steps, store, atol=1e-6)
    check([*steps, v1.Pad(2, padding_mode="edge"), v1.RandomVerticalFlip()], store, atol=1e-6)
    check([v1.ToTensor(), v1.RandomCrop(8, padding=2), v1.Normalize(*NORM)], store, atol=1e-6)


def test_channels_that_normalize_does_not_fit() -> None:
    """v2 widens one channel to three as torchvision does; v1 and other counts are errors that name both numbers."""
    gray = ArrayStore(images(5, ODD, channels=1))
    check(
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*NORM)], gray, atol=1e-6
    )
    with pytest.raises(
        ValueError, match=r"sample 0 .* it has 1 channel, but Normalize has 3 means. Give one value"
    ):
        served([v1.ToTensor(), v1.Normalize(*NORM)], gray, [0])
    mixed = [(Image.new(mode, (6, 5)), 0) for mode in ("L", "RGB")]
    crop = v1.RandomCrop(5, padding=1, fill=(1, 2, 3))
    with pytest.raises(
        SampleError, match=r"sample 0 .* it has 1 channel, but fill=\(1, 2, 3\) has 3 values"
    ):
        CachedDataset(mixed, transform=crop)


# RandomResizedCrop


@both_apis
@all_forms
@pytest.mark.parametrize("interpolation", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_random_resized_crop(api: Any, form: str, interpolation: str) -> None:
    """Boxes and pixels equal torchvision's, on PIL images and on tensors, down and up, then mirrored."""
    store = ArrayStore(images(12, (37, 50)), form)
    mode = v1.InterpolationMode(interpolation)
    levels = 1 if form == "tensor" and api is v1 else 0  # float32, summed in another order
    check(
        [api.RandomResizedCrop((16, 24), interpolation=mode), api.RandomHorizontalFlip()],
        store,
        atol=levels,
    )
    check(
        [api.RandomCrop(36), api.RandomResizedCrop(90, scale=(0.5, 1.0), interpolation=mode)],
        store,
        atol=levels,
    )


@pytest.mark.parametrize("interpolation", ["box", "hamming", "lanczos"])
def test_random_resized_crop_with_pillows_other_filters(interpolation: str) -> None:
    """Filters that only Pillow has work on PIL images."""
    mode = v1.InterpolationMode(interpolation)
    check(
        [v1.RandomResizedCrop(16, interpolation=mode), v1.ToTensor()],
        ArrayStore(images(5, (37, 50))),
    )


@both_apis
def test_a_box_of_the_whole_image_is_resized_without_a_warning(api: Any) -> None:
    """A box of the whole image gives torch no read-only memory of a store, of which it would warn."""
    torch.set_warn_always(True)
    try:
        check(
            [api.RandomResizedCrop(9, scale=(1, 1), ratio=(1, 1))],
            ArrayStore(images(2, (7, 7)), "tensor"),
        )
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_random_resized_crop_of_other_channels(channels: int) -> None:
    """Grey images and images with alpha have Pillow's pixels; it multiplies colours by alpha before it resizes."""
    check([v1.RandomResizedCrop(9)], ArrayStore(images(6, (37, 50), channels=channels)))


@pytest.mark.parametrize("size", [(10, 60), (60, 10), (20, 20)])
def test_central_box_where_nothing_fits(size: tuple[int, int]) -> None:
    """If ten tries fail, the largest central box with the nearest allowed ratio is used."""
    store = ArrayStore(images(5, size))
    check([v1.RandomResizedCrop(8, scale=(1.5, 2.0))], store)
    check([v1.RandomResizedCrop(8, scale=(0.9, 1.0))], store)


# Whole programs


@both_apis
def test_ragged_samples(api: Any) -> None:
    """Images of several sizes come out as one batch after a crop, equal to torchvision's."""
    store = ArrayStore(images(9, (12, 9), (9, 17), (31, 16)))
    check([api.RandomHorizontalFlip(), api.RandomCrop(8), api.RandomVerticalFlip()], store)
    check(
        [api.RandomResizedCrop(8), api.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*NORM)],
        store,
        atol=1e-6,
    )
    check([api.RandomHorizontalFlip(), api.CenterCrop(14)], store)
    assert compiled([api.RandomCrop(8)], store).output((3, 12, 9)) == ((3, 8, 8), np.dtype("uint8"))


def test_output_is_none_where_it_depends_on_the_sample() -> None:
    """Ragged samples that are only mirrored keep their sizes; run_one still serves each."""
    store = ArrayStore(images(4, (12, 9), (9, 17)))
    prog = compiled([v1.RandomHorizontalFlip(), v1.Pad(1)], store)
    assert prog.output((3, 12, 9)) is None
    assert prog.run_one(store, 1, 0, 0).shape == (3, 11, 19)
    check([v1.RandomHorizontalFlip(), v1.Pad(1)], store)


def test_no_ops_copy() -> None:
    """A program that only changes the form copies the stored samples to new memory."""
    store = ArrayStore(images(4, ODD))
    assert np.array_equal(
        served([v1.PILToTensor()], store, [2, 0]), np.stack([store.samples[2], store.samples[0]])
    )
    alone = compiled([v1.PILToTensor()], store).run_one(store, 1, 0, 0)
    assert np.array_equal(alone, store.samples[1])
    assert not np.shares_memory(alone, store.samples[1])


def test_a_sample_does_not_depend_on_its_batch() -> None:
    """A sample has the same pixels in batches of any size and order, with one epoch for all or one for each."""
    store = ArrayStore(images(130, EIGHTS))
    steps = [
        v1.RandomCrop(8, padding=3),
        v1.RandomHorizontalFlip(),
        v1.ToTensor(),
        v1.Normalize(*NORM),
    ]
    whole = served(steps, store, range(130))
    order = np.random.default_rng(1).permutation(130)
    assert np.array_equal(served(steps, store, order.tolist()), whole[order])
    prog = compiled(steps, store)
    out = np.empty((2, *whole.shape[1:]), np.float32)
    prog.run(store, np.array([5, 5]), np.array([EPOCH, EPOCH + 1]), SEED, out)
    assert np.array_equal(out[0], whole[5])
    assert not np.array_equal(out[1], whole[5])


def test_seed_and_epoch_change_the_draws() -> None:
    """Two seeds, and two epochs, give different batches; the same give the same."""
    store = ArrayStore(images(16, EIGHTS))
    prog = compiled([v1.RandomCrop(4)], store)
    batches = []
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (0, 0)):
        out = np.empty((16, 3, 4, 4), np.uint8)
        prog.run(store, np.arange(16), epoch, seed, out)
        batches.append(out)
    assert np.array_equal(batches[0], batches[3])
    assert not np.array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], batches[2])


def test_threads_do_not_disturb_each_other() -> None:
    """Four threads that serve different batches at once give what one thread gives."""
    store = ArrayStore(images(64, (33, 35)))
    steps = [v1.RandomCrop(31, padding=2), v1.RandomHorizontalFlip(), v1.ToTensor()]
    prog = compiled(steps, store)
    expected = served(steps, store, range(64))
    wrong: list[int] = []
    start = threading.Barrier(4)

    def serve(part: int) -> None:
        index = np.arange(part * 16, part * 16 + 16)
        start.wait()
        for _ in range(20):
            out = np.empty((16, 3, 31, 31), np.float32)
            prog.run(store, index, EPOCH, SEED, out)
            if not np.array_equal(out, expected[index]):
                wrong.append(part)

    threads = [threading.Thread(target=serve, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_empty_batch() -> None:
    """A batch of no samples is served without complaint."""
    assert served([v1.RandomCrop(4), v1.ToTensor()], ArrayStore(images(2, ODD)), []).shape == (
        0,
        3,
        4,
        4,
    )


def test_a_compiled_program_pickles() -> None:
    """A program that has run comes back and serves the same, without its scratch."""
    store = ArrayStore(images(8, LARGE))
    prog = compiled([v1.RandomCrop(99), v1.RandomHorizontalFlip()], store)
    before = prog.run_one(store, 3, EPOCH, SEED)
    data = pickle.dumps(prog)
    assert len(data) < 1500
    assert np.array_equal(pickle.loads(data).run_one(store, 3, EPOCH, SEED), before)


# Errors


@both_apis
def test_crop_larger_than_the_image(api: Any) -> None:
    """The error is torchvision's, with both sizes, and names the first sample that is too small."""
    with pytest.raises(
        ValueError,
        match=r"Required crop size \(7, 4\) is larger than input image size \(6, 5\) of sample 2",
    ):
        served([api.RandomCrop((7, 4))], ArrayStore(images(3, ODD)), [2, 1])
    ragged = ArrayStore(images(4, (9, 9), (9, 6)))
    with pytest.raises(ValueError, match=r"size \(9, 6\) of sample 3"):
        served([api.RandomCrop((7, 8))], ragged, [0, 3, 1])


def test_samples_that_do_not_fit_the_batch() -> None:
    """A gray image among colour images is an error that names it, not a broadcast."""
    store = ArrayStore([*images(2, (8, 9)), *images(1, (8, 9), channels=1)])
    with pytest.raises(
        ValueError,
        match=r"sample 2 has the shape \(1, 4, 4\) after .* must have \(3, 4, 4\)",
    ):
        served([v1.RandomCrop(4)], store, [0, 2])


def test_batch_memory_must_be_contiguous() -> None:
    """Memory with gaps is refused before anything is written."""
    store = ArrayStore(images(2, ODD))
    out = np.zeros((2, 3, 6, 10), np.uint8)[..., ::2]
    with pytest.raises(ValueError, match="must be C-contiguous"):
        compiled([v1.RandomHorizontalFlip()], store).run(store, np.array([0, 1]), 0, 0, out)
    assert not out.any()


@pytest.mark.parametrize("samples", [np.zeros((3, 6, 5), np.float32), np.zeros((6, 5), np.uint8)])
def test_samples_that_are_no_uint8_images(samples: np.ndarray) -> None:
    """Batch ops for samples other than uint8 images are an error that names dtype, shape and the cure."""
    store = ArrayStore([samples], "tensor")
    with pytest.raises(
        ValueError, match=rf"the samples are {samples.dtype} of shape .*batch_ops=False"
    ):
        Program(split_transform(v1.RandomHorizontalFlip(), form="tensor").batch_ops, store.spec)


# Forms that are served


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_floats_are_rounded_once(dtype: torch.dtype) -> None:
    """Batches and samples of 16-bit floats are the float32 ones, rounded; within their precision torchvision's."""
    samples = [(Image.fromarray(array.transpose(1, 2, 0)), 0) for array in images(5, ODD)]
    steps = [
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(dtype, scale=True),
        v2.Normalize((0.5,), (0.25,)),
    ]
    whole = [*steps[:2], v2.ToDtype(torch.float32, scale=True), steps[3]]
    with (
        CachedDataset(samples, transform=v2.Compose(steps), seed=1) as half,
        CachedDataset(samples, transform=v2.Compose(whole), seed=1) as full,
    ):
        (got, _), (want, _) = (
            next(iter(DataLoader(half, batch_size=5))),
            next(iter(DataLoader(full, batch_size=5))),
        )
        assert got.dtype == half[0][0].dtype == dtype
        assert torch.equal(got, want.to(dtype))


def test_bfloat16_images_of_v2_are_told_as_such() -> None:
    """Samples, also those that an unknown step gets, are bfloat16 tensors, not integers with their bits."""
    samples = [(tv_tensors.Image(torch.from_numpy(array)), 0) for array in images(2, EIGHTS)]
    steps = [v2.RandomHorizontalFlip(), v2.ToDtype(torch.bfloat16, scale=True)]
    for transform in (v2.Compose(steps), v2.Compose([*steps, v1.Lambda(lambda image: image * 1)])):
        with CachedDataset(samples, transform=transform, seed=1) as dataset:
            assert dataset[0][0].dtype == torch.bfloat16
            assert next(iter(DataLoader(dataset, batch_size=2)))[0].dtype == torch.bfloat16
            assert dataset[0][0].max() <= 1


def test_what_comes_before_an_unknown_step_is_served_in_batches() -> None:
    """An unknown step gets the same samples as if they were read one by one, and the batches are equal."""
    seen: list[Any] = []
    samples = [
        (Image.fromarray(array.transpose(1, 2, 0)), i) for i, array in enumerate(images(6, EIGHTS))
    ]
    keep, zero = v1.Lambda(seen.append), v1.Lambda(lambda _: 0)
    steps = v1.Compose([v1.RandomCrop(7), v1.RandomHorizontalFlip(), keep, zero])
    with CachedDataset(samples, transform=steps, seed=1) as dataset:
        dataset.set_epoch(0)
        dataset.__getitems__([4, 0, 5])
        together = [np.asarray(image) for image in seen]
        dataset.set_epoch(0)
        seen.clear()
        for index in (4, 0, 5):
            dataset[index]
        for one, other in zip(together, seen, strict=True):
            assert np.array_equal(one, np.asarray(other))


def test_floats_are_of_the_type_that_holds_now() -> None:
    """``torch.set_default_dtype`` counts from the next epoch on, as for torchvision's ``ToTensor``."""
    image = Image.fromarray(np.arange(108, dtype=np.uint8).reshape(6, 6, 3))
    transform = v1.Compose([v1.CenterCrop(4), v1.ToTensor(), v1.Normalize(*NORM)])
    cached = CachedDataset([(image, 0)] * 3, transform=transform)
    loader = DataLoader(cached, batch_size=3)
    list(loader)
    torch.set_default_dtype(torch.float64)
    try:
        expected = transform(image)
        [(images, _)] = loader
    finally:
        torch.set_default_dtype(torch.float32)
    assert images.dtype == torch.float64
    assert torch.equal(images[1], expected)
    assert cached[0][0].dtype == torch.float32


@pytest.mark.parametrize("api", [v1, v2], ids=["v1", "v2"])
def test_draws_and_pixels_do_not_follow_the_default_device(api: Any) -> None:
    """Batches are made on the CPU even under ``torch.set_default_device``."""
    image = Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3))
    steps = [api.RandomPerspective(p=1), api.RandAugment(), api.ToTensor(), api.Normalize(*NORM)]

    def served() -> list[torch.Tensor]:
        cached = CachedDataset([(image, 0)] * 3, transform=api.Compose(steps), seed=SEED)
        assert cached.plan.is_batched
        torch.manual_seed(1)
        return [sample for sample, _ in cached]

    expected = served()
    with torch.device("meta"):
        found = served()
    assert all(map(torch.equal, found, expected))


def test_magnitudes_may_be_halves() -> None:
    """RandAugment works if torch's default dtype is bfloat16, which NumPy does not have."""
    image = Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3))
    torch.set_default_dtype(torch.bfloat16)
    try:
        cached = CachedDataset([(image, 0)] * 3, transform=v1.RandAugment())
        assert [target for _, target in cached] == [0, 0, 0]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("api", [v1, v2])
@pytest.mark.parametrize("mode", [None, "RGB"])
def test_tensors_that_become_images_before_the_store_are_cast(api: Any, mode: Any) -> None:
    """ToTensor gets the images that ToPILImage left in the store, not the tensors before it."""
    image = Image.fromarray(np.arange(90, dtype=np.uint8).reshape(5, 6, 3))
    steps = [api.PILToTensor(), api.ToPILImage(mode), api.RandomHorizontalFlip(1.0), v1.ToTensor()]
    transform = api.Compose(steps)
    with CachedDataset([(image, 0)], transform=transform) as dataset:
        assert torch.equal(dataset[0][0], transform(image))
