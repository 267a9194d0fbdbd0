"""Training loops over a prefetcher on a simulated device, for schedules and for mutants.

Each reads batches by kernels that run late, drops them at once, and looks at what the kernels saw.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.transforms import v2

from fastdata import CachedDataset, CudaPrefetcher, DataLoader, collate
from fastdata.loaders import resident
from fastdata.machine import limits
from simcuda import Event, Schedule, Sim, SimThread

__all__ = ["SCENARIOS", "forget", "prepare", "run"]

Scenario = Callable[[Sim], None]
SCENARIOS: dict[str, Scenario] = {}
BATCHES = 5


class WrongError(AssertionError):
    """The loop read other values than the loader gave."""


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def run(name: str, seed: int, *, ordered: bool = False, driver: str = "") -> list[str]:
    """Run one schedule of a scenario, and return the errors that were found."""
    sim = Sim(seed, devices=2 if name == "second_device" else 1, ordered=ordered)
    sim.driver = driver or sim.driver
    found: list[str] = []
    available_bytes = limits.available_bytes
    limits.available_bytes = lambda: limits.Available(bytes=1 << 40, limited_by="the test")
    try:
        with sim.installed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                SCENARIOS[name](sim)
            except Exception as error:  # noqa: BLE001
                found.append(f"{type(error).__name__}: {error}")
    finally:
        limits.available_bytes = available_bytes
    return found + sim.violations


# What loops are made of


def rng(sim: Sim) -> Any:
    assert isinstance(sim.scheduler, Schedule)
    return sim.scheduler.random


def fresh(count: int = BATCHES, size: tuple[int, ...] = (3, 5)) -> list[Any]:
    return [
        (torch.full(size, float(i + 1)), torch.arange(size[0]) + 100 * (i + 1))
        for i in range(count)
    ]


class Making:
    """A loader that makes each batch when it is requested, and keeps none."""

    def __init__(self, right: list[Any], make: Callable[[Any], Any] | None = None) -> None:
        self.right = right
        self.make = make or (lambda batch: tuple(part.clone() for part in batch))

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.right)


class Taking:
    """An iterator over batches that records when the loop is inside ``next``."""

    def __init__(self, sim: Sim, batches: Any) -> None:
        self.sim, self.iterator = sim, iter(batches)

    def __iter__(self) -> Taking:
        return self

    def __next__(self) -> Any:
        self.sim.is_inside_next = True
        try:
            return next(self.iterator)
        finally:
            self.sim.is_inside_next = False


def prefetcher(sim: Sim, loader: Any, **options: Any) -> CudaPrefetcher:
    return CudaPrefetcher(
        loader, options.pop("device", "cuda:0"), depth=rng(sim).choice((1, 2, 3)), **options
    )


def consume(sim: Sim, batches: Any, at_most: int = -1) -> list[Any]:
    """Return copies of all batches, made by late kernels; a batch is dropped at once, or after the next one."""
    made: list[Any] = []
    held: list[Any] = []
    keeps = rng(sim).choice((0, 0, 1))
    taking = Taking(sim, batches)
    for images, labels in taking:
        made.append((images.clone(), labels.clone()))
        held.append((images, labels))
        del images, labels, held[: max(0, len(held) - keeps)]
        # Takes what was freed.
        torch.full((3, 5), 255, dtype=torch.uint8, device=torch.device("cuda"))
        if len(made) == at_most:
            break
    return made


def check(made: list[Any], right: list[Any]) -> None:
    torch.cuda.synchronize()
    if len(made) != len(right):
        raise WrongError(f"{len(made)} batches in place of {len(right)}")
    for number, (seen, expected) in enumerate(zip(made, right, strict=True)):
        for part, other in zip(seen, expected, strict=True):
            here = part.cpu()
            with torch._C._DisableTorchDispatch():  # this is no work of the device
                is_right = here.dtype == other.dtype and (
                    torch.equal(here, other)
                    or torch.allclose(here.double(), other.double(), atol=1e-5, rtol=0)
                )
            if not is_right:
                raise WrongError(
                    f"batch {number} is {here.flatten()[:3].tolist()}, not {other.flatten()[:3].tolist()}"
                )


# Roads of a batch


@scenario
def staged(sim: Sim) -> None:
    """Copy ordinary memory to pinned memory first: two epochs, one stream, few events."""
    right = fresh()
    with prefetcher(sim, Making(right)) as batches:
        for _ in range(2):
            check(consume(sim, batches), right)
        if batches.report().pageable_bytes or sim.counts["blocking copies"]:
            sim.violation("copies from pageable memory")
    if len(sim.streams) != 2:
        sim.violation(f"{len(sim.streams) - 1} side streams were made")


@scenario
def growing(sim: Sim) -> None:
    """Batches need more or less pinned memory than the ones before."""
    right = [(torch.full((n, 7), float(n)), torch.arange(n)) for n in (2, 300, 3, 700, 40)]
    with prefetcher(sim, Making(right)) as batches:
        check(consume(sim, batches), right)


@scenario
def pinned_by_the_loader(sim: Sim) -> None:
    """Memory that torch reuses when no known copy reads it, and a part of it with gaps."""
    right = fresh()

    def make(batch: Any) -> Any:
        images, labels = batch
        wide = torch.zeros(len(labels), 2, dtype=torch.int64)
        wide[:, 0] = labels
        return images.t().pin_memory().t(), wide.pin_memory()[:, 0]

    with prefetcher(sim, Making(right, make)) as batches:
        check(consume(sim, batches), right)
        if batches.report().in_place_bytes != sum(images.nbytes for images, _ in right):
            sim.violation("pinned images were not copied in place")


@scenario
def pageable(sim: Sim) -> None:
    """The driver refuses to pin."""
    sim.refuses_to_pin = True
    right = fresh()
    with prefetcher(
        sim, Making(right), transform=lambda batch: (batch[0] + 1, batch[1])
    ) as batches:
        check(consume(sim, batches), [(images + 1, labels) for images, labels in right])


STEPS: dict[str, list[Any]] = {
    "none": [],
    "crop": [
        transforms.RandomCrop((7, 5), padding=1),
        transforms.RandomHorizontalFlip(),
        transforms.ConvertImageDtype(torch.float32),
        transforms.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
    ],
}


@functools.cache
def dataset_of(storage: str, steps: str) -> CachedDataset:
    generator = torch.Generator().manual_seed(3)
    samples = [
        (torch.randint(0, 256, (3, 8, 6), dtype=torch.uint8, generator=generator), i)
        for i in range(16)
    ]
    transform = transforms.Compose(STEPS[steps]) if STEPS[steps] else None
    return CachedDataset(samples, transform=transform, storage=storage, seed=0)  # type: ignore[arg-type]


MIX = v2.RandomChoice([v2.MixUp(num_classes=16), v2.CutMix(num_classes=16)])


def mixed(batch: Any) -> Any:
    return MIX(*default_collate(batch))


@functools.cache
def expected_of(steps: str, mix: Any = None) -> list[Any]:
    """Return the CPU's batches; a mix is called on each."""
    collate_fn = None if mix is None else lambda batch: mix(batch)
    loader = DataLoader(dataset_of("shared", steps), 4, collate_fn=collate_fn)
    loader.set_epoch(2)
    return [(images.clone(), labels.clone()) for images, labels in loader]


