"""Batch ops on a device give the draws and the pixels of batch ops on the CPU.

Everything here runs on CPU tensors, and once more on a GPU where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms as v1
from torchvision.transforms import v2

from conftest import shown
from data import ArrayStore
from fastdata.loaders.floats import Form, ToFloats
from fastdata.loaders.window import Window, window_obstacle
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.split import split_transform
from test_transforms import (
    EPOCH,
    NORM,
    SEED,
    all_conversions,
    all_forms,
    all_modes,
    both_apis,
    images,
    served,
)

SIZE = (37, 50)
Steps = Sequence[Any]


class OnDevice(TorchDispatchMode):
    """Refuses what is right on the CPU and wrong or slow on a GPU; keeps each op that made a tensor, and that.

    ``out=`` of another dtype than what is computed: CUDA computes in the dtype of ``out`` (pytorch#173110). An index of
    several tensors: all of them are spread out over every pixel. Anything that brings a value to the host, or whose
    shape only the device knows: the host waits.
    """

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "item",
        "is_nonzero",
        "equal",
        "unique",
    )
    VIEWS = (
        "view",
        "_unsafe_view",
        "expand",
        "permute",
        "slice",
        "unsqueeze",
        "select",
        "unbind",
        "transpose",
        "detach",
    )

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        assert name not in self.WAITING, f"{name} makes the host wait"
        if name == "index":
            assert sum(each is not None for each in args[1]) < 2, "an index of several tensors"
        if isinstance(kwargs.get("out"), torch.Tensor) and not kwargs["out"].is_floating_point():
            inputs = [each for each in args if isinstance(each, torch.Tensor)]
            promoted = inputs[0].dtype
            for each in inputs[1:]:
                promoted = torch.promote_types(promoted, each.dtype)
            assert kwargs["out"].dtype == promoted, (
                f"{name} computes {promoted} into {kwargs['out'].dtype}"
            )
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and name not in self.VIEWS:
            assert result.dtype != torch.float64 or name == "lift_fresh", (
                "float64, which not every device has"
            )
            self.made.append((name, result))
        return result


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def store_of(
    form: str = "pil", size: tuple[int, int] = SIZE, channels: int = 3, count: int = 24
) -> ArrayStore:
    return ArrayStore(images(count, size, channels=channels), form)


class Ops:
    """The batch ops of a transform, split into those before and after the transfer to a device."""

    def __init__(self, steps: Steps, store: ArrayStore) -> None:
        if store.spec.form == "pil" and not any("To" in type(step).__name__ for step in steps):
            steps = [*steps, v1.PILToTensor()]  # steps that end with a tensor
        plan = split_transform(
            v1.Compose(list(steps)), form=store.spec.form, channels=store.samples[0].shape[0]
        )
        assert not plan.per_sample, plan.obstacle
        self.host, cast = Program(plan.batch_ops, store.spec).without_cast()
        self.floats = ToFloats(cast) if cast else lambda images: images
        self.has_floats = cast is not None
        self.obstacle = window_obstacle(plan, store.spec)

    def window(self, store: ArrayStore, device: torch.device) -> Window:
        """Return a window over all samples of a store on the device."""
        assert not self.obstacle
        return Window(self.host, torch.from_numpy(np.stack(store.samples)).to(device))

    def sent(self, store: ArrayStore, index_B: np.ndarray) -> torch.Tensor:
        output = self.host.output(store.samples[0].shape)
        assert output is not None
        out = np.empty((len(index_B), *output[0]), np.uint8)
        self.host.run(store, index_B, EPOCH, SEED, out)
        return torch.from_numpy(out)

    def cut(self, store: ArrayStore, index_B: np.ndarray, device: torch.device) -> torch.Tensor:
        window = self.window(store, device)
        draws = window.draw(index_B, EPOCH, SEED)
        rows = torch.from_numpy(index_B).to(device)
        return window.cut(rows, None if draws is None else draws.to(device))


def run_both(
    steps: Steps, store: ArrayStore, index: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return served samples made from what is sent, and check that a store on the device gives the same."""
    ops = Ops(steps, store)
    index_B = np.array(index, np.int64)
    sent = ops.sent(store, index_B).to(device)
    if not ops.obstacle:
        there = ops.cut(store, index_B, device)
        assert torch.equal(sent, there)
        assert sent.stride() == there.stride() or not len(sent)
    batch = ops.floats(sent)
    assert (batch.dtype is torch.uint8) is not ops.has_floats
    return batch.cpu()


def check(steps: Steps, store: ArrayStore, device: torch.device, *, atol: float = 0) -> None:
    """Check that batches equal those of the CPU's program; some samples come twice."""
    index = [*reversed(range(len(store.samples))), 0, 0]
    expected = served(steps, store, index)
    batch = run_both(steps, store, index, device)
    assert batch.is_contiguous()
    assert batch.shape == expected.shape
    np.testing.assert_allclose(batch.numpy(), expected, rtol=0, atol=atol)
    assert batch.dtype == torch.from_numpy(expected).dtype


# Geometry


@both_apis
@all_forms
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [(6, 5), (8, 16), SIZE], ids=shown)
def test_flips(device: torch.device, api: Any, form: str, p: float, size: tuple[int, int]) -> None:
    """No, some and all samples are mirrored, along one axis and along both, as on the CPU."""
    check(
        [api.RandomHorizontalFlip(p), api.PILToTensor()][: 1 + (form == "pil")],
        store_of(form, size),
        device,
    )
    check([api.RandomVerticalFlip(p), api.RandomHorizontalFlip(0.5)], store_of(form, size), device)


