"""The index of a cache or of a shard, checked completely, because anybody may have written it.

A cache is a folder with

* shards: a file for each part of the samples, ``part0-<shard>.npy`` (raw samples of one shape, an
  ordinary NumPy file (n, *shape)) or ``part0-<shard>.bin`` (all others, end to end), and the shard
  manifest ``shard-<shard>.npz``, the index of the shard's samples;
* ``fastdata.npz``, the index of all samples, written last.

Nothing is unpickled. The name of a shard is a hash of everything its samples are made from, so its
files never change: a build adds files and replaces the index by renaming. A shard without a
manifest is incomplete or damaged, and the next build writes it again.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdata.errors import CacheError, MemoryBudgetError, RemoteError, SampleError
from fastdata.machine.blocks import ArrayBlock
from fastdata.machine.budget import StoragePlan
from fastdata.machine.tables import SampleTable
from fastdata.machine.units import format_bytes
from fastdata.paths import AnyPath, local_path, refuse_remote
from fastdata.pixels.arrays import Array
from fastdata.sources.remote import Place
from fastdata.stores.codecs import codec_of
from fastdata.stores.disk import DiskStore, shard_manifest_name
from fastdata.stores.disk_file import DiskFile
from fastdata.stores.kept import KeptSamples
from fastdata.stores.manifest import VERSION, Manifest, from_json
from fastdata.stores.mirror import MirroredStore
from fastdata.stores.prepare import Prepared
from fastdata.stores.store import Decoder
from fastdata.stores.targets import unpack_targets
from fastdata.stores.writer import StoredPart, open_all

if TYPE_CHECKING:
    from fastdata.stores.targets import Columns


INDEX = "fastdata.npz"

_MOST_SAMPLE_BYTES = 1 << 36
"""More bytes than any real sample has. An index may claim any shape, and memory is reserved for it.
"""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Index of a cache or of one of its shards, an ``.npz`` file of columns.

    A row is a sample of the source, in the source's order. A kept sample is one that was not left
    out. The columns are

    * for each shard: ``shards.names``, a fingerprint of its samples and of their preparation;
      ``shards.rows``, int64; and ``shards.bytes``, int64 (shards, parts), the size of the file of
      each part;
    * for each row: ``kept``, bool. For each sample that was left out, ``skipped.json`` has its
      path, its error, and True if the cause may be gone in the next run;
    * for each part and kept sample: ``part0.sums``, uint32 (see ``checksum``); ``part0.offsets``,
      int64, its first byte in the file of its shard; ``part0.sizes``, int64, its bytes; and
      ``part0.shapes``, int32 (kept, dimensions);
    * for each kept sample, if samples are files: ``paths`` and ``ends`` (see ``Packed``). Either
      all paths are relative to the root, or all are absolute;
    * the targets of the kept samples, see ``pack_targets``. A shard manifest of files has none.
    """

    place: Place
    manifest: Manifest
    columns: Columns

    @classmethod
    def read(cls, place: Place) -> Cache:
        """Read the index of a cache.

        Raises:
            FileNotFoundError: the cache does not exist.
            CacheError: the index is damaged, or has another format.
            RemoteError: the index cannot be fetched.
        """
        try:
            return cls.unpack(place, place.read(INDEX))
        except (FileNotFoundError, RemoteError, MemoryBudgetError):
            raise
        except Exception as problem:  # damaged bytes may raise anything
            raise CacheError(
                f"{place.at(INDEX)} cannot be read: {type(problem).__name__}: {problem}"
            ) from problem

    @classmethod
    def unpack(cls, place: Place, data: bytes) -> Cache:
        """Read an index, and check the type, size and range of every column.

        Raises:
            Exception: of any kind, if the bytes are not an index.
        """
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            entries = stored.zip.infolist()
            # The columns must not take more memory than the file has bytes. A compressed entry
            # could expand to any size, and a thousand entries of a zip file may share their bytes.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("its columns are compressed, which may hide their size")
            if sum(entry.file_size for entry in entries) > len(data):
                raise ValueError(
                    "its columns overlap, and take more memory than the file has bytes"
                )
            columns = dict(stored.items())
            # NumPy reads only as many bytes as the header of a column states. If a flipped bit
            # makes this too few, the checksum of the whole entry is never compared. This compares
            # it.
            if stored.zip.testzip():
                raise ValueError("its columns are longer than their headers state")
        for name, column in columns.items():
            if name.endswith(".json"):
                columns[name] = json.loads(column.tobytes())
        document = columns.pop("manifest.json")
        if document["version"] != VERSION:
            raise ValueError(
                f"its format is {document['version']!r}, but this fastdata reads {VERSION}"
            )
        cache = cls(place=place, manifest=from_json(Manifest, document), columns=columns)
        cache._check()  # all columns, although not every caller needs all
        return cache

    def pack(self) -> bytes:
        """Return the bytes of the index: arrays without pickle, and everything else as JSON."""
        columns = {"manifest.json": dataclasses.asdict(self.manifest), **self.columns}
        arrays = {
            name: column
            if isinstance(column, np.ndarray)
            else np.frombuffer(json.dumps(column).encode(), np.uint8)
            for name, column in columns.items()
        }
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # of numbers, which are not pickled
        return stream.getvalue()

    @property
    def shard_names(self) -> list[str]:
        """Fingerprints of the shards, in the order of their samples."""
        return [name.decode() for name in self.columns["shards.names"].tolist()]

    @cached_property
    def kept(self) -> Array:
        """Rows of the samples that were not left out."""
        return np.flatnonzero(self.columns["kept"])

    @property
    def size_bytes(self) -> int:
        return int(self.columns["shards.bytes"].sum())

    def files(self) -> list[dict[str, int]]:
        """Return for each part the name and size in bytes of its file in each shard."""
        files = []
        for number, part in enumerate(self.manifest.parts):
            ending = ".npy" if part.is_table else ".bin"
            names = [f"part{number}-{shard}{ending}" for shard in self.shard_names]
            sizes = self.columns["shards.bytes"][:, number].tolist()
            files.append(dict(zip(names, sizes, strict=True)))
        return files

    def file_names(self) -> set[str]:
        """Return the names of all files of this cache, including the index."""
        return {INDEX}.union(map(shard_manifest_name, self.shard_names), *self.files())

    def lacks_shard_manifests(self) -> bool:
        """Return True if a shard's manifest is gone, because a reader found the shard damaged.

        Readers do not change caches behind a URL, so the result is False for these.
        """
        if self.place.is_remote:
            return False
        return not {*map(shard_manifest_name, self.shard_names)} <= {*os.listdir(self.place.url)}

    def _check(self) -> None:
        """Raise ValueError, or another error, if the columns do not fit together."""
        parts = self.manifest.parts
        if len(parts) <= self.manifest.layout.target_parts:
            raise ValueError(f"its parts do not match its layout: {parts}")
        shards = len(self.columns["shards.names"])
        names = self._column("shards.names", "S16", shards).tolist()
        rows = self._column("shards.rows", "int64", shards)
        sizes = self._column("shards.bytes", "int64", shards, len(parts))
        kept = self._column("kept", "bool", int(rows.sum()))
        # The names become file names, which must not lead out of the folder.
        if not re.fullmatch(rb"[0-9a-f]*", b"".join(names)):
            raise ValueError(f"{names} are not names of shards")
        # Each number is checked, because huge ones could overflow to a sum that fits ``kept``.
        is_negative = min(rows.min(initial=0), sizes.min(initial=0)) < 0
        if is_negative or rows.max(initial=0) > len(kept) or len({*names}) < shards:
            raise ValueError("the sizes or names of its shards are impossible")
        if "paths" in self.columns:
            ends = self._column("ends", "int64", len(self.kept))
            self._column("paths", "uint8", int(ends[-1]))
            if (np.diff(ends, prepend=0) < 0).any():
                raise ValueError("its file names overlap")
        for name in ("skipped", "targets", "located"):
            getattr(self, name)  # these properties check their columns

    def _column(self, name: str, dtype: str, *shape: int) -> Array:
        """Return a column; a ValueError if it does not have this type and shape."""
        column: Array = self.columns[name]
        if column.dtype != np.dtype(dtype) or column.shape != shape:
            found = f"{column.dtype}{list(column.shape)}"
            raise ValueError(f"{name} are {found}, but {dtype}{list(shape)} are needed")
        return column

    @cached_property
    def skipped(self) -> list[SampleError]:
        """Errors of the samples that were left out."""
        rows = np.flatnonzero(~self.columns["kept"]).tolist()
        errors = []
        for row, entry in zip(rows, self.columns["skipped.json"], strict=True):
            path, message, may_pass = entry
            if not isinstance(path, str | None):
                raise ValueError(f"{path!r} is not a path")
            error = SampleError(message, index=row, path=path)
            error.may_pass = may_pass
            errors.append(error)
        return errors

    @cached_property
    def targets(self) -> Any:
        """Targets of the kept samples: array, tensor or list; zeros if targets are a part."""
        count = len(self.kept)
        if self.manifest.layout.target_is_part:
            return np.zeros(count, int)
        return unpack_targets(self.columns["targets.json"], self.columns, count)

    @cached_property
    def located(self) -> list[Columns]:
        """Index of each part's store: offsets, sizes and so on of each sample."""
        return [self._locate(number) for number in range(len(self.manifest.parts))]

    def _locate(self, number: int) -> Columns:
        """Return the index of a part's store, after checking the place and shape of each sample.

        Samples are later read at their offset, and decoded into memory of their shape, without
        another check. So only this check keeps every read within its file.

        Raises:
            ValueError: a sample has an impossible offset, size or shape.
        """
        part = self.manifest.parts[number]
        shape = part.spec.shape
        name = f"part{number}"
        rows = self.columns["shards.rows"]
        shards = np.repeat(np.arange(len(rows)), rows)[self.kept]
        count = len(shards)
        offsets = self._column(f"{name}.offsets", "int64", count)
        sizes = self._column(f"{name}.sizes", "int64", count)
        dimensions = part.dimensions if shape is None else len(shape)
        shapes = self._column(f"{name}.shapes", "int32", count, dimensions)
        item_bytes = np.dtype(part.spec.dtype).itemsize
        sample_bytes = shapes.astype(np.float64).prod(axis=1) * item_bytes
        file_bytes = self.columns["shards.bytes"][shards, number]
        # Not `offsets + sizes > file_bytes`, because the sum of two int64 may overflow. The product
        # of a shape may overflow too, so it is computed in floats.
        is_wrong = (offsets < 0) | (sizes < 0) | (offsets > file_bytes - sizes)
        is_wrong |= (shapes < 0).any(axis=1) | (sample_bytes > _MOST_SAMPLE_BYTES)
        if shape is not None:
            is_wrong |= (shapes != shape).any(axis=1)
        if part.codec is None:
            is_wrong |= (sample_bytes != sizes) | (offsets % item_bytes != 0)
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise ValueError(f"sample {row} of {name} has an impossible offset, size or shape")
        return {
            "offsets": offsets,
            "sizes": sizes,
            "shapes": shapes,
            "files": shards.astype(np.int32),
            "sums": self._column(f"{name}.sums", "uint32", count),
        }

    def open_part(
        self, number: int, decoder: Decoder | None, local_cache: AnyPath | None = None
    ) -> DiskStore:
        """Map the files of a part.

        Raises:
            CacheError: a file is missing or has another size.
        """
        spec = self.manifest.parts[number].spec
        sizes = self.files()[number]
        located = self.located[number]
        if self.place.is_remote:
            return MirroredStore.open(
                self.place, sizes, spec, located, decoder, mirror_folder(local_cache)
            )
        files = open_all(
            DiskFile.open(Path(self.place.url, name), size) for name, size in sizes.items()
        )
        located = {**located, "checked": np.zeros(len(self.kept), np.uint8)}
        return DiskStore(files, spec, ArrayBlock.of(located, seal=False), decoder)

    def serve(
        self,
        known: Sequence[Decoder | None],
        table: SampleTable | None,
        local_cache: AnyPath | None = None,
    ) -> Prepared:
        """Map all samples.

        Args:
            known: codecs that may decode a part, in addition to fastdata's own.
            table: table of the source's samples, or of the kept ones; by default one of the targets
                in the cache.
            local_cache: folder for the segments of a cache behind a URL.

        Raises:
            CacheError: the cache has no samples, or a part needs a codec that is not known.
        """
        if not len(self.kept):
            raise CacheError(
                f"{self.place} has no samples: all were left out when it was built. Build it again "
                "with on_error='raise' to see why"
            )
        stores = open_all(
            self.open_part(number, _coder_of(self.place, part, known), local_cache)
            for number, part in enumerate(self.manifest.parts)
        )
        if table is None:
            table = SampleTable(self.targets)
        if len(self.kept) < len(table):
            table = table.reduced_to(self.kept.tolist())
        codecs = "+".join(dict.fromkeys(store.codec for store in stores))
        reason = f"storage='disk': {format_bytes(self.size_bytes)} {codecs} in {self.place}"
        return Prepared(
            storage_plan=StoragePlan("disk", reason, None if codecs == "raw" else codecs),
            kept=KeptSamples(tuple(stores), table, **vars(self.manifest.layout)),
            skipped=self.skipped,
        )


def _coder_of(place: Place, part: StoredPart, known: Sequence[Decoder | None]) -> Decoder | None:
    """Return the codec of a part; None for raw samples."""
    if part.codec is None:
        return None
    for coder in known:
        if coder is not None and coder.settings() == part.codec:
            return coder
    try:
        return codec_of(part.codec)
    except (TypeError, ValueError) as unknown:
        raise CacheError(
            f"{place} cannot be opened on its own: {unknown}. Unchanged image files, and samples "
            "that your own codec object has encoded, need the dataset that the cache was made "
            f"from. Make that dataset again with cache_dir={place.url.rpartition('/')[0]!r} and "
            "the same codec=, transform= and loader=."
        ) from unknown


def mirror_folder(local_cache: AnyPath | None) -> Path:
    """Return the folder for copies of caches behind URLs, by default in the user's cache folder."""
    if local_cache is not None:
        refuse_remote(local_cache)
        return Path(local_path(local_cache)).absolute()
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users, "fastdata", "remote").absolute()
