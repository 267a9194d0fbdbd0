"""How much faster are published scripts after a user has changed at most three lines, and what are users told?

    python benchmarks/ports.py [NAMES] [--workers 2] [--json benchmarks/results/ports.json]

Each file of ``benchmarks/ports/`` has the data code of a published script, rewritten with the same structure, and the
changes that a user makes. Both versions read one epoch with the same seed, so that labels and pixels can be compared.
Then they take turns; rates are of epochs after the first. Changed lines are counted by comparing the two sources.
"""

from __future__ import annotations

import difflib
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from _helper import Row, class_folders, datasets, in_turns, parser, print_rows, save_rows
from _port_data import write_files
from fastdata import FastDataWarning

PORTS = Path(__file__).parent / "ports"

# These files of CIFAR are synthetic, so their checksums differ from those of the published files.
datasets.cifar.check_integrity = lambda *_: True


@dataclass(kw_only=True)
class Port:
    """The outcome of one script.

    Attributes:
        lines: number of lines that a user changes.
        order: how labels, masks and other values compare with torch's, batch by batch.
        pixels: how images compare: "equal", the largest difference, or "drawn" if the transform draws random numbers.
        path: path in the loader's report.
        said: warnings and errors, in the order in which a user reads them.
    """

    name: str
    lines: int
    order: str = ""
    pixels: str = ""
    path: str = ""
    said: list[str] = field(default_factory=list)


def changed_source(source: str, changes: dict[str, str]) -> str:
    """Return a script after the user's changes.

    Raises:
        ValueError: the old text of a change is not in exactly one place.
    """
    head, mark, tail = source.partition("CHANGES = {")
    table, end, code = tail.partition("\n}\n")
    for old, new in changes.items():
        if head.count(old) + code.count(old) != 1:
            raise ValueError(f"{old!r} is in the script {head.count(old) + code.count(old)} times")
        head, code = head.replace(old, new), code.replace(old, new)
    return "".join((head, mark, table, end, code))


def count_lines(before: str, after: str) -> int:
    """Return how many lines differ; a line that replaces another one counts once."""
    pairs = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return sum(
        max(last - first, end - start)
        for kind, first, last, start, end in pairs.get_opcodes()
        if kind != "equal"
    )


def load_both(name: str, folder: Path) -> tuple[ModuleType, ModuleType, int]:
    """Import a script as it was published, and as a user changes it."""
    before = (PORTS / f"{name}.py").read_text("utf-8")
    (folder / f"original_{name}.py").write_text(before, "utf-8")
    original = importlib.import_module(f"original_{name}")
    after = changed_source(before, original.CHANGES)
    (folder / f"changed_{name}.py").write_text(after, "utf-8")
    importlib.invalidate_caches()
    changed = importlib.import_module(f"changed_{name}")
    return original, changed, count_lines(before, after)


def seeded_epoch(loader: Any, script: ModuleType) -> list[Any]:
    torch.manual_seed(1)
    np.random.seed(1)
    return list(map(getattr(script, "unpack", lambda batch: batch), loader))


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the tensors and other values of a batch."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            yield from leaves(part)
    else:
        yield batch if isinstance(batch, torch.Tensor) else torch.as_tensor(batch)


def compare(ours: list[Any], theirs: list[Any], is_drawn: bool) -> tuple[str, str]:
    """Return how the labels and other values of two epochs compare, and how their images compare."""
    if len(ours) != len(theirs):
        return f"{len(ours)} batches, torch has {len(theirs)}", ""
    largest, count, images = 0.0, 0, 0
    are_alike = True
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for ours_part, theirs_part in zip(leaves(one), leaves(other), strict=True):
            if ours_part.shape != theirs_part.shape or ours_part.dtype != theirs_part.dtype:
                return f"batch {number} has another form", ""
            if ours_part.ndim == 4:
                largest = max(largest, float((ours_part - theirs_part).abs().max()))
                differ = ours_part.flatten(1).mean(1) - theirs_part.flatten(1).mean(1)
                are_alike &= bool((differ.abs() < 0.01).all())
                images += len(ours_part)
            elif not torch.equal(ours_part, theirs_part):
                return f"batch {number} has other values", ""
            else:
                count += ours_part.numel()
    pixels = "drawn" if is_drawn else f"differ by up to {largest:.3g}" if largest else "equal"
    if not count:  # a flip or a small shift hardly changes a mean
        return f"{'equal' if are_alike else 'other'} means of {images} images", pixels
    return f"equal, {count} values", pixels


def images_in(batch: Any) -> int:
    return len(next(leaves(batch)))


def rate(loader: Any, seconds: float) -> float:
    """Return samples a second of whole epochs, for at least some seconds."""
    samples, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or not samples:
        samples += sum(map(images_in, loader))
    return samples / passed


def measure(name: str, root: Path, options: Any) -> tuple[Port, list[Row]]:
    with tempfile.TemporaryDirectory(prefix="fastdata-ports-") as folder:
        sys.path.insert(0, folder)
        try:
            original, changed, lines = load_both(name, Path(folder))
        finally:
            sys.path.remove(folder)
    port = Port(name=name, lines=lines)
    theirs = original.make_loader(root, options.workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ours = changed.make_loader(root, options.workers)
            epoch = seeded_epoch(ours, changed)
        except Exception as error:  # noqa: BLE001  # what a user reads is the result
            port.said.append(f"{type(error).__name__}: {error}")
            return port, []
        if hasattr(changed, "train") and find_spec("keras"):
            changed.train(ours)
    told = (each for each in caught if issubclass(each.category, FastDataWarning))
    port.said += dict.fromkeys(str(each.message) for each in told)
    port.path = ours.report().path
    is_drawn = getattr(original, "IS_DRAWN", True)
    port.order, port.pixels = compare(epoch, seeded_epoch(theirs, original), is_drawn)
    del epoch
    rates = in_turns(
        {
            "torch": lambda: rate(theirs, options.seconds),
            "fastdata": lambda: rate(ours, options.seconds),
        },
        options.rounds,
    )
    rows = [
        Row(section=name, name="torch", unit="images/s", rounds=rates["torch"]),
        Row(
            section=name,
            name="fastdata",
            unit="images/s",
            rounds=rates["fastdata"],
            against="torch",
            target="5 x",
        ),
    ]
    return port, rows


def main() -> None:
    """Measure the ports that were named, or all."""
    made = parser(str(__doc__).splitlines()[0])
    known = sorted(path.stem for path in PORTS.glob("*.py"))
    made.add_argument("names", nargs="*", help=f"ports to run, of {', '.join(known)}; default: all")
    made.add_argument("--workers", type=int, default=2, help="workers of both loaders")
    made.add_argument(
        "--seconds", type=float, default=2.0, help="least length of a round in seconds"
    )
    made.add_argument("--count", type=int, default=500, help="number of photographs")
    made.add_argument(
        "--cifar-count", type=int, default=10_000, help="number of images of each CIFAR"
    )
    options = made.parse_args()
    ports: list[Port] = []
    rows: list[Row] = []
    with (
        class_folders(options.images, count=options.count) as (photos, which),
        tempfile.TemporaryDirectory(prefix="fastdata-ports-") as folder,
    ):
        write_files(photos, Path(folder), cifar_count=options.cifar_count)
        for name in options.names or known:
            port, figures = measure(name, Path(folder), options)
            ports.append(port)
            rows += figures
            print(json.dumps(asdict(port), indent=1), flush=True)
    print_rows(rows)
    save_rows(
        rows,
        options.json,
        images=which,
        workers=options.workers,
        ports=[asdict(port) for port in ports],
    )


if __name__ == "__main__":
    main()
