"""Make tables of Markdown from benchmarks/results/; ``figures.py`` writes them into the pages."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PORTS = Path(__file__).parent / "ports"
VANILLA, MEMORY, UNKEPT = FORMS = (
    "torchvision + torch, from files",
    "fastdata, 256x256 in memory",
    "fastdata, storage='none'",
)
CROP = "RandomResizedCrop, flip"


def medians(file: str) -> dict[str, dict[str, float]]:
    """Return the median of each row of each section of a file in ``results/``."""
    sections: dict[str, dict[str, float]] = {}
    for row in json.loads((RESULTS / file).read_text("utf-8"))["figures"]:
        sections.setdefault(row["section"], {})[row["name"]] = row["median"]
    return sections


def table(header: Iterable[str], rows: Iterable[Iterable[str]], file: str) -> str:
    """Return a table of Markdown, and a line that names the file, the date and the machine of its figures."""
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    shown = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{shown}\n\n{source(file)}"


def source(file: str) -> str:
    """Return a line that names the date and the machine of a measurement, and the file of its figures."""
    document = json.loads((RESULTS / file).read_text("utf-8"))
    facts = document["settings"]
    machine = document["machine"]
    cores = f"{machine['usable_cores']} cores of {machine['cpu_model'].replace('(R)', '')}"
    gpu = f"{facts['gpu']}, " if "gpu" in facts else ""
    return f"Measured on {facts['date']}: {gpu}{cores} (`benchmarks/results/{file}`)."


def rate(value: float) -> str:
    return f"{value:,.0f}"


def times(value: float) -> str:
    """Return a ratio as text, such as 51x or 3.2x."""
    return f"{value:.0f}x" if value >= 20 else f"{value:.1f}x"


def recipe_table() -> str:
    header = [
        "recipe",
        "torchvision + torch",
        "fastdata, images kept at 256x256",
        "speedup",
        "fastdata, nothing kept",
        "speedup, nothing kept",
    ]
    rows = []
    for name, found in medians("recipes.json").items():
        if set(FORMS) <= set(found):
            vanilla, memory, unkept = (found[form] for form in FORMS)
            rows.append(
                [
                    name,
                    rate(vanilla),
                    f"**{rate(memory)}**",
                    times(memory / vanilla),
                    rate(unkept),
                    times(unkept / vanilla),
                ]
            )
    return table(header, rows, "recipes.json")


def peer_table() -> str:
    """Compare the crop recipe of all loaders with torchvision and torch in the same run."""
    found = medians("recipes.json")[CROP]
    rows = [
        [name, times(value / found[VANILLA])]
        for name, value in sorted(found.items(), key=lambda row: -row[1])
    ]
    return table(["loader", "times as fast as torchvision + torch"], rows, "recipes.json")


def limit_table() -> str:
    """Compare recipes without decoding with a bare copy or conversion, which is the limit."""
    header = [
        "recipe",
        "a bare copy or conversion, 1 thread",
        "fastdata, 1 thread",
        "share of the bare one",
        "fastdata, 2 threads",
    ]
    rows = []
    for name, found in medians("limits.json").items():
        bare = found.get("the bare copy or conversion, 1 thread")
        if bare is None:
            continue
        one = found["fastdata, 1 thread"]
        rows.append(
            [name, rate(bare), rate(one), f"{one / bare:.2f}", rate(found["fastdata, 2 threads"])]
        )
    return table(header, rows, "limits.json")


def decode_table() -> str:
    """Compare first epochs with torchvision and torch, and with the bare decoder."""
    header = [
        "what",
        "torchvision + torch",
        "fastdata",
        "speedup",
        "simplejpeg alone, whole images",
        "share of that",
    ]
    rows = []
    for name, found in medians("decode.json").items():
        if name.startswith("first epoch"):
            vanilla = next(value for row, value in found.items() if row.startswith("vanilla"))
            ours = found["now"]
            bare = found["bare simplejpeg, whole images"]
            rows.append(
                [
                    name,
                    rate(vanilla),
                    f"**{rate(ours)}**",
                    times(ours / vanilla),
                    rate(bare),
                    f"{ours / bare:.2f}",
                ]
            )
    return table(header, rows, "decode.json")


def versus_table(file: str, what: str, base: str, ours: str, more: str = "") -> str:
    """Return a table with a row for each section of a file.

    Args:
        file: file in ``results/``.
        what: title of the column of sections.
        base: name of the row to compare with.
        ours: name of fastdata's row.
        more: name of another row of fastdata; empty for none.
    """
    header = [what, base, ours, "speedup", *([more, f"speedup, {more}"] if more else [])]
    rows = []
    for name, found in medians(file).items():
        if base in found and ours in found:
            cells = [name, rate(found[base]), f"**{rate(found[ours])}**"]
            cells.append(times(found[ours] / found[base]))
            if more:
                cells += [rate(found[more]), times(found[more] / found[base])]
            rows.append(cells)
    return table(header, rows, file)


def bucket_table() -> str:
    return versus_table(
        "buckets.json",
        "recipe, images/s",
        "by hand: torchvision + torch",
        "fastdata, in memory",
        "fastdata, storage='none'",
    )


def array_table() -> str:
    theirs, ours = "TensorDataset, torch's loader", "CachedDataset, fastdata's loader"
    return versus_table("arrays.json", "arrays, samples/s", theirs, ours)


def albumentations_table() -> str:
    theirs = "albumentations + torch, from files"
    return versus_table(
        "albumentations_recipes.json", "recipe, images/s", theirs, "fastdata, albumentations"
    )


def mixing_table() -> str:
    """Compare MixUp and CutMix that fastdata runs with the batch, and that it calls as a function."""
    rows = []
    for section, found in medians("mixing.json").items():
        plain = found["without mixing"]
        for name, value in found.items():
            if f"{name}, called" in found:
                called = found[f"{name}, called"]
                rows.append(
                    [
                        f"{section}: {name}",
                        rate(plain),
                        f"**{rate(value)}**",
                        rate(called),
                        times(value / called),
                    ]
                )
    header = ["images per CPU second", "without mixing", "mixed by fastdata"]
    return table(
        [*header, "not recognised", "mixed by fastdata / not recognised"], rows, "mixing.json"
    )


def codec_table() -> str:
    found = medians("codecs.json")["photographs, 500 of 3 x 256 x 256 uint8"]
    rows = [
        [f'`"{codec}"`', f"{found[f'{codec}: ratio']:.1f}", rate(found[f"{codec}: decode"])]
        for codec in ("lz4", "zstd", "jpeg")
    ]
    header = ["codec", "times smaller than raw", "images/s, decoded by one CPU core"]
    return table(header, rows, "codecs.json")


RANK_FORMS = {
    "bare processes": "processes without data",
    "fastdata": "fastdata",
    "fastdata, share='off'": "fastdata, a copy for each rank",
    "a list of arrays, forked workers": "plain list of arrays, forked workers",
    "a list of arrays, forkserver": "plain list of arrays, forkserver workers",
}
"""Rows of ``ranks.json``, with their names in the table and in the chart."""


def rank_sections() -> dict[str, dict[str, float]]:
    """Return the memory of all processes in MB, by the number of ranks and the way to hold the samples."""
    return {
        name.rpartition(", ")[2].split()[0]: {RANK_FORMS[form]: mb for form, mb in found.items()}
        for name, found in medians("ranks.json").items()
        if name.startswith("PSS of the tree")
    }


def rank_table() -> str:
    shown = RANK_FORMS.values()
    rows = [
        [ranks, *(rate(found[name]) if name in found else "out of memory" for name in shown)]
        for ranks, found in rank_sections().items()
    ]
    return table(["ranks (other columns: MB)", *shown], rows, "ranks.json")


def chunked_table() -> str:
    """Compare rates and peaks of memory of data that are larger than the limit."""
    sections = medians("chunked.json")
    shown = {
        "chunked": "`ChunkedLoader`",
        "chunked, page cache emptied": "`ChunkedLoader`",
        "from disk, no limit": "`DataLoader`, no limit",
        "in memory, a quarter of them": "`DataLoader` over a quarter of the images (1 GiB), all in memory",
        "chunked, decoded by 2 processes": "`ChunkedLoader`",
        "chunked, decoded by 2 threads": "`ChunkedLoader`",
        "torch and torchvision, 2 workers": "torchvision + torch",
    }
    what = {
        "raw images, 4 GiB against 1 GiB": "raw, in the page cache",
        "raw images, 4 GiB against 1 GiB, read from the disk each epoch": "raw, read from the disk",
        "JPEGs of a folder, decoded each epoch, against 1 GiB, batch 64": "JPEG files, decoded",
    }
    rows = [
        [shown_section, label, rate(sections[name][row]), rate(peaks[row])]
        for name, shown_section in what.items()
        for peaks in [sections[f"{name}: peak PSS of the process tree"]]
        for row, label in shown.items()
        if row in sections[name]
    ]
    header = ["files", "read by", "images/s", "most memory, MiB"]
    return table(header, rows, "chunked.json")


def tune_table() -> str:
    """Compare the choices of tune and of loadtune with the best of all settings."""
    rows = []
    sections = medians("tune.json")
    for name, found in sections.items():
        best = next((row for row in found if row.startswith("best of all")), None)
        if best is not None:
            chosen = [
                value for row, value in found.items() if row.startswith(("tune:", "tune again"))
            ]
            other = next(value for row, value in found.items() if row.startswith("loadtune:"))
            seconds = sections[f"{name}: seconds to choose"]
            setting = best.partition(": ")[2]
            rows.append(
                [
                    name,
                    setting if setting == "no workers" else setting.replace("workers", "processes"),
                    rate(found[best]),
                    " and ".join(f"{value / found[best]:.2f}" for value in chosen),
                    f"{other / found[best]:.2f}",
                    f"{seconds['all 31 settings']:.0f}",
                    f"{seconds['tune, twice']:.0f}",
                    f"{seconds['loadtune']:.1f}",
                ]
            )
    header = [
        "dataset",
        "best of 31 settings",
        "its samples/s",
        "rate of two choices of tune, share of the best",
        "rate of loadtune's choice, share of the best",
        "seconds for all 31 settings",
        "seconds for tune",
        "seconds for loadtune",
    ]
    return table(header, rows, "tune.json")


def port_table() -> str:
    """Compare published scripts before and after the change, the largest gain first."""
    found = medians("ports.json")
    settings = json.loads((RESULTS / "ports.json").read_text("utf-8"))["settings"]
    measured, refused = [], []
    for port in settings["ports"]:
        what = f"{_data_of(port['name'])} | {port['lines']}"
        if port["name"] not in found:
            refused.append([what, "", "refused", ""])
            continue
        torch, ours = (found[port["name"]][row] for row in ("torch", "fastdata"))
        measured.append(
            (ours / torch, [what, rate(torch), f"**{rate(ours)}**", times(ours / torch)])
        )
    rows = [row for _, row in sorted(measured, reverse=True)] + refused
    header = ["data of", "changed lines", "torch, images/s", "fastdata, images/s", "speedup"]
    return table(header, rows, "ports.json")


def _data_of(name: str) -> str:
    """Return the first line of a port's docstring, without the words that all of them begin with."""
    source = (PORTS / f"{name}.py").read_text("utf-8")
    line = str(ast.get_docstring(ast.parse(source))).partition("\n")[0]
    return line.removeprefix("The data of ").removesuffix(".").replace("``", "`")


