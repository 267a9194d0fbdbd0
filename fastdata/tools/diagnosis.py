"""The diagnosis of a training loop: its limit and the advice, derived from measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fastdata.errors import counted
from fastdata.report import Line, Report

_HARDLY = 0.1
"""If a loop waits for at most this share of its time, the model is the limit."""


LIMITS = {
    "model": ("the model", "a faster loader would not help: make the training step faster"),
    "host-to-device": (
        "copying to the device",
        "copy fewer bytes: make uint8 batches, and convert them on the device by dtype= of "
        "CudaPrefetcher",
    ),
    "disk": (
        "reading from disk or network",
        "keep the samples in memory, or use more workers, which wait at the same time",
    ),
    "decode": (
        "decoding",
        "decode each image once and store it, as fastdata's datasets do unless storage='none'",
    ),
    "transform": (
        "the transform",
        "run its steps on whole batches, as fastdata's datasets do with steps that they know",
    ),
    "collate": ("collate_fn", "let samples be tensors of one shape, which stack without Python"),
    "workers": ("the number of workers", "use every core, or let fastdata.tune choose num_workers"),
    "loader": (
        "the loader",
        "it is not a torch DataLoader over samples, so its parts were not measured",
    ),
}
"""The name and the cure of each thing that can limit a loop."""


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>fastdata diagnose</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em }}
.bar {{ display: flex; height: 2.5em; color: white; margin: 1em 0; overflow: hidden }}
.bar div {{ padding: .5em; white-space: nowrap; box-sizing: border-box; overflow: hidden }}
td {{ padding: .1em 1em .1em 0; white-space: pre-wrap }}
</style>
<h1>What a training step spends its time on</h1>
<div class="bar"><div style="background: #c44e52; width: {waited:.1f}%">{wait}</div>
<div style="background: #4c72b0; width: {stepped:.1f}%">{step}</div></div>
{table}
</html>
"""


