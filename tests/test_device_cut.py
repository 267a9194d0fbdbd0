"""The kernel that cuts batches on a device. Here it runs on the CPU, launched through a simulated driver.

``fake_driver.c`` compiles the kernel's source, and a simulated device has the memory and the streams.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import scenarios
from conftest import shown
from data import ArrayStore
from fake_driver import FakeDriver, find_driver
from fastdata import CachedDataset, CudaPrefetcher, DataLoader
from fastdata.loaders import driver
from fastdata.loaders.device_cut import DeviceCut
from fastdata.loaders.floats import Form, ToFloats
from fastdata.loaders.window import Window
from fastdata.pixels.program import Program
from fastdata.pixels.split import split_transform
from simcuda import Sim
from test_transforms import EPOCH, NORM, SEED, all_modes, images

SIZE = (7, 5)
COUNT = 9
BY_OPS = "batches are cut by ops of torch"
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*NORM)]
FORMS = [
    Form(dtype, channels_last=is_last)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for is_last in (False, True)
]


@pytest.fixture(scope="module")
def library() -> FakeDriver:
    found = find_driver()
    if found is None:
        pytest.skip("needs a C compiler with float16")
    return found


@pytest.fixture
def gpu(library: FakeDriver) -> Iterator[Sim]:
    """Yield a simulated device with a driver, and restore the previous state."""
    sim = Sim()
    sim.driver = library.path
    library.fail()
    library.spoil(is_on=False)
    with sim.installed():
        yield sim
    assert library.depth == 0
    assert not sim.violations


class Cutting:
    """The same samples and steps for both ways to cut them."""

    def __init__(self, steps: Sequence[Any], form: Form, channels: int = 3) -> None:
        self.store = ArrayStore(images(COUNT, SIZE, channels=channels), "tensor")
        plan = split_transform(v2.Compose(list(steps)), form="tensor", channels=channels)
        assert not plan.per_sample, plan.obstacle
        self._program, self._cast = Program(plan.batch_ops, self.store.spec).without_cast()
        self._form = form

    def on(self, device: str) -> tuple[Window, ToFloats | None]:
        samples = torch.from_numpy(np.stack(self.store.samples))
        convert = ToFloats(self._cast, self._form) if self._cast else None
        return Window(self._program, samples.to(device)), convert

    def by_kernel(self, index_B: np.ndarray) -> torch.Tensor:
        window, convert = self.on("cuda:0")
        cut = DeviceCut(window, convert, lambda made: made)
        lines = window.draw(index_B, EPOCH, SEED)
        there = torch.from_numpy(index_B).to("cuda:0")
        return cut(there, None if lines is None else lines.to("cuda:0")).cpu()

    def by_ops(self, index_B: np.ndarray, device: str = "cpu") -> torch.Tensor:
        window, convert = self.on(device)
        lines = window.draw(index_B, EPOCH, SEED)
        there = torch.from_numpy(index_B).to(device)
        made = window.cut(there, None if lines is None else lines.to(device))
        return made if convert is None else convert(made)


def assert_same(made: torch.Tensor, right: torch.Tensor) -> None:
    """Check dtype, layout and values: bytes are equal, floats within 1e-6 or a unit in the last place."""
    assert made.dtype is right.dtype
    assert made.shape == right.shape
    assert made.stride() == right.stride()
    room = torch.finfo(made.dtype).eps if made.dtype.is_floating_point else 0
    torch.testing.assert_close(made.double(), right.double(), rtol=room, atol=1e-6)


def check(gpu: Sim, cutting: Cutting, index: Sequence[int] = range(COUNT)) -> None:
    """Check that the kernel's batch equals that of torch's ops on the CPU."""
    index_B = np.array(index, np.int64)
    right = cutting.by_ops(index_B)
    launches = gpu.counts["cuLaunchKernel"]
    made = cutting.by_kernel(index_B)
    assert gpu.counts["cuLaunchKernel"] > launches
    assert_same(made, right)


# Pixels


@all_modes
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_border_gives_the_pixels_of_the_ops(gpu: Sim, mode: str, channels: int) -> None:
    """Uneven borders, mirrored along both axes, give the pixels of the ops as uint8 and as floats."""
    fill = (1, 128, 255, 7)[:channels] if mode == "constant" else 0
    crop = v2.RandomCrop((6, 5), padding=(1, 2, 3, 4), padding_mode=mode, fill=fill)
    steps = [crop, v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    check(gpu, Cutting(steps, Form(), channels))
    norm = v2.Normalize([0.4] * channels, [0.3] * channels)
    check(gpu, Cutting([*steps, *FLOATS[:2], norm], Form(), channels))


@pytest.mark.parametrize("form", FORMS, ids=shown)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_form_gives_the_values_of_the_ops(gpu: Sim, form: Form, channels: int) -> None:
    """One channel becomes three if there are three means; values that are only scaled are bit-equal."""
    crop = v2.RandomCrop(4, padding=1)
    check(gpu, Cutting([crop, *FLOATS], form, channels))
    scaled = Cutting([crop, *FLOATS[:2]], form, channels)
    index_B = np.arange(COUNT)
    assert torch.equal(scaled.by_kernel(index_B), scaled.by_ops(index_B))


def test_half_floats_round_as_those_of_torch(gpu: Sim) -> None:
    """All 256 values round as in torch, from subnormal numbers to infinity."""
    for factor, dtype in itertools.product((1e-9, 3e-7, 1.0, 1e3, 1e38), FORMS[2::2]):
        cutting = Cutting([v2.ToDtype(torch.float32), v2.Normalize([0.0], [1 / factor])], dtype)
        cutting.store.samples[0].flat[:] = np.arange(3 * 35)
        cutting.store.samples[1].flat[:] = np.arange(151, 256)
        index_B = np.arange(2)
        made, right = cutting.by_kernel(index_B), cutting.by_ops(index_B)
        assert torch.equal(made, right), (factor, dtype)


@pytest.mark.parametrize("index", [[0], [COUNT - 1, 0, 0, COUNT - 1]], ids=shown)
def test_batches_of_any_length_and_order(gpu: Sim, index: list[int]) -> None:
    """A batch of one, and the first and last samples several times, are right, cut and not cut."""
    check(gpu, Cutting([v2.RandomHorizontalFlip()], Form()), index)
    check(gpu, Cutting(FLOATS, Form()), index)


def test_a_batch_without_samples_is_not_launched(gpu: Sim) -> None:
    """An empty batch launches no kernel, because a grid cannot be empty."""
    window, convert = Cutting(FLOATS, Form()).on("cuda:0")
    cut = DeviceCut(window, convert, lambda made: made)
    launches = gpu.counts["cuLaunchKernel"]
    assert cut(torch.arange(0).to("cuda:0"), None).shape == (0, 3, *SIZE)
    assert gpu.counts["cuLaunchKernel"] == launches


def test_images_of_more_pixels_than_a_grid_has_threads(
    gpu: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large image each thread makes several pixels, and all are right."""
    monkeypatch.setattr(driver, "MOST_BLOCKS", 1)
    monkeypatch.setattr(driver, "THREADS", 4)
    check(gpu, Cutting([v2.RandomCrop(SIZE, padding=2), *FLOATS], Form()))


