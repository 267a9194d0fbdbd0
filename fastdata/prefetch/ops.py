"""Where the batch ops of a prefetched loader run: on its devices, or on the CPU before batches are sent there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fastdata.engine import stored_obstacle_of
from fastdata.memory import format_bytes
from fastdata.prefetch.backends import Backend
from fastdata.prefetch.finish import Finish
from fastdata.prefetch.mirror import Mirror
from fastdata.prefetch.pinning import PinnedMemory
from fastdata.report import warn_user
from fastdata.served import Served
from fastdata.stored import StoredBatch, StoredReader, plan_and_spec
from fastdata.transforms import TransformPlan
from fastdata.transforms.device import DeviceProgram

__all__ = ["BatchOps", "DeviceOps", "OpsPlan", "WhereOps", "choose_ops"]

WhereOps = Literal["auto", "device", "cpu"]

MOST_TIMES_SERVED = 1.5
"""Up to so many times the bytes are sent. To gather 256 samples of 256 x 256 takes the host as long as to crop them to
224 x 224 (9.0 and 8.5 ms on a thread), at 1.3 times the bytes: beyond that the device's work spares the host none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsPlan:
    """Whether batch ops run on the device, and why if they do not."""

    on_device: bool
    reason: str = ""


def choose_ops(
    asked: WhereOps,
    *,
    obstacle: str | None,
    stored_bytes: int,
    served_bytes: int,
    is_mirrored: bool = False,
) -> OpsPlan:
    """Decide where batch ops run.

    Args:
        asked: by the user.
        obstacle: why they cannot run on the device; None if they can.
        stored_bytes: of a sample as it is sent if they run on the device.
        served_bytes: of a sample after them, which is sent if they run on the CPU.
        is_mirrored: whether the store is on the device, and no sample is sent.

    Raises:
        ValueError: they are to run on the device, and cannot.

    Example:
        >>> choose_ops("auto", obstacle=None, stored_bytes=786_432, served_bytes=3_072).reason
        'a sample as stored is 768.0 KiB, after the batch ops 3.0 KiB'
    """
    if asked == "cpu":
        return OpsPlan(on_device=False, reason="batch_ops='cpu'")
    if obstacle is not None:
        if asked == "device":
            raise ValueError(f"batch_ops='device' is not possible here: {obstacle}. Use batch_ops='auto'.")
        return OpsPlan(on_device=False, reason=obstacle)
    if asked == "device" or is_mirrored or stored_bytes <= served_bytes * MOST_TIMES_SERVED:
        return OpsPlan(on_device=True)
    stored, served = format_bytes(stored_bytes), format_bytes(served_bytes)
    return OpsPlan(on_device=False, reason=f"a sample as stored is {stored}, after the batch ops {served}")


class DeviceOps:
    """Makes the images of stored batches on the device that these lie on.

    Args:
        program: the batch ops.
        mirror: where samples are; None where batches bring them along.
    """

    def __init__(self, program: DeviceProgram, mirror: Mirror | None) -> None:
        self.program, self.mirror = program, mirror

    def __call__(self, batch: Any, device: torch.device) -> Any:
        """Return ``[images, targets]``; what is no stored batch stays as it is."""
        if not isinstance(batch, StoredBatch):
            return batch
        samples, draws, targets = batch
        if self.mirror is None:
            return [self.program.run(samples, draws), targets]
        return [self.program.gather_run(self.mirror.on(device), samples, draws), targets]


class BatchOps:
    """The batch ops of a prefetcher's loader, epoch after epoch: a dataset's transform may be replaced between them.

    Args:
        loader: any; only those of fastdata have batch ops.
        asked: where they are to run.
        finish: what is done to batches after them.
        backend: of the devices.
        pinned: for copying the store there.
    """

    def __init__(self, loader: Any, asked: WhereOps, finish: Finish, backend: Backend, pinned: PinnedMemory) -> None:
        self._loader, self._asked, self._finish = loader, asked, finish
        self._backend, self._pinned = backend, pinned
        self._served = Served.find(getattr(loader, "dataset", None))
        self._compiled: tuple[TransformPlan, DeviceOps] | None = None
        self._mirror: Mirror | None = None
        self._has_warned = False
        self.plan: OpsPlan | None = None
        """The decision for the latest epoch; None where the loader has no batch ops of fastdata."""

    def begin(self) -> tuple[StoredReader, DeviceOps] | None:
        """Decide for an epoch; return what reads its batches and what finishes them, or None if the CPU does it all.

        Raises:
            ValueError: as ``choose_ops``.
        """
        if self._served is not None:
            self._served.dataset.refresh()
        self.plan = self._choose()
        self._warn_once()
        if self.plan is None or not self.plan.on_device:
            return None
        assert self._served is not None
        dataset, ops = self._served.dataset, self._compile()
        return StoredReader(dataset, ops.program, only_places=ops.mirror is not None), ops

    def describe(self, devices: list[torch.device]) -> str:
        """Where they ran in the latest epoch, in one line; empty where there are none."""
        if self.plan is None:
            return ""
        if not self.plan.on_device:
            return f"on the CPU: {self.plan.reason}"
        assert self._compiled is not None
        where, ops = f"on {', '.join(map(str, devices))}", self._compiled[1]
        if ops.program.host_step:
            return f"{where}, the conversion only: {ops.program.host_step} runs on the CPU"
        if ops.mirror is None:
            return where
        return f"{where}, from a copy of the store there ({format_bytes(ops.mirror.size_bytes)})"

    def close(self) -> None:
        """Give back the memory on the devices. Idempotent."""
        if self._mirror is not None:
            self._mirror.close()

    def _choose(self) -> OpsPlan | None:
        if self._served is None:
            return None
        dataset, obstacle = self._served.dataset, stored_obstacle_of(self._loader, self._served)
        if obstacle is not None:
            return choose_ops(self._asked, obstacle=obstacle, stored_bytes=0, served_bytes=0)
        if not dataset.plan.batch_ops and dataset.storage != "device":
            return None
        ops = self._compile()
        is_mirrored = ops.mirror is not None
        if self._asked == "auto" and not self._backend.can_pin and not is_mirrored:
            obstacle = "batches are not pinned, so bytes that are not sent gain little"
        return choose_ops(
            self._asked,
            obstacle=obstacle,
            stored_bytes=math.prod(ops.program.sent_shape),
            served_bytes=self._served.sample_bytes or 0,
            is_mirrored=is_mirrored,
        )

    def _compile(self) -> DeviceOps:
        """Compile the program once for each plan: what it needs is copied to the devices."""
        assert self._served is not None
        dataset, finish = self._served.dataset, self._finish
        plan, spec = plan_and_spec(dataset)
        if self._compiled is None or self._compiled[0] is not plan:
            program = DeviceProgram(plan, spec, dtype=finish.dtype, channels_last=finish.channels_last)
            if dataset.storage == "device" and program.host is None and self._mirror is None:
                assert dataset.kept is not None
                self._mirror = Mirror(dataset.kept.images, self._backend, self._pinned)
            self._compiled = plan, DeviceOps(program, self._mirror if program.host is None else None)
        return self._compiled[1]

    def _warn_once(self) -> None:
        if self._has_warned or self.plan is None or self._asked == "cpu":
            return
        if self._served is None or self._served.dataset.storage != "device":
            return
        why = f", batches are made on the CPU: {self.plan.reason}"
        if self.plan.on_device:
            step = self._compile().program.host_step
            if not step:
                return
            why = f": {step} runs on the CPU"
        self._has_warned = True
        warn_user(f"storage='device' has no effect{why}")
