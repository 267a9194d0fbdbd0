"""The position in one epoch of a loader."""

from __future__ import annotations

from dataclasses import dataclass

from fastdata.datasets.draws import DrawKey
from fastdata.loaders.samplers import StateDict

Mark = tuple[int, bool]
"""Number of batches that were returned, and True if these were all."""

NO_DRAWS = DrawKey(0, 0, 0)
"""Placeholder before the first batch."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """The position in one epoch.

    Attributes:
        epoch: number of the epoch, which random draws depend on; -1 before the first.
        base_seed: seed of worker processes, and of draws if the dataset has no seed; None until it
            is drawn.
        start: states of generators and samplers when the order was drawn; None before that.
        state: loaded state that the epoch continues; used until the first batch is returned.
        is_begun: True if that state is a position inside the epoch. Nothing more is then drawn from
            the global generator.
        first: number of batches that were returned before that state.
        drawn: number of batches whose indices were drawn.
        handed: number of these batches that were returned.
        counted: how much of the sampler's length was drawn, in samples for torch's BatchSampler, in
            batches for any other.
        is_finished: True once there are no more batches.
        draws: the ``DrawKey`` of the batch that was drawn last.
        seen: the mark of the user's latest batch, if a prefetcher reads ahead of the user.
        waits_for_next: True if nothing is read before the first ``next``. Otherwise batches are
            read ahead from ``iter`` on, as in torch's loader.
    """

    # There are several counts, because indices are drawn ahead of the workers, workers read ahead
    # of the loop, and a prefetcher takes batches ahead of the user: drawn >= handed >= seen.

    epoch: int = -1
    base_seed: int | None = None
    start: StateDict | None = None
    state: StateDict | None = None
    is_begun: bool = False
    first: int = 0
    drawn: int = 0
    handed: int = 0
    counted: int = 0
    is_finished: bool = False
    draws: DrawKey = NO_DRAWS
    seen: Mark | None = None
    waits_for_next: bool = False

    @classmethod
    def resumed(cls, state: StateDict) -> Progress:
        """Return the progress of an epoch that begins where a state was saved."""
        passed = state["num_yielded"]
        return cls(
            epoch=state["epoch"],
            base_seed=state["base_seed"],
            start=state["start"],
            state=state,
            is_begun=state["is_begun"],
            first=passed,
            drawn=passed,
            handed=passed,
        )

    def mark(self) -> Mark:
        """Return the current position; a prefetcher's thread sends it with the batch."""
        return self.handed, self.is_finished

    def mark_delivered(self, mark: Mark) -> None:
        """Count the batches that a prefetcher has returned, not those that it has read ahead."""
        self.seen = mark

    @property
    def pending(self) -> StateDict | None:
        """The loaded state, until a batch is returned; then None."""
        is_untouched = (self.seen or self.mark()) == (self.first, False)
        return self.state if is_untouched else None
