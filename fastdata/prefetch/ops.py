"""Where the batch ops of a prefetched loader run: on its devices, or on the CPU before batches are sent there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from fastdata.batchops import DeviceProgram, compile_device_ops
from fastdata.engine import stored_obstacle_of
from fastdata.memory import format_bytes
from fastdata.plan import TransformPlan
from fastdata.plan.ops import RandomResizedCrop
from fastdata.prefetch.backends import Backend
from fastdata.prefetch.finish import Finish
from fastdata.prefetch.mirror import Mirror
from fastdata.prefetch.pinning import PinnedMemory
from fastdata.report import warn_user
from fastdata.served import Served
from fastdata.stored import StoredBatch, StoredReader, plan_and_spec

__all__ = ["BatchOps", "DeviceOps", "OpsPlan", "WhereOps", "choose_ops"]

WhereOps = Literal["auto", "device", "cpu"]

MOST_TIMES_SERVED = 1.5
"""Up to so many times the bytes are sent. To gather 256 samples of 256 x 256 takes the host as long as to crop them to
224 x 224 (9.0 and 8.5 ms on a thread), at 1.3 times the bytes: beyond that the device's work spares the host none."""
MOST_TIMES_RESIZED = 8
"""The same where the CPU would resize, which takes it 18 times as long as to gather them (155 ms)."""


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
    resizes: bool = False,
    is_mirrored: bool = False,
) -> OpsPlan:
    """Decide where batch ops run.

    Args:
        asked: by the user.
        obstacle: why they cannot run on the device; None if they can.
        stored_bytes: of a sample as it is stored, which is sent if they run on the device.
        served_bytes: of a sample after them, which is sent if they run on the CPU.
        resizes: whether they resize.
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
    most = MOST_TIMES_RESIZED if resizes else MOST_TIMES_SERVED
    if asked == "device" or is_mirrored or stored_bytes <= served_bytes * most:
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
        draws_DB = torch.empty(0, 0, dtype=torch.int32) if draws is None else draws.t()
        if self.mirror is None:
            return [self.program.run(samples, draws_DB), targets]
        return [self.program.gather_run(self.mirror.on(device), samples, draws_DB), targets]


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
        if self.plan is None or not self.plan.on_device:
            self._warn_once()
            return None
        assert self._served is not None
        dataset = self._served.dataset
        ops = self._compile(is_mirrored=dataset.storage == "device")
        return StoredReader(dataset, ops.program, only_places=ops.mirror is not None), ops

    def describe(self, devices: list[torch.device]) -> str:
        """Where they ran in the latest epoch, in one line; empty where there are none."""
        if self.plan is None:
            return ""
        if not self.plan.on_device:
            return f"on the CPU: {self.plan.reason}"
        where = f"on {', '.join(map(str, devices))}"
        if self._mirror is None:
            return where
        return f"{where}, from a copy of the store there ({format_bytes(self._mirror.size_bytes)})"

    def close(self) -> None:
        """Give back the memory on the devices. Idempotent."""
        if self._mirror is not None:
            self._mirror.close()

    def _choose(self) -> OpsPlan | None:
        if self._served is None:
            return None
        dataset, obstacle = self._served.dataset, stored_obstacle_of(self._loader, self._served)
        is_mirrored = dataset.storage == "device"
        if obstacle is not None:
            return choose_ops(self._asked, obstacle=obstacle, stored_bytes=0, served_bytes=0)
        plan, spec = plan_and_spec(dataset)
        if not plan.batch_ops and not is_mirrored:
            return None
        if self._asked == "auto" and not self._backend.can_pin and not is_mirrored:
            obstacle = "batches are not pinned, so bytes that are not sent gain little"
        return choose_ops(
            self._asked,
            obstacle=obstacle,
            stored_bytes=spec.sample_bytes,
            served_bytes=self._served.sample_bytes or 0,
            resizes=any(isinstance(op, RandomResizedCrop) for op in plan.batch_ops),
            is_mirrored=is_mirrored,
        )

    def _compile(self, *, is_mirrored: bool) -> DeviceOps:
        """Compile the program once for each plan: what it needs is copied to the devices."""
        assert self._served is not None
        plan, spec = plan_and_spec(self._served.dataset)
        if self._compiled is None or self._compiled[0] is not plan:
            if is_mirrored and self._mirror is None:
                contents = self._served.dataset.kept
                assert contents is not None
                self._mirror = Mirror(contents.images, self._backend, self._pinned)
            finish = self._finish
            program = compile_device_ops(plan, spec, dtype=finish.dtype, channels_last=finish.channels_last)
            self._compiled = plan, DeviceOps(program, self._mirror)
        return self._compiled[1]

    def _warn_once(self) -> None:
        is_in_vain = self._served is not None and self._served.dataset.storage == "device" and self._asked != "cpu"
        if self.plan is None or not is_in_vain or self._has_warned:
            return
        self._has_warned = True
        warn_user(f"storage='device' has no effect, batches are made on the CPU: {self.plan.reason}")
