"""Does a first epoch from a throttled S3 run at the bandwidth of S3, and how do LitData and Mosaic's streaming compare?

The same images are stored as fastdata caches, LitData folders and MDS folders: as raw pixels (256 x 256, uint8), and
as the same JPEGs; the folder of photographs is read, too. A server, in its own process, waits 50 ms for each request
and divides its bandwidth among requests; a part of the answers fails, stalls or is cut short. Each contender begins
in a new process with an empty local folder and runs two shuffled epochs, in turns with the others; two processes
decode. Times begin when the contender is imported. The limit is the lower one of a bare download and of fastdata on
local files. The server uses the CPU of the same machine; the table shows how much.
"""

from __future__ import annotations

import functools
import http.client
import importlib.metadata
import io
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import psutil
import simplejpeg
import torch
from PIL import Image

from _helper import (
    Row,
    class_folders,
    datasets,
    parser,
    peak_memory,
    print_rows,
    save_rows,
    transforms,
    vanilla_loader,
)
from fastdata import CachedDataset, ChunkedLoader, DataLoader, ImageFolder
from fastdata.stores.codecs import JpegCodec
from s3 import FaultPlan, ThrottledS3, throttled_s3

SIDE, BATCH, WORKERS = 256, 64, 2
DOWNLOAD_BYTES = 1 << 23
MIB = 1 << 20
CODECS = {"raw": "auto", "jpeg": "jpeg"}
STEPS = [transforms.Resize(SIDE), transforms.CenterCrop(SIDE), transforms.PILToTensor()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a contender finds its images: a bucket, or a folder that holds the same."""

    root: str
    server: ThrottledS3
    local: str
    memory_limit: str

    @property
    def remote_options(self) -> dict[str, Any]:
        return (
            {"storage_options": self.server.storage_options}
            if self.root.startswith("s3://")
            else {}
        )


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Figures of one process; lists have an entry for each epoch."""

    seconds: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    first_batch_s: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    local_bytes: int = 0
    error: str = ""


# The contenders. Each imports its packages, and returns a function that opens the images.


def chunked(kind: str, place: Place) -> Callable[[], Any]:
    import s3fs  # noqa: F401  # fastdata imports it when it is first needed

    options: dict[str, Any] = dict(place.remote_options)
    if options.get("storage_options"):
        options |= {"local_cache": place.local}

    def make() -> ChunkedLoader:
        cache = CachedDataset.from_cache(f"{place.root}/cache-{kind}", as_tensors=True, **options)
        return ChunkedLoader(cache, BATCH, memory_limit=place.memory_limit)

    return make


def folder(place: Place) -> Callable[[], Any]:
    import s3fs  # noqa: F401

    transform = transforms.Compose(STEPS)

    def make() -> Any:
        dataset = ImageFolder(f"{place.root}/train", transform, **place.remote_options)
        return DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS)

    return make


def torchvision_folder(place: Place) -> Callable[[], Any]:
    dataset = datasets.ImageFolder(f"{place.root}/train", transforms.Compose(STEPS))
    return lambda: vanilla_loader(dataset, BATCH, WORKERS)


def litdata(kind: str, place: Place, **options: Any) -> Callable[[], Any]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # LitData has no public option for it

    def make() -> Any:
        dataset = StreamingDataset(
            f"{place.root}/lit-{kind}",
            cache_dir=place.local,
            shuffle=True,
            max_cache_size="64GB",
            storage_options={"endpoint_url": place.server.url},
            transform=decode_sample if kind == "jpeg" else None,
            **options,
        )
        return StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
        )

    return make


def litdata_folder(place: Place, **options: Any) -> Callable[[], Any]:
    from litdata import StreamingRawDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True

    def make() -> Any:
        dataset = StreamingRawDataset(
            f"{place.root}/train",
            cache_dir=place.local,
            cache_files=True,  # keys and endpoint are those of the environment, which all its parts understand
            transform=decode_photo,
            **options,
        )
        return vanilla_loader(dataset, BATCH, WORKERS)

    return make


def decode_photo(data: bytes) -> tuple[torch.Tensor, int]:
    """Return the image of a file after the steps, and class 0: LitData does not give the class."""
    with Image.open(io.BytesIO(data)) as image:
        return transforms.Compose(STEPS)(image.convert("RGB")), 0


