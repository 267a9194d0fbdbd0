"""Options of a dataset: their names, defaults and meanings, each defined once.

A new option goes into ``Options``, with its default, and into ``DatasetOptions``, with its meaning:
``help`` of each dataset, its signature and its errors follow from these.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, TypedDict, TypeVar, get_args

from fastdata.paths import AnyPath
from fastdata.pixels.resize import Bound
from fastdata.sources.storage_options import StorageOptions
from fastdata.stores.source_codec import SOURCE

RequestedStorage = Literal["auto", "device", "shared", "compressed", "disk", "none"]

OnError = Literal["raise", "skip"]

_Dataset = TypeVar("_Dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a dataset: ``DatasetOptions`` with their defaults, and a few internal ones."""

    storage: RequestedStorage = "auto"
    codec: Any = "auto"
    resize: Bound | None = None
    cache_dir: AnyPath | None = None
    cache_key: str | None = None
    memory_limit: int | float | str | None = None
    storage_options: Mapping[str, Any] | None = None
    local_cache: AnyPath | None = None
    seed: int | None = None
    on_error: OnError = "raise"
    prepare_workers: int | None = None
    batch_ops: bool = True
    return_index: bool = False
    frozen: bool = False
    """True if one draw of each item is to be kept of a dataset that draws (``CachedDataset``)."""
    at_once: bool = False
    """True if all samples are prepared now, and none when it is first read."""
    cores: Collection[int] = ()
    """Cores of all ranks, if this process prepares for all of them."""
    engine: str | Executor = "local"
    """The executor that writes a cache; see ``build_cache`` of datasets."""
    shard_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.storage_options is not None:  # hidden from messages and pickles from here on
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={value!r} is not one of {listed}")
        for name in ("batch_ops", "return_index"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is neither True nor False")
        for name in ("prepare_workers", "seed"):
            value = getattr(self, name)
            if not isinstance(value, Integral | None):
                raise TypeError(f"{name}={value!r} is neither an int nor None")
        if self.prepare_workers is not None and self.prepare_workers < 0:
            raise ValueError(
                f"prepare_workers={self.prepare_workers} is less than 0; leave it out to use all "
                "usable cores"
            )
        for codec in self.codecs:
            if codec not in ("auto", SOURCE):
                from fastdata.stores.codecs import find_codec

                find_codec(codec)
        if self.cache_dir is None and self.storage == "disk":
            raise ValueError("storage='disk' keeps samples in a folder; name it with cache_dir=")
        if self.cache_dir is not None and self.storage not in ("auto", "disk"):
            raise ValueError(
                "cache_dir= keeps samples on disk, from where the page cache serves them; "
                f"storage={self.storage!r} does not. Leave one of them out; codec= compresses on "
                "disk as well."
            )
        if self.engine not in ("local", "ray") and not isinstance(self.engine, Executor):
            raise ValueError(
                f"engine={self.engine!r} is not 'local', 'ray', or a concurrent.futures.Executor"
            )
        if self.cache_dir is None and (self.engine != "local" or self.shard_bytes is not None):
            raise ValueError("build_cache() writes a cache; name its folder with cache_dir=")

    @property
    def codecs(self) -> Sequence[Any]:
        """The codecs of the parts, or the one codec of all parts."""
        return self.codec if isinstance(self.codec, (tuple, list)) else (self.codec,)


_CHOICES = {"storage": get_args(RequestedStorage), "on_error": get_args(OnError)}


class DatasetOptions(TypedDict, total=False):
    """The keyword arguments that all fastdata datasets share; ``Options`` has their defaults.

    Attributes:
        storage: ``"shared"`` keeps prepared samples in shared memory; ``"compressed"`` keeps them
            encoded there, and decodes on every read; ``"disk"`` keeps them in ``cache_dir``;
            ``"none"`` keeps nothing and prepares on every read; ``"auto"`` (default) is ``"disk"``
            where ``cache_dir`` is given, else takes the first of the others that fits the memory
            budget. ``"device"``: like ``"shared"``, and each ``CudaPrefetcher`` copies all of them
            to its GPU once, to gather batches there; never chosen by ``"auto"``.
        codec: how ``"compressed"`` samples, or those on disk, are encoded. ``"source"``: their own
            files as they are, prepared on every read. ``"lz4"``, ``"zstd"``: lossless. ``"jpeg"``:
            lossy. An object with ``encode(array) -> bytes`` and ``decode(memoryview, out)``. A
            tuple of these, one for each part of a sample. ``"auto"`` (default): the lossless one
            that decodes fastest of those that fit, tried on samples of the data, see
            ``storage_report``; on disk none where samples fit as they are.
        resize: size in pixels that images are resized to before they are stored, as torchvision's
            ``Resize``: an int for the shorter side, or (height, width); or ``"short:320"``,
            ``"long:500"``: at most that, never enlarged. Default: images stay as large as they are.
        memory_limit: the most memory to use: bytes, ``"8GiB"``, or a fraction of what is free.
            Default: what this process may take, less a reserve of 10 %.
        seed: of the random draws of batch ops. ``None`` (default) takes the base seed that torch's
            loaders draw in each epoch, so that ``torch.manual_seed`` and ``generator=`` decide;
            with a number draws depend on it, the epoch and the sample only. The epoch is that of
            fastdata's loader, or of ``set_epoch``; reads without either draw from torch's
            generator.
        batch_ops: run known random transforms on whole batches, with fastdata's own draws; False
            runs them per sample exactly as written. Default: True.
        return_index: add the index of each sample to its item: (image, label, index), or under
            ``"index"`` where items are dicts; batches likewise. It is the index in this dataset,
            also behind a ``Subset``. Default: False.
        on_error: ``"raise"`` (default), or ``"skip"`` to leave out samples that cannot be prepared,
            with one warning. More than 1 % of the samples (and more than 10), or 100 in a row, is
            an error all the same.
        prepare_workers: threads that prepare, or forked processes where code of your own reads or
            prepares samples; default: all usable cores. Where no process can be forked (macOS,
            Windows) code of your own runs in this thread alone.
        cache_dir: folder that keeps prepared samples for the next run (default: none does), which
            maps them into memory and prepares only those whose file has changed since. The page
            cache holds one copy for all workers, ranks and runs. It is found by the prepare part,
            the codec and the files (relative path, size, time); any number of datasets may share a
            folder. Not with a ``storage`` in memory. Every sample is held against a checksum when
            it is first read.
        cache_key: stands for what fastdata cannot see: the samples of a dataset that does not list
            its files in ``samples``, and what only C code knows of steps and loaders. Change it
            whenever these change. Default: none.
        storage_options: for URLs, of files and of ``cache_dir``: what their file system in fsspec
            takes, such as credentials. They get into no pickle, cache or message. Default: what
            fsspec is configured for.
        local_cache: folder in which all runs and ranks of a machine keep what they need of caches
            behind URLs; by default ``~/.cache/fastdata/remote``. It takes up to half of what is
            free there; what was needed least lately leaves first.
    """

    storage: RequestedStorage
    codec: Any
    resize: Bound | None
    cache_dir: AnyPath | None
    cache_key: str | None
    memory_limit: int | float | str | None
    storage_options: Mapping[str, Any] | None
    local_cache: AnyPath | None
    seed: int | None
    on_error: OnError
    prepare_workers: int | None
    batch_ops: bool
    return_index: bool


def with_options(dataset: type[_Dataset]) -> type[_Dataset]:
    """Add each option, with default and meaning, to the signature and the docstring of a class."""
    init: Any = dataset.__init__
    shown = inspect.signature(init)
    defaults = inspect.signature(Options).parameters
    *own, _ = shown.parameters.values()  # the last is **options
    options = [defaults[name] for name in DatasetOptions.__annotations__]
    init.__signature__ = shown.replace(parameters=[*own, *options])
    meanings = (inspect.getdoc(DatasetOptions) or "").partition("Attributes:\n")[2]
    text = inspect.getdoc(dataset) or ""
    dataset.__doc__ = text.replace("    options: see ``DatasetOptions``.", meanings)
    return dataset


def read_options(dataset: type, given: Mapping[str, Any]) -> Options:
    """Return the options that a constructor was given.

    In addition to ``DatasetOptions`` these may be ``engine`` and ``shard_bytes`` of
    ``build_cache``.

    Raises:
        TypeError: there is no such option; suggests one with a similar name.
    """
    for name in given.keys() - {*DatasetOptions.__annotations__, "engine", "shard_bytes"}:
        close = get_close_matches(name, inspect.signature(dataset).parameters, n=1)
        advice = f"help({dataset.__name__}) lists those it has."
        if close:
            advice = f"Did you mean {close[0]}=?"
        raise TypeError(f"{dataset.__name__}() has no argument {name}=. {advice}")
    return Options(**given)