# When it is used


def taken(own: torch.dtype = torch.float32, **form: Any) -> list[torch.Tensor]:
    """Return the images of two epochs from a store on the device, after comparing them with the CPU's."""
    crop = v2.RandomCrop(5, padding=1)
    steps = [crop, v2.ToDtype(own, scale=True), v2.Normalize(*NORM)]
    samples = [(torch.from_numpy(image), n) for n, image in enumerate(images(COUNT, SIZE))]
    made = []
    with CachedDataset(samples, transform=v2.Compose(steps), seed=0, storage="device") as data:
        loader = DataLoader(data, 4)
        with CudaPrefetcher(loader, "cuda:0", **form) as batches:
            for epoch in range(2):
                loader.set_epoch(epoch)
                right = list(loader)
                loader.set_epoch(epoch)
                for (there, labels), (expected, numbers) in zip(batches, right, strict=True):
                    made.append(there.cpu())
                    assert labels.tolist() == numbers.tolist()
                    wanted = expected.to(form.get("dtype"))
                    torch.testing.assert_close(made[-1], wanted, rtol=1e-2, atol=1e-6)
    return made


@pytest.mark.parametrize("form", [{}, {"dtype": torch.float16, "channels_last": True}], ids=shown)
def test_a_prefetcher_cuts_by_the_kernel(
    gpu: Sim, form: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One launch compares the kernel with the ops, and one in each epoch cuts its batches."""
    caplog.set_level("INFO", "fastdata")
    made = taken(**form)
    assert gpu.counts["cuLaunchKernel"] == 1 + 2
    assert BY_OPS not in caplog.text
    is_last = form.get("channels_last", False)
    assert all(it.is_contiguous(memory_format=torch.channels_last) is is_last for it in made)


def test_without_a_driver_ops_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Without a driver, ops cut the batches; the log gives the reason, once for each device."""
    caplog.set_level("INFO", "fastdata")
    with Sim().installed():
        taken()
    assert caplog.text.count(f"{BY_OPS} on device 0: ") == 1


@pytest.mark.parametrize("name", sorted(driver.FUNCTIONS.keys() - {"cuCtxPopCurrent_v2"}))
def test_a_driver_that_fails_is_not_used(
    gpu: Sim, library: FakeDriver, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever function fails, ops cut the batches, and the log has the function and the error."""
    caplog.set_level("INFO", "fastdata")
    library.fail(name)
    taken()
    assert gpu.counts["cuLaunchKernel"] == 0
    assert re.search(f"{BY_OPS}.*: {name} of the CUDA driver returned error 999", caplog.text)


def test_a_driver_that_is_too_old_for_the_ptx_is_not_used(
    gpu: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that does not load the PTX is not used, and the log says so."""
    caplog.set_level("INFO", "fastdata")
    monkeypatch.setattr(driver, "PTX", tmp_path / "other.ptx")
    driver.PTX.write_bytes(b"//")
    taken()
    assert "cuModuleLoadData of the CUDA driver returned error 218" in caplog.text


def test_a_kernel_that_makes_other_pixels_is_not_used(
    gpu: Sim, library: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """If the kernel makes other pixels, batches are right, and the log has one warning."""
    library.spoil(is_on=True)
    taken()
    taken()
    assert gpu.counts["cuLaunchKernel"] == 1
    assert caplog.text.count("its pixels differ") == 1


def test_float64_is_made_by_ops(gpu: Sim, caplog: pytest.LogCaptureFixture) -> None:
    """float64 is made by ops, also if it is cast afterwards."""
    caplog.set_level("INFO", "fastdata")
    taken(torch.float64)
    taken(torch.float64, dtype=torch.float32)
    assert gpu.counts["cuLaunchKernel"] == 0
    assert f"{BY_OPS}: the kernel computes in float32" in caplog.text


def test_rocm_has_no_such_kernel(
    gpu: Sim, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ROCm build of torch does not use the kernel, also if there is a driver of CUDA."""
    caplog.set_level("INFO", "fastdata")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    taken()
    assert gpu.counts["cuLaunchKernel"] == 0
    assert "this build of torch is for ROCm" in caplog.text


@pytest.mark.parametrize("failing", ["", "cuLaunchKernel"], ids=["works", "fails"])
def test_the_kernel_keeps_the_order_of_streams(library: FakeDriver, failing: str) -> None:
    """Batches of the scenarios are right, and accesses ordered, also if a launch fails."""
    library.fail(failing)
    scenarios.prepare()
    try:
        for name in ("store_on_the_device", "store_and_streams", "store_and_inference"):
            for seed in range(4):
                assert scenarios.run(name, seed, ordered=seed == 3, driver=library.path) == []
    finally:
        library.fail()
        scenarios.forget()


# The package


def test_the_ptx_is_made_from_the_source() -> None:
    """The checksum in the PTX is that of cut_kernel.cu; .ci/make-ptx writes it."""
    source = driver.PTX.with_suffix(".cu").read_text("utf-8")
    checksum = hashlib.sha256(source.encode()).hexdigest()
    head, *_ = driver.PTX.read_text("utf-8").splitlines()
    assert head == f"// cut_kernel.cu, sha256 {checksum}"


# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS, ids=shown)
def test_a_gpu_cuts_by_the_kernel_as_by_ops(form: Form) -> None:
    """A real driver loads the PTX, and its batches equal those of torch's ops on the same GPU."""
    flips = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    index_B = np.arange(COUNT)
    for mode, channels in itertools.product(("constant", "edge", "reflect"), (1, 3)):
        crop = v2.RandomCrop((6, 5), padding=(1, 2, 3, 4), padding_mode=mode, fill=9)
        for more in ([], FLOATS[:2], FLOATS):
            cutting = Cutting([crop, *flips, *more], form, channels)
            made = cutting.by_kernel(index_B)
            assert_same(made, cutting.by_ops(index_B, "cuda:0").cpu())
    kernel = driver.find_kernel(0)
    assert kernel is not None
    assert all(kernel.is_right.values())