@functools.cache
def loader_of(storage: str, steps: str, workers: int, mix: Any = None) -> DataLoader:
    loader = DataLoader(dataset_of(storage, steps), 4, num_workers=workers, collate_fn=mix)
    loader.set_epoch(2)
    return loader


def prepare() -> None:
    """Make what all schedules share, outside of a simulation."""
    for steps in STEPS:
        expected_of(steps)
    expected_of("crop", mixed)
    for steps in STEPS:
        dataset_of("device", steps)


def forget() -> None:
    """Free everything that ``prepare`` made."""
    for storage, steps in itertools.product(("shared", "device"), STEPS):
        dataset_of(storage, steps).close()
    for made in (loader_of, expected_of, dataset_of):
        made.cache_clear()


def left_in_the_middle(sim: Sim, workers: int) -> None:
    """Leave four epochs of a loader with a pinned ring in the middle, and check all their batches at the end."""
    loader, right = loader_of("shared", "none", workers), expected_of("none")
    with prefetcher(sim, loader) as batches:
        kept = []
        for _ in range(4):
            loader.set_epoch(2)
            kept.append(consume(sim, batches, at_most=rng(sim).randrange(1, 5)))
    for made in kept:
        check(made, right[: len(made)])


def ours(
    sim: Sim,
    storage: str,
    steps: str,
    where: Any,
    epochs: int = 1,
    mix: Any = None,
    workers: int = 0,
) -> None:
    loader, right = loader_of(storage, steps, workers, mix), expected_of(steps, mix)
    loader.set_epoch(2)
    with prefetcher(sim, loader, batch_ops=where) as batches:
        for _ in range(epochs):
            loader.set_epoch(2)
            check(consume(sim, batches), right)
        report = batches.report()
        if report.pageable_bytes or (storage == "shared" and not report.in_place_bytes):
            sim.violation(f"{report.pageable_bytes} pageable, {report.in_place_bytes} in place")


