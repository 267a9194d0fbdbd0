"""``fastdata.diagnose``: where a training loop's time goes, and what would make it shorter.

Measured are the loop as it is, the model with one batch again and again, the loader without a model, what one sample
costs in its parts, and other settings of the loader; all but the first two in processes of their own (``probe.py``).
``figures.py`` has what is measured and makes words of it, ``loops.py`` the loops, ``costs.py`` the loader alone.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastdata.loader import DataLoader
from fastdata.loader.resume import undisturbed
from fastdata.loader.view import MOSTLY_PREPARED
from fastdata.memory import tree_pss_bytes, usable_cores
from fastdata.prefetch import CudaPrefetcher
from fastdata.tools.diagnosis.costs import examine_loader
from fastdata.tools.diagnosis.figures import Diagnosis, Figures, Limit, Part, Trial, advise, name_limit, percent, say
from fastdata.tools.diagnosis.loops import EnoughError, Script, TimedLoop, lightning_callback, model_rate, run_loop
from fastdata.tools.measure import undisturbed_generators

__all__ = [
    "Diagnosis",
    "Figures",
    "Limit",
    "Part",
    "TimedLoop",
    "Trial",
    "diagnose",
    "diagnose_script",
    "lightning_callback",
]

_LEAST_S = 1.0
"""Of a loop that is shorter it is the beginning that counts."""


def _diagnosis(figures: Figures, loader: Any) -> Diagnosis:
    target = loader.loader if isinstance(loader, CudaPrefetcher) else loader
    figures = examine_loader(figures, target)
    limit, length = name_limit(figures), None
    rates = [rate for rate in (figures.loader_per_s, figures.model_per_s) if rate is not None]
    is_long = figures.batches * figures.seconds >= _LEAST_S
    is_alone = is_long and figures.loader_per_s is not None and figures.prepared >= MOSTLY_PREPARED
    if is_alone and limit not in ("model", "host-to-device") and figures.loop_per_s * 2 < min(rates):
        share = f"only {percent(figures.loop_per_s / min(rates))} of the slower of loader and model alone"
        why = f"the loop reaches {share}: they share the cores ({figures.usable_cores}), or others use them too"
        figures = replace(figures, notes=(*figures.notes, why))
    if isinstance(target, TorchDataLoader) and not target.persistent_workers:
        with contextlib.suppress(TypeError):  # of an IterableDataset
            length = len(target)
    advice = advise(figures, limit, is_prefetched=target is not loader, epoch_batches=length)
    return Diagnosis(limit=limit, line=say(figures, limit), advice=advice, figures=figures)


def diagnose(
    loader: Iterable[Any],
    step: Callable[[Any], Any] | None = None,
    *,
    device: str | torch.device | None = None,
    batches: int = 100,
) -> Diagnosis:
    """Run a training loop and say where its time goes.

    The loop is run over one epoch at most, then ``step`` again on its last batch for about a second: the model learns
    from that. All else runs in forked processes; random generators, the loader's too, are left as they were. A loader
    of fastdata's counts the epoch. What the loader or ``step`` raises in the loop is raised here.

    Args:
        loader: any torch ``DataLoader``, fastdata's among them, or a ``CudaPrefetcher``. Of other iterables of batches
            only the loop is measured.
        step: called with each batch; without it nothing is done with them.
        device: where batches are moved before ``step``; default: where they are.
        batches: to run at most, at least 2; the first one is not counted.

    Raises:
        ValueError: the loader gave fewer than two batches.

    Example:
        >>> from fastdata.tools.diagnosis import diagnose
        >>> print(diagnose([torch.zeros(4, 3)] * 20, lambda batch: [batch.exp() for _ in range(99)]).limit)
        model
    """
    if batches < 2:
        raise ValueError(f"batches={batches}: at least 2 are needed, the first one is not counted")
    target: Any = loader.loader if isinstance(loader, CudaPrefetcher) else loader
    where = loader.device if isinstance(loader, CudaPrefetcher) else None if device is None else torch.device(device)
    inner = getattr(getattr(target, "batch_sampler", None), "sampler", None)
    owners = (target, getattr(target, "sampler", None), inner)
    generators = [one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)]
    prepared = target.report().prepared if isinstance(target, DataLoader) else 1.0
    had_workers = getattr(target, "_iterator", None) is not None
    with undisturbed_generators(), undisturbed(*generators):
        figures, batch = run_loop(loader, step, where, batches)
        if not had_workers and getattr(target, "_iterator", None) is not None:
            target._iterator = None  # of workers that persist: the user's first epoch starts its own
        figures = replace(figures, prepared=prepared, model_per_s=model_rate(step, batch) if step else None)
        del batch
        return _diagnosis(figures, loader)


def diagnose_script(path: str | PathLike[str], arguments: Sequence[str] = (), *, batches: int = 100) -> Diagnosis:
    """Run a training script and say where the time of its loop goes.

    The script runs in this process as ``__main__``, until a loop over one of its loaders has had ``batches`` batches,
    or to its end. Wait and step are those of its loop; the loader is then measured alone.

    Args:
        path: of the script.
        arguments: that it finds in ``sys.argv``.
        batches: after which it is stopped; at least 2.

    Raises:
        ValueError: the script has no loop of two batches over a torch ``DataLoader``.

    What the script raises before that, ``SystemExit`` included, is raised here.
    """
    module, watch, notes = types.ModuleType("__main__"), Script(batches), []
    module.__file__ = str(path)
    code = compile(Path(path).read_bytes(), str(path), "exec")
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(Path(path).resolve().parent)]
    sys.modules["__main__"] = module  # and not by runpy: its workers may have to import from it when it has ended
    try:
        with watch.watched():
            try:
                exec(code, module.__dict__)
            except EnoughError:
                pass
            except (Exception, SystemExit) as end:
                if not any(loop.batches > 1 for loop in watch.loops.values()):
                    raise
                notes.append(f"the script has ended with {type(end).__name__}: {end}")
        loop = max(watch.loops.values(), key=lambda one: one.times.wait_s + one.times.busy_s, default=None)
        if loop is None or loop.batches < 2:
            raise ValueError(f"{path} has no loop over a torch DataLoader of two batches or more: nothing to diagnose")
        if torch.cuda.is_initialized():
            notes.append("the wait is the loop's own: the GPU may have had queued work meanwhile")
        count = loop.batches - 1
        figures = Figures(
            batches=count,
            batch_size=loop.samples / loop.batches,
            usable_cores=usable_cores(),
            memory_bytes=tree_pss_bytes(),
            notes=tuple(notes),
            first_s=loop.first_s,
            wait_s=loop.times.wait_s / count,
            step_s=loop.times.busy_s / count,
        )
        return _diagnosis(figures, loop.loader)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before
