"""Does tune find settings nearly as good as the best, in a third of the time that trying all of them takes?

Five synthetic datasets wait for different things. The exhaustive search measures every setting of a grid once, as
long as a probe of tune. Its three fastest settings are then measured again, longer, in turns with the settings that
tune chose from the same grid in two runs, and with those that the package loadtune chose, in torch's loader (which it
tunes) and in ours. So the best is the fastest of several settings, measured next to the others by a plain loop. All
loops are empty, read endlessly shuffled samples, and run in their own processes.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from _helper import Row, in_turns, parser, print_rows, save_rows
from _loaders import LOADERS, Synthetic
from fastdata import DataLoader, tune
from fastdata.tools.measure import in_subprocess, shuffled
from fastdata.tools.measure import measure_rate as probe

GRID = {
    "num_workers": (0, 1, 2, 4, 8, 16),
    "workers": ("auto", "thread"),
    "prefetch_factor": (2, 4, 8),
}
LIMIT_S = 120.0
RUNS = 2  # of tune
STEPS = {"loadtune": 100, "loadtune, 20 steps": 20}  # its default, and its only knob for time

Settings = dict[str, Any]


class Chosen(NamedTuple):
    """Settings that were chosen, and the loader and the number of torch's threads with which they are measured."""

    settings: Settings
    loader: type[TorchDataLoader[Any]]
    num_threads: int | None = None

    def __str__(self) -> str:
        if not self.settings["num_workers"]:
            return "no workers"
        kind = "threads" if self.settings.get("workers") == "thread" else "workers"
        kind = kind[:-1] if self.settings["num_workers"] == 1 else kind
        return f"{self.settings['num_workers']} {kind}, prefetch {self.settings.get('prefetch_factor', 2)}"

    def probed(self, dataset: Synthetic, window_s: float) -> float:
        """Return the rate, measured as tune measures it."""
        return in_subprocess(
            lambda: probe(self.over(dataset), seconds=window_s),
            limit_s=LIMIT_S,
        )

    def counted(self, dataset: Synthetic, window_s: float) -> float:
        """Return the rate of a plain loop, which would show an error in tune's own measurement."""
        return in_subprocess(partial(self._count, dataset, window_s), limit_s=LIMIT_S)

    def over(self, dataset: Synthetic) -> TorchDataLoader[Any]:
        order = shuffled(dataset)
        return self.loader(dataset, batch_size=dataset.batch_size, sampler=order, **self.settings)

    def _count(self, dataset: Synthetic, window_s: float) -> float:
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        loader = self.over(dataset)
        batches, begun, served = iter(loader), time.perf_counter(), 0
        # The batches that were read ahead while workers started do not count.
        for _ in range(1 + loader.num_workers * (1 + (loader.prefetch_factor or 0))):
            next(batches)
            if time.perf_counter() - begun > window_s:
                break
        begun = time.perf_counter()
        while time.perf_counter() - begun < window_s:
            next(batches)
            served += 1
        return served * dataset.batch_size / (time.perf_counter() - begun)


def cells() -> list[Settings]:
    """Return all settings of the grid; without workers their kind and prefetch_factor make no difference."""
    rows = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    return [{"num_workers": 0}, *(row for row in rows if row["num_workers"])]


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return action(), time.perf_counter() - start


def search(dataset: Synthetic, window_s: float) -> list[tuple[Chosen, float]]:
    """Return all settings with their rates, the fastest first."""
    found = [Chosen(settings, DataLoader) for settings in cells()]
    rates = [(chosen, chosen.probed(dataset, window_s)) for chosen in found]
    return sorted(rates, key=lambda each: -each[1])


