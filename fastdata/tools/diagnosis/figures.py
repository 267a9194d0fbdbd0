"""What a diagnosis measured, and the words that follow from it: nothing here measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal

from fastdata.loader.view import MOSTLY_PREPARED
from fastdata.memory import format_bytes
from fastdata.report import EngineKind
from fastdata.tools.bench import chart

Limit = Literal[
    "model",
    "host-to-device",
    "decode",
    "disk",
    "transform",
    "collate",
    "workers: too few",
    "workers: too many",
    "transport",
    "loader",
]
"""The last one where the loader is none of torch's, so that nothing more is known of it."""

_HARDLY = 0.1
"""A loop that waits less is as fast as its model."""
_MORE_IS_BETTER, _FEWER_IS_BETTER = 1.15, 1.08
_SLOWED = 1.3
WAITING = 0.5
"""A read that waits so much of its time for others than a core is limited by them."""
_UNEXPLAINED = 3.0
"""So many times slower than its workers' costs add up to, a loader spends its time on handing batches over."""


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
        gpu_utilisation: as nvidia-ml-py sees it, of the whole GPU.
        engine: who reads.
        worker_cpu: share of a core that each worker used.
        memory_bytes: of this process and all below it (PSS).
        prepared: share of fastdata's samples that were prepared before the loop, others on their first read in it.
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
    gpu_utilisation: float | None = None
    engine: EngineKind = "inline"
    workers: int = 0
    usable_cores: int
    worker_cpu: tuple[float, ...] = ()
    memory_bytes: int = 0
    prepared: float = 1.0
    parts: tuple[Part, ...] = ()
    trials: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()

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

    def gain(self, trial: Trial) -> float:
        return trial.samples_per_s / self.loader_per_s if self.loader_per_s else 1.0

    def best(self, kind: str, least: float) -> Trial | None:
        """The trial of a kind that gains most, if that is at least so many times as fast."""
        found = [each for each in self.trials if each.kind == kind and each.is_sure and self.gain(each) >= least]
        return max(found, key=lambda trial: trial.samples_per_s, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Where a training loop's time goes; ``print`` shows the line, the table behind it, and advice.

    Args:
        limit: what the loop is limited by, such as ``"decode"`` or ``"model"``.
        line: that in one line.
        advice: what to do, each with the figure that says so.
        figures: all that was measured.
    """

    limit: Limit
    line: str
    advice: tuple[str, ...]
    figures: Figures

    def __str__(self) -> str:
        advice = [f"- {line}" for line in self.advice]
        notes = [f"({note})" for note in self.figures.notes]
        return "\n".join([self.line, "", *_table(self.figures), *([""] if advice else []), *advice, *notes])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return asdict(self)

    def plot(self, file: str | PathLike[str]) -> None:
        """Draw the parts of a step, and of making a sample, as a chart."""
        figures = self.figures
        step = {"wait for data": figures.wait_s, "host-to-device": figures.move_s, "step": figures.step_s}
        sample = {f"{part.kind}: {part.name}": part.seconds for part in figures.parts}
        with chart(file, width=9.0, height=4.5, feature="plot()") as axes:
            axes.set(title=self.line, yticks=[0, 1], yticklabels=["a sample,\non one core", "a step"], xlabel="share")
            axes.title.set(fontsize="small", wrap=True)
            for row, parts in enumerate((sample, step)):
                left, total = 0.0, sum(parts.values()) or 1.0
                for name, seconds in parts.items():
                    axes.barh(row, seconds / total, left=left, label=f"{name}, {_ms(seconds)}")
                    left += seconds / total
            axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))


# What the figures say


def name_limit(figures: Figures) -> Limit:
    """Name what the loop is limited by; of figures alone."""
    model = figures.model_per_s
    if figures.waited <= _HARDLY or (model is not None and figures.loop_per_s >= (1 - _HARDLY) * model):
        return "model"
    if figures.move_s > figures.wait_s:
        return "host-to-device"
    if figures.prepared < MOSTLY_PREPARED:
        return "decode"
    if figures.best("fewer", _FEWER_IS_BETTER):
        return "workers: too many"
    costs: dict[Limit, float] = {}
    for part in figures.parts:
        kind: Limit = ("disk" if part.waiting >= WAITING else "decode") if part.kind == "read" else part.kind
        costs[kind] = costs.get(kind, 0.0) + part.seconds
    largest = max(costs, key=lambda kind: costs[kind], default=None)
    readers = figures.workers if largest == "disk" else min(figures.workers, figures.usable_cores)
    explained = readers / max(sum(costs.values()), 1e-9)
    is_sent = figures.engine == "process" and largest is not None and figures.loader_per_s is not None
    if is_sent and (figures.loader_per_s or 0.0) * _UNEXPLAINED < explained:
        return "transport"
    if largest == "disk":
        return "disk"
    if figures.workers < figures.usable_cores and figures.best("more", _MORE_IS_BETTER):
        return "workers: too few"
    return largest or "loader"


_WORDS: dict[Limit, str] = {
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


def say(figures: Figures, limit: Limit) -> str:
    """The diagnosis in one line."""
    who = "The GPU" if figures.gpu_busy is not None else "The loop"
    line = f"{who} waits {percent(figures.waited)} of each step for data; {_WORDS[limit]}"
    could = []
    if figures.loader_per_s is not None:
        could.append(f"the loader could feed {figures.loader_per_s:,.0f} samples/s")
    if figures.model_per_s is not None:
        could.append(f"the model {'' if could else 'could take '}{figures.model_per_s:,.0f}")
    line = "; ".join([line, *([", ".join(could)] if could else [])])
    if limit == "model" and figures.slowed >= _SLOWED:
        return f"{line}; its step takes {figures.slowed:.1f} times as long beside the loader as alone"
    if limit == "decode" and figures.prepared < MOSTLY_PREPARED:
        return f"{line} from the next epoch on; {percent(1 - figures.prepared)} of the samples had to be prepared first"
    best = _best(figures) if limit not in ("model", "host-to-device") else None
    return f"{line}; {best.name} would lift it to {best.samples_per_s:,.0f}" if best else line


def _best(figures: Figures) -> Trial | None:
    found = [each for kind in ("kept", "more", "fewer") if (each := figures.best(kind, _FEWER_IS_BETTER))]
    return max(found, key=lambda trial: trial.samples_per_s, default=None)


def advise(figures: Figures, limit: Limit, *, is_prefetched: bool, epoch_batches: int | None) -> tuple[str, ...]:
    """What to do, each line with the figure that backs it."""
    lines = []
    total_s = sum(part.seconds for part in figures.parts)
    if limit == "model":
        lines.append(f"no faster loader would help: a step is {figures.step_s * 1000:,.1f} ms of the model's own work")
        if figures.slowed >= _SLOWED:
            alone_ms = figures.step_s * 1000 / figures.slowed
            lines[-1] = (
                f"a step takes {figures.step_s * 1000:,.1f} ms beside the loader and {alone_ms:,.1f} alone: they share "
                "the cores, so that samples that cost less would help the model"
            )
    if limit == "host-to-device":
        cure = "send fewer bytes: uint8 batches, with dtype= of CudaPrefetcher to cast them on the device"
        cure = cure if is_prefetched else "CudaPrefetcher(loader) copies from pinned memory while the model computes"
        lines.append(f"copies take {figures.move_s * 1000:,.1f} ms of each step: {cure}")
    if limit not in ("model", "host-to-device"):
        for trial in sorted(figures.trials, key=lambda trial: -trial.samples_per_s):
            if trial.is_sure and figures.gain(trial) >= _FEWER_IS_BETTER:
                now = f"{figures.gain(trial):.1f} times the {figures.loader_per_s or 0:,.0f} now"
                needs = f"; {trial.needs}" if trial.needs else ""
                lines.append(f"{trial.name}: {trial.samples_per_s:,.0f} samples/s, tried, {now}{needs}")
    kind = {"decode": "read", "disk": "read"}.get(limit, limit)
    parts = [part for part in figures.parts if part.kind == kind] or list(figures.parts)
    for part in sorted(parts, key=lambda part: -part.seconds)[:1] if limit != "model" else ():
        share = f"{part.name} takes {_ms(part.seconds)}, {percent(part.seconds / total_s)} of what a sample costs"
        share += f", and waits {percent(part.waiting)} of that for disk or network" if part.waiting >= WAITING else ""
        how = ", in batches already" if part.is_batched else ", one sample after the other in Python"
        lines.append(f"{share}{how if part.kind == 'transform' else ''}")
    begins = figures.first_s - figures.wait_s
    if figures.engine == "process" and epoch_batches and limit != "model":
        share_of_epoch = begins / (begins + epoch_batches * figures.seconds)
        if share_of_epoch >= _HARDLY:
            cure = "persistent_workers=True starts workers once"
            lines.append(
                f"the first batch came after {figures.first_s:.1f} s, {percent(share_of_epoch)} of an epoch: {cure}"
            )
    return tuple(lines)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.3g} us"


def _table(figures: Figures) -> list[str]:
    rows = [(f"a step, mean of {figures.batches}", "", "")]
    for name, seconds in (
        ("wait for data", figures.wait_s),
        ("host-to-device", figures.move_s),
        ("step", figures.step_s),
    ):
        rows.append((f"  {name}", _ms(seconds), percent(seconds / max(figures.seconds, 1e-9))))
    for name, rate in (("loop", figures.loop_per_s), ("loader", figures.loader_per_s), ("model", figures.model_per_s)):
        alone = "" if name == "loop" else " alone"
        rows.append((f"the {name}{alone}", "-" if rate is None else f"{rate:,.0f}", "samples/s"))
    cpu = ", ".join(map(percent, figures.worker_cpu))
    rows.append(("workers", str(figures.workers), figures.engine + (f", of a core each: {cpu}" if cpu else "")))
    for name, share in (("GPU busy", figures.gpu_busy), ("GPU utilisation (nvidia-ml-py)", figures.gpu_utilisation)):
        rows += [] if share is None else [(name, percent(share), "")]
    rows.append(("memory, with workers", format_bytes(figures.memory_bytes), ""))
    if figures.parts:
        rows.append(("a sample, on one core", "", ""))
    for part in figures.parts:
        how = f"waits {percent(part.waiting)}" if part.waiting >= WAITING else ""
        how = ("in batches" if part.is_batched else "in Python") if part.kind == "transform" else how
        rows.append((f"  {part.kind}: {part.name}", _ms(part.seconds), how))
    if figures.trials:
        rows.append(("tried, the loader alone", "", ""))
    for trial in figures.trials:
        sure = f"{figures.gain(trial):.2f} times" + ("" if trial.is_sure else ", within the noise")
        rows.append((f"  {trial.name}", f"{trial.samples_per_s:,.0f}", f"samples/s, {sure}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"{row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2]}".rstrip() for row in rows]
