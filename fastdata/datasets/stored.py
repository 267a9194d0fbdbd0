"""Frozen values of a dataset: its samples and their preparation, and the user's transforms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastdata.machine.tables import SampleTable
from fastdata.pixels.arrays import Array
from fastdata.pixels.core import library
from fastdata.pixels.plan import PairTransform, Transform
from fastdata.sources.source import Source
from fastdata.stores.kept import KeptSamples
from fastdata.stores.options import Options
from fastdata.stores.prepare import Prepared


@dataclass(frozen=True)
class LeadingSteps:
    """The leading steps of a transform after which samples are stored.

    Attributes:
        count: number of steps.
        key: text that is equal for steps with the same effect; "" for no steps.
        text: the steps as shown in errors.
    """

    count: int = 0
    key: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The samples of a dataset, and their preparation.

    Attributes:
        options: options of the dataset.
        prepared: the stored samples, and the reason for the choice of storage.
        source: source of the samples, needed to prepare them again. If samples are stored, a copy
            in another process does not have it.
        files: paths and targets, if they are known beforehand.
        first_steps: the dataset's ``prepare=`` and ``resize=``, which run before the transform.
        after: steps of the transform after which samples are stored, or after which they did not
            fit; None before they are prepared.
        is_upright: True if samples were rotated as their EXIF requires.
        is_remote: True if samples that are not stored are fetched from a URL.
    """

    options: Options
    prepared: Prepared
    source: Source | None = None
    files: SampleTable | None = None
    first_steps: tuple[Transform, ...] = ()
    after: LeadingSteps | None = None
    is_upright: bool = False
    is_remote: bool = False

    @cached_property
    def kept(self) -> KeptSamples | None:
        """The stored samples; None if they are not stored."""
        return self.prepared.kept

    @property
    def obstacle(self) -> str | None:
        """Reason why no step of any transform can run on whole batches; None if some can."""
        return library.obstacle() if self.options.batch_ops else "batch_ops=False"

    @cached_property
    def samples(self) -> Any:
        """The stored samples, or their source; None once the dataset is closed."""
        return self.source if self.kept is None else self.kept

    @cached_property
    def table(self) -> SampleTable | None:
        """Paths and targets; None if only the source has them."""
        return self.files if self.kept is None else self.kept.table

    def filled_share(self, index: Array | None = None) -> float:
        """Return the share of all samples, or of those with ``index``, that is already stored."""
        return 0.0 if self.kept is None else self.kept.images.filled_share(index)


@dataclass(frozen=True)
class Transforms:
    """The user's transforms of a dataset's items.

    Attributes:
        of_sample: transform that is called with each sample.
        of_target: transform that is called with each target.
        of_both: transform that is called with sample and target together, instead of the other two.
    """

    of_sample: Transform | None = None
    of_target: Transform | None = None
    of_both: PairTransform | None = None