def mosaic(kind: str, place: Place, **options: Any) -> Callable[[], Any]:
    from streaming import StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            pair = sample["image"], sample["label"]
            return decode_sample(pair) if kind == "jpeg" else pair

    def make() -> Any:
        where = {"remote": f"{place.root}/mds-{kind}", "local": place.local}
        dataset = Images(**where, batch_size=BATCH, shuffle=True, cache_limit="64gb", **options)
        return torch.utils.data.DataLoader(
            dataset, BATCH, num_workers=WORKERS, persistent_workers=True
        )

    return make


def decode_sample(sample: tuple[bytes, int]) -> tuple[torch.Tensor, int]:
    """Decode by simplejpeg, the fastest decoder for Python; torchvision's decoder is not in all of its builds."""
    return torch.from_numpy(simplejpeg.decode_jpeg(sample[0])).permute(
        2, 0, 1
    ).contiguous(), sample[1]


def contenders(
    kind: str, only: Sequence[str] = ()
) -> dict[str, Callable[[Place], Callable[[], Any]]]:
    """Return contenders by name: all, or those whose names begin with one of ``only``.

    Contenders named "local" read files of this machine, such as a local cache has in later epochs.
    """
    found = _contenders(kind)
    return {name: found[name] for name in found if name.startswith(tuple(only) or "")}


def _contenders(kind: str) -> dict[str, Callable[[Place], Callable[[], Any]]]:
    if kind == "folder":
        return {
            "fastdata, local": folder,
            "torchvision, local": torchvision_folder,
            "fastdata": folder,
            "LitData": litdata_folder,
            "LitData, tuned": functools.partial(litdata_folder, max_prefetch=64),
        }
    return {
        "fastdata, local": functools.partial(chunked, kind),
        "fastdata": functools.partial(chunked, kind),
        "LitData": functools.partial(litdata, kind),
        "LitData, tuned": functools.partial(litdata, kind, batch_decode=False, max_pre_download=8),
        "Mosaic": functools.partial(mosaic, kind),
        "Mosaic, tuned": functools.partial(mosaic, kind, predownload=4096),
    }


# Building


def build(
    root: Path, bucket: Path, shard_bytes: int, kinds: Sequence[str], only: Sequence[str]
) -> int:
    """Write everything that the contenders read; return the number of images."""
    shutil.copytree(root, bucket / "train")
    for kind, codec in CODECS.items():
        transform = transforms.Compose(STEPS)
        options: dict[str, Any] = {
            "cache_dir": bucket / f"cache-{kind}",
            "codec": codec,
        }
        ImageFolder(str(root), transform, **options).close()
    with ImageFolder(
        str(root), transforms.Compose(STEPS), cache_dir=bucket / "cache-raw"
    ) as photos:
        for kind in CODECS.keys() & {*kinds}:
            names = " ".join(contenders(kind, only))
            if "LitData" in names:
                write_litdata(kind, photos, bucket / f"lit-{kind}", shard_bytes)
            if "Mosaic" in names:
                write_mds(kind, photos, bucket / f"mds-{kind}", shard_bytes)
        return len(photos)


def samples(kind: str, photos: ImageFolder) -> Iterator[tuple[Any, int]]:
    """Yield (pixels, label) of each image, or, for kind "jpeg", (encoded bytes, label)."""
    assert photos.reader().kept is not None
    encode = JpegCodec().encode if kind == "jpeg" else np.ascontiguousarray
    for index, label in enumerate(photos.targets):
        yield encode(photos.reader().kept.images.read(index)), label


def write_litdata(kind: str, photos: ImageFolder, target: Path, shard_bytes: int) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(target), chunk_bytes=shard_bytes)
    for index, (image, label) in enumerate(samples(kind, photos)):
        cache[index] = (image if kind == "jpeg" else torch.from_numpy(image.copy()), label)
    cache.done()
    cache.merge()


def write_mds(kind: str, photos: ImageFolder, target: Path, shard_bytes: int) -> None:
    from streaming import MDSWriter

    columns = {
        "image": "bytes" if kind == "jpeg" else f"ndarray:uint8:3,{SIDE},{SIDE}",
        "label": "int",
    }
    with MDSWriter(out=str(target), columns=columns, size_limit=shard_bytes) as writer:
        for image, label in samples(kind, photos):
            writer.write({"image": image, "label": label})


# Measuring


