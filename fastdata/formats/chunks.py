"""LitData's chunks and Mosaic's MDS shards: files that begin with how many samples they hold, and where each lies."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from fastdata.codecs import decompress
from fastdata.formats.files import File, Shards, array_of
from fastdata.images import decode_image, from_raw


class _Binary(Shards):
    """``raw_bytes`` are the sizes of the files before compression, at most."""

    def __init__(
        self,
        files: Sequence[File],
        counts: Sequence[int],
        raw_bytes: Sequence[int],
        compression: str,
        only: Collection[str] | None,
    ) -> None:
        for file, count, size_bytes in zip(files, counts, raw_bytes, strict=True):
            if type(count) is not int or type(size_bytes) is not int or not 0 < 4 * (count + 2) <= size_bytes:
                raise ValueError(f"{file.name} cannot have {count} samples in {size_bytes} bytes")
        super().__init__(files, counts, only)
        self._counts, self._raw_bytes, self._compression = list(counts), list(raw_bytes), compression
        self._offsets: dict[int, Any] = {}

    def _span(self, number: int, row: int, index: int) -> tuple[int, int] | None:
        return None if self._compression else self._ends_of(number, self._files[number].read, row)

    def _record(self, number: int, row: int, index: int) -> bytes:
        if not self._compression:
            return self.fetch(number, index, self._ends_of(number, self._files[number].read, row))
        unpack = partial(_unpacked, self._files[number], self._compression, self._raw_bytes[number])
        whole = self.keep("shard", number, unpack)
        start, stop = self._ends_of(number, lambda start, stop: whole[start:stop], row, len(whole))
        return cast("bytes", whole[start:stop])

    def _ends_of(
        self, number: int, read: Callable[[int, int], bytes], row: int, size_bytes: int | None = None
    ) -> tuple[int, int]:
        """First and last byte of a sample, of which its file says where they are."""
        if number not in self._offsets:
            count = self._counts[number]
            size_bytes = self._files[number].size_bytes if size_bytes is None else size_bytes
            head = np.frombuffer(read(0, min(4 * (count + 2), size_bytes)), "<u4").astype(np.int64)
            offsets = head[1:]
            is_within = len(offsets) == count + 1 and offsets[0] >= 4 * (count + 2) and offsets[-1] <= size_bytes
            if not is_within or head[0] != count or (np.diff(offsets) < 0).any():
                raise ValueError(f"the offsets at its start are not those of {count} samples in {size_bytes:,} bytes")
            self._offsets[number] = offsets
        start, stop = self._offsets[number][row : row + 2].tolist()
        return start, stop


def _unpacked(file: File, compression: str, most_bytes: int) -> bytes:
    return decompress(file.place.read(file.name), compression, most_bytes)


def _cut(data: bytes, sizes: Sequence[int], start: int) -> Iterator[bytes]:
    """The pieces of these sizes, which fill the data from ``start`` on."""
    ends = np.cumsum([start, *sizes]).tolist()
    if ends[-1] != len(data):
        raise ValueError(f"it has {len(data):,} bytes where its values take {ends[-1]:,}")
    return (data[first:last] for first, last in pairwise(ends))


def _number(data: bytes, dtype: str) -> Any:
    return array_of(data, dtype, ())[()].item()


def _with_header(data: bytes, dtypes: Sequence[str]) -> np.ndarray:
    """LitData's array: dtype, dimensions and shape as uint32, of tensors in newer versions big-endian, then values."""
    order = "<" if max(np.frombuffer(data[:8], "<u4"), default=0) < 1 << 16 else ">"
    dtype, dimensions = np.frombuffer(data[:8], f"{order}u4").tolist()
    shape = np.frombuffer(data[8 : 8 + 4 * dimensions], f"{order}u4").tolist()
    if dtype >= len(dtypes) or len(shape) != dimensions:
        raise ValueError(f"an array of dtype number {dtype} and {dimensions} dimensions is not known")
    return array_of(data[8 + 4 * dimensions :], dtypes[dtype], shape)


