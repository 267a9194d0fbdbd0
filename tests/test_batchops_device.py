"""Batch ops on a device give the draws and the pixels of batch ops on the CPU.

Everything here runs on CPU tensors, and once more on a GPU where there is one.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastdata.batchops import DeviceProgram, boxes, compile_device_ops, device_obstacle
from fastdata.batchops.resample import pillow_chooses_order
from fastdata.batchops.weights import LineWeights
from fastdata.plan import plan_transform
from fastdata.spec import SampleSpec
from test_batchops import (
    EPOCH,
    NORM,
    SEED,
    TELLING_COLOURS,
    ArrayStore,
    all_conversions,
    all_forms,
    all_modes,
    both_apis,
    images,
    served,
)

SIZE = (37, 50)
Steps = Sequence[Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def store_of(form: str = "pil", size: tuple[int, int] = SIZE, channels: int = 3, count: int = 24) -> ArrayStore:
    return ArrayStore(images(count, size, channels=channels), form)


def program_of(steps: Steps, store: ArrayStore, **options: Any) -> DeviceProgram:
    plan = plan_transform(v1.Compose(list(steps)), form=store.spec.form)
    assert not plan.per_sample, plan.obstacle
    return DeviceProgram(plan.batch_ops, store.spec, **options)


def stacked(store: ArrayStore, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.stack(store.samples)).to(device)


def run_both(
    steps: Steps, store: ArrayStore, index: Sequence[int], device: torch.device, **options: Any
) -> torch.Tensor:
    """What ``run`` gives on a copy of the samples; ``gather_run`` on all of them must give the same."""
    prog = program_of(steps, store, **options)
    index_B = torch.tensor(index, dtype=torch.int64)
    draws = prog.draw(index_B.numpy(), EPOCH, SEED).to(device)
    samples = stacked(store, device)
    index_B = index_B.to(device)
    batch = prog.run(samples[index_B], draws)
    gathered = prog.gather_run(samples, index_B, draws)
    assert torch.equal(batch, gathered)
    assert batch.stride() == gathered.stride()
    assert (tuple(batch.shape[1:]), batch.dtype) == prog.output
    return batch.cpu()


def check(steps: Steps, store: ArrayStore, device: torch.device, *, atol: float = 0, **options: Any) -> None:
    """Batches equal those of the CPU's program, some samples twice."""
    index = [*reversed(range(len(store.samples))), 0, 0]
    expected = served(steps, store, index)
    batch = run_both(steps, store, index, device, **options)
    assert batch.is_contiguous(
        memory_format=torch.channels_last if options.get("channels_last") else torch.contiguous_format
    )
    assert batch.shape == expected.shape
    np.testing.assert_allclose(batch.numpy(), expected, rtol=0, atol=atol)
    assert batch.dtype == torch.from_numpy(expected).dtype


# Geometry


@both_apis
@all_forms
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [(6, 5), (8, 16), SIZE], ids=str)
def test_flips(device: torch.device, api: Any, form: str, p: float, size: tuple[int, int]) -> None:
    """None, some and all mirrored, along one axis and along both."""
    check([api.RandomHorizontalFlip(p), api.PILToTensor()][: 1 + (form == "pil")], store_of(form, size), device)
    check([api.RandomVerticalFlip(p), api.RandomHorizontalFlip(0.5)], store_of(form, size), device)


@both_apis
@all_forms
@all_modes
@pytest.mark.parametrize("channels", [1, 3])
def test_padded_crops(device: torch.device, api: Any, form: str, mode: str, channels: int) -> None:
    """Uneven borders in all modes, mirrored along both axes."""
    crop = api.RandomCrop((36, 50), padding=(1, 2, 3, 4), padding_mode=mode, fill=7)
    steps = [crop, api.RandomHorizontalFlip(), api.RandomVerticalFlip()]
    check(steps, store_of(form, channels=channels), device)
    check(steps, store_of(form, channels=channels), device, channels_last=True)


