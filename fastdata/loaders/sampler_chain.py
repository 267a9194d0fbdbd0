"""The samplers of a loader, and their states.

For torch's own samplers a state holds their generators, and torch's global generator if they draw
from it. For any other sampler it holds the sampler's own ``state_dict()``, or its ``epoch`` if it
has ``set_epoch``.
"""

from __future__ import annotations

import base64
import copy
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data import dataloader as torch_loader

from fastdata.loaders.progress import Progress
from fastdata.loaders.samplers import RankSampler, StateDict
from fastdata.machine.ranks import Rank


@dataclass(frozen=True, slots=True)
class SamplerChain:
    """A loader's sampler, the samplers inside it, and the generators that they draw from.

    Attributes:
        outer: sampler that yields the indices of each batch, or single indices.
        generator: the loader's ``generator``.
        each: ``outer``, then the sampler that it reads, and so on. The last one reads no other, or
            has a ``state_dict`` that includes the samplers inside it.
        ranked: the last one if it is a ``RankSampler``; else None.
    """

    outer: Any
    generator: torch.Generator | None
    each: list[Any]
    ranked: RankSampler | None

    @classmethod
    def of(cls, loader: torch_loader.DataLoader[Any]) -> SamplerChain:
        """Return the samplers and generators of an epoch of a loader that begins now."""
        outer = loader._index_sampler
        each = _nested(outer)
        ranked = each[-1] if isinstance(each[-1], RankSampler) else None
        if ranked is not None and not ranked.has_begun:
            ranked.find_ranks()  # a launcher may have made this process a rank in the meantime
        return cls(outer, loader.generator, each, ranked)

    @property
    def has_set_epoch(self) -> bool:
        """True if a sampler has ``set_epoch``; Lightning calls it between ``iter`` and ``next``."""
        inner = getattr(self.outer, "sampler", None)
        return any(hasattr(sampler, "set_epoch") for sampler in (*self.each, inner))

    @property
    def batch_size(self) -> int | None:
        """Samples in each batch of a rank, if they decide a RankSampler's position; else None."""
        if self.ranked is None:
            return None
        if self.outer is self.ranked:
            return 1
        is_batched = type(self.outer) is BatchSampler and self.outer.sampler is self.ranked
        return self.outer.batch_size if is_batched else None

    @property
    def sharing(self) -> Any:
        """The sampler that divides the samples among ranks; None if none does."""
        # Some samplers set num_replicas=None if there is only one rank.
        return next((each for each in self.each if getattr(each, "num_replicas", None)), None)

    @property
    def rank(self) -> Rank:
        """The rank that the samplers are for."""
        sharing = self.sharing
        return Rank(0, 1) if sharing is None else Rank(sharing.rank, sharing.num_replicas)

    @property
    def ranks_may_overlap(self) -> bool:
        """True if several ranks may read the same sample, and nothing marks it as repeated."""
        sharing = self.sharing
        if sharing is None or sharing is self.ranked:
            return False
        return type(sharing) is not DistributedSampler

    def is_spent(self, counted: int) -> bool:
        """Return True if the samplers' lengths leave no further batch.

        Args:
            counted: samples drawn so far for torch's BatchSampler, whose batch size may change
                within an epoch; batches drawn so far for any other sampler.
        """
        outer = self.outer
        if type(outer) is not BatchSampler:
            return counted == length_of(outer)
        length = length_of(outer.sampler)
        if length is None:
            return False
        least = outer.batch_size if outer.drop_last else 1
        return length - counted < least

    def has_changed_size(self, progress: Progress) -> bool:
        """Return True if the ``batch_size`` of torch's BatchSampler has changed in the epoch."""
        outer = self.outer
        if type(outer) is not BatchSampler or self.batch_size is not None:
            return False
        whole = progress.drawn * outer.batch_size
        return progress.counted not in (whole, length_of(outer.sampler))

    @property
    def gives_each_once(self) -> bool:
        """True if no index can come twice in an epoch."""
        # Exact types, because a subclass may yield anything.
        if type(self.outer) is not BatchSampler:
            return False
        inner = self.outer.sampler
        if type(inner) is RandomSampler:
            return not inner.replacement and inner.num_samples == len(inner.data_source)
        return type(inner) is SequentialSampler

    @property
    def ends_with_a_draw(self) -> bool:
        """True if the sampler draws again after its last index, from a generator that others use.

        torch's RandomSampler does. Without a ``generator`` it draws from a private one.
        """
        last = self.each[-1]
        return type(last) is RandomSampler and last.generator is not None

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that the order is drawn from, each once."""
        found = [getattr(sampler, "generator", False) for sampler in self.each]
        if None in found:  # torch's samplers then draw from the global one, or take a seed from it
            found.append(torch.default_generator)
        found.insert(0, self.generator)
        return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))

    def capture(self) -> StateDict:
        """Return the states of generators and samplers, to draw the same order again later."""
        return {
            "generators": [_pack(generator) for generator in self.generators],
            "samplers": [_capture(sampler) for sampler in self.each],
        }

    def restore(self, start: StateDict, *, is_begun: bool) -> None:
        """Restore the states that ``capture`` returned, except that of a ``RankSampler``."""
        for generator, packed in zip(self.generators, start["generators"], strict=True):
            generator.set_state(_unpack(packed))
        for sampler, saved in zip(self.each, start["samplers"], strict=True):
            if sampler is self.ranked:
                continue
            if "state" in saved:
                sampler.load_state_dict(copy.deepcopy(saved["state"]))
            if "epoch" in saved and is_begun:  # otherwise the user may have set the coming epoch
                sampler.set_epoch(saved["epoch"])

    def identity(self) -> StateDict:
        """Return the values that a state and the loader that loads it must share."""
        identity: StateDict = {
            "generators": len(self.generators),
            "sampler": " > ".join(type(sampler).__name__ for sampler in self.each),
        }
        if self.ranked is not None:
            identity |= {"world_size": self.ranked.num_replicas, "order": self.ranked.identity}
        return identity


def _nested(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers inside it, unless its own ``state_dict`` includes them."""
    inner = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
    if inner is None or _keeps_state(sampler):
        return [sampler]
    return [sampler, *_nested(inner)]


def _pack(generator: torch.Generator) -> str:
    """Return the state of a generator as text: about 4,000 characters."""
    # A Mersenne twister's state has 5,056 bytes, half of which are zeros.
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes(), 1)).decode()


def _unpack(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.uint8)


def rank_state(start: StateDict) -> StateDict:
    """Return the state of the ``RankSampler`` in what ``SamplerChain.capture`` returned."""
    state: StateDict = start["samplers"][-1]["state"]
    return state


def _keeps_state(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


def _capture(sampler: Any) -> StateDict:
    if isinstance(sampler, RankSampler):
        return {"state": sampler.coming()}
    captured = {}
    if _keeps_state(sampler):
        captured["state"] = copy.deepcopy(sampler.state_dict())
    if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
        captured["epoch"] = sampler.epoch
    return captured


def length_of(sized: Any) -> int | None:
    """Return the length of a dataset, sampler or loader; None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