def measure(contender: Callable[[Place], Callable[[], Any]], place: Place, connection: Any) -> None:
    """Run two epochs in this process, whose memory is measured twice a second; send the outcome."""
    outcome = Outcome()
    # The default in scripts on Linux. Here it would be "spawn", by which this process was started.
    multiprocessing.set_start_method("fork", force=True)
    try:
        make = contender(place)
        with peak_memory(every_s=0.5) as peak:
            start, loader = time.perf_counter(), None
            for _ in range(2):
                place.server.reset()
                loader = loader if loader is not None else make()
                _epoch(loader, start, outcome)
                stats = place.server.stats()
                outcome.sent_bytes.append(sum(stats.bytes_of.values()))
                outcome.server_cpu_s.append(stats.cpu_s)
                start = time.perf_counter()
        outcome.peak_bytes = peak.size_bytes
    except Exception as problem:  # noqa: BLE001  # a contender's error is a result of the benchmark
        print(traceback.format_exc(limit=-1), file=sys.stderr)
        outcome.error = f"{type(problem).__name__}: {str(problem).strip().splitlines()[-1]}"
    outcome.local_bytes = sum(
        path.stat().st_size for path in Path(place.local).rglob("*") if path.is_file()
    )
    connection.send(outcome)
    connection.close()


def _epoch(loader: Any, start: float, outcome: Outcome) -> None:
    count = 0
    for images, labels in loader:
        if not count:
            outcome.first_batch_s.append(time.perf_counter() - start)
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, SIDE, SIDE)
        count += len(labels)
    outcome.seconds.append(time.perf_counter() - start)
    outcome.images.append(count)


def in_own_process(
    contender: Callable[[Place], Callable[[], Any]], place: Place, limit_s: float
) -> Outcome:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(contender, place, theirs))
    process.start()
    theirs.close()
    try:
        return (
            ours.recv() if ours.poll(limit_s) else Outcome(error=f"not done after {limit_s:.0f} s")
        )
    except EOFError:
        return Outcome(error="the process ended")
    finally:
        process.join(20)
        for child in (
            psutil.Process(process.pid).children(recursive=True) if process.is_alive() else ()
        ):
            child.kill()
        process.kill()
        process.join()


def download_s(server: ThrottledS3, bucket: Path, below: str, threads: int) -> float:
    """Return the seconds that plain requests, for pieces of files, take to download a folder."""
    paths = [path for path in (bucket / below).rglob("*") if path.is_file()]
    pieces = [
        (path, start) for path in paths for start in range(0, path.stat().st_size, DOWNLOAD_BYTES)
    ]

    def fetch(number: int) -> None:
        with closing(http.client.HTTPConnection(urlsplit(server.url).netloc)) as connection:
            for path, start in pieces[number::threads]:
                span = {"Range": f"bytes={start}-{start + DOWNLOAD_BYTES - 1}"}
                connection.request(
                    "GET", f"/{quote(path.relative_to(bucket.parent).as_posix())}", headers=span
                )
                connection.getresponse().read()

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fetch, range(threads)))
    return time.perf_counter() - start


QUESTIONS: dict[str, tuple[str, Callable[[Outcome], float]]] = {
    "first epoch": ("images/s", lambda outcome: outcome.images[0] / outcome.seconds[0]),
    "second epoch": ("images/s", lambda outcome: outcome.images[1] / outcome.seconds[1]),
    "first batch after": ("s", lambda outcome: outcome.first_batch_s[0]),
    "over the network, first epoch": ("MB", lambda outcome: outcome.sent_bytes[0] / 1e6),
    "over the network, second epoch": ("MB", lambda outcome: outcome.sent_bytes[1] / 1e6),
    "peak PSS of the process tree": ("MiB", lambda outcome: outcome.peak_bytes / MIB),
    "local folder in the end": ("MB", lambda outcome: outcome.local_bytes / 1e6),
    "CPU of the server, first epoch": ("s", lambda outcome: outcome.server_cpu_s[0]),
}


