"""Random draws of collate functions, which are the same in any process or thread."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from fastdata.datasets.batch import collate
from fastdata.datasets.trees import ChannelsLast
from fastdata.pixels.random_numbers import sample_keys

if TYPE_CHECKING:
    from fastdata.datasets.batch import Collate

_READ_SALT = 0x72656164
"""Keeps draws while a batch is read independent of those while it is collated."""


class DrawKey(NamedTuple):
    """The key that a ``collate_fn`` draws from: its batch among those of all epochs and ranks."""

    seed: int
    epoch: int
    number: int

    def for_reading(self) -> DrawKey:
        """Return the key for draws of the user's code while the batch is read."""
        return self._replace(seed=self.seed ^ _READ_SALT)

    def generator(self) -> torch.Generator:
        """Return a generator of the batch."""
        start = sample_keys(self.seed, self.epoch, np.array([self.number]))
        return torch.Generator().manual_seed(int(start[0]))

    def collate(self, collate_fn: Collate, samples: Any) -> Any:
        """Call a ``collate_fn``, whose draws are made from this key."""
        inner = collate_fn.collate_fn if isinstance(collate_fn, ChannelsLast) else collate_fn
        # These two draw nothing, and take a quarter of the time outside of a dispatch mode.
        with nullcontext() if inner in (collate, default_collate) else BatchDraws(self):
            return collate_fn(samples)


class BatchDraws(TorchDispatchMode):
    """A mode in which torch's global generator is replaced by one of the batch, in this thread.

    Thus a ``collate_fn`` draws the same in any process, and the user's generator is left alone.
    Draws on a device, and from generators of Python and NumPy, are as before.
    """

    def __init__(self, key: DrawKey) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = key.generator()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _can_be_seeded(function):
            # Add our generator only where torch's global CPU generator would be used.
            given = pytree.tree_leaves((args, kwargs))
            is_seeded = any(isinstance(it, torch.Generator) for it in given)
            devices = [getattr(it, "device", it) for it in given]
            is_on_cpu = all(it.type == "cpu" for it in devices if isinstance(it, torch.device))
            if is_on_cpu and not is_seeded:
                return function.overloadpacket(*args, **kwargs, generator=self._generator)
        return function(*args, **kwargs)


@cache
def _can_be_seeded(function: Any) -> bool:
    """Return True if an operation draws, and it or an overload of it takes a generator."""
    named = f"{function._schema} {function.overloadpacket.overloads()}"
    return torch.Tag.nondeterministic_seeded in function.tags and "generator" in named