def ask_loadtune(dataset: Synthetic, steps: int) -> tuple[Settings, int | None, int]:
    """Return the loader options and threads that loadtune recommends, and the number of its measurements."""
    loadtune: Any = importlib.import_module("loadtune")
    workload = loadtune.Workload(
        name=type(dataset).__name__,
        make_dataset=lambda: dataset,
        make_model=lambda: torch.nn.Linear(1, 1),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        train_step=lambda *_: torch.zeros(()),
        default_batch_size=dataset.batch_size,
    )
    found = loadtune.tune(workload, steps=steps, warmup=steps // 10, verbose=False)
    knobs = found.best.knobs if found.best and found.speedup > 1 else loadtune.Knobs()
    return knobs.loader_kwargs(), knobs.num_threads, 1 + len(found.trials)


def measure(
    name: str, dataset: Synthetic, given: Any, has_loadtune: bool
) -> tuple[list[Row], dict[str, Any]]:
    ranked, exhaustive_s = timed(partial(search, dataset, given.window))
    exhaustive = f"all {len(ranked)} settings"
    seconds = {exhaustive: [exhaustive_s]}
    choices = {f"place {place}": chosen for place, (chosen, _) in enumerate(ranked[:3], start=1)}

    ask = partial(tune, dataset, batch_size=dataset.batch_size, parameters=GRID, progress=False)
    runs = [ask() for _ in range(RUNS)]
    seconds["tune, twice"] = [run.seconds for run in runs]
    for label, run in zip(("tune", "tune again"), runs, strict=True):
        best = {key: value for key, value in run.best.items() if key != "batch_size"}
        choices[label] = Chosen(best, DataLoader)

    measured = {}
    for label, steps in STEPS.items() if has_loadtune else ():
        answer = partial(in_subprocess, partial(ask_loadtune, dataset, steps), limit_s=10 * LIMIT_S)
        (options, threads, measured[label]), took_s = timed(answer)
        seconds[label] = [took_s]
        choices[label] = Chosen(options, TorchDataLoader, threads)
        choices[f"{label}: by ours"] = Chosen(options, DataLoader, threads)

    keys = {
        label: f"{_engine(chosen)} {chosen}, {chosen.num_threads}"
        for label, chosen in choices.items()
    }
    distinct = {keys[label]: chosen for label, chosen in choices.items()}
    rounds = in_turns(
        {key: partial(chosen.counted, dataset, given.longer) for key, chosen in distinct.items()},
        given.rounds,
    )
    best_label = max(list(choices)[:3], key=lambda label: statistics.median(rounds[keys[label]]))
    best_name = f"best of all: {choices[best_label]}"
    rows = [Row(section=name, name=best_name, unit="samples/s", rounds=rounds[keys[best_label]])]
    for label, chosen in list(choices.items())[3:]:
        target = "0.90 at least" if label.startswith("tune") else ""
        figures = rounds[keys[label]]
        shown = f"{label}: {chosen}"
        rows.append(
            Row(
                section=name,
                name=shown,
                unit="samples/s",
                rounds=figures,
                against=best_name,
                target=target,
            )
        )
    for label, took in seconds.items():
        target = "a third at most" if label.startswith("tune") else ""
        against = "" if label == exhaustive else exhaustive
        section = f"{name}: seconds to choose"
        rows.append(
            Row(
                section=section,
                name=label,
                unit="s",
                rounds=tuple(took),
                against=against,
                target=target,
            )
        )
    probed = [[probe.settings for probe in run.probes] for run in runs]
    details = {
        "grid": [{"settings": chosen.settings, "samples_per_s": rate} for chosen, rate in ranked],
        "tune": [asdict(run) for run in runs],
        "probes": [len(settings) for settings in probed],
        "equal_probes": probed[0] == probed[1],
        "probed_once": [
            settings
            for settings in probed[0] + probed[1]
            if (settings in probed[0]) != (settings in probed[1])
        ],
        "measurements_of_loadtune": measured,
    }
    return rows, details


def in_words(name: str, found: dict[str, Any]) -> str:
    one, other = found["probes"]
    words = "the same" if found["equal_probes"] else f"{len(found['probed_once'])} in one run only"
    return f"{name}: {one} and {other} probes, {words}"


def _engine(chosen: Chosen) -> str:
    return "ours" if chosen.loader is DataLoader else "torch's"


def find_loadtune(folder: Path | None) -> str | None:
    """Return the version of loadtune; None, after a hint, if it is not installed."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        version: str = importlib.import_module("loadtune").__version__
    except ImportError:
        print(
            "loadtune left out: pip install --no-deps loadtune==0.3.0 --target FOLDER, then --loadtune FOLDER"
        )
        return None
    return version


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=3)
    options.add_argument(
        "--loaders", nargs="+", choices=LOADERS, default=list(LOADERS), help="datasets to measure"
    )
    options.add_argument(
        "--window",
        type=float,
        default=0.75,
        help="seconds for which each setting is measured, as in tune",
    )
    options.add_argument(
        "--longer",
        type=float,
        default=2.0,
        help="seconds for each setting in each round of the second measurement",
    )
    options.add_argument(
        "--loadtune", type=Path, help="folder in which the package loadtune is installed"
    )
    chosen = options.parse_args()
    loadtune = find_loadtune(chosen.loadtune)
    rows: list[Row] = []
    details = {}
    for name in chosen.loaders:
        dataset = LOADERS[name]()
        found, details[name] = measure(name, dataset, chosen, loadtune is not None)
        rows += found
        print(in_words(name, details[name]), flush=True)
    print_rows(rows)
    settings = {
        "grid": GRID,
        "window_s": chosen.window,
        "longer_s": chosen.longer,
        "loadtune": loadtune,
    }
    save_rows(rows, chosen.json, **settings, loaders=details)


if __name__ == "__main__":
    main()
