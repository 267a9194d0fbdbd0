"""The loader alone, in processes of its own: its rate, what a sample costs in its parts, and other settings."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, Subset, default_collate

from fastdata.cached import CachedDataset
from fastdata.dataset import PreparedDataset, latest_reader, prepared_anew
from fastdata.errors import kind_of
from fastdata.images import OpenedImages, SampleSpec
from fastdata.loader import DataLoader
from fastdata.memory import available_bytes, budget_bytes, format_bytes, thread_clock, usable_cores
from fastdata.report import EngineKind
from fastdata.tools.diagnosis.figures import WAITING, Figures, Part, Trial, name_limit
from fastdata.tools.measure import EndlessOrder, Rate, apart, differs, measure_rate, rebuilt
from fastdata.transforms import plan_transform
from fastdata.transforms.cpu import Program
from fastdata.transforms.steps import flatten

Costs = npt.NDArray[np.float64]
"""Seconds of one core, waiting for others than a core included; and CPU seconds."""

_WINDOW_S = 1.0
_PATIENCE_S = 30.0
_LOOKED_AT = 32
_SAMPLES_S = 1.5
_LETTERS = 44


def _variant(loader: Any, **changes: Any) -> Any:
    """A loader like the user's that leaves its workers alone."""
    if not isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None and "dataset" not in changes:
        return rebuilt(loader, **changes)
    other = copy.copy(loader)
    workers = changes.get("num_workers", loader.num_workers)
    ahead = (loader.prefetch_factor or 2) if workers else None
    usual = {"_iterator": None, "pin_memory": False, "persistent_workers": False, "prefetch_factor": ahead}
    other.__dict__.update(usual | changes | ({} if workers else {"timeout": 0}))
    return other


def _rate(loader: Any, to_beat: Rate | None = None, **changes: Any) -> Rate:
    def measure() -> Rate:
        window = partial(measure_rate, window_s=_WINDOW_S, limit_s=6 * _WINDOW_S, to_beat=to_beat)
        return window(_variant(loader, **changes))

    return apart(measure, limit_s=_PATIENCE_S)


def _is_sure(rate: Rate, base: Rate) -> bool:
    """Whether a rate differs; slow loaders have no time for slices that could tell of less than twice."""
    low, high = sorted((rate.samples_per_s, base.samples_per_s))
    return differs(rate, base) or high >= 2 * low


def _clock() -> Costs:
    return np.array(thread_clock())


def _text(step: Any) -> str:
    return shorten(" ".join(repr(step).split()), _LETTERS, placeholder=" ...")


class _Watched:
    """A transform that adds up what its steps cost."""

    def __init__(self, transform: Any, spent: dict[Any, Costs], *, is_joint: bool = False) -> None:
        steps = (transform,) if is_joint else flatten(transform)
        self._steps = [((number, _text(step)), step) for number, step in enumerate(steps)]
        self._spent = spent

    def __call__(self, *sample: Any) -> Any:
        for key, step in self._steps:
            before = _clock()
            sample = (step(*sample),)
            cost = _clock() - before
            self._spent[key] = self._spent.get(key, 0.0) + cost
        return sample[0]


class _Then:
    """Samples of a dataset after further steps."""

    def __init__(self, dataset: Any, steps: Callable[[Any], Any]) -> None:
        self._dataset, self._steps = dataset, steps

    def __getitem__(self, index: Any) -> Any:
        sample, *rest = self._dataset[index]
        return self._steps(sample), *rest


def _with_transforms(dataset: Any, replaced: Callable[..., Any]) -> Any:
    """A copy of a dataset, or of one within, with its transform replaced where it is kept as torchvision's does."""
    other = copy.copy(dataset)
    own, joint = vars(other), getattr(dataset, "transforms", None)
    if type(dataset) is Subset:
        own["dataset"] = _with_transforms(dataset.dataset, replaced)
    if own.get("transform") is not None:
        own["transform"] = replaced(own["transform"])
    if type(joint).__name__ == "StandardTransform":  # holds the same one
        own["transforms"] = copy.copy(joint)
        own["transforms"].transform = own.get("transform")
    elif callable(joint):
        own["transforms"] = replaced(joint, is_joint=True)
    return other