def train_table() -> str:
    """Compare models on one batch with models fed by fastdata, in two runs."""
    first, again = medians("gpu-train.json"), medians("gpu-train_again.json")
    alone, ours = "the model alone, on one batch", "fastdata"
    rows = []
    for name, found in first.items():
        model, _, what = name.partition(": ")
        if what == "images trained on":
            waits = first[f"{model}: a step's time in which the GPU's stream waits for its batch"]
            used = first[f"{model}: utilisation by the driver"]
            second = again.get(name)
            rows.append(
                [
                    model,
                    rate(found[alone]),
                    f"**{rate(found[ours])}**",
                    f"{found[ours] / found[alone]:.2f}",
                    "" if second is None else f"{second[ours] / second[alone]:.2f}",
                    f"{waits[ours]:.2f} %",
                    f"{used[ours]:.1f} %",
                ]
            )
    header = [
        "model",
        "model alone, images/s",
        "fed by fastdata, images/s",
        "share",
        "share in a second run",
        "time that the GPU waits",
        "GPU in use",
    ]
    return table(header, rows, "gpu-train.json")


def feed_table() -> str:
    """Compare how many images a second each way of loading brings to the GPU, without a model."""
    shown = {
        "torchvision and torch": "torchvision + torch, 16 workers",
        "the same, floats made on the GPU": "the same, floats made on the GPU",
        "the same, decoded on the GPU": "the same, JPEG files decoded on the GPU",
        "fastdata": "fastdata, images decoded before",
    }
    found = medians("gpu-train.json")["loaders alone, batches on the GPU"]
    rows = [[label, rate(found[name])] for name, label in shown.items()]
    return table(["way of loading, no model", "images/s"], rows, "gpu-train.json")


