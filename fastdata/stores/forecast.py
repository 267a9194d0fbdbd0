"""Expected size and form of all samples, from a few that are spread over the source."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastdata.errors import SampleError
from fastdata.machine.budget import CodecTrial
from fastdata.pixels.samples import SampleSpec
from fastdata.stores.kept import Layout
from fastdata.stores.preparer import Preparer, ReadSample, read_samples
from fastdata.stores.writer import NO_LIMIT, RAGGED_ALIGN_BYTES, WriterPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The expected stores of a source, from a few samples that are spread over it.

    Attributes:
        preparer: reader and preparer of the samples.
        count: number of all samples.
        probed: the few samples, prepared, each in new memory.
        parts: plan for each part, with a shape if all probed samples have the same.
        raw: size of all samples without a codec; exact if they have one shape, else an estimate.
        layout: how the parts of a sample are put together.
    """

    preparer: Preparer
    count: int
    probed: list[ReadSample]
    parts: list[WriterPlan]
    raw: CodecTrial
    layout: Layout

    def plan_writers(self, trial: CodecTrial, limit_bytes: int = NO_LIMIT) -> list[WriterPlan]:
        """Plan the stores of all samples, encoded as in a trial, or raw."""
        # Estimates may be wrong, so each part may grow by the bytes that all parts together leave
        # free.
        spare_bytes = limit_bytes - trial.need_bytes
        plans = []
        for part, coder, size_bytes in zip(self.parts, trial.coders, trial.part_bytes, strict=True):
            codec = None if coder is None else coder.settings()
            limit_bytes = max(spare_bytes + size_bytes, 1)
            plans.append(replace(part, codec=codec, coder=coder, limit_bytes=limit_bytes))
        return plans


def forecast(preparer: Preparer, *, probes: int = 8) -> Forecast:
    """Prepare ``probes`` + 1 samples, spread evenly, and estimate all from them.

    Raises:
        SampleError: none of them can be prepared. It is the error of the first.
    """
    count = len(preparer.source)
    indices = sorted({round(k * (count - 1) / probes) for k in range(probes + 1)})
    preparer.source.expect(indices)
    probed: list[ReadSample] = []
    errors = []
    for read in read_samples(preparer, indices):
        if isinstance(read, SampleError):
            errors.append(read)
        # A sample with another number of parts than the first raises an error when it is written.
        elif not probed or len(read.parts) == len(probed[0].parts):
            probed += read.copies()
    if not probed:
        raise errors[0]
    parts = []
    part_bytes = []
    for number, (first, form) in enumerate(probed[0].parts):
        samples = [read.parts[number][0] for read in probed]
        shape = None
        align_bytes = RAGGED_ALIGN_BYTES  # samples of many shapes are written one by one
        if len({sample.shape for sample in samples}) == 1:
            shape = first.shape
            align_bytes = 1
        total_bytes = sum(-(-sample.nbytes // align_bytes) * align_bytes for sample in samples)
        part_bytes.append(math.ceil(total_bytes / len(samples) * count))
        spec = SampleSpec(shape=shape, dtype=first.dtype.name, form=form)
        parts.append(WriterPlan(spec=spec, dimensions=first.ndim))
    return Forecast(
        preparer=preparer,
        count=count,
        probed=probed,
        parts=parts,
        raw=CodecTrial("raw", tuple(part_bytes), coders=(None,) * len(parts)),
        layout=replace(probed[0].layout, keys=preparer.source.keys),
    )


_TRIAL_SAMPLES = 24


def probe_more(preparer: Preparer) -> Forecast:
    """Forecast from more samples, because their encoded sizes vary more than their shapes."""
    return forecast(preparer, probes=_TRIAL_SAMPLES)
