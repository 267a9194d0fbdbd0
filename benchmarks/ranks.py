"""Do the ranks of one machine hold one copy of the samples, and prepare them once?

torchrun starts 1, 2, 4 and 8 ranks with 2 worker processes each over the same raw samples. Every rank reads all of
them, as it would over several epochs. Then, while all processes are alive, their PSS is added up: torchrun, ranks and
workers. For comparison, bare processes make the same imports, join the group and fork 2 workers that wait. Cases that
do not fit into the free memory are left out. Preparing and attaching are timed between barriers of the ranks, without
their start.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import _rank
from _helper import (
    Row,
    class_folders,
    in_turns,
    link_files,
    on_ranks,
    parser,
    print_rows,
    save_rows,
)
from _rank import BARE, BATCH, FORMS, SAMPLE_BYTES, SHARED, SIDE_PX, WORKERS
from fastdata.machine.limits import available_bytes
from fastdata.machine.units import format_bytes

MB = 1e6


def memory(folder: Path, count: int, ranks: list[int]) -> list[Row]:
    """Measure the PSS of the process tree for each number of ranks."""
    raw_bytes, rows, launchers = count * SAMPLE_BYTES, [], []
    for number in ranks:
        section = f"PSS of the tree, {raw_bytes / 1e9:.2f} GB of raw samples, {number} x {WORKERS}"
        most_mb = 1.05 * raw_bytes / MB + 250 * number
        bare_bytes = 0
        for name, form in FORMS.items():
            need_bytes = 1.1 * (
                bare_bytes + (form.copies + form.copies_per_rank * number) * raw_bytes
            )
            free_bytes = available_bytes().bytes
            if need_bytes > free_bytes:
                words = f"up to {format_bytes(int(need_bytes))} of {format_bytes(free_bytes)} free"
                print(f"{section}: {name} left out, {words}", file=sys.stderr)
                continue
            found = on_ranks(number, _rank.__file__, "memory", folder, "--form", name)
            bare_bytes = found["tree_bytes"] if name == BARE else bare_bytes
            row = partial(
                Row, section=section, name=name, unit="MB", rounds=(found["tree_bytes"] / MB,)
            )
            rows.append(row(target=f"{most_mb:,.0f} MB at most" if name == SHARED else ""))
            if name == SHARED:
                own = partial(
                    Row,
                    section="of it torchrun itself, with fastdata",
                    name=f"{number} x {WORKERS}",
                )
                launchers.append(own(unit="MB", rounds=(found["launcher_bytes"] / MB,)))
    return [*rows, *launchers]


def preparing(folder: Path, count: int, rounds: int) -> list[Row]:
    """Compare preparing by one rank and by two ranks on the same cores."""
    competitors = {
        f"{ranks} rank{'s' * (ranks > 1)}": partial(
            on_ranks, ranks, _rank.__file__, "preparing", folder
        )
        for ranks in (1, 2)
    }
    row = partial(
        Row, section=f"preparing {count:,} photographs on all cores", unit="s", against="1 rank"
    )
    return [
        row(name=name, rounds=figures) for name, figures in in_turns(competitors, rounds).items()
    ]


def attaching(folder: Path, count: int, rounds: int) -> list[Row]:
    """Measure how long the second rank needs for its dataset after the first rank has prepared."""
    seconds = on_ranks(2, _rank.__file__, "attaching", folder, "--rounds", rounds)
    section = f"the dataset of a late rank, {count:,} photographs that are prepared"
    return [
        Row(
            section=section,
            name="construction",
            unit="ms",
            rounds=tuple(1000 * each for each in seconds),
        )
    ]


SECTIONS = ("memory", "preparing", "attaching")


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--gigabytes",
        type=float,
        default=1.0,
        help="size of the raw samples whose memory is measured, in 10^9 bytes",
    )
    options.add_argument("--count", type=int, default=2000, help="number of photographs to prepare")
    options.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of ranks, for memory"
    )
    options.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to run"
    )
    chosen = options.parse_args()
    rows: list[Row] = []
    count = round(chosen.gigabytes * 1e9 / SAMPLE_BYTES)
    if "memory" in chosen.sections:
        with (
            class_folders(None, count=50, size=(SIDE_PX, SIDE_PX)) as (few, _),
            TemporaryDirectory(dir=few) as linked,
        ):
            link_files(few, Path(linked), count)
            rows += memory(Path(linked), count, chosen.ranks)
    if {"preparing", "attaching"} & set(chosen.sections):
        with (
            class_folders(chosen.images, count=200) as (few, _),
            TemporaryDirectory(dir=few) as linked,
        ):
            link_files(few, Path(linked), chosen.count)
            for name, measure in (("preparing", preparing), ("attaching", attaching)):
                if name in chosen.sections:
                    rows += measure(Path(linked), chosen.count, chosen.rounds)
    print_rows(rows)
    save_rows(
        rows,
        chosen.json,
        gigabytes=chosen.gigabytes,
        count=chosen.count,
        rounds=chosen.rounds,
        batch=BATCH,
    )


if __name__ == "__main__":
    main()