@scenario
def gathered(sim: Sim) -> None:
    """Threads of the loader write batches to pinned slots, from which they are copied to the device."""
    ours(sim, "shared", "none", "auto", epochs=2)


@scenario
def gathered_anew(sim: Sim) -> None:
    """Slots of epochs that were left in the middle are filled again by the next epoch."""
    left_in_the_middle(sim, workers=0)


@scenario
def gathered_by_threads(sim: Sim) -> None:
    """The loop queues copies of batches that threads read; the prefetcher has no thread."""
    ours(sim, "shared", "none", "auto", epochs=2, workers=2)
    if len(sim.streams) != 2:
        sim.violation(f"{len(sim.streams) - 1} side streams were made")


@scenario
def left_while_threads_gather(sim: Sim) -> None:
    """Slots of epochs that were left in the middle are filled again by threads of the next epoch."""
    left_in_the_middle(sim, workers=2)


@scenario
def ops_behind_threads(sim: Sim) -> None:
    """Crop, flip and Normalize on the side stream; the loop queues them, sometimes in inference mode."""
    loader, right = loader_of("shared", "crop", 2), expected_of("crop")
    made = []
    with prefetcher(sim, loader, batch_ops="device") as batches:
        for _ in range(2):
            loader.set_epoch(2)
            taking = Taking(sim, batches)
            for number in range(len(right)):
                with torch.inference_mode(mode=rng(sim).random() < 0.5):
                    images, labels = next(taking)
                if images.is_inference() or labels.is_inference():
                    sim.violation(f"batch {number} is an inference tensor")
                made.append((images.clone(), labels.clone()))
                del images, labels
                torch.full((4, 3, 7, 5), 255.0, device=torch.device("cuda"))
            del taking
    check(made, right * 2)


@scenario
def streams_and_threads(sim: Sim) -> None:
    """The loop uses its own stream, another one in the second epoch, and threads read the batches."""
    loader, right = loader_of("shared", "none", 2), expected_of("none")
    with prefetcher(sim, loader) as batches:
        for stream in [torch.cuda.Stream() for _ in range(2)]:
            loader.set_epoch(2)
            with torch.cuda.stream(stream):
                made = consume(sim, batches)
            check(made, right)


