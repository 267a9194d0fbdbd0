"""Options of a dataset: their names, defaults and meanings, each defined once.

A new option goes into ``Options`` with its default, and into ``DatasetOptions`` with its meaning.
The signature, the docstring and the errors of each dataset are made from these.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, TypedDict, TypeVar, get_args

from fastdata.errors import check_choices
from fastdata.paths import AnyPath
from fastdata.pixels.resize import Bound
from fastdata.sources.storage_options import StorageOptions
from fastdata.stores.source_codec import SOURCE

RequestedStorage = Literal["auto", "device", "shared", "compressed", "disk", "none"]

OnError = Literal["raise", "skip"]

_Dataset = TypeVar("_Dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a dataset: those of ``DatasetOptions`` with defaults, and a few internal ones."""

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
    """True to store one draw of each item of a dataset that draws at random (``CachedDataset``)."""
    at_once: bool = False
    """True to prepare all samples now, and not each when it is first read."""
    cores: Collection[int] = ()
    """Cores of all ranks, if this process prepares for all of them."""
    engine: str | Executor = "local"
    """Executor that writes a cache; see ``build_cache`` of datasets."""
    shard_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.storage_options is not None:  # from here on hidden from messages and pickles
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        check_choices(_CHOICES, **{name: getattr(self, name) for name in _CHOICES})
        for name in ("batch_ops", "return_index"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True or False")
        for name in ("prepare_workers", "seed"):
            value = getattr(self, name)
            if not isinstance(value, Integral | None):
                raise TypeError(f"{name}={value!r} must be an int or None")
        if self.prepare_workers is not None and self.prepare_workers < 0:
            raise ValueError(
                f"prepare_workers={self.prepare_workers} must be 0 or more; leave it out to use "
                "all usable cores"
            )
        for codec in self.codecs:
            if codec not in ("auto", SOURCE):
                from fastdata.stores.codecs import find_codec

                find_codec(codec)
        if self.cache_dir is None and self.storage == "disk":
            raise ValueError("storage='disk' needs a folder for the samples: name it as cache_dir=")
        if self.cache_dir is not None and self.storage not in ("auto", "disk"):
            raise ValueError(
                "cache_dir= stores samples on disk, where the page cache keeps them in memory, but "
                f"storage={self.storage!r} does not. Leave one of them out; codec= compresses "
                "samples on disk too."
            )
        if self.engine not in ("local", "ray") and not isinstance(self.engine, Executor):
            raise ValueError(
                f"engine={self.engine!r} must be 'local', 'ray' or a concurrent.futures.Executor"
            )
        if self.cache_dir is None and (self.engine != "local" or self.shard_bytes is not None):
            raise ValueError("build_cache() needs a folder for the cache: name it as cache_dir=")

    @property
    def codecs(self) -> Sequence[Any]:
        """The codec of each part, or the only codec for all parts."""
        return self.codec if isinstance(self.codec, (tuple, list)) else (self.codec,)


_CHOICES = {"storage": get_args(RequestedStorage), "on_error": get_args(OnError)}


class DatasetOptions(TypedDict, total=False):
    """The keyword arguments that all fastdata datasets share; ``Options`` has their defaults.

    Attributes:
        storage: where prepared samples are stored. ``"auto"`` (default): on disk if ``cache_dir``
            is given, else the first of ``"shared"``, ``"compressed"`` and ``"none"`` that fits into
            the free memory. ``"shared"``: in shared memory. ``"compressed"``: encoded in shared
            memory, and decoded on every read. ``"none"``: nowhere; samples are prepared on every
            read. ``"disk"``: in ``cache_dir``, which must be given. ``"device"``: like
            ``"shared"``, and each ``CudaPrefetcher`` also copies all samples to its GPU once, and
            makes the batches there.
        codec: codec of samples that are ``"compressed"`` or on disk. ``"source"``: the unchanged
            files, prepared on every read. ``"lz4"`` and ``"zstd"``: lossless. ``"jpeg"``: lossy. An
            object with ``encode(array) -> bytes`` and ``decode(memoryview, out)``. A tuple of
            these, one for each part of a sample. ``"auto"`` (default): the lossless codec that
            decodes fastest among those that fit, measured on some samples, see ``storage_report``;
            on disk no codec if raw samples fit.
        resize: size in pixels to which images are resized before they are stored, as by
            torchvision's ``Resize``: an int for the shorter side, or (height, width). Or a limit
            that never enlarges: ``"short:320"`` for the shorter side, ``"long:500"`` for the longer
            side. Default: images are not resized.
        memory_limit: the most memory that stored samples may take: bytes, ``"8GiB"``, or a fraction
            of the free memory. Default: all free memory, minus a reserve of 10 %. It does not
            limit batches and workers; the ``memory_limit`` of ``ChunkedLoader`` does.
        seed: seed of the random steps that run on whole batches. With a number, their random
            numbers depend only on it, the epoch (which fastdata's loaders count, and ``set_epoch``
            sets), the sample, and how often it came before in the epoch. ``None`` (default): torch
            draws a new base seed for each epoch, so ``torch.manual_seed`` and ``generator=``
            decide. Reads without an epoch, such as ``dataset[3]`` before ``set_epoch``, use
            torch's generator.
        batch_ops: True (default) to run known random transforms on whole batches, with random
            numbers of fastdata; False to run them per sample, exactly as written.
        return_index: True to add the index of each sample to its item: (image, label, index), or
            under ``"index"`` if items are dicts. Batches have it too. It is the index in this
            dataset, even if a ``Subset`` is read. Default: False.
        on_error: ``"raise"`` (default), or ``"skip"`` to leave out samples that cannot be prepared,
            with one warning. It is still an error if more than 1 % of the samples (and more than
            10), or 100 in a row, cannot be prepared.
        prepare_workers: number of threads that prepare samples, or of forked processes if your own
            code reads or prepares them. Default: all usable cores. If processes cannot be forked
            (macOS, Windows), your own code runs in the calling thread only.
        cache_dir: folder that stores prepared samples for the next run, which maps them into memory
            and prepares only those whose file has changed. It may be a URL. The system's page cache
            holds one copy for all workers, ranks and runs. Any number of datasets may share a
            folder: a cache is found by the steps that have run, the codec and the files (relative
            path, size, time). ``storage`` must then be ``"auto"`` or ``"disk"``. Each sample is
            compared with a checksum when it is first read. Default: None, nothing is stored on
            disk.
        cache_key: text that stands for everything that fastdata cannot see: the samples of a
            dataset that does not list its files in ``samples``, and settings inside of steps or
            of a ``loader`` that only C code can read, such as a database handle. Change it whenever
            these change. Default: None.
        storage_options: options for the fsspec file system of URLs (files and ``cache_dir``), such
            as credentials. They are never written into a cache, a log or a message. A pickle holds
            them only on its way to a spawned worker process or a task of ``build_cache``. Default:
            the configuration of fsspec.
        local_cache: folder in which all runs and ranks of a machine store the parts that they need
            of caches behind URLs. Default: ``~/.cache/fastdata/remote``. It takes at most half of
            the free space of its disk; the parts that were unused for longest are deleted first.
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
    """Add all options, with defaults and meanings, to the signature and docstring of a class."""
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
    """Return the options that were given to a constructor.

    In addition to ``DatasetOptions`` these may be ``engine`` and ``shard_bytes`` of
    ``build_cache``.

    Raises:
        TypeError: an option is unknown. The message suggests one with a similar name.
    """
    for name in given.keys() - {*DatasetOptions.__annotations__, "engine", "shard_bytes"}:
        close = get_close_matches(name, inspect.signature(dataset).parameters, n=1, cutoff=0.7)
        advice = f"help({dataset.__name__}) lists all arguments."
        if close:
            advice = f"Did you mean {close[0]}=?"
        raise TypeError(f"{dataset.__name__}() has no argument {name}=. {advice}")
    return Options(**given)