@both_apis
@all_modes
@pytest.mark.parametrize("padding", [None, (1, 0, 2, 1)])
def test_pad_if_needed(device: torch.device, api: Any, mode: str, padding: Any) -> None:
    """Images that are too small along one axis are padded there."""
    crop = api.RandomCrop((9, 8), padding=padding, pad_if_needed=True, padding_mode=mode)
    check([crop, api.RandomHorizontalFlip()], store_of(size=(6, 9)), device)


@all_modes
def test_stages_that_do_not_fuse(device: torch.device, mode: str) -> None:
    """A border of a cropped image, then a crop of that, and another border."""
    pad = v1.Pad((1, 0, 3, 2), padding_mode=mode)
    steps = [v1.RandomCrop(8), pad, v1.RandomHorizontalFlip(), v1.RandomCrop(9), v1.RandomVerticalFlip(), pad]
    check(steps, store_of(), device)


@pytest.mark.parametrize("size", [(3, 2), (4, 3), (9, 8), (9, 2), (2, 10)], ids=str)
def test_centre_crops(device: torch.device, size: tuple[int, int]) -> None:
    """Smaller and larger than the image, along each axis."""
    check([v1.RandomHorizontalFlip(), v1.CenterCrop(size)], store_of(size=(6, 5), channels=1), device)


def test_colour_fill_and_repeated_reflection(device: torch.device) -> None:
    """A fill per channel lands in its channel; PIL images are reflected again and again."""
    steps = [v1.RandomCrop(6, padding=3, fill=(1, 128, 255)), v1.RandomHorizontalFlip()]
    check(steps, store_of(size=(6, 5)), device)
    check(steps, store_of(size=(6, 5)), device, channels_last=True)
    check([v1.RandomCrop(5, padding=9, padding_mode="reflect")], store_of(size=(6, 5)), device)


# RandomResizedCrop


@both_apis
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("out", [(16, 24), (24, 16), (90, 40)], ids=str)
def test_resized_crops_of_pil_images_are_bit_equal(
    device: torch.device, api: Any, interpolation: str, out: tuple[int, int]
) -> None:
    """Down and up, in whichever order Pillow resizes the axes, mirrored, and cropped once more."""
    crop = api.RandomResizedCrop(out, interpolation=v1.InterpolationMode(interpolation))
    for size in (SIZE, (50, 50), (70, 20)):
        check([crop, api.RandomHorizontalFlip(), api.RandomVerticalFlip()], store_of(size=size), device)
    check([crop, api.RandomCrop((13, 15))], store_of(channels=1), device, channels_last=True)
    check([api.RandomCrop(30), crop, api.Pad(2, padding_mode="edge")], store_of(), device)


@pytest.mark.parametrize("interpolation", ["box", "hamming", "lanczos"])
def test_pillows_other_filters_are_bit_equal(device: torch.device, interpolation: str) -> None:
    """Filters that only Pillow has."""
    check([v1.RandomResizedCrop(16, interpolation=v1.InterpolationMode(interpolation))], store_of(), device)


