"""The command ``fastdata``."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from json import dumps, loads
from pathlib import Path
from textwrap import fill
from typing import Any

from fastdata.cache import inspect_caches, prune_caches, verify_cache
from fastdata.codecs import KNOWN_CODECS
from fastdata.errors import FastDataError, counted, is_url, refuse_remote
from fastdata.export import export_cache
from fastdata.folder import ImageFolder
from fastdata.images import CenterCrop
from fastdata.memory import format_bytes
from fastdata.tools import bench
from fastdata.tools.doctor import examine_machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words after ``fastdata``, by default the process's, and return the exit status.

    That is 0; 1 when ``inspect`` finds a cache damaged, ``doctor`` a problem, or the script of ``diagnose`` fails; 2
    when the input is at fault, after one line on standard error; 130 after Ctrl-C.
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    if options.get("crop_px", 0) > options.get("resize_px", 0):
        parser.error(f"--crop {options['crop_px']} is larger than the prepared square, --resize {options['resize_px']}")
    format_before = warnings.formatwarning
    if command is not _diagnose:  # whose warnings are of the user's own script
        warnings.formatwarning = lambda message, *_, **__: f"fastdata: {_in_flags(message, options)}\n"
    try:
        _refuse_outputs(options)
        return int(command(**options))
    except KeyboardInterrupt:
        print("fastdata: interrupted", file=sys.stderr)
        return 130
    except (FastDataError, ImportError, OSError, ValueError) as error:
        print(f"fastdata: {_in_flags(error, options)}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = format_before


def _in_flags(message: object, options: Iterable[str]) -> str:
    """What the library says of its arguments, as flags of the command: ``on_error='skip'`` is ``--on-error skip``."""
    names = "|".join(name.removesuffix("_px") for name in options)
    words = re.sub(rf"\b({names})=(?:'(\w+)'|True)?", lambda said: f"--{said[1]} {said[2] or ''}".strip(), str(message))
    flags = re.sub(r"--\w+", lambda flag: flag[0].replace("_", "-"), words)
    return re.sub(r"cache_dir=(\W?)", lambda said: f"CACHE {said[1]}" if said[1] in "'\"" else f"CACHE{said[1]}", flags)


def _refuse_outputs(options: dict[str, Any]) -> None:
    """Raise what would otherwise be raised after minutes of measuring."""
    for name in ("json", "plot"):
        if (file := options.get(name)) and not file.parent.is_dir():
            raise FileNotFoundError(f"--{name} {file}: there is no folder {file.parent}")
    if options.get("plot"):
        bench.import_extra("matplotlib", "plot", feature="--plot")


def _keep(document: dict[str, Any], json: Path | None) -> None:
    if json:
        document = {**document, "versions": bench.versions(), "machine": bench.machine_facts()}
        json.write_text(dumps(document, indent=2, default=str) + "\n", "utf-8")
        print(f"figures: {json}")


def _draw(draw: Callable[[Path], object], plot: Path | None) -> None:
    if plot:
        draw(plot)
        print(f"chart: {plot}")


def _bench(*, json: Path | None, plot: Path | None, **settings: Any) -> int:
    document = bench.run_bench(bench.BenchSettings(**settings, progress=True))
    print(bench.table(document))
    _keep(document, json)
    _draw(partial(bench.save_chart, document), plot)
    return 0


def _tune(
    *,
    folder: Path,
    recipe: str | None,
    transform: str | None,
    vanilla: bool,
    storage: Any,
    tune_storage: bool,
    batch_size: int | None,
    seconds: float,
    seed: int,
    json: Path | None,
    plot: Path | None,
    **look: Any,
) -> int:
    from fastdata.tools.tune import PARAMETERS, tune  # brings what --help does without

    refuse_remote(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give the root of class folders of images")
    _, v1, vanilla_folder = bench.find_vanilla()
    wanted = [] if transform else [recipe or ("crop" if v1 is bench.StandIns else "rrc")]
    unused: dict[str, Any] = {"images": None, "batch_size": 1, "rounds": 1, "num_workers": None, "progress": True}
    settings = bench.BenchSettings(folder=folder, recipe=wanted, transform=transform, **unused, **look)
    ((name, steps),) = bench.chosen_transforms(settings, v1).items()
    parameters = [*PARAMETERS, *(("storage", "codec") if tune_storage else ())]
    with ExitStack() as stack:
        if vanilla:
            files = frozenset(bench.choose_images(folder, sys.maxsize))
            dataset = vanilla_folder(os.path.abspath(folder), steps, is_valid_file=files.__contains__, allow_empty=True)
            parameters.remove("workers")
        else:
            is_sized = name in ("crop", transform)
            size = None if is_sized else (settings.resize_px, settings.resize_px)
            dataset = stack.enter_context(ImageFolder(folder, steps, resize=size, storage=storage))
            print(dataset.storage_plan.reason)
        result = tune(dataset, batch_size=batch_size, max_seconds=seconds, parameters=parameters, seed=seed)
    print(result)
    _keep({"folder": folder, "transform": name, **result.as_dict()}, json)
    _draw(result.plot, plot)
    if result.best_storage:
        print(f"dataset = ImageFolder({str(folder)!r}, transform, **{result.best_storage})")
    print(f"loader = DataLoader(dataset, **{result.best})")
    return 0


def _doctor(*, json: Path | None) -> int:
    report = examine_machine()
    print(report)
    _keep(report.as_dict(), json)
    return 1 if report.problems else 0


def _diagnose(*, script: Path, arguments: list[str], batches: int, json: Path | None, plot: Path | None) -> int:
    if not script.is_file():
        raise FileNotFoundError(f"{script} is no file: give the script that trains, then its own arguments")
    from fastdata.tools.diagnosis import diagnose_script

    try:
        diagnosis = diagnose_script(script, arguments, batches=batches)
    except SystemExit as end:
        if end.code:
            raise
        raise ValueError(f"{script} has ended before it read two batches of a torch DataLoader") from end
    except Exception as error:
        frame = error.__traceback__
        while frame and frame.tb_frame.f_code.co_filename != str(script):
            frame = frame.tb_next
        if frame is None and not isinstance(error, SyntaxError):
            raise
        traceback.print_exception(type(error), error, frame)  # the user's own code, from its first line on
        return 1
    print(diagnosis)
    _keep(diagnosis.as_dict(), json)
    _draw(diagnosis.plot, plot)
    return 0


def _build(*, folder: Path, cache: Path, crop: int | None, **options: Any) -> int:
    if not is_url(folder) and not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give the root of class folders of images")
    centre = None if crop is None else CenterCrop((crop, crop))
    with ImageFolder(folder, centre, cache_dir=cache, **options) as dataset:
        print(f"{counted(len(dataset), 'sample')}; {dataset.storage_plan.reason}")
    return 0


def _inspect(*, cache: Path, verify: bool, json: Path | None, storage_options: dict[str, Any] | None) -> int:
    is_sound, documents = True, []
    for found in inspect_caches(cache, storage_options):
        print(found)
        damaged = verify_cache(found) if verify else []
        for line in damaged:
            print(f"  {line}")
        if verify and not damaged:
            print("  verified   every sample is as it was written")
        is_sound = is_sound and not found.problem and not damaged
        documents.append({**asdict(found), "damaged": damaged if verify else None})
    _keep({"caches": documents}, json)
    return 0 if is_sound else 1


def _export(*, cache: Path, out: Path, image_format: Any, **options: Any) -> int:
    done = export_cache(cache, out, image_format=image_format, **options)
    pixels = "the pixels of the cache" if done.lossless else "pixels changed by lossy compression"
    print(f"{done.folder}: {done.samples:,} samples as {image_format} files, {pixels}")
    return 0


def _prune(*, cache: Path, gone: bool, dry_run: bool) -> int:
    removals = prune_caches(cache, gone=gone, dry_run=dry_run)
    for removal in removals:
        print(f"{removal.path}: {removal.reason} ({format_bytes(removal.size_bytes)})")
    size = format_bytes(sum(removal.size_bytes for removal in removals))
    done = f"{size} {'would be removed' if dry_run else 'removed'}"
    print(done if removals else "nothing to remove: no leftovers, and each cache can be read")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdata", description="Image batches for PyTorch at memory speed.")
    parser.add_argument(
        "--version", action="version", version=f"fastdata {bench.versions()['fastdata'] or '(not installed)'}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[..., int], text: str, description: str, *examples: str) -> Callable[..., object]:
        made: argparse.ArgumentParser = commands.add_parser(
            run.__name__.removeprefix("_"),
            help=text,
            description=fill(description, 100),
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(command=run)
        return made.add_argument

    add = command(
        _bench,
        "measure a training epoch: torchvision and torch against fastdata, on your images",
        "Measures training epochs over a folder of images: torchvision and torch, and fastdata, in turns.",
        "fastdata bench",
        "fastdata bench imagenet/train --recipe rrc --dtype float32 --json bench.json",
    )
    add("folder", nargs="?", type=Path, metavar="FOLDER", help="class folders of images; without it images are drawn")
    add("--images", type=_positive, metavar="N", help="images at most; by default 1000, or 400 drawn ones")
    recipes = "what to measure, several times if need be; by default all of them"
    add("--recipe", action="append", choices=bench.RECIPES, help=recipes)
    _add_look(add, "uint8")
    add("--batch-size", type=_positive, default=64, metavar="N", help="images in a batch; default: %(default)s")
    add("--rounds", type=_positive, default=3, metavar="N", help="measured rounds; default: %(default)s")
    add("--num-workers", type=_whole, metavar="N", help="of both loaders; by default the best for each")
    _add_files(add, plots=True)

    add = command(
        _tune,
        "find the loader's settings that serve a folder of images fastest on this machine",
        "Measures an empty loop over class folders of images with one setting of the loader after another, and prints "
        "all that was measured and the line for your script. Without a transform of your own, a training recipe of "
        "bench's stands in for it.",
        "fastdata tune imagenet/train --transform train:train_transform --batch-size 256",
        "fastdata tune imagenet/train --storage none --batch-size auto --json tune.json",
    )
    add("folder", type=Path, metavar="FOLDER", help="class folders of images")
    add("--recipe", choices=bench.RECIPES, help="of bench's; by default rrc, or crop where there is no torchvision")
    _add_look(add, "float32")
    sizes = "images in a batch, or auto to tune that, too; default: 64"
    add("--batch-size", type=_size_or_auto, default=64, metavar="N", help=sizes)
    kept = "as ImageFolder's: auto is what fits, none tunes decoding; default: %(default)s"
    add("--storage", choices=("auto", "shared", "compressed", "none"), default="auto", help=kept)
    add("--tune-storage", action="store_true", help="tune storage and codec, too")
    add("--vanilla", action="store_true", help="tune for torchvision's ImageFolder, which keeps nothing")
    add("--seconds", type=_seconds, default=60.0, metavar="S", help="time for all of it; default: 60")
    add("--seed", type=_whole, default=0, metavar="N", help="of the order of images; default: %(default)s")
    _add_files(add, plots=True)

    add = command(
        _doctor,
        "look at what this machine gives to training, and say what is missing",
        "Looks at cores, memory, limits, libraries and GPUs as this process sees them. Status 1 if there is a problem, "
        "marked with !, that breaks training or slows it badly; advice stands behind ->.",
        "fastdata doctor",
        "docker run --gpus all IMAGE fastdata doctor --json doctor.json",
    )
    _add_files(add)

    add = command(
        _diagnose,
        "run a training script for some batches and say what limits it",
        "Runs a training script as python does, measures the first batches of the loader it trains with, and says "
        "where its steps wait. All words after the script's name are the script's own.",
        "fastdata diagnose train.py --epochs 1",
        "fastdata diagnose --batches 300 --plot steps.png train.py",
    )
    _add_files(add, plots=True)
    add("--batches", type=_batches, default=100, metavar="N", help="batches to measure; default: %(default)s")
    add("script", type=Path, metavar="SCRIPT", help="the script that trains")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")

    add = command(
        _build,
        "prepare a folder of images into a cache, for cache_dir= of later runs",
        "Prepares class folders of images as ImageFolder(FOLDER, transform, cache_dir=CACHE) does whose transform "
        "begins with Resize and CenterCrop of these sizes; such a dataset then starts from the cache.",
        "fastdata build imagenet/train /data/caches --resize 256 --crop 256",
        "fastdata build imagenet/train /data/caches --resize 256 --codec lz4 --on-error skip",
    )
    add("folder", type=Path, metavar="FOLDER", help="class folders of images")
    add("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    add("--resize", type=_positive, metavar="PX", help="length of the shorter side; default: as it is")
    add("--crop", type=_positive, metavar="PX", help="side of the square cut out of the centre; default: all")
    codecs = ("auto", "source", *KNOWN_CODECS)
    add("--codec", choices=codecs, default="auto", help="default: auto, which is raw where the disk has room")
    on_error = "what to do with a file that is no image; default: %(default)s"
    add("--on-error", choices=("raise", "skip"), default="raise", help=on_error)
    add("--num-workers", type=_positive, metavar="N", help="processes; by default all usable cores")
    engines = "what prepares: this machine, or a Ray cluster (extra: ray); default: %(default)s"
    add("--engine", choices=("local", "ray"), default="local", help=engines)
    sizes = (
        "write shards of about this size, such as 256MiB; a build that was stopped goes on after those that are done"
    )
    add("--shard-size", "--shard-bytes", dest="shard_bytes", metavar="SIZE", help=sizes)
    _add_options(add)

    add = command(
        _inspect,
        "show what caches hold, and whether they are sound",
        "Shows a cache, or all in a folder. Status 1 if one is damaged.",
        "fastdata inspect /data/caches --verify",
    )
    add("cache", type=Path, metavar="CACHE", help="a cache, or a folder that keeps caches")
    marks = "read every sample and mark damaged ones, which the next run prepares anew"
    add("--verify", action="store_true", help=marks)
    _add_options(add)
    _add_files(add)

    add = command(
        _export,
        "write a cache as files that other libraries read",
        "Writes the images of a cache, at the size that they have there, as class folders or WebDataset tars. PNG, "
        "the default, keeps every pixel.",
        "fastdata export /data/caches /data/folder --to folder",
        "fastdata export /data/caches /data/tars --to webdataset --image-format jpeg --quality 95",
    )
    add("cache", type=Path, metavar="CACHE", help="a cache, or a folder that keeps one")
    add("out", type=Path, metavar="OUT", help="the folder to make")
    add("--to", choices=("webdataset", "folder"), required=True, help="what to write")
    add(
        "--image-format", choices=("png", "jpeg", "webp"), default="png", help="default: %(default)s, which is lossless"
    )
    add(
        "--quality",
        type=_positive,
        metavar="N",
        help="1 to 100, of JPEG, by default 95, or of WebP, by default lossless",
    )
    sizes = "most bytes of images in a tar; default: %(default)s"
    add("--shard-size", default="256MiB", metavar="SIZE", help=sizes)
    _add_options(add)

    add = command(
        _prune,
        "remove caches that no run can use any more",
        "Removes what dead writers left, and caches that cannot be read.",
        "fastdata prune /data/caches --gone --dry-run",
    )
    add("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    add("--gone", action="store_true", help="also caches of folders that are not there now")
    add("--dry-run", action="store_true", help="only say what would go")
    return parser


def _add_look(add: Callable[..., object], dtype: str) -> None:
    """Options that say what images become."""
    add("--transform", metavar="MODULE:NAME", help="a transform of your own, such as train:train_transform")
    side, crop = "side of the prepared square; default: %(default)s", "side of the random crop; default: %(default)s"
    add("--resize", "--image-size", dest="resize_px", default=256, type=_positive, metavar="PX", help=side)
    add("--crop", dest="crop_px", default=224, type=_positive, metavar="PX", help=crop)
    dtypes = "float32 is normalised; default: %(default)s"
    add("--dtype", choices=("uint8", "float32"), default=dtype, help=dtypes)


def _add_files(add: Callable[..., object], *, plots: bool = False) -> None:
    add("--json", type=Path, metavar="FILE", help="keep every figure, with versions")
    if plots:
        add("--plot", type=Path, metavar="FILE", help="draw a chart (extra: plot)")


def _add_options(add: Callable[..., object]) -> None:
    secrets = "JSON of fsspec's options for URLs, such as credentials, which must not stand in a command"
    add("--storage-options", type=_json, metavar="FILE", help=secrets)


def _json(text: str) -> dict[str, Any]:
    try:
        found = loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {problem}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text} holds no JSON object, such as {{"anon": true}}')
    return found


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if (number := _whole(text)) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _batches(text: str) -> int:
    if (number := _positive(text)) == 1:
        raise argparse.ArgumentTypeError("must be at least 2, as the first one is left out")
    return number


def _size_or_auto(text: str) -> int | None:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of images nor 'auto'")
    return None if text == "auto" else _positive(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: give seconds, more than 0")
    return float(text)
