"""Charts of docs/, and tables of README and docs/, made of benchmarks/results/: ``python benchmarks/figures.py``.

A page has a table between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "docs" / "charts"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(
    r"(?<=<!-- figures: )(?P<name>[\w-]+)(?P<open> -->\n).*?(?=<!-- end of figures -->)", re.DOTALL
)
COLOURS = ("#9aa5b1", "#2f7ed8", "#7cb5ec", "#e8b04b", "#d9673a")
FORMS = (
    "torchvision + torch, from files",
    "fastdata, 256x256 in memory",
    "fastdata, storage='none'",
)
ROW_PX, LABEL_PX, BARS_PX, FIGURE_PX = 15, 260, 380, 60

Group = tuple[str, list[tuple[str, float]]]  # its name; (what a bar is, its length)


def bars(title: str, unit: str, groups: Iterable[Group]) -> str:
    """An SVG of groups of horizontal bars from zero; a legend where bars of several groups have the same names."""
    groups = list(groups)
    names = list(dict.fromkeys(name for _, members in groups for name, _ in members))
    longest = max(length for _, members in groups for _, length in members)
    marks, y = [f'<text x="0" y="14" font-weight="bold">{escape(title)}, {unit}</text>'], 26
    for number, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        x, y = number % 3 * 230, y + (ROW_PX if number and number % 3 == 0 else 0)
        marks.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        marks.append(f'<text x="{x + 15}" y="{y + 9}">{escape(name)}</text>')
    y += 24
    for group, members in groups:
        marks.append(
            f'<text x="0" y="{y + ROW_PX * len(members) / 2 + 4:g}">{escape(group)}</text>'
        )
        for name, length in members:
            colour, width = COLOURS[names.index(name)], max(1, round(BARS_PX * length / longest))
            marks.append(
                f'<rect x="{LABEL_PX}" y="{y}" width="{width}" height="{ROW_PX - 3}" fill="{colour}"/>'
            )
            marks.append(f'<text x="{LABEL_PX + width + 5}" y="{y + 10}">{length:,.0f}</text>')
            y += ROW_PX
        y += ROW_PX // 2
    size = f'width="{LABEL_PX + BARS_PX + FIGURE_PX}" height="{y}"'
    style = 'font-family="sans-serif" font-size="11" fill="#808890"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *marks, "</svg>", ""]
    )


def medians(file: str) -> dict[str, dict[str, float]]:
    """Median of each row of each section."""
    sections: dict[str, dict[str, float]] = {}
    for row in json.loads((RESULTS / file).read_text("utf-8"))["figures"]:
        sections.setdefault(row["section"], {})[row["name"]] = row["median"]
    return sections


def recipes() -> str:
    groups = [
        (name, rows) for name, rows in medians("recipes.json").items() if set(FORMS) <= set(rows)
    ]
    return bars(
        "Recipes",
        "images/s",
        [(name, [(form, rows[form]) for form in FORMS]) for name, rows in groups],
    )


def larger_than_ram() -> str:
    rows = medians("chunked.json")["raw images, 4 GiB against 1 GiB: peak PSS of the process tree"]
    names = {
        "from disk, no limit": "all of it mapped, no limit",
        "in memory, a quarter of them": "a quarter of it in memory",
        "chunked": "ChunkedLoader, memory_limit='1GiB'",
    }
    groups = [(shown, [("4 GiB of raw images", rows[name])]) for name, shown in names.items()]
    return bars("Peak memory of the process tree", "MiB", groups)


def ranks() -> str:
    sections = [
        (name, rows)
        for name, rows in medians("ranks.json").items()
        if name.startswith("PSS of the tree")
    ]
    what = sections[0][0].rpartition(", ")[0]
    groups = [
        (f"{name.rpartition(', ')[2]}, ranks x workers", list(rows.items()))
        for name, rows in sections
    ]
    return bars(what, "MB", groups)


CHARTS_BY_NAME = {
    "recipes.svg": recipes,
    "larger-than-ram.svg": larger_than_ram,
    "ranks.svg": ranks,
}


def recipe_table() -> str:
    lines = [
        "| images/s | torchvision + torch, from files | fastdata, 256x256 in memory | | "
        'fastdata, `storage="none"` | |',
        "|---|---|---|---|---|---|",
    ]
    for name, rows in medians("recipes.json").items():
        if set(FORMS) <= set(rows):
            vanilla, memory, unkept = (rows[form] for form in FORMS)
            lines.append(
                f"| {name} | {vanilla:,.0f} | **{memory:,.0f}** | {memory / vanilla:.0f}x "
                f"| {unkept:,.0f} | {unkept / vanilla:.1f}x |"
            )
    return "\n".join(lines)


def limit_table() -> str:
    """Recipes without decoding, beside the least that they can cost."""
    lines = [
        "| images/s | a bare copy or conversion, 1 thread | fastdata, 1 thread | | 2 threads |",
        "|---|---|---|---|---|",
    ]
    for name, rows in medians("recipes.json").items():
        if "fastdata, 2 threads" in rows:
            bare = rows["the bare copy or conversion, 1 thread"]
            one = rows["fastdata, 1 thread"]
            two = rows["fastdata, 2 threads"]
            lines.append(f"| {name} | {bare:,.0f} | {one:,.0f} | {one / bare:.2f} | {two:,.0f} |")
    return "\n".join(lines)


def decode_table() -> str:
    """What decodes, beside torchvision and torch, and beside the bare decoder."""
    bare_row = "bare simplejpeg, whole images"
    lines = [
        "| images/s | torchvision + torch | fastdata | | bare simplejpeg, whole images | |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in medians("decode.json").items():
        vanilla = next((rate for row, rate in rows.items() if row.startswith("vanilla")), None)
        if "now" in rows and vanilla is not None:
            ours = rows["now"]
            bare = rows[bare_row]
            lines.append(
                f"| {name} | {vanilla:,.0f} | **{ours:,.0f}** | {ours / vanilla:.1f}x "
                f"| {bare:,.0f} | {ours / bare:.2f} |"
            )
    return "\n".join(lines)


def train_table() -> str:
    """Models alone, and fed by fastdata; the rest of a loop that is fed by torch is in docs/gpus.md."""
    sections = medians("gpu-train.json")
    lines = [
        "| images/s | the model alone | fed by fastdata | | its GPU waits | |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in sections.items():
        model, _, what = name.partition(": ")
        if what == "images trained on":
            alone = rows["the model alone, on one batch"]
            ours = rows["fastdata"]
            waits = sections[
                f"{model}: a step's time in which the GPU's stream waits for its batch"
            ]
            used = sections[f"{model}: utilisation by the driver"]
            lines.append(
                f"| {model} | {alone:,.0f} | **{ours:,.0f}** | {ours / alone:.2f} "
                f"| {waits['fastdata']:.2f} % of a step | {used['fastdata']:.1f} % utilised |"
            )
    return "\n".join(lines)


def bucket_table() -> str:
    """Bucketed batches, beside a bucket sampler by hand."""
    by_hand = "by hand: torchvision + torch"
    lines = [
        f'| images/s | {by_hand} | fastdata, in memory | | fastdata, `storage="none"` | |',
        "|---|---|---|---|---|---|",
    ]
    for name, rows in medians("buckets.json").items():
        hand = rows[by_hand]
        memory = rows["fastdata, in memory"]
        unkept = rows["fastdata, storage='none'"]
        lines.append(
            f"| {name} | {hand:,.0f} | **{memory:,.0f}** | {memory / hand:.0f}x "
            f"| {unkept:,.0f} | {unkept / hand:.1f}x |"
        )
    return "\n".join(lines)


def array_table() -> str:
    """Arrays that are no images, beside TensorDataset."""
    theirs = "TensorDataset, torch's loader"
    ours = "CachedDataset, fastdata's loader"
    lines = [f"| samples/s | {theirs} | {ours} | |", "|---|---|---|---|"]
    for name, rows in medians("arrays.json").items():
        ratio = rows[ours] / rows[theirs]
        lines.append(f"| {name} | {rows[theirs]:,.0f} | **{rows[ours]:,.0f}** | {ratio:.1f}x |")
    return "\n".join(lines)


TABLES = {
    "arrays": array_table,
    "buckets": bucket_table,
    "recipes": recipe_table,
    "limits": limit_table,
    "decode": decode_table,
    "train": train_table,
}


def with_tables(page: str) -> str:
    """The page's text with each table as the results have it."""
    return TABLE.sub(
        lambda match: f"{match['name']}{match['open']}{TABLES[match['name']]()}\n\n", page
    )


if __name__ == "__main__":
    for name, draw in CHARTS_BY_NAME.items():
        (CHARTS / name).write_text(draw(), "utf-8")
    for path in PAGES:
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
