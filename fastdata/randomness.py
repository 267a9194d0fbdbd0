"""What the order of an epoch is drawn from: random generators and samplers, as plain values.

A sampler may draw from a generator of its own, from the global ones, or from an epoch number that was set on it. Only
what it can draw from is recorded: an epoch in sequence needs nothing, torch's own samplers need torch's generator, and
a sampler that nobody knows may use any.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = ["Randomness", "draw_base_seed", "undisturbed"]

_DRAW_NOTHING = (BatchSampler, SequentialSampler, DistributedSampler, list, tuple, range, np.ndarray, torch.Tensor)
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True, slots=True)
class Randomness:
    """Everything that an epoch's order can depend on.

    Args:
        samplers: the sampler that gives the order and those inside of it, outermost first.
        generators: of the loader and its samplers, each once.
        libraries: whose global generators are drawn from, among ``"torch"``, ``"python"`` and ``"numpy"``.
    """

    samplers: tuple[Any, ...]
    generators: tuple[torch.Generator, ...]
    libraries: tuple[str, ...]

    @classmethod
    def behind(cls, sampler: Any, generator: torch.Generator | None) -> Randomness:
        """Look what ``sampler`` draws from; None stands for a dataset that gives its own order.

        Args:
            sampler: a sampler or batch sampler, and whatever it has as ``sampler`` or ``batch_sampler`` inside.
            generator: the loader's.
        """
        chain = tuple(_chain(sampler))
        found = [generator, *(getattr(link, "generator", None) for link in chain)]
        generators = {id(each): each for each in found if isinstance(each, torch.Generator)}
        return cls(chain, tuple(generators.values()), _libraries(chain))

    @property
    def name(self) -> str:
        """The classes of the samplers, outermost first."""
        return " > ".join(type(link).__name__ for link in self.samplers)

    def capture(self) -> dict[str, Any]:
        """Return the present state as plain values; a sampler with a ``state_dict`` is asked for its own."""
        return {
            "global": {library: _pack(_get_global(library)) for library in self.libraries},
            "generators": [_pack(_bytes(generator.get_state())) for generator in self.generators],
            "samplers": [_capture_sampler(link) for link in self.samplers],
        }

    def restore(self, state: dict[str, Any], *, with_epochs: bool = True) -> None:
        """Put back what ``capture`` returned, global generators included.

        Args:
            state: from ``capture``.
            with_epochs: whether samplers get back their epoch numbers too, or keep those set on them since.
        """
        for library, packed in state["global"].items():
            _set_global(library, _unpack(packed))
        for generator, packed in zip(self.generators, state["generators"], strict=True):
            generator.set_state(_tensor(_unpack(packed)))
        for link, each in zip(self.samplers, state["samplers"], strict=True):
            if "state" in each:
                link.load_state_dict(copy.deepcopy(each["state"]))
            if with_epochs and "epoch" in each:
                link.set_epoch(each["epoch"])


def draw_base_seed(generator: torch.Generator | None = None) -> int:
    """Draw what torch's iterators draw at the beginning of each epoch."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


@contextmanager
def undisturbed(generators: tuple[torch.Generator, ...] = ()) -> Iterator[None]:
    """Put the global generators, and those given, back to where they are now."""
    before = [(library, _get_global(library)) for library in _LIBRARIES]
    own = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for library, state in before:
            _set_global(library, state)
        for generator, generator_state in zip(generators, own, strict=True):
            generator.set_state(generator_state)


_LIBRARIES = ("torch", "python", "numpy")


def _chain(sampler: Any) -> Iterator[Any]:
    """The sampler and those inside of it; one that keeps a state of its own answers for its inside."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        yield sampler
        seen.add(id(sampler))
        if _is_stateful(sampler):
            return
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def _libraries(chain: tuple[Any, ...]) -> tuple[str, ...]:
    if not chain or any(type(link) not in (*_DRAW_NOTHING, *_DRAW_FROM_TORCH) for link in chain):
        return _LIBRARIES
    drawing = [link for link in chain if type(link) in _DRAW_FROM_TORCH and link.generator is None]
    return ("torch",) if drawing else ()


def _is_stateful(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def _capture_sampler(sampler: Any) -> dict[str, Any]:
    captured: dict[str, Any] = {}
    if _is_stateful(sampler):
        captured["state"] = copy.deepcopy(sampler.state_dict())
    if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
        captured["epoch"] = sampler.epoch
    return captured


def _get_global(library: str) -> bytes:
    if library == "torch":
        return _bytes(torch.get_rng_state())
    if library == "python":
        return json.dumps(random.getstate()).encode()
    name, keys, *rest = np.random.get_state(legacy=True)
    return json.dumps([name, np.asarray(keys).tolist(), *rest]).encode()


def _set_global(library: str, state: bytes) -> None:
    if library == "torch":
        torch.set_rng_state(_tensor(state))
    elif library == "python":
        version, words, spare = json.loads(state)
        random.setstate((version, tuple(words), spare))
    else:
        np.random.set_state(tuple(json.loads(state)))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _pack(state: bytes) -> str:
    """Write as text, some 4,000 characters for a Mersenne twister of 20,000 bits."""
    return base64.b64encode(zlib.compress(state, 1)).decode()


def _unpack(packed: str) -> bytes:
    return zlib.decompress(base64.b64decode(packed))
