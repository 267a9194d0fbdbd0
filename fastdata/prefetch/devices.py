"""Which devices a prefetcher moves batches to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.cuda

from fastdata.errors import DeviceError

__all__ = ["DeviceLike", "current_accelerator", "current_cuda", "resolve_devices"]

DeviceLike = str | int | torch.device

_CPU = torch.device("cpu")


def resolve_devices(
    device: DeviceLike | Sequence[DeviceLike] | None, default: Callable[[], torch.device]
) -> list[torch.device]:
    """Return the devices asked for, each with its number where it has one.

    Raises:
        DeviceError: torch does not see one of them, or they cannot be used together.
    """
    asked: list[Any] = list(device) if isinstance(device, (list, tuple)) else [device]
    if not asked:
        raise DeviceError("device=[] names no device; give at least one, or leave device=None")
    devices = [default() if one is None else _with_number(torch.device(one)) for one in asked]
    for one in devices:
        _check_seen(one)
    if len({one.type for one in devices}) > 1:
        raise DeviceError(f"device={device!r} mixes kinds of devices; shards of a batch go to devices of one kind")
    if len(set(devices)) < len(devices) and devices[0] != _CPU:
        raise DeviceError(f"device={device!r} names a device twice; name each once")
    return devices


def current_cuda() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def current_accelerator() -> torch.device:
    """The current device of the machine's kind of accelerator, or the CPU where there is none."""
    accelerators: Any = getattr(torch, "accelerator", None)
    if accelerators is not None:  # torch >= 2.6
        kind = accelerators.current_accelerator() if accelerators.is_available() else None
        return _CPU if kind is None else _with_number(torch.device(kind.type))
    if torch.cuda.is_available():
        return current_cuda()
    if _module(torch.device("xpu")).is_available():
        return _with_number(torch.device("xpu"))
    return torch.device("mps") if torch.backends.mps.is_available() else _CPU


def _with_number(device: torch.device) -> torch.device:
    if ":" in str(device) or device.type not in ("cuda", "xpu"):
        return device
    module = _module(device)
    return torch.device(device.type, module.current_device()) if module.is_available() else device


def _check_seen(device: torch.device) -> None:
    if device.type not in ("cuda", "xpu"):
        return
    count = _module(device).device_count() if _module(device).is_available() else 0
    if count == 0:
        raise DeviceError(
            f"device={str(device)!r} was asked for, but torch sees no {device.type.upper()} device: "
            f"{_what_torch_is()}. Install a build of torch for this machine's accelerator and its driver (`python -m "
            f"torch.utils.collect_env` shows both), or leave device=None: batches then stay on the CPU where there is "
            f"no accelerator."
        )
    if device.index >= count:
        raise DeviceError(
            f"device={str(device)!r} was asked for, but torch sees {count} {device.type.upper()} "
            f"device{'s' if count > 1 else ''}, numbered from 0: {_what_torch_is()}."
        )


def _what_torch_is() -> str:
    toolkits: dict[str, str | None] = {
        "CUDA": getattr(torch.version, "cuda", None),
        "ROCm": getattr(torch.version, "hip", None),
    }
    built = " and ".join(f"{name} {version}" for name, version in toolkits.items() if version) or "the CPU only"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"torch {torch.__version__} is built for {built}, CUDA_VISIBLE_DEVICES is " + (
        "not set" if visible is None else repr(visible)
    )


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)