@both_apis
@all_forms
@all_modes
@pytest.mark.parametrize("channels", [1, 3])
def test_padded_crops(device: torch.device, api: Any, form: str, mode: str, channels: int) -> None:
    """Crops with uneven borders in all modes, mirrored along both axes, equal the CPU's."""
    crop = api.RandomCrop((36, 50), padding=(1, 2, 3, 4), padding_mode=mode, fill=7)
    steps = [crop, api.RandomHorizontalFlip(), api.RandomVerticalFlip()]
    check(steps, store_of(form, channels=channels), device)


@both_apis
@all_modes
@pytest.mark.parametrize("padding", [None, (1, 0, 2, 1)])
def test_pad_if_needed(device: torch.device, api: Any, mode: str, padding: Any) -> None:
    """Images that are too small along one axis are padded there, as on the CPU."""
    crop = api.RandomCrop((9, 8), padding=padding, pad_if_needed=True, padding_mode=mode)
    check([crop, api.RandomHorizontalFlip()], store_of(size=(6, 9)), device)


@pytest.mark.parametrize("size", [(3, 2), (4, 3), (9, 8), (9, 2), (2, 10)], ids=shown)
def test_centre_crops(device: torch.device, size: tuple[int, int]) -> None:
    """Centre crops smaller and larger than the image, along each axis, equal the CPU's."""
    check(
        [v1.RandomHorizontalFlip(), v1.CenterCrop(size)], store_of(size=(6, 5), channels=1), device
    )


def test_colour_fill_and_repeated_reflection(device: torch.device) -> None:
    """Each channel gets its own fill value; PIL images are reflected several times."""
    steps = [v1.RandomCrop(6, padding=3, fill=(1, 128, 255)), v1.RandomHorizontalFlip()]
    check(steps, store_of(size=(6, 5)), device)
    check([v1.RandomCrop(5, padding=9, padding_mode="reflect")], store_of(size=(6, 5)), device)


# Values


@all_conversions
def test_conversions_are_bit_equal(device: torch.device, steps: list[Any]) -> None:
    """Each conversion to floats is bit-equal to the CPU's for all 256 values, alone and after a crop."""
    store = store_of()
    store.samples[0].flat[:256] = np.arange(256)
    check(steps, store, device)
    check([v1.RandomCrop(20), *steps], store, device)


