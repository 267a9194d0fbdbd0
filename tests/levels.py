"""Compare the lower levels of instruction sets with the highest in each call of the core.

Every level gives the same bytes. While ``Levels`` are installed, each call of this process is repeated by the libraries
of all lower levels, on copies of its memory, and what they write is compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fastdata.pixels.core.library import ENDING, Core, load, open_library

__all__ = ["Levels", "lower_levels"]

Octets = np.ndarray[Any, np.dtype[np.uint8]]
FILLS = (0x00, 0xFF)
"""The memory of a call is filled with each of them in turn: afterwards both are equal only where the call wrote."""


def lower_levels(folder: Path) -> list[Core]:
    """Open the libraries of the levels below the one that this process uses, copied to ``folder``."""
    highest = Path(load().functions._name)
    cores = []
    for file in sorted(highest.parent.glob(f"core-level?{ENDING}")):
        if file.name < highest.name:
            (folder / file.stem).mkdir()
            (folder / file.stem / file.name).write_bytes(file.read_bytes())
            cores.append(open_library(folder / file.stem))
    return cores


class Levels:
    """Repeats the calls of the core by lower levels.

    Attributes:
        compares: False if records have infinities, from which levels may compute different numbers.
    """

    def __init__(self, lower: list[Core]) -> None:
        self._core, self._lower = load(), lower
        self._real: dict[str, Callable[..., Any]] = {}
        self.compares = True

    def install(self) -> None:
        for name in (
            "values",
            "draw",
            "equations",
            "serve",
            "blend",
            "jpeg_headers",
            "jpeg_decode",
        ):
            self._real[name] = getattr(self._core.functions, f"fastdata_{name}")
            setattr(self._core.functions, f"fastdata_{name}", getattr(self, f"_{name}"))

    def uninstall(self) -> None:
        for name, function in self._real.items():
            setattr(self._core.functions, f"fastdata_{name}", function)

    def _others(self, name: str) -> Iterable[Callable[..., Any]]:
        return [getattr(core.functions, f"fastdata_{name}") for core in self._lower]

    def _compare(self, what: str, found: Any, expected: Any) -> None:
        if isinstance(found, np.ndarray):
            found, expected = found.tobytes(), expected.tobytes()
        assert found == expected or not self.compares, (
            f"a lower level of instruction set gives another result than the highest: {what}"
        )

    # Each method has the arguments of the function of its name in records.h.

    def _values(self, table: int) -> None:
        there = octets(table, self._core.records["Table"].itemsize)
        before = there.copy()
        self._real["values"](table)
        for other in self._others("values"):
            again = before.copy()
            other(again.ctypes.data)
            self._compare("values", again, there)

    def _draw(self, *arguments: Any) -> int:
        *given, shapes, samples, ops, room, is_probe, refusal = arguments
        shapes_there, ops_there = (
            octets(shapes, 12 * samples),
            octets(ops, self._op_bytes * samples * room),
        )
        before = shapes_there.copy()
        drawn: int = self._real["draw"](*arguments)
        for other in self._others("draw"):
            written = []
            for fill in FILLS:
                shapes_again, ops_again = before.copy(), np.full_like(ops_there, fill)
                refused = self._core.refusal()
                addresses = shapes_again.ctypes.data, samples, ops_again.ctypes.data
                found = other(*given, *addresses, room, is_probe, refused)
                self._compare("count of draw", found, drawn)
                self._compare("refusal of draw", bytes(refused), bytes(refusal))
                if drawn >= 0:
                    self._compare("shapes of draw", shapes_again, shapes_there)
                written.append(ops_again)
            is_written = written[0] == written[1]
            if 0 <= drawn <= room:
                self._compare("draw", written[0][is_written], ops_there[is_written])
        return drawn

    @property
    def _op_bytes(self) -> int:
        return self._core.records["OP"].itemsize

    def _equations(self, ops: int, count: int, out: int) -> None:
        self._real["equations"](ops, count, out)
        for other in self._others("equations"):
            again = np.empty(count * 72 * 8, np.uint8)
            other(ops, count, again.ctypes.data)
            self._compare("equations", again, octets(out, len(again)))

    def _serve(self, *arguments: Any) -> int:
        *given, rows, outputs, count, first, last, blending, refusal = arguments
        place: int = self._real["serve"](*arguments)
        real = [outputs._obj] if count == 1 else list(outputs)
        served = range(first, last) if rows is None else numbers(rows, last)[first:].tolist()
        for other in self._others("serve"):
            copies = [Copy(output, served) for output in real]
            blended = (
                None
                if blending is None
                else BlendingCopy(self._core, blending, copies, (first, last))
            )
            again = (self._core.output * count)(*(copy.output for copy in copies))
            refused = self._core.refusal()
            address = None if blended is None else blended.address
            found = other(*given, rows, again, count, first, last, address, refused)
            self._compare("place of serve", found, place)
            self._compare("refusal of serve", bytes(refused), bytes(refusal))
            if place < 0:
                for copy in copies if blended is None else (*copies, blended.copy):
                    copy.compare(self._compare, "serve")
        return place

    def _blend(self, blending: int, refusal: Any) -> int:
        place: int = self._real["blend"](blending, refusal)
        for other in self._others("blend"):
            blended = BlendingCopy(self._core, blending, [], None)
            refused = self._core.refusal()
            self._compare("place of blend", other(blended.address, refused), place)
            self._compare("refusal of blend", bytes(refused), bytes(refusal))
            if place < 0:
                blended.copy.compare(self._compare, "blend")
        return place

    def _jpeg_headers(self, *arguments: Any) -> None:
        *given, count, upright, channels, most_pixels, shapes, turns = arguments
        self._real["jpeg_headers"](*arguments)
        for other in self._others("jpeg_headers"):
            again = np.empty(12 * count, np.uint8), np.empty(4 * count, np.uint8)
            addresses = [array.ctypes.data for array in again]
            other(*given, count, upright, channels, most_pixels, *addresses)
            self._compare("shapes of headers", again[0], octets(shapes, len(again[0])))
            self._compare("turns of headers", again[1], octets(turns, len(again[1])))

    def _jpeg_decode(self, *arguments: Any) -> int:
        *given, channels, height, width, out = arguments
        is_decoded: int = self._real["jpeg_decode"](*arguments)
        for other in self._others("jpeg_decode"):
            again = np.empty(channels * height * width, np.uint8)
            found = other(*given, channels, height, width, again.ctypes.data)
            self._compare("outcome of decode", found, is_decoded)
            if is_decoded:
                self._compare("decode", again, octets(out, len(again)))
        return is_decoded


class Copy:
    """A copy of an output's memory after a call, with each byte of the call's rows inverted: they must be rewritten."""

    def __init__(self, output: Any, rows: Iterable[int]) -> None:
        self._there = octets(output.out_B, output.out_bytes)
        self._row_bytes = output.out_bytes // max(output.rows, 1)
        self._rows = [row for row in rows if 0 <= row < output.rows]
        self.memory = self._there.copy()
        self.output = type(output).from_buffer_copy(output)
        self.output.out_B = self.memory.ctypes.data
        for row in self._rows:
            here = self.memory[row * self._row_bytes :][: self._row_bytes]
            np.invert(here, out=here)

    def moved(self, address: int) -> int:
        """Return the address in the copy for one in the output's memory; any other address is returned unchanged."""
        offset = address - self._there.ctypes.data
        return self.memory.ctypes.data + offset if 0 <= offset < len(self.memory) else address

    def compare(self, compare: Callable[[str, Any, Any], None], what: str) -> None:
        for row in self._rows:
            part = slice(row * self._row_bytes, (row + 1) * self._row_bytes)
            compare(f"row {row} of {what}", self.memory[part], self._there[part])