@scenario
def failing_threads(sim: Sim) -> None:
    """Some batches fail on the device; the others come in order, and nothing is read after a failure."""
    loader, right = loader_of("shared", "none", 2), expected_of("none")
    loader.set_epoch(2)
    bad = {rng(sim).randrange(4) for _ in range(2)}
    seen = [0]

    def fail(batch: Any) -> Any:
        number, seen[0] = seen[0], seen[0] + 1
        if number in bad:
            raise ValueError("no such image")
        return batch

    made = []
    failures = 0
    with prefetcher(sim, loader) as batches:
        epoch: Any = iter(batches)  # which may wait for the copy of a batch that fails
        epoch._epoch.finish = fail
        while True:
            try:
                images, labels = next(epoch)
            except StopIteration:
                break
            except ValueError:
                failures += 1
                if seen[0] > len(made) + failures:
                    sim.violation("a batch is copied behind a failure")
                continue
            made.append((images.clone(), labels.clone()))
            del images, labels
    check(made, [batch for number, batch in enumerate(right) if number not in bad])


@scenario
def ops_on_the_device(sim: Sim) -> None:
    """Crop, flip and Normalize in the prefetcher's thread."""
    ours(sim, "shared", "crop", "device")


@scenario
def mixed_on_the_device(sim: Sim) -> None:
    """uint8 is sent, and the prefetcher's thread converts and mixes it; the host has made the draws."""
    ours(sim, "shared", "crop", "device", epochs=2, mix=mixed)
    images_bytes, numbers_bytes = 2 * 16 * 3 * 7 * 5, 2 * 16 * 8
    if sum(sim.sent) > images_bytes + numbers_bytes + 8 * 64 + 24:  # and draws of each batch
        sim.violation(f"{sum(sim.sent)} bytes were sent")


@scenario
def store_on_the_device(sim: Sim) -> None:
    """All samples are on the device, copied there once, in chunks."""
    before, resident.CHUNK_BYTES = (
        resident.CHUNK_BYTES,
        144 * rng(sim).choice((1, 7, 100)),
    )
    try:
        ours(sim, "device", "crop", "auto", epochs=2)
    finally:
        resident.CHUNK_BYTES = before
    # And where windows lie, in each epoch; and what a kernel is compared for.
    if sum(sim.sent) > 16 * 144 + 2700:
        sim.violation(f"the store was sent more than once: {sum(sim.sent)} bytes")


@scenario
def store_and_streams(sim: Sim) -> None:
    """Batches that were cut together are taken on several streams; the copy of the store ends with the prefetcher."""
    loader, right = loader_of("device", "crop", 0), expected_of("crop")
    streams = [torch.cuda.Stream() for _ in range(2)]
    made = []
    before, resident.GROUP_BYTES = (
        resident.GROUP_BYTES,
        4 * 105 * 4 * rng(sim).choice((0, 1, 100)),
    )
    try:
        for _ in range(2):
            loader.set_epoch(2)
            with prefetcher(sim, loader) as batches:
                taking = Taking(sim, batches)
                for number in range(len(right)):
                    with torch.cuda.stream(streams[rng(sim).randrange(2)]):
                        images, labels = next(taking)
                        made.append((images.clone(), labels.clone()))
                        del images, labels
                        torch.full((number + 1, 3, 7, 5), 255.0, device=torch.device("cuda"))
                del taking
            torch.full((16, 3, 8, 6), 255, dtype=torch.uint8, device=torch.device("cuda"))
    finally:
        resident.GROUP_BYTES = before
    check(made, right * 2)


@scenario
def store_on_another_stream(sim: Sim) -> None:
    """An epoch has another stream than the first one, which copied the samples and was left at its start."""
    loader = loader_of("device", "none", 0)
    with prefetcher(sim, loader) as batches:
        loader.set_epoch(2)
        iter(batches)
        loader.set_epoch(2)
        with torch.cuda.stream(torch.cuda.Stream()):
            taking = Taking(sim, batches)
            made = [(images.clone(), labels.clone()) for images, labels in taking]
    check(made, expected_of("none"))