def test_normalize(device: torch.device) -> None:
    """Normalised floats are within 1e-6 of the CPU's, also without scaling to 0..1, and from one channel to three."""
    norm = v1.Normalize(*NORM)
    scale = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    for steps in (
        [v1.RandomHorizontalFlip(), v1.ToTensor(), norm],
        [
            v1.ToTensor(),
            norm,
            v1.RandomCrop(30),
        ],
        [v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize((127.0,), (64.0,))],
        [v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.Grayscale(3), v1.ToTensor(), norm],
    ):
        check(steps, store_of(), device, atol=1e-6)
    check(
        [*scale, v2.Normalize(*NORM)],
        store_of(channels=1),
        device,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_floats_are_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    """What a transform makes of halves is the float32 batch, rounded."""
    crop = [v1.RandomCrop(20), v2.ToImage()]
    whole, half = (
        run_both([*crop, v2.ToDtype(kind, scale=True)], store_of(), range(24), device)
        for kind in (torch.float32, dtype)
    )
    assert torch.equal(half, whole.to(dtype))
    assert half.stride() == whole.stride()


def conversion(dtype: torch.dtype, form: Form, mean: Sequence[float] = NORM[0]) -> ToFloats:
    """Return the last step of a dataset of normalised floats of a dtype, for a prefetcher."""
    steps = [v2.ToImage(), v2.ToDtype(dtype, scale=True), v2.Normalize(mean, NORM[1])]
    plan = split_transform(v2.Compose(steps), form="pil", channels=3)
    return ToFloats(plan.batch_ops[-1], form)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mean", [NORM[0], (0.0, 0.0, 0.0)], ids=["multiplied", "without mean"])
def test_floats_are_made_in_one_pass_in_the_form_that_is_served(
    device: torch.device, dtype: torch.dtype, mean: Sequence[float]
) -> None:
    """Each value is the float32 value, rounded once: within half a unit, plus the error of float32."""
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3, 1).reshape(1, 3, 16, 16).to(device)
    convert = conversion(torch.float32, Form(dtype, channels_last=True), mean)
    convert(pixels)  # which sends the constants
    with OnDevice() as ops:
        made = convert(pixels)
    assert made.dtype is dtype
    assert made.is_contiguous(memory_format=torch.channels_last)
    whole = [tensor for name, tensor in ops.made if tensor.numel() >= pixels.numel()]
    assert all(tensor.dtype is dtype for tensor in whole)  # no float32 copy
    assert [name for name, _ in ops.made if "empty" not in name] == ["addcmul"]
    assert torch.equal(made, conversion(torch.float32, Form(), mean)(pixels).to(dtype))
    channels = torch.tensor([mean, NORM[1]], dtype=torch.float64)[:, :, None, None]
    exact = (pixels.cpu().double() / 255 - channels[0]) / channels[1]
    half_unit = torch.finfo(dtype).eps / 2
    room = half_unit * exact.abs().clamp(min=torch.finfo(dtype).smallest_normal) + 1e-6
    assert (made.cpu().double() - exact).abs().le(room).all()


def test_floats_that_would_be_rounded_twice_are_cast_afterwards() -> None:
    """float16 values of a dataset stay float16 values, whatever dtype is served; the layout is made at once."""
    pixels = torch.arange(192, dtype=torch.uint8).reshape(2, 3, 8, 4)
    own = conversion(torch.float16, Form())(pixels)
    made = conversion(torch.float16, Form(torch.float32, channels_last=True))(pixels)
    assert made.dtype is torch.float16
    assert torch.equal(made, own)
    assert made.is_contiguous(memory_format=torch.channels_last)
    whole = conversion(torch.float32, Form(torch.int64))(pixels)
    assert whole.dtype is torch.float32