@dataclass(frozen=True, slots=True)
class Part:
    """The cost of one part of making a sample, on one core.

    Attributes:
        kind: ``"read"``, ``"transform"`` or ``"collate"``.
        name: class of the dataset, the step of the transform, or the ``collate_fn``.
        seconds: time for one sample, including waits for disks and networks, but not for a core.
        cpu_s: CPU time for one sample.
    """

    kind: str
    name: str
    seconds: float
    cpu_s: float

    @property
    def limit(self) -> str:
        if self.kind != "read":
            return self.kind
        return "disk" if self.cpu_s < self.seconds / 2 else "decode"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Diagnosis(Report):
    """The time of a training loop by its parts; printed as one line, a table and advice.

    Args:
        batches: number of batches that were measured, without the first one.
        batch_size: mean number of samples in a batch.
        wait_s: mean time in each step of the loop that waits for data, in seconds.
        step_s: mean time of the rest of each step, in seconds.
        workers: number of the loader's workers.
        usable_cores: number of cores that this process may use.
        is_prefetched: True if a ``CudaPrefetcher`` copies batches to the device.
        loader_per_s: samples per second of an empty loop over the loader; None if not measured.
        parts: cost of each part of making a sample.
        kept_per_s: samples per second of the loader if its samples were stored in memory; None
            unless that is clearly faster.
        kept: how many samples this was measured on, the memory for all, and how much is free.
        imports: names to import from fastdata instead of torchvision and torch, if the loader is
            torch's.
        note: measurements that failed, and why.
    """

    batches: int
    batch_size: float
    wait_s: float
    step_s: float
    workers: int = 0
    usable_cores: int = 1
    is_prefetched: bool = False
    loader_per_s: float | None = None
    parts: Sequence[Part] = ()
    kept_per_s: float | None = None
    kept: str = ""
    imports: str = ""
    note: str = ""

    @property
    def waited(self) -> float:
        """Share of each step that waits for data."""
        return self.wait_s / (self.wait_s + self.step_s)

    @property
    def loop_per_s(self) -> float:
        """Samples per second of the whole loop."""
        return self.batch_size / (self.wait_s + self.step_s)

    @property
    def model_per_s(self) -> float:
        """Samples per second that the loop would reach if it never waited for data."""
        return self.batch_size / max(self.step_s, 1e-9)

    @property
    def limit(self) -> str:
        """The part that limits the loop, in one word.

        It is ``"model"``, ``"host-to-device"``, ``"disk"``, ``"decode"``, ``"transform"``,
        ``"collate"``, ``"workers"`` or ``"loader"``.
        """
        # The first thing that explains the waiting is the limit: to cure another gains nothing.
        if self.waited <= _HARDLY:
            return "model"
        # The loader is much faster than the loop, so the copies between them must be slow.
        if self.is_prefetched and (self.loader_per_s or 0) > 1.5 * self.loop_per_s:
            return "host-to-device"
        if not self.parts:
            return "loader"
        costs = dict.fromkeys([part.limit for part in self.parts], 0.0)
        for part in self.parts:
            costs[part.limit] += part.seconds
        largest = max(costs, key=costs.__getitem__)
        # More workers help if a core is the limit, but cannot make a slow disk faster.
        return "workers" if self.workers < self.usable_cores and largest != "disk" else largest

    @property
    def line(self) -> str:
        """The diagnosis in one line."""
        loader = ""
        if self.loader_per_s is not None:
            loader = f"The loader alone gives {self.loader_per_s:,.0f} samples/s. "
        return (
            f"The loop waits {_percent(self.waited)} of each step for data; "
            f"{LIMITS[self.limit][0]} is the limit. "
            f"{loader}The model could take {self.model_per_s:,.0f} samples/s."
        )

    @property
    def advice(self) -> tuple[str, ...]:
        """The cures, with the measurements that they are based on."""
        cures = [LIMITS[self.limit][1]]
        if self.limit != "model" and self.kept_per_s is not None:
            cures.append(f"samples in memory: {self.kept_per_s:,.0f} samples/s, {self.kept}")
        return tuple(cures)

    def plot(self) -> Any:
        """Return a figure of the time of a step, as one bar; it needs matplotlib."""
        from fastdata.pictures import show_bars

        parts = {"wait for data": [1000 * self.wait_s], "step": [1000 * self.step_s]}
        return show_bars(["a step"], parts, "ms")

    def as_page(self) -> str:
        """Return the report as a page of HTML that needs no other file: bar, table and advice."""
        return _PAGE.format(
            waited=100 * self.waited,
            stepped=100 * (1 - self.waited),
            wait=escape(f"wait {_ms(self.wait_s)}"),
            step=escape(f"step {_ms(self.step_s)}"),
            table=self._repr_html_(),
        )

    def _lines(self) -> Iterator[Line]:
        yield from (self.line, "")
        yield f"one step of the loop, mean of {self.batches}", "", ""
        yield "  wait for data", _ms(self.wait_s), _percent(self.waited)
        yield "  your training step", _ms(self.step_s), _percent(1 - self.waited)
        yield "the loop", f"{self.loop_per_s:,.0f}", "samples/s"
        if self.loader_per_s is not None:
            yield (
                "the loader alone",
                f"{self.loader_per_s:,.0f}",
                f"samples/s, {counted(self.workers, 'worker')}",
            )
        if self.parts:
            yield "one sample, on one core", "", ""
        for part in self.parts:
            waits = f"CPU {_ms(part.cpu_s)}" if part.limit == "disk" else ""
            yield f"  {part.kind}: {part.name}", _ms(part.seconds), waits
        yield ""
        yield from (f"- {line}" for line in self.advice)
        if self.note:
            yield f"({self.note})"
        if not self.imports or self.kept_per_s is None or self.limit == "model":
            return
        loop, limit = min((self.kept_per_s, "loader"), (self.model_per_s, "model"))
        yield ""
        yield "Change the imports, and keep the rest of the script:"
        yield f"    from fastdata import {self.imports}"
        yield (
            f"The loader would go from {self.loader_per_s:,.0f} to {self.kept_per_s:,.0f} "
            f"samples/s, and the loop from {self.loop_per_s:,.0f} to about {loop:,.0f}; then the "
            f"{limit} would be the limit."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms"