class BlendingCopy:
    """A ``Blending`` that reads from and writes to copies."""

    def __init__(
        self, core: Core, address: int, sources: list[Copy], served: tuple[int, int] | None
    ) -> None:
        self._record = record(core, "Blending", address, 1).copy()
        count = int(self._record["count"][0])
        self._rows = record(core, "Blended", int(self._record["rows"][0]), count).copy()
        output = core.output.from_address(int(self._record["output"][0]))
        first, last = served or (0, 1 << 62)
        is_made = (self._rows["after"] >= first) & (self._rows["after"] < last)
        self.copy = Copy(output, self._rows["row"][is_made].tolist())
        for name in ("own", "partner"):
            for source in sources:
                self._rows[name] = [source.moved(int(each)) for each in self._rows[name]]
        self._record["rows"] = self._rows.ctypes.data
        self._record["output"] = ctypes.addressof(self.copy.output)
        self.address = self._record.ctypes.data


def octets(address: int, size: int) -> Octets:
    """Return the memory at an address as an array."""
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def numbers(address: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return octets(address, 8 * count).view(np.int64)


def record(core: Core, name: str, address: int, count: int) -> np.ndarray[Any, Any]:
    dtype = core.records[name]
    return octets(address, dtype.itemsize * count).view(dtype)