def test_scaled_values_are_divided_into_the_form_that_is_served(device: torch.device) -> None:
    """Without ``Normalize`` there is only a division, which is bit-equal."""
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).to(device)
    [cast] = split_transform(v1.Compose([v1.ToTensor()]), form="pil", channels=1).batch_ops
    made = ToFloats(cast, Form(torch.bfloat16))(pixels)
    assert torch.equal(made, ToFloats(cast)(pixels).bfloat16())
    assert torch.equal(made.cpu(), (pixels.cpu() / 255).bfloat16())


# Steps that the device has no form of

AUGMENTATION = [
    v1.RandomResizedCrop(24),
    v1.RandomHorizontalFlip(),
    v1.RandomCrop(24, padding=3),
    v1.ToTensor(),
    v1.Normalize(*NORM),
]
WINDOWS = [v1.RandomCrop(36), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*NORM)]


def test_other_steps_run_before_the_transfer(device: torch.device) -> None:
    """The core resizes and changes colours, and only its uint8 is sent."""
    jitter = [
        v1.RandomResizedCrop(24),
        v1.ColorJitter(0.4, 0.4),
        v1.ToTensor(),
        v1.Normalize(*NORM),
    ]
    for steps in (AUGMENTATION, jitter):
        check(steps, store_of(), device, atol=1e-6)
        ops = Ops(steps, store_of())
        assert re.match(r"RandomResizedCrop\(.*\) runs on the CPU", ops.obstacle)
        assert ops.sent(store_of(), np.arange(2)).shape == (2, 3, 24, 24)


@all_modes
def test_windows_that_do_not_fuse_run_before_the_transfer(device: torch.device, mode: str) -> None:
    """A border around a crop, or of another colour, needs more than one window, and is made before the transfer."""
    for steps in (
        [v1.RandomCrop(8), v1.Pad((1, 0, 3, 2), padding_mode=mode), v1.RandomVerticalFlip()],
        [v1.RandomCrop(38, padding=5, fill=3), v1.RandomHorizontalFlip(), v1.Pad(2, fill=9)],
    ):
        assert Ops(steps, store_of()).obstacle
        check(steps, store_of(), device)


# Batches


def test_a_sample_does_not_depend_on_its_batch(device: torch.device) -> None:
    """A sample has the same pixels in batches of any size and order."""
    store = store_of()
    whole = run_both(WINDOWS, store, range(24), device)
    for index in ([7], [3, 3, 21, 0], np.random.default_rng(1).permutation(24).tolist()):
        assert torch.equal(run_both(WINDOWS, store, index, device), whole[index])


def test_draws_are_one_small_tensor() -> None:
    """Draws are two numbers for each sample, in one tensor: its rows and its columns."""
    cpu = torch.device("cpu")
    window = Ops(WINDOWS, store_of()).window(store_of(), cpu)
    draws = window.draw(np.arange(24), EPOCH, SEED)
    assert draws is not None
    assert draws.dtype == torch.int32
    assert draws.is_contiguous()
    assert draws.shape == (2, 24)
    mixed = window.draw(np.arange(24), np.arange(24) % 2, SEED)
    assert mixed is not None
    assert not torch.equal(mixed, draws)
    plain = Ops([v1.ToTensor()], store_of()).window(store_of(), cpu)
    assert plain.draw(np.arange(24), EPOCH, SEED) is None


def test_no_ops(device: torch.device) -> None:
    """A program without steps gives the stored samples."""
    store = store_of("tensor")
    samples = torch.from_numpy(np.stack(store.samples)).to(device)
    window = Window(Program((), store.spec), samples)
    index_B = torch.tensor([2, 0], device=device)
    assert torch.equal(window.cut(index_B, None), samples[index_B])
    assert window.shape == (3, *SIZE)


def test_the_stored_samples_are_only_read(device: torch.device) -> None:
    """Cutting batches does not write to the store."""
    store = store_of()
    window = Ops([v1.RandomCrop(SIZE, padding=3), v1.ToTensor()], store).window(store, device)
    draws = window.draw(np.arange(24), EPOCH, SEED)
    assert draws is not None
    window.cut(torch.arange(24, device=device), draws.to(device))
    assert torch.equal(window.tensors[0].cpu(), torch.from_numpy(np.stack(store.samples)))