def _pil(data: bytes) -> Any:
    """A raw PIL image of LitData and MDS: width, height, length of the mode's name, then that and the pixels."""
    width, height, length = np.frombuffer(data[:12], "<u4").tolist()
    return from_raw(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


# Numbers of dtypes as litdata's constants.py lists them; what lies behind is bfloat16, objects, texts.
_TORCH_DTYPES = [*("f4", "f4", "f8", "f8", "c8", "c8", "c16", "c16", "f2", "f2", "O"), *("u1", "i1", "i2", "i2")]
_TORCH_DTYPES += ["i4", "i4", "i8", "i8", "?", "u2"]
_NUMPY_DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
_LITDATA: dict[str, Callable[[bytes, str], Any]] = {
    "jpeg": lambda data, _: decode_image(data),
    "image": lambda data, _: decode_image(data),
    "pil": lambda data, _: _pil(data),
    "tensor": lambda data, _: _torch(_with_header(data, _TORCH_DTYPES)),
    "no_header_tensor": lambda data, number: _torch(array_of(data, _TORCH_DTYPES[int(number)])),
    "numpy": lambda data, _: _with_header(data, _NUMPY_DTYPES),
    "no_header_numpy": lambda data, number: array_of(data, _NUMPY_DTYPES[int(number)]),
    "int": lambda data, _: _number(data, "<i8"),
    "float": lambda data, _: _number(data, "<f8"),
    "text": lambda data, _: data.decode(),
    "boolean": lambda data, _: _number(data, "?"),
    "bool": lambda data, _: _number(data, "?"),
    "str": lambda data, _: data.decode(),
    "bytes": lambda data, _: data,
    "file": lambda data, _: data,
}
_NDARRAY_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4"}
_NDARRAY_DTYPES |= {64: "u8", 65: "i8", 66: "f8"}
_MOSAIC: dict[str, Callable[[bytes, str], Any]] = {
    **{name: _LITDATA[name] for name in ("jpeg", "pil", "int", "str", "bytes")},
    **{
        np.dtype(dtype).name: lambda data, _, dtype=dtype: _number(data, dtype)  # type: ignore[misc]
        for dtype in _NDARRAY_DTYPES.values()
    },
    "png": lambda data, _: decode_image(data),
    "json": lambda data, _: json.loads(data),
    "str_int": lambda data, _: int(data),
    "str_float": lambda data, _: float(data),
    "ndarray": lambda data, detail: _ndarray(data, *filter(None, detail.split(":"))),
}


def _ndarray(data: bytes, dtype: str | None = None, shape: str | None = None) -> np.ndarray:
    """MDS's array; what its column does not say stands at its start."""
    at = 0
    if dtype is None:
        dtype, at = _NDARRAY_DTYPES[data[0]], 1
    sides: Sequence[int] = list(map(int, shape.split(","))) if shape else ()
    if shape is None:
        dimensions, side_bytes = data[at] >> 2, 1 << (data[at] & 3)
        stop = at + 1 + dimensions * side_bytes
        sides, at = np.frombuffer(data[at + 1 : stop], f"<u{side_bytes}").tolist(), stop
    return array_of(data[at:], dtype, sides)


def _decoder(known: Mapping[str, Callable[[bytes, str], Any]], text: str) -> Callable[[bytes], Any]:
    name, _, detail = text.partition(":")
    if name in ("pickle", "pkl"):
        raise ValueError("it holds pickled values, and what is not trusted is not unpickled; write them in another way")
    if name not in known:
        raise ValueError(f"values written as {text!r} are not known; {', '.join(known)} are")
    return lambda data: known[name](data, detail)


_FRAME = np.dtype([("first", "<u4"), ("count", "<u4"), ("start", "<u8"), ("size", "<u4"), ("bytes", "<u4")])
_MOST_BYTES = 1 << 30
"""Of one sample that is compressed by itself."""


class LitDataChunks(_Binary):
    """What ``litdata.optimize`` writes; items are as the function gave them, images PIL images."""

    def __init__(self, index: Mapping[str, Any], files: Mapping[str, File], only: Collection[str] | None) -> None:
        config, chunks = index["config"], index["chunks"]
        formats, counts = list(config["data_format"]), [chunk["chunk_size"] for chunk in chunks]
        if len(formats) == 1 and formats[0].startswith("no_header_tensor"):
            raise ValueError("it holds one stream of tokens, and no samples")
        if config.get("encryption"):
            raise ValueError("it is encrypted")
        raw_bytes = [chunk["chunk_bytes"] + 4 * (chunk["chunk_size"] + 2) for chunk in chunks]  # new ones count these
        named = [files[chunk["filename"]] for chunk in chunks]
        compression = (config.get("compression") or "").partition(":")[0]
        self._level = config.get("compression_level") or "chunk" if compression else ""
        super().__init__(named, counts, raw_bytes, compression if self._level == "chunk" else "", only)
        for text in formats:
            _decoder(_LITDATA, text)
        self._formats = formats
        self._spec = json.loads(config["data_spec"])[1]
        leaves = iter(range(len(formats)))
        if isinstance(shown := _unflatten(self._spec, leaves), dict):
            self.wanted(shown)
        if next(leaves, None) is not None:
            raise ValueError("its data_spec has fewer values than its data_format")

    def _item(self, number: int, row: int, index: int) -> Any:
        data = self._framed(number, row) if self._level == "batch" else self._record(number, row, index)
        if self._level == "sample":
            data = decompress(data, "zstd", _MOST_BYTES)
        count = len(self._formats)
        pieces = _cut(data, np.frombuffer(data[: 4 * count], "<u4").tolist(), 4 * count)
        values = [_decoder(_LITDATA, text)(piece) for text, piece in zip(self._formats, pieces, strict=True)]
        item = _unflatten(self._spec, iter(values))
        return {name: item[name] for name in self.wanted(item)} if isinstance(item, dict) else item

    def _span(self, number: int, row: int, index: int) -> tuple[int, int] | None:
        return None if self._level == "batch" else super()._span(number, row, index)

    def _framed(self, number: int, row: int) -> bytes:
        """A record of a chunk whose records are compressed some at a time; litdata's framed_zstd.py has the layout."""
        file, count = self._files[number], self._counts[number]
        if number not in self._offsets:
            magic, version, _, found, _, frames = struct.unpack("<8sHHIII", file.read(0, 24))
            first, last = 24 + 4 * (count + 1), 24 + 4 * (count + 1) + _FRAME.itemsize * frames
            if (magic, version, found) != (b"LDFZ01\0\0", 1, count) or last > file.size_bytes:
                raise ValueError(f"it does not begin as a chunk of {count} samples that are compressed in batches does")
            offsets = np.frombuffer(file.read(24, first), "<u4").astype(np.int64)
            table = np.frombuffer(file.read(first, last), _FRAME)
            rows = np.cumsum([0, *table["count"]])
            is_wrong = (table["start"] > file.size_bytes) | (table["start"] + table["size"] > file.size_bytes)
            if (
                is_wrong.any()
                or rows[-1] != count
                or (table["first"] != rows[:-1]).any()
                or (np.diff(offsets) < 0).any()
            ):
                raise ValueError(f"its batches do not hold {count} samples in {file.size_bytes:,} bytes")
            self._offsets[number] = offsets, table
        offsets, table = self._offsets[number]
        batch = int(np.searchsorted(table["first"], row, side="right")) - 1
        _, _, start, size, most_bytes = table[batch].tolist()
        data = self.keep(
            "batch", (number, batch), lambda: decompress(file.read(start, start + size), "zstd", most_bytes)
        )
        first, last = (offsets[row : row + 2] - offsets[table["first"][batch]]).tolist()
        return cast("bytes", data[first:last])


def _unflatten(spec: Mapping[str, Any], leaves: Iterator[Any]) -> Any:
    """What ``torch.utils._pytree`` makes of its own text; of types only Python's own, which run no code."""
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        return next(leaves)
    values = [_unflatten(child, leaves) for child in children]
    if kind in ("builtins.dict", "collections.OrderedDict"):
        return dict(zip(json.loads(spec["context"]), values, strict=True))
    if kind not in ("builtins.list", "builtins.tuple"):
        raise ValueError(f"items that are a {kind} are not known")
    return tuple(values) if kind == "builtins.tuple" else values


class MosaicShards(_Binary):
    """Mosaic's MDS shards; items are dicts."""

    def __init__(self, index: Mapping[str, Any], files: Mapping[str, File], only: Collection[str] | None) -> None:
        shards, first = index["shards"], index["shards"][0]
        same = ("column_names", "column_encodings", "column_sizes", "compression")
        for shard in shards:
            if (shard["version"], shard["format"]) != (2, "mds"):
                raise ValueError(f"shards are {shard['format']} of version {shard['version']}, not mds of version 2")
            if any(shard[name] != first[name] for name in same):
                raise ValueError("its shards have different columns or compression")
        named = [files[(shard["zip_data"] or shard["raw_data"])["basename"]] for shard in shards]
        counts, raw_bytes = [s["samples"] for s in shards], [s["raw_data"]["bytes"] for s in shards]
        compression = (first["compression"] or "").partition(":")[0] if first["zip_data"] else ""
        super().__init__(named, counts, raw_bytes, compression, only)
        for file, size_bytes in zip(named, raw_bytes, strict=True):
            if not compression and file.size_bytes != size_bytes:
                raise ValueError(f"{file.name} has {file.size_bytes:,} bytes where {size_bytes:,} were written")
        columns = zip(first["column_names"], first["column_encodings"], first["column_sizes"], strict=True)
        self._columns = cast("list[tuple[str, str, int | None]]", list(columns))
        for _, encoding, size in self._columns:
            _decoder(_MOSAIC, encoding)
            if size is not None and (type(size) is not int or size < 0):
                raise ValueError(f"a column cannot have values of {size!r} bytes")
        self.wanted(first["column_names"])

    def _item(self, number: int, row: int, index: int) -> Any:
        data = self._record(number, row, index)
        count = sum(not size for _, _, size in self._columns)
        sizes = iter(np.frombuffer(data[: 4 * count], "<u4").tolist())
        pieces = _cut(data, [size or next(sizes) for _, _, size in self._columns], 4 * count)
        found = {name: (encoding, piece) for (name, encoding, _), piece in zip(self._columns, pieces, strict=True)}
        wanted = self.wanted(found)
        return {name: _decoder(_MOSAIC, found[name][0])(found[name][1]) for name in wanted}