def _watched(dataset: Any, spent: dict[Any, Costs]) -> Any:
    """A copy of a dataset that adds up what the steps of its transform cost, where these can be told apart."""
    if isinstance(dataset, PreparedDataset):
        if not dataset.plan.per_sample or latest_reader(dataset).pair_transform is not None:
            return dataset
        steps = flatten(dataset.transform)
        known: Any = steps[: len(steps) - len(dataset.plan.per_sample)] or None
        return _Then(dataset.with_transform(known), _Watched(dataset.plan.per_sample, spent))
    with contextlib.suppress(Exception):  # one that cannot be copied is read as a whole
        return _with_transforms(dataset, partial(_Watched, spent=spent))
    return dataset


def _reads(loader: Any, dataset: Any) -> Iterator[list[Any]]:
    """A few samples, those read together together: spread over the dataset where the order is a usual one."""
    if isinstance(dataset, IterableDataset):
        yield from ([sample] for sample in islice(dataset, _LOOKED_AT))
        return
    whole = getattr(dataset, "__getitems__", None) or (lambda places: [dataset[place] for place in places])
    is_usual = type(loader.sampler) in (SequentialSampler, RandomSampler)
    if loader.batch_sampler is not None and (not is_usual or loader.batch_size is None):
        yield from map(whole, islice(loader.batch_sampler, 4))
        return
    count = len(loader.dataset)
    places = range(0, count, max(1, count // _LOOKED_AT))[:_LOOKED_AT] if is_usual else loader.sampler
    size = (loader.batch_size or 1) if hasattr(dataset, "__getitems__") else 1
    order = iter(islice(places, _LOOKED_AT))
    yield from map(whole, iter(lambda: list(islice(order, size)), []))


def _measure_parts(loader: Any) -> tuple[Part, ...]:
    """What the parts of a sample cost, in the calling thread."""
    if loader.num_workers:
        torch.set_num_threads(1)  # as workers do
    dataset, spent = loader.dataset, dict[Any, Costs]()
    is_own = isinstance(dataset, PreparedDataset)
    if is_own and latest_reader(dataset).obstacle is None and (told_apart := _parts_of_batches(dataset)):
        return told_apart
    samples: list[Any] = []
    total, begun, before = np.zeros(2), time.perf_counter(), _clock()
    for number, group in enumerate(_reads(loader, _watched(dataset, spent))):
        if number or len(group) > 1:  # the first one pays for imports and tables
            total += _clock() - before
            samples += group
        else:
            spent.clear()
        if time.perf_counter() - begun > _SAMPLES_S and samples:
            break
        before = _clock()
    if not samples:
        return ()
    read_s, read_cpu_s = np.maximum(total - sum(spent.values(), np.zeros(2)), 0) / len(samples)
    parts = [Part(name=type(dataset).__name__, kind="read", seconds=read_s, cpu_s=read_cpu_s)]
    for (_, name), costs in spent.items():
        seconds, cpu_s = np.maximum(costs, 0) / len(samples)
        parts.append(Part(name=name, kind="transform", seconds=seconds, cpu_s=cpu_s))
    joined, collated = samples[: loader.batch_size or _LOOKED_AT], []
    for _ in range(2):
        before = _clock()
        if loader.batch_sampler is None:
            list(map(loader.collate_fn, joined))
        else:
            loader.collate_fn(joined)
        collated.append((_clock() - before) / len(joined))
    seconds, cpu_s = np.maximum(min(collated, key=lambda costs: costs[0]), 0)
    name = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
    return (*parts, Part(name=name, kind="collate", seconds=seconds, cpu_s=cpu_s))


def _parts_of_batches(dataset: PreparedDataset) -> tuple[Part, ...]:
    """What reading, and each step that runs on whole batches, costs; nothing where that cannot be told apart."""
    reader = dataset.reader()
    plan, kept = reader.plan, reader.kept
    if plan.views or reader.pair_transform is not None or (reader.options.resize is not None and kept is None):
        return ()
    index_B = np.arange(0, reader.length, max(1, reader.length // _LOOKED_AT))[:_LOOKED_AT]
    spec = kept.images.spec if kept else SampleSpec(shape=None, dtype="uint8", form="pil")
    shape = kept.images.shape(0) if kept else (3, 1, 1)
    parts: list[Part] = []
    steps, first, names, last_s = flatten(dataset.transform), len(plan.prepare), [], 0.0
    decoded = None if kept else _decoded(reader.open_files, index_B)
    for count in range(first, len(steps) + 1):
        names += [_text(steps[count - 1])] * (count > first)
        known = plan_transform(steps[:count], prepared=first, form=spec.form, dtype=spec.dtype, channels=shape[0])
        program = Program(known.batch_ops, spec)
        output = program.output(shape)
        if output is None:  # of several sizes
            continue
        out, seconds, opened_s = np.empty((len(index_B), *output[0]), output[1]), [], []
        for _ in range(3):
            begun = time.perf_counter()
            if kept:
                program.run(kept.images, index_B, 0, 0, out)
            elif decoded is not None:
                program.run_images(decoded, index_B, 0, 0, out)
            seconds.append((time.perf_counter() - begun) / len(index_B))
            if not kept and not parts:
                begun = time.perf_counter()
                program.run_images(reader.open_files(index_B.tolist()), index_B, 0, 0, out)
                opened_s.append((time.perf_counter() - begun) / len(index_B))
        if opened_s:  # of what the first step leaves of the image
            decode_s = max(0.0, min(opened_s) - min(seconds))
            parts.append(Part(name="decode", kind="read", seconds=decode_s, cpu_s=decode_s))
        cost_s, last_s = max(0.0, min(seconds) - last_s), min(seconds)
        kind: Literal["read", "transform"] = "transform" if names else "read"
        name = ", ".join(names) or f"from storage={dataset.storage!r}"
        parts.append(Part(name=name, kind=kind, seconds=cost_s, cpu_s=cost_s, is_batched=True))
        names = []
    return tuple(parts)


def _decoded(open_files: Callable[[list[int]], OpenedImages], index_B: np.ndarray) -> OpenedImages:
    """Whole images of samples that are kept nowhere."""
    whole = Program((), SampleSpec(shape=None, dtype="uint8", form="pil"))
    planes = whole.prepare(open_files(index_B.tolist()))
    return OpenedImages.decoded([np.array(image.transpose(1, 2, 0), order="C") for image in planes])


def _rate_when_kept(loader: Any, storage: str, count: int) -> tuple[Rate, int]:
    """The loader over some of its samples, prepared and kept by fastdata, and what all of them would need in bytes."""
    dataset = loader.dataset
    index = range(0, len(dataset), max(1, len(dataset) // count))[:count]
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    if isinstance(dataset, PreparedDataset):
        kept: PreparedDataset = prepared_anew(dataset, index, storage=storage, codec="auto")
    else:
        transforms: list[Any] = []
        bare = _with_transforms(dataset, lambda transform, is_joint=False: transforms.append((transform, is_joint)))
        (transform, is_joint), *others = transforms or [(None, False)]
        if is_joint or others:
            raise ValueError("its transform takes the target too")
        options: Any = {"storage": storage, "progress": False, "share": "off"}
        kept = CachedDataset(Subset(bare, list(index)), transform=transform, **options)
    workers = min(loader.num_workers, usable_cores())
    order = EndlessOrder(len(index), 0)
    other: Any = DataLoader(kept, loader.batch_size, sampler=order, num_workers=workers, collate_fn=collate_fn)
    samples = latest_reader(kept).kept
    stores = samples.stores if samples else ()
    need_bytes = sum(store.size_bytes for store in stores) * len(dataset) // len(index)
    return measure_rate(other, window_s=_WINDOW_S, limit_s=6 * _WINDOW_S), need_bytes


def _try_kept(loader: Any, base: Rate, parts: Sequence[Part]) -> Trial | None:
    """Whether it pays to decode once, with the first storage that all samples fit into."""
    dataset, budget = loader.dataset, budget_bytes(available_bytes())
    is_kept = isinstance(dataset, PreparedDataset) and latest_reader(dataset).kept is not None
    if is_kept or isinstance(dataset, IterableDataset) or loader.batch_size is None:
        return None
    sample_s = max(1e-6, sum(part.seconds for part in parts))
    count = min(len(dataset), max(_LOOKED_AT, min(512, int(_SAMPLES_S * usable_cores() / sample_s))))
    for storage in ("shared", "compressed"):
        rate, need_bytes = apart(partial(_rate_when_kept, loader, storage, count), limit_s=_PATIENCE_S)
        if need_bytes <= budget.bytes:
            needs = f"all {len(dataset):,} samples need about {format_bytes(need_bytes)}, and {budget}"
            name, is_sure = f"storage={storage!r}", _is_sure(rate, base)
            return Trial(name=name, kind="kept", samples_per_s=rate.samples_per_s, is_sure=is_sure, needs=needs)
    return None


def _worker_counts(workers: int, cores: int, *, is_read_waiting: bool) -> dict[int, Literal["more", "fewer"]]:
    """Which other numbers of workers are worth a trial."""
    found: dict[int, Literal["more", "fewer"]] = {}
    if workers < cores or is_read_waiting:
        found[2 * workers or cores] = "more"
    for fewer in (workers // 2, cores):
        if 0 < fewer < workers:
            found[fewer] = "fewer"
    return found


def examine_loader(figures: Figures, loader: Any) -> Figures:
    """The figures with those of the loader alone; trials where the loop waits for it."""
    if not isinstance(loader, TorchDataLoader):
        why = f"{kind_of(loader)} is no torch DataLoader: what it costs to make a batch is not measured"
        return replace(figures, notes=(*figures.notes, why))
    engine: EngineKind = "process" if loader.num_workers else "inline"
    engine = loader.report().engine if isinstance(loader, DataLoader) else engine
    figures = replace(figures, workers=loader.num_workers, engine=engine)
    notes, rates, trials = list(figures.notes), [], []
    with _noting(notes, "the loader alone"):
        rates.append(_rate(loader))
        figures = replace(figures, loader_per_s=rates[0].samples_per_s)
    with _noting(notes, "what a sample costs"):
        figures = replace(figures, parts=apart(partial(_measure_parts, loader), limit_s=_PATIENCE_S))
    if rates and name_limit(figures) not in ("model", "host-to-device"):
        is_waiting = any(part.kind == "read" and part.waiting >= WAITING for part in figures.parts)
        counts = _worker_counts(loader.num_workers, usable_cores(), is_read_waiting=is_waiting)
        base = rates[0]
        for count, kind in counts.items():
            with _noting(notes, f"num_workers={count}"):
                rate = _rate(loader, base, num_workers=count)
                if rate.samples_per_s > base.samples_per_s and _is_sure(rate, base):  # and not for what others did
                    base = base.joined(_rate(loader))
                    rate = rate.joined(_rate(loader, num_workers=count))
                name, is_sure = f"num_workers={count}", _is_sure(rate, base)
                trials.append(Trial(name=name, kind=kind, samples_per_s=rate.samples_per_s, is_sure=is_sure))
        with _noting(notes, "keeping samples in memory"):
            trials += [kept] if (kept := _try_kept(loader, base, figures.parts)) else []
        figures = replace(figures, loader_per_s=base.samples_per_s, trials=tuple(trials))
    return replace(figures, notes=tuple(notes))


@contextlib.contextmanager
def _noting(notes: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # of the user's code, under settings that they did not ask for
        first = next(iter(str(error).splitlines()), "")
        notes.append(f"not measured: {what}: {type(error).__name__}: {shorten(first, 160, placeholder=' ...')}")