# What it costs


@pytest.mark.parametrize(
    "steps",
    [
        WINDOWS,
        [v1.RandomCrop(40, padding=4, padding_mode="reflect"), v1.ToTensor()],
        [v1.RandomCrop(40, padding=4, fill=7), v1.PILToTensor()],
        [
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*NORM),
        ],
    ],
    ids=["crop", "reflect", "fill", "v2"],
)
def test_no_op_is_slow_or_wrong_on_a_device(steps: list[Any]) -> None:
    """No op waits for a value or a shape, mixes dtypes in ``out=``, or indexes each pixel."""
    store = store_of()
    ops = Ops(steps, store)
    window = ops.window(store, torch.device("cpu"))
    draws = window.draw(np.arange(24), EPOCH, SEED)
    index_B = torch.arange(24)
    ops.floats(window.cut(index_B, draws))  # makes the constants
    with OnDevice() as made:
        ops.floats(window.cut(index_B, draws))
    pixels = 24 * 3 * window.shape[1] * window.shape[2]
    passes = [
        name for name, tensor in made.made if tensor.numel() >= pixels and "empty" not in name
    ]
    assert len(passes) <= 10, passes
    kernels = [name for name, _ in made.made if "empty" not in name]
    is_reflected = getattr(steps[0], "padding_mode", "") == "reflect"
    assert len(kernels) <= (18 if is_reflected else 14), kernels


def test_the_guard_sees_both_faults() -> None:
    """The guard refuses on the CPU what was wrong on a GPU."""
    pixels = torch.zeros(2, 3, dtype=torch.int32)
    with OnDevice(), pytest.raises(AssertionError, match=r"computes .*int32 into"):
        torch.bitwise_right_shift(pixels, pixels, out=torch.empty(2, 3, dtype=torch.uint8))
    with OnDevice(), pytest.raises(AssertionError, match="several tensors"):
        pixels[torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]
    with OnDevice(), pytest.raises(AssertionError, match="the host wait"):
        pixels.sum().item()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let CUDA raise where the host waits. Setting the mode warns once, which is no fault of the test."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_no_host_synchronisation_on_a_gpu() -> None:
    """After the first batch, which sends the constants, the host never waits for CUDA."""
    device = torch.device("cuda")
    store = store_of()
    ops = Ops(WINDOWS, store)
    window = ops.window(store, device)
    index_B = torch.arange(24, device=device)
    drawn = window.draw(np.arange(24), EPOCH, SEED)
    assert drawn is not None
    draws = drawn.pin_memory()
    ops.floats(window.cut(index_B, draws.to(device)))
    torch.cuda.synchronize()
    with no_synchronisation():
        ops.floats(window.cut(index_B, draws.to(device, non_blocking=True)))
    torch.cuda.synchronize()


# Errors and obstacles


@pytest.mark.parametrize(
    ("steps", "spec", "reason"),
    [
        ([v1.RandomCrop(4), v1.ToTensor()], {"shape": None}, "samples have different shapes"),
        ([], {"shape": (3, 8, 9), "dtype": "float32"}, "the stored samples are float32 of shape"),
        ([v1.ToTensor(), v1.RandomErasing()], {"shape": (3, 8, 9)}, "Erasing.* runs on the CPU"),
    ],
    ids=["ragged", "floats", "erased"],
)
def test_obstacles(steps: list[Any], spec: dict[str, Any], reason: str) -> None:
    """The reason why a store on the device is not used is given for each step that prevents it."""
    plan = split_transform(v1.Compose(steps), form="pil")
    stored = SampleSpec(**{"dtype": "uint8", "form": "pil", **spec})
    assert re.search(reason, window_obstacle(plan, stored))
