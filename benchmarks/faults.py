"""How do epochs end after 1,000 faults of a remote storage: right images, clear errors, wrong images, hangs?

Epochs read a small cache and a small folder in S3, each with an empty local cache, while half of the answers have one
kind of fault. Either only the first two requests for a range may fail, so that a repeated one succeeds, or all may.
Every image is in its own class, so that its label identifies its right pixels. An epoch is a hang if it takes longer
than a request may take with all its repetitions.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from _helper import parser, transforms
from _processor import processor_facts
from fastdata import CachedDataset, ChunkedLoader, DataLoader, ImageFolder
from fastdata.tools.figures import machine_facts, versions
from s3 import KINDS, SECRET, FaultPlan, ThrottledS3, throttled_s3

COUNT, SIDE, BATCH = 48, 24, 8
SILENCE_S = 0.5  # the client's timeout; the server stalls for four times as long
Images = dict[int, torch.Tensor]


def build(bucket: Path) -> Images:
    """Write a folder of PNGs of noise and a cache of them; return the pixels by label."""
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), np.uint8)
    for label, image in enumerate(pixels):
        path = bucket / "train" / f"{label:03}" / "image.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(image).save(path)
    options: dict[str, Any] = {"cache_dir": bucket / "cache"}
    ImageFolder(str(bucket / "train"), transforms.PILToTensor(), **options).close()
    return {label: torch.from_numpy(image).permute(2, 0, 1) for label, image in enumerate(pixels)}


def open_loader(what: str, options: dict[str, Any], local: str) -> Any:
    if what == "cache":
        cache = CachedDataset.from_cache(
            "s3://bucket/cache", as_tensors=True, local_cache=local, **options
        )
        return ChunkedLoader(cache, BATCH, memory_limit="2GiB")
    dataset = ImageFolder("s3://bucket/train", transforms.PILToTensor(), **options)
    return DataLoader(dataset, BATCH, shuffle=True)


def run_epochs(what: str, server: ThrottledS3, expected: Images, connection: Any) -> None:
    """For each True that comes, run an epoch with an empty local cache and send its outcome; end with False."""
    options = server.storage_options | {
        "config_kwargs": {"read_timeout": SILENCE_S, "connect_timeout": SILENCE_S}
    }
    while connection.recv():
        outcome: dict[str, Any] = {"right": 0, "wrong": 0, "samples": 0, "error": ""}
        with tempfile.TemporaryDirectory() as local:
            try:
                loader = open_loader(what, {"storage_options": options}, local)
                with closing(loader.dataset):
                    for images, labels in loader:
                        pairs = zip(images, labels.tolist(), strict=True)
                        is_right = all(
                            torch.equal(image, expected[label]) for image, label in pairs
                        )
                        outcome["right" if is_right else "wrong"] += 1
                        outcome["samples"] += len(labels)
            except Exception as error:  # noqa: BLE001  # any text is looked at
                outcome["error"] = f"{type(error).__name__}: {error}"
        connection.send(outcome)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--faults", type=int, default=1000, help="number of faults to inject, of all kinds together"
    )
    options.add_argument(
        "--limit-s", type=float, default=240, help="seconds after which an epoch counts as a hang"
    )
    chosen = options.parse_args()
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    texts: defaultdict[str, set[str]] = defaultdict(set)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fastdata-faults-") as work:
        (bucket := Path(work, "bucket")).mkdir()
        expected = build(bucket)
        with throttled_s3(Path(work), latency_s=0.001, bandwidth=1e9) as server:
            os.environ |= server.environment
            children: dict[str, Any] = {}
            for seed in range(1_000_000):
                if sum(count["faults"] for count in counts.values()) >= chosen.faults:
                    break
                kind, what = KINDS[seed % len(KINDS)], ("cache", "folder")[seed // len(KINDS) % 2]
                if what not in children:
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=run_epochs, args=(what, server, expected, theirs)
                    )
                    process.start()
                    children[what] = process, ours
                process, ours = children[what]
                attempts = None if seed % 3 == 2 else 2
                plan = FaultPlan(
                    rate=0.5, kinds=(kind,), attempts=attempts, seed=seed, stall_s=4 * SILENCE_S
                )
                server.reset()
                server.set_faults(plan)
                ours.send(True)
                count = counts[f"{what}, {kind}"]
                if ours.poll(chosen.limit_s):
                    outcome = ours.recv()
                    count.update({name: outcome[name] for name in ("right", "wrong")})
                    count["errors"] += bool(outcome["error"])
                    count["short epochs"] += not outcome["error"] and outcome["samples"] != COUNT
                    count["secrets told"] += SECRET in outcome["error"]
                    if outcome["error"]:
                        texts[f"{what}, {kind}"].add(outcome["error"])
                else:
                    count["hangs"] += 1
                    process.kill()
                    del children[what]
                count["faults"] += sum(server.stats().faults.values())
                print(f"{what}, {kind}: {dict(count)}", file=sys.stderr, flush=True)
            for process, ours in children.values():
                ours.send(False)
                process.join()
    columns = ("faults", "right", "errors", "wrong", "short epochs", "hangs", "secrets told")
    print(f"{'':<20}" + "".join(f"{column:>13}" for column in columns))
    for name, count in (*counts.items(), ("all", sum(counts.values(), Counter()))):
        print(f"{name:<20}" + "".join(f"{count[column]:>13}" for column in columns))
    for name, told in texts.items():
        print(f"{name}: {sorted(told)[0]}")
    if chosen.json:
        told = {name: sorted(some)[:3] for name, some in texts.items()}
        document = {
            "counts": counts,
            "texts": told,
            "versions": versions(),
            "machine": machine_facts() | {"processor": processor_facts()},
        }
        chosen.json.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