@pytest.mark.parametrize("interpolation", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_resized_crops_of_v2_tensors_are_bit_equal(device: torch.device, interpolation: str, antialias: bool) -> None:
    """Torch's kernels for uint8, whose weights have as many binary places as fit."""
    mode = v1.InterpolationMode(interpolation)
    crop = v2.RandomResizedCrop((16, 24), interpolation=mode, antialias=antialias)
    check([crop, v2.RandomHorizontalFlip()], store_of("tensor"), device)
    check(
        [v2.RandomCrop(36), v2.RandomResizedCrop(90, interpolation=mode, antialias=antialias)],
        store_of("tensor"),
        device,
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_resized_crops_in_float(device: torch.device, interpolation: str, antialias: bool) -> None:
    """What torchvision resizes in float32 is at most one level off, in fewer than 1 of 200 pixels."""
    steps = [v1.RandomResizedCrop((40, 48), interpolation=v1.InterpolationMode(interpolation), antialias=antialias)]
    store, index = store_of("tensor"), range(24)
    batch = run_both(steps, store, index, device).numpy().astype(int)
    off = np.abs(batch - served(steps, store, index))
    assert off.max() <= 1
    assert off.mean() < 1 / 200


def test_both_orders_of_the_axes_occur(device: torch.device) -> None:
    """The boxes of these tests are of both kinds, where Pillow has two; the test above would see a wrong order."""
    draws = program_of([v1.RandomResizedCrop((16, 24))], store_of()).draw(np.arange(24), EPOCH, SEED)
    assert set(draws[4].tolist()) == ({0, 1} if pillow_chooses_order() else {0})


@both_apis
@all_forms
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resized_extremes_stay_in_range(device: torch.device, api: Any, form: str, interpolation: str) -> None:
    """Black and white stay what they are, and edges between them do not wrap around, however much they shrink."""
    store = store_of(form, size=(180, 200), count=4)
    store.samples[0][:] = 255
    store.samples[1][:] = 0
    store.samples[2][:] = np.where(np.arange(200) % 40 < 20, 0, 255)
    steps = [api.RandomResizedCrop(2, scale=(0.9, 1.0), interpolation=v1.InterpolationMode(interpolation))]
    if form == "tensor" and api is v1:  # rounds the other way where the exact value is a half
        off = run_both(steps, store, range(4), device).numpy().astype(int) - served(steps, store, range(4))
        assert np.abs(off).max() <= 1
    else:
        check(steps, store, device)


@pytest.mark.parametrize(("weights", "overshoots"), [((8, 8), False), ((9, 8), True), ((17, -1), True)], ids=str)
def test_sums_that_can_leave_the_range(weights: tuple[int, int], overshoots: bool) -> None:
    """Weights in sixteenths that are negative, or whose sum is more than 1, are clipped; others need not be."""
    lines = LineWeights(
        arithmetic="integer",
        starts=np.zeros((1, 1), np.int64),
        weights=np.array(weights, np.int32).reshape(2, 1, 1),
        bits=np.full(1, 4, np.int32),
    )
    assert lines.half.tolist() == [8]
    assert lines.overshoots is overshoots


# Values


@both_apis
@all_forms
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("outputs", [1, 3])
def test_grayscale(device: torch.device, api: Any, form: str, channels: int, outputs: int) -> None:
    """Luma of all domains, also for colours at which fused and unfused additions differ, and between two stages."""
    store = store_of(form, size=(128, 129), channels=channels, count=6)
    for row, colour in enumerate(TELLING_COLOURS):
        store.samples[0][:, row] = np.array(colour)[:channels, None]
    check([api.RandomVerticalFlip(), api.Grayscale(outputs)], store, device)
    check([api.RandomVerticalFlip(), api.Grayscale(outputs), api.RandomCrop(20)], store, device, channels_last=True)


@all_conversions
def test_conversions_are_bit_equal(device: torch.device, steps: list[Any]) -> None:
    """Each way to floats gives the CPU's for all 256 values, alone and after a crop."""
    store = store_of()
    store.samples[0].flat[:256] = np.arange(256)
    check(steps, store, device)
    check([v1.RandomCrop(20), *steps], store, device, channels_last=True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalize(device: torch.device, channels_last: bool) -> None:
    """Normalised floats are within 1e-6 of the CPU's, twice too, without a conversion to 0..1, and widened."""
    norm = v1.Normalize(*NORM)
    scale = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    for steps in (
        [v1.RandomHorizontalFlip(), v1.ToTensor(), norm],
        [v1.ToTensor(), norm, v1.Normalize((0.1,), (1.5,)), v1.RandomCrop(30), v1.Pad(2, padding_mode="edge")],
        [v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize((127.0,), (64.0,))],
        [v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.Grayscale(3), v1.ToTensor(), norm],
    ):
        check(steps, store_of(), device, atol=1e-6, channels_last=channels_last)
    check([*scale, v2.Normalize(*NORM)], store_of(channels=1), device, atol=1e-6, channels_last=channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_half_floats_are_rounded_once(device: torch.device, dtype: torch.dtype, channels_last: bool) -> None:
    """What ``dtype=`` serves is the float32 batch, rounded; uint8 batches stay uint8."""
    options: dict[str, Any] = {"channels_last": channels_last}
    scale = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    for steps, channels in (
        ([v1.RandomCrop(20), v1.ToTensor(), v1.Normalize(*NORM)], 3),
        ([v1.RandomCrop(20), v1.ToTensor()], 3),
        ([v1.RandomCrop(20), *scale], 3),
        ([*scale, v2.Normalize(*NORM)], 1),
    ):
        store = store_of(channels=channels)
        whole = run_both(steps, store, range(24), device, **options)
        half = run_both(steps, store, range(24), device, dtype=dtype, **options)
        assert torch.equal(half, whole.to(dtype))
        assert half.stride() == whole.stride()
    assert program_of([v1.RandomCrop(20)], store_of(), dtype=dtype).output == ((3, 20, 20), torch.uint8)


# Batches

AUGMENTATION = [
    v1.RandomResizedCrop(24),
    v1.RandomHorizontalFlip(),
    v1.RandomCrop(24, padding=3),
    v1.ToTensor(),
    v1.Normalize(*NORM),
]


def test_a_sample_does_not_depend_on_its_batch(device: torch.device) -> None:
    """In batches of 0, 1 and more samples, in any order and company, a sample has the same pixels."""
    store = store_of()
    whole = run_both(AUGMENTATION, store, range(24), device)
    for index in ([], [7], [3, 3, 21, 0], np.random.default_rng(1).permutation(24).tolist()):
        assert torch.equal(run_both(AUGMENTATION, store, index, device), whole[index])


def test_visits_and_seed_change_the_draws() -> None:
    """Each sample's draws follow its own visits, and the seed."""
    prog = program_of(AUGMENTATION, store_of())
    index = np.arange(24)
    draws = prog.draw(index, 0, SEED)
    assert torch.equal(draws, prog.draw(index, 0, SEED))
    assert not torch.equal(draws, prog.draw(index, 0, SEED + 1))
    mixed = prog.draw(index, index % 2, SEED)
    assert torch.equal(mixed[:, ::2], draws[:, ::2])
    assert torch.equal(mixed[:, 1::2], prog.draw(index, 1, SEED)[:, 1::2])
    assert not torch.equal(mixed, draws)


def test_draws_are_one_small_tensor() -> None:
    """A batch's draws are one int32 tensor of a few numbers a sample, which a single copy takes to the device."""
    draws = program_of(AUGMENTATION, store_of()).draw(np.arange(24), EPOCH, SEED)
    assert draws.dtype == torch.int32
    assert draws.is_contiguous()
    assert draws.shape == (9, 24)
    assert program_of([v1.ToTensor()], store_of()).draw(np.arange(24), EPOCH, SEED).shape == (0, 24)


def test_no_ops(device: torch.device) -> None:
    """A plan that does nothing gives back the batch itself, and takes samples out of a store."""
    store = store_of("tensor")
    prog = compile_device_ops(plan_transform(None, form="tensor"), store.spec)
    samples = stacked(store, device)
    draws = prog.draw(np.array([2, 0]), 0, 0).to(device)
    assert prog.run(samples, draws) is samples
    index_B = torch.tensor([2, 0], device=device)
    assert torch.equal(prog.gather_run(samples, index_B, draws), samples[index_B])
    assert prog.output == ((3, *SIZE), torch.uint8)


def test_the_stored_samples_are_only_read(device: torch.device) -> None:
    """No stage writes into the batch or the store that it is given."""
    store = store_of()
    samples = stacked(store, device)
    prog = program_of([v1.RandomCrop(SIZE, padding=3), v1.ToTensor()], store)
    draws = prog.draw(np.arange(24), EPOCH, SEED).to(device)
    prog.run(samples, draws)
    prog.gather_run(samples, torch.arange(24, device=device), draws)
    assert torch.equal(samples, stacked(store, device))


def test_a_program_pickles() -> None:
    """A program that has run comes back and serves the same, without its tables."""
    store = store_of()
    prog = program_of(AUGMENTATION, store, dtype=torch.float16, channels_last=True)
    draws = prog.draw(np.arange(24), EPOCH, SEED)
    before = prog.run(stacked(store, torch.device("cpu")), draws)
    data = pickle.dumps(prog)
    assert len(data) < 1500
    again = pickle.loads(data)
    assert torch.equal(again.draw(np.arange(24), EPOCH, SEED), draws)
    after = again.run(stacked(store, torch.device("cpu")), draws)
    assert torch.equal(after, before)
    assert after.stride() == before.stride()


# What it costs


class Ops(TorchDispatchMode):
    """Records each op that torch runs, and what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.append((func.overloadpacket.__name__, result))
        else:
            self.made.append((func.overloadpacket.__name__, torch.empty(0)))
        return result


VIEWS = {
    "view",
    "_unsafe_view",
    "expand",
    "permute",
    "slice",
    "unsqueeze",
    "select",
    "unbind",
    "transpose",
    "t",
    "detach",
}


def recorded(steps: Steps, store: ArrayStore, **options: Any) -> list[tuple[str, torch.Tensor]]:
    prog = program_of(steps, store, **options)
    count = len(store.samples)
    draws = prog.draw(np.arange(count), EPOCH, SEED)
    samples = stacked(store, torch.device("cpu"))
    prog.run(samples, draws)  # makes the constants
    with Ops() as ops:
        prog.run(samples, draws)
        prog.gather_run(samples, torch.arange(count), draws)
    return [(name, made) for name, made in ops.made if name not in VIEWS]


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_normalised_crop_is_two_passes(channels_last: bool) -> None:
    """Crop, flips and normalisation touch each pixel in one gather and one fused multiplication and addition."""
    steps = [v1.RandomCrop(36), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*NORM)]
    for dtype in (None, torch.float16):
        made = recorded(steps, store_of(), channels_last=channels_last, dtype=dtype)
        passes = [name for name, tensor in made if tensor.numel() >= 24 * 3 * 36 * 36 and "empty" not in name]
        assert passes == ["index", "addcmul"] * 2


@pytest.mark.parametrize(
    "steps",
    [
        AUGMENTATION,
        [v2.RandomResizedCrop(24, interpolation=v1.InterpolationMode.BICUBIC), v2.Grayscale(3), v2.CenterCrop(60)],
        [v1.RandomCrop(40, padding=4, padding_mode="reflect"), v1.Grayscale(1), v1.ToTensor()],
    ],
    ids=["pil", "v2", "modes"],
)
@pytest.mark.parametrize("form", ["pil", "tensor"])
def test_the_host_never_waits(steps: list[Any], form: str) -> None:
    """No op whose result has a shape that only the device knows, none that brings a value back, and no float64."""
    if form == "tensor":
        steps = [step for step in steps if not isinstance(step, v1.ToTensor | v1.Normalize)]
    made = recorded(steps, store_of(form))
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal", "unique", "copy"}
    assert not waiting & {name for name, _ in made}
    assert torch.float64 not in {tensor.dtype for _, tensor in made}


@contextmanager
def no_synchronisation() -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["pil", "tensor"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_no_host_synchronisation_on_a_gpu(form: str, channels_last: bool) -> None:
    """After a first batch has brought the constants there, CUDA is never waited for."""
    device = torch.device("cuda")
    steps = AUGMENTATION if form == "pil" else [*AUGMENTATION[:2], v2.Grayscale(3), v2.RandomCrop(20, padding=2)]
    store = store_of(form)
    prog = program_of(steps, store, channels_last=channels_last)
    samples, index_B = stacked(store, device), torch.arange(24, device=device)
    draws = prog.draw(np.arange(24), EPOCH, SEED).pin_memory()
    prog.run(samples, draws.to(device))
    torch.cuda.synchronize()
    guard: AbstractContextManager[Any] = no_synchronisation()
    with guard:
        on_device = draws.to(device, non_blocking=True)
        prog.run(samples, on_device)
        prog.gather_run(samples, index_B, on_device)
    torch.cuda.synchronize()


# Errors and obstacles


def test_batches_of_another_shape_or_dtype() -> None:
    """A batch that is not as the samples were stored is an error that names both."""
    store = store_of()
    prog = program_of(AUGMENTATION, store)
    draws = prog.draw(np.arange(2), EPOCH, SEED)
    for wrong in (torch.zeros(2, 3, 50, 37, dtype=torch.uint8), torch.zeros(2, 3, 37, 50)):
        with pytest.raises(ValueError, match=r"uint8 samples of shape \(3, 37, 50\), but got a batch of torch"):
            prog.run(wrong, draws)
        with pytest.raises(ValueError, match="Give it samples as they are stored"):
            prog.gather_run(wrong, torch.arange(2), draws)


@pytest.mark.parametrize(
    ("steps", "spec", "reason"),
    [
        ([v1.RandomCrop(4), v1.ToTensor()], {"shape": None}, "the stored samples have different shapes"),
        ([v1.PILToTensor()], {"shape": (3, 8, 9), "dtype": "float32"}, "the stored samples are float32 of shape"),
        ([v1.RandomCrop(9), v1.ToTensor()], {"shape": (3, 8, 9)}, r"Required crop size \(9, 9\) is larger than"),
        ([v1.RandomHorizontalFlip(), v1.Lambda(abs)], {"shape": (3, 8, 9)}, "Lambda.* is not a known batch op"),
        ([v1.RandomHorizontalFlip()], {"shape": (3, 8, 9)}, "the transform ends with a PIL image"),
        ([v1.ToTensor(), v1.Normalize(*NORM)], {"shape": (1, 8, 9)}, "Normalize has 3 means"),
        ([v1.RandomResizedCrop(4), v1.ToTensor()], {"shape": (4, 8, 9)}, "4 channels, whose alpha Pillow"),
    ],
    ids=["ragged", "floats", "small", "unknown", "pil", "channels", "alpha"],
)
def test_obstacles(steps: list[Any], spec: dict[str, Any], reason: str) -> None:
    """What only the CPU can do is said, in words that compiling repeats."""
    plan = plan_transform(v1.Compose(steps), form="pil")
    stored = SampleSpec(**{"dtype": "uint8", "form": "pil", **spec})
    obstacle = device_obstacle(plan, stored)
    assert obstacle is not None
    with pytest.raises(ValueError, match=f"^batch ops cannot run on the device: .*{reason}.*Run them on the CPU.$"):
        compile_device_ops(plan, stored)


def test_no_obstacle() -> None:
    """A program is compiled where nothing stands in the way."""
    plan = plan_transform(v1.Compose(AUGMENTATION), form="pil")
    assert device_obstacle(plan, store_of().spec) is None
    assert compile_device_ops(plan, store_of().spec).output == ((3, 24, 24), torch.float32)


def test_an_older_pillow(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Pillow always begins with the rows, no sample is turned; the boxes that it does not turn are the same."""
    store, steps = store_of(), [v1.RandomResizedCrop((16, 24))]
    turned = program_of(steps, store).draw(np.arange(24), EPOCH, SEED)[4]
    expected = served(steps, store, range(24))
    monkeypatch.setattr(boxes, "pillow_chooses_order", lambda: False)
    batch = run_both(steps, store, range(24), device).numpy()
    same = turned.numpy() == 0
    assert np.array_equal(batch[same], expected[same])
    assert np.abs(batch.astype(int) - expected).max() <= 1
