"""What the user chooses of a dataset: names, defaults, meanings, and what is refused."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from fastdata.pixels.images import Bound
from fastdata.sources.remote import StorageOptions
from fastdata.stores.samples import SOURCE

Storage = Literal["auto", "device", "shared", "compressed", "disk", "none"]
OnError = Literal["raise", "skip"]
_Dataset = TypeVar("_Dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What was chosen: ``DatasetOptions`` and their defaults, and what is said elsewhere."""

    storage: Storage = "auto"
    codec: Any = "auto"
    resize: Bound | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_key: str | None = None
    memory_limit: int | float | str | None = None
    storage_options: Mapping[str, Any] | None = None
    local_cache: str | os.PathLike[str] | None = None
    seed: int | None = None
    on_error: OnError = "raise"
    prepare_workers: int | None = None
    batch_ops: bool = True
    at_once: bool = False
    """Whether all samples are prepared now, and none on its first read."""
    alone: bool = False
    """Whether samples are not for the other ranks of this machine."""
    engine: str | Executor = "local"
    """What writes a cache; see ``build_cache`` of datasets."""
    shard_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        for name, kind in get_type_hints(Options).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={value!r} is not one of {choices}")
            if not isinstance(value, _PLAIN.get(kind, object)):
                raise TypeError(f"{name}={value!r} is not of type {kind}")
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
        """The one of all parts of samples, or those of each."""
        return self.codec if isinstance(self.codec, (tuple, list)) else (self.codec,)


_PLAIN: dict[Any, Any] = {bool: bool, int | None: Integral | None}
"""Types of options that are looked at here -> of which their values must be."""


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
            with a number draws depend on it, the epoch and the sample only.
        batch_ops: run known random transforms on whole batches, with fastdata's own draws; False
            runs them per sample exactly as written. Default: True.
        on_error: ``"raise"`` (default), or ``"skip"`` to leave out samples that cannot be prepared,
            with one warning. More than 1 % of the samples (and more than 10) is an error all the
            same.
        prepare_workers: threads that prepare, or processes where code of your own reads or prepares
            samples; default: all usable cores.
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

    storage: Storage
    codec: Any
    resize: Bound | None
    cache_dir: str | os.PathLike[str] | None
    cache_key: str | None
    memory_limit: int | float | str | None
    storage_options: Mapping[str, Any] | None
    local_cache: str | os.PathLike[str] | None
    seed: int | None
    on_error: OnError
    prepare_workers: int | None
    batch_ops: bool


def with_options(dataset: type[_Dataset]) -> type[_Dataset]:
    """Have ``help`` of a class, and its signature, list each option with default and meaning."""
    init: Any = dataset.__init__
    shown = inspect.signature(init)
    defaults = inspect.signature(Options).parameters
    own = [each for name, each in shown.parameters.items() if name != "options"]
    options = [defaults[name] for name in DatasetOptions.__annotations__]
    init.__signature__ = shown.replace(parameters=[*own, *options])
    meanings = inspect.cleandoc(DatasetOptions.__doc__ or "").partition("Attributes:\n")[2]
    text = inspect.cleandoc(dataset.__doc__ or "")
    dataset.__doc__ = text.replace("    options: see ``DatasetOptions``.", meanings)
    return dataset


def read_options(made: type, given: Mapping[str, Any], writing: tuple[Any, Any]) -> Options:
    """The options that a constructor was given; a TypeError for a name it has no argument of."""
    for name in given.keys() - DatasetOptions.__annotations__.keys():
        close = get_close_matches(name, inspect.signature(made).parameters, n=1)
        advice = f"help({made.__name__}) lists those it has."
        if close:
            advice = f"Did you mean {close[0]}=?"
        raise TypeError(f"{made.__name__}() has no argument {name}=. {advice}")
    engine, shard_bytes = writing
    return Options(**given, engine=engine, shard_bytes=shard_bytes)
