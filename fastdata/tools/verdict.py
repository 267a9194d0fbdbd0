"""What a diagnosis measured, and the words that follow from it: nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal

from fastdata.loaders.view import MOSTLY_PREPARED
from fastdata.machine.memory import format_bytes
from fastdata.report import EngineKind
from fastdata.tools import output

_HARDLY = 0.1
"""A loop that waits less is as fast as its model."""
_MORE_IS_BETTER = 1.15
_FEWER_IS_BETTER = 1.08
_SLOWED = 1.3
_WAITING = 0.5
"""A read that waits so much of its time for others than a core is limited by them."""
_UNEXPLAINED = 3.0
"""So many times slower than its workers' costs add up to, a loader spends its time on handing
batches over."""

LIMITS = {
    "model": "the model is the limit",
    "host-to-device": "copying to the device is the limit",
    "decode": "decoding is the limit",
    "disk": "reading from disk or network is the limit",
    "transform": "the transform is the limit",
    "collate": "collate_fn is the limit",
    "workers: too few": "too few workers are the limit",
    "workers: too many": "too many workers are the limit",
    "transport": "handing batches over from the workers is the limit",
    "loader": "the loader is the limit",
}
"""What limits a loop; the last one where the loader is none of torch's, so that nothing more is
known of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one part of making a sample costs one core, waiting for others than a core included."""

    name: str
    kind: Literal["read", "transform", "collate"]
    seconds: float
    cpu_s: float
    is_batched: bool = False

    @property
    def waiting(self) -> float:
        return max(0.0, 1 - self.cpu_s / self.seconds) if self.seconds else 0.0

    @property
    def is_waiting(self) -> bool:
        return self.kind == "read" and self.waiting >= _WAITING

    @property
    def limit(self) -> str:
        if self.kind == "read":
            return "disk" if self.is_waiting else "decode"
        return self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The loader alone under another setting."""

    name: str
    kind: Literal["more", "fewer", "kept"]
    samples_per_s: float
    is_sure: bool  # that it differs from the loader as it is, beyond the noise
    needs: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured; times are of one step in seconds, rates in samples a second.

    Args:
        batches: that the times are means of; the first one is left out.
        batch_size: samples in a batch, in the mean.
        first_s: until the first batch was there.
        wait_s: of the loop, for data.
        move_s: of the loop, for copies to the device.
        step_s: of the loop, for all else.
        model_per_s: the step with one batch again and again.
        loader_per_s: an empty loop over the loader.
        gpu_busy: share of the loop in which the GPU had work of the step, by CUDA events.
        engine: who reads.
        memory_bytes: of this process and all below it (PSS).
        prepared: share of fastdata's samples that were prepared before the loop, others on their
            first read in it.
        is_prefetched: whether a CudaPrefetcher moves batches.
        epoch_batches: of a loader whose workers start anew with each epoch; 0 of others.
        imports: what to import from fastdata in place of torchvision's and torch's, where the
            loader is theirs.
        parts: of making a sample.
        trials: other settings.
        notes: what could not be measured, or holds only in part.
    """

    batches: int
    batch_size: float
    first_s: float = 0.0
    wait_s: float
    move_s: float = 0.0
    step_s: float
    model_per_s: float | None = None
    loader_per_s: float | None = None
    gpu_busy: float | None = None
    engine: EngineKind = "inline"
    workers: int = 0
    usable_cores: int
    memory_bytes: int = 0
    prepared: float = 1.0
    is_prefetched: bool = False
    epoch_batches: int = 0
    imports: str = ""
    parts: tuple[Part, ...] = ()
    trials: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> dict[str, float]:
        """Seconds of the parts of a step."""
        return {"wait for data": self.wait_s, "host-to-device": self.move_s, "step": self.step_s}

    @property
    def seconds(self) -> float:
        return self.wait_s + self.move_s + self.step_s

    @property
    def waited(self) -> float:
        """Share of each step in which the model had nothing to do."""
        if self.gpu_busy is not None:
            return 1 - self.gpu_busy
        return (self.wait_s + self.move_s) / self.seconds if self.seconds else 0.0

    @property
    def loop_per_s(self) -> float:
        return self.batch_size / self.seconds if self.seconds else 0.0

    @property
    def slowed(self) -> float:
        """How many times as long a step takes in the loop as alone."""
        return self.step_s * (self.model_per_s or 0.0) / self.batch_size if self.batch_size else 0.0

    @property
    def sample_s(self) -> float:
        return sum(part.seconds for part in self.parts)

    def gain(self, trial: Trial) -> float:
        return trial.samples_per_s / self.loader_per_s if self.loader_per_s else 1.0

    @property
    def better(self) -> list[Trial]:
        """Trials that gain beyond the noise, the best first."""
        found = [
            trial for trial in self.trials if trial.is_sure and self.gain(trial) >= _FEWER_IS_BETTER
        ]
        return sorted(found, key=lambda trial: -trial.samples_per_s)

    def best(self, kind: str) -> Trial | None:
        return next((trial for trial in self.better if trial.kind == kind), None)


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """Where a training loop's time goes; shown as one line, the table behind it, and advice."""

    figures: Figures

    @property
    def limit(self) -> str:
        """What the loop is limited by, such as ``"decode"`` or ``"model"``."""
        return name_limit(self.figures)

    @property
    def line(self) -> str:
        """The diagnosis in one line."""
        return "; ".join(_say(self.figures, self.limit))

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, each with the figure that says so."""
        return tuple(_advise(self.figures, self.limit))

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "limit": self.limit,
            "line": self.line,
            "advice": self.advice,
            "figures": asdict(self.figures),
        }

    def plot(self, file: str | PathLike[str]) -> None:
        """Draw the parts of a step, and of making a sample, as a chart."""
        rows = [
            (f"a step: {name}", seconds * 1000, True) for name, seconds in self.figures.step.items()
        ]
        rows += [
            (f"a sample: {part.name}", part.seconds * 1000, False) for part in self.figures.parts
        ]
        output.bars(str(file), rows, "ms", self.line)

    def __repr__(self) -> str:
        advice = [f"- {line}" for line in self.advice]
        notes = [f"({note})" for note in self.figures.notes]
        swap = list(_swap(self.figures, self.limit))
        return "\n".join(
            [self.line, "", *output.aligned(list(_rows(self.figures))), "", *advice, *notes, *swap]
        )


def name_limit(figures: Figures) -> str:
    """Name what the loop is limited by; of figures alone."""
    model = figures.model_per_s
    if figures.waited <= _HARDLY or (
        model is not None and figures.loop_per_s >= (1 - _HARDLY) * model
    ):
        return "model"
    if figures.move_s > figures.wait_s:
        return "host-to-device"
    if figures.prepared < MOSTLY_PREPARED:
        return "decode"
    if figures.best("fewer"):
        return "workers: too many"
    costs: dict[str, float] = {}
    for part in figures.parts:
        costs[part.limit] = costs.get(part.limit, 0.0) + part.seconds
    if not costs:
        return "loader"
    largest = max(costs, key=lambda kind: costs[kind])
    readers = figures.workers if largest == "disk" else min(figures.workers, figures.usable_cores)
    explained = readers / max(figures.sample_s, 1e-9)
    if figures.engine == "process" and 0 < (figures.loader_per_s or 0) * _UNEXPLAINED < explained:
        return "transport"
    more = figures.best("more")
    has_cores = largest != "disk" and figures.workers < figures.usable_cores
    if has_cores and more and figures.gain(more) >= _MORE_IS_BETTER:
        return "workers: too few"
    return largest


def _say(figures: Figures, limit: str) -> Iterator[str]:
    who = "The GPU" if figures.gpu_busy is not None else "The loop"
    yield f"{who} waits {_percent(figures.waited)} of each step for data"
    yield LIMITS[limit]
    could = {
        "the loader could feed": figures.loader_per_s,
        "the model could take": figures.model_per_s,
    }
    rates = [f"{words} {rate:,.0f}" for words, rate in could.items() if rate is not None]
    if rates:
        yield f"{', '.join(rates)} samples/s"
    if limit == "model" and figures.slowed >= _SLOWED:
        yield f"its step takes {figures.slowed:.1f} times as long beside the loader as alone"
    if limit == "decode" and figures.prepared < MOSTLY_PREPARED:
        yield f"fastdata prepares samples on their first read ({_percent(figures.prepared)} were prepared before)"
    if figures.better and limit not in ("model", "host-to-device"):
        yield f"{figures.better[0].name} would lift it to {figures.better[0].samples_per_s:,.0f}"


def _advise(figures: Figures, limit: str) -> Iterator[str]:
    if limit == "model":
        yield _advise_model(figures)
        return
    if limit == "host-to-device":
        cure = "CudaPrefetcher(loader) copies from pinned memory while the model computes"
        if figures.is_prefetched:
            cure = "send fewer bytes: uint8 batches, with dtype= of CudaPrefetcher to cast them on the device"
        yield f"copies take {_ms(figures.move_s)} of each step: {cure}"
    else:
        for trial in figures.better:
            words = f"{trial.name}: {trial.samples_per_s:,.0f} samples/s, tried"
            gain = f"{figures.gain(trial):.1f} times the {figures.loader_per_s:,.0f} now"
            yield ", ".join([words, gain]) + (f"; {trial.needs}" if trial.needs else "")
    parts = [part for part in figures.parts if part.limit == limit] or figures.parts
    if parts:
        part = max(parts, key=lambda part: part.seconds)
        share = (
            f"{part.name} takes {_ms(part.seconds)}, {_percent(part.seconds / figures.sample_s)}"
        )
        how = (
            f", and waits {_percent(part.waiting)} of that for disk or network"
            if part.is_waiting
            else ""
        )
        if part.kind == "transform" and not part.is_batched:
            how = ", one sample after the other in Python"
        yield f"{share} of what a sample costs{how}"
    start_s = figures.first_s - figures.wait_s
    share_of_epoch = start_s / max(start_s + figures.epoch_batches * figures.seconds, 1e-9)
    if figures.engine == "process" and figures.epoch_batches and share_of_epoch >= _HARDLY:
        late = f"the first batch came after {figures.first_s:.1f} s, {_percent(share_of_epoch)} of an epoch"
        yield f"{late}: persistent_workers=True starts workers once"


def _advise_model(figures: Figures) -> str:
    if figures.slowed < _SLOWED:
        return (
            f"no faster loader would help: a step is {_ms(figures.step_s)} of the model's own work"
        )
    alone = f"a step takes {_ms(figures.step_s)} beside the loader and {_ms(figures.step_s / figures.slowed)} alone"
    return f"{alone}: they share the cores, so that samples that cost less would help the model"


def _swap(figures: Figures, limit: str) -> Iterator[str]:
    """The lines to change where the loader is torch's, and what they would bring."""
    kept = figures.best("kept")
    if not (figures.imports and kept and limit != "model"):
        return
    most = figures.batch_size / max(figures.step_s, 1e-9)
    loop = min(kept.samples_per_s, most)
    then = (
        "the model is the limit then"
        if most < kept.samples_per_s
        else "the loader still is the limit then"
    )
    yield ""
    yield "change the imports, and keep the script:"
    yield f"    from fastdata import {figures.imports}"
    yield (
        f"which would bring {kept.samples_per_s:,.0f} samples/s where the loader has {figures.loader_per_s:,.0f}, and "
        f"the loop from {figures.loop_per_s:,.0f} to about {loop:,.0f}: {then}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.3g} us"


def _rows(figures: Figures) -> Iterator[tuple[str, str, str]]:
    yield f"a step, mean of {figures.batches}", "", ""
    for name, seconds in figures.step.items():
        yield f"  {name}", _ms(seconds), _percent(seconds / max(figures.seconds, 1e-9))
    rates = {"the loop": figures.loop_per_s, "the loader alone": figures.loader_per_s}
    for name, rate in (rates | {"the model alone": figures.model_per_s}).items():
        yield name, "-" if rate is None else f"{rate:,.0f}", "samples/s"
    yield "workers", str(figures.workers), figures.engine
    if figures.gpu_busy is not None:
        yield "GPU busy", _percent(figures.gpu_busy), ""
    yield "memory, with workers", format_bytes(figures.memory_bytes), ""
    if figures.parts:
        yield "a sample, on one core", "", ""
    for part in figures.parts:
        how = f"waits {_percent(part.waiting)}" if part.is_waiting else ""
        if part.kind == "transform":
            how = "in batches" if part.is_batched else "in Python"
        yield f"  {part.kind}: {part.name}", _ms(part.seconds), how
    if figures.trials:
        yield "tried, the loader alone", "", ""
    for trial in figures.trials:
        doubt = "" if trial.is_sure else ", within the noise"
        yield (
            f"  {trial.name}",
            f"{trial.samples_per_s:,.0f}",
            f"samples/s, {figures.gain(trial):.2f} times{doubt}",
        )
