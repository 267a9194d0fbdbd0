"""Who reads the batches of a loader: threads, processes or the training loop, how many, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from fastdata import machine
from fastdata.batch import collate
from fastdata.memory import PinningPlan, budget_bytes, choose_pinning
from fastdata.report import Reader
from fastdata.served import Served
from fastdata.stored import stored_obstacle

__all__ = [
    "Engine",
    "Workers",
    "choose_engine",
    "choose_workers",
    "decide_pinning",
    "stored_obstacle_of",
]

Workers = Literal["auto", "thread", "process"]

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Who reads batches.

    Args:
        kind: fastdata's engine, ``"thread"``, or torch's, ``"process"``.
        path: the road of the batches and why they take it, in one line.
        workers: threads or processes; 0 is the training loop itself.
    """

    kind: Literal["thread", "process"]
    path: str
    workers: int = 0

    @property
    def reader(self) -> Reader:
        """Where batches are read."""
        return self.kind if self.workers else "inline"


def choose_engine(loader: Any) -> Engine:
    """Choose who reads the batches of a DataLoader, from its arguments and what its dataset serves."""
    obstacle = _thread_obstacle(loader)
    if loader.workers == "process" or obstacle is not None:
        reason = obstacle or "workers='process'"
        processes = "1 worker process" if loader.num_workers == 1 else f"{loader.num_workers} worker processes"
        road = f"{processes} over a shared ring" if loader.num_workers else "torch's engine in the training loop"
        return Engine(kind="process", path=f"{road}: {reason}", workers=loader.num_workers)
    serves = _served_text(loader._served)
    if loader.num_workers == 0:
        return Engine(kind="thread", path=f"{serves}, read in the training loop: num_workers=0")
    cores = machine.usable_cores()
    threads = min(loader.num_workers, cores)
    capped = f", as many as there are usable cores (num_workers={loader.num_workers})"
    path = f"{serves}, read by {threads} {'thread' if threads == 1 else 'threads'}"
    return Engine(kind="thread", path=path + (capped if cores < loader.num_workers else ""), workers=threads)


def _thread_obstacle(loader: Any) -> str | None:
    """Why threads cannot or should not read; None if they should."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset is read in order"
    if loader.batch_sampler is None:
        return "batch_size=None asks for single samples"
    if loader.workers == "thread":
        return None
    if loader.worker_init_fn is not None and not _only_seeds(loader.worker_init_fn):
        return "worker_init_fn is for worker processes"
    if loader._served is None:
        return f"{type(loader.dataset).__name__} is no fastdata dataset"
    if loader.num_workers > 0 and loader._served.is_filling:
        return "samples are prepared on their first read"
    obstacle: str | None = loader._served.obstacle
    return obstacle


def _only_seeds(worker_init_fn: Any) -> bool:
    """Whether it is what Lightning's ``seed_everything(workers=True)`` sets; whole batches use no seeded generator."""
    function = getattr(worker_init_fn, "func", worker_init_fn)
    package = str(getattr(function, "__module__", "")).split(".")[0]
    return package in _LIGHTNING and getattr(function, "__name__", "") == "pl_worker_init_function"


def _served_text(served: Served | None) -> str:
    """What the dataset of a DataLoader serves to threads."""
    if served is None:
        return "samples one by one"
    return "whole batches" if served.obstacle is None else f"samples one by one ({served.obstacle})"


def stored_obstacle_of(loader: Any, served: Served) -> str | None:
    """Why batches of a loader cannot be had as they are stored, to be finished on a device; None if they can.

    Args:
        loader: any.
        served: the fastdata dataset behind it.
    """
    if getattr(loader, "_served", None) is None:
        return f"the loader is a {type(loader).__name__}, not fastdata's DataLoader in batches"
    engine = choose_engine(loader)
    if engine.kind == "process":
        return f"batches come from {engine.path}"
    return stored_obstacle(served.dataset) or (None if loader.collate_fn is collate else "collate_fn= is your own")


def choose_workers(cores: int, ranks: int, *, asks_for_workers: bool = False) -> int:
    """Decide ``num_workers="auto"``.

    Args:
        cores: usable by this process; where a launcher has pinned each rank to cores of its own they are shared once
            more, because nothing tells the two apart.
        ranks: that share them.
        asks_for_workers: an argument was given that torch allows with workers only.
    """
    return max(int(asks_for_workers), cores // ranks - 1)


def decide_pinning(loader: Any, asked: Any) -> PinningPlan:
    """Decide ``pin_memory=`` of a DataLoader from what its dataset serves and what is free."""
    if asked != "auto":
        return PinningPlan(pin=asked, reason="", is_own_choice=False)
    has_accelerator = torch.cuda.is_available() or torch.xpu.is_available()
    batch_bytes = _batch_bytes(loader)
    under_way = max(1, loader.num_workers * (loader.prefetch_factor or 0)) + 1
    return choose_pinning(
        has_accelerator=has_accelerator,
        batch_bytes=batch_bytes,
        pinned_bytes=(batch_bytes or 0) * under_way,
        budget=budget_bytes(machine.available_bytes()),
    )


def _batch_bytes(loader: Any) -> int | None:
    """Bytes of the images of a full batch; None where that is not known without reading one."""
    sample_bytes = loader._served.sample_bytes if loader._served else None
    return None if sample_bytes is None or loader.batch_size is None else sample_bytes * loader.batch_size