def rows_of(
    kind: str, outcomes: dict[str, list[Outcome]], download: list[float], count: int
) -> list[Row]:
    """Return the rows of one kind of images, without runs that failed."""
    runs = {name: [run for run in rounds if not run.error] for name, rounds in outcomes.items()}
    rates = {
        name: tuple(run.images[0] / run.seconds[0] for run in good)
        for name, good in runs.items()
        if good
    }
    rates |= {(bare := "bare download"): tuple(count / seconds for seconds in download)}
    limit = min(
        {bare, "fastdata, local"} & rates.keys(), key=lambda name: statistics.median(rates[name])
    )
    rows = [Row(section=f"{kind}: first epoch", name=bare, unit="images/s", rounds=rates[bare])]
    for question, (unit, answer) in QUESTIONS.items():
        for name in filter(rates.__contains__, runs):
            is_held = question == "first epoch" and "local" not in name
            limits = (
                {"against": limit, "target": "0.9" if name == "fastdata" else ""} if is_held else {}
            )
            rounds = tuple(map(answer, runs[name]))
            rows.append(
                Row(section=f"{kind}: {question}", name=name, unit=unit, rounds=rounds, **limits)
            )
    return rows


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=3)
    options.add_argument(
        "--count",
        type=int,
        default=4000,
        help="number of files; photographs are copied as often as needed",
    )
    options.add_argument(
        "--shard-mib",
        type=float,
        default=64,
        help="size of shards of LitData and Mosaic in MiB; the default is what both recommend",
    )
    options.add_argument(
        "--kinds",
        nargs="+",
        choices=[*CODECS, "folder"],
        default=[*CODECS, "folder"],
        help="kinds of images to read",
    )
    options.add_argument(
        "--only", nargs="+", default=[], help="measure only contenders whose names begin with this"
    )
    options.add_argument(
        "--latency-s", type=float, default=0.05, help="latency of each request in seconds"
    )
    options.add_argument(
        "--bandwidth",
        type=float,
        default=100e6,
        help="bandwidth of all answers together, in bytes a second",
    )
    options.add_argument(
        "--fault-rate", type=float, default=0.01, help="share of the requests that fail"
    )
    options.add_argument(
        "--memory-limit",
        default="2GiB",
        help="memory_limit of fastdata's processes, for contenders that have this option",
    )
    options.add_argument(
        "--limit-s", type=float, default=300, help="seconds after which a contender is ended"
    )
    options.add_argument("--work", type=Path, help="folder in which a temporary folder is made")
    chosen = options.parse_args()
    rows, kept = [], {}
    with (
        class_folders(chosen.images, count=chosen.count) as (root, what),
        tempfile.TemporaryDirectory(prefix="fastdata-remote-", dir=chosen.work) as work,
    ):
        (bucket := Path(work, "served", "bucket")).mkdir(parents=True)
        shard_bytes = int(chosen.shard_mib * MIB)
        count = build(root, bucket, shard_bytes, chosen.kinds, chosen.only)
        with throttled_s3(
            bucket.parent, latency_s=chosen.latency_s, bandwidth=chosen.bandwidth
        ) as server:
            os.environ |= server.environment
            for kind in chosen.kinds:
                outcomes: dict[str, list[Outcome]] = {}
                download = []
                for seed in range(chosen.rounds):
                    server.set_faults(FaultPlan())
                    below, threads = ("train", 64) if kind == "folder" else (f"cache-{kind}", 16)
                    download.append(download_s(server, bucket, below, threads))
                    server.set_faults(FaultPlan(rate=chosen.fault_rate, seed=seed))
                    for name, contender in contenders(kind, chosen.only).items():
                        local = Path(tempfile.mkdtemp(prefix="local-", dir=work))
                        root_url = str(bucket) if "local" in name else f"s3://{bucket.name}"
                        place = Place(
                            root=root_url,
                            server=server,
                            local=str(local),
                            memory_limit=chosen.memory_limit,
                        )
                        outcome = in_own_process(contender, place, chosen.limit_s)
                        outcomes.setdefault(name, []).append(outcome)
                        print(
                            f"{kind}, {name}: {outcome.error or outcome.seconds}",
                            file=sys.stderr,
                            flush=True,
                        )
                        shutil.rmtree(local)
                rows += rows_of(kind, outcomes, download, count)
                kept[kind] = {name: list(map(asdict, runs)) for name, runs in outcomes.items()}
    print_rows(rows)
    save_rows(
        rows,
        chosen.json,
        images=what,
        count=count,
        **{
            name: getattr(chosen, name)
            for name in (
                "latency_s",
                "bandwidth",
                "fault_rate",
                "shard_mib",
                "memory_limit",
                "rounds",
            )
        },
        packages={
            found.name: found.version
            for found in importlib.metadata.distributions()
            if found.name in ("litdata", "mosaicml-streaming", "obstore", "s3fs")
        },
        outcomes=kept,
    )


if __name__ == "__main__":
    main()