@scenario
def store_and_inference(sim: Sim) -> None:
    """Batches that are cut together, some of them requested in inference mode, can all be trained on."""
    loader, right = loader_of("device", "crop", 0), expected_of("crop")
    loader.set_epoch(2)
    made = []
    with prefetcher(sim, loader) as batches:
        taking = Taking(sim, batches)
        for number in range(len(right)):
            with torch.inference_mode(mode=number == 0):
                images, labels = next(taking)
            if images.is_inference() or labels.is_inference():
                sim.violation(f"batch {number} is an inference tensor")
            made.append((images.clone(), labels.clone()))
    check(made, right)


@scenario
def state_before_the_first_batch(sim: Sim) -> None:
    """A state saved while the first batch is made begins with that batch, whatever was read ahead."""
    for storage in ("shared", "device"):
        loader = loader_of(storage, "crop", 0)
        loader.set_epoch(2)
        states: list[Any] = []

        def note(batch: Any, loader: DataLoader = loader, states: list[Any] = states) -> Any:
            states.append(loader.state_dict())
            return batch

        with prefetcher(sim, loader, transform=note) as batches:
            check(consume(sim, batches), expected_of("crop"))
        first = states[0]
        if not first["is_begun"] or (first["epoch"], first["num_yielded"]) != (2, 0):
            sim.violation(f"batches count before the first is there, {storage}")


# Bounds


@scenario
def bounds(sim: Sim) -> None:
    """The copy of batch i waits for the loop's work on batch i - depth - 1; at most depth + 3 batches exist."""
    right = fresh(10, (64, 16))
    left: list[int] = []
    with prefetcher(sim, Making(right)) as batches:
        oldest, copied, stream = batches.depth + 1, [0], torch.cuda.current_stream()

        def noting() -> None:
            number, copied[0] = copied[0] // 2, copied[0] + 1
            if number >= oldest and number - oldest not in left:
                sim.violation(
                    f"batch {number} is copied before the device has left {number - oldest}"
                )

        sim.on_copy = noting
        before, sums = sim.live_bytes, []
        for number, (images, labels) in enumerate(Taking(sim, batches)):
            sums.append((images.sum(), labels.clone()))
            stream.push("kernel", lambda number=number: left.append(number))  # type: ignore[attr-defined]
            del images, labels
        sim.on_copy = lambda: None
        check(sums, [(images.sum(), labels) for images, labels in right])
    batch_bytes = right[0][0].nbytes + right[0][1].nbytes
    most = (batches.depth + 3) * batch_bytes + len(right) * (64 * 8 + 4)
    if sim.peak_bytes - before > most:
        sim.violation(f"{sim.peak_bytes - before} bytes on the device, more than {most}")


@scenario
def bounds_without_a_thread(sim: Sim) -> None:
    """The same if the loop queues the copies: it waits for the device only with ``depth`` steps queued."""
    loader = DataLoader(dataset_of("shared", "none"), 1, num_workers=2)
    left: list[int] = []
    steps: list[int] = []  # places in the loop's stream behind each step
    made: list[Any] = []
    with prefetcher(sim, loader) as batches:
        depth, copied, stream = batches.depth, [0], torch.cuda.current_stream()

        def noting() -> None:
            number, copied[0] = copied[0] // 2, copied[0] + 1
            if number > depth and number - depth - 1 not in left:
                sim.violation(
                    f"batch {number} is copied before the device has left {number - depth - 1}"
                )

        def waiting(event: Event) -> None:
            if copied[0] // 2 > len(made):
                sim.violation("the loop waits for the device, although a batch is there")
            if event.stream is stream and sum(step > event.position for step in steps) < depth:
                sim.violation("the loop waits until the device has little left to do")

        sim.on_copy, sim.on_wait = noting, waiting
        for number, (images, labels) in enumerate(Taking(sim, batches)):
            made.append(labels.clone())
            stream.push("kernel", lambda number=number: left.append(number))  # type: ignore[attr-defined]
            steps.append(stream.queued)  # type: ignore[attr-defined]
            del images, labels
        sim.on_copy = lambda: None
        torch.cuda.synchronize()
        if [label.item() for label in made] != list(range(16)):
            sim.violation("other labels")
        if batches.report().fresh_batches:
            sim.violation("slots are held longer than their copies run")


