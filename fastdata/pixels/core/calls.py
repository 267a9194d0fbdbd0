"""Calls of the compiled core that draw and make a batch.

serve.c describes how a batch is made, and records.h has the records. The core trusts the lengths of
the arrays that it gets, so this file checks them.

Shape letters: B batch, S ops of a sample, P perspectives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fastdata.pixels.arrays import Array, Float64s, Int32s, Int64s
from fastdata.pixels.core.library import load

Levels = Mapping[tuple[int, int, int], Float64s]
"""Magnitudes of policies, by (place of the policy in the table, height, width)."""


class CoreError(Exception):
    """The core refused a sample of a batch.

    Attributes:
        place: number of the sample in the batch.
        reason: name of the refusal in records.h, such as ``"crop"``.
        program: number of the output whose program refused it.
        step: place of the step in the table.
        numbers: the fields of the refusal.
    """

    def __init__(self, place: int, found: ctypes.Array[ctypes.c_byte]) -> None:
        refusal = np.frombuffer(bytes(found), load().records["REFUSAL"])[0]
        self.reason = load().reasons[int(refusal["reason"]) - 1]
        super().__init__(f"the compiled core refused sample {place} of a batch: {self.reason}")
        self.place = place
        self.program = int(refusal["program"])
        self.step = int(refusal["step"])
        names = load().records["REFUSAL"][self.reason].names
        self.numbers = {name: int(refusal[self.reason][name]) for name in names or ()}


class Samples:
    """Addresses of uint8 samples (B,), and their shapes: channels, height and width (B, 3).

    Samples are pixels (C, H, W), or JPEG files. ``files`` then has three addresses: of the
    functions of a ``Jpeg``, of the sizes of the files in bytes (0: the sample is pixels), and of
    the EXIF orientations by which they are turned.
    """

    files: tuple[int | None, int | None, int | None] = (None, None, None)

    def __init__(self, sources_B: Int64s, shapes_B3: Int32s) -> None:
        self.sources_B = np.ascontiguousarray(sources_B, np.int64)
        self.shapes_B3 = np.ascontiguousarray(shapes_B3, np.int32)


class Keys(NamedTuple):
    """The numbers that the draws of samples depend on: a seed, and visits and indices (B,)."""

    seed: int
    visits: Int64s
    indices: Int64s


class Table:
    """The steps of a transform, and magnitudes for some image sizes, in the form of the core.

    It holds the arrays that its record points to. It never changes, because other threads may be
    using it in a call.

    Args:
        steps: records ``STEP``.
        levels: magnitudes of policies.
        facts: facts of this machine: the fields ``fuses``, ``resizes_fast`` and ``chooses_order``.
    """

    def __init__(self, steps: Array, levels: Levels, **facts: bool) -> None:
        core = load()
        self._steps = steps
        self._facts = facts
        self.levels = levels
        rows = [(*size, values.size, values.ctypes.data) for size, values in levels.items()]
        self._sizes = np.array(rows, core.records["Levels"])
        self.record = np.zeros((), core.records["Table"])
        self.record["steps"] = steps.ctypes.data
        self.record["count"] = len(steps)
        self.record["levels"] = self._sizes.ctypes.data
        self.record["levels_count"] = len(levels)
        for name, value in facts.items():
            self.record[name] = value
        self.address: int = self.record.ctypes.data
        core.functions.fastdata_values(self.address)

    def with_levels(self, levels: Levels) -> Table:
        return Table(self._steps, levels, **self._facts)


def describe_output(
    table: Table, out: Array, solved_BS8: Float64s | None = None
) -> ctypes.Structure:
    """Return the record for the memory of a batch, and the table that makes it.

    Args:
        table: steps of the transform.
        out: memory for rows of (channels, height, width), or of masks (height, width);
            C-contiguous, or torch's channels_last.
        solved_BS8: result of ``solve_perspectives``, if the table draws perspectives.

    Raises:
        ValueError: the memory has another format, or is read-only.
    """
    is_last = not out.flags.c_contiguous
    if is_last and not out.transpose(0, 2, 3, 1).flags.c_contiguous:
        raise ValueError("the memory for a batch must be C-contiguous or channels_last")
    if not out.flags.writeable:
        raise ValueError("the memory for a batch is read-only, but samples are written to it")
    channels, height, width = (1, *out.shape[1:])[-3:]
    # A ctypes structure is filled in 1 us, a NumPy record in 4, and a batch of one small sample
    # takes 20 us in all.
    output = load().output(
        table=table.address,
        out_B=out.ctypes.data,
        out_bytes=out.nbytes,
        channels=channels,
        height=height,
        width=width,
        channels_last=is_last,
    )
    if solved_BS8 is not None:
        output.solved_BS8 = solved_BS8.ctypes.data
        output.solved = solved_BS8.shape[1]
    # The record holds only addresses. Keep the objects alive, because the program may replace its
    # table during the call.
    output.kept = (table, out, solved_BS8)
    return output


def draw(
    table: Table, keys: Keys, shapes_B3: Int32s, *, is_probe: bool = False, most: int = 1
) -> tuple[Array, Int32s]:
    """Draw the ops of samples, without making any pixel.

    Args:
        table: steps of the transform.
        keys: seed, visits and indices of the samples.
        shapes_B3: channels, height and width of each sample.
        is_probe: True to find only the shapes. A probe returns no ops and refuses no size.
        most: number of ops per sample for which there is room at first. If a sample has more, the
            call is repeated with more room.

    Returns:
        The ops of each sample, records ``OP`` (B, S) filled up with OP_NOTHING; perspectives have
        their corners instead of coefficients. And the shapes after all steps (B, 3); for a probe,
        height and width are 0 if they are unknown or differ between draws.

    Raises:
        CoreError: a step does not support such a sample.
        ValueError: the numbers of keys and of shapes differ.
    """
    _check_lengths(keys, shapes_B3)
    refusal = load().refusal()
    after_B3 = np.array(shapes_B3, np.int32, order="C")
    ops_BS = np.empty((len(after_B3), most), load().records["OP"])
    # The call returns the largest number of ops of a sample, also if there was no room for them.
    drawn = load().functions.fastdata_draw(
        table.address,
        keys.seed,
        keys.visits.ctypes.data,
        keys.indices.ctypes.data,
        after_B3.ctypes.data,
        len(after_B3),
        ops_BS.ctypes.data,
        most,
        is_probe,
        refusal,
    )
    if drawn < 0:
        raise CoreError(-1 - drawn, refusal)
    if drawn > most:
        return draw(table, keys, shapes_B3, most=drawn)
    return ops_BS[:, :drawn], after_B3


def solve_perspectives(ops_BS: Array) -> Float64s:
    """Return the coefficients (B, S, 8) of the ops that are perspectives, and 0 for all others.

    This is ``_get_perspective_coeffs`` of torchvision's transforms/functional.py, in one call for
    all. It must be torch's solver: the last bits of another solver differ, and change pixels.

    Raises:
        ValueError: three corners are on one line, as they may be for small images.
    """
    solved_BS8 = np.zeros((*ops_BS.shape, 8))
    is_warp_BS = ops_BS["code"] == load().numbers["OP_WARP"]
    is_solved_BS = is_warp_BS & (ops_BS["warp"]["is_perspective"] != 0)
    ops_P = ops_BS[is_solved_BS]
    equations_P89 = torch.empty((len(ops_P), 8, 9), dtype=torch.float64, device="cpu")
    load().functions.fastdata_equations(ops_P.ctypes.data, len(ops_P), equations_P89.data_ptr())
    # LAPACK's gels, as in torchvision; a solver for square matrices rounds differently.
    try:
        found = torch.linalg.lstsq(equations_P89[..., :8], equations_P89[..., 8:], driver="gels")
    except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
        raise ValueError(
            "RandomPerspective drew corners that are on one line, which also happens with "
            "torchvision if images are small. Use larger images or a smaller distortion_scale."
        ) from cause
    solved_BS8[is_solved_BS] = found.solution[..., 0].float()
    return solved_BS8


def serve(
    samples: Samples,
    keys: Keys,
    outputs: Sequence[ctypes.Structure],
    *,
    rows: Int64s | None = None,
    first: int,
    last: int,
    blending: Blending | None = None,
) -> None:
    """Make samples [first, last) of a batch, for all outputs.

    Sample b is written to row b of each output, or to row ``rows[b]``. The row is filled
    completely, and no other memory is written, except by ``blending``.

    Args:
        samples: the samples of the whole batch.
        keys: seed, visits and indices of the samples.
        outputs: results of ``describe_output``.
        rows: the row for each sample; None for row b.
        first: first sample to make.
        last: the sample after the last one.
        blending: rows to blend from these samples, as soon as they are made.

    Raises:
        CoreError: a sample has another shape after the steps, a step does not support it, or its
            file is damaged.
        MemoryError: there is no memory for an image.
        ValueError: a sample has no key, shape or row, or its row is outside of the memory.
    """
    count = _check_lengths(keys, samples.shapes_B3)
    row_address = None
    if rows is not None:
        rows = np.ascontiguousarray(rows, np.int64)
        row_address = rows.ctypes.data
    if len(samples.sources_B) != count or (rows is not None and len(rows) != count):
        given = f"{len(samples.sources_B)} addresses"
        given += "" if rows is None else f" and {len(rows)} rows to write to"
        raise ValueError(
            f"a batch of {count} samples came with {given}, but each sample needs one. "
            "Pass arrays of one length."
        )
    if not 0 <= first <= last <= count:
        raise ValueError(
            f"samples {first} to {last} are not a part of a batch of {count}. Pass numbers from 0 "
            f"to {count}, in order."
        )
    refusal = load().refusal()
    place = load().functions.fastdata_serve(
        samples.sources_B.ctypes.data,
        samples.shapes_B3.ctypes.data,
        *samples.files,
        keys.seed,
        keys.visits.ctypes.data,
        keys.indices.ctypes.data,
        row_address,
        ctypes.byref(outputs[0]) if len(outputs) == 1 else (load().output * len(outputs))(*outputs),
        len(outputs),
        first,
        last,
        None if blending is None else blending.address,
        refusal,
    )
    if place >= 0:
        raise _error_of(CoreError(place, refusal), count)


class Blending:
    """Rows of a batch, each mixed from two samples in the memory format of the output.

    Args:
        rows: records ``Blended``, in the order of ``after``. The core trusts their addresses.
        output: the batch, as returned by ``describe_output``.
        converts: True if samples are uint8 that the output's table converts; False if they are
            values in its dtype.
    """

    def __init__(self, rows: Array, output: ctypes.Structure, *, converts: bool) -> None:
        self.count = len(rows)
        self._record = np.zeros((), load().records["Blending"])
        self._record["output"] = ctypes.addressof(output)
        self._record["rows"] = rows.ctypes.data
        self._record["count"] = len(rows)
        self._record["converts"] = converts
        self._kept = rows, output  # the record points to them
        self.address: int = self._record.ctypes.data

    def write(self) -> None:
        """Write all rows.

        Raises:
            MemoryError: memory for the intermediate images cannot be allocated.
            ValueError: ``output`` has no row for a sample.
            CoreError: a box is not in the image.
        """
        refusal = load().refusal()
        place = load().functions.fastdata_blend(self.address, refusal)
        if place >= 0:
            raise _error_of(CoreError(place, refusal), self.count)


def _error_of(refused: CoreError, count: int) -> Exception:
    if refused.reason == "memory":
        return MemoryError(
            f"there is no memory for the intermediate images of sample {refused.place} of a batch"
        )
    if refused.reason == "row":
        row, rows_there = refused.numbers["row"], refused.numbers["rows"]
        return ValueError(
            f"sample {refused.place} of a batch of {count} must be written to row {row}, but the "
            f"memory for the batch has {rows_there} rows of its shape and dtype. Pass memory with "
            "a row for every sample."
        )
    return refused


def _check_lengths(keys: Keys, shapes_B3: Int32s) -> int:
    """Return the number of samples, after checking that each has one key and one shape."""
    count = len(keys.indices)
    if len(keys.visits) != count or shapes_B3.shape != (count, 3):
        raise ValueError(
            f"a batch of {count} indices came with {len(keys.visits)} visits and shapes "
            f"{shapes_B3.shape}, but every sample needs an index, a visit and a shape "
            "(channels, height, width). Pass arrays of one length."
        )
    return count
