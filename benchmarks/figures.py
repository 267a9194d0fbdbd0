"""Write the charts of docs/, and the tables of README and docs/, from the figures in benchmarks/results/.

Run ``python benchmarks/figures.py``. A table is between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` of
a page; ``_tables.TABLES`` has the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from _tables import CROP, FORMS, MEMORY, TABLES, VANILLA, medians, rank_sections

ROOT = Path(__file__).parents[1]
CHARTS = ROOT / "docs" / "charts"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(
    r"(?<=<!-- figures: )(?P<name>[\w-]+)(?P<open> -->\n).*?(?=<!-- end of figures -->)", re.DOTALL
)
COLOURS = ("#9aa5b1", "#2f7ed8", "#7cb5ec", "#e8b04b", "#d9673a")
ROW_PX, LABEL_PX, BARS_PX, FIGURE_PX = 15, 260, 380, 60
TALL_PX, NAMES_PX = 24, 150

Group = tuple[str, list[tuple[str, float]]]  # name of a group; (name, length) of each of its bars


def bars(title: str, unit: str, groups: Iterable[Group]) -> str:
    """Return an SVG of groups of horizontal bars from zero, with a legend of the names of the bars."""
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


def ranking(title: str, rows: list[tuple[str, float]]) -> str:
    """Return an SVG with a bar for each row; the last bar, which is fastdata's, is in colour."""
    longest = max(length for _, length in rows)
    marks = [f'<text x="0" y="16" font-weight="bold">{escape(title)}</text>']
    y = 32
    for name, length in rows:
        is_ours = (name, length) == rows[-1]
        width = max(2, round(BARS_PX * length / longest))
        colour = COLOURS[1] if is_ours else COLOURS[0]
        middle = y + TALL_PX / 2 + 4
        marks.append(f'<text x="0" y="{middle:g}">{escape(name)}</text>')
        marks.append(
            f'<rect x="{NAMES_PX}" y="{y}" width="{width}" height="{TALL_PX - 6}" fill="{colour}"/>'
        )
        weight = ' font-weight="bold"' if is_ours else ""
        marks.append(
            f'<text x="{NAMES_PX + width + 6}" y="{middle:g}"{weight}>{length:.2g}x</text>'
        )
        y += TALL_PX
    size = f'width="{NAMES_PX + BARS_PX + FIGURE_PX}" height="{y}"'
    style = 'font-family="sans-serif" font-size="13" fill="#808890"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *marks, "</svg>", ""]
    )


def peers() -> str:
    found = medians("recipes.json")[CROP]
    shown = {
        VANILLA: "torchvision + torch",
        "DALI, 256x256 in memory": "DALI, on the CPU",
        "FFCV, 256x256 mapped, area filter": "FFCV",
        "TurboLoader, 256x256, no antialias": "TurboLoader",
        MEMORY: "fastdata",
    }
    title = "RandomResizedCrop, flip, float32: times as fast as torchvision + torch"
    rows = sorted(((label, found[name]) for name, label in shown.items()), key=lambda row: row[1])
    return ranking(title, [(label, value / found[VANILLA]) for label, value in rows])


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
    groups = [
        (f"{number} rank{'s' * (number != '1')}, 2 workers each", list(found.items()))
        for number, found in rank_sections().items()
    ]
    return bars("Memory of all processes, for 1 GB of samples", "MB", groups)


CHARTS_BY_NAME = {
    "peers.svg": peers,
    "recipes.svg": recipes,
    "larger-than-ram.svg": larger_than_ram,
    "ranks.svg": ranks,
}


def with_tables(page: str) -> str:
    """Return the text of a page with new tables."""
    return TABLE.sub(
        lambda match: f"{match['name']}{match['open']}{TABLES[match['name']]()}\n\n", page
    )


if __name__ == "__main__":
    for name, draw in CHARTS_BY_NAME.items():
        (CHARTS / name).write_text(draw(), "utf-8")
    for path in PAGES:
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