# What runs on the side stream besides copies


@scenario
def transform(sim: Sim) -> None:
    """The transform reads memory that the loop has just written, the loop keeps its results, and some batches fail."""
    right = fresh(8)
    weight = torch.zeros(5, device=torch.device("cuda"))
    bad = {rng(sim).randrange(8) for _ in range(2)}
    seen = [0]

    def apply(batch: Any) -> Any:
        number, seen[0] = seen[0], seen[0] + 1
        made = batch[0] * 3 * weight - batch[0] * weight, batch[1] + 1
        if number in bad:
            raise ValueError("no such image")
        return made

    made: list[Any] = []
    with prefetcher(sim, Making(right), transform=apply, dtype=torch.float32) as batches:
        weight.fill_(2.0)  # queued by the loop just before it asks for its first batch
        taking = Taking(sim, batches)
        while True:
            try:
                images, labels = next(taking)
            except StopIteration:
                break
            except ValueError:
                continue
            made.append((images.clone(), labels.clone()))
            del images, labels
            torch.full((3, 5), 255.0, device=torch.device("cuda"))
        check(
            made,
            [(images * 4, labels + 1) for n, (images, labels) in enumerate(right) if n not in bad],
        )


class Held:
    """A user's own batch class."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images = images
        self.others = {"labels": [labels]}

    def parts(self) -> tuple[Any, Any]:
        return self.images, self.others["labels"][0]


class Slotted:
    """A batch class without ``__dict__``, with a mangled attribute name."""

    __slots__ = ("__inner",)

    def __init__(self, images: Any, labels: Any) -> None:
        self.__inner = Held(images, labels)

    def parts(self) -> tuple[Any, Any]:
        return self.__inner.parts()


class Opaque:
    """A batch class whose tensors cannot be seen from Python, with its own ``record_stream``."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.parts = lambda: (images, labels)

    def record_stream(self, stream: Any) -> None:
        for tensor in self.parts():
            tensor.record_stream(stream)


@scenario
def objects(sim: Sim) -> None:
    """A transform returns objects of the user's own classes, and the loop reads their tensors late."""
    right = fresh(8)

    def apply(batch: Any) -> Any:
        return rng(sim).choice((Held, Slotted, Opaque))(batch[0] * 3, batch[1] + 1)

    made = []
    with prefetcher(sim, Making(right), transform=apply) as batches:
        for batch in Taking(sim, batches):
            images, labels = batch.parts()
            made.append((images.clone(), labels.clone()))
            del batch, images, labels
            torch.full((3, 5), 255.0, device=torch.device("cuda"))
        check(made, [(images * 3, labels + 1) for images, labels in right])


class Moving(Held):
    """A batch class that goes to a device by itself, in place, as PyG's does."""

    def to(self, device: Any, non_blocking: bool = False) -> Moving:
        self.images = self.images.to(device, non_blocking=non_blocking)
        [labels] = self.others["labels"]
        self.others = {"labels": [labels.to(device, non_blocking=non_blocking)]}
        return self

    def pin_memory(self) -> Moving:
        images, labels = self.parts()
        images = images if images.is_pinned() else images.pin_memory()
        return Moving(images, labels.pin_memory())


@scenario
def moving_objects(sim: Sim) -> None:
    """Objects are moved by their own ``pin_memory`` and ``to``; their images are in slots that are filled again."""
    right = expected_of("none")
    loader = DataLoader(
        dataset_of("shared", "none"), 4, collate_fn=lambda samples: Moving(*collate(samples))
    )
    made = []
    with prefetcher(sim, loader) as batches:
        for _ in range(2):
            for batch in Taking(sim, batches):
                images, labels = batch.parts()
                made.append((images.clone(), labels.clone()))
                if images.device != batches.device:
                    sim.violation("an object stays on the CPU")
                del batch, images, labels
        check(made, right * 2)
        if batches.report().pageable_bytes:
            sim.violation("an object was copied from pageable memory")


