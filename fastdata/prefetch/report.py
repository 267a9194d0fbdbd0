"""How an epoch through a prefetcher went."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdata.memory import format_bytes
from fastdata.prefetch.staging import CopyCounts
from fastdata.report import EpochReport

__all__ = ["PrefetchReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchReport(EpochReport):
    """How the latest epoch of a prefetcher went, complete or not.

    Batches, samples and times are those of the training loop; ``wait_s`` is how long it waited for the prefetcher.
    What the loader says of itself (road, engine, workers, memory) is the loader's.

    Args:
        devices: where batches went; ``("cpu",)`` where nothing was moved.
        pinned_bytes: the most host memory that was pinned at a time, by this prefetcher.
        copies: copies of tensors, by where they were copied from.
        batch_ops: where they ran, and why there if on the CPU; empty where the loader has none of fastdata's.
    """

    devices: tuple[str, ...] = ("cpu",)
    pinned_bytes: int = 0
    copies: CopyCounts = field(default_factory=CopyCounts)
    batch_ops: str = ""

    def __str__(self) -> str:
        lines = super(PrefetchReport, self).__str__().splitlines()
        if self.devices == ("cpu",):
            return "\n".join([*lines, "batches stay on the CPU"])
        copies = self.copies
        return "\n".join(
            [
                *lines,
                f"to {', '.join(self.devices)}: {format_bytes(copies.device_bytes)}, of it "
                f"{format_bytes(copies.in_place_bytes)} straight from pinned memory ({copies.in_place} tensors), "
                f"{format_bytes(copies.staged_bytes)} by one more host copy ({copies.staged}), "
                f"{format_bytes(copies.pageable_bytes)} from pageable memory ({copies.pageable})",
                f"pinned at most {format_bytes(self.pinned_bytes)}",
                *([f"batch ops: {self.batch_ops}"] if self.batch_ops else []),
            ]
        )
