"""From the files of a cache to stores: every size and offset is checked before it is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastdata.blocks import ArrayBlock
from fastdata.cache.manifest import Part, Shard, read_array
from fastdata.errors import CacheError
from fastdata.stores.disk import DiskStore
from fastdata.stores.encoded import Decoder
from fastdata.stores.shards import ShardMap

__all__ = ["Columns", "map_shards", "open_part", "read_columns"]

Columns = dict[str, np.ndarray]


def open_part(folder: Path, part: Part, rows: np.ndarray, decoder: Decoder | None) -> DiskStore:
    """Map the shards of a part as the store of the samples in these rows.

    Args:
        folder: of the cache.
        part: as the manifest has it.
        rows: int64 (N,), the row of each sample among those of all shards.
        decoder: of encoded samples; None for raw ones.

    Raises:
        CacheError: files are missing, damaged, or of another size than was written.
    """
    columns, heads = read_columns(folder, part)
    if len(rows) and not 0 <= rows.min() <= rows.max() < part.rows:
        raise CacheError(f"{folder} has {part.rows} rows, but its samples reach from {rows.min()} to {rows.max()}")
    shards = map_shards(folder, part)
    index = ArrayBlock({"rows": rows, **{name: column[rows] for name, column in columns.items()}})
    is_table = part.codec is None and len(heads) == 1 and None not in heads
    head_bytes = heads.pop() if is_table else None
    return DiskStore(shards, part.spec, index, name=part.name, decoder=decoder, head_bytes=head_bytes)


def map_shards(folder: Path, part: Part) -> ShardMap:
    """Map the files of a part.

    Raises:
        CacheError: one is missing, or of another size than was written.
    """
    return ShardMap(str(folder), [shard.name for shard in part.shards], [shard.size_bytes for shard in part.shards])


def read_columns(folder: Path, part: Part) -> tuple[Columns, set[int | None]]:
    """Where every row of a part lies, and the bytes before the first row of its tables, None for what is no table.

    Raises:
        CacheError: a file is missing or damaged, or a row reaches beyond its shard.
    """
    heads: set[int | None] = set()
    many: list[Columns] = []
    for number, shard in enumerate(part.shards):
        if shard.is_table:
            columns, head = _rows_of_table(folder, part, shard)
        else:
            columns, head = _rows_of_heap(folder, part, shard), None
        heads.add(head)
        many.append({"shards": np.full(shard.rows, number, np.int32), **columns})
    dimensions = 0 if part.spec.shape is None else len(part.spec.shape)
    empty: Columns = {
        "shards": np.empty(0, np.int32),
        **dict.fromkeys(("offsets", "sizes"), np.empty(0, np.int64)),
        "shapes": np.empty((0, dimensions), np.int32),
        "sums": np.empty(0, np.uint64),
    }
    if not many:
        return empty, heads
    if len({columns["shapes"].shape[1] for columns in many}) > 1:
        raise CacheError(f"{folder} has shards of samples with different numbers of dimensions")
    return {name: np.concatenate([columns[name] for columns in many]) for name in empty}, heads


def _rows_of_table(folder: Path, part: Part, shard: Shard) -> tuple[Columns, int]:
    spec = part.spec
    if spec.shape is None or part.codec is not None:
        raise CacheError(f"{folder / shard.name} is a table, but its samples are no raw ones of one shape")
    head_bytes = _head_of(folder / shard.name, (shard.rows, *spec.shape), np.dtype(spec.dtype))
    if head_bytes + shard.rows * spec.sample_bytes != shard.size_bytes:
        raise CacheError(
            f"{folder / shard.name} has {shard.size_bytes:,} bytes, which do not fit its {shard.rows} rows"
        )
    columns: Columns = {
        "offsets": head_bytes + np.arange(shard.rows, dtype=np.int64) * spec.sample_bytes,
        "sizes": np.full(shard.rows, spec.sample_bytes, np.int64),
        "shapes": np.tile(np.array(spec.shape, np.int32), (shard.rows, 1)),
        "sums": read_array(folder, shard.arrays["sums"], "uint64", (shard.rows,)),
    }
    return columns, head_bytes


def _head_of(path: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Bytes of the header of a ``.npy`` file that must hold such an array."""
    try:
        with path.open("rb") as stream:
            np.lib.format.read_magic(stream)
            found = np.lib.format.read_array_header_1_0(stream)
            head_bytes = stream.tell()
    except (OSError, ValueError) as problem:
        raise CacheError(f"{path} cannot be opened as a NumPy file: {problem}") from problem
    if found != (shape, False, dtype):
        raise CacheError(f"{path} holds {found[2]}{list(found[0])} where {dtype}{list(shape)} was written")
    return head_bytes


def _rows_of_heap(folder: Path, part: Part, shard: Shard) -> Columns:
    try:
        files = {name: shard.arrays[name] for name in ("offsets", "sizes", "shapes", "sums")}
    except KeyError as missing:
        raise CacheError(f"{folder / shard.name} lacks its {missing}") from None
    offsets, sizes = (read_array(folder, files[name], "int64", (shard.rows,)) for name in ("offsets", "sizes"))
    shapes = read_array(folder, files["shapes"], "int32", (shard.rows, -1))
    common = part.spec.shape
    if common is not None and (shapes.shape[1] != len(common) or (shapes != np.array(common, np.int64)).any()):
        raise CacheError(f"{folder / shard.name} holds samples of other shapes than {list(common)}")
    if shard.rows:
        is_wrong = (offsets < 0) | (sizes < 0) | (offsets > shard.size_bytes - sizes)
        if part.codec is None:
            item_bytes = np.dtype(part.spec.dtype).itemsize
            is_wrong |= (shapes < 0).any(axis=1) | (shapes.astype(np.float64).prod(axis=1) * item_bytes != sizes)
            is_wrong |= offsets % item_bytes != 0
        if is_wrong.any():
            raise CacheError(f"{folder / shard.name}: row {int(is_wrong.argmax())} does not lie within the file")
    sums = read_array(folder, files["sums"], "uint64", (shard.rows,))
    return {"offsets": offsets, "sizes": sizes, "shapes": shapes, "sums": sums}