@scenario
def made_on_the_device(sim: Sim) -> None:
    """A loader makes batches on the device, on the default stream as its threads do, and keeps none."""
    right = fresh(8)

    def make(batch: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            images, labels = (part.to(torch.device("cuda", 0)) for part in batch)
            return rng(sim).choice(([images * 3, labels + 1], Held(images * 3, labels + 1)))

    def apply(batch: Any) -> Any:
        images, labels = batch.parts() if isinstance(batch, Held) else batch
        return images * 2, labels + 1

    made = []
    with prefetcher(sim, Making(right, make), transform=apply, dtype=torch.float64) as batches:
        for images, labels in Taking(sim, batches):
            made.append((images.float(), labels.clone()))
            del images, labels
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.full((3, 5), 255.0, device=torch.device("cuda"))
        check(made, [(images * 6, labels + 2) for images, labels in right])


@scenario
def own_stream(sim: Sim) -> None:
    """The loop uses its own stream, another one in the second epoch."""
    right = fresh()
    streams = [torch.cuda.Stream() for _ in range(2)]
    with prefetcher(sim, Making(right)) as batches:
        for stream in streams:
            with torch.cuda.stream(stream):
                made = consume(sim, batches)
            check(made, right)


@scenario
def second_device(sim: Sim) -> None:
    """The prefetcher's device is not the current one, and no context is made on any other."""
    right = fresh()
    made = prefetcher(sim, Making(right), device="cuda:1", transform=lambda batch: batch)
    with made as batches, torch.cuda.device(1):
        check(consume(sim, batches), right)
    if torch.device("cuda", 0) in sim.contexts:
        sim.violation("a device is opened that is not used")


@scenario
def capture(sim: Sim) -> None:
    """The loop captures graphs during an epoch."""
    right = fresh(8)
    made = []
    with prefetcher(sim, Making(right)) as batches:
        for number, (images, labels) in enumerate(Taking(sim, batches)):
            made.append((images.clone(), labels.clone()))
            del images, labels
            if number % 3 == 1:
                sim.begin_capture()
                for _ in range(rng(sim).randrange(12)):
                    sim.scheduler.point()
                if not sim.end_capture():
                    sim.violation("a capture of the loop was made invalid")
        check(made, right)


@scenario
def capture_beside_loader_threads(sim: Sim) -> None:
    """Threads of the loader pin slots of its ring while a graph is captured."""
    right, loader = expected_of("none"), loader_of("shared", "none", 2)
    loader.set_epoch(2)
    made = []
    with prefetcher(sim, loader) as batches:
        taking = Taking(sim, batches)  # the threads read from now on
        for number in range(len(right)):
            if number < 2:
                sim.begin_capture()
                for _ in range(rng(sim).randrange(20)):
                    sim.scheduler.point()
                if not sim.end_capture():
                    sim.violation("a capture was made invalid by a thread of the loader")
            images, labels = next(taking)
            made.append((images.clone(), labels.clone()))
            del images, labels
        check(made, right)


# Ends


@scenario
def broken_off(sim: Sim) -> None:
    """Epochs are left in the middle, and their thread ends in time or not; then two whole ones run side by side."""
    assert isinstance(sim.scheduler, Schedule)
    right = fresh()
    sim.scheduler.joins_time_out = rng(sim).random() < 0.5
    batches = prefetcher(sim, Making(right))
    kept = [consume(sim, batches, at_most=rng(sim).randrange(1, 5)) for _ in range(2)]
    pairs = list(zip(Taking(sim, batches), Taking(sim, batches), strict=True))
    kept += [list(made) for made in zip(*pairs, strict=True)]
    del pairs
    epoch = iter(batches)
    next(epoch)
    sim.scheduler.joins_time_out = False
    batches.close()
    sim.scheduler.block(lambda: all(task.is_done for task in sim.scheduler.tasks[1:]))  # type: ignore[union-attr]
    for made in kept:
        check(made, right[: len(made)])


@scenario
def closed_while_the_loop_waits(sim: Sim) -> None:
    """Another thread closes the prefetcher while the loop waits for a stuck loader, and stops waiting for it."""
    assert isinstance(sim.scheduler, Schedule)
    scheduler, right = sim.scheduler, fresh(9)
    is_stuck = rng(sim).random() < 0.7
    is_free = [not is_stuck]
    number = [0]

    def make(batch: Any) -> Any:
        number[0] += 1
        if number[0] in (4, 9):
            scheduler.block(lambda: is_free[0])
        return tuple(part.clone() for part in batch)

    made: list[Any] = []
    batches = prefetcher(sim, Making(right, make))
    epoch = iter(batches)
    loop = SimThread(target=lambda: made.extend((x.clone(), y.clone()) for x, y in epoch))
    loop.start()
    for _ in range(rng(sim).randrange(60)):
        scheduler.point()
    scheduler.joins_time_out = is_stuck
    batches.close()
    scheduler.joins_time_out = False
    loop.join()
    is_free[0] = True
    scheduler.block(lambda: all(task.is_done for task in scheduler.tasks[1:]))
    check(made, right[: len(made)])


@scenario
def closed_while_threads_read(sim: Sim) -> None:
    """Another thread closes the prefetcher while the loop waits for threads, or queues copies."""
    assert isinstance(sim.scheduler, Schedule)
    scheduler, right = sim.scheduler, expected_of("none")
    loader = loader_of("shared", "none", 2)
    made: list[Any] = []
    batches = prefetcher(sim, loader)
    for _ in range(2):
        loader.set_epoch(2)
        epoch = iter(batches)
        found: list[Any] = []

        def loop(epoch: Any = epoch, found: list[Any] = found) -> None:
            found.extend((images.clone(), labels.clone()) for images, labels in epoch)

        thread = SimThread(target=loop)
        thread.start()
        for _ in range(rng(sim).randrange(60)):
            scheduler.point()
        batches.close()
        sim.on_copy = lambda: sim.violation("a batch is copied after the epoch was closed")
        thread.join()
        sim.on_copy = lambda: None
        made.append(found)
    for found in made:
        check(found, right[: len(found)])


@scenario
def lost_device_behind_threads(sim: Sim) -> None:
    """If the device is lost, the loop gets the error, the threads end, and nothing hangs."""
    loader = DataLoader(dataset_of("shared", "none"), 1, num_workers=2)
    batches = prefetcher(sim, loader)
    taking = Taking(sim, batches)
    next(taking)
    sim.lost = "CUDA error: an illegal memory access was encountered"
    is_told = False
    for _ in range(30):
        try:
            next(taking)
        except StopIteration:
            break
        except RuntimeError as error:
            is_told = is_told or "illegal memory access" in str(error)
    if not is_told:
        sim.violation("the loop was not told that the device is lost")
    sim.order.is_on = False  # a lost device reads no slot, whoever writes to it
    del taking
    batches.close()


@scenario
def lost_device(sim: Sim) -> None:
    """If the device is lost, the loop gets the error, the thread ends, and nothing hangs."""
    batches = prefetcher(sim, Making(fresh(12)))
    taking = Taking(sim, batches)
    next(taking)
    for _ in range(rng(sim).randrange(30)):
        sim.scheduler.point()
    sim.lost = "CUDA error: an illegal memory access was encountered"
    is_told = False
    for _ in range(20):
        try:
            next(taking)
        except StopIteration:
            break
        except RuntimeError as error:
            is_told = is_told or "illegal memory access" in str(error)
    if not is_told:
        sim.violation("the loop was not told that the device is lost")
    del taking
    batches.close()


def main() -> None:
    """Run one schedule: ``python scenarios.py NAME SEED``."""
    prepare()
    name, seed = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        gc.collect()
        print(run(name, int(seed)) or "right")  # noqa: T201


if __name__ == "__main__":
    main()