def transfer_table() -> str:
    """Compare how long a step waits for its batch of 38 MiB, by the way in which batches come to the GPU."""
    sections = medians("gpu-transfer.json")
    busy, launching = "busy", "launch-bound"
    shown = {
        "on the GPU already": "on the GPU already",
        "prefetcher, gathered by threads": "`CudaPrefetcher`, loader of fastdata",
        "prefetcher, pinned batches": "`CudaPrefetcher`, other loader, pinned",
        "prefetcher, pageable batches": "`CudaPrefetcher`, other loader, not pinned",
        "to(device, non_blocking), pinned": "`.to(device, non_blocking=True)`, pinned",
        "to(device), pageable": "`.to(device)`, not pinned",
    }
    rows = [
        [
            label,
            f"{sections[f'the wait of a {busy} step for its batch of 38 MiB'][name]:.3f}",
            *(
                f"{sections[f'the length of a {kind} step'][name]:.1f}"
                for kind in (busy, launching)
            ),
        ]
        for name, label in shown.items()
    ]
    header = [
        "how the batch comes",
        "a busy step waits, ms",
        "length of a busy step, ms",
        "length of a step of 400 tiny kernels, ms",
    ]
    return table(header, rows, "gpu-transfer.json")


TABLES = {
    "albumentations": albumentations_table,
    "arrays": array_table,
    "buckets": bucket_table,
    "chunked": chunked_table,
    "codecs": codec_table,
    "decode": decode_table,
    "feed": feed_table,
    "limits": limit_table,
    "mixing": mixing_table,
    "peers": peer_table,
    "ports": port_table,
    "ranks": rank_table,
    "recipes": recipe_table,
    "train": train_table,
    "transfer": transfer_table,
    "tune": tune_table,
}
