"""Random draws of collate functions, which are the same in every process and thread."""

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
"""Makes the draws while a batch is read independent of those while it is collated."""


class DrawKey(NamedTuple):
    """The key that a ``collate_fn`` draws from: the seed, the epoch and the number of its batch."""

    seed: int
    epoch: int
    number: int

    def for_reading(self) -> DrawKey:
        """Return the key that the user's code draws from while the batch is read."""
        return self._replace(seed=self.seed ^ _READ_SALT)

    def generator(self) -> torch.Generator:
        """Return a generator of the batch."""
        start = sample_keys(self.seed, self.epoch, np.array([self.number]))
        return torch.Generator().manual_seed(int(start[0]))

    def collate(self, collate_fn: Collate, samples: Any) -> Any:
        """Call a ``collate_fn`` so that its draws depend only on this key."""
        inner = collate_fn.collate_fn if isinstance(collate_fn, ChannelsLast) else collate_fn
        # These two functions draw nothing, and without a dispatch mode take a quarter of the time.
        with nullcontext() if inner in (collate, default_collate) else BatchDraws(self):
            return collate_fn(samples)


class BatchDraws(TorchDispatchMode):
    """A mode in which a generator for the batch replaces torch's global one, in this thread.

    So a ``collate_fn`` draws the same numbers in any process, and the user's generator does not
    change. Draws on a device, and from generators of Python and NumPy, stay as they were.
    """

    def __init__(self, key: DrawKey) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = key.generator()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _can_be_seeded(function):
            # Our generator is added only if torch's global CPU generator would be used.
            given = pytree.tree_leaves((args, kwargs))
            is_seeded = any(isinstance(it, torch.Generator) for it in given)
            devices = [getattr(it, "device", it) for it in given]
            is_on_cpu = all(it.type == "cpu" for it in devices if isinstance(it, torch.device))
            if is_on_cpu and not is_seeded:
                return function.overloadpacket(*args, **kwargs, generator=self._generator)
        return function(*args, **kwargs)


@cache
def _can_be_seeded(function: Any) -> bool:
    """Return True if an operation draws, and it or one of its overloads takes a generator."""
    named = f"{function._schema} {function.overloadpacket.overloads()}"
    return torch.Tag.nondeterministic_seeded in function.tags and "generator" in named
